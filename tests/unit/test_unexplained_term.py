"""TERM came, and the scheduler did not say why: what this link and the next make of it."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from links import make_chain

from hpc_ckpt import events, lease
from hpc_ckpt.chain import evidence
from hpc_ckpt.chain.allocation import SlurmBackend
from hpc_ckpt.chain.backend import Backend, Cause, JobRecord
from hpc_ckpt.chain.clockwork import Clockwork
from hpc_ckpt.chain.ledger import read_status
from hpc_ckpt.chain.link import LinkRunner
from hpc_ckpt.chain.local import LocalBackend
from hpc_ckpt.chain.lookback import explain_last
from hpc_ckpt.chain.orders import Orders
from hpc_ckpt.chain.verdict import judge
from hpc_ckpt.errors import SchedulerError
from hpc_ckpt.events import Event, EventLog
from hpc_ckpt.rundir import Outcome, Result, RunDir, write_outcome

NOTICED = 'until test -e "$HPC_CKPT_NOTICE"; do sleep 0.05; done'
TELLS_ITSELF = 'echo \'{"time": 1, "source": "TERM"}\' > "$HPC_CKPT_NOTICE"'
HEARS = TELLS_ITSELF.replace("TERM", "shim TERM")


class Job(SlurmBackend):
    """Its step is the command itself."""

    def step(self, argv: Sequence[str], log: Path) -> list[str]:
        return list(argv)


def away(argv: Sequence[str]) -> str:
    """Since the link has begun: it was still told of the other indices of its array."""
    if argv[-1] == "9":
        return ""
    raise SchedulerError(argv, 1, "Socket timed out on send/recv operation")


@pytest.fixture
def term() -> Iterator[Callable[[], None]]:
    """Sends TERM to this thread, where the link waits for it; nobody else hears it."""
    heard = {signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    yield lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    while signal.sigtimedwait(heard, 0) is not None:
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def chain(tmp_path: Path, script: str, **more: Any) -> RunDir:
    return make_chain(tmp_path / "run", argv=["sh", "-c", script], jobs=["9"], **more)


def run_link(
    rundir: RunDir, run: Callable[[Sequence[str]], str], index: int = 1, restarts: int = 0
) -> None:
    environ = {
        "SLURM_JOB_ID": str(9 + index),
        "SLURM_ARRAY_JOB_ID": "9",
        "SLURM_ARRAY_TASK_ID": str(index),
        "SLURM_RESTART_COUNT": str(restarts),
    }
    LinkRunner(rundir, Orders.read(rundir), Job(environ, kill_wait_s=5.0, run=run)).run()


def end_of(rundir: RunDir, generation: int = 1) -> dict[str, Any]:
    records = events.read(rundir.ledger_file(generation))
    (ended,) = (r for r in records if r["event"] == Event.LINK_ENDED.value)
    return ended


# ── exit code 0 ───────────────────────────────────────────────────────────────────────────
def test_code_0_after_it_does_not_say_that_the_work_is_complete(
    tmp_path: Path, term: Callable[[], None]
) -> None:
    """Many programs save at a signal and leave with 0."""
    rundir = chain(tmp_path, NOTICED)
    term()
    run_link(rundir, away)
    assert (Result.SAVED.value, Cause.STOPPED.value) == (
        end_of(rundir)["outcome"], end_of(rundir)["cause"],
    )  # fmt: skip
    assert rundir.done() is None


@pytest.mark.parametrize(
    ("shown", "after_s", "complete"),
    [("RUNNING", 0.2, True), ("RUNNING", 60.0, False), ("COMPLETING", 0.2, False)],
)
def test_unless_the_job_has_outlived_it(
    tmp_path: Path,
    term: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    shown: str,
    after_s: float,
    complete: bool,
) -> None:
    """The kill would have come by then: who sent it did not end the job."""
    monkeypatch.setattr(evidence, "OUTLIVED_SLACK_S", after_s - 5.0)  # the kill wait
    rundir = chain(tmp_path, f"{NOTICED}; sleep 0.5")
    term()
    run_link(rundir, Later(shown))
    assert complete is (rundir.done() is not None)
    unknown = shown == "RUNNING" and not complete
    assert unknown is (end_of(rundir).get("cause_unknown") is True)


def test_nor_where_nobody_says_that_it_runs(
    tmp_path: Path, term: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "OUTLIVED_SLACK_S", -5.0)
    rundir = chain(tmp_path, NOTICED)
    term()
    run_link(rundir, away)
    assert rundir.done() is None


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.usefixtures("term")
def test_nor_does_it_after_a_signal_that_was_forwarded(tmp_path: Path, forward: bool) -> None:
    """The shim alone heard TERM. Told by the notice file alone a program says 75."""
    spec = {"forward": {"signal": "USR1", "to": "command"}} if forward else {}
    rundir = chain(tmp_path, TELLS_ITSELF, spec=spec)
    run_link(rundir, away)
    assert forward is (rundir.done() is None)


@pytest.mark.usefixtures("term")
def test_nor_does_it_where_the_shim_alone_heard_it(tmp_path: Path) -> None:
    """As at the start of a preemption's grace; a program that heard it too may leave at once."""
    rundir = chain(tmp_path, HEARS)
    run_link(rundir, away)
    assert Result.SAVED.value == end_of(rundir)["outcome"]
    assert end_of(rundir)["cause_unknown"] is True
    assert rundir.done() is None


