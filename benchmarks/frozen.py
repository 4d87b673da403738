"""A model of which nine tenths never change: what a save still writes, and how long it takes.

The full saves of the same process, in which the frozen part is changed as well, are the measure.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .clock import rest
from .ours import Run, Urgent
from .states import Shape, State, build

FROZEN = 0.9


class Thawed:
    """The same state, changed as a whole."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._frozen = [p.data for p in state.model.parameters() if not p.requires_grad]

    def advance(self) -> None:
        torch._foreach_add_(self._frozen, 1e-3)
        self._state.advance()


def measure(job: dict[str, Any]) -> dict[str, Any]:
    state = build(job["gib"], Shape.LARGE, frozen=FROZEN)
    thawed = Thawed(state)
    tracked = {"model": state.model, "optimizer": state.optimizer}
    run = Run(Path(job["directory"]), Urgent.policy, tracked)
    with run.entered():
        rest(job["gib"])
        first = _save(run, thawed)
        full = [_save(run, thawed) for _ in range(job["saves"])]
        after = [_save(run, state) for _ in range(job["saves"] + 2)]
    return {"first": first, "full": full, "frozen": after[2:], "state_bytes": state.size}


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
