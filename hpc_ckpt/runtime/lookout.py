"""Looks outside: notice, deadline and halt files once a second, signals when they come.

One thread does all of it, so that a hung file system stops the looking and never the training:
the training loop reads what was last seen. What follows from it is decided in triggers.py.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..rundir import HURRY_AFTER_S, Notice, RunDir, read_deadline, read_notice
from .signals import SignalWatch

log = logging.getLogger("hpc_ckpt")

LOOK_EVERY_S = 1.0
LOOK_AT_MOST_EVERY_S = 0.02


@dataclass(frozen=True)
class Places:
    """Where this link is told things."""

    rundir: RunDir
    notice: Path
    deadline: Path


class Lookout:
    """The newest knowledge of the world outside, kept up to date by a thread."""

    def __init__(
        self, places: Places, signals: SignalWatch, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._places = places
        self._signals = signals
        self._clock = clock
        self._seen: dict[Path, tuple[int, ...] | None] = {}
        self._filed: Notice | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._wake: _Wake | None = None
        self.hurry_since_s: float | None = None
        self.deadline_s: float | None = None
        self.halted: str | None = None

    @property
    def notice(self) -> Notice | None:
        """The notice of file and signals together; costs no system call."""
        moments = [(moment, name) for moment, name in self._signals.received()]
        filed = self._filed
        if filed is None and not moments:
            return None
        times = [moment for moment, _ in moments] + ([] if filed is None else [filed.time])
        sources = (() if filed is None else filed.sources) + tuple(name for _, name in moments)
        late = max(times) - min(times) >= HURRY_AFTER_S
        return Notice(min(times), sources, late or (filed is not None and filed.hurry))

    def look(self) -> None:
        """Read what changed since the last look."""
        self._signals.drain()
        if self._changed(self._places.notice):
            self._filed = read_notice(self._places.notice) or self._filed
        if self._changed(self._places.deadline):
            self.deadline_s = read_deadline(self._places.deadline)
        if self._changed(self._places.rundir.halt_file):
            self.halted = self._places.rundir.halted()
        notice = self.notice
        if notice is not None and notice.hurry and self.hurry_since_s is None:
            self.hurry_since_s = self._clock()

    def _changed(self, path: Path) -> bool:
        """What is there and cannot be read just now has not changed yet: looked at again."""
        try:
            status = path.stat()
            now = (status.st_mtime_ns, status.st_size, status.st_ino)
        except OSError:
            now = None
        if path in self._seen and self._seen[path] == now:
            return False
        if now is not None and not _is_readable(path):
            return False
        changed = now is not None or self._seen.get(path) is not None
        self._seen[path] = now
        return changed

    # ── the thread ────────────────────────────────────────────────────────────────────────
    def start(self, after_look: Callable[[], float]) -> None:
        """Look now, then once a second; `after_look` runs in the thread each time.

        It returns the seconds until the next look if that is to come sooner.
        """
        self.look()
        self._wake = _Wake()
        self._thread = threading.Thread(
            target=self._run, args=(self._wake, after_look), name="hpc-ckpt-lookout", daemon=True
        )
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """False if the thread hangs in a file system; it is left behind then."""
        if self._thread is None or self._wake is None:
            return True
        self._stopped.set()
        self._wake.up()
        self._thread.join(timeout_s)
        ended = not self._thread.is_alive()
        if ended:
            self._wake.close()
        return ended

    def _run(self, wake: _Wake, after_look: Callable[[], float]) -> None:
        poll = select.poll()
        poll.register(wake.descriptor, select.POLLIN)
        if self._signals.wakeup >= 0:
            poll.register(self._signals.wakeup, select.POLLIN)
        pause_s = LOOK_EVERY_S
        while not self._stopped.is_set():
            poll.poll(1000 * min(max(pause_s, LOOK_AT_MOST_EVERY_S), LOOK_EVERY_S))
            if self._stopped.is_set():
                return
            try:
                self.look()
                pause_s = after_look()
            except Exception:  # whatever it was, the looking must go on
                # Without a lookout the link would be killed unsaved.
                log.exception("the lookout failed; it goes on")
                self._stopped.wait(LOOK_EVERY_S)


def _is_readable(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return False
    return True


class _Wake:
    """Ends a poll at once."""

    def __init__(self) -> None:
        self.descriptor, self._write_end = os.pipe()

    def up(self) -> None:
        os.write(self._write_end, b"\0")

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self._write_end)
