"""Whether a command tells which files its program writes, before it is trusted to a recipe."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from .ingredients import Test
from .recipe import Recipe
from .values import Values


def why_not_known(recipe: Recipe, values: Values) -> str | None:
    """None: the restart files can be found, and the end of the work can be told."""
    return _restarts(recipe, values) or _end(recipe, values)


def _restarts(recipe: Recipe, values: Values) -> str | None:
    patterns = recipe.restart.files
    missing = [values.unknown(pattern) for pattern in patterns]
    if missing and None not in missing:
        return (
            f"the command does not show {{{missing[0]}}}, which its restart files need; "
            f"give it a default in a recipe of your own with 'like: {recipe.name}'. "
            f"{recipe.note}"
        ).strip()
    doubts = [values.unsure(p) for p in patterns if values.unknown(p) is None]
    told = [doubt for doubt in doubts if doubt is not None]
    if told and (len(told) == len(doubts) or recipe.restart.pick == "all"):
        return f"the names of its restart files cannot be known: {told[0]}; write it out"
    return None


def _end(recipe: Recipe, values: Values) -> str | None:
    untold = [_untold(values, test) for test in recipe.complete]
    if None not in untold:
        return f"nothing shows {{{untold[0]}}}, which tells the end of the work; {recipe.note}"
    doubts = [_doubtful(values, test) for test in recipe.complete]
    if None not in doubts:
        return f"the end of the work cannot be told: {doubts[0]}; write it out"
    return None


def _untold(values: Values, test: Test) -> str | None:
    """A name that its target needs and nothing gives."""
    target = test.target
    if target is None or target.value is None or not target.is_value:
        return None
    return values.unknown(target.value)


def _doubtful(values: Values, test: Test) -> str | None:
    added = None if test.target is None else test.target.plus
    numbers = [number for number in (test.step, test.target, added) if number is not None]
    texts = [test.file, test.where]
    for number in numbers:
        texts += [number.file, number.value, number.count, *(number.command or ())]
    return next(filter(None, (values.unsure(text) for text in texts if text is not None)), None)
