"""The batch script of a plan. Text in, text out; every inserted word is quoted by a filter.

Two quotings meet here: bash's, and that of #SBATCH lines, which Slurm reads with rules of its
own. The command is not in the script: the runner takes it from chain.json.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import re
import shlex

import jinja2

from .. import resources
from ..errors import SpecError
from .directives import Directive
from .plan import Plan
from .profile import Backend

TEMPLATE = "templates/chain.sbatch.j2"
LONGEST_DIRECTIVE = 8000
"""Slurm reads an #SBATCH line into a buffer of 8192 bytes."""


def render(plan: Plan, *, python: str) -> str:
    """The script; write it with os.fsencode, a path may hold bytes that are not UTF-8.

    `python` is the absolute interpreter that becomes the batch process.
    """
    if plan.backend is not Backend.SLURM:
        raise SpecError("the local runner needs no batch script; choose a profile with a Slurm")
    template = resources.find(TEMPLATE).read_text(encoding="utf-8")
    return (
        _environment()
        .from_string(template)
        .render(
            directives=[*map(sbatch_line, plan.directives), *plan.extra],
            signal=plan.signal,
            modules=plan.modules,
            prologue=plan.prologue,
            activations=plan.activations,
            python=python,
            root=str(plan.root),
            strategy=plan.strategy.value,
            array=plan.array is not None,
            sweep=bool(plan.members),
            group=plan.group,
        )
    )


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = shlex.quote
    return environment


def sbatch_line(directive: Directive) -> str:
    """`--name=value` as Slurm's own parser of #SBATCH lines reads it back."""
    if directive.value is None:
        return directive.name
    if re.search(r"[\n\r\0]", directive.value):
        raise SpecError(
            f"{directive.name}: {directive.value!r} contains a line break, which no #SBATCH line "
            "can carry; choose another name or place"
        )
    line = f"{directive.name}={_sbatch_quote(directive.value)}"
    if len(line.encode("utf-8", "surrogateescape")) > LONGEST_DIRECTIVE:
        raise SpecError(f"{directive.name}: too long for an #SBATCH line")
    return line


def _sbatch_quote(value: str) -> str:
    """In double quotes a backslash escapes any character; there is no other escape."""
    if re.fullmatch(r"[\w@%+=:,./-]+", value, re.ASCII):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
