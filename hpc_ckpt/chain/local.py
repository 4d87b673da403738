"""The local runner: the same links one after the other on this machine, without Slurm.

LocalBackend is what a link sees; LocalChain is the parent that starts the links, tells each
when it must end, and leaves nothing running. Standard library only: link.py imports it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .. import fsio, lease, processes
from ..errors import HpcCkptError, RootError
from ..lease import Holder
from ..rundir import RunDir
from .backend import Cause, JobRecord

TICK_S = 0.1


@dataclass
class LocalBackend:
    """This machine, seen from inside one link."""

    end_file: Path | None = None
    kill_wait_s: float = 30.0
    name: str = "local"
    enforces_end: bool = False
    _parent: int = field(default_factory=os.getppid)
    _orphaned_at: float | None = None

    @property
    def node(self) -> str | None:
        return None

    def holder(self) -> Holder:
        return Holder.here()

    def probe(self, holder: Holder) -> bool | None:
        return lease.alive_here(holder)

    @property
    def nodes(self) -> str | None:
        return None

    def surely_gone(self, holder: Holder, nodes: str | None) -> bool:
        return lease.alive_here(holder) is False  # what it started dies with it

    def ended_whole(self, code: int) -> bool:
        return True  # the runner has ended what was left

    def like(self, node: str) -> list[str]:
        return []

    def look(self) -> JobRecord:
        """What the parent wrote; a parent that is gone ends the link now."""
        if os.getppid() != self._parent:
            self._orphaned_at = self._orphaned_at or time.time()
            return JobRecord(self._orphaned_at, Cause.CANCELLED)
        if self.end_file is None:
            return JobRecord()
        try:
            record = json.loads(self.end_file.read_bytes())
            cause = record.get("cause")
            return JobRecord(float(record["end"]), None if cause is None else Cause(cause))
        except (OSError, ValueError, KeyError, TypeError):
            return JobRecord()

    def cancelled_members(self, before: str | None = None) -> list[tuple[str, int]] | None:
        return []

    def explain(self, holder: Holder) -> JobRecord:
        return JobRecord()  # nobody keeps a record of it

    def step(self, argv: Sequence[str], log: Path) -> list[str]:
        return list(argv)


@dataclass(frozen=True)
class Incident:
    """Something that befalls one link on purpose: the demo and rehearsals use it."""

    environment: Mapping[str, str] = field(default_factory=dict)
    preempt_when: Callable[[], bool] | None = None
    grace_s: float = 10.0
    link_time_s: float | None = None
    """Another length for this link."""


def end_file(rundir: RunDir) -> Path:
    """Where the end of a local link is told."""
    return rundir.control / "local-end.json"


def tell_end(rundir: RunDir, end: float, cause: Cause | None) -> None:
    fsio.write_atomic(end_file(rundir), json.dumps({"end": end, "cause": cause}).encode())


class Interrupted(Exception):
    """Ctrl-C: the link saved what it could and nothing is running."""


class LocalChain:
    """Runs links until the work is done, the chain stops, or the tokens are used up."""

    def __init__(
        self,
        rundir: RunDir,
        *,
        links: int,
        link_time_s: float,
        kill_wait_s: float,
        incidents: Mapping[int, Incident] | None = None,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._rundir = rundir
        self._links = links
        self._link_time_s = link_time_s
        self._kill_wait_s = kill_wait_s
        self._incidents = incidents or {}
        self._on_tick = on_tick
        self._end_file = end_file(rundir)
        self._log_file = rundir.logs / "local.log"

    def run(self) -> bool:
        """True if the work is complete. Raises Interrupted after Ctrl-C, nothing left running."""
        with self._alone():
            return self._run_links()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Between two links nobody holds the lease; a second runner must not slip in."""
        descriptor = os.open(self._rundir.control, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise RootError(self._rundir.root, "another 'hpc-ckpt run' is at work on it") from None
        finally:
            os.close(descriptor)

    def _run_links(self) -> bool:
        for number in range(1, self._links + 1):
            if self._rundir.done() is not None or self._rundir.halted() is not None:
                break
            before = lease.highest(self._rundir)
            self._run_link(self._incidents.get(number, Incident()))
            if lease.highest(self._rundir) == before:
                raise HpcCkptError(f"the link did not begin; see {self._log_file}")
        return self._rundir.done() is not None

    def _run_link(self, incident: Incident) -> None:
        length_s = incident.link_time_s or self._link_time_s
        self._tell_end(time.time() + length_s, None)
        process = self._start(incident)
        try:
            self._attend(process, incident)
        except KeyboardInterrupt:
            self._stop(process)
            raise Interrupted from None
        finally:
            kill_session(process.pid)
            process.wait()

    def _start(self, incident: Incident) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-I", "-m", "hpc_ckpt.chain.link", "--backend=local"]
        argv += [f"--root={self._rundir.root}", f"--end-file={self._end_file}"]
        with self._log_file.open("ab") as stream, _blocked(signal.SIGTERM):
            return subprocess.Popen(
                argv,
                env={**os.environ, **incident.environment},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,  # Ctrl-C reaches this process only, and it decides
            )

    def _attend(self, process: subprocess.Popen[bytes], incident: Incident) -> None:
        preempt = incident.preempt_when
        while process.poll() is None:
            self._on_tick()
            if preempt is not None and preempt():
                preempt = None
                self._tell_end(time.time() + incident.grace_s, Cause.PREEMPTED)
                process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TICK_S)
        self._on_tick()

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        """Ask for a save and wait for it; a second Ctrl-C kills at once."""
        self._tell_end(time.time() + self._kill_wait_s, Cause.CANCELLED)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
            process.wait(2 * self._kill_wait_s)

    def _tell_end(self, end: float, cause: Cause | None) -> None:
        tell_end(self._rundir, end, cause)


class Command:
    """A command as the work of this very process: its own output, the notice file as channel."""

    returns = False

    def __init__(self, argv: Sequence[str], *, own_session: bool) -> None:
        self._argv = list(argv)
        self._own_session = own_session
        """Where no scheduler ends what the command leaves behind."""
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return Path(self._argv[0]).name

    def run(self) -> tuple[int, int]:
        """Its exit code, also as the result."""
        # Where every process of a step is signalled, the default action would end the command.
        guarded = ["sh", "-c", 'trap "" USR1 USR2; exec "$@"', "sh", *self._argv]
        self._child = subprocess.Popen(
            guarded, stdin=subprocess.DEVNULL, start_new_session=self._own_session
        )
        try:
            code = self._child.wait()
        finally:
            self.abandon()
        return code, code

    def abandon(self) -> None:
        """Kill what still runs."""
        if self._child is None:
            return
        if self._own_session:
            kill_session(self._child.pid)
        elif self._child.poll() is None:
            self._child.kill()


@contextlib.contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    """What is started inside inherits the mask: a signal that comes too early stays pending."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill_session(leader: int) -> None:
    """Kill whatever is left of a session; nothing of a link may outlive it."""
    for pid, stat in processes.every():
        if stat.session == leader and not stat.ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
