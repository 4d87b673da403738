"""`rehearse`: whether a command survives on this machine, and at which level."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import EXIT_FAILED, SpecError
from ..units import format_duration, format_size, parse_duration
from .options import AsJson, ProfileName

if TYPE_CHECKING:
    from ..chain.profile import Profile
    from ..levels.base import Work
    from ..levels.choice import Choice
    from ..levels.rehearse import Rehearsal

DEFAULT_MTBF_S = 24 * 3600.0
RecipeName = Annotated[
    str | None,
    typer.Option(
        "--recipe", metavar="NAME", help="By this one, also if it was not run: a name or a file."
    ),
]


def rehearse(
    context: typer.Context,
    profile: ProfileName = None,
    level: Annotated[
        str, typer.Option("--level", help="Only this one: application, dmtcp, criu.")
    ] = "auto",
    recipe: RecipeName = None,
    run: Annotated[str, typer.Option("--run", help="How long it runs before it is saved.")] = "5s",
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Not in a copy of the working directory.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write a spec from it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a command briefly, save it, kill it and go on: hpc-ckpt rehearse -- CMD."""
    from ..chain.layers import load
    from ..levels.base import Work
    from ..levels.choose import levels_of
    from ..levels.orphans import Orphans
    from ..levels.rehearse import best
    from ..levels.rehearse import rehearse as try_levels

    command: list[str] = context.obj or []
    if not command:
        raise SpecError("give a command after '--', as in: hpc-ckpt rehearse -- ./simulate in.dat")
    loaded = load({"command": command}, profile=profile or "local", cwd=Path.cwd(),
                  environ=os.environ)  # fmt: skip
    work = Work(argv=tuple(loaded.spec.argv), cwd=Path.cwd(), environ=dict(os.environ))
    choice = _choice(work, level, recipe, loaded.profile)
    if not as_json:
        for name, why in choice.rejected:
            print(f"not {name}: {why}")
    real = [entry for entry in choice.entries if entry["name"] != "plain"]
    if not real:
        print(choice.warning or f"{choice.chosen}: {choice.why}; nothing to rehearse")
        raise typer.Exit(0 if choice.chosen == "model" else EXIT_FAILED)
    mtbf = loaded.profile.failures.mtbf
    mtbf_s = DEFAULT_MTBF_S if mtbf is None else parse_duration(mtbf)
    found: list[Rehearsal] = []
    tried = try_levels(
        work, levels_of(real), run_s=parse_duration(run), in_place=in_place, orphans=Orphans()
    )
    for one in tried:
        found.append(one)
        if not as_json:
            _tell(one)
    chosen = best(found)
    if as_json:
        print(json.dumps([one.to_json() for one in found], indent=1))
    if chosen is None:
        raise typer.Exit(EXIT_FAILED)
    lines = _spec_lines(command, chosen, mtbf_s, recipe)
    if output is not None:
        _write(output, lines)
    elif not as_json:
        print("\nIn a spec:\n")
        sys.stdout.write(lines)


def _choice(work: Work, level: str, recipe: str | None, profile: Profile) -> Choice:
    from ..levels.choose import choose
    from ..levels.recipe import load_recipes

    if recipe is not None and level not in ("auto", "application"):
        raise SpecError(f"--recipe is for level application, not for --level {level}")
    known = load_recipes(work.cwd, work.environ)
    tools = profile.tools.model_dump(mode="json")
    return choose(work, level, recipes=known, recipe=recipe, tools=tools)


def _tell(one: Rehearsal) -> None:
    verdict = "survives" if one.survived else "does not survive"
    print(f"{one.level}: {verdict}: {one.why}")
    if one.save_s is not None and one.size is not None and one.resume_s is not None:
        print(
            f"  a save takes {one.save_s:.2f} s and {format_size(one.size)}; "
            f"going on takes {one.resume_s:.2f} s"
        )


def _spec_lines(command: list[str], chosen: Rehearsal, mtbf_s: float, recipe: str | None) -> str:
    """`recipe`: the one that was asked for; else it was found by its own name."""
    interval, lead = chosen.interval_s(mtbf_s), chosen.lead_s
    lines = [f"command: {json.dumps(command)}"]
    if chosen.level in ("dmtcp", "criu"):
        lines.append(f"level: {chosen.level}")
    else:
        lines += ["level: application", f"recipe: {json.dumps(recipe or chosen.level)}"]
    if interval is not None and lead is not None:
        lines.append(f"checkpoint: {{policy: every {format_duration(round(interval))}}}")
        lines.append(f"lead: {format_duration(lead)}")
    return "\n".join(lines) + "\n"


def _write(output: Path, lines: str) -> None:
    if output.exists():
        raise SpecError(f"{output}: is there already")
    try:
        output.write_text(lines, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{output}: {error.strerror}") from None
    print(f"written: {output}")
