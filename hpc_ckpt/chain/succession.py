"""How one link is followed by the next on Slurm: tokens of an array, successors, or requeue.

A link sees to its successor when it begins, so that no way of ending can break the chain:
where nothing is pending behind it, it submits more, if the site lets compute nodes do that.

Standard library only: the link runner asks it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import SchedulerError, Unanswered
from ..events import Event, EventLog
from ..rundir import RunDir
from . import setup, slurm, unanswered
from .allocation import SlurmBackend
from .backend import Cause, Succession
from .cancelling import cancel_pending
from .orders import HALT, Orders
from .past import hosts_excluded, jobs_of
from .sweep import all_over
from .unanswered import arrays_unknown, running_script

log = logging.getLogger("hpc_ckpt.link")

AWAY_RETRY_S = 5.0
SUBMITTING_S = 300.0
"""So long jobs that follow each other may take to be submitted, while the first already runs."""
AWAY_PATIENCE_S = 3600.0
"""An allocation that waits longer for an answer costs others more than it saves."""


@dataclass
class _OnSlurm:
    """What both kinds have in common."""

    backend: SlurmBackend
    rundir: RunDir
    orders: Orders
    ledger: EventLog
    links_left: Callable[[], int]
    """What the budget still allows after this link."""
    is_unexplained: Callable[[], bool] = lambda: False
    """Whether TERM came to it, and Slurm has not said why."""

    def mail(self, address: str) -> None:
        if self.backend.job is None:
            return
        try:
            slurm.update_job(
                self.backend.job, self.backend.run, MailUser=address, MailType="END,FAIL"
            )
        except SchedulerError as error:
            log.warning("no mail will be sent: %s", error.stderr)

    def _say_last(self, why: str) -> None:
        """Also by mail, however this job ends: nothing runs after it that could send the one."""
        self.ledger.emit(Event.NOTHING_FOLLOWS, reason=why)
        log.warning("this is the last link that was submitted: %s", why)
        self._mail_if_over()

    def _mail_if_over(self) -> None:
        if self.orders.mail and all_over(self.rundir):
            self.mail(self.orders.mail)


@dataclass
class Successors(_OnSlurm):
    """array, afterany, resubmit: further members or jobs wait behind this one."""

    clock: Callable[[], float] = time.monotonic
    _settled: bool = False
    """Whether something is known to follow, or that nothing can."""
    _asked_at: float | None = None
    """When it was first asked what follows."""

    def prepare(self) -> bool:
        """Ask what is pending; submit more if nothing is and the budget allows it."""
        return self._lacking() is None

    def go_on(self) -> None:
        """What follows was submitted before, unless the link was too short for that, or refused:
        this is the last moment, and a chain must not end without a word."""
        if self._settled or self._is_being_submitted():
            return
        why = self._lacking()
        if why is not None:
            self._settled = True
            self._say_last(f"{why}; submit the chain again")

    def _lacking(self) -> str | None:
        """Why nothing is known to follow; None: it does, or all that can be said has been."""
        left = self.links_left()
        if left <= 0:
            return None  # not settled: a link that ends in a way that does not count leaves one
        try:
            if not self._pending():
                if self._is_being_submitted():
                    return "the jobs of the chain are still being submitted"
                self._follow(left)
        except SchedulerError as error:
            log.warning("nothing is known to follow this link: %s", error.stderr)
            return " ".join(error.stderr.split())
        self._settled = True
        return None

    def _is_being_submitted(self) -> bool:
        """They are written down together, after the last of them: until then this one is not."""
        now = self.clock()
        self._asked_at = now if self._asked_at is None else self._asked_at
        unknown = self.backend.job not in jobs_of(self.rundir)
        by_jobs = self.orders.strategy == "afterany" and self.orders.member is None
        return by_jobs and unknown and now - self._asked_at < SUBMITTING_S

    def _follow(self, left: int) -> None:
        if self.orders.may_submit:
            self._extend(left)
        else:
            self._say_last("this site lets no compute node submit jobs; submit the chain again")

    def end(self) -> list[str]:
        try:
            return cancel_pending(self._jobs(), self.backend.run)
        except SchedulerError:
            return []  # they end by themselves: a link that finds DONE or halt leaves at once

    def avoid(self, hosts: Sequence[str]) -> bool:
        try:
            for job in self._pending():
                slurm.update_job(job, self.backend.run, ExcNodeList=",".join(hosts))
        except SchedulerError as error:
            log.warning("could not exclude %s: %s", ", ".join(hosts), error.stderr)
            return False
        return True

    def _jobs(self) -> list[str]:
        """Every job of this chain, this one's included; of a sweep's array one index alone."""
        known = jobs_of(self.rundir)
        own = self.backend.job if self.orders.member else self.backend.array or self.backend.job
        return known if own is None or own in known else [*known, own]

    def _pending(self) -> list[str]:
        """What will begin of this chain; one squeue. A job that runs its script and that nobody
        wrote down was submitted by a link that did not live to hear the answer."""
        queue, known = slurm.in_queue(self.backend.run), self._jobs()
        ours = running_script(queue, self.orders.script, self._indices())
        for job in arrays_unknown(ours, known):
            self.ledger.emit(Event.CHAIN_EXTENDED, job=job, links=None, found=True)
            log.info("job %s was submitted without an answer; it follows this link", job)
        every = [*ours, *(one for one in queue if one.is_of(known))]
        return list(dict.fromkeys(one.id for one in every if one.will_begin))

    def _extend(self, left: int) -> None:
        """By as many as were submitted first; by one where the site takes fewer by now."""
        count = min(left, self.orders.links) if self._by_tokens() else 1
        try:
            job = self._submit(count)
        except SchedulerError as error:
            if count == 1 or slurm.is_away(error) or isinstance(error, Unanswered):
                raise
            log.info("%d more links were refused: %s", count, error.stderr)
            count, job = 1, self._submit(1)
        self.ledger.emit(Event.CHAIN_EXTENDED, job=job, links=count)
        log.info("nothing was pending: submitted %d more as %s", count, job)

    def _by_tokens(self) -> bool:
        return self.orders.member is None and self.orders.strategy == "array"

    def _submit(self, count: int) -> str:
        options = [f"--dependency=afterany:{self.backend.job}"]
        if self.orders.member is not None:
            options.append(f"--array={self.orders.member.index}")
        elif self._by_tokens():
            options.append(f"--array=1-{count}%1")
        hosts = [*hosts_excluded(self.rundir), *setup.bad_nodes(self.orders)]
        if hosts:
            every = dict.fromkeys([*self.orders.exclude, *hosts])
            options.append(f"--exclude={','.join(every)}")
        return unanswered.submit(
            self.orders.script,
            *options,
            known=self._jobs(),
            indices=self._indices(),
            run=self.backend.run,
        )

    def _indices(self) -> tuple[int, ...] | None:
        """Of a sweep's script this chain is one index."""
        return None if self.orders.member is None else (self.orders.member.index,)


