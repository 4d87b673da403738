"""How long a final save is waited for, while the deadline may move."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hpc_ckpt.engine.persist import Pending
from hpc_ckpt.rundir import CheckpointKey
from hpc_ckpt.runtime import waiting
from hpc_ckpt.runtime.waiting import committed_in_time
from hpc_ckpt.tiers.base import Committed

DONE = Committed(CheckpointKey(1, 20), Path("x"), 1, reused=False)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(waiting, "SHORTEST_WAIT_S", 0.2)


def ended_after(seconds: float) -> Pending:
    pending = Pending("last")
    threading.Timer(seconds, lambda: pending.succeed(DONE)).start()
    return pending


def test_a_deadline_that_moves_on_gives_it_more_time() -> None:
    """At the limit Slurm asks; the kill wait is known only then."""
    left = iter([-0.1, -0.1, 5.0])
    last = [5.0]

    def seconds_left() -> float:
        return next(left, last[0])

    assert DONE == committed_in_time(ended_after(0.6), seconds_left, 600.0)


def test_where_no_time_is_left_it_is_given_up_after_the_shortest_wait() -> None:
    with pytest.raises(TimeoutError, match=r"not committed after 0\.\d s"):
        committed_in_time(Pending("last"), lambda: -1.0, 600.0)


def test_where_no_end_is_known_it_has_the_longest() -> None:
    assert DONE == committed_in_time(ended_after(0.4), lambda: None, 600.0)
    with pytest.raises(TimeoutError):
        committed_in_time(Pending("last"), lambda: None, 0.1)
