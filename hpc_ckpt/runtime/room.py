"""Is there room for what this run will save? Asked once, when its size is known.

Memory is asked at once. Storage is asked in a thread, for a file system may hang; what it found
comes out at a later step. preflight.py does the looking.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import threading

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

    def __init__(self, stack: Stack, events: EventLog, memory: int | None) -> None:
        self._stack = stack
        self._events = events
        self._memory = memory
        self._found: list[tuple[Tier, str]] = []

    def check_memory(self, size: int) -> None:
        """A job that is killed for its memory at the first save has lost what came before."""
        problem = preflight.check_memory(size, self._memory)
        if problem is not None:
            raise UserError(problem)

    def check_storage(self, size: int) -> None:
        """Ask every tier; take_problems() says what they answered."""
        threading.Thread(
            target=self._look, args=(size,), name="hpc-ckpt-preflight", daemon=True
        ).start()

    def take_problems(self, *, fresh: bool) -> list[str]:
        """What was found since this was last asked.

        Fresh: nothing was ever saved. Then a home without room is an error, before hours of work
        that could not be kept; later it is a warning, for what was saved stands.
        """
        found, self._found = self._found, []
        for tier, problem in found:
            if fresh and tier is self._stack.home:
                raise UserError(problem)
        return [problem for _, problem in found]

    def _look(self, size: int) -> None:
        for tier in self._stack.tiers:
            place = tier.path_of(CheckpointKey(0, 0)).parent
            quota = self._stack.wish(tier).quota
            problem = preflight.check_storage(place, size, FILES, quota=quota)
            if problem is not None:
                self._events.emit(Event.NO_ROOM, tier=tier.name, problem=problem)
                self._found.append((tier, problem))
