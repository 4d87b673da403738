"""Cancels many jobs by one scancel. Standard library only: the link runner asks it too."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..errors import SchedulerError
from . import slurm
from .slurm import Runner

AT_ONCE = 1000
"""Jobs that are named in one scancel: a command line has an end."""
_GONE = ("Invalid job id", "already completing or completed")


def cancel_pending(jobs: Sequence[str], run: Runner | None = None) -> list[str]:
    """Cancel what has not begun; what runs is asked to save through its notice.

    The newest first: what waits for another may begin when that one is gone.
    """
    done = cancel_all(reversed(jobs), "--state=PENDING", run=run)
    return [job for job in jobs if job in done]


def cancel_all(jobs: Iterable[str], *options: str, run: Runner | None = None) -> list[str]:
    """Those that Slurm has forgotten are no error, and not among the ids that are returned.

    A scheduler that does not answer is asked once, not for every job.
    """
    wanted = list(dict.fromkeys(jobs))
    done: list[str] = []
    for place in range(0, len(wanted), AT_ONCE):
        some = wanted[place : place + AT_ONCE]
        gone: list[str] = []
        try:
            (run or slurm.run_command)(["scancel", *options, *some])
        except SchedulerError as error:
            gone = [line for line in error.stderr.splitlines() if line.strip()]
            if not gone or not all(any(word in line for word in _GONE) for line in gone):
                raise
        named = set(re.findall(r"\w+", " ".join(gone)))
        if len(gone) < len(some):
            done += [job for job in some if job not in named]
    return done
