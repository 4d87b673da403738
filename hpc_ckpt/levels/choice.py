"""What was chosen to make a command resumable, and what was not."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LEVELS = ("auto", "model", "application", "system", "dmtcp", "criu", "plain")
"""What a spec may ask for."""


@dataclass(frozen=True)
class Choice:
    """What chain.json and the plan say of levels."""

    entries: tuple[dict[str, Any], ...]
    """For chain.json, best first; empty: the program saves for itself, or nobody does."""
    chosen: str
    why: str
    rejected: tuple[tuple[str, str], ...] = ()
    warning: str | None = None
    before: tuple[str, ...] = ()
    """Words before the command."""
    fenced: bool = False
    """Whether all that the program keeps goes through commits that look at the lease. Any
    other one writes files of its own: two links of it must never run at once."""

    def told(self) -> dict[str, Any]:
        """For chain.json, and so for the ledger."""
        return {"level": self.chosen, "rejected": dict(self.rejected)}


MODEL = Choice(
    (),
    "model",
    "the command is expected to use hpc_ckpt.Checkpointer, or to exit 75 when saved",
    fenced=True,
)
