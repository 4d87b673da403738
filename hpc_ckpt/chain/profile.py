"""The site's profile: what its administrators know and every user's chain must fit."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import re
from enum import Enum
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from ..settings import parse_signal
from ..tiers.wishes import Survives, check_storage_name, check_storage_path, parse_quota
from ..units import parse_duration
from .fields import Count, Duration, DurationOrZero, Line, Section, Words, checked, line, text
from .sbatchfile import NOT_IN_A_CHAIN, options_of

LONGEST_LEAD_S = 65535
"""What Slurm's --signal can count."""
WRITTEN = (
    "--account", "--array", "--chdir", "--constraint", "--cpus-per-task", "--exclude", "--export",
    "--gres", "--job-name", "--mem", "--nodes", "--ntasks", "--open-mode", "--output",
    "--partition", "--qos", "--requeue", "--reservation", "--signal", "--time", "--time-min",
)  # fmt: skip
"""The directives of a rendered script, by name; --requeue stands for --no-requeue too."""
ESSENTIAL = frozenset(
    {"--array", "--time", "--signal", "--export", "--output", "--open-mode", "--nodes", "--ntasks"}
)
"""A chain that lost one of these would not be one."""


class Backend(str, Enum):
    SLURM = "slurm"
    LOCAL = "local"


class PreemptMode(str, Enum):
    REQUEUE = "requeue"
    CANCEL = "cancel"
    SUSPEND = "suspend"


class Preempt(Section):
    mode: PreemptMode = PreemptMode.REQUEUE
    grace: DurationOrZero = "0s"


class Partition(Section):
    max_time: Duration | None = None
    gpus: Words | None = None
    """Types; an empty list says there are none, nothing says it is not known."""
    preempt: Preempt | None = None


def _signal(value: object) -> str:
    number = parse_signal(text(value), where="")
    if number.name not in ("SIGUSR1", "SIGUSR2"):
        raise ValueError(f"{text(value)!r} is taken by others; write USR1 or USR2")
    return number.name.removeprefix("SIG")


class SignalSection(Section):
    name: Annotated[str, BeforeValidator(checked(_signal))] = "USR1"
    lead: DurationOrZero = "180s"

    @field_validator("lead")
    @classmethod
    def _slurm_can_count_it(cls, lead: str) -> str:
        if parse_duration(lead) > LONGEST_LEAD_S:
            raise ValueError(f"at most {LONGEST_LEAD_S} seconds")
        return lead


class Strategy(str, Enum):
    """How one link is followed by the next; see docs/guides/slurm.md."""

    ARRAY = "array"
    """--array=1-N%1: the indices are interchangeable tokens, one a link."""
    REQUEUE = "requeue"
    """One job that is put back into the queue after each link."""
    AFTERANY = "afterany"
    """N jobs, each waiting until the one before is gone: no overlap, order kept."""
    RESUBMIT = "resubmit"
    """Each link submits the next when it begins; needs sbatch on compute nodes."""


class ChainRules(Section):
    strategy: Strategy | None = None
    """None: array for programs with a Checkpointer, afterany for those that write files of
    their own."""
    requeue: bool = True
    """Whether Slurm may put a job back into the queue here."""
    submit_from_compute_nodes: bool = False
    """Whether sbatch works there: a chain that runs out of links can then extend itself."""
    exclude_after: Annotated[int, Field(ge=0)] = 2
    """A host on which so many links failed gets no further ones; 0: never excluded."""


class Limits(Section):
    """What the site allows one user; asked of the cluster where nothing is said."""

    max_array: Count | None = None
    """Slurm's MaxArraySize: the greatest index and one."""
    max_submit: Count | None = None
    """Jobs that one user may have in the queue."""


class Failures(Section):
    """How often this site ends a job early: spare links are planned from it."""

    mtbf: Duration | None = None
    preemption: Duration | None = None
    """Mean time between two preemptions of one job on a preemptible partition."""


