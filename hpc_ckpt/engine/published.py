"""What this process has published last, in whichever tier; and whether it still may publish."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from ..errors import BrokenOff, one_line
from ..events import Event, EventLog
from ..format.manifest import Manifest
from ..rundir import CheckpointKey
from ..tiers.base import Tier
from ..tiers.stack import Stack
from .orders import Order

log = logging.getLogger("hpc_ckpt")

LEASE_S = 5.0
"""So long a save into another tier waits for the run directory, where the lease lies."""
URGENT_LEASE_S = 1.0
"""The same for one that may not have more."""


class Guard:
    """Whether a newer generation has taken over, for a commit or a removal in whichever tier.

    The lease lies in the run directory. Where that does not answer, other tiers are committed to
    all the same: once a newer generation has committed, readers never choose an older one's.
    Nothing is removed then. One that is gone as a whole does not answer either.
    """

    def __init__(self, lease: Callable[[], None], stack: Stack, events: EventLog) -> None:
        self._lease = lease
        self._stack = stack
        self._events = events
        self._told = False

    def for_commit(self, tier: Tier, *, urgent: bool = False) -> None:
        """Raises Fenced; an OSError only of the run directory, for a commit there."""
        try:
            self._ask(tier, URGENT_LEASE_S if urgent else LEASE_S)
        except OSError as error:
            if self._is_home(tier):
                raise
            self._tell(tier, error)
        else:
            self._told = False

    def of_order(self, order: Order) -> None:
        self.for_commit(order.tier, urgent=order.urgent)

    def for_removal(self, tier: Tier) -> None:
        """Raises Fenced, and OSError where nobody can tell."""
        self._ask(tier, LEASE_S)

    def _ask(self, tier: Tier, patience_s: float) -> None:
        if self._is_home(tier):
            self._lease()
        else:
            self._stack.ask_home(self._lease, patience_s)

    def _is_home(self, tier: Tier) -> bool:
        return tier.name == self._stack.home.name  # the drain hands on what only stands for one

    def _tell(self, tier: Tier, error: OSError) -> None:
        """Once, until it answers again."""
        if self._told:
            return
        self._told = True
        home, said = self._stack.home.name, one_line(error)
        self._events.emit(Event.TIER_FAILED, flush=False, tier=home, error=said)
        log.warning("tier %s does not answer, saves go on in tier %s: %s", home, tier.name, said)


class Published:
    """Asked and told by the threads that commit."""

    def __init__(
        self, guard: Callable[[Order], None], on_lost: Callable[[Path], None] = lambda path: None
    ) -> None:
        self._guard = guard
        self._on_lost = on_lost
        """The newest, or the newest that lasts, was found to be damaged."""
        self._lock = threading.Lock()
        self._last: Manifest | None = None
        self._places: dict[CheckpointKey, dict[str, bool]] = {}
        """In which tiers each stands, and whether they outlive the job."""
        self.newest: CheckpointKey | None = None
        """Of this lineage: published here, else the restored one."""
        self.lasting: CheckpointKey | None = None
        """The newest of them that the next link can find."""
        self.any = False
        """There was one, whatever has become of it."""

    def stands(self, key: CheckpointKey, tier: str, *, lasts: bool) -> None:
        """It is in that tier; `lasts`: which outlives the job."""
        with self._lock:  # the drain, and a save that hung, come between
            self._places.setdefault(key, {})[tier] = lasts
            self.any = True
            self._choose()

    def gone(self, tier: Tier, keys: Collection[CheckpointKey]) -> None:
        """They were removed from that tier, or are damaged there."""
        with self._lock:
            before = (self.newest, self.lasting)
            for key in keys:
                places = self._places.get(key, {})
                places.pop(tier.name, None)
                if not places:
                    self._places.pop(key, None)
            self._choose()
            after = (self.newest, self.lasting)
        for old, new in zip(before, after, strict=True):
            if old is not None and old != new:
                return self._on_lost(tier.path_of(old))

    def _choose(self) -> None:
        self.newest = max(self._places, default=None)
        lasting = (key for key, places in self._places.items() if any(places.values()))
        self.lasting = max(lasting, default=None)

    def places(self, key: CheckpointKey) -> Collection[str]:
        """Names of the tiers in which it stands."""
        with self._lock:
            return tuple(self._places.get(key, ()))

    def of(self, key: CheckpointKey) -> Manifest | None:
        """What there is of the same step, perhaps in another tier."""
        last = self._last
        same = last is not None and (last.generation, last.step) == (key.generation, key.step)
        return last if same else None

    def check(self, order: Order, key: CheckpointKey) -> None:
        """Raises if the save may not be published: by this process, or not any more."""
        self._guard(order)
        if order.given_up and self.of(key) is not None:
            raise BrokenOff(f"step {key.step} was saved again while this save of it hung")

    def add(self, manifest: Manifest, revision: int) -> None:
        numbered = replace(manifest, revision=revision)
        with self._lock:
            if self._last is None or self._last.key <= numbered.key:
                self._last = numbered
