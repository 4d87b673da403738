"""The criu command: found or not, and why; command lines; what its logs say."""

import os
from pathlib import Path

import pytest

from hpc_ckpt.levels import criu_tool
from hpc_ckpt.levels.base import Work
from hpc_ckpt.levels.criu_tool import Tool, find, read_version, reason_in, refused_by_storage
from hpc_ckpt.levels.sockets import Tcp, judge

NEW = Tool("/opt/criu", (4, 2, 1))
OLD = Tool("/opt/criu", (4, 1, 1))


def stand_in(place: Path, version: str = "4.1.1", check: str = "exit 0") -> dict[str, str]:
    """A script in the place of criu, for answers that the real one does not give here."""
    path = place / "criu"
    path.write_text(
        f'#!/bin/sh\ncase $1 in --version) echo "Version: {version}" ;; *) {check} ;; esac\n'
    )
    path.chmod(0o755)
    return {"path": str(path)}


def work(**more: object) -> Work:
    return Work(argv=("true",), cwd=Path("/"), environ=dict(os.environ), **more)  # type: ignore[arg-type]


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criu_tool, "capabilities", lambda: 1 << 21)


def test_one_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    assert "not found" in str(find({"path": str(tmp_path / "criu")}, work()))


@pytest.mark.usefixtures("root")
def test_what_can_be_used_is_found(tmp_path: Path) -> None:
    tool = stand_in(tmp_path)
    assert Tool(tool["path"], (4, 1, 1)) == find(tool, work())


@pytest.mark.usefixtures("root")
def test_one_named_from_here_is_called_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save enters the program's name space, where the working directory is another."""
    tool = stand_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert Tool(tool["path"], (4, 1, 1)) == find({"path": "./criu"}, work())


def test_an_old_one_is_refused(tmp_path: Path) -> None:
    said = str(find(stand_in(tmp_path, "3.15"), work()))
    assert "version 3.15, too old" in said


def test_something_else_of_that_name_is_refused(tmp_path: Path) -> None:
    assert "is it CRIU?" in str(find(stand_in(tmp_path, "unknown"), work()))


@pytest.mark.usefixtures("root")
def test_the_check_of_criu_is_asked(tmp_path: Path) -> None:
    said = "Error (criu/vdso.c:381): vdso: Unexpected rt vDSO area bounds"
    found = find(stand_in(tmp_path, "3.17.1", f'echo "{said}"; exit 1'), work())
    assert "criu check says no: vdso: Unexpected rt vDSO area bounds" == found


def test_missing_privileges_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criu_tool, "capabilities", lambda: 0)
    assert "CAP_CHECKPOINT_RESTORE" in str(find(stand_in(tmp_path), work()))


def test_the_capability_alone_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criu_tool, "capabilities", lambda: 1 << 40)
    found = find(stand_in(tmp_path, check='test "$2" = --unprivileged'), work())
    assert isinstance(found, Tool) and found.unprivileged
    assert "--unprivileged" in found.restore(tmp_path, tmp_path, tmp_path, Tcp.NONE)


@pytest.mark.usefixtures("root")
def test_gpus_need_the_plugin_and_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins: there is no GPU here, and Debian's CRIU has no CUDA plugin."""
    tool = stand_in(tmp_path)
    monkeypatch.setenv("CRIU_LIBS_DIR", str(tmp_path))
    assert "no cuda_plugin.so" in str(find(tool, work(gpus=1)))
    (tmp_path / "cuda_plugin.so").touch()
    assert "cuda-checkpoint" in str(find(tool, work(gpus=1)))
    (tmp_path / "cuda-checkpoint").write_text("#!/bin/sh\n")
    (tmp_path / "cuda-checkpoint").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = find(tool, work(gpus=1))
    assert isinstance(found, Tool)
    argv = found.restore(tmp_path, tmp_path, tmp_path, Tcp.NONE)
    assert str(tmp_path) == argv[argv.index("--libdir") + 1]
    assert "has no CUDA plugin" in str(find(stand_in(tmp_path, "3.19"), work(gpus=1)))


def test_after_a_last_save_the_program_goes_no_further() -> None:
    place = Path("/x")
    for last in (True, False):
        argv = NEW.dump(7, place, place, place, last=last, tcp=Tcp.NONE)
        assert ["--leave-stopped" if last else "--leave-running"] == [
            word for word in argv if word.startswith("--leave")
        ]
        assert "--manage-cgroups=ignore" in argv  # the job of the next link has another group


