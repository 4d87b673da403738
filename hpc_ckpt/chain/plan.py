"""From spec and profile to a plan: how many links, how long, with which directives.

Pure: reads no clock, no file and no environment. render.py turns a plan into a batch script;
submit.py and the local runner carry it out.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import SpecError
from ..levels.choice import MODEL, Choice
from ..settings import DEFAULT_POLICY, parse_keep
from ..tiers.wishes import HOME, Survives, check_names
from ..units import format_duration, parse_duration
from .activation import Activation
from .directives import Directive, dependency_of, directives
from .members import member_name, unused
from .profile import Backend, Partition, Profile, Sharing, Strategy
from .spec import MOST_LINKS, Spec
from .strategy import array_of, strategy_notes, strategy_of, within_limits
from .survey import Bound, LiveLimits
from .warnings import root_warnings

DEFAULT_LINKS = 10
LONGEST_DEFAULT_LINK_S = 8 * 3600.0
LOCAL_LINK_S = 3600.0
SIGNAL_SLACK_S = 60.0
"""Slurm may send --signal this much earlier than asked."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be submitted."""

    level: Choice
    """What makes the program resumable."""
    later: tuple[Choice, ...]
    """The same of the commands that follow."""

    backend: Backend
    cluster: str
    name: str
    root: Path
    cwd: Path
    strategy: Strategy
    links: int
    """How many are submitted at once."""
    wanted: int
    """How many the work is expected to take, spare ones included."""
    budget: int
    """How many the chain may have until it is submitted or resumed again: it extends itself up to
    that, where the site lets it."""
    link_s: float
    total_s: float | None
    """What the user said the work takes."""
    lead_s: float
    signal: str
    array: str | None
    members: tuple[str, ...]
    """The names of a sweep's chains, in the order of their array indices."""
    complete: int
    """How many of them are, and are left alone."""
    gpus: int
    """What one link has in all."""
    group: bool
    """The run directory is shared with the group."""
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
            *([f"members   {self._members()}"] if self.members else []),
            f"links     {self._links()}",
            *([] if self.strategy is Strategy.ARRAY else [f"strategy  {self._strategy()}"]),
            *([f"work      {format_duration(self.total_s)} asked for"] if self.total_s else []),
            f"level     {self.level.chosen}: {self.level.why}",
            *(f"  not     {name}: {why}" for name, why in self.level.rejected),
            *(f"then      {choice.chosen}: {choice.why}" for choice in self.later),
            f"policy    {self.policy}",
            f"keep      {self.keep}",
            *([f"tiers     {', then '.join(self.tiers)}"] if self.tiers else []),
            *([f"set-up    {self._set_up()}"] if self.backend is Backend.SLURM else []),
            *(f"note      {note}" for note in self.notes),
        ]

    @property
    def fenced(self) -> bool:
        """Whether two links at once could do no harm."""
        return all(choice.fenced for choice in (self.level, *self.later))

    def _links(self) -> str:
        each = format_duration(self.link_s)
        together = f"({format_duration(self.budget * self.link_s)})"
        if self.wanted < self.budget:
            work = f"{self.wanted} of {each} each for the work"
            return f"{work}, at most {self.budget} {together}, one at a time"
        return f"at most {self.budget} of {each} each {together}, one at a time"

    def _strategy(self) -> str:
        name = self.strategy.value
        if self.fenced or self.strategy is not Strategy.AFTERANY:
            return name
        return f"{name}: the program writes files of its own, so no two links may overlap"

    def _members(self) -> str:
        done = f"; {self.complete} are complete and left alone" if self.complete else ""
        return f"{len(self.members)}, each a chain of its own{done}"

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
    spec: Spec,
    profile: Profile,
    *,
    cwd: Path,
    level: Choice = MODEL,
    later: Sequence[Choice] = (),
    activations: Sequence[Activation] = (),
    limits: LiveLimits | None = None,
    home: str | None = None,
    remarks: Sequence[str] = (),
    complete: Collection[str] = (),
) -> Plan:
    """The plan, or a SpecError that says what does not fit. `spec.root` must be absolute;
    `complete`: members of a sweep that will not be submitted again."""
    partitions = _partitions(spec, profile)
    live = limits or LiveLimits()
    link_s = _link_time(spec, profile, partitions, live.wall)
    wanted, notes = _links(spec, profile, partitions, link_s)
    slurm = profile.backend is Backend.SLURM
    members = tuple(map(member_name, spec.members))
    left = [place + 1 for place, name in enumerate(members) if name not in complete]
    fenced = all(choice.fenced for choice in (level, *later))
    strategy = strategy_of(spec, profile, live, fenced=fenced) if slurm else Strategy.ARRAY
    links = wanted
    if slurm:
        links, more = within_limits(wanted, strategy, spec, profile, live, left)
        notes += [*more, *strategy_notes(strategy, fenced=fenced)]
    array = array_of(spec, strategy, links)
    return Plan(
        level=level,
        later=tuple(later),
        backend=profile.backend,
        cluster=profile.cluster,
        name=spec.name,
        root=Path(spec.root),
        cwd=cwd,
        strategy=strategy,
        links=links,
        wanted=wanted,
        budget=spec.chain.max_links or wanted,
        link_s=link_s,
        total_s=parse_duration(spec.chain.total_time) if spec.chain.total_time else None,
        lead_s=parse_duration(profile.signal.lead),
        signal=profile.signal.name,
        array=array,
        members=members,
        complete=len(members) - len(left),
        gpus=_gpu_count(spec),
        group=(spec.sharing or profile.sharing) is Sharing.GROUP,
        directives=directives(spec, profile, cwd, array, link_s) if slurm else (),
        extra=(*profile.directives.extra, *spec.sbatch) if slurm else (),
        modules=profile.environment.modules if slurm else (),
        prologue=_prologue(profile) if slurm else None,
        activations=tuple(activations) if slurm and not _prologue(profile) else (),
        policy=_policy_text(spec),
        keep=_keep_text(spec),
        tiers=_tiers_text(spec, profile),
        notes=(*notes, *_notes(spec, profile, partitions, (level, *later), home), *remarks),
    )


