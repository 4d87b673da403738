"""Submission: everything is checked first, then the run directory is made, then sbatch is asked.

If sbatch refuses, the run directory is put back as it was. A stopped root is taken up again; a
live or finished one is refused. sweeping.py does the same for many chains in one array.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
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

from .. import fsio
from ..errors import SchedulerError, SpecError, Unanswered
from ..provenance import git_version
from ..rundir import RunDir
from ..settings import ENV_PREFIX
from ..units import format_duration
from . import pinning, setup, slurm, unanswered
from .claim import add_jobs, claimed_directory, counted_anew, encode, refuse_another_command
from .command import check_command
from .directives import dependency_of
from .freeze import freeze, is_frozen
from .layers import Loaded, load
from .ledger import ChainStatus, State, has_run_out, may_be_over, read_status
from .past import jobs_of
from .plan import Plan
from .planning import is_of_this_cluster, make_plan
from .profile import Backend, Strategy
from .record import chain_record
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
        return jobs_of(self.rundir)

    def status(self) -> ChainStatus:
        return read_status(self.rundir)

    def wait(self, timeout_s: float | None = None) -> ChainStatus:
        """Until the work is complete, the chain has stopped, or nothing follows its last link;
        TimeoutError after that long.

        Looks at files only: a chain that is cancelled behind our back is not noticed, nor that
        Slurm does not put a last link back which it has preempted, or does put back one that was
        lost without a word.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if may_be_over(self.rundir):  # first: a status reads the whole history
                status = self.status()
                over = status.state in (State.COMPLETE, State.STOPPED)
                if over or has_run_out(self.rundir, status):
                    return status
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"{self.rundir.root}: still {self.status().state.value}")
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
    plan = make_plan(loaded, cwd=cwd, environ=os.environ, live=True)
    submit_loaded(loaded, plan, environ=os.environ)
    return Chain(plan.root)


def render_loaded(loaded: Loaded, *, cwd: Path, environ: Mapping[str, str]) -> str:
    """As it would be submitted now, within the limits of the cluster if the profile is of this
    one."""
    plan = make_plan(loaded, cwd=cwd, environ=environ, live=is_of_this_cluster(loaded))
    return render(plan, python=sys.executable)


def submit_loaded(loaded: Loaded, plan: Plan, *, environ: Mapping[str, str]) -> list[str]:
    """The ids of the array or jobs. Nothing half-made is left behind if they cannot be had.

    Unanswered: they may exist, so the run directory stays as they need it.
    """
    if plan.backend is not Backend.SLURM:
        raise SpecError(
            "no Slurm here: run the chain on this machine with 'hpc-ckpt run', or name a "
            "cluster with --profile"
        )
    if plan.members:
        raise SpecError("members: a sweep is submitted with sweeping.submit_sweep")
    check_command(loaded.spec, plan, environ)
    check_live(loaded, plan)
    script = render(plan, python=sys.executable)
    with uninterrupted(), _run_directory(loaded, plan) as rundir:
        path = rundir.root / SCRIPT_NAME
        fsio.write_atomic(path, os.fsencode(script))
        jobs, lost = _sbatch_all(path, plan, jobs_of(rundir))
        add_jobs(rundir, jobs)
    remember(plan.root, plan.name, environ)
    if lost is not None:
        raise lost
    return jobs


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits: an array whose id nobody wrote down could not be stopped."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _sbatch_all(
    script: Path, plan: Plan, known: Sequence[str]
) -> tuple[list[str], Unanswered | None]:
    """One job or array; for afterany each job behind the one before. All of them or none, unless
    an answer is lost: what is known to exist then stays, and the error is told."""
    jobs: list[str] = []
    wanted = plan.links if plan.strategy is Strategy.AFTERANY else 1
    asked = dependency_of(plan.extra)
    while len(jobs) < wanted:
        options = [f"--dependency={_behind(jobs[-1], asked)}"] if jobs else []
        try:
            jobs.append(sbatch(script, *options, known=[*known, *jobs]))
        except Unanswered as lost:
            return jobs, lost
        except BaseException:  # all of them or none; then raised again
            for job in reversed(jobs):
                with contextlib.suppress(SchedulerError):
                    slurm.cancel(job)
            raise
    return jobs, None


