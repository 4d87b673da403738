"""The user's spec: what to run, where, with what, for how long.

Only the shape and meaning of each key; which file a value comes from is layers.py's business,
and what follows from the site's profile is plan.py's.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ..errors import SpecError
from ..levels.choice import LEVELS
from ..settings import parse_keep, parse_memory, parse_policy, parse_signal
from ..tiers.wishes import parse_entries
from .fields import Count, Duration, Line, Memory, Section, Words, checked, line, text
from .members import Member, members_of
from .profile import Extra, Sharing, Strategy

MOST_LINKS = 1000
"""Slurm's MaxArraySize is 1001 unless a site changes it."""
_NAME = re.compile(r"\w[\w.+=@-]{0,63}")
_SCRIPT = re.compile(r".+\.(py|sh|bash|R|r|jl|m|pl|lua|rb|exe|x)")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)

Command = str | tuple[str, ...]


def _command(value: object) -> Command:
    if not isinstance(value, (list, tuple)):
        if not isinstance(value, str) or not value.strip():
            raise ValueError("must be a command line, or a list of a program and its arguments")
        return text(value)
    words = tuple(text(word) for word in value)
    if not words or not words[0]:
        raise ValueError("must name a program")
    return words


class ForwardTo(str, Enum):
    """Which process of the step is signalled."""

    COMMAND = "command"
    """The command itself: a program, bash, mpirun, or srun (never with TERM)."""
    WORKERS = "workers"
    """Processes without children: behind torchrun and accelerate, which a signal would kill."""


def _forwarded(value: object) -> str:
    number = parse_signal(text(value), where="")
    if number.name in ("SIGKILL", "SIGSTOP"):
        raise ValueError(f"{text(value)!r} cannot be caught; write USR1, USR2, TERM or INT")
    return number.name.removeprefix("SIG")


def _gpus(value: object) -> int | str:
    """A number, or the type and a number as Slurm writes it: a100:2."""
    shown = text(value).strip()
    match = re.fullmatch(r"([A-Za-z][\w.-]*)(?::(\d+))?|(\d+)", shown, re.ASCII)
    if match is None:
        raise ValueError(f"{shown!r} is not a number of GPUs; write 2, or a100:2")
    count = int(match[2] or match[3] or 1)
    return f"{match[1]}:{count}" if match[1] and count else count


def _level(value: object) -> str:
    shown = text(value)
    if shown not in LEVELS:
        raise ValueError(f"{shown!r} is not a level; write one of {', '.join(LEVELS)}")
    return shown


def _recipe(value: object) -> str | dict[str, Any]:
    """What is inside is checked with the recipes at hand."""
    return dict(value) if isinstance(value, Mapping) else line(value)


def _name(value: object) -> str:
    shown = line(value)
    if _NAME.fullmatch(shown) is None:
        raise ValueError(
            f"{shown!r} cannot be a job name: letters, digits and . _ - + = @ only, at most 64; "
            f"{job_name(shown)!r} would do"
        )
    return shown


def _root(value: object) -> str:
    shown = text(value)
    if not shown.strip():
        raise ValueError("must not be empty")
    return shown


def _policy(value: object) -> str:
    shown = text(value)
    parse_policy(shown, where="")
    return shown


def _snapshot_memory(value: object) -> str:
    shown = text(value).strip()
    parse_memory(shown, where="")
    return shown


def _tiers(value: object) -> tuple[str, ...]:
    items = [text(item) for item in value] if isinstance(value, (list, tuple)) else text(value)
    return parse_entries(items, where="")


class Resources(Section):
    nodes: Count = 1
    gpus: Annotated[int | str, BeforeValidator(_gpus)] = 0
    cpus: Count = 1
    memory: Memory | None = None

    @field_validator("nodes")
    @classmethod
    def _one_node(cls, nodes: int) -> int:
        if nodes > 1:
            raise ValueError("more than one node is not available in this version; write 1")
        return nodes


class Reaction(str, Enum):
    """What the chain does after a link that ended for some cause."""

    CONTINUE = "continue"
    """The next link goes on, and the end does not count as a failure."""
    RETRY = "retry"
    """The next link goes on, but only so many such ends in a row are borne."""
    HALT = "halt"


class ChainSection(Section):
    strategy: Strategy | None = None
    """The profile's, unless said otherwise."""
    total_time: Duration | None = None
    link_time: Duration | None = None
    min_time: Duration | None = None
    """Slurm may shorten a link to this if it can start earlier then (--time-min)."""
    max_links: Annotated[Count, Field(le=MOST_LINKS)] | None = None
    max_hours: Annotated[float, Field(gt=0)] | None = None
    """Allocated hours over all links."""
    max_gpu_hours: Annotated[float, Field(gt=0)] | None = None
    max_restarts: Annotated[int, Field(ge=0)] | None = None
    """Links beyond the first, whatever they ended for."""
    retries: Annotated[int, Field(ge=0)] = 5
    """Failed links in a row that are followed by another one."""
    on_preemption: Reaction = Reaction.CONTINUE
    on_node_failure: Reaction = Reaction.CONTINUE
    on_out_of_memory: Reaction = Reaction.RETRY
    on_crash: Reaction = Reaction.RETRY
    on_cancel: Reaction = Reaction.HALT


class PinCode(str, Enum):
    """Which code every link runs."""

    COMMIT = "commit"
    """What git has of the working directory; uncommitted changes are refused."""
    COPY = "copy"
    """A copy of the working directory's files as they are at submission."""


class Pin(Section):
    code: PinCode | None = None
    environment: bool = False
    """A link whose installed packages are not those of the submission does not start."""


class Forward(Section):
    """A real signal for a program that does not look at the notice file."""

    signal: Annotated[str, BeforeValidator(checked(_forwarded))]
    to: ForwardTo = ForwardTo.COMMAND


