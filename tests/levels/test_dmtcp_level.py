"""The DMTCP level against a stand-in that imitates recorded command lines and exit codes.

What DMTCP itself does is shown in test_dmtcp_real.py, where it is installed.
"""

import errno
import fcntl
import itertools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import dmtcp_stand_in
import pytest
from dmtcp_case import Lone, Synced
from test_steward import Case

from hpc_ckpt import events, lease, processes, resources
from hpc_ckpt.chain.layers import load
from hpc_ckpt.chain.planning import make_plan
from hpc_ckpt.errors import EXIT_COMPLETE, EXIT_FAILED, EXIT_SAVED, SpecError
from hpc_ckpt.events import EventLog
from hpc_ckpt.levels import dmtcp as room
from hpc_ckpt.levels import (
    dmtcp_checkpoint,
    dmtcp_control,
    dmtcp_coordinator,
    dmtcp_files,
    openfiles,
)
from hpc_ckpt.levels.base import (
    Moment,
    NoRoom,
    NotHere,
    NothingNew,
    NotNow,
    ResumeFailed,
    SaveFailed,
    Start,
    StartFailed,
    Work,
    passes,
)
from hpc_ckpt.levels.choose import choose
from hpc_ckpt.levels.dmtcp import Dmtcp
from hpc_ckpt.levels.dmtcp_tool import (
    ENV_FILE_CAP,
    NoTool,
    clean,
    env_file_text,
    find_tool,
)
from hpc_ckpt.levels.footprint import image_bytes, missing_features
from hpc_ckpt.levels.plain import WARNING, Plain
from hpc_ckpt.levels.restarts import Restarts
from hpc_ckpt.levels.stewardship import Steward
from hpc_ckpt.policy.interval import EveryTime
from hpc_ckpt.rundir import Result
from hpc_ckpt.settings import Settings

SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return dmtcp_stand_in.install(tmp_path / "dmtcp" / "bin")


@pytest.fixture
def lone(tmp_path: Path, place: Path) -> Iterator[Lone]:
    found = Lone(tmp_path, {"path": str(place)})
    yield found
    found.end()


def work(*argv: str, gpus: int = 0, cwd: Path = Path("/")) -> Work:
    return Work(argv=argv, cwd=cwd, environ=dict(os.environ), gpus=gpus)


# ── probe ─────────────────────────────────────────────────────────────────────────────────
def test_without_dmtcp_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not on PATH" in (Dmtcp().probe(work("/bin/true")) or "")


@pytest.mark.parametrize("where", ["", "bin", "bin/dmtcp_launch"])
def test_the_profiles_path_may_name_the_prefix_the_bin_or_the_program(
    place: Path, where: str
) -> None:
    found = find_tool({"path": str(place.parent / where)}, os.environ)
    assert place == found.place


def test_a_wrong_path_in_the_profile_says_which_key(tmp_path: Path) -> None:
    assert "tools.dmtcp.path" in (
        Dmtcp({"path": str(tmp_path / "x")}).probe(work("/bin/true")) or ""
    )


def test_a_module_is_loaded_to_find_it(place: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".bash_profile").write_text(f'module() {{ PATH="{place}:$PATH"; echo "loads $*"; }}\n')
    environ = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    assert place == find_tool({"module": "dmtcp/3.0"}, environ).place


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("2.6.0", (2, 6)),
        ("3.2.0", (3, 2)),
        ("4.1.1", (4, 1)),
        ("4.2.0-rc1", (4, 2)),
        ("5.0", (5, 0)),
    ],
)
def test_every_version_is_told_apart(
    place: Path, monkeypatch: pytest.MonkeyPatch, said: str, number: tuple[int, int]
) -> None:
    monkeypatch.setenv("STAND_IN_VERSION", said)
    found = find_tool({"path": str(place)}, os.environ)
    assert (said, number) == (found.version, found.number)


@pytest.mark.parametrize(("said", "why"), [("2.5.2", "too old"), ("unknown", "not known")])
def test_an_unusable_version_is_a_reason(
    place: Path, monkeypatch: pytest.MonkeyPatch, said: str, why: str
) -> None:
    monkeypatch.setenv("STAND_IN_VERSION", said)
    assert why in (Dmtcp({"path": str(place)}).probe(work("/bin/true")) or "")


def test_half_an_installation_is_refused(place: Path) -> None:
    (place / "mtcp_restart").unlink()
    with pytest.raises(NoTool, match="mtcp_restart is missing"):
        find_tool({"path": str(place)}, os.environ)


def test_gpus_are_a_reason(place: Path) -> None:
    assert "GPU" in (Dmtcp({"path": str(place)}).probe(work("/bin/true", gpus=1)) or "")


@pytest.mark.parametrize(
    "argv",
    [
        ("mpirun", "-np", "4", "./a"),
        ("/usr/bin/srun", "./a"),
        ("bash", "-c", "cd x && srun -n 4 ./a"),
        ("bash", "-c", "true;mpiexec ./a"),
    ],
)
def test_mpi_is_a_reason(place: Path, argv: tuple[str, ...]) -> None:
    assert "MPI" in (Dmtcp({"path": str(place)}).probe(work(*argv)) or "")


def test_mpirun_is_taken_if_it_is_asked_for(place: Path) -> None:
    """By the script, which has mpirun under DMTCP too; not unasked, and not what srun starts."""
    tools = {"dmtcp": {"path": str(place)}}
    mpirun, srun = work("mpirun", "-np", "2", "./a"), work("srun", "./a")
    choice = choose(mpirun, "dmtcp", tools=tools)
    assert ("dmtcp", ()) == (choice.chosen, choice.entries)
    *before, script = choice.before
    assert ["env", f"DMTCP_BIN={place}", "INTERVAL=600", "bash"] == before
    assert Path(script).name == "dmtcp.sh" and Path(script).is_file()
    assert () == choose(mpirun, tools=tools).before
    with pytest.raises(SpecError, match="starts processes elsewhere"):
        choose(srun, "dmtcp", tools=tools)
    with pytest.raises(SpecError, match="no dmtcp_launch"):
        choose(mpirun, "dmtcp", tools={"dmtcp": {"path": "/nowhere"}})


