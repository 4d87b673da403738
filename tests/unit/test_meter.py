"""The meter: training time, stall, and the metrics a checkpoint carries."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_ckpt.errors import UserError
from hpc_ckpt.runtime.meter import RECENT_STEPS, Meter, Metrics


def test_time_is_either_training_or_stall() -> None:
    """What passes between resume and pause is training, the rest is stall."""
    meter = Meter(10.0)
    meter.pause(13.0)
    meter.resume(13.5)
    meter.pause(15.5)
    meter.resume(16.5)
    assert (5.0, 1.5) == (meter.training_s, meter.stall_s)


@given(st.lists(st.integers(0, 1000), max_size=40))
def test_no_second_is_counted_twice_or_lost(gaps: list[int]) -> None:
    """Training and stall add up to the time that passed."""
    meter, now = Meter(0.0), 0.0
    for number, gap in enumerate(gaps):
        now += gap
        (meter.resume if number % 2 else meter.pause)(now)
    assert now == meter.training_s + meter.stall_s


def test_the_slowest_step_is_forgotten_after_a_while() -> None:
    """A first step that compiles does not count for ever; stall is not part of a step."""
    meter, now = Meter(0.0), 0.0
    durations = [90.0] + [1.0] * (RECENT_STEPS - 1)
    for duration in durations:
        now += duration
        meter.pause(now)
        meter.boundary()
        now += 7.0
        meter.resume(now)
    assert (90.0, 1.0) == (meter.slowest_step_s, meter.step_s)
    meter.pause(now + 2.0)
    meter.boundary()
    assert 2.0 == meter.slowest_step_s


def test_before_the_first_step_nothing_is_known() -> None:
    """No step, no typical duration."""
    assert (0.0, None) == (Meter(0.0).slowest_step_s, Meter(0.0).step_s)


def test_a_metric_belongs_to_the_steps_after_the_last_save() -> None:
    """read(after) leaves out what was given before."""
    metrics = Metrics()
    metrics.give(1, 0.5, {"accuracy": 0.1})
    metrics.give(2, torch.tensor(0.25, requires_grad=True), None)
    assert {"loss": 0.25, "accuracy": 0.1} == metrics.read()
    assert {"loss": 0.25} == metrics.read(after_step=1)


def test_a_loss_does_not_keep_its_graph() -> None:
    """Holding the graph would hold every activation of the step."""
    metrics, weight = Metrics(), torch.zeros(1, requires_grad=True)
    metrics.give(1, (weight * 2).sum(), None)
    assert not any(getattr(value, "requires_grad", False) for _, value in metrics._given.values())


def test_the_loss_is_the_one_that_was_last_read() -> None:
    """Giving a value does not read it: that would wait for the device at every step."""
    metrics = Metrics()
    metrics.give(1, 0.5, None)
    assert metrics.loss is None
    metrics.read()
    assert 0.5 == metrics.loss


def test_not_a_number_is_a_number() -> None:
    """A diverged loss is kept as it is."""
    metrics = Metrics()
    metrics.give(1, math.nan, None)
    assert math.isnan(metrics.read()["loss"])


@pytest.mark.parametrize("value", ["high", torch.zeros(2), [1.0]])
def test_what_is_not_one_number_is_refused_by_name(value: object) -> None:
    """The error names the metric, at the step that gave it."""
    with pytest.raises(UserError, match="metric 'accuracy'"):
        Metrics().give(1, None, {"accuracy": value})
