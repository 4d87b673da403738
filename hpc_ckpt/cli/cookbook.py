"""`recipes`: which programs hpc_ckpt knows how to save, and how."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import AsJson

if TYPE_CHECKING:  # at run time every verb would pay for it
    from ..levels.recipe import Recipe


def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show this one: a name or a file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The recipes for programs that write restart files of their own."""
    from ..levels.recipe import load_recipes, recipe_of

    known = load_recipes(Path.cwd(), os.environ)
    if name is None:
        _list(known, as_json=as_json)
        return
    found = recipe_of(name, known, Path.cwd())
    print(json.dumps(_record(found)) if as_json else _text(found))


def _list(known: list[Recipe], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([_record(recipe) for recipe in known]))
        return
    from rich.table import Table
    from rich.text import Text

    from .tables import console

    table = Table(box=None, pad_edge=False)
    for head in ("recipe", "program", "recognised by", "tried"):
        table.add_column(head, overflow="fold")
    for recipe in known:
        tried = Text(recipe.tried, "green" if recipe.was_tried else "yellow")
        table.add_row(recipe.name, Text(recipe.title), Text(recognised_by(recipe)), tried)
    screen = console()
    screen.print(table)
    screen.print("\nOf the shipped ones only those that were tried are taken by themselves;")
    screen.print("name the others in the spec: recipe: NAME")
    screen.print("One of them in full: hpc-ckpt recipes NAME")


def recognised_by(recipe: Recipe) -> str:
    seen = recipe.recognised
    if not seen.programs:
        return "its name in a spec only"
    text = ", ".join(seen.programs)
    if seen.words:
        text += " with " + " ".join(seen.words)
    return text + (" and what the script says" if seen.mentions else "")


def _record(recipe: Recipe) -> dict[str, Any]:
    return {
        "name": recipe.name,
        "title": recipe.title,
        "tried": recipe.tried,
        "was_tried": recipe.was_tried,
        "origin": recipe.origin,
        "recipe": recipe.to_json(),
    }


def _text(recipe: Recipe) -> str:
    """As a YAML file that could be changed and used."""
    import yaml

    body = yaml.safe_dump(recipe.to_json(), sort_keys=False, allow_unicode=True, width=100)
    return f"# {recipe.origin}\n{_warning(recipe)}{body}".rstrip()


def _warning(recipe: Recipe) -> str:
    if recipe.was_tried:
        return ""
    how = f"hpc-ckpt rehearse --recipe {recipe.name} -- CMD"
    return f"# not run here: rehearse it before you trust it: {how}\n"
