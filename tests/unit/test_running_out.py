"""A chain that nothing follows: whoever waits for its end comes back."""

import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from hpc_ckpt.chain import submit
from hpc_ckpt.chain.backend import Cause
from hpc_ckpt.chain.following import chain_over, is_over
from hpc_ckpt.chain.ledger import ChainStatus, State, read_status
from hpc_ckpt.chain.submit import Chain
from hpc_ckpt.cli import live, watching
from hpc_ckpt.events import Event, EventLog
from hpc_ckpt.lease import Holder
from hpc_ckpt.rundir import RunDir

WHY = "this site lets no compute node submit jobs; submit the chain again"


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    """The last link of a chain at work; nothing follows it, and it has said so."""
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    rundir.chain_file.write_text(json.dumps({"chain": "x", "jobs": ["7"]}))
    holder = Holder(job="7_1", host="elsewhere")
    (rundir.lease / "00000001").write_text(json.dumps(vars(holder)))
    ledger = EventLog(rundir.ledger_file(1))
    ledger.emit(Event.LINK_STARTED, step=0)
    ledger.emit(Event.NOTHING_FOLLOWS, reason=WHY)
    return rundir


def ended(rundir: RunDir, cause: Cause) -> None:
    EventLog(rundir.ledger_file(1)).emit(Event.LINK_ENDED, cause=cause.value)


def left(rundir: RunDir) -> None:
    (rundir.lease / "00000001.released").touch()


def over(rundir: RunDir) -> bool:
    """In the eyes of all who wait, who are of one mind."""
    seen = {is_over(read_status(rundir)), chain_over(rundir), _wait_returns(rundir)}
    assert 1 == len(seen)
    return seen.pop()


def _wait_returns(rundir: RunDir) -> bool:
    try:
        Chain(rundir.root).wait(timeout_s=0)
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("cause", [Cause.SAVED, Cause.TIME_LIMIT, Cause.CRASHED, Cause.CANCELLED])
def test_a_chain_is_over_when_its_last_link_has_left(rundir: RunDir, cause: Cause) -> None:
    """Not while the link runs, nor while its runner still decides what becomes of the chain."""
    assert not over(rundir)
    ended(rundir, cause)
    assert not over(rundir)
    left(rundir)
    assert over(rundir)


@pytest.mark.parametrize("cause", [Cause.PREEMPTED, Cause.REQUEUED, Cause.NODE_FAILURE])
def test_a_job_that_slurm_may_put_back_is_waited_for(rundir: RunDir, cause: Cause) -> None:
    """Nothing was submitted behind it; it comes again itself."""
    ended(rundir, cause)
    left(rundir)
    assert not over(rundir)


def test_a_last_link_without_a_word_is_gone_with_its_deadline(rundir: RunDir) -> None:
    """A program that hears nothing takes its runner with it when Slurm kills them."""
    rundir.write_deadline(1, time.time())
    assert not over(rundir)
    rundir.write_deadline(1, 1000.0)
    assert over(rundir)


def test_a_chain_that_something_follows_is_not_over(rundir: RunDir) -> None:
    """It was submitted again, or another link of it is about to begin."""
    ended(rundir, Cause.SAVED)
    left(rundir)
    (rundir.lease / "00000002").write_text(json.dumps(vars(Holder(job="7_2", host="n"))))
    assert not over(rundir)
    (rundir.lease / "00000002").unlink()
    rundir.chain_file.write_text(json.dumps({"chain": "x", "after_generation": 1}))
    assert not over(rundir)


def test_wait_comes_back_without_a_timeout(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    ended(rundir, Cause.SAVED)
    monkeypatch.setattr(submit.time, "sleep", lambda _: left(rundir))
    told = Chain(rundir.root).wait()
    assert (State.BETWEEN, f"nothing follows this link: {WHY}") == (told.state, told.remark)


def test_who_waits_reads_the_history_only_where_it_may_be_over(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a long chain on a shared file system that is hundreds of files."""
    rundir.ledger_file(1).unlink()
    EventLog(rundir.ledger_file(1)).emit(Event.LINK_STARTED, step=0)
    read: list[RunDir] = []
    slept: list[float] = []

    def status_of(place: RunDir) -> ChainStatus:
        read.append(place)
        return read_status(place)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 5:
            ended(rundir, Cause.HALTED)
            rundir.write_halt("enough")

    monkeypatch.setattr(submit, "read_status", status_of)
    monkeypatch.setattr(submit.time, "sleep", sleep)
    assert State.STOPPED is Chain(rundir.root).wait().state
    assert (5, 1) == (len(slept), len(read))


@pytest.mark.parametrize(("terminal", "looks"), [(True, 1), (False, 0)])
def test_a_chain_on_this_machine_is_looked_at_only_where_it_is_shown(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, terminal: bool, looks: int
) -> None:
    """Ten times a second it is asked for; four times a second somebody can see it."""
    screen = Console(file=io.StringIO(), force_terminal=terminal)
    monkeypatch.setattr(watching, "console", lambda: screen)
    monkeypatch.setattr(watching, "REFRESH_S", 60.0)
    read: list[RunDir] = []

    def look() -> ChainStatus:
        read.append(rundir)
        return read_status(rundir)

    with watching._live(None) as show:
        for _ in range(10):
            show("a chain", look)
    assert looks == len(read)


def test_watch_says_why_and_fails(rundir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    ended(rundir, Cause.SAVED)
    left(rundir)
    assert 1 == live.watch_chain(rundir, as_json=False)
    assert f"(nothing follows this link: {WHY})" in capsys.readouterr().out
