"""What a new link finds out about those before it. Standard library only: the runner asks it."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from .. import events, lease
from ..events import Event, EventLog
from ..lease import Holder
from ..rundir import Result, RunDir
from . import setup
from .backend import Backend, Cause, JobRecord, Succession
from .orders import HALT, Orders
from .past import (
    bad_hosts,
    explanations,
    hosts_excluded,
    past_links,
    present_jobs,
    ran_nothing,
)
from .patience import sleep_unless_told
from .verdict import Verdict, explain

log = logging.getLogger("hpc_ckpt.link")

ENDING_S = 120.0
"""A job whose link is over may still be on its way out, in an epilog: only then does Slurm say what
it was. A controller that does not answer may be back by then, too."""
ASK_AGAIN_S = 5.0
LONGEST_PAUSE_S = 30.0
"""Pauses double up to this: a site that is back has every one of its chains asking."""

T = TypeVar("T")


def look_back(
    rundir: RunDir, generation: int, orders: Orders, backend: Backend, ledger: EventLog
) -> str | None:
    """Writes down why the last link ended; why the chain does, if an index was cancelled before it
    could write anything. ToldToStop: this link was, while it waited for an answer."""
    cancelled = cancelled_unseen(rundir, orders, backend)
    if cancelled is not None and orders.reaction(Cause.CANCELLED) == HALT:
        return f"cancelled by the user: {cancelled}, before it began"
    explain_last(rundir, generation, orders, backend, ledger)
    return None


def explain_last(
    rundir: RunDir, generation: int, orders: Orders, backend: Backend, ledger: EventLog
) -> None:
    """Write down how the last link that began ended, if it could not do so itself, or why, if
    nobody had told it. ToldToStop: this link was, while it waited for that."""
    known: set[int] = set()
    for earlier in range(generation - 1, orders.after_generation, -1):
        records = list(events.read(rundir.ledger_file(earlier)))
        if not any(record["event"] == Event.LINK_STARTED.value for record in records):
            continue  # it found nothing to do
        if earlier not in known:
            _explain(rundir, earlier, records, orders, backend, ledger)
        if not ran_nothing(records):
            return
        known |= explanations(records).keys()  # else it was told to stop before it could ask


def _explain(
    rundir: RunDir,
    earlier: int,
    records: list[dict[str, Any]],
    orders: Orders,
    backend: Backend,
    ledger: EventLog,
) -> None:
    holder = lease.holder_of(rundir, earlier)
    job = None if holder is None else holder.job
    batch = orders.batch_logs / f"slurm-{job}.log"
    verdict = explain(rundir, earlier, partial(_explained, backend), batch)
    verdict = verdict or _told_late(records, holder, orders, backend)
    if verdict is not None:
        ended = _within(rundir, earlier, verdict.ended, backend.kill_wait_s)
        verdict = replace(verdict, ended=ended)
        _write_down(rundir, earlier, records, verdict, ledger)


def _within(
    rundir: RunDir, generation: int, ended: float | None, kill_wait_s: float
) -> float | None:
    """A job that was put back tells only when that was: days later, if the whole site was down."""
    given = rundir.deadline(generation)
    return ended if ended is None or given is None else min(ended, given + kill_wait_s)


def _told_late(
    records: list[dict[str, Any]], holder: Holder | None, orders: Orders, backend: Backend
) -> Verdict | None:
    """Why TERM came to a link that has ended in good order, but had no answer to that. A job that
    is back in the queue tells nothing where the chain itself puts it there."""
    unknown = [r for r in records if r.get("cause_unknown") is True]
    if not unknown or holder is None:
        return None
    record = _explained(backend, holder)
    back = record.restarted or record.cause is Cause.REQUEUED
    if record.cause is None or (back and orders.strategy == "requeue"):
        return None
    result = Result(unknown[-1]["outcome"]) if unknown[-1].get("outcome") else None
    reason = f"{unknown[-1].get('reason')}; Slurm told the next link why"
    return Verdict(
        result, record.cause, reason,
        evidence=(record.said,), ended=float(unknown[-1]["time"]),
    )  # fmt: skip


def _explained(backend: Backend, holder: Holder, known: bool = False) -> JobRecord:
    def may_say_more(record: JobRecord) -> bool:
        return not known and record.cause is None and (record.ending or record.unanswered)

    return _asked(lambda: backend.explain(holder), may_say_more)


def _asked(ask: Callable[[], T], may_say_more: Callable[[T], bool]) -> T:
    """Again, ever less often, while the scheduler may say more by and by."""
    end, pause = time.monotonic() + ENDING_S, ASK_AGAIN_S
    while True:
        found = ask()
        if not may_say_more(found) or time.monotonic() >= end:
            return found
        sleep_unless_told(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def cancelled_unseen(rundir: RunDir, orders: Orders, backend: Backend) -> str | None:
    """An index that was cancelled before it could write anything down. ToldToStop: this link was,
    while it waited for an answer.

    The other indices of a sweep's array are other chains.
    """
    if orders.member is not None:
        return None
    generations = lease.generations(rundir)
    holders = (lease.holder_of(rundir, generation) for generation in generations)
    known = {(holder.job, holder.restarts) for holder in holders if holder is not None}
    is_first = len(generations) < 2
    before = _job_before(rundir, backend)
    cancelled = _asked(
        lambda: backend.cancelled_members(before), lambda found: found is None and not is_first
    )
    return next((job for job, n in cancelled or () if (job, n) not in known), None)


def _job_before(rundir: RunDir, backend: Backend) -> str | None:
    """Of jobs that follow each other, the one in front of this; those before it were asked for,
    and those of an earlier submission its user knows."""
    jobs, own = present_jobs(rundir), backend.holder().job
    place = jobs.index(own) if own in jobs else 0
    return jobs[place - 1] if place else None


def _write_down(
    rundir: RunDir,
    generation: int,
    records: list[dict[str, Any]],
    verdict: Verdict,
    ledger: EventLog,
) -> None:
    started = [r for r in records if r["event"] == Event.LINK_STARTED.value][-1]
    begun_at = started.get("step")
    step_from = begun_at if isinstance(begun_at, int) else 0
    ended = [r for r in records if r["event"] == Event.LINK_ENDED.value]
    got_on = any(r.get("progress") is True for r in ended)  # it knew better: of phases, of codes
    keys = [key.step for key in rundir.all_keys() if key.generation == generation]
    ledger.emit(
        Event.LINK_EXPLAINED,
        generation=generation,
        cause=verdict.cause,
        reason=verdict.reason,
        evidence=list(verdict.evidence),
        progress=got_on or verdict.progress(step_from, max(keys, default=step_from)),
        last_seen=_last_seen(rundir, generation, float(started["time"]), verdict.ended),
    )
    log.info("link %d before: %s (%s)", generation, verdict.cause.value, verdict.reason)


def _last_seen(rundir: RunDir, generation: int, began: float, ended: float | None) -> float:
    """What its budget is charged up to: the end of its job, its last event or output; where nobody
    knows any of them, the end that it was given."""
    paths = rundir.events.glob(f"{generation:08d}-*.jsonl")
    told = [r.get("time") for path in paths for r in events.read(path)]
    moments = [*told, ended, _written(rundir.log_file(generation), began)]
    known = [float(moment) for moment in moments if isinstance(moment, (int, float))]
    known = [moment for moment in known if moment >= began]
    now, deadline = time.time(), rundir.deadline(generation)
    return min(now, max(known) if known else deadline or now)


def _written(path: Path, began: float) -> float | None:
    """When a program last wrote to its log. srun makes it as it starts: empty, or of that moment,
    it tells nothing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime if found.st_size and found.st_mtime > began else None


def avoid_bad_hosts(
    rundir: RunDir, last: int, orders: Orders, succession: Succession, ledger: EventLog
) -> None:
    """Hosts on which links failed repeatedly get no further ones."""
    avoided = [*orders.exclude, *setup.bad_nodes(orders)]
    links = past_links(rundir, orders.after_generation, last)
    bad = bad_hosts(links, orders.exclude_after, setup.one_by_one(avoided))
    known = hosts_excluded(rundir)
    every = list(dict.fromkeys([*avoided, *bad]))
    if set(bad) != set(known) and succession.avoid(every):
        ledger.emit(Event.HOSTS_EXCLUDED, hosts=bad)
        log.warning("hosts to which no link goes, for links failed there: %s", bad or "none now")
