"""Storage that does not answer costs waiting before a link, and nothing while its program runs."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt import lease
from hpc_ckpt.chain import link, patience, unread
from hpc_ckpt.chain.allocation import SlurmBackend
from hpc_ckpt.chain.clockwork import Clockwork
from hpc_ckpt.chain.local import LocalBackend
from hpc_ckpt.chain.orders import Orders
from hpc_ckpt.chain.succession import InOneProcess
from hpc_ckpt.errors import SchedulerError
from hpc_ckpt.events import EventLog
from hpc_ckpt.rundir import RunDir


@pytest.fixture
def runner(rundir: RunDir) -> link.LinkRunner:
    return link.LinkRunner(rundir, Orders.read(rundir), LocalBackend(kill_wait_s=5.0))


def stale(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ESTALE, "Stale file handle")


class Following(InOneProcess):
    """Counts how often it was to go on."""

    def __init__(self) -> None:
        self.went_on = 0

    def go_on(self) -> None:
        self.went_on += 1


# ── during ────────────────────────────────────────────────────────────────────────────────
def test_a_look_that_fails_is_said_once_and_the_rest_is_still_looked_at(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The notice file cannot be seen; the end of the link is still enforced."""
    log = EventLog(rundir.ledger_file(1))
    clock = Clockwork(rundir, Orders.read(rundir), LocalBackend(kill_wait_s=5.0), log, 1)
    clock.deadline = 1.0
    monkeypatch.setattr(Path, "exists", stale)
    with caplog.at_level(logging.WARNING):
        clock.tick()
        clock.tick()
    assert 1 == caplog.text.count("Stale file handle")
    assert "end of the link" in rundir.notice_file(1).read_text()


