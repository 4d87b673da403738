"""The signal that a spec's `forward:` asks for, behind a steward: it knows which processes are the
program, and gives it time to answer before anything is ended. Without one the shim sends it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from .. import processes
from .base import Kind, Level
from .binaries import SHELLS
from .program import Program

ENV = "HPC_CKPT_FORWARD"
ANSWER_S = 60.0
"""For a program that nobody else saves, where the spec says nothing of its lead."""
_KILLS_ITS_TASKS = frozenset((signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT))


class Forwarding:
    """Once in a link, to a program that has to answer itself."""

    def __init__(self, environ: Mapping[str, str], lead_s: float | None) -> None:
        name, _, to = environ.get(ENV, "").partition(" ")
        self._number = signal.Signals[f"SIG{name}"] if name else None
        self._to_workers = to == "workers"
        self._lead_s = lead_s

    def ask(self, level: Level, program: Program, until: float) -> None:
        """And wait for its answer, at most to this moment of time.monotonic(). DMTCP and CRIU save
        it as it is: in their images the signal would come again with every restart."""
        number, self._number = self._number, None
        if number is None or level.kind is Kind.SYSTEM:
            return
        for pid in program.leaves() if self._to_workers else _commands([program.pid]):
            if _name(pid) == "srun" and number in _KILLS_ITS_TASKS:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        alone = ANSWER_S if self._lead_s is None else self._lead_s
        patience_s = level.lead_s if level.kind is Kind.APPLICATION else alone
        program.wait(min(until, time.monotonic() + patience_s))


def _commands(pids: Iterable[int]) -> list[int]:
    """The first that are no shells; a shell only where it has no children."""
    found: list[int] = []
    for pid in pids:
        children = [child for child, stat in processes.every() if stat.parent == pid]
        found += _commands(children) if children and _name(pid) in SHELLS else [pid]
    return found


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
