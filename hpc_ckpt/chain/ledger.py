"""A chain's history, merged from its ledger (runner) and events (runtime). Reads, never writes.

No question to the scheduler: a person may look as often as they like.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .. import events, lease
from ..events import Event
from ..rundir import RunDir
from .backend import Cause
from .past import explanations, jobs_of, told_of_end

Record = dict[str, Any]
LONGEST_KILL_WAIT_S = 300.0
"""So long after its deadline a link that left no record of its end is taken for dead."""
_PUT_BACK = (Cause.PREEMPTED, Cause.REQUEUED, Cause.NODE_FAILURE, Cause.STOPPED)
"""Ends after which Slurm itself may start the same job again."""
_BEGIN = (Event.LINK_STARTED, Event.RESTORED, Event.STARTED_FRESH)


class State(str, Enum):
    """Where a chain stands."""

    NEW = "not started"
    RUNNING = "running"
    BETWEEN = "between links"
    STOPPED = "stopped"
    COMPLETE = "complete"


@dataclass(frozen=True, kw_only=True)
class LinkSummary:
    """One row of the chain's table."""

    generation: int
    job: str | None
    host: str
    started: float
    ended: float | None
    cause: str
    reason: str
    evidence: tuple[str, ...]
    """What was seen of its end, in the words of whoever said it."""
    step_from: int
    step_now: int
    """The newest step it is known to have reached."""
    step_to: int
    """The newest step it committed."""
    lost_steps: int
    """Steps that had to be made again, as far as the events know."""
    stall_s: float
    useful_s: float
    """Seconds of training that ended up in a checkpoint."""
    allocated_s: float

    @property
    def goodput(self) -> float:
        """Useful ÷ allocated time."""
        return self.useful_s / self.allocated_s if self.allocated_s > 0 else 0.0


@dataclass(frozen=True)
class NextJob:
    """What waits in the queue to run the next link, and why it waits, in Slurm's words."""

    id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class ChainStatus:
    """Everything `hpc-ckpt status` shows."""

    root: str
    name: str
    state: State
    reason: str
    """Why it stopped, where it did."""
    last_lines: tuple[str, ...]
    """What the program said last, where a failure stopped the chain."""
    remark: str
    """What its user should know now, such as that nothing follows the link that runs."""
    step: int
    links: tuple[LinkSummary, ...]
    jobs: tuple[str, ...]
    next_job: NextJob | None = None
    """Known where the scheduler was asked, see stuck.py."""

    @property
    def allocated_s(self) -> float:
        return sum(link.allocated_s for link in self.links)

    @property
    def goodput(self) -> float:
        useful = sum(link.useful_s for link in self.links)
        return useful / self.allocated_s if self.allocated_s > 0 else 0.0

    @property
    def lost_steps(self) -> int:
        return sum(link.lost_steps for link in self.links)

    @property
    def stall_s(self) -> float:
        return sum(link.stall_s for link in self.links)


def read_status(
    rundir: RunDir, now: float | None = None, *, gone: int | None = None
) -> ChainStatus:
    """The chain as its files tell it at this moment.

    `gone`: a link that is over whatever they say, because the scheduler does not run it.
    """
    now = time.time() if now is None else now
    chain = rundir.chain() or {}
    generations = lease.generations(rundir)
    links = _link_summaries(rundir, generations, now, gone)
    newest = rundir.newest()
    state, reason = _state(rundir, generations, links)
    last = told_by_last(rundir)
    return ChainStatus(
        root=str(rundir.root),
        name=str(chain.get("name") or rundir.root.name),
        state=state,
        reason=reason,
        last_lines=_last_lines(last) if state is State.STOPPED else (),
        step=0 if newest is None else newest.step,
        remark=_remark(last) if state in (State.RUNNING, State.BETWEEN) else "",
        links=tuple(links),
        jobs=tuple(jobs_of(rundir)),
    )


def told_by_last(rundir: RunDir) -> list[Record]:
    """What the runner of the last link of the present submission wrote down.

    A set-up that fails before anybody has a generation writes into the ledger of whoever takes it
    next, perhaps days later: until that link has begun or left, nothing there is its own.
    """
    last = lease.highest(rundir)
    if last <= int((rundir.chain() or {}).get("after_generation") or 0):
        return []
    records = list(events.read(rundir.ledger_file(last)))
    names = [record["event"] for record in records]
    if Event.LINK_STARTED.value in names:
        return records[names.index(Event.LINK_STARTED.value) :]
    return records if lease.released(rundir, last) else []


def nothing_follows(rundir: RunDir) -> bool:
    """Whether the last link has said so; it may be at work still."""
    return _last(told_by_last(rundir), Event.NOTHING_FOLLOWS) is not None


def may_be_over(rundir: RunDir) -> bool:
    """No more than a few files are read."""
    return rundir.done() is not None or rundir.halted() is not None or nothing_follows(rundir)


def has_run_out(rundir: RunDir, status: ChainStatus) -> bool:
    """Whether nothing follows a link that is gone: its user alone can take the chain up again.

    Only once its runner has left: what it decides about the chain comes after its end.
    """
    if status.state is not State.BETWEEN or not nothing_follows(rundir):
        return False
    last = lease.highest(rundir)
    if not (lease.released(rundir, last) or is_gone(rundir, last, time.time())):
        return False
    return not any(
        link.generation == last and link.cause in _PUT_BACK for link in status.links[-1:]
    )


def _last_lines(records: Sequence[Record]) -> tuple[str, ...]:
    stopped = _last(records, Event.CHAIN_STOPPED) or {}
    return tuple(str(line) for line in stopped.get("last_lines") or ())


