"""One link of a chain inside a job that somebody else started, such as submitit.

The lease, the deadline, the notice and the ledger of link.py, but in the process that does the
work: no step is started here and no script is owned. Signals become lines of the notice file,
and the work ends at its own next boundary. How the job comes back is passed in.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from .. import fsio, lease, processes
from ..errors import (
    EXIT_COMPLETE,
    EXIT_FAILED,
    EXIT_SAVED,
    ChainStopped,
    HpcCkptError,
    LinkEnded,
    RootError,
)
from ..events import Event, EventLog
from ..lease import Holder
from ..making import prepare
from ..rundir import Result, RunDir
from ..settings import margin
from .backend import Backend, Cause, JobRecord
from .budget import no_progress, spent
from .entries import write_end, write_start
from .evidence import Finding, Grace
from .orders import Budget
from .past import past_links
from .patience import STORAGE_PATIENCE_S, Unseen, why_unread
from .sentry import Sentry
from .unread import begun_or_put_back
from .verdict import Verdict, judge
from .work import Ended, Work, perform

log = logging.getLogger("hpc_ckpt.task")

LEASE_SLACK_S = 45.0
JOIN_SLACK_S = 60.0 + STORAGE_PATIENCE_S
"""Rank 0 may wait for storage."""
PATIENCE_S = 30.0
"""Where no end is known: how long after a notice the work may take to end by itself."""
LEAST_CALL_S = 1.0
_BY_THE_SCHEDULER = frozenset({Cause.PREEMPTED, Cause.REQUEUED})
_BY_A_SIGNAL = frozenset({Cause.STOPPED, Cause.SAVED})


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job that this process is a task of."""

    backend: Backend
    submission: str
    """The same for all links of one submission, and for no other."""
    rank: int = 0
    end: float | None = None
    """Unix seconds, where the scheduler cannot be asked for it."""
    most_restarts: int | None = None
    """How often the launcher brings a job back."""
    requeue: Callable[[], int] | None = None
    """Puts the job back into the queue; the code to leave with. None: nobody does that."""


