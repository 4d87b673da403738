"""A row of numbered pieces of work that several threads take from, each piece once.

Standard library only. It knows nothing of files or digests; pieces are expected to spend their
time where the interpreter's lock is not held. Beside it, how to keep the interpreter's garbage
collector out of a stretch of work that somebody waits for, and a thread out of others' way.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import gc
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection inside: with a large program in memory one takes 0.1 s and more."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Row:
    """Pieces 0 to count - 1. Any thread may lend a hand while some are left."""

    def __init__(self, count: int, work: Callable[[int], None]) -> None:
        self._count = count
        self._work = work
        self._next = 0
        self._under_way: set[int] = set()
        """Threads with a piece."""
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def run(self, threads: int = 1) -> None:
        """Return when every piece is done; raises the first error, after which none is begun."""
        with self:
            start_threads(min(threads, self._count) - 1, self.help)
            self.help()
        self.check()

    def __enter__(self) -> Row:
        return self

    def __exit__(self, *_: object) -> None:
        """No piece is begun any more, and none is under way when this returns.

        Also after an interrupt, which may come between two pieces: whoever leaves may give back
        the memory and the files that the others work on."""
        with self._changed:
            self._next = self._count
            # An interrupt may have come before this thread could say that it has no piece.
            self._under_way.discard(threading.get_ident())
            self._changed.wait_for(lambda: not self._under_way)

    @property
    def failed(self) -> bool:
        return self._error is not None

    def check(self) -> None:
        """Raises the first error of any piece."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # they would keep each other, and with them all that the work has filled

    def help(self, most: float = math.inf) -> None:
        """Take pieces until none is left, or so many; errors are for check() to raise."""
        while most > 0 and (piece := self._take()) is not None:
            most -= 1
            error: BaseException | None = None
            try:
                self._work(piece)
            except BaseException as raised:  # noqa: BLE001 - check() raises it in its own thread
                error = raised
            self._give_back(error)
            del error  # likewise

    def _take(self) -> int | None:
        with self._changed:
            if self._next >= self._count or self._error is not None:
                return None
            piece, self._next = self._next, self._next + 1
            self._under_way.add(threading.get_ident())
            return piece

    def _give_back(self, error: BaseException | None) -> None:
        with self._changed:
            self._under_way.discard(threading.get_ident())
            self._error = self._error or error
            self._changed.notify_all()


def start_threads(count: int, work: Callable[[], None], name: str = "hpc-ckpt-row") -> None:
    """As many as there are threads to be had: one alone does the work too."""
    with suppress(RuntimeError):
        for number in range(count):
            # A daemon: a file system that hangs must not keep a finished program from ending.
            threading.Thread(target=work, name=f"{name}-{number}", daemon=True).start()


def be_nice(level: int) -> None:
    """This thread, if it is not nicer already; it cannot be taken back."""
    with suppress(OSError):
        thread = threading.get_native_id()
        before = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, max(before, level))
