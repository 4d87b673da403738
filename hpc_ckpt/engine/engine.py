"""The engine: saves from snapshot to commit, and what follows a commit.

Measures itself and reports events. When to save and when to stop is decided elsewhere.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from functools import partial

from ..errors import BrokenOff, Fenced, UnsupportedState, one_line
from ..events import Event
from ..format.manifest import Manifest, ShardRecord
from ..parallel import uncollected
from ..rundir import CheckpointKey
from ..tiers.base import Committed, Tier
from ..tiers.draining import Drainer
from ..tiers.retention import lacking
from ..tiers.writing import Pace
from .destination import Destination, Wish
from .failures import Failures
from .labels import manifest_of
from .orders import About, Order, Publisher
from .pacing import BACKGROUND_RATE, Pacing
from .persist import Pending, persist
from .published import Guard, Published
from .restore import Origin
from .snapshot import SLOTS, Camera
from .standing import Standing
from .steady import Steady
from .tidying import Tidier
from .times import SaveTimes
from .underway import STUCK_S, UnderWay, patience_s
from .warming import Warming

log = logging.getLogger("hpc_ckpt")


class Engine:
    """Owns the buffers, the persist threads and the record of what was committed."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        origin: Origin | None = None,
        step: int = 0,
        known_save_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._publisher = publisher
        self._times = SaveTimes(known_save_s)
        self._clock = clock
        self._camera = Camera(publisher.memory)
        self._failures = Failures(publisher.events, self._times, self._overtaken)
        self._under_way = UnderWay(clock, self._failures.drop)
        self._warming = Warming(self._camera)
        self._pacing = Pacing()
        guard = Guard(publisher.lease.check, publisher.stack, publisher.events)
        self._published = Published(guard.of_order, self._failures.damaged)
        self._tidier = Tidier(
            publisher.keep,
            publisher.lease,
            publisher.events,
            on_fenced=self._overtaken,
            guard=guard.for_removal,
            on_damaged=self._distrust,
            on_gone=self._gone,
            on_sound=self._failures.sound,
            pace=self._pacing.calm,
            origin=origin,
        )
        self._drainer = Drainer(
            publisher.stack,
            guard=guard.for_commit,
            events=publisher.events,
            arrived=self._stands,
            after=self._tidier.tidy,
            lacking=partial(lacking, keep=publisher.keep) if publisher.keep.lasting else None,
            damaged=self._tidier.distrust,
            pace=lambda: Pace(BACKGROUND_RATE),
        )
        self._standing = Standing(self._published, self._tidier, self._drainer, publisher.stack)
        self.destination = Destination(publisher.stack, self._under_way, self._drainer)
        self._steady = Steady()
        if origin is not None:
            self._go_on_from(origin)
        self.snapshot_step = step
        """Step of the last snapshot, or where this process began."""
        self.snapshot_s = clock()
        self.prepared = False
        self.committed: Committed | None = None
        """The newest checkpoint this process committed."""
        self.fenced: Fenced | None = None

    def _go_on_from(self, origin: Origin) -> None:
        self._standing.stands(origin.tier, origin.key)
        if origin.tier is self._publisher.stack.first:
            # What these refer to was read there; in another tier nobody has looked at it.
            self._steady = Steady(origin.set_apart, origin.shards)
            held = (CheckpointKey.parse(record.holder or "") for record in origin.shards)
            self.destination.note(origin.tier, filter(None, held))
        broken = [name for name, keys in origin.broken.items() if origin.key in keys]
        self._drainer.catch_up(origin.key, origin.tier, broken)

    # ── what is known ─────────────────────────────────────────────────────────────────────
    @property
    def busy(self) -> bool:
        """Something is being written, or a buffer made."""
        return self._under_way.busy or self._warming.active

    @property
    def ready(self) -> bool:
        """A snapshot can be taken now."""
        return not self._warming.active and self._under_way.count < SLOTS and self._camera.ready

    @property
    def why_not_ready(self) -> str:
        if self._warming.active:
            return "the buffer is being prepared"
        return "no buffer is free: the last save is still under way"

    @property
    def newest(self) -> CheckpointKey | None:
        """The newest checkpoint of this lineage: committed here, else the restored one."""
        return self._published.newest

    @property
    def lasting(self) -> CheckpointKey | None:
        """The newest of them that the next link can find."""
        return self._published.lasting

    @property
    def ever_saved(self) -> bool:
        return self._published.any

    def save_s(self) -> float | None:
        """How long the next save takes at full speed, with what has to end before it."""
        return self._under_way.save_s(self.destination.last_save_s(self._times.save_s))

    @property
    def stall_s(self) -> float | None:
        """Seconds the slowest recent save cost training: waiting, and slower steps beside it."""
        return self._times.stall_s

    def note_stolen(self, seconds: float) -> None:
        self._times.add_stolen(seconds)

    @property
    def failed_at_s(self) -> float | None:
        """Unix seconds of the last failure, if no save has begun since."""
        return self._failures.at_s

    def take_failure(self) -> Exception | None:
        """The error of a background save that nobody has been told of yet."""
        return self._failures.take()

    # ── before the first save ─────────────────────────────────────────────────────────────
    def prepare(self, state: object, frozen: Collection[int] = ()) -> int:
        """Plan the copy; returns the bytes of its buffer, which warm() makes.

        `frozen`: addresses of memory that no optimizer changes.
        """
        self.prepared = True
        self._steady.suggest(self._camera.leaves_at(state, frozen))
        return self._camera.plan(state, self._steady.expected)

    def warm(self, size: int) -> None:
        self._warming.first(size)

    def make_room(self) -> None:
        self._warming.second()

    # ── saving ────────────────────────────────────────────────────────────────────────────
    def save(
        self,
        capture: Callable[[], object],
        about: About,
        pending: Pending | None = None,
        wish: Wish | None = None,
    ) -> Pending:
        """Copy the state now, persist it in the background; only while ready.

        When it returns, training may go on. What cannot be represented is raised here; what the
        memory or the storage refuses becomes a failed save. An urgent one is written at full speed.
        """
        wish = wish or Wish()
        self._warming.wait()
        if wish.urgent and not self._camera.ready:
            self._warming.grow(last=wish.last)
        pending = pending or Pending(about.reason)
        self._tidier.calm()
        began, self._failures.at_s = self._clock(), None
        self._pacing.interval_s = began - self.snapshot_s
        self.snapshot_step, self.snapshot_s = about.step, began
        pending.step = about.step
        self._publisher.events.emit(
            Event.SAVE_STARTED,
            flush=False,  # the persist thread writes it: a hung file system must not stop training
            step=about.step,
            reason=about.reason,
            training_s=round(about.training_s, 6),
        )
        try:
            if not self._camera.ready:
                self._under_way.check_free()
            with uncollected():
                snapshot = self._camera.take(capture(), self._steady.expected)
        except UnsupportedState:
            raise
        except Exception as error:  # noqa: BLE001 - no memory, no thread, a setting outgrown: training goes on
            self._failures.add(pending, error, save_s=self._clock() - began, flush=False)
            return pending
        order = Order(
            snapshot=snapshot,
            about=about,
            pending=pending,
            tier=self.destination.of(snapshot, self._steady, wish),
            pace=self._pacing.pace(snapshot.size, urgent=wish.urgent),
            began_s=began,
            stall_s=self._clock() - began,
            urgent=wish.urgent,
            fixed=wish.home,
        )
        pending.hurry, pending.look = self.hurry, self._look
        self._start(order)
        return pending

    def _start(self, order: Order) -> None:
        try:
            self._under_way.start(order, self._persist)
        except RuntimeError as error:  # no thread to be had: training goes on
            order.snapshot.release()
            save_s = self._clock() - order.began_s
            self._failures.add(order.pending, error, save_s=save_s, flush=False)

    def take_stuck(self) -> str | None:
        """Said once of each save that hangs; its thread is left behind, and its tier avoided."""
        order = self._under_way.stuck(self._times.save_s)
        return None if order is None else self._given_up(order)

    def tell_stuck(self) -> None:
        """The same of one that is waited for all the same."""
        order = self._under_way.untold(self._times.save_s)
        if order is not None:
            self._emit_stuck(order)
            log.warning("%s; it is waited for", self._under_way.told(order))

    def _look(self) -> None:
        stuck = self.take_stuck()
        if stuck is not None:
            log.warning("%s", stuck)

    def _given_up(self, order: Order) -> str:
        # Its thread may still use what is known of steady leaves: nobody else does any more.
        self._steady = Steady()
        self._drainer.go_on()
        if not order.told:
            self._emit_stuck(order)
        return f"{self._under_way.told(order)}; training goes on"

    def _emit_stuck(self, order: Order) -> None:
        self._publisher.events.emit(
            Event.SAVE_STUCK, flush=False, step=order.about.step, tier=order.tier.name
        )

    def hurry(self) -> None:
        """Somebody waits: what is under way goes on at full speed."""
        self._under_way.hurry()
        self._tidier.break_off()

    def wait(self, timeout: float | None = None) -> bool:
        """True once nothing is under way; in a hurry, for training waits too."""
        self._tidier.hasten()
        return self._under_way.wait(timeout)

    def settle(self, left_s: float | None = None) -> None:
        """Before a save that somebody waits for: what is under way ends, or is given up.

        Of the time left, at most half is spent on somebody else's save.
        """
        bound = patience_s(self._times.save_s)
        self._tidier.hurry()
        for order in self._under_way.settle(bound, None if left_s is None else left_s / 2):
            log.warning("%s", self._given_up(order))

    def close(self, timeout: float | None = None) -> bool:
        """Wait for what is under way, and for the drain; False if something was left behind."""
        began = self._clock()

        def left() -> float | None:
            return None if timeout is None else max(0.0, timeout - (self._clock() - began))

        ended = self.wait(timeout) and self._warming.wait(left())
        self._under_way.close()
        self._warming.close()
        if not self._drainer.close(left()):
            log.warning("a checkpoint has not arrived in every tier; the next link goes on")
        if ended:
            self._camera = Camera()  # as large as the state, and not needed any more
            self._warming = Warming(self._camera)
        return ended

    # ── in the persist thread ─────────────────────────────────────────────────────────────
    def _persist(self, order: Order) -> None:
        self._publisher.events.flush(0.0)
        # What hangs may be known only since it was ordered; an urgent one begins at once.
        if not order.fixed and (order.moved or not order.urgent):
            order.tier = self.destination.unless_it_hangs(order.tier)
        try:
            committed = self._commit_somewhere(order)
        except BrokenOff as error:  # it hung, and its step was saved again
            self._end(order)
            return self._failures.skip(order, error)
        except Exception as error:  # noqa: BLE001 - whatever broke, training goes on
            self._end(order)
            self._tidier.sweep_again(order.tier)
            took_s = None if order.given_up else self._under_way.at_full_speed(order)
            self._failures.add(order.pending, error, save_s=took_s)
            return
        if not order.given_up:
            self._steady.learn(order.snapshot, order.about.step)
        self._end(order)
        self._standing.stands(order.tier, committed.key)
        self._drainer.order(committed.key, order.tier)
        self._tell(order, committed)
        self._tidier.tidy(order.tier, committed)

    def _end(self, order: Order) -> None:
        order.snapshot.release()
        self._under_way.end(order)
        if order.urgent:
            self._drainer.go_on()

    def _commit_somewhere(self, order: Order) -> Committed:
        """A tier that fails is passed over for the next that will do."""
        for instead in () if order.fixed else self.destination.instead_of(order.tier):
            try:
                return self._commit(order)
            except OSError as error:
                failed, said = order.tier.name, one_line(error)
                log.warning("tier %s failed, %s is used: %s", failed, instead.name, said)
                self._publisher.events.emit(Event.TIER_FAILED, flush=False, tier=failed, error=said)
            order.tier = instead
        return self._commit(order)

    def _commit(self, order: Order) -> Committed:
        publisher, about = self._publisher, order.about
        if order.urgent and not order.given_up:
            self._drainer.hold(order.tier)
        parent = None if self.newest is None else self.newest.directory_name
        key = CheckpointKey(publisher.lease.generation, about.step)
        made: list[Manifest] = []

        def record(shards: tuple[ShardRecord, ...]) -> Manifest:
            made.append(manifest_of(publisher, order, parent, shards))
            return made[-1]

        committed = persist(
            order.snapshot,
            order.tier,
            key,
            record,
            lambda: self._published.check(order, key),
            steady=self._steady,
            pace=order.pace,
            elsewhere=self._published.of(key),
        )
        self._published.add(made[-1], committed.key.revision)
        self.destination.note(order.tier, (committed.key, *made[-1].holders))
        return committed

    def _tell(self, order: Order, committed: Committed) -> None:
        about, elapsed_s = order.about, self._clock() - order.began_s
        full_s = self._under_way.at_full_speed(order)
        if order.given_up:  # how long it hung says little of the next one
            self._times.guess(min(full_s, STUCK_S))  # else the next may hang four times as long
        else:
            self._times.add(stall_s=order.stall_s, save_s=full_s)
            self._publisher.stack.note(order.tier, committed.size, full_s)
        # One that hung may end after newer ones.
        if self.newest is None or self.newest <= committed.key:
            self.committed = committed
        self._publisher.events.emit(
            Event.COMMITTED,
            step=about.step,
            checkpoint=committed.key.directory_name,
            tier=order.tier.name,
            lasts=self._publisher.stack.outlives_job(order.tier),
            bytes=committed.size,
            stall_s=round(order.stall_s, 6),
            save_s=round(elapsed_s, 6),
            full_s=None if order.given_up else round(full_s, 6),
            training_s=round(about.training_s, 6),
            reused=committed.reused,
        )
        log.info("committed %s (%s)", committed.key.directory_name, about.reason)
        order.pending.succeed(committed)

    def _stands(self, tier: Tier, key: CheckpointKey) -> None:
        self._standing.stands(tier, key)

    def _gone(self, tier: Tier, keys: Collection[CheckpointKey]) -> None:
        self._standing.gone(tier, keys)

    def bring_home(self, timeout: float) -> None:
        """Before the link says what it has saved: what would go with the job is drained."""
        self._standing.bring_home(timeout)

    def _distrust(self, holder: str) -> None:
        """A shard that others refer to is damaged: the next save writes its bytes again."""
        self._steady.forget(holder)

    def _overtaken(self, error: Fenced) -> None:
        self.fenced = error
        self._publisher.events.emit(Event.FENCED, flush=False, newer=error.newer)
