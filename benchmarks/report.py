"""The table and the JSON of a run. Says what was measured; judges nothing."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import statistics
from typing import Any

from .figures import Cell, Contender, Grid, Limits, Record, Spread, Stolen, spread, stolen
from .ours import Urgent
from .states import GIB
from .targets import Target

NOTHING = "–"


def markdown(machine: dict[str, Any], records: list[Record], targets: list[Target]) -> str:
    grid = Grid([one for one in records if "shape" in one])
    parts = [_machine(machine), _targets(targets)]
    parts += [_cell(grid, cell) for cell in grid.cells()]
    parts += [_stolen_table(records), _competing(records), _tiny(records), _frozen(records)]
    parts.append(_tiers(records))
    return "\n\n".join(part for part in parts if part) + "\n"


def as_json(machine: dict[str, Any], records: list[Record], targets: list[Target]) -> str:
    """One line per record, so that two runs can be compared line by line."""
    lines = ",\n".join(json.dumps(_rounded(one)) for one in records)
    judged = json.dumps([_judged(one) for one in targets], indent=1, ensure_ascii=False)
    described = json.dumps(machine, indent=1, ensure_ascii=False)
    return f'{{"machine": {described},\n"targets": {judged},\n"records": [\n{lines}\n]}}\n'


def _judged(target: Target) -> dict[str, Any]:
    return {
        "name": target.name,
        "target": _bound(target),
        "seen": _rounded(target.seen),
        "verdict": target.verdict,
    }


def _rounded(value: Any) -> Any:
    """To the microsecond."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, 6) if isinstance(value, float) else value


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def seconds(value: float) -> str:
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.3g} s"


def between(samples: Spread) -> str:
    if not samples:
        return NOTHING
    return f"{seconds(samples.median)} ({seconds(samples.least)} to {seconds(samples.most)})"


