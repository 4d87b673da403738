"""How long a final save is waited for, while the deadline may move."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_ckpt.engine.persist import Pending
from hpc_ckpt.rundir import CheckpointKey
from hpc_ckpt.runtime import waiting
from hpc_ckpt.runtime.waiting import committed_in_time
from hpc_ckpt.tiers.base import Committed
from hpc_ckpt.triggers import Surroundings

NOW = 1_800_000_000.0
DONE = Committed(CheckpointKey(1, 20), Path("x"), 1, reused=False)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(waiting, "SHORTEST_WAIT_S", 0.2)


def ended_after(seconds: float) -> Pending:
    pending = Pending("last")
    threading.Timer(seconds, lambda: pending.succeed(DONE)).start()
    return pending


def around(*to_deadline: float | None) -> Callable[[], Surroundings]:
    """What is seen at each look, the last for ever after."""
    left = list(to_deadline)

    def look() -> Surroundings:
        seconds = left.pop(0) if len(left) > 1 else left[0]
        return Surroundings(now_s=NOW, deadline_s=None if seconds is None else NOW + seconds)

    return look


def test_a_deadline_that_moves_on_gives_it_more_time() -> None:
    """At the limit Slurm asks; the kill wait is known only then."""
    moves = around(*[-1.0] * 5, 5.0)
    assert DONE == committed_in_time(ended_after(0.6), moves, 600.0)


def test_it_is_waited_for_until_the_deadline_and_a_little_more() -> None:
    """Until then nobody has asked for the end, whatever margin there was."""
    assert DONE == committed_in_time(ended_after(0.6), around(-0.1), 600.0)


def test_where_no_time_is_left_it_is_given_up_after_the_shortest_wait() -> None:
    with pytest.raises(TimeoutError, match=r"not committed after 0\.\d s"):
        committed_in_time(Pending("last"), around(-1.0), 600.0)


def test_where_no_end_is_known_it_has_the_longest() -> None:
    assert DONE == committed_in_time(ended_after(0.4), around(None), 600.0)
    with pytest.raises(TimeoutError):
        committed_in_time(Pending("last"), around(None), 0.1)
