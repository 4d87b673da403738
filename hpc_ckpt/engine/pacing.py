"""How fast a save may be written while training goes on beside it."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from ..cores import IdleCores
from ..tiers.writing import Pace

BACKGROUND_RATE = 300e6
"""Bytes a second while training goes on: what two busy cores hardly notice (ADR 6)."""
INTERVAL_SHARE = 0.5
"""A paced persist is over after this part of the time between two saves."""
SPARE_CORE = 0.75
"""So much of a core idle on average: writing at full speed takes nothing from training."""


class Pacing:
    """Chooses a pace for each save."""

    def __init__(self, cores: IdleCores | None = None) -> None:
        self._cores = cores or IdleCores()
        self.interval_s = 0.0
        """Seconds between the last two saves."""

    def pace(self, size: int, *, urgent: bool) -> Pace:
        """Full speed if somebody waits or a core is idle; else what training hardly notices,
        but fast enough to be over before the next save is due."""
        spare = self._cores.spare()
        if urgent or (spare is not None and spare >= SPARE_CORE):
            return Pace()
        due_s = self.interval_s * INTERVAL_SHARE
        return Pace(max(BACKGROUND_RATE, size / due_s if due_s > 0 else 0.0))

    def calm(self, size: int) -> Pace:
        """For what follows a save of this size: slowly, but over before the next one is due."""
        due_s = self.interval_s * (1 - INTERVAL_SHARE) / 2
        return Pace(max(BACKGROUND_RATE, size / due_s if due_s > 0 else 0.0))
