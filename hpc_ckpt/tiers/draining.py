"""Draining: committed checkpoints go down the stack in the background, one thread, newest first.

Knows the queue, the pace and what failed; tiers/drain.py copies. What is too much for the queue
is given up, but for what is to stay in the home: that is looked for in the other tiers whenever
there is time. Which ones that are (`lacking`), and retention in the target (`after`), are the
caller's.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from ..errors import CorruptCheckpoint, Fenced, NoCheckpoint, one_line
from ..events import Event, EventLog
from ..rundir import CheckpointKey
from .base import Committed, Tier
from .drain import drain
from .stack import Stack
from .turn import Turn, followed
from .writing import Pace

log = logging.getLogger("hpc_ckpt")

LAG = 2
"""At most so many checkpoints wait to be drained."""
STUCK_S = 300.0
"""A turn at a tier in which nothing moves for so long hangs in a file system."""
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
    looked_for: bool = False
    """Found in its tier, not ordered: it does not wait in the queue."""


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
        lacking: Callable[[Tier, Tier], Sequence[CheckpointKey]] | None = None,
        pace: Callable[[], Pace] = Pace,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stack = stack
        self._guard = guard
        self._events = events
        self._after = after
        self._lacking = lacking
        self._new_pace = pace
        self._pace = pace()
        self._hurried = False
        self._clock = clock
        self._settled: dict[str, set[CheckpointKey]] = {tier.name: set() for tier in stack.tiers}
        self._changed = threading.Condition()
        self._waiting: list[_Order] = []
        self._current: _Order | None = None
        self._at: tuple[Turn, _Order | None] | None = None
        """Where the thread is, how it gets on, and with what; None: it looks."""
        self._hung: set[tuple[str, str]] = set()
        """From which tier to which a thread that was left behind is still on its way."""
        self._busy = False
        self._behind = False
        """The home may lack something that is to stay."""
        self._looks_next = False
        """An order went since the last look: before the next one it is a look's turn."""
        self._tried: set[tuple[str, CheckpointKey]] = set()
        """Of what was looked for, with its tier: not again before the next order."""
        self._damaged: set[tuple[str, CheckpointKey]] = set()
        """Likewise, and never again."""
        self._missed: set[CheckpointKey] = set()
        """Of what was looked for: failed, and will be looked for again."""
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
            self._behind = self._behind or bool(self._missed)
            self._leave_behind()
            self._try_again()
            self._start()
            self._changed.notify_all()
            self._changed.wait_for(self._idle, timeout)
            self._closed, idle, arrived = True, not self._busy, self._arrived()
            self._changed.notify_all()
        if idle and self._thread is not None:
            self._thread.join()
        return arrived

    def _enqueue(self, order: _Order) -> None:
        with self._changed:
            if self._closed or self.fenced is not None:
                return
            self._behind = self._lacking is not None and len(self._stack.tiers) > 1
            self._leave_behind()
            self._try_again()
            dropped = self._put(order) if order.targets else []
            self._start()
            self._changed.notify_all()
        self._tell_dropped(dropped)

    def _start(self) -> None:
        """Without a thread to be had, orders wait; the next one asks again, and close() does."""
        if self._thread is not None or not self._has_work():
            return
        thread = threading.Thread(target=self._run, name="hpc-ckpt-drain", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("no thread for the drain: %s", error)
            for order in self._waiting:
                self._tell_failed(order, order.targets[0], error, flush=False)
        else:
            self._thread = thread

    def _leave_behind(self) -> None:
        """A thread that hangs; the others' orders get a new one. The condition is held.

        Its copy stands if it ever comes back; until then nothing goes the same way.
        """
        if self._at is None or self._at[0].still_s < STUCK_S:
            return
        turn, order = self._at
        self._hung.add(turn.way)
        self._thread, self._busy, self._current, self._at = None, False, None, None
        self._tell_hung(turn, order)
        left = [] if order is None else [one for one in order.targets if one.name != turn.way[1]]
        if order is not None and left and not order.looked_for:
            self._put(_Order(order.key, order.source, left, believed=order.believed))

    def _was_left_behind(self) -> bool:
        return self._thread is not threading.current_thread()

    # ── the queue; the condition is held ──────────────────────────────────────────────────
    def _put(self, order: _Order) -> list[_Order]:
        """Newest first, one order a checkpoint; what is too much comes back."""
        others = [waiting for waiting in self._waiting if waiting.key != order.key]
        ordered = sorted([order, *others], key=lambda one: one.key, reverse=True)
        self._waiting = ordered[:LAG]
        return ordered[LAG:]

    def _ready(self) -> _Order | None:
        return next((order for order in self._waiting if order.ready), None)

    def _try_again(self) -> None:
        for order in self._waiting:
            order.ready = True
        self._tried.clear()
        self._missed.clear()

    def _has_work(self) -> bool:
        return self._behind or self._ready() is not None

    def _idle(self) -> bool:
        cannot = self._closed or self._thread is None
        return not self._busy and (cannot or not self._has_work())

    def _arrived(self) -> bool:
        left = (self._waiting, self._missed, self._damaged, self._hung)
        return not (self._busy or self._behind or any(left)) and self.fenced is None

    def _next(self) -> _Order | None:
        """The newest that waits; None: something that is to stay is looked for.

        In turn, so that neither waits for ever where the drain is slower than the saves; when
        somebody waits for the end, the newest go first.
        """
        order = self._ready()
        if order is None or (self._behind and self._looks_next and not self._hurried):
            self._behind = self._looks_next = False
            return None
        self._looks_next = True
        self._waiting.remove(order)
        return order

    # ── in the drain thread ───────────────────────────────────────────────────────────────
    def _run(self) -> None:
        _be_nice()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._has_work())
                if self._closed:
                    return
                self._current = order = self._next()
                self._busy = True
            order = order or self._look()
            if order is not None:
                self._carry(order)
            with self._changed:
                if self._was_left_behind():
                    return
                self._current, self._busy = None, False
                dropped = [] if order is None else self._put_back(order)
                self._changed.notify_all()
            self._tell_dropped(dropped)

    def _look(self) -> _Order | None:
        """The oldest of what is to stay and the home lacks, in whichever tier it is."""
        home = self._stack.home
        for source in self._stack.tiers:
            if source is home or self._closed or self._lacking is None:
                continue
            # Where the first does not get through it is most likely the home that hangs.
            if self._hung & {(one.name, home.name) for one in (source, self._stack.first)}:
                continue
            found = self._found(source, home, self._lacking)
            with self._changed:
                if self._was_left_behind():
                    return None
                ordered = {order.key for order in self._waiting}
                known = self._tried | self._damaged
                for key in found:
                    if (source.name, key) not in known and key not in ordered:
                        self._tried.add((source.name, key))
                        self._behind = True  # there may be more
                        self._current = _Order(key, source, [home], looked_for=True)
                        return self._current
        return None

    def _found(
        self, source: Tier, home: Tier, lacking: Callable[[Tier, Tier], Sequence[CheckpointKey]]
    ) -> Sequence[CheckpointKey]:
        with self._turn(source, home) as turn:
            try:
                self._stack.ask(source, source.keys)  # one that hangs must not hold up the others
                return lacking(followed(source, turn), followed(home, turn))
            except Exception as error:  # noqa: BLE001 - told; looked at again with the next order
                log.warning("cannot see what tier %s has to drain: %s", source.name, error)
                return []

    def _put_back(self, order: _Order) -> list[_Order]:
        if self.fenced is not None:
            self._waiting, self._behind = [], False
            return []
        if order.looked_for and order.targets:
            self._missed.add(order.key)
        elsewhere = any(waiting.key == order.key for waiting in self._waiting)
        if order.looked_for or not order.targets or elsewhere:
            return []
        order.ready = False
        return self._put(order)

    def _carry(self, order: _Order) -> None:
        """To each target; one that fails does not keep the others from theirs."""
        for target in tuple(order.targets):
            if self._closed or self._was_left_behind() or self.fenced is not None:
                return
            with self._turn(order.source, target, order) as turn:
                self._visit(order, target, turn)

    def _visit(self, order: _Order, target: Tier, turn: Turn) -> None:
        try:
            if not self._is_there(order, target):
                self._drain(order, target, turn)
        except Fenced as error:
            self.fenced = error
            self._tell_failed(order, target, error)
            return
        except NoCheckpoint:
            self._tell(order, f"no longer in tier {order.source.name}")
        except Exception as error:  # noqa: BLE001 - told; tried again with the next order
            self._note_damage(order, error)
            self._tell_failed(order, target, error)
            return
        order.targets.remove(target)

    @contextmanager
    def _turn(self, source: Tier, target: Tier, order: _Order | None = None) -> Iterator[Turn]:
        """All of it may hang: the questions before the copy, and retention after it."""
        pace = Pace() if order is None or self._hurried else self._new_pace()
        turn = Turn(source, target, pace, self._clock)
        with self._changed:
            self._pace, self._at = pace, (turn, order)
        if self._hurried:  # said while the new pace was being made
            pace.hurry()
        try:
            yield turn
        finally:
            with self._changed:
                if self._was_left_behind():
                    self._hung.discard(turn.way)
                else:
                    self._at = None

    def _note_damage(self, order: _Order, error: Exception) -> None:
        if order.looked_for and isinstance(error, CorruptCheckpoint) and not error.passing:
            self._damaged.add((order.source.name, order.key))

    def _is_there(self, order: _Order, target: Tier) -> bool:
        """Asked whether it is believed or not: one that hangs must not hold up the others."""
        if (order.source.name, target.name) in self._hung:
            raise TimeoutError("it hangs since an earlier drain")
        listed = self._stack.ask(target, target.keys)
        return target.name in order.believed and order.key in listed

    def _drain(self, order: _Order, target: Tier, turn: Turn) -> None:
        turn.begin()
        settled = self._settled[target.name]
        committed = drain(order.source, target, order.key, self._guard, turn.took, settled)
        seconds = turn.seconds
        turn.arrived = True
        self._stack.note(target, turn.copied, seconds - turn.slept_s)
        self._events.emit(
            Event.DRAINED,
            checkpoint=order.key.directory_name,
            tier=target.name,
            bytes=turn.copied,
            seconds=round(seconds, 6),
        )
        log.info("drained %s to %s", order.key.directory_name, target.name)
        try:
            self._after(followed(target, turn), committed)
        except Fenced:
            raise
        except Exception as error:  # noqa: BLE001 - the copy stands; the next one tidies again
            log.warning("could not tidy tier %s: %s", target.name, error)

    def _tell_hung(self, turn: Turn, order: _Order | None) -> None:
        """Not flushed: whoever commits must not wait for a file system here."""
        (source, target), said = turn.way, "TimeoutError: it hangs"
        if turn.arrived:
            self._events.emit(Event.RETENTION_FAILED, flush=False, tier=target, error=said)
        else:  # without a checkpoint: it looked for what the tier lacks
            fields = {"checkpoint": order and order.key.directory_name, "tier": target}
            self._events.emit(Event.DRAIN_FAILED, flush=False, **fields, error=said)
        log.warning("the drain from %s to %s hangs", source, target)

    def _tell_failed(
        self, order: _Order, target: Tier, error: Exception, *, flush: bool = True
    ) -> None:
        """Not flushed where somebody commits, or waits: a file system may hang."""
        name = order.key.directory_name
        said = one_line(error)
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
