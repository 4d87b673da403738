"""What a new link finds out about those before it. Standard library only: the runner asks it."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging

from .. import events, lease
from ..events import Event, EventLog
from ..rundir import RunDir
from . import setup
from .backend import Backend, Succession
from .orders import Orders
from .past import bad_hosts, hosts_excluded, past_links, present_jobs
from .verdict import Verdict, explain

log = logging.getLogger("hpc_ckpt.link")


def explain_last(
    rundir: RunDir, generation: int, orders: Orders, backend: Backend, ledger: EventLog
) -> None:
    """Write down how the last link that began ended, if it could not do so itself."""
    for earlier in range(generation - 1, orders.after_generation, -1):
        records = list(events.read(rundir.ledger_file(earlier)))
        if not any(record["event"] == Event.LINK_STARTED.value for record in records):
            continue  # it found nothing to do
        holder = lease.holder_of(rundir, earlier)
        job = None if holder is None else holder.job
        verdict = explain(rundir, earlier, backend, orders.batch_logs / f"slurm-{job}.log")
        if verdict is not None:
            _write_down(rundir, earlier, records, verdict, ledger)
        return


def cancelled_unseen(rundir: RunDir, orders: Orders, backend: Backend) -> str | None:
    """An index that was cancelled before it could write anything down.

    The other indices of a sweep's array are other chains.
    """
    if orders.member is not None:
        return None
    holders = (lease.holder_of(rundir, generation) for generation in lease.generations(rundir))
    known = {(holder.job, holder.restarts) for holder in holders if holder is not None}
    cancelled = backend.cancelled_members(_job_before(rundir, backend))
    return next((job for job, n in cancelled if (job, n) not in known), None)


def _job_before(rundir: RunDir, backend: Backend) -> str | None:
    """Of jobs that follow each other, the one in front of this; those before it were asked for,
    and those of an earlier submission its user knows."""
    jobs, own = present_jobs(rundir), backend.holder().job
    place = jobs.index(own) if own in jobs else 0
    return jobs[place - 1] if place else None


def _write_down(
    rundir: RunDir,
    generation: int,
    records: list[dict[str, object]],
    verdict: Verdict,
    ledger: EventLog,
) -> None:
    begun_at = [r.get("step") for r in records if r["event"] == Event.LINK_STARTED.value][-1]
    step_from = begun_at if isinstance(begun_at, int) else 0
    keys = [key.step for key in rundir.all_keys() if key.generation == generation]
    ledger.emit(
        Event.LINK_EXPLAINED,
        generation=generation,
        cause=verdict.cause,
        reason=verdict.reason,
        evidence=list(verdict.evidence),
        progress=verdict.progress(step_from, max(keys, default=step_from)),
        last_seen=_last_seen(rundir, generation),
    )
    log.info("link %d before: %s (%s)", generation, verdict.cause.value, verdict.reason)


def _last_seen(rundir: RunDir, generation: int) -> float | None:
    """When its program last wrote an event."""
    paths = rundir.events.glob(f"{generation:08d}-*.jsonl")
    moments = [r.get("time") for path in paths for r in events.read(path)]
    return max((float(m) for m in moments if isinstance(m, (int, float))), default=None)


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
