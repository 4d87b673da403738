"""One link inside somebody else's job: party wall, notice, budgets, and how it comes back."""

import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt import events, fsio, lease
from hpc_ckpt.chain import evidence, patience, tasklink
from hpc_ckpt.chain.backend import Cause, JobRecord
from hpc_ckpt.chain.ledger import State, read_status
from hpc_ckpt.chain.local import Command
from hpc_ckpt.chain.tasklink import Job, TaskLink
from hpc_ckpt.chain.work import Call, Work
from hpc_ckpt.errors import ChainStopped, HpcCkptError, LinkEnded, RootError
from hpc_ckpt.lease import Holder
from hpc_ckpt.rundir import MANIFEST_NAME, CheckpointKey, Outcome, Result, RunDir, write_outcome

BACK = 99
"""What the job leaves with when it was put back."""


@dataclass
class Scheduler:
    """A scheduler that says what it is told to."""

    record: JobRecord = field(default_factory=JobRecord)
    job: str | None = "12_3"
    restarts: int = 0
    alive: bool | None = False
    looks: int = 0
    name: str = "slurm"
    kill_wait_s: float = 0.0
    enforces_end: bool = True
    node: str | None = "n1"
    nodes: str | None = "n1"

    def holder(self) -> Holder:
        return Holder.here(job=self.job, restarts=self.restarts)

    def probe(self, holder: Holder) -> bool | None:
        return self.alive

    def look(self) -> JobRecord:
        self.looks += 1
        return self.record

    def step(self, argv: Sequence[str], log: Path) -> list[str]:
        return list(argv)

    def cancel_rest(self) -> str | None:
        return None


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """In a job the callbacks stay; here they must not."""
    heard = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in heard}
    yield
    for number, callback in before.items():
        signal.signal(number, callback)


