"""The DMTCP level with the real DMTCP: one test for every trap that was found in it.

Needs dmtcp_launch on PATH; without it every test here is skipped, and says so.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from dmtcp_case import Lone, Synced

from hpc_ckpt import resources
from hpc_ckpt.chain.ledger import read_status
from hpc_ckpt.levels.base import Moment, NothingNew, NotNow, ResumeFailed, SaveFailed, passes
from hpc_ckpt.levels.dmtcp import Dmtcp
from hpc_ckpt.levels.dmtcp_coordinator import Coordinator
from hpc_ckpt.levels.dmtcp_tool import find_tool, same_addresses
from hpc_ckpt.levels.restarts import Restart
from hpc_ckpt.rundir import RunDir

REAL_DMTCP = True
pytestmark = [
    pytest.mark.skipif(shutil.which("dmtcp_launch") is None, reason="dmtcp_launch is not on PATH"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed"),
]
NOBODY = 65534
PYTHON = str(Path(sys.executable).resolve())
COUNT = r"""
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int main(int argc, char **argv) {
    int most = atoi(argv[1]), code = atoi(argv[2]);
    unsigned long hash = 1;
    FILE *out = fopen("count.txt", "a");
    for (int i = 0; i < most; i++) {
        for (int k = 0; k < 2000000; k++)
            hash = hash * 6364136223846793005UL + 1442695040888963407UL;
        fprintf(out, "%d %lu\n", i, hash);
        fflush(out);
        usleep(20000);
    }
    FILE *end = fopen("end.txt", "w");
    fprintf(end, "%lu %s\n", hash, getenv("SLURM_JOB_ID") ? getenv("SLURM_JOB_ID") : "none");
    fclose(end);
    return code;
}
"""
GROW = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(void) {
    FILE *out = fopen("count.txt", "a");
    for (int i = 0; i < 60; i++) {
        for (int k = 0; k < 100; k++)
            memset(malloc(10000), i, 10000);
        fprintf(out, "%d\n", i);
        fflush(out);
        usleep(50000);
    }
    return 7;
}
"""
TREE = """
import multiprocessing as mp, sys, time
def work(queue, start):
    value = start
    for n in range(60):
        value = (value * 31 + n) % 1000003
        time.sleep(0.05)
    queue.put(value)
if __name__ == "__main__":
    queue = mp.Queue()
    them = [mp.Process(target=work, args=(queue, n)) for n in range(2)]
    [p.start() for p in them]
    open("up", "w").write("1\\n")
    print(sorted(queue.get() for _ in them), file=open("tree.txt", "w"))
    [p.join() for p in them]
    sys.exit(5)
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("programs")
    (place / "count.c").write_text(COUNT)
    (place / "grow.c").write_text(GROW)
    (place / "tree.py").write_text(TREE)
    for source, flag, name in (
        ("count.c", "-g0", "count"),
        ("count.c", "-static", "static"),
        ("grow.c", "-no-pie", "grow"),
    ):
        build = ["gcc", "-O1", "-w", flag, "-o", name, source]
        subprocess.run(build, cwd=place, check=True)
    return place


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[Lone]:
    found = Lone(tmp_path)
    yield found
    found.end()


class Counting(Lone):
    """The counter in C: every line once and in order, whatever happened between."""

    most = 160
    code_wanted = 7

    def begin(self, programs: Path, lines: int = 5) -> None:
        self.first(str(programs / "count"), str(self.most), str(self.code_wanted))
        self.until_lines(self.cwd / "count.txt", lines)

    def check(self) -> str:
        assert self.code_wanted == self.code(), self.output.read_text()
        lines = (self.cwd / "count.txt").read_text().splitlines()
        assert [str(n) for n in range(self.most)] == [line.split()[0] for line in lines]
        value, job = (self.cwd / "end.txt").read_text().split()
        assert lines[-1].split()[1] == value
        return job


@pytest.fixture
def counting(tmp_path: Path) -> Iterator[Counting]:
    found = Counting(tmp_path)
    yield found
    found.end()


def image_of(restart: Restart) -> Path:
    (image,) = restart.path.glob("*.dmtcp")
    return image


# ── that it works ─────────────────────────────────────────────────────────────────────────
def test_a_counter_goes_on_from_its_restart_with_its_exit_code(
    counting: Counting, programs: Path
) -> None:
    """cwd, files cut back to the checkpoint, code of the program, images in a renamed place."""
    counting.begin(programs)
    restart = counting.save()
    counting.until_lines(counting.cwd / "count.txt", 20)  # lost, and done again
    here = Path.cwd()
    os.chdir("/")
    try:
        counting.resume(restart)
    finally:
        os.chdir(here)
    counting.check()


def test_each_restart_is_kept_apart_and_a_restarted_program_saves_too(
    counting: Counting, programs: Path
) -> None:
    """DMTCP overwrites its images, and after a restart those it was restarted from."""
    counting.begin(programs)
    first = counting.save()
    before = image_of(first).stat()
    counting.until_lines(counting.cwd / "count.txt", 15)
    second = counting.save()
    counting.resume(second)
    counting.until_lines(counting.cwd / "count.txt", 25)
    third = counting.save(last=True)
    after = image_of(first).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert first.key < second.key < third.key
    counting.resume(third)
    counting.until_lines(counting.cwd / "count.txt", 30)
    counting.resume(first)
    counting.check()


def test_a_process_tree_comes_back_whole(lone: Lone, programs: Path) -> None:
    lone.first("bash", "-c", f"{PYTHON} {programs / 'tree.py'}; exit $(( $? + 1 ))")
    lone.until_lines(lone.cwd / "up", 1)
    restart = lone.save(last=True)
    assert len(restart.facts["images"]) >= 4
    lone.resume(restart)
    assert 6 == lone.code()
    got = (lone.cwd / "tree.txt").read_text()
    (lone.cwd / "tree.txt").unlink()
    subprocess.run([PYTHON, programs / "tree.py"], cwd=lone.cwd, check=False)
    assert (lone.cwd / "tree.txt").read_text() == got


def test_the_directories_beside_the_images_belong_to_them(lone: Lone) -> None:
    code = "import time\nfor n in range(40):\n print(n, flush=True); time.sleep(0.1)"
    lone.first(PYTHON, "-c", code)
    lone.until_lines(lone.output, 3)
    restart = lone.save(last=True)
    beside = [path for path in restart.path.iterdir() if path.is_dir()]
    if not beside:
        pytest.skip("this Python has no file open that DMTCP copies")
    shutil.move(beside[0], lone.place / "away")
    with pytest.raises(ResumeFailed, match="code 99"):
        lone.resume(restart)
    shutil.move(lone.place / "away", beside[0])
    lone.resume(restart)
    assert 0 == lone.code()


def test_variables_of_the_job_are_fresh_after_a_restart(counting: Counting, programs: Path) -> None:
    if not find_tool(None, os.environ).refreshes_environment:
        pytest.skip("this DMTCP was built without its plugin modify-env")
    counting.environ["SLURM_JOB_ID"] = "111"
    counting.begin(programs)
    restart = counting.save(last=True)
    counting.environ["SLURM_JOB_ID"] = "222"
    counting.resume(restart)
    assert "222" == counting.check()


def test_a_bash_loop_goes_on(lone: Lone) -> None:
    lone.first("bash", "-c", "for i in {1..40}; do echo $i; sleep 0.1; done; exit 3")
    lone.until_lines(lone.output, 5)
    restart = lone.save(last=True)
    lone.output.write_text("")
    lone.resume(restart)
    assert 3 == lone.code()
    numbers = [int(x) for x in lone.output.read_text().splitlines() if x.isdecimal()]
    assert list(range(numbers[0], 41)) == numbers
    assert 5 <= numbers[0] <= 10


def test_memory_asked_for_after_a_restart_is_there(lone: Lone, programs: Path) -> None:
    """At random addresses DMTCP does not always restore the end of the heap."""
    if not same_addresses(lone.environ):
        pytest.skip("setarch -R is not allowed here")
    counted = lone.cwd / "count.txt"
    lone.first(str(programs / "grow"))
    lone.until_lines(counted, 5)
    restart = lone.save(last=True)
    for _ in range(8):
        lone.resume(restart)
        lone.until_lines(counted, 20)
    lone.resume(lone.save(last=True))
    assert 7 == lone.code(), lone.output.read_text()


# ── launch ────────────────────────────────────────────────────────────────────────────────
@pytest.mark.skipif(
    shutil.which("gmx") is None, reason="gmx, a program with hwloc, is not installed"
)
@pytest.mark.parametrize("components", [None, "linux,linuxio"])
def test_hwloc_ends_a_program_unless_its_devices_are_switched_off(
    lone: Lone, components: str | None
) -> None:
    lone.environ.pop("HWLOC_COMPONENTS", None)
    if components is not None:
        lone.environ["HWLOC_COMPONENTS"] = components
    lone.environ["GMX_MAXBACKUP"] = "-1"
    lone.first("gmx", "-quiet", "mdrun", "-s", "none.tpr", "-nt", "1")
    code = lone.code()
    own = lone.level.own_failure(code)
    if components is None:
        assert (1, None) == (code, own), lone.output.read_text()
    elif code != 99:
        pytest.skip("this gmx does not look at devices before it reads its input")
    else:
        assert own is not None


@pytest.mark.parametrize("what", ["no such program", "no coordinator"])
def test_a_launch_that_cannot_be_is_the_levels_own_failure(
    lone: Lone, programs: Path, what: str
) -> None:
    name = programs / "count" if what == "no coordinator" else programs / "none"
    start = lone.level.first(lone.work(str(name), "5", "0"))
    if what == "no coordinator":
        lone.level._now().coordinator._child.kill()
        lone.level._now().coordinator._child.wait()
    lone._run(start)
    code = lone.code()
    assert 99 == code
    assert "assertion of DMTCP" in (lone.level.own_failure(code) or "")


def test_variables_that_break_dmtcp_do_not(counting: Counting, programs: Path) -> None:
    counting.environ |= {"DMTCP_COORD_PORT": "", "DMTCP_FORKED_CHECKPOINT": "1", "DMTCP_GZIP": "1"}
    counting.begin(programs)
    counting.resume(counting.save(last=True))
    counting.check()


def test_a_static_program_is_refused_and_never_half_saved(lone: Lone, programs: Path) -> None:
    static = str(programs / "static")
    assert "statically" in (lone.level.probe(lone.work(static, "9", "0")) or "")
    lone.first(static, "2000", "0")
    lone.until_lines(lone.cwd / "count.txt", 3)
    with pytest.raises(SaveFailed, match=r"not (run )?under DMTCP"):
        lone.save()
    assert lone.running.poll() is None


def test_a_static_child_of_a_shell_forbids_the_save(lone: Lone, programs: Path) -> None:
    lone.first("bash", "-c", f"name={programs}/static; $name 2000 0; true")
    lone.until_lines(lone.cwd / "count.txt", 3)
    with pytest.raises(SaveFailed, match="static"):
        lone.save()
    assert lone.running.poll() is None


# ── saves ─────────────────────────────────────────────────────────────────────────────────
@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system can only be mounted by root")
def test_a_full_disk_is_seen_before_it_kills_the_program(
    counting: Counting, programs: Path
) -> None:
    small = counting.rundir.restarts
    small.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", small], check=True)
    try:
        counting.begin(programs)
        with pytest.raises(NotNow, match="are needed"):
            counting.save()
        assert counting.running.poll() is None
    finally:
        subprocess.run(["umount", small], check=True)
    counting.resume(counting.save(last=True))
    counting.check()


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system can only be mounted by root")
def test_a_full_disk_that_was_not_foreseen_is_a_failed_save(
    counting: Counting, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dmtcp, "_check_space", lambda *_: None)
    small = counting.rundir.restarts
    small.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", small], check=True)
    try:
        counting.begin(programs)
        with pytest.raises(SaveFailed, match=r"the program died.*are free") as caught:
            counting.save()
        assert passes(caught.value)  # it says nothing against DMTCP
        assert 99 == counting.code()
    finally:
        subprocess.run(["umount", small], check=True)


def test_uncompressed_images_are_on_the_disk_before_they_count(
    counting: Counting, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DMTCP syncs only what it compresses."""
    counting.begin(programs)
    synced = Synced(monkeypatch)
    synced.check(counting.save(last=True))


