"""What the link runner asks of a scheduler; Slurm and the local runner both answer it."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from ..lease import Holder


class Cause(str, Enum):
    """Why a link ended, in the words of the ledger."""

    COMPLETE = "complete"
    TIME_LIMIT = "time limit"
    PREEMPTED = "preempted"
    REQUEUED = "requeued"
    NODE_FAILURE = "node failure"
    OUT_OF_MEMORY = "out of memory"
    CANCELLED = "cancelled"
    HALTED = "halted"
    STOPPED = "stopped by signal"
    SAVED = "saved and left"
    CRASHED = "crashed"
    KILLED = "killed"
    LOST = "lost"
    """It left no record of its end, and nobody else had one."""
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
class Queued:
    """When a job was put into the queue, could have begun, and got its nodes; unix seconds."""

    submitted: float | None = None
    eligible: float | None = None
    """An index that %1 held back is so only when it begins: no measure of a wait."""
    allocated: float | None = None

    def known(self) -> dict[str, Any]:
        """For the ledger."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class JobRecord:
    """What the scheduler says of this link's job at one moment."""

    end: float | None = None
    """Unix seconds at which the allocation ends; None: unknown or unlimited."""
    cause: Cause | None = None
    """Why the scheduler is ending it, or has ended it."""
    said: str = ""
    """Its own words, for the ledger."""
    ending: bool = False
    """The fatal signal follows within the kill wait."""
    certain: bool = False
    """Nothing that was said before outranks this: a preempted job can still be cancelled."""
    restarted: bool = False
    """It is on its way back into the queue."""
    runs_on: bool = False
    """It runs, and nobody is ending it."""
    queued: Queued = Queued()
    """Of its present run."""
    unanswered: bool = False
    """Nobody answered: it may be asked again. False as well where it knows nothing of the job."""


class Backend(Protocol):
    """One scheduler, seen from inside one of its allocations."""

    name: str
    kill_wait_s: float
    """Seconds between the polite signal and the fatal one."""
    enforces_end: bool
    """False: nobody else ends the link, so the runner itself must."""

    @property
    def node(self) -> str | None:
        """The scheduler's name of this host, where it has one."""

    def holder(self) -> Holder:
        """The record for the lease file."""

    def probe(self, holder: Holder) -> bool | None:
        """Whether another link's holder still lives. At most one question to the scheduler."""

    @property
    def nodes(self) -> str | None:
        """Those of this link, in the scheduler's own short form."""

    def surely_gone(self, holder: Holder, nodes: str | None) -> bool:
        """Whether its job is over and whoever could see its processes there says that none is
        left. At most two questions to the scheduler; no answer is no."""

    def ended_whole(self, code: int) -> bool:
        """Of this link, whose step has returned `code`: whether nothing of it can be left. At most
        one question to the scheduler; no answer is no."""

    def like(self, node: str) -> list[str]:
        """Nodes that answer and could run the same links. At most one question."""

    def look(self) -> JobRecord:
        """Ask the scheduler about this link's own job. Never raises: no answer is no fact."""

    def cancelled_members(self, before: str | None = None) -> list[tuple[str, int]] | None:
        """This array's members that began and were cancelled: id and number of restarts.
        Where links are jobs of their own, the same of the one `before`. None: nobody answered."""

    def explain(self, holder: Holder) -> JobRecord:
        """Ask how another link's job ended, while it is remembered. Never raises."""

    def step(self, argv: Sequence[str], log: Path) -> list[str]:
        """The command that runs `argv` as this link's one step, writing to `log`."""


class Succession(Protocol):
    """How one link is followed by the next. Nothing here raises: the next occasion tries again."""

    def prepare(self) -> bool:
        """See that something will follow this link; False: nothing does, ask again later."""

    def go_on(self) -> None:
        """This link is over, or will be killed within the kill wait: bring about the next."""

    def end(self) -> list[str]:
        """The chain is over: cancel what is pending of it; the ids that were cancelled."""

    def avoid(self, hosts: Sequence[str]) -> bool:
        """Let no further link run there; whether that could be asked for."""

    def mail(self, address: str) -> None:
        """Let the scheduler send one mail when this link's job is over."""
