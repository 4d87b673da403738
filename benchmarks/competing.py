"""Blocking time beside other processes: two busy loops share the cores with the copy.

Three ways to copy the same pieces take turns: hpc_ckpt's snapshot, a memcpy loop, and
torch's own multi-threaded copy.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .clock import rest, seconds
from .limits import Target
from .ours import Background, Run
from .states import Shape, State, build, views

BUSY = 2


def measure(job: dict[str, Any]) -> dict[str, Any]:
    state = build(job["gib"], Shape.MANY)
    target = Target(views(state.flat()))
    threaded = _threaded(state, target)
    tracked = {"model": state.model, "optimizer": state.optimizer}
    run = Run(Path(job["directory"]), Background.policy, tracked)
    with run.entered():
        rest(job["gib"])
        alone = _turns(run, state, target, threaded, 3)
        with _busy_loops():
            beside = _turns(run, state, target, threaded, job["snapshots"])
    return {"alone": alone, "beside": beside, "state_bytes": state.size}


def _turns(
    run: Run, state: State, target: Target, threaded: Callable[[], None], times: int
) -> dict[str, list[float]]:
    result: dict[str, list[float]] = {"hpc_ckpt": [], "memcpy": [], "foreach": []}
    for _ in range(times):
        result["hpc_ckpt"].append(run.background(state)["block_s"])
        state.advance()
        result["memcpy"].append(seconds(target.copy_large) + seconds(target.copy_small))
        state.advance()
        result["foreach"].append(seconds(threaded))
    return result


def _threaded(state: State, target: Target) -> Callable[[], None]:
    sources = [torch.from_numpy(piece) for _, piece in (*target.large, *target.small)]
    places = [torch.from_numpy(place) for place, _ in (*target.large, *target.small)]
    return lambda: torch._foreach_copy_(places, sources)


@contextmanager
def _busy_loops() -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
