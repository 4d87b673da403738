"""The saves under way and the threads they run in; which of them hang, and are waited for no more.

Knows no tier's business: it starts, waits, and gives up.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable

from ..errors import StorageHangs
from ..rundir import CheckpointKey
from .orders import Order
from .persist import LOOK_EVERY_S, Worker

log = logging.getLogger("hpc_ckpt")

NICE = 10
STUCK_S = 60.0
"""A save that takes so long, four times as long as any before, and of which nothing was written for
so long, hangs in its file system."""
FOLLOWS_S = 1.0
"""So long a save that must not wait for ever waits for what follows a commit."""


class UnderWay:
    """One thread for what training does not wait for, one for what it does.

    A thread's niceness cannot be taken back: what is urgent has one of its own. What follows a
    commit is done in the thread of its save, and may hang there as well.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        dropped: Callable[[Order, Exception], None] = lambda order, error: None,
    ) -> None:
        self._clock = clock
        self._dropped = dropped
        """Told of each that will not begin, and why."""
        self._orders: deque[Order] = deque()
        self._waiting: dict[Order, Callable[[Order], None]] = {}
        """Those that have not begun, and what is to be done with each."""
        self._lock = threading.Lock()
        self._alone_s = dict.fromkeys((False, True), -math.inf)
        """By urgency: since when its thread was left with what follows, unless a save began."""
        self._judging = threading.Lock()
        """Whoever waits looks for what hangs, in whichever thread: none is given up twice."""
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
        # As a whole: a thread that is left behind meanwhile would never begin it.
        with self._lock:
            worker = self._urgent if order.urgent else self._background
            self._waiting[order] = work
            order.queued_s = self._clock()
            try:
                worker.start(lambda: self._begin(order, worker))
            except BaseException:  # taken back, then raised again
                del self._waiting[order]
                raise

    def _begin(self, order: Order, worker: Worker) -> None:
        """In its thread; one that was left behind finds that others have its orders."""
        with self._lock:
            mine = worker is (self._urgent if order.urgent else self._background)
            if mine and order in self._waiting:
                order.pace.moved_s = self._clock()
                order.waited_s += order.pace.moved_s - order.queued_s
            work = self._waiting.pop(order, None) if mine else None
        if work is not None:
            work(order)

    def end(self, order: Order) -> None:
        self._alone_s[order.urgent] = self._clock()
        self._orders.remove(order)

    # ── how long ──────────────────────────────────────────────────────────────────────────
    def at_full_speed(self, order: Order) -> float:
        """Seconds it takes so far, without those it held back, or waited for others to end."""
        queueing_s = self._clock() - order.queued_s if order in self._waiting else 0.0
        waited_s = order.pace.waited_s + order.waited_s + queueing_s
        return self._clock() - order.began_s - waited_s

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
        with self._judging:
            self._free(known)
            for order in tuple(self._orders):
                if not order.given_up and self._hangs(order, known):
                    self._give_up(order)
                    return order
        return None

    def untold(self, known: float | None) -> Order | None:
        """One that hangs and is not given up, for there is nothing else to wait for; found once."""
        with self._judging:
            for order in tuple(self._orders):
                if not (order.given_up or order.told) and self._hangs(order, known):
                    order.told = True
                    return order
        return None

    def _hangs(self, order: Order, known: float | None) -> bool:
        return self._stands_still(order) and self.at_full_speed(order) >= patience_s(known)

    def _free(self, known: float | None) -> None:
        """Those that wait behind what follows a commit, and not behind a save, wait no longer."""
        for order in tuple(self._waiting):
            patient = self._clock() - order.queued_s < patience_s(known)
            if not patient and not self._begun(urgent=order.urgent):
                self._leave_what_follows(urgent=order.urgent)

    def _leave_what_follows(self, *, urgent: bool) -> None:
        log.warning("removing or reading old checkpoints takes too long: saves wait no longer")
        self._replace(urgent=urgent)

    def _begun(self, *, urgent: bool) -> list[Order]:
        """The saves that its present thread is at: one, or none."""
        return [
            order
            for order in tuple(self._orders)
            if order.urgent is urgent and order not in self._waiting and not order.given_up
        ]

    def _stands_still(self, order: Order) -> bool:
        """One that waits for its turn does not."""
        return order not in self._waiting and self._clock() - order.pace.moved_s >= STUCK_S

    def told(self, order: Order) -> str:
        place = order.tier.path_of(CheckpointKey(0, 0)).parent
        return (
            f"the save of step {order.about.step} hangs in tier {order.tier.name} ({place}) since "
            f"{self.at_full_speed(order):.0f} s"
        )

    def check_free(self) -> None:
        """Raises if saves that hang have every buffer."""
        hung = [self.told(order) for order in tuple(self._orders) if order.given_up]
        if hung:
            raise StorageHangs(f"no buffer is free: {'; '.join(hung)}")

    def settle(self, patience_s: float, limit_s: float | None) -> list[Order]:
        """Before a save that must not wait for ever: what does not end in time, and stands still or
        has used up the limit, is given up, and returned; what has not even begun is dropped. The
        last save needs a buffer, and a thread that does not hang. What waits behind what follows a
        commit is not dropped: it may be the last save itself."""
        began, most_s = self._clock(), math.inf if limit_s is None else limit_s
        follows_s = min(FOLLOWS_S, most_s / 2, patience_s / 2)
        left_s = most_s
        while not self.wait(max(0.0, min(LOOK_EVERY_S, follows_s, left_s))):
            left_s = began + most_s - self._clock()
            patient = self._clock() < began + patience_s
            with self._judging:
                if left_s <= 0 or not (patient or self._moves()):
                    return self._leave()
                self._leave_what_only_follows(began, follows_s)
        return []

    def _leave_what_only_follows(self, since_s: float, follows_s: float) -> None:
        for urgent, worker in ((False, self._background), (True, self._urgent)):
            alone_s = self._clock() - max(since_s, self._alone_s[urgent])
            if worker.left and not self._begun(urgent=urgent) and alone_s >= follows_s:
                self._alone_s[urgent] = self._clock()
                self._leave_what_follows(urgent=urgent)

    def _leave(self) -> list[Order]:
        with self._lock:
            dropped = list(self._waiting)
            self._waiting.clear()
        for order in dropped:
            self._drop(order, TimeoutError("the save before it hangs, and a newer one comes"))
        left = [order for urgent in (False, True) for order in self._begun(urgent=urgent)]
        for order in left:
            self._give_up(order)
        for urgent, worker in ((False, self._background), (True, self._urgent)):
            if worker.left:
                self._leave_what_follows(urgent=urgent)
        return left

    def _moves(self) -> bool:
        begun = [*self._begun(urgent=False), *self._begun(urgent=True)]
        return any(not self._stands_still(order) for order in begun)

    def _give_up(self, order: Order) -> None:
        order.given_up = True
        self._replace(urgent=order.urgent)

    def _replace(self, *, urgent: bool) -> None:
        """Its thread is left behind, and ends if it ever comes back; others get a new one, with
        what waited behind it."""
        with self._lock:
            behind = self._urgent if urgent else self._background
            if urgent:
                self._urgent = Worker("hpc-ckpt-urgent")
            else:
                self._background = Worker("hpc-ckpt-persist", nice=NICE)
            waiting = {o: work for o, work in self._waiting.items() if o.urgent is urgent}
        behind.close(0.0)
        for order, work in waiting.items():
            order.moved = True
            order.waited_s += self._clock() - order.queued_s
            try:
                self._queue(order, work)
            except RuntimeError as error:  # nobody would ever begin it
                self._drop(order, error)

    def _drop(self, order: Order, error: Exception) -> None:
        self._orders.remove(order)
        self._dropped(order, error)


def patience_s(known: float | None) -> float:
    return max(STUCK_S, 4 * (known or 0.0))