class Tool(Section):
    """Where a program that is not on every PATH is found."""

    module: Line | None = None
    path: Line | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Tool:
        if (self.module is None) == (self.path is None):
            raise ValueError("write either module or path")
        return self


class Tools(Section):
    dmtcp: Tool | None = None
    criu: Tool | None = None


class Sharing(str, Enum):
    """Who may read and take up a run directory."""

    PRIVATE = "private"
    GROUP = "group"


class EnvironmentSection(Section):
    modules: Words = ()
    prologue: Annotated[str, BeforeValidator(text)] | None = None
    """bash, run in the batch script before the program; replaces the re-activation."""


def directive_name(directive: str) -> str:
    return re.split(r"[=\s]", directive, maxsplit=1)[0].replace("--no-requeue", "--requeue")


def _directives(value: object) -> list[str]:
    return [line(item) for item in (value if isinstance(value, (list, tuple)) else [value])]


def _not_ours(extra: tuple[str, ...]) -> tuple[str, ...]:
    for directive in extra:
        if not re.match(r"--[a-z]", directive):
            raise ValueError(f"{directive!r} must begin with '--', as in --constraint=ib")
        for given in checked(options_of)(directive):
            if f"--{given.name}" in ESSENTIAL:
                raise ValueError(f"{directive!r}: the chain itself sets --{given.name}")
            if given.name == "partition":
                asked = f"say partition: {given.value} in the spec, so that its limits are kept"
                raise ValueError(f"{directive!r}: {asked}")
            if given.name in NOT_IN_A_CHAIN:
                raise ValueError(f"{directive!r}: --{given.name}: {NOT_IN_A_CHAIN[given.name]}")
    return extra


Extra = Annotated[tuple[str, ...], BeforeValidator(_directives), AfterValidator(_not_ours)]
"""Directives that are written as they are, after all others."""


class Directives(Section):
    extra: Extra = ()
    skip: Words = ()

    @field_validator("skip")
    @classmethod
    def _ours(cls, skip: tuple[str, ...]) -> tuple[str, ...]:
        for directive in skip:
            if directive_name(directive) not in WRITTEN:
                raise ValueError(f"{directive!r} is never written; known: {', '.join(WRITTEN)}")
            if directive_name(directive) in ESSENTIAL:
                raise ValueError(f"{directive!r} cannot be left out: the chain depends on it")
        return skip


def _quota(value: object) -> str:
    shown = text(value).strip()
    parse_quota(shown, where="")
    return shown


class Storage(Section):
    """A place for tiers that is not the run directory."""

    path: Annotated[Line, AfterValidator(checked(check_storage_path))]
    """$TMPDIR and the like get their values on the node."""
    survives: Survives
    """A final save goes to what outlives the node, where that is fast enough."""
    quota: Annotated[str, BeforeValidator(checked(_quota))] | None = None
    """What one user may have there; more is refused before the first save."""
    purge: Duration | None = None
    """Files that nobody touched for so long are removed by the site."""


class Profile(Section):
    cluster: Line
    contact: Line | None = None
    backend: Backend = Backend.SLURM
    partitions: dict[Line, Partition] = Field(default_factory=dict)
    signal: SignalSection = SignalSection()
    kill_wait: DurationOrZero = "30s"
    """Seconds between TERM and KILL at the end of a job: Slurm's KillWait."""
    chain: ChainRules = ChainRules()
    limits: Limits = Limits()
    failures: Failures = Failures()
    tools: Tools = Tools()
    sharing: Sharing = Sharing.PRIVATE
    storage: dict[Annotated[Line, AfterValidator(checked(check_storage_name))], Storage] = Field(
        default_factory=dict
    )
    """What a spec may name in `tiers`."""
    environment: EnvironmentSection = EnvironmentSection()
    directives: Directives = Directives()

    @field_validator("partitions", mode="before")
    @classmethod
    def _bare_partitions(cls, value: Any) -> Any:
        """`gpu:` with nothing after it names a partition about which nothing is known."""
        if not isinstance(value, dict):
            return value
        return {name: {} if item is None else item for name, item in value.items()}
