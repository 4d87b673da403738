"""WHY now: policy, notice, deadline and halt become one answer with its reason.

Arithmetic on facts that are passed in. runtime/ watches the files, the signals and the
clock, and does what an answer says. The first word of a reason to
stop (notice, deadline, halt) is read by the link runner.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from dataclasses import dataclass

from .policy.base import Policy, Progress
from .rundir import Notice
from .settings import SAVE_FACTOR, margin
from .units import format_duration

HURRY_GRACE_S = 10.0
"""After a hurry with no known deadline: how long a step boundary may still come."""
RETRY_S = 60.0
"""After a failed save: the longest wait before the next attempt."""


@dataclass(frozen=True)
class Answer:
    """What this step boundary should do, and why."""

    save: bool = False
    stop: bool = False
    """Save, then end the link."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What is known from outside the training loop. Moments are unix seconds."""

    now_s: float
    notice: Notice | None = None
    hurry_since_s: float | None = None
    """When a second notice was first seen."""
    deadline_s: float | None = None
    """None: unknown."""
    halted: str | None = None
    slowest_step_s: float = 0.0
    """The slowest recent step."""
    save_s: float | None = None
    """The slowest recent save, from its start to its commit; None: never timed."""
    failed_s: float | None = None
    """When the last save failed, if no save has begun since."""


class Triggers:
    """Asked at every step boundary; also tells the watchdog when no boundary came in time."""

    def __init__(
        self, policy: Policy, *, entered_s: float, deadline_s: float | None = None
    ) -> None:
        self._policy = policy
        self._entered_s = entered_s
        self._margin_s = None if deadline_s is None else margin(deadline_s - entered_s)
        self._saved_when_halted: float | None = None

    def ask(self, progress: Progress, around: Surroundings) -> Answer:
        """One answer; a reason to stop comes before a reason to save."""
        stop = self.reason_to_stop(around)
        if stop is not None:
            return Answer(save=True, stop=True, reason=stop)
        answer = self._reason_to_save(progress, around)
        return self._halted(answer, progress, around) if around.halted is not None else answer

    def reason_to_stop(self, around: Surroundings) -> str | None:
        """Why the link must end as soon as it can, or None. Halt waits for a save instead."""
        if around.notice is not None:
            return "notice: " + ", ".join(dict.fromkeys(around.notice.sources))
        if around.deadline_s is None:
            return None
        needed = around.slowest_step_s + SAVE_FACTOR * (around.save_s or 0.0) + self._margin(around)
        if around.now_s + needed < around.deadline_s:
            return None
        left = format_duration(around.deadline_s - around.now_s)
        return f"deadline: {left} left, {format_duration(needed)} needed for a step and a save"

    def overdue(self, around: Surroundings) -> str | None:
        """Why it is too late to wait for a step boundary any longer, or None."""
        stop, moment = self.reason_to_stop(around), self.overdue_at(around)
        if stop is None or moment is None or around.now_s < moment:
            return None
        return f"{stop}; no step boundary came in time"

    def overdue_at(self, around: Surroundings) -> float | None:
        """From when on no step boundary is waited for; None: as long as it takes."""
        hurry = around.hurry_since_s
        if around.deadline_s is None:
            return None if hurry is None else hurry + HURRY_GRACE_S
        if hurry is not None:
            return hurry
        return around.deadline_s - (around.save_s or 0.0) - self._margin(around)

    def last_word_at(self, around: Surroundings) -> float | None:
        """From when on a save under way is not waited for either."""
        if around.deadline_s is None:
            return None
        return around.deadline_s - self._margin(around) / 2

    def _reason_to_save(self, progress: Progress, around: Surroundings) -> Answer:
        decision = self._policy.decide(progress)
        if decision.save:
            return Answer(save=True, reason=decision.reason)
        if around.failed_s is not None and around.now_s >= around.failed_s + RETRY_S:
            return Answer(save=True, reason="again after a failed save")
        if self._must_measure(around):
            return Answer(save=True, reason="half the link is over: times a save for the deadline")
        return Answer(reason=decision.reason)

    def _must_measure(self, around: Surroundings) -> bool:
        """With no save ever timed, half of the link's time is assumed to be needed for one."""
        if around.deadline_s is None or around.save_s is not None or around.failed_s is not None:
            return False
        return around.now_s >= (self._entered_s + around.deadline_s) / 2

    def _halted(self, answer: Answer, progress: Progress, around: Surroundings) -> Answer:
        """The chain stops after the next checkpoint: the next save is the last."""
        if self._saved_when_halted is None:
            self._saved_when_halted = progress.saved_s
        if not answer.save and progress.saved_s == self._saved_when_halted:
            return answer
        return Answer(save=True, stop=True, reason=f"halt: {around.halted}")

    def _margin(self, around: Surroundings) -> float:
        if self._margin_s is None:
            self._margin_s = margin((around.deadline_s or 0.0) - self._entered_s)
        return self._margin_s
