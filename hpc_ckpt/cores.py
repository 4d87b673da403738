"""How many of this process's cores had nothing to do since somebody last asked.

Reads the kernel's counters for the cores this process may use, so that data workers, other
processes and threads that only spin all count as busy. Standard library only.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

STAT = Path("/proc/stat")
LEAST_WINDOW_S = 0.5
"""The counters tick a hundred times a second: less tells nothing."""

_IDLE, _IOWAIT = 4, 5


class IdleCores:
    """Asked again and again; each answer is about the time since the last one."""

    def __init__(self, stat: Path = STAT, clock: Callable[[], float] = time.monotonic) -> None:
        self._stat = stat
        self._clock = clock
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._since_s, self._idle = clock(), self._read()

    def spare(self) -> float | None:
        """Cores that were idle on average; None if that cannot be told."""
        now, idle = self._clock(), self._read()
        window_s = now - self._since_s
        if window_s < LEAST_WINDOW_S:
            return None
        before, self._since_s, self._idle = self._idle, now, idle
        if idle is None or before is None:
            return None
        return max(0.0, (idle - before) / self._ticks / window_s)

    def _read(self) -> int | None:
        """Ticks the cores of this process were idle, all of them together."""
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        try:
            lines = self._stat.read_text(encoding="ascii").splitlines()
            rows = [line.split() for line in lines]
            idle = [int(r[_IDLE]) + int(r[_IOWAIT]) for r in rows if r and r[0] in mine]
        except (OSError, ValueError, IndexError):
            return None
        return sum(idle) if idle else None
