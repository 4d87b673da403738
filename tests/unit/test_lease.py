"""Leases: generations are unique and dense, holders are waited for, newer ones fence older."""

import errno
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt import fsio, lease
from hpc_ckpt.errors import Fenced, RootError
from hpc_ckpt.lease import Holder, Waiting
from hpc_ckpt.rundir import MANIFEST_NAME, CheckpointKey, RunDir


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0
        self.after: dict[float, Callable[[], None]] = {}

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for moment in sorted(self.after):
            if moment <= self.now:
                self.after.pop(moment)()


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    directory = RunDir(tmp_path / "run")
    directory.create()
    return directory


def waiting(clock: Clock, alive: bool | None, limit_s: float = 60.0) -> tuple[Waiting, list[float]]:
    asked: list[float] = []

    def probe(holder: Holder) -> bool | None:
        asked.append(clock.now)
        return alive

    return Waiting(probe=probe, limit_s=limit_s, sleep=clock.sleep, clock=clock), asked


def take(rundir: RunDir, alive: bool | None = False) -> lease.Lease:
    return lease.acquire(rundir, Holder.here(), waiting(Clock(), alive)[0])


def test_generations_count_up_from_one(rundir: RunDir) -> None:
    """Link number = generation: it grows by one with every attempt."""
    taken = [take(rundir).generation for _ in range(3)]
    assert [1, 2, 3] == taken
    assert [1, 2, 3] == lease.generations(rundir)


def test_a_newer_generation_fences_an_older_one(rundir: RunDir) -> None:
    """Every commit looks at the lease."""
    old = take(rundir)
    old.check()
    take(rundir)
    with pytest.raises(Fenced, match="generation 1 was overtaken by generation 2"):
        old.check()


def test_a_released_holder_is_not_waited_for_nor_asked_about(rundir: RunDir) -> None:
    """A link that gave back its lease costs the next one nothing."""
    take(rundir).release()
    clock = Clock()
    wait, asked = waiting(clock, alive=True)
    assert 2 == lease.acquire(rundir, Holder.here(), wait).generation
    assert (0.0, []) == (clock.now, asked)


def test_a_lease_is_released_although_its_program_may_live(rundir: RunDir) -> None:
    """The mark says so; a shim that has given the lease back itself knows better."""
    take(rundir).release(program_left=True)
    assert (True, False) == (lease.released(rundir, 1), lease.program_gone(rundir, 1))
    (rundir.lease / "00000001.left").unlink()
    assert lease.program_gone(rundir, 1)
    second = take(rundir)
    assert not lease.program_gone(rundir, 2)
    (rundir.lease / "00000002.released").touch()
    second.release(program_left=True)
    assert lease.program_gone(rundir, 2)


