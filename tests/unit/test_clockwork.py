"""When a link ends: what is published of it, and what a warning means."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from hpc_ckpt.chain.allocation import SlurmBackend
from hpc_ckpt.chain.backend import Cause, JobRecord
from hpc_ckpt.chain.clockwork import Clockwork
from hpc_ckpt.chain.orders import Budget, Orders
from hpc_ckpt.chain.verdict import judge
from hpc_ckpt.events import Event, EventLog
from hpc_ckpt.rundir import Outcome, Result, RunDir, write_outcome

NOW = 1_800_000_000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as a list of one."""
    now = [NOW]
    monkeypatch.setattr("time.time", lambda: now[0])
    return now


class Scheduler:
    """A double that says what it is told to say."""

    enforces_end = True
    kill_wait_s = 30.0

    def __init__(self, end: float = NOW + 3600.0) -> None:
        self.record = JobRecord(end=end)

    def look(self) -> JobRecord:
        return self.record


def clockwork(rundir: RunDir, scheduler: Scheduler, **orders: object) -> Clockwork:
    told = replace(Orders.read(rundir), **orders)  # type: ignore[arg-type] # any of its fields
    made = Clockwork(rundir, told, scheduler, EventLog(rundir.ledger_file(1)), 1)  # type: ignore[arg-type] # a double
    made.begin()
    return made


def warn(made: Clockwork) -> None:
    made.warned(signal.SIGUSR1)
    made.tick()


def said_of_code_0(rundir: RunDir, made: Clockwork) -> tuple[Result | None, Cause]:
    verdict = judge(rundir, 1, 0, made.seen)
    return verdict.result, verdict.cause


@pytest.mark.parametrize(
    "record",
    [
        "JobId=10 JobState=COMPLETING Restarts=0 EndTime=1800000001",
        "JobId=10 JobState=COMPLETING Restarts=1 EndTime=1800086400",
        "JobId=10 JobState=PENDING Restarts=1 EndTime=1800086400",
    ],
)
def test_a_job_that_is_being_ended_ends_with_the_kill_wait(clock: list[float], record: str) -> None:
    """Its EndTime is when that began, or of a run to come. First seen counts, however often."""
    backend = SlurmBackend({"SLURM_JOB_ID": "10"}, kill_wait_s=30.0, run=lambda _: record)
    assert NOW + 30.0 == backend.look().end
    clock[0] += 7.0
    assert NOW + 30.0 == backend.look().end


def test_a_scheduler_that_answers_late_does_not_put_the_kill_off(clock: list[float]) -> None:
    """EndTime is when the ending began."""
    record = f"JobId=10 JobState=COMPLETING Restarts=0 EndTime={NOW - 20.0:.0f}"
    backend = SlurmBackend({"SLURM_JOB_ID": "10"}, kill_wait_s=30.0, run=lambda _: record)
    assert NOW + 10.0 == backend.look().end


def test_a_running_job_ends_when_slurm_says(clock: list[float]) -> None:
    """Also where nobody told this process how often it was started."""
    record = f"JobId=10 JobState=RUNNING Restarts=1 EndTime={NOW + 600.0:.0f}"
    backend = SlurmBackend({"SLURM_JOB_ID": "10"}, kill_wait_s=30.0, run=lambda _: record)
    assert NOW + 600.0 == backend.look().end


def test_once_it_is_being_ended_a_budget_does_not_cut_the_kill_wait(
    clock: list[float], rundir: RunDir
) -> None:
    scheduler = Scheduler()
    budget = Budget(links=9, hours=0.5)
    made = clockwork(rundir, scheduler, budget=budget)
    assert NOW + 1800.0 == made.deadline
    clock[0] += 1805.0
    scheduler.record = JobRecord(end=clock[0] + 30.0, cause=Cause.TIME_LIMIT, ending=True)
    made.ask_once("SIGTERM")
    assert clock[0] + 30.0 == made.deadline
    scheduler.record = JobRecord()
    made.ask_once("second SIGTERM")
    assert clock[0] + 30.0 == made.deadline


def test_a_scheduler_that_does_not_answer_moves_no_deadline(
    clock: list[float], rundir: RunDir
) -> None:
    """The budget ends long after the link: a program that believed it would not save in time."""
    scheduler = Scheduler()
    made = clockwork(rundir, scheduler, budget=Budget(links=9, hours=500))
    scheduler.record = JobRecord()
    made.ask_once("SIGUSR1")
    clock[0] += 3500.0
    made.tick()
    assert NOW + 3600.0 == made.deadline
    assert NOW + 3600.0 == rundir.deadline(1)
    scheduler.record = JobRecord(end=NOW + 7200.0)
    made.look_again()
    assert NOW + 7200.0 == made.deadline