def _machine(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    quick = "\n\nA quick run: it shows that everything runs, its figures mean little."
    return (
        "# Checkpoints side by side\n\n"
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB memory; "
        f"Linux {machine['kernel']}; {machine['file_system']}; Python {machine['python']}; "
        f"{versions}; commit {machine['commit']}, tree {machine.get('tree', 'unknown')}; "
        f"{machine['date']}; load average at the start {machine['load_before']:.2f}; "
        f"rounds: {machine['rounds']}; "
        f"sittings: {machine.get('sittings', 1)}." + (quick if machine["quick"] else "")
    )


def _targets(targets: list[Target]) -> str:
    rows = [[one.name, _bound(one), _seen(one), one.verdict] for one in targets]
    return "## Targets\n\n" + table(["figure", "target", "seen", "verdict"], rows)


def _bound(target: Target) -> str:
    return f"{target.sense} {_figure(target, target.bound)}"


def _figure(target: Target, value: float) -> str:
    number = f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return f"{number} {target.unit}".strip()


def _seen(target: Target) -> str:
    return "; ".join(
        f"{where}: {_figure(target, value)}" + ("" if target.holds(value) else " (missed)")
        for where, value in target.seen.items()
    )


# ── one size and shape ────────────────────────────────────────────────────────────────────
def _cell(grid: Grid, cell: Cell) -> str:
    limits = grid.limits(cell)
    head = [
        "contender",
        "block, first",
        "block",
        "durable",
        "÷ raw write",
        "load cold ÷ raw read",
        "load cached ÷ memcpy",
        "files",
        "extra memory",
    ]
    rows = [_row(grid, cell, name, limits) for name in grid.names(cell)]
    parts = [f"## {cell}", table(head, rows), _limits(limits), *_beside(grid, cell)]
    failures = sorted(set(grid.restore_failures(cell)))
    parts += [f"A restore failed: {why}" for why in failures]
    new = grid.restores(cell, cached=False, empty=True)
    if new and limits is not None:
        parts.append(
            "hpc_ckpt restored into an optimizer that has not stepped, so into memory new to the "
            f"process: {between(new)}; a raw read into new memory: {between(limits.read_new())}."
        )
    skipped = grid.background(cell).every("skipped_s")
    if skipped:
        parts.append(
            f"hpc_ckpt skipped {len(skipped.samples)} snapshots that were due, because no buffer "
            f"was ready; a step() that did so blocked {between(skipped)}."
        )
    return "\n\n".join(parts)


def _row(grid: Grid, cell: Cell, name: str, limits: Limits | None) -> list[str]:
    contender = grid.contender(cell, name)
    if not contender.results:
        return [name, f"failed: {contender.failures[0]}", *[NOTHING] * 7]
    size = contender.results[0]["state_bytes"]
    durable = contender.later("durable_s")
    return [
        name + (f" (failed {len(contender.failures)} ×)" if contender.failures else ""),
        between(contender.first("block_s")),
        between(contender.later("block_s")),
        between(durable),
        _ratio(limits.best("write_s") if limits else None, durable),
        *_loads(grid, cell, name, contender, limits),
        f"{contender.median('files'):g}",
        f"{contender.median('extra_bytes') / size:.2f} ×",
    ]


def _loads(
    grid: Grid, cell: Cell, name: str, contender: Contender, limits: Limits | None
) -> list[str]:
    """Ours is restored in processes of their own, from what the urgent saves left."""
    cold, cached = contender.every("load_cold_s"), contender.every("load_cached_s")
    if name == Urgent.name:
        cold = grid.restores(cell, cached=False, empty=False)
        cached = grid.restores(cell, cached=True, empty=False)
    return [
        _timed_ratio(limits.best("read_s") if limits else None, cold),
        _timed_ratio(limits.memcpy.median if limits else None, cached),
    ]


def _timed_ratio(limit_s: float | None, samples: Spread) -> str:
    if not samples:
        return NOTHING
    return f"{_ratio(limit_s, samples)} ({seconds(samples.median)})"


def _ratio(limit_s: float | None, samples: Spread) -> str:
    return f"{limit_s / samples.median:.2f}" if limit_s and samples else NOTHING


def _limits(limits: Limits | None) -> str:
    if limits is None:
        return "Limits: not measured."
    rows = [
        ["memcpy loop, numpy", between(limits.memcpy), _rate(limits, limits.memcpy.median)],
        ["memmove loop, ctypes", between(limits.memmove), _rate(limits, limits.memmove.median)],
    ]
    for key, name in (("write_s", "raw O_DIRECT write + fsync"), ("read_s", "raw O_DIRECT read")):
        for threads, samples in limits.threads(key).items():
            rate = _rate(limits, samples.median)
            rows.append([f"{name}, {threads} thread(s)", between(samples), rate])
    return table(["limit", "seconds", "rate"], rows)


def _beside(grid: Grid, cell: Cell) -> list[str]:
    """What the verdicts set hpc_ckpt against."""
    raw = grid.urgent(cell).by_threads("write_s", after=1)
    parts = {
        "memcpy loop of the pieces of 64 KiB and more": grid.background(cell).later(
            "memcpy_large_s"
        ),
        **{f"raw write by {threads} thread(s)": one for threads, one in raw.items()},
        "raw read": grid.beside_restores(cell, "read_s", cached=False, empty=False),
        "memcpy loop beside a cached restore": grid.beside_restores(
            cell, "memcpy_s", cached=True, empty=False
        ),
    }
    told = [f"{name} {between(samples)}" for name, samples in parts.items() if samples]
    return [f"Between hpc_ckpt's own saves and restores: {'; '.join(told)}."] if told else []


def _rate(limits: Limits, took_s: float) -> str:
    return f"{limits.size / took_s / 1e9:.2f} GB/s"


# ── the rows apart ────────────────────────────────────────────────────────────────────────
def _stolen_table(records: list[Record]) -> str:
    groups = stolen(records)
    if not groups:
        return ""
    head = [
        "contender",
        "compute threads",
        "step alone",
        "stolen per checkpoint",
        "the same over quiet steps",
        "share of the window",
        "p95 step",
        "persist",
        "blocking",
        "late",
    ]
    rows = [_stolen_row(one) for one in groups]
    return f"## Stolen from training, {groups[0].gib:g} GiB in the background\n\n" + table(
        head, rows
    )


def _stolen_row(one: Stolen) -> list[str]:
    if not one.results:
        return [one.name, str(one.threads), f"failed: {one.failures[0]}", *[NOTHING] * 7]
    persist = spread(v for result in one.results for v in result["persist_s"])
    block = spread(v for result in one.results for v in result["block_s"])
    return [
        one.name,
        str(one.threads),
        seconds(one.baseline_s),
        _signed(one.per_save()),
        _signed(one.noise()),
        f"{100 * one.share().median:.1f} %",
        f"{100 * one.slower_p95():+.1f} %",
        f"{between(persist)}, {one.rate().median / 1e9:.2f} GB/s",
        between(block),
        str(one.late()),
    ]


def _signed(one: Spread) -> str:
    """Seconds that may be less than none."""
    return f"{one.median:.3g} s ({one.least:.3g} to {one.most:.3g})" if one else NOTHING


def _competing(records: list[Record]) -> str:
    kept = [one for one in records if one["kind"] == "competing"]
    if not kept:
        return ""
    title = f"## Blocking beside two busy processes, {kept[0]['gib']:g} GiB in 2,000 tensors"
    results = [one["result"] for one in kept if "result" in one]
    if not results:
        return f"{title}\n\nfailed: {kept[0]['failed']}"
    rows = []
    for name in results[0]["beside"]:
        alone = spread(v for one in results for v in one["alone"][name])
        beside = spread(v for one in results for v in one["beside"][name])
        rows.append([name, between(alone), between(beside), seconds(beside.most)])
    return f"{title}\n\n" + table(["copy", "alone", "beside", "worst"], rows)


def _tiny(records: list[Record]) -> str:
    kept = [one for one in records if one["kind"] == "tiny"]
    if not kept:
        return ""
    rows = []
    for name in dict.fromkeys(one["name"] for one in kept):
        contender = Contender([one for one in kept if one["name"] == name])
        if not contender.results:
            rows.append([name, f"failed: {contender.failures[0]}", NOTHING, NOTHING])
            continue
        block, durable = contender.later("block_s"), contender.later("durable_s")
        each = f"{1e6 * block.median / kept[0]['count']:.2f} µs"
        rows.append([name, each, between(block), between(durable)])
    head = ["contender", "blocking per tensor", "block", "durable"]
    return f"## {kept[0]['count']:,} tensors of one element\n\n" + table(head, rows)


def _frozen(records: list[Record]) -> str:
    kept = [one for one in records if one["kind"] == "frozen"]
    if not kept:
        return ""
    title = f"## 90 % of {kept[0]['gib']:g} GiB frozen"
    results = [one["result"] for one in kept if "result" in one]
    if not results:
        return f"{title}\n\nfailed: {kept[0]['failed']}"
    rows = []
    for name, key in (("everything changed", "full"), ("90 % unchanged", "frozen")):
        saves = [save for one in results for save in one[key]]
        written = statistics.median(save["written_bytes"] for save in saves) / GIB
        rows.append(
            [
                name,
                f"{written:.3f} GiB",
                between(spread(save["persist_s"] for save in saves)),
                between(spread(save["whole_s"] for save in saves)),
            ]
        )
    return f"{title}\n\n" + table(["save", "written", "persist", "snapshot and persist"], rows)


def _tiers(records: list[Record]) -> str:
    """Beside the targets: what it costs that a tier may hang."""
    kept = [one for one in records if one["kind"] == "tiers"]
    if not kept:
        return ""
    rows = []
    for one in kept:
        if "result" not in one:
            rows.append([one["cut"], f"failed: {one['failed']}", NOTHING, NOTHING])
            continue
        root, tier = (spread(one["result"][name][1:]) for name in ("root", "tier"))
        ratio = f"{tier.median / root.median:.2f} ×"
        rows.append([one["cut"], between(root), between(tier), ratio])
    title = f"## Restored, cold, out of another tier than the root, {kept[0]['gib']:g} GiB"
    head = ["shape", "the root, straight into place", "a tier that may hang", "÷ root"]
    return f"{title}\n\n" + table(head, rows)
