"""Hears the scheduler's signals for a process whose main thread is busy with the work.

The callbacks do nothing: a wakeup descriptor tells a thread, which hears of a signal also while
the main thread is in C code or has given its callbacks to a Checkpointer, which passes on what
it hears. Forked children are given back harmless dispositions: a data worker that is ended by
its parent must not look like a notice.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import functools
import logging
import os
import select
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

log = logging.getLogger("hpc_ckpt.task")

HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
LOOK_EVERY_S = 0.5
JOIN_S = 5.0
_OFF = -1


class Sentry:
    """After listen() a signal ends nothing; from start() to stop() it is reported."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = _OFF
        self._ends: tuple[int, int] | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def listen(self) -> None:
        """What comes from here on is kept until start()."""
        if threading.current_thread() is not threading.main_thread():
            log.warning("not in the main thread: signals are left alone; the notice file works")
            return
        self._ends = os.pipe()
        for end in self._ends:
            os.set_blocking(end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)
        for number in HEARD:
            self._before[number] = signal.signal(number, _do_nothing)
        _set_fork_rule()

    def start(self, on_signal: Callable[[str], None], on_look: Callable[[], None]) -> None:
        """In a thread: `on_signal` with the name of each signal, `on_look` twice a second."""
        self._thread = threading.Thread(
            target=self._run, args=(on_signal, on_look), name="hpc-ckpt-sentry", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Nothing is reported after this; a signal still ends nothing."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._ends is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            os.write(self._ends[1], b"\0")
        if self._thread is not None:
            self._thread.join(JOIN_S)
        if self._ends is not None and not (self._thread and self._thread.is_alive()):
            for end in self._ends:
                os.close(end)

    def restore(self) -> None:
        """Put back the callbacks that were there before listen()."""
        for number, before in self._before.items():
            # None: it was installed by C code, and cannot be put back from here.
            signal.signal(number, signal.SIG_DFL if before is None else before)

    def _run(self, on_signal: Callable[[str], None], on_look: Callable[[], None]) -> None:
        poll = select.poll()
        if self._ends is not None:
            poll.register(self._ends[0], select.POLLIN)
        while not self._stopped.is_set():
            poll.poll(1000 * LOOK_EVERY_S)
            try:
                for name in self._arrived():
                    on_signal(name)
                if not self._stopped.is_set():
                    on_look()
            except Exception:  # whatever it was, without a sentry the job would not come back
                log.exception("the sentry failed; it goes on")
                self._stopped.wait(LOOK_EVERY_S)

    def _arrived(self) -> list[str]:
        if self._ends is None:
            return []
        try:
            data = os.read(self._ends[0], 4096)
        except BlockingIOError:
            return []
        names = {int(number): number.name for number in HEARD}
        return [names[byte] for byte in data if byte in names]


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """The wakeup descriptor has told already."""


@functools.cache
def _set_fork_rule() -> None:
    """Such a rule cannot be taken back: set once, and it acts only where our callbacks are."""
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


_mask = threading.local()


def _before_fork() -> None:
    """A child that is signalled before it has let go of our descriptor would speak for us."""
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _in_child() -> None:
    ours = [number for number in HEARD if signal.getsignal(number) is _do_nothing]
    if ours:
        signal.set_wakeup_fd(_OFF)
    for number in ours:
        # The default action of the others is death, and a child of the step hears them too.
        default = number == signal.SIGTERM
        signal.signal(number, signal.SIG_DFL if default else signal.SIG_IGN)
    _after_fork()
