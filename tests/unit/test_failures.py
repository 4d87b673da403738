"""Saves that came to nothing."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from pathlib import Path

from hpc_ckpt.engine.failures import Failures
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