class TaskLink:
    """From lease to verdict; run() returns what the work did, or raises SystemExit to come back."""

    def __init__(
        self,
        rundir: RunDir,
        job: Job,
        *,
        max_restarts: int | None = None,
        max_links: int | None = None,
        site: Mapping[str, Any] | None = None,
    ) -> None:
        self._rundir = rundir
        self._job = job
        self._max_restarts = max_restarts
        self._max_links = max_links
        self._site = dict(site or {})
        self._sentry = Sentry()
        self._started = time.time()
        self._generation = 0
        self._step_from = 0
        self._deadline: float | None = None
        self._seen: Finding | None = None
        """Why the scheduler ends the link, once it has said so."""
        self._grace = Grace()
        self._noticed: float | None = None
        self._asked: set[str] = set()
        self._met: set[Holder] = set()
        self._may_hold = False
        """Storage failed while the lease was taken: what is taken may be this link's own."""
        self._putting_back = threading.Lock()
        self._code: int | None = None
        """What to leave with once the job is put back into the queue."""
        self._time_called = False
        self._unseen = Unseen()

    def run(self, work: Work) -> Any:
        """ChainStopped if the chain must not go on; what the work itself raised, if it failed."""
        self._sentry.listen()
        try:
            return self._lead(work) if self._job.rank == 0 else self._follow(work)
        finally:
            self._sentry.stop()
            if self._job.requeue is None:
                self._sentry.restore()  # else a late signal would end the job before its result

    # ── rank 0 ────────────────────────────────────────────────────────────────────────────
    def _lead(self, work: Work) -> Any:
        mine, back = self._job.backend.holder(), self._put_back if self._job.requeue else None
        held = begun_or_put_back(partial(self._enter, work), self._rundir, mine, back)
        if held is None:
            log.warning("%s: nothing to do, the work is complete", self._rundir.root)
            return EXIT_COMPLETE
        self._generation = held.generation
        self._ledger = EventLog(self._rundir.ledger_file(held.generation))
        try:
            self._begin(work)
            ended = self._perform(work)
            self._sentry.stop()
            if self._code is not None:
                raise SystemExit(self._code)
            verdict = self._judge(ended, work)
            stop = self._finish(verdict, ended.code)
        finally:
            held.release()
        return self._leave(work, ended, verdict, stop)

    def _enter(self, work: Work) -> lease.Lease | None:
        """The lease of this link; None: there is nothing to do."""
        try:
            prepare(self._rundir)
        except RootError as error:
            raise error from error.__cause__ or why_unread(self._rundir.chain_file)
        self._refuse_to_begin()
        if not work.returns and self._rundir.done() is not None:
            return None
        return self._take_lease()

    def _refuse_to_begin(self) -> None:
        why = self._why_over()
        if why is not None:
            raise ChainStopped(self._rundir.root, why)

    def _take_lease(self) -> lease.Lease:
        backend = self._job.backend
        waiting = lease.Waiting(self._probe, limit_s=backend.kill_wait_s + LEASE_SLACK_S)
        try:
            return lease.acquire(self._rundir, backend.holder(), waiting)
        except (RootError, OSError):
            self._may_hold = True
            raise

    def _probe(self, holder: Holder) -> bool | None:
        """One who lives may be on its way out; one who still lives half a minute later is not."""
        if self._may_hold and holder == self._job.backend.holder():
            return False
        alive = self._job.backend.probe(holder)
        if alive and holder in self._met:
            who = f"job {holder.job}" if holder.job else f"process {holder.pid} on {holder.host}"
            raise RootError(
                self._rundir.root, f"in use by {who}; stop that first, or choose another root"
            )
        self._met.add(holder)
        return alive

    def _begin(self, work: Work) -> None:
        self._describe(work)
        self._step_from = self._newest_step()
        queued = self._look().queued
        self._seen, self._grace = None, Grace()  # what befell an earlier link of the job is no news
        write_start(
            self._ledger,
            self._job.backend,
            self._generation,
            self._step_from,
            deadline=self._deadline,
            queued=queued,
            submission=self._job.submission,
        )
        self._sentry.start(self._on_signal, lambda: self._call_time(work))

    def _describe(self, work: Work) -> None:
        """chain.json: what the Checkpointer is told, and which job `hpc-ckpt stop` may cancel."""
        record = self._rundir.chain() or {}
        if "argv" in record:
            return  # a chain of 'hpc-ckpt submit', whose settings stay
        job = self._job.backend.holder().job
        jobs = [str(known) for known in record.get("jobs") or ()]
        jobs += [job] if job is not None and job not in jobs else []
        wanted = {**record, **self._site, "name": work.name, "jobs": jobs}
        if wanted != record:
            text = json.dumps(wanted, indent=1) + "\n"
            fsio.write_atomic(self._rundir.chain_file, text.encode("utf-8", "surrogateescape"))

    def _perform(self, work: Work) -> Ended:
        return perform(work, self._rundir.environment(self._generation, self._job.backend.name))

    # ── while it works: in the sentry's thread ────────────────────────────────────────────
    def _on_signal(self, name: str) -> None:
        self._noticed = self._noticed or time.time()
        try:
            self._rundir.give_notice(self._generation, name)
        except OSError as error:
            log.warning("could not write the notice: %s", error)
        # The first TERM may be the start of a grace; the second is the end of it.
        occasion = f"second {name}" if name == "SIGTERM" and name in self._asked else name
        if occasion in self._asked:
            return
        self._asked.add(occasion)
        record = self._look()
        self._ledger.emit(
            Event.LINK_NOTICED,
            source=occasion,
            cause=self._cause,
            said=record.said,
            left_s=None if self._deadline is None else round(self._deadline - time.time(), 1),
        )

    @property
    def _cause(self) -> Cause | None:
        return None if self._seen is None else self._seen.cause

    def _look(self) -> JobRecord:
        """Ask the scheduler: at the start, at the first of each signal, and at the end."""
        record = self._job.backend.look()
        if self._grace.is_cut_short(record):
            self._seen = Finding(Cause.CANCELLED, record.said, certain=True)
        elif record.cause is not None and (self._seen is None or record.certain):
            self._seen = Finding(record.cause, record.said, record.certain)
        self._publish(self._job.end if record.end is None else record.end)
        return record

    def _publish(self, end: float | None) -> None:
        if end is None or end == self._deadline:
            return
        if self._deadline is not None:
            self._ledger.emit(Event.DEADLINE_MOVED, deadline=end)
        self._deadline = end
        with contextlib.suppress(OSError):  # the notice still comes
            self._rundir.write_deadline(self._generation, end)

    def _call_time(self, work: Work) -> None:
        """Work that does not end by itself is put back into the queue in the last moment."""
        if self._code is not None or self._job.requeue is None or not self._is_time():
            return
        if not self._time_called:
            self._look()  # the end may have been moved, or somebody have cancelled the job
            if not self._is_time():
                return
            self._time_called = True
            log.warning("the work does not end in time: the job is put back as it is")
            seen = self._seen or Finding(Cause.TIME_LIMIT, "")
            verdict = judge(self._rundir, self._generation, EXIT_FAILED, seen)
            if verdict.result is Result.FAILED:
                verdict = replace(verdict, reason="it did not end by itself")
            self._finish(verdict, None)
        if self._cause is Cause.CANCELLED or self._is_fenced():
            return
        code = self._put_back()
        if self._job.backend.name == "local":
            work.abandon()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # Slurm ends a job that it has requeued; here nobody would

    def _is_time(self) -> bool:
        now = time.time()
        if self._deadline is None:
            return self._noticed is not None and now >= self._noticed + PATIENCE_S
        return now >= self._deadline - max(margin(self._deadline - self._started) / 4, LEAST_CALL_S)

    def _is_fenced(self) -> bool:
        return lease.highest(self._rundir) > self._generation

    # ── after ─────────────────────────────────────────────────────────────────────────────
    def _judge(self, ended: Ended, work: Work) -> Verdict:
        if ended.code != EXIT_COMPLETE or self._noticed is not None:
            self._look()
        # Heard by the command itself, which may have left for it, however long that took.
        told = "SIGTERM" in self._asked and not work.returns
        verdict = judge(self._rundir, self._generation, ended.code, self._seen, told=told)
        if ended.error is not None and not ended.by_link_end:
            return replace(verdict, reason=f"{type(ended.error).__name__}: {ended.error}")
        if verdict.cause in _BY_A_SIGNAL and self._asked - {"SIGTERM", "second SIGTERM"}:
            return replace(verdict, cause=Cause.TIME_LIMIT)  # that is what --signal warns of
        if work.returns and ended.code == EXIT_COMPLETE and verdict.result is Result.FAILED:
            # It dealt with its own failure, or was called for its result after DONE.
            return replace(
                verdict,
                result=Result.COMPLETE,
                cause=Cause.COMPLETE,
                reason="the function returned",
            )
        return verdict

    def _finish(self, verdict: Verdict, code: int | None) -> str | None:
        """Into the ledger; why the chain stops here although it is not complete, or None."""
        step = self._newest_step()
        write_end(self._ledger, verdict, code, self._step_from, step)
        if verdict.result is Result.COMPLETE:
            self._ledger.emit(Event.CHAIN_DONE, step=step)
        if verdict.result in (None, Result.COMPLETE):
            return None
        why = "the job was cancelled" if verdict.cause is Cause.CANCELLED else self._why_over()
        if why is not None:
            self._ledger.emit(Event.CHAIN_STOPPED, reason=why)
        return why

    def _leave(self, work: Work, ended: Ended, verdict: Verdict, stop: str | None) -> Any:
        if verdict.result is Result.COMPLETE:
            return ended.value
        if verdict.result is None:
            log.warning("%s: %s; nothing of this link counts", self._rundir.root, verdict.reason)
            raise SystemExit(EXIT_COMPLETE)
        interrupted = isinstance(ended.error, KeyboardInterrupt)
        saved = verdict.result is Result.SAVED or ended.by_link_end
        if interrupted or not (saved or verdict.cause in _BY_THE_SCHEDULER):
            raise ended.error or HpcCkptError(f"{work.name}: {verdict.reason}")
        if stop is not None:
            raise ChainStopped(self._rundir.root, stop, self._newest_step()) from ended.error
        if self._job.requeue is None:
            raise ended.error if ended.by_link_end and ended.error else LinkEnded(verdict.reason)
        raise SystemExit(self._put_back())

    def _put_back(self) -> int:
        """Once, whoever comes first: the end of the work, or the sentry in the last moment."""
        with self._putting_back:
            if self._code is None and self._job.requeue is not None:
                self._code = self._job.requeue()
            return EXIT_SAVED if self._code is None else self._code

    # ── budgets ───────────────────────────────────────────────────────────────────────────
    def _why_over(self) -> str | None:
        """Why no further link may follow those of this submission."""
        halted = self._rundir.halted()
        if halted is not None:
            return f"halted ({halted})"
        every = past_links(self._rundir, 0, lease.highest(self._rundir))
        links = [link for link in every if link.submission == self._job.submission]
        if self._max_restarts is not None and len(links) > self._max_restarts:
            return f"max_restarts={self._max_restarts} is spent"
        if self._max_links is not None:
            first = links[0].generation if links else 1
            last = links[-1].generation if links else 0
            over = spent(links, first - 1, last, Budget(self._max_links))
            if over is not None:
                return f"{over} (max_links of the task)"
        if self._job.most_restarts is not None and len(links) > self._job.most_restarts:
            return f"the local executor starts a job at most {self._job.most_restarts + 1} times"
        return no_progress(links)

    def _newest_step(self) -> int:
        newest = self._rundir.newest()
        return 0 if newest is None else newest.step

    # ── other ranks ───────────────────────────────────────────────────────────────────────
    def _follow(self, work: Work) -> Any:
        """The same party wall; rank 0 alone judges, records and requeues."""
        self._generation = self._join()
        ended = self._perform(work)
        outcome = self._rundir.outcome(self._generation)
        saved = outcome is not None and outcome.outcome is Result.SAVED
        if ended.code == EXIT_SAVED or (ended.code == EXIT_COMPLETE and saved):
            raise SystemExit(EXIT_COMPLETE)  # any other code could take rank 0 with it
        if ended.code != EXIT_COMPLETE:
            raise ended.error or HpcCkptError(f"{work.name}: exit code {ended.code}")
        return ended.value

    def _join(self) -> int:
        """The generation that rank 0 has taken for this link."""
        end = time.monotonic() + self._job.backend.kill_wait_s + LEASE_SLACK_S + JOIN_SLACK_S
        while time.monotonic() < end:
            with self._unseen:
                generation = lease.highest(self._rundir)
                holder = lease.holder_of(self._rundir, generation)
                if holder is not None and self._is_rank_0(holder, generation):
                    return generation
            halted = self._rundir.halted()
            if halted is not None:
                raise ChainStopped(self._rundir.root, f"halted ({halted})")
            time.sleep(0.1)
        raise RootError(self._rundir.root, "rank 0 of this job has taken no lease; see its log")

    def _is_rank_0(self, holder: Holder, generation: int) -> bool:
        mine = self._job.backend.holder()
        if mine.job is not None:
            return (mine.job, mine.restarts) == (holder.job, holder.restarts)
        if holder.host != mine.host or holder.boot != mine.boot:
            return False
        if lease.alive_here(holder):
            return _parent(holder.pid) == os.getppid()
        # It may be done already. Whoever held the lease in the link before is older than this
        # process: the launcher starts no task before all of the last link have ended.
        return lease.taken_at(self._rundir, generation) > lease.started_at(mine)


def _parent(pid: int) -> int | None:
    stat = processes.stat_of(pid)
    return None if stat is None else stat.parent
