"""What a checkpoint in the background takes from training, step by step.

A loop of equal steps saves every so many of them. Steps between the snapshot and the end of the
save are its window, all others are quiet. Stolen time is the sum over the window of step minus the
mean of the quiet steps next to it (figures.py); the snapshot itself is reported apart.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, Protocol

from . import disk
from .beside import Beside
from .clock import collect_garbage, rest, seconds
from .ours import TIDY_S, Run
from .peers import BY_NAME
from .states import Shape, build
from .work import STEP_S, Loaded, Work

KEEP = 2
"""The least that does not make every commit read itself back before the older one goes."""


class Contender(Protocol):
    """Saves at given steps of a training loop."""

    def after_step(self) -> None:
        """Last line of every iteration; timed with it."""

    def save(self) -> float:
        """Save; the seconds training waited."""

    def busy(self) -> bool:
        """Whether the save, and what follows it, is still under way; untimed."""

    def finish(self) -> dict[str, Any]: ...


class Ours:
    """The policy saves inside step(); every save has changed bytes to write."""

    def __init__(self, loaded: Loaded, directory: Path, every: int) -> None:
        work = loaded.work
        tracked = {"model": work.model, "optimizer": work.optimizer, "ballast": loaded.ballast}
        self._loaded = loaded
        self._beside = Beside(loaded, directory)
        self._run = Run(directory, f"every {every} steps", tracked, KEEP)
        self._inside = self._run.entered()
        self._inside.__enter__()
        self._step = 0
        self._saves: list[dict[str, Any]] = []
        self._tidy_until = 0.0

    def after_step(self) -> None:
        self._run.ckpt.step()

    def save(self) -> float:
        took = seconds(self._run.ckpt.step)
        self._step = self._run.ckpt.global_step
        return took

    def busy(self) -> bool:
        """Until a checkpoint that is surplus now is removed: that is stolen time, too."""
        events, now = self._run.events, time.perf_counter()
        events.look()
        committed = events.find("save.committed", step=self._step)
        if committed is None:
            return True
        if not self._saves or self._saves[-1] is not committed:
            self._saves.append(committed)
            removes = len(self._saves) > KEEP
            self._tidy_until = now + (TIDY_S if removes else 0.0)
        since = next(i for i, one in enumerate(events.seen) if one is committed)
        return now < self._tidy_until and events.find("removed", since) is None

    def finish(self) -> dict[str, Any]:
        """The full rate in the same process: saves that are waited for, no compute beside."""
        result = {
            "persist_s": [one["save_s"] - one["stall_s"] for one in self._saves[1:]],
            "bytes": [one["bytes"] for one in self._saves[1:]],
        }
        self._loaded.work.step()
        self.save()
        while self.busy():
            time.sleep(0.05)
        full: list[float] = []
        for _ in range(3):
            full.append(self._run.urgent(self._loaded)["persist_s"])
            self._beside.write()
        result |= {"full_s": full[1:], **self._beside.result()}
        result["skipped"] = sum(one["event"] == "save.skipped" for one in self._run.events.seen)
        self._inside.__exit__(None, None, None)
        return result


class Theirs:
    """A peer whose end, with the harness's sync, is awaited by a thread."""

    def __init__(self, name: str, loaded: Loaded, directory: Path) -> None:
        self._peer = BY_NAME[name]()
        self._peer.prepare(loaded, directory)
        self._step = 0
        self._waiter: threading.Thread | None = None
        self._persist_s: list[float] = []
        self._bytes = sum(tensor.nbytes for tensor in loaded.flat().values())

    def after_step(self) -> None:
        return

    def save(self) -> float:
        if self._step:
            disk.remove(self._peer.path(self._step))
        self._step += 1
        began = time.perf_counter()
        handle = self._peer.save(self._step)
        blocked = time.perf_counter()
        path = self._peer.path(self._step)

        def until_durable() -> None:
            handle.wait()
            disk.sync(path)
            self._persist_s.append(time.perf_counter() - blocked)

        self._waiter = threading.Thread(target=until_durable, daemon=True)
        self._waiter.start()
        return blocked - began

    def busy(self) -> bool:
        return self._waiter is not None and self._waiter.is_alive()

    def finish(self) -> dict[str, Any]:
        self._peer.close()
        kept = self._persist_s[1:]
        return {"persist_s": kept, "bytes": [self._bytes] * len(kept)}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    work = Work(job["threads"])
    loaded = Loaded(work, build(job["gib"], Shape.LARGE).flat())
    every = round(job["interval_s"] / STEP_S)
    directory = Path(job["directory"])
    contender: Contender
    if job["name"] == "hpc_ckpt":
        contender = Ours(loaded, directory, every)
    else:
        contender = Theirs(job["name"], loaded, directory)
    rest(job["gib"])
    result = _train(contender, loaded, every, job["saves"] + 1)
    return {**result, **contender.finish(), "every": every, "threads": job["threads"]}


def _train(contender: Contender, loaded: Loaded, every: int, saves: int) -> dict[str, Any]:
    """The first save warms up: it is left out of the result. Quiet steps: before the first window
    that is kept, and after each."""
    quiet: list[list[float]] = []
    windows: list[list[float]] = []
    blocked: list[float] = []
    overran = 0
    for turn in range(saves + 1):
        quiet.append([])
        overran += _interval(contender, loaded.work, every, quiet[-1], windows)
        if turn < saves:
            loaded.work.step()
            loaded.advance()
            collect_garbage()
            blocked.append(contender.save())
            windows.append([])
    return {
        "quiet_s": quiet[1:],
        "windows_s": windows[1:],
        "block_s": blocked[1:],
        "overran": overran,
    }


def _interval(
    contender: Contender, work: Work, every: int, quiet: list[float], windows: list[list[float]]
) -> bool:
    """The steps up to the next save; whether the last save was still under way when it was due."""
    under_way = bool(windows)
    for _ in range(every - 1):
        under_way = under_way and contender.busy()
        (windows[-1] if under_way else quiet).append(_step(contender, work))
    overran = under_way and contender.busy()
    while under_way and contender.busy():
        windows[-1].append(seconds(work.step))
    return overran


def _step(contender: Contender, work: Work) -> float:
    began = time.perf_counter()
    work.step()
    contender.after_step()
    return time.perf_counter() - began
