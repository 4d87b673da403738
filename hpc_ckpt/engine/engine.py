"""The engine: one save at a time, from snapshot to commit, and what follows a commit.

Measures itself and reports events. When to save and when to stop is decided elsewhere.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import platform
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from .. import __version__
from ..errors import CorruptCheckpoint, Fenced
from ..events import Event, EventLog
from ..format.manifest import Manifest, ShardRecord
from ..lease import Lease
from ..rundir import CheckpointKey
from ..settings import Keep
from ..tiers.base import Committed, Tier
from ..tiers.retention import retain
from .persist import Pending, Worker, persist
from .snapshot import ImageBuffer, Snapshot

log = logging.getLogger("hpc_ckpt")

RECENT_SAVES = 8


@dataclass(frozen=True, kw_only=True)
class About:
    """What a save says about itself in the manifest and the events."""

    step: int
    epoch: int
    reason: str
    metrics: dict[str, float] = field(default_factory=dict)
    training_s: float = 0.0
    """Seconds of training in this process that the checkpoint protects."""


@dataclass(frozen=True, kw_only=True)
class Publisher:
    """As whom, where, and under which rules this process publishes."""

    chain: str
    lease: Lease
    tier: Tier
    keep: Keep
    events: EventLog


@dataclass(frozen=True, kw_only=True)
class _Order:
    """One save under way."""

    snapshot: Snapshot
    about: About
    pending: Pending
    parent: str | None
    began_s: float
    stall_s: float


class SaveTimes:
    """The slowest of the recent saves; until one was made here, that of the chain's last link."""

    def __init__(self, known_save_s: float | None = None) -> None:
        self.stall_s: float | None = None
        self.save_s = known_save_s
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_SAVES)

    def add(self, *, stall_s: float, save_s: float) -> None:
        self._recent.append((stall_s, save_s))
        self.stall_s = max(stall for stall, _ in self._recent)
        self.save_s = max(save for _, save in self._recent)


