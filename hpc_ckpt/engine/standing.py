"""What this process knows to stand in which tier; brings the newest home before the link ends.

Published decides what counts, the tidier what is damaged, the drainer what is copied: here they
hear of each other.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Collection

from ..rundir import CheckpointKey
from ..tiers.base import Tier
from ..tiers.draining import Drainer
from ..tiers.stack import Stack
from .published import Published
from .tidying import Tidier


class Standing:
    """Told by the threads that commit and drain; asked by the training thread at the end."""

    def __init__(
        self, published: Published, tidier: Tidier, drainer: Drainer, stack: Stack
    ) -> None:
        self._published = published
        self._tidier = tidier
        self._drainer = drainer
        self._stack = stack
        self._lost: CheckpointKey | None = None
        """The newest, which is damaged where it was to last."""

    def stands(self, tier: Tier, key: CheckpointKey) -> None:
        """It is there, whole."""
        self._tidier.is_whole(tier, key)
        self._published.stands(key, tier.name, lasts=self._stack.outlives_job(tier))

    def gone(self, tier: Tier, keys: Collection[CheckpointKey]) -> None:
        """Removed there, or damaged: a drain looks before it believes that they are there."""
        self._drainer.settled(tier).difference_update(keys)
        self._published.gone(tier, keys)
        if self._published.newest in keys and self._stack.outlives_job(tier):
            self._lost = self._published.newest

    def bring_home(self, timeout: float) -> None:
        """Before the link says what it has saved: what would go with the job is drained.

        Nothing else is waited for: neither older ones nor other tiers, which may hang.
        """
        if self._is_home():
            return
        self._order_again()
        self._drainer.hurry()
        self._drainer.insist(timeout, enough=self._is_home)

    def _is_home(self) -> bool:
        newest, lasting = self._published.newest, self._published.lasting  # which damage takes away
        return newest is None or (lasting is not None and newest <= lasting)

    def _order_again(self) -> None:
        """What was drained already, and is damaged there, is not on its way any more."""
        lost, self._lost = self._lost, None
        if lost is None or lost != self._published.newest:
            return
        for tier in self._stack.tiers:
            if tier.name in self._published.places(lost):
                return self._drainer.order(lost, tier)
