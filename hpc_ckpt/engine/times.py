"""What recent saves cost: seconds training waited, seconds until durable at full speed."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections import deque

RECENT_SAVES = 8


class SaveTimes:
    """The slowest of the recent saves; until one was made here, that of the chain's last link."""

    def __init__(self, known_save_s: float | None = None) -> None:
        self.stall_s: float | None = None
        self.save_s = known_save_s
        """At full speed: time spent on holding back is not in it."""
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_SAVES)
        self._stolen: deque[float] = deque(maxlen=RECENT_SAVES)

    def add(self, *, stall_s: float, save_s: float) -> None:
        self._recent.append((stall_s, save_s))
        self.save_s = max(save for _, save in list(self._recent))
        self._set_stall()

    def guess(self, save_s: float) -> None:
        """Of a save that seemed to hang, and was committed: too much rather than nothing at all;
        the next that is timed takes its place."""
        if self.save_s is None:
            self.save_s = save_s

    def add_stolen(self, seconds: float) -> None:
        """What one save cost the steps beside which it was written."""
        self._stolen.append(seconds)
        self._set_stall()

    def _set_stall(self) -> None:
        # Copies: a save that was given up may end beside another one.
        waited = max((stall for stall, _ in list(self._recent)), default=0.0)
        self.stall_s = waited + max(list(self._stolen), default=0.0)
