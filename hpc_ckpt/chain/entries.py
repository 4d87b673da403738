"""How a link began and how it ended, as its ledger has it: the same whoever runs the link.

Standard library only: the link runner writes them.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from typing import Any

from ..events import Event, EventLog
from .backend import Backend, Queued
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
