"""`adopt`: an existing batch script as a chain, shown before anything is written or submitted."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import dataclasses
import difflib
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SpecError, Unanswered
from .options import ProfileName

if TYPE_CHECKING:
    from ..chain.adopt import Adopted
    from ..chain.conflicts import Remark
    from ..chain.layers import Loaded
    from ..chain.plan import Plan
    from ..levels.choice import Choice

MOST_BYTES = 1 << 20
BEFOREHAND = """
The script's exit code decides: 0 says that the work is complete, 75 that it was saved and is to
go on. A program that the time limit kills has failed, and after two such links without a checkpoint
the chain stops. Programs that use hpc_ckpt.Checkpointer do all that by themselves."""


def adopt(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="The script for sbatch.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="SPEC.yaml", help="Write the spec and its script."),
    ] = None,
    submit: Annotated[
        bool, typer.Option("--submit", help="Submit the chain after asking.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    profile: ProfileName = None,
) -> None:
    """Make a chain of an existing batch script; shows what becomes of every line of it."""
    from ..chain.adopt import adopt as adopt_text
    from ..chain.adopt import script_file

    text = _read(script)
    body = (script if output is None else output).parent / script_file(script)
    adopted = adopt_text(text, source=script.name, script=str(body))
    level = _level_of(adopted)
    if level is not None:
        adopted = dataclasses.replace(adopted, spec={**adopted.spec, "level": level.chosen})
    loaded, plan = _plan(adopted.spec, profile, level, submit=submit)
    wishes = {body: adopted.script} if output or submit else {}
    if output is not None:
        wishes[output] = adopted.spec_text(script.name)
    _refuse_others(wishes, force=force)
    if submit:
        _refuse_without_slurm(plan)
    _show(adopted, script, text, body, plan)
    if submit and not yes:
        _ask(adopted)
    made = _write(wishes, _mode(script))
    if submit:
        try:
            _submit(loaded, plan)
        except Unanswered:
            raise  # the chain may be in the queue, and needs its script
        except BaseException:  # as it was, then raised again
            for path in made if output is None else ():
                path.unlink(missing_ok=True)
            raise


def _level_of(adopted: Adopted) -> Choice | None:
    """The script is not there yet, so the plan cannot look into it: its text tells whether it, or
    a program that it calls, saves for itself."""
    from ..levels.base import Work
    from ..levels.choice import Choice
    from ..levels.speaking import speaks_for_itself

    work = Work(argv=("bash", "-c", adopted.script), cwd=Path.cwd(), environ=os.environ)
    spoken = speaks_for_itself(work)
    if spoken is None:
        return None
    return Choice((), "model", spoken.why, fenced=spoken.by_checkpointer)


def _read(script: Path) -> str:
    try:
        with script.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise SpecError(f"{script}: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise SpecError(f"{script}: larger than 1 MiB, so it is not a batch script")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise SpecError(f"{script}: not UTF-8 text") from None


def _plan(
    spec: Mapping[str, Any], profile: str | None, level: Choice | None, *, submit: bool
) -> tuple[Loaded, Plan]:
    """Also the proof that the spec can be loaded."""
    from ..chain import slurm
    from ..chain.layers import ENV_PROFILE, load
    from ..chain.planning import is_of_this_cluster, make_plan

    named = profile or os.environ.get(ENV_PROFILE)
    cwd = Path.cwd()
    loaded = load(
        spec,
        profile=named,
        live_cluster=None if named else slurm.cluster_name(),
        cwd=cwd,
        environ=os.environ,
    )
    live = submit or is_of_this_cluster(loaded)
    return loaded, make_plan(loaded, cwd=cwd, environ=os.environ, live=live, known=level)


# ── showing ───────────────────────────────────────────────────────────────────────────────
def _show(adopted: Adopted, script: Path, text: str, body: Path, plan: Plan) -> None:
    from ..chain.profile import Backend
    from ..chain.render import render
    from .tables import console

    screen = console()
    for title, remarks in _grouped(adopted.remarks):
        screen.print(title, style="bold")
        screen.print(_table(remarks))
    screen.print("\nThe spec", style="bold")
    screen.print(adopted.spec_text(script.name), markup=False, soft_wrap=True, end="")
    if plan.backend is Backend.SLURM:
        batch = render(plan, python=sys.executable)
        _print_diff(text, batch, str(script), "chain.sbatch")
    else:
        print("\nno Slurm here: name a cluster with --profile to see the batch script")
    _print_diff(text, adopted.script, str(script), str(body))
    print(BEFOREHAND)


def _grouped(remarks: tuple[Remark, ...]) -> Iterator[tuple[str, list[Remark]]]:
    from ..chain.conflicts import Fate

    look = [remark for remark in remarks if remark.fate is Fate.LOOK]
    plain = [remark for remark in remarks if remark.fate is not Fate.LOOK]
    if plain:
        yield "What becomes of the options", plain
    if look:
        yield f"\nLook at these ({len(look)})", look


def _table(remarks: list[Remark]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    for name in ("line", "what", "fate", "why"):
        table.add_column(justify="right" if name == "line" else "left", overflow="fold")
    for remark in remarks:
        row = (str(remark.line), remark.what, remark.fate.value, remark.why)
        table.add_row(*map(Text, row))
    return table


def _print_diff(old: str, new: str, old_name: str, new_name: str) -> None:
    from rich.text import Text

    from .tables import console

    styles = {"+": "green", "-": "red", "@": "cyan"}
    screen = console()
    screen.print()
    lines = difflib.unified_diff(
        old.splitlines(), new.splitlines(), old_name, new_name, lineterm="", n=3
    )
    for line in lines:
        screen.print(Text(line, styles.get(line[:1], "")), soft_wrap=True)


# ── doing ─────────────────────────────────────────────────────────────────────────────────
def _refuse_without_slurm(plan: Plan) -> None:
    from ..chain.profile import Backend

    if plan.backend is not Backend.SLURM:
        raise SpecError("no Slurm here: name a cluster with --profile, or write the spec with -o")


def _refuse_others(wishes: Mapping[Path, str], *, force: bool) -> None:
    for path, text in wishes.items():
        if force or not os.path.lexists(path):
            continue
        if not path.is_file() or path.read_bytes() != text.encode():
            raise SpecError(f"{path}: is there already; --force replaces it")


def _ask(adopted: Adopted) -> None:
    if not sys.stdin.isatty():
        raise SpecError("nobody can be asked here: look at the differences, then say --yes")
    open_ones = sum(remark.fate.value == "look at it" for remark in adopted.remarks)
    looks = f" ({open_ones} things to look at above)" if open_ones else ""
    if not typer.confirm(f"\nSubmit this chain?{looks}"):
        print("nothing was written or submitted")
        raise typer.Exit(1)


def _mode(script: Path) -> int:
    """What is made of a script is for the same people to read: it may have secrets in it."""
    try:
        return stat.S_IMODE(script.stat().st_mode) & 0o777 | stat.S_IRUSR
    except OSError as error:
        raise SpecError(f"{script}: {error.strerror}") from None


def _write(wishes: Mapping[Path, str], mode: int) -> list[Path]:
    """The files that were not there before; a spec is not to be executed."""
    from .. import fsio

    made = [path for path in wishes if not os.path.lexists(path)]
    for path, text in wishes.items():
        try:
            fsio.write_atomic(path, text.encode())
            path.chmod(mode if path.suffix == ".sh" else mode & 0o666)
        except OSError as error:
            raise SpecError(f"{path}: {error.strerror}") from None
        print(f"wrote {path}")
    return made


def _submit(loaded: Loaded, plan: Plan) -> None:
    from ..chain.submit import submit_loaded
    from .printing import say_submitted

    job = submit_loaded(loaded, plan, environ=os.environ)
    say_submitted(plan, job)
