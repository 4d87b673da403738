"""What the ledgers say of earlier links: how each ended, on which host, what it used.

The history as the runner needs it, cheap and without judgement; ledger.py tells it to people.
Standard library only.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import events, lease
from ..events import Event
from ..rundir import RunDir
from .backend import Cause


@dataclass(frozen=True)
class PastLink:
    """One link that began."""

    generation: int
    host: str
    cause: Cause | None
    """None: it left no record of its end, and nobody has explained it."""
    progress: bool | None
    """None: it says nothing about the program."""
    allocated_s: float
    submission: str | None = None
    """Of submitit, where a root may have had several."""
    budget_end: bool = False
    """It was told to end because the budget of hours does."""
    ran: bool = True
    """False: it was over before it had started its program."""


def past_links(rundir: RunDir, after: int, until: int) -> list[PastLink]:
    """The links of one submission that began, oldest first."""
    # The one after them may have found out how the last one ended.
    records = {g: list(events.read(rundir.ledger_file(g))) for g in range(after + 1, until + 2)}
    explained = explanations(record for many in records.values() for record in many)
    records.pop(until + 1, None)  # none at all where nothing is known after `after`
    every = (_past(rundir, g, many, explained.get(g, {})) for g, many in records.items())
    return [link for link in every if link is not None]


def explanations(records: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What later links found out about earlier ones that left no record of their end."""
    return {
        int(record["generation"]): record
        for record in records
        if record["event"] == Event.LINK_EXPLAINED.value and _is_number(record.get("generation"))
    }