@pytest.mark.usefixtures("term")
def test_a_script_that_signals_its_own_group_is_complete(tmp_path: Path) -> None:
    """`kill 0` reaches the shim too: Slurm answers that the job runs on."""
    rundir = chain(tmp_path, HEARS)
    run_link(rundir, Later("RUNNING"))
    assert rundir.done() is not None


@pytest.mark.parametrize("shim_first", [True, False])
def test_but_not_where_the_job_heard_it_too(rundir: RunDir, shim_first: bool) -> None:
    """As at the end, which Slurm may not show yet, and by `scancel --full -s TERM`."""
    clock = clock_of(rundir, Job({"SLURM_JOB_ID": "9_1"}, run=Later("RUNNING")))
    rundir.give_notice(1, "shim TERM")
    hear = [clock.hear_shim, clock.terminated]
    for one in hear if shim_first else hear[::-1]:
        one()
    clock.look_again()
    assert clock.is_terminated


@pytest.mark.parametrize("shown", ["RUNNING", None])
def test_and_so_it_is_where_it_was_warned_before(rundir: RunDir, shown: str | None) -> None:
    """The backstop has warned of the time limit, and the script comes to its own end in time.
    Where nobody answers it may have been that limit."""
    run = away if shown is None else Later(shown)
    clock = clock_of(rundir, Job({"SLURM_JOB_ID": "9_1"}, run=run))
    clock.warned(signal.SIGUSR1)
    assert clock.seen is not None and clock.seen.warning
    rundir.give_notice(1, "shim TERM")
    clock.hear_shim()
    clock.look_again()
    complete = judge(rundir, 1, 0, clock.seen, told=clock.is_terminated).result is Result.COMPLETE
    assert (complete, complete) == (shown is not None, clock.seen.warning)


