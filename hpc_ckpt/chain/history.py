"""What befell a chain: each link with the evidence of its cause, and the events of the chain.

Reads files only. Evidence is what a link wrote when it ended, and what a later link found out
about one that could not say it any more.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .. import events, lease
from ..events import Event
from ..rundir import RunDir
from .ledger import LinkSummary, Record, read_status

EXPLAINED = "link.explained"
"""By a later link: generation, cause, evidence of an earlier one."""
OF_THE_CHAIN = "chain."


@dataclass(frozen=True, kw_only=True)
class LinkHistory:
    """One link: how long it waited, what it did, why it ended and how that is known."""

    generation: int
    job: str | None
    host: str
    started: float
    ended: float | None
    wait_s: float | None
    """In the queue, since it was put there and the link before had ended; None: not known."""
    cause: str
    reason: str
    evidence: tuple[str, ...]
    step_from: int
    step_to: int
    lost_steps: int


@dataclass(frozen=True)
class ChainEvent:
    """Something that happened to the chain as a whole."""

    time: float
    generation: int
    event: str
    """Without its prefix: stopped, done, extended."""
    fields: dict[str, Any]


@dataclass(frozen=True)
class History:
    root: str
    name: str
    state: str
    reason: str
    links: tuple[LinkHistory, ...]
    events: tuple[ChainEvent, ...]

    def record(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self)


def read_history(rundir: RunDir, now: float | None = None) -> History:
    status = read_status(rundir, now)
    ledgers = {g: list(events.read(rundir.ledger_file(g))) for g in lease.generations(rundir)}
    explained = _explained(ledgers)
    waits = _waits(rundir, status.links, ledgers)
    links = [
        _link(link, wait_s, ledgers.get(link.generation, []), explained.get(link.generation))
        for link, wait_s in zip(status.links, waits, strict=True)
    ]
    return History(
        root=status.root,
        name=status.name,
        state=status.state.value,
        reason=status.reason,
        links=tuple(links),
        events=tuple(sorted(_chain_events(ledgers), key=lambda event: event.time)),
    )


def _link(
    link: LinkSummary, wait_s: float | None, records: Sequence[Record], explained: Record | None
) -> LinkHistory:
    """What a later link found out outranks a guess from silence, and is added to a record."""
    ends = [record for record in records if record["event"] == Event.LINK_ENDED.value]
    told = (*_evidence(ends[-1]), *_level(ends[-1])) if ends else ()
    later = () if explained is None else _evidence(explained)
    cause = str((explained or {}).get("cause") or link.cause)
    return LinkHistory(
        generation=link.generation,
        job=link.job,
        host=link.host,
        started=link.started,
        ended=link.ended,
        wait_s=wait_s,
        cause=cause,
        reason=link.reason,
        evidence=tuple(dict.fromkeys((*told, *later))),
        step_from=link.step_from,
        step_to=link.step_now if link.ended is None else link.step_to,
        lost_steps=link.lost_steps,
    )


def _evidence(record: Record) -> tuple[str, ...]:
    found = record.get("evidence")
    if isinstance(found, str):
        return (found,)
    return tuple(str(item) for item in found) if isinstance(found, list) else ()


def _level(record: Record) -> tuple[str, ...]:
    """Which level saved for a program that cannot do it itself, and why none above it."""
    level, rejected = record.get("level"), record.get("rejected")
    if not level:
        return ()
    others = rejected.items() if isinstance(rejected, dict) else ()
    return (f"level: {level}", *(f"not {name}: {why}" for name, why in others if name != level))


def _explained(ledgers: dict[int, list[Record]]) -> dict[int, Record]:
    found: dict[int, Record] = {}
    for records in ledgers.values():
        for record in records:
            if record["event"] == EXPLAINED and isinstance(record.get("generation"), int):
                found[record["generation"]] = record
    return found


def _waits(
    rundir: RunDir, links: Sequence[LinkSummary], ledgers: dict[int, list[Record]]
) -> list[float | None]:
    """Until its job got its nodes, where the scheduler has told; else until it began."""
    chain = rundir.chain() or {}
    after = chain.get("after_generation")
    first = after + 1 if isinstance(after, int) else 1
    since: float | None = None
    created = chain.get("created")
    if isinstance(created, (int, float)) and first == 1:
        since = float(created)
    waits: list[float | None] = []
    # An array is submitted long before its indices have anything to wait for: only a job that
    # was submitted after the link before had begun waits from then on.
    begun = 0.0
    for link in links:
        if link.generation == first and first > 1:
            since = None  # it was stopped, and nobody wrote down when it was taken up again
        told = _first(ledgers.get(link.generation, []), Event.LINK_STARTED)
        submitted = told.get("submitted")
        if submitted is not None and submitted > begun:
            since = max(submitted, since or submitted)
        until = told.get("allocated") or link.started
        waits.append(None if since is None else max(0.0, until - since))
        since, begun = link.ended, link.started
    return waits


def _first(records: Sequence[Record], event: Event) -> Record:
    return next((record for record in records if record["event"] == event.value), {})


def _chain_events(ledgers: dict[int, list[Record]]) -> Iterator[ChainEvent]:
    for generation, records in ledgers.items():
        for record in records:
            if record["event"].startswith(OF_THE_CHAIN):
                fields = {k: v for k, v in record.items() if k not in ("time", "event")}
                event = record["event"].removeprefix(OF_THE_CHAIN)
                yield ChainEvent(float(record.get("time") or 0.0), generation, event, fields)
