"""The saves under way and the threads they run in; which of them hang, and are waited for no more.

Knows no tier's business: it starts, waits, and gives up.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from .orders import Order
from .persist import Worker

NICE = 10
STUCK_S = 60.0
"""A save that takes so long, and four times as long as any before, hangs in its file system."""


class UnderWay:
    """One thread for what training does not wait for, one for what it does.

    A thread's niceness cannot be taken back: what is urgent has one of its own.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._orders: deque[Order] = deque()
        self._waiting: dict[Order, Callable[[Order], None]] = {}
        """Those that have not begun, and what is to be done with each."""
        self._lock = threading.Lock()
        self._background = Worker("hpc-ckpt-persist", nice=NICE)
        self._urgent = Worker("hpc-ckpt-urgent")

    @property
    def busy(self) -> bool:
        return bool(self._background.left or self._urgent.left)

    @property
    def count(self) -> int:
        return len(self._orders)

    @property
    def hanging(self) -> set[str]:
        """Names of tiers in which something hangs."""
        return {order.tier.name for order in tuple(self._orders) if order.given_up}

    def start(self, order: Order, work: Callable[[Order], None]) -> None:
        """RuntimeError if there is no thread to be had; then nothing has begun."""
        self._orders.append(order)
        try:
            self._queue(order, work)
        except BaseException:  # taken back, then raised again
            self._orders.remove(order)
            raise

    def _queue(self, order: Order, work: Callable[[Order], None]) -> None:
        worker = self._urgent if order.urgent else self._background
        self._waiting[order] = work
        try:
            worker.start(lambda: self._begin(order, worker))
        except BaseException:  # taken back, then raised again
            del self._waiting[order]
            raise

    def _begin(self, order: Order, worker: Worker) -> None:
        """In its thread; one that was left behind finds that others have its orders."""
        with self._lock:
            mine = worker is (self._urgent if order.urgent else self._background)
            work = self._waiting.pop(order, None) if mine else None
        if work is not None:
            if order.moved:
                order.began_s = self._clock()  # what it waited for another says nothing of it
            work(order)

    def aside(self, work: Callable[[], None]) -> None:
        """Something else that the next urgent save waits for."""
        self._urgent.start(work)

    def wait_aside(self) -> None:
        self._urgent.wait()

    def end(self, order: Order) -> None:
        self._orders.remove(order)

    # ── how long ──────────────────────────────────────────────────────────────────────────
    def at_full_speed(self, order: Order) -> float:
        """Seconds it takes so far, without those it held back."""
        return self._clock() - order.began_s - order.pace.waited_s

    def save_s(self, known: float | None) -> float | None:
        """How long the next save takes at full speed: the slowest recent one, and as long again
        for each that has to end before it; or the one under way, if that takes longer."""
        orders = [order for order in tuple(self._orders) if not order.given_up]
        if not orders:
            return known
        longest = max(self.at_full_speed(order) for order in orders)
        return max(longest, (known or 0.0)) + len(orders) * (known or 0.0)

    # ── waiting ───────────────────────────────────────────────────────────────────────────
    def hurry(self) -> None:
        for order in tuple(self._orders):
            order.pace.hurry()

    def wait(self, timeout: float | None = None) -> bool:
        """True once nothing is under way; in a hurry, for training waits too."""
        self.hurry()
        began = self._clock()
        if not self._background.wait(timeout):
            return False
        left = None if timeout is None else max(0.0, timeout - (self._clock() - began))
        return self._urgent.wait(left)

    def close(self) -> None:
        for worker in (self._background, self._urgent):
            worker.close(0.0)

    # ── giving up ─────────────────────────────────────────────────────────────────────────
    def stuck(self, known: float | None) -> Order | None:
        """One that has taken so long that it hangs; given up, and not found again."""
        for order in tuple(self._orders):
            if not order.given_up and self.at_full_speed(order) >= patience_s(known):
                self._give_up(order)
                return order
        return None

    def settle(self, within_s: float) -> tuple[list[Order], list[Order]]:
        """Before a save that must not wait for ever: what does not end in time is given up, and
        what has not even begun is dropped; both are returned. The last save needs a buffer."""
        if self.wait(within_s):
            return [], []
        with self._lock:
            dropped = list(self._waiting)
            self._waiting.clear()
        for order in dropped:
            self._orders.remove(order)
        left = [order for order in tuple(self._orders) if not order.given_up]
        for order in left:
            self._give_up(order)
        return left, dropped

    def _give_up(self, order: Order) -> None:
        """Its thread is left behind, and ends if it ever comes back; others get a new one, with
        what waited behind it."""
        order.given_up = True
        with self._lock:
            behind = self._urgent if order.urgent else self._background
            if order.urgent:
                self._urgent = Worker("hpc-ckpt-urgent")
            else:
                self._background = Worker("hpc-ckpt-persist", nice=NICE)
            waiting = {o: work for o, work in self._waiting.items() if o.urgent == order.urgent}
        behind.close(0.0)
        for other, work in waiting.items():
            with suppress(RuntimeError):  # no thread to be had: it hangs as long as the other
                other.moved = True
                self._queue(other, work)


def patience_s(known: float | None) -> float:
    return max(STUCK_S, 4 * (known or 0.0))