def test_what_the_job_has_outlived_is_not_heard_again(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notice stays; only a further TERM is news."""
    monkeypatch.setattr(evidence, "OUTLIVED_SLACK_S", 0.0)
    clock = clock_of(rundir, Job({"SLURM_JOB_ID": "9_1"}, kill_wait_s=0.0, run=Later("RUNNING")))
    for _ in range(2):
        rundir.give_notice(1, "shim TERM")
        clock.tick()
        assert clock.is_terminated
        clock.look_again()
        clock.tick()
        clock.hear_shim()
        assert not clock.is_terminated


def test_what_a_steward_has_by_its_code_says_no_more(rundir: RunDir) -> None:
    by_code = Outcome(Result.COMPLETE, 1, None, "exit code 0", by_code=True)
    write_outcome(rundir.outcome_file(1), by_code)
    assert Result.SAVED is judge(rundir, 1, 0, None, told=True).result
    assert rundir.done() is None


# ── a cancelled job ───────────────────────────────────────────────────────────────────────
SAVES = f'touch "$HPC_CKPT_ROOT/ran-$HPC_CKPT_GENERATION"; {NOTICED}; exit 75'


class Later:
    """Slurm, once it answers: what it shows of job 9_1, one after the other."""

    def __init__(self, *states: str) -> None:
        self.states = list(states)
        self.restarts = 0
        self.told: list[list[str]] = []

    def __call__(self, argv: Sequence[str]) -> str:
        if argv[:2] != ["scontrol", "-o"]:
            self.told.append(list(argv))
        elif argv[-1] == "9_1":
            state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
            ids = f"JobId=10 ArrayJobId=9 ArrayTaskId=1 Restarts={self.restarts} NodeList=n1"
            return f"{ids} JobState={state}"
        return ""


@pytest.mark.parametrize(
    ("states", "reaction", "halts"),
    [
        (["CANCELLED"], "halt", True),
        (["COMPLETING", "CANCELLED"], "halt", True),
        (["CANCELLED"], "continue", False),
        (["TIMEOUT"], "halt", False),
        (["COMPLETED"], "halt", False),
    ],
)
def test_the_next_link_asks_whether_it_was_cancelled(
    tmp_path: Path,
    term: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    states: list[str],
    reaction: str,
    halts: bool,
) -> None:
    """A job whose link is over may still be on its way out."""
    monkeypatch.setattr("hpc_ckpt.chain.lookback.ASK_AGAIN_S", 0.01)
    chain_rules = {"max_links": 9, "on_cancel": reaction}
    rundir = chain(tmp_path, SAVES, spec={"chain": chain_rules})
    term()
    run_link(rundir, away)
    assert end_of(rundir)["cause_unknown"] is True
    if not halts:
        term()
    run_link(rundir, Later(*states), index=2)
    assert halts is (rundir.halted() == "cancelled by the user")
    assert halts is not (rundir.root / "ran-2").exists()
    cause = {"COMPLETED": "saved and left", "TIMEOUT": "time limit"}.get(states[-1], "cancelled")
    assert cause == read_status(rundir).links[0].cause


def test_it_asks_again_while_nobody_answers(
    tmp_path: Path, term: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_ckpt.chain.lookback.ASK_AGAIN_S", 0.01)
    rundir, slurm = chain(tmp_path, SAVES), Later("CANCELLED")
    term()
    run_link(rundir, away)
    absent = [away] * 3

    def run(argv: Sequence[str]) -> str:
        explains = argv[:2] == ["scontrol", "-o"] and argv[-1] == "9_1"
        return absent.pop()(argv) if absent and explains else slurm(argv)

    run_link(rundir, run, index=2)
    assert [] == absent
    assert "cancelled by the user" == rundir.halted()


@pytest.mark.parametrize("shown", [None, "COMPLETING"])
def test_a_link_that_is_told_to_stop_as_it_waits_for_that_starts_nothing(
    tmp_path: Path, term: Callable[[], None], shown: str | None
) -> None:
    """What the one before was stays open: this one is over at once."""
    rundir = chain(tmp_path, SAVES)
    term()
    run_link(rundir, away)
    term()
    run_link(rundir, away if shown is None else Later(shown), index=2)
    assert not (rundir.root / "ran-2").exists()
    assert "told to stop before the program was started" == end_of(rundir, 2)["reason"]


@pytest.mark.parametrize(("runs", "halts"), [(False, True), (True, False)])
def test_the_one_after_it_asks_for_both(
    tmp_path: Path, term: Callable[[], None], runs: bool, halts: bool
) -> None:
    """It started nothing: how the program was ended is still open. One that ran a program went on
    from there, and what its user did before that is over."""
    rundir = chain(tmp_path, SAVES)
    term()
    run_link(rundir, away)
    term()
    run_link(rundir, Later("COMPLETED") if runs else away, index=2)
    assert runs is (rundir.root / "ran-2").exists()
    term()
    run_link(rundir, Later("CANCELLED"), index=3)
    assert halts is (read_status(rundir).links[0].cause == "cancelled")
    assert halts is (rundir.halted() == "cancelled by the user")
    assert halts is not (rundir.root / "ran-3").exists()


def test_what_it_had_found_out_is_not_asked_for_again(rundir: RunDir) -> None:
    ended = {"outcome": "failed", "cause": Cause.STOPPED, "code": None}
    for generation in (1, 2):
        (rundir.lease / f"{generation:08d}").write_text(f'{{"job": "9_{generation}"}}')
        log = EventLog(rundir.ledger_file(generation))
        log.emit(Event.LINK_STARTED, step=0)
        if generation == 2:
            log.emit(Event.LINK_EXPLAINED, generation=1, cause=Cause.PREEMPTED)
            log.emit(Event.LINK_ENDED, **ended)
    asked: list[str] = []

    def run(argv: Sequence[str]) -> str:
        asked.append(argv[-1])
        return ""

    explain_last(rundir, 3, Orders.read(rundir), Job({}, run=run), EventLog(rundir.ledger_file(3)))
    assert [] == asked


def test_a_requeue_does_not_undo_it(tmp_path: Path, term: Callable[[], None]) -> None:
    """The controller was away as TERM came, and answers as the job would be put back."""
    slurm = Later("COMPLETING Reason=None")

    def run(argv: Sequence[str]) -> str:
        if argv[:2] == ["scontrol", "-o"] and not lease.released(rundir, 1):
            return away(argv)
        return slurm(argv)

    rundir = chain(tmp_path, SAVES, strategy="requeue")
    term()
    run_link(rundir, run)
    assert [] == slurm.told
    assert "cancelled by the user, as Slurm said once it answered" == rundir.halted()


def test_nor_does_the_requeue_explain_it(tmp_path: Path, term: Callable[[], None]) -> None:
    """The chain puts its own job back: no cause, and no reason to forget that it got nowhere."""
    rundir = chain(tmp_path, f"{NOTICED}; exit 1", strategy="requeue")
    slurm = Later("RUNNING")
    for slurm.restarts in (0, 1):
        term()
        run_link(rundir, slurm, restarts=slurm.restarts)
    assert ["crashed", "crashed"] == [link.cause for link in read_status(rundir).links]
    assert "no progress" in str(rundir.halted())


class SlowToAnswer(Job):
    """The first question, what ends the job, has no answer; later ones have."""

    def look(self) -> JobRecord:
        return JobRecord()


@pytest.mark.parametrize("set_up", [True, False])
def test_nor_does_that_of_a_link_that_has_not_begun(
    tmp_path: Path, term: Callable[[], None], monkeypatch: pytest.MonkeyPatch, set_up: bool
) -> None:
    """It waits for its lease, or after a set-up that failed."""
    rundir, slurm = chain(tmp_path, SAVES, strategy="requeue"), Later("COMPLETING Reason=None")
    environ = {"SLURM_JOB_ID": "10", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "1"}
    runner = LinkRunner(rundir, Orders.read(rundir), SlowToAnswer(environ, run=slurm))
    monkeypatch.setattr(runner, "_acquire", full)
    term()
    assert (0 if set_up else 1) == (runner.run() if set_up else runner.not_set_up("no module"))
    assert [] == [words for words in slurm.told if "requeue" in words]
    assert "cancelled by the user, as Slurm said once it answered" == rundir.halted()


def full() -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


# ── what counts as a word of the scheduler ────────────────────────────────────────────────
def clock_of(rundir: RunDir, backend: Backend) -> Clockwork:
    return Clockwork(rundir, Orders.read(rundir), backend, EventLog(rundir.ledger_file(1)), 1)


def test_its_word_is_heard_behind_what_was_concluded(tmp_path: Path) -> None:
    """The backstop of a program that a signal is forwarded to has called it the time limit."""
    rundir = chain(tmp_path, "true", spec={"forward": {"signal": "USR1", "to": "command"}})
    slurm = Later("RUNNING", "COMPLETING Reason=TimeLimit")
    clock = clock_of(rundir, Job({"SLURM_JOB_ID": "9_1"}, run=slurm))
    clock.warned(signal.SIGUSR1)
    clock.terminated()
    assert clock.is_unexplained()
    clock.ask_once("SIGTERM")
    assert not clock.is_unexplained()


def test_where_nobody_can_say_why_nobody_is_asked_later(tmp_path: Path) -> None:
    rundir = chain(tmp_path, "true")
    clock = clock_of(rundir, LocalBackend())
    clock.terminated()
    assert {} == clock.said_of_the_end()
