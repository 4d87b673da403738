"""Triggers: policy, notice, deadline and halt become one answer with its reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_ckpt.policy.base import Decision, Progress
from hpc_ckpt.policy.interval import EverySteps, EveryTime
from hpc_ckpt.rundir import Notice
from hpc_ckpt.settings import margin
from hpc_ckpt.triggers import Answer, Surroundings, Triggers

ENTERED = 1_000_000.0
NOTICE = Notice(ENTERED + 5, ("SIGTERM",), False)


class Never:
    """A policy that is never due."""

    def decide(self, progress: Progress) -> Decision:
        return Decision(False, "never")

    def __str__(self) -> str:
        return "never"


def at(step: int = 7, now_s: float = 10.0, saved_step: int = 0, saved_s: float = 0.0) -> Progress:
    return Progress(step=step, now_s=now_s, saved_step=saved_step, saved_s=saved_s)


def after(seconds: float, **known: object) -> Surroundings:
    return Surroundings(now_s=ENTERED + seconds, **known)  # type: ignore[arg-type] # test shorthand


def never(deadline_s: float | None = None) -> Triggers:
    return Triggers(Never(), entered_s=ENTERED, deadline_s=deadline_s)


# ── policy ────────────────────────────────────────────────────────────────────────────────
def test_the_policys_decision_is_a_save_that_does_not_stop() -> None:
    """A policy save keeps its reason and the link goes on."""
    answer = Triggers(EverySteps(7), entered_s=ENTERED).ask(at(step=7), after(1))
    assert Answer(save=True, stop=False, reason="step 7: every 7 steps") == answer


def test_nothing_due_is_no_save() -> None:
    """Without any reason the answer is to go on."""
    answer = never().ask(at(), after(1))
    assert (False, False) == (answer.save, answer.stop)


# ── notice ────────────────────────────────────────────────────────────────────────────────
def test_a_notice_stops_and_names_its_sources_once() -> None:
    """The reason begins with the word the runner reads, and lists each source once."""
    notice = Notice(ENTERED, ("SIGTERM", "SIGTERM", "stop"), False)
    answer = never().ask(at(), after(1, notice=notice))
    assert Answer(save=True, stop=True, reason="notice: SIGTERM, stop") == answer


def test_a_notice_comes_before_the_policy() -> None:
    """A reason to stop outweighs a reason to save."""
    answer = Triggers(EverySteps(1), entered_s=ENTERED).ask(at(), after(1, notice=NOTICE))
    assert answer.stop


# ── deadline ──────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("link_s", "spare_s"), [(10, 0.5), (100, 4.0), (600, 24.0), (8 * 3600, 30.0), (-5, 0.5)]
)
def test_the_margin_is_four_percent_within_bounds(link_s: float, spare_s: float) -> None:
    """4 % of the link, at least half a second and at most 30 seconds."""
    assert spare_s == margin(link_s)


def test_the_deadline_save_comes_as_late_as_is_safe() -> None:
    """One slowest step, one and a half saves and the margin before the deadline, not sooner."""
    deadline = ENTERED + 600
    triggers = never(deadline)
    known = {"deadline_s": deadline, "slowest_step_s": 3.0, "save_s": 10.0}
    last_safe = 600 - 3 - 15 - 24
    assert not triggers.ask(at(), after(last_safe - 0.01, **known)).stop
    answer = triggers.ask(at(), after(last_safe, **known))
    assert answer.stop
    assert answer.reason.startswith("deadline: 42s left")


def test_an_unknown_deadline_never_stops() -> None:
    """No deadline file: only notices end the link."""
    answer = never().ask(at(), after(10**9, slowest_step_s=50.0, save_s=50.0))
    assert not answer.stop


def test_until_a_save_was_timed_half_of_the_link_is_kept_for_it() -> None:
    """At the middle an ordinary save is made, so that from then on its time is known."""
    deadline = ENTERED + 600
    triggers = never(deadline)
    before = triggers.ask(at(), after(299.9, deadline_s=deadline))
    middle = triggers.ask(at(), after(300, deadline_s=deadline))
    timed = triggers.ask(at(), after(300, deadline_s=deadline, save_s=1.0))
    assert (False, True, False) == (before.save, middle.save, timed.save)
    assert not middle.stop
    assert "half the link is over" in middle.reason


def test_a_link_that_begins_with_too_little_time_ends_at_its_first_step() -> None:
    """It behaves as if the notice had come, with or without a measured save."""
    for save_s in (None, 5.0):
        triggers = never(ENTERED + 0.4)
        answer = triggers.ask(at(), after(0.1, deadline_s=ENTERED + 0.4, save_s=save_s))
        assert answer.stop


def test_a_deadline_that_moves_closer_is_obeyed() -> None:
    """Preemption brings the end near: the margin stays that of the link as it began."""
    triggers = never(ENTERED + 600)
    assert not triggers.ask(at(), after(100, deadline_s=ENTERED + 600, save_s=1.0)).stop
    assert triggers.ask(at(), after(100, deadline_s=ENTERED + 125, save_s=1.0)).stop
    assert not triggers.ask(at(), after(100, deadline_s=ENTERED + 126, save_s=1.0)).stop


def test_a_deadline_that_becomes_known_later_works() -> None:
    """The deadline file may appear after the program began."""
    triggers = never()
    assert not triggers.ask(at(), after(1)).stop
    assert triggers.ask(at(), after(99, deadline_s=ENTERED + 100, save_s=0.1)).stop


@given(
    left=st.floats(0, 10**5),
    step_s=st.floats(0, 10**4),
    save_s=st.floats(0, 10**4),
    more=st.floats(0, 10**4),
)
def test_slower_steps_and_saves_never_make_it_later(
    left: float, step_s: float, save_s: float, more: float
) -> None:
    """What stops the link still stops it when a step or a save takes longer."""
    triggers = never(ENTERED + 600)
    facts = Surroundings(
        now_s=ENTERED, deadline_s=ENTERED + left, slowest_step_s=step_s, save_s=save_s
    )
    if triggers.reason_to_stop(facts) is not None:
        assert triggers.reason_to_stop(replace(facts, slowest_step_s=step_s + more)) is not None
        assert triggers.reason_to_stop(replace(facts, save_s=save_s + more)) is not None


# ── halt ──────────────────────────────────────────────────────────────────────────────────
def test_halt_stops_at_the_next_save_and_not_before() -> None:
    """The chain stops after the next checkpoint."""
    triggers = Triggers(EverySteps(10), entered_s=ENTERED)
    waits = triggers.ask(at(step=9), after(1, halted="enough"))
    stops = triggers.ask(at(step=10), after(2, halted="enough"))
    assert not waits.save
    assert Answer(save=True, stop=True, reason="halt: enough") == stops


def test_halt_stops_once_the_program_has_saved_by_itself() -> None:
    """A save the program asked for is a next checkpoint too."""
    triggers = never()
    assert not triggers.ask(at(saved_s=1.0), after(1, halted="enough")).stop
    assert triggers.ask(at(saved_s=2.0), after(2, halted="enough")).stop


# ── after a failure ───────────────────────────────────────────────────────────────────────
def test_a_failed_save_is_tried_again_after_a_minute_not_at_every_step() -> None:
    """A full disk is asked again, but not a thousand times a second."""
    triggers = Triggers(EveryTime(600.0), entered_s=ENTERED)
    soon = triggers.ask(at(now_s=10.0), after(59.9, failed_s=ENTERED))
    later = triggers.ask(at(now_s=10.0), after(60.0, failed_s=ENTERED))
    assert (False, True) == (soon.save, later.save)
    assert "again after a failed save" == later.reason


def test_the_policy_may_be_due_before_the_retry() -> None:
    """A shorter policy does not wait the minute."""
    triggers = Triggers(EveryTime(5.0), entered_s=ENTERED)
    assert triggers.ask(at(now_s=10.0), after(6, failed_s=ENTERED)).save


# ── the watchdog's rule ───────────────────────────────────────────────────────────────────
def test_without_a_reason_to_stop_nothing_is_overdue() -> None:
    """The watchdog does not act on slow steps alone."""
    assert never().overdue(after(10**6, slowest_step_s=10**6)) is None


def test_overdue_leaves_a_boundary_the_time_that_a_commit_does_not_need() -> None:
    """Between the stop becoming due and the last moment for a commit, boundaries may come."""
    deadline = ENTERED + 600
    triggers = never(deadline)
    known = {"deadline_s": deadline, "slowest_step_s": 20.0, "save_s": 10.0}
    assert triggers.reason_to_stop(after(560, **known)) is not None
    assert triggers.overdue(after(565.9, **known)) is None
    assert "no step boundary came in time" in (triggers.overdue(after(566, **known)) or "")


def test_a_first_notice_without_a_deadline_is_never_overdue() -> None:
    """Nobody said when the end is: the step may take as long as it takes."""
    assert never().overdue(after(10**6, notice=NOTICE)) is None


def test_after_a_hurry_without_a_deadline_ten_seconds_are_left() -> None:
    """A second notice means that the end is near, though nobody knows when."""
    hurried = replace(NOTICE, hurry=True)
    known = {"notice": hurried, "hurry_since_s": ENTERED + 100}
    assert never().overdue(after(109.9, **known)) is None
    assert (never().overdue(after(110, **known)) or "").startswith("notice: ")


def test_after_a_hurry_with_a_deadline_the_watchdog_acts_at_once() -> None:
    """With a known end a hurry is taken at its word."""
    known = {"notice": replace(NOTICE, hurry=True), "hurry_since_s": ENTERED + 100}
    assert never().overdue(after(100, deadline_s=ENTERED + 600, **known)) is not None
