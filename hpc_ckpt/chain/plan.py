"""From spec and profile to a plan: how many links, how long, with which directives.

Pure: reads no clock, no file and no environment. render.py turns a plan into a batch script;
submit.py and the local runner carry it out.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import SpecError
from ..settings import DEFAULT_POLICY, parse_keep
from ..tiers.wishes import HOME, Survives, check_names
from ..units import (
    format_duration,
    parse_duration,
    parse_size,
    slurm_memory,
    slurm_time,
)
from .activation import Activation
from .profile import Backend, Partition, Profile, directive_name
from .spec import MOST_LINKS, Spec

DEFAULT_LINKS = 10
LONGEST_DEFAULT_LINK_S = 8 * 3600.0
LOCAL_LINK_S = 3600.0
SIGNAL_SLACK_S = 60.0
"""Slurm may send --signal this much earlier than asked."""
LEVEL = "model: the command is expected to use hpc_ckpt.Checkpointer, or to exit 75 when saved"


@dataclass(frozen=True)
class Directive:
    """One #SBATCH line; `value` is what Slurm shall understand, not yet quoted."""

    name: str
    value: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be submitted."""

    backend: Backend
    cluster: str
    name: str
    root: Path
    cwd: Path
    links: int
    link_s: float
    total_s: float | None
    """What the user said the work takes."""
    lead_s: float
    signal: str
    array: str
    directives: tuple[Directive, ...]
    extra: tuple[str, ...]
    """Directives of profile and spec, written as they are."""
    modules: tuple[str, ...]
    prologue: str | None
    activations: tuple[Activation, ...]
    policy: str
    keep: str
    tiers: tuple[str, ...]
    """Where checkpoints go, for people; empty: the run directory alone."""
    notes: tuple[str, ...]

    def describe(self) -> list[str]:
        """The plan for people, one fact a line."""
        return [
            f"chain     {self.name} on {self._where()}",
            f"root      {self.root}",
            f"links     at most {self.links} of {format_duration(self.link_s)} each, one at a time"
            f" ({format_duration(self.links * self.link_s)} in all)",
            *([f"work      {format_duration(self.total_s)} asked for"] if self.total_s else []),
            f"level     {LEVEL}",
            f"policy    {self.policy}",
            f"keep      {self.keep}",
            *([f"tiers     {', then '.join(self.tiers)}"] if self.tiers else []),
            *([f"set-up    {self._set_up()}"] if self.backend is Backend.SLURM else []),
            *(f"note      {note}" for note in self.notes),
        ]

    def _where(self) -> str:
        if self.backend is Backend.LOCAL:
            return "this machine (no Slurm)"
        named = [d.value for d in self.directives if d.name == "--partition"]
        return f"{self.cluster}, partition {named[0]}" if named else self.cluster

    def _set_up(self) -> str:
        steps = [f"module load {module}" for module in self.modules]
        steps += ["the profile's prologue"] if self.prologue else []
        steps += [f"activate {active.prefix}" for active in self.activations]
        return ", then ".join(steps) or "none: no environment was active at submission"


def plan_chain(
    spec: Spec, profile: Profile, *, cwd: Path, activations: Sequence[Activation] = ()
) -> Plan:
    """The plan, or a SpecError that says what does not fit. `spec.root` must be absolute."""
    partitions = _partitions(spec, profile)
    link_s, lead_s = _link_time(spec, profile, partitions), parse_duration(profile.signal.lead)
    links, notes = _links(spec, profile, partitions, link_s)
    slurm = profile.backend is Backend.SLURM
    prologue = (profile.environment.prologue or "").strip("\n") or None
    array = f"1-{links}%1"
    return Plan(
        backend=profile.backend,
        cluster=profile.cluster,
        name=spec.name,
        root=Path(spec.root),
        cwd=cwd,
        links=links,
        link_s=link_s,
        total_s=None if spec.chain.total_time is None else parse_duration(spec.chain.total_time),
        lead_s=lead_s,
        signal=profile.signal.name,
        array=array,
        directives=_directives(spec, profile, cwd, array, link_s) if slurm else (),
        extra=(*profile.directives.extra, *spec.sbatch) if slurm else (),
        modules=profile.environment.modules if slurm else (),
        prologue=prologue if slurm else None,
        activations=tuple(activations) if slurm and prologue is None else (),
        policy=_policy_text(spec),
        keep=_keep_text(spec),
        tiers=_tiers_text(spec, profile),
        notes=(*notes, *_partition_notes(spec, profile, partitions)),
    )


# ── time ──────────────────────────────────────────────────────────────────────────────────
def _partitions(spec: Spec, profile: Profile) -> dict[str, Partition]:
    """What the profile knows of the partitions asked for."""
    if profile.backend is Backend.LOCAL or not profile.partitions:
        return {}
    for name in spec.partition:
        if name not in profile.partitions:
            raise SpecError(
                f"partition: the profile of {profile.cluster} knows no partition {name!r}; known: "
                f"{', '.join(sorted(profile.partitions))}. One that is missing there is added in "
                f"~/.config/hpc_ckpt/clusters/{profile.cluster}.yaml"
            )
        _check_gpus(spec, name, profile.partitions[name])
    return {name: profile.partitions[name] for name in spec.partition}


def _check_gpus(spec: Spec, name: str, partition: Partition) -> None:
    wanted = spec.resources.gpus
    if not wanted or partition.gpus is None:
        return
    kind = wanted.partition(":")[0] if isinstance(wanted, str) else None
    if not partition.gpus:
        raise SpecError(f"resources.gpus: partition {name!r} has no GPUs")
    if kind is not None and kind not in partition.gpus:
        known = ", ".join(partition.gpus)
        raise SpecError(f"resources.gpus: partition {name!r} has no {kind!r} GPUs; known: {known}")


def _link_time(spec: Spec, profile: Profile, partitions: dict[str, Partition]) -> float:
    limits = {n: parse_duration(p.max_time) for n, p in partitions.items() if p.max_time}
    tightest = min(limits, key=lambda name: limits[name], default=None)
    asked = spec.chain.link_time
    if profile.backend is Backend.LOCAL:
        return parse_duration(asked) if asked else LOCAL_LINK_S
    longest = LONGEST_DEFAULT_LINK_S if tightest is None else limits[tightest]
    link_s = parse_duration(asked) if asked else min(longest, LONGEST_DEFAULT_LINK_S)
    if tightest is not None and link_s > longest:
        raise SpecError(
            f"chain.link_time: {asked} is more than partition {tightest!r} allows "
            f"({partitions[tightest].max_time})"
        )
    _check_signal_fits(profile, link_s)
    return link_s


def _check_signal_fits(profile: Profile, link_s: float) -> None:
    """A link hardly longer than its warning is warned when it starts and does no work."""
    smallest = 2 * (parse_duration(profile.signal.lead) + SIGNAL_SLACK_S)
    if link_s < smallest:
        raise SpecError(
            f"chain.link_time: {format_duration(link_s)} is too short for a warning "
            f"{profile.signal.lead} before the end; at least {format_duration(smallest)}, "
            "or a shorter signal.lead in the profile"
        )


def _links(
    spec: Spec, profile: Profile, partitions: dict[str, Partition], link_s: float
) -> tuple[int, list[str]]:
    """How many array indices to submit: what the work needs, and spare ones."""
    most = spec.chain.max_links
    if spec.chain.total_time is None:
        return most or DEFAULT_LINKS, []
    lost_s = 0.0
    if profile.backend is Backend.SLURM:
        lost_s = parse_duration(profile.signal.lead) + SIGNAL_SLACK_S
    needed = math.ceil(parse_duration(spec.chain.total_time) / (link_s - lost_s))
    preemptible = any(partition.preempt is not None for partition in partitions.values())
    # An index that is not needed costs nothing: completion cancels the rest.
    wanted = needed + (needed if preemptible else math.ceil(needed / 10))
    links = min(wanted, most or MOST_LINKS, MOST_LINKS)
    if links >= needed:
        return links, []
    short = format_duration(links * (link_s - lost_s))
    return links, [f"{links} links give {short} of work, less than total_time; submit again then"]


# ── directives ────────────────────────────────────────────────────────────────────────────
def _directives(
    spec: Spec, profile: Profile, cwd: Path, array: str, link_s: float
) -> tuple[Directive, ...]:
    wants = spec.resources
    lead = math.ceil(parse_duration(profile.signal.lead))
    memory = None if wants.memory is None else parse_size(wants.memory)
    every: tuple[tuple[str, str | None], ...] = (
        ("--job-name", spec.name),
        ("--array", array),
        ("--time", slurm_time(link_s)),
        ("--partition", ",".join(spec.partition) or None),
        ("--account", spec.account),
        ("--qos", spec.qos),
        ("--constraint", spec.constraint),
        ("--nodes", str(wants.nodes)),
        ("--ntasks", "1"),
        ("--cpus-per-task", str(wants.cpus)),
        ("--gres", f"gpu:{wants.gpus}" if wants.gpus else None),
        ("--mem", None if memory is None else slurm_memory(memory) if memory else "0"),
        ("--signal", f"B:{profile.signal.name}@{lead}"),
        ("--open-mode", "append"),
        ("--output", _log_pattern(spec.root)),
        ("--export", "NONE"),
        ("--chdir", str(cwd)),
    )
    requeue = Directive("--requeue" if profile.chain.requeue else "--no-requeue")
    written = [Directive(name, value) for name, value in every if value is not None]
    skip = {directive_name(name) for name in profile.directives.skip}
    return tuple(d for d in [*written, requeue] if directive_name(d.name) not in skip)


def _log_pattern(root: str) -> str:
    if "\\" in root:
        raise SpecError(
            f"root: {root!r} contains a backslash, and Slurm cannot write its log there; "
            "choose another root"
        )
    return root.replace("%", "%%") + "/logs/slurm-%A_%a.log"


# ── words ─────────────────────────────────────────────────────────────────────────────────
def _policy_text(spec: Spec) -> str:
    policy = spec.checkpoint.policy
    auto = policy.strip().lower() == "auto"
    return f"auto, which means {DEFAULT_POLICY} in this version" if auto else policy


def _keep_text(spec: Spec) -> str:
    keep = parse_keep(spec.checkpoint.keep.model_dump())
    parts = [f"the newest {keep.last}"]
    if keep.every is not None:
        parts.append(f"every {keep.every}th step")
    if keep.best is not None:
        parts.append(f"the best by {keep.best.metric} ({keep.best.mode})")
    return ", ".join(parts)


def _tiers_text(spec: Spec, profile: Profile) -> tuple[str, ...]:
    """Checked here because only spec and profile together know the names."""
    where = f"tiers: the profile of {profile.cluster}"
    check_names(spec.tiers, profile.storage, where)
    shown = []
    for entry in spec.tiers:
        known = profile.storage.get(entry)
        if known is None:
            shown.append(entry)
        else:
            short = "; gone with the job" if known.survives is Survives.PROCESS else ""
            shown.append(f"{entry} ({known.path}{short})")
    return tuple(shown) if not shown or HOME in spec.tiers else (*shown, HOME)


def _partition_notes(spec: Spec, profile: Profile, partitions: dict[str, Partition]) -> list[str]:
    if profile.backend is Backend.LOCAL:
        return ["partition is not used on this machine"] if spec.partition else []
    if not spec.partition:
        return ["no partition named: Slurm chooses its default, whose time limit must fit"]
    return [
        f"links on {name} can be preempted ({partition.preempt.mode.value}, "
        f"{partition.preempt.grace} to save)"
        for name, partition in partitions.items()
        if partition.preempt is not None
    ]


# ── chain.json ────────────────────────────────────────────────────────────────────────────
def chain_record(
    spec: Spec,
    profile: Profile,
    plan: Plan,
    *,
    chain: str,
    created: float,
    code: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What chain.json says; `chain` is a fresh UUID, `code` is {git, dirty}."""
    resolved = spec.model_dump(mode="json")
    resolved["chain"]["max_links"] = spec.chain.max_links or plan.links
    resolved["chain"]["link_time"] = spec.chain.link_time or format_duration(plan.link_s)
    return {
        "format_version": 1,
        "chain": chain,
        "name": spec.name,
        "created": created,
        "version": __version__,
        "command": resolved["command"],
        "argv": spec.argv,
        "cwd": str(plan.cwd),
        "threads": _threads(spec, profile),
        "backend": profile.backend.value,
        "spec": resolved,
        "profile": profile.model_dump(mode="json"),
        "code": code,
        "after_generation": 0,
        "jobs": [],
    }


def _threads(spec: Spec, profile: Profile) -> int | None:
    """What to pin OMP_NUM_THREADS to; None leaves this machine's own default, all its cores."""
    asked = "cpus" in spec.resources.model_fields_set
    return spec.resources.cpus if asked or profile.backend is Backend.SLURM else None
