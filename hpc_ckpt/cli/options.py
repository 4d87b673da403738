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


def root_of(root: Path | None) -> Path:
    """The run that is meant; SpecError if nothing says which."""
    told = os.environ.get("HPC_CKPT_ROOT")
    chosen = root or (Path(told) if told else None)
    if chosen is None:
        raise SpecError("which run? Give its directory, or set HPC_CKPT_ROOT")
    return _last() if str(chosen) == "last" and not (chosen / "lease").is_dir() else chosen


def _last() -> Path:
    from ..chain.runs import last_run

    found = last_run(os.environ)
    if found is None:
        raise SpecError("last: no run of yours is known on this machine; give its directory")
    return found


def run_of(root: Path | None) -> RunDir:
    """The run directory that is meant, which must be one."""
    from ..errors import RootError
    from ..rundir import RunDir

    rundir = RunDir(root_of(root))
    if not rundir.lease.is_dir():
        raise RootError(rundir.root, "no run there; give the root of a run")
    return rundir
