"""A step boundary: asks the triggers and does what they answer.

Saves, skips, ends the link; heartbeats and background errors come out here as well. It does
not know loops, data or tracked objects: those are checkpointer.py's.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import time
import warnings

from ..engine.destination import Wish
from ..engine.orders import About
from ..engine.persist import Pending
from ..errors import Fenced, HpcCkptError, one_line
from ..events import Event
from ..policy.base import Progress
from ..rundir import CheckpointKey, Result
from ..triggers import Surroundings
from .heartbeat import Heartbeat
from .lookout import LOOK_EVERY_S
from .parts import Parts, Place
from .telling import tell_failures
from .waiting import (
    SHORTEST_WAIT_S,
    Waiting,
    committed_in_time,
    look_s,
    result_of,
    spare_s,
)

log = logging.getLogger("hpc_ckpt")

LONGEST_FINAL_SAVE_S = 600.0


class Boundary:
    """Used by the training thread; watch() by the lookout thread."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._requested: Pending | None = None
        self._skipping = False
        self._ending_now = False
        self._stays_away: CheckpointKey | None = None
        """It did not come home in time for poll()."""
        self._heartbeat = Heartbeat(parts.session, parts.meter, parts.metrics)
        self._metrics_after = -1
        """Metrics given up to this step belong to an earlier checkpoint."""

    # ── at a boundary ─────────────────────────────────────────────────────────────────────
    def reached(self, place: Place, *, may_save: bool) -> None:
        """Once per step(); raises LinkEnded when the link must end here."""
        engine = self._parts.engine
        tell_failures(self._parts)
        if engine.fenced is not None:
            self._end_fenced(engine.fenced)
            return
        if may_save:
            self._act(place)
        self.heartbeat(place)

    def _act(self, place: Place) -> None:
        parts = self._parts
        self._prepare(place)
        answer = parts.triggers.ask(self._progress(place), self.surroundings())
        if answer.stop:
            self.end(place, answer.reason)
            return
        if not (answer.save or self._requested):
            self._skipping = False
        elif parts.engine.ready:
            self._skipping = False
            self.save(place, self._requested.reason if self._requested else answer.reason)
        elif not self._skipping:
            # Once per busy period: the next boundary asks again.
            self._skipping = True
            reason = f"{parts.engine.why_not_ready} ({answer.reason})"
            parts.session.events.emit(
                Event.SAVE_SKIPPED, flush=False, step=place.step, reason=reason
            )
            parts.engine.make_room()

    def _prepare(self, place: Place) -> None:
        """At the first boundary the form of the state is known, and with it what a save needs."""
        parts = self._parts
        if parts.engine.prepared:
            return
        size = parts.engine.prepare(parts.capture(place), parts.frozen())
        parts.room.check_memory(size)
        parts.room.check_storage(size)
        parts.engine.warm(size)

    def _progress(self, place: Place) -> Progress:
        parts = self._parts
        return Progress(
            step=place.step,
            now_s=time.monotonic(),
            saved_step=parts.engine.snapshot_step,
            saved_s=parts.engine.snapshot_s,
            step_s=parts.meter.step_s,
            stall_s=parts.engine.stall_s,
            save_s=parts.engine.save_s(),
            loss=parts.metrics.loss,
        )

    def surroundings(self) -> Surroundings:
        lookout = self._parts.lookout
        return Surroundings(
            now_s=time.time(),
            notice=lookout.notice,
            hurry_since_s=lookout.hurry_since_s,
            deadline_s=lookout.deadline_s,
            halted=lookout.halted,
            slowest_step_s=self._parts.meter.slowest_step_s,
            save_s=self._parts.engine.save_s(),
            failed_s=self._parts.engine.failed_at_s,
        )

    def heartbeat(self, place: Place) -> None:
        self._heartbeat.beat(place.step, place.epoch)

    # ── saving ────────────────────────────────────────────────────────────────────────────
    def request(self, reason: str) -> Pending:
        """A save at the next boundary that can take it; one record for all who ask till then."""
        if self._requested is None:
            self._requested = Pending(reason)
        return self._requested

    def refuse(self, reason: str) -> Pending:
        """Nothing is saved after the end: the outcome already names the last checkpoint."""
        pending = Pending(reason)
        pending.fail(HpcCkptError(f"not saved: {self._parts.ending.error()}"))
        return pending

    def abandon(self) -> None:
        """No boundary comes any more: whoever waits for the save that was asked for hears of it."""
        requested, self._requested = self._requested, None
        if requested is not None:
            requested.fail(HpcCkptError("not saved: the program left before the step was over"))

    def save(self, place: Place, reason: str, wish: Wish | None = None) -> Pending:
        """Snapshot now; only while the engine is ready."""
        parts, requested = self._parts, self._requested
        self._prepare(place)
        self._requested = None
        if parts.engine.snapshot_step < place.step:
            self._metrics_after = parts.engine.snapshot_step
        about = About(
            step=place.step,
            epoch=place.epoch,
            reason=reason,
            metrics=parts.metrics.read(self._metrics_after),
            training_s=parts.meter.training_s,
        )
        try:
            return parts.engine.save(lambda: parts.capture(place), about, requested, wish)
        except BaseException as error:  # also Ctrl-C while the state is copied; raised again
            if requested is not None and not requested.done():
                told = error if isinstance(error, Exception) else HpcCkptError("not saved: stopped")
                requested.fail(told)
            raise

    def _seconds_left(self) -> float | None:
        around = self.surroundings()
        last_word = self._parts.triggers.last_word_at(around)
        return None if last_word is None else last_word - around.now_s

    def _time_left(self) -> float | None:
        """Not less than it may take until a deadline that has moved is known."""
        left = self._seconds_left()
        return None if left is None else max(left, SHORTEST_WAIT_S)

    def _patience_s(self) -> float:
        """For the final save. Without a known end somebody still wants to hear of it."""
        left = self._time_left()
        return LONGEST_FINAL_SAVE_S if left is None else left

    # ── ending ────────────────────────────────────────────────────────────────────────────
    def end(self, place: Place, reason: str) -> None:
        """The final save, the outcome, the latch; then LinkEnded."""
        parts = self._parts
        # Not flushed, here and below: an event log that hangs must not cost the final save.
        parts.session.events.emit(Event.STOPPING, flush=False, step=place.step, reason=reason)
        self._ending_now = True
        try:
            parts.engine.settle(self._time_left())
            if parts.engine.fenced is None:
                self._decide(self._save_last(place, reason), place, reason)
            else:
                parts.ending.latch(_fenced(parts.engine.fenced))
        finally:
            self._ending_now = False
        parts.ending.raise_here()

    def _save_last(self, place: Place, reason: str) -> Pending:
        return self.save(place, reason, Wish(urgent=True, within_s=self._seconds_left(), last=True))

    def _decide(self, final: Pending, place: Place, reason: str) -> None:
        """Whatever became of the final save, the link is over."""
        ending, engine = self._parts.ending, self._parts.engine
        try:
            saved = committed_in_time(final, self.surroundings, LONGEST_FINAL_SAVE_S)
            self._wait_for_look(reason)
            if not _reaches(engine.newest, saved.key) and self._spare_s() > 0:
                engine.settle(self._time_left())
                final = self._save_last(place, reason)
                saved = committed_in_time(final, self.surroundings, LONGEST_FINAL_SAVE_S)
                self._wait_for_look(reason)
        except Fenced as error:
            ending.latch(_fenced(error))
            return
        except Exception as error:  # noqa: BLE001 - any failure of storage is told, not raised
            self._lasting(reason)  # an earlier one may be only where it would go with the job
            self._decide_without_final_save(reason, f"the final save failed ({one_line(error)})")
        else:
            self._decide_by(saved.key, reason)
        ending.latch(reason)

    def _decide_by(self, saved: CheckpointKey, reason: str) -> None:
        """What would go with the job does not count before it is drained."""
        if _reaches(self._lasting(reason), saved):
            self._parts.ending.decide(Result.SAVED, saved.step, reason)
        else:
            there = _reaches(self._parts.engine.newest, saved)
            what = "is only in a tier that goes with the job" if there else "was damaged since"
            self._decide_without_final_save(reason, f"step {saved.step} {what}")

    def _wait_for_look(self, reason: str) -> None:
        """What follows a commit may read it back; damage that it finds is better known now.

        The link may be killed meanwhile: what the next one can find is said first. Raises Fenced.
        """
        engine, patience_s = self._parts.engine, look_s(self._parts.triggers, self.surroundings())
        if not engine.busy or patience_s <= 0:
            return
        if engine.lasting is not None:
            self._parts.ending.rescue(engine.lasting.step, reason)
        engine.wait(patience_s)
        if engine.fenced is not None:
            raise engine.fenced

    def _spare_s(self) -> float:
        return spare_s(self._parts.triggers, self.surroundings())

    def _lasting(self, reason: str) -> CheckpointKey | None:
        """The newest checkpoint that the next link can find, once the drain had its time.

        The link may be killed meanwhile: what it can find already is said first.
        """
        engine = self._parts.engine
        before, newest = engine.lasting, engine.newest
        if before is not None and newest is not None and before < newest:
            self._parts.ending.rescue(before.step, f"{reason}; step {newest.step} is being drained")
        engine.bring_home(self._patience_s())
        return engine.lasting

    def end_if_saved(self, place: Place, reason: str) -> bool:
        """End without a save where the newest checkpoint is of this very step, and the next link
        can find it; otherwise step() saves, while there is time for that."""
        parts = self._parts
        if parts.engine.snapshot_step == place.step:
            parts.engine.settle(self._seconds_left())
        newest = parts.engine.newest
        if newest is None or newest.step != place.step or parts.engine.fenced is not None:
            return False
        if self._stays_away == newest:  # a home that hangs is not waited for by each poll()
            return False
        if not _reaches(self._lasting(reason), newest) and self._spare_s() > 0:
            self._stays_away = newest
            return False
        self._end_with_lasting(reason)
        return True

    def end_with_newest(self, reason: str) -> None:
        """End where the state now is not that of a boundary: the newest checkpoint stands."""
        self._lasting(reason)
        self._end_with_lasting(reason)

    def _end_with_lasting(self, reason: str) -> None:
        parts, newest = self._parts, self._parts.engine.lasting
        step = None if newest is None else newest.step
        parts.session.events.emit(Event.STOPPING, flush=False, step=step, reason=reason)
        if newest is None:
            parts.ending.decide(Result.FAILED, None, f"{reason}; {self._nothing()}")
        else:
            parts.ending.decide(Result.SAVED, newest.step, reason)
        parts.ending.latch(reason)
        parts.ending.raise_here()

    def complete(self, place: Place, *, stepped: bool, again: bool = True) -> None:
        """The last checkpoint and DONE; raises what keeps them from being written.

        A run directory that takes no save does not cost the work of the link: it ends as saved
        where another tier keeps that for the next one, which then completes it. Without a step
        made (`stepped`) there is nothing to lose: then it is waited for. One that is found damaged
        is saved `again`: DONE would stand beside nothing that is whole.
        """
        self._parts.engine.settle(self._seconds_left())
        if self._parts.engine.fenced is not None:
            self._end_fenced(self._parts.engine.fenced)
            return
        waiting, destination = self._waiting(), self._parts.engine.destination
        # The buffer of a last save is not spent on a home that hangs where another place is left.
        last = not (destination.home_hangs and destination.elsewhere)
        final = self.save(place, "complete", Wish(urgent=True, home=True, last=last))
        given_up = waiting.until_over(final, patient=True, instead=stepped)
        why = "" if given_up is None else given_up.why
        try:
            saved = None if given_up is not None else final.committed()
            if saved is not None:
                self._wait_for_look("the work is done")
        except Fenced as error:
            self._end_fenced(error)
            return
        except OSError as error:
            if not destination.elsewhere:
                raise
            saved, why = None, one_line(error)
        if saved is None:
            self._end_incomplete(place, why)
        elif _reaches(self._parts.engine.lasting, saved.key):
            self._parts.ending.complete(saved.key.step)
        elif again and self._spare_s() > 0:
            self.complete(place, stepped=stepped, again=False)
        else:
            self._end_incomplete(place, "what was saved was damaged since")

    def _end_incomplete(self, place: Place, why: str) -> None:
        reason = f"the work is done, but the run directory does not take it: {why}"
        if self._parts.engine.destination.elsewhere:
            self._parts.engine.settle(0.0)
            self.end(place, reason)
            return
        self._decide_without_final_save(reason, "no other place would keep it")
        self._parts.ending.latch(reason)
        self._parts.ending.raise_here()

    def save_and_wait(self, place: Place, reason: str) -> Pending:
        """Raises what goes wrong; one that hangs, or that the end of the link overtakes, is left to
        itself with a warning: the next step() says what follows."""
        parts, waiting = self._parts, self._waiting()
        parts.engine.settle(self._seconds_left())
        pending = self.save(place, reason, Wish(urgent=True))
        given_up = waiting.until_over(pending, patient=False) or result_of(pending)
        if given_up is None:
            return pending
        if given_up.hangs and parts.strict:
            raise TimeoutError(given_up.why)
        warnings.warn(
            f"a save is not waited for any longer: {given_up.why}", RuntimeWarning, stacklevel=4
        )
        return pending

    def _waiting(self) -> Waiting:
        parts = self._parts
        return Waiting(parts.engine, parts.triggers, self.surroundings, self.surroundings())

    def _end_fenced(self, error: Fenced) -> None:
        """No outcome: what an overtaken generation says no longer counts."""
        self._parts.ending.latch(_fenced(error))
        self._parts.ending.raise_here()

    def _decide_without_final_save(self, reason: str, why: str) -> None:
        newest, failure = self._parts.engine.lasting, f"{reason}; {why}"
        if newest is None:
            self._parts.ending.decide(Result.FAILED, None, f"{failure}; {self._nothing()}")
        else:
            standing = f"{failure}; the newest checkpoint is of step {newest.step}"
            self._parts.ending.decide(Result.SAVED, newest.step, standing)

    def _nothing(self) -> str:
        known = "nothing that this link knows of is left for the next one"
        return known if self._parts.engine.ever_saved else "nothing was ever saved"

    # ── in the lookout thread ─────────────────────────────────────────────────────────────
    def watch(self) -> float:
        """The watchdog: says what is saved when no boundary comes in time.

        It changes nothing else: the process is left to its end, and a boundary that comes
        after all has the last word. Returns the seconds until it wants to look again.
        """
        parts, around = self._parts, self.surroundings()
        if parts.triggers.reason_to_stop(around) is not None:
            parts.engine.hurry()  # the final save has to wait for what is under way
        reason = parts.triggers.overdue(around)
        if reason is not None and not parts.ending.latched and self._is_settled(around):
            self._rescue(reason)
        parts.session.events.flush(0.0)
        moments = (parts.triggers.overdue_at(around), parts.triggers.last_word_at(around))
        ahead = [m - around.now_s for m in moments if m is not None and m > around.now_s]
        return min(ahead, default=LOOK_EVERY_S)

    def _is_settled(self, around: Surroundings) -> bool:
        """No save is under way that a later look could find committed in time."""
        if not (self._parts.engine.busy or self._ending_now):
            return True
        last_word = self._parts.triggers.last_word_at(around)
        return last_word is not None and around.now_s >= last_word

    def _rescue(self, reason: str) -> None:
        parts, newest = self._parts, self._parts.engine.lasting
        if newest is None or parts.engine.fenced is not None:
            return
        if parts.engine.committed is None:
            reason += "; nothing newer than the restored checkpoint exists"
        if parts.ending.rescue(newest.step, reason):
            log.warning("%s: the newest checkpoint is of step %d", reason, newest.step)
            parts.session.events.emit(Event.WATCHDOG, flush=False, step=newest.step, reason=reason)


def _reaches(known: CheckpointKey | None, saved: CheckpointKey) -> bool:
    return known is not None and known >= saved


def _fenced(error: Fenced) -> str:
    return f"fenced: {error}"
