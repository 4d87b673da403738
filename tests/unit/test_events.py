"""The event log: what was emitted is in the file when it is closed."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hpc_ckpt import events
from hpc_ckpt.events import Event, EventLog


@pytest.mark.parametrize("taken", [True, False])
def test_closing_waits_for_a_write_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, taken: bool
) -> None:
    """Its thread is a daemon: the end of the program would cut it short. What the file system
    does not take then is tried once more."""
    real, begun, attempts = events._append, threading.Event(), list[bytes]()

    def append(path: Path, data: bytes) -> int:
        begun.set()
        attempts.append(data)
        if len(attempts) > 1:
            return real(path, data)
        threading.Event().wait(0.2)  # a slow file system
        return real(path, data) if taken else 0

    monkeypatch.setattr(events, "_append", append)
    log = EventLog(tmp_path / "events.jsonl", patience_s=60.0)
    log.emit(Event.STARTED_FRESH, flush=False)
    log.flush(0.0)
    assert begun.wait(60)
    log.close()
    assert ["started_fresh"] == [record["event"] for record in events.read(log.path)]


def test_closing_gives_up_on_a_write_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished program ends though the file system does not answer."""
    begun, over = threading.Event(), threading.Event()

    def append(path: Path, data: bytes) -> int:
        begun.set()
        over.wait(60)
        return len(data)

    monkeypatch.setattr(events, "_append", append)
    monkeypatch.setattr(events, "LAST_FLUSH_S", 0.05)
    log = EventLog(tmp_path / "events.jsonl", patience_s=60.0)
    log.emit(Event.STARTED_FRESH, flush=False)
    log.flush(0.0)
    assert begun.wait(60)
    closing = threading.Thread(target=log.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    over.set()


def test_what_waits_while_a_write_hangs_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hang for days; of too many the oldest are dropped."""
    over, begun, real = threading.Event(), threading.Event(), events._append

    def append(path: Path, data: bytes) -> int:
        begun.set()
        over.wait(60)
        return real(path, data)

    monkeypatch.setattr(events, "_append", append)
    monkeypatch.setattr(events, "MOST_WAITING", 3)
    log = EventLog(tmp_path / "e.jsonl", patience_s=0.01)
    log.emit(Event.PROGRESS, step=0)
    assert begun.wait(60)
    for step in range(1, 11):
        log.emit(Event.PROGRESS, flush=step % 2 == 0, step=step)
    assert 3 == len(log._waiting)
    over.set()
    log.close()
    assert [0, 8, 9, 10] == [record["step"] for record in events.read(log.path)]
