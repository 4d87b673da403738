"""Three ways to end a chain, or all chains of a sweep: save and end, end after the next
checkpoint, end at once.

All write `halt`, so that no further link runs; they differ in how the running one is told.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from .. import lease
from ..errors import RootError
from ..rundir import RunDir
from .backend import Cause
from .cancelling import cancel_all, cancel_pending
from .local import tell_end
from .past import jobs_of
from .sweep import SweepMember, arrays_of, members, own_jobs, running_link

BY_THE_USER = "stopped by the user"
SOURCE = "hpc-ckpt stop"
HURRY_S = 10.0
"""How long a link that was told to hurry may take before its job is cancelled."""
LOOK_EVERY_S = 0.25


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
    unwritten = _unwritten(partial(rundir.write_halt, reason))
    link = _running(rundir)
    if how is How.AFTER_CHECKPOINT and link is not None and unwritten is None:
        # The link cancels the rest when it ends; until then `halt` can be taken away again.
        return Stopped(how, link, (), ended=False)
    stopped = _stop(rundir, link, how, sleep, clock)
    if unwritten is not None:
        raise _not_told(rundir.root, unwritten, [] if link is None else [rundir])
    return stopped


def _stop(
    rundir: RunDir,
    link: int | None,
    how: How,
    sleep: Callable[[float], object],
    clock: Callable[[], float],
) -> Stopped:
    """All but `halt`, whatever of it the root lets be written."""
    if link is not None and how is not How.AFTER_CHECKPOINT:
        with suppress(OSError):
            rundir.give_notice(link, SOURCE, hurry=how is How.NOW)
    cancelled = tuple(cancel_pending(jobs_of(rundir)))
    if how is not How.NOW or link is None:
        return Stopped(how, link, cancelled, ended=link is None)
    if not _still_there({rundir: link}, sleep, clock):
        return Stopped(how, link, cancelled, ended=True)
    return Stopped(how, link, cancelled, ended=False, killed=_kill(rundir, link))


def _unwritten(write: Callable[[], object]) -> OSError | None:
    """Why a file could not be written: what waits must be cancelled all the same."""
    try:
        write()
    except OSError as error:
        return error
    return None


def _not_told(root: Path, why: OSError, running: Iterable[RunDir]) -> RootError:
    """What was done although nothing could be written, and what is left to do."""
    holders = (lease.holder_of(one, lease.highest(one)) for one in running)
    jobs = " ".join(holder.job for holder in holders if holder is not None and holder.job)
    rest = f"; 'scancel {jobs}' ends what runs" if jobs else ""
    return RootError(
        root,
        f"halt cannot be written ({why.strerror}): what was pending is cancelled, but a link that "
        f"runs or comes back is not told{rest}; make room and stop it again",
    )


def _running(rundir: RunDir) -> int | None:
    last = lease.highest(rundir)
    return last if last and not lease.released(rundir, last) else None


def _still_there(
    links: Mapping[RunDir, int], sleep: Callable[[float], object], clock: Callable[[], float]
) -> list[RunDir]:
    """Those that have not ended when HURRY_S are over."""
    end, left = clock() + HURRY_S, list(links)
    while left := [rundir for rundir in left if not lease.released(rundir, links[rundir])]:
        if clock() >= end:
            break
        sleep(LOOK_EVERY_S)
    return left


def _kill(rundir: RunDir, link: int) -> str | None:
    """By whoever can: Slurm, or the runner of a local link, whose end is now."""
    holder = lease.holder_of(rundir, link)
    if holder is not None and holder.job is not None:
        return holder.job if cancel_all([holder.job]) else None
    if holder is not None and lease.alive_here(holder):
        tell_end(rundir, time.time(), Cause.CANCELLED)
        return "local"
    return None


# ── a sweep ───────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class SweepStopped:
    """What stopping did to a sweep; members by their names."""

    how: How
    stopped: tuple[str, ...]
    """Those that were not over."""
    running: tuple[str, ...]
    """Those of them that ran."""
    killed: tuple[str, ...]
    """Those of them whose job had to be cancelled while it ran."""


def stop_sweep(
    root: Path,
    how: How,
    reason: str = BY_THE_USER,
    *,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> SweepStopped:
    """Every member that is not over, also one that was asked before and still runs.

    The scheduler is asked once for what waits and once for what has to be killed.
    """
    every = [member for member in members(root) if member.rundir.done() is None]
    running = {member: link for member in every if (link := running_link(member.rundir))}
    at_work = [m for m in every if m in running or m.rundir.halted() is None]
    # First of all: none of them may begin while others are being stopped.
    unwritten = _halt_all([m.rundir for m in at_work if m.rundir.halted() is None], reason)
    spared = running if how is How.AFTER_CHECKPOINT else {}
    for member, link in running.items():
        if member not in spared:
            with suppress(OSError):
                member.rundir.give_notice(link, SOURCE, hurry=how is How.NOW)
    arrays = arrays_of(root)
    own = (job for m in every if m not in spared for job in own_jobs(m, arrays))
    cancel_all([*arrays, *own], "--state=PENDING")
    killed = _kill_all(running, sleep, clock) if how is How.NOW else ()
    if unwritten:
        rundir, why = next(iter(unwritten.items()))
        raise _not_told(rundir.root, why, [m.rundir for m in running if m.rundir in unwritten])
    return SweepStopped(
        how,
        stopped=tuple(member.name for member in at_work),
        running=tuple(member.name for member in running),
        killed=killed,
    )


def _halt_all(rundirs: Iterable[RunDir], reason: str) -> dict[RunDir, OSError]:
    """Those in which it could not be written, and why."""
    found = {one: _unwritten(partial(one.write_halt, reason)) for one in rundirs}
    return {one: why for one, why in found.items() if why is not None}


def _kill_all(
    running: Mapping[SweepMember, int],
    sleep: Callable[[float], object],
    clock: Callable[[], float],
) -> tuple[str, ...]:
    left = _still_there({member.rundir: link for member, link in running.items()}, sleep, clock)
    holders = {m: lease.holder_of(m.rundir, running[m]) for m in running if m.rundir in left}
    jobs = {m.name: holder.job for m, holder in holders.items() if holder and holder.job}
    cancel_all(jobs.values())
    return tuple(jobs)
