"""Saves of one link: asked for, waited for, committed, told. What failed is judged here, too.

Want of space, quota or an answer of the storage says nothing against a level: it is told, tried
again, and the level is kept.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from ..events import Event, EventLog
from ..lease import Lease
from ..rundir import CheckpointKey
from .base import (
    Level,
    LevelFailed,
    Moment,
    NoRoom,
    NothingNew,
    NotNow,
    Saved,
    SaveFailed,
    passes,
)
from .moments import Cost, Moments
from .program import Program
from .record import Trials
from .restarts import Restart, Restarts

log = logging.getLogger("hpc_ckpt.steward")


class Saves:
    """Of one link, by whatever level has it at the time."""

    def __init__(
        self,
        restarts: Restarts,
        lease: Lease,
        events: EventLog,
        trials: Trials,
        moments: Moments,
        keep: int,
        argv: Sequence[str] | None = None,
    ) -> None:
        self._restarts = restarts
        self._lease = lease
        self._events = events
        self._trials = trials
        self._moments = moments
        self._keep = keep
        self._argv = argv
        self.tried_at = time.monotonic()
        """When the last try was over: a program whose saves take longer than the interval gets on
        in between."""
        self.stall_s = 0.0
        self.no_room: str | None = None
        """Why the storage did not take a save of this link."""
        self.failed: str | None = None
        """Why the last one did."""
        self.not_now = False
        """Whether the last one failed for a reason that passes."""
        self.ended_by_storage: str | None = None
        """The same, of one that took the program along."""
        self.skipped: set[CheckpointKey] = set()
        """Restarts that this link could not go on from."""
        self._newest: CheckpointKey | None = None
        """Remembered: storage that does not answer for a moment must not end the program."""
        self._at = (0, 0)
        """Of the last save, or what the program went on from: its key's step, and the program's."""

    def goes_on_from(self, restart: Restart | None) -> None:
        """None: from the beginning."""
        own = None if restart is None else restart.facts.get("step")
        step = 0 if restart is None else restart.key.step
        self._at = (step, step if own is None else int(own))

    def look(self) -> None:
        """What earlier links have left, listed before the program runs and not again."""
        self._newest = max(self._restarts.keys(), default=None)

    def newest(self) -> CheckpointKey | None:
        return self._newest

    def step(self) -> int:
        newest = self.newest()
        return 0 if newest is None else newest.step

    def any_here(self) -> bool:
        newest = self.newest()
        return newest is not None and newest.generation == self._lease.generation

    def make(self, level: Level, program: Program, reason: str, *, last: bool) -> Restart | None:
        """None: none was made; the program goes on if it can."""
        try:
            return self._try(level, program, reason, last=last)
        finally:
            self.tried_at = time.monotonic()

    def _try(self, level: Level, program: Program, reason: str, *, last: bool) -> Restart | None:
        began = time.monotonic()
        self._events.emit(Event.SAVE_STARTED, step=self.step(), reason=reason)
        self.failed, self.not_now = None, False
        try:
            restart, saved = self._made(
                level, program, self._moments.moment(began, last=last), reason
            )
        except NotNow as error:
            self.failed, self.not_now = str(error), True
            if isinstance(error, NoRoom):
                self.no_room = str(error)
            self._events.emit(Event.SAVE_FAILED, step=self.step(), error=str(error))
            log.warning("no save now, tried again later: %s", error)
            return None
        except NothingNew as nothing:
            self._events.emit(Event.SAVE_SKIPPED, step=self.step(), reason=str(nothing))
            return None
        except (SaveFailed, OSError) as error:
            self._failed(level, program, error, last=last)
            return None
        self._tell(level, restart, saved, time.monotonic() - began)
        return restart

    def _made(
        self, level: Level, program: Program, moment: Moment, reason: str
    ) -> tuple[Restart, Saved]:
        with self._restarts.stage(self._lease.generation) as staging:
            level.ask(program, staging.path, moment)
            saved = level.wait(program, staging.path, moment)
            restart = staging.commit(
                level=level.name,
                step=self._counted(saved.step),
                reason=reason,
                facts={**saved.facts, "step": saved.step},
                guard=self._lease.check,
                argv=self._argv,
            )
            self._newest = restart.key
            self._at = (restart.key.step, self._at[1] if saved.step is None else saved.step)
            return restart, saved

    def _counted(self, own: int | None) -> int:
        """The step of the next key: never below one of this link, or the older would be gone on
        from. Programs may count anew (`reset_timestep`); that is progress if it was seen within
        the link, but not at its first save: there it may as well have begun anew."""
        if own is None:
            return self.step() + 1
        at, last = self._at
        if own >= last:
            counted = at + own - last
        elif self.any_here():
            counted = at + 1
            log.info("the program counts anew: its step %d comes after %d", own, last)
        else:
            counted = own
        return max(counted, self.step()) if self.any_here() else counted

    def _tell(self, level: Level, restart: Restart, saved: Saved, seconds: float) -> None:
        self.stall_s += seconds
        cost = Cost(max(0.0, seconds - saved.waited_s), saved.lead_s)
        self._moments.measured(cost)
        self._trials.save(level.name, cost)
        self._events.emit(
            Event.COMMITTED,
            step=restart.key.step,
            checkpoint=restart.key.directory_name,
            tier="restarts",
            bytes=restart.size,
            stall_s=round(seconds, 3),
            save_s=round(seconds, 3),
            training_s=self.working_s(),
        )
        self._retain(level, restart)

    def _retain(self, level: Level, restart: Restart) -> None:
        try:
            gone = self._restarts.retain(self._keep, level.name, restart.key, self.skipped)
        except OSError as error:
            log.warning("no older restart is removed now: %s", error)
            return
        for key in gone:
            self._events.emit(Event.REMOVED, checkpoint=key.directory_name, tier="restarts")

    def _failed(self, level: Level, program: Program, error: Exception, *, last: bool) -> None:
        self.failed = str(error)
        self._events.emit(Event.SAVE_FAILED, step=self.step(), error=self.failed)
        log.warning("save failed: %s", error)
        ended = program.poll() is not None
        if passes(error):
            self.no_room = str(error)
            if ended and not last:
                self.ended_by_storage = str(error)
            return
        if self._trials.has_saved(level.name):
            return
        if ended:
            raise LevelFailed(f"its first save failed and ended the program: {error}")
        if not isinstance(error, OSError) and not isinstance(error.__cause__, OSError):
            self._trials.fail(level.name, f"its first save failed: {error}")

    def working_s(self) -> float:
        """What the program has had of this link."""
        return round(time.time() - self._moments.entered - self.stall_s, 3)
