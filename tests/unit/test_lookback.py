"""What a new link finds out of those before it, from what Slurm still remembers."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt.chain import slurm
from hpc_ckpt.chain.allocation import SlurmBackend
from hpc_ckpt.chain.backend import Cause, JobRecord
from hpc_ckpt.chain.claim import add_jobs
from hpc_ckpt.chain.clockwork import Clockwork
from hpc_ckpt.chain.link import LinkRunner
from hpc_ckpt.chain.local import LocalBackend
from hpc_ckpt.chain.lookback import cancelled_unseen, explain_last
from hpc_ckpt.chain.orders import MemberOrders, Orders
from hpc_ckpt.chain.past import jobs_of, past_links
from hpc_ckpt.chain.submit import take_up_again
from hpc_ckpt.chain.succession import SUBMITTING_S, Requeue, Successors
from hpc_ckpt.errors import SchedulerError
from hpc_ckpt.events import Event, EventLog
from hpc_ckpt.rundir import RunDir

SHOWN = """\
JobId=815 ArrayJobId=812 ArrayTaskId=3 JobState=CANCELLED Restarts=1 NodeList=n1
JobId=816 ArrayJobId=812 ArrayTaskId=4 JobState=CANCELLED Restarts=0 NodeList=(null)
JobId=817 ArrayJobId=812 ArrayTaskId=5 JobState=RUNNING Restarts=0 NodeList=n2
"""


def backend(run: Any) -> SlurmBackend:
    environ = {"SLURM_ARRAY_JOB_ID": "812", "SLURM_ARRAY_TASK_ID": "5", "SLURM_JOB_ID": "817"}
    return SlurmBackend(environ, run=run)


def test_an_index_cancelled_before_it_wrote_anything_is_found(rundir: RunDir) -> None:
    """One that was still pending is only a token less; one that ended before is known."""
    orders, asked = Orders.read(rundir), backend(lambda _: SHOWN)
    assert "812_3" == cancelled_unseen(rundir, orders, asked)
    held = {"job": "812_3", "restarts": 0}
    (rundir.lease / "00000001").write_text(json.dumps(held))
    assert "812_3" == cancelled_unseen(rundir, orders, asked)  # cancelled in its second run
    (rundir.lease / "00000002").write_text(json.dumps({**held, "restarts": 1}))
    assert cancelled_unseen(rundir, orders, asked) is None


def away(argv: Any) -> str:
    raise SchedulerError(list(argv), None, "no answer from the scheduler")


def one_before(rundir: RunDir) -> None:
    (rundir.lease / "00000001").write_text(json.dumps({"job": "812_1", "host": "n1"}))
    (rundir.lease / "00000001.released").touch()


def test_it_is_asked_again_for_while_nobody_answers(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer does not say that there is none; one that knows nothing of the array does."""
    monkeypatch.setattr("hpc_ckpt.chain.lookback.ASK_AGAIN_S", 0.01)
    one_before(rundir)
    (rundir.lease / "00000002").write_text(json.dumps({"job": "812_5", "host": "n2"}))
    orders, absent = Orders.read(rundir), [away] * 2
    slow = backend(lambda argv: absent.pop()(argv) if absent else SHOWN)
    assert "812_3" == cancelled_unseen(rundir, orders, slow)
    forgotten = SchedulerError(["scontrol"], 1, "Invalid job id specified")
    asked: list[Any] = []

    def refuse(argv: Any) -> str:
        asked.append(argv)
        raise forgotten

    assert cancelled_unseen(rundir, orders, backend(refuse)) is None
    assert 1 == len(asked)


