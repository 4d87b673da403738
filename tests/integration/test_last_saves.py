"""The last save of a link: where it goes, what is said of it, and what must not hold it up."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from test_tiers import recorded, run, settle, steps_of, tier_of

from hpc_ckpt import Checkpointer, LinkEnded, checkpointer, events, lease
from hpc_ckpt.engine import published, underway
from hpc_ckpt.engine.engine import Engine
from hpc_ckpt.errors import NoCheckpoint
from hpc_ckpt.events import Event
from hpc_ckpt.rundir import CheckpointKey, Outcome, Result, RunDir
from hpc_ckpt.runtime import boundary, waiting
from hpc_ckpt.runtime.ending import Ending
from hpc_ckpt.tiers import draining
from hpc_ckpt.tiers.directory import DirectoryTier
from hpc_ckpt.tiers.stack import Stack
from hpc_ckpt.tiers.staging import DirectoryStaging
from hpc_ckpt.tiers.turn import Turn
from hpc_ckpt.tiers.wishes import Survives

NEWEST = "step-000000002-g00000001"


@pytest.fixture
def local(fast: Path) -> dict[str, Any]:
    """Settings with a tier that goes with the job."""
    storage = {"local": {"path": str(fast), "survives": Survives.PROCESS.value}}
    return {"storage": storage, "tiers": ["local"], "policy": "every hour"}


@pytest.fixture
def to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is never time for the run directory."""
    monkeypatch.setattr(Stack, "choose", lambda self, *_, **__: self.first)


def before_each_save(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]
) -> None:
    """What the run directory does before it takes one."""
    real = DirectoryTier.stage

    def stage(self: DirectoryTier, key: CheckpointKey) -> DirectoryStaging:
        if self.path == rundir.checkpoints:
            act()
        return real(self, key)

    monkeypatch.setattr(DirectoryTier, "stage", stage)


