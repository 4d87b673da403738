"""When a link ends: what the scheduler says of it, published in the deadline and notice files.

The scheduler is asked at the start, at the first of each kind of signal, and once before each
known end, in case somebody has moved it; never in a loop. Standard library only.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from .. import events
from ..events import Event, EventLog
from ..rundir import RunDir
from ..settings import SAVE_FACTOR, margin
from .backend import Backend, Cause, JobRecord, Queued
from .budget import seconds_left
from .evidence import Finding, Grace, is_outlived
from .orders import Orders
from .patience import Unseen

log = logging.getLogger("hpc_ckpt.link")

BACKSTOP_SHARE = 0.5
"""Of the runtime's own margin: its deadline save comes first, the backstop only if it did not."""
LOOK_AHEAD_S = 20.0
SHIM_TERM = "shim TERM"
"""The source of a notice that templates/shim.sh gives when it hears TERM."""
MEASURE_EVERY_S = 10.0


class Clockwork:
    """The end of one link, as far as it is known."""

    def __init__(
        self,
        rundir: RunDir,
        orders: Orders,
        backend: Backend,
        ledger: EventLog,
        generation: int,
    ) -> None:
        self._rundir = rundir
        self._orders = orders
        self._backend = backend
        self._ledger = ledger
        self._generation = generation
        self.deadline: float | None = None
        self.seen: Finding | None = None
        """Why the scheduler ends the link, once it has said so."""
        self.queued = Queued()
        self._asked: set[str] = set()
        self._backstop_pending = False
        self._looked_for: float | None = None
        self._budget_end: float | None = None
        self._grace = Grace()
        self._started = time.time()
        self._save_s: float | None = None
        self._step_s = 0.0
        self._measure_at = 0.0
        self._unseen = Unseen()
        self._terminated_at: float | None = None
        """On the monotonic clock; None as well once the job has outlived it."""
        self._by_shim = 0
        """How often the shim has written down a TERM: each counts once."""
        self._only_shim = False
        """No TERM came to the job itself."""
        self._answered = False
        """Whether the scheduler itself has named a cause: `seen` may be what was concluded here."""

    def begin(self) -> None:
        self._started = time.time()
        left = seconds_left(self._rundir, self._generation, self._orders)
        self._budget_end = None if left is None else self._started + left
        record = self._backend.look()
        self.queued = record.queued
        if record.ending or record.certain:
            self._learn(record)
        else:
            self._publish(record)  # what befell an earlier run of the same job is no news

    def said_of_the_end(self) -> dict[str, Any]:
        """For the ledger: that the end the program was told is that of the budget of hours, and
        that a later link has to ask why TERM came."""
        by_budget = self._budget_end is not None and self.deadline == self._budget_end
        found = {"budget_end": by_budget, "cause_unknown": self.is_unexplained()}
        return {name: True for name, true in found.items() if true}

    def is_unexplained(self) -> bool:
        """TERM came, and the scheduler has not said why; nobody else could."""
        return self.is_terminated and self._backend.enforces_end and not self._answered

    @property
    def is_terminated(self) -> bool:
        """TERM came, and as far as is known it was that of the job's end."""
        return self._terminated_at is not None

    @property
    def is_forwarded(self) -> bool:
        """A notice was given, and the program hears of it by a signal that its spec asks for."""
        forwards = self._orders.forward is not None
        return forwards and self._rundir.notice(self._generation) is not None

    # ── the scheduler's signals ───────────────────────────────────────────────────────────
    def warned(self, number: signal.Signals) -> None:
        """The --signal backstop: a notice only if the end is nearer than was known.

        The runtime's own deadline save then comes as late as is safe.
        """
        known = self.deadline
        self._measure_at = 0.0  # the first save may have been made since the last look
        self.ask_once(number.name)
        shortened = self.deadline is None or known is None or self.deadline < known - 1.0
        if shortened:
            self._end_by(Cause.TIME_LIMIT)
            self.give_notice(number.name)
        else:
            self._backstop_pending = True

    def give_notice(self, source: str) -> None:
        self._asked.add("notice")  # our own needs no second question
        try:
            self._rundir.give_notice(self._generation, source)
        except OSError as error:
            log.warning("could not write the notice: %s", error)

    def ask_once(self, occasion: str) -> JobRecord | None:
        """Ask the scheduler at the first of each kind of occasion, never again for it."""
        if occasion in self._asked:
            return None
        self._asked.add(occasion)
        record = self._backend.look()
        self._learn(record)
        self._ledger.emit(
            Event.LINK_NOTICED,
            source=occasion,
            cause=None if self.seen is None else self.seen.cause,
            said=record.said,
            left_s=None if self.deadline is None else round(self.deadline - time.time(), 1),
        )
        return record

    def look_again(self) -> None:
        """The scheduler may not have answered when it was asked, or may say more by now."""
        if self.seen is None or self.seen.warning or self.seen.cause is Cause.PREEMPTED:
            record = self._backend.look()
            self._learn(record)
            # A script that cleans up by `kill 0` reaches its shim as well.
            by_itself = self._only_shim and record.runs_on
            if by_itself or is_outlived(self._terminated_at, record, self._backend.kill_wait_s):
                self._terminated_at = None
        if self.is_terminated:
            self._is_no_warning()

    def _learn(self, record: JobRecord) -> None:
        self._answered = self._answered or record.cause is not None
        if self._grace.is_cut_short(record):
            self.seen = Finding(Cause.CANCELLED, record.said, certain=True)
        elif record.cause is not None and (
            self.seen is None or self.seen.warning or record.certain
        ):
            self.seen = Finding(record.cause, record.said, record.certain)
        self._publish(record)

    def _end_by(self, cause: Cause) -> None:
        """The program is asked to end. It hears of it by the notice file, and says 75 then, unless
        a signal is forwarded to it, after which 0 says nothing."""
        told_by_file = self._backend.enforces_end and self._orders.forward is None
        self.seen = self.seen or Finding(cause, "", warning=told_by_file)

    def terminated(self) -> None:
        """TERM came: whatever the scheduler answers, the program is being ended."""
        self._only_shim = False
        self._terminated_at = time.monotonic()
        self._is_no_warning()

    def _is_no_warning(self) -> None:
        if self.seen is not None and self.seen.warning:
            self.seen = self.seen._replace(warning=False)

    def hear_shim(self) -> None:
        """At the start of a preemption's grace TERM goes to the steps only: to the shim, and where
        processes are not tracked by cgroup to the program as well. What was a warning stays one
        until it is known that no script has ended its own group."""
        notice = self._rundir.notice(self._generation)
        heard = 0 if notice is None else notice.sources.count(SHIM_TERM)
        if heard > self._by_shim:
            self._by_shim = heard
            self._only_shim = self._only_shim or not self.is_terminated
            self._terminated_at = time.monotonic()

    # ── while it runs ─────────────────────────────────────────────────────────────────────
    def tick(self) -> None:
        """Once a second."""
        with self._unseen:
            if self._rundir.notice_file(self._generation).exists():
                self.ask_once("notice")
                self.hear_shim()
        if self._backstop_pending and self._rundir.outcome(self._generation) is not None:
            self._backstop_pending = False  # it has saved and is on its way out
        if self._backstop_pending and self._time_is_short():
            self._backstop_pending = False
            self._end_by(Cause.TIME_LIMIT)
            self.give_notice(f"{self._orders.signal.name} backstop")
        if self._backend.enforces_end:
            self._look_before_end()
            self._end_with_budget()
        else:
            self._enforce_end()

    def _look_before_end(self) -> None:
        """Once before each known end: an operator may have moved it since."""
        end = self.deadline
        if end is None or self._looked_for == end:
            return
        # The runtime ends the link for a step and a save before the end that it knows.
        needed_s = SAVE_FACTOR * (self._measured_save() or 0.0) + self._step_s
        ahead_s = needed_s + margin(end - self._started) + LOOK_AHEAD_S
        if time.time() >= end - ahead_s:
            self._looked_for = end
            self._publish(self._backend.look())

    def _end_with_budget(self) -> None:
        """The scheduler knows nothing of it; a program that looks at no deadline is told."""
        if self._budget_end is None or time.time() < self._budget_end or "budget" in self._asked:
            return
        self._asked.add("budget")
        self._end_by(Cause.TIME_LIMIT)
        self.give_notice("end of the budget")

    def _publish(self, record: JobRecord) -> None:
        """The scheduler's end, or the end of the budget if that comes first; once the job is being
        ended, when it is killed."""
        if record.end is None and self.deadline is not None:
            return  # no answer moves nothing: the budget may end hundreds of hours after the link
        bounds = (record.end,) if record.ending else (record.end, self._budget_end)
        ends = [end for end in bounds if end is not None]
        if not ends or min(ends) == self.deadline:
            return
        if self.deadline is not None:
            self._ledger.emit(Event.DEADLINE_MOVED, deadline=min(ends))
        self.deadline = min(ends)
        with contextlib.suppress(OSError):  # the notice still comes
            self._rundir.write_deadline(self._generation, self.deadline)

    def _time_is_short(self) -> bool:
        save_s = self._measured_save()
        if self.deadline is None or save_s is None:
            return True
        spare_s = BACKSTOP_SHARE * margin(self.deadline - self._started)
        return self.deadline - time.time() <= save_s + spare_s

    def _measured_save(self) -> float | None:
        """Seconds of this link's slowest save, as the runtime recorded it; read now and then."""
        if time.monotonic() >= self._measure_at:
            self._measure_at = time.monotonic() + MEASURE_EVERY_S
            with self._unseen:
                records = self._recorded()
                self._save_s, self._step_s = _slowest_save(records), _slowest_step(records)
        return self._save_s

    def _recorded(self) -> list[dict[str, Any]]:
        paths = self._rundir.events.glob(f"{self._generation:08d}-*.jsonl")
        return [record for path in paths for record in events.read(path)]

    # ── where no scheduler ends the link ──────────────────────────────────────────────────
    def _enforce_end(self) -> None:
        """Notice at the end of the link; the kill follows after the kill wait."""
        record = self._backend.look()
        self._publish(record)
        if self.deadline is None or time.time() < self.deadline or "end" in self._asked:
            return
        self._asked.add("end")
        self._end_by(record.cause or Cause.TIME_LIMIT)
        self.give_notice("end of the link")

    def is_past_end(self) -> bool:
        return (
            self.deadline is not None and time.time() >= self.deadline + self._backend.kill_wait_s
        )


def _slowest_save(records: Iterable[dict[str, Any]]) -> float | None:
    committed = (r for r in records if r["event"] == Event.COMMITTED.value)
    seconds = [r.get("full_s", r.get("save_s")) for r in committed]
    return max((float(s) for s in seconds if isinstance(s, (int, float))), default=None)


def _slowest_step(records: Iterable[dict[str, Any]]) -> float:
    """Between two records of how far training is; 0.0 where they tell nothing."""
    # A steward counts its saves where a program tells no steps.
    told = [(r.get("step"), r.get("training_s")) for r in records if r.get("tier") != "restarts"]
    known = [(s, t) for s, t in told if isinstance(s, int) and isinstance(t, (int, float))]
    steps = pairwise(sorted(known))
    return max(((t2 - t1) / (s2 - s1) for (s1, t1), (s2, t2) in steps if s2 > s1), default=0.0)
