"""Earlier work that cannot be looked at: waited for, told of, and not begun anew over.

The order of checkpoints is (generation, step): the first commit of a run that begins anew, or
goes back, outranks for ever what could not be read just then. What the run directory has on
record of earlier generations is asked; no checkpoint is read here.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from .. import events
from ..engine.restore import Found, Skipped
from ..errors import CheckpointError, NoCheckpoint
from ..events import Event
from ..rundir import CheckpointKey, RunDir
from ..tiers.base import Tier
from ..tiers.stack import Stack
from ..tiers.wishes import is_path
from .session import Session

log = logging.getLogger("hpc_ckpt")

WAIT_S = 300.0
"""A file server that restarts is back by then; the next link may find it answering."""
AGAIN_S = 15.0
_NOT_PASSING = (errno.EACCES, errno.EPERM, errno.ENOTDIR)
"""Somebody's mistake: it is told at once."""


def find(session: Session, search: Callable[[], Found]) -> Found:
    """What `search` finds. While there may be newer work that cannot be read, again for a while.

    NoCheckpoint if that is still so then: going on from what is older, or from nothing, would
    outrank it for ever. Except where the tier gives what is older: it answers, and the newer
    files are what is wrong. The first generation of a run has nothing that it could lose, and
    does not wait; nor does one whose newer work lies where no other job can find it.
    """
    waiting = _Waiting()
    while True:
        try:
            found = search()
        except OSError as error:  # the run directory itself cannot be listed
            if error.errno in _NOT_PASSING or waiting.is_over():
                raise
            waiting.again(str(error))
            continue
        unseen = {**_unread(found), **_unlisted(session, found)}
        over = bool(unseen) and waiting.is_over()
        if not unseen or (over and _may_go_back(session, found, unseen)):
            found.check()
            return found
        told = "; ".join(f"tier {tier}: {why}" for tier, why in sorted(unseen.items()))
        if over:
            _tell_passed_over(session, unseen)
            found.check()
            raise NoCheckpoint(session.rundir.root, _refusal(session, found, told))
        waiting.again(told)


class _Waiting:
    """For a while from the first time that something could not be read: a search alone may have
    taken minutes."""

    def __init__(self) -> None:
        self._end_s: float | None = None

    def is_over(self) -> bool:
        now_s = time.monotonic()
        if self._end_s is None:
            self._end_s = now_s + WAIT_S
        return now_s >= self._end_s

    def again(self, told: str) -> None:
        log.warning("newer work may lie where nobody can look (%s); looking again", told)
        time.sleep(AGAIN_S)


def _unread(found: Found) -> dict[str, str]:
    """Tiers in which a newer checkpoint could not be read just now, and why."""
    here = None if found.checkpoint is None else found.checkpoint.manifest.key
    unread: dict[str, str] = {}
    for one in found.skipped:
        key = CheckpointKey.parse(one.path.name)
        if one.passing and key is not None and (here is None or key > here):
            unread.setdefault(one.tier, str(one))
    return unread


def _may_go_back(session: Session, found: Found, unseen: dict[str, str]) -> bool:
    """Where each of these tiers answers otherwise, or has nothing for a later job."""
    stack = session.stack
    if found.checkpoint is None:
        return False
    key = found.checkpoint.manifest.key
    return all(
        not _lasts(session, stack.named(name)) or _gives(stack, stack.named(name), key)
        for name in unseen
    )


def _gives(stack: Stack, tier: Tier, key: CheckpointKey) -> bool:
    if tier.name in stack.passed_over:
        return False
    try:
        stack.reader(tier, key)
    except (CheckpointError, OSError):
        return False
    return True


def _unlisted(session: Session, found: Found) -> dict[str, str]:
    return _unseen(session) if found.checkpoint is None else _newer(session, found)


def _refusal(session: Session, found: Found, told: str) -> str:
    if found.checkpoint is None:
        what = "finds no checkpoint and does not begin anew, for there may be some"
    else:
        name = found.checkpoint.manifest.key.directory_name
        what = f"finds {name} and does not go back to it, for there are newer ones"
    return (
        f"generation {session.generation} {what} where it cannot look ({told}). Run it again when "
        "that can be read; to give up what may be there, take the tier out of 'tiers', or choose "
        "another root"
    )


