"""A run directory for one submission: made or taken up again, claimed, put back if it fails."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from .. import fsio, lease
from ..errors import RootError
from ..rundir import RunDir
from . import slurm
from .past import jobs_of

AT_ONCE = 1000
"""Jobs that are named in one squeue: a sweep can have many, an argument has an end."""


@contextlib.contextmanager
def claimed_directory(rundir: RunDir, changed: Sequence[Path], *, group: bool) -> Iterator[None]:
    """Inside, nobody else submits to it. The files in `changed` are as before if that fails."""
    made = create(rundir, group=group)
    # Nothing is undone without the claim: whoever has it may be using what we made.
    with claimed(rundir.lease), put_back(changed, made):
        refuse_if_live(rundir)
        yield


@contextlib.contextmanager
def put_back(changed: Sequence[Path], made: Sequence[Path]) -> Iterator[None]:
    """If what is done inside fails: files as they were, new directories gone."""
    before = {path: _read_or_none(path) for path in changed}
    try:
        yield
    except BaseException:  # put back, then raised again
        for path, data in before.items():
            _put_back(path, data)
        _remove_empty(made)
        raise


def create(rundir: RunDir, *, group: bool) -> list[Path]:
    there = [place for place in (*rundir.root.parents, *rundir.places) if place.exists()]
    try:
        made = rundir.create(group=group)
        if not os.access(rundir.root, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        _remove_empty([p for p in (*reversed(rundir.root.parents), *rundir.places)
                       if p not in there])  # fmt: skip
        raise RootError(
            rundir.root, f"cannot be made or written ({error.strerror}); choose another root"
        ) from None
    return made


def _remove_empty(places: Sequence[Path]) -> None:
    """Innermost first. What somebody else has put something into meanwhile stays."""
    for place in reversed(places):
        with contextlib.suppress(OSError):
            place.rmdir()


@contextlib.contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """One submission at a time; the lock goes with the process, however it ends."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise RootError(directory.parent, "another submission is at work on it") from None
    finally:
        os.close(descriptor)


def refuse_if_live(rundir: RunDir) -> None:
    if rundir.done() is not None:
        raise RootError(
            rundir.root,
            f"the work is complete; delete {rundir.done_file} to go on with it, "
            "or choose another root",
        )
    jobs = jobs_of(rundir)
    holder = holder_at_work(rundir)
    if holder is not None and holder.job is not None:
        jobs.append(holder.array or holder.job)
    refuse_live_jobs(rundir.root, jobs)
    refuse_if_held_here(rundir)


def holder_at_work(rundir: RunDir) -> lease.Holder | None:
    """Who took the last generation and has not given it back."""
    last = lease.highest(rundir)
    return None if lease.released(rundir, last) else lease.holder_of(rundir, last)


def refuse_live_jobs(root: Path, jobs: Sequence[str]) -> None:
    wanted = sorted(set(jobs))
    parts = [wanted[place : place + AT_ONCE] for place in range(0, len(wanted), AT_ONCE)]
    live = [job for part in parts for job in slurm.live_jobs(part)]
    if live:
        raise RootError(
            root,
            f"job {', '.join(live)} is a chain on it already; stop that with "
            f"'hpc-ckpt stop {root}', or choose another root",
        )


def refuse_if_held_here(rundir: RunDir) -> None:
    holder = holder_at_work(rundir)
    if holder is not None and lease.alive_here(holder):
        raise RootError(
            rundir.root, f"in use by process {holder.pid} on this host; choose another root"
        )


def _read_or_none(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _put_back(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink(missing_ok=True)
    else:
        fsio.write_atomic(path, data)
