"""One peer, one size, one shape, one round: some saves, then loads, in one process."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from . import disk, memory
from .clock import collect_garbage, rest, seconds
from .peers import BY_NAME, Peer
from .states import Shape, State, build, digest, erase


class WrongContent(RuntimeError):
    """What was loaded is not what was saved."""


def measure(job: dict[str, Any]) -> dict[str, Any]:
    state = build(job["gib"], Shape(job["shape"]))
    peer = BY_NAME[job["name"]]()
    before = memory.resident()
    memory.forget_peak()
    peer.prepare(state, Path(job["directory"]))
    rest(job["gib"])
    try:
        result = _save(peer, state, job["saves"] + 1)
        result["extra_bytes"] = memory.peak() - before + result.pop("children_bytes")
        return {**result, **_load(peer, state, job["saves"])}
    finally:
        peer.close()


def _save(peer: Peer, state: State, times: int) -> dict[str, Any]:
    result: dict[str, Any] = {"block_s": [], "done_s": [], "durable_s": []}
    children = 0
    for step in range(times):
        state.advance()
        collect_garbage()
        for key, value in timed_save(peer, step).items():
            result[key].append(value)
        children = max(children, memory.children())
        if step + 1 < times:
            disk.remove(peer.path(step))
    last = peer.path(times - 1)
    return {
        **result,
        "state_bytes": state.size,
        "tensors": len(state.flat()),
        "files": len(disk.files(last)),
        "disk_bytes": disk.size(last),
        "children_bytes": children,
    }


def timed_save(peer: Peer, step: int) -> dict[str, float]:
    """Until it returns, until it says it is done, until everything is synced."""
    began = time.perf_counter()
    handle = peer.save(step)
    blocked = time.perf_counter()
    handle.wait()
    done = time.perf_counter()
    disk.sync(peer.path(step))
    durable = time.perf_counter()
    return {"block_s": blocked - began, "done_s": done - began, "durable_s": durable - began}


def _load(peer: Peer, state: State, step: int) -> dict[str, Any]:
    """Once untimed, which warms code and cache; then cached; then cold."""
    expected = digest(state.flat())
    _timed_load(peer, state, step, expected)
    cached = _timed_load(peer, state, step, expected)
    disk.drop_cache(peer.path(step))
    cold = _timed_load(peer, state, step, expected)
    return {"load_cached_s": [cached], "load_cold_s": [cold]}


def _timed_load(peer: Peer, state: State, step: int, expected: str) -> float:
    erase(state.flat())
    collect_garbage()
    took = seconds(lambda: peer.load(step))
    if digest(state.flat()) != expected:
        raise WrongContent("what was loaded is not what was saved")
    return took
