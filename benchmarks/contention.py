"""Where the time goes that a save in the background takes from training's threads.

    python -m benchmarks.contention [--threads 2 1] [--out FILE]

The explanation beside the row "stolen from training". The kernel counts for each thread how long
it ran and how long it was ready but had no core; training's threads are those that exist before
the Checkpointer. A step's wall time beyond what its threads ran and queued for is waiting: for
the other compute thread, for the interpreter's lock, for the host that took the core away.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path

from .clock import collect_garbage, rest
from .states import Shape, build
from .stolen import Ours
from .work import STEP_S, Loaded, Work

GIB = 1.0
INTERVAL_S = 6.0
SAVES = 6
NS = 1e-9
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
TASKS = Path("/proc/self/task")


@dataclass
class Spent:
    """Seconds of one step, or summed over several."""

    wall: float = 0.0
    main_ran: float = 0.0
    main_queued: float = 0.0
    helpers_ran: float = 0.0
    helpers_queued: float = 0.0
    others_ran: float = 0.0
    others_queued: float = 0.0
    host_took: float = 0.0

    def minus(self, other: Spent) -> Spent:
        return Spent(*(a - b for a, b in zip(self._values(), other._values(), strict=True)))

    def plus(self, other: Spent) -> Spent:
        return Spent(*(a + b for a, b in zip(self._values(), other._values(), strict=True)))

    def times(self, factor: float) -> Spent:
        return Spent(*(factor * value for value in self._values()))

    @property
    def main_waited(self) -> float:
        return self.wall - self.main_ran - self.main_queued

    def _values(self) -> list[float]:
        return [getattr(self, field.name) for field in fields(self)]


class Clocks:
    """Reads the kernel's clocks of this process's threads, in three groups."""

    def __init__(self) -> None:
        self._main = str(os.getpid())
        self._helpers = {path.name for path in TASKS.iterdir()} - {self._main}

    def read(self) -> Spent:
        now = Spent(wall=time.perf_counter(), host_took=_stolen_by_host())
        for task in TASKS.iterdir():
            ran, queued = _of_thread(task)
            group = self._group(task.name)
            setattr(now, f"{group}_ran", getattr(now, f"{group}_ran") + ran)
            setattr(now, f"{group}_queued", getattr(now, f"{group}_queued") + queued)
        return now

    def _group(self, name: str) -> str:
        if name == self._main:
            return "main"
        return "helpers" if name in self._helpers else "others"


def _of_thread(task: Path) -> tuple[float, float]:
    try:
        ran, queued, _ = (task / "schedstat").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0, 0.0
    return int(ran) * NS, int(queued) * NS


def _stolen_by_host() -> float:
    return int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8]) * TICK_S


@dataclass
class Looked:
    """Steps while nothing was under way, and of each save's window."""

    baseline: list[Spent]
    windows: list[list[Spent]]
    full_s: float


def look(threads: int, directory: Path) -> Looked:
    work = Work(threads)
    clocks = Clocks()
    loaded = Loaded(work, build(GIB, Shape.LARGE).flat())
    every = round(INTERVAL_S / STEP_S)
    contender = Ours(loaded, directory, every)
    rest(GIB)
    baseline: list[Spent] = []
    windows: list[list[Spent]] = []
    for turn in range(SAVES + 2):
        for _ in range(every - 1):
            steps = windows[-1] if windows and contender.busy() else baseline
            before = clocks.read()
            work.step()
            contender.after_step()
            steps.append(clocks.read().minus(before))
        if turn <= SAVES:
            work.step()
            loaded.advance()
            collect_garbage()
            contender.save()
            windows.append([])
        if turn == 0:
            baseline.clear()  # buffers were being prepared beside these steps
    return Looked(baseline, windows[1:], statistics.median(contender.finish()["full_s"]))


def table(threads: int, looked: Looked) -> str:
    """A save's window against as many steps of the baseline."""
    usual = total(looked.baseline).times(1 / len(looked.baseline))
    lines = [
        f"## {GIB:g} GiB, {threads} compute thread(s)",
        "",
        f"Save at full rate, nothing beside it: {1000 * looked.full_s:.0f} ms."
        f" A usual step: {1000 * usual.wall:.1f} ms. Milliseconds over a save's steps, beyond"
        " what as many usual steps have:",
        "",
        "| save | steps | wall | main ran | main queued | main waited |"
        " helpers ran | helpers queued | hpc_ckpt ran | hpc_ckpt queued | host took |",
        "| --- " * 11 + "|",
    ]
    beyond = []
    for number, window in enumerate(looked.windows):
        extra = total(window).minus(usual.times(len(window)))
        beyond.append(extra)
        lines.append(row(str(number + 1), str(len(window)), extra))
    lines.append(row("mean", "", total(beyond).times(1 / len(beyond))))
    return "\n".join([*lines, ""])


def total(spent: list[Spent]) -> Spent:
    whole = Spent()
    for one in spent:
        whole = whole.plus(one)
    return whole


def row(name: str, steps: str, extra: Spent) -> str:
    values = (
        extra.wall,
        extra.main_ran,
        extra.main_queued,
        extra.main_waited,
        extra.helpers_ran,
        extra.helpers_queued,
        extra.others_ran,
        extra.others_queued,
        extra.host_took,
    )
    return "| " + " | ".join([name, steps, *(f"{1000 * value:.0f}" for value in values)]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    parts = []
    for threads in options.threads:
        with tempfile.TemporaryDirectory(dir=options.scratch) as place:
            parts.append(table(threads, look(threads, Path(place))))
    text = "# Where stolen time goes\n\n" + "\n".join(parts)
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
