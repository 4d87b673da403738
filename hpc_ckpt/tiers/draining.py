"""Draining: committed checkpoints go down the stack in the background, one thread, newest first.

Knows the queue, the pace and what failed; tiers/drain.py copies. What is too much for the queue
is given up, but for what is to stay in the home: that is looked for in the other tiers whenever
there is time. Which ones that are (`lacking`), and retention in the target (`after`), are the
caller's.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from ..errors import CorruptCheckpoint, Fenced, NoCheckpoint
from ..events import EventLog
from ..parallel import be_nice
from ..rundir import CheckpointKey
from .backlog import Backlog, Order
from .base import Committed, Tier
from .drain import drain
from .stack import Stack
from .telling import Telling
from .turn import Gate, Turn, followed
from .writing import Pace

log = logging.getLogger("hpc_ckpt")

STUCK_S, IN_THE_WAY_S = 300.0, 10.0
"""A turn at a tier in which nothing moves for so long hangs in a file system; the second where
somebody waits for what is to come home behind it."""
INSIST_S = 60.0
AGAIN_S, SOON_S = 5.0, 0.1
NICE = 10
"""What the thread leaves to the training beside it."""


class Drainer:
    """One named thread that brings checkpoints down the stack, the newest first.

    A daemon: a file system that hangs must not keep a finished program from ending.
    """

    def __init__(
        self,
        stack: Stack,
        *,
        guard: Callable[[Tier], None],
        events: EventLog,
        arrived: Callable[[Tier, CheckpointKey], None] = lambda tier, key: None,
        after: Callable[[Tier, Committed], None] = lambda tier, committed: None,
        lacking: Callable[[Tier, Tier], Sequence[CheckpointKey]] | None = None,
        damaged: Callable[[Tier, str], None] = lambda tier, name: None,
        pace: Callable[[], Pace] = Pace,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stack = stack
        self._guard = guard
        self._says = Telling(events)
        self._tell_arrived, self._tell_damaged = arrived, damaged
        self._after, self._lacking = after, lacking
        self._new_pace, self._pace = pace, pace()
        self._hurried = False
        self._gate = Gate()
        self._clock = clock
        self._settled: dict[str, set[CheckpointKey]] = {tier.name: set() for tier in stack.tiers}
        self._changed = threading.Condition()
        self._waiting = Backlog()
        self._current: Order | None = None
        self._at: tuple[Turn, Order | None] | None = None
        """Where the thread is, how it gets on, and with what; None: it looks."""
        self._hung: set[Turn] = set()
        """At which a thread that was left behind still is. Where its copy has arrived, only what
        follows one is left out in that tier."""
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
        self._enqueue(Order(key, source, list(self._stack.targets(source))))

    def catch_up(self, key: CheckpointKey, source: Tier, broken_in: Collection[str] = ()) -> None:
        """At the start of a link: drain what the last one could not drain any more.

        A tier that lists the checkpoint already is believed, not read again; where it is known
        to be broken (`broken_in`, names of tiers) it is replaced. Does no I/O itself.
        """
        targets = list(self._stack.targets(source))
        believed = {tier.name for tier in targets}.difference(broken_in)
        self._enqueue(Order(key, source, targets, believed=frozenset(believed)))

    @property
    def lag(self) -> int:
        """How many checkpoints are on their way, the one under way and failed ones included."""
        with self._changed:
            return len(self._waiting) + (self._current is not None)

    @property
    def hanging(self) -> set[str]:
        """Names of tiers that a thread which was left behind was on its way to."""
        return {target for _, target in self._closed_ways()}

    def _closed_ways(self) -> set[tuple[str, str]]:
        return {turn.way for turn in tuple(self._hung) if not turn.arrived}

    def settled(self, tier: Tier) -> set[CheckpointKey]:
        """What it is known to have brought there; whoever finds one damaged takes it out."""
        return self._settled[tier.name]

    def hold(self, saves_into: Tier) -> None:
        """Until go_on(): somebody waits for a save into that tier. What would go with the job is
        brought to other tiers meanwhile: that may be all that is left of the link."""
        self._gate.shut(saves_into.name)

    def go_on(self) -> None:
        self._gate.open()

    def hurry(self) -> None:
        """No more pacing, now and later: somebody waits."""
        self._hurried = True
        self._pace.hurry()

    def wait(
        self, timeout: float | None = None, enough: Callable[[], bool] = lambda: False
    ) -> bool:
        """Until nothing can be done any more, or what has arrived is enough; True if everything
        has. `enough` is asked whenever one has arrived somewhere."""
        with self._changed:
            self._changed.wait_for(lambda: enough() or self._idle(), timeout)
            return self._arrived()

    def insist(self, timeout: float, enough: Callable[[], bool]) -> None:
        """wait() until it is enough: what fails is tried again, for a minute."""
        end = self._clock() + timeout
        last = min(end, self._clock() + INSIST_S)
        while not (self._outlast(end, enough) or enough() or self.fenced):
            if self._clock() >= last:
                return
            # The next try needs the rest of the time.
            time.sleep(min(AGAIN_S, max(SOON_S, (last - self._clock()) / 4)))
            with self._changed:
                self._try_again()
                self._start()
                self._changed.notify_all()

    def _outlast(self, end: float, enough: Callable[[], bool]) -> bool:
        """wait(); what stands still on its way elsewhere than home does not use up the time."""
        while not (arrived := self.wait(min(end - self._clock(), SOON_S), enough)):
            with self._changed:
                if enough() or self._idle() or self._clock() >= end:
                    break
                if self._at is not None and self._at[0].way[1] != self._stack.home.name:
                    self._leave_behind(IN_THE_WAY_S)
                    self._start()
        return arrived

    def close(self, timeout: float | None = None) -> bool:
        """In a hurry, with a last attempt at what has failed; False if something is left behind."""
        self.hurry()
        self.go_on()
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

    def _enqueue(self, order: Order) -> None:
        with self._changed:
            if self._closed or self.fenced is not None:
                return
            self._behind = self._lacking is not None and len(self._stack.tiers) > 1
            self._leave_behind()
            self._try_again()
            dropped = self._waiting.put(order) if order.targets else []
            self._start()
            self._changed.notify_all()
        self._says.dropped(dropped)

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
                self._says.failed(order, order.targets[0], error, flush=False)
        else:
            self._thread = thread

    def _leave_behind(self, patience_s: float | None = None) -> None:
        """A thread that hangs; the others' orders get a new one. The condition is held.

        Until it comes back nothing goes the same way, unless its copy has arrived.
        """
        if self._at is None or self._at[0].still_s < (patience_s or STUCK_S):
            return
        turn, order = self._at
        self._hung.add(turn)
        self._thread, self._busy, self._current, self._at = None, False, None, None
        self._says.hung(turn, order)
        left = [] if order is None else [one for one in order.targets if one.name != turn.way[1]]
        if order is not None and left and not order.looked_for:
            self._waiting.put(Order(order.key, order.source, left, believed=order.believed))

    def _was_left_behind(self) -> bool:
        return self._thread is not threading.current_thread()

    # ── the queue; the condition is held ──────────────────────────────────────────────────
    def _try_again(self) -> None:
        self._waiting.again()
        self._tried.clear()
        self._missed.clear()

    def _has_work(self) -> bool:
        return self._behind or self._waiting.ready() is not None

    def _idle(self) -> bool:
        cannot = self._closed or self._thread is None
        return not self._busy and (cannot or not self._has_work())

    def _arrived(self) -> bool:
        left = (self._waiting, self._missed, self._damaged, self._closed_ways())
        return not (self._busy or self._behind or any(left)) and self.fenced is None

    def _next(self) -> Order | None:
        """The newest that waits; None: something that is to stay is looked for.

        In turn, so that neither waits for ever where the drain is slower than the saves; when
        somebody waits for the end, the newest go first.
        """
        order = self._waiting.ready()
        if order is None or (self._behind and self._looks_next and not self._hurried):
            self._behind = self._looks_next = False
            return None
        self._looks_next = True
        self._waiting.take(order)
        return order

    # ── in the drain thread ───────────────────────────────────────────────────────────────
    def _run(self) -> None:
        be_nice(NICE)
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
            self._says.dropped(dropped)

    def _look(self) -> Order | None:
        """The oldest of what is to stay and the home lacks, in whichever tier it is."""
        home = self._stack.home
        for source in self._stack.tiers:
            if source is home or self._closed or self._lacking is None:
                continue
            # Where the first does not get through it is most likely the home that hangs.
            if self._closed_ways() & {(one.name, home.name) for one in (source, self._stack.first)}:
                continue
            found = self._found(source, home, self._lacking)
            with self._changed:
                if self._was_left_behind():
                    return None
                known = self._tried | self._damaged
                for key in found:
                    if (source.name, key) not in known and key not in self._waiting:
                        self._tried.add((source.name, key))
                        self._behind = True  # there may be more
                        self._current = Order(key, source, [home], looked_for=True)
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

    def _put_back(self, order: Order) -> list[Order]:
        if self.fenced is not None:
            self._waiting.clear()
            self._behind = False
            return []
        if order.looked_for and order.targets:
            self._missed.add(order.key)
        if order.looked_for or not order.targets or order.key in self._waiting:
            return []
        order.ready = False
        return self._waiting.put(order)

    def _carry(self, order: Order) -> None:
        """To each target; one that fails does not keep the others from theirs."""
        for target in tuple(order.targets):
            if self._closed or self._was_left_behind() or self.fenced is not None:
                return
            with self._turn(order.source, target, order) as turn:
                self._visit(order, target, turn)

    def _visit(self, order: Order, target: Tier, turn: Turn) -> None:
        try:
            if self._is_there(order, target):
                self._is_in(target, order.key)
            else:
                self._drain(order, target, turn)
        except Fenced as error:
            self.fenced = error
            self._says.failed(order, target, error)
            return
        except NoCheckpoint:
            self._says.given_up(order, f"no longer in tier {order.source.name}")
        except Exception as error:  # noqa: BLE001 - told; tried again with the next order
            self._note_damage(order, error)
            self._says.failed(order, target, error)
            return
        order.targets.remove(target)

    @contextmanager
    def _turn(self, source: Tier, target: Tier, order: Order | None = None) -> Iterator[Turn]:
        """All of it may hang: the questions before the copy, and retention after it."""
        pace = Pace() if order is None or self._hurried else self._new_pace()
        outlives = self._stack.outlives_job
        needed = outlives(target) and not outlives(source)
        give_way = partial(self._gate.wait, target.name, needed=needed)
        turn = Turn(source, target, pace, self._clock, give_way)
        with self._changed:
            self._pace, self._at = pace, (turn, order)
        if self._hurried:  # said while the new pace was being made
            pace.hurry()
        try:
            yield turn
        finally:
            with self._changed:
                if self._was_left_behind():
                    self._hung.discard(turn)
                else:
                    self._at = None

    def _note_damage(self, order: Order, error: Exception) -> None:
        if isinstance(error, CorruptCheckpoint) and not error.passing:
            self._tell_damaged(order.source, error.path.name)  # it, or what holds shards of it
            if order.looked_for:
                self._damaged.add((order.source.name, order.key))

    def _is_there(self, order: Order, target: Tier) -> bool:
        """Asked whether it is believed or not: one that hangs must not hold up the others."""
        if (order.source.name, target.name) in self._closed_ways():
            raise TimeoutError("it hangs since an earlier drain")
        listed = self._stack.ask(target, target.keys)
        return target.name in order.believed and order.key in listed

    def _drain(self, order: Order, target: Tier, turn: Turn) -> None:
        turn.begin()
        settled, told = self._settled[target.name], partial(self._tell_arrived, target)
        guard = partial(self._guard, target)
        committed = drain(order.source, target, order.key, guard, turn.took, settled, told)
        seconds = turn.seconds
        turn.arrived = True
        self._is_in(target, order.key)
        self._stack.note(target, turn.copied, seconds - turn.slept_s)
        lasts = self._stack.outlives_job(target)
        self._says.drained(order, target, turn.copied, seconds, lasts=lasts)
        if any(one.arrived and one.way[1] == target.name for one in tuple(self._hung)):
            return
        try:
            self._after(followed(target, turn), committed)
        except Fenced:
            raise
        except Exception as error:  # noqa: BLE001 - the copy stands; the next one tidies again
            log.warning("could not tidy tier %s: %s", target.name, error)

    def _is_in(self, target: Tier, key: CheckpointKey) -> None:
        """Before retention there, which may take long: somebody may wait for just this one."""
        self._tell_arrived(target, key)
        with self._changed:
            self._changed.notify_all()
