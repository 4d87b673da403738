"""From samples to figures: medians, spreads and ratios, by cell and contender."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .ours import Background, Urgent

PER_TENSOR_S = 2e-6
LIMITS = "limits"
PERIOD = 2
"""Saves after which what follows a save repeats itself: as many as are kept."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Spread:
    """Some samples of one figure."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def least(self) -> float:
        return min(self.samples)

    @property
    def most(self) -> float:
        return max(self.samples)

    def __bool__(self) -> bool:
        return bool(self.samples)


def spread(values: Iterable[float]) -> Spread:
    return Spread(tuple(values))


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


@dataclass(frozen=True, order=True)
class Cell:
    """One size and one shape."""

    gib: float
    shape: str

    def __str__(self) -> str:
        return f"{self.gib:g} GiB {self.shape}"


class Contender:
    """All rounds of one contender in one cell."""

    def __init__(self, records: list[Record]) -> None:
        self.results = [one["result"] for one in records if "result" in one]
        self.failures = [one["failed"] for one in records if "failed" in one]

    def first(self, key: str) -> Spread:
        return spread(result[key][0] for result in self.results if result.get(key))

    def later(self, key: str) -> Spread:
        return spread(value for result in self.results for value in result.get(key, ())[1:])

    def every(self, key: str) -> Spread:
        return spread(value for result in self.results for value in result.get(key, ()))

    def median(self, key: str) -> float:
        return float(statistics.median(result[key] for result in self.results))

    def by_threads(self, key: str, after: int = 0) -> dict[str, Spread]:
        """Without the first `after` of each process."""
        found: dict[str, list[float]] = {}
        for result in self.results:
            for threads, values in result.get(key, {}).items():
                found.setdefault(threads, []).extend(values[after:])
        return {threads: spread(values) for threads, values in found.items() if values}

    def best(self, key: str, after: int = 0) -> float | None:
        """Median seconds with the thread count that does best."""
        return min((one.median for one in self.by_threads(key, after).values()), default=None)


class Limits:
    """What the machine could do in one cell; the disk does not know shapes, so they share it."""

    def __init__(self, cell: Contender, size: Contender) -> None:
        self._of_size = size
        self.size: int = cell.results[0]["state_bytes"]
        self.small_pieces: int = cell.results[0]["small_pieces"]
        self.large = cell.later("memcpy_large_s")
        small = cell.later("memcpy_small_s")
        self.memcpy = spread(map(sum, zip(self.large.samples, small.samples, strict=True)))
        self.memmove = cell.later("memmove_s")

    def threads(self, key: str) -> dict[str, Spread]:
        return self._of_size.by_threads(key)

    def best(self, key: str) -> float:
        best = self._of_size.best(key)
        if best is None:
            raise ValueError(f"no limit {key}")
        return best

    def read_new(self) -> Spread:
        """Seconds of a raw read into memory that is new to the process."""
        return self._of_size.every("read_new_s")


class Grid:
    """Every contender of every cell."""

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    def cells(self) -> list[Cell]:
        return sorted({Cell(one["gib"], one["shape"]) for one in self._records})

    def names(self, cell: Cell) -> list[str]:
        kept = [one["name"] for one in self._of(cell) if one["kind"] in ("ours", "peer")]
        return list(dict.fromkeys(sorted(kept, key=lambda name: not name.startswith("hpc_ckpt"))))

    def contender(self, cell: Cell, name: str) -> Contender:
        kept = [one for one in self._of(cell) if one["kind"] != "restore"]
        return Contender([one for one in kept if one["name"] == name])

    def limits(self, cell: Cell) -> Limits | None:
        found = self.contender(cell, LIMITS)
        of_size = [o for o in self._records if o["name"] == LIMITS and o["gib"] == cell.gib]
        return Limits(found, Contender(of_size)) if found.results else None

    def background(self, cell: Cell) -> Contender:
        return self.contender(cell, Background.name)

    def urgent(self, cell: Cell) -> Contender:
        return self.contender(cell, Urgent.name)

    def peers(self, cell: Cell) -> Iterator[tuple[str, Contender]]:
        for name in dict.fromkeys(o["name"] for o in self._of(cell) if o["kind"] == "peer"):
            contender = self.contender(cell, name)
            if contender.results:
                yield name, contender

    def restores(self, cell: Cell, *, cached: bool, empty: bool) -> Spread:
        return spread(
            one["result"]["seconds"]
            for one in self._of(cell)
            if one["kind"] == "restore"
            and (one["cached"], one["empty"]) == (cached, empty)
            and "result" in one
        )

    def beside_restores(self, cell: Cell, key: str, *, cached: bool, empty: bool) -> Spread:
        """The limit that was measured in the processes of these restores."""
        return spread(
            value
            for one in self._of(cell)
            if one["kind"] == "restore" and (one["cached"], one["empty"]) == (cached, empty)
            for value in one.get("result", {}).get(key, ())
        )

    def restore_failures(self, cell: Cell) -> list[str]:
        kept = [one for one in self._of(cell) if one["kind"] == "restore"]
        return [one["failed"] for one in kept if "failed" in one]

    def _of(self, cell: Cell) -> list[Record]:
        return [o for o in self._records if (o["gib"], o["shape"]) == (cell.gib, cell.shape)]


@dataclass(frozen=True)
class Stolen:
    """Of one contender with one number of threads, over all rounds."""

    name: str
    threads: int
    gib: float
    results: tuple[Record, ...]
    failures: tuple[str, ...]

    @property
    def baseline_s(self) -> float:
        return spread(self._quiet()).median

    def per_save(self) -> Spread:
        """Seconds stolen by each checkpoint.

        Against the mean of as many quiet steps before it and after it: a machine drifts by more
        in a minute than a save takes, and steps have a long tail, which a median leaves out.
        """
        return spread(sum(window) - len(window) * near for window, near in self._windows())

    def noise(self) -> Spread:
        """The same sum over as many quiet steps, where nothing could be stolen."""
        length = statistics.median(len(window) for window, _ in self._windows())
        found = []
        for one in self.results:
            for steps in one["quiet_s"]:
                third = len(steps) // 3
                if third:
                    inside, near = steps[third : 2 * third], steps[:third] + steps[2 * third :]
                    found.append(length * (statistics.mean(inside) - statistics.mean(near)))
        return spread(found)

    def _windows(self) -> Iterator[tuple[list[float], float]]:
        """The steps beside each save, and the mean quiet step next to them."""
        for one in self.results:
            around = zip(one["quiet_s"], one["windows_s"], one["quiet_s"][1:], strict=False)
            for before, window, after in around:
                length = len(window)
                near = before[max(len(before) - length, 0) :] + after[:length]
                yield window, statistics.mean(near or self._quiet())

    def _quiet(self) -> list[float]:
        return [step for one in self.results for steps in one["quiet_s"] for step in steps]

    def mean_per_save(self) -> float:
        """Over whole periods: every second save is read back before an older one goes."""
        stolen = self.per_save().samples
        each = len(stolen) // len(self.results)
        last = [
            value
            for number in range(len(self.results))
            for value in stolen[number * each : (number + 1) * each][-PERIOD * (each // PERIOD) :]
        ]
        return statistics.mean(last)

    def share(self) -> Spread:
        """Stolen seconds as share of the time the save was under way."""
        return spread(
            1 - len(window) * near / sum(window) for window, near in self._windows() if window
        )

    def slower_p95(self) -> float:
        inside = [v for one in self.results for window in one["windows_s"] for v in window]
        return quantile(inside or self._quiet(), 0.95) / quantile(self._quiet(), 0.95) - 1

    def rate(self) -> Spread:
        """Bytes per second from the snapshot to durable."""
        return spread(
            size / took
            for one in self.results
            for size, took in zip(one["bytes"], one["persist_s"], strict=True)
        )

    def raw_rate(self) -> float | None:
        """Bytes per second of raw writes in the same processes."""
        best = Contender([{"result": one} for one in self.results]).best("write_s", after=1)
        sizes = [size for one in self.results for size in one["bytes"]]
        return None if best is None else statistics.median(sizes) / best

    def full_s(self) -> Spread:
        return spread(value for one in self.results for value in one.get("full_s", ()))

    def late(self) -> int:
        return sum(one["overran"] + one.get("skipped", 0) for one in self.results)


def stolen(records: list[Record]) -> list[Stolen]:
    kept = [one for one in records if one["kind"] == "stolen"]
    groups = dict.fromkeys((one["name"], one["threads"], one["gib"]) for one in kept)
    return [
        Stolen(
            name,
            threads,
            gib,
            tuple(o["result"] for o in kept if _is(o, name, threads) and "result" in o),
            tuple(o["failed"] for o in kept if _is(o, name, threads) and "failed" in o),
        )
        for name, threads, gib in groups
    ]


def _is(record: Record, name: str, threads: int) -> bool:
    return (record["name"], record["threads"]) == (name, threads)