def test_it_is_asked_for_ever_less_often(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that was down has many chains that begin at once."""
    now, pauses = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("hpc_ckpt.chain.lookback.sleep_unless_told", sleep)
    one_before(rundir)
    assert cancelled_unseen(rundir, Orders.read(rundir), backend(away)) is None
    assert [] == pauses, "the first of a chain waits for nobody"
    (rundir.lease / "00000002").write_text(json.dumps({"job": "812_5", "host": "n2"}))
    assert cancelled_unseen(rundir, Orders.read(rundir), backend(away)) is None
    assert [5.0, 10.0, 20.0, 30.0, 30.0, 30.0] == pauses


@pytest.mark.parametrize("first", ["away", "JobState=COMPLETING Restarts=0"])
def test_nor_is_a_link_without_a_record_given_up_at_the_first_question(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Its runner was killed while it asked itself: what is written down of it now stays."""
    monkeypatch.setattr("hpc_ckpt.chain.lookback.ASK_AGAIN_S", 0.01)
    (rundir.lease / "00000001").write_text(json.dumps({"job": "812_4", "host": "n1"}))
    EventLog(rundir.ledger_file(1)).emit(Event.LINK_STARTED, step=7)
    answers = [first, "JobState=CANCELLED Restarts=0"]

    def run(argv: Any) -> str:
        said = answers.pop(0) if argv[0] == "scontrol" else "away"
        return away(argv) if said == "away" else said

    ledger = EventLog(rundir.ledger_file(2))
    explain_last(rundir, 2, Orders.read(rundir), backend(run), ledger)
    (link,) = past_links(rundir, 0, 1)
    assert Cause.CANCELLED is link.cause


def test_what_a_link_was_told_before_it_was_killed_is_not_waited_for_again(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that cannot be killed keeps its job on its way out: that is no cause to wait."""
    monkeypatch.setattr("hpc_ckpt.chain.lookback.sleep_unless_told", pytest.fail)
    (rundir.lease / "00000001").write_text(json.dumps({"job": "812_4", "host": "n1"}))
    log = EventLog(rundir.ledger_file(1))
    log.emit(Event.LINK_STARTED, step=7)
    log.emit(Event.LINK_NOTICED, source="SIGTERM", cause="time limit", said="Reason=TimeLimit")
    slow = backend(lambda argv: "JobState=COMPLETING Restarts=0")
    explain_last(rundir, 2, Orders.read(rundir), slow, EventLog(rundir.ledger_file(2)))
    (link,) = past_links(rundir, 0, 1)
    assert Cause.TIME_LIMIT is link.cause


def test_a_link_that_is_told_to_stop_as_it_asks_for_them_starts_nothing(rundir: RunDir) -> None:
    one_before(rundir)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        LinkRunner(rundir, Orders.read(rundir), backend(away)).run()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert "told to stop before the program was started" in rundir.ledger_file(2).read_text()


def test_one_that_was_told_before_it_began_asks_for_nobody(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its set-up heard the TERM, and nothing would break off its waiting but the KILL."""
    one_before(rundir)
    EventLog(rundir.ledger_file(1)).emit(Event.LINK_STARTED, step=7)

    def sleep(seconds: float) -> None:
        raise AssertionError(f"waits {seconds} s")

    monkeypatch.setattr("hpc_ckpt.chain.lookback.sleep_unless_told", sleep)
    LinkRunner(rundir, Orders.read(rundir), backend(away), told=True).run()
    assert "told to stop before the program was started" in rundir.ledger_file(2).read_text()


def test_a_job_cancelled_before_it_wrote_anything_is_found_by_the_next(rundir: RunDir) -> None:
    """Where links are jobs of their own, the one in front is asked for, and only that."""
    record = json.loads(rundir.chain_file.read_text())
    rundir.chain_file.write_text(json.dumps({**record, "jobs": ["20", "21", "22"]}))
    asked: list[str] = []

    def run(argv: Any) -> str:
        asked.append(argv[-1])
        return f"JobId={argv[-1]} JobState=CANCELLED Restarts=0 NodeList=n1\n"

    orders = Orders.read(rundir)
    assert "21" == cancelled_unseen(rundir, orders, SlurmBackend({"SLURM_JOB_ID": "22"}, run=run))
    assert cancelled_unseen(rundir, orders, SlurmBackend({"SLURM_JOB_ID": "20"}, run=run)) is None
    assert ["21"] == asked
    (rundir.lease / "00000001").write_text(json.dumps({"job": "21", "restarts": 0}))
    assert cancelled_unseen(rundir, orders, SlurmBackend({"SLURM_JOB_ID": "22"}, run=run)) is None


def cancelled(argv: Any) -> str:
    """Of every job that is asked for."""
    return f"JobId={argv[-1]} JobState=CANCELLED Restarts=0 NodeList=n1\n"


def of_job(job: str) -> SlurmBackend:
    return SlurmBackend({"SLURM_JOB_ID": job}, run=cancelled)


@pytest.mark.parametrize("taken", [True, False])
def test_jobs_of_an_earlier_submission_are_not_looked_at(rundir: RunDir, taken: bool) -> None:
    """Whoever cancelled them has submitted again since. Extensions follow what they extended, also
    one that was submitted by a link that never took its lease."""
    add_jobs(rundir, ["20"])
    EventLog(rundir.ledger_file(1)).emit(Event.CHAIN_EXTENDED, job="21", links=1)
    if taken:
        (rundir.lease / "00000001").write_text(json.dumps({"job": "20", "restarts": 0}))
    take_up_again(rundir)
    add_jobs(rundir, ["30", "31"])
    own = 2 if taken else 1
    EventLog(rundir.ledger_file(own)).emit(Event.CHAIN_EXTENDED, job="32", links=1)
    (rundir.lease / f"{own:08d}").write_text(json.dumps({"job": "31", "restarts": 0}))
    assert ["20", "21", "30", "31", "32"] == jobs_of(rundir)
    orders = Orders.read(rundir)
    assert cancelled_unseen(rundir, orders, of_job("30")) is None
    assert "30" == cancelled_unseen(rundir, orders, of_job("31"))
    assert cancelled_unseen(rundir, orders, of_job("32")) is None  # the lease tells of 31


def test_a_job_that_a_failed_set_up_submitted_is_known(rundir: RunDir) -> None:
    """Its ledger is that of a link which nobody has begun; it can be stopped all the same."""
    EventLog(rundir.ledger_file(1)).emit(Event.CHAIN_EXTENDED, job="21", links=1)
    assert ["21"] == jobs_of(rundir)


def test_other_members_of_a_sweep_are_other_chains(rundir: RunDir) -> None:
    orders = replace(Orders.read(rundir), member=MemberOrders(5, "five", {}))
    assert cancelled_unseen(rundir, orders, backend(lambda _: SHOWN)) is None


def test_cancelled_in_the_grace_of_a_preemption_is_cancelled(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """scontrol says COMPLETING of both; a preemption ends with the grace, or is requeued."""
    now = 1000.0
    monkeypatch.setattr("time.time", lambda: now)
    told: list[JobRecord] = []

    class Told:
        enforces_end = True
        kill_wait_s = 30.0

        def look(self) -> JobRecord:
            return told.pop(0)

    grace = JobRecord(end=1010.0, cause=Cause.PREEMPTED, said="PreemptTime=1000")
    ending = JobRecord(end=1004.0, cause=Cause.PREEMPTED, said="COMPLETING", ending=True)
    for late, back, expected in (
        (4.0, False, Cause.CANCELLED),
        (4.0, True, Cause.PREEMPTED),
        (9.5, False, Cause.PREEMPTED),
    ):
        now = 1000.0
        log = EventLog(rundir.ledger_file(1))
        clock = Clockwork(rundir, Orders.read(rundir), Told(), log, 1)  # type: ignore[arg-type] # a double
        told += [grace, replace(ending, restarted=back)]
        clock.ask_once("SIGTERM")
        now += late
        clock.look_again()
        assert clock.seen is not None
        assert expected is clock.seen.cause


def test_a_save_made_just_before_the_warning_is_known_to_it(rundir: RunDir) -> None:
    """What a save takes is read now and then; unknown, it would end the link at once."""

    class Running:
        enforces_end = True

        def look(self) -> JobRecord:
            return JobRecord(end=end)

    end = time.time() + 60.0
    ledger = EventLog(rundir.ledger_file(1))
    clock = Clockwork(rundir, Orders.read(rundir), Running(), ledger, 1)  # type: ignore[arg-type] # a double
    clock.begin()
    clock.tick()
    saved = EventLog(rundir.events / "00000001-n1.jsonl")
    saved.emit(Event.COMMITTED, step=20, full_s=0.1)
    clock.warned(signal.SIGUSR1)
    clock.tick()
    assert rundir.notice(1) is None


def test_a_link_that_was_killed_before_it_could_halt_the_chain_has_ended_it(
    rundir: RunDir,
) -> None:
    """It had written down that it was cancelled; the next one, which already waited, reads that."""
    (rundir.lease / "00000001").write_text("{}")
    ledger = EventLog(rundir.ledger_file(1))
    ledger.emit(Event.LINK_STARTED, step=0)
    ledger.emit(Event.LINK_ENDED, cause=Cause.CANCELLED, outcome="failed")
    runner = LinkRunner(rundir, Orders.read(rundir), LocalBackend(kill_wait_s=0.0))
    assert 0 == runner.run()
    assert "cancelled by the user" == rundir.halted()
    assert [] == list(rundir.logs.glob("link-00000002*"))


class Submitting:
    """squeue shows nothing that waits; whatever is submitted is remembered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.submitted: list[tuple[str, ...]] = []
        self.now = 0.0
        monkeypatch.setattr(slurm, "submit_script", self.sbatch)

    def __call__(self, argv: Any) -> str:
        return ""

    def sbatch(self, script: Path, *options: str) -> str:
        self.submitted.append(options)
        return "99"


def test_jobs_that_are_still_being_submitted_are_waited_for(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of them runs while its user's sbatch waits for an answer to the second: it neither
    submits more nor says that nothing follows. A submission that died is not waited for."""
    cluster = Submitting(monkeypatch)
    orders = replace(Orders.read(rundir), strategy="afterany", may_submit=True)
    follow = Successors(
        SlurmBackend({"SLURM_JOB_ID": "20"}, run=cluster),
        rundir,
        orders,
        EventLog(rundir.ledger_file(1)),
        lambda: 5,
        clock=lambda: cluster.now,
    )
    assert not follow.prepare()
    follow.go_on()
    assert [] == cluster.submitted
    assert not rundir.ledger_file(1).exists()
    cluster.now += SUBMITTING_S
    assert follow.prepare()
    assert 1 == len(cluster.submitted)


def test_a_job_that_was_written_down_is_all_that_was_submitted(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_jobs(rundir, ["20"])
    cluster = Submitting(monkeypatch)
    orders = replace(Orders.read(rundir), strategy="afterany", may_submit=True)
    backend = SlurmBackend({"SLURM_JOB_ID": "20"}, run=cluster)
    ledger = EventLog(rundir.ledger_file(1))
    assert Successors(backend, rundir, orders, ledger, lambda: 5).prepare()
    assert 1 == len(cluster.submitted)


def test_hosts_are_excluded_once_the_job_is_in_the_queue(rundir: RunDir) -> None:
    """Slurm changes them of pending jobs only; a controller that is away is waited for."""
    asked: list[list[str]] = []
    away = [SchedulerError(["scontrol"], 1, "Unable to contact slurm controller")]

    def run(argv: Any) -> str:
        asked.append(list(argv))
        if away and argv[1] == "requeue":
            raise away.pop()
        return ""

    log, slept = EventLog(rundir.ledger_file(1)), list[float]()
    follow = Requeue(backend(run), rundir, Orders.read(rundir), log, lambda: 5, sleep=slept.append)
    assert follow.avoid(["n1", "n2"])
    assert [] == asked
    follow.go_on()
    assert ["requeue", "requeue", "update"] == [words[1] for words in asked]
    assert "ExcNodeList=n1,n2" in asked[-1]
    assert 1 == len(slept)


def test_a_controller_that_stays_away_is_given_up(rundir: RunDir) -> None:
    def run(argv: Any) -> str:
        raise SchedulerError(argv, None, "no answer from the scheduler")

    moments = iter(range(0, 100000, 1000))
    log = EventLog(rundir.ledger_file(1))
    follow = Requeue(
        backend(run), rundir, Orders.read(rundir), log, lambda: 5,
        sleep=lambda _: None, clock=lambda: float(next(moments)),
    )  # fmt: skip
    follow.go_on()
    assert "chain.nothing_follows" in rundir.ledger_file(1).read_text()


# ── what a link used that left no record ──────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("shown", "logged", "event", "used_s"),
    [
        ("JobState=NODE_FAIL Restarts=0 EndTime=1700000900", 700, None, 900.0),
        ("JobState=PENDING Restarts=1 EndTime=1700007200", 700, None, 700.0),
        ("JobState=PENDING Restarts=1 SubmitTime=1700000800", 700, None, 800.0),
        ("JobState=PENDING Restarts=1 SubmitTime=1700090000", 700, None, 1030.0),
        ("JobState=RUNNING Restarts=2 SubmitTime=1700000990", 700, None, 700.0),
        ("JobState=PENDING Restarts=1 SubmitTime=1699990000", None, None, 1000.0),
        ("", 700, 800, 800.0),
        ("", None, None, 1000.0),
        ("", 0, None, 1000.0),
    ],
    ids=[
        "as Slurm says", "of a later run", "put back", "put back after an outage", "put back twice",
        "of an earlier one", "by its words", "as it was given", "its log is older",
    ],
)  # fmt: skip
def test_what_a_link_used_is_known_without_a_checkpointer(
    rundir: RunDir, shown: str, logged: int | None, event: int | None, used_s: float
) -> None:
    """Else a budget of hours would not see links whose node failed."""
    began = 1_700_000_000
    (rundir.lease / "00000001").write_text(json.dumps({"job": "812_4", "host": "n1"}))
    started = {"time": began, "event": "link.started", "step": 0}
    rundir.ledger_file(1).write_text(json.dumps(started))
    rundir.write_deadline(1, began + 1000.0)
    if logged is not None:
        rundir.log_file(1).write_text("step 1\n")
        os.utime(rundir.log_file(1), (began + logged, began + logged))
    if event is not None:
        said = {"time": began + event, "event": "program.progress"}
        rundir.events_file(1, "n1").write_text(json.dumps(said))
    ledger = EventLog(rundir.ledger_file(2))
    explain_last(rundir, 2, Orders.read(rundir), backend(lambda _: shown), ledger)
    (link,) = past_links(rundir, 0, 1)
    assert used_s == link.allocated_s


def test_an_empty_log_says_nothing_of_what_a_link_used(rundir: RunDir) -> None:
    """srun makes it as it starts; hours of a program that prints nothing would be free."""
    began = time.time() - 5000.0
    started = {"time": began, "event": "link.started", "step": 0}
    rundir.ledger_file(1).write_text(json.dumps(started))
    rundir.write_deadline(1, began + 3600.0)
    rundir.log_file(1).touch()
    os.utime(rundir.log_file(1), (began + 1.0, began + 1.0))
    ledger = EventLog(rundir.ledger_file(2))
    explain_last(rundir, 2, Orders.read(rundir), backend(lambda _: ""), ledger)
    (link,) = past_links(rundir, 0, 1)
    assert link.allocated_s == pytest.approx(3600.0, abs=0.01)


@pytest.mark.parametrize("outcome", ["failed", "saved", None])
def test_progress_that_a_link_has_made_stays_when_its_cause_is_told(
    rundir: RunDir, outcome: str | None
) -> None:
    """It began the next command, or retention has removed its checkpoints since."""
    (rundir.lease / "00000001").write_text(json.dumps({"job": "812_4", "host": "n1"}))
    ended = {"outcome": outcome, "cause": "crashed", "progress": True, "cause_unknown": True}
    log = EventLog(rundir.ledger_file(1))
    log.emit(Event.LINK_STARTED, step=7)
    log.emit(Event.LINK_ENDED, step=7, reason="exit code 1", **ended)
    shown = "JobState=TIMEOUT Restarts=0"
    ledger = EventLog(rundir.ledger_file(2))
    explain_last(rundir, 2, Orders.read(rundir), backend(lambda _: shown), ledger)
    (link,) = past_links(rundir, 0, 1)
    assert (Cause.TIME_LIMIT, True) == (link.cause, link.progress)


# ── what follows ──────────────────────────────────────────────────────────────────────────
class Site:
    """Nothing is pending; sbatch takes arrays of at most `most`, or nobody answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int, away: int = 0) -> None:
        self.most, self.away = most, away
        self.arrays: list[str] = []
        monkeypatch.setattr("hpc_ckpt.chain.slurm.submit_script", self.sbatch)

    def run(self, argv: Any) -> str:
        if self.away:
            self.away -= 1
            raise SchedulerError(argv, None, "no answer from the scheduler")
        return ""

    def sbatch(self, _: Path, *options: str) -> str:
        (array,) = (o.removeprefix("--array=") for o in options if o.startswith("--array="))
        self.arrays.append(array)
        if int(array.removesuffix("%1").rpartition("-")[2]) > self.most:
            raise SchedulerError(["sbatch"], 1, "error: QOSMaxSubmitJobPerUserLimit")
        return "900"

    def following(self, rundir: RunDir) -> Successors:
        orders = replace(Orders.read(rundir), may_submit=True, links=9)
        log = EventLog(rundir.ledger_file(1))
        return Successors(backend(self.run), rundir, orders, log, lambda: 5)


def test_a_link_that_ends_before_it_has_looked_is_followed(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look comes after a second, or when the controller is back; links can be shorter."""
    site = Site(monkeypatch, most=9)
    follow = site.following(rundir)
    follow.go_on()
    follow.go_on()
    assert ["1-5%1"] == site.arrays
    assert '"job":"900"' in rundir.ledger_file(1).read_text().replace(" ", "")
    later = Site(monkeypatch, most=9, away=1)
    follow = later.following(rundir)
    assert not follow.prepare()
    follow.go_on()
    assert ["1-5%1"] == later.arrays


def test_a_chain_extends_itself_by_one_where_the_site_takes_no_more(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user has other jobs by now."""
    site = Site(monkeypatch, most=1)
    assert site.following(rundir).prepare()
    assert ["1-5%1", "1-1%1"] == site.arrays


def test_a_chain_that_cannot_go_on_says_so(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused while the link ran and when it ended: without a word it would look alive."""
    follow = Site(monkeypatch, most=0).following(rundir)
    assert not follow.prepare()
    assert not rundir.ledger_file(1).exists()
    follow.go_on()
    follow.go_on()
    (told,) = rundir.ledger_file(1).read_text().splitlines()
    assert "chain.nothing_follows" in told
    assert "QOSMaxSubmitJobPerUserLimit; submit the chain again" in told


def test_the_last_link_of_the_budget_is_followed_if_it_does_not_count(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempted after it had saved: none was left when it began, and one is now."""
    site, left = Site(monkeypatch, most=9), [0]
    follow = site.following(rundir)
    follow.links_left = lambda: left[0]
    assert follow.prepare()
    follow.go_on()
    assert [] == site.arrays
    left[0] = 1
    follow.go_on()
    assert ["1-1%1"] == site.arrays


def test_where_nothing_can_be_submitted_the_last_link_says_so(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow, left = Site(monkeypatch, most=9).following(rundir), [0]
    follow.orders = replace(follow.orders, may_submit=False)
    follow.links_left = lambda: left[0]
    assert follow.prepare()
    left[0] = 1
    follow.go_on()
    assert "chain.nothing_follows" in rundir.ledger_file(1).read_text()