def test_a_kill_in_the_middle_of_a_save_leaves_the_restart_before(
    counting: Counting, programs: Path
) -> None:
    counting.begin(programs)
    restart = counting.save()
    timer = threading.Timer(0.05, counting.running.end)
    timer.start()
    with pytest.raises((SaveFailed, NothingNew)):
        counting.save()
        counting.save()
    timer.join()
    counting.resume(restart)
    counting.check()


def test_a_coordinator_that_dies_takes_the_program_along(
    counting: Counting, programs: Path
) -> None:
    counting.begin(programs)
    restart = counting.save()
    counting.level._now().coordinator._child.kill()
    code = counting.code()
    assert 99 == code
    assert counting.level.own_failure(code) is not None
    counting.resume(restart)
    counting.check()


def test_directories_that_are_missing_are_made(counting: Counting, programs: Path) -> None:
    """DMTCP makes one level only, and kills the program for want of the others."""
    counting.begin(programs)
    into = counting.place / "not" / "yet" / "there"
    moment = Moment(until=time.monotonic() + 60)
    counting.level.ask(counting.running, into, moment)
    counting.level.wait(counting.running, into, moment)
    assert len(list(into.glob("*.dmtcp"))) == 1
    counting.check()


def test_a_checkpoint_by_somebody_else_is_waited_for(counting: Counting, programs: Path) -> None:
    """Meanwhile dmtcp_command answers with code 2."""
    counting.begin(programs)
    other = counting.level._now().coordinator.checkpoint()
    restart = counting.save()
    other.communicate()
    counting.resume(restart)
    counting.check()


