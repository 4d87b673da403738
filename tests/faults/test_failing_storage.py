"""Failure is normal: full disk, quota, storage that hangs. Training goes on and says so."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_ckpt import Checkpointer, LinkEnded, events, fsio, lease
from hpc_ckpt.engine import pacing, underway
from hpc_ckpt.engine.orders import Order
from hpc_ckpt.engine.snapshot import SLOTS, Camera
from hpc_ckpt.engine.underway import STUCK_S, UnderWay
from hpc_ckpt.errors import NoCheckpoint
from hpc_ckpt.events import Event, EventLog
from hpc_ckpt.format.defects import Defect, DefectKind
from hpc_ckpt.rundir import Done, Outcome, Result, RunDir
from hpc_ckpt.runtime.session import known_save_s
from hpc_ckpt.state.data import DataState
from hpc_ckpt.testing import FaultyTier
from hpc_ckpt.tiers.staging import DirectoryStaging

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    for name in list(os.environ):
        if name.startswith("HPC_CKPT"):
            monkeypatch.delenv(name)
    return RunDir(tmp_path / "run")


@pytest.fixture
def tier(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> FaultyTier:
    """The run's own tier, made to fail on demand."""
    faulty = FaultyTier(rundir.checkpoints, name="root")
    monkeypatch.setattr("hpc_ckpt.tiers.stack.DirectoryTier", lambda _path, name: faulty)
    return faulty


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Storage that hangs at the first byte of a shard until the event is set."""
    opened = threading.Event()
    fsio.observe(lambda point: opened.wait(60) if point == "shard.opened" else None)
    yield opened
    opened.set()
    fsio.observe(None)


def short_patience(monkeypatch: pytest.MonkeyPatch, stuck_s: float, *, hangs: int = 1) -> None:
    """Until so many saves were given up: a well one that follows may take as long as a slow disk
    does, and is not taken for another that hangs."""
    given_up, real = list[Order](), UnderWay._give_up

    def give_up(self: UnderWay, order: Order) -> None:
        given_up.append(order)
        if len(given_up) == hangs:
            monkeypatch.setattr(underway, "STUCK_S", STUCK_S)
        real(self, order)

    monkeypatch.setattr(underway, "STUCK_S", stuck_s)
    monkeypatch.setattr(UnderWay, "_give_up", give_up)


def recorded(rundir: RunDir, event: Event) -> list[dict[str, Any]]:
    paths = sorted(rundir.events.glob("*.jsonl"))
    return [r for path in paths for r in events.read(path) if r["event"] == event.value]


def outcome(rundir: RunDir) -> Outcome:
    found = rundir.outcome(1)
    assert found is not None
    return found


def failed_save(ckpt: Checkpointer) -> None:
    """Save at this step and wait until it has failed, without asking how."""
    pending = ckpt.save()
    while not pending.done():
        time.sleep(0.001)


# ── background failures ───────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("operation", ["stage", "write_shard", "commit"])
def test_a_failed_save_warns_once_and_training_goes_on(
    rundir: RunDir, tier: FaultyTier, operation: str
) -> None:
    """The event and one warning at the next step(); the next save works again."""
    with Checkpointer(rundir.root) as ckpt:
        ckpt.step()
        tier.fail_at(operation, FULL, times=1)
        failed_save(ckpt)
        with pytest.warns(RuntimeWarning, match="No space left on device"):
            ckpt.step()
        ckpt.step()
        ckpt.save(wait=True)
    (failure,) = recorded(rundir, Event.SAVE_FAILED)
    assert (1, "OSError: [Errno 28] No space left on device") == (
        failure["step"], failure["error"],
    )  # fmt: skip
    assert Done(1, 3) == rundir.done()
    assert not list(rundir.checkpoints.glob(".tmp-*"))


def test_strict_makes_it_fatal(rundir: RunDir, tier: FaultyTier) -> None:
    """strict=True raises the error at the next step()."""
    with (
        pytest.raises(OSError, match="No space left"),
        Checkpointer(rundir.root, strict=True) as ckpt,
    ):
        ckpt.step()
        tier.fail_at("write_shard", FULL)
        failed_save(ckpt)
        ckpt.step()
    assert (Result.FAILED, None) == (outcome(rundir).outcome, rundir.done())


def test_who_waits_for_a_save_is_told_and_nobody_twice(rundir: RunDir, tier: FaultyTier) -> None:
    """wait() raises the error; the next step() does not warn of it again."""
    with Checkpointer(rundir.root) as ckpt:
        ckpt.step()
        tier.fail_at("write_shard", FULL, times=1)
        with pytest.raises(OSError, match="No space left"):
            ckpt.save(wait=True)
        ckpt.step()


def test_a_full_disk_is_not_asked_at_every_step(rundir: RunDir, tier: FaultyTier) -> None:
    """After a failed policy save the next attempt waits for the policy or a minute."""
    tier.fail_at("write_shard", FULL)
    with pytest.warns(RuntimeWarning), Checkpointer(rundir.root, policy="every 50 ms") as ckpt:
        began = time.monotonic()
        while time.monotonic() < began + 0.4:
            ckpt.step()
            time.sleep(0.001)
        tier.heal()
    assert 1 <= len(recorded(rundir, Event.SAVE_FAILED)) <= 9


def test_retention_that_fails_hurts_no_checkpoint(rundir: RunDir, tier: FaultyTier) -> None:
    """The commit stands; the event says what could not be removed."""
    with Checkpointer(rundir.root, keep=1) as ckpt:
        tier.fail_at("remove", OSError(errno.EIO, "Input/output error"))
        for _ in ckpt.steps(3):
            ckpt.step()
            ckpt.save(wait=True)
    assert len(rundir.committed()) >= 3
    assert "Input/output error" in recorded(rundir, Event.RETENTION_FAILED)[0]["error"]
    assert rundir.done() is not None


# ── the final save fails ──────────────────────────────────────────────────────────────────
def test_a_failed_final_save_leaves_the_newest_checkpoint_as_outcome(
    rundir: RunDir, tier: FaultyTier
) -> None:
    """The link still ends; the outcome names the step that is saved, and the failure."""
    with pytest.raises(LinkEnded), Checkpointer(rundir.root) as ckpt:
        ckpt.step()
        ckpt.save(wait=True)
        tier.fail_at("write_shard", FULL)
        os.kill(os.getpid(), signal.SIGTERM)
        ckpt.step()
    found = outcome(rundir)
    assert (Result.SAVED, 1) == (found.outcome, found.step)
    assert found.reason.startswith("notice: SIGTERM; the final save failed (OSError: ")


def test_a_failed_final_save_with_nothing_before_it_is_a_failure(
    rundir: RunDir, tier: FaultyTier
) -> None:
    """Nothing was ever saved, so nothing may be claimed."""
    tier.fail_at("write_shard", FULL)
    with pytest.raises(LinkEnded), Checkpointer(rundir.root) as ckpt:
        os.kill(os.getpid(), signal.SIGTERM)
        ckpt.step()
    found = outcome(rundir)
    assert (Result.FAILED, None) == (found.outcome, found.step)
    assert "nothing was ever saved" in found.reason


def test_completion_needs_its_checkpoint(rundir: RunDir, tier: FaultyTier) -> None:
    """If the last checkpoint cannot be written the error is raised, and there is no DONE."""
    with pytest.raises(OSError, match="No space left"), Checkpointer(rundir.root) as ckpt:
        ckpt.step()
        tier.fail_at("commit", FULL)
    assert (None, None) == (rundir.done(), rundir.outcome(1))


def test_work_that_is_complete_stays_so_whatever_storage_does_then(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old manifest that could not be looked at after DONE was written made the program fail,
    and kept its lease and its last events from being given away."""
    real_stat, real_done = os.stat, RunDir.write_done

    def stat(path: Any, *arguments: Any, **more: Any) -> os.stat_result:
        if str(path).endswith("step-000000001-g00000001/MANIFEST.json"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real_stat(path, *arguments, **more)

    def write_done(self: RunDir, done: Done) -> None:
        real_done(self, done)
        monkeypatch.setattr(os, "stat", stat)

    monkeypatch.setattr(RunDir, "write_done", write_done)
    with Checkpointer(rundir.root, keep=5) as ckpt:
        ckpt.step()
        ckpt.save(wait=True)
        ckpt.step()
    with pytest.raises(OSError, match="Input/output error"):
        rundir.done()
    monkeypatch.undo()
    (ended,) = recorded(rundir, Event.ENDED)
    assert (True, Done(1, 2), True) == (ended["complete"], rundir.done(), lease.released(rundir, 1))


def test_the_lease_is_given_back_whatever_goes_wrong_before(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: DataState) -> None:
        raise RuntimeError("a data worker is gone")

    monkeypatch.setattr(DataState, "close", broken)
    with pytest.raises(RuntimeError, match="data worker"), Checkpointer(rundir.root) as ckpt:
        ckpt.step()
    assert lease.released(rundir, 1)
    monkeypatch.undo()
    with Checkpointer(rundir.root) as ckpt:
        assert 1 == ckpt.global_step
    assert [True] == [record["complete"] for record in recorded(rundir, Event.ENDED)]


# ── restore ───────────────────────────────────────────────────────────────────────────────
@pytest.mark.usefixtures("impatient")
def test_storage_that_cannot_be_read_is_not_a_fresh_start(rundir: RunDir, tier: FaultyTier) -> None:
    """Starting from nothing because of a file system's bad day would throw the work away."""
    with Checkpointer(rundir.root) as ckpt:
        ckpt.step()
    tier.fail_at("open", OSError(errno.EIO, "Input/output error"))
    with pytest.raises(NoCheckpoint, match="Input/output error"), Checkpointer(rundir.root):
        pass
    tier.heal()
    with Checkpointer(rundir.root) as ckpt:
        assert 1 == ckpt.global_step


def test_when_all_are_broken_nothing_is_started_nor_removed(rundir: RunDir) -> None:
    """A bad node must not cost the work: a person decides, and is told how."""
    with Checkpointer(rundir.root) as ckpt:
        ckpt.step()
    for shard in rundir.checkpoints.glob("*/rank-*"):
        shard.write_bytes(shard.read_bytes()[:-1])
    before = rundir.committed()
    with pytest.raises(NoCheckpoint, match=r"shard-size.*Move it away to start afresh"):
        Checkpointer(rundir.root).__enter__()
    assert before == rundir.committed()


def test_the_training_thread_writes_no_events(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that hangs while a line is written holds up another thread, not training."""
    writers: list[str] = []
    write = EventLog._write

    def noted(log: EventLog, lines: list[str]) -> None:
        writers.append(threading.current_thread().name)
        write(log, lines)

    with Checkpointer(rundir.root, policy="every 1 steps") as ckpt:
        monkeypatch.setattr(EventLog, "_write", noted)
        for _ in ckpt.steps(20):
            ckpt.step()
            time.sleep(0.1)
        seen = set(writers)
    assert seen and "MainThread" not in seen


# ── storage that hangs ────────────────────────────────────────────────────────────────────
def test_hung_storage_never_blocks_training(rundir: RunDir, gate: threading.Event) -> None:
    """Steps go on while a save hangs; leaving with an exception does not wait for long."""
    with Checkpointer(rundir.root, policy="every 1 steps") as ckpt:
        began = time.monotonic()
        for _ in ckpt.steps(100):
            ckpt.step()
        assert time.monotonic() - began < 5
        assert [] == rundir.committed()
        gate.set()


def test_a_save_that_hangs_is_said_once(
    rundir: RunDir, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One event and one warning, however long it lasts; training goes on."""
    short_patience(monkeypatch, 0.1)
    with Checkpointer(rundir.root, policy="every 1000 steps", w=torch.ones(2)) as ckpt:
        ckpt.step()
        pending = ckpt.save()
        with pytest.warns(RuntimeWarning, match="hangs in tier") as caught:
            for _ in range(30):
                time.sleep(0.01)
                ckpt.step()
        assert 1 == len(caught)
        gate.set()
        pending.wait(10)
    assert [1] == [record["step"] for record in recorded(rundir, Event.SAVE_STUCK)]


def test_a_last_save_that_hangs_is_said_once_and_waited_for(
    rundir: RunDir,
    gate: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """There is no other place and no end of the link: a program that leaves must not be silent."""
    monkeypatch.setattr(underway, "STUCK_S", 0.1)

    def open_later() -> None:
        end = time.monotonic() + 20
        while not recorded(rundir, Event.SAVE_STUCK) and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(2.5)  # two looks
        gate.set()

    opener = threading.Thread(target=open_later, daemon=True)
    with Checkpointer(rundir.root, policy="every hour", w=torch.ones(2)) as ckpt:
        ckpt.step()
        opener.start()
    opener.join(30)
    assert [1] == [record["step"] for record in recorded(rundir, Event.SAVE_STUCK)]
    assert 1 == sum("it is waited for" in message for message in caplog.messages)
    assert rundir.done() == Done(1, 1)


def test_a_tier_that_hangs_is_avoided(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run directory is well: the next save goes there, and the final one, too."""
    short_patience(monkeypatch, 0.1)
    opened, real = threading.Event(), DirectoryStaging.write_shard

    def hanging(self: Any, *arguments: Any) -> Any:
        if "fast" in self.path.parts:
            opened.wait(60)
        return real(self, *arguments)

    monkeypatch.setattr(DirectoryStaging, "write_shard", hanging)
    tiers = [str(tmp_path / "fast")]
    with Checkpointer(rundir.root, policy="every 1000 steps", tiers=tiers, w=torch.ones(2)) as ckpt:
        ckpt.step()
        ckpt.save()
        time.sleep(0.3)
        with pytest.warns(RuntimeWarning, match="hangs in tier"):
            ckpt.step()
        ckpt.save(wait=True)
        assert [2] == [key.step for key in rundir.committed()]
        opened.set()


def test_a_save_that_waits_behind_one_that_hangs_goes_to_the_run_directory(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had begun before anybody knew; both buffers would be lost to the tier that hangs, and
    nothing could be saved any more."""
    short_patience(monkeypatch, 0.3)
    opened, real = threading.Event(), DirectoryStaging.write_shard

    def hanging(self: Any, *arguments: Any) -> Any:
        if "fast" in self.path.parts:
            opened.wait(60)
        return real(self, *arguments)

    monkeypatch.setattr(DirectoryStaging, "write_shard", hanging)
    tiers, weight = [str(tmp_path / "fast")], torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Checkpointer(
            rundir.root, policy="every 1 steps", tiers=tiers, keep=50, w=weight
        ) as ckpt:
            end = time.monotonic() + 10
            while len(rundir.committed()) < 3 and time.monotonic() < end:
                weight += 1
                ckpt.step()
                time.sleep(0.01)
            committed = [key.step for key in rundir.committed()]
            opened.set()
    assert len(committed) >= 3
    assert {"fast"} == {Path(r["tier"]).name for r in recorded(rundir, Event.SAVE_STUCK)}


def test_the_last_save_takes_no_third_buffer(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One save hangs and one waits behind it: the one that waits makes room for the last."""
    opened, real = threading.Event(), DirectoryStaging.write_shard

    def hanging(self: Any, *arguments: Any) -> Any:
        if "fast" in self.path.parts:
            opened.wait(60)
        return real(self, *arguments)

    monkeypatch.setattr(DirectoryStaging, "write_shard", hanging)
    tiers, weight = [str(tmp_path / "fast")], torch.ones(2)
    with Checkpointer(rundir.root, policy="every 1 steps", tiers=tiers, w=weight) as ckpt:
        engine = ckpt._entered().engine
        while engine._under_way.count < 2:
            weight += 1
            ckpt.step()
            time.sleep(0.005)
        short_patience(monkeypatch, 0.2)
        weight += 1
        ckpt.save(wait=True)
        assert [ckpt.global_step] == [key.step for key in rundir.committed()]
        assert SLOTS == len(engine._camera._slots)
        opened.set()
    skipped = [r["reason"] for r in recorded(rundir, Event.SAVE_SKIPPED)]
    assert 1 == sum("hangs" in reason for reason in skipped)


def hung_saves(ckpt: Checkpointer, weight: torch.Tensor, count: int) -> None:
    """Each is waited for until it hangs."""
    for _ in range(count):
        weight += 1
        ckpt.step()
        with pytest.warns(RuntimeWarning, match="not waited for any longer: the save of step"):
            ckpt.save(wait=True)


def slots(ckpt: Checkpointer) -> int:
    return len(ckpt._entered().engine._camera._slots)


def test_saves_that_hang_take_two_buffers_and_no_more(
    rundir: RunDir, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often one is waited for: the next says what hangs, and where; training goes on."""
    short_patience(monkeypatch, 0.2, hangs=SLOTS)
    weight = torch.ones(2)
    with Checkpointer(rundir.root, policy="every hour", w=weight) as ckpt:
        hung_saves(ckpt, weight, SLOTS)
        for _ in range(2):
            weight += 1
            ckpt.step()
            where = re.escape(f"the save of step 1 hangs in tier root ({rundir.checkpoints})")
            with pytest.warns(RuntimeWarning, match=f"no buffer is free: {where} since .*step 2"):
                pending = ckpt.save(wait=True)
            assert pending.done()
        assert SLOTS == slots(ckpt)
        gate.set()
    assert [3, 4] == [r["step"] for r in recorded(rundir, Event.SAVE_FAILED)]
    assert rundir.done() == Done(1, 4)


def test_strict_raises_what_keeps_the_buffers(
    rundir: RunDir, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does for a save that hangs itself."""
    short_patience(monkeypatch, 0.2, hangs=SLOTS)
    with Checkpointer(rundir.root, policy="every hour", strict=True) as ckpt:
        for _ in range(SLOTS):
            ckpt.step()
            with pytest.raises(TimeoutError, match="hangs in tier root"):
                ckpt.save(wait=True)
        ckpt.step()
        with pytest.raises(TimeoutError, match="no buffer is free: the save of step 1 hangs"):
            ckpt.save(wait=True)
        ckpt.step()  # who was told is not told again
        gate.set()


@pytest.mark.parametrize("complete", [False, True])
def test_the_last_save_takes_a_third_buffer_where_two_hang(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, complete: bool
) -> None:
    """Storage that has come back by then keeps the work of the link."""
    short_patience(monkeypatch, 0.2, hangs=SLOTS)
    over, real, away = threading.Event(), DirectoryStaging.write_shard, [True]

    def hanging(self: Any, *arguments: Any) -> Any:
        if away:
            over.wait(60)
        return real(self, *arguments)

    monkeypatch.setattr(DirectoryStaging, "write_shard", hanging)
    weight = torch.ones(2)
    with contextlib.suppress(LinkEnded), Checkpointer(rundir.root, w=weight) as ckpt:
        hung_saves(ckpt, weight, SLOTS)
        away.clear()
        ckpt.step()
        if not complete:
            os.kill(os.getpid(), signal.SIGTERM)
            ckpt.step()
    step = ckpt.global_step
    over.set()
    assert (outcome(rundir).outcome, outcome(rundir).step) == (
        (Result.COMPLETE if complete else Result.SAVED), step,
    )  # fmt: skip
    assert step in [key.step for key in rundir.committed()]


@pytest.fixture
def first_hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The first shard hangs until the event is set; later ones are written."""
    short_patience(monkeypatch, 0.2)
    opened, began, real = threading.Event(), list[bool](), DirectoryStaging.write_shard

    def write_shard(self: Any, *arguments: Any) -> Any:
        if not began:
            began.append(True)
            opened.wait(60)
        return real(self, *arguments)

    monkeypatch.setattr(DirectoryStaging, "write_shard", write_shard)
    yield opened
    opened.set()


def test_how_long_a_save_hung_is_not_how_long_saves_take(
    rundir: RunDir, first_hangs: threading.Event
) -> None:
    """The next link, and the link runner, would begin their last save that much earlier."""
    with Checkpointer(rundir.root, policy="every hour") as ckpt:
        ckpt.step()
        began = time.monotonic()
        hung = ckpt.save()
        ckpt.step()
        ckpt.save(wait=True)
        time.sleep(1)
        hung_s = time.monotonic() - began
        first_hangs.set()
        hung.wait(30)
    took_s = {r["step"]: r["full_s"] for r in recorded(rundir, Event.COMMITTED)}
    assert took_s[1] is None
    assert took_s[2] is not None
    known = known_save_s(rundir, 2)
    assert known is not None
    assert known < hung_s


def test_where_no_other_was_timed_a_save_that_hung_tells_how_long_they_take(
    rundir: RunDir, first_hangs: threading.Event
) -> None:
    """A disk that slow would take the last save for one of no time, in this link and the next."""
    with pytest.raises(KeyboardInterrupt), Checkpointer(rundir.root, policy="every hour") as ckpt:
        ckpt.step()
        hung = ckpt.save()
        time.sleep(0.5)
        with pytest.warns(RuntimeWarning, match="hangs in tier"):
            ckpt.step()
        engine = ckpt._entered().engine
        assert engine.save_s() is None
        first_hangs.set()
        hung.wait(30)
        assert (engine.save_s() or 0) >= 0.5
        raise KeyboardInterrupt
    (committed,) = recorded(rundir, Event.COMMITTED)
    assert (None, committed["save_s"]) == (committed["full_s"], known_save_s(rundir, 2))
    assert committed["save_s"] >= 0.5


def test_a_hung_save_whose_step_was_saved_again_is_no_failure(
    rundir: RunDir, first_hangs: threading.Event
) -> None:
    """Strict training would end although nothing is lost."""
    with Checkpointer(rundir.root, policy="every hour", strict=True) as ckpt:
        ckpt.step()
        hung = ckpt.save()
        ckpt.save(wait=True)
        first_hangs.set()
        while not hung.done():
            time.sleep(0.01)
        ckpt.step()
    assert [] == recorded(rundir, Event.SAVE_FAILED)
    (skipped,) = recorded(rundir, Event.SAVE_SKIPPED)
    assert "step 1 was saved again while this save of it hung" == skipped["reason"]


def test_a_waiting_save_that_no_thread_would_begin_has_failed(
    rundir: RunDir, first_hangs: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that finds none when it is ordered: warned of, and tried again."""
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "hpc-ckpt-persist":
            raise RuntimeError("can't start new thread")
        real(self)

    with Checkpointer(rundir.root, policy="every hour") as ckpt:
        engine = ckpt._entered().engine
        ckpt.step()
        ckpt.save()
        engine._warming.grow()
        ckpt.step()
        assert 2 == ckpt.save().step
        monkeypatch.setattr(threading.Thread, "start", start)
        time.sleep(0.5)
        with (
            pytest.warns(RuntimeWarning, match="the save of step 1 hangs"),
            pytest.warns(RuntimeWarning, match="can't start new thread"),
        ):
            ckpt.step()
        assert engine.failed_at_s is not None
        monkeypatch.setattr(threading.Thread, "start", real)
        first_hangs.set()
    assert [2] == [r["step"] for r in recorded(rundir, Event.SAVE_FAILED)]


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_snapshot_that_fails_stops_no_training(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Whatever it was: an event and a warning, and the next save tries again."""
    real, left = Camera._copied, [error]

    def once(*arguments: Any) -> Any:
        if left:
            raise left.pop()
        return real(*arguments)

    monkeypatch.setattr(Camera, "_copied", once)
    with Checkpointer(rundir.root, policy="every 1 steps", w=torch.ones(3)) as ckpt:
        with pytest.warns(RuntimeWarning, match="could not be saved"):
            for _ in range(2):
                ckpt.step()
        ckpt.save(wait=True)
    assert 1 == len(recorded(rundir, Event.SAVE_FAILED))
    assert rundir.committed()


def test_a_second_buffer_that_cannot_be_had_hurts_nothing(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that asked for it lives on: the final save is its work."""

    def refused(self: Camera) -> None:
        raise RuntimeError("CUDA error: out of memory")

    with Checkpointer(rundir.root, w=torch.ones(3)) as ckpt:
        ckpt.step()
        ckpt.save(wait=True)
        monkeypatch.setattr(Camera, "can_grow", True)
        monkeypatch.setattr(Camera, "grow", refused)
        engine = ckpt._entered().engine
        engine.make_room()
        assert engine._under_way._urgent.wait(5)
        ckpt.step()
        ckpt.save(wait=True)
    assert 2 <= len(rundir.committed())


def test_an_interrupt_does_not_wait_for_hung_storage(
    rundir: RunDir, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends the program within seconds, whatever the file system does."""
    monkeypatch.setattr("hpc_ckpt.checkpointer.PATIENCE_INTERRUPTED_S", 0.2)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Checkpointer(rundir.root) as ckpt:
        ckpt.step()
        ckpt.save()
        raise KeyboardInterrupt
    assert time.monotonic() - began < 5
    gate.set()


# ── the real thing ────────────────────────────────────────────────────────────────────────
PROGRAM = """
import json, resource, sys, time, warnings
import torch
from hpc_ckpt import Checkpointer
from hpc_ckpt.errors import UserError
big = torch.zeros(int(sys.argv[4]) if len(sys.argv) > 4 else 16, dtype=torch.uint8)
caught = []
warnings.showwarning = lambda message, *_: caught.append(str(message))
warnings.simplefilter("always")
if int(sys.argv[3]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    with Checkpointer(sys.argv[1], policy="every 1 steps", big=big) as ckpt:
        for _ in ckpt.steps(40):
            time.sleep(0.01)
            ckpt.step()
            if ckpt.global_step == 5:
                big.resize_(int(sys.argv[2]))
            if ckpt.global_step == 20:
                resource.setrlimit(
                    resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
                )
                big.resize_(16)
except (OSError, UserError) as error:
    caught.append(f"raised {error}")
print(json.dumps({"step": ckpt.global_step, "warnings": caught}))
"""


def test_a_file_size_limit_is_survived_and_recovered_from(rundir: RunDir) -> None:
    """EFBIG from the kernel, then room again: warned, tried again, complete."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(rundir.root), "3000000", "1000000"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert 0 == ended.returncode, ended.stderr
    said = json.loads(ended.stdout)
    assert 40 == said["step"]
    assert "File too large" in said["warnings"][0]
    assert Done(1, 40) == rundir.done()


def on_a_tiny_file_system(place: Path, *arguments: str) -> dict[str, Any]:
    """What the program says that runs on a tmpfs of 1 MiB."""
    place.mkdir()
    private = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    command = 'mount -t tmpfs -o size=1m tiny "$1" && exec "$2" -c "$3" "$1/run" 3000000 "${@:4}"'
    ended = subprocess.run(
        [*private, "bash", "-c", command, "sh", str(place), sys.executable, PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if os.environ.get("CI") != "true" and ("unshare:" in ended.stderr or "mount:" in ended.stderr):
        pytest.skip(f"needs a mount namespace (util-linux): {ended.stderr.strip()}")
    assert 0 == ended.returncode, ended.stderr
    said: dict[str, Any] = json.loads(ended.stdout)
    return said


def test_a_full_file_system_is_survived_and_recovered_from(tmp_path: Path) -> None:
    """ENOSPC from a tiny file system: warned while the state is too big, saved when it fits."""
    said = on_a_tiny_file_system(tmp_path / "tiny", "0")
    assert 40 == said["step"]
    assert "No space left on device" in said["warnings"][0]
    assert not [text for text in said["warnings"] if text.startswith("raised")]


def test_a_run_that_cannot_be_saved_at_all_is_refused_at_once(tmp_path: Path) -> None:
    """Nothing was ever saved and nothing fits: told at the first steps, not after hours."""
    said = on_a_tiny_file_system(tmp_path / "tiny", "0", "3000000")
    assert said["step"] < 20
    assert "in 3 files are needed" in said["warnings"][-1]
    assert "choose another directory" in said["warnings"][-1]


@pytest.mark.filterwarnings("ignore:a checkpoint is damaged:RuntimeWarning")
def test_the_only_other_copy_goes_only_after_the_new_one_was_read(
    rundir: RunDir, tier: FaultyTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With keep=1 a commit that cannot be read back leaves the one before in place.

    The work is not called done by such a disk: the next link goes on from what is whole.
    """
    broken = Defect(DefectKind.CHUNK_DIGEST, "rank-00000.safetensors", "as if by a bad disk")
    with (
        pytest.raises(LinkEnded, match="the work is done, but"),
        Checkpointer(rundir.root, keep=1, value=torch.zeros(3)) as ckpt,
    ):
        ckpt.step()
        ckpt.save(wait=True)
        monkeypatch.setattr(tier, "verify", lambda _key, _stop: [broken])
        ckpt.step()
        ckpt.save(wait=True)
        ckpt.step()
    assert [1, 2, 3] == [key.step for key in rundir.committed()]
    assert recorded(rundir, Event.RETENTION_FAILED)
    assert recorded(rundir, Event.DAMAGED)
    assert rundir.done() is None


def test_whoever_waits_for_a_save_does_not_wait_for_a_calm_look_at_the_last_one(
    rundir: RunDir, tier: FaultyTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new checkpoint is read back slowly, beside training; a save that is waited for ends that,
    and what would have been removed stays until the next commit."""
    monkeypatch.setattr(pacing, "BACKGROUND_RATE", 1.0)  # a chunk in half a year
    with Checkpointer(rundir.root, keep=1, value=torch.zeros(3)) as ckpt:
        for _ in range(2):
            ckpt.step()
            ckpt.save(wait=True)
        time.sleep(0.3)  # without a pace it would be read, and the first removed, in a moment
        assert [1, 2] == [key.step for key in rundir.committed()]
        ckpt.step()
        ckpt.save().wait()  # behind the look, in the same thread
        kept = [key.step for key in rundir.committed()]
    assert [1, 2, 3] == kept
    assert not recorded(rundir, Event.SAVE_STUCK)
    # Leaving waits for the look, which is then not calm: what it lets go is gone.
    assert [3] == [key.step for key in rundir.committed()]
