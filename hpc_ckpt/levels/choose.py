"""Which level saves for a command: the first of the order that fits, and why not the others.

Asked at submission, for people and for chain.json; the steward asks each level again on the
node, and goes down the same order.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import resources
from ..errors import SpecError
from ..policy.interval import EveryTime
from ..settings import parse_policy
from . import criu_tool, dmtcp_tool
from .application import Application
from .base import Kind, Level, Work
from .binaries import MPI_LAUNCHERS, launcher_in
from .choice import Choice
from .criu import Criu
from .dmtcp import Dmtcp
from .dmtcp_tool import NoTool, find_tool
from .plain import WARNING, Plain
from .recipe import Recipe, matching, recipe_of, untried
from .speaking import speaks_for_itself

SCRIPT = "templates/dmtcp.sh"
SCRIPT_INTERVAL_S = 1800
"""The script's own, where it is told none."""
MPI_WARNING = (
    "MPI under DMTCP was run with Open MPI 4.1 on one node and no other: try a small case first"
)

_NOT_FOUND = (dmtcp_tool.NOT_FOUND, criu_tool.NOT_FOUND)


def choose(
    work: Work,
    wanted: str = "auto",
    *,
    recipes: Iterable[Recipe] = (),
    recipe: str | Mapping[str, Any] | None = None,
    tools: Mapping[str, Any] | None = None,
    policy: str = "auto",
) -> Choice:
    """`wanted`: one of choice.LEVELS; `recipe`: a name or a recipe; `tools`: the profile's;
    `policy`: the spec's, for what keeps its own checkpoints."""
    known = list(recipes)
    if recipe is not None:
        return _by_recipe(work, recipe_of(recipe, known, work.cwd))
    if wanted in ("auto", "model"):
        own = speaks_for_itself(work)
        if own is not None:
            return Choice((), Kind.MODEL.value, own.why, fenced=own.by_checkpointer)
        if wanted == "model":
            return Choice((), Kind.MODEL.value, "as the spec says", fenced=True)
    launcher = launcher_in(work.argv)
    if wanted == Dmtcp.name and launcher is not None and Path(launcher).name in MPI_LAUNCHERS:
        return _by_script(work, launcher, (tools or {}).get(Dmtcp.name), policy)
    rejected = [(Kind.MODEL.value, "no file that the command shows imports hpc_ckpt")]
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
        f"name it with recipe: {near.name}, after hpc-ckpt rehearse --recipe {near.name} -- CMD"
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
        forced = wanted == level.name
        if why is None or _on_the_node(tools.get(level.name), why, forced=forced):
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
    chosen = str(entries[0]["name"])
    entries.append({"name": Plain.name, "kind": Kind.PLAIN.value})
    unseen = dict(rejected).get(chosen) if wanted == chosen else None
    warning = None if unseen is None else f"{chosen} is left to the nodes; here: {unseen}"
    return Choice(tuple(entries), chosen, "as a whole process", tuple(rejected), warning)


def _by_script(work: Work, launcher: str, tool: Mapping[str, Any] | None, policy: str) -> Choice:
    """MPI on one node, the launcher under DMTCP too: a script that keeps its own checkpoints and
    speaks to the chain by the notice file and its exit code."""
    if work.gpus:
        raise SpecError("level: dmtcp: GPUs are asked for, and DMTCP does not save what is on them")
    try:
        found = find_tool(tool, work.environ)
    except NoTool as error:
        raise SpecError(f"level: dmtcp: {error}") from error
    script = str(resources.find(SCRIPT))
    interval, how_often = _interval(policy)
    why = f"{launcher} on one node, as a whole, by {SCRIPT}, a checkpoint {how_often}"
    before = ("env", f"DMTCP_BIN={found.place}", *interval, "bash", script)
    return Choice((), Dmtcp.name, why, warning=MPI_WARNING, before=before)


def _interval(policy: str) -> tuple[tuple[str, ...], str]:
    """A policy as the script takes it, and for people."""
    asked = parse_policy(policy)
    if not isinstance(asked, EveryTime):
        return (), f"{EveryTime(SCRIPT_INTERVAL_S)}: it counts no steps"
    seconds = math.ceil(asked.seconds)
    return (f"INTERVAL={seconds}",), str(EveryTime(seconds))


def _on_the_node(tool: Mapping[str, Any] | None, why: str, *, forced: bool) -> bool:
    """Only the node can say whether a module brings it, or whether a path that is not here is
    there; the latter is believed of a level that was asked for by name."""
    tool = tool or {}
    named = os.path.expandvars(str(tool.get("path") or ""))
    unfound = why in _NOT_FOUND
    if forced and named and (unfound or named in why):
        return not Path(named).exists()
    return bool(tool.get("module")) and unfound


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
