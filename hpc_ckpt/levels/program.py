"""The user's program as a child: its process tree, its end, its processor time."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from .. import processes

LOOK_EVERY_S = 0.1
TICKS = processes.TICKS
_RESET = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_FROM_OUTSIDE = frozenset((signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
_CRASHES = frozenset(
    (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP)
)
own_children: set[int] = set()
"""Started by this process in sessions of their own, and waited for by whoever started them."""


class Program:
    """One process with its descendants, in a session of its own."""

    def __init__(
        self,
        argv: Sequence[str],
        cwd: Path,
        environ: Mapping[str, str],
        output: Path | None = None,
    ) -> None:
        self._before_s = 0.0
        with contextlib.ExitStack() as stack:
            stream = None if output is None else stack.enter_context(output.open("ab"))
            self._child = subprocess.Popen(
                list(argv),
                cwd=cwd,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=None if stream is None else subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_reset_signals,  # noqa: PLW1509 - no threads beside this one yet
            )
        own_children.add(self.pid)

    @property
    def pid(self) -> int:
        return self._child.pid

    def poll(self) -> int | None:
        """Its exit code once it has ended; -N: killed by signal N."""
        return self._child.poll()

    def wait(self, until: float) -> int | None:
        """The same, waiting for it up to a moment of time.monotonic()."""
        while (code := self.poll()) is None and time.monotonic() < until:
            time.sleep(LOOK_EVERY_S)
        return code

    def tell(self, number: signal.Signals) -> None:
        """To the process itself, not to its children."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill the whole tree, whatever of it is left."""
        for pid in self.tree():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._child.wait()
        own_children.discard(self.pid)

    def tree(self) -> list[int]:
        """The process and its descendants, those that live."""
        return tree_of(self.pid)

    def leaves(self) -> list[int]:
        """Those of the tree without children."""
        mine = set(self.tree())
        parents = {stat.parent for _, stat in processes.every()}
        return sorted(mine - parents)

    def processor_s(self) -> float:
        """Processor time of the tree, ended children included."""
        mine = set(self.tree())
        return sum(stat.ticks for pid, stat in processes.every() if pid in mine) / TICKS

    def memory(self) -> int:
        """Resident bytes of the tree."""
        return memory_of(self.tree())


def how_it_ended(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def ended_from_outside(code: int) -> bool:
    """Whoever ends a program so, it is no restart."""
    return _signal_in(code) in _FROM_OUTSIDE


def crashed(code: int) -> bool:
    return _signal_in(code) in _CRASHES


def _signal_in(code: int) -> int:
    return -code if code < 0 else code - 128  # as the keeper of a program says it


def tree_of(root: int) -> list[int]:
    """A process and its descendants, parents before their children."""
    children: dict[int, list[int]] = {}
    for pid, stat in processes.every():
        children.setdefault(stat.parent, []).append(pid)
    found, pending = [], [root]
    while pending:
        pid = pending.pop()
        found.append(pid)
        pending += children.get(pid, [])
    return found


def memory_of(pids: Collection[int]) -> int:
    """Their resident bytes."""
    return sum(stat.resident for pid, stat in processes.every() if pid in pids)


_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def _reset_signals() -> None:
    # It must not outlive the steward: the next link would start a second one beside it.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in _RESET:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