def test_the_end_of_a_budget_is_told_to_those_who_look_at_no_deadline(
    clock: list[float], rundir: RunDir
) -> None:
    """Slurm knows nothing of it: the program would run to the end of the link."""
    made = clockwork(rundir, Scheduler(), budget=Budget(links=9, hours=0.5))
    made.tick()
    assert rundir.notice(1) is None
    clock[0] += 1801.0
    made.tick()
    made.tick()
    notice = rundir.notice(1)
    assert notice is not None
    assert ("end of the budget",) == tuple(notice.sources)


def test_a_command_that_returns_0_after_a_warning_is_complete(
    clock: list[float], rundir: RunDir
) -> None:
    """Nobody has ended it: it came to its end in the last minutes of the link."""
    made = clockwork(rundir, Scheduler())
    warn(made)
    assert rundir.notice(1) is not None
    made.look_again()
    assert (Result.COMPLETE, Cause.COMPLETE) == said_of_code_0(rundir, made)


def test_not_so_one_that_a_forwarded_signal_has_told_to_end(
    clock: list[float], rundir: RunDir
) -> None:
    """Many programs save at a signal and leave with 0."""
    made = clockwork(rundir, Scheduler(), forward=("USR1", "command"))
    warn(made)
    assert (Result.FAILED, Cause.TIME_LIMIT) == said_of_code_0(rundir, made)


def test_nor_one_that_slurm_was_seen_to_end_after_its_warning(
    clock: list[float], rundir: RunDir
) -> None:
    scheduler = Scheduler()
    made = clockwork(rundir, scheduler)
    warn(made)
    scheduler.record = JobRecord(end=NOW + 30.0, cause=Cause.TIME_LIMIT, said="x", ending=True)
    made.look_again()
    assert (Result.FAILED, Cause.TIME_LIMIT) == said_of_code_0(rundir, made)


def test_nor_one_that_heard_term_from_a_scheduler_that_says_nothing(
    clock: list[float], rundir: RunDir
) -> None:
    scheduler = Scheduler()
    made = clockwork(rundir, scheduler)
    warn(made)
    scheduler.record = JobRecord()
    made.ask_once("SIGTERM")
    made.terminated()
    made.look_again()
    assert (Result.FAILED, Cause.TIME_LIMIT) == said_of_code_0(rundir, made)


def test_a_link_that_saved_after_a_warning_met_its_limit(
    clock: list[float], rundir: RunDir
) -> None:
    made = clockwork(rundir, Scheduler())
    warn(made)
    saved = Outcome(Result.SAVED, 1, 20, "notice: SIGUSR1")
    write_outcome(rundir.outcome_file(1), saved)
    assert (Result.SAVED, Cause.TIME_LIMIT) == said_of_code_0(rundir, made)


@pytest.mark.parametrize(("save_s", "step_s"), [(5.0, 0.1), (5.0, 90.0), (120.0, 1.0)])
def test_a_moved_end_is_looked_for_before_the_runtime_ends_the_link(
    clock: list[float], rundir: RunDir, save_s: float, step_s: float
) -> None:
    """It ends it 1.5 saves, a step and a margin before what it knows; late is best."""
    told = EventLog(rundir.events / "00000001-n1.jsonl")
    for step in (10, 20):
        told.emit(Event.COMMITTED, step=step, training_s=step * step_s, full_s=save_s)
    for save in (31, 32):  # a steward's count of its saves is no count of steps
        told.emit(Event.COMMITTED, step=save, training_s=600.0 * save, tier="restarts")
    scheduler = Scheduler(end=NOW + 8 * 3600.0)
    made = clockwork(rundir, scheduler)
    scheduler.record = JobRecord(end=NOW + 9 * 3600.0)
    needed_s = 1.5 * save_s + step_s + 30.0
    clock[0] = NOW + 8 * 3600.0 - (needed_s + 25.0)
    made.tick()
    assert NOW + 8 * 3600.0 == made.deadline
    clock[0] = NOW + 8 * 3600.0 - (needed_s + 5.0)
    made.tick()
    assert NOW + 9 * 3600.0 == made.deadline