@pytest.fixture
def place(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def run(
    place: RunDir,
    work: Work | Callable[[], Any],
    *,
    scheduler: Scheduler | None = None,
    submission: str = "slurm 12_3",
    requeue: Callable[[], int] | None = lambda: BACK,
    max_restarts: int | None = None,
    max_links: int | None = None,
    **job: Any,
) -> Any:
    link = TaskLink(
        place,
        Job(
            backend=scheduler or Scheduler(),
            submission=submission,
            requeue=requeue,
            **job,
        ),
        max_restarts=max_restarts,
        max_links=max_links,
    )
    return link.run(Call(work) if callable(work) else work)


def comes_back(place: RunDir, work: Work | Callable[[], Any], **more: Any) -> bool:
    try:
        run(place, work, **more)
    except SystemExit as end:
        return end.code == BACK
    return False


def commit(place: RunDir, step: int) -> None:
    """What is taken for a committed checkpoint."""
    generation = int(os.environ["HPC_CKPT_GENERATION"])
    directory = place.checkpoints / CheckpointKey(generation, step).directory_name
    directory.mkdir()
    (directory / MANIFEST_NAME).write_text("{}")


def say(result: Result, step: int | None = None) -> None:
    generation = int(os.environ["HPC_CKPT_GENERATION"])
    outcome = Outcome(result, generation, step, "notice: test")
    write_outcome(Path(os.environ["HPC_CKPT_OUTCOME"]), outcome)


def end_link() -> None:
    raise LinkEnded("notice: test")


def test_the_work_sees_the_party_wall_and_its_result_is_returned(place: RunDir) -> None:
    """As in a link of the runner; afterwards the environment is as it was."""
    before = dict(os.environ)
    told = run(place, lambda: {k: v for k, v in os.environ.items() if k.startswith("HPC_CKPT_")})
    assert place.environment(1, "slurm") == told
    assert before == dict(os.environ)
    assert State.COMPLETE == read_status(place).state
    assert lease.released(place, 1)


def test_link_ended_puts_the_job_back(place: RunDir) -> None:
    """The next link has the next generation, and the ledger tells both."""
    assert comes_back(place, end_link)
    assert comes_back(place, end_link)
    assert "done" == run(place, lambda: "done")
    causes = [link.cause for link in read_status(place).links]
    assert ["saved and left", "saved and left", "complete"] == causes


def test_a_swallowed_end_is_still_an_end(place: RunDir) -> None:
    """What decides is the outcome: a function that returns after it is not complete."""
    assert comes_back(place, lambda: say(Result.SAVED, 3))
    assert place.done() is None


def test_a_failure_is_the_users_own_error(place: RunDir) -> None:
    """And is not tried again."""

    def fail() -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        run(place, fail)
    assert "ZeroDivisionError: mine" == read_status(place).links[0].reason


def test_a_failure_while_the_scheduler_ends_the_job_is_not_the_works(place: RunDir) -> None:
    """Peers that are gone make programs crash."""
    preempted = Scheduler(JobRecord(cause=Cause.PREEMPTED))

    def crash() -> None:
        raise ConnectionError("peer is gone")

    assert comes_back(place, crash, scheduler=preempted)


def test_sys_exit_is_read_as_the_exit_code_of_a_program(place: RunDir) -> None:
    """75 comes back, 0 is complete, 3 failed."""

    def leave(code: int) -> Callable[[], None]:
        def work() -> None:
            raise SystemExit(code)

        return work

    assert comes_back(place, leave(75))
    with pytest.raises(HpcCkptError, match="exit code 3"):
        run(place, leave(3))
    assert run(place, leave(0)) is None


def test_a_signal_becomes_a_notice_and_the_scheduler_is_asked_once(place: RunDir) -> None:
    """The save is the work's own, at its next boundary; a second signal means hurry."""
    scheduler = Scheduler(JobRecord(end=time.time() + 500))

    def wait() -> None:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        notice = Path(os.environ["HPC_CKPT_NOTICE"])
        until(lambda: notice.exists() and len(notice.read_text().splitlines()) == 3)
        end_link()

    assert comes_back(place, wait, scheduler=scheduler)
    notice = place.notice(1)
    assert notice is not None and not notice.hurry
    assert {"SIGUSR1", "SIGTERM"} == set(notice.sources)
    assert 5 == scheduler.looks  # start, each of the two signals, the second TERM, end
    deadline = place.deadline(1)
    assert deadline is not None and scheduler.record.end is not None
    assert abs(deadline - scheduler.record.end) < 0.01


def until(what: Callable[[], object], within_s: float = 10.0) -> None:
    end = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_forked_child_that_is_terminated_is_no_notice(place: RunDir) -> None:
    """Data workers are ended with SIGTERM by their parent."""

    def fork() -> bool:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        os.kill(child.pid or 0, signal.SIGUSR1)
        time.sleep(0.2)
        ignored = child.is_alive()
        child.terminate()
        child.join(10)
        time.sleep(0.2)
        return ignored and child.exitcode == -signal.SIGTERM

    assert run(place, fork)
    assert place.notice(1) is None


def test_a_signal_after_the_end_does_not_undo_it(place: RunDir) -> None:
    """submitit's own callback would put a finished job back before its result is written."""
    assert "result" == run(place, lambda: "result")
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)


def test_outside_of_a_job_everything_is_put_back(place: RunDir) -> None:
    """Called directly it is a link of its own, which ends as a program does."""
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(LinkEnded):
        run(place, end_link, requeue=None)
    assert before is signal.getsignal(signal.SIGUSR1)