def told_of_end(
    ended: dict[str, Any] | None, explained: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Its own record, except for what it could not know and a later link was told."""
    if ended is None or not explained:
        return ended or explained
    return {**ended, **explained} if ended.get("cause_unknown") is True else ended


def _past(
    rundir: RunDir, generation: int, records: list[dict[str, Any]], explained: dict[str, Any]
) -> PastLink | None:
    started = _last(records, Event.LINK_STARTED)
    if started is None:
        return None  # it took the lease and found nothing to do, or was killed before it began
    told = told_of_end(_last(records, Event.LINK_ENDED), explained) or {}
    progress = told.get("progress")
    return PastLink(
        generation=generation,
        host=_host(rundir, generation, started),
        cause=_cause(told.get("cause")),
        progress=progress if isinstance(progress, bool) else None,
        allocated_s=_allocated(started, records, explained),
        submission=started.get("submission"),
        budget_end=told.get("budget_end") is True,
        ran=not ran_nothing(records),
    )


def ran_nothing(records: Iterable[dict[str, Any]]) -> bool:
    """A link that was told to stop at once, or whose program could not be started, has no exit
    code. Of one without a record of its end nobody knows."""
    last = {record["event"]: record for record in records}
    ended = last.get(Event.LINK_ENDED.value)
    is_first = Event.PHASE_DONE.value not in last  # else the command before did run
    return ended is not None and ended.get("code", 0) is None and is_first


def _allocated(
    started: dict[str, Any], records: list[dict[str, Any]], explained: dict[str, Any]
) -> float:
    """Up to the last thing known of it: what it used, not what it was given."""
    moments = [record.get("time") for record in records] + [explained.get("last_seen")]
    known = [float(m) for m in moments if isinstance(m, (int, float))]
    return max(known) - float(started["time"])


def _host(rundir: RunDir, generation: int, started: dict[str, Any]) -> str:
    """By the scheduler's name for it, which is what can be excluded."""
    named = started.get("node") or started.get("host")
    if named:
        return str(named)
    holder = lease.holder_of(rundir, generation)
    return "" if holder is None else holder.host


def _cause(text: object) -> Cause | None:
    try:
        return Cause(text)
    except ValueError:
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _last(records: list[dict[str, Any]], event: Event) -> dict[str, Any] | None:
    return next((r for r in reversed(records) if r["event"] == event.value), None)


# ── what the runner asks ──────────────────────────────────────────────────────────────────
def jobs_of(rundir: RunDir) -> list[str]:
    """The scheduler's ids of a chain, oldest first: as submitted, and as it extended itself."""
    record = rundir.chain() or {}
    return list(dict.fromkeys([*_of_sweep(record), *_jobs_beside(rundir, record)]))


def jobs_beside_sweep(rundir: RunDir) -> list[str]:
    """Those of a member that are no indices of its sweep's arrays.

    sweep.json is not read: asked of every member, that would cost the square of their number.
    """
    return _jobs_beside(rundir, rundir.chain() or {})


def present_jobs(rundir: RunDir) -> list[str]:
    """Those of the present submission, oldest first; of a member, without indices of its sweep."""
    record = rundir.chain() or {}
    return _jobs_beside(rundir, record)[int(record.get("jobs_before") or 0) :]


def _jobs_beside(rundir: RunDir, record: dict[str, Any]) -> list[str]:
    # A link whose set-up failed writes into the ledger of the next generation, and takes no lease.
    last = max(lease.highest(rundir), int(record.get("after_generation") or 0))
    untaken = events.read(rundir.ledger_file(last + 1))
    extended = [
        str(one["job"])
        for one in (*_all_records(rundir), *untaken)
        if one["event"] == Event.CHAIN_EXTENDED.value and "job" in one
    ]
    return list(dict.fromkeys([*(str(job) for job in record.get("jobs") or ()), *extended]))


def _of_sweep(record: dict[str, Any]) -> list[str]:
    """A member's own index in each array of its sweep."""
    sweep, member = record.get("sweep"), record.get("member") or {}
    if not sweep or "index" not in member:
        return []
    try:
        known = json.loads(Path(sweep, "sweep.json").read_bytes())
        return [f"{job}_{member['index']}" for job in known.get("jobs") or ()]
    except (OSError, ValueError, AttributeError):
        return []


def hosts_excluded(rundir: RunDir) -> list[str]:
    """As of now: each record has the whole list."""
    found: list[str] = []
    for record in _all_records(rundir):
        if record["event"] == Event.HOSTS_EXCLUDED.value:
            found = [str(host) for host in record.get("hosts") or ()]
    return found


def _all_records(rundir: RunDir) -> Iterable[dict[str, Any]]:
    for generation in lease.generations(rundir):
        yield from events.read(rundir.ledger_file(generation))


_HOST_MAY_BE_BAD = frozenset({Cause.NODE_FAILURE, Cause.LOST, Cause.KILLED, Cause.NOT_STARTED})
_HOST_IS_GONE = frozenset({Cause.NODE_FAILURE, Cause.LOST})
RECENT_LINKS = 20
"""A host whose failures are further back is given another chance."""


def bad_hosts(links: Sequence[PastLink], after: int, avoided: Collection[str] = ()) -> list[str]:
    """Hosts on which so many recent links running failed, but only while another is known that
    was not lost itself and is not `avoided`: a chain that may run nowhere would wait for ever."""
    by_host: dict[str, list[PastLink]] = {}
    for link in links[-RECENT_LINKS:]:
        if link.host:
            by_host.setdefault(link.host, []).append(link)
    if not after:
        return []
    bad = [host for host, many in by_host.items() if _all_failed(many[-after:], after)]
    none_of = {"", *bad, *avoided}
    others = {link.host: link.cause for link in links if link.host not in none_of}
    return bad if any(cause not in _HOST_IS_GONE for cause in others.values()) else []


def _all_failed(links: list[PastLink], after: int) -> bool:
    return len(links) == after and all(_may_be_the_host(link) for link in links)


def _may_be_the_host(link: PastLink) -> bool:
    """A program that crashes wherever it gets far enough is no fault of a host."""
    return link.cause in _HOST_MAY_BE_BAD or (
        link.cause is Cause.CRASHED and link.progress is not True
    )