@pytest.fixture
def full_home(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(draining, "INSIST_S", 0.1)
    return lambda: before_each_save(rundir, monkeypatch, full)


def ended(rundir: RunDir, settings: Any, before: Callable[[Checkpointer], object]) -> Outcome:
    """What the link says that is told to stop at its second step."""
    with pytest.raises(LinkEnded), Checkpointer(rundir.root, settings=settings) as ckpt:
        ckpt.step()
        before(ckpt)
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            ckpt.step()
            time.sleep(0.01)
    outcome = rundir.outcome(1)
    assert outcome is not None
    return outcome


@pytest.mark.usefixtures("to_the_first")
def test_what_goes_with_the_job_is_drained_before_it_counts(
    rundir: RunDir, local: dict[str, Any]
) -> None:
    outcome = ended(rundir, local, lambda ckpt: None)
    (committed,) = recorded(rundir, Event.COMMITTED)
    assert "local" == committed["tier"]
    assert (Result.SAVED, committed["step"]) == (outcome.outcome, outcome.step)
    assert [outcome.step] == steps_of(DirectoryTier(rundir.checkpoints))


@pytest.mark.usefixtures("to_the_first")
def test_what_goes_with_the_job_and_was_not_drained_is_not_called_saved(
    rundir: RunDir, local: dict[str, Any], full_home: Callable[[], None]
) -> None:
    """The outcome names what the next link will find, and why it is not the newest."""

    def first_save(ckpt: Checkpointer) -> None:
        settle(ckpt.save())
        while not recorded(rundir, Event.DRAINED):
            time.sleep(0.01)
        full_home()

    outcome = ended(rundir, local, first_save)
    assert (Result.SAVED, 1) == (outcome.outcome, outcome.step)
    assert "only in a tier that goes with the job" in outcome.reason
    assert 1 < recorded(rundir, Event.COMMITTED)[-1]["step"]


@pytest.mark.usefixtures("to_the_first")
def test_a_home_that_takes_nothing_for_a_moment_is_tried_again(
    rundir: RunDir, local: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is time, and without it the link would have saved nothing."""
    real, tries = DirectoryTier.stage, []

    def stage(self: DirectoryTier, key: CheckpointKey) -> DirectoryStaging:
        if self.path == rundir.checkpoints:
            tries.append(key)
            if len(tries) < 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, key)

    monkeypatch.setattr(DirectoryTier, "stage", stage)
    monkeypatch.setattr(draining, "AGAIN_S", 0.01)
    outcome = ended(rundir, local, lambda ckpt: None)
    assert Result.SAVED == outcome.outcome
    assert [outcome.step] == steps_of(DirectoryTier(rundir.checkpoints))


@pytest.mark.usefixtures("to_the_first")
def test_with_little_time_left_the_next_try_comes_soon_enough(
    rundir: RunDir, local: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two tries is longer than what is left; the second one would have no time."""
    tries: list[int] = []

    def fail_once() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    before_each_save(rundir, monkeypatch, fail_once)
    monkeypatch.setattr(boundary, "LONGEST_FINAL_SAVE_S", draining.AGAIN_S / 2)
    outcome = ended(rundir, local, lambda ckpt: None)
    assert Result.SAVED == outcome.outcome


def test_the_end_of_a_link_is_no_error_of_the_save_it_overtakes(
    rundir: RunDir, fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """strict=True makes errors fatal; told to stop, the link ends as saved."""
    monkeypatch.setattr(waiting, "TOLD_S", 0.2)
    before_each_save(rundir, monkeypatch, lambda: time.sleep(4))
    with (
        pytest.raises(LinkEnded, match="notice: SIGTERM"),
        Checkpointer(rundir.root, tiers=[fast], policy="every hour", strict=True) as ckpt,
    ):
        ckpt.step()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.warns(RuntimeWarning, match="not waited for any longer"):
            ckpt.save(wait=True)
        while True:
            ckpt.step()
    outcome = rundir.outcome(1)
    assert outcome is not None
    assert Result.SAVED is outcome.outcome


@pytest.mark.usefixtures("to_the_first")
def test_the_end_waits_for_the_one_checkpoint_and_for_no_other_tier(
    rundir: RunDir, local: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An archive that hangs cost the link its time to say what it had saved."""
    archive, over, real = tmp_path / "archive", threading.Event(), DirectoryTier.stage

    def stage(self: DirectoryTier, key: CheckpointKey) -> DirectoryStaging:
        if archive in self.path.parents:
            over.wait(60)
        return real(self, key)

    def decide(self: Ending, *arguments: Any) -> None:
        said.append(arguments[0])
        over.set()

    said: list[Result] = []
    monkeypatch.setattr(DirectoryTier, "stage", stage)
    monkeypatch.setattr(boundary, "LONGEST_FINAL_SAVE_S", 3.0)
    monkeypatch.setattr(Ending, "decide", decide)
    began = time.monotonic()
    with (
        pytest.raises(LinkEnded),
        Checkpointer(rundir.root, settings={**local, "tiers": ["local", "root", archive]}) as ckpt,
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            ckpt.step()
            time.sleep(0.01)
    assert [Result.SAVED] == said
    assert time.monotonic() - began < 3.0


def test_what_was_restored_counts_if_the_home_has_it_too(
    rundir: RunDir, local: dict[str, Any]
) -> None:
    """A process that is started again in its job reads the fast copy; told to stop before its
    first step, it said that nothing was ever saved."""
    with pytest.raises(KeyboardInterrupt), Checkpointer(rundir.root, settings=local) as ckpt:
        ckpt.step()
        settle(ckpt.save())
        raise KeyboardInterrupt
    with pytest.raises(LinkEnded), Checkpointer(rundir.root, settings=local) as ckpt:
        assert ckpt.restored is not None
        assert "local" == ckpt.restored.tier
        os.kill(os.getpid(), signal.SIGTERM)
        while not ckpt.poll():
            time.sleep(0.01)
    outcome = rundir.outcome(2)
    assert outcome is not None
    assert (Result.SAVED, 1) == (outcome.outcome, outcome.step)


@pytest.mark.usefixtures("to_the_first")
def test_with_nothing_that_outlives_the_job_the_link_has_failed(
    rundir: RunDir, local: dict[str, Any], full_home: Callable[[], None]
) -> None:
    outcome = ended(rundir, local, lambda ckpt: full_home())
    assert (Result.FAILED, None) == (outcome.outcome, outcome.step)
    assert outcome.reason.endswith("; nothing that this link knows of is left for the next one")


def saved_here_alone(
    rundir: RunDir, settings: Any, full_home: Callable[[], None], *, then: Callable[[], object]
) -> Outcome:
    """Of a link that is told to stop where its newest checkpoint would go with the job."""
    with pytest.raises(LinkEnded), Checkpointer(rundir.root, settings=settings) as ckpt:
        ckpt.step()
        settle(ckpt.save())
        while not recorded(rundir, Event.DRAINED):
            time.sleep(0.01)
        full_home()
        ckpt.step()
        settle(ckpt.save())
        os.kill(os.getpid(), signal.SIGTERM)
        while not ckpt.poll():
            time.sleep(0.01)
        assert ckpt.poll()
        then()
        ckpt.step()
    outcome = rundir.outcome(1)
    assert outcome is not None
    return outcome


@pytest.mark.usefixtures("to_the_first")
def test_poll_ends_no_link_on_what_does_not_come_home(
    rundir: RunDir,
    local: dict[str, Any],
    full_home: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The state is in memory, and the next step() saves it. It is waited for once."""
    real, waited = Engine.bring_home, []

    def bring_home(self: Engine, timeout: float) -> None:
        waited.append(timeout)
        real(self, timeout)

    def home_again() -> None:
        assert 1 == len(waited)
        monkeypatch.undo()

    monkeypatch.setattr(Engine, "bring_home", bring_home)
    outcome = saved_here_alone(rundir, local, full_home, then=home_again)
    assert (Result.SAVED, 3) == (outcome.outcome, outcome.step)


@pytest.mark.usefixtures("to_the_first")
def test_poll_ends_a_link_that_has_no_time_for_another_save(
    rundir: RunDir,
    local: dict[str, Any],
    full_home: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would have nothing to say when it is killed."""
    monkeypatch.setattr(boundary, "spare_s", lambda *_: 0.0)
    outcome = saved_here_alone(rundir, local, full_home, then=lambda: pytest.fail("it went on"))
    assert (Result.SAVED, 1) == (outcome.outcome, outcome.step)


def test_the_deadline_leaves_time_for_the_run_directory(
    rundir: RunDir, local: dict[str, Any]
) -> None:
    """Where commits go with the job, only what reaches the home is there for the next link."""
    with pytest.raises(KeyboardInterrupt), Checkpointer(rundir.root, settings=local) as ckpt:
        engine, stack = ckpt._entered().engine, ckpt._entered().session.stack
        ckpt.step()
        settle(ckpt.save())
        while stack.expected_s(stack.home, 1) is None:
            time.sleep(0.001)
        stack.note(stack.home, 1, 1.0)
        assert (engine.save_s() or 0) > 1000
        raise KeyboardInterrupt


def test_the_completing_save_is_in_the_run_directory_or_nowhere(
    rundir: RunDir, local: dict[str, Any], full_home: Callable[[], None]
) -> None:
    """DONE beside a checkpoint that is elsewhere does not count, and exit code 0 would lie."""
    with (
        pytest.raises(OSError, match="No space left"),
        Checkpointer(rundir.root, settings=local) as ckpt,
    ):
        ckpt.step()
        full_home()
    assert (None, None) == (rundir.done(), rundir.outcome(1))


def test_work_that_the_run_directory_cannot_keep_is_completed_by_the_next_link(
    rundir: RunDir, fast: Path, full_home: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another tier keeps it till then."""
    with (
        pytest.raises(LinkEnded, match="the work is done, but"),
        Checkpointer(rundir.root, tiers=[fast], policy="every hour") as ckpt,
    ):
        ckpt.step()
        full_home()
    outcome = rundir.outcome(1)
    assert outcome is not None
    assert (None, Result.SAVED, 1) == (rundir.done(), outcome.outcome, outcome.step)
    monkeypatch.undo()
    with Checkpointer(rundir.root, tiers=[fast]) as ckpt:
        assert (1, "fast") == (ckpt.global_step, ckpt.restored and Path(ckpt.restored.tier).name)
    done = rundir.done()
    assert done is not None
    assert 1 == done.step


@pytest.fixture
def hanging_home(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    over = threading.Event()
    monkeypatch.setattr(underway, "STUCK_S", 1.0)
    monkeypatch.setattr(checkpointer, "PATIENCE_S", 1.0)  # for the drain to the same place
    yield lambda: before_each_save(rundir, monkeypatch, lambda: over.wait(60))
    over.set()


def test_a_run_directory_that_hangs_at_the_end_does_not_cost_the_work(
    rundir: RunDir, fast: Path, hanging_home: Callable[[], None]
) -> None:
    """The job would have been killed there, with all since the last save."""
    with (
        pytest.raises(LinkEnded, match="hangs in tier root"),
        Checkpointer(rundir.root, tiers=[fast], policy="every hour") as ckpt,
    ):
        ckpt.step()
        hanging_home()
    outcome = rundir.outcome(1)
    assert outcome is not None
    assert (Result.SAVED, 1) == (outcome.outcome, outcome.step)
    assert [1] == steps_of(tier_of(rundir, fast))


def test_the_end_of_a_link_comes_before_the_end_of_a_hang(
    rundir: RunDir, local: dict[str, Any], hanging_home: Callable[[], None]
) -> None:
    """With no other place that lasts, the last committed one is what the outcome names."""
    with (
        pytest.raises(LinkEnded, match="deadline"),
        Checkpointer(rundir.root, settings=local) as ckpt,
    ):
        ckpt.step()
        settle(ckpt.save())
        while not recorded(rundir, Event.DRAINED):
            time.sleep(0.01)
        rundir.write_deadline(1, time.time() + 6)
        ckpt.step()
        hanging_home()
    outcome = rundir.outcome(1)
    assert outcome is not None
    assert (None, Result.SAVED, 1) == (rundir.done(), outcome.outcome, outcome.step)


def test_a_notice_of_an_unknown_end_is_heard_while_the_work_is_being_completed(
    rundir: RunDir, fast: Path, hanging_home: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill comes long before a hang is known for one."""
    monkeypatch.setattr(underway, "STUCK_S", 600.0)
    monkeypatch.setattr(waiting, "TOLD_S", 0.5)
    with (
        pytest.raises(LinkEnded, match="notice: SIGTERM"),
        Checkpointer(rundir.root, tiers=[fast], policy="every hour") as ckpt,
    ):
        ckpt.step()
        hanging_home()
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert [1] == steps_of(tier_of(rundir, fast))


# ── a run directory that is away as a whole ───────────────────────────────────────────────
@pytest.fixture(params=["EIO", "hangs"])
def no_home(
    request: pytest.FixtureRequest, rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], None]]:
    """From now on: it takes no save, gives no lease, and cannot be looked at."""
    over, listdir, stat = threading.Event(), os.listdir, os.stat

    def answer() -> None:
        if request.param == "hangs":
            over.wait(60)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def list_lease(path: Any = ".") -> Any:
        return answer() if str(path) == str(rundir.lease) else listdir(path)

    def stat_root(path: Any, *arguments: Any, **more: Any) -> Any:
        return answer() if str(path) == str(rundir.root) else stat(path, *arguments, **more)

    def leave() -> None:
        before_each_save(rundir, monkeypatch, answer)
        monkeypatch.setattr(os, "listdir", list_lease)
        monkeypatch.setattr(os, "stat", stat_root)

    monkeypatch.setattr(published, "LEASE_S", 0.3)
    monkeypatch.setattr(underway, "STUCK_S", 1.0)
    monkeypatch.setattr(checkpointer, "PATIENCE_S", 1.0)  # for the drain to the same place
    monkeypatch.setattr(draining, "INSIST_S", 0.1)
    yield leave
    over.set()


@pytest.mark.usefixtures("to_the_first")
def test_a_run_directory_that_is_away_fails_no_save_into_another_tier(
    rundir: RunDir, fast: Path, no_home: Callable[[], None]
) -> None:
    """Its lease is asked at each commit; the final save lay in the tier, whole, and was thrown
    away. The tier is not called the one that fails."""
    began = time.monotonic()
    outcome = ended(rundir, {"tiers": [fast], "policy": "every hour"}, lambda ckpt: no_home())
    (committed,) = recorded(rundir, Event.COMMITTED)
    assert (str(fast), Result.SAVED) == (committed["tier"], outcome.outcome)
    assert [outcome.step] == steps_of(tier_of(rundir, fast))
    assert ["root"] == [record["tier"] for record in recorded(rundir, Event.TIER_FAILED)]
    assert time.monotonic() - began < 20


def test_work_is_kept_elsewhere_when_the_run_directory_is_away(
    rundir: RunDir, fast: Path, no_home: Callable[[], None]
) -> None:
    """The completing save finds no home; the next link completes it."""
    with (
        pytest.raises(LinkEnded, match="the work is done, but"),
        Checkpointer(rundir.root, tiers=[fast], policy="every hour") as ckpt,
    ):
        ckpt.step()
        no_home()
    outcome = rundir.outcome(1)
    assert outcome is not None
    assert (Result.SAVED, 1) == (outcome.outcome, outcome.step)
    assert [1] == steps_of(tier_of(rundir, fast))
    assert {"root"} == {record["tier"] for record in recorded(rundir, Event.TIER_FAILED)}


@pytest.fixture
def slow_home(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> float:
    """Healthy, but slower than what is taken for a hang."""
    slow_s = 1.5
    monkeypatch.setattr(underway, "STUCK_S", 0.5)
    before_each_save(rundir, monkeypatch, lambda: time.sleep(slow_s))
    return slow_s


def test_a_link_that_has_only_to_complete_the_work_waits_for_a_slow_home(
    rundir: RunDir, fast: Path, slow_home: float
) -> None:
    """Otherwise one link after the other would save elsewhere and leave."""
    with (
        pytest.raises(LinkEnded, match="hangs in tier root"),
        Checkpointer(rundir.root, tiers=[fast], policy="every hour") as ckpt,
    ):
        ckpt.step()
    with Checkpointer(rundir.root, tiers=[fast], policy="every hour") as ckpt:
        assert 1 == ckpt.global_step
    assert rundir.done() is not None


def test_with_one_place_a_slow_completing_save_is_never_given_up(
    rundir: RunDir, slow_home: float
) -> None:
    """Nothing better could be done; a save of the same step may be there already."""
    with Checkpointer(rundir.root, policy="every 2 steps") as ckpt:
        ckpt.step()
        ckpt.step()
        rundir.write_deadline(1, time.time() + 10 * slow_home)
    done = rundir.done()
    assert done is not None
    assert 2 == done.step


def test_what_the_next_link_can_find_is_said_before_the_drain_is_waited_for(
    rundir: RunDir, local: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link may be killed while it waits."""
    said: list[Outcome | None] = []

    def bring_home(self: Engine, timeout: float) -> None:
        said.append(rundir.outcome(1))

    def first_save(ckpt: Checkpointer) -> None:
        settle(ckpt.save())
        while not recorded(rundir, Event.DRAINED):
            time.sleep(0.01)
        monkeypatch.setattr(Stack, "choose", lambda self, *_, **__: self.first)
        monkeypatch.setattr(Engine, "bring_home", bring_home)

    ended(rundir, local, first_save)
    assert [(Result.SAVED, 1)] == [(one.outcome, one.step) for one in said if one is not None]


def test_a_save_that_hangs_while_it_is_waited_for_gives_the_program_back(
    rundir: RunDir, fast: Path, hanging_home: Callable[[], None]
) -> None:
    """Training goes on, and the end of the link finds another place."""
    with (
        pytest.raises(LinkEnded),
        Checkpointer(rundir.root, tiers=[fast], policy="every hour") as ckpt,
    ):
        ckpt.step()
        hanging_home()
        with pytest.warns(RuntimeWarning, match="not waited for any longer"):
            assert not ckpt.save(wait=True).done()
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            ckpt.step()
            time.sleep(0.01)
    outcome = rundir.outcome(1)
    assert outcome is not None
    assert [outcome.step] == steps_of(tier_of(rundir, fast))


def test_a_full_home_does_not_lose_the_save_that_is_waited_for(
    rundir: RunDir, fast: Path, full_home: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes to the other tier, which the next link reads as well."""
    run(rundir, fast, 1)
    full_home()
    weight = torch.zeros(3000)
    with (
        pytest.raises(KeyboardInterrupt),
        Checkpointer(rundir.root, tiers=[fast], policy="every hour", weight=weight) as ckpt,
    ):
        weight += 1
        ckpt.step()
        ckpt.save(wait=True)
        raise KeyboardInterrupt
    assert 2 == steps_of(tier_of(rundir, fast))[-1]
    monkeypatch.undo()
    assert 2 == run(rundir, fast, 2, save=False).step


@dataclass(frozen=True)
class LeftBehind:
    way: tuple[str, str]
    arrived: bool = False


def hangs(ckpt: Checkpointer, way: tuple[str, str]) -> None:
    """As if a copy that way had been left behind."""
    ckpt._entered().engine._drainer._hung.add(cast("Turn", LeftBehind(way)))


def test_a_home_that_hangs_is_not_where_the_last_save_goes(rundir: RunDir, fast: Path) -> None:
    """The drain was left behind there: nobody would hear of the save again."""
    with (
        pytest.raises(KeyboardInterrupt),
        Checkpointer(rundir.root, tiers=[fast], policy="every hour") as ckpt,
    ):
        ckpt.step()
        hangs(ckpt, (str(fast), "root"))
        ckpt.save(wait=True)
        ckpt._entered().engine._drainer._hung.clear()
        raise KeyboardInterrupt
    assert str(fast) == recorded(rundir, Event.COMMITTED)[-1]["tier"]


def test_a_home_that_hung_is_still_better_than_what_goes_with_the_job(
    rundir: RunDir, local: dict[str, Any]
) -> None:
    """It may answer again in time; nothing drains what lies in the other tier by then."""
    outcome = ended(rundir, local, lambda ckpt: hangs(ckpt, ("local", "root")))
    (committed,) = recorded(rundir, Event.COMMITTED)
    assert "root" == committed["tier"]
    assert (Result.SAVED, committed["step"]) == (outcome.outcome, outcome.step)


# ── events that cannot be written ─────────────────────────────────────────────────────────
@pytest.fixture
def hanging_events(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    over, real = threading.Event(), events._append

    def append(path: Path, data: bytes) -> int:
        over.wait(60)
        return real(path, data)

    yield lambda: monkeypatch.setattr(events, "_append", append)
    over.set()


def test_an_event_log_that_hangs_costs_no_save(
    rundir: RunDir, hanging_events: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file lies on a server that is away; the checkpoints do not."""
    monkeypatch.setattr(events, "LAST_FLUSH_S", 0.1)
    outcome = ended(rundir, {"policy": "every hour"}, lambda ckpt: hanging_events())
    assert Result.SAVED == outcome.outcome
    assert [outcome.step] == steps_of(DirectoryTier(rundir.checkpoints))


# ── tiers that are not there ──────────────────────────────────────────────────────────────
@pytest.mark.usefixtures("impatient")
def test_a_tier_that_is_not_mounted_is_not_gone_back_behind(rundir: RunDir, fast: Path) -> None:
    """The run directory has an older one, and on record that there is a newer."""
    run(rundir, fast, 2)
    shutil.rmtree(rundir.checkpoints / NEWEST)
    fast.rename(fast.with_name("elsewhere"))
    with pytest.raises(NoCheckpoint, match=r"does not go back to it.*is it mounted on this node"):
        run(rundir, fast, 1)
    fast.with_name("elsewhere").rename(fast)
    assert 2 == run(rundir, fast, 3).step


@pytest.mark.parametrize("bare", [False, True], ids=["no directory", "a bare mount point"])
@pytest.mark.parametrize("restored", [False, True], ids=["first link", "restored"])
def test_a_run_directory_that_goes_before_the_first_save_is_not_made_anew(
    tmp_path: Path, bare: bool, restored: bool
) -> None:
    """The next mount would hide what is written to the bare place, be it a checkpoint or DONE."""
    root, away = tmp_path / "run", tmp_path / "away"
    if restored:
        train(root, 2)
    before = {False: [], True: [NEWEST]}[restored]

    def unmount() -> None:
        root.rename(away)
        if bare:
            root.mkdir()

    with pytest.raises(FileNotFoundError):
        train(root, 4, at_the_first=unmount)
    assert [] == list(root.rglob("*"))
    if bare:
        root.rmdir()
    away.rename(root)
    assert before == [key.directory_name for key in RunDir(root).committed()]
    # Its process lives here; of one that has ended the next link need not be told.
    lease.Lease(RunDir(root), lease.highest(RunDir(root))).release()
    train(root, 4)
    assert RunDir(root).done() is not None


def train(root: Path, steps: int, at_the_first: Callable[[], object] = lambda: None) -> None:
    """Saves nothing before the end."""
    state = {"weights": torch.zeros(8)}
    with Checkpointer(root, policy="every hour", state=state) as ckpt:
        for number, _ in enumerate(ckpt.steps(steps)):
            if number == 0:
                at_the_first()
            state["weights"] += 1
            ckpt.step()
