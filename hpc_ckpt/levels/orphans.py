"""Processes whose parent has ended: they become the steward's children, and it hears of their end.

Without that each would stay as a zombie until the link is over, and those that still run would
go on beside the next attempt to run the program. Where the steward itself is killed, they become
the local link runner's. Standard library only: that one imports it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import logging
import os
import signal
import time

from .. import processes
from .namespaces import adopt_orphans
from .program import own_children, tree_of

log = logging.getLogger("hpc_ckpt.steward")

LOOK_EVERY_S = 5.0
END_S = 5.0
_AGAIN_AFTER_S = 0.02


class Orphans:
    """From now on those of every descendant of this process."""

    def __init__(self) -> None:
        adopt_orphans()
        self._look_at = 0.0

    def reap(self) -> None:
        """Take note of those that have ended; now and then, however often it is called.

        What this process has started itself is waited for by whoever started it: it is known by
        name, or shares the session of this process, as no descendant of the program does.
        """
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_EVERY_S
        here, session = os.getpid(), os.getsid(0)
        for pid, stat in processes.every():
            ours = pid in own_children or stat.session == session
            if stat.parent == here and stat.ended and not ours:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def end(self) -> None:
        end_descendants()


def end_descendants() -> None:
    """Kill and wait for whatever descends from this process; nothing of it is in use."""
    until = time.monotonic() + END_S
    while rest := tree_of(os.getpid())[1:]:
        for pid in rest:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _hear_all()
        if time.monotonic() >= until:
            log.warning("still there after SIGKILL: %s", ", ".join(map(str, rest)))
            return
        time.sleep(_AGAIN_AFTER_S)


def _hear_all() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
