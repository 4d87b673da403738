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

from ..levels.namespaces import adopt_orphans
from ..levels.orphans import end_descendants
from ..levels.program import tree_of
from ..rundir import RunDir
from .backend import Backend
from .orders import Orders
from .surroundings import environment


def start(
    rundir: RunDir, orders: Orders, backend: Backend, generation: int
) -> subprocess.Popen[bytes]:
    """Raises OSError if there is no such program."""
    if not backend.enforces_end:
        adopt_orphans()  # of a steward that is killed: no scheduler ends them
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


def poll(child: subprocess.Popen[bytes]) -> int | None:
    """Its exit code once it has ended. Orphans that have ended do not stay as zombies."""
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (code := child.poll()) is None:
        ended = os.waitid(os.P_ALL, 0, look)
        if ended is None:
            break
        if ended.si_pid != child.pid:
            os.waitpid(ended.si_pid, 0)
    return code


def kill(child: subprocess.Popen[bytes], backend: Backend) -> None:
    """The child with its group, and all that descend from it; once it has ended, what it has left
    behind, where no scheduler does that."""
    if child.poll() is None:
        descendants = tree_of(child.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(child.pid) == child.pid:
                os.killpg(child.pid, signal.SIGKILL)
        for pid in descendants:  # a steward's program has a session of its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        child.wait()
    if not backend.enforces_end:
        end_descendants()


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
