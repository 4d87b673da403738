"""Fixed intervals: every N steps, every T seconds."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from dataclasses import dataclass

from ..units import format_duration
from .base import Decision, Progress


@dataclass(frozen=True)
class EverySteps:
    """Save when the step number is a multiple of `steps`.

    Multiples, not distances: where saves fall does not depend on where links began.
    """

    steps: int

    def decide(self, progress: Progress) -> Decision:
        due = progress.step // self.steps > progress.saved_step // self.steps
        return Decision(due, f"step {progress.step}: {self}" if due else "not yet due")

    def __str__(self) -> str:
        return f"every {self.steps} steps"


@dataclass(frozen=True)
class EveryTime:
    """Save when `seconds` have passed since the last snapshot."""

    seconds: float

    def decide(self, progress: Progress) -> Decision:
        since = progress.now_s - progress.saved_s
        if since < self.seconds:
            return Decision(False, "not yet due")
        return Decision(True, f"{format_duration(since)} since the last save: {self}")

    def __str__(self) -> str:
        return f"every {format_duration(self.seconds)}"
