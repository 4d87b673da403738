"""Persist: a snapshot becomes a checkpoint in the background, one at a time.

Knows threads and waiting, and the order of the writes; the tier writes and commits.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from ..errors import UserError
from ..format.manifest import Manifest, ShardRecord
from ..rundir import CheckpointKey
from ..tiers.base import Committed, Tier
from .snapshot import Snapshot


def persist(
    snapshot: Snapshot,
    tier: Tier,
    key: CheckpointKey,
    record: Callable[[tuple[ShardRecord, ...]], Manifest],
    guard: Callable[[], None],
) -> Committed:
    """Write the shards, then commit; `guard` raises if this process may not publish."""
    with tier.stage(key) as staging:
        shards = tuple(
            staging.write_shard(layout, image)
            for layout, image in zip(snapshot.layouts, snapshot.images, strict=True)
        )
        return staging.commit(record(shards), guard)


class Pending:
    """A save that was asked for: done when it is committed or has failed."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.step: int | None = None
        """Step of the snapshot; None while it waits for a step boundary."""
        self.seen = False
        """Somebody waited and was told how it ended."""
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
        return self.committed(timeout).path

    def committed(self, timeout: float | None = None) -> Committed:
        try:
            result = self._future.result(timeout)
        except concurrent.futures.TimeoutError:
            if self._future.done():  # the save itself failed with a timeout
                self.seen = True
                raise
            raise TimeoutError(f"the save is not committed after {timeout} s") from None
        except Exception:  # noted as told, then raised again
            self.seen = True
            raise
        self.seen = True
        return result

    def succeed(self, committed: Committed) -> None:
        self._future.set_result(committed)

    def fail(self, error: Exception) -> None:
        self._future.set_exception(error)


class Worker:
    """One named thread that does one thing at a time.

    A daemon: a file system that hangs must not keep a finished program from ending.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return not self._idle.is_set()

    def start(self, work: Callable[[], None]) -> None:
        """Begin; only while not busy. `work` must not raise."""
        if self.busy:
            raise RuntimeError(f"{self._name} is busy")
        self._idle.clear()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._orders.put(work)

    def wait(self, timeout: float | None = None) -> bool:
        """True once idle."""
        return self._idle.wait(timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Wait for the work under way; False if it was left behind."""
        ended = self.wait(timeout)
        self._orders.put(None)
        if ended and self._thread is not None:
            self._thread.join()
        return ended

    def _run(self) -> None:
        while True:
            work = self._orders.get()
            if work is None:
                return
            try:
                work()
            finally:
                self._idle.set()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