def test_in_a_thread_signals_are_left_alone(place: RunDir) -> None:
    """Python allows callbacks in the main thread only."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run(place, lambda: 5)))
    thread.start()
    thread.join()
    assert [5] == results


def test_no_progress_in_two_links_running_stops(place: RunDir) -> None:
    """A link that says nothing was saved got nowhere; the second one says so and ends it."""

    def nowhere() -> None:
        say(Result.FAILED)
        end_link()

    assert comes_back(place, nowhere)
    with pytest.raises(ChainStopped, match="no progress in two links running"):
        run(place, nowhere)
    with pytest.raises(ChainStopped, match="no progress in two links running"):
        run(place, nowhere)  # the same job once more: it does not even begin
    assert 2 == lease.highest(place)


def test_another_submission_has_its_own_two_links(place: RunDir) -> None:
    """Whoever submits again has changed something."""

    def nowhere() -> None:
        say(Result.FAILED)
        end_link()

    assert comes_back(place, nowhere)
    assert comes_back(place, nowhere, submission="slurm 13_0")


def test_progress_in_between_starts_the_count_again(place: RunDir) -> None:
    """Only two in a row are too many."""

    def nowhere() -> None:
        say(Result.FAILED)
        end_link()

    def somewhere() -> None:
        commit(place, 7)
        say(Result.SAVED, 7)
        end_link()

    assert [True] * 3 == [comes_back(place, work) for work in (nowhere, somewhere, nowhere)]


def test_a_preempted_link_without_progress_is_not_to_blame(place: RunDir) -> None:
    """A chain never stops because of preemptions."""
    preempted = Scheduler(JobRecord(cause=Cause.PREEMPTED))

    def nowhere() -> None:
        say(Result.FAILED)
        end_link()

    assert all(comes_back(place, nowhere, scheduler=preempted) for _ in range(4))


def test_max_restarts(place: RunDir) -> None:
    """Links beyond the first, whatever they ended for."""
    assert comes_back(place, end_link, max_restarts=1)
    with pytest.raises(ChainStopped, match="max_restarts=1 is spent"):
        run(place, end_link, max_restarts=1)


def test_max_links(place: RunDir) -> None:
    """As in a chain: preemptions do not count, and submitting again begins to count anew."""

    def gets_on() -> None:
        commit(place, lease.highest(place))
        say(Result.SAVED, lease.highest(place))
        end_link()

    preempted = Scheduler(JobRecord(cause=Cause.PREEMPTED))
    assert comes_back(place, gets_on, max_links=2)
    assert all(comes_back(place, gets_on, max_links=2, scheduler=preempted) for _ in range(3))
    with pytest.raises(ChainStopped, match="the budget of 2 links is spent"):
        run(place, gets_on, max_links=2)
    assert comes_back(place, gets_on, max_links=2, submission="slurm 13_3")


def test_the_launchers_own_limit_is_told(place: RunDir) -> None:
    """submitit's local executor would just not start it again."""
    with pytest.raises(ChainStopped, match="at most 1 times"):
        run(place, end_link, most_restarts=0)


def test_a_job_that_is_cancelled_in_the_grace_of_a_preemption_is_not_put_back(
    place: RunDir,
) -> None:
    """Slurm says COMPLETING of both, and would take a requeue."""
    grace = JobRecord(end=time.time() + 60, cause=Cause.PREEMPTED, said="PreemptTime=…")
    ending = JobRecord(end=time.time() + 5, cause=Cause.PREEMPTED, said="COMPLETING", ending=True)
    scheduler = Scheduler()

    def wait() -> None:
        for record in (grace, ending):
            scheduler.record, seen = record, scheduler.looks
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda seen=seen: scheduler.looks > seen)  # type: ignore[misc] # bound now
        end_link()

    with pytest.raises(ChainStopped, match="the job was cancelled"):
        run(place, wait, scheduler=scheduler)


def test_a_cancelled_job_is_not_put_back(place: RunDir) -> None:
    """scancel sends TERM too, and means it."""
    cancelled = Scheduler(JobRecord(cause=Cause.CANCELLED, said="scontrol: JobState=COMPLETING"))
    with pytest.raises(ChainStopped, match="the job was cancelled"):
        run(place, end_link, scheduler=cancelled)
    (ended,) = (r for r in events.read(place.ledger_file(1)) if r["event"] == "link.ended")
    assert "scontrol: JobState=COMPLETING" in ended["evidence"]


