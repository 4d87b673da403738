"""Is there room for what this run will save? Asked once, when its size is known.

Memory is asked at once. Storage is asked in a thread, for a file system may hang; what it found
comes out at a later step. preflight.py does the looking.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import threading
from contextlib import suppress

from .. import preflight
from ..errors import UserError
from ..events import Event, EventLog
from ..rundir import CheckpointKey
from ..tiers.base import Tier
from ..tiers.stack import Stack

FILES = 3
"""Of one checkpoint, with its directory."""


class Room:
    """Of one run, in every tier."""

    def __init__(
        self, stack: Stack, events: EventLog, memory: int | None, *, keep: int = 0
    ) -> None:
        self._stack = stack
        self._events = events
        self._memory = memory
        self._keep = keep
        self._found: list[tuple[Tier, str, bool]] = []
        """Where, what, and whether not even one checkpoint fits."""

    def check_memory(self, size: int) -> None:
        """A job that is killed for its memory at the first save has lost what came before."""
        problem = preflight.check_memory(size, self._memory)
        if problem is not None:
            raise UserError(problem)

    def check_storage(self, size: int) -> None:
        """Ask every tier; take_problems() says what they answered.

        Without a thread to be had nobody is asked: a save that finds no room says so itself.
        """
        with suppress(RuntimeError):
            threading.Thread(
                target=self._look, args=(size,), name="hpc-ckpt-preflight", daemon=True
            ).start()

    def take_problems(self, *, fresh: bool) -> list[str]:
        """What was found since this was last asked.

        Fresh: nothing was ever saved. Then a home without room is an error, before hours of work
        that could not be kept; later it is a warning, for what was saved stands.
        """
        found, self._found = self._found, []
        for tier, problem, at_once in found:
            if fresh and at_once and tier is self._stack.home:
                raise UserError(problem)
        return [problem for _, problem, _ in found]

    def _look(self, size: int) -> None:
        for tier in self._stack.tiers:
            place = tier.path_of(CheckpointKey(0, 0)).parent
            quota = self._stack.wish(tier).quota
            for count in self._counts(tier):
                needed = (count * size, count * FILES)
                problem = preflight.check_storage(place, *needed, quota=quota)
                if problem is None:
                    continue
                if count > 1:
                    problem = f"{problem} ({self._keep} checkpoints are kept beside the next one)"
                self._events.emit(Event.NO_ROOM, tier=tier.name, problem=problem)
                self._found.append((tier, problem, count == 1))
                break

    def _counts(self, tier: Tier) -> tuple[int, ...]:
        """One has to fit now; as many as are kept, and the next beside them, later."""
        try:
            there = len(tier.keys())
        except OSError:
            there = 0
        later = self._keep + 1 - there
        return (1, later) if self._keep and later > 1 else (1,)
