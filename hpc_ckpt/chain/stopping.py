"""Three ways to end a chain: save and end, end after the next checkpoint, end at once.

All write `halt`, so that no further link runs; they differ in how the running one is told.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from .. import lease
from ..errors import RootError, SchedulerError
from ..rundir import RunDir
from . import slurm
from .backend import Cause
from .local import tell_end
from .past import jobs_of

BY_THE_USER = "stopped by the user"
SOURCE = "hpc-ckpt stop"
HURRY_S = 10.0
"""How long a link that was told to hurry may take before its job is cancelled."""
LOOK_EVERY_S = 0.25
_GONE = ("Invalid job id", "already completing or completed")


class How(str, Enum):
    SAVE = "save"
    """Ask the running link to save and end, cancel what is pending."""
    AFTER_CHECKPOINT = "after checkpoint"
    """Only `halt`: the link goes on to the checkpoint that its policy makes next."""
    NOW = "now"
    """Ask it to hurry, wait a little, then cancel its job."""


@dataclass(frozen=True)
class Stopped:
    """What stopping did."""

    how: How
    link: int | None
    """The one that was running."""
    cancelled: tuple[str, ...]
    """Jobs whose pending rest was cancelled."""
    ended: bool
    """Whether no link was running when this was written."""
    killed: str | None = None
    """The job that had to be cancelled while it ran; 'local' on this machine."""


def stop_chain(
    rundir: RunDir,
    reason: str,
    how: How,
    *,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Stopped:
    """Refuses a root without a chain, and one whose work is complete."""
    if rundir.chain() is None:
        raise RootError(rundir.root, "no chain there; give the root of a run")
    if rundir.done() is not None:
        raise RootError(rundir.root, "the work is complete; there is nothing to stop")
    jobs = jobs_of(rundir)
    rundir.write_halt(reason)
    link = _running(rundir)
    if how is How.AFTER_CHECKPOINT and link is not None:
        # The link cancels the rest when it ends; until then `halt` can be taken away again.
        return Stopped(how, link, (), ended=False)
    if link is not None:
        rundir.give_notice(link, SOURCE, hurry=how is How.NOW)
    cancelled = tuple(job for job in jobs if cancel_what_waits(job))
    if how is not How.NOW or link is None:
        return Stopped(how, link, cancelled, ended=link is None)
    if _ends_within(rundir, link, HURRY_S, sleep, clock):
        return Stopped(how, link, cancelled, ended=True)
    return Stopped(how, link, cancelled, ended=False, killed=_kill(rundir, link))


def _running(rundir: RunDir) -> int | None:
    last = lease.highest(rundir)
    return last if last and not lease.released(rundir, last) else None


def _done(cancel: Callable[[str], object], job: str) -> bool:
    """A job the scheduler has forgotten is no error: there is nothing left to cancel."""
    try:
        cancel(job)
    except SchedulerError as error:
        if any(gone in error.stderr for gone in _GONE):
            return False
        raise
    return True


def _ends_within(
    rundir: RunDir,
    link: int,
    seconds: float,
    sleep: Callable[[float], object],
    clock: Callable[[], float],
) -> bool:
    end = clock() + seconds
    while not lease.released(rundir, link):
        if clock() >= end:
            return False
        sleep(LOOK_EVERY_S)
    return True


def cancel_what_waits(job: str) -> bool:
    return _done(slurm.cancel_pending, job)


def _kill(rundir: RunDir, link: int) -> str | None:
    """By whoever can: Slurm, or the runner of a local link, whose end is now."""
    holder = lease.holder_of(rundir, link)
    if holder is not None and holder.job is not None:
        return holder.job if _done(slurm.cancel, holder.job) else None
    if holder is not None and lease.alive_here(holder):
        tell_end(rundir, time.time(), Cause.CANCELLED)
        return "local"
    return None