def _remark(records: Sequence[Record]) -> str:
    """A link that nothing follows is told early: there is time to submit more."""
    told = _last(records, Event.NOTHING_FOLLOWS)
    return "" if told is None else f"nothing follows this link: {told.get('reason')}"


def _state(
    rundir: RunDir, generations: Sequence[int], links: Sequence[LinkSummary]
) -> tuple[State, str]:
    if rundir.done() is not None:
        return State.COMPLETE, ""
    if links and links[-1].ended is None:
        return State.RUNNING, ""
    halted = rundir.halted()
    if halted is not None:
        return State.STOPPED, halted
    return (State.BETWEEN if generations else State.NEW), ""


def _link_summaries(
    rundir: RunDir, generations: Sequence[int], now: float, gone: int | None
) -> list[LinkSummary]:
    records = {generation: _records(rundir, generation) for generation in generations}
    explained = explanations(record for many in records.values() for record in many)
    begun = [g for g in generations if _first(records[g], *_BEGIN) is not None]
    summaries = []
    for place, generation in enumerate(begun):
        following = begun[place + 1 : place + 2]
        resumed_at = _step_from(records[following[0]]) if following else None
        summaries.append(
            _summarise(
                rundir,
                generation,
                records[generation],
                explained.get(generation),
                resumed_at,
                now,
                over=resumed_at is not None or generation == gone,
            )
        )
    return summaries


def _summarise(
    rundir: RunDir,
    generation: int,
    records: list[Record],
    explained: Record | None,
    resumed_at: int | None,
    now: float,
    *,
    over: bool,
) -> LinkSummary:
    ended = told_of_end(_last(records, Event.LINK_ENDED), explained)
    holder = lease.holder_of(rundir, generation) or lease.Holder()
    # A set-up that failed before may have stopped the chain in this ledger, days ago.
    started = float((_first(records, *_BEGIN) or records[0])["time"])
    end_time = _end_time(rundir, generation, records, over, now)
    step_from = _step_from(records)
    commits = [r for r in records if r["event"] == Event.COMMITTED.value]
    step_to = max([step_from, *(int(r["step"]) for r in commits)])
    reached = max([step_to, *_reached(records)])
    cause, reason = _cause(ended, records, end_time)
    kept = step_to if resumed_at is None else min(resumed_at, reached)
    return LinkSummary(
        generation=generation,
        job=holder.job,
        host=holder.host,
        started=started,
        ended=end_time,
        cause=cause,
        reason=reason,
        evidence=_evidence(ended or {}),
        step_from=step_from,
        step_now=reached,
        step_to=step_to,
        lost_steps=0 if end_time is None else max(0, reached - kept),
        stall_s=sum(float(r.get("stall_s") or 0.0) for r in commits),
        useful_s=max((float(r.get("training_s") or 0.0) for r in _kept(records)), default=0.0),
        allocated_s=max(0.0, (now if end_time is None else end_time) - started),
    )


def _kept(records: list[Record]) -> list[Record]:
    """What says how much of a link was not in vain: commits, and the end of complete work."""
    return [
        r
        for r in records
        if r["event"] == Event.COMMITTED.value
        or (r["event"] == Event.ENDED.value and r.get("complete") is True)
    ]


def _evidence(record: Record) -> tuple[str, ...]:
    found = record.get("evidence")
    return tuple(str(one) for one in found) if isinstance(found, list) else ()


def _cause(ended: Record | None, records: list[Record], end_time: float | None) -> tuple[str, str]:
    if ended is not None:
        return str(ended.get("cause")), str(ended.get("reason") or "")
    if end_time is None:
        return "running", ""
    last = _last(records, Event.ENDED)
    if last is not None:
        reason = str(last.get("reason") or "")
        cause = Cause.COMPLETE if last.get("complete") else Cause.said(reason) or Cause.CRASHED
        return cause.value, reason
    return Cause.LOST.value, "it left no record of its end"


def _end_time(
    rundir: RunDir, generation: int, records: list[Record], over: bool, now: float
) -> float | None:
    """When it ended; for a link that left no record, the last thing known of it."""
    by_runner = _first(records, Event.LINK_STARTED) is not None
    told = _last(records, Event.LINK_ENDED if by_runner else Event.ENDED)
    if told is not None:
        return float(told["time"])
    if over or lease.released(rundir, generation) or is_gone(rundir, generation, now):
        return float(records[-1]["time"])
    return None


def is_gone(rundir: RunDir, generation: int, now: float) -> bool:
    """Whether a link that left no record of its end must be dead: seen here, or by its deadline."""
    holder = lease.holder_of(rundir, generation)
    if holder is not None and lease.alive_here(holder) is False:
        return True
    deadline = rundir.deadline(generation)
    return deadline is not None and now > deadline + LONGEST_KILL_WAIT_S


def _records(rundir: RunDir, generation: int) -> list[Record]:
    paths = [rundir.ledger_file(generation), *rundir.events.glob(f"{generation:08d}-*.jsonl")]
    merged = [record for path in paths for record in events.read(path)]
    return sorted(merged, key=lambda record: float(record.get("time") or 0.0))


def _step_from(records: Iterable[Record]) -> int:
    begun = _first(records, Event.RESTORED) or _first(records, Event.LINK_STARTED)
    return int((begun or {}).get("step") or 0)


def _reached(records: Iterable[Record]) -> list[int]:
    telling = {Event.PROGRESS, Event.SAVE_STARTED, Event.STOPPING, Event.ENDED}
    return [int(r["step"]) for r in records if r["event"] in telling and "step" in r]


def _first(records: Iterable[Record], *names: Event) -> Record | None:
    return next((record for record in records if record["event"] in names), None)


def _last(records: Sequence[Record], name: Event) -> Record | None:
    return next((record for record in reversed(records) if record["event"] == name), None)
