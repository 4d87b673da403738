"""What the queue has of a chain: the next job, jobs that never begin by themselves, or nothing.

Slurm holds a job whose node could not start it, or that it has requeued too often; accounts and
limits change while a chain runs; jobs are cancelled, and nodes are lost with theirs. A chain
without a job behind that one then waits for ever, and no link of it runs that could say so.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import dataclasses
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .. import events, lease
from ..errors import SchedulerError
from ..events import Event
from ..rundir import RunDir
from . import slurm
from .ledger import ChainStatus, LinkSummary, NextJob, State, read_status
from .reasons import not_allowed
from .slurm import InQueue, Runner, run_command
from .sweep import SWEEP_FILE, MemberStatus, SweepMember, SweepStatus, own_jobs
from .unanswered import running_script

_ask_shortly: Runner = partial(run_command, timeout_s=slurm.IS_IT_THERE_TIMEOUT_S)
AT_MOST_NAMED = 8
SETTLED_S = 60.0
"""A chain that was submitted, or whose link ended, less than this ago may not be seen whole: files
of other nodes are seen late, and so may a new job be."""
_OVER = (State.STOPPED, State.COMPLETE)
_BEHIND_ANOTHER = ("Dependency", "JobArrayTaskLimit")


# ── a chain ───────────────────────────────────────────────────────────────────────────────
def with_stuck_jobs(
    status: ChainStatus, run: Runner = _ask_shortly, now: float | None = None
) -> ChainStatus:
    """The same, and what the queue has of it; one squeue, and none for a chain that is over."""
    now = time.time() if now is None else now
    rundir = RunDir(status.root)
    record = rundir.chain() or {}
    if status.state in _OVER or not status.jobs or _runs_here(status, record):
        return status
    queue = _queue(rundir.chain_file, run)
    if queue is None:
        return status
    ours = _of_chain(rundir, record, status.jobs, queue)
    gone, following = _gone_link(status, ours), _next_job(ours)
    elsewhere = _elsewhere(rundir, run) if gone is not None or not ours else None
    if elsewhere is not None:
        return dataclasses.replace(status, remark=elsewhere)
    if gone is not None:
        quiet = _settled(now, *_traces(rundir, gone.generation))
        # It may have ended just now.
        status = read_status(rundir, now, gone=gone.generation if quiet else None)
        if status.state is State.RUNNING:
            return dataclasses.replace(status, next_job=following)
        if status.state is not State.BETWEEN:
            return status
    told = [*filter(None, [status.remark])]
    if gone is not None and not lease.released(rundir, gone.generation):
        told.append(_say_gone(gone, following))
    if not ours and _settled(now, rundir.chain_file, rundir.lease):
        told.append(f"nothing of this chain is in this cluster's queue: {_again(status, record)}")
    elif not any(one.will_begin and one.reason != "Dependency" for one in ours):
        told += _advice(ours, status.root)  # otherwise any index runs the next link
    return dataclasses.replace(status, remark="\n".join(told), next_job=following)


def _runs_here(status: ChainStatus, record: Mapping[str, Any]) -> bool:
    """Jobs of an earlier submission are no matter to a chain of this machine."""
    local = (record.get("profile") or {}).get("backend") == "local"
    return local or (status.state is State.RUNNING and status.links[-1].job is None)


def _of_chain(
    rundir: RunDir, record: Mapping[str, Any], jobs: Collection[str], queue: Sequence[InQueue]
) -> list[InQueue]:
    """Also what runs its script and nobody wrote down: a submission whose answer was lost."""
    member = record.get("member")
    indices = None if member is None else (int(member["index"]),)
    script = Path(record.get("sweep") or rundir.root) / "chain.sbatch"
    known = {one.id for one in running_script(queue, script, indices)}
    return [one for one in queue if one.is_of(jobs) or one.id in known]


def _gone_link(status: ChainStatus, ours: Iterable[InQueue]) -> LinkSummary | None:
    """The link that runs by its files, if its job does not: its node was lost, or it was killed."""
    if status.state is not State.RUNNING:
        return None
    link = status.links[-1]
    alive = any(one.id == link.job and one.state != "PENDING" for one in ours)
    return None if alive else link


def _next_job(ours: Iterable[InQueue]) -> NextJob | None:
    pending = [one for one in ours if one.state == "PENDING"]
    first = min(pending, key=_turn, default=None)
    return None if first is None else NextJob(first.id, first.reason)


def _turn(job: InQueue) -> tuple[bool, bool, list[int]]:
    """Its place among those that wait: what can begin is before what waits for it."""
    numbers = [int(number) for number in re.findall(r"\d+", job.id)]
    return not job.will_begin, job.reason in _BEHIND_ANOTHER, numbers


def _say_gone(link: LinkSummary, following: NextJob | None) -> str:
    said = (
        f"link {link.generation} is gone: its job {link.job} does not run any more, and it left no "
        "record of its end"
    )
    if following is None:
        return said
    return f"{said}; job {following.id} goes on from the newest checkpoint"


def _again(status: ChainStatus, record: Mapping[str, Any]) -> str:
    if "spec" not in record:
        return "submit its task again"  # one of submitit
    return f"take it up again with 'hpc-ckpt resume {status.root}'"


# ── a sweep ───────────────────────────────────────────────────────────────────────────────
def with_stuck_members(
    status: SweepStatus, run: Runner = _ask_shortly, now: float | None = None
) -> SweepStatus:
    """The same of a sweep, where each index is a chain; one squeue for all members."""
    now = time.time() if now is None else now
    left = [member for member in status.members if State(member.state) not in _OVER]
    sweep_file = Path(status.root, SWEEP_FILE)
    queue = _queue(sweep_file, run) if left and status.jobs else None
    if queue is None:
        return status
    script = {one.id for one in running_script(queue, Path(status.root, "chain.sbatch"))}
    ours = [one for one in queue if one.is_of(status.jobs) or one.id in script]
    told = _advice(ours, status.root)
    if _settled(now, sweep_file):
        indices = {one.id.partition("_")[2] for one in ours}
        missed = [member for member in left if str(member.index) not in indices]
        stranded = [one.name for one in missed if _is_stranded(status, one, queue, now)]
        elsewhere = _elsewhere(RunDir(Path(status.root, stranded[0])), run) if stranded else None
        if elsewhere is not None:
            return dataclasses.replace(status, remark=elsewhere)
        told += _say_stranded(status.root, stranded, every=len(stranded) == len(left))
    waiting = Counter(one.reason for one in ours if one.state == "PENDING")
    return dataclasses.replace(status, remark="\n".join(told), waiting=dict(waiting))


def _is_stranded(
    status: SweepStatus, member: MemberStatus, queue: Sequence[InQueue], now: float
) -> bool:
    """Whether the queue has nothing of a member whose index is not there: its files name others."""
    rundir = RunDir(Path(status.root, member.name))
    own = own_jobs(SweepMember(member.index, member.name, {}, rundir), status.jobs)
    traces = _traces(rundir, lease.highest(rundir))
    if any(one.is_of(own) for one in queue) or not _settled(now, *traces):
        return False
    if member.state == State.RUNNING.value:
        holder = lease.holder_of(rundir, lease.highest(rundir))
        if holder is None or holder.job is None:
            return False  # on this machine
    return rundir.done() is None and rundir.halted() is None  # it may have ended just now


def _say_stranded(root: str, names: Sequence[str], *, every: bool) -> list[str]:
    if not names:
        return []
    which = ", ".join([*names[:AT_MOST_NAMED], *(["…"] if len(names) > AT_MOST_NAMED else [])])
    which = f"{len(names)} members ({which}) are" if len(names) > 1 else f"member {which} is"
    place = root if every else str(Path(root, names[0] if len(names) == 1 else "MEMBER"))
    return [
        f"{which} not over, and nothing of that is in this cluster's queue: take it up again with "
        f"'hpc-ckpt resume {place}'"
    ]


# ── the queue ─────────────────────────────────────────────────────────────────────────────
def _queue(submitted: Path, run: Runner) -> list[InQueue] | None:
    """All that this user has there. None: on another machine, while Slurm is away, or for a chain
    that somebody else has submitted, the files are all there is."""
    try:
        return slurm.in_queue(run) if submitted.stat().st_uid == os.getuid() else None
    except (OSError, SchedulerError):
        return None


def _elsewhere(rundir: RunDir, run: Runner) -> str | None:
    """What to say where this cluster is not the one of the newest link, as in a home that several
    share: its jobs are not in this queue, and that means nothing."""
    begun = [
        record.get("cluster")
        for record in events.read(rundir.ledger_file(lease.highest(rundir)))
        if record["event"] == Event.LINK_STARTED.value
    ]
    own = begun[-1] if begun else None
    here = None if own is None else slurm.cluster_name(run)
    if here is None or here == own:
        return None
    return f"asked on another cluster than its own ({own}): only its files are known here"


def _traces(rundir: RunDir, generation: int) -> list[Path]:
    """What a link writes while it lives."""
    name = f"{generation:08d}"
    written = [*rundir.ledger.glob(f"{name}.*"), *rundir.events.glob(f"{name}-*")]
    return [rundir.chain_file, rundir.lease, *written]


def _settled(now: float, *paths: Path) -> bool:
    """Whether nothing has been submitted, written, begun or ended for a while."""
    try:
        return now - max(path.stat().st_mtime for path in paths) > SETTLED_S
    except OSError:
        return False


def _advice(ours: Iterable[InQueue], root: str) -> list[str]:
    by_reason: dict[str, list[InQueue]] = {}
    for one in ours:
        if one.is_stuck:
            by_reason.setdefault(one.reason, []).append(one)
    return [_say(reason, many, root) for reason, many in by_reason.items()]


def _say(reason: str, jobs: Sequence[InQueue], root: str) -> str:
    few = len(jobs) <= AT_MOST_NAMED
    named = list(dict.fromkeys(one.id if few else one.array for one in jobs))
    which = f"job {', '.join(named)}"
    said = f"{which} never begins by itself"
    if not few:
        said = f"{len(jobs)} members of {which} never begin by themselves"
    said = f"{said} ({reason}): "
    if "Dependency" in reason:
        return f"{said}end it with 'hpc-ckpt stop {root}', then 'hpc-ckpt resume {root}'"
    if "Admin" in reason:
        return f"{said}ask those who run this cluster to release it"
    if not_allowed(reason):
        return (
            f"{said}the site does not give it what it asks for. Ask those who run this cluster; "
            f"or 'hpc-ckpt stop {root}', change the spec, and 'hpc-ckpt submit' it again"
        )
    return f"{said}its node may be at fault; try again with 'scontrol release {','.join(named)}'"
