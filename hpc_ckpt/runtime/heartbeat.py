"""How far training is, told now and then: `status` reads it."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import math
import time

from ..events import Event
from .meter import Meter, Metrics
from .session import Session


class Heartbeat:
    """Used by the training thread."""

    def __init__(self, session: Session, meter: Meter, metrics: Metrics) -> None:
        self._session = session
        self._meter = meter
        self._metrics = metrics
        self._last_s = time.monotonic()

    def beat(self, step: int, epoch: int) -> None:
        """Not more often than the session wants it."""
        now = time.monotonic()
        if now - self._last_s < self._session.heartbeat_s:
            return
        self._last_s = now
        self._metrics.read()
        loss = self._metrics.loss
        self._session.events.emit(
            Event.PROGRESS,
            flush=False,  # the lookout writes it: a hung file system must not stop training
            step=step,
            epoch=epoch,
            training_s=round(self._meter.training_s, 6),
            stall_s=round(self._meter.stall_s, 6),
            loss=loss if loss is not None and math.isfinite(loss) else None,
        )
