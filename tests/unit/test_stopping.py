"""Three ways to stop: what each writes, cancels and waits for."""

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_ckpt import lease
from hpc_ckpt.chain import slurm
from hpc_ckpt.chain.stopping import HURRY_S, How, stop_chain
from hpc_ckpt.chain.submit import Chain
from hpc_ckpt.errors import RootError, SchedulerError
from hpc_ckpt.lease import Holder
from hpc_ckpt.rundir import Done, RunDir


class Scheduler:
    """Remembers what was cancelled."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.says: str | None = None

    def __call__(self, argv: list[str], *_: object) -> str:
        self.asked.append(list(argv))
        if self.says is not None:
            raise SchedulerError(argv, 1, self.says)
        return ""


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    double = Scheduler()
    monkeypatch.setattr(slurm, "run_command", double)
    return double


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    rundir.chain_file.write_text(json.dumps({"chain": "x", "jobs": ["7"]}))
    return rundir


def holds(rundir: RunDir, link: int, holder: Holder) -> None:
    (rundir.lease / f"{link:08d}").write_text(json.dumps(vars(holder)))


def released(rundir: RunDir, link: int) -> None:
    (rundir.lease / f"{link:08d}.released").touch()


class Clock:
    """Time that passes only in pauses; something may happen at one of them."""

    def __init__(self, act_at_s: float = 1e9, act: Callable[[], None] = lambda: None) -> None:
        self.now = 0.0
        self._act_at_s = act_at_s
        self._act = act

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self._act_at_s:
            self._act()


PENDING = ["scancel", "--state=PENDING", "7"]


def test_the_usual_way(rundir: RunDir, scheduler: Scheduler) -> None:
    """halt, notice without hurry, cancel of what is pending; the running job is spared."""
    holds(rundir, 1, Holder(job="7_1", host="n1"))
    assert ["7"] == Chain(rundir.root).stop()
    notice = rundir.notice(1)
    assert notice is not None and (("hpc-ckpt stop",), False) == (notice.sources, notice.hurry)
    assert "stopped by the user" == rundir.halted()
    assert [PENDING] == scheduler.asked


def test_after_the_next_checkpoint(rundir: RunDir, scheduler: Scheduler) -> None:
    """Only halt: no notice, and nothing is asked of the scheduler."""
    holds(rundir, 1, Holder(job="7_1", host="n1"))
    stopped = stop_chain(rundir, "enough", How.AFTER_CHECKPOINT)
    assert (1, (), False) == (stopped.link, stopped.cancelled, stopped.ended)
    assert ("enough", None) == (rundir.halted(), rundir.notice(1))
    assert [] == scheduler.asked


def test_after_the_next_checkpoint_of_nobody(rundir: RunDir, scheduler: Scheduler) -> None:
    """Where no link runs there is nothing to wait for: what is pending goes."""
    holds(rundir, 1, Holder(job="7_1", host="n1"))
    released(rundir, 1)
    stopped = stop_chain(rundir, "enough", How.AFTER_CHECKPOINT)
    assert (None, ("7",), True) == (stopped.link, stopped.cancelled, stopped.ended)
    assert [PENDING] == scheduler.asked


@pytest.mark.parametrize("how", list(How))
def test_a_root_that_cannot_be_written_to_is_stopped_as_far_as_that_goes(
    rundir: RunDir, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, how: How
) -> None:
    """A full one is what people stop chains for: what is pending goes, and the rest is said."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(RunDir, "write_halt", full)
    monkeypatch.setattr(RunDir, "give_notice", full)
    holds(rundir, 1, Holder(job="7_1", array="7", host="n1"))
    clock = Clock()
    said = r"\(Disk quota exceeded\): what was pending is cancelled.*'scancel 7_1' ends what runs"
    with pytest.raises(RootError, match=said):
        stop_chain(rundir, "x", how, sleep=clock.sleep, clock=clock)
    killed = [["scancel", "7_1"]] if how is How.NOW else []
    assert [PENDING, *killed] == scheduler.asked


