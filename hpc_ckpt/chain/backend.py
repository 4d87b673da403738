"""What the link runner asks of a scheduler; Slurm and the local runner both answer it."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from ..lease import Holder


class Cause(str, Enum):
    """Why a link ended, in the words of the ledger."""

    COMPLETE = "complete"
    TIME_LIMIT = "time limit"
    PREEMPTED = "preempted"
    REQUEUED = "requeued"
    CANCELLED = "cancelled"
    HALTED = "halted"
    STOPPED = "stopped by signal"
    SAVED = "saved and left"
    CRASHED = "crashed"
    KILLED = "killed"
    FENCED = "fenced"
    NOT_STARTED = "could not start"

    @classmethod
    def said(cls, reason: str) -> Cause | None:
        """What the first word of the runtime's reason means."""
        words = {
            "deadline": cls.TIME_LIMIT,
            "halt": cls.HALTED,
            "notice": cls.STOPPED,
            "fenced": cls.FENCED,
        }
        return words.get(reason.partition(":")[0])


@dataclass(frozen=True)
class JobRecord:
    """What the scheduler says of this link's job at one moment."""

    end: float | None = None
    """Unix seconds at which the allocation ends; None: unknown or unlimited."""
    cause: Cause | None = None
    """Why the scheduler is ending it, once it is."""


class Backend(Protocol):
    """One scheduler, seen from inside one of its allocations."""

    name: str
    kill_wait_s: float
    """Seconds between the polite signal and the fatal one."""
    enforces_end: bool
    """False: nobody else ends the link, so the runner itself must."""

    def holder(self) -> Holder:
        """The record for the lease file."""

    def probe(self, holder: Holder) -> bool | None:
        """Whether another link's holder still lives. At most one question to the scheduler."""

    def look(self) -> JobRecord:
        """Ask the scheduler about this link's own job. Never raises: no answer is no fact."""

    def step(self, argv: Sequence[str], log: Path) -> list[str]:
        """The command that runs `argv` as this link's one step, writing to `log`."""

    def cancel_rest(self) -> str | None:
        """Cancel the pending rest of this link's own array; the id cancelled, or None."""
