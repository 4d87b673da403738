"""After a commit: what retention no longer wants goes, and what killed writers left behind.

The rule of what to keep is tiers/retention.py's; nothing here can hurt the commit it follows.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ..errors import CorruptCheckpoint, Fenced
from ..events import Event, EventLog
from ..lease import Lease
from ..rundir import CheckpointKey
from ..settings import Keep
from ..tiers.base import Committed, Tier
from ..tiers.retention import retain
from .restore import Origin
from .scrub import Scrubber

log = logging.getLogger("hpc_ckpt")


class Tidier:
    """Used by the threads that commit; each tier is swept once, and again after a failed save."""

    def __init__(
        self,
        keep: Keep,
        lease: Lease,
        events: EventLog,
        *,
        on_fenced: Callable[[Fenced], None],
        on_damaged: Callable[[str], None] = lambda holder: None,
        origin: Origin | None = None,
    ) -> None:
        self._keep = keep
        self._lease = lease
        self._events = events
        self._on_fenced = on_fenced
        self._on_damaged = on_damaged
        self._origin = origin
        """Every byte of it was read; it goes only after another one was read as well."""
        self._broken = {} if origin is None else dict(origin.broken)
        self._scrubber = Scrubber()
        self._swept: set[str] = set()

    def sweep_again(self, tier: Tier) -> None:
        """A save failed there: what it could not clear away itself may be cleared later."""
        self._swept.discard(tier.name)

    def tidy(self, tier: Tier, committed: Committed) -> None:
        try:
            self._look_after(tier, committed)
            removed = retain(
                tier,
                self._keep,
                generation=self._lease.generation,
                newest_verified=committed.key,
                guard=self._lease.check,
                known_broken=self._broken.get(tier.name, ()),
                before=lambda surplus: self._before(tier, committed, surplus),
            )
            if tier.name not in self._swept:
                tier.sweep(self._lease.generation)
                self._swept.add(tier.name)
        except Fenced as error:
            self._on_fenced(error)
        except Exception as error:  # noqa: BLE001 - the commit stands; the next one tidies again
            said = " ".join(f"{type(error).__name__}: {error}".split())
            self._events.emit(Event.RETENTION_FAILED, tier=tier.name, error=said)
            log.warning("could not remove old checkpoints: %s", error)
        else:
            for key in removed:
                self._events.emit(Event.REMOVED, checkpoint=key.directory_name, tier=tier.name)

    def _look_after(self, tier: Tier, committed: Committed) -> None:
        """Where retention leaves no other copy, this one must be read before the last goes.

        Where it leaves some, a part of what they all refer to is read each time: one damaged
        holder would spoil every checkpoint that is still to come.
        """
        if self._keep.last == 1:
            self._read_back(tier, committed)
        for holder in self._scrubber.damaged(tier, committed.key):
            self._distrust(holder)

    def _before(self, tier: Tier, committed: Committed, surplus: Sequence[CheckpointKey]) -> None:
        origin = self._origin
        if origin is None or origin.tier.name != tier.name or origin.key not in surplus:
            return
        self._read_back(tier, committed)
        self._origin = None

    def _read_back(self, tier: Tier, committed: Committed) -> None:
        defects = tier.verify(committed.key)
        if not defects:
            return
        for shard in tier.manifest(committed.key).shards:
            if shard.holder is not None:
                self._distrust(shard.holder)
        raise CorruptCheckpoint(committed.path, defects)

    def _distrust(self, holder: str) -> None:
        self._on_damaged(holder)
        self._events.emit(Event.HOLDER_DAMAGED, checkpoint=holder)
        log.warning("%s holds shards of others and is damaged; they are written again", holder)
