"""What this process has measured and been told: steps, training time, stall, metrics.

Seconds come in from outside; nothing here reads a clock or a file. A loss that is a tensor is
kept detached and read only when somebody needs the number: reading it waits for the device.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import SupportsFloat

from ..errors import UserError

RECENT_STEPS = 50


class Meter:
    """Splits time into training and stall, and remembers the recent past."""

    def __init__(self, now_s: float) -> None:
        self.training_s = 0.0
        """Seconds of this process between step boundaries that were not stall."""
        self.stall_s = 0.0
        self._since_s = now_s
        self._step_began_s = 0.0
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self.slowest_step_s = 0.0
        """Of the recent ones; a plain number, for the lookout thread reads it meanwhile."""
        self._undisturbed: deque[float] = deque(maxlen=RECENT_STEPS)
        self._stolen_s: float | None = None

    # ── time ──────────────────────────────────────────────────────────────────────────────
    def pause(self, now_s: float) -> None:
        """Training stops here and waits for us."""
        self.training_s += now_s - self._since_s
        self._since_s = now_s

    def resume(self, now_s: float) -> None:
        """Training goes on."""
        self.stall_s += now_s - self._since_s
        self._since_s = now_s

    def boundary(self, *, disturbed: bool = False) -> float | None:
        """A step that may be saved is over; call it while paused.

        Disturbed: a checkpoint was being written beside it. With the first step after such ones
        comes the time they took longer than usual: the saves stole it.
        """
        step_s = self.training_s - self._step_began_s
        self._steps.append(step_s)
        self._step_began_s = self.training_s
        self.slowest_step_s = max(self._steps)
        if disturbed:
            usual = statistics.median_low(self._undisturbed) if self._undisturbed else step_s
            self._stolen_s = (self._stolen_s or 0.0) + step_s - usual
            return None
        self._undisturbed.append(step_s)
        stolen, self._stolen_s = self._stolen_s, None
        return None if stolen is None else max(stolen, 0.0)

    @property
    def step_s(self) -> float | None:
        """A typical recent step."""
        return statistics.median_low(self._steps) if self._steps else None


class Metrics:
    """The newest value of each metric, and the step at which it was given."""

    def __init__(self) -> None:
        self._given: dict[str, tuple[int, object]] = {}
        self.loss: float | None = None
        """The loss as last read; older than the newest loss that was given."""

    def give(self, step: int, loss: object, metrics: Mapping[str, object] | None) -> None:
        """Raises UserError now for what could not be read as one number later."""
        if loss is not None:
            self._given["loss"] = (step, _kept("loss", loss))
        for name, value in (metrics or {}).items():
            self._given[str(name)] = (step, _kept(str(name), value))

    def read(self, after_step: int = -1) -> dict[str, float]:
        """The values given after a step; what belongs to older weights stays out."""
        values: dict[str, float] = {}
        for name, (step, value) in self._given.items():
            number = _as_float(name, value)
            self._given[name] = (step, number)
            if name == "loss":
                self.loss = number
            if step > after_step:
                values[name] = number
        return values


def _kept(name: str, value: object) -> object:
    """A tensor without its graph, which would hold every activation of the step; else a float."""
    if not callable(getattr(value, "item", None)):
        return _as_float(name, value)
    count = getattr(value, "numel", None)
    if callable(count) and count() != 1:
        raise UserError(f"metric {name!r} is not one number: it has {count()} items")
    detach = getattr(value, "detach", None)
    return detach() if callable(detach) else value


def _as_float(name: str, value: object) -> float:
    item = getattr(value, "item", None)
    try:
        number = item() if callable(item) else value
        if isinstance(number, SupportsFloat):
            return float(number)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"metric {name!r} is not one number: {error}") from error
    raise UserError(f"metric {name!r} is not a number but a {type(value).__name__}")