class Engine:
    """Owns the image buffer, the persist thread and the record of what was committed."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        restored: CheckpointKey | None = None,
        step: int = 0,
        known_save_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._publisher = publisher
        self._times = SaveTimes(known_save_s)
        self._clock = clock
        self._buffer = ImageBuffer()
        self._worker = Worker("hpc-ckpt-persist")
        self._newest = restored
        self.snapshot_step = step
        """Step of the last snapshot, or where this process began."""
        self.snapshot_s = clock()
        self._began_s: float | None = None
        self._failure: tuple[Pending, Exception] | None = None
        self._swept = False
        self.committed: Committed | None = None
        """The newest checkpoint this process committed."""
        self.fenced: Fenced | None = None
        self.failed_at_s: float | None = None
        """Unix seconds of the last failure, if no save has begun since."""

    # ── what is known ─────────────────────────────────────────────────────────────────────
    @property
    def busy(self) -> bool:
        return self._worker.busy

    @property
    def newest(self) -> CheckpointKey | None:
        """The newest checkpoint of this lineage: committed here, else the restored one."""
        return self._newest

    def save_s(self) -> float | None:
        """The slowest recent save, or the one under way if that takes longer."""
        began, known = self._began_s, self._times.save_s
        if began is None:
            return known
        return max(self._clock() - began, known or 0.0)

    @property
    def stall_s(self) -> float | None:
        """Seconds training waited for the slowest recent save."""
        return self._times.stall_s

    def take_failure(self) -> Exception | None:
        """The error of a background save that nobody has been told of yet."""
        failure, self._failure = self._failure, None
        if failure is None or failure[0].seen:
            return None
        return failure[1]

    # ── saving ────────────────────────────────────────────────────────────────────────────
    def save(
        self, capture: Callable[[], object], about: About, pending: Pending | None = None
    ) -> Pending:
        """Copy the state now, persist it in the background; only while not busy.

        When it returns, training may go on. What cannot be represented is raised here; what
        the memory or the storage refuses becomes a failed save.
        """
        pending = pending or Pending(about.reason)
        began, self.failed_at_s = self._clock(), None
        self._began_s = began
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
            snapshot = self._buffer.take(capture())
        except (OSError, MemoryError) as error:
            self._failed(pending, error, began)
            return pending
        except BaseException:  # raised again
            self._began_s = None
            raise
        order = _Order(
            snapshot=snapshot,
            about=about,
            pending=pending,
            parent=None if self._newest is None else self._newest.directory_name,
            began_s=began,
            stall_s=self._clock() - began,
        )
        self._worker.start(lambda: self._persist(order))
        return pending

    def wait(self, timeout: float | None = None) -> bool:
        """True once nothing is under way."""
        return self._worker.wait(timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Wait for what is under way; False if it was left behind."""
        ended = self._worker.close(timeout)
        if ended:
            self._buffer = ImageBuffer()  # as large as the state, and not needed any more
        return ended

    # ── in the persist thread ─────────────────────────────────────────────────────────────
    def _persist(self, order: _Order) -> None:
        self._publisher.events.flush()
        try:
            committed = self._commit(order)
        except Exception as error:  # noqa: BLE001 - whatever broke, training goes on
            self._failed(order.pending, error, order.began_s)
            return
        self._tidy(committed)

    def _commit(self, order: _Order) -> Committed:
        publisher, about = self._publisher, order.about
        key = CheckpointKey(publisher.lease.generation, about.step)
        committed = persist(
            order.snapshot,
            publisher.tier,
            key,
            lambda shards: self._manifest(order, shards),
            publisher.lease.check,
        )
        save_s = self._clock() - order.began_s
        self._times.add(stall_s=order.stall_s, save_s=save_s)
        self.committed, self._newest, self._began_s = committed, committed.key, None
        publisher.events.emit(
            Event.COMMITTED,
            step=about.step,
            checkpoint=committed.key.directory_name,
            bytes=committed.size,
            stall_s=round(order.stall_s, 6),
            save_s=round(save_s, 6),
            training_s=round(about.training_s, 6),
            reused=committed.reused,
        )
        log.info("committed %s (%s)", committed.key.directory_name, about.reason)
        order.pending.succeed(committed)
        return committed

    def _manifest(self, order: _Order, shards: tuple[ShardRecord, ...]) -> Manifest:
        about = order.about
        return Manifest(
            chain=self._publisher.chain,
            generation=self._publisher.lease.generation,
            step=about.step,
            revision=0,
            parent=order.parent,
            epoch=about.epoch,
            wall_time=time.time(),
            reason=about.reason,
            metrics=about.metrics,
            world_size=1,
            threads=torch.get_num_threads(),
            versions=versions(),
            tree=order.snapshot.tree,
            aliases=order.snapshot.aliases,
            shards=shards,
        )

    def _failed(self, pending: Pending, error: Exception, began_s: float) -> None:
        self._began_s = None
        if isinstance(error, Fenced):
            self.fenced = error
            self._publisher.events.emit(Event.FENCED, newer=error.newer)
        else:
            # How long it took to fail says how long the next attempt may take.
            self._times.add(stall_s=0.0, save_s=self._clock() - began_s)
            self._publisher.events.emit(Event.SAVE_FAILED, step=pending.step, error=one_line(error))
            self._failure = (pending, error)
            self.failed_at_s = time.time()
        log.warning("save of step %s failed: %s", pending.step, one_line(error))
        pending.fail(error)

    def _tidy(self, committed: Committed) -> None:
        """Retention, and once per process what killed writers left behind."""
        publisher = self._publisher
        try:
            self._read_back(committed)
            removed = retain(
                publisher.tier,
                publisher.keep,
                generation=publisher.lease.generation,
                newest_verified=committed.key,
                guard=publisher.lease.check,
            )
            if not self._swept:
                publisher.tier.sweep(publisher.lease.generation)
                self._swept = True
        except Fenced as error:
            self.fenced = error
            publisher.events.emit(Event.FENCED, newer=error.newer)
        except Exception as error:  # noqa: BLE001 - the commit stands; the next one tidies again
            publisher.events.emit(Event.RETENTION_FAILED, error=one_line(error))
            log.warning("could not remove old checkpoints: %s", error)
        else:
            for key in removed:
                publisher.events.emit(Event.REMOVED, checkpoint=key.directory_name)

    def _read_back(self, committed: Committed) -> None:
        """Where retention leaves no other copy, this one must be read before the last goes."""
        if self._publisher.keep.last > 1:
            return
        defects = self._publisher.tier.verify(committed.key)
        if defects:
            raise CorruptCheckpoint(committed.path, defects)


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "hpc_ckpt": __version__,
    }


def one_line(error: BaseException) -> str:
    """Type and message, for files that are read line by line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
