"""How a link began and how it ended, as its ledger has it: the same whoever runs the link.

Standard library only: the link runner writes them.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
from typing import Any

from ..events import Event, EventLog
from ..rundir import RunDir, read_json
from .backend import Backend, Queued
from .orders import Orders
from .verdict import Verdict


def write_start(
    ledger: EventLog,
    backend: Backend,
    generation: int,
    step: int,
    *,
    deadline: float | None,
    queued: Queued,
    **more: Any,
) -> None:
    ledger.emit(
        Event.LINK_STARTED,
        generation=generation,
        step=step,
        deadline=deadline,
        node=backend.node,
        nodes=backend.nodes,
        cluster=os.environ.get("SLURM_CLUSTER_NAME"),
        **queued.known(),
        **vars(backend.holder()),
        **more,
    )


def write_end(
    ledger: EventLog,
    verdict: Verdict,
    code: int | None,
    step_from: int,
    step_to: int,
    **more: Any,
) -> None:
    ledger.emit(
        Event.LINK_ENDED,
        outcome=verdict.result,
        cause=verdict.cause,
        reason=verdict.reason,
        code=code,
        step=step_to,
        progress=verdict.progress(step_from, step_to),
        evidence=list(verdict.evidence),
        **more,
    )


def level_of(rundir: RunDir, orders: Orders, generation: int) -> dict[str, Any]:
    """Which level saved for the program, and which did not fit."""
    levels, asked = orders.levels, orders.choice
    if not levels and asked.get("level") in (None, "model"):
        return {}
    known = read_json(rundir.levels_file) or {}
    chosen = (known.get("chosen") or {}).get(str(generation))
    found = (asked.get("rejected"), known.get("rejected"), known.get("failed"))
    rejected = {name: why for some in found for name, why in (some or {}).items()}
    return {"level": chosen if levels else asked["level"], "rejected": rejected}
