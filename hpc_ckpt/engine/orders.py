"""What the engine is told and what it has under way: records, and nothing that acts."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from dataclasses import dataclass, field

from ..events import EventLog
from ..lease import Lease
from ..settings import Keep
from ..tiers.base import Tier
from ..tiers.stack import Stack
from ..tiers.writing import Pace
from .persist import Pending
from .snapshot import Snapshot


@dataclass(frozen=True, kw_only=True)
class About:
    """What a save says about itself in the manifest and the events."""

    step: int
    epoch: int
    reason: str
    metrics: dict[str, float] = field(default_factory=dict)
    training_s: float = 0.0
    """Seconds of training in this process that the checkpoint protects."""


@dataclass(frozen=True, kw_only=True)
class Publisher:
    """As whom, where, and under which rules this process publishes."""

    chain: str
    lease: Lease
    stack: Stack
    keep: Keep
    events: EventLog
    memory: int | None = None
    """The most bytes that buffers may have."""


@dataclass(kw_only=True, eq=False)
class Order:
    """One save under way."""

    snapshot: Snapshot
    about: About
    pending: Pending
    tier: Tier
    pace: Pace
    began_s: float
    stall_s: float
    urgent: bool
    queued_s: float = 0.0
    waited_s: float = 0.0
    """Since then, and before it was given another thread: for others to end."""
    given_up: bool = False
    """It hangs: nobody waits for it any more."""
    told: bool = False
    """That it hangs was said while somebody waited for it all the same."""
    fixed: bool = False
    """Into its tier or nowhere."""
    moved: bool = False
    """It waited behind something that hangs, and was given another thread."""
