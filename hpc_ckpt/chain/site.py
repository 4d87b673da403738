"""What a profile asks of jobs that others write the script of: its lines, their environment.

Also whether a root is free for such a job. Knows no submitit; tasks.py does.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import logging
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import lease, rundir
from ..errors import RootError, SchedulerError
from ..rundir import RunDir
from ..units import parse_duration
from . import slurm
from .hidden import refuse_if_hidden
from .layers import load
from .profile import Backend, Profile
from .surroundings import ENV_FENCE, ENV_FENCING

log = logging.getLogger("hpc_ckpt.task")

ENV_SIGNAL = "SUBMITIT_PREEMPT_SIGNAL"
PICKLE = "%j_submitted.pkl"
"""submitit's file of a job, with its patterns."""
STEP_ENVIRONMENT = (
    "trap : USR1 USR2 TERM  # TERM at the limit would end this shell, and with it the final save",
    "export SLURM_EXPORT_ENV=ALL",
    'if [ -n "${SLURM_CPUS_PER_TASK-}" ]; then  # srun no longer inherits it since Slurm 22.05',
    '    export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
    '    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}"',
    "fi",
)
MODULES = (
    "if ! command -v module >/dev/null 2>&1; then",
    "    for init in /etc/profile.d/{modules,lmod,z00_lmod}.sh; do",
    '        if [ -r "$init" ]; then . "$init"; fi',
    "    done",
    "fi",
)
_OF_A_JOB = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "PMI")
_OF_A_LINK = (
    rundir.ENV_ROOT, rundir.ENV_GENERATION, rundir.ENV_NOTICE, rundir.ENV_DEADLINE,
    rundir.ENV_OUTCOME, rundir.ENV_SETTINGS, rundir.ENV_BACKEND, ENV_FENCE, ENV_FENCING,
)  # fmt: skip
_KEPT = frozenset({"SLURM_CONF", "SUBMITIT_LOG_LEVEL"})


@dataclass(frozen=True)
class Site:
    """Where jobs go, and what their links are told."""

    profile: Profile
    on_slurm: bool
    record: dict[str, Any]
    """For chain.json."""

    @classmethod
    def find(cls, wanted: str | os.PathLike[str] | None) -> Site:
        live = slurm.cluster_name()
        given = {"command": ["submitit"], "root": "runs"}  # a spec needs both; neither is used
        cwd, environ = Path.cwd(), os.environ
        loaded = load(given, profile=wanted, live_cluster=live, cwd=cwd, environ=environ)
        profile, spec = loaded.profile, loaded.spec.model_dump(mode="json")
        told = {name: spec[name] for name in ("checkpoint", "tiers")}
        clustered = profile.backend is Backend.SLURM
        if clustered and live is None:
            log.warning("no Slurm answers here: jobs for %s run on this machine", profile.cluster)
        return cls(
            profile=profile,
            on_slurm=clustered and live is not None,
            record={"spec": told, "profile": profile.model_dump(mode="json")},
        )

    @property
    def lead_s(self) -> float:
        return parse_duration(self.profile.signal.lead)


# ── the script ────────────────────────────────────────────────────────────────────────────
def setup_lines(profile: Profile, folder: Path) -> list[str]:
    """bash, before the step: one setting of the signal for script and runtime, the environment."""
    loads = [
        f"module load {shlex.quote(name)} || "
        f"{{ echo hpc-ckpt: module load {shlex.quote(name)} failed on $HOSTNAME >&2; exit 1; }}"
        for name in profile.environment.modules
    ]
    prologue = (profile.environment.prologue or "").strip("\n")
    return [
        *STEP_ENVIRONMENT,
        f"export {ENV_SIGNAL}={profile.signal.name}",
        *_healing(folder),
        *(MODULES if loads else ()),
        *loads,
        *([prologue] if prologue else []),
    ]


def _healing(folder: Path) -> list[str]:
    """submitit removes its pickle before it renames the new one: killed between, it has none."""
    variables = {
        "%j": "$job", "%t": "0", "%A": "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}",
        "%a": "${SLURM_ARRAY_TASK_ID-}",
    }  # fmt: skip
    place = "'" + str(folder / PICKLE).replace("'", "'\\''") + "'"
    for pattern, variable in variables.items():
        place = place.replace(pattern, f"'\"{variable}\"'")
    return [
        'job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"',
        f"pickle={place}",
        'if [ ! -e "$pickle" ] && [ -e "$pickle.save_tmp" ]; then',
        '    mv "$pickle.save_tmp" "$pickle"',
        "fi",
    ]


def directive(text: str) -> tuple[str, str | bool]:
    """A directive of the profile as submitit wants it.

    >>> directive("--constraint=ib"), directive("--licenses fluent:2"), directive("--exclusive")
    (('constraint', 'ib'), ('licenses', 'fluent:2'), ('exclusive', True))
    """
    name, *value = text.removeprefix("--").replace(" ", "=", 1).split("=", 1)
    return name, value[0].strip() if value else True


# ── the environment ───────────────────────────────────────────────────────────────────────
@contextlib.contextmanager
def scrubbed(signal_name: str) -> Iterator[None]:
    """Nothing of a job around this process reaches the new one; SLURM_CONF names the Slurm."""
    foreign = ("SUBMITIT_", *(_OF_A_JOB if "SLURM_JOB_ID" in os.environ else ()))
    hidden = {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(foreign) and name not in _KEPT) or name in _OF_A_LINK
    }
    for name in hidden:
        del os.environ[name]
    os.environ[ENV_SIGNAL] = signal_name
    try:
        yield
    finally:
        del os.environ[ENV_SIGNAL]
        os.environ.update(hidden)


# ── the root ──────────────────────────────────────────────────────────────────────────────
def refuse_if_live(places: Sequence[RunDir], *, on_slurm: bool) -> None:
    """The newcomer would fence whoever is at work there. One squeue for all."""
    jobs: dict[str, RunDir] = {}
    for place in places:
        last = lease.highest(place)
        holder = lease.holder_of(place, last)
        if holder is not None and not lease.released(place, last):
            if lease.alive_here(holder):
                raise RootError(place.root, f"in use by process {holder.pid} on this host")
            jobs.update({holder.job: place} if holder.job else {})
        jobs.update({str(job): place for job in (place.chain() or {}).get("jobs") or ()})
    live = (queue() or set()) if jobs and on_slurm else set()
    for job, place in jobs.items():
        if any(known == job or known.startswith(f"{job}_") for known in live):
            raise RootError(place.root, f"job {job} is a chain on it already; stop that first")
    if on_slurm:
        refuse_if_hidden(places)


def queue() -> set[str] | None:
    """Everything this user has in the queue, array members one by one; None: no answer."""
    try:
        text = slurm.run_command(
            ["squeue", "--me", "--all", "--array", "--noheader", "--format=%i"]
        )
    except SchedulerError:
        return None
    return set(text.split())
