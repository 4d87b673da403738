"""Waiting for a save that somebody wants to see done: as long as nothing better can be done.

Looks at clock and engine; what follows from giving up is decided by whoever waits.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..engine.engine import Engine
from ..engine.persist import Pending
from ..errors import StorageHangs
from ..settings import SAVE_FACTOR
from ..tiers.base import Committed
from ..triggers import Surroundings, Triggers
from .lookout import LOOK_EVERY_S

TOLD_S = 5.0
SHORTEST_WAIT_S = 5.0
"""At a time limit Slurm first asks, and kills after the kill wait: so long it may take until the
link runner has heard of that and has moved the deadline."""


class GivenUp(NamedTuple):
    """Why a save is not waited for any longer: it hangs, or the link ends."""

    why: str
    hangs: bool


def result_of(pending: Pending) -> GivenUp | None:
    """Of a save that is over: raises what went wrong. One that could not even begin because others
    hang is no worse than those were."""
    try:
        pending.wait()
    except StorageHangs as error:
        return GivenUp(str(error), hangs=True)
    return None


def committed_in_time(
    final: Pending, around: Callable[[], Surroundings], longest_s: float
) -> Committed:
    """What became of a final save; TimeoutError once no time is left for it.

    The deadline is looked at again and again, since it may move at its end; `longest_s` is for
    the time in which none is known.
    """
    began_s = time.monotonic()
    while not final.over(min(LOOK_EVERY_S, SHORTEST_WAIT_S)):
        waited_s, now = time.monotonic() - began_s, around()
        known = now.deadline_s is not None
        past = now.deadline_s is None or now.now_s >= now.deadline_s + SHORTEST_WAIT_S
        if past and waited_s >= (SHORTEST_WAIT_S if known else longest_s):
            raise TimeoutError(f"the save is not committed after {waited_s:.1f} s")
    return final.committed()


def spare_s(triggers: Triggers, around: Surroundings) -> float:
    """What is left beside the time of one more save."""
    last_word = triggers.last_word_at(around)
    return math.inf if last_word is None else last_word - around.now_s - _needed_s(around)


def look_s(triggers: Triggers, around: Surroundings) -> float:
    """So long a last save may be read back: what takes longer would cost another its time, and
    somebody who has told us to stop may kill us."""
    return min(_needed_s(around) + TOLD_S, spare_s(triggers, around))


def _needed_s(around: Surroundings) -> float:
    return SAVE_FACTOR * (around.save_s or 0.0)


@dataclass(frozen=True)
class Waiting:
    """Made right before the save begins: what it is given time for is known by then."""

    engine: Engine
    triggers: Triggers
    around: Callable[[], Surroundings]
    before: Surroundings

    def until_over(
        self, pending: Pending, *, patient: bool, instead: bool = True
    ) -> GivenUp | None:
        """None once it is committed or has failed.

        If `patient`, only another place to save is a reason to give up on one that hangs, and that
        only if a save there `instead` is of use.
        """
        told_s: float | None = None
        while not pending.over(LOOK_EVERY_S):
            elsewhere = instead and self.engine.destination.elsewhere
            if elsewhere or not patient:
                hangs = self.engine.take_stuck()
                if hangs is not None:
                    return GivenUp(hangs, hangs=True)
            else:
                self.engine.tell_stuck()
            now = self.around()
            if told_s is None and now.notice is not None:
                told_s = now.now_s
            moment = self._moment(now, told_s, elsewhere=elsewhere)
            if moment is not None and now.now_s >= moment:
                why = self.triggers.reason_to_stop(now) or "the deadline is near"
                return GivenUp(why, hangs=False)
        return None

    def _moment(self, now: Surroundings, told_s: float | None, *, elsewhere: bool) -> float | None:
        """From when on another save, where there is a place for it, would not be done in time; one
        that had little time from the beginning has it all. Told to stop by an unknown time, it has
        as long as saves take."""
        last_word, save_s = self.triggers.last_word_at(now), self.before.save_s or 0.0
        if not elsewhere:
            return None if now.deadline_s is None else now.deadline_s + SHORTEST_WAIT_S
        if last_word is None:
            return None if told_s is None else told_s + SAVE_FACTOR * save_s + TOLD_S
        for_another = last_word - SAVE_FACTOR * save_s
        for_this = self.before.now_s + SAVE_FACTOR * save_s + LOOK_EVERY_S
        return min(max(for_another, for_this), last_word)
