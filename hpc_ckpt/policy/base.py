"""The policy protocol: facts in, a decision with its reason out."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Progress:
    """What is known at a step boundary. Moments are seconds on one monotonic clock."""

    step: int
    now_s: float
    saved_step: int
    """Step of the last snapshot, or where this link began."""
    saved_s: float
    """Moment of the last snapshot, or of this link's beginning."""
    step_s: float | None = None
    """Typical duration of one step; None until measured."""
    stall_s: float | None = None
    """Seconds training waits for one save; None until measured."""
    save_s: float | None = None
    """Seconds from the start of a save to its commit; None until measured."""
    loss: float | None = None


@dataclass(frozen=True)
class Decision:
    """Save or not, and why: the reason ends up in the manifest and in the events."""

    save: bool
    reason: str


class Policy(Protocol):
    """A pure rule; asked at every step boundary, so it must cost microseconds."""

    def decide(self, progress: Progress) -> Decision:
        """Whether this boundary should be saved. May be asked again with the same facts."""

    def __str__(self) -> str:
        """The expression a user would write to get this policy."""
