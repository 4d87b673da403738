"""`make bench`: hpc_ckpt beside its peers and the machine's limits, in one go.

Every measurement has a process and a directory of its own; rounds go over all contenders in
turn, so that a machine that drifts drifts for all of them. docs/benchmarks.md is the method.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import machine, report, targets
from .figures import LIMITS, Record
from .ours import MODES, Urgent
from .peers import PEERS, DistributedStaged, Safetensors, SnapshotAsync, TorchSave
from .runner import PROJECT, Runner
from .states import Shape

RESULTS = PROJECT / "benchmarks" / "results"
QUICK_RESULTS = PROJECT / "build" / "bench-quick"
UNFINISHED = PROJECT / "build" / "bench-unfinished"
SCRATCH = PROJECT / "build" / "bench"
SIZES = (0.1, 1.0, 4.0)
SAVES = {0.1: 4, 1.0: 3, 4.0: 1}
"""Of a peer, after its first."""
OWN_SAVES = {0.1: 6, 1.0: 5, 4.0: 3}
"""Of hpc_ckpt and of the limits: they are set against each other."""
RESTORES = tuple(
    {"cached": cached, "empty": empty, "limit_first": limit_first}
    for cached, empty in ((False, False), (False, True), (False, False), (True, False))
    for limit_first in (False, True)
)
"""Each beside its limit, which comes first in every second one. The cached ones last: they read the
checkpoint once more, and a host would have it nearer than the file it is set against."""
ROWS = ("grid", "stolen", "competing", "tiny", "frozen", "tiers", "resume")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured, and how often."""

    sizes: tuple[float, ...]
    rounds: int | None
    quick: bool
    only: tuple[str, ...]
    contenders: tuple[str, ...]

    def rounds_at(self, gib: float) -> int:
        """Fewer where each takes long."""
        return self.rounds or (1 if gib >= 1 else 2)

    @property
    def row_gib(self) -> float:
        """Of the rows beside the grid."""
        return 0.1 if self.quick else 1.0

    def wants(self, name: str) -> bool:
        return not self.contenders or name in self.contenders or name == LIMITS


def main() -> None:
    options = _options()
    plan = _plan(options)
    # Otherwise the process that is being measured would outlive this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    shutil.rmtree(options.scratch, ignore_errors=True)
    options.scratch.mkdir(parents=True)
    runner = Runner(options.scratch, options.patience)
    about = machine.describe(options.scratch)
    about |= {"quick": plan.quick, "rounds": plan.rounds or "2 at 0.1 GiB, 1 above"}
    records = _earlier(UNFINISHED) if options.resume else []
    about["sittings"] = 1 + max((one.get("sitting", 0) for one in records), default=0)
    try:
        for record in _records(runner, plan, Known(records)):
            records.append({**record, "sitting": about["sittings"]})
            _tell(record)
            _write(UNFINISHED, about, records)
    finally:
        shutil.rmtree(options.scratch, ignore_errors=True)
    print(_write(options.output, about, records))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="0.1 GiB and one round: does it run?")
    parser.add_argument("--rounds", type=int, help="rounds of every size (2; 1 from 1 GiB on)")
    parser.add_argument("--sizes", type=float, nargs="+", choices=SIZES, help="in GiB")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS, help="some of the rows")
    parser.add_argument("--contenders", nargs="+", default=(), help="some of the contenders")
    parser.add_argument("--patience", type=float, default=1800, help="seconds for one process")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="where to write")
    parser.add_argument(
        "--resume", action="store_true", help="go on with a run that was broken off"
    )
    parser.add_argument("--output", type=Path, help="where the results go")
    options = parser.parse_args()
    options.output = options.output or (QUICK_RESULTS if options.quick else RESULTS)
    return options


def _plan(options: argparse.Namespace) -> Plan:
    sizes = (0.1,) if options.quick else SIZES
    return Plan(
        sizes=tuple(options.sizes or sizes),
        rounds=options.rounds or (1 if options.quick else None),
        quick=options.quick,
        only=tuple(options.only),
        contenders=tuple(options.contenders),
    )


class Known:
    """What an earlier sitting has measured already."""

    def __init__(self, records: list[Record]) -> None:
        self._keys = [_key(one) for one in records if "result" in one]

    def has(self, job: dict[str, Any], times: int = 1) -> bool:
        return self._keys.count(_key(job)) >= times


def _key(job: dict[str, Any]) -> tuple[Any, ...]:
    names = ("kind", "name", "gib", "shape", "round", "threads", "count")
    return tuple(job.get(name) for name in names)