def test_a_kill_in_the_middle_of_a_trees_save_mixes_nothing(lone: Lone, programs: Path) -> None:
    """The images of a tree get their names one by one."""
    lone.first(PYTHON, str(programs / "tree.py"))
    lone.until_lines(lone.cwd / "up", 1)
    restart = lone.save()
    before = sorted((path.name, path.stat().st_size) for path in restart.path.rglob("*.dmtcp"))
    timer = threading.Timer(0.1, lone.running.end)
    timer.start()
    with pytest.raises((SaveFailed, NothingNew)):
        lone.save()
        lone.save()
    timer.join()
    after = sorted((path.name, path.stat().st_size) for path in restart.path.rglob("*.dmtcp"))
    assert before == after
    lone.resume(restart)
    assert 5 == lone.code()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_program_killed_by_a_signal_says_so(
    counting: Counting, programs: Path, number: signal.Signals
) -> None:
    """Before a checkpoint and after a restart."""
    counting.begin(programs)
    restart = counting.save()
    counting.running.tell(number)
    assert -number == counting.code()
    counting.resume(restart)
    counting.running.tell(number)
    assert -number == counting.code()
    assert counting.level.own_failure(-number) is None


def test_usr2_is_dmtcps_and_a_stray_one_does_no_harm(counting: Counting, programs: Path) -> None:
    counting.begin(programs)
    restart = counting.save()
    counting.running.tell(signal.SIGUSR2)
    time.sleep(1.5)
    assert counting.running.poll() is None
    counting.resume(restart)
    counting.check()


