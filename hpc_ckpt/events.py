"""Event records: what happened, one JSON line each. The names below are the metrics API.

The runtime writes events/ (one file per node and generation), the link runner writes ledger/
(one file per generation). Nothing here interprets them; analysis/ and chain/ledger.py do.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from .fsio import file_mode


class Event(str, Enum):
    """Every event name, with the fields that go with it."""

    # ledger/ (link runner)
    LINK_STARTED = "link.started"  # generation, step, deadline, node, the holder's fields, and as
    # the scheduler has them submitted, eligible, allocated
    LINK_NOTICED = "link.noticed"  # source, cause, said, left_s
    DEADLINE_MOVED = "link.deadline_moved"  # deadline
    LINK_ENDED = "link.ended"  # outcome, cause, code, step, reason, evidence, level, rejected
    PHASE_DONE = "chain.phase_done"  # phase, step, level, rejected: the next command begins
    LINK_EXPLAINED = "link.explained"  # generation (of an earlier link), cause, evidence, time
    CHAIN_EXTENDED = "chain.extended"  # job, links; found: by its script, the answer was lost
    NOTHING_FOLLOWS = "chain.nothing_follows"  # reason
    HOSTS_EXCLUDED = "chain.hosts_excluded"  # hosts: all that are, from now on
    LOG_CUT = "link.log_cut"  # bytes
    CHAIN_STOPPED = "chain.stopped"  # reason
    CHAIN_DONE = "chain.done"  # generation, step
    REST_CANCELLED = "chain.rest_cancelled"  # jobs
    # events/ (runtime)
    RESTORED = "restored"  # step, epoch, checkpoint, tier, skipped, seconds
    STARTED_FRESH = "started_fresh"
    PROGRESS = "progress"  # step, epoch, training_s, stall_s, loss
    SAVE_STARTED = "save.started"  # step, reason, training_s
    SAVE_SKIPPED = "save.skipped"  # step, reason
    # step, checkpoint, tier, lasts (the tier outlives the job), bytes, stall_s, save_s,
    # full_s (unpaced; null of one that hung), training_s, reused
    COMMITTED = "save.committed"
    TIER_FAILED = "tier.failed"  # tier, error: it was passed over, in a save or at the start
    NO_ROOM = "no_room"  # tier, problem
    SAVE_FAILED = "save.failed"  # step, error
    SAVE_STUCK = "save.stuck"  # step, tier: it hangs in the file system
    DRAINED = "drained"  # checkpoint, tier, lasts, bytes, seconds
    DRAIN_FAILED = "drain.failed"  # checkpoint, tier, error
    DRAIN_DROPPED = "drain.dropped"  # checkpoint, reason
    RETENTION_FAILED = "retention.failed"  # tier, error
    DAMAGED = "checkpoint.damaged"  # checkpoint, tier: found by reading it back; saved again
    HOLDER_DAMAGED = "holder.damaged"  # checkpoint: its shards are written again
    REMOVED = "removed"  # checkpoint, tier
    REOPENED = "reopened"  # step: DONE was taken back, the work goes on
    LEVEL_CHOSEN = "level.chosen"  # level, kind
    LEVEL_REJECTED = "level.rejected"  # level, reason, lasting
    STOPPING = "stopping"  # step, reason
    FENCED = "fenced"  # newer
    WATCHDOG = "watchdog"  # step, reason
    ENDED = "ended"  # step, training_s, stall_s, complete, reason


LAST_FLUSH_S = 10.0
MOST_WAITING = 10_000
"""Records kept while the file system takes none; of more the oldest are dropped."""


class EventLog:
    """Appends records to one file; safe to share between threads.

    A record that cannot be written waits for the next one, up to a bound: a full disk must not
    stop the training that the record is about.
    """

    def __init__(
        self,
        path: Path,
        *,
        patience_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`patience_s`: nobody who writes waits longer for the file system; None: all do."""
        self.path = path
        self._patience_s = patience_s
        self._clock = clock
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._aside: threading.Thread | None = None
        self._waiting: list[str] = []
        self._torn = False
        """The last line in the file was cut short."""

    def emit(self, event: Event, *, flush: bool = True, **fields: Any) -> None:
        """Add a record; with flush=False it is written together with the next flushed one."""
        record = {"time": round(self._clock(), 3), "event": event.value, **fields}
        with self._lock:
            self._waiting.append(json.dumps(record, default=str))
            del self._waiting[:-MOST_WAITING]  # a write that hangs takes none of them
        if flush:
            self.flush()

    def flush(self, within_s: float | None = None) -> None:
        """Write what waits. Within so many seconds, or the log's own patience: in a thread of its
        own, which is waited for so long."""
        within_s = self._patience_s if within_s is None else within_s
        if within_s is None:
            self._flush()
            return
        until_s = time.monotonic() + within_s
        for _ in range(2):  # one that was at work already may have begun before the last record
            aside = self._writer() if self._waiting else None
            if aside is not None:
                aside.join(max(0.0, until_s - time.monotonic()))

    def close(self) -> None:
        """What was emitted is written, or was tried for a while: by whichever thread took it."""
        if self._patience_s is None:
            self._flush()
            return
        until_s = time.monotonic() + LAST_FLUSH_S
        self.flush(LAST_FLUSH_S)
        # A write under way is a daemon's: the end of the program would cut it short.
        if self._writing.acquire(timeout=max(0.0, until_s - time.monotonic())):
            self._writing.release()
        self.flush(max(0.0, until_s - time.monotonic()))  # what that write could not write

    def _writer(self) -> threading.Thread | None:
        aside = self._aside
        if aside is None or not aside.is_alive():
            # A daemon: a file system that hangs must not keep a finished program from ending.
            aside = threading.Thread(target=self._flush, name="hpc-ckpt-events", daemon=True)
            try:
                aside.start()
            except RuntimeError:  # no thread to be had: written with the next one
                return None
            self._aside = aside
        return aside

    def _flush(self) -> None:
        with self._writing:
            with self._lock:
                lines, self._waiting = self._waiting, []
            if lines:
                self._write(lines)

    def _write(self, lines: list[str]) -> None:
        """What the file system does not take waits for the next time."""
        # After a line that was cut short the next one begins on a line of its own.
        data = ("\n" * self._torn + "\n".join(lines) + "\n").encode()
        written = _append(self.path, data)
        self._torn = 0 < written < len(data) or (self._torn and written == 0)
        if written < len(data):
            left = lines[data[:written].count(b"\n") - (1 if data[:1] == b"\n" else 0) :]
            with self._lock:
                self._waiting = (left + self._waiting)[-MOST_WAITING:]


def _append(path: Path, data: bytes) -> int:
    """How many bytes were taken."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, file_mode(path.parent))
    except OSError:
        return 0
    try:
        return os.write(descriptor, data)
    except OSError:
        return 0
    finally:
        os.close(descriptor)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of one file; a torn last line (killed writer) is passed over."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("event"), str):
            yield record