def _notes(
    spec: Spec,
    profile: Profile,
    partitions: dict[str, Partition],
    levels: Sequence[Choice],
    home: str | None,
) -> list[str]:
    return [
        *(choice.warning for choice in levels if choice.warning),
        *_partition_notes(spec, profile, partitions),
        *_member_notes(spec),
        *_dependency_notes(spec, profile),
        *root_warnings(spec, profile, home=home),
    ]


def _dependency_notes(spec: Spec, profile: Profile) -> list[str]:
    after = dependency_of((*profile.directives.extra, *spec.sbatch))
    if after is None or profile.backend is Backend.LOCAL:
        return []
    return [
        f"--dependency={after} is for the first link; those after it wait for the link before, "
        "and a chain that is resumed waits for nothing else"
    ]


def _gpu_count(spec: Spec) -> int:
    wanted = spec.resources.gpus
    count = int(wanted.rpartition(":")[2]) if isinstance(wanted, str) else wanted
    return count * spec.resources.nodes


def _member_notes(spec: Spec) -> list[str]:
    _refuse_gaps(spec)
    left_out = {name: None for member in spec.members for name in unused(spec.command, member)}
    if not left_out:
        return []
    names = ", ".join(f"{{{name}}}" for name in left_out)
    return [f"the command does not mention {names}: HPC_CKPT_MEMBER_… has the values"]


def _refuse_gaps(spec: Spec) -> None:
    """A {name} that other members have a value for would reach this one's program as it is."""
    every = {name: None for member in spec.members for name in member}
    mentioned = set(every) - set(unused(spec.command, every))
    for member in spec.members:
        gaps = sorted(mentioned - set(member))
        if gaps:
            raise SpecError(
                f"members: {member_name(member)} has no value for {gaps[0]}, which the command "
                f"mentions as {{{gaps[0]}}}; give it one, or take it out of the command"
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


def _link_time(
    spec: Spec, profile: Profile, partitions: dict[str, Partition], wall: Bound | None
) -> float:
    limits = {f"partition {name!r}": parse_duration(one.max_time)
              for name, one in partitions.items() if one.max_time}  # fmt: skip
    if wall is not None:
        limits[wall.by] = wall.most
    tightest = min(limits, key=lambda name: limits[name], default=None)
    asked = spec.chain.link_time
    if profile.backend is Backend.LOCAL:
        return parse_duration(asked) if asked else LOCAL_LINK_S
    longest = LONGEST_DEFAULT_LINK_S if tightest is None else limits[tightest]
    link_s = parse_duration(asked) if asked else min(longest, LONGEST_DEFAULT_LINK_S)
    if tightest is not None and link_s > longest:
        raise SpecError(
            f"chain.link_time: {asked} is more than {tightest} allows ({format_duration(longest)})"
        )
    _check_signal_fits(profile, link_s, "chain.link_time")
    if spec.chain.min_time is not None:
        shortest = parse_duration(spec.chain.min_time)
        if shortest > link_s:
            raise SpecError("chain.min_time: more than a link may take; it must be shorter")
        _check_signal_fits(profile, shortest, "chain.min_time")
    return link_s


def _check_signal_fits(profile: Profile, link_s: float, key: str) -> None:
    """A link hardly longer than its warning is warned when it starts and does no work."""
    smallest = 2 * (parse_duration(profile.signal.lead) + SIGNAL_SLACK_S)
    if link_s < smallest:
        raise SpecError(
            f"{key}: {format_duration(link_s)} is too short for a warning "
            f"{profile.signal.lead} before the end; at least {format_duration(smallest)}, "
            "or a shorter signal.lead in the profile"
        )


def _links(
    spec: Spec, profile: Profile, partitions: dict[str, Partition], link_s: float
) -> tuple[int, list[str]]:
    """How many links to submit: what the work needs, and spare ones, within the budget."""
    most = spec.chain.max_links
    if spec.chain.total_time is None:
        return most or DEFAULT_LINKS, []
    lost_s = 0.0
    if profile.backend is Backend.SLURM:
        lost_s = parse_duration(profile.signal.lead) + SIGNAL_SLACK_S
    needed = math.ceil(parse_duration(spec.chain.total_time) / (link_s - lost_s))
    preemptible = any(partition.preempt is not None for partition in partitions.values())
    # An index that is not needed costs nothing: completion cancels the rest.
    wanted = needed + _spare(spec.chain.total_time, profile, needed, preemptible=preemptible)
    links = min(wanted, most or MOST_LINKS, MOST_LINKS)
    if links >= needed:
        return links, []
    short = format_duration(links * (link_s - lost_s))
    return links, [f"{links} links give {short} of work, less than total_time; submit again then"]


def _prologue(profile: Profile) -> str | None:
    return (profile.environment.prologue or "").strip("\n") or None


def _spare(total: str, profile: Profile, needed: int, *, preemptible: bool) -> int:
    """Links for what the site ends early: as it says how often, or a guess."""
    often = [profile.failures.mtbf, profile.failures.preemption if preemptible else None]
    told = [parse_duration(every) for every in often if every is not None]
    if told and (profile.failures.preemption is not None or not preemptible):
        return math.ceil(1.5 * sum(parse_duration(total) / every for every in told)) + 1
    return needed if preemptible else math.ceil(needed / 10)


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
