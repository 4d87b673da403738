"""A model of which nine tenths never change: what a save still writes, and how long it takes.

Saves of a state of the same size that is trained as a whole, in the same process, are the measure.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from pathlib import Path
from typing import Any

from .clock import rest
from .ours import Run, Urgent
from .states import GIB, Shape, State, build

FROZEN = 0.9


def measure(job: dict[str, Any]) -> dict[str, Any]:
    directory, saves = Path(job["directory"]), job["saves"]
    full = _saves(build(job["gib"], Shape.LARGE), directory / "full", saves)
    frozen = _saves(build(job["gib"], Shape.LARGE, frozen=FROZEN), directory / "frozen", saves)
    return {"full": full, "frozen": frozen}


def _saves(state: State, directory: Path, times: int) -> list[dict[str, Any]]:
    """Without the first two: what does not change has to be written once, and to be noticed."""
    tracked = {"model": state.model, "optimizer": state.optimizer}
    run = Run(directory, Urgent.policy, tracked)
    with run.entered():
        rest(state.size / GIB)
        return [_save(run, state) for _ in range(times + 2)][2:]


def _save(run: Run, state: Any) -> dict[str, Any]:
    before = _written()
    result = run.urgent(state)
    return {**result, "written_bytes": _written() - before}


def _written() -> int:
    """Bytes this process has sent to storage, whatever the files say."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("write_bytes:"):
            return int(line.split()[1])
    return 0