class BestSection(Section):
    metric: Line
    mode: str = "max"

    @field_validator("mode")
    @classmethod
    def _known(cls, mode: str) -> str:
        if mode not in ("max", "min"):
            raise ValueError(f"must be max or min, not {mode!r}")
        return mode


class KeepSection(Section):
    last: Count = 3
    every: Count | None = None
    best: BestSection | None = None

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"last": value} if isinstance(value, (str, int)) else value

    @field_validator("best", mode="before")
    @classmethod
    def _metric_alone(cls, value: Any) -> Any:
        return {"metric": value} if isinstance(value, str) else value


class CheckpointSection(Section):
    not_available: ClassVar[tuple[str, ...]] = ("overhead",)
    policy: Annotated[str, BeforeValidator(checked(_policy))] = "auto"
    keep: KeepSection = KeepSection()
    memory: Annotated[str, BeforeValidator(checked(_snapshot_memory))] | None = None
    """The most host memory that snapshots may use."""

    @field_validator("keep")
    @classmethod
    def _as_the_runtime_reads_it(cls, keep: KeepSection) -> KeepSection:
        checked(parse_keep)(keep.model_dump())
        return keep


class Phase(Section):
    """A further command of the chain."""

    command: Annotated[Command, BeforeValidator(_command)]
    level: Annotated[str, BeforeValidator(_level)] = "auto"
    recipe: Annotated[str | dict[str, Any], BeforeValidator(_recipe)] | None = None

    @property
    def argv(self) -> list[str]:
        return _argv(self.command)


class Spec(Section):
    not_available: ClassVar[tuple[str, ...]] = ("overhead",)

    name: Annotated[str, BeforeValidator(_name)]
    command: Annotated[Command, BeforeValidator(_command)]
    root: Annotated[str, BeforeValidator(_root)]
    partition: Words = ()
    account: Line | None = None
    qos: Line | None = None
    constraint: Line | None = None
    resources: Resources = Resources()
    chain: ChainSection = ChainSection()
    checkpoint: CheckpointSection = CheckpointSection()
    tiers: Annotated[tuple[str, ...], BeforeValidator(checked(_tiers))] = ()
    """Fastest first: names of the profile's storage, directories (with a slash), or root."""
    level: Annotated[str, BeforeValidator(_level)] = "auto"
    recipe: Annotated[str | dict[str, Any], BeforeValidator(_recipe)] | None = None
    """Which recipe knows the command: a name, a file, or the recipe itself."""
    lead: Duration | None = None
    """How long a last save takes that no link has measured yet: `hpc-ckpt rehearse` says it."""
    then: tuple[Phase, ...] = ()
    """Commands that follow, each when the one before is complete; any may have another level."""
    members: Annotated[tuple[Member, ...], BeforeValidator(members_of)] = ()
    """A sweep: one independent chain for each."""
    parallel: Count | None = None
    """How many members of a sweep run at once; all that the cluster lets if not said."""
    forward: Forward | None = None
    mail: Line | None = None
    """One mail when the chain ends, whatever the number of links, complete or not."""
    reservation: Line | None = None
    exclude: Words = ()
    """Hosts that are never used."""
    sbatch: Extra = ()
    """Further directives, written as they are after those of the profile."""
    pin: Pin = Pin()
    log_limit: Memory = "1G"
    """The most that the program's output of one link may take on disk."""
    sharing: Sharing | None = None

    @model_validator(mode="before")
    @classmethod
    def _name_from_command(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        given = cls.said(value)
        if "command" not in given:
            return {"name": "chain", "root": "runs/chain", **given}
        named = {"name": job_name_of(given["command"]), **given}
        return {"root": f"runs/{named['name']}", **named}

    @property
    def argv(self) -> list[str]:
        """What the runner executes."""
        return _argv(self.command)


def _argv(command: Command) -> list[str]:
    if isinstance(command, str):
        # A program that is killed in front of `| tee log` must not look complete.
        return ["bash", "-o", "pipefail", "-c", command]
    return list(command)


def job_name(wish: str) -> str:
    """The nearest job name to `wish`."""
    return re.sub(r"[^\w.+=@-]+", "-", wish).strip("-.+=@")[:64] or "chain"


def job_name_of(command: object) -> str:
    """A name for a chain that was given none: its script, its module or its program."""
    try:
        items = shlex.split(command) if isinstance(command, str) else command
    except ValueError:
        return "chain"  # unbalanced quotes: bash will say more about it
    if not isinstance(items, (list, tuple)):
        return "chain"
    words = [word for word in map(str, items) if not _ASSIGNMENT.fullmatch(word)]
    for word in words:
        if _SCRIPT.fullmatch(PurePosixPath(word).name):
            return job_name(PurePosixPath(word).stem)
    if "-m" in words[:-1]:
        return job_name(words[words.index("-m") + 1].rpartition(".")[2])
    return job_name(PurePosixPath(words[0]).name) if words else "chain"


def locate(root: str, *, cwd: Path, environ: Mapping[str, str]) -> Path:
    """The absolute run directory. Relative means relative to where the chain is submitted.

    `~` and `$NAME` are those of the submission too: every link must find the same place.
    """
    expanded = _VARIABLE.sub(lambda match: _variable(match, environ), root)
    if expanded == "~" or expanded.startswith("~/"):
        expanded = environ.get("HOME", str(Path.home())) + expanded[1:]
    return Path(os.path.abspath(cwd / expanded))  # noqa: PTH100 - resolve() would follow links


def _variable(match: re.Match[str], environ: Mapping[str, str]) -> str:
    name = match[1] or match[2]
    if name not in environ:
        raise SpecError(f"${name} is not set where the chain is submitted")
    return environ[name]