@pytest.mark.parametrize(
    ("mark", "look"), [("left", lease.program_gone), ("released", lease.released)]
)
def test_a_mark_that_storage_does_not_show_now_is_not_missing(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, mark: str, look: Callable[..., bool]
) -> None:
    """Path.exists() of Python 3.14 says that it is: a program would be begun beside another."""
    take(rundir).release(program_left=True)
    real = os.stat

    def stat(path: Any, *arguments: Any, **more: Any) -> os.stat_result:
        if str(path).endswith(f".{mark}"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(path, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        patch.setattr(Path, "exists", os.path.exists)
        with pytest.raises(OSError, match="Stale"):
            look(rundir, 1)


def test_a_mark_that_cannot_be_written_keeps_the_lease(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release without it would say that the program is gone."""
    taken, real = take(rundir), fsio.write_atomic

    def full(path: Path, data: bytes) -> None:
        if path.suffix == ".left":
            raise OSError(errno.ENOSPC, "full")
        real(path, data)

    monkeypatch.setattr(fsio, "write_atomic", full)
    taken.release(program_left=True)
    assert not lease.released(rundir, 1)


def test_a_living_holder_is_waited_for_until_it_releases(rundir: RunDir) -> None:
    """Its final save must not be thrown away."""
    first = take(rundir)
    clock = Clock()
    clock.after[12.0] = first.release
    wait, asked = waiting(clock, alive=True)
    assert 2 == lease.acquire(rundir, Holder.here(), wait).generation
    assert 12.0 == clock.now
    assert [0.0] == asked


def test_the_wait_is_bounded_and_the_scheduler_rarely_asked(rundir: RunDir) -> None:
    """A holder that never answers is overtaken; it is fenced from then on."""
    first = take(rundir)
    clock = Clock()
    wait, asked = waiting(clock, alive=True, limit_s=65.0)
    assert 2 == lease.acquire(rundir, Holder.here(), wait).generation
    assert 65.0 == pytest.approx(clock.now)
    assert [0.0, 30.0, 60.0] == asked
    with pytest.raises(Fenced):
        first.check()


@pytest.mark.parametrize(("alive", "waited"), [(False, 0.0), (None, 65.0)])
def test_a_dead_holder_costs_nothing_an_unknown_one_the_whole_wait(
    rundir: RunDir, alive: bool | None, waited: float
) -> None:
    """No answer is not an answer."""
    take(rundir)
    clock = Clock()
    wait, _ = waiting(clock, alive=alive, limit_s=65.0)
    lease.acquire(rundir, Holder.here(), wait)
    assert waited == pytest.approx(clock.now)


def test_no_claim_is_left_behind(rundir: RunDir) -> None:
    """lease/ holds generations and releases, nothing else."""
    take(rundir).release()
    assert {"00000001", "00000001.released"} == {path.name for path in rundir.lease.iterdir()}


def _take_many(root: Path, count: int, taken: "multiprocessing.Queue[int]") -> None:
    for _ in range(count):
        held = take(RunDir(root))
        taken.put(held.generation)
        held.release()


def test_eight_processes_never_share_a_generation(rundir: RunDir) -> None:
    """link(2) decides: unique, dense, monotone."""
    context = multiprocessing.get_context("spawn")
    taken: multiprocessing.Queue[int] = context.Queue()
    workers = [context.Process(target=_take_many, args=(rundir.root, 10, taken)) for _ in range(8)]
    for worker in workers:
        worker.start()
    seen = sorted(taken.get(timeout=60) for _ in range(80))
    for worker in workers:
        worker.join()
    assert list(range(1, 81)) == seen


def test_a_process_is_known_by_pid_boot_and_start(rundir: RunDir) -> None:
    """A reused pid is somebody else."""
    me = Holder.here()
    assert lease.alive_here(me) is True
    assert lease.alive_here(Holder(**{**vars(me), "started": me.started + 1})) is False
    assert lease.alive_here(Holder(**{**vars(me), "boot": "another"})) is False
    assert lease.alive_here(Holder(**{**vars(me), "host": "elsewhere"})) is None


def test_a_killed_process_does_not_hold_a_root(rundir: RunDir) -> None:
    """After SIGKILL the same command simply goes on."""
    script = (
        "import sys, os, signal; from hpc_ckpt import lease; from hpc_ckpt.rundir import RunDir\n"
        "lease.acquire_standalone(RunDir(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(rundir.root)], check=False)
    assert 2 == lease.acquire_standalone(rundir).generation


def test_two_living_processes_cannot_share_a_root(rundir: RunDir) -> None:
    """The second is told who has it and what to do."""
    lease.acquire_standalone(rundir)
    with pytest.raises(RootError, match=f"in use by process {os.getpid()} .*choose another root"):
        lease.acquire_standalone(rundir)


def test_a_root_of_a_submitted_chain_is_not_taken_by_hand(rundir: RunDir) -> None:
    """It would fence the link that may be running on another host."""
    holder = Holder(job="812_3", host="another-host", pid=1, boot="b", started=1.0)
    lease.acquire(rundir, holder, waiting(Clock(), False)[0])
    with pytest.raises(RootError, match=r"job 812_3.*hpc-ckpt stop"):
        lease.acquire_standalone(rundir)


def test_a_damaged_lease_file_still_counts_as_a_generation(rundir: RunDir) -> None:
    """Its number fences; only its holder is unknown."""
    (rundir.lease / "00000004").write_text("{broken")
    assert lease.holder_of(rundir, 4) is None
    assert 5 == take(rundir).generation


def test_an_unwritable_root_is_the_users_error(tmp_path: Path) -> None:
    """What, where, and exit code 2."""
    rundir = RunDir(tmp_path / "never-made")
    with pytest.raises(RootError, match="cannot take a lease") as caught:
        take(rundir)
    assert 2 == caught.value.exit_code


def _start_at_once(
    root: Path, ready: Any, told: "multiprocessing.Queue[str]", over: Any, linked: bool = False
) -> None:
    ready.wait()
    try:
        if linked:
            lease.join(RunDir(root), 1)
        else:
            lease.acquire_standalone(RunDir(root))
        told.put("started")
        over.wait(30)
    except RootError:
        told.put("refused")


@pytest.mark.parametrize("linked", [False, True], ids=["by hand", "in a link"])
def test_of_several_that_start_at_once_one_gets_the_root(rundir: RunDir, linked: bool) -> None:
    """The others are refused, not fenced a moment later."""
    context = multiprocessing.get_context("spawn")
    ready, over, told = context.Barrier(4), context.Event(), context.Queue()
    workers = [
        context.Process(target=_start_at_once, args=(rundir.root, ready, told, over, linked))
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    answers = sorted(told.get(timeout=60) for _ in workers)
    over.set()
    for worker in workers:
        worker.join()
    assert ["refused", "refused", "refused", "started"] == answers


def test_a_link_that_was_made_although_it_is_said_to_exist_is_ours(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS repeats a request whose answer was lost, and finds its own work."""
    real = os.link

    def repeated(source: Path, target: Path) -> None:
        real(source, target)
        real(source, target)

    monkeypatch.setattr(os, "link", repeated)
    assert 1 == take(rundir, alive=True).generation
    assert [1] == lease.generations(rundir)


def test_a_claim_that_was_swept_while_it_waited_is_written_again(rundir: RunDir) -> None:
    """Others take a file of that name for one that a killed process left, after a minute."""
    take(rundir)
    clock = Clock()
    swept: list[str] = []

    def sweep() -> None:
        for path in rundir.lease.glob(".claim*"):
            swept.append(path.name)
            path.unlink()

    clock.after[10.0] = sweep
    taken = lease.acquire(rundir, Holder.here(), waiting(clock, alive=True)[0])
    assert (2, 1) == (taken.generation, len(swept))
    assert [] == list(rundir.lease.glob(".claim*"))
    assert Holder.here() == lease.holder_of(rundir, 2)


def as_another(rundir: RunDir, number: int) -> Holder:
    """A living process that is not this one has that seat."""
    pid = os.getppid()
    other = Holder(**{**vars(Holder.here()), "pid": pid, "started": lease._ticks(pid)})
    lease._seat_file(rundir, 1, number).write_text(json.dumps(vars(other)))
    return other


def test_two_programs_of_one_link_cannot_both_publish(rundir: RunDir) -> None:
    """They would share generation and checkpoints, and restore each other's weights."""
    other = as_another(rundir, 1)
    with pytest.raises(RootError, match=f"process {other.pid} on .*only one program of a link"):
        lease.join(rundir, 1)
    lease._seat_file(rundir, 1, 1).unlink()
    assert 1 == lease.join(rundir, 1).generation


def test_storage_may_show_another_owner(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with all_squash, or NFSv4 that maps no ids: what is its own is its own there too."""
    other = os.geteuid() + 1
    monkeypatch.setattr("os.geteuid", lambda: other)
    assert 1 == lease.join(rundir, 1).generation
    taken = take(rundir)
    holder = lease.holder_of(rundir, taken.generation)
    assert Holder.here() == holder
    assert not holder.is_foreign
    assert [] == list(rundir.lease.glob(".owner*"))


def test_a_process_that_begins_anew_by_exec_is_not_in_its_own_way(rundir: RunDir) -> None:
    """It has the same number and the same start."""
    lease.join(rundir, 1)
    lease.join(rundir, 1).leave()
    assert ["00000001.program-1"] == [path.name for path in rundir.lease.iterdir()]


def test_of_two_that_find_room_in_one_moment_not_both_get_in(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One left between the look of the first and its link."""
    real = lease._linked

    def linked(rundir: RunDir, seat: Path) -> bool:
        as_another(rundir, 2)
        return real(rundir, seat)

    monkeypatch.setattr(lease, "_linked", linked)
    with pytest.raises(RootError, match="only one program of a link"):
        lease.join(rundir, 1)
    assert ["00000001.program-2"] == [path.name for path in rundir.lease.iterdir()]


def test_a_program_that_was_killed_makes_room_for_the_next_of_its_link(rundir: RunDir) -> None:
    """A launcher starts its worker again in the same link."""
    script = (
        "import sys, os, signal; from hpc_ckpt import lease; from hpc_ckpt.rundir import RunDir\n"
        "lease.join(RunDir(sys.argv[1]), 1); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(rundir.root)], check=False)
    lease.join(rundir, 1)
    assert 2 == len(list(rundir.lease.glob("00000001.program-*")))


def test_a_root_that_takes_no_file_does_not_keep_a_link_from_its_work(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full storage is normal: what can be saved elsewhere still is."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(fsio, "write_atomic", full)
    joined = lease.join(rundir, 1)
    joined.leave()
    assert 1 == joined.generation


# ── files that a purge of old ones takes ──────────────────────────────────────────────────
def test_a_purged_lease_keeps_nobody_from_saving(rundir: RunDir) -> None:
    """Its directory is the same: the run directory is there, and no newer generation in it."""
    held = lease.acquire_standalone(rundir)
    lease.file_of(rundir, 1).unlink()
    held.check()
    lease.file_of(rundir, 2).touch()
    with pytest.raises(Fenced):
        held.check()


def test_another_directory_in_its_place_does_not_count(rundir: RunDir, tmp_path: Path) -> None:
    held = lease.acquire_standalone(rundir)
    rundir.root.rename(tmp_path / "away")
    for bare in (False, True):
        if bare:
            rundir.create()
        with pytest.raises(FileNotFoundError, match="the lease is not there any more"):
            held.check()


def test_generations_go_on_above_what_was_saved(rundir: RunDir) -> None:
    """From a lower one nothing would be chosen: purged leases, or a copy without them."""
    saved = rundir.checkpoints / CheckpointKey(3, 30).directory_name
    saved.mkdir()
    (saved / MANIFEST_NAME).touch()
    assert 4 == lease.acquire_standalone(rundir).generation


def test_what_was_saved_and_cannot_be_read_counts_as_well(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bad directory, however old, must not keep a program from starting."""
    (rundir.checkpoints / CheckpointKey(3, 30).directory_name).mkdir()

    def broken(path: object) -> bool:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(fsio, "is_file", broken)
    assert 4 == lease.acquire_standalone(rundir).generation


def test_no_generation_is_taken_where_nobody_can_tell_what_was_saved(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that cannot be listed is not an empty one."""
    real = os.listdir

    def listdir(path: Any) -> list[str]:
        if Path(path) == rundir.checkpoints:
            raise OSError(errno.EIO, "broken")
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    with pytest.raises(OSError, match="broken"):
        lease.acquire_standalone(rundir)
    assert [] == lease.generations(rundir)
