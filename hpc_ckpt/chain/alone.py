"""Programs that write files of their own cannot be fenced by a lease: before a link starts one,
that of the last link must be gone.

Slurm sees to that, but for a node of which it hears nothing more: it takes the job there for dead
and starts it elsewhere, while its processes may live. The runner there, whose srun ends then,
releases its lease with a mark that the program may be left. The shim beside the processes sees the
new lease, kills them and takes the mark away (templates/shim.sh); here that is waited for, as long
as it can take.

Standard library only: the link runner asks it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import events, lease
from ..events import Event
from ..lease import Holder
from ..rundir import RunDir
from .backend import Backend
from .past import ran_nothing
from .patience import ToldToStop, sleep_unless_told

log = logging.getLogger("hpc_ckpt.link")

LONGEST_S = 90.0
"""A shim looks every second, but a network file system may show it a new file a minute late."""
LOOK_EVERY_S = 1.0
ASK_EVERY_S = 30.0


@dataclass
class OwnProgram:
    """What the runner has seen of the program of its link."""

    begun: bool = False
    returned: int | None = None
    """By its step; None: that was not waited for to its end."""

    def may_be_left(self, backend: Backend) -> bool:
        """Ask as late as possible: a step may return before Slurm sets its node down."""
        if not self.begun:
            return False
        return self.returned is None or not backend.ended_whole(self.returned)


def wait_until_alone(
    rundir: RunDir,
    generation: int,
    backend: Backend,
    *,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Whether the last program is known to be gone; False: nobody can tell, and it was waited for.

    Link `generation` has its lease already: that is what a program left behind is ended by.
    """
    last, started = _last_started(rundir, generation)
    if started is None or lease.program_gone(rundir, last):
        return True
    holder = lease.holder_of(rundir, last) or Holder()
    nodes = started.get("nodes") or started.get("node")
    begun = asked = clock()
    if backend.surely_gone(holder, nodes):
        return True
    log.warning("link %d gave no sign of its end: is its program gone?", last)
    while not lease.program_gone(rundir, last):
        now = clock()
        if now >= begun + LONGEST_S:
            log.warning("nobody can tell; after %g s it is taken for dead", LONGEST_S)
            return False
        if now >= asked + ASK_EVERY_S:
            asked = now
            if backend.surely_gone(holder, nodes):
                break
        sleep(LOOK_EVERY_S)
    log.info("the program of link %d is gone", last)
    return True


def told_while_waiting(rundir: RunDir, generation: int, backend: Backend) -> bool:
    """Waits as above. True: the link was told to stop meanwhile."""
    try:
        wait_until_alone(rundir, generation, backend, sleep=sleep_unless_told)
    except ToldToStop:
        return True
    return False


def _last_started(rundir: RunDir, generation: int) -> tuple[int, dict[str, Any] | None]:
    """The last link before this one that started a program, and its record of that."""
    for earlier in range(generation - 1, 0, -1):
        records = list(events.read(rundir.ledger_file(earlier)))
        started = [r for r in records if r["event"] == Event.LINK_STARTED.value]
        if started and not ran_nothing(records):
            return earlier, started[-1]
    return 0, None
