"""After a commit: what retention no longer wants goes, and what killed writers left behind.

The rule of what to keep is tiers/retention.py's; nothing here can hurt the commit it follows.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from ..errors import BrokenOff, CorruptCheckpoint, Fenced, one_line
from ..events import Event, EventLog
from ..format.defects import DefectKind
from ..format.manifest import CHUNK
from ..lease import Lease
from ..rundir import CheckpointKey
from ..settings import Keep
from ..tiers.base import Committed, Tier
from ..tiers.retention import referring, retain
from ..tiers.writing import Pace
from .restore import Origin
from .scrub import Scrubber

log = logging.getLogger("hpc_ckpt")

STUCK_S = 60.0
"""What follows a commit and has not ended after so long is not waited for by the next."""


class Tidier:
    """Used by the threads that commit; each tier is swept once, and again after a failed save."""

    def __init__(
        self,
        keep: Keep,
        lease: Lease,
        events: EventLog,
        *,
        on_fenced: Callable[[Fenced], None],
        guard: Callable[[Tier], None] | None = None,
        on_damaged: Callable[[str], None] = lambda holder: None,
        on_gone: Callable[[Tier, Collection[CheckpointKey]], None] = lambda tier, keys: None,
        on_sound: Callable[[Path], None] = lambda path: None,
        pace: Callable[[int], Pace] = lambda size: Pace(),
        origin: Origin | None = None,
    ) -> None:
        self._keep = keep
        self._lease = lease
        self._events = events
        self._on_fenced = on_fenced
        self._guard = guard or (lambda tier: lease.check())
        """Raises unless it is known that no newer generation has taken over."""
        self._on_damaged = on_damaged
        self._on_gone = on_gone
        """Removed, or damaged in that tier: no later link finds them there."""
        self._on_sound = on_sound
        """The one that was committed was read back whole."""
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
        self._damaged: dict[str, set[CheckpointKey]] = {}
        """By tier: holders of a shard that was found damaged; no new save refers to them."""
        self._hurried = threading.Event()
        self._rounds = _Rounds()
        self._scrubber = Scrubber()
        self._swept: set[str] = set()
        self._untidy: dict[str, tuple[str, object]] = {}
        """By tier: why nothing could be removed at the last commit."""

    def sweep_again(self, tier: Tier) -> None:
        """A save failed there: what it could not clear away itself may be cleared later."""
        self._swept.discard(tier.name)

    def hurry(self) -> None:
        """Somebody waits for a save, which is about to begin: until calm() no checkpoint is read
        back, and the last one that was stays until the next commit."""
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

    def is_whole(self, tier: Tier, key: CheckpointKey) -> None:
        """It was written there just now, perhaps in the place of a damaged one."""
        for known in (self._broken, self._damaged):
            known.setdefault(tier.name, set()).discard(key)

    def tidy(self, tier: Tier, committed: Committed) -> None:
        self.is_whole(tier, committed.key)
        if not self._rounds.begin(tier.name):
            self._tell_that_it_hangs(tier)
            return
        try:
            self._tidy(tier, committed)
        finally:
            self._rounds.end(tier.name)

    def _tell_that_it_hangs(self, tier: Tier) -> None:
        if self._rounds.told(tier.name):
            return
        said = f"TimeoutError: what followed an earlier commit has not ended after {STUCK_S:.0f} s"
        self._events.emit(Event.RETENTION_FAILED, flush=False, tier=tier.name, error=said)
        log.warning("old checkpoints stay in tier %s until that answers: %s", tier.name, said)

    def _tidy(self, tier: Tier, committed: Committed) -> None:
        try:
            for holder in self._scrubber.damaged(tier, committed.key):
                self._distrust(tier, holder)
            broken = self._broken_in(tier)
            self._on_gone(tier, broken)
            if tier.name not in self._swept:
                self._guard(tier)
                tier.recover()  # before anything goes: at the start it may not have answered
            removed = retain(
                tier,
                self._keep,
                generation=self._lease.generation,
                committed=committed.key,
                guard=lambda: self._guard(tier),
                known_broken=broken,
                before=lambda surplus: self._before(tier, committed, surplus, broken),
                after=lambda key: self._on_gone(tier, [key]),
            )
            if tier.name not in self._swept:
                tier.sweep(self._lease.generation)
                self._swept.add(tier.name)
        except Fenced as error:
            self._on_fenced(error)
        except Exception as error:  # noqa: BLE001 - the commit stands; the next one tidies again
            self._tell_that_all_stays(tier, error)
        else:
            self._untidy.pop(tier.name, None)
            for key in removed:
                self._events.emit(Event.REMOVED, checkpoint=key.directory_name, tier=tier.name)

    def _tell_that_all_stays(self, tier: Tier, error: Exception) -> None:
        """Once for the same reason: a run directory may be away for many commits."""
        known = error.errno if isinstance(error, OSError) else one_line(error)
        reason = (type(error).__name__, known)
        if self._untidy.get(tier.name) == reason:
            return
        self._untidy[tier.name] = reason
        self._events.emit(Event.RETENTION_FAILED, tier=tier.name, error=one_line(error))
        log.warning("could not remove old checkpoints: %s", error)

    def _broken_in(self, tier: Tier) -> frozenset[CheckpointKey]:
        """None of these can be counted on: a holder that is damaged takes others with it."""
        damaged = frozenset(self._damaged.get(tier.name, ()))
        others = referring(tier, damaged) if damaged else ()
        return damaged.union(self._broken.get(tier.name, ()), others)

    def _before(
        self,
        tier: Tier,
        committed: Committed,
        surplus: Sequence[CheckpointKey],
        broken: Collection[CheckpointKey],
    ) -> Collection[CheckpointKey]:
        """Of what stays, one was read: the new one now, if the last of those is too old to stay.

        One read for as many saves as are kept. If it is broken off, that last one stays, or where
        none was ever read, or is damaged since, one more than is wanted.
        """
        verified = self._verified.get(tier.name)
        if verified in broken:
            verified = None
        if not surplus or (verified is not None and verified > surplus[-1]):
            return ()
        try:
            self._read_back(tier, committed)
        except BrokenOff as error:
            log.info("one more checkpoint stays until the next commit: %s", error)
            sound = [key for key in surplus if key not in broken]
            return (verified,) if verified in sound else sound[-1:]
        self._verified[tier.name] = committed.key
        self._on_sound(tier.path_of(committed.key))
        return ()

    def _read_back(self, tier: Tier, committed: Committed) -> None:
        look = _Look(self._pace(committed.size))
        self._looks.add(look)
        try:
            # Somebody may have come before there was a look to break off or to hasten.
            if self._hurried.is_set():
                look.break_off()
            if self._hasty:
                look.pace.hurry()
            found = tier.verify(committed.key, look.stop)
        finally:
            self._looks.discard(look)
        # What somebody put beside the others is no reason to lose them.
        defects = [one for one in found if one.kind is not DefectKind.UNEXPECTED_FILE]
        if not defects:
            return
        error = CorruptCheckpoint(committed.path, defects)
        if not error.passing:
            self._note_damage(tier, committed.key, {one.file for one in defects})
        raise error

    def _note_damage(self, tier: Tier, key: CheckpointKey, places: Collection[str]) -> None:
        self._broken[tier.name].add(key)
        self._on_damaged(key.directory_name)  # the next save must not refer to it
        self._on_gone(tier, [key])
        self._events.emit(Event.DAMAGED, checkpoint=key.directory_name, tier=tier.name)
        shards = tier.manifest(key).shards
        for holder in {one.holder for one in shards if one.place in places} - {None}:
            self._distrust(tier, str(holder))
        self._on_gone(tier, self._broken_in(tier))

    def distrust(self, tier: Tier, name: str) -> None:
        """Damage that somebody else has found there. Whether it is in a shard that others refer to
        is not known: the scrubber finds it there."""
        self._on_damaged(name)
        key = CheckpointKey.parse(name)
        if key is not None:
            self._on_gone(tier, [key])

    def _distrust(self, tier: Tier, holder: str) -> None:
        key = CheckpointKey.parse(holder)
        if key is not None:
            self._damaged.setdefault(tier.name, set()).add(key)
        self._on_damaged(holder)
        self._events.emit(Event.HOLDER_DAMAGED, checkpoint=holder)
        log.warning("%s holds shards of others and is damaged; they are written again", holder)


class _Rounds:
    """One at a time in each tier: where it hangs, only one thread does."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._began_s: dict[str, float] = {}
        self._told: set[str] = set()

    def begin(self, tier: str) -> bool:
        """After the one under way; False: that does not end."""
        with self._changed:
            while tier in self._began_s:
                left_s = self._began_s[tier] + STUCK_S - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
            self._began_s[tier] = time.monotonic()
            return True

    def end(self, tier: str) -> None:
        with self._changed:
            del self._began_s[tier]
            self._told.discard(tier)
            self._changed.notify_all()

    def told(self, tier: str) -> bool:
        """Whether it was said already that this one does not end; it is now."""
        with self._changed:
            known = tier in self._told
            self._told.add(tier)
            return known


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
