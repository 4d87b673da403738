"""Restores of one checkpoint out of the run directory, and out of a second tier.

A tier may hang while it is read: what is read there passes through memory of the reader's own, so
that bytes which come too late cannot reach the program. Both take turns, from a cold cache.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from . import disk
from .clock import collect_garbage, rest
from .ours import NEVER, PATIENCE_S, START_S, NotSaved, Run
from .states import GIB, Shape, State, build, digest, erase

ROOT, TIER = "root", "tier"


def measure(job: dict[str, Any]) -> dict[str, Any]:
    directory = Path(job["directory"])
    root, fast = directory / "run", directory / "fast"
    state = build(job["gib"], Shape(job["cut"]))
    kept = _saved(state, root, fast)
    found: dict[str, list[float]] = {ROOT: [], TIER: []}
    for _ in range(job["saves"] + 1):
        for name, tiers in ((ROOT, []), (TIER, [fast])):
            disk.drop_cache(directory)
            found[name].append(_restored(state, root, tiers, kept))
    return found


def _saved(state: State, root: Path, fast: Path) -> str:
    """In both places; the digest of what was saved."""
    run = Run(root, NEVER, _tracked(state), tiers=[fast])
    with run.entered():
        rest(state.size / GIB)
        state.advance()
        run.ckpt.step()
        pending = run.ckpt.save(reason="benchmark")
        while pending.step is None:  # while its buffer is being made it waits for another step
            time.sleep(0.05)
            state.advance()
            run.ckpt.step()
        if run.events.wait("drained", PATIENCE_S, tier="root") is None:
            raise NotSaved("the checkpoint has not arrived in the root")
        return digest(state.flat())


def _restored(state: State, root: Path, tiers: list[Path], kept: str) -> float:
    erase(state.flat())
    collect_garbage()
    run = Run(root, NEVER, _tracked(state), tiers=tiers)
    run.events.look()
    since = len(run.events.seen)
    with run.entered():
        restored = run.events.wait("restored", START_S, since)
    wanted = str(tiers[0]) if tiers else "root"
    if restored is None or restored["tier"] != wanted or digest(state.flat()) != kept:
        raise NotSaved(f"the restored state is not the one that was saved in {wanted}")
    return float(restored["seconds"])


def _tracked(state: State) -> dict[str, Any]:
    return {"model": state.model, "optimizer": state.optimizer}
