"""A run directory for one submission: made or taken up again, claimed, put back if it fails."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import fsio, lease
from ..errors import RootError
from ..levels.base import AnotherLevel
from ..levels.dmtcp import Dmtcp
from ..levels.restarts import Restarts, not_its_work, not_offered
from ..rundir import RunDir, phase_of, read_json
from . import slurm
from .hidden import refuse_if_hidden
from .past import jobs_beside_sweep, jobs_of
from .phases import SCRIPTS
from .unanswered import arrays_unknown, running_script

AT_ONCE = 1000
"""Jobs that are named in one squeue: a sweep can have many, an argument has an end."""


@contextlib.contextmanager
def claimed_directory(
    rundir: RunDir, changed: Sequence[Path], *, group: bool, script: Path | None = None
) -> Iterator[None]:
    """Inside, nobody else submits to it. The files in `changed` are as before if that fails.

    `script`: what Slurm is to be given; None: nothing is submitted.
    """
    made = create(rundir, group=group)
    # Nothing is undone without the claim: whoever has it may be using what we made.
    with claimed(rundir.lease):
        with put_back([], made):
            refuse_if_live(rundir, script)
        with put_back(changed, made):
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


def refuse_if_live(rundir: RunDir, script: Path | None = None) -> None:
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
    unknown = refuse_live_jobs(rundir.root, jobs, script)
    if unknown:
        add_jobs(rundir, unknown)
        raise RootError(rundir.root, unanswered(rundir.root, unknown))
    refuse_if_held([rundir])


def refuse_another_command(rundir: RunDir, new: Mapping[str, Any]) -> None:
    """Raises where restarts are the work of another command than `new`, a record for chain.json,
    has, or of a level that it has not. With a Checkpointer that is the user's affair: its
    checkpoints take other arguments."""
    _refuse_another_mpirun(rundir, new)
    restarts = Restarts(rundir)
    if rundir.speaks_file.exists() or not restarts.keys():
        return
    before = phase_of(rundir.chain() or {}, rundir.phase()).get("argv")
    present = phase_of(new, rundir.phase())
    asked = present["argv"]
    saved = before if before not in (None, asked) else restarts.of_another(asked)
    if saved is not None:
        raise RootError(rundir.root, not_its_work(restarts.place, saved, asked))
    offered = [str(level["name"]) for level in present["levels"]]
    try:
        restarts.owner(offered, (read_json(rundir.levels_file) or {}).get("failed") or ())
    except AnotherLevel as error:
        raise RootError(rundir.root, str(error)) from None


def _refuse_another_mpirun(rundir: RunDir, new: Mapping[str, Any]) -> None:
    """The same of what templates/dmtcp.sh keeps: it goes on from that, whatever it is given."""
    place, phase, old = rundir.root / SCRIPTS, rundir.phase(), rundir.chain()
    if old is None or not any(fsio.exists(place / name) for name in ("newest", "DONE")):
        return
    before, asked = phase_of(old, phase), phase_of(new, phase)
    commands = [phase_of(one.get("spec") or {}, phase).get("command") for one in (old, new)]
    if commands[0] != commands[1]:
        raise RootError(rundir.root, not_its_work(place, before["argv"], asked["argv"]))
    if _by_script(before) and not _by_script(asked):
        offered = [str(level["name"]) for level in asked["levels"]]
        raise RootError(rundir.root, not_offered(place, Dmtcp.name, offered))


def _by_script(phase: Mapping[str, Any]) -> bool:
    """Whether the script saves, and not a level: for an mpirun under DMTCP."""
    return not phase.get("levels") and (phase.get("choice") or {}).get("level") == Dmtcp.name


def add_jobs(rundir: RunDir, jobs: Sequence[str]) -> None:
    """Into chain.json, where there is one: what is written down can be stopped."""
    record = rundir.chain()
    if record is not None:
        record["jobs"] = list(dict.fromkeys([*record.get("jobs", ()), *jobs]))
        fsio.write_atomic(rundir.chain_file, encode(record))


def counted_anew(rundir: RunDir) -> dict[str, Any]:
    """For chain.json: the links and jobs up to now are those of earlier submissions. What these
    extended themselves by is listed among them, so that all jobs stay in their order."""
    jobs = jobs_beside_sweep(rundir)
    return {"after_generation": lease.last(rundir), "jobs": jobs, "jobs_before": len(jobs)}


def encode(record: Mapping[str, Any]) -> bytes:
    """A record as chain.json has it."""
    return (json.dumps(record, indent=1) + "\n").encode("utf-8", "surrogateescape")


def unanswered(root: Path, jobs: Sequence[str]) -> str:
    """What to say of jobs that nobody wrote down."""
    named = ", ".join(jobs)
    return (
        f"job {named} was submitted with its script, though the answer of sbatch was lost: it is a "
        f"chain on it already. Look with 'hpc-ckpt status {root}'; end it with 'hpc-ckpt stop "
        f"{root}', or 'scancel {' '.join(jobs)}' where that knows no chain"
    )


def holder_at_work(rundir: RunDir) -> lease.Holder | None:
    """Who took the last generation and has not given it back."""
    last = lease.highest(rundir)
    return None if lease.released(rundir, last) else lease.holder_of(rundir, last)


def refuse_live_jobs(
    root: Path,
    jobs: Sequence[str],
    script: Path | None = None,
    indices: Collection[int] | None = None,
) -> list[str]:
    """Raises if one of these lives. Jobs that nobody wrote down, but that run `script`, are told.

    One squeue for all; in a root that a group shares others may have jobs too: a second one.
    """
    if not jobs and script is None:
        return []
    queue = slurm.in_queue()
    known = set(jobs)
    live = {one.array for one in queue if one.is_of(known)}
    if _is_shared(root):
        wanted = sorted(known)
        parts = [wanted[place : place + AT_ONCE] for place in range(0, len(wanted), AT_ONCE)]
        live.update(job for part in parts for job in slurm.live_jobs(part))
    if live:
        raise RootError(
            root,
            f"job {', '.join(sorted(live))} is a chain on it already; stop that with "
            f"'hpc-ckpt stop {root}', or choose another root",
        )
    found = [] if script is None else running_script(queue, script, indices)
    return arrays_unknown(found, known)


def _is_shared(root: Path) -> bool:
    return bool(root.stat().st_mode & stat.S_IWGRP)


def refuse_if_held(rundirs: Sequence[RunDir]) -> None:
    for rundir in rundirs:
        holder = holder_at_work(rundir)
        if holder is not None and lease.alive_here(holder):
            raise RootError(
                rundir.root, f"in use by process {holder.pid} on this host; choose another root"
            )
    refuse_if_hidden(rundirs)


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
