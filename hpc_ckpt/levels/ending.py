"""How a link of a program that cannot be changed ended: whether the work is complete, and the
word of it that the link runner reads."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..errors import EXIT_COMPLETE, EXIT_FAILED, EXIT_SAVED
from ..events import Event, EventLog
from ..lease import Lease
from ..rundir import Done, Outcome, Result, RunDir, write_outcome
from .base import Level, Work
from .moments import Moments
from .saving import Saves

log = logging.getLogger("hpc_ckpt.steward")

PATIENCE_S = 30.0
"""For storage that does not answer when the word of a link's end is due."""
LOOK_EVERY_S = 1.0


class Ending:
    """Of one link."""

    def __init__(
        self,
        place: RunDir,
        lease: Lease,
        work: Work,
        events: EventLog,
        saves: Saves,
        moments: Moments,
    ) -> None:
        self._place = place
        self._lease = lease
        self._work = work
        self._events = events
        self._saves = saves
        self._moments = moments

    def if_complete(self, level: Level, code: int) -> int | None:
        """The exit code of a link whose work is complete; None: it is not."""
        if code != EXIT_COMPLETE:
            return None  # whatever its files look like: they may be of an earlier run
        shown = level.is_complete(self._work, code)
        by_code = shown is None
        if shown is False or (by_code and self._moments.why_told() is not None):
            return None  # asked to end, many programs save and leave with code 0
        _patiently(self._lease.check)
        if by_code:  # what the link runner has seen may say otherwise, so that DONE is its affair
            return self.leave(Result.COMPLETE, None, "exit code 0", by_code=True)
        left = self.leave(Result.COMPLETE, None, "complete")
        done = Done(self._lease.generation, None)
        _patiently(lambda: self._place.write_done(done))
        return left

    def leave(self, result: Result, step: int | None, reason: str, *, by_code: bool = False) -> int:
        """The exit code of the link."""
        generation = self._lease.generation
        self._events.emit(
            Event.ENDED,
            step=self._saves.step(),
            training_s=self._saves.working_s(),
            stall_s=round(self._saves.stall_s, 3),
            complete=result is Result.COMPLETE,
            reason=reason,
        )
        outcome = Outcome(result, generation, step, reason, by_code)
        _patiently(lambda: write_outcome(self._place.outcome_file(generation), outcome))
        log.info("%s: %s", result.value, reason)
        codes = {Result.COMPLETE: EXIT_COMPLETE, Result.SAVED: EXIT_SAVED}
        return codes.get(result, EXIT_FAILED)


def _patiently(act: Callable[[], None]) -> None:
    """Work that is complete would be done again for a moment of silence."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return act()
        except OSError as error:
            if time.monotonic() >= until:
                raise
            log.warning("%s; tried again", error)
            time.sleep(LOOK_EVERY_S)