def _earlier(folder: Path) -> list[Record]:
    path = folder / "checkpoint.json"
    if not path.exists():
        sys.exit(f"nothing to go on with: {path} is not there")
    records: list[Record] = json.loads(path.read_text())["records"]
    return records


def _records(runner: Runner, plan: Plan, known: Known) -> Iterator[Record]:
    """Every size and row once, then the second rounds."""
    for turn in range(max(plan.rounds_at(gib) for gib in plan.sizes)):
        for gib in plan.sizes:
            if "grid" in plan.only and turn < plan.rounds_at(gib):
                for shape in Shape:
                    yield from _round(runner, plan, gib, shape, turn, known)
        for job in _rows(plan) if turn == 0 else ():
            if not known.has(job):
                yield runner.run(job)


def _round(
    runner: Runner, plan: Plan, gib: float, shape: Shape, turn: int, known: Known
) -> Iterator[Record]:
    """Everybody once; each round begins with another one."""
    everybody = [
        (LIMITS, LIMITS),
        *(("ours", name) for name in MODES),
        *(("peer", peer.name) for peer in PEERS),
    ]
    wanted = [one for one in everybody if plan.wants(one[1])]
    start = turn * len(wanted) // plan.rounds_at(gib)
    for kind, name in wanted[start:] + wanted[:start]:
        job = {
            "kind": kind,
            "name": name,
            "gib": gib,
            "shape": shape.value,
            "round": turn,
            "saves": (SAVES if kind == "peer" else OWN_SAVES)[gib],
        }
        if name == Urgent.name:
            if not known.has({**job, "kind": "restore"}, times=len(RESTORES)):
                yield from _saved_and_restored(runner, job)
        elif not known.has(job):
            yield runner.run(job)


def _saved_and_restored(runner: Runner, job: dict[str, Any]) -> Iterator[Record]:
    """The saves, then each restore in a fresh process."""
    directory = runner.directory()
    try:
        saved = runner.run_in(directory, job)
        yield saved
        if "failed" in saved:
            return
        digest = saved["result"]["digest"]
        for way in RESTORES:
            again = {**job, "kind": "restore", **way}
            yield runner.run_in(directory, {**again, "digest": digest})
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _rows(plan: Plan) -> Iterator[dict[str, Any]]:
    gib = plan.row_gib
    if "stolen" in plan.only:
        for threads in (2, 1):
            turns = ("hpc_ckpt", DistributedStaged.name, SnapshotAsync.name, "hpc_ckpt")
            for turn, name in enumerate(turns):
                yield {
                    "kind": "stolen",
                    "round": turn,
                    "name": name,
                    "gib": gib,
                    "threads": threads,
                    "saves": 1 if plan.quick else 4,
                    "interval_s": 4.0 if plan.quick else 12.0,
                }
    if "competing" in plan.only:
        yield {"kind": "competing", "name": "hpc_ckpt", "gib": gib, "snapshots": 12}
    if "tiny" in plan.only:
        count = 20_000 if plan.quick else 100_000
        for name in ("hpc_ckpt", TorchSave.name, Safetensors.name):
            yield {"kind": "tiny", "name": name, "count": count, "saves": 3}
    if "frozen" in plan.only:
        yield {"kind": "frozen", "name": "hpc_ckpt", "gib": gib, "saves": 3}
    if "tiers" in plan.only:
        for shape in Shape:
            yield {"kind": "tiers", "name": shape.value, "gib": gib, "cut": shape.value, "saves": 3}
    if "resume" in plan.only:
        count = 10**6 if plan.quick else 10**7
        yield {"kind": "resume", "name": "hpc_ckpt", "count": count, "saves": 7}


def _tell(record: Record) -> None:
    where = " ".join(str(record[key]) for key in ("gib", "shape", "threads") if key in record)
    how = record.get("failed", f"{record['took_s']:g} s")
    line = f"round {record.get('round', 0)}: {record['kind']} {record['name']} {where}: {how}"
    print(line, file=sys.stderr, flush=True)


def _write(folder: Path, about: dict[str, Any], records: list[Record]) -> str:
    """Done after every record as well: a run that is broken off leaves what it has seen."""
    folder.mkdir(parents=True, exist_ok=True)
    judged = targets.judge(records)
    text = report.markdown(about, records, judged)
    (folder / "checkpoint.json").write_text(report.as_json(about, records, judged))
    (folder / "checkpoint.md").write_text(text)
    return text


if __name__ == "__main__":
    main()