@pytest.mark.parametrize(
    ("tcp", "expected"),
    [
        (Tcp.NONE, []),
        (Tcp.LISTENS, []),
        (Tcp.WITHIN, ["--tcp-established", "--network-lock", "skip"]),
        (Tcp.OUTSIDE, ["--tcp-close"]),
    ],
)
def test_tcp_is_kept_within_and_closed_to_the_outside(tcp: Tcp, expected: list[str]) -> None:
    place = Path("/x")
    argv = NEW.restore(place, place, place, tcp)
    assert expected == [
        word for word in argv if "tcp" in word or word in ("--network-lock", "skip")
    ]


def test_sockets_that_this_version_cannot_save_on_this_kernel_are_refused() -> None:
    assert "CRIU 4.1.1 cannot" in str(OLD.refuses(Tcp.LISTENS, (6, 18)))
    assert OLD.refuses(Tcp.WITHIN, (6, 12)) is None
    assert OLD.refuses(Tcp.NONE, (6, 18)) is None
    assert NEW.refuses(Tcp.WITHIN, (6, 18)) is None


HERE, THERE = "0100007F:1F90", "0100007F:1F91"
HERE_6, THERE_6 = (f"00000000000000000000000001000000:{port}" for port in ("1F90", "1F91"))
MAPPED = "0000000000000000FFFF0000"


def line(remote: str, state: str = "01", inode: str = "5", local: str = HERE) -> str:
    return f"0: {local} {remote} {state} 0:0 00:0 0 0 0 {inode} 1"


def both(local: str, remote: str, inode: str = "6") -> list[str]:
    """A connection of this machine with itself; the other end is this socket."""
    return [line(remote, local=local), line(local, inode=inode, local=remote)]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], Tcp.NONE),
        ([line(THERE, inode="7")], Tcp.NONE),
        ([line("00000000:0000", "0A")], Tcp.LISTENS),
        ([line("00000000:0000", "0A"), *both(HERE, THERE)], Tcp.WITHIN),
        ([*both(HERE, THERE), line("00000000:0000", "0A")], Tcp.WITHIN),
        (both(HERE_6, THERE_6), Tcp.WITHIN),
        (both(MAPPED + HERE, MAPPED + THERE), Tcp.WITHIN),
        (
            [line(MAPPED + THERE, local=MAPPED + HERE), line(HERE, inode="6", local=THERE)],
            Tcp.WITHIN,
        ),
        (both(HERE, THERE, inode="0"), Tcp.WITHIN),
        (both(HERE, THERE, inode="7"), Tcp.OUTSIDE),
        ([line(THERE)], Tcp.OUTSIDE),
        ([*both(HERE, THERE), line("0A00000A:01BB")], Tcp.OUTSIDE),
    ],
)
def test_connections_are_judged_by_their_other_end(lines: list[str], expected: Tcp) -> None:
    """Lines as of /proc/net/tcp; 5 and 6 are sockets of the program, 7 is a daemon's, and 0 waits
    to be accepted."""
    assert expected is judge(lines, {"5", "6"})


def test_versions_are_read() -> None:
    assert (4, 2, 1) == read_version("Version: 4.2.1\n")
    assert (3, 19) == read_version("Version: 3.19\nGitID: v3.19\n")
    assert read_version("") is None


# As in logs of 4.1.1, shortened.
TAKEN = """\
(00.000000) Error (criu/util.c:1533): rlimit: Can't setup RLIMIT_NOFILE for self: (EPERM)
(00.013047) Error (criu/cr-restore.c:1228): Can't fork for 6428: File exists
(00.013190) Error (criu/cr-restore.c:2324): Restoring FAILED.
"""
SIZE = """\
(00.021003) Error (criu/files-reg.c:2190): File tmp/out.txt has bad size 10 (expect 8)
(00.021060) Error (criu/files.c:1211): Unable to open fd=3 id=0x6
(00.023103) Error (criu/cr-restore.c:2324): Restoring FAILED.
"""


def test_the_reason_is_the_first_error_that_matters() -> None:
    assert "process id 6428 is taken by another process on this node" == reason_in(TAKEN)
    assert "File tmp/out.txt has bad size 10 (expect 8)" == reason_in(SIZE)
    assert reason_in(TAKEN.splitlines()[0]) is None


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ("(00.02) Error (criu/image.c:9): Can't write header: No space left on device", True),
        ("(00.02) Error (criu/bfd.c:3): Error flushing image: Disk quota exceeded", True),
        ("hpc-ckpt: /run/copies/1 No space left on device", True),
        ("(00.02) Warn  (criu/kdat.c:1): cache: Read-only file system", False),
        ("(00.02) Error (criu/mem.c:1): Can't read pages: Input/output error", False),
        ("(00.02) Error (criu/sk-inet.c:1): Connected TCP socket", False),
    ],
)
def test_storage_that_does_not_take_a_dump_is_told_apart(said: str, refused: bool) -> None:
    """Only that says nothing against CRIU."""
    assert refused is refused_by_storage(f"(00.01) Dumping\n{said}\n")
