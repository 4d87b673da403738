"""The site's profile: what its administrators know and every user's chain must fit."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import re
from enum import Enum
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from ..settings import parse_signal
from ..tiers.wishes import Survives, check_storage_name, check_storage_path, parse_quota
from ..units import parse_duration
from .fields import Duration, DurationOrZero, Line, Section, Words, checked, line, text

LONGEST_LEAD_S = 65535
"""What Slurm's --signal can count."""
WRITTEN = (
    "--account", "--array", "--chdir", "--constraint", "--cpus-per-task", "--export", "--gres",
    "--job-name", "--mem", "--nodes", "--ntasks", "--open-mode", "--output", "--partition",
    "--qos", "--requeue", "--signal", "--time",
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


class ChainRules(Section):
    not_available: ClassVar[tuple[str, ...]] = ("submit_from_compute_nodes",)
    strategy: str = "array"
    requeue: bool = True

    @field_validator("strategy")
    @classmethod
    def _only_array(cls, strategy: str) -> str:
        if strategy != "array":
            raise ValueError(f"{strategy!r} is not available in this version; write array")
        return strategy


class EnvironmentSection(Section):
    modules: Words = ()
    prologue: Annotated[str, BeforeValidator(text)] | None = None
    """bash, run in the batch script before the program; replaces the re-activation."""


def directive_name(directive: str) -> str:
    return re.split(r"[=\s]", directive, maxsplit=1)[0].replace("--no-requeue", "--requeue")


def _directives(value: object) -> list[str]:
    return [line(item) for item in (value if isinstance(value, list) else [value])]


class Directives(Section):
    extra: Annotated[tuple[str, ...], BeforeValidator(_directives)] = ()
    """Written as they are, after all others."""
    skip: Words = ()

    @field_validator("extra")
    @classmethod
    def _not_ours(cls, extra: tuple[str, ...]) -> tuple[str, ...]:
        for directive in extra:
            if not re.match(r"--[a-z]", directive):
                raise ValueError(f"{directive!r} must begin with '--', as in --constraint=ib")
            if directive_name(directive) in ESSENTIAL:
                raise ValueError(
                    f"{directive!r}: the chain itself sets {directive_name(directive)}"
                )
        return extra

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


class Profile(Section):
    not_available: ClassVar[tuple[str, ...]] = ("failures", "tools")

    cluster: Line
    contact: Line | None = None
    backend: Backend = Backend.SLURM
    partitions: dict[Line, Partition] = Field(default_factory=dict)
    signal: SignalSection = SignalSection()
    kill_wait: DurationOrZero = "30s"
    """Seconds between TERM and KILL at the end of a job: Slurm's KillWait."""
    chain: ChainRules = ChainRules()
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
