"""Which checkpoints may go: a pure rule, and the careful hand that carries it out.

Nothing here looks inside shards or decides when to run; the engine calls retain() after a
commit, and reads a checkpoint back before the last one that was read goes.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ..errors import CheckpointError, CorruptCheckpoint, NewerCheckpoint
from ..rundir import CheckpointKey
from ..settings import Best, Keep
from .base import Tier


@dataclass(frozen=True)
class Entry:
    """What retention knows of one checkpoint."""

    key: CheckpointKey
    metrics: Mapping[str, float] = field(default_factory=dict)
    pinned: bool = False
    holders: frozenset[CheckpointKey] = frozenset()
    """Older checkpoints that hold shards of this one."""
    foreign: bool = False
    """Made by a newer version: it may refer to any that is older."""


def surplus(
    entries: Sequence[Entry],
    keep: Keep,
    *,
    own_generation: int,
    committed: CheckpointKey,
    known_broken: Collection[CheckpointKey] = (),
) -> list[CheckpointKey]:
    """The checkpoints nothing asks to keep, oldest first.

    Kept whatever `keep` says: pins, the one that was just committed and everything newer, every
    generation above our own, whatever holds shards of something that stays, and what a newer
    version has made, with all that it may refer to. What lies above
    the committed one may be broken, so it counts neither among the newest N nor as the best.
    What is known to be broken does not count either, and goes when its time has come; where
    nothing else is left, nothing goes.
    """
    below = [entry for entry in entries if entry.key <= committed]
    counted = [one for one in below if one.key not in known_broken and not one.foreign]
    candidates = sorted(entry.key for entry in counted)
    if not candidates:
        return []
    newest = candidates[-keep.last :]
    kept = {*newest, committed}
    kept |= {entry.key for entry in below if entry.key in known_broken and entry.key > newest[0]}
    kept |= {entry.key for entry in entries if entry.pinned}
    kept |= _lasting(counted, keep)
    foreign = max((entry.key for entry in entries if entry.foreign), default=None)
    kept |= {entry.key for entry in entries if foreign is not None and entry.key <= foreign}
    unwanted = {
        entry.key
        for entry in below
        if entry.key not in kept and entry.key.generation <= own_generation
    }
    return sorted(unwanted - _needed(entries, unwanted))


def _needed(entries: Sequence[Entry], unwanted: set[CheckpointKey]) -> set[CheckpointKey]:
    """The unwanted ones that hold shards of others that stay, directly or in turn."""
    holders = {entry.key: entry.holders for entry in entries}
    waiting = [entry.key for entry in entries if entry.key not in unwanted]
    needed: set[CheckpointKey] = set()
    while waiting:
        for holder in holders.get(waiting.pop(), frozenset()) - needed:
            needed.add(holder)
            waiting.append(holder)
    return needed & unwanted


def _lasting(entries: Sequence[Entry], keep: Keep) -> set[CheckpointKey]:
    """What stays for another reason than being new."""
    every = keep.every
    kept = {one.key for one in entries if every is not None and one.key.step % every == 0}
    return kept if keep.best is None else kept | _best(entries, keep.best)


def lacking(source: Tier, target: Tier, keep: Keep) -> list[CheckpointKey]:
    """What is to stay, for another reason than being new, and only `source` has; oldest first.

    Of both together: what the target would not keep because it has a better one is not named.
    """
    here = {key: _entry(target, key) for key in target.keys()}  # noqa: SIM118 - not a dict
    there = {key: _entry(source, key) for key in source.keys() if key not in here}  # noqa: SIM118
    known = [one for one in (*there.values(), *here.values()) if not one.foreign]
    return sorted(_lasting(known, keep) - here.keys())


def referring(tier: Tier, holders: Collection[CheckpointKey]) -> set[CheckpointKey]:
    """The checkpoints that cannot be restored without these."""
    entries = (_entry(tier, key) for key in tier.keys())  # noqa: SIM118 - not a dict
    return {entry.key for entry in entries if not entry.holders.isdisjoint(holders)}


def _best(entries: Sequence[Entry], best: Best) -> set[CheckpointKey]:
    """The one with the best value; equal values: the newest. NaN and no value never win."""
    sign = -1.0 if best.mode == "min" else 1.0
    scored = [
        (sign * entry.metrics[best.metric], entry.key)
        for entry in entries
        if not math.isnan(entry.metrics.get(best.metric, math.nan))
    ]
    return {max(scored)[1]} if scored else set()


def retain(
    tier: Tier,
    keep: Keep,
    *,
    generation: int,
    committed: CheckpointKey,
    guard: Callable[[], None],
    known_broken: Collection[CheckpointKey] = (),
    before: Callable[[Sequence[CheckpointKey]], Collection[CheckpointKey]] = lambda surplus: (),
    after: Callable[[CheckpointKey], None] = lambda removed: None,
) -> list[CheckpointKey]:
    """Remove what is surplus and say what went; called only after a commit.

    `guard` is asked before each removal and raises when a newer generation has taken over;
    `before` sees the whole list first, says which of them stay all the same, and may raise;
    `after` hears of each as it goes. If the committed checkpoint is not in this tier, nothing is
    removed.
    """
    keys = tier.keys()
    if committed not in keys:
        return []
    entries = [_entry(tier, key) for key in keys]
    unwanted_of = partial(
        surplus,
        keep=keep,
        own_generation=generation,
        committed=committed,
        known_broken=known_broken,
    )
    unwanted = unwanted_of(entries)
    stays = before(unwanted)
    if stays:  # with all that they refer to
        unwanted = unwanted_of([replace(e, pinned=e.pinned or e.key in stays) for e in entries])
    removed = []
    for key in unwanted:
        guard()
        if tier.pinned(key):  # pinned since the list was made
            continue
        if tier.remove(key):
            removed.append(key)
            after(key)
    return removed


def _entry(tier: Tier, key: CheckpointKey) -> Entry:
    """A broken manifest has no metrics, and nothing can be restored from what it refers to.

    One that could not be looked at may name anything: then nothing is removed this time.
    """
    try:
        summary = tier.summary(key)
    except NewerCheckpoint:
        return Entry(key, pinned=tier.pinned(key), foreign=True)
    except CheckpointError as error:
        if isinstance(error, CorruptCheckpoint) and error.passing:
            raise
        return Entry(key, {}, tier.pinned(key))
    return Entry(key, summary.metrics, tier.pinned(key), summary.holders)