def test_term_reaches_the_program_before_and_after(lone: Lone) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(0.1)"
    )
    lone.first(PYTHON, "-c", code)
    lone.until_lines(lone.output, 1)
    lone.resume(lone.save(last=True))
    lone.running.tell(signal.SIGTERM)
    assert 4 == lone.code()


# ── restarts ──────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(("part", "within_s"), [(0.9, 20.0), (100_000, 5.0), (0, 5.0)])
def test_a_truncated_image_is_given_up_in_time(
    counting: Counting, programs: Path, part: float, within_s: float
) -> None:
    """As if its digest had not told: mtcp_restart crashes, or spins for ever."""
    counting.begin(programs)
    restart = counting.save(last=True)
    image = image_of(restart)
    os.truncate(image, int(part * image.stat().st_size) if part < 1 else int(part))
    began = time.monotonic()
    with pytest.raises(ResumeFailed):
        counting.resume(restart, within_s=within_s)
    assert time.monotonic() - began < within_s + 15
    counting.end()
    assert counting.running.poll() is not None


def test_a_flipped_image_is_told_by_its_digest(counting: Counting, programs: Path) -> None:
    """DMTCP itself would go on with it."""
    from hpc_ckpt.levels.restarts import Restarts

    counting.begin(programs)
    image = image_of(counting.save(last=True))
    with image.open("r+b") as stream:
        stream.seek(image.stat().st_size // 2)
        stream.write(b"\xa5" * 4096)
    said: list[str] = []
    assert [] == list(Restarts(counting.rundir).newest("dmtcp", lambda _, why: said.append(why)))
    assert "digest" in said[0]


def test_restarts_may_be_moved_and_gone_on_from_anywhere(lone: Lone) -> None:
    """Images name the directories beside them by path: a relative one would be looked for in
    the working directory, one in the run directory would be gone."""
    code = "import time\nfor n in range(40):\n print(n, flush=True); time.sleep(0.1)"
    lone.first(PYTHON, "-c", code)
    lone.until_lines(lone.output, 3)
    restart = lone.save(last=True)
    assert any(path.is_dir() for path in restart.path.iterdir())
    moved = lone.place / "elsewhere"
    lone.rundir.root.rename(moved)
    away = moved / restart.path.relative_to(lone.rundir.root)
    lone.cwd = moved
    lone.resume(replace(restart, path=away))
    assert 0 == lone.code()


def test_a_relative_directory_of_images_is_a_trap(tmp_path: Path) -> None:
    """That is why none is ever given: the same flow with the absolute one goes on."""
    code = "import time\nfor n in range(30):\n time.sleep(0.1)"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert 99 == by_hand(tmp_path, Path("images"), elsewhere, [PYTHON, "-c", code])
    assert 0 == by_hand(tmp_path, tmp_path / "absolute", elsewhere, [PYTHON, "-c", code])


def by_hand(place: Path, images: Path, then: Path, argv: list[str]) -> int:
    """Launch in one directory, restart in another one: the exit code."""
    coordinator = Coordinator(find_tool(None, os.environ), place / f"of-{images.name}", os.environ)
    joined = ["-j", "-h", "127.0.0.1", "-p", str(coordinator.port), "--quiet"]
    try:
        launch = ["dmtcp_launch", *joined, "--no-gzip", "--ckptdir", str(images), *argv]
        child = subprocess.Popen(launch, cwd=place)
        time.sleep(1.0)
        with coordinator.checkpoint() as asked:
            assert 0 == asked.wait(30)
        child.kill()
        child.wait()
    finally:
        coordinator.close()
    again = Coordinator(find_tool(None, os.environ), place / f"again-{images.name}", os.environ)
    joined[4] = str(again.port)
    try:
        found = sorted(str(path) for path in (place / images).glob("*.dmtcp"))
        assert found
        restart = ["dmtcp_restart", *joined, *found]
        return subprocess.run(restart, cwd=then, timeout=60, check=False).returncode
    finally:
        again.close()


@pytest.mark.parametrize("what", ["cut", "removed"])
def test_output_that_was_cut_between_links_is_named(
    counting: Counting, programs: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """DMTCP goes on without a word, with a gap."""
    counting.begin(programs, lines=10)
    restart = counting.save(last=True)
    path = counting.cwd / "count.txt"
    assert {str(path)} == set(restart.facts["written"]) - {str(counting.output)}
    counting.resume(restart)
    assert "LOST" not in caplog.text
    counting.end()
    if what == "cut":
        os.truncate(path, 20)
    else:
        path.unlink()
    counting.resume(restart)
    assert counting.code_wanted == counting.code()
    assert f"{path} has {20 if what == 'cut' else 0} bytes" in caplog.text
    lines = path.read_text(errors="replace").splitlines()
    assert counting.most > len(lines)


IN_PLACE = """
import mmap, struct, time
with open("table", "wb") as made:
    made.write(bytes(4096 * 4))
with open("mapped", "wb") as made:
    made.write(bytes(4096 * 4))
table = open("table", "r+b", buffering=0)
with open("mapped", "r+b") as stream:
    mapped = mmap.mmap(stream.fileno(), 0)
for n in range(4000):
    at = 4096 * (n % 4)
    table.seek(at)
    value = struct.unpack("<q", table.read(8))[0] + 1
    table.seek(at)
    table.write(struct.pack("<q", value))
    mapped[at:at + 8] = struct.pack("<q", struct.unpack("<q", mapped[at:at + 8])[0] + 1)
    if n % 100 == 0:
        print(n, flush=True)
    time.sleep(0.002)
"""


def test_a_file_written_in_place_has_the_bytes_of_the_image(lone: Lone) -> None:
    """A kill after the save: what was added since is added again, and must not count twice. Its
    size says nothing; another save is made of the program that went on."""

    def counted(name: str) -> int:
        data = (lone.cwd / name).read_bytes()
        return sum(int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 4096))

    lone.first("bash", "-c", f"{PYTHON} -c '{IN_PLACE}'; exit $(( $? + 3 ))")
    lone.until_lines(lone.output, 3)
    first = lone.save()
    lone.until_lines(lone.output, 8)
    lone.resume(first)
    lone.until_lines(lone.output, 12)
    second = lone.save()
    lone.until_lines(lone.output, 15)
    record = json.loads((second.path / "openfiles.json").read_text())
    copied = {Path(entry["path"]).name for entry in record["files"]}
    assert {"table", "mapped"} <= copied
    lone.resume(second)
    assert 3 == lone.code(), lone.output.read_text()
    assert (4000, 4000) == (counted("table"), counted("mapped"))


# A table that is only read, as by numpy's mmap_mode="r", and one that is written.
READ = """
import mmap, os, time
with open("read", "wb") as made:
    made.write(bytes(4096))
with open("read", "rb") as stream:
    mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
table = open("table", "w+b", buffering=0)
for n in range(10000):
    table.seek(0)
    table.write(b"%d" % n)
    if n % 10 == 0:
        print(n, flush=True)
    time.sleep(0.01)
"""


def test_what_is_only_read_is_not_copied(lone: Lone) -> None:
    """DMTCP opens it for writing while it makes images: so it does with a file of the system, where
    it may. No checkpoint is made again for that."""
    lone.first(PYTHON, "-c", READ)
    lone.until_lines(lone.output, 3)
    asked: list[int] = []
    attempt = lone.level._attempt
    assert attempt is not None
    checkpoint = attempt.coordinator.checkpoint

    def counted() -> subprocess.Popen[bytes]:
        asked.append(1)
        return checkpoint()

    object.__setattr__(attempt.coordinator, "checkpoint", counted)
    for _ in range(4):
        restart = lone.save()
        record = json.loads((restart.path / "openfiles.json").read_text())
        assert ["table"] == [Path(entry["path"]).name for entry in record["files"]]
    assert 4 == len(asked)
    lone.resume(restart)
    lone.until_lines(lone.output, 10)


def test_behind_a_linked_tmpdir_nothing_of_dmtcps_own_is_put_back(tmp_path: Path) -> None:
    """The directory of the link that saved is gone by then, and may not be made again."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    lone = Lone(tmp_path / "link")
    try:
        lone.first(PYTHON, "-c", IN_PLACE)
        lone.until_lines(lone.output, 3)
        restart = lone.save()
        record = json.loads((restart.path / "openfiles.json").read_text())
        assert {"table", "mapped"} == {Path(entry["path"]).name for entry in record["files"]}
        lone.resume(restart)
        assert not (tmp_path / "real" / "scratch-0").exists()
        assert 0 == lone.code(), lone.output.read_text()
    finally:
        lone.end()


# One row in a transaction of its own; the end says what became of all of them.
SQLITE = """
import sqlite3, time
database = sqlite3.connect("db")
database.execute("create table t(k integer primary key, v text)")
for n in range(60):
    database.execute("insert into t values(?, ?)", (n, "x" * 50))
    database.commit()
    print(n, flush=True)
    time.sleep(0.1)
whole = database.execute("pragma integrity_check").fetchall() == [("ok",)]
keys = [key for (key,) in database.execute("select k from t order by k")]
raise SystemExit(3 if whole and keys == list(range(60)) else 4)
"""


def test_sqlite_goes_on_writing_after_a_restart(lone: Lone) -> None:
    """It refuses to, in a file that is another inode than the one it has opened."""
    lone.first(PYTHON, "-c", SQLITE)
    lone.until_lines(lone.output, 5)
    restart = lone.save()
    lone.until_lines(lone.output, 20)
    lone.resume(restart)
    assert 3 == lone.code(), lone.output.read_text()


def test_what_it_prints_goes_where_the_restart_is_told(lone: Lone) -> None:
    """The log of each link has its own."""
    lone.first("bash", "-c", "for i in {1..40}; do echo $i; sleep 0.1; done")
    lone.until_lines(lone.output, 5)
    restart = lone.save(last=True)
    before = lone.output.read_text()
    lone.output = lone.place / "second"
    lone.resume(restart)
    assert 0 == lone.code()
    assert before == (lone.place / "output").read_text()
    assert "40" == lone.output.read_text().split()[-1]


@pytest.mark.skipif(os.geteuid() != 0, reason="every test here is already without root")
def test_no_root_is_needed(programs: Path) -> None:
    """In a process of its own that has given it up."""
    place = Path(tempfile.mkdtemp(prefix="hpc-ckpt-test-"))
    shutil.copy(programs / "count", place)
    os.chown(place, NOBODY, NOBODY)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.chdir(place)
            counting = Counting(place)
            counting.begin(place)
            restart = counting.save(last=True)
            counting.resume(restart)
            counting.check()
            counting.end()
            code = 0
        finally:
            os._exit(code)
    try:
        assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert {NOBODY} == {path.stat().st_uid for path in (place / "run").rglob("*.dmtcp")}
    finally:
        shutil.rmtree(place)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a host another name")
def test_a_restart_on_a_host_of_another_name(counting: Counting, programs: Path) -> None:
    counting.begin(programs)
    restart = counting.save(last=True)
    name = 'hostname elsewhere; exec "$@"'
    counting.before = ("unshare", "--uts", "sh", "-c", name, "sh")
    counting.resume(restart)
    counting.check()


# ── exit codes ────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("word", ["-k", "-q", "-kc"])
def test_code_0_after_somebody_elses_kill_is_not_trusted(
    counting: Counting, programs: Path, word: str
) -> None:
    counting.begin(programs)
    counting.level._now().coordinator._ask(word)
    assert 0 == counting.code()
    time.sleep(0.3)
    assert counting.level.is_complete(counting.work("x"), 0) is False


def test_code_0_of_the_program_itself_counts(counting: Counting, programs: Path) -> None:
    counting.most, counting.code_wanted = 6, 0
    counting.begin(programs)
    counting.check()
    time.sleep(0.3)
    assert counting.level.is_complete(counting.work("x"), 0) is None


# ── chains ────────────────────────────────────────────────────────────────────────────────
# Paced by sleeps: longer than one link on any machine.
NUMPY = """
import time
import numpy as np
rng = np.random.default_rng(3)
a = rng.random((300, 300)); b = np.eye(300)
for n in range(200):
    b = b @ a; b /= np.abs(b).max(); time.sleep(0.05)
print(repr(float(b.sum())), file=open("result", "w"))
"""
TORCH = """
import time
import torch
torch.manual_seed(3)
torch.set_num_threads(2)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters())
for n in range(150):
    x = torch.randn(512, 64)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step(); time.sleep(0.1)