def _newer(session: Session, found: Found) -> dict[str, str]:
    """Tiers with newer work on record that cannot be looked at, and that outlive a job."""
    stack, hidden = session.stack, _out_of_sight(session)
    missing = {one.tier for one in overlooked(session, found)}
    return {name: hidden[name] for name in missing if _lasts(session, stack.named(name))}


def _tell_passed_over(session: Session, unseen: dict[str, str]) -> None:
    for tier, error in unseen.items():
        session.events.emit(Event.TIER_FAILED, tier=tier, error=error)


def _unseen(session: Session) -> dict[str, str]:
    """Tiers that may hold earlier work and cannot be looked at, and why."""
    if session.generation == 1:
        return {}
    hidden, silent = _out_of_sight(session), session.stack.passed_over
    recorded = _recorded(session.rundir, session.generation) if hidden else {}
    return {name: why for name, why in hidden.items() if name in silent or name in recorded}


def _out_of_sight(session: Session) -> dict[str, str]:
    """Tiers that cannot be looked at, and why."""
    found = dict(session.stack.passed_over)
    for tier in session.stack.tiers:
        why = None if tier.name in found else _why_gone(session, tier)
        if why is not None:
            found[tier.name] = why
    return found


def _why_gone(session: Session, tier: Tier) -> str | None:
    """Nobody who wants to begin anew removes the directory that all chains share: a file system
    that is not mounted on this node looks like that."""
    place = session.stack.wish(tier).path
    if place is None or not (is_path(tier.name) or _lasts(session, tier)):
        return None
    try:
        there = session.stack.ask(tier, place.is_dir)
    except OSError as error:
        return str(error) if _lasts(session, tier) else None
    if there or not _lasts(session, tier):
        return None
    return f"{place} is not there; is it mounted on this node?"


def _lasts(session: Session, tier: Tier) -> bool:
    """Whether a later job can find there what an earlier one left.

    Of a directory of which nobody has said so, those that wrote there knew: where it is not
    there, one that no other node has looks like a file system that is not mounted.
    """
    if not is_path(tier.name):
        return session.stack.outlives_job(tier)
    recorded = _recorded(session.rundir, session.generation).get(tier.name)
    return recorded is None or recorded[1]


def overlooked(session: Session, found: Found) -> tuple[Skipped, ...]:
    """Newer checkpoints that are on record in tiers that cannot be looked at."""
    stack, hidden = session.stack, _out_of_sight(session)
    if found.checkpoint is None or not hidden:
        return ()
    recorded = _recorded(session.rundir, session.generation)
    newer = {
        stack.named(name).path_of(recorded[name][0]): name
        for name in hidden
        if name in recorded and recorded[name][0] > found.checkpoint.manifest.key
    }
    for one in found.skipped:
        newer.pop(one.path, None)
    return tuple(
        Skipped(path, f"tier {name}: {hidden[name]}", name) for path, name in newer.items()
    )


def _recorded(rundir: RunDir, generation: int) -> dict[str, tuple[CheckpointKey, bool]]:
    """By tier: the newest checkpoint that earlier generations have brought there, and whether
    that was to outlive their job."""
    newest: dict[str, tuple[CheckpointKey, bool]] = {}
    for record in _records(rundir):
        key, tier = CheckpointKey.parse(str(record.get("checkpoint"))), str(record.get("tier"))
        if key is not None and key.generation < generation:
            said = (key, record.get("lasts") is not False)
            newest[tier] = max(said, newest.get(tier, said))
    return newest


def _records(rundir: RunDir) -> Iterator[dict[str, Any]]:
    brought = {Event.COMMITTED.value, Event.DRAINED.value}
    for path in sorted(rundir.events.glob("*.jsonl")):
        for record in events.read(path):
            if record["event"] in brought:
                yield record
