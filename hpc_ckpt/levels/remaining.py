"""How many steps are left, for a program that counts them anew in each link."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..rundir import ENV_DEADLINE
from .base import NotHere, ResumeFailed, Work
from .binaries import find
from .evidence import Evidence
from .ingredients import Edit, Number
from .recipe import Recipe
from .values import Values

NAME = "steps_left"


def is_told(edit: Edit) -> bool:
    """Whether the program is given the number."""
    return any(f"{{{NAME}}}" in text for text in edit.texts)


def steps_left(recipe: Recipe, values: Values, evidence: Evidence, restart: Path) -> int | None:
    """At least one; None: the work is not as long as any number says.

    Raises NotHere, ResumeFailed: left out, the number of the whole work would be done again.
    """
    progress = recipe.progress
    total = None if progress is None else _given(progress.total, values, evidence)
    if progress is None or total is None:
        return None
    last = evidence.number(total)
    if last is None:
        raise NotHere(f"the steps that are left cannot be told: {_asked(total, values)}")
    done = evidence.number(progress, restart)
    if done is not None:
        return max(last - done, 1)
    path = None if progress.file is None else values.path(progress.file, {"restart": str(restart)})
    if path is not None and not path.exists():
        return None  # written with the first step: there is none yet
    raise ResumeFailed(
        f"the steps that are left cannot be told: nothing shows the step of {restart.name}"
    )


def why_untold(recipe: Recipe, values: Values, evidence: Evidence, work: Work) -> str | None:
    """Why later links could not be told the number; only a node can ask the program's commands."""
    if ENV_DEADLINE not in work.environ or recipe.progress is None or not is_told(recipe.resume):
        return None
    total = _given(recipe.progress.total, values, evidence)
    if total is None or evidence.number(total) is not None:
        return None
    commands = [values.words(words) for words in _commands(total)]
    if commands and all(_may_answer_later(words, work) for words in commands):
        return None
    return (
        "the steps that are left cannot be told, and each later link would do all of them again: "
        f"{_asked(total, values)}; name the program by its path, or load its module by "
        f"'environment: modules' and not in the command. {recipe.note}"
    ).strip()


def _given(total: Number | None, values: Values, evidence: Evidence) -> Number | None:
    """Unless neither the command nor its input has such a number: then it needs no change."""
    if total is None:
        return None
    if total.value is not None and values.unknown(total.value) is None:
        return total
    if total.is_value or (total.file is not None and evidence.number(total) is None):
        return None
    return total


def _may_answer_later(words: list[str] | None, work: Work) -> bool:
    """A command that is there, for a file that the user's command has still to make."""
    if words is None or find(words[0], work.cwd, work.environ) is None:
        return False
    return not any((work.cwd / word).is_file() for word in words[1:])


def _commands(number: Number) -> Iterator[tuple[str, ...]]:
    if number.command is not None:
        yield number.command
    if number.plus is not None:
        yield from _commands(number.plus)


def _asked(total: Number, values: Values) -> str:
    asked = [" ".join(values.words(words) or words) for words in _commands(total)]
    if asked:
        return f"'{asked[0]}' cannot be run here, or does not say"
    return f"{values.fill(total.value or '')!r} is no number"
