"""Jobs that were submitted although sbatch did not say so, found by the script that they run.

The script lies in the run directory, so its name tells whose chain a job is. It is a field of
every job that neither users nor sites write into, as they do with names and comments.

Standard library only: the link runner asks too.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from ..errors import SchedulerError, Unanswered
from . import slurm
from .slurm import InQueue, Runner, run_command


def running_script(
    queue: Iterable[InQueue], script: Path, indices: Collection[int] | None = None
) -> list[InQueue]:
    """Of `queue`, what was submitted with this script; of a sweep's, these indices alone."""
    names = {str(script), os.path.realpath(script)}
    wanted = None if indices is None else {str(index) for index in indices}
    found = [one for one in queue if one.script in names]
    return [one for one in found if wanted is None or one.id.partition("_")[2] in wanted]


def arrays_unknown(found: Iterable[InQueue], known: Collection[str]) -> list[str]:
    """The arrays or jobs among these that nobody wrote down."""
    return list(dict.fromkeys(one.array for one in found if not one.is_of(known)))


def submit(
    script: Path,
    *options: str,
    known: Collection[str] = (),
    indices: Collection[int] | None = None,
    run: Runner = run_command,
) -> str:
    """The id of the job or array. If the answer is lost, the queue is asked for it, once.

    `known`: the jobs of this script, or of its `indices`, that live and are written down.
    Raises SchedulerError if sbatch refused, Unanswered if nobody knows.
    """
    try:
        return slurm.submit_script(script, *options)
    except SchedulerError as error:
        if not slurm.may_have_submitted(error):
            raise
        lost = Unanswered(error.command, error.returncode, error.stderr)
    try:
        found = arrays_unknown(running_script(slurm.in_queue(run), script, indices), known)
    except SchedulerError:
        raise lost from None
    if not found:
        raise lost
    return found[-1]