def test_the_program_outlives_what_the_runner_cannot_see(
    runner: link.LinkRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whatever it looks at."""
    monkeypatch.setattr(runner._succession, "prepare", stale)
    monkeypatch.setattr(runner._clock, "tick", stale)
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        runner._look_around(child)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_an_error_after_the_lease_was_taken_does_not_end_the_chain(
    runner: link.LinkRunner, rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = Following()
    monkeypatch.setattr(link, "succession", lambda *_: follow)
    monkeypatch.setattr(runner, "_run_link", stale)
    with pytest.raises(OSError, match="Stale"):
        runner.run()
    assert 1 == follow.went_on
    rundir.write_halt("enough")
    runner._go_on_unless_over()
    assert 1 == follow.went_on


# ── before ────────────────────────────────────────────────────────────────────────────────
def waiting(monkeypatch: pytest.MonkeyPatch, back: Callable[[], object]) -> list[float]:
    """Storage comes back while somebody waits for it."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        back()

    monkeypatch.setattr(patience, "sleep_unless_told", sleep)
    return slept


def run_main(monkeypatch: pytest.MonkeyPatch, *words: str, backend: str = "local") -> int:
    """Up to where the runner begins."""
    monkeypatch.setattr(link.LinkRunner, "run", lambda _: 0)
    monkeypatch.setattr("signal.pthread_sigmask", lambda *_: set())
    return link.main([*words, "--backend", backend])


def test_the_orders_are_waited_for(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not mounted has not even the place for runs."""
    place, away = tmp_path / "runs", tmp_path / "away"
    away.mkdir()
    rundir.root.rename(away / "run")
    slept = waiting(monkeypatch, lambda: away.rename(place))
    assert 0 == run_main(monkeypatch, "--root", str(place / "run"))
    assert [patience.STORAGE_RETRY_S] == slept


def test_a_sweep_is_waited_for(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {"members": [{"name": "run", "values": {"lr": "1"}}]}
    (tmp_path / "sweep.json").write_text(json.dumps(record))
    reading = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", stale)
    slept = waiting(monkeypatch, lambda: monkeypatch.setattr(Path, "read_bytes", reading))
    assert 0 == run_main(monkeypatch, "--root", str(tmp_path), "--member", "1")
    assert [patience.STORAGE_RETRY_S] == slept


def test_the_first_look_at_the_leases_is_waited_for(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    highest = lease.highest
    monkeypatch.setattr(lease, "highest", stale)
    slept = waiting(monkeypatch, lambda: monkeypatch.setattr(lease, "highest", highest))
    assert 0 == run_main(monkeypatch, "--root", str(rundir.root))
    assert [patience.STORAGE_RETRY_S] == slept


@pytest.mark.parametrize("set_up", [True, False])
def test_whether_the_chain_is_over_is_waited_for(
    runner: link.LinkRunner, rundir: RunDir, monkeypatch: pytest.MonkeyPatch, set_up: bool
) -> None:
    """A link that cannot be told so would fail before it has begun."""
    rundir.write_halt("enough")
    over = runner._why_over
    monkeypatch.setattr(runner, "_why_over", stale)
    slept = waiting(monkeypatch, lambda: monkeypatch.setattr(runner, "_why_over", over))
    assert 0 == (runner.run() if set_up else runner.not_set_up("no such module"))
    assert [patience.STORAGE_RETRY_S] == slept


def asks_slurm(monkeypatch: pytest.MonkeyPatch, *answers: str | SchedulerError) -> list[list[str]]:
    """What is asked of a scheduler that answers so, from within job 812."""
    asked: list[list[str]] = []
    left = list(answers)

    def run(argv: Sequence[str], *_: Any) -> str:
        asked.append(list(argv))
        answer = left.pop(0) if left else ""
        if isinstance(answer, SchedulerError):
            raise answer
        return answer

    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "812")
    monkeypatch.setattr(unread, "SlurmBackend", partial(SlurmBackend, run=run))
    return asked


def unread_for_ever(monkeypatch: pytest.MonkeyPatch, rundir: RunDir, strategy: str) -> int:
    monkeypatch.setattr(patience, "STORAGE_PATIENCE_S", 0.0)
    monkeypatch.setattr(Path, "read_bytes", stale)
    root = ("--root", str(rundir.root))
    return run_main(monkeypatch, *root, "--strategy", strategy, backend="slurm")


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("requeue", True), ("resubmit", True), ("array", False), ("afterany", False)],
)
def test_orders_that_never_come_do_not_end_a_chain(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, strategy: str, expected: bool
) -> None:
    """Where nothing waits behind this link, its job goes back into the queue."""
    asked = asks_slurm(monkeypatch)
    assert 0 != unread_for_ever(monkeypatch, rundir, strategy)
    assert ([["scontrol", "requeue", "812"]] if expected else []) == asked


@pytest.mark.parametrize(
    ("state", "requeued"),
    [("CANCELLED Reason=None", False), ("COMPLETING Reason=TimeLimit", True), ("RUNNING", False)],
)
def test_told_to_stop_while_orders_are_waited_for(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, state: str, requeued: bool
) -> None:
    """What somebody cancelled is not brought back."""
    asked = asks_slurm(monkeypatch, f"JobId=812 JobState={state} Restarts=0")
    monkeypatch.setattr(patience, "sleep_unless_told", tell)
    monkeypatch.setattr(Path, "read_bytes", stale)
    root = ("--root", str(rundir.root))
    assert 1 == run_main(monkeypatch, *root, "--strategy", "requeue", backend="slurm")
    assert requeued == (["scontrol", "requeue", "812"] in asked)


@pytest.mark.parametrize(("restarts", "requeued"), [(22, True), (23, False)])
def test_orders_that_can_never_be_read_again_are_not_tried_for_ever(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, restarts: int, requeued: bool
) -> None:
    """One file is broken, and the rest of the root answers: its last lease is of restart 3."""
    asked = asks_slurm(monkeypatch)
    (rundir.lease / "00000004").write_text(json.dumps({"job": "812", "restarts": 3}))
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    monkeypatch.setattr(patience, "STORAGE_PATIENCE_S", 0.0)
    read = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        return stale() if path == rundir.chain_file else read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    root = ("--root", str(rundir.root))
    assert 0 != run_main(monkeypatch, *root, "--strategy", "requeue", backend="slurm")
    assert ([["scontrol", "requeue", "812"]] if requeued else []) == asked


@pytest.mark.parametrize("gone", [True, False])
def test_a_root_that_is_away_ends_no_chain_however_often_its_job_began(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    """Its leases would tell which of the starts were in vain."""
    asked = asks_slurm(monkeypatch)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "99")
    (rundir.lease / "00000004").write_text(json.dumps({"job": "812", "restarts": 98}))
    if gone:
        shutil.rmtree(rundir.root.parent)
    assert 0 != unread_for_ever(monkeypatch, rundir, "requeue")
    assert [["scontrol", "requeue", "812"]] == asked


def tell(_: float) -> None:
    raise patience.ToldToStop


def test_storage_and_scheduler_are_away_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a failure of power; a refusal is final, and said."""
    away = SchedulerError(["scontrol"], 1, "Unable to contact slurm controller")
    asked = asks_slurm(monkeypatch, away, SchedulerError(["scontrol"], 1, "disabled\n"))
    slept: list[float] = []
    unread.requeue(unread.SlurmBackend(os.environ), sleep=slept.append)
    assert (2, 1) == (len(asked), len(slept))
    assert "nothing follows this link: disabled; submit the chain again" in caplog.text


@pytest.mark.parametrize(
    ("strategy", "restarts", "requeued"),
    [
        ("requeue", 22, True),
        ("requeue", 23, False),
        ("resubmit", 18, True),
        ("resubmit", 19, False),
        ("array", 0, False),
        ("afterany", 0, False),
    ],
)
def test_a_full_root_is_tried_again_and_not_for_ever(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, strategy: str, restarts: int, requeued: bool
) -> None:
    """No lease, no ledger: no budget counts such a start. Job 812 has had links up to its third
    restart, if it is the one that goes back after each; other strategies have their tokens."""
    asked = asks_slurm(monkeypatch)
    job = "812" if strategy == "requeue" else "811"
    (rundir.lease / "00000004").write_text(json.dumps({"job": job, "restarts": 3}))
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    backend = unread.SlurmBackend(os.environ)
    monkeypatch.setattr(unread, "SlurmBackend", SlurmBackend)
    monkeypatch.setattr(patience, "STORAGE_PATIENCE_S", 0.0)
    orders = replace(Orders.read(rundir), strategy=strategy)
    runner = link.LinkRunner(rundir, orders, backend)
    monkeypatch.setattr(runner, "_acquire", full)
    with pytest.raises(OSError, match="No space"):
        runner.run()
    assert ([["scontrol", "requeue", "812"]] if requeued else []) == asked


@pytest.mark.parametrize("set_up", [True, False])
def test_a_chain_of_which_nobody_knows_whether_it_is_over_goes_on(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, set_up: bool
) -> None:
    """A later link may find out."""
    asked = asks_slurm(monkeypatch)
    monkeypatch.setattr(patience, "STORAGE_PATIENCE_S", 0.0)
    backend = unread.SlurmBackend(os.environ)
    monkeypatch.setattr(unread, "SlurmBackend", SlurmBackend)
    orders = replace(Orders.read(rundir), strategy="requeue")
    runner = link.LinkRunner(rundir, orders, backend)
    monkeypatch.setattr(runner, "_why_over", stale)
    begin = runner.run if set_up else partial(runner.not_set_up, "no such module")
    with pytest.raises(OSError, match="Stale"):
        begin()
    assert [["scontrol", "requeue", "812"]] == asked


def test_leases_that_are_never_seen_do_not_end_a_chain(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And what storage says is told without a traceback."""
    asked = asks_slurm(monkeypatch)
    monkeypatch.setattr(patience, "STORAGE_PATIENCE_S", 0.0)
    monkeypatch.setattr(lease, "highest", stale)
    root = ("--root", str(rundir.root))
    assert 1 == run_main(monkeypatch, *root, "--strategy", "requeue", backend="slurm")
    assert [["scontrol", "requeue", "812"]] == asked
    assert "Stale file handle" in caplog.text


def full() -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_run_that_is_gone_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = waiting(monkeypatch, lambda: None)
    assert 0 != run_main(monkeypatch, "--root", str(tmp_path / "deleted"))
    assert [] == slept
