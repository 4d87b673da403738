"""The link runner: the batch script becomes this process, and it runs one link of a chain.

It takes the lease, publishes the deadline, sees that something follows, runs the user's command
as one step, turns the scheduler's signals into the notice file, judges how the link ended and
decides whether the chain goes on. It never signals the command: the notice file asks for a save.

Standard library only, here and in everything it imports: it is started with `-I` by an
absolute interpreter, before and outside of any environment the user's program needs.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .. import lease
from ..errors import EXIT_COMPLETE, EXIT_FAILED, HpcCkptError
from ..events import Event, EventLog
from ..rundir import Result, RunDir
from ..units import format_duration
from . import logcap, phases, pinning, setup, step
from .alone import OwnProgram, told_while_waiting
from .arguments import backend_of, parse
from .backend import Backend, Cause
from .budget import budget_spent, links_left, reason_to_stop
from .clockwork import Clockwork
from .entries import level_of, write_end, write_start
from .evidence import last_lines, tail
from .lookback import avoid_bad_hosts, look_back
from .orders import HALT, Orders
from .patience import ToldToStop, Unseen, sleep_unless_told
from .succession import succession
from .sweep import all_over
from .unread import go_on_unread, go_on_unwritten, read_orders, waited_for
from .verdict import Logs, Verdict, judge, told_too_soon

log = logging.getLogger("hpc_ckpt.link")

WAKE_EVERY_S = 1.0
PREPARE_EVERY_S = 60.0
LEASE_SLACK_S = 30.0


class LinkRunner:
    """One link, from lease to verdict."""

    def __init__(
        self, rundir: RunDir, orders: Orders, backend: Backend, *, told: bool = False
    ) -> None:
        self._told = told
        """It was told to stop before it was set up: its program is not started."""
        self._rundir = rundir
        self._orders = orders
        self._backend = backend
        self._watched = {signal.SIGTERM, signal.SIGCHLD, orders.signal}
        self._generation = lease.last(rundir) + 1
        self._enter(self._generation)

    def _enter(self, generation: int) -> None:
        """What depends on the number of the link; nothing is written yet."""
        self._generation = generation
        self._ledger = EventLog(self._rundir.ledger_file(generation))
        self._succession = succession(
            self._backend,
            self._rundir,
            self._orders,
            self._ledger,
            self._links_left,
            lambda: self._clock.is_unexplained(),  # noqa: PLW0108 - it is made after this
        )
        self._clock = Clockwork(self._rundir, self._orders, self._backend, self._ledger, generation)
        self._step_from = 0
        self._terminated = False
        self._goes_on = False
        self._program = OwnProgram()
        self._prepare_at = 0.0
        self._unseen = Unseen()

    def run(self) -> int:
        """Exit code of the batch job: 0 unless the program failed."""
        try:
            if waited_for(self._is_over, self._go_on_unbegun):
                return EXIT_COMPLETE
            taken = waited_for(self._acquire, self._go_on_unbegun)
        except ToldToStop:
            return EXIT_COMPLETE
        self._enter(taken.generation)
        try:
            try:
                code = self._run_with_lease()
            finally:
                left = self._orders.alone and self._program.may_be_left(self._backend)
                taken.release(program_left=left)
        except Exception:  # the chain goes on without this link, then raised again
            self._go_on_unless_over()
            raise
        if self._goes_on:
            self._succession.go_on()
        return code

    def not_set_up(self, why: str) -> int:
        """The environment of the program could not be made here; no link begins."""
        if waited_for(self._is_over, self._go_on_unbegun):
            return EXIT_COMPLETE
        if setup.gives_up(self._orders, self._backend):
            self._stop_chain(why, [])
        else:
            setup.avoid_node(self._rundir, self._orders, self._backend, self._succession)
            told = setup.told_in_pause()
            stopped = self._rundir.halted() is not None  # meanwhile, by its user
            if not (stopped or (told and self._halt_if_cancelled())):
                self._succession.go_on()
        return EXIT_FAILED

    def _run_with_lease(self) -> int:
        if self._orders.phases_left or self._rundir.is_entering_phase():
            phases.catch_up(self._rundir, self._orders.phases_left, self._generation)
            self._orders = Orders.read(self._rundir)
        # The one before may have finished the work, or ended the chain, meanwhile.
        if self._is_over() or self._ends_with_the_last():
            return EXIT_COMPLETE
        if self._orders.alone and not self._told:
            self._told = told_while_waiting(self._rundir, self._generation, self._backend)
            if self._is_over():
                return EXIT_COMPLETE
        return self._run_link()

    def _go_on_unless_over(self) -> None:
        """Whatever went wrong here, a later link may find it better."""
        try:
            if self._why_over() is None:
                self._succession.go_on()
        except OSError as error:
            log.warning("nothing is known to follow this link: %s", error)

    def _links_left(self) -> int:
        seen = None if self._clock.seen is None else self._clock.seen.cause
        return links_left(self._rundir, self._generation, self._orders, seen)

    # ── before ────────────────────────────────────────────────────────────────────────────
    def _go_on_unbegun(self, *, told: bool) -> None:
        """Without a lease of this link; a later one may find storage better."""
        if not told:
            go_on_unwritten(self._rundir, self._orders.strategy, self._backend)
            return
        log.info("told to stop while waiting for the lease; nothing was started")
        if not self._halt_if_cancelled():
            self._succession.go_on()

    def _is_over(self) -> bool:
        """Whether the chain is over; a requeued or left-over array index then ends at once."""
        why = self._why_over()
        if why is None:
            return False
        log.info("nothing to do: %s", why)
        self._succession.end()
        return True

    def _why_over(self) -> str | None:
        if self._rundir.done() is not None and not self._orders.phases_left:
            return "the work is complete"
        halted = self._rundir.halted()
        if halted is not None:
            return f"the chain is halted: {halted}"
        return budget_spent(self._rundir, self._generation - 1, self._orders)

    def _halt_if_cancelled(self) -> bool:
        """It has no ledger of its own: the halt file tells the others."""
        self._clock.terminated()  # so that a requeue asks once more, where this has no answer
        record = self._backend.look()
        if record.cause is not None and self._orders.reaction(record.cause) == HALT:
            reason = f"{record.cause.value} before link {self._generation} began"
            self._write_halt(reason)
            self._succession.end()
            return True
        return False

    def _acquire(self) -> lease.Lease:
        waiting = lease.Waiting(
            probe=self._backend.probe,
            limit_s=self._backend.kill_wait_s + LEASE_SLACK_S,
            sleep=sleep_unless_told,
        )
        return lease.acquire(self._rundir, self._backend.holder(), waiting)

    def _ends_with_the_last(self) -> bool:
        """Whether a link that could not say so itself, or not act on it, was the last one."""
        known = (self._rundir, self._generation, self._orders, self._backend, self._ledger)
        try:
            # Once it was told, nothing breaks its waiting off: the next link asks.
            cancelled = None if self._told else look_back(*known)
        except ToldToStop:
            self._told, cancelled = True, None
        avoid_bad_hosts(
            self._rundir, self._generation - 1, self._orders, self._succession, self._ledger
        )
        reason = cancelled or reason_to_stop(self._rundir, self._generation - 1, self._orders)
        if reason is not None:
            self._stop_chain(reason, [])
        return reason is not None

    # ── during ────────────────────────────────────────────────────────────────────────────
    def _run_link(self) -> int:
        self._step_from = self._newest_step()
        self._clock.begin()
        logs = Logs.of(self._rundir, self._generation, self._batch_log())
        write_start(
            self._ledger,
            self._backend,
            self._generation,
            self._step_from,
            deadline=self._clock.deadline,
            queued=self._clock.queued,
        )
        log.info("link %d: from step %d, %s", self._generation, self._step_from, self._left())
        if self._told:
            self._clock.terminated()
            self._clock.look_again()
        if self._told or self._clock.seen is not None:
            return self._finish(told_too_soon(self._clock.seen), None)
        different = pinning.changed(self._orders.packages or {})
        if different is not None:
            return self._finish(Verdict(Result.FAILED, Cause.NOT_STARTED, different), None)
        verdict, code = self._run_command(logs)
        while verdict.result is Result.COMPLETE and self._orders.phases_left:
            self._next_phase()
            if (halted := self._rundir.halted()) is not None:
                return self._finish(Verdict(Result.SAVED, Cause.HALTED, halted, by_code=True), code)
            verdict, code = self._run_command(logs)
        return self._finish(verdict, code)

    def _batch_log(self) -> Path:
        return self._orders.batch_logs / f"slurm-{self._backend.holder().job}.log"

    def _run_command(self, logs: Logs) -> tuple[Verdict, int | None]:
        try:
            child = step.start(self._rundir, self._orders, self._backend, self._generation)
        except OSError as error:
            reason = f"{self._orders.argv[0]}: {error.strerror}"
            return Verdict(Result.FAILED, Cause.NOT_STARTED, reason), None
        self._program = OwnProgram(begun=True)
        try:
            code = self._program.returned = self._wait_for(child)
        finally:
            step.kill(child, self._backend)  # nothing of it is left behind
        self._clock.hear_shim()  # it may have ended between two ticks
        outcome = self._rundir.outcome(self._generation)
        unsaid = outcome is None or outcome.by_code
        if code != EXIT_COMPLETE or self._terminated or unsaid:
            self._clock.look_again()  # it may have left sooner than anybody asked
        told = self._clock.is_terminated or self._clock.is_forwarded
        seen = self._clock.seen
        return judge(self._rundir, self._generation, code, seen, logs, told=told), code

    def _next_phase(self) -> None:
        """The next command of the chain begins in what is left of this link."""
        done = self._orders.phase
        self._ledger.emit(Event.PHASE_DONE, phase=done, step=self._newest_step(), **self._level())
        phases.complete(self._rundir, done, self._generation)
        self._orders = Orders.read(self._rundir)
        self._step_from = -1  # a complete command is progress, wherever the next one gets
        log.info("command %d is complete; the next one begins", done + 1)

    def _wait_for(self, child: subprocess.Popen[bytes]) -> int:
        while True:
            received = signal.sigtimedwait(self._watched, WAKE_EVERY_S)
            if received is not None and received.si_signo != signal.SIGCHLD:
                with self._unseen:
                    self._on_signal(signal.Signals(received.si_signo))
            code = step.poll(child)
            if code is not None:
                return code
            self._look_around(child)

    def _on_signal(self, number: signal.Signals) -> None:
        """TERM is always a notice; the --signal backstop only if time is really short."""
        if number != signal.SIGTERM:
            self._clock.warned(number)
            return
        # The first one may be the start of a grace; the second is the end of it.
        occasion = f"second {number.name}" if self._terminated else number.name
        self._terminated = True
        self._clock.give_notice(number.name)  # first: the scheduler may be slow to answer
        record = self._clock.ask_once(occasion)
        self._clock.terminated()
        seen = self._clock.seen
        if record is None or not record.ending or seen is None or seen.cause is None:
            return
        if self._orders.reaction(seen.cause) != HALT:
            # Whether the program leaves within the kill wait is not known.
            self._succession.go_on()

    def _look_around(self, child: subprocess.Popen[bytes]) -> None:
        with self._unseen:
            self._see_to_succession()
        with self._unseen:
            self._clock.tick()
        dropped = logcap.cut(self._rundir.log_file(self._generation), self._orders.log_limit)
        if dropped:
            self._ledger.emit(Event.LOG_CUT, bytes=dropped)
        if not self._backend.enforces_end and self._clock.is_past_end():
            step.kill(child, self._backend)

    def _see_to_succession(self) -> None:
        """Once, and again while the scheduler does not answer."""
        now = time.monotonic()
        if now < self._prepare_at:
            return
        self._prepare_at = float("inf") if self._succession.prepare() else now + PREPARE_EVERY_S

    # ── after ─────────────────────────────────────────────────────────────────────────────
    def _finish(self, verdict: Verdict, code: int | None) -> int:
        step = self._newest_step()
        more = {**self._level(), **self._clock.said_of_the_end()}
        write_end(self._ledger, verdict, code, self._step_from, step, **more)
        log.info(
            "link %d: %s at step %d (%s)",
            self._generation,
            verdict.cause.value,
            step,
            verdict.reason,
        )
        if verdict.result is not None:
            self._decide_chain(verdict)
        return EXIT_FAILED if verdict.result is Result.FAILED else EXIT_COMPLETE

    def _level(self) -> dict[str, Any]:
        return level_of(self._rundir, self._orders, self._generation)

    def _decide_chain(self, verdict: Verdict) -> None:
        """Go on, or end the chain: done, halted, budget spent, or no progress twice running."""
        if verdict.result is Result.COMPLETE:
            done = self._rundir.done()
            self._ledger.emit(Event.CHAIN_DONE, step=None if done is None else done.step)
            self._end_succession()
            return
        # First: two failures on a host that is now excluded say little of the program.
        avoid_bad_hosts(
            self._rundir, self._generation, self._orders, self._succession, self._ledger
        )
        reason = reason_to_stop(self._rundir, self._generation, self._orders)
        if reason is None:
            self._goes_on = True
            return
        failed = verdict.result is Result.FAILED
        lines = last_lines(tail(self._rundir.log_file(self._generation))) if failed else []
        self._stop_chain(reason, lines)

    def _stop_chain(self, reason: str, lines: list[str]) -> None:
        self._ledger.emit(Event.CHAIN_STOPPED, reason=reason, last_lines=lines)
        log.info("the chain stops: %s", reason)
        for line in lines:
            log.info("  %s", line)
        self._write_halt(reason)
        self._end_succession()

    def _write_halt(self, reason: str) -> None:
        """Whatever becomes of it, what is pending must be cancelled."""
        try:
            if self._rundir.halted() is None:
                self._rundir.write_halt(reason)
        except OSError as error:
            log.warning("%s: %s", self._rundir.halt_file, error)

    def _end_succession(self) -> None:
        cancelled = self._succession.end()
        if cancelled:
            self._ledger.emit(Event.REST_CANCELLED, jobs=cancelled)
        if self._orders.mail and all_over(self._rundir):
            self._succession.mail(self._orders.mail)

    def _newest_step(self) -> int:
        newest = self._rundir.newest()
        return 0 if newest is None else newest.step

    def _left(self) -> str:
        if self._clock.deadline is None:
            return "end of the allocation unknown"
        return f"{format_duration(max(0.0, self._clock.deadline - time.time()))} left"


def main(argv: Sequence[str] | None = None) -> int:
    # First of all: a signal that comes before anybody waits for it must stay pending.
    signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD}
    )
    logging.basicConfig(level=logging.INFO, format="hpc-ckpt: %(message)s", stream=sys.stderr)
    arguments = parse(argv)
    try:
        rundir, orders = read_orders(arguments)
        signal.pthread_sigmask(signal.SIG_BLOCK, {orders.signal})
        setup.started(orders)
        backend = backend_of(arguments, orders)
        make = partial(LinkRunner, rundir, orders, backend, told=arguments.told)
        runner = waited_for(make, partial(go_on_unread, arguments))
        if arguments.not_set_up is not None:
            return runner.not_set_up(arguments.not_set_up)
        if arguments.set_up:
            setup.worked(orders, backend.node)
        return runner.run()
    except ToldToStop:
        log.warning("told to stop while waiting for storage; nothing was started")
        return EXIT_FAILED
    except (HpcCkptError, OSError) as error:
        log.error("%s", error)  # noqa: TRY400 - the message is the whole story
        return error.exit_code if isinstance(error, HpcCkptError) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
