"""What is said of drains: an event and a line in the log each. What follows is draining.py's."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging

from ..errors import one_line
from ..events import Event, EventLog
from .backlog import LAG, Order
from .base import Tier
from .turn import Turn

log = logging.getLogger("hpc_ckpt")


class Telling:
    """Flushed only where nobody commits or waits: a file system may hang."""

    def __init__(self, events: EventLog) -> None:
        self._events = events

    def drained(
        self, order: Order, target: Tier, copied: int, seconds: float, *, lasts: bool
    ) -> None:
        self._events.emit(
            Event.DRAINED,
            checkpoint=order.key.directory_name,
            tier=target.name,
            lasts=lasts,
            bytes=copied,
            seconds=round(seconds, 6),
        )
        log.info("drained %s to %s", order.key.directory_name, target.name)

    def hung(self, turn: Turn, order: Order | None) -> None:
        (source, target), said = turn.way, "TimeoutError: it hangs"
        if turn.arrived:
            self._events.emit(Event.RETENTION_FAILED, flush=False, tier=target, error=said)
        else:  # without a checkpoint: it looked for what the tier lacks
            fields = {"checkpoint": order and order.key.directory_name, "tier": target}
            self._events.emit(Event.DRAIN_FAILED, flush=False, **fields, error=said)
        log.warning("the drain from %s to %s hangs", source, target)

    def failed(self, order: Order, target: Tier, error: Exception, *, flush: bool = True) -> None:
        name = order.key.directory_name
        said = one_line(error)
        self._events.emit(
            Event.DRAIN_FAILED, flush=flush, checkpoint=name, tier=target.name, error=said
        )
        log.warning("could not drain %s to %s: %s", name, target.name, said)

    def dropped(self, orders: list[Order]) -> None:
        for order in orders:
            self.given_up(order, f"more than {LAG} were waiting, and newer ones go first")

    def given_up(self, order: Order, reason: str) -> None:
        name = order.key.directory_name
        self._events.emit(Event.DRAIN_DROPPED, flush=False, checkpoint=name, reason=reason)
        log.info("%s is not drained: %s", name, reason)
