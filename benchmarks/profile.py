"""Where the time of a save and of a restore goes: phases of the disk, functions of Python.

    python -m benchmarks.profile [--gib 0.1 1] [--out FILE]

The explanation beside the table of benchmarks.checkpoint, not a measurement of its own: cProfile
makes Python slower, so shares count here, not milliseconds.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from hpc_ckpt import Checkpointer, fsio

from . import disk
from .clock import collect_garbage, seconds
from .limits import Target, write
from .ours import NEVER, Enough
from .states import Shape, State, build, views

SAVES = 6
ROWS = 14
PHASES = (
    ("snapshot", "began", "stage.created"),
    ("digests and direct writes", "shard.opened", "shard.written"),
    ("fsync of the shard", "shard.written", "shard.synced"),
    ("manifest, made and written", "shard.synced", "manifest.written"),
    ("fsync of the manifest", "manifest.written", "manifest.synced"),
    ("fsync of the directory, lease, rename", "manifest.synced", "commit.renamed"),
    ("fsync of the parent", "commit.renamed", "commit.durable"),
    ("retention, events, waking up", "commit.durable", "returned"),
)


@contextmanager
def entered(root: Path, state: State) -> Iterator[Checkpointer]:
    """A Checkpointer that saves only when told, left without a final checkpoint."""
    tracked = {"model": state.model, "optimizer": state.optimizer}
    ckpt = Checkpointer(root, policy=NEVER, keep=2, **tracked)
    with suppress(Enough), ckpt:
        yield ckpt
        raise Enough


def phases(root: Path, state: State) -> dict[str, float]:
    """Median milliseconds of each phase of a save that is waited for."""
    moments: dict[str, float] = {}
    found: dict[str, list[float]] = {name: [] for name, _, _ in PHASES}
    before = fsio.observe(lambda point: moments.__setitem__(point, time.perf_counter()))
    try:
        with entered(root, state) as ckpt:
            for number in range(SAVES):
                state.advance()
                ckpt.step()
                collect_garbage()
                moments.clear()
                moments["began"] = time.perf_counter()
                ckpt.save(reason="profile", wait=True)
                moments["returned"] = time.perf_counter()
                for name, start, end in PHASES if number else ():
                    found[name].append(1000 * (moments[end] - moments[start]))
    finally:
        fsio.observe(before)
    return {name: statistics.median(values) for name, values in found.items()}


def profile_of(run: cProfile.Profile) -> str:
    """The functions with the most time of their own."""
    text = io.StringIO()
    pstats.Stats(run, stream=text).strip_dirs().sort_stats("tottime").print_stats(ROWS)
    lines = text.getvalue().splitlines()
    start = next(i for i, line in enumerate(lines) if "tottime" in line)
    return "\n".join(line.rstrip() for line in lines[start : start + ROWS + 1])


def blocking(root: Path, state: State) -> str:
    """step() with a snapshot, several times."""
    tracked = {"model": state.model, "optimizer": state.optimizer}
    run = cProfile.Profile()
    ckpt = Checkpointer(root, policy="every 1 steps", keep=2, **tracked)
    with suppress(Enough), ckpt:
        for number in range(SAVES):
            state.advance()
            collect_garbage()
            if number:
                run.enable()
            ckpt.step()
            run.disable()
            time.sleep(1.0)
        raise Enough
    return profile_of(run)


def restoring(root: Path, state: State) -> str:
    """Entering the block, from a cold cache."""
    disk.drop_cache(root / "checkpoints")
    run = cProfile.Profile()
    run.enable()
    with entered(root, state):
        run.disable()
    return profile_of(run)


def raw_write(place: Path, state: State) -> float:
    """Median seconds of the same bytes, written directly and synced, nothing else."""
    memory = Target(views(state.flat())).memory
    place.mkdir()
    taken = [seconds(lambda n=n: write(place / str(n), memory, 2)) for n in range(SAVES)]
    shutil.rmtree(place)
    return statistics.median(taken[1:])


def report(gib: float, shape: Shape, scratch: Path) -> str:
    state = build(gib, shape)
    root = scratch / f"{gib:g}-{shape.value}"
    timed = phases(root, state)
    raw_ms = 1000 * raw_write(scratch / "raw", state)
    whole = sum(timed.values())
    lines = [
        f"## {gib:g} GiB {shape.value}",
        "",
        "A save that is waited for, by its kill points:",
        "",
    ]
    lines += ["| phase | ms | share |", "| --- | --- | --- |"]
    lines += [f"| {name} | {ms:.1f} | {100 * ms / whole:.0f} % |" for name, ms in timed.items()]
    lines += [f"| (raw direct write and fsync of the same bytes) | {raw_ms:.1f} | |", ""]
    lines += [
        "A `step()` with a snapshot, under cProfile:",
        "",
        "```",
        blocking(root, state),
        "```",
    ]
    lines += ["", "A restore, under cProfile:", "", "```", restoring(root, state), "```", ""]
    shutil.rmtree(root, ignore_errors=True)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, nargs="+", default=[0.1, 1.0])
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory(dir=options.scratch) as place:
        parts = [report(gib, shape, Path(place)) for gib in options.gib for shape in Shape]
    text = "# Where the time goes\n\n" + "\n".join(parts)
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
