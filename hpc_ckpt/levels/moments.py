"""When a link of a program that cannot be changed must end, and what a save may take of it.

Told by the notice, halt and deadline files; measured by the saves of this link and of earlier
ones. It asks nobody for anything.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import time
from dataclasses import dataclass

from ..rundir import RunDir, read_notice
from ..settings import SAVE_FACTOR, margin
from .base import Level, Moment

LEAD_SHARE = 0.4
"""Of a link, for its last save: one shorter than a guess would otherwise do no work at all."""
STORE_SHARE = 0.25
"""Of a link, for storing: storage that takes longer must not leave the program without time."""
UNKNOWN_END_S = 60.0
"""For a last save after a notice where no end is known."""
RESUME_S = 120.0
"""A program that is not back after this long will not come back; longer for large restarts."""
SLOW_READ = 50 * 1024**2
"""Bytes a second of a file system that is still worth waiting for."""


@dataclass(frozen=True)
class Cost:
    """What a save took."""

    store_s: float
    """Without the time in which the program itself was writing."""
    lead_s: float | None = None
    """What the program itself takes for a last one; None: all of a save is in store_s."""


class Moments:
    """Of one link."""

    def __init__(
        self, place: RunDir, generation: int, interval_s: float, lead_s: float | None = None
    ) -> None:
        """`lead_s`: what a rehearsal says of a last save."""
        self._place = place
        self._generation = generation
        self._interval_s = interval_s
        self._lead_s = lead_s
        self._cost: Cost | None = None
        self._handed_s = 0.0
        self._is_of_this_link = False
        self.entered = time.time()

    def expect(self, cost: Cost | None) -> None:
        """What a save of the present level took in earlier links."""
        self._cost, self._is_of_this_link = cost, False

    def measured(self, cost: Cost) -> None:
        self._cost, self._is_of_this_link = cost, True

    @property
    def store_s(self) -> float:
        """To be kept free for storing what the program writes."""
        if self._cost is None or self._cost.lead_s is None:
            return 0.0
        return min(SAVE_FACTOR * self._cost.store_s, self._most_s())

    def hand_out(self) -> float:
        """The same, as the program is told it: it stops by its own clock so much earlier, and is
        asked before that, however fast later saves are."""
        self._handed_s = self.store_s
        return self._handed_s

    def _most_s(self) -> float:
        end = self._place.deadline(self._generation)
        return float("inf") if end is None else STORE_SHARE * (end - self.entered)

    # ── the end ───────────────────────────────────────────────────────────────────────────
    def why_end(self, level: Level) -> str | None:
        """The first word is read by the link runner."""
        told = self.why_told()
        if told is not None:
            return told
        end = self._place.deadline(self._generation)
        if end is None:
            return None
        link_s = end - self.entered
        needed = self.lead(level, link_s) + margin(link_s)
        left = end - time.time()
        return f"deadline: {left:.1f} s left" if left <= needed else None

    def why_told(self) -> str | None:
        """The same where somebody has asked for the end, by a notice or a halt."""
        notice = read_notice(self._place.notice_file(self._generation))
        if notice is not None:
            return "notice: " + ", ".join(dict.fromkeys(notice.sources))
        halted = self._place.halted()
        return None if halted is None else f"halt: {halted}"

    def lead(self, level: Level, link_s: float) -> float:
        """What saves have taken; before any, a rehearsal's word or the level's guess."""
        guess = level.lead_s if self._lead_s is None else self._lead_s
        if self._cost is None:
            return min(guess, LEAD_SHARE * link_s)
        taken = SAVE_FACTOR * self._cost.store_s
        if self._cost.lead_s is not None:
            return min(self._cost.lead_s, LEAD_SHARE * link_s) + max(self.store_s, self._handed_s)
        # What was measured in another link may have been a smaller program, or another disk.
        return taken if self._is_of_this_link else max(min(guess, LEAD_SHARE * link_s), taken)

    # ── a save ────────────────────────────────────────────────────────────────────────────
    def moment(self, began: float, *, last: bool) -> Moment:
        """By when a save that begins at this moment of time.monotonic() must be over."""
        until = self._until() if last else self._soon(began)
        return Moment(until=until, last=last, store_s=self.store_s)

    def _until(self) -> float:
        end = self._place.deadline(self._generation)
        if end is None:
            return time.monotonic() + UNKNOWN_END_S
        left = end - time.time() - margin(end - self.entered) / 2
        return time.monotonic() + max(left, 1.0)

    def _soon(self, began: float) -> float:
        """For one of many: neither DMTCP nor CRIU can be stopped in the middle of a save without
        harm to the program. Only the end of the link is not slept through."""
        if self._place.deadline(self._generation) is not None:
            return self._until()
        return began + max(self._interval_s, UNKNOWN_END_S)


def back_by(size: int) -> float:
    """The moment of time.monotonic() by which a program is back from a restart of so many bytes."""
    return time.monotonic() + RESUME_S + size / SLOW_READ
