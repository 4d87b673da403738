"""Whether DMTCP has a whole process tree: one that it does not know is missing after a restart."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from .base import Moment, NothingNew, NotNow, SaveFailed
from .binaries import deaf_to_preload
from .dmtcp_coordinator import Coordinator
from .dmtcp_window import Window
from .footprint import living
from .program import TICKS, Program

CONNECT_S = 60.0
"""As long as a process runs it may not yet have reached DMTCP: its file system may be busy."""
STRANGER_S = 1.5
"""A process belongs to DMTCP only some moments after its fork or exec."""
LOOK_EVERY_S = 0.1
_RESTORER = "mtcp_restart"
"""The executable of every process that was restarted; itself static."""


def until_finished(window: Window, coordinator: Coordinator, moment: Moment) -> None:
    """Raises NotNow while a save that nobody waits for any longer is still being made: another
    would change the path at which it looks for its files."""
    while window.unfinished is not None:
        status = coordinator.status()
        if status is not None and status.running:
            window.forget_unfinished()
        elif not moment.last or time.monotonic() >= moment.until:
            raise NotNow("the checkpoint before it is still being made")
        else:
            time.sleep(LOOK_EVERY_S)


def under_control(program: Program, coordinator: Coordinator, until: float) -> list[int]:
    """The living processes of the tree, once DMTCP has them all; waits for those that begin.

    Raises NotNow where that takes longer than until a moment of time.monotonic(), SaveFailed
    where it will never be so.
    """
    began = time.monotonic()
    until = min(until, began + CONNECT_S)
    while True:
        pids = living(program.tree())
        clients = coordinator.clients()
        strangers = {pid: name for pid, name in pids.items() if pid not in clients or is_deaf(pid)}
        if pids and not strangers:
            return list(pids)
        if program.poll() is not None:
            raise NothingNew("the program has ended")
        if time.monotonic() >= min(began + STRANGER_S, until):
            _give_up(strangers, coordinator)
        if time.monotonic() >= until:
            raise NotNow(f"still on its way to DMTCP, nothing could be saved: {_named(strangers)}")
        time.sleep(LOOK_EVERY_S)


def _give_up(strangers: dict[int, str], coordinator: Coordinator) -> None:
    """Raises SaveFailed where waiting is in vain."""
    if not coordinator.alive():
        raise SaveFailed("its coordinator is gone: it does not run under DMTCP")
    never = {pid: n for pid, n in strangers.items() if is_deaf(pid) or _age(pid) >= CONNECT_S}
    if never:
        raise SaveFailed(f"not under DMTCP (statically linked, or setuid?): {_named(never)}")


def is_deaf(pid: int) -> bool:
    """A static program keeps the connection of the shell that became it, and never answers."""
    try:
        path = Path(f"/proc/{pid}/exe").readlink()
    except OSError:
        return False
    return path.name != _RESTORER and deaf_to_preload(path) is not None


def _age(pid: int) -> float:
    """Seconds since it was made; 0 for one that is gone."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        made = int(text.rpartition(")")[2].split()[19]) / TICKS
        return time.clock_gettime(time.CLOCK_BOOTTIME) - made
    return 0.0


def _named(pids: Mapping[int, str]) -> str:
    return ", ".join(f"{name} ({pid})" for pid, name in sorted(pids.items()))
