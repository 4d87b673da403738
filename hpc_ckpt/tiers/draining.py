"""Draining: committed checkpoints go down the stack in the background, one thread, newest first.

Knows the queue, the pace and what failed; tiers/drain.py copies. Retention in the target is the
caller's (`after`).
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from ..errors import Fenced, NoCheckpoint
from ..events import Event, EventLog
from ..rundir import CheckpointKey
from .base import Committed, Tier
from .drain import drain
from .stack import Stack
from .writing import Pace

log = logging.getLogger("hpc_ckpt")

LAG = 2
"""At most so many checkpoints wait to be drained."""
NICE = 10
"""What the thread leaves to the training beside it."""


@dataclass
class _Order:
    """One checkpoint on its way down."""

    key: CheckpointKey
    source: Tier
    targets: list[Tier]
    """Where it has not arrived yet."""
    ready: bool = field(default=True)
    """False: it failed, and waits for the next order."""
    believed: frozenset[str] = frozenset()
    """Names of targets that have it if they list it; they are not read."""


class _Meter:
    """What one drain copied, and how much of its time it waited for others' sake."""

    def __init__(self, pace: Pace, clock: Callable[[], float]) -> None:
        self._pace, self._clock = pace, clock
        self._began_s = clock()
        self.copied = 0
        self.slept_s = 0.0

    def took(self, nbytes: int) -> None:
        self.copied += nbytes
        began = self._clock()
        self._pace.took(nbytes)
        self.slept_s += self._clock() - began

    @property
    def seconds(self) -> float:
        return self._clock() - self._began_s