total = sum(p.double().sum().item() for p in model.parameters())
print(total.hex(), file=open("result", "w"))
"""
LOOP = """
import time
value = 1
for n in range(2_000_000):
    value = (value * 31 + n) % 1000003
    if n % 10_000 == 0:
        time.sleep(0.05)
print(value, file=open("result", "w"))
"""
SHELL = (
    "v=1; for ((n=0; n<100000; n++)); do v=$(( (v * 31 + n) % 1000003 )); "
    "if (( n % 500 == 0 )); then sleep 0.05; fi; done; echo $v >result"
)


def run_chain(place: Path, command: list[str], link_time: str) -> subprocess.CompletedProcess[str]:
    spec = {
        "name": "x",
        "command": command,
        "root": "run",
        "level": "auto",
        "chain": {"link_time": link_time, "max_links": 20},
        "checkpoint": {"policy": "every 2 s"},
    }
    (place / "spec.yaml").write_text(json.dumps(spec))
    return subprocess.run(
        [sys.executable, "-m", "hpc_ckpt.cli", "run", "spec.yaml"],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def chain(place: Path, command: list[str], link_time: str = "8s") -> dict[str, str]:
    """Runs a local chain to its end; the level of each link."""
    done = run_chain(place, command, link_time)
    logs = "".join(path.read_text() for path in sorted((place / "run/logs").glob("link-*")))
    assert 0 == done.returncode, done.stdout + done.stderr + logs
    found: dict[str, str] = json.loads((place / "run/control/levels.json").read_text())["chosen"]
    return found


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["{programs}/count", "400", "0"], id="c"),
        pytest.param(["bash", "-c", SHELL], id="bash"),
        pytest.param([PYTHON, "-c", LOOP], id="python"),
        pytest.param([sys.executable, "-c", NUMPY], id="numpy"),
        pytest.param([sys.executable, "-c", TORCH], id="torch with threads"),
    ],
)
def test_a_chain_has_the_result_of_an_uninterrupted_run(
    tmp_path: Path, programs: Path, command: list[str]
) -> None:
    argv = [word.format(programs=programs) if "{programs}" in word else word for word in command]
    alone, chained = tmp_path / "alone", tmp_path / "chained"
    for place in (alone, chained):
        place.mkdir()
    environ = {**os.environ, "OMP_NUM_THREADS": "2"}
    subprocess.run(argv, cwd=alone, env=environ, check=True)
    # A save of PyTorch takes 2 to 7 s, and one is kept free for the end of each link.
    levels = chain(chained, argv, "16s" if TORCH in command else "8s")
    assert {"dmtcp"} == set(levels.values())
    assert len(levels) > 1
    for path in alone.iterdir():
        assert path.read_bytes() == (chained / path.name).read_bytes(), path.name


def test_a_program_that_hangs_makes_no_progress(tmp_path: Path) -> None:
    """What DMTCP itself computes at a restart and at saves does not count."""
    program = "sum(range(3 * 10**7)); print('hangs', flush=True); import time; time.sleep(10**6)"
    done = run_chain(tmp_path, [PYTHON, "-c", program], "7s")
    assert 1 == done.returncode, done.stdout + done.stderr
    status = read_status(RunDir(tmp_path / "run"))
    assert (3, "no progress in two links running") == (len(status.links), status.reason)


def test_what_dmtcp_cannot_save_goes_to_the_next_level_in_a_chain(
    tmp_path: Path, programs: Path
) -> None:
    """A static program behind a variable: found out at the first save. Only its first run is
    longer than a link, on any machine."""
    often = "if [ -e begun ]; then often=5; else often=5000; fi; touch begun"
    command = ["bash", "-c", f"{often}; name={programs}/static; $name $often 0"]
    levels = chain(tmp_path, command, link_time="16s")
    assert "dmtcp" == levels["1"]
    record = json.loads((tmp_path / "run/control/levels.json").read_text())
    assert "not under DMTCP" in record["failed"]["dmtcp"]
    assert "dmtcp" not in [levels[key] for key in levels if key != "1"]


# ── the script for one's own jobs ─────────────────────────────────────────────────────────
def test_the_script_goes_on_falls_back_and_is_done_once(tmp_path: Path, programs: Path) -> None:
    script = resources.find("templates/dmtcp.sh")
    environ = {**os.environ, "CKPT_DIR": "ck", "INTERVAL": "600"}

    def job(lines: int | None) -> tuple[int, str]:
        argv = ["bash", str(script), str(programs / "count"), "120", "0"]
        child = subprocess.Popen(argv, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True)
        counted = tmp_path / "count.txt"
        while lines is not None and child.poll() is None:
            if counted.exists() and len(counted.read_text().splitlines()) >= lines:
                child.send_signal(signal.SIGUSR1)
                break
            time.sleep(0.05)
        said = child.communicate(timeout=60)[1]
        return child.returncode, said

    assert 75 == job(20)[0]
    assert 75 == job(60)[0]
    newest = tmp_path / "ck" / (tmp_path / "ck/newest").read_text().strip()
    image = next(newest.glob("*.dmtcp"))
    os.truncate(image, image.stat().st_size // 2)
    code, said = job(None)
    assert (0, True) == (code, "is damaged" in said), said
    lines = (tmp_path / "count.txt").read_text().splitlines()
    assert [str(n) for n in range(120)] == [line.split()[0] for line in lines]
    before = (tmp_path / "end.txt").stat().st_mtime_ns
    assert (0, True) == (job(None)[0], before == (tmp_path / "end.txt").stat().st_mtime_ns)


def test_the_script_does_not_believe_code_0_after_a_kill(tmp_path: Path, programs: Path) -> None:
    """By somebody's -kc: nothing in the coordinator's log tells it from an end of its own."""
    argv = ["bash", str(resources.find("templates/dmtcp.sh")), str(programs / "count"), "900", "0"]
    child = subprocess.Popen(argv, cwd=tmp_path, env={**os.environ, "CKPT_DIR": "ck"})
    counted = tmp_path / "count.txt"
    while not counted.exists() or counted.read_text().count("\n") < 5:
        assert child.poll() is None
        time.sleep(0.1)
    asked = ["ps", "-ww", "-o", "args=", "--ppid", str(child.pid)]
    words = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    port = Path(words[words.index("--port-file") + 1]).read_text().strip()
    subprocess.run(["dmtcp_command", "-h", "127.0.0.1", "-p", port, "-kc"], check=False)
    assert 1 == child.wait(30)
    assert not (tmp_path / "ck/DONE").exists()


# Without mpi.h, which is not in the packages that bring mpirun: Open MPI's own names.
MPI = r"""
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
struct any;
extern struct any ompi_mpi_comm_world, ompi_mpi_long, ompi_mpi_op_sum;
extern int MPI_Init(int *, char ***), MPI_Finalize(void), MPI_Comm_rank(struct any *, int *);
extern int MPI_Allreduce(void *, void *, int, struct any *, struct any *, struct any *);
int main(int argc, char **argv) {
    int rank;
    long state = 1, mine, all;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(&ompi_mpi_comm_world, &rank);
    FILE *out = rank == 0 ? fopen("count.txt", "a") : NULL;
    for (int i = 0; i < atoi(argv[1]); i++) {
        mine = (state * 31 + rank + i) % 1000003;
        MPI_Allreduce(&mine, &all, 1, &ompi_mpi_long, &ompi_mpi_op_sum, &ompi_mpi_comm_world);
        state = all % 1000003;
        usleep(100000);
        if (out) { fprintf(out, "%d %ld\n", i, state); fflush(out); }
    }
    return MPI_Finalize();
}
"""
MPIRUN = ["mpirun", "--oversubscribe", "--allow-run-as-root", "-np", "2"]


def mpi_program(place: Path) -> tuple[list[str], str]:
    """The command, and what it writes if nothing interrupts it."""
    (place / "mpi.c").write_text(MPI)
    build = ["gcc", "-O1", "-o", "mpi", "mpi.c", "-l:libmpi.so.40"]
    if subprocess.run(build, cwd=place, check=False, capture_output=True).returncode != 0:
        pytest.skip("no Open MPI 4 to be linked with")
    command = [*MPIRUN, "./mpi", "80"]
    subprocess.run(command, cwd=place, check=True)
    alone = (place / "count.txt").read_text()
    (place / "count.txt").unlink()
    return command, alone


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_the_script_takes_mpirun_on_one_node(tmp_path: Path) -> None:
    """With mpirun itself under DMTCP, and Open MPI's files where they stay."""
    command, alone = mpi_program(tmp_path)
    counted = tmp_path / "count.txt"
    script = ["bash", str(resources.find("templates/dmtcp.sh"))]
    environ = {**os.environ, "CKPT_DIR": "ck", "INTERVAL": "600"}
    first = subprocess.Popen([*script, *command], cwd=tmp_path, env=environ)
    while not counted.exists() or counted.read_text().count("\n") < 20:
        assert first.poll() is None
        time.sleep(0.1)
    first.send_signal(signal.SIGUSR1)
    assert 75 == first.wait(60)
    for path in Path("/dev/shm").glob("vader_segment.*"):  # as on another node
        if any((tmp_path / "ck").rglob(f"{path.name}*")):
            path.unlink()
    assert (
        0 == subprocess.run([*script, *command], cwd=tmp_path, env=environ, timeout=90).returncode
    )
    assert alone == counted.read_text()


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_mpirun_at_level_dmtcp_is_a_chain(tmp_path: Path) -> None:
    """The notice file ends a link of it, exit code 75 says that it is saved."""
    command, alone = mpi_program(tmp_path)
    counted = tmp_path / "count.txt"
    words = ["run", "--root", "run", "--link-time", "90 s", "--max-links", "4"]
    chain = subprocess.Popen(
        [sys.executable, "-m", "hpc_ckpt.cli", *words, "--set", "level=dmtcp", "--", *command],
        cwd=tmp_path,
    )
    while not counted.exists() or counted.read_text().count("\n") < 20:
        assert chain.poll() is None
        time.sleep(0.1)
    rundir = RunDir(tmp_path / "run")
    rundir.give_notice(1, "test")
    assert 0 == chain.wait(120)
    assert alone == counted.read_text()
    links = read_status(rundir).links
    assert (2, "complete") == (len(links), links[-1].cause)
