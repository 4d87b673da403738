"""One turn of the drain thread at a tier: what it copied, and since when nothing has moved.

Whether that is too long is tiers/draining.py's to say.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from ..format.defects import Defect
from ..format.reading import never
from ..rundir import CheckpointKey
from .base import Tier
from .writing import Pace


class Turn:
    """From the first question to the tier to the end of retention there."""

    def __init__(self, source: Tier, target: Tier, pace: Pace, clock: Callable[[], float]) -> None:
        self.way = (source.name, target.name)
        self._pace, self._clock = pace, clock
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
