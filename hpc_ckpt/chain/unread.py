"""Storage that did not give the orders of a link in time, or take its lease: where nothing waits
behind the link, its job goes back into the queue all the same, by what Slurm itself knows of it.

Standard library only: the link runner asks it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from .. import fsio, lease
from ..errors import HpcCkptError, SchedulerError
from ..lease import Holder
from ..rundir import RunDir
from . import slurm
from .allocation import SlurmBackend
from .arguments import read
from .backend import Backend, Cause
from .orders import Orders
from .patience import ToldToStop, by_mistake, by_storage, patiently, why_unread
from .succession import AWAY_PATIENCE_S, AWAY_RETRY_S
from .sweep import member_root

log = logging.getLogger("hpc_ckpt.link")

NOTHING_WAITS = ("requeue", "resubmit")
"""Strategies in which the chain is over with a link that does nothing; otherwise the next token,
or the next job, finds out whether it is better."""
MOST_STARTS = 20
"""In a row, of a job that could not write anything: five hours, as with the tokens of an array."""

T = TypeVar("T")


def read_orders(arguments: argparse.Namespace) -> tuple[RunDir, Orders]:
    """The run directory of the chain and its orders, waited for; raises if they do not come."""
    asked = partial(read, arguments.root, arguments.member)
    return waited_for(asked, partial(go_on_unread, arguments))


def waited_for(act: Callable[[], T], go_on: Callable[..., object]) -> T:
    """What is asked of storage before a link can begin. Where nothing comes of it, `go_on(told=…)`
    before it raises: ToldToStop if the link was told to stop, else what storage said."""
    try:
        return patiently(act)
    except ToldToStop:
        go_on(told=True)
        raise
    except (HpcCkptError, OSError) as error:
        if by_storage(error):
            go_on(told=False)
        raise


def go_on_unread(arguments: argparse.Namespace, *, told: bool) -> None:
    if arguments.backend == "slurm" and arguments.strategy in NOTHING_WAITS:
        backend = SlurmBackend(os.environ)
        # What somebody cancels is not brought back; and no answer is no fact.
        if not told or backend.look().cause not in (None, Cause.CANCELLED):
            _requeue_unless_in_vain(_place_of(arguments), backend)


def _place_of(arguments: argparse.Namespace) -> RunDir | None:
    """None: what tells it for a member cannot be read either."""
    try:
        member = arguments.member
        return RunDir(arguments.root if member is None else member_root(arguments.root, member))
    except (HpcCkptError, OSError):
        return None


def go_on_unwritten(rundir: RunDir, strategy: str, backend: Backend) -> None:
    """No lease could be taken, so that no budget counts this start; Slurm counts them."""
    if not isinstance(backend, SlurmBackend) or strategy not in NOTHING_WAITS:
        return
    _requeue_unless_in_vain(rundir, backend)


def _requeue_unless_in_vain(rundir: RunDir | None, backend: SlurmBackend) -> None:
    if rundir is None or _starts_in_vain(rundir, backend.holder()) < MOST_STARTS:
        requeue(backend)
    else:
        log.error("not tried again after %d times; make room, then resume the chain", MOST_STARTS)


def begun_or_put_back(
    act: Callable[[], T], rundir: RunDir, holder: Holder, put_back: Callable[[], int] | None
) -> T:
    """The same for a link in somebody else's job, which keeps its signals by itself: `act`, or
    SystemExit with what `put_back` says. In its first start a root that cannot be made is a
    mistake, and nothing to wait for."""

    def passes(error: Exception) -> bool:
        return by_storage(error) and not (holder.restarts == 0 and by_mistake(error))

    try:
        return patiently(act, passes=passes, sleep=time.sleep)
    except (HpcCkptError, OSError) as error:
        hopeless = not passes(error) or _starts_in_vain(rundir, holder) >= MOST_STARTS
        if hopeless or put_back is None:
            raise
        log.warning("%s; the job goes back into the queue", error)
        raise SystemExit(put_back()) from error


def _starts_in_vain(rundir: RunDir, holder: Holder) -> int:
    """Of this job, since a link of it began; 0 where not even that can be read."""
    try:
        if not fsio.exists(rundir.root):
            return 0  # as where it is not mounted
        newest = lease.highest(rundir)
        last = lease.holder_of(rundir, newest)
        if newest and last is None and why_unread(lease.file_of(rundir, newest)):
            return 0
    except (HpcCkptError, OSError):
        return 0
    before = -1 if last is None or last.job != holder.job else last.restarts
    return holder.restarts - before


def requeue(
    backend: SlurmBackend,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """The last thing such a link does; tried again while the scheduler is away as well."""
    if backend.job is None:
        return
    end = clock() + AWAY_PATIENCE_S
    while True:
        try:
            slurm.requeue(backend.job, backend.run)
        except SchedulerError as error:
            if slurm.is_away(error) and clock() < end:
                sleep(AWAY_RETRY_S)
                continue
            said = " ".join(error.stderr.split())
            log.warning("nothing follows this link: %s; submit the chain again", said)
        return
