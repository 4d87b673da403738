"""Nodes, tasks, cores, GPUs and memory of a batch script as a spec's resources. Pure.

A link is one task on one node, so several tasks become one task with the cores of all.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..errors import SpecError
from ..units import parse_size, slurm_memory
from .conflicts import Fate, Remark
from .directives import Directive
from .render import sbatch_line
from .sbatchfile import Given, options_of

Refuse = Callable[[Given, str], SpecError]
_OF_MEMORY = ("mem", "mem-per-gpu", "mem-per-cpu")
_OF_GPUS = ("gpus", "gpus-per-node", "gres", "gpus-per-task")
_GPUS = re.compile(r"(?:([A-Za-z][\w.-]*?)(?::(\d+))?|(\d+))(?:\(S:[\d,-]+\))?", re.ASCII)
_NO_GPUS = re.compile(r"(?:[^:]+:)?0|", re.ASCII)
_GRES = re.compile(r"(?:gres[:/])?gpu(?:[:=](.*))?", re.ASCII)


@dataclass
class Demands:
    """What one link needs."""

    NAMES: ClassVar[frozenset[str]] = frozenset(
        {"nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "cpus-per-task", "cpus-per-gpu"}
    ) | {*_OF_MEMORY, *_OF_GPUS}
    """The options that are read here."""

    resources: dict[str, Any] = field(default_factory=dict)
    tasks: int = 1
    cpus_per_task: int = 1
    gpus: int = 0
    remarks: list[Remark] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    def say(self, given: Given, fate: Fate, why: str) -> None:
        self.remarks.append(Remark(given.line, str(given), fate, why))

    def keep(self, given: Given, why: str) -> None:
        self.kept.append(sbatch_line(Directive(f"--{given.name}", given.value)))
        self.say(given, Fate.KEPT, why)

    def take(self, given: Given, key: str, value: object) -> None:
        self.resources[key] = value
        self.say(given, Fate.TAKEN, f"resources.{key}: {value}")


def demands_of(given: Mapping[str, Given], refuse: Refuse) -> Demands:
    """From the options by name; `refuse` makes the error for one that cannot be."""
    found = Demands()
    _nodes(found, given.get("nodes"), refuse)
    _gpus(found, given, refuse)
    _tasks(found, given, refuse)
    _gpus_per_task(found, given, refuse)
    _cpus(found, given, refuse)
    _memory(found, given, refuse)
    return found


def _nodes(found: Demands, given: Given | None, refuse: Refuse) -> None:
    if given is None:
        return
    match = re.match(r"(\d+)([km]?)", given.value or "", re.IGNORECASE)
    if match is None:
        raise refuse(given, "not a number of nodes")
    if int(match[1]) > 1 or match[2]:
        raise refuse(given, "a chain on more than one node is not available in this version")
    exact = given.value == "1"
    found.say(given, Fate.TAKEN if exact else Fate.REPLACED, "one node for each link")


# ── tasks and cores ───────────────────────────────────────────────────────────────────────
def _tasks(found: Demands, given: Mapping[str, Given], refuse: Refuse) -> None:
    for name, factor in (("ntasks", 1), ("ntasks-per-node", 1), ("ntasks-per-gpu", found.gpus)):
        option = given.get(name)
        if option is None:
            continue
        tasks = _count(option, refuse) * max(factor, 1)
        if found.tasks > 1:
            found.say(option, Fate.LEFT_OUT, "follows from the others")
        elif tasks == 1:
            found.say(option, Fate.TAKEN, "one task for each link")
        else:
            found.tasks = tasks
            found.say(option, Fate.REPLACED, _SEVERAL.format(tasks=tasks))


_SEVERAL = (
    "a link is one task on one node, with the cores of all {tasks}; the new script sets "
    "SLURM_NTASKS={tasks}, so that srun and mpirun in it start as many as before"
)


def _cpus(found: Demands, given: Mapping[str, Given], refuse: Refuse) -> None:
    option, per_gpu = given.get("cpus-per-task"), given.get("cpus-per-gpu")
    asked = option is not None or found.tasks > 1
    if option is not None:
        found.cpus_per_task = _count(option, refuse)
    if per_gpu is not None:
        cores = _count(per_gpu, refuse) * max(found.gpus, 1)
        found.cpus_per_task = max(found.cpus_per_task, -(-cores // found.tasks))
        option, asked = option or per_gpu, True
    if not asked:
        return
    cpus = found.tasks * found.cpus_per_task
    found.resources["cpus"] = cpus
    for each in {id(one): one for one in (option, per_gpu) if one is not None}.values():
        found.say(each, Fate.TAKEN, f"resources.cpus: {cpus}")


def _count(given: Given, refuse: Refuse) -> int:
    value = given.value or ""
    if not re.fullmatch(r"[1-9]\d{0,6}", value, re.ASCII):
        raise refuse(given, "not a number (sbatch fills in no variables here)")
    return int(value)


# ── GPUs ──────────────────────────────────────────────────────────────────────────────────
def _gpus(found: Demands, given: Mapping[str, Given], refuse: Refuse) -> None:
    for name in ("gpus", "gpus-per-node", "gres"):
        option = given.get(name)
        if option is None:
            continue
        if found.gpus:
            found.say(option, Fate.LEFT_OUT, "the GPUs are said already")
        elif name == "gres":
            _gres(found, option, refuse)
        else:
            _some_gpus(found, option, option.value or "", 1, refuse)


def _gres(found: Demands, given: Given, refuse: Refuse) -> None:
    parts = [part.strip() for part in (given.value or "").split(",")]
    ours = [match for part in parts if (match := _GRES.fullmatch(part)) is not None]
    if len(ours) == 1 and len(parts) == 1:
        _some_gpus(found, given, ours[0][1] or "1", 1, refuse)
        return
    if len(ours) == 1:
        # Written after the chain's own --gres, so this one counts; the plan knows the GPUs.
        _some_gpus(found, given, ours[0][1] or "1", 1, refuse)
    found.keep(given, "as it is: more than GPUs of one kind")


def _gpus_per_task(found: Demands, given: Mapping[str, Given], refuse: Refuse) -> None:
    option = given.get("gpus-per-task")
    if option is None:
        return
    if found.gpus:
        found.say(option, Fate.LEFT_OUT, "the GPUs are said already")
    else:
        _some_gpus(found, option, option.value or "", found.tasks, refuse)


def _some_gpus(found: Demands, given: Given, value: str, times: int, refuse: Refuse) -> None:
    if "," in value:
        found.keep(given, "as it is: more than GPUs of one kind")
        return
    match = _GPUS.fullmatch(value)
    if match is None:
        raise refuse(given, "not a number of GPUs")
    found.gpus = int(match[2] or match[3] or 1) * times
    shown = f"{match[1]}:{found.gpus}" if match[1] and found.gpus else found.gpus
    found.take(given, "gpus", shown)


def asks_for_gpus(directives: Iterable[str]) -> bool:
    """Whether these #SBATCH lines do; of lines about the same the last counts."""
    given = {one.name: one.value or "" for line in directives for one in options_of(line)}
    for name, value in given.items():
        parts = [part.strip() for part in value.split(",")]
        if name in ("gres", "tres-per-task"):
            parts = [match[1] or "1" for match in map(_GRES.fullmatch, parts) if match]
        elif not name.startswith("gpus"):
            continue
        if any(_NO_GPUS.fullmatch(part) is None for part in parts):
            return True
    return False


# ── memory ────────────────────────────────────────────────────────────────────────────────
def _memory(found: Demands, given: Mapping[str, Given], refuse: Refuse) -> None:
    asked = [given[name] for name in _OF_MEMORY if name in given]
    if len(asked) > 1:
        raise refuse(asked[1], f"{asked[0]} is there too, and Slurm takes only one of them")
    for option in asked:
        if option.name == "mem-per-cpu":
            found.keep(option, "as it is: with all cores of the link's one task")
        elif option.name == "mem":
            found.take(option, "memory", _size(option, refuse))
        else:
            whole = parse_size(_size(option, refuse)) * max(found.gpus, 1)
            found.take(option, "memory", slurm_memory(whole))


def _size(given: Given, refuse: Refuse) -> str:
    """Slurm's bare number is MiB."""
    value = (given.value or "").strip()
    size = f"{value}M" if value.isdecimal() and int(value) else value
    try:
        parse_size(size)
    except SpecError as error:
        raise refuse(given, str(error)) from None
    return size
