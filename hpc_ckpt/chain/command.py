"""Whether a command can be started at all: found out at submission, not after the queue."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from ..errors import SpecError
from .plan import Plan
from .spec import Spec

_INTERPRETER = re.compile(r"(python|pypy)[\d.]*|bash|sh|dash|zsh|Rscript|julia|perl|ruby|lua|srun")
_SHELL_SYNTAX = frozenset("|&;<>()$`*?[]{}~#\n")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


def check_command(spec: Spec, plan: Plan, environ: Mapping[str, str]) -> None:
    """Raise SpecError for a program or script that is certainly missing.

    What only the node can know is left to it: bare names when a module or a prologue may
    provide them, and command lines that are more than plain words to bash.
    """
    words = _words(spec.command)
    if not words:
        return
    program, rest = words[0], words[1:]
    if "/" in program:
        _check_file(plan.cwd, program, executable=True)
    elif not (plan.modules or plan.prologue) and not _on_path(program, environ):
        raise SpecError(f"command: no program {program!r} on the PATH; give its path")
    script = next((word for word in rest if not word.startswith("-")), None)
    if script is None or not _INTERPRETER.fullmatch(PurePath(program).name):
        return
    options = rest[: rest.index(script)]
    if PurePath(script).suffix in (".py", ".sh", ".R", ".jl", ".pl") and not (
        {"-c", "-m", "-e"} & set(options)
    ):
        _check_file(plan.cwd, script, executable=False)


def _words(command: str | Sequence[str]) -> list[str]:
    """The plain words of a command; none if only bash can say what they are."""
    if not isinstance(command, str):
        return list(command)
    if _SHELL_SYNTAX & set(command):
        return []
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise SpecError(
            f"command: {command!r}: {error}".replace("No closing", "no closing")
        ) from None
    while words and _ASSIGNMENT.match(words[0]):
        words.pop(0)
    return words


def _on_path(program: str, environ: Mapping[str, str]) -> bool:
    builtin = program in ("cd", "exec", "eval", "source", ".", "true", "false", "exit", "set", ":")
    return builtin or shutil.which(program, path=environ.get("PATH", os.defpath)) is not None


def _check_file(cwd: Path, name: str, *, executable: bool) -> None:
    path = cwd / Path(name).expanduser()
    if not path.is_file():
        raise SpecError(f"command: no file {name!r} in {cwd}")
    if executable and not os.access(path, os.X_OK):
        raise SpecError(f"command: {path} is not executable; chmod +x it, or name its interpreter")
