"""Storage that does not answer costs waiting before a link, and nothing while its program runs."""

from __future__ import annotations

import errno
import json
import logging
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt.chain import link, patience
from hpc_ckpt.chain.clockwork import Clockwork
from hpc_ckpt.chain.local import LocalBackend
from hpc_ckpt.chain.orders import Orders
from hpc_ckpt.chain.succession import InOneProcess
from hpc_ckpt.events import EventLog
from hpc_ckpt.rundir import RunDir


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    place = RunDir(tmp_path / "run")
    place.create()
    record = {
        "argv": ["true"],
        "cwd": "/",
        "spec": {"chain": {"max_links": 9}},
        "profile": {"signal": {"name": "USR1"}, "kill_wait": "5s"},
    }
    place.chain_file.write_text(json.dumps(record))
    return place


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


def run_main(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Up to where the runner begins."""
    monkeypatch.setattr(link.LinkRunner, "run", lambda _: 0)
    monkeypatch.setattr("signal.pthread_sigmask", lambda *_: set())
    return link.main([*words, "--backend", "local"])


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


def test_a_run_that_is_gone_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = waiting(monkeypatch, lambda: None)
    assert 0 != run_main(monkeypatch, "--root", str(tmp_path / "deleted"))
    assert [] == slept
