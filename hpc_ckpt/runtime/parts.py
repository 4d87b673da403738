"""What a step boundary works with, and where the program stands: records, and nothing that acts."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ..engine.engine import Engine
from ..triggers import Triggers
from .ending import Ending
from .lookout import Lookout
from .meter import Meter, Metrics
from .room import Room
from .session import Session


@dataclass(frozen=True)
class Place:
    """Where the program stands."""

    step: int
    epoch: int


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a boundary works with."""

    session: Session
    engine: Engine
    lookout: Lookout
    triggers: Triggers
    meter: Meter
    metrics: Metrics
    ending: Ending
    room: Room
    capture: Callable[[Place], object]
    """The state to save, by reference."""
    frozen: Callable[[], Collection[int]]
    """Addresses of memory that no optimizer changes."""
    strict: bool
