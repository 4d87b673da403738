"""Saves that came to nothing."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import time
from pathlib import Path

from hpc_ckpt.engine.failures import AGAIN_S, Failures
from hpc_ckpt.engine.persist import Pending
from hpc_ckpt.engine.times import SaveTimes
from hpc_ckpt.events import EventLog


def test_an_error_that_is_its_own_cause_is_no_endless_walk(tmp_path: Path) -> None:
    """A program may handle one while it saves; then it is what the failed save came from."""
    failures = Failures(EventLog(tmp_path / "events.jsonl"), SaveTimes(), lambda error: None)
    try:
        try:
            own = ValueError("its own cause")
            raise own from own
        except ValueError:
            raise MemoryError("no buffer")  # noqa: B904 - as it comes about
    except MemoryError as error:
        failures.add(Pending("asked"), error, save_s=None)
        assert error is failures.take()


def test_storage_that_spoils_everything_is_not_filled_by_saves_again(tmp_path: Path) -> None:
    """The first comes soon, each further one after twice as long."""
    failures = Failures(EventLog(tmp_path / "events.jsonl"), SaveTimes(), lambda error: None)
    began, waits = time.time(), []
    for _ in range(4):
        failures.damaged(tmp_path)
        assert failures.at_s is not None
        waits.append(round((failures.at_s - began) / AGAIN_S))
        failures.at_s = None  # a save has begun
    assert [0, 1, 3, 7] == waits
    for sound, wait in ((tmp_path / "tier" / "one", 15), (tmp_path.with_name("other"), 0)):
        failures.sound(sound)
        failures.damaged(tmp_path)
        assert failures.at_s is not None
        assert wait == round((failures.at_s - began) / AGAIN_S), "elsewhere says nothing"
        failures.at_s = None


def test_damage_puts_off_no_save_that_failed(tmp_path: Path) -> None:
    """Found in an older one meanwhile: the state is as unsaved as before, and that is told."""
    failures = Failures(EventLog(tmp_path / "events.jsonl"), SaveTimes(), lambda error: None)
    for _ in range(4):
        failures.damaged(tmp_path)
    failures.take()
    failures.at_s, error = None, OSError("no space")
    failures.add(Pending("asked"), error, save_s=None)
    at_s = failures.at_s
    failures.damaged(tmp_path)
    assert (at_s, error) == (failures.at_s, failures.take())
