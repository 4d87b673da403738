"""Arguments that several verbs share."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import SpecError

if TYPE_CHECKING:
    from ..rundir import RunDir

Root = Annotated[
    Path | None,
    typer.Argument(
        metavar="ROOT", help="The run directory; 'last' is your newest run [$HPC_CKPT_ROOT]."
    ),
]
ProfileName = Annotated[
    str | None, typer.Option("--profile", help="The site's profile: a name or a path.")
]
AsJson = Annotated[bool, typer.Option("--json", help="For machines.")]
EXIT_INTERRUPTED = 130
MOST_MEMBERS = 10
"""Of a sweep, named in a message."""


def root_of(root: Path | None) -> Path:
    """The run that is meant; SpecError if nothing says which."""
    told = os.environ.get("HPC_CKPT_ROOT")
    chosen = root or (Path(told) if told else None)
    if chosen is None:
        raise SpecError("which run? Give its directory, or set HPC_CKPT_ROOT")
    return _last() if str(chosen) == "last" else chosen


def _last() -> Path:
    """The newest run, unless a run here is called so."""
    from ..chain.runs import is_run, last_run

    if is_run(Path("last")):
        return Path("last")
    found = last_run(os.environ)
    if found is None:
        raise SpecError("last: no run of yours is known on this machine; give its directory")
    return found


def place_of(root: Path | None) -> Path:
    """The same for verbs about one run: a sweep is many, so one of them must be named."""
    from ..chain.sweep import is_sweep, members
    from ..errors import RootError

    place = root_of(root)
    if not is_sweep(place):
        return place
    roots = [str(place / member.name) for member in members(place)]
    shown = [*roots[:MOST_MEMBERS], *(["…"] if len(roots) > MOST_MEMBERS else [])]
    raise RootError(
        place,
        f"a sweep of {len(roots)} runs; 'hpc-ckpt status {place}' shows all of them, this verb "
        "wants one:\n  " + "\n  ".join(shown),
    )


def run_of(root: Path | None) -> RunDir:
    """The run directory that is meant, which must be one."""
    from ..errors import RootError
    from ..rundir import RunDir

    rundir = RunDir(place_of(root))
    if not rundir.lease.is_dir():
        raise RootError(rundir.root, "no run there; give the root of a run")
    return rundir
