"""The #SBATCH lines of a plan. Pure; render.py quotes them."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import SpecError
from ..units import parse_duration, parse_size, slurm_memory, slurm_time
from .profile import Profile, directive_name
from .spec import Spec


@dataclass(frozen=True)
class Directive:
    """One #SBATCH line; `value` is what Slurm shall understand, not yet quoted."""

    name: str
    value: str | None = None


def directives(
    spec: Spec, profile: Profile, cwd: Path, array: str | None, link_s: float
) -> tuple[Directive, ...]:
    """`array` is None where links are jobs of their own, or one job again and again."""
    wants = spec.resources
    lead = math.ceil(parse_duration(profile.signal.lead))
    memory = None if wants.memory is None else parse_size(wants.memory)
    shortest = spec.chain.min_time
    every: tuple[tuple[str, str | None], ...] = (
        ("--job-name", spec.name),
        ("--array", array),
        ("--time", slurm_time(link_s)),
        ("--time-min", None if shortest is None else slurm_time(parse_duration(shortest))),
        ("--partition", ",".join(spec.partition) or None),
        ("--account", spec.account),
        ("--qos", spec.qos),
        ("--reservation", spec.reservation),
        ("--constraint", spec.constraint),
        ("--exclude", ",".join(spec.exclude) or None),
        ("--nodes", str(wants.nodes)),
        ("--ntasks", "1"),
        ("--cpus-per-task", str(wants.cpus)),
        ("--gres", f"gpu:{wants.gpus}" if wants.gpus else None),
        ("--mem", None if memory is None else slurm_memory(memory) if memory else "0"),
        ("--signal", f"B:{profile.signal.name}@{lead}"),
        ("--open-mode", "append"),
        ("--output", _log_pattern(spec.root, "%A_%a" if array else "%j")),
        ("--export", "NONE"),
        ("--chdir", str(cwd)),
    )
    requeue = Directive("--requeue" if profile.chain.requeue else "--no-requeue")
    written = [Directive(name, value) for name, value in every if value is not None]
    skip = {directive_name(name) for name in profile.directives.skip}
    return tuple(d for d in [*written, requeue] if directive_name(d.name) not in skip)


def without_dependency(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(line for line in lines if dependency_of([line]) is None)


def dependency_of(lines: Iterable[str]) -> str | None:
    """What these directives make a job wait for; sbatch takes abbreviations, and the last word."""
    found = None
    for line in lines:
        for name, value in re.findall(r"(?:^|\s)--(dep[a-z]*)(?:=|\s+)(\S+)", line):
            if "dependency".startswith(name):
                found = value.strip("\"'")
    return found


def _log_pattern(root: str, job: str) -> str:
    if "\\" in root:
        raise SpecError(
            f"root: {root!r} contains a backslash, and Slurm cannot write its log there; "
            "choose another root"
        )
    return root.replace("%", "%%") + f"/logs/slurm-{job}.log"
