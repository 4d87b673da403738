"""The targets, each computed from the samples: the figure seen, and held or MISSED."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from . import resume
from .figures import (
    PER_TENSOR_S,
    Cell,
    Contender,
    Grid,
    Limits,
    Record,
    Spread,
    spread,
    stolen,
)

AT_MOST, AT_LEAST = "≤", "≥"
SLACK_BYTES = 32 << 20
"""Of the interpreter and the allocator, whatever the state's size."""


@dataclass(frozen=True)
class Target:
    """One line: what must hold everywhere it was measured."""

    name: str
    sense: str
    bound: float
    unit: str = "×"
    seen: dict[str, float] = field(default_factory=dict)

    def holds(self, value: float) -> bool:
        return value <= self.bound if self.sense == AT_MOST else value >= self.bound

    @property
    def missed(self) -> list[str]:
        return [where for where, value in self.seen.items() if not self.holds(value)]

    @property
    def verdict(self) -> str:
        if not self.seen:
            return "no figure"
        return "MISSED" if self.missed else "held"


def judge(records: list[Record]) -> list[Target]:
    """In the order of the table of targets."""
    grid = Grid([one for one in records if "shape" in one])
    return [
        *_blocking(grid),
        *_competing(records),
        *_tiny(records),
        _urgent(grid),
        *_stolen(records),
        *_restore(grid),
        *_memory(grid),
        _files(grid),
        *_ahead(grid),
        *_frozen(records),
        _resume(records),
    ]


def _per_cell(grid: Grid, value: Callable[[Cell, Limits], float | None]) -> dict[str, float]:
    """A figure for each cell that has its samples."""
    found: dict[str, float] = {}
    for cell in grid.cells():
        limits = grid.limits(cell)
        figure = None if limits is None else value(cell, limits)
        if figure is not None:
            found[str(cell)] = figure
    return found


def _median(samples: Spread) -> float | None:
    return samples.median if samples else None


def _blocking(grid: Grid) -> list[Target]:
    def figure(choose: Callable[[Contender], Spread]) -> dict[str, float]:
        def value(cell: Cell, limits: Limits) -> float | None:
            ours = grid.background(cell)
            block, copied = _median(choose(ours)), _median(ours.later("memcpy_large_s"))
            if block is None or copied is None:
                return None
            return (block - PER_TENSOR_S * limits.small_pieces) / copied

        return _per_cell(grid, value)

    return [
        Target(
            "blocking time of a step() with a snapshot ÷ memcpy loop (2 µs per small piece)",
            AT_MOST,
            1.15,
            seen=figure(lambda one: one.later("block_s")),
        ),
        Target(
            "the same, first save of a process",
            AT_MOST,
            1.15,
            seen=figure(lambda one: one.first("block_s")),
        ),
    ]


def _competing(records: list[Record]) -> list[Target]:
    results = [o["result"] for o in records if o["kind"] == "competing" and "result" in o]
    like, strict = {}, {}
    if results:
        beside = {
            name: [v for one in results for v in one["beside"][name]]
            for name in results[0]["beside"]
        }
        worst = max(beside["hpc_ckpt"])
        like["worst of all"] = worst / max(beside["memcpy"])
        strict["worst of all"] = worst / statistics.median(beside["memcpy"])
    return [
        Target(
            "beside two busy processes: worst blocking ÷ worst memcpy loop beside them",
            AT_MOST,
            2.0,
            seen=like,
        ),
        Target(
            "the same ÷ median memcpy loop beside them",
            AT_MOST,
            2.0,
            seen=strict,
        ),
    ]


def _tiny(records: list[Record]) -> list[Target]:
    kept = [o for o in records if o["kind"] == "tiny" and o["name"] == "hpc_ckpt"]
    seen = {
        f"{one['count']:,} tensors": 1e6
        * statistics.median(one["result"]["block_s"][1:])
        / one["count"]
        for one in kept
        if "result" in one
    }
    return [Target("blocking time per tensor of one element", AT_MOST, 2.0, unit="µs", seen=seen)]


def _urgent(grid: Grid) -> Target:
    def value(cell: Cell, limits: Limits) -> float | None:
        ours = grid.urgent(cell)
        persist, raw = _median(ours.later("persist_s")), ours.best("write_s", after=1)
        return None if persist is None or raw is None else raw / persist

    return Target(
        "urgent persist: rate until durable ÷ raw O_DIRECT write",
        AT_LEAST,
        0.9,
        seen=_per_cell(grid, value),
    )


