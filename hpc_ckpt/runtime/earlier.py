"""Earlier work in a tier that cannot be looked at: waited for, told of, and not begun anew over.

The order of checkpoints is (generation, step): the first commit of a run that begins anew
outranks for ever what a tier holds that did not answer just then. What the run directory has on
record of earlier generations is asked; no checkpoint is read here.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from .. import events
from ..engine.restore import Found, Skipped
from ..errors import NoCheckpoint
from ..events import Event
from ..rundir import CheckpointKey, RunDir
from ..tiers.base import Tier
from .session import Session

log = logging.getLogger("hpc_ckpt")

WAIT_S = 300.0
"""A file server that restarts is back by then; the next link may find it answering."""
AGAIN_S = 15.0


def find(session: Session, search: Callable[[], Found]) -> Found:
    """What `search` finds. While a tier that cannot be looked at may hold newer work than that,
    again for a while.

    NoCheckpoint if that is still so then: going on from what is older, or from nothing, would
    outrank it for ever. The first generation of a run has nothing that it could lose, and does
    not wait; nor does one whose newer work lies where no other job can find it anyway.
    """
    end_s = time.monotonic() + WAIT_S
    while True:
        found = search()
        unseen = _unseen(session) if found.checkpoint is None else _newer(session, found)
        if not unseen:
            return found
        left_s = end_s - time.monotonic()
        told = "; ".join(f"tier {tier}: {why}" for tier, why in sorted(unseen.items()))
        if left_s <= 0:
            _tell_passed_over(session, unseen)
            raise NoCheckpoint(session.rundir.root, _refusal(session, found, told))
        log.warning("newer work may lie where nobody can look (%s); looking again", told)
        time.sleep(min(AGAIN_S, left_s))


def _refusal(session: Session, found: Found, told: str) -> str:
    if found.checkpoint is None:
        what = "finds no checkpoint and does not begin anew, for there may be some"
    else:
        name = found.checkpoint.manifest.key.directory_name
        what = f"finds {name} and does not go back to it, for newer ones are on record"
    return (
        f"generation {session.generation} {what} where it cannot look ({told}). Run it again when "
        "that can be read; to give up what may be there, take the tier out of 'tiers', or choose "
        "another root"
    )


def _newer(session: Session, found: Found) -> dict[str, str]:
    """Tiers with newer work on record that cannot be looked at, and that outlive a job."""
    stack = session.stack
    missing = {one.tier for one in overlooked(session, found)}
    return {
        name: why
        for name, why in stack.passed_over.items()
        if name in missing and stack.outlives_job(stack.named(name))
    }


def _tell_passed_over(session: Session, unseen: dict[str, str]) -> None:
    for tier, error in unseen.items():
        session.events.emit(Event.TIER_FAILED, tier=tier, error=error)


def _unseen(session: Session) -> dict[str, str]:
    """Tiers that may hold earlier work and cannot be looked at, and why."""
    if session.generation == 1:
        return {}
    found = dict(session.stack.passed_over)
    recorded = _recorded(session.rundir, session.generation)
    for tier in session.stack.tiers:
        if tier.name in recorded and tier.name not in found:
            why = _why_gone(session, tier)
            if why is not None:
                found[tier.name] = why
    return found


def _why_gone(session: Session, tier: Tier) -> str | None:
    """Nobody who wants to begin anew removes the directory that all chains share: a file system
    that is not mounted on this node looks like that."""
    place = session.stack.wish(tier).path
    if place is None or not session.stack.outlives_job(tier):
        return None
    try:
        there = session.stack.ask(tier, place.is_dir)
    except OSError as error:
        return str(error)
    return None if there else f"{place} is not there; is it mounted on this node?"


def overlooked(session: Session, found: Found) -> tuple[Skipped, ...]:
    """Newer checkpoints that are on record in tiers that were passed over."""
    stack = session.stack
    if found.checkpoint is None or not stack.passed_over:
        return ()
    recorded = _recorded(session.rundir, session.generation)
    newer = {
        stack.named(name).path_of(recorded[name]): name
        for name in stack.passed_over
        if name in recorded and recorded[name] > found.checkpoint.manifest.key
    }
    for one in found.skipped:
        newer.pop(one.path, None)
    told = stack.passed_over
    return tuple(Skipped(path, f"tier {name}: {told[name]}", name) for path, name in newer.items())


def _recorded(rundir: RunDir, generation: int) -> dict[str, CheckpointKey]:
    """By tier: the newest checkpoint that earlier generations have brought there."""
    newest: dict[str, CheckpointKey] = {}
    for record in _records(rundir):
        key, tier = CheckpointKey.parse(str(record.get("checkpoint"))), str(record.get("tier"))
        if key is not None and key.generation < generation:
            newest[tier] = max(key, newest.get(tier, key))
    return newest


def _records(rundir: RunDir) -> Iterator[dict[str, Any]]:
    brought = {Event.COMMITTED.value, Event.DRAINED.value}
    for path in sorted(rundir.events.glob("*.jsonl")):
        for record in events.read(path):
            if record["event"] in brought:
                yield record
