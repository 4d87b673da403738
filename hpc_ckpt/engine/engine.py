"""The engine: saves from snapshot to commit, and what follows a commit.

Measures itself and reports events. When to save and when to stop is decided elsewhere.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from functools import partial

from .. import preflight
from ..errors import Fenced, UnsupportedState, one_line
from ..events import Event
from ..format.manifest import Manifest, ShardRecord
from ..parallel import uncollected
from ..rundir import CheckpointKey
from ..tiers.base import Committed, Tier
from ..tiers.draining import Drainer
from ..tiers.retention import lacking
from ..tiers.writing import Pace
from .labels import manifest_of
from .orders import About, Order, Publisher
from .pacing import BACKGROUND_RATE, Pacing
from .persist import Pending, persist
from .published import Published
from .restore import Origin
from .snapshot import SLOTS, Camera
from .steady import Steady
from .tidying import Tidier
from .times import SaveTimes
from .underway import UnderWay, patience_s

log = logging.getLogger("hpc_ckpt")

WORTH_WARMING = 64 * 1024**2


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
        self._under_way = UnderWay(clock)
        self._pacing = Pacing()
        self._tidier = Tidier(
            publisher.keep,
            publisher.lease,
            publisher.events,
            on_fenced=self._overtaken,
            on_damaged=self._distrust,
            pace=self._pacing.calm,
            origin=origin,
        )
        self._drainer = Drainer(
            publisher.stack,
            guard=publisher.lease.check,
            events=publisher.events,
            after=self._tidier.tidy,
            lacking=partial(lacking, keep=publisher.keep) if publisher.keep.lasting else None,
            pace=lambda: Pace(BACKGROUND_RATE),
        )
        self._steady = Steady()
        if origin is not None and origin.tier is publisher.stack.first:
            # What these refer to was read there; in another tier nobody has looked at it.
            self._steady = Steady(origin.set_apart, origin.shards)
        self._newest = None if origin is None else origin.key
        if origin is not None:
            broken_in = [name for name, keys in origin.broken.items() if origin.key in keys]
            self._drainer.catch_up(origin.key, origin.tier, broken_in)
        self.snapshot_step = step
        """Step of the last snapshot, or where this process began."""
        self.snapshot_s = clock()
        self._published = Published(publisher.lease.check)
        self._failure: tuple[Pending, Exception] | None = None
        self._warming = False
        self.prepared = False
        self.committed: Committed | None = None
        """The newest checkpoint this process committed."""
        self.fenced: Fenced | None = None
        self.failed_at_s: float | None = None
        """Unix seconds of the last failure, if no save has begun since."""

    # ── what is known ─────────────────────────────────────────────────────────────────────
    @property
    def busy(self) -> bool:
        """Something is being written."""
        return self._under_way.busy

    @property
    def ready(self) -> bool:
        """A snapshot can be taken now."""
        return not self._warming and self._under_way.count < SLOTS and self._camera.ready

    @property
    def why_not_ready(self) -> str:
        if self._warming:
            return "the buffer is being prepared"
        return "no buffer is free: the last save is still under way"

    @property
    def newest(self) -> CheckpointKey | None:
        """The newest checkpoint of this lineage: committed here, else the restored one."""
        return self._newest

    def save_s(self) -> float | None:
        """How long the next save takes at full speed, with what has to end before it."""
        return self._under_way.save_s(self._times.save_s)

    @property
    def stall_s(self) -> float | None:
        """Seconds the slowest recent save cost training: waiting, and slower steps beside it."""
        return self._times.stall_s

    def note_stolen(self, seconds: float) -> None:
        self._times.add_stolen(seconds)

    def take_failure(self) -> Exception | None:
        """The error of a background save that nobody has been told of yet."""
        failure, self._failure = self._failure, None
        if failure is None or failure[0].seen:
            return None
        return failure[1]

    # ── before the first save ─────────────────────────────────────────────────────────────
    def prepare(self, state: object, frozen: Collection[int] = ()) -> int:
        """Plan the copy; returns the bytes of its buffer, which warm() makes.

        `frozen`: addresses of memory that no optimizer changes.
        """
        self.prepared = True
        self._steady.suggest(self._camera.leaves_at(state, frozen))
        return self._camera.plan(state, self._steady.expected)

    def warm(self, size: int) -> None:
        """Make the buffer in the background, so that the first save need not."""
        if size >= WORTH_WARMING:
            self._in_background(lambda: self._camera.warm(size))

    def make_room(self) -> None:
        """A save found no buffer: make the second one, if there is memory for it."""
        if not self._warming and self._camera.can_grow:
            self._in_background(self._grow)

    def _grow(self) -> None:
        if preflight.check_memory(self._camera.held) is None:
            self._camera.grow()

    def _in_background(self, work: Callable[[], None]) -> None:
        self._warming = True
        try:
            self._under_way.aside(lambda: self._warm(work))
        except RuntimeError as error:  # no thread: the next save makes its own buffer
            self._warming = False
            log.warning("no thread for a buffer: %s", error)

    def _warm(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - a device's allocator raises what it likes; the next save asks again
            log.warning("no memory for a buffer yet: %s", one_line(error))
        finally:
            self._warming = False

    # ── saving ────────────────────────────────────────────────────────────────────────────
    def save(
        self,
        capture: Callable[[], object],
        about: About,
        pending: Pending | None = None,
        *,
        urgent: bool = False,
        within_s: float | None = None,
    ) -> Pending:
        """Copy the state now, persist it in the background; only while ready.

        When it returns, training may go on. What cannot be represented is raised here; what
        the memory or the storage refuses becomes a failed save. An urgent one is written at full
        speed, into the tier that is fast enough to be done in `within_s`.
        """
        if self._warming:
            self._under_way.wait_aside()
        if urgent and not self._camera.ready:
            self._grow()
        pending = pending or Pending(about.reason)
        self._tidier.calm()
        began, self.failed_at_s = self._clock(), None
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
            with uncollected():
                snapshot = self._camera.take(capture(), self._steady.expected)
        except UnsupportedState:
            raise
        except Exception as error:  # noqa: BLE001 - no memory, no thread, a setting outgrown: training goes on
            self._failed(pending, error, save_s=self._clock() - began, flush=False)
            return pending
        order = Order(
            snapshot=snapshot,
            about=about,
            pending=pending,
            tier=self._tier(self._steady.left_to_write(snapshot), urgent=urgent, within_s=within_s),
            pace=self._pacing.pace(snapshot.size, urgent=urgent),
            began_s=began,
            stall_s=self._clock() - began,
            urgent=urgent,
        )
        pending.hurry = self.hurry
        try:
            self._under_way.start(order, self._persist)
        except RuntimeError as error:  # no thread to be had: training goes on
            snapshot.release()
            self._failed(pending, error, save_s=self._clock() - began, flush=False)
        return pending

    def _tier(self, size: int, *, urgent: bool, within_s: float | None) -> Tier:
        stack = self._publisher.stack
        return self._unless_it_hangs(stack.choose(size, within_s) if urgent else stack.first)

    def _unless_it_hangs(self, tier: Tier) -> Tier:
        hangs = self._publisher.stack.hangs(tier) or tier.name in self._under_way.hanging
        return self._publisher.stack.home if hangs else tier

    def take_stuck(self) -> str | None:
        """Said once of each save that hangs; its thread is left behind, and its tier avoided."""
        order = self._under_way.stuck(self._times.save_s)
        return None if order is None else self._given_up(order)

    def _given_up(self, order: Order) -> str:
        # Its thread may still use what is known of steady leaves: nobody else does any more.
        self._steady = Steady()
        self._publisher.events.emit(
            Event.SAVE_STUCK, flush=False, step=order.about.step, tier=order.tier.name
        )
        return (
            f"the save of step {order.about.step} hangs in tier {order.tier.name} "
            f"({order.tier.path_of(CheckpointKey(0, 0)).parent}) since "
            f"{self._under_way.at_full_speed(order):.0f} s; training goes on"
        )

    def _drop(self, order: Order) -> None:
        """It has not begun, and a newer one needs its buffer."""
        order.snapshot.release()
        why, step = "the save before it hangs, and a newer one comes", order.about.step
        self._publisher.events.emit(Event.SAVE_SKIPPED, flush=False, step=step, reason=why)
        order.pending.fail(TimeoutError(why))

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
        within_s = bound if left_s is None else min(bound, left_s / 2)
        hanging, dropped = self._under_way.settle(within_s)
        for order in hanging:
            log.warning("%s", self._given_up(order))
        for order in dropped:
            self._drop(order)

    def close(self, timeout: float | None = None) -> bool:
        """Wait for what is under way, and for the drain; False if something was left behind."""
        began = self._clock()
        ended = self.wait(timeout)
        self._under_way.close()
        left = None if timeout is None else max(0.0, timeout - (self._clock() - began))
        if not self._drainer.close(left):
            log.warning("a checkpoint has not arrived in every tier; the next link goes on")
        if ended:
            self._camera = Camera()  # as large as the state, and not needed any more
        return ended

    # ── in the persist thread ─────────────────────────────────────────────────────────────
    def _persist(self, order: Order) -> None:
        self._publisher.events.flush()
        order.tier = self._unless_it_hangs(order.tier)  # known only since it was ordered
        try:
            committed = self._commit_somewhere(order)
        except Exception as error:  # noqa: BLE001 - whatever broke, training goes on
            self._end(order)
            self._tidier.sweep_again(order.tier)
            took_s = None if order.given_up else self._under_way.at_full_speed(order)
            self._failed(order.pending, error, save_s=took_s)
            return
        if not order.given_up:
            self._steady.learn(order.snapshot, order.about.step)
        self._end(order)
        self._tell(order, committed)
        self._drainer.order(committed.key, order.tier)
        self._tidier.tidy(order.tier, committed)

    def _end(self, order: Order) -> None:
        order.snapshot.release()
        self._under_way.end(order)

    def _commit_somewhere(self, order: Order) -> Committed:
        """A tier that fails is passed over for the run directory's own."""
        home = self._publisher.stack.home
        try:
            return self._commit(order)
        except OSError as error:
            if order.tier is home:
                raise
            log.warning("tier %s failed, the run directory is used: %s", order.tier.name, error)
            self._publisher.events.emit(
                Event.TIER_FAILED, tier=order.tier.name, error=one_line(error)
            )
        order.tier = home
        return self._commit(order)

    def _commit(self, order: Order) -> Committed:
        publisher, about = self._publisher, order.about
        parent = None if self._newest is None else self._newest.directory_name
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
        return committed

    def _tell(self, order: Order, committed: Committed) -> None:
        about, elapsed_s = order.about, self._clock() - order.began_s
        full_s = self._under_way.at_full_speed(order)
        if not order.given_up:  # how long it hung says nothing of the next one
            self._times.add(stall_s=order.stall_s, save_s=full_s)
            self._publisher.stack.note(order.tier, committed.size, full_s)
        # One that hung may end after newer ones.
        if self._newest is None or self._newest <= committed.key:
            self.committed, self._newest = committed, committed.key
        self._publisher.events.emit(
            Event.COMMITTED,
            step=about.step,
            checkpoint=committed.key.directory_name,
            tier=order.tier.name,
            bytes=committed.size,
            stall_s=round(order.stall_s, 6),
            save_s=round(elapsed_s, 6),
            full_s=round(full_s, 6),
            training_s=round(about.training_s, 6),
            reused=committed.reused,
        )
        log.info("committed %s (%s)", committed.key.directory_name, about.reason)
        order.pending.succeed(committed)

    def _failed(
        self, pending: Pending, error: Exception, *, save_s: float | None, flush: bool = True
    ) -> None:
        if isinstance(error, Fenced):
            self._overtaken(error)
        else:
            # How long it took to fail says how long the next attempt may take; a hang does not.
            if save_s is not None:
                self._times.add(stall_s=0.0, save_s=save_s)
            self._publisher.events.emit(
                Event.SAVE_FAILED, flush=flush, step=pending.step, error=one_line(error)
            )
            self._failure = (pending, error)
            self.failed_at_s = time.time()
        log.warning("save of step %s failed: %s", pending.step, one_line(error))
        pending.fail(error)

    def _distrust(self, holder: str) -> None:
        """A shard that others refer to is damaged: the next save writes its bytes again."""
        self._steady.forget(holder)

    def _overtaken(self, error: Fenced) -> None:
        self.fenced = error
        self._publisher.events.emit(Event.FENCED, newer=error.newer)
