"""Jobs of other people that a site hides (PrivateData=jobs): Slurm says of them what it says of
jobs that are over. In a root that a group shares a chain may be such a one's.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import re
import time
from collections.abc import Iterable

from .. import lease
from ..errors import RootError, SchedulerError
from ..ownership import is_of_another
from ..rundir import RunDir
from . import slurm
from .ledger import may_be_over
from .past import jobs_of

LATE_S = 300.0
"""A job may run over its end by its kill wait, and clocks differ."""


def are_hidden(config: str) -> bool:
    """From `scontrol show config`: whether others' jobs are."""
    found = re.search(r"^\s*PrivateData[ \t]*=[ \t]*(\S+)", config, re.MULTILINE)
    return found is not None and not {"jobs", "all"}.isdisjoint(found[1].lower().split(","))


def refuse_if_hidden(rundirs: Iterable[RunDir]) -> None:
    """Raises where somebody else has a chain in one of them whose jobs may run, or begin, unseen.
    At most one question for all."""
    refused = next(filter(None, map(_in_the_way, rundirs)), None)
    if refused is not None and _may_be_hidden():
        raise refused


def _in_the_way(rundir: RunDir) -> RootError | None:
    return _running(rundir) or _to_begin(rundir)


def _running(rundir: RunDir) -> RootError | None:
    """Its last link has not given its lease back."""
    last = lease.highest(rundir)
    holder = None if lease.released(rundir, last) else lease.holder_of(rundir, last)
    if holder is None or holder.job is None or not holder.is_foreign:
        return None
    deadline = rundir.deadline(last)
    if deadline is not None and time.time() > deadline + LATE_S:
        return None
    return RootError(
        rundir.root,
        f"job {holder.job} of another user has not said that it is over, and this site hides the "
        "jobs of others: it may be at work. Wait for its end, or let its user stop it with "
        f"'hpc-ckpt stop {rundir.root}'; if it is surely over, make the file "
        f"{lease.file_of(rundir, last)}.released",
    )


def _to_begin(rundir: RunDir) -> RootError | None:
    """Between two links, or before the first, nothing but its jobs tells that it goes on."""
    if may_be_over(rundir) or not is_of_another(rundir.chain_file):
        return None
    jobs = jobs_of(rundir)
    if not jobs:
        return None
    return RootError(
        rundir.root,
        f"another user has submitted it (job {', '.join(jobs)}), it has neither ended nor been "
        "stopped, and this site hides the jobs of others: its next link may begin at any moment. "
        f"Let its user stop it with 'hpc-ckpt stop {rundir.root}'; if all its jobs are surely "
        f"over, make the file {rundir.halt_file}",
    )


def _may_be_hidden() -> bool:
    try:
        return are_hidden(slurm.run_command(["scontrol", "show", "config"]))
    except SchedulerError:
        return True  # nobody can tell
