"""hpc_ckpt, through its public API and its events, as a training script uses it."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpc_ckpt import Checkpointer

from . import disk, memory
from .beside import Beside
from .clock import collect_garbage, rest, seconds
from .states import GIB, Shape, State, build, digest, without_moments

NEVER = "every 1000000000 steps"
POLL_S = 0.001
START_S = 3.0
TIDY_S = 10.0
PATIENCE_S = 300.0
TRIES = 20
CROWDED = 3
TIMES = ("block_s", "whole_s", "persist_s", "durable_s", "sync_again_s", "sync_idle_s")
EVENT_FIELDS = ("stall_s", "save_s", "full_s", "bytes", "reused")


class NotSaved(RuntimeError):
    """A save that was asked for did not happen, or failed."""


class Enough(Exception):
    """Everything is measured: leaves the block without a final checkpoint."""


class Events:
    """Follows the event files of a run directory."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "events"
        self._read: dict[Path, int] = {}
        self.seen: list[dict[str, Any]] = []

    def look(self) -> None:
        with suppress(FileNotFoundError):
            for path in sorted(self._folder.iterdir()):
                self._look_into(path)

    def _look_into(self, path: Path) -> None:
        start = self._read.get(path, 0)
        if path.stat().st_size == start:
            return
        with path.open("rb") as stream:
            stream.seek(start)
            whole, _, _ = stream.read().rpartition(b"\n")
        if whole:
            self._read[path] = start + len(whole) + 1
            self.seen += [json.loads(line) for line in whole.splitlines() if line]

    def find(self, name: str, since: int = 0, **fields: Any) -> dict[str, Any] | None:
        """The newest of this name and these fields, among those after the first `since`."""
        wanted = {"event": name, **fields}.items()
        return next((one for one in reversed(self.seen[since:]) if wanted <= one.items()), None)

    def wait(
        self, name: str, patience_s: float, since: int = 0, **fields: Any
    ) -> dict[str, Any] | None:
        until = time.perf_counter() + patience_s
        while True:
            self.look()
            if (found := self.find(name, since, **fields)) is not None:
                return found
            self._complain(fields)
            if time.perf_counter() > until:
                return None
            time.sleep(POLL_S)

    def _complain(self, fields: dict[str, Any]) -> None:
        if "step" in fields:
            failed = self.find("save.failed", step=fields["step"])
            if failed is not None:
                raise NotSaved(failed["error"])


class Run:
    """One stay in a Checkpointer's block."""

    def __init__(
        self,
        root: Path,
        policy: str,
        tracked: dict[str, Any],
        keep: int = 1,
        tiers: Sequence[Path] = (),
    ) -> None:
        self.root = root
        self.events = Events(root)
        self.ckpt = Checkpointer(
            root, policy=policy, keep=keep, tiers=list(tiers) or None, **tracked
        )
        self._saved = 0
        self._idle = root.with_name(f"{root.name}-idle")
        self._make_idle()

    def _make_idle(self) -> None:
        """As many files as a checkpoint has, synced before anything is timed."""
        self._idle.mkdir(exist_ok=True)
        for name in ("first", "second"):
            (self._idle / name).write_bytes(bytes(4096))
        disk.sync(self._idle)

    @contextmanager
    def entered(self) -> Iterator[Run]:
        """Leaves without a final checkpoint."""
        with suppress(Enough), self.ckpt:
            self.events.look()
            yield self
            raise Enough

    def background(self, state: Any) -> dict[str, Any]:
        """A save by the policy: what step() costs, and how long until it is committed."""
        skipped: list[float] = []
        for _ in range(TRIES):
            state.advance()
            collect_garbage()
            began = time.perf_counter()
            self.ckpt.step()
            blocked = time.perf_counter()
            step = self.ckpt.global_step
            if self.events.wait("save.started", START_S, step=step) is not None:
                committed = self._committed(step)
                whole_s = time.perf_counter() - began
                synced = self._sync(committed)
                self._tidied()
                result = sample(committed, synced, block_s=blocked - began, whole_s=whole_s)
                return {**result, "skipped_s": skipped}
            skipped.append(blocked - began)
        raise NotSaved(f"no save began in {TRIES} steps")

    def urgent(self, state: Any) -> dict[str, Any]:
        """A save the program waits for, and what of it came after the snapshot."""
        state.advance()
        self.ckpt.step()
        collect_garbage()
        since = len(self.events.seen)
        began = time.perf_counter()
        self.ckpt.save(reason="benchmark", wait=True)
        whole_s = time.perf_counter() - began
        committed = self._committed(self.ckpt.global_step, since)
        synced = self._sync(committed)
        self._tidied()
        return sample(committed, synced, block_s=committed["stall_s"], whole_s=whole_s)

    def crowd(self, state: Any) -> None:
        """Saves at every step, with nobody who waits: the next is taken beside the one before.

        Until so many are committed that each buffer was used again.
        """
        since = len(self.events.seen)
        until = time.perf_counter() + PATIENCE_S
        while sum(one["event"] == "save.committed" for one in self.events.seen[since:]) < CROWDED:
            if time.perf_counter() > until:
                raise NotSaved(f"no {CROWDED} saves in {PATIENCE_S:g} s")
            state.advance()
            self.ckpt.step()
            self.events.look()

    def _sync(self, committed: dict[str, Any]) -> dict[str, float]:
        """What the harness does for everybody; beside it the same for files long synced."""
        path = self.root / "checkpoints" / committed["checkpoint"]
        return {
            "sync_again_s": seconds(lambda: disk.sync(path)),
            "sync_idle_s": seconds(lambda: disk.sync(self._idle)),
        }

    def _committed(self, step: int, since: int = 0) -> dict[str, Any]:
        record = self.events.wait("save.committed", PATIENCE_S, since, step=step)
        if record is None:
            raise NotSaved(f"step {step} is not committed after {PATIENCE_S:g} s")
        return record

    def _tidied(self) -> None:
        """What follows a commit is over when the checkpoint before it has gone.

        The first has none before it: it is given the time that its save took, twice.
        """
        newest = self.events.find("save.committed") or {}
        since = next(i for i, one in enumerate(self.events.seen) if one is newest)
        first = 0.5 + 2 * newest["save_s"]
        self.events.wait("removed", TIDY_S if self._saved else first, since)
        self._saved += 1
        time.sleep(disk.SETTLE_S)

    def newest(self) -> Path:
        return newest(self.root)


