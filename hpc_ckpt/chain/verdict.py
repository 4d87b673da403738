"""How a link ended, and whether the chain goes on. Reads the run directory, starts nothing.

Standard library only: the link runner asks it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from .. import events, lease
from ..errors import EXIT_COMPLETE, EXIT_SAVED
from ..events import Event
from ..rundir import Done, Result, RunDir
from .backend import Cause
from .orders import Orders

_NOT_ITS_FAULT = frozenset({Cause.PREEMPTED, Cause.REQUEUED, Cause.CANCELLED, Cause.HALTED})
"""Ends that say nothing about whether the program makes progress."""

_NOT_COUNTED = frozenset({Cause.PREEMPTED.value, Cause.REQUEUED.value, None})
"""Ends that do not use up the budget of links; None is a link that left no record."""
STARTS_PER_LINK = 10


@dataclass(frozen=True)
class Verdict:
    """How the link ended."""

    result: Result | None
    """None: fenced, so what this link says no longer counts."""
    cause: Cause
    reason: str
    by_code: bool = False
    """No outcome file: the program keeps its own restart files, and its word is all there is."""

    def progress(self, step_from: int, step_to: int) -> bool | None:
        """Whether it got anywhere; None if it did not, but that was not its fault."""
        if step_to > step_from or self.result is Result.COMPLETE:
            return True
        if self.result is Result.SAVED and self.by_code:
            return True
        return None if self.result is None or self.cause in _NOT_ITS_FAULT else False


def judge(rundir: RunDir, generation: int, code: int, seen: Cause | None) -> Verdict:
    """The outcome file decides; the exit code only where there is none.

    `seen` is what the scheduler said when it began to end the link.
    """
    newest = lease.highest(rundir)
    if newest > generation:
        return Verdict(None, Cause.FENCED, f"overtaken by link {newest}")
    if seen is None and rundir.halted() is not None:
        seen = Cause.HALTED
    outcome = rundir.outcome(generation)
    if outcome is None:
        return _judge_by_code(rundir, generation, code, seen)
    if outcome.outcome is Result.SAVED:
        cause = seen or Cause.said(outcome.reason) or Cause.SAVED
        return Verdict(Result.SAVED, cause, outcome.reason)
    if outcome.outcome is Result.FAILED:
        return Verdict(Result.FAILED, seen or Cause.CRASHED, outcome.reason)
    if rundir.done() is None:
        reason = "it said complete, but the checkpoint that DONE names is not there"
        return Verdict(Result.FAILED, Cause.CRASHED, reason)
    return Verdict(Result.COMPLETE, Cause.COMPLETE, outcome.reason)


def _judge_by_code(rundir: RunDir, generation: int, code: int, seen: Cause | None) -> Verdict:
    if code == EXIT_COMPLETE and _used_checkpointer(rundir, generation):
        # It always leaves an outcome: this one was killed behind something that returned 0.
        reason = "the command returned 0, but the program inside it ended without a word"
        return Verdict(Result.FAILED, seen or Cause.KILLED, reason)
    if code == EXIT_COMPLETE:
        if rundir.done() is None:
            rundir.write_done(Done(generation, None))
        return Verdict(Result.COMPLETE, Cause.COMPLETE, "exit code 0")
    if code == EXIT_SAVED:
        return Verdict(Result.SAVED, seen or Cause.SAVED, f"exit code {code}", by_code=True)
    number = -code if code < 0 else code - 128
    if number in {member.value for member in signal.Signals}:
        name = signal.Signals(number).name
        return Verdict(Result.FAILED, seen or Cause.KILLED, f"killed by {name}")
    return Verdict(Result.FAILED, seen or Cause.CRASHED, f"exit code {code}")


def _used_checkpointer(rundir: RunDir, generation: int) -> bool:
    return any(rundir.events.glob(f"{generation:08d}-*.jsonl"))


def reason_to_stop(rundir: RunDir, generation: int, orders: Orders) -> str | None:
    """Why no further link should run after this one, or None."""
    halted = rundir.halted()
    if halted is not None:
        return halted
    if _progress_of(rundir, generation) is False and _stuck_before(rundir, generation, orders):
        return "no progress in two links running"
    return budget_spent(rundir, generation, orders)


def budget_spent(rundir: RunDir, last: int, orders: Orders) -> str | None:
    """Whether the links up to `last` have used up the budget, and which.

    Preempted and requeued links, and those that left no record because their node went, do not
    count: a chain never stops because of them. Starts are bounded all the same.
    """
    generations = range(orders.after_generation + 1, last + 1)
    if len(generations) >= STARTS_PER_LINK * orders.max_links:
        return f"started {len(generations)} times for a budget of {orders.max_links} links"
    counted = [g for g in generations if _cause_of(rundir, g) not in _NOT_COUNTED]
    if len(counted) >= orders.max_links:
        return f"the budget of {orders.max_links} links is spent"
    return None


def _stuck_before(rundir: RunDir, generation: int, orders: Orders) -> bool:
    """Whether the last earlier link that counts made no progress."""
    for earlier in range(generation - 1, orders.after_generation, -1):
        progress = _progress_of(rundir, earlier)
        if progress is not None:
            return progress is False
    return False


def _progress_of(rundir: RunDir, generation: int) -> bool | None:
    progress = _end_of(rundir, generation).get("progress")
    return progress if isinstance(progress, bool) else None


def _cause_of(rundir: RunDir, generation: int) -> str | None:
    cause = _end_of(rundir, generation).get("cause")
    return None if cause is None else str(cause)


def _end_of(rundir: RunDir, generation: int) -> dict[str, Any]:
    records = events.read(rundir.ledger_file(generation))
    ends = [record for record in records if record["event"] == Event.LINK_ENDED.value]
    return ends[-1] if ends else {}