def _behind(job: str, asked: str | None) -> str:
    """The command line outranks the script, so what was asked for is said again: where it can
    never be fulfilled Slurm may cancel the first job, and afterany alone would start the second.
    Slurm takes all (,) or any (?) of a list, never both."""
    return f"afterany:{job}" + (f",{asked}" if asked and "?" not in asked else "")


def sbatch(
    script: Path, *options: str, known: Sequence[str] = (), indices: Sequence[int] | None = None
) -> str:
    """`known`: live jobs of this script, or of its `indices`; any other one is a lost answer."""
    try:
        return unanswered.submit(script, *options, known=known, indices=indices)
    except Unanswered:
        raise
    except SchedulerError as error:
        raise SpecError(f"sbatch refused the chain: {' '.join(error.stderr.split())}") from None


def check_live(loaded: Loaded, plan: Plan) -> None:
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
    script = rundir.root / SCRIPT_NAME
    changed = [rundir.chain_file, rundir.halt_file, script]
    submits = script if plan.backend is Backend.SLURM else None
    with claimed_directory(rundir, changed, group=plan.group, script=submits):
        write_chain(rundir, loaded, plan, pin(loaded, plan, rundir.root))
        setup.forget(rundir.logs)
        yield rundir


@dataclass(frozen=True)
class Pinned:
    """What is kept of the moment of a submission; one for all members of a sweep."""

    code: dict[str, str | bool] | None
    cwd: Path | None
    """Where the links run if the code is pinned."""
    packages: dict[str, str] | None


def pin(loaded: Loaded, plan: Plan, home: Path) -> Pinned:
    prefixes = _pinned_prefixes(plan) if loaded.spec.pin.environment else None
    return Pinned(
        code=_version(plan.cwd, home),
        cwd=_frozen_code(loaded, plan, home),
        packages=None if prefixes is None else pinning.record(prefixes),
    )


def _pinned_prefixes(plan: Plan) -> list[str]:
    """On this machine links run in the environment of whoever starts them."""
    prefixes = [one.prefix for one in plan.activations]
    if prefixes or plan.backend is not Backend.SLURM:
        return prefixes
    if plan.prologue is not None:
        why = f"the prologue of {plan.cluster} makes the environment, and nobody knows which"
        raise SpecError(f"pin.environment: {why}; take the key out, and pin versions there")
    raise SpecError(
        "pin.environment: no virtual or conda environment is active, so there are no packages to "
        "compare; activate the one of the program, or take the key out"
    )


def _version(cwd: Path, home: Path) -> dict[str, str | bool] | None:
    if is_frozen(cwd, home):  # git would speak of whatever is around the copy
        known: dict[str, str | bool] | None = (RunDir(home).chain() or {}).get("code")
        return known
    return git_version(cwd)


def _frozen_code(loaded: Loaded, plan: Plan, home: Path) -> Path | None:
    kind = loaded.spec.pin.code
    return None if kind is None else freeze(kind, plan.cwd, home)


def write_chain(
    rundir: RunDir,
    loaded: Loaded,
    plan: Plan,
    pinned: Pinned,
    more: Mapping[str, Any] | None = None,
) -> None:
    """chain.json of a run directory that is claimed; `more` outranks what the plan says."""
    old = rundir.chain() or {}
    record = chain_record(
        loaded.spec,
        loaded.profile,
        plan,
        chain=str(old.get("chain") or uuid.uuid4()),
        created=float(old.get("created") or time.time()),
        code=pinned.code,
        cwd=pinned.cwd,
    )
    refuse_another_command(rundir, record)
    record.update(counted_anew(rundir))
    record["environment"] = _overrides(loaded)
    if pinned.packages is not None:
        record["packages"] = pinned.packages
    fsio.write_atomic(rundir.chain_file, encode({**record, **(more or {})}))
    rundir.halt_file.unlink(missing_ok=True)


def take_up_again(rundir: RunDir) -> None:
    """A stopped chain as it is, for new links that count from here."""
    record = {**(rundir.chain() or {}), **counted_anew(rundir)}
    fsio.write_atomic(rundir.chain_file, encode(record))
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
