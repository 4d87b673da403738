"""The link runner: the batch script becomes this process, and it runs one link of a chain.

It takes the lease, publishes the deadline, runs the user's command as one step, turns the
scheduler's signals into the notice file, judges how the link ended and decides whether the
chain goes on. It never signals the command: what asks for a save is the notice file.

Standard library only, here and in everything it imports: it is started with `-I` by an
absolute interpreter, before and outside of any environment the user's program needs.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .. import events, lease
from ..errors import EXIT_COMPLETE, EXIT_FAILED, HpcCkptError
from ..events import Event, EventLog
from ..rundir import Result, RunDir
from ..settings import margin
from ..units import format_duration
from .backend import Backend, Cause, JobRecord
from .local import LocalBackend
from .orders import Orders
from .slurm import SlurmBackend
from .verdict import Verdict, budget_spent, judge, reason_to_stop

log = logging.getLogger("hpc_ckpt.link")

WAKE_EVERY_S = 1.0
LEASE_SLACK_S = 30.0
BACKSTOP_SHARE = 0.5
"""Of the runtime's own margin: its deadline save comes first, the backstop only if it did not."""


class _ToldToStop(Exception):
    """A signal came before the lease was taken."""


class LinkRunner:
    """One link, from lease to verdict."""

    def __init__(self, rundir: RunDir, orders: Orders, backend: Backend) -> None:
        self._rundir = rundir
        self._orders = orders
        self._backend = backend
        self._watched = {signal.SIGTERM, signal.SIGCHLD, orders.signal}
        self._deadline: float | None = None
        self._cause: Cause | None = None
        self._asked: set[str] = set()
        self._backstop_pending = False
        self._step_from = 0
        self._started = time.time()

    def run(self) -> int:
        """Exit code of the batch job: 0 unless the program failed."""
        if self._is_over(lease.highest(self._rundir) + 1):
            return EXIT_COMPLETE
        try:
            taken = self._take_lease()
        except _ToldToStop:
            log.info("told to stop while waiting for the lease; nothing was started")
            return EXIT_COMPLETE
        self._generation = taken.generation
        self._ledger = EventLog(self._rundir.ledger_file(self._generation))
        try:
            # The one before may have finished the work, or ended the chain, meanwhile.
            if self._is_over(self._generation):
                return EXIT_COMPLETE
            return self._run_link()
        finally:
            taken.release()

    # ── before ────────────────────────────────────────────────────────────────────────────
    def _is_over(self, generation: int) -> bool:
        """Whether the chain is over; a requeued or left-over array index then ends at once."""
        why = self._why_over(generation)
        if why is None:
            return False
        log.info("nothing to do: %s", why)
        self._backend.cancel_rest()
        return True

    def _why_over(self, generation: int) -> str | None:
        if self._rundir.done() is not None:
            return "the work is complete"
        halted = self._rundir.halted()
        if halted is not None:
            return f"the chain is halted: {halted}"
        return budget_spent(self._rundir, generation - 1, self._orders)

    def _take_lease(self) -> lease.Lease:
        waiting = lease.Waiting(
            probe=self._backend.probe,
            limit_s=self._backend.kill_wait_s + LEASE_SLACK_S,
            sleep=self._sleep_unless_told,
        )
        return lease.acquire(self._rundir, self._backend.holder(), waiting)

    def _sleep_unless_told(self, seconds: float) -> None:
        received = signal.sigtimedwait(self._watched, seconds)
        if received is not None and received.si_signo == signal.SIGTERM:
            raise _ToldToStop

    # ── during ────────────────────────────────────────────────────────────────────────────
    def _run_link(self) -> int:
        self._step_from = self._newest_step()
        self._publish_end(self._backend.look())
        self._ledger.emit(
            Event.LINK_STARTED,
            generation=self._generation,
            step=self._step_from,
            deadline=self._deadline,
            **vars(self._backend.holder()),
        )
        log.info("link %d: from step %d, %s", self._generation, self._step_from, self._left())
        try:
            child = self._start()
        except OSError as error:
            reason = f"{self._orders.argv[0]}: {error.strerror}"
            return self._finish(Verdict(Result.FAILED, Cause.NOT_STARTED, reason), None)
        try:
            code = self._wait_for(child)
        finally:
            _kill_group(child)  # does nothing once it has ended; never leaves it behind
        return self._finish(judge(self._rundir, self._generation, code, self._cause), code)

    def _start(self) -> subprocess.Popen[bytes]:
        argv = self._backend.step(self._orders.argv, self._rundir.log_file(self._generation))
        if self._backend.enforces_end:
            return self._popen(argv, None)
        with self._rundir.log_file(self._generation).open("ab") as stream:
            return self._popen(argv, stream.fileno())

    def _popen(self, argv: Sequence[str], output: int | None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            argv,
            cwd=self._orders.cwd,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Ignored and blocked signals are inherited across exec: without this the shim's
            # trap would never fire.
            preexec_fn=self._reset_signals,  # noqa: PLW1509 - this process has one thread
        )

    def _reset_signals(self) -> None:
        if not self._backend.enforces_end:
            os.setpgid(0, 0)  # so that the end of a local link reaches its whole tree
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, self._orders.signal):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        environment.update(self._orders.environment)
        environment.update(self._rundir.environment(self._generation, self._backend.name))
        if self._orders.threads:
            # Another thread count gives other sums: the same for every link of the chain.
            environment.setdefault("OMP_NUM_THREADS", str(self._orders.threads))
        return environment

    def _wait_for(self, child: subprocess.Popen[bytes]) -> int:
        while True:
            received = signal.sigtimedwait(self._watched, WAKE_EVERY_S)
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._on_signal(signal.Signals(received.si_signo))
            code = child.poll()
            if code is not None:
                return code
            self._look_around(child)

    def _on_signal(self, number: signal.Signals) -> None:
        """TERM is always a notice; the --signal backstop only if time is really short.

        The runtime's own deadline save then comes as late as is safe.
        """
        known = self._deadline
        if number == signal.SIGTERM:
            self._give_notice(number.name)  # first: the scheduler may be slow to answer
        self._ask_once(number.name)
        shortened = self._deadline is None or known is None or self._deadline < known - 1.0
        if number == signal.SIGTERM:
            return
        if shortened:
            self._cause = self._cause or Cause.TIME_LIMIT
            self._give_notice(number.name)
        else:
            self._backstop_pending = True

    def _look_around(self, child: subprocess.Popen[bytes]) -> None:
        if self._rundir.notice_file(self._generation).exists():
            self._ask_once("notice")
        if self._backstop_pending and self._rundir.outcome(self._generation) is not None:
            self._backstop_pending = False  # it has saved and is on its way out
        if self._backstop_pending and self._time_is_short():
            self._backstop_pending = False
            self._cause = self._cause or Cause.TIME_LIMIT
            self._give_notice(f"{self._orders.signal.name} backstop")
        if not self._backend.enforces_end:
            self._enforce_end(child)

    def _ask_once(self, occasion: str) -> None:
        """Ask the scheduler at the first of each kind of occasion, never again for it."""
        if occasion in self._asked:
            return
        self._asked.add(occasion)
        record = self._backend.look()
        self._cause = self._cause or record.cause
        self._publish_end(record)
        self._ledger.emit(
            Event.LINK_NOTICED,
            source=occasion,
            cause=self._cause,
            left_s=None if self._deadline is None else round(self._deadline - time.time(), 1),
        )

    def _publish_end(self, record: JobRecord) -> None:
        if record.end is None or record.end == self._deadline:
            return
        if self._deadline is not None:
            self._ledger.emit(Event.DEADLINE_MOVED, deadline=record.end)
        self._deadline = record.end
        with contextlib.suppress(OSError):  # the notice still comes
            self._rundir.write_deadline(self._generation, record.end)

    def _give_notice(self, source: str) -> None:
        self._asked.add("notice")  # our own needs no second question
        try:
            self._rundir.give_notice(self._generation, source)
        except OSError as error:
            log.warning("could not write the notice: %s", error)

    def _time_is_short(self) -> bool:
        save_s = self._measured_save()
        if self._deadline is None or save_s is None:
            return True
        spare_s = BACKSTOP_SHARE * margin(self._deadline - self._started)
        return self._deadline - time.time() <= save_s + spare_s

    def _measured_save(self) -> float | None:
        """Seconds of this link's slowest save, as the runtime recorded it."""
        paths = self._rundir.events.glob(f"{self._generation:08d}-*.jsonl")
        records = (record for path in paths for record in events.read(path))
        committed = (r for r in records if r["event"] == Event.COMMITTED.value)
        seconds = [r.get("full_s", r.get("save_s")) for r in committed]
        return max((float(s) for s in seconds if isinstance(s, (int, float))), default=None)

    def _enforce_end(self, child: subprocess.Popen[bytes]) -> None:
        """Where no scheduler does: notice at the end of the link, then the kill wait."""
        record = self._backend.look()
        self._publish_end(record)
        if self._deadline is None or time.time() < self._deadline:
            return
        if "end" not in self._asked:
            self._asked.add("end")
            self._cause = self._cause or record.cause or Cause.TIME_LIMIT
            self._give_notice("end of the link")
        if time.time() >= self._deadline + self._backend.kill_wait_s:
            _kill_group(child)

    # ── after ─────────────────────────────────────────────────────────────────────────────
    def _finish(self, verdict: Verdict, code: int | None) -> int:
        step = self._newest_step()
        self._ledger.emit(
            Event.LINK_ENDED,
            outcome=verdict.result,
            cause=verdict.cause,
            reason=verdict.reason,
            code=code,
            step=step,
            progress=verdict.progress(self._step_from, step),
        )
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

    def _decide_chain(self, verdict: Verdict) -> None:
        """Go on, or end the chain: done, halted, budget spent, or no progress twice running."""
        if verdict.result is Result.COMPLETE:
            done = self._rundir.done()
            self._ledger.emit(Event.CHAIN_DONE, step=None if done is None else done.step)
        else:
            reason = reason_to_stop(self._rundir, self._generation, self._orders)
            if reason is None:
                return
            self._ledger.emit(Event.CHAIN_STOPPED, reason=reason)
            log.info("the chain stops: %s", reason)
            if self._rundir.halted() is None:
                self._rundir.write_halt(reason)
        cancelled = self._backend.cancel_rest()
        if cancelled is not None:
            self._ledger.emit(Event.REST_CANCELLED, array=cancelled)

    def _newest_step(self) -> int:
        keys = self._rundir.committed()
        return keys[-1].step if keys else 0

    def _left(self) -> str:
        if self._deadline is None:
            return "end of the allocation unknown"
        return f"{format_duration(max(0.0, self._deadline - time.time()))} left"


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(child.pid) == child.pid:
                os.killpg(child.pid, signal.SIGKILL)
            else:
                child.kill()
        child.wait()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hpc_ckpt.chain.link", description="Run one link.")
    parser.add_argument("--root", required=True, type=Path)
    parser.add_argument("--backend", required=True, choices=("slurm", "local"))
    parser.add_argument("--end-file", type=Path, help="local: where the end of the link is told")
    return parser.parse_args(argv)


def _backend(arguments: argparse.Namespace, orders: Orders) -> Backend:
    if arguments.backend == "slurm":
        return SlurmBackend(os.environ, kill_wait_s=orders.kill_wait_s, cpus=orders.threads)
    return LocalBackend(end_file=arguments.end_file, kill_wait_s=orders.kill_wait_s)


def main(argv: Sequence[str] | None = None) -> int:
    # First of all: a signal that comes before anybody waits for it must stay pending.
    signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD}
    )
    logging.basicConfig(level=logging.INFO, format="hpc-ckpt: %(message)s", stream=sys.stderr)
    arguments = _parse(argv)
    rundir = RunDir(arguments.root)
    try:
        orders = Orders.read(rundir)
        signal.pthread_sigmask(signal.SIG_BLOCK, {orders.signal})
        return LinkRunner(rundir, orders, _backend(arguments, orders)).run()
    except HpcCkptError as error:
        log.error("%s", error)  # noqa: TRY400 - the message is the whole story
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