def test_now_and_it_hurries(rundir: RunDir, scheduler: Scheduler) -> None:
    """A link that ends in time is not cancelled."""
    holds(rundir, 1, Holder(job="7_1", host="n1"))
    clock = Clock(2.0, lambda: released(rundir, 1))
    stopped = stop_chain(rundir, "x", How.NOW, sleep=clock.sleep, clock=clock)
    notice = rundir.notice(1)
    assert notice is not None and notice.hurry
    assert (True, None) == (stopped.ended, stopped.killed)
    assert [PENDING] == scheduler.asked


def test_now_and_it_does_not(rundir: RunDir, scheduler: Scheduler) -> None:
    """Its own array member is cancelled, never the bare array; the wait is bounded."""
    holds(rundir, 1, Holder(job="7_1", array="7", host="n1"))
    clock = Clock()
    stopped = stop_chain(rundir, "x", How.NOW, sleep=clock.sleep, clock=clock)
    assert (False, "7_1") == (stopped.ended, stopped.killed)
    assert [PENDING, ["scancel", "7_1"]] == scheduler.asked
    assert HURRY_S <= clock.now < HURRY_S + 1


def test_now_on_this_machine(rundir: RunDir, scheduler: Scheduler) -> None:
    """The runner is told that the link's end is now; it kills after the kill wait."""
    rundir.chain_file.write_text(json.dumps({"chain": "x", "jobs": []}))
    holds(rundir, 1, Holder.here())
    clock = Clock()
    stopped = stop_chain(rundir, "x", How.NOW, sleep=clock.sleep, clock=clock)
    assert "local" == stopped.killed
    told = json.loads((rundir.control / "local-end.json").read_text())
    assert "cancelled" == told["cause"]
    assert [] == scheduler.asked


def test_jobs_that_slurm_has_forgotten(rundir: RunDir, scheduler: Scheduler) -> None:
    """Are no error."""
    scheduler.says = "scancel: error: Invalid job id 7"
    holds(rundir, 1, Holder(job="7_1", host="n1"))
    clock = Clock()
    stopped = stop_chain(rundir, "x", How.NOW, sleep=clock.sleep, clock=clock)
    assert ((), None) == (stopped.cancelled, stopped.killed)


def test_all_jobs_of_a_chain_are_cancelled_by_one_scancel(
    rundir: RunDir, scheduler: Scheduler
) -> None:
    """The newest first: what waits for another could begin when that is gone."""
    rundir.chain_file.write_text(json.dumps({"chain": "x", "jobs": ["7", "8", "9"]}))
    scheduler.says = (
        "scancel: error: Kill job error on job id 7: Invalid job id specified\n"
        "scancel: error: Kill job error on job id 8: Job/step already completing or completed\n"
    )
    assert ["9"] == Chain(rundir.root).stop()
    assert [["scancel", "--state=PENDING", "9", "8", "7"]] == scheduler.asked


def test_a_scheduler_that_fails_is_said(rundir: RunDir, scheduler: Scheduler) -> None:
    """But halt is written first."""
    scheduler.says = "Unable to contact slurm controller"
    with pytest.raises(SchedulerError):
        stop_chain(rundir, "x", How.SAVE)
    assert "x" == rundir.halted()


def test_what_cannot_be_stopped(rundir: RunDir, scheduler: Scheduler, tmp_path: Path) -> None:
    """Complete, or no chain at all."""
    with pytest.raises(RootError, match="no chain there"):
        stop_chain(RunDir(tmp_path / "x"), "x", How.SAVE)
    rundir.write_done(Done(1, None))
    with pytest.raises(RootError, match="the work is complete"):
        stop_chain(rundir, "x", How.NOW)
    assert rundir.halted() is None
    assert 0 == lease.highest(rundir)
