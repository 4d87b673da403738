"""Persist: a snapshot becomes a checkpoint in the background, one at a time.

Knows threads and waiting, and the order of the writes; the tier writes and commits.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import concurrent.futures
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError, UserError
from ..format.manifest import Manifest, ShardRecord
from ..parallel import be_nice
from ..rundir import CheckpointKey
from ..tiers.base import Committed, Staging, Tier
from ..tiers.writing import Pace
from .snapshot import Snapshot
from .steady import Steady

log = logging.getLogger("hpc_ckpt")

LOOK_EVERY_S = 0.5


def persist(
    snapshot: Snapshot,
    tier: Tier,
    key: CheckpointKey,
    record: Callable[[tuple[ShardRecord, ...]], Manifest],
    guard: Callable[[], None],
    *,
    steady: Steady | None = None,
    pace: Pace | None = None,
    elsewhere: Manifest | None = None,
) -> Committed:
    """Write the shards, then commit; `guard` raises if this process may not publish.

    `elsewhere` is what it has published under the same name in another tier.
    """
    steady = steady or Steady()
    with tier.stage(key) as staging:
        shards = tuple(
            _write_or_refer(staging, snapshot, number, steady, key, pace)
            for number in range(len(snapshot.layouts))
        )
        committed = staging.commit(record(shards), guard, elsewhere)
    for number, shard in enumerate(shards):
        if snapshot.steady[number]:
            steady.committed(shard, committed.key.directory_name)
            snapshot.learn(number, shard.digests)
    return committed


def _write_or_refer(
    staging: Staging,
    snapshot: Snapshot,
    number: int,
    steady: Steady,
    key: CheckpointKey,
    pace: Pace | None,
) -> ShardRecord:
    layout, image = snapshot.layouts[number], snapshot.images[number]
    held = None
    if snapshot.steady[number]:
        held = steady.held(layout, image, known=snapshot.digests.get(number))
    # A second save of the step that wrote it cannot refer to what may turn out to be itself.
    if held is not None and not _is_older(held, key):
        held = None
    if held is not None:
        try:
            staging.refer(held)
        except OSError:  # somebody removed it: written again
            held = None
    return _written(staging, snapshot, number, pace) if held is None else held


def _written(staging: Staging, snapshot: Snapshot, number: int, pace: Pace | None) -> ShardRecord:
    record = staging.write_shard(snapshot.layouts[number], snapshot.images[number], pace)
    known = snapshot.digests.get(number)
    if known is not None and record.digests != known:
        snapshot.learn(number, record.digests)  # so that the next snapshot copies it again
        raise CheckpointError(
            f"{record.file}: the snapshot in memory is not what it was when it was compared; is "
            "this node's memory sound?"
        )
    return record


def _is_older(held: ShardRecord, key: CheckpointKey) -> bool:
    holder = CheckpointKey.parse(held.holder or "")
    return holder is not None and (holder.generation, holder.step) < (key.generation, key.step)


class Pending:
    """A save that was asked for: done when it is committed or has failed."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.step: int | None = None
        """Step of the snapshot; None while it waits for a step boundary."""
        self.seen = False
        """Somebody waited and was told how it ended."""
        self.hurry: Callable[[], None] | None = None
        """What whoever waits calls first: nothing is gained by a paced save then."""
        self.look: Callable[[], None] | None = None
        """What whoever waits calls now and then: no step() looks for what hangs meanwhile."""
        self._future: concurrent.futures.Future[Committed] = concurrent.futures.Future()

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout: float | None = None) -> Path:
        """The checkpoint's path once it is committed; raises what went wrong, or TimeoutError."""
        waits = self.step is None and not self.done()
        if timeout is None and waits and _in_main_thread():
            raise UserError(
                "this save waits for the end of the iteration: call wait() after the next step()"
            )
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self.over(max(0.0, min(LOOK_EVERY_S, end - time.monotonic()))):
            if self.look is not None:
                self.look()
            if time.monotonic() >= end:
                raise _not_in(timeout)
        return self.committed().path

    def over(self, timeout: float) -> bool:
        """done(), after so many seconds at most."""
        self._hasten()
        concurrent.futures.wait([self._future], timeout)
        return self.done()

    def _hasten(self) -> None:
        if self.hurry is not None and not self.done():
            self.hurry()

    def committed(self, timeout: float | None = None) -> Committed:
        self._hasten()
        try:
            result = self._future.result(timeout)
        except concurrent.futures.TimeoutError:
            if self._future.done():  # the save itself failed with a timeout
                self.seen = True
                raise
            raise _not_in(timeout) from None
        except Exception:  # noted as told, then raised again
            self.seen = True
            raise
        self.seen = True
        return result

    def succeed(self, committed: Committed) -> None:
        self._future.set_result(committed)

    def fail(self, error: Exception) -> None:
        self._future.set_exception(error)


def _not_in(timeout: float | None) -> TimeoutError:
    return TimeoutError(f"the save is not committed after {timeout} s")


class Worker:
    """One named thread that does one thing after the other.

    A daemon: a file system that hangs must not keep a finished program from ending.
    """

    def __init__(self, name: str, *, nice: int = 0) -> None:
        self._name = name
        self._nice = nice
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._left = 0
        self._thread: threading.Thread | None = None

    @property
    def left(self) -> int:
        """How many orders are not done yet."""
        return self._left

    def start(self, work: Callable[[], None]) -> None:
        """Do this after all that was ordered before. `work` must not raise.

        RuntimeError if there is no thread to be had; then nothing was ordered.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread
        with self._changed:
            self._left += 1
        self._orders.put(work)

    def wait(self, timeout: float | None = None) -> bool:
        """True once nothing is left."""
        with self._changed:
            return self._changed.wait_for(lambda: self._left == 0, timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Wait for the work under way; False if it was left behind."""
        ended = self.wait(timeout)
        self._orders.put(None)
        if ended and self._thread is not None:
            self._thread.join()
        return ended

    def _run(self) -> None:
        if self._nice:
            be_nice(self._nice)
        while True:
            work = self._orders.get()
            if work is None:
                return
            try:
                work()
            except Exception:  # logged; without this thread whoever waits would hang
                log.exception("an error in thread %s", self._name)
            finally:
                with self._changed:
                    self._left -= 1
                    self._changed.notify_all()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
