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
    from ..levels.rehearse import Rehearsal

DEFAULT_MTBF_S = 24 * 3600.0


def rehearse(
    context: typer.Context,
    profile: ProfileName = None,
    level: Annotated[
        str, typer.Option("--level", help="Only this one: application, dmtcp, criu.")
    ] = "auto",
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
    from ..levels.choose import choose, levels_of
    from ..levels.recipe import load_recipes
    from ..levels.rehearse import best
    from ..levels.rehearse import rehearse as try_levels

    command: list[str] = context.obj or []
    if not command:
        raise SpecError("give a command after '--', as in: hpc-ckpt rehearse -- ./simulate in.dat")
    loaded = load({"command": command}, profile=profile or "local", cwd=Path.cwd(),
                  environ=os.environ)  # fmt: skip
    work = Work(argv=tuple(loaded.spec.argv), cwd=Path.cwd(), environ=dict(os.environ))
    choice = choose(
        work,
        level,
        recipes=load_recipes(Path.cwd(), os.environ),
        tools=loaded.profile.tools.model_dump(mode="json"),
    )
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
    for one in try_levels(work, levels_of(real), run_s=parse_duration(run), in_place=in_place):
        found.append(one)
        if not as_json:
            _tell(one)
    chosen = best(found)
    if as_json:
        print(json.dumps([one.to_json() for one in found], indent=1))
    if chosen is None:
        raise typer.Exit(EXIT_FAILED)
    lines = _spec_lines(command, chosen, mtbf_s)
    if output is not None:
        _write(output, lines)
    elif not as_json:
        print("\nIn a spec:\n")
        sys.stdout.write(lines)


def _tell(one: Rehearsal) -> None:
    verdict = "survives" if one.survived else "does not survive"
    print(f"{one.level}: {verdict}: {one.why}")
    if one.save_s is not None and one.size is not None and one.resume_s is not None:
        print(
            f"  a save takes {one.save_s:.2f} s and {format_size(one.size)}; "
            f"going on takes {one.resume_s:.2f} s"
        )


def _spec_lines(command: list[str], chosen: Rehearsal, mtbf_s: float) -> str:
    interval, lead = chosen.interval_s(mtbf_s), chosen.lead_s
    level = chosen.level if chosen.level in ("dmtcp", "criu") else "application"
    lines = [f"command: {json.dumps(command)}", f"level: {level}"]
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
