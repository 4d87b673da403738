"""`profile generate` and `doctor`: what a cluster says of itself, and whether a profile fits it."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import EXIT_COMPLETE, EXIT_FAILED, SchedulerError, SpecError

if TYPE_CHECKING:  # at run time every verb would pay for them
    from rich.table import Table
    from rich.text import Text

    from ..chain.doctor import Diagnosis
    from ..chain.findings import Finding

profile_verbs = typer.Typer(no_args_is_help=True, help="The profile of a site.")


@profile_verbs.command("generate")
def generate(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Instead of the screen.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a profile from what the live cluster says of itself."""
    from ..chain.generate import profile_text
    from ..chain.layers import Places
    from ..chain.survey import take_survey

    if output is not None and output.exists() and not force:
        raise SpecError(f"{output}: is there already; --force replaces it")
    try:
        survey = take_survey()
    except SchedulerError as error:
        raise SpecError(
            f"no Slurm answers on this machine ({error.stderr}): run it on a login node"
        ) from None
    text = profile_text(survey)
    if output is None:
        sys.stdout.write(text)
        return
    _write(output, text)
    user = Places.usual(Path.cwd(), os.environ).user
    folder = f"{user or '/etc/hpc_ckpt'}/clusters"
    print(f"written: {output}")
    print(f"found by name there:  {folder}/{survey.config.cluster or 'NAME'}.yaml")
    print(f"check it:             hpc-ckpt doctor --profile {_path(output)}")


def _write(output: Path, text: str) -> None:
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{output}: {error.strerror}") from None


def _path(output: Path) -> str:
    """As --profile takes it: a name without a slash is looked up."""
    return str(output) if "/" in str(output) else f"./{output}"


def doctor(
    profile: Annotated[
        str | None, typer.Option("--profile", help="The site's profile: a name or a path.")
    ] = None,
    no_job: Annotated[bool, typer.Option("--no-job", help="Only ask; submit nothing.")] = False,
    partition: Annotated[
        str | None, typer.Option("--partition", help="Where the trial job runs [the default].")
    ] = None,
    root: Annotated[Path, typer.Option("--root", help="A directory where runs will be.")] = Path(),
    wait: Annotated[str, typer.Option("--wait", help="The longest the job may take.")] = "120s",
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Compare a profile with the live cluster, and try its signals in a small job."""
    from ..chain.doctor import Options, diagnose
    from ..units import parse_duration

    options = Options(
        profile=profile, job=not no_job, partition=partition, root=root, wait_s=parse_duration(wait)
    )
    diagnosis = diagnose(options, cwd=Path.cwd(), environ=os.environ, say=_say)
    if as_json:
        print(json.dumps(dataclasses.asdict(diagnosis) | {"wrong": diagnosis.wrong}))
    else:
        from .tables import console

        screen = console()
        screen.print(findings_table(diagnosis.findings))
        screen.print(f"\n{summary(diagnosis)}")
    raise typer.Exit(EXIT_FAILED if diagnosis.wrong else EXIT_COMPLETE)


def _say(text: str) -> None:
    print(f"hpc-ckpt: {text}", file=sys.stderr)


_STYLE = {"ok": "green", "note": "yellow", "wrong": "bold red"}


def findings_table(findings: tuple[Finding, ...]) -> Table:
    """One row each; what the profile says and what to do stand below what was seen."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(max_width=24, overflow="fold")
    table.add_column(overflow="fold")
    for finding in findings:
        grade = Text(finding.grade.value, _STYLE[finding.grade.value])
        table.add_row(grade, Text(finding.what), _told(finding))
    return table


def _told(finding: Finding) -> Text:
    from rich.text import Text

    text = Text(finding.seen)
    if finding.said:
        text.append(f"\nprofile: {finding.said}", "dim")
    if finding.advice:
        text.append(f"\n→ {finding.advice}")
    return text


def summary(diagnosis: Diagnosis) -> str:
    from .tables import count

    notes = sum(finding.grade.value == "note" for finding in diagnosis.findings)
    about = f"profile of {diagnosis.cluster}: {count(len(diagnosis.findings), 'thing')} looked at"
    told = f"{diagnosis.wrong or 'nothing'} wrong, {count(notes, 'note')}"
    return f"{about}, {told}"
