"""Verbs about a run that exists: its output, its history, its end, its next beginning."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from ..errors import SpecError
from .options import AsJson, Root, root_of, run_of


def logs(
    root: Root = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is printed, link after link.")
    ] = False,
    link: Annotated[int | None, typer.Option("--link", help="Of this link [the newest].")] = None,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", min=0, help="Only the last ones [10 with -f].")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What the program printed. Ctrl-C ends -f; so does the end of the chain."""
    from .printing import follow_logs, print_log

    rundir = run_of(root)
    if follow:
        raise typer.Exit(follow_logs(rundir, link, 10 if lines is None else lines, as_json=as_json))
    print_log(rundir, link, lines, as_json=as_json)


def history(root: Root = None, as_json: AsJson = False) -> None:
    """Why each link ended and how that is known, and what befell the chain."""
    from ..chain.history import read_history

    found = read_history(run_of(root))
    if as_json:
        print(json.dumps(found.record()))
        return
    from .tables import console
    from .views import history_view

    console().print(history_view(found))


def watch(root: Root = None, as_json: AsJson = False) -> None:
    """A chain while it runs; reads files every two seconds, never asks the scheduler. Ctrl-C."""
    from .live import watch_chain

    raise typer.Exit(watch_chain(run_of(root), as_json=as_json))


def stop(
    root: Root = None,
    now: Annotated[
        bool, typer.Option("--now", help="Cancel the running job after some seconds to save.")
    ] = False,
    after_checkpoint: Annotated[
        bool, typer.Option("--after-checkpoint", help="Let it work on to its next checkpoint.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Halt a chain: save, end the running link, cancel the pending rest."""
    from ..chain.stopping import BY_THE_USER, How, stop_chain
    from ..chain.sweep import is_sweep
    from ..rundir import RunDir
    from .printing import say_stopped, say_sweep_stopped

    if now and after_checkpoint:
        raise SpecError("--now and --after-checkpoint: choose one")
    how = How.NOW if now else How.AFTER_CHECKPOINT if after_checkpoint else How.SAVE
    rundir = RunDir(root_of(root))
    if is_sweep(rundir.root):
        say_sweep_stopped(rundir.root, how, as_json=as_json)
        return
    say_stopped(rundir, stop_chain(rundir, BY_THE_USER, how), as_json=as_json)


def resume(root: Root = None, as_json: AsJson = False) -> None:
    """Take up a stopped chain or sweep again, with the spec and profile it was submitted with."""
    from ..chain.resume import resume_chain
    from ..chain.sweep import is_sweep

    if is_sweep(root_of(root)):
        _resume_sweep(root_of(root).absolute(), None, as_json=as_json)
        return
    rundir = run_of(root)
    sweep = (rundir.chain() or {}).get("sweep")
    if sweep:
        _resume_sweep(Path(sweep), rundir.root.name, as_json=as_json)
        return
    plan, jobs = resume_chain(rundir, os.environ)
    if as_json:
        print(json.dumps({"root": str(plan.root), "jobs": jobs, "links": plan.links}))
        return
    from .printing import say_submitted

    say_submitted(plan, jobs)


def _resume_sweep(sweep: Path, member: str | None, *, as_json: bool) -> None:
    from ..chain.sweeping import resume_members

    job, names = resume_members(sweep, None if member is None else [member])
    if as_json:
        print(json.dumps({"root": str(sweep), "jobs": [job], "members": names}))
        return
    print(f"submitted array {job}: {len(names)} members of {sweep}")
    print(f"look at it:  hpc-ckpt status {sweep}")


def report(
    root: Root = None,
    for_support: Annotated[
        bool,
        typer.Option("--for-support", help="For those who help you; without known secrets."),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The new .tar.gz file.")
    ] = None,
) -> None:
    """Pack what others need to help, without known secrets: records, logs, versions; no weights."""
    if not for_support:
        raise SpecError("say --for-support: there is no other report in this version")
    from ..chain.support import default_name, write_report
    from .printing import say_reported

    rundir = run_of(root)
    target = Path(default_name(rundir)) if output is None else output
    say_reported(write_report(rundir, target, environ=os.environ))


VERBS = (logs, history, watch, stop, resume, report)