def _stolen(records: list[Record]) -> list[Target]:
    ours = {one.threads: one for one in stolen(records) if one.name == "hpc_ckpt" and one.results}
    share, p95, late, spare, rate = {}, {}, {}, {}, {}
    if (both := ours.get(2)) and both.per_save() and both.full_s():
        where = f"{both.gib:g} GiB, 2 threads"
        share[where] = both.mean_per_save() / both.full_s().median
        p95[where] = 100 * both.slower_p95()
        late[where] = float(both.late())
    if (single := ours.get(1)) and single.share():
        where = f"{single.gib:g} GiB, 1 thread"
        spare[where] = 100 * single.share().median
        if (raw := single.raw_rate()) is not None:
            rate[where] = single.rate().median / raw
    return [
        Target(
            "background, 2-thread compute: time stolen ÷ durable time at full rate",
            AT_MOST,
            0.25,
            seen=share,
        ),
        Target("background, 2-thread compute: p95 step, slower by", AT_MOST, 15.0, "%", seen=p95),
        Target("background: saves that were late for the next", AT_MOST, 0.0, "", seen=late),
        Target("one spare core: share of time stolen", AT_MOST, 5.0, "%", seen=spare),
        Target("one spare core: persist rate ÷ raw O_DIRECT write", AT_LEAST, 0.9, seen=rate),
    ]


def _restore(grid: Grid) -> list[Target]:
    def figure(key: str, **way: bool) -> dict[str, float]:
        def value(cell: Cell, limits: Limits) -> float | None:
            took = _median(grid.restores(cell, **way))
            least = _median(grid.beside_restores(cell, key, **way))
            return None if took is None or least is None else least / took

        return _per_cell(grid, value)

    return [
        Target(
            "restore, cold ÷ raw O_DIRECT read",
            AT_LEAST,
            0.9,
            seen=figure("read_s", cached=False, empty=False),
        ),
        Target(
            "restore, cached ÷ memcpy",
            AT_LEAST,
            0.8,
            seen=figure("memcpy_s", cached=True, empty=False),
        ),
        Target(
            "restore, cold, into an optimizer that has not stepped ÷ raw O_DIRECT read",
            AT_LEAST,
            0.9,
            seen=figure("read_s", cached=False, empty=True),
        ),
    ]


def _resume(records: list[Record]) -> Target:
    kept = [one for one in records if one["kind"] == "resume" and "result" in one]
    seen = {
        f"{one['count']:,} samples, {name}": value
        for one in kept
        for name, value in resume.ratios(one["result"]).items()
    }
    return Target("going on in an epoch ÷ one permutation", AT_MOST, 1.5, seen=seen)


def _memory(grid: Grid) -> list[Target]:
    def figure(choose: Callable[[Cell], Contender], key: str) -> dict[str, float]:
        def value(cell: Cell, limits: Limits) -> float | None:
            contender = choose(cell)
            if not contender.results:
                return None
            return contender.median(key) / (limits.size + SLACK_BYTES)

        return _per_cell(grid, value)

    return [
        Target(
            "extra host memory at its peak ÷ (state + 32 MiB)",
            AT_MOST,
            1.0,
            seen=figure(grid.urgent, "extra_bytes"),
        ),
        Target(
            "the same, saved at every step without waiting",
            AT_MOST,
            2.0,
            seen=figure(grid.background, "crowded_bytes"),
        ),
    ]


def _files(grid: Grid) -> Target:
    def value(cell: Cell, limits: Limits) -> float | None:
        contender = grid.background(cell)
        return contender.median("files") if contender.results else None

    return Target("files per checkpoint", AT_MOST, 2.0, unit="", seen=_per_cell(grid, value))


def _ahead(grid: Grid) -> list[Target]:
    def figure(ours: Callable[[Cell], Contender], key: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for cell in grid.cells():
            mine = _median(ours(cell).later(key))
            theirs = [(one.later(key).median, name) for name, one in grid.peers(cell)]
            if mine is not None and theirs:
                best, name = min(theirs)
                found[f"{cell} (best: {name})"] = best / mine
        return found

    return [
        Target(
            "ahead of the best peer: blocking",
            AT_LEAST,
            2.0,
            seen=figure(grid.background, "block_s"),
        ),
        Target(
            "ahead of the best peer: durable (snapshot and persist)",
            AT_LEAST,
            1.5,
            seen=figure(grid.urgent, "durable_s"),
        ),
    ]


def _frozen(records: list[Record]) -> list[Target]:
    results = [o["result"] for o in records if o["kind"] == "frozen" and "result" in o]

    def figure(key: str) -> dict[str, float]:
        if not results:
            return {}
        full = spread(save[key] for one in results for save in one["full"])
        after = spread(save[key] for one in results for save in one["frozen"])
        return {"90 % frozen": after.median / full.median}

    return [
        Target(
            "90 % frozen: bytes written ÷ full save", AT_MOST, 0.2, seen=figure("written_bytes")
        ),
        Target("90 % frozen: persist time ÷ full save", AT_MOST, 0.2, seen=figure("persist_s")),
        Target(
            "90 % frozen: snapshot and persist ÷ full save", AT_MOST, 0.2, seen=figure("whole_s")
        ),
    ]
