"""Signals sent to this process itself become notices: a flag, nothing more.

A Python signal callback runs only between bytecodes of the main thread, so the wakeup
descriptor also tells the lookout thread, which hears of a signal while the main thread is busy
in C code. Forked children are given back harmless dispositions: the default action of the site's
signal is death, and a data worker must not save anything.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

log = logging.getLogger("hpc_ckpt")

_OFF = -1


class SignalWatch:
    """Catches SIGTERM and the site's signal between install() and remove()."""

    def __init__(
        self, signals: Iterable[signal.Signals], *, clock: Callable[[], float] = time.time
    ) -> None:
        self.signals = tuple(dict.fromkeys(signals))
        self._clock = clock
        self._pid = os.getpid()
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_wakeup = _OFF
        self._ends: tuple[int, int] | None = None
        self._arrived: list[tuple[float, str]] = []
        self._called: list[tuple[float, str]] = []

    # ── what came ─────────────────────────────────────────────────────────────────────────
    def received(self) -> list[tuple[float, str]]:
        """(unix seconds, name) of each signal, in order.

        Arrivals are what the wakeup descriptor said. A callback that ran long after its signal
        must not look like a second one, so callbacks count only where no arrival was heard.
        """
        return list(self._arrived or self._called)

    @property
    def wakeup(self) -> int:
        """The descriptor to wait on, or -1."""
        return self._ends[0] if self._ends is not None else _OFF

    def drain(self) -> None:
        """Take what the wakeup descriptor holds; called by the lookout thread."""
        if self._ends is None:
            return
        try:
            data = os.read(self._ends[0], 4096)
        except OSError:  # nothing there
            return
        now = self._clock()
        mine = {int(number): number for number in self.signals}
        self._arrived.extend((now, mine[byte].name) for byte in data if byte in mine)
        if self._previous_wakeup != _OFF:
            # Somebody, such as an event loop, waits there for its own signals.
            _write_quietly(self._previous_wakeup, data)

    # ── from install to remove ────────────────────────────────────────────────────────────
    def install(self) -> bool:
        """False, with a log line, where Python allows no signal callbacks."""
        if threading.current_thread() is not threading.main_thread():
            log.warning(
                "not in the main thread: signals are left alone; the notice file still works"
            )
            return False
        read_end, write_end = os.pipe()
        for end in (read_end, write_end):
            os.set_blocking(end, False)
        self._ends = (read_end, write_end)
        self._previous_wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in self.signals:
            self._previous[number] = signal.signal(number, self._on_signal)
        _fork_rule.watch(self)
        return True

    def remove(self) -> None:
        """Put everything back as it was before install()."""
        if self._ends is None or os.getpid() != self._pid:
            return
        if threading.current_thread() is threading.main_thread():
            for number, previous in self._previous.items():
                # None: it was installed by C code, and cannot be put back from here.
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
            signal.set_wakeup_fd(self._previous_wakeup)
        _fork_rule.active = None
        ends, self._ends = self._ends, None
        for end in ends:
            os.close(end)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A child forked behind Python's back: not ours to save.
            _fork_rule.active = self
            _fork_rule.after_in_child()
            if number == signal.SIGTERM:
                os.kill(os.getpid(), number)
            return
        self._called.append((self._clock(), signal.Signals(number).name))


class _ForkRule:
    """What forked children do with our signals. Such a rule cannot be taken back, so one is set
    per process and does nothing while no watch is installed."""

    def __init__(self) -> None:
        self.active: SignalWatch | None = None
        self._set = False

    def watch(self, watch: SignalWatch) -> None:
        self.active = watch
        if not self._set:
            os.register_at_fork(after_in_child=self.after_in_child)
            self._set = True

    def after_in_child(self) -> None:
        watch, self.active = self.active, None
        if watch is None:
            return
        signal.set_wakeup_fd(_OFF)
        for number in watch.signals:
            default = number == signal.SIGTERM
            signal.signal(number, signal.SIG_DFL if default else signal.SIG_IGN)


_fork_rule = _ForkRule()


def _write_quietly(descriptor: int, data: bytes) -> None:
    try:
        os.write(descriptor, data)
    except OSError:  # closed or full: its owner is gone or awake already
        return
