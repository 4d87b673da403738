"""The link's one step: the user's command, or the steward who saves for it, as a child.

Standard library only: the link runner starts it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from ..levels.program import tree_of
from ..rundir import RunDir
from .backend import Backend
from .orders import Orders
from .surroundings import environment


def start(
    rundir: RunDir, orders: Orders, backend: Backend, generation: int
) -> subprocess.Popen[bytes]:
    """Raises OSError if there is no such program."""
    log = rundir.log_file(generation)
    with contextlib.ExitStack() as stack:
        # srun writes the log itself.
        output = None if backend.enforces_end else stack.enter_context(log.open("ab")).fileno()
        return subprocess.Popen(
            backend.step(_argv(orders), log),
            cwd=orders.cwd,
            env=environment(os.environ, rundir, orders, generation, backend.name),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Ignored and blocked signals are inherited across exec: without this the shim's
            # trap would never fire.
            preexec_fn=functools.partial(_reset_signals, orders, backend),  # noqa: PLW1509
        )


def kill(child: subprocess.Popen[bytes]) -> None:
    """The child with its group, and all that descend from it; nothing once it has ended."""
    if child.poll() is None:
        descendants = tree_of(child.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(child.pid) == child.pid:
                os.killpg(child.pid, signal.SIGKILL)
        for pid in descendants:  # a steward's program has a session of its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        child.wait()


def _argv(orders: Orders) -> Sequence[str]:
    if not orders.levels:
        return orders.argv
    return (sys.executable, "-I", "-m", "hpc_ckpt.levels.steward")


def _reset_signals(orders: Orders, backend: Backend) -> None:
    """In the child, which has one thread."""
    if not backend.enforces_end:
        os.setpgid(0, 0)  # so that the end of a local link reaches its whole tree
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, orders.signal):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