@dataclass
class Requeue(_OnSlurm):
    """One job, or one array member, that goes back into the queue after each link."""

    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    _asked: bool = False
    _hosts: tuple[str, ...] | None = None
    """What to exclude once it is in the queue: Slurm changes that of pending jobs only."""

    def prepare(self) -> bool:
        return True

    def go_on(self) -> None:
        """The last thing a link does: Slurm ends the job at once."""
        if self._asked or self.backend.job is None:
            return
        end = self.clock() + AWAY_PATIENCE_S
        while not self._asked:
            try:
                if self.is_unexplained() and self._is_cancelled():
                    self._stop_cancelled()
                    return
                if not slurm.requeue(self.backend.job, self.backend.run):
                    self.backend.see_that_it_begins()
                self._asked = True
                self._exclude(self.backend.job)
            except SchedulerError as error:
                if not slurm.is_away(error) or self.clock() >= end:
                    self._say_last(f"requeue refused: {error.stderr}")
                    return
                log.warning("%s; tried again while this allocation lasts", error.stderr.strip())
                self.sleep(AWAY_RETRY_S)

    def _is_cancelled(self) -> bool:
        """Nobody could say so when it was told to end; a requeue would undo it."""
        halts = self.orders.reaction(Cause.CANCELLED) == HALT
        return halts and self.backend.asked().cause is Cause.CANCELLED

    def _stop_cancelled(self) -> None:
        reason = "cancelled by the user, as Slurm said once it answered"
        self.ledger.emit(Event.CHAIN_STOPPED, reason=reason, last_lines=[])
        log.info("the chain stops: %s", reason)
        try:
            if self.rundir.halted() is None:
                self.rundir.write_halt(reason)
        except OSError as error:
            log.warning("%s: %s", self.rundir.halt_file, error)
        self._mail_if_over()

    def end(self) -> list[str]:
        return []  # nothing waits behind it; a requeue by Slurm itself finds DONE or halt

    def avoid(self, hosts: Sequence[str]) -> bool:
        self._hosts = tuple(hosts)
        return self.backend.job is not None

    def _exclude(self, job: str) -> None:
        if self._hosts is None:
            return
        try:
            slurm.update_job(job, self.backend.run, ExcNodeList=",".join(self._hosts))
        except SchedulerError as error:
            log.warning("could not exclude %s: %s", ", ".join(self._hosts), error.stderr)


class InOneProcess:
    """The local runner: the parent starts the next link, or sees that there is none."""

    def prepare(self) -> bool:
        return True

    def go_on(self) -> None:
        pass

    def end(self) -> list[str]:
        return []

    def avoid(self, hosts: Sequence[str]) -> bool:
        return False

    def mail(self, address: str) -> None:
        pass


def succession(
    backend: object,
    rundir: RunDir,
    orders: Orders,
    ledger: EventLog,
    links_left: Callable[[], int],
    is_unexplained: Callable[[], bool],
) -> Succession:
    """The one that the plan chose."""
    if not isinstance(backend, SlurmBackend):
        return InOneProcess()
    if orders.strategy == "requeue":
        return Requeue(backend, rundir, orders, ledger, links_left, is_unexplained)
    return Successors(backend, rundir, orders, ledger, links_left, is_unexplained)
