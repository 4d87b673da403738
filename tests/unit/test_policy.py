"""Policies: pure rules about when a step boundary should be saved."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_ckpt.policy.base import Progress
from hpc_ckpt.policy.interval import EverySteps, EveryTime


def at(step: int = 0, now_s: float = 0.0, saved_step: int = 0, saved_s: float = 0.0) -> Progress:
    return Progress(step=step, now_s=now_s, saved_step=saved_step, saved_s=saved_s)


@pytest.mark.parametrize(
    ("step", "saved_step", "due"),
    [(499, 0, False), (500, 0, True), (501, 500, False), (999, 500, False), (1000, 500, True)],
)
def test_every_steps_saves_at_multiples(step: int, saved_step: int, due: bool) -> None:
    """A save is due at each multiple of the interval."""
    assert due == EverySteps(500).decide(at(step=step, saved_step=saved_step)).save


def test_every_steps_does_not_depend_on_where_a_link_began() -> None:
    """A link that begins at step 730 saves at 1000, not at 1230."""
    assert EverySteps(500).decide(at(step=1000, saved_step=730)).save
    assert not EverySteps(500).decide(at(step=999, saved_step=730)).save


def test_a_multiple_that_was_missed_is_still_due() -> None:
    """When the boundary at the multiple could not save, the next one does."""
    assert EverySteps(500).decide(at(step=503, saved_step=120)).save


@given(st.integers(1, 50), st.lists(st.booleans(), min_size=1, max_size=300))
def test_every_steps_saves_each_interval_once(interval: int, could_save: list[bool]) -> None:
    """Whatever boundaries refuse, saves never fall twice into one interval."""
    policy, saved_step, intervals = EverySteps(interval), 0, []
    for step, possible in enumerate(could_save, start=1):
        if possible and policy.decide(at(step=step, saved_step=saved_step)).save:
            saved_step = step
            intervals.append(step // interval)
    assert sorted(set(intervals)) == intervals


@pytest.mark.parametrize(("now_s", "due"), [(699.9, False), (700.0, True), (5000.0, True)])
def test_every_time_counts_from_the_last_snapshot(now_s: float, due: bool) -> None:
    """A save is due once the interval has passed since the last snapshot."""
    assert due == EveryTime(600.0).decide(at(now_s=now_s, saved_s=100.0)).save


@pytest.mark.parametrize("policy", [EverySteps(10), EveryTime(10.0)])
def test_a_decision_says_why(policy: EverySteps | EveryTime) -> None:
    """The reason of a save names the rule."""
    decision = policy.decide(at(step=100, now_s=100.0))
    assert decision.save
    assert str(policy) in decision.reason


def test_asking_twice_changes_nothing() -> None:
    """A policy keeps no state: the same facts give the same decision."""
    policy, facts = EveryTime(5.0), at(now_s=6.0)
    assert policy.decide(facts) == policy.decide(dataclasses.replace(facts))
