"""Where a save goes: by what hangs, what was measured, and what a tier has already.

Decides; it neither writes nor waits.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..rundir import CheckpointKey
from ..tiers.base import Tier
from ..tiers.draining import Drainer
from ..tiers.stack import Stack
from .snapshot import Snapshot
from .steady import Steady
from .underway import UnderWay


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is asked of a save."""

    urgent: bool = False
    """Somebody waits for it."""
    within_s: float | None = None
    """An urgent one: the tier has to be fast enough for that."""
    last: bool = False
    """Nothing follows it in this link: what goes with the job is of no use, and there is a buffer
    for it beside those of saves that hang."""
    home: bool = False
    """In the run directory, or nowhere."""


class Destination:
    """Asked when a save begins, again when its turn comes, and when its tier fails."""

    def __init__(self, stack: Stack, under_way: UnderWay, drainer: Drainer) -> None:
        self._stack = stack
        self._under_way = under_way
        self._drainer = drainer
        self._has: dict[str, set[CheckpointKey]] = {tier.name: set() for tier in stack.tiers}
        """By tier: checkpoints that it is known to have, as far as others refer to them."""
        self._last_size = 0
        """Bytes that the last save would have had to write into the home."""

    def of(self, snapshot: Snapshot, steady: Steady, wish: Wish) -> Tier:
        def size_in(tier: Tier) -> int:
            return steady.left_to_write(snapshot, lambda holder: self._is_in(tier, holder))

        self._last_size = size_in(self._stack.home)
        if wish.home:
            return self._stack.home
        if not wish.urgent:
            return self.unless_it_hangs(self._stack.first)
        return self._stack.choose(size_in, wish.within_s, self._hanging(), last=wish.last)

    def unless_it_hangs(self, tier: Tier) -> Tier:
        """The tier, or where its saves go instead; the home if all hang."""
        if tier.name not in self._hanging():
            return tier
        return next(iter(self.instead_of(tier)), self._stack.home)

    def instead_of(self, tier: Tier) -> tuple[Tier, ...]:
        hanging = self._hanging()
        return tuple(one for one in self._stack.instead_of(tier) if one.name not in hanging)

    @property
    def elsewhere(self) -> bool:
        """Whether the next link would find a save although the run directory takes none."""
        return bool(self.instead_of(self._stack.home))

    @property
    def home_hangs(self) -> bool:
        return self._stack.home.name in self._hanging()

    def last_save_s(self, known: float | None) -> float | None:
        """Seconds of the last save of a link; `known`: those of a commit, None if never timed.

        Where commits go with the job, only the home keeps it for the next link.
        """
        stack = self._stack
        if stack.outlives_job(stack.first):
            return known
        home_s = stack.expected_s(stack.home, self._last_size)
        return known if home_s is None else max(home_s, known or 0.0)

    def note(self, tier: Tier, keys: Iterable[CheckpointKey]) -> None:
        """These checkpoints are there, and later ones may refer to them."""
        self._has[tier.name] = set(keys)

    def _is_in(self, tier: Tier, holder: str) -> bool:
        key = CheckpointKey.parse(holder)
        return key in self._has[tier.name] or key in self._drainer.settled(tier)

    def _hanging(self) -> set[str]:
        """Names of tiers that owe an answer, to whomever."""
        silent = {tier.name for tier in self._stack.tiers if self._stack.hangs(tier)}
        return silent | self._under_way.hanging | self._drainer.hanging