def test_a_halted_chain_ends_and_does_not_begin(place: RunDir) -> None:
    """`hpc-ckpt stop` works on these chains too."""

    def halted() -> None:
        place.write_halt("stopped by the user")
        end_link()

    for _ in range(2):
        with pytest.raises(ChainStopped, match="halted \\(stopped by the user\\)"):
            run(place, halted)
    assert 1 == lease.highest(place)


def test_a_fenced_link_neither_counts_nor_comes_back(place: RunDir) -> None:
    """A requeue would kill the newer run of the very same job."""

    def overtaken() -> None:
        (place.lease / "00000002").write_text("{}")
        end_link()

    with pytest.raises(SystemExit) as end:
        run(place, overtaken, requeue=lambda: pytest.fail("requeued"))
    assert 0 == end.value.code


def test_work_that_ignores_the_notice_is_put_back_in_the_last_moment(place: RunDir) -> None:
    """A function without a Checkpointer; Slurm then ends the process."""
    scheduler = Scheduler(JobRecord(end=time.time() + 1.5))
    back = threading.Event()

    def requeue() -> int:
        back.set()
        return BACK

    with pytest.raises(SystemExit) as end:
        run(place, lambda: back.wait(20), scheduler=scheduler, requeue=requeue)
    assert BACK == end.value.code
    assert "time limit" == read_status(place).links[0].cause


