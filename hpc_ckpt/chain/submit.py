"""Submission: everything is checked first, then the run directory is made, then sbatch is asked.

If sbatch refuses, the run directory is put back as it was. A stopped root is taken up again; a
live or finished one is refused.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import fsio, lease
from ..errors import RootError, SchedulerError, SpecError
from ..provenance import git_version
from ..rundir import RunDir
from ..settings import ENV_PREFIX
from ..units import format_duration
from . import slurm
from .activation import active
from .command import check_command
from .layers import Loaded, load
from .ledger import ChainStatus, State, read_status
from .plan import Plan, chain_record, plan_chain
from .profile import Backend
from .render import render
from .runs import remember
from .stopping import BY_THE_USER, How, stop_chain

SCRIPT_NAME = "chain.sbatch"
LOOK_EVERY_S = 2.0


@dataclass(frozen=True)
class Prepared:
    """A run directory that is ready to run its first, or next, link."""

    rundir: RunDir
    plan: Plan


class Chain:
    """A chain that was submitted; everything it knows is read from the run directory."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.rundir = RunDir(root)

    def __repr__(self) -> str:
        return f"Chain({str(self.rundir.root)!r})"

    @property
    def job_ids(self) -> list[str]:
        """The scheduler's ids of its arrays, oldest first."""
        return [str(job) for job in (self.rundir.chain() or {}).get("jobs") or ()]

    def status(self) -> ChainStatus:
        return read_status(self.rundir)

    def wait(self, timeout_s: float | None = None) -> ChainStatus:
        """Until the work is complete or the chain has stopped; TimeoutError after that long.

        Looks at files only: a chain that is cancelled behind our back is not noticed.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            status = self.status()
            if status.state in (State.COMPLETE, State.STOPPED):
                return status
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"{self.rundir.root}: still {status.state.value}")
            time.sleep(LOOK_EVERY_S)

    def stop(self, reason: str = BY_THE_USER, *, how: How = How.SAVE) -> list[str]:
        """Halt, ask the running link to save, cancel what is pending; the ids cancelled."""
        return list(stop_chain(self.rundir, reason, how).cancelled)


def submit(spec: str | os.PathLike[str] | Mapping[str, Any], profile: str | None = None) -> Chain:
    """Submit a spec (a file or a mapping) to the cluster."""
    cwd = Path.cwd()
    loaded = load(
        spec, profile=profile, live_cluster=slurm.cluster_name(), cwd=cwd, environ=os.environ
    )
    plan = make_plan(loaded, cwd=cwd, environ=os.environ)
    submit_loaded(loaded, plan, environ=os.environ)
    return Chain(plan.root)


def make_plan(loaded: Loaded, *, cwd: Path, environ: Mapping[str, str]) -> Plan:
    """The plan of what was loaded, with the environment that is active here."""
    return plan_chain(loaded.spec, loaded.profile, cwd=cwd, activations=active(environ))


def render_loaded(loaded: Loaded, *, cwd: Path, environ: Mapping[str, str]) -> str:
    return render(make_plan(loaded, cwd=cwd, environ=environ), python=sys.executable)


def submit_loaded(loaded: Loaded, plan: Plan, *, environ: Mapping[str, str]) -> str:
    """The id of the array. Nothing half-made is left behind if it cannot be had."""
    if plan.backend is not Backend.SLURM:
        raise SpecError(
            "no Slurm here: run the chain on this machine with 'hpc-ckpt run', or name a "
            "cluster with --profile"
        )
    check_command(loaded.spec, plan, environ)
    _check_live_limits(loaded, plan)
    script = render(plan, python=sys.executable)
    with _uninterrupted(), _run_directory(loaded, plan) as rundir:
        path = rundir.root / SCRIPT_NAME
        fsio.write_atomic(path, os.fsencode(script))
        job = _sbatch(path)
        _add_job(rundir, job)
    remember(plan.root, plan.name, environ)
    return job


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits: an array whose id nobody wrote down could not be stopped."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _sbatch(script: Path) -> str:
    try:
        return slurm.submit_script(script)
    except SchedulerError as error:
        raise SpecError(f"sbatch refused the chain: {' '.join(error.stderr.split())}") from None


def _check_live_limits(loaded: Loaded, plan: Plan) -> None:
    """Slurm accepts a job its partition can never run and lets it pend for ever."""
    try:
        live = {partition.name: partition for partition in slurm.live_partitions()}
    except SchedulerError as error:
        raise SpecError(f"the cluster does not answer: {error}") from None
    asked = loaded.spec.partition or tuple(p.name for p in live.values() if p.default)
    for name in asked:
        if name not in live:
            known = ", ".join(sorted(live))
            raise SpecError(f"partition: this cluster has no {name!r}; it has {known}")
        limit = live[name].max_time_s
        if limit is not None and plan.link_s > limit:
            raise SpecError(
                f"chain.link_time: {format_duration(plan.link_s)} is more than partition "
                f"{name!r} allows ({format_duration(limit)})"
            )


def prepare(loaded: Loaded, *, cwd: Path, environ: Mapping[str, str]) -> Prepared:
    """For the local runner: the same checks and the same run directory, without a script."""
    plan = make_plan(loaded, cwd=cwd, environ=environ)
    if plan.backend is not Backend.LOCAL:
        raise SpecError(f"profile {plan.cluster!r} is a cluster's: use 'hpc-ckpt submit'")
    check_command(loaded.spec, plan, environ)
    with _run_directory(loaded, plan) as rundir:
        prepared = Prepared(rundir, plan)
    remember(plan.root, plan.name, environ)
    return prepared


# ── the run directory ─────────────────────────────────────────────────────────────────────
@contextlib.contextmanager
def _run_directory(loaded: Loaded, plan: Plan) -> Iterator[RunDir]:
    """Made or taken up again, and claimed for this submission; as it was if that fails."""
    rundir = RunDir(plan.root)
    made = _create(rundir)
    # Nothing is undone without the claim: whoever has it may be using what we made.
    with _claimed(rundir):
        changed = [rundir.chain_file, rundir.halt_file, rundir.root / SCRIPT_NAME]
        before = {path: _read_or_none(path) for path in changed}
        try:
            _refuse_if_live(rundir)
            _write_chain(rundir, loaded, plan)
            yield rundir
        except BaseException:  # put back, then raised again
            for path, data in before.items():
                _put_back(path, data)
            _remove_empty(made)
            raise


def _create(rundir: RunDir) -> list[Path]:
    there = [place for place in (*rundir.root.parents, *rundir.places) if place.exists()]
    try:
        made = rundir.create()
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
def _claimed(rundir: RunDir) -> Iterator[None]:
    """One submission at a time; the lock goes with the process, however it ends."""
    descriptor = os.open(rundir.lease, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise RootError(rundir.root, "another submission is at work on it") from None
    finally:
        os.close(descriptor)


def _refuse_if_live(rundir: RunDir) -> None:
    if rundir.done() is not None:
        raise RootError(
            rundir.root,
            f"the work is complete; delete {rundir.done_file} to go on with it, "
            "or choose another root",
        )
    jobs = [str(job) for job in (rundir.chain() or {}).get("jobs") or ()]
    last = lease.highest(rundir)
    holder = None if lease.released(rundir, last) else lease.holder_of(rundir, last)
    if holder is not None and holder.job is not None:
        jobs.append(holder.array or holder.job)
    live = slurm.live_jobs(sorted(set(jobs)))
    if live:
        raise RootError(
            rundir.root,
            f"job {', '.join(live)} is a chain on it already; stop that with "
            f"'hpc-ckpt stop {rundir.root}', or choose another root",
        )
    if holder is not None and lease.alive_here(holder):
        raise RootError(
            rundir.root, f"in use by process {holder.pid} on this host; choose another root"
        )


def _write_chain(rundir: RunDir, loaded: Loaded, plan: Plan) -> None:
    old = rundir.chain() or {}
    record = chain_record(
        loaded.spec,
        loaded.profile,
        plan,
        chain=str(old.get("chain") or uuid.uuid4()),
        created=float(old.get("created") or time.time()),
        code=git_version(plan.cwd),
    )
    record["after_generation"] = lease.highest(rundir)
    record["jobs"] = list(old.get("jobs") or ())
    record["environment"] = _overrides(loaded)
    fsio.write_atomic(rundir.chain_file, _encode(record))
    rundir.halt_file.unlink(missing_ok=True)


def _overrides(loaded: Loaded) -> dict[str, str]:
    """Settings of the program's own from the environment and the command line.

    A program may set its policy in the call; what was asked for at submission outranks that.
    """
    asked = {
        row.key: row.value
        for row in loaded.spec_rows()
        if row.origin.startswith(("environment variable ", "--"))
    }
    found = {key: value for key, value in asked.items() if key.startswith("checkpoint.")}
    if "tiers" in asked:
        found["tiers"] = json.dumps(loaded.spec.tiers)
    return {ENV_PREFIX + key.upper().replace(".", "__"): value for key, value in found.items()}


def _add_job(rundir: RunDir, job: str) -> None:
    record = rundir.chain() or {}
    record["jobs"] = [*record.get("jobs", ()), job]
    fsio.write_atomic(rundir.chain_file, _encode(record))


def _encode(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, indent=1) + "\n").encode("utf-8", "surrogateescape")


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
