"""Saves that came to nothing: what is said of each, and what the next step() has to tell."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from ..errors import DamagedCheckpoint, Fenced, one_line
from ..events import Event, EventLog
from .orders import Order
from .persist import Pending
from .times import SaveTimes

log = logging.getLogger("hpc_ckpt")


AGAIN_S = 60.0


class Failures:
    """Told by whichever thread finds out; asked by the training thread."""

    def __init__(
        self, events: EventLog, times: SaveTimes, on_fenced: Callable[[Fenced], None]
    ) -> None:
        self._events = events
        self._times = times
        self._on_fenced = on_fenced
        self._untold: tuple[Pending, Exception] | None = None
        self._damages: Counter[Path] = Counter()
        """Since one was read back whole, by the directory of checkpoints."""
        self.at_s: float | None = None
        """Unix seconds of the last one, if no save has begun since."""

    def take(self) -> Exception | None:
        """The error of a background save that nobody has been told of yet."""
        untold, self._untold = self._untold, None
        if untold is None or untold[0].seen:
            return None
        return untold[1]

    def add(
        self, pending: Pending, error: Exception, *, save_s: float | None, flush: bool = True
    ) -> None:
        if isinstance(error, Fenced):
            self._on_fenced(error)
        else:
            # How long it took to fail says how long the next attempt may take; a hang does not.
            if save_s is not None:
                self._times.add(stall_s=0.0, save_s=save_s)
            self._events.emit(
                Event.SAVE_FAILED, flush=flush, step=pending.step, error=one_line(error)
            )
            self._untold = (pending, error)
            self.at_s = time.time()
        log.warning("save of step %s failed: %s", pending.step, one_line(error))
        _forget_locals(error)
        pending.fail(error)

    def damaged(self, path: Path) -> None:
        """What was saved is so no more: told, and tried again, like a save that failed."""
        error = DamagedCheckpoint(f"{path}: damaged since it was saved")
        # Storage that spoils all that it is given is not filled by one save a minute.
        at_s = time.time() + AGAIN_S * (2 ** min(self._damages[path.parent], 20) - 1)
        self._damages[path.parent] += 1
        # A save that failed is tried again no later for that, and told of.
        known_s, untold = self.at_s, self._untold
        self.at_s = at_s if known_s is None else min(known_s, at_s)
        if untold is None or untold[0].seen:
            self._untold = (Pending(str(error)), error)
        log.warning("%s; it does not count as saved any more", error)

    def sound(self, path: Path) -> None:
        """One was read back and is whole: not everything is spoilt there."""
        self._damages[path.parent] = 0

    def drop(self, order: Order, error: Exception) -> None:
        """It has not begun and will not: skipped for a newer one, or failed."""
        order.snapshot.release()
        if isinstance(error, TimeoutError):
            self.skip(order, error)
        else:
            self.add(order.pending, error, save_s=None, flush=False)

    def skip(self, order: Order, error: Exception) -> None:
        """Nothing is lost with it: another save has taken its place, or does."""
        step = order.about.step
        self._events.emit(Event.SAVE_SKIPPED, flush=False, step=step, reason=str(error))
        order.pending.fail(error)


def _forget_locals(error: BaseException) -> None:
    """Whoever keeps the error would keep the buffer of its save, which is as large as the state.

    `raise error from error` makes a ring of one.
    """
    seen: set[int] = set()
    chained: BaseException | None = error
    while chained is not None and id(chained) not in seen:
        seen.add(id(chained))
        traceback.clear_frames(chained.__traceback__)
        chained = chained.__cause__ or chained.__context__
