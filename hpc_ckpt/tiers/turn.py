"""One turn of the drain thread at a tier: what it copied, and since when nothing has moved.

Whether that is too long is tiers/draining.py's to say.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from ..format.defects import Defect
from ..format.reading import never
from ..rundir import CheckpointKey
from .base import Tier
from .writing import Pace

LONGEST_HOLD_S = 600.0
"""For a save that somebody waits for; one that takes longer shares the storage again."""


class Gate:
    """Drains give way to a save that somebody waits for: it has the storage for itself."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._saves_into: str | None = None

    def shut(self, tier: str) -> None:
        self._set(tier)

    def open(self) -> None:
        self._set(None)

    def _set(self, tier: str | None) -> None:
        with self._changed:
            self._saves_into = tier
            self._changed.notify_all()

    def wait(self, target: str, *, needed: bool) -> None:
        """`needed`: what is brought to the target would go with the job. That may have no time
        to lose, and gives way only to a save into the same tier."""

        def free() -> bool:
            return self._saves_into is None or (needed and self._saves_into != target)

        with self._changed:
            self._changed.wait_for(free, LONGEST_HOLD_S)


class Turn:
    """From the first question to the tier to the end of retention there."""

    def __init__(
        self,
        source: Tier,
        target: Tier,
        pace: Pace,
        clock: Callable[[], float],
        give_way: Callable[[], None],
    ) -> None:
        self.way = (source.name, target.name)
        self._pace, self._clock, self._give_way = pace, clock, give_way
        self._began_s = self._moved_s = clock()
        self._holding_back = False
        self.copied = 0
        self.slept_s = 0.0
        """How much of its time the copy waited for others' sake."""
        self.arrived = False
        """The copy is there; what follows is retention."""

    def begin(self) -> None:
        """The copy begins now."""
        self._began_s = self._moved_s = self._clock()

    def moved(self) -> None:
        self._moved_s = self._clock()

    def took(self, nbytes: int) -> None:
        self.copied += nbytes
        began = self._clock()
        with self._held_back():
            self._give_way()
            self._pace.took(nbytes)
        self.slept_s += self._moved_s - began

    @contextmanager
    def _held_back(self) -> Iterator[None]:
        """Whoever holds back for the training's sake does not hang."""
        self._holding_back = True
        try:
            yield
        finally:
            self.moved()
            self._holding_back = False

    def paced(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        """The same question, which may hold back: each time it is asked, something has moved."""

        def ask() -> bool:
            with self._held_back():
                return stop()

        return ask

    @property
    def still_s(self) -> float:
        """For how long nothing has moved."""
        return 0.0 if self._holding_back else self._clock() - self._moved_s

    @property
    def seconds(self) -> float:
        return self._clock() - self._began_s


class _Followed:
    """A tier, and a turn that learns of everything that is asked of it."""

    def __init__(self, tier: Tier, turn: Turn) -> None:
        self._tier, self._turn = tier, turn

    def __getattr__(self, name: str) -> Any:
        self._turn.moved()
        return getattr(self._tier, name)

    def verify(self, key: CheckpointKey, stop: Callable[[], bool] = never) -> list[Defect]:
        return self._tier.verify(key, self._turn.paced(stop))


def followed(tier: Tier, turn: Turn) -> Tier:
    """The same tier for a task of many steps: the next one shows that none hung, and a
    read-back moves with each chunk."""
    return cast("Tier", _Followed(tier, turn))
