"""After a commit: what retention no longer wants goes, and what killed writers left behind.

The rule of what to keep is tiers/retention.py's; nothing here can hurt the commit it follows.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from ..errors import BrokenOff, CorruptCheckpoint, Fenced, one_line
from ..events import Event, EventLog
from ..format.manifest import CHUNK
from ..lease import Lease
from ..rundir import CheckpointKey
from ..settings import Keep
from ..tiers.base import Committed, Tier
from ..tiers.retention import retain
from ..tiers.writing import Pace
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
        pace: Callable[[int], Pace] = lambda size: Pace(),
        origin: Origin | None = None,
    ) -> None:
        self._keep = keep
        self._lease = lease
        self._events = events
        self._on_fenced = on_fenced
        self._on_damaged = on_damaged
        self._pace = pace
        """How fast that many bytes may be read beside training."""
        self._looks: set[_Look] = set()
        """Under way now; the thread that commits and the one that drains have one each."""
        self._hasty = False
        self._verified = {} if origin is None else {origin.tier.name: origin.key}
        """By tier: the newest of which every byte was read; it goes only after another was."""
        self._broken: dict[str, set[CheckpointKey]] = {}
        if origin is not None:
            self._broken = {tier: set(keys) for tier, keys in origin.broken.items()}
        self._hurried = threading.Event()
        self._scrubber = Scrubber()
        self._swept: set[str] = set()

    def sweep_again(self, tier: Tier) -> None:
        """A save failed there: what it could not clear away itself may be cleared later."""
        self._swept.discard(tier.name)

    def hurry(self) -> None:
        """Somebody waits for a save, which is about to begin: until calm() no checkpoint is read
        back, and what that would have let go stays until the next commit."""
        self._hurried.set()
        self.break_off()

    def calm(self) -> None:
        """That save has begun."""
        self._hurried.clear()

    def break_off(self) -> None:
        """Somebody waits for what comes behind the looks under way."""
        for look in tuple(self._looks):
            look.break_off()

    def hasten(self) -> None:
        """Somebody waits for all to end: from now on nothing is read slowly."""
        self._hasty = True
        for look in tuple(self._looks):
            look.pace.hurry()

    def tidy(self, tier: Tier, committed: Committed) -> None:
        broken = self._broken.setdefault(tier.name, set())
        broken.discard(committed.key)  # a whole copy has taken its place
        try:
            for holder in self._scrubber.damaged(tier, committed.key):
                self._distrust(holder)
            removed = retain(
                tier,
                self._keep,
                generation=self._lease.generation,
                committed=committed.key,
                guard=self._lease.check,
                known_broken=broken,
                before=lambda surplus: self._before(tier, committed, surplus),
            )
            if tier.name not in self._swept:
                tier.sweep(self._lease.generation)
                self._swept.add(tier.name)
        except Fenced as error:
            self._on_fenced(error)
        except BrokenOff as error:
            log.info("old checkpoints stay until the next commit: %s", error)
        except Exception as error:  # noqa: BLE001 - the commit stands; the next one tidies again
            said = one_line(error)
            self._events.emit(Event.RETENTION_FAILED, tier=tier.name, error=said)
            log.warning("could not remove old checkpoints: %s", error)
        else:
            for key in removed:
                self._events.emit(Event.REMOVED, checkpoint=key.directory_name, tier=tier.name)

    def _before(self, tier: Tier, committed: Committed, surplus: Sequence[CheckpointKey]) -> None:
        """Of what stays, one was read: the new one now, if the last of those is too old to stay.

        One read for as many saves as are kept.
        """
        verified = self._verified.get(tier.name)
        if surplus and (verified is None or verified <= surplus[-1]):
            self._read_back(tier, committed)
            self._verified[tier.name] = committed.key

    def _read_back(self, tier: Tier, committed: Committed) -> None:
        look = _Look(self._pace(committed.size))
        self._looks.add(look)
        try:
            # Somebody may have come before there was a look to break off or to hasten.
            if self._hurried.is_set():
                look.break_off()
            if self._hasty:
                look.pace.hurry()
            defects = tier.verify(committed.key, look.stop)
        finally:
            self._looks.discard(look)
        if not defects:
            return
        error = CorruptCheckpoint(committed.path, defects)
        if not error.passing:
            self._broken[tier.name].add(committed.key)
            for shard in tier.manifest(committed.key).shards:
                if shard.holder is not None:
                    self._distrust(shard.holder)
        raise error

    def _distrust(self, holder: str) -> None:
        self._on_damaged(holder)
        self._events.emit(Event.HOLDER_DAMAGED, checkpoint=holder)
        log.warning("%s holds shards of others and is damaged; they are written again", holder)


class _Look:
    """One reading of every byte, at a pace, until somebody breaks it off."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._broken_off = threading.Event()

    def break_off(self) -> None:
        self._broken_off.set()
        self.pace.hurry()

    def stop(self) -> bool:
        """Asked before each chunk."""
        self.pace.took(CHUNK)
        return self._broken_off.is_set()