@pytest.mark.parametrize(
    ("policy", "given", "said"),
    [
        ("every 7 min", ["INTERVAL=420"], "a checkpoint every 7m"),
        ("every 1.5 s", ["INTERVAL=2"], "a checkpoint every 2s"),
        ("auto", ["INTERVAL=600"], "a checkpoint every 10m"),
        ("every 500 steps", [], "a checkpoint every 30m: it counts no steps"),
    ],
)
def test_mpirun_is_saved_as_often_as_the_policy_says(
    place: Path, tmp_path: Path, policy: str, given: list[str], said: str
) -> None:
    (tmp_path / "lab.yaml").write_text(f"cluster: lab\ntools: {{dmtcp: {{path: {place}}}}}\n")
    command = ["mpirun", "-np", "2", "./a"]
    spec = {"command": command, "level": "dmtcp", "checkpoint": {"policy": policy}}
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    loaded = load(spec, profile=str(tmp_path / "lab.yaml"), cwd=tmp_path, environ=environ)
    level = make_plan(loaded, cwd=tmp_path, environ=environ).level
    assert given == [word for word in level.before if word.startswith("INTERVAL=")]
    assert "bash" == level.before[-2] and level.why.endswith(said)


def test_a_program_that_is_not_there_is_a_reason(place: Path) -> None:
    assert "no such program" in (Dmtcp({"path": str(place)}).probe(work("./a")) or "")


def test_an_ordinary_program_is_taken(place: Path) -> None:
    assert Dmtcp({"path": str(place)}).probe(work(*SLEEP)) is None
    assert Dmtcp({"path": str(place)}).probe(work("bash", "-c", "echo a/b; ls /bin")) is None


