"""The processes of this machine, as the stat files in /proc tell of them.

Standard library only: the link runner is built on this. It looks; it ends nobody.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TICKS = os.sysconf("SC_CLK_TCK")
"""Clock ticks in a second."""

_PROC = Path("/proc")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Stat(NamedTuple):
    """One process, at the moment of looking."""

    state: str
    parent: int
    session: int
    ticks: int
    """Processor time, that of ended children included."""
    started: int
    """In clock ticks since boot: pids are reused, the pair of both is not."""
    resident: int
    """Bytes."""

    @property
    def ended(self) -> bool:
        """A zombie: nothing of it runs any more."""
        return self.state in "ZX"


def stat_of(pid: int) -> Stat | None:
    """None if there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:  # also ESRCH: it went while it was being looked at
        return None
    return _parsed(text)


def every() -> Iterator[tuple[int, Stat]]:
    """Each process that can be seen, with its pid."""
    for path in _PROC.iterdir():
        if path.name.isdecimal() and (stat := stat_of(int(path.name))) is not None:
            yield int(path.name), stat


def _parsed(text: str) -> Stat:
    """A program may have brackets and spaces in its name: only the last bracket ends it."""
    fields = text.rpartition(")")[2].split()
    return Stat(
        state=fields[0],
        parent=int(fields[1]),
        session=int(fields[3]),
        ticks=sum(int(ticks) for ticks in fields[11:15]),
        started=int(fields[19]),
        resident=_PAGE * int(fields[21]),
    )
