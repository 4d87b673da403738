"""Time that saves steal from the steps beside which they are written."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_ckpt.engine.times import RECENT_SAVES, SaveTimes
from hpc_ckpt.runtime.meter import RECENT_STEPS, Meter


class Steps:
    """A meter that is told of one step after the other, with some stall between them."""

    def __init__(self) -> None:
        self.meter, self._now = Meter(0.0), 0.0

    def take(self, seconds: float, *, disturbed: bool = False) -> float | None:
        self._now += seconds
        self.meter.pause(self._now)
        stolen = self.meter.boundary(disturbed=disturbed)
        self._now += 100.0
        self.meter.resume(self._now)
        return stolen


def test_nothing_is_stolen_without_a_save() -> None:
    """However much the steps differ."""
    steps = Steps()
    assert [None] * 4 == [steps.take(seconds) for seconds in (1.0, 9.0, 0.5, 3.0)]


def test_stolen_time_is_what_disturbed_steps_took_longer_than_usual() -> None:
    """It is told with the first step after them, once."""
    steps = Steps()
    for _ in range(3):
        steps.take(2.0)
    told = [steps.take(seconds, disturbed=True) for seconds in (2.5, 3.0, 2.25)]
    assert [None] * 3 == told
    assert 1.75 == steps.take(2.0)
    assert [None, None] == [steps.take(2.0), steps.take(2.0)]


def test_the_usual_step_is_the_median_of_undisturbed_ones() -> None:
    """One slow step is not usual, and neither is a disturbed one."""
    steps = Steps()
    for seconds in (1.0, 1.0, 50.0, 1.0):
        steps.take(seconds)
    for _ in range(20):
        steps.take(6.0, disturbed=True)
    assert 100.0 == steps.take(1.0)
    steps.take(4.0, disturbed=True)
    assert 3.0 == steps.take(1.0)


def test_steps_that_were_faster_beside_a_save_stole_nothing() -> None:
    """Time is not given back; a faster step makes up for a slower one of the same save."""
    steps = Steps()
    steps.take(2.0)
    steps.take(1.0, disturbed=True)
    assert 0.0 == steps.take(2.0)
    for seconds in (1.5, 3.0):
        steps.take(seconds, disturbed=True)
    assert 0.5 == steps.take(2.0)


def test_without_an_undisturbed_step_nothing_is_usual() -> None:
    """A save from the first step on cannot be charged with anything."""
    steps = Steps()
    for seconds in (5.0, 7.0):
        steps.take(seconds, disturbed=True)
    assert 0.0 == steps.take(1.0)


def test_the_usual_step_follows_the_program() -> None:
    """What was usual long ago is forgotten."""
    steps = Steps()
    for _ in range(RECENT_STEPS):
        steps.take(1.0)
    for _ in range(RECENT_STEPS):
        steps.take(5.0)
    steps.take(6.0, disturbed=True)
    assert 1.0 == steps.take(5.0)


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=60))
def test_no_save_is_charged_less_than_nothing_or_twice(
    given_steps: list[tuple[int, bool]],
) -> None:
    """Each run of disturbed steps is told once, by the undisturbed step after it."""
    steps, pending = Steps(), False
    for seconds, disturbed in given_steps:
        stolen = steps.take(float(seconds), disturbed=disturbed)
        assert (stolen is not None) == (pending and not disturbed)
        assert stolen is None or stolen >= 0.0
        pending = disturbed


def test_disturbed_steps_count_among_the_slowest_and_typical_ones() -> None:
    """The watchdog and the policy go by what steps really take."""
    steps = Steps()
    steps.take(1.0)
    for _ in range(2):
        steps.take(9.0, disturbed=True)
    assert (9.0, 9.0) == (steps.meter.slowest_step_s, steps.meter.step_s)


# ── what a save costs ─────────────────────────────────────────────────────────────────────
def test_stolen_time_is_stall_to_the_policy() -> None:
    """The slowest wait and the worst theft of the recent saves, together."""
    times = SaveTimes()
    assert (None, None) == (times.stall_s, times.save_s)
    times.add(stall_s=0.25, save_s=4.0)
    assert (0.25, 4.0) == (times.stall_s, times.save_s)
    times.add_stolen(1.5)
    times.add(stall_s=0.5, save_s=3.0)
    times.add_stolen(1.0)
    assert (2.0, 4.0) == (times.stall_s, times.save_s)


def test_theft_is_forgotten_after_some_saves() -> None:
    """A bad hour of a shared machine does not count for ever."""
    times = SaveTimes()
    times.add(stall_s=1.0, save_s=1.0)
    times.add_stolen(60.0)
    for _ in range(RECENT_SAVES):
        times.add_stolen(2.0)
    assert 3.0 == times.stall_s


def test_theft_can_be_told_before_a_save_has_ended() -> None:
    """Then it is all that is known."""
    times = SaveTimes(known_save_s=7.0)
    times.add_stolen(2.0)
    assert (2.0, 7.0) == (times.stall_s, pytest.approx(times.save_s))


def test_a_save_that_seemed_to_hang_tells_more_than_none() -> None:
    """Until one is timed: the last save would begin too late for the disk it goes to."""
    times = SaveTimes()
    times.guess(90.0)
    assert 90.0 == times.save_s
    times.add(stall_s=0.0, save_s=3.0)
    times.guess(600.0)
    assert 3.0 == times.save_s


def test_what_an_earlier_link_has_timed_is_better_than_that() -> None:
    times = SaveTimes(known_save_s=7.0)
    times.guess(600.0)
    assert 7.0 == pytest.approx(times.save_s)
