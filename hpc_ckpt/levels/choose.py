"""Which level saves for a command: the first of the order that fits, and why not the others.

Asked at submission, for people and for chain.json; the steward asks each level again on the
node, and goes down the same order.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import SpecError
from .application import Application
from .base import Kind, Level, Work
from .choice import Choice
from .criu import Criu
from .dmtcp import Dmtcp
from .plain import WARNING, Plain
from .recipe import Recipe, matching, recipe_of, untried

LOOK_INTO = 1024**2
"""Of a script: a line that imports the Checkpointer is near its top."""
_USES = re.compile(
    rb"""^(?:[^#\n]*[;:])?[ \t]*(?:from|import(?:[ \t]+[\w., \t]+,)?)[ \t]+hpc_ckpt\b
       | ^[^#\n]*\bimport\w*\(["']hpc_ckpt\b
       | (?:^|[ \t])-m\s+hpc_ckpt\b(?!/)
       | (?<![\w/.-])HPC_CKPT_(?:NOTICE|ROOT|DEADLINE|OUTCOME)\b
       | \bexit[ ]75\b""",
    re.MULTILINE | re.VERBOSE,
)
"""Not the bare name: a directory may have it too, and its program would never be saved."""
_ASKS = re.compile(r"(?<![\w/.-])HPC_CKPT_[A-Z]")
"""Any of a link's variables, in the command itself."""
_SCRIPT = re.compile(r"[^=]*\.(?:py|sh|bash|R|jl|pl)")


def choose(
    work: Work,
    wanted: str = "auto",
    *,
    recipes: Iterable[Recipe] = (),
    recipe: str | Mapping[str, Any] | None = None,
    tools: Mapping[str, Any] | None = None,
) -> Choice:
    """`wanted`: one of choice.LEVELS; `recipe`: a name or a recipe; `tools`: the profile's."""
    known = list(recipes)
    if recipe is not None:
        return _by_recipe(work, recipe_of(recipe, known, work.cwd))
    if wanted in ("auto", "model"):
        own = speaks_for_itself(work)
        if own is not None or wanted == "model":
            return Choice((), Kind.MODEL.value, own or "as the spec says")
    rejected = [(Kind.MODEL.value, "no file of the command imports hpc_ckpt")]
    if wanted in ("auto", "application"):
        found = matching(known, work)
        why = _unknown(known, work) if found is None else Application(found).probe(work)
        if found is not None and (why is None or wanted == "application"):
            chosen = _by_recipe(work, found, rejected)
            return _with_others(chosen, work, tools or {}) if wanted == "auto" else chosen
        named = Kind.APPLICATION.value if found is None else found.name
        rejected.append((named, why or ""))
        if wanted == "application":
            raise SpecError(
                f"level: application: {why}; name one with 'recipe:' "
                "('hpc-ckpt recipes' lists them), or write one"
            )
    return _by_system(work, wanted, rejected, tools or {})


def _unknown(known: Sequence[Recipe], work: Work) -> str:
    near = untried(known, work)
    if near is None:
        return "no recipe knows this command"
    return (
        f"recipe {near.name} knows this command but was not run here: "
        f"name it with recipe: {near.name}"
    )


def _by_recipe(work: Work, found: Recipe, rejected: Sequence[tuple[str, str]] = ()) -> Choice:
    level = Application(found)
    why = level.probe(work)
    if why is not None:
        raise SpecError(f"recipe {found.name}: {why}")
    entry = {"name": level.name, "kind": Kind.APPLICATION.value, "recipe": found.to_json()}
    return Choice((entry,), level.name, found.title, tuple(rejected))


def _with_others(chosen: Choice, work: Work, tools: Mapping[str, Any]) -> Choice:
    """What nobody asked for by name gives way if it turns out not to work."""
    others = _by_system(work, "auto", [], tools).entries
    last = {"name": Plain.name, "kind": Kind.PLAIN.value}
    return replace(chosen, entries=(*chosen.entries, *(others or (last,))))


def _by_system(
    work: Work, wanted: str, rejected: list[tuple[str, str]], tools: Mapping[str, Any]
) -> Choice:
    """The usable ones in order, each standing in for the one before."""
    entries: list[dict[str, Any]] = []
    for level in (Dmtcp(tools.get("dmtcp")), Criu(tools.get("criu"))):
        if wanted in ("plain",) or (wanted in ("dmtcp", "criu") and wanted != level.name):
            continue
        why = level.probe(work)
        if why is None or wanted == level.name or _by_module(tools.get(level.name)):
            # A job has another PATH: what was found here is named, and looked for there.
            tool = tools.get(level.name) or level.tool
            entries.append({"name": level.name, "kind": Kind.SYSTEM.value, "tool": tool})
        if why is not None:
            rejected.append((level.name, why))
    if not entries:
        if wanted not in ("auto", "plain"):
            said = "; ".join(f"{name}: {why}" for name, why in rejected[1:])
            raise SpecError(f"level: {wanted}: not usable for this command here: {said}")
        return Choice((), Kind.PLAIN.value, "nothing else fits", tuple(rejected), WARNING)
    entries.append({"name": Plain.name, "kind": Kind.PLAIN.value})
    return Choice(tuple(entries), str(entries[0]["name"]), "as a whole process", tuple(rejected))


def _by_module(tool: Mapping[str, Any] | None) -> bool:
    """Only the node can say whether a module brings it."""
    return bool(tool and tool.get("module"))


def levels_of(entries: Iterable[Mapping[str, Any]]) -> list[Level]:
    """The levels that chain.json names."""
    return [_build(entry) for entry in entries]


def _build(entry: Mapping[str, Any]) -> Level:
    name = entry.get("name")
    if entry.get("kind") == Kind.APPLICATION.value:
        return Application(Recipe.from_json(entry["recipe"]))
    if name == Dmtcp.name:
        return Dmtcp(entry.get("tool"))
    if name == Criu.name:
        return Criu(entry.get("tool"))
    if name == Plain.name:
        return Plain()
    raise SpecError(f"chain.json names a level {name!r} that this version does not know")


# ── programs that save for themselves ─────────────────────────────────────────────────────
def speaks_for_itself(work: Work) -> str | None:
    """Which word of the command shows that it uses a Checkpointer or the notice file."""
    found = words(work.argv)
    text = "\n".join(found)
    if _USES.search(os.fsencode(text)) or _ASKS.search(text):
        return "the command speaks to hpc_ckpt itself"
    for word in found:
        path = _script(word, work.cwd)
        if path is not None and _mentions(path):
            return f"{word} uses hpc_ckpt"
    return None


def words(argv: Sequence[str]) -> list[str]:
    """The words of a command, those inside `bash -c` too; modules as the files they would be."""
    found: list[str] = []
    for before, word in zip(("", *argv), argv, strict=False):
        if before == "-c":
            found += _split(word)
        found.append(word)
        if before == "-m":
            found.append(word.replace(".", "/") + ".py")
    return found


def _split(text: str) -> list[str]:
    try:
        inner = shlex.split(text, comments=True)
    except ValueError:
        inner = text.split()
    return words(inner)


def _script(word: str, cwd: Path) -> Path | None:
    if _SCRIPT.fullmatch(word) is None:
        return None
    path = cwd / word
    return path if path.is_file() else None


def _mentions(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return _USES.search(stream.read(LOOK_INTO)) is not None
    except OSError:
        return False
