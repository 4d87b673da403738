"""The engine: saves from snapshot to commit, and what follows a commit.

Measures itself and reports events. When to save and when to stop is decided elsewhere.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import platform
import time
from collections import deque
from collections.abc import Callable, Collection

import numpy as np
import torch

from .. import __version__, preflight
from ..errors import Fenced, UnsupportedState
from ..events import Event
from ..format.manifest import Manifest, ShardRecord
from ..parallel import uncollected
from ..rundir import CheckpointKey
from ..tiers.base import Committed, Tier
from ..tiers.drain import Drainer
from ..tiers.writing import Pace
from .orders import About, Order, Publisher
from .pacing import BACKGROUND_RATE, Pacing
from .persist import Pending, Worker, persist
from .restore import Origin
from .snapshot import SLOTS, Camera
from .steady import Steady
from .tidying import Tidier
from .times import SaveTimes

log = logging.getLogger("hpc_ckpt")

NICE = 10
STUCK_S = 60.0
"""A save that takes so long, and four times as long as any before, hangs in its file system."""
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
        self._background = Worker("hpc-ckpt-persist", nice=NICE)
        # A thread's niceness cannot be taken back: what is urgent has one of its own.
        self._urgent = Worker("hpc-ckpt-urgent")
        self._tidier = Tidier(
            publisher.keep, publisher.lease, publisher.events, on_fenced=self._overtaken
        )
        self._drainer = Drainer(
            publisher.stack,
            guard=publisher.lease.check,
            events=publisher.events,
            after=self._tidier.tidy,
            pace=lambda: Pace(BACKGROUND_RATE),
        )
        self._steady = Steady() if origin is None else Steady(origin.set_apart, origin.shards)
        self._newest = None if origin is None else origin.key
        if origin is not None:
            self._drainer.catch_up(origin.key, origin.tier)
        self.snapshot_step = step
        """Step of the last snapshot, or where this process began."""
        self.snapshot_s = clock()
        self._pacing = Pacing()
        self._orders: deque[Order] = deque()
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
        return bool(self._background.left or self._urgent.left)

    @property
    def ready(self) -> bool:
        """A snapshot can be taken now."""
        return not self._warming and len(self._orders) < SLOTS and self._camera.ready

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
        """How long the next save takes at full speed: the slowest recent one, and as long again
        for each that has to end before it; or the one under way, if that takes longer."""
        known, orders = self._times.save_s, tuple(self._orders)
        if not orders:
            return known
        longest = max(self._at_full_speed(order) for order in orders)
        return max(longest, (known or 0.0)) + len(orders) * (known or 0.0)

    def _at_full_speed(self, order: Order) -> float:
        return self._clock() - order.began_s - order.pace.waited_s

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
        self._urgent.start(lambda: self._warm(work))

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
            self._urgent.wait()
        if urgent and not self._camera.ready:
            self._grow()
        pending = pending or Pending(about.reason)
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
            tier=self._tier(snapshot.size, urgent=urgent, within_s=within_s),
            pace=self._pacing.pace(snapshot.size, urgent=urgent),
            began_s=began,
            stall_s=self._clock() - began,
            urgent=urgent,
        )
        pending.hurry = self.hurry
        self._orders.append(order)
        worker = self._urgent if urgent else self._background
        worker.start(lambda: self._persist(order))
        return pending

    def _tier(self, size: int, *, urgent: bool, within_s: float | None) -> Tier:
        stack = self._publisher.stack
        chosen = stack.choose(size, within_s) if urgent else stack.first
        hanging = {order.tier.name for order in tuple(self._orders) if order.given_up}
        return stack.home if chosen.name in hanging else chosen

    def take_stuck(self) -> str | None:
        """Said once of each save that hangs; its thread is left behind, and its tier avoided."""
        known = self._times.save_s or 0.0
        for order in tuple(self._orders):
            took_s = self._at_full_speed(order)
            if order.given_up or took_s < max(STUCK_S, 4 * known):
                continue
            order.given_up = True
            if order.urgent:
                self._urgent = Worker("hpc-ckpt-urgent")
            else:
                self._background = Worker("hpc-ckpt-persist", nice=NICE)
            self._publisher.events.emit(
                Event.SAVE_STUCK, flush=False, step=order.about.step, tier=order.tier.name
            )
            return (
                f"the save of step {order.about.step} hangs in tier {order.tier.name} "
                f"({order.tier.path_of(CheckpointKey(0, 0)).parent}) since {took_s:.0f} s; "
                "training goes on"
            )
        return None

    def hurry(self) -> None:
        """Somebody waits: what is under way goes on at full speed."""
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

    def close(self, timeout: float | None = None) -> bool:
        """Wait for what is under way, and for the drain; False if something was left behind."""
        began = self._clock()
        ended = self.wait(timeout)
        for worker in (self._background, self._urgent):
            worker.close(0.0)
        left = None if timeout is None else max(0.0, timeout - (self._clock() - began))
        if not self._drainer.close(left):
            log.warning("a checkpoint has not arrived in every tier; the next link goes on")
        if ended:
            self._camera = Camera()  # as large as the state, and not needed any more
        return ended

    # ── in the persist thread ─────────────────────────────────────────────────────────────
    def _persist(self, order: Order) -> None:
        self._publisher.events.flush()
        try:
            committed = self._commit_somewhere(order)
        except Exception as error:  # noqa: BLE001 - whatever broke, training goes on
            self._end(order)
            self._failed(order.pending, error, save_s=self._at_full_speed(order))
            return
        self._steady.learn(order.snapshot, order.about.step)
        self._end(order)
        self._tell(order, committed)
        self._drainer.order(committed.key, order.tier)
        self._tidier.tidy(order.tier, committed)

    def _end(self, order: Order) -> None:
        order.snapshot.release()
        self._orders.remove(order)

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
        return persist(
            order.snapshot,
            order.tier,
            CheckpointKey(publisher.lease.generation, about.step),
            lambda shards: self._manifest(order, parent, shards),
            publisher.lease.check,
            steady=self._steady,
            pace=order.pace,
        )

    def _tell(self, order: Order, committed: Committed) -> None:
        about, elapsed_s = order.about, self._clock() - order.began_s
        full_s = self._at_full_speed(order)
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

    def _manifest(
        self, order: Order, parent: str | None, shards: tuple[ShardRecord, ...]
    ) -> Manifest:
        about = order.about
        return Manifest(
            chain=self._publisher.chain,
            generation=self._publisher.lease.generation,
            step=about.step,
            revision=0,
            parent=parent,
            epoch=about.epoch,
            wall_time=time.time(),
            reason=about.reason,
            metrics=about.metrics,
            world_size=1,
            threads=torch.get_num_threads(),
            versions=versions(),
            tree=order.snapshot.make_tree(),
            aliases=order.snapshot.aliases,
            shards=shards,
        )

    def _failed(
        self, pending: Pending, error: Exception, *, save_s: float, flush: bool = True
    ) -> None:
        if isinstance(error, Fenced):
            self._overtaken(error)
        else:
            # How long it took to fail says how long the next attempt may take.
            self._times.add(stall_s=0.0, save_s=save_s)
            self._publisher.events.emit(
                Event.SAVE_FAILED, flush=flush, step=pending.step, error=one_line(error)
            )
            self._failure = (pending, error)
            self.failed_at_s = time.time()
        log.warning("save of step %s failed: %s", pending.step, one_line(error))
        pending.fail(error)

    def _overtaken(self, error: Fenced) -> None:
        self.fenced = error
        self._publisher.events.emit(Event.FENCED, newer=error.newer)


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "hpc_ckpt": __version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def one_line(error: BaseException) -> str:
    """Type and message, for files that are read line by line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