def test_what_is_found_on_the_path_is_named_for_the_node(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job has another PATH than the shell that submits it."""
    monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")
    (first, *_) = choose(work(*SLEEP)).entries
    assert ("dmtcp", {"path": str(place)}) == (first["name"], first["tool"])
    profile = {"dmtcp": {"module": "dmtcp/3.0"}}
    (first, *_) = choose(work(*SLEEP), tools=profile).entries
    assert profile["dmtcp"] == first["tool"]


@pytest.mark.parametrize(
    ("argv", "gpus", "why"),
    [
        (SLEEP, 1, "GPUs are asked for"),
        (("srun", "./a"), 0, "starts processes elsewhere"),
        (("mpirun", "./a"), 0, "starts processes elsewhere"),
        (("./deaf",), 0, "setuid"),
    ],
)
def test_a_module_of_the_profile_brings_the_tool_and_nothing_else(
    tmp_path: Path, argv: tuple[str, ...], gpus: int, why: str
) -> None:
    """Whatever the module brings, DMTCP cannot save these: said now, not on the node."""
    (tmp_path / "deaf").write_bytes(b"\x7fELF")
    (tmp_path / "deaf").chmod(0o4755)
    this = Work(argv=argv, cwd=tmp_path, environ={"PATH": "/usr/bin:/bin"}, gpus=gpus)
    choice = choose(this, tools={"dmtcp": {"module": "dmtcp/3.0"}})
    assert "dmtcp" not in [entry["name"] for entry in choice.entries]
    assert why in dict(choice.rejected)["dmtcp"]
    assert choice.entries or choice.warning == WARNING


@pytest.mark.parametrize("name", ["dmtcp", "criu"])
def test_a_level_asked_for_by_name_that_is_not_there_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chain would run without it, and nobody was told."""
    monkeypatch.setattr("hpc_ckpt.levels.criu_tool._PLACES", ())
    this = replace(work("/bin/sleep", "9"), environ={"PATH": "/nowhere"})
    with pytest.raises(SpecError, match=rf"level: {name}: not usable.*{name}.*PATH"):
        choose(this, name)


@pytest.mark.parametrize("wanted", ["auto", "its name"])
@pytest.mark.parametrize("name", ["dmtcp", "criu"])
def test_a_tool_that_only_a_module_brings_is_left_to_the_node(
    name: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_ckpt.levels.criu_tool._PLACES", ())
    this = replace(work("/bin/sleep", "9"), environ={"PATH": "/nowhere"})
    asked = name if wanted == "its name" else wanted
    choice = choose(this, asked, tools={name: {"module": "m/1.0"}})
    assert [name, "plain"] == [entry["name"] for entry in choice.entries]
    assert "PATH" in dict(choice.rejected)[name]


@pytest.mark.parametrize("name", ["dmtcp", "criu"])
def test_a_path_that_only_the_nodes_have_is_believed_of_a_level_asked_for_by_name(
    name: str, tmp_path: Path
) -> None:
    this = replace(work("/bin/sleep", "9"), environ={"PATH": "/nowhere"})
    there = {name: {"path": str(tmp_path / "nodes" / "bin" / name)}}
    choice = choose(this, name, tools=there)
    assert [name, "plain"] == [entry["name"] for entry in choice.entries]
    assert "left to the nodes" in (choice.warning or "")
    assert name not in [entry["name"] for entry in choose(this, "auto", tools=there).entries]
    with pytest.raises(SpecError, match="GPUs"):
        choose(replace(this, gpus=1), "dmtcp", tools=there)


# ── command lines ─────────────────────────────────────────────────────────────────────────
def test_command_lines_are_absolute_and_share_nothing(
    lone: Lone, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = lone.place / "notes"
    monkeypatch.setenv("STAND_IN_NOTES", str(notes))
    lone.environ = dict(os.environ)
    (place.parent / "lib/dmtcp").mkdir(parents=True)
    (place.parent / "lib/dmtcp/libdmtcp_modify-env.so").touch()
    lone.first(*SLEEP)
    restart = lone.save()
    lone.resume(restart)
    said = [json.loads(line) for line in notes.read_text().splitlines()]
    coordinator = next(words for words in said if words[0] == "dmtcp_coordinator")
    assert {"--exit-on-last", "--port-file"} < set(coordinator)
    assert "0" == coordinator[coordinator.index("--port") + 1]
    assert 2 == sum(words[0] == "dmtcp_coordinator" for words in said)
    launch = next(words for words in said if words[0] == "dmtcp_launch")
    assert list(SLEEP) == launch[-3:]
    assert {"-j", "--no-gzip", "--modify-env"} < set(launch)
    assert not any("signal" in word for words in said for word in words)
    restarted = next(words for words in said if words[0] == "dmtcp_restart")
    assert "--ckptdir" not in restarted
    for words in (coordinator, launch, restarted):
        for before, word in itertools.pairwise(words):
            if before in ("--ckptdir", "--tmpdir", "--port-file"):
                assert word.startswith("/"), words
    ports = [w[w.index("-p") + 1] for w in said if "-p" in w]
    assert 2 == len(set(ports))
    assert not any(words[-1] in ("-kc", "-c") for words in said)
    never = {"-i", "--interval", "--checkpoint-open-files", "--enable-unique-checkpoint-filenames"}
    assert not never & {word for words in said for word in words}


def test_without_the_plugin_the_environment_is_left_alone(lone: Lone) -> None:
    assert "--modify-env" not in lone.level.first(lone.work(*SLEEP)).argv


def test_dmtcps_own_variables_do_not_reach_it() -> None:
    environ = {"DMTCP_COORD_PORT": "", "DMTCP_FORKED_CHECKPOINT": "1", "DMTCP_CHECKPOINT_DIR": "x"}
    assert {"HWLOC_COMPONENTS": "-linuxio"} == clean(environ)
    assert {"HWLOC_COMPONENTS": "linux"} == clean({"HWLOC_COMPONENTS": "linux"})


def test_the_file_of_fresh_variables_fits_dmtcps_buffers() -> None:
    environ = {
        "SLURM_JOB_ID": "222",
        "SLURM_ODD": 'a="b" $c',
        "HOME": "/home/me",
        "HPC_CKPT_NOTICE": "/run/control/notice-2",
        **{f"SLURM_MANY_{number}": "x" * 400 for number in range(50)},
    }
    text = env_file_text(environ, ["SLURM_JOB_ID", "SLURM_GONE", "BAD NAME"])
    assert "SLURM_JOB_ID=222\n" in text
    assert "HPC_CKPT_NOTICE=/run/control/notice-2\n" in text
    assert "HOME" not in text
    assert "ODD" not in text
    assert "BAD" not in text
    assert len(text) <= ENV_FILE_CAP
    assert "SLURM_GONE\n" == env_file_text({}, ["SLURM_GONE"])


# ── saves ─────────────────────────────────────────────────────────────────────────────────
def test_a_save_has_images_their_files_and_facts(lone: Lone) -> None:
    lone.first(*SLEEP)
    restart = lone.save(last=True)
    assert -signal.SIGKILL == lone.running.poll()
    (image,) = restart.facts["images"]
    assert {image, image.replace(".dmtcp", "_files")} == {p.name for p in restart.path.iterdir()}
    assert "5.0" == restart.facts["dmtcp"]


def test_steps_go_on_from_the_restart(lone: Lone) -> None:
    """They are seconds of processor time; a program that only sleeps after it makes none."""
    busy = "import time; [0 for _ in range(10**7)]; print(flush=True); time.sleep(60)"
    lone.first(sys.executable, "-c", busy)
    lone.until_lines(lone.output, 1)
    restart = lone.save()
    assert restart.key.step >= 1
    lone.resume(restart)  # the stand-in begins anew
    lone.until_lines(lone.output, 2)
    again = lone.save()
    assert again.key.step > restart.key.step
    assert again.key.step == lone.save().key.step


def test_a_busy_coordinator_is_asked_again(lone: Lone, monkeypatch: pytest.MonkeyPatch) -> None:
    lone.environ["STAND_IN"] = "busy"
    lone.first(*SLEEP)
    assert lone.save().size > 0


def test_a_busy_coordinator_is_not_asked_for_ever(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dmtcp_checkpoint, "BUSY_S", 0.0)
    monkeypatch.setattr(dmtcp_checkpoint, "DEATH_S", 0.1)
    lone.environ["STAND_IN"] = "busy"
    lone.first(*SLEEP)
    with pytest.raises(SaveFailed, match=r"not in running state.*the program goes on"):
        lone.save()


# Bytes before the end of a file change all the time.
IN_PLACE = """
import os, time
if not os.path.exists("table"):
    open("table", "w").write("0" * 9)
table = open("table", "r+b", buffering=0)
print("up", flush=True)
while True:
    count = int(table.read(9))
    table.seek(0)
    table.write(b"%09d" % (count + 1))
    table.seek(0)
    time.sleep(0.001)
"""


def in_place(lone: Lone, mode: str) -> Path:
    lone.environ["STAND_IN"] = mode
    lone.first(sys.executable, "-c", IN_PLACE)
    lone.until_lines(lone.output, 1)
    return lone.cwd / "table"


@pytest.mark.parametrize("mode", ["still", "still-later"])
def test_files_written_in_place_are_copied_while_the_program_stands_still(
    lone: Lone, mode: str
) -> None:
    """And put back before it goes on; a checkpoint that was over too soon is made again."""
    table = in_place(lone, mode)
    restart = lone.save()
    time.sleep(0.1)
    (copy,) = (restart.path / openfiles.COPIES).iterdir()
    saved = copy.read_text()
    assert 9 == len(saved)
    lone.end()
    assert int(table.read_text() or "0") > int(saved)
    lone.level.resume(lone.work(), restart.path, restart.facts)
    assert saved == table.read_text()


# As DMTCP itself has one in every program, and in the directory that it is given.
SHARED = """
import mmap, sys, time
with open(f"{sys.argv[1]}/shared", "w+b") as made:
    made.write(bytes(4096))
    made.flush()
    mapped = mmap.mmap(made.fileno(), 0)
print("up", flush=True)
time.sleep(60)
"""


def test_what_dmtcp_has_for_itself_is_not_the_programs_behind_a_link_either(
    tmp_path: Path, place: Path
) -> None:
    """$TMPDIR may be one; the kernel tells what it leads to. Put back, it would be missing with
    the job's directory, and no link would go on."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    lone = Lone(tmp_path / "link", {"path": str(place)})
    lone.environ["STAND_IN"] = "still"
    try:
        start = lone.level.first(lone.work(sys.executable, "-c", SHARED))
        attempt = lone.level._attempt
        assert attempt is not None
        lone._run(replace(start, argv=(*start.argv, str(attempt.coordinator.temporary))))
        lone.until_lines(lone.output, 1)
        assert not (lone.save().path / openfiles.RECORD).exists()
    finally:
        lone.end()


def test_files_in_place_that_could_not_be_copied_in_time_fail_the_save(lone: Lone) -> None:
    """DMTCP alone would go on from them as they are by then: a wrong result, and no word."""
    in_place(lone, "")
    with pytest.raises(SaveFailed, match="writes files in place"):
        lone.save()
    assert lone.running.poll() is None
    assert not any(
        stat.state == "T" for pid, stat in processes.every() if pid in lone.running.tree()
    )


def test_the_processes_that_are_known_stop_before_others_are_looked_for(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes as long as a small image where a node has thousands. A pid that is another's by
    then is left alone."""
    child = lone._run(Start(argv=SLEEP, cwd=lone.cwd, environ=lone.environ)).pid
    did: list[object] = []
    tell = dmtcp_files._tell

    def told(pid: int, number: signal.Signals) -> None:
        did.append((pid, number.name))
        tell(pid, number)

    def tree() -> list[int]:
        did.append("tree")
        return [child]

    monkeypatch.setattr(dmtcp_files, "_tell", told)
    monkeypatch.setattr(lone.running, "tree", tree)
    until = time.monotonic() + 30
    known = dmtcp_files._with_starts([child])
    with dmtcp_files._stopped(known, lone.running, until) as still:
        assert still
    first = did.index("tree")
    assert [(child, "SIGSTOP"), "tree", (child, "SIGCONT")] == did[first - 1 : first + 2]
    did.clear()
    with dmtcp_files._stopped({child: known[child] - 1}, lone.running, until):
        assert ["tree", (child, "SIGSTOP")] == did


LARGE = """
import sys, time
table = open("table", sys.argv[1], buffering=0)
table.seek(0, int(sys.argv[2]))
print("up", flush=True)
time.sleep(60)
"""


def large(lone: Lone, monkeypatch: pytest.MonkeyPatch, mode: str, whence: int) -> Path:
    for name in ("COPY_MOST", "COPY_AT_END_MOST"):
        monkeypatch.setattr(openfiles, name, 8)
    (lone.cwd / "table").write_text("0123456789")
    lone.environ["STAND_IN"] = "still"
    lone.first(sys.executable, "-c", LARGE, mode, str(whence))
    lone.until_lines(lone.output, 1)
    return lone.cwd / "table"


def test_a_file_in_place_too_large_to_copy_fails_the_save(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known only while the program stands still: a look at a running one tells nothing of it."""
    table = large(lone, monkeypatch, "r+b", os.SEEK_SET)
    into, moment = lone.place / "into", Moment(until=time.monotonic() + 30)
    lone.level.ask(lone.running, into, moment)
    with pytest.raises(SaveFailed, match=f"^{table}: written in place, and too large") as failure:
        lone.level.wait(lone.running, into, moment)
    assert not passes(failure.value)
    assert lone.running.poll() is None


def slow(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Storage that takes so long for the nine bytes of a table."""
    now = time.monotonic

    def later() -> float:
        time.sleep(seconds / 9)
        return now()

    monkeypatch.setattr(openfiles, "BLOCK", 1)
    monkeypatch.setattr(openfiles, "time", SimpleNamespace(monotonic=later))


def test_files_in_place_that_take_too_long_to_copy_fail_this_save_alone(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next may have more time: it says nothing against DMTCP, not even as the first one."""
    table = in_place(lone, "still")
    with monkeypatch.context() as patch:
        slow(patch, 30.0)
        with pytest.raises(NotNow, match=f"^{table}: written in place, and not copied in the time"):
            lone.save(within_s=6.0)
    assert lone.running.poll() is None
    assert (lone.save().path / openfiles.COPIES).exists()


def test_copies_have_all_the_time_that_the_rest_of_a_save_does_not_need(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A last save has 1.5 times what the one before took: of that, copies may need the most."""
    in_place(lone, "still")
    lone.save()
    slow(monkeypatch, 4.0)
    restart = lone.save(within_s=7.0, last=True)
    assert (restart.path / openfiles.COPIES).exists()
    assert restart.facts["rest_seconds"] <= restart.facts["seconds"] - 4.0


# Larger at its images than when they were asked for.
GROWS = """
import time
table = open("table", "w+b", buffering=0)
print("up", flush=True)
while True:
    table.seek(0, 2)
    table.write(bytes(1000))
    table.seek(0)
    time.sleep(0.002)
"""


def test_files_in_place_without_room_for_them_fail_this_save_alone(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked for does not count what the images have already."""
    lone.environ["STAND_IN"] = "still"
    lone.first(sys.executable, "-c", GROWS)
    lone.until_lines(lone.output, 1)
    needs: list[int] = []

    def full(place: Path, need: int, files: int) -> str:
        needs.append(need)
        large.unlink()
        return f"{need} bytes are needed, 0 are free"

    into, moment = lone.place / "into", Moment(until=time.monotonic() + 20)
    large = into / "images" / "more.temp"
    with monkeypatch.context() as patch:
        patch.setattr(dmtcp_files, "check_storage", full)
        lone.level.ask(lone.running, into, moment)
        with large.open("wb") as image:
            os.posix_fallocate(image.fileno(), 0, 2**28)
        with pytest.raises(NoRoom, match="0 are free"):
            lone.level.wait(lone.running, into, moment)
    assert lone.running.poll() is None
    assert needs[0] <= (lone.cwd / "table").stat().st_size
    assert (lone.save().path / openfiles.COPIES).exists()


@pytest.mark.parametrize("mode", ["r+b", "a+b"])
def test_a_large_output_that_may_be_read_too_fails_no_save(
    lone: Lone, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """Not even the first, which would cost the level; what is not certain is told."""
    table = large(lone, monkeypatch, mode, os.SEEK_END)
    restart = lone.save()
    assert not (restart.path / openfiles.COPIES).exists()
    assert f"{table}: too large to be copied" in caplog.text
    lone.end()
    table.write_text("0123456789 and more")
    lone.level.resume(lone.work(), restart.path, restart.facts)
    if mode == "r+b":  # DMTCP itself cuts the others
        assert "0123456789" == table.read_text()


def test_a_copy_that_fails_lets_the_checkpoint_come_to_its_end(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DMTCP would end a program whose images cannot get their names."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(dmtcp_files, "stored", full)
    in_place(lone, "still")
    with pytest.raises(SaveFailed, match="full") as failure:
        lone.save()
    assert passes(failure.value)
    assert lone.running.poll() is None
    monkeypatch.undo()
    assert (lone.save().path / openfiles.RECORD).exists()


def test_what_another_writes_between_two_links_is_kept(
    lone: Lone, caplog: pytest.LogCaptureFixture
) -> None:
    """The note of it is in the restart of a planned end, and in no other."""
    table = in_place(lone, "still")
    assert {} == lone.save().facts["left"]
    restart = lone.save(last=True)
    assert [str(table)] == list(restart.facts["left"])
    lone.resume(restart)
    assert "SOMEBODY ELSE" not in caplog.text
    restart = lone.save(last=True)
    table.write_text("000000000 of another")
    lone.resume(restart)
    assert f"{table}: WAS CHANGED BY SOMEBODY ELSE" in caplog.text


def test_files_in_place_are_as_they_were_where_no_restart_works(lone: Lone) -> None:
    table = in_place(lone, "still")
    restart = lone.save()
    lone.end()
    table.write_text("999999999")
    lone.environ["STAND_IN"] = "restart-99"
    with pytest.raises(ResumeFailed):
        lone.resume(restart)
    lone.end()
    assert "999999999" == table.read_text()


def test_images_that_come_after_the_answer_are_waited_for(lone: Lone) -> None:
    """Release 4.1 answers -bc before they are there, under their names."""
    lone.environ["STAND_IN"] = "answers-early"
    lone.first(*SLEEP)
    restart = lone.save(last=True)
    assert restart.facts["images"] == [path.name for path in restart.path.iterdir()]
    assert [".dmtcp"] == [Path(name).suffix for name in restart.facts["images"]]


def test_a_checkpoint_that_kills_the_program_is_a_failed_save(lone: Lone) -> None:
    lone.environ["STAND_IN"] = "checkpoint-kills"
    lone.first(*SLEEP)
    with pytest.raises(SaveFailed, match=r"died \(code 99"):
        lone.save()


def test_a_checkpoint_that_hangs_is_given_up_in_time(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dmtcp_checkpoint, "DEATH_S", 0.1)
    lone.environ["STAND_IN"] = "hangs"
    program = lone.first(*SLEEP)
    into = lone.place / "into"
    moment = Moment(until=time.monotonic() + 1.0)
    lone.level.ask(program, into, moment)
    with pytest.raises(NotNow, match="not over in time"):
        lone.level.wait(program, into, moment)


def test_a_checkpoint_that_outlasts_its_time_still_finds_its_directory(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DMTCP cannot be stopped in the middle of one, and ends a program whose images it cannot
    name with code 99. Until it is over no other is begun."""
    monkeypatch.setattr(dmtcp_checkpoint, "DEATH_S", 0.1)
    lone.environ["STAND_IN"] = "slow"
    program = lone.first("bash", "-c", "echo >up; sleep 60")
    lone.until_lines(lone.cwd / "up", 1)
    store = Restarts(lone.rundir)
    moment = Moment(until=time.monotonic() + 3.0)
    with pytest.raises(NotNow, match="not over in time"), store.stage(1) as staging:
        lone.level.ask(program, staging.path, moment)
        lone.level.wait(program, staging.path, moment)
    with pytest.raises(NotNow, match="still being made"):
        lone.save()
    assert [".temp"] == [path.suffix for path in store.place.rglob("ckpt_*")]
    assert lone.save(last=True).size > 0
    assert [] == [path.name for path in store.place.glob(".tmp-*/**/ckpt_*")]


def test_nothing_of_a_checkpoint_that_outlasts_its_link_stays(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dmtcp_checkpoint, "DEATH_S", 0.1)
    lone.environ["STAND_IN"] = "slow"
    program = lone.first("bash", "-c", "echo >up; sleep 60")
    lone.until_lines(lone.cwd / "up", 1)
    store = Restarts(lone.rundir)
    moment = Moment(until=time.monotonic() + 3.0, last=True)
    with pytest.raises(NotNow, match="not over in time"), store.stage(1) as staging:
        lone.level.ask(program, staging.path, moment)
        lone.level.wait(program, staging.path, moment)
    lone.end()
    assert [] == list(store.place.rglob("ckpt_*"))
    store.sweep(2)
    assert [] == list(store.place.iterdir())


def test_a_process_dmtcp_does_not_know_forbids_the_save(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dmtcp_control, "CONNECT_S", 2.0)
    lone.environ["STAND_IN"] = "stranger"
    lone.first("bash", "-c", "sleep 50 & echo >up; wait")
    lone.until_lines(lone.cwd / "up", 1)
    with pytest.raises(SaveFailed, match=r"not under DMTCP.*sleep"):
        lone.save()
    assert lone.running.poll() is None


def test_a_program_that_is_still_being_launched_is_waited_for(lone: Lone) -> None:
    lone.environ["STAND_IN"] = "launch-slow"
    lone.first(*SLEEP)
    assert lone.save().size > 0


def test_static_is_only_said_of_what_has_been_running_for_a_while(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone.environ["STAND_IN"] = "launch-never"
    program = lone.first(*SLEEP)
    began = time.monotonic()
    with pytest.raises(NotNow, match="still on its way"):
        lone.level.ask(program, lone.place / "into", Moment(until=began + 2.5))
    assert time.monotonic() >= began + 2.5
    monkeypatch.setattr(dmtcp_control, "CONNECT_S", 2.0)
    with pytest.raises(SaveFailed, match="statically linked"):
        lone.level.ask(program, lone.place / "into", Moment(until=began + 60))


def test_too_little_space_is_found_before_the_program_dies_of_it(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone.first(*SLEEP)
    with monkeypatch.context() as patch:
        patch.setattr(room, "image_bytes", lambda pid: 2**60)
        with pytest.raises(NotNow, match="are needed"):
            lone.save()
    assert lone.running.poll() is None
    assert lone.save().size > 0


def test_images_are_on_the_disk_before_they_count(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DMTCP itself syncs none that is not compressed: each file, each directory, the manifest
    last, and only then the name."""
    lone.first(*SLEEP)
    synced = Synced(monkeypatch)
    restart = lone.save(last=True)
    synced.check(restart)


def test_a_disk_that_filled_up_during_the_save_is_not_dmtcps_fault(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was space when it was looked at; the program has died of it."""
    lone.environ["STAND_IN"] = "checkpoint-kills"
    lone.first(*SLEEP)
    full = "1 GiB are needed, 0 are free"
    monkeypatch.setattr(dmtcp_checkpoint, "check_storage", lambda *_: full)
    with pytest.raises(SaveFailed, match=r"died \(code 99.*0 are free") as caught:
        lone.save()
    assert passes(caught.value)


def test_a_program_that_has_ended_has_nothing_new(lone: Lone) -> None:
    lone.first("/bin/true")
    assert 0 == lone.code()
    with pytest.raises(NothingNew):
        lone.save()


# ── restarts ──────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("allowed", [True, False])
def test_a_restart_is_at_the_same_addresses_where_that_is_allowed(
    lone: Lone, allowed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A sandbox may forbid it: then with a warning, not at all."""
    setarch = lone.place / "bin-of-the-system" / "setarch"
    setarch.parent.mkdir()
    setarch.write_text(f'#!/bin/sh\n{"shift 2; exec" if allowed else "exit 1 #"} "$@"\n')
    setarch.chmod(0o755)
    lone.environ["PATH"] = f"{setarch.parent}:{lone.environ['PATH']}"
    lone.first(*SLEEP)
    restart = lone.save(last=True)
    start = lone.level.resume(lone.work(), restart.path, restart.facts)
    before = ["setarch", platform.machine(), "-R"] if allowed else []
    assert [*before, "dmtcp_restart"] == [Path(w).name for w in start.argv[: len(before) + 1]]
    assert allowed == ("setarch -R does not work here" not in caplog.text)


@pytest.mark.parametrize(
    ("mode", "why"), [("restart-99", "code 99"), ("restart-spins", "no process of it runs")]
)
def test_a_restart_that_does_not_come_back_is_given_up(lone: Lone, mode: str, why: str) -> None:
    lone.first(*SLEEP)
    restart = lone.save()
    lone.environ["STAND_IN"] = mode
    with pytest.raises(ResumeFailed, match=why):
        lone.resume(restart, within_s=1.0)


def test_images_for_another_processor_are_not_tried(lone: Lone, tmp_path: Path) -> None:
    lone.first(*SLEEP)
    restart = lone.save()
    facts = {**restart.facts, "processor": ["avx1024"]}
    with pytest.raises(ResumeFailed, match=r"avx1024.*constraint"):
        lone.level.resume(lone.work(), restart.path, facts)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor: 0\nflags : fpu sse2 avx2 arch_perfmon\n")
    assert ["avx512f"] == missing_features(["sse2", "avx512f"], cpuinfo)


@pytest.mark.parametrize("what", ["gone", "garbage", "one more"])
def test_images_that_cannot_be_meant_are_not_tried(lone: Lone, what: str) -> None:
    lone.first(*SLEEP)
    restart = lone.save()
    (image,) = restart.path.glob("*.dmtcp")
    if what == "gone":
        image.unlink()
    elif what == "garbage":
        image.write_bytes(b"x" * 1000)
    else:
        image.with_name("ckpt_y.dmtcp").write_bytes(image.read_bytes())
    with pytest.raises(ResumeFailed):
        lone.level.resume(lone.work(), restart.path, restart.facts)


def test_a_coordinator_without_a_port_is_no_start(lone: Lone) -> None:
    lone.environ["STAND_IN"] = "no-port"
    with pytest.raises(NotHere, match=r"gave no port.*ASSERT: no port"):
        lone.first(*SLEEP)


# ── exit codes ────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("word", ["-q", "-kc"])
def test_code_0_after_a_strangers_quit_is_not_trusted(lone: Lone, word: str) -> None:
    """-kc makes a checkpoint first; the coordinator's log says nothing of the kill."""
    lone.environ["STAND_IN"] = "quit"
    lone.first("bash", "-c", "echo >up; sleep 60")
    lone.until_lines(lone.cwd / "up", 1)
    lone.level._now().coordinator._ask(word)
    assert 0 == lone.code()
    assert lone.level.is_complete(lone.work(*SLEEP), 0) is False


def test_a_checkpoint_of_somebody_else_long_before_the_end_is_forgotten(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "STRAY_S", 0.5)
    lone.first("bash", "-c", "echo >up; sleep 2")
    lone.until_lines(lone.cwd / "up", 1)
    lone.level._now().coordinator._ask("-bc")
    assert 0 == lone.code()
    assert lone.level.is_complete(lone.work(*SLEEP), 0) is None


def test_code_0_of_the_program_itself_is_left_to_the_steward(lone: Lone) -> None:
    lone.first("/bin/true")
    assert 0 == lone.code()
    time.sleep(0.3)
    assert lone.level.is_complete(lone.work("/bin/true"), 0) is None


def test_asserts_and_crashes_at_launch_are_its_own(lone: Lone) -> None:
    lone.environ["STAND_IN"] = "launch-crashes"
    lone.first(*SLEEP)
    code = lone.code()
    assert -signal.SIGSEGV == code
    assert "soon after its launch" in (lone.level.own_failure(code) or "")
    assert "99" in (lone.level.own_failure(99) or "")
    assert lone.level.own_failure(7) is None
    assert lone.level.own_failure(-signal.SIGKILL) is None
    lone.level._began -= room.EARLY_S
    assert lone.level.own_failure(code) is None


def test_nothing_is_left_after_close(lone: Lone) -> None:
    program = lone.first("bash", "-c", "echo >up; sleep 60")
    lone.until_lines(lone.cwd / "up", 1)
    coordinator = lone.level._now().coordinator
    lone.level.close()
    assert not coordinator.alive()
    assert program.wait(time.monotonic() + 5) is not None


def test_an_image_is_at_least_what_is_in_use() -> None:
    ballast = bytearray(os.urandom(1024)) * 64 * 1024
    assert image_bytes(os.getpid()) > len(ballast)


# ── with the steward ──────────────────────────────────────────────────────────────────────
@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def link(case: Case, place: Path, mode: str, *argv: str, interval_s: float = 600.0) -> Steward:
    held = lease.acquire_standalone(case.rundir)
    case.generation = held.generation
    held.release()
    environ = {**os.environ, "STAND_IN": mode}
    work = Work(argv=argv, cwd=case.cwd, environ=environ)
    return Steward(
        case.rundir,
        case.generation,
        work,
        (Dmtcp({"path": str(place)}), Plain()),
        Settings(policy=EveryTime(interval_s)),
        EventLog(case.rundir.events_file(case.generation, "here")),
    )


@pytest.mark.parametrize("mode", ["launch-99", "launch-crashes"])
def test_what_dmtcp_cannot_launch_goes_to_the_next_level(
    case: Case, place: Path, mode: str
) -> None:
    steward = link(case, place, mode, sys.executable, "-c", "open('ran', 'w')")
    assert EXIT_COMPLETE == steward.run()
    record = json.loads(case.rundir.levels_file.read_text())
    assert "dmtcp" in record["failed"]
    assert {"1": "plain"} == record["chosen"]
    assert (case.cwd / "ran").exists()


def test_a_coordinator_that_does_not_come_up_in_two_links_gives_way(
    case: Case, place: Path
) -> None:
    """One link says nothing: its node may have been busy."""
    ran = (sys.executable, "-c", "open('ran', 'w')")
    assert EXIT_FAILED == link(case, place, "no-port", *ran).run()
    assert not (case.cwd / "ran").exists()
    assert "failed" not in json.loads(case.rundir.levels_file.read_text())
    assert EXIT_COMPLETE == link(case, place, "no-port", *ran).run()
    record = json.loads(case.rundir.levels_file.read_text())
    assert "gave no port" in record["failed"]["dmtcp"]
    assert "plain" == record["chosen"]["2"]


@pytest.mark.parametrize("where", ["window", "scratch"])
def test_a_full_node_at_the_first_start_never_condemns_dmtcp(
    case: Case, place: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def full(path: Path, *_: object, **__: object) -> None:
        name = "hpc-ckpt-dmtcp-" if where == "window" else "dmtcp-"
        if path.name.startswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.makedirs(path, exist_ok=True)  # noqa: PTH103 - Path.mkdir is this

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        for _ in range(3):
            assert EXIT_FAILED == link(case, place, "", *SLEEP).run()
            outcome = case.rundir.outcome(case.generation)
            assert outcome is not None and "No space left" in outcome.reason
            assert "started_fresh" not in case.names()
    assert "failed" not in json.loads(case.rundir.levels_file.read_text())
    assert EXIT_COMPLETE == link(case, place, "", "/bin/true").run()
    assert "dmtcp" == json.loads(case.rundir.levels_file.read_text())["chosen"]["4"]


def test_a_site_whose_nodes_never_let_it_start_is_not_waited_for(
    case: Case, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A /tmp that nobody may write to may be meant; the chain would stop, its program unstarted."""
    ran = (sys.executable, "-c", "open('ran', 'w')")

    def closed(path: Path, *_: object, **__: object) -> None:
        if path.name.startswith("hpc-ckpt-dmtcp-"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        os.makedirs(path, exist_ok=True)  # noqa: PTH103 - Path.mkdir is this

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", closed)
        assert EXIT_FAILED == link(case, place, "", *ran).run()
        assert EXIT_COMPLETE == link(case, place, "", *ran).run()
    assert "plain" == json.loads(case.rundir.levels_file.read_text())["chosen"]["2"]


def test_what_passes_is_found_behind_other_errors() -> None:
    """Whoever was in between has given it a name of his own."""
    full, other = OSError(errno.ENOSPC, "full"), OSError(errno.ENOENT, "gone")
    for cause in (full, other):
        inner, outer = ResumeFailed("inner"), StartFailed("outer")
        inner.__cause__, outer.__cause__ = cause, inner
        assert (cause is full) == passes(outer)


def test_a_notice_saves_and_the_next_link_restarts(case: Case, place: Path) -> None:
    steward = link(case, place, "", *SLEEP)
    case.notice_after(0.8)
    assert EXIT_SAVED == steward.run()
    (key,) = case.restarts.keys()
    steward = link(case, place, "", *SLEEP)
    case.notice_after(1.0)
    assert EXIT_SAVED == steward.run()
    assert "restored" in case.names()
    assert case.restarts.keys()[-1] > key


def test_a_coordinator_that_does_not_come_up_condemns_no_restart(
    case: Case, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy node, slow storage: the next link goes on from where this one could not."""
    steward = link(case, place, "", *SLEEP)
    case.notice_after(0.8)
    assert EXIT_SAVED == steward.run()
    before = case.restarts.keys()
    monkeypatch.setattr(dmtcp_coordinator, "START_S", 0.5)
    assert EXIT_FAILED == link(case, place, "no-port", *SLEEP).run()
    assert "started_fresh" not in case.names()
    monkeypatch.undo()
    steward = link(case, place, "", *SLEEP)
    case.notice_after(1.0)
    assert EXIT_SAVED == steward.run()
    assert "restored" in case.names()
    assert before == case.restarts.keys()[:1]
    assert "failed" not in json.loads(case.rundir.levels_file.read_text())


def test_a_window_that_somebody_holds_condemns_no_restart(case: Case, place: Path) -> None:
    """As the steward of the link before, which is not gone yet."""
    steward = link(case, place, "", *SLEEP)
    case.notice_after(0.8)
    assert EXIT_SAVED == steward.run()
    (key,) = case.restarts.keys()
    window = Path(case.restarts.open(key).facts["window"])
    window.mkdir(mode=0o700)
    held = os.open(window, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert EXIT_FAILED == link(case, place, "", *SLEEP).run()
    finally:
        os.close(held)
    assert "started_fresh" not in case.names()
    assert "failed" not in json.loads(case.rundir.levels_file.read_text())
    steward = link(case, place, "", *SLEEP)
    case.notice_after(1.0)
    assert EXIT_SAVED == steward.run()
    assert "restored" in case.names()


def test_a_coordinator_is_given_as_long_as_a_client() -> None:
    assert dmtcp_coordinator.START_S == dmtcp_control.CONNECT_S


def test_a_link_on_a_full_disk_leaves_the_level_to_the_next(
    case: Case, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was saved in a whole link, and that says nothing of DMTCP."""
    with monkeypatch.context() as patch:
        patch.setattr(room, "image_bytes", lambda pid: 2**60)
        steward = link(case, place, "", *SLEEP)
        case.rundir.write_deadline(case.generation, time.time() + 3.0)
        assert EXIT_SAVED == steward.run()
    assert [] == case.restarts.keys()
    steward = link(case, place, "", *SLEEP)
    case.notice_after(0.8)
    assert EXIT_SAVED == steward.run()
    assert "dmtcp" == json.loads(case.rundir.levels_file.read_text())["chosen"]["2"]
    assert 1 == len(case.restarts.keys())


@pytest.mark.parametrize("mode", ["launch-slow", "launch-never", "hangs", "full"])
def test_a_first_save_without_time_or_space_is_not_the_levels_fault(
    case: Case, place: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next link tries it again."""
    monkeypatch.setattr(dmtcp_checkpoint, "DEATH_S", 0.1)
    if mode == "full":
        monkeypatch.setattr(room, "image_bytes", lambda pid: 2**60)
    steward = link(case, place, mode, *SLEEP)
    if mode != "launch-slow":
        case.rundir.write_deadline(case.generation, time.time() + 5.0)
    case.notice_after(0.5)
    assert EXIT_SAVED == steward.run()
    assert (mode == "launch-slow") == bool(case.restarts.keys())
    assert "failed" not in json.loads(case.rundir.levels_file.read_text())


def test_a_save_that_takes_longer_than_the_interval_ends_neither_the_program_nor_the_level(
    case: Case, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for, and the program gets on before the next one."""
    monkeypatch.setattr("hpc_ckpt.levels.moments.UNKNOWN_END_S", 0.5)
    monkeypatch.setenv("STAND_IN_SLOW_S", "2")
    steward = link(case, place, "slow", *SLEEP, interval_s=1.0)
    case.rundir.write_deadline(case.generation, time.time() + 120.0)
    case.notice_when(lambda: case.commits() >= 2)
    assert EXIT_SAVED == steward.run()
    assert "save.failed" not in case.names()
    assert "failed" not in json.loads(case.rundir.levels_file.read_text())
    told = list(events.read(case.rundir.events_file(case.generation, "here")))
    begun = [record["time"] for record in told if record["event"] == "save.started"]
    over = [record["time"] for record in told if record["event"] == "save.committed"]
    assert begun[1] - over[0] >= 0.9


def test_a_quit_by_somebody_else_is_a_failed_link_and_never_done(case: Case, place: Path) -> None:
    steward = link(case, place, "quit", "bash", "-c", "echo >up; sleep 60")
    level = steward._levels[0]
    assert isinstance(level, Dmtcp)
    case.when((case.cwd / "up").exists, lambda: level._now().coordinator._ask("-q"))
    assert EXIT_FAILED == steward.run()
    assert Result.FAILED is case.result()
    assert case.rundir.done() is None


def test_a_program_that_fails_by_itself_is_not_blamed_on_dmtcp(case: Case, place: Path) -> None:
    steward = link(case, place, "", sys.executable, "-c", "raise SystemExit(3)")
    assert EXIT_FAILED == steward.run()
    assert "failed" not in json.loads(case.rundir.levels_file.read_text())


# ── the script for one's own jobs ─────────────────────────────────────────────────────────
def job(place: Path, tools: Path, shims: Path | None = None) -> tuple[int, str]:
    """One job of the script, told to end as soon as its program runs; its code and its words."""
    began, notice = place / "began", place / "notice"
    before = began.stat().st_size if began.exists() else 0
    notice.unlink(missing_ok=True)
    first = f"{tools}:" if shims is None else f"{shims}:{tools}:"
    environ = {**os.environ, "PATH": first + os.environ["PATH"], "HPC_CKPT_NOTICE": str(notice)}
    child = subprocess.Popen(
        ["bash", str(resources.find("templates/dmtcp.sh")), "bash", "-c",
         f"echo >> {began}; exec sleep 1000"],
        cwd=place, env={**environ, "CKPT_DIR": "ck"}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until = time.monotonic() + 30
    while child.poll() is None and time.monotonic() < until:
        if began.exists() and began.stat().st_size > before:
            break
        time.sleep(0.05)
    notice.touch()
    said = child.communicate(timeout=60)[1]
    return child.returncode, said


def test_the_script_keeps_the_set_it_fell_back_to_until_another_is_sealed(
    tmp_path: Path, place: Path
) -> None:
    """The newest is damaged, and the save of the job that went on from the older one fails."""
    for _ in range(2):
        assert EXIT_SAVED == job(tmp_path, place)[0]
    home = tmp_path / "ck"
    assert ("2", "1") == tuple((home / name).read_text().strip() for name in ("newest", "older"))
    (image,) = (home / "2").glob("*.dmtcp")
    image.write_bytes(b"")
    shims = tmp_path / "shims"
    shims.mkdir()
    seal = shims / "sha256sum"
    seal.write_text(f'#!/bin/bash\n[[ " $* " == *" -c "* ]] || exit 1\nexec {sha256sum()} "$@"\n')
    seal.chmod(0o755)
    code, said = job(tmp_path, place, shims)
    assert (EXIT_FAILED, True) == (code, f"goes on from {home}/1" in said), said
    code, said = job(tmp_path, place)
    assert (EXIT_SAVED, True) == (code, f"goes on from {home}/1" in said), said
    assert ("2", "1") == tuple((home / name).read_text().strip() for name in ("newest", "older"))


def sha256sum() -> str:
    found = shutil.which("sha256sum")
    assert found is not None
    return found