def newest(root: Path) -> Path:
    return max((root / "checkpoints").glob("step-*"), key=lambda path: path.stat().st_mtime)


def sample(
    committed: dict[str, Any], synced: dict[str, float], *, block_s: float, whole_s: float
) -> dict[str, Any]:
    """`durable_s` has the harness's sync in it, as for the peers; `persist_s` has not."""
    return {
        "block_s": block_s,
        "whole_s": whole_s,
        "persist_s": whole_s - block_s,
        "durable_s": whole_s + synced["sync_again_s"],
        **synced,
        "event": {key: committed.get(key) for key in EVENT_FIELDS},
    }


class Background:
    name = "hpc_ckpt background"
    policy = "every 1 steps"

    @staticmethod
    def save(run: Run, state: Any) -> dict[str, Any]:
        return run.background(state)

    @staticmethod
    def limit(beside: Beside) -> None:
        beside.copy()


class Urgent:
    name = "hpc_ckpt urgent"
    policy = NEVER

    @staticmethod
    def save(run: Run, state: Any) -> dict[str, Any]:
        return run.urgent(state)

    @staticmethod
    def limit(beside: Beside) -> None:
        beside.write()


MODES = {mode.name: mode for mode in (Background, Urgent)}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """A first save and some more, the limit between them; the root is left for restore()."""
    mode = MODES[job["name"]]
    state = build(job["gib"], Shape(job["shape"]))
    tracked = {"model": state.model, "optimizer": state.optimizer}
    beside = Beside(state, Path(job["directory"]))
    before = memory.resident()
    memory.forget_peak()
    run = Run(Path(job["directory"]), mode.policy, tracked)
    with run.entered():
        rest(job["gib"])
        samples = []
        for turn in range(job["saves"] + 1):
            if turn % 2:
                mode.limit(beside)
            samples.append(mode.save(run, state))
            if not turn % 2:
                mode.limit(beside)
        peak = memory.peak()
        kept = digest(state.flat())
        crowded = _crowded(run, state) if mode is Background else None
    if mode is Urgent:
        beside.leave_twin()
    return {
        **beside.result(),
        **{key: [one[key] for one in samples] for key in TIMES},
        "skipped_s": [took for one in samples for took in one.get("skipped_s", ())],
        "events": [one["event"] for one in samples],
        "state_bytes": state.size,
        "tensors": len(state.flat()),
        "files": len(disk.files(run.newest())),
        "disk_bytes": disk.size(run.newest()),
        "extra_bytes": max(0, peak - before) + memory.children(),
        "crowded_bytes": None if crowded is None else max(0, crowded - before),
        "digest": kept,
    }


def _crowded(run: Run, state: State) -> int:
    """The peak while a snapshot is taken beside a save."""
    memory.forget_peak()
    run.crowd(state)
    return memory.peak()


def restore(job: dict[str, Any]) -> dict[str, Any]:
    """Enter the root again in this fresh process; the event says how long the restore took.

    Beside it its limit, before or after: a raw read of as many bytes that were written together
    with the checkpoint, or a copy of the same pieces.
    """
    state: State = build(job["gib"], Shape(job["shape"]))
    root = Path(job["directory"])
    beside = Beside(state, root)
    limit = beside.copy_restored if job["cached"] else beside.read_twin
    if job["empty"]:
        state = without_moments(state)
    if job["cached"]:
        disk.warm_cache(newest(root))
    else:
        disk.drop_cache(newest(root))
    collect_garbage()
    run = Run(root, NEVER, {"model": state.model, "optimizer": state.optimizer})
    memory.condition(round(job["gib"] * GIB))
    if job["limit_first"]:
        limit()
    began = time.perf_counter()
    with run.entered():
        entered_s = time.perf_counter() - began
        restored = run.events.wait("restored", START_S)
        equal = digest(state.flat()) == job["digest"]
    if restored is None or not equal:
        raise NotSaved("the restored state is not the one that was saved")
    if not job["limit_first"]:
        limit()
    return {**beside.result(), "seconds": restored["seconds"], "enter_s": entered_s}