class Drainer:
    """One named thread that brings checkpoints down the stack, the newest first.

    A daemon: a file system that hangs must not keep a finished program from ending.
    """

    def __init__(
        self,
        stack: Stack,
        *,
        guard: Callable[[], None],
        events: EventLog,
        after: Callable[[Tier, Committed], None] = lambda tier, committed: None,
        pace: Callable[[], Pace] = Pace,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stack = stack
        self._guard = guard
        self._events = events
        self._after = after
        self._new_pace = pace
        self._pace = pace()
        self._hurried = False
        self._clock = clock
        self._settled: dict[str, set[CheckpointKey]] = {tier.name: set() for tier in stack.tiers}
        self._changed = threading.Condition()
        self._waiting: list[_Order] = []
        self._current: _Order | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self.fenced: Fenced | None = None
        """A newer generation has taken over: nothing more is drained."""

    # ── for whoever commits ───────────────────────────────────────────────────────────────
    def order(self, key: CheckpointKey, source: Tier) -> None:
        """Drain a committed checkpoint to every tier below; does no I/O itself.

        Orders that failed are tried again. If more than LAG wait, the oldest is given up.
        """
        self._enqueue(_Order(key, source, list(self._stack.targets(source))))

    def catch_up(self, key: CheckpointKey, source: Tier, broken_in: Collection[str] = ()) -> None:
        """At the start of a link: drain what the last one could not drain any more.

        A tier that lists the checkpoint already is believed, not read again; where it is known
        to be broken (`broken_in`, names of tiers) it is replaced. Does no I/O itself.
        """
        targets = list(self._stack.targets(source))
        believed = {tier.name for tier in targets}.difference(broken_in)
        self._enqueue(_Order(key, source, targets, believed=frozenset(believed)))

    @property
    def lag(self) -> int:
        """How many checkpoints are on their way, the one under way and failed ones included."""
        with self._changed:
            return len(self._waiting) + (self._current is not None)

    def hurry(self) -> None:
        """No more pacing, now and later: somebody waits."""
        self._hurried = True
        self._pace.hurry()

    def wait(self, timeout: float | None = None) -> bool:
        """Until nothing can be done any more; True if everything has arrived."""
        with self._changed:
            self._changed.wait_for(self._idle, timeout)
            return self._arrived()

    def close(self, timeout: float | None = None) -> bool:
        """In a hurry, with a last attempt at what has failed; False if something is left behind."""
        self.hurry()
        with self._changed:
            for order in self._waiting:
                order.ready = True
            self._start()
            self._changed.notify_all()
            self._changed.wait_for(self._idle, timeout)
            self._closed, idle, arrived = True, self._current is None, self._arrived()
            self._changed.notify_all()
        if idle and self._thread is not None:
            self._thread.join()
        return arrived

    def _enqueue(self, order: _Order) -> None:
        with self._changed:
            if self._closed or self.fenced is not None or not order.targets:
                return
            for waiting in self._waiting:
                waiting.ready = True
            dropped = self._put(order)
            self._start()
            self._changed.notify_all()
        self._tell_dropped(dropped)

    def _start(self) -> None:
        """Without a thread to be had, orders wait; the next one asks again, and close() does."""
        if self._thread is not None or not self._waiting:
            return
        thread = threading.Thread(target=self._run, name="hpc-ckpt-drain", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            for order in self._waiting:
                self._tell_failed(order, order.targets[0], error, flush=False)
        else:
            self._thread = thread

    # ── the queue; the condition is held ──────────────────────────────────────────────────
    def _put(self, order: _Order) -> list[_Order]:
        """Newest first, one order a checkpoint; what is too much comes back."""
        others = [waiting for waiting in self._waiting if waiting.key != order.key]
        ordered = sorted([order, *others], key=lambda one: one.key, reverse=True)
        self._waiting = ordered[:LAG]
        return ordered[LAG:]

    def _ready(self) -> _Order | None:
        return next((order for order in self._waiting if order.ready), None)

    def _idle(self) -> bool:
        cannot = self._closed or self._thread is None
        return self._current is None and (cannot or self._ready() is None)

    def _arrived(self) -> bool:
        return self._current is None and not self._waiting and self.fenced is None

    # ── in the drain thread ───────────────────────────────────────────────────────────────
    def _run(self) -> None:
        _be_nice()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._ready() is not None)
                order = self._ready()
                if self._closed or order is None:
                    return
                self._waiting.remove(order)
                self._current = order
            self._carry(order)
            with self._changed:
                self._current = None
                dropped = self._put_back(order)
                self._changed.notify_all()
            self._tell_dropped(dropped)

    def _put_back(self, order: _Order) -> list[_Order]:
        if self.fenced is not None:
            self._waiting = []
            return []
        if not order.targets or any(waiting.key == order.key for waiting in self._waiting):
            return []
        order.ready = False
        return self._put(order)

    def _carry(self, order: _Order) -> None:
        """To each target; one that fails does not keep the others from theirs."""
        for target in tuple(order.targets):
            if self._closed:
                return
            try:
                if not self._is_there(order, target):
                    self._drain(order, target)
            except Fenced as error:
                self.fenced = error
                self._tell_failed(order, target, error)
                return
            except NoCheckpoint:
                self._tell(order, f"no longer in tier {order.source.name}")
            except Exception as error:  # noqa: BLE001 - told; tried again with the next order
                self._tell_failed(order, target, error)
                continue
            order.targets.remove(target)

    def _is_there(self, order: _Order, target: Tier) -> bool:
        """Asked whether it is believed or not: one that hangs must not hold up the others."""
        listed = self._stack.ask(target, target.keys)
        return target.name in order.believed and order.key in listed

    def _drain(self, order: _Order, target: Tier) -> None:
        self._pace = Pace() if self._hurried else self._new_pace()
        if self._hurried:  # said while the new pace was being made
            self._pace.hurry()
        meter, settled = _Meter(self._pace, self._clock), self._settled[target.name]
        committed = drain(order.source, target, order.key, self._guard, meter.took, settled)
        seconds = meter.seconds
        self._stack.note(target, meter.copied, seconds - meter.slept_s)
        self._events.emit(
            Event.DRAINED,
            checkpoint=order.key.directory_name,
            tier=target.name,
            bytes=meter.copied,
            seconds=round(seconds, 6),
        )
        log.info("drained %s to %s", order.key.directory_name, target.name)
        try:
            self._after(target, committed)
        except Fenced:
            raise
        except Exception as error:  # noqa: BLE001 - the copy stands; the next one tidies again
            log.warning("could not tidy tier %s: %s", target.name, error)

    def _tell_failed(
        self, order: _Order, target: Tier, error: Exception, *, flush: bool = True
    ) -> None:
        """Not flushed where somebody commits, or waits: a file system may hang."""
        name = order.key.directory_name
        said = " ".join(f"{type(error).__name__}: {error}".split())
        self._events.emit(
            Event.DRAIN_FAILED, flush=flush, checkpoint=name, tier=target.name, error=said
        )
        log.warning("could not drain %s to %s: %s", name, target.name, said)

    def _tell_dropped(self, dropped: list[_Order]) -> None:
        for order in dropped:
            self._tell(order, f"more than {LAG} were waiting, and newer ones go first")

    def _tell(self, order: _Order, reason: str) -> None:
        """Not flushed: whoever commits must not wait for a file system here."""
        name = order.key.directory_name
        self._events.emit(Event.DRAIN_DROPPED, flush=False, checkpoint=name, reason=reason)
        log.info("%s is not drained: %s", name, reason)


def _be_nice() -> None:
    with suppress(OSError):
        thread = threading.get_native_id()
        before = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, max(before, NICE))