def test_without_a_known_end_it_waits_a_while_after_the_notice(
    place: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can say how long the grace is."""
    monkeypatch.setattr(tasklink, "PATIENCE_S", 0.5)
    back = threading.Event()

    def requeue() -> int:
        back.set()
        return BACK

    def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        back.wait(20)

    assert comes_back(place, work, requeue=requeue)


def test_a_requeue_that_fails_is_tried_again(place: RunDir) -> None:
    """A controller may be busy; what does not come back is lost."""
    scheduler = Scheduler(JobRecord(end=time.time() + 1.2))
    tries: list[float] = []
    back = threading.Event()

    def requeue() -> int:
        tries.append(time.monotonic())
        if len(tries) < 3:
            raise HpcCkptError("no answer")
        back.set()
        return BACK

    assert comes_back(place, lambda: back.wait(20), scheduler=scheduler, requeue=requeue)
    assert 3 == len(tries)


def test_a_command_is_judged_by_its_exit_code(place: RunDir) -> None:
    """75 comes back, 0 completes, anything else raises; after DONE nothing is run."""
    assert comes_back(place, Command(["sh", "-c", "exit 75"], own_session=True))
    with pytest.raises(HpcCkptError, match="sh: exit code 3"):
        run(place, Command(["sh", "-c", "exit 3"], own_session=True))
    assert 0 == run(place, Command(["true"], own_session=True))
    assert 0 == run(place, Command(["false"], own_session=True))


def test_code_0_after_a_term_that_nobody_explains_says_nothing_of_a_command(place: RunDir) -> None:
    """A function that returns has come to its end."""
    waits = 'kill -TERM $PPID; until test -e "$HPC_CKPT_NOTICE"; do sleep 0.05; done'
    assert comes_back(place, Command(["sh", "-c", waits], own_session=True))
    assert place.done() is None

    def told() -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: place.notice(2) is not None)
        return "result"

    assert "result" == run(place, told)


def test_nor_does_it_when_the_job_has_outlived_that(
    place: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command has heard it too, and may have saved for as long, and left for it."""
    monkeypatch.setattr(evidence, "OUTLIVED_SLACK_S", 0.0)
    waits = 'kill -TERM $PPID; until test -e "$HPC_CKPT_NOTICE"; do sleep 0.05; done; sleep 0.2'
    running = Scheduler(JobRecord(said="JobState=RUNNING", runs_on=True))
    command = Command(["sh", "-c", waits], own_session=True)
    with pytest.raises(SystemExit):
        run(place, command, scheduler=running)
    assert place.done() is None


def test_a_command_survives_the_sites_signal_and_leaves_nothing(place: RunDir) -> None:
    """Where every process of a step is signalled, the command hears USR1 too."""
    script = "kill -USR1 $$; kill -USR2 $$; sleep 600.0625 & exit 0"
    assert 0 == run(place, Command(["sh", "-c", script], own_session=True))
    lines = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    assert not [line for line in lines if b"600.0625" in line]


def test_somebody_elses_root_is_refused(place: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """One who is on its way out is waited for, one who stays is not fenced."""
    monkeypatch.setattr(lease, "PROBE_EVERY_S", 0.1)
    monkeypatch.setattr(lease, "LOOK_EVERY_S", 0.1)
    place.create()
    (place.lease / "00000001").write_text(json.dumps({"job": "77"}))
    with pytest.raises(RootError, match="in use by job 77"):
        run(place, lambda: 1, scheduler=Scheduler(alive=True))


def test_chain_json_tells_the_checkpointer_of_the_site(place: RunDir) -> None:
    """And names the job, which `hpc-ckpt stop` cancels; a submitted chain's own record stays."""
    site = {"profile": {"signal": {"name": "USR2"}}, "spec": {"checkpoint": {"policy": "auto"}}}
    job = Job(backend=Scheduler(), submission="s", requeue=lambda: BACK)
    TaskLink(place, job, site=site).run(Call(lambda: 1))
    record = place.chain() or {}
    assert ("USR2", ["12_3"]) == (record["profile"]["signal"]["name"], record["jobs"])
    place.chain_file.write_text(json.dumps({**record, "argv": ["x"], "profile": {}}))
    TaskLink(place, job, site=site).run(Call(lambda: 1))
    assert {} == (place.chain() or {})["profile"]


def test_other_ranks_join_the_generation_of_rank_0_and_leave_with_0(place: RunDir) -> None:
    """Any other code could take rank 0 with it; nothing of theirs is judged."""
    told: list[str] = []

    def lead() -> None:
        def follow() -> None:
            told.append(os.environ["HPC_CKPT_GENERATION"])
            end_link()

        job = Job(backend=Scheduler(), submission="s", rank=1, requeue=lambda: 1)
        with pytest.raises(SystemExit) as end:
            TaskLink(place, job).run(Call(follow))
        told.append(str(end.value.code))
        end_link()

    assert comes_back(place, lead)
    assert ["1", "0"] == told
    assert 1 == lease.highest(place)


def test_a_rank_without_rank_0_gives_up(place: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log says why, before the time limit does."""
    monkeypatch.setattr(tasklink, "LEASE_SLACK_S", 0.1)
    monkeypatch.setattr(tasklink, "JOIN_SLACK_S", 0.1)
    with pytest.raises(RootError, match="rank 0 of this job has taken no lease"):
        run(place, lambda: 1, rank=1)


def test_what_happened_is_in_the_ledger(place: RunDir) -> None:
    """`hpc-ckpt status` shows these chains as any other."""
    assert comes_back(place, end_link)
    began, ended = events.read(place.ledger_file(1))
    assert ("link.started", "link.ended") == (began["event"], ended["event"])
    assert "n1" == began["node"]
    assert any("exit code" in said for said in ended["evidence"])


# ── storage that is full or away when a link begins ───────────────────────────────────────
class Failing:
    """Does what `real` does, once it has failed so often."""

    def __init__(self, real: Callable[..., Any], number: int, times: float = 1) -> None:
        self.real, self.number, self.left = real, number, times

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.left > 0:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number))
        return self.real(*args, **kwargs)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    return waited


@pytest.mark.parametrize("where", ["create", "halted", "done"])
def test_storage_that_fails_for_a_moment_costs_waiting(
    place: RunDir, monkeypatch: pytest.MonkeyPatch, slept: list[float], where: str
) -> None:
    """As in the links of `hpc-ckpt submit`: the whole chain would be over otherwise."""
    failing = Failing(getattr(RunDir, where), errno.ESTALE)
    method = lambda *args, **more: failing(*args, **more)  # noqa: E731, PLW0108 - it is bound
    monkeypatch.setattr(RunDir, where, method)
    assert 0 == run(place, Command(["true"], own_session=True))
    assert [patience.STORAGE_RETRY_S] == slept


def test_a_lease_that_was_taken_as_storage_failed_is_no_one_elses(
    place: RunDir, monkeypatch: pytest.MonkeyPatch, slept: list[float]
) -> None:
    """Its job lives, and is this one."""
    failing = Failing(fsio.sync_directory, errno.EIO)

    def sync(directory: Path) -> None:
        taken = (place.lease / "00000001").exists()
        (failing if taken else failing.real)(directory)

    monkeypatch.setattr(fsio, "sync_directory", sync)
    assert 5 == run(place, lambda: 5, scheduler=Scheduler(alive=True))
    assert (2, [patience.STORAGE_RETRY_S]) == (lease.highest(place), slept)


def test_a_chain_json_that_cannot_be_read_just_now_is_waited_for(
    place: RunDir, monkeypatch: pytest.MonkeyPatch, slept: list[float]
) -> None:
    place.create()
    place.chain_file.write_text(json.dumps({"chain": "x"}))
    read, stale = Path.read_bytes, Failing(Path.read_bytes, errno.ESTALE, times=3)

    def read_bytes(path: Path) -> bytes:
        found: bytes = (stale if path == place.chain_file else read)(path)
        return found

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert 5 == run(place, lambda: 5)
    assert [patience.STORAGE_RETRY_S] == slept


@pytest.mark.parametrize(("restarts", "back"), [(0, True), (18, True), (19, False)])
def test_a_root_that_stays_full_puts_the_job_back_and_not_for_ever(
    place: RunDir, monkeypatch: pytest.MonkeyPatch, restarts: int, back: bool
) -> None:
    place.create()
    monkeypatch.setattr(patience, "STORAGE_PATIENCE_S", 0.0)
    monkeypatch.setattr(lease, "acquire", Failing(lease.acquire, errno.ENOSPC, times=9))
    scheduler = Scheduler(restarts=restarts)
    if back:
        assert comes_back(place, lambda: 5, scheduler=scheduler)
    else:
        with pytest.raises(OSError, match="No space"):
            run(place, lambda: 5, scheduler=scheduler)


def test_without_anybody_to_bring_it_back_storage_has_the_last_word(
    place: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "STORAGE_PATIENCE_S", 0.0)
    monkeypatch.setattr(lease, "acquire", Failing(lease.acquire, errno.ENOSPC, times=9))
    with pytest.raises(OSError, match="No space"):
        run(place, lambda: 5, requeue=None)


def test_a_root_that_nobody_can_make_is_said_at_once(tmp_path: Path, slept: list[float]) -> None:
    """A mistake does not heal; but where the job ran before, it is the storage."""
    (tmp_path / "file").touch()
    place = RunDir(tmp_path / "file" / "run")
    with pytest.raises(RootError, match="cannot be used as a run directory"):
        run(place, lambda: 5)
    assert [] == slept


def test_a_root_that_could_be_made_before_is_waited_for(
    place: RunDir, monkeypatch: pytest.MonkeyPatch, slept: list[float]
) -> None:
    """What is not mounted has a parent that belongs to somebody else."""
    failing = Failing(RunDir.create, errno.EACCES)
    method = lambda *args, **more: failing(*args, **more)  # noqa: E731, PLW0108 - it is bound
    monkeypatch.setattr(RunDir, "create", method)
    assert 5 == run(place, lambda: 5, scheduler=Scheduler(restarts=1))
    assert [patience.STORAGE_RETRY_S] == slept


def test_other_ranks_pass_over_storage_that_fails_for_a_moment(
    place: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def lead() -> None:
        monkeypatch.setattr(lease, "highest", Failing(lease.highest, errno.ESTALE))
        job = Job(backend=Scheduler(), submission="s", rank=1, requeue=lambda: 1)
        TaskLink(place, job).run(Call(lambda: told.append(os.environ["HPC_CKPT_GENERATION"])))

    run(place, lead)
    assert ["1"] == told
