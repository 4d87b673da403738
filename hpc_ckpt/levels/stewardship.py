"""The steward: runs one link of a program that cannot be changed, and saves for it.

It stands where a program with a Checkpointer would: told by the notice and deadline files, it
leaves events, restarts, an outcome and an exit code. Which level saves is tried in the order of
chain.json; one that turns out not to work here gives way to the next.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from ..errors import EXIT_COMPLETE, EXIT_FAILED, EXIT_SAVED, Fenced, SpecError
from ..events import Event, EventLog
from ..lease import Lease
from ..policy.interval import EveryTime
from ..rundir import (
    CheckpointKey,
    Done,
    Outcome,
    Result,
    RunDir,
    read_notice,
    write_outcome,
)
from ..settings import Settings, margin
from .base import (
    Kind,
    Level,
    Moment,
    NotHere,
    NothingNew,
    NotNow,
    ResumeFailed,
    SaveFailed,
    Start,
    StartFailed,
    Work,
)
from .program import Program, how_it_ended
from .record import Trials
from .relay import Relay
from .restarts import Restart, Restarts

log = logging.getLogger("hpc_ckpt.steward")

TICK_S = 0.25
LEAD_SHARE = 0.4
"""Of a link, for its last save: one shorter than a guess would otherwise do no work at all."""
SAVE_FACTOR = 1.5
"""The next save may be slower than any yet seen."""
INTERVAL_S = 600.0
FIRST_S = 60.0
RESUME_S = 120.0
"""A program that is not back after this long will not come back; longer for large restarts."""
SLOW_READ = 50 * 1024**2
"""Bytes a second of a file system that is still worth waiting for."""
UNKNOWN_END_S = 60.0
"""For a last save after a notice where no end is known."""


class LevelFailed(Exception):
    """This level does not work for this program here; the next one may."""


class Steward:
    """One link, from the choice of a level to the outcome."""

    def __init__(
        self,
        place: RunDir,
        generation: int,
        work: Work,
        levels: Sequence[Level],
        settings: Settings,
        events: EventLog,
        lead_s: float | None = None,
    ) -> None:
        self._place = place
        self._lease = Lease(place, generation)
        self._work = work
        self._levels = levels
        self._events = events
        self._keep = settings.keep.last
        policy = settings.policy
        self._interval_s = policy.seconds if isinstance(policy, EveryTime) else INTERVAL_S
        self._restarts = Restarts(place)
        self._trials = Trials(place, generation, events)
        self._entered = time.time()
        self._lead_s = lead_s
        self._save_s: float | None = None
        self._told_lead_s: float | None = None
        self._stall_s = 0.0
        self._tried_at = time.monotonic()
        self._relay: Relay | None = None
        self._began_from: str | None = None
        """The restart this link went on from, until it has saved itself."""

    def run(self) -> int:
        """The exit code of the link's program."""
        self._restarts.sweep(self._lease.generation)
        try:
            return self._by_levels()
        except ResumeFailed as failure:
            return self._leave(Result.FAILED, self._step(), str(failure))
        except OSError as error:
            return self._leave(Result.FAILED, None, f"restarts cannot be read now: {error}")

    def _by_levels(self) -> int:
        owner = self._owner()
        for level in self._levels:
            failed = self._trials.failed(level.name)
            why = failed or level.probe(self._work)
            if why is not None:
                self._trials.reject(level.name, why)
                if level.name == owner and failed is None:
                    # Another node may do; any other level would begin anew.
                    raise ResumeFailed(f"the work was saved by {owner}, which says no here: {why}")
                continue
            try:
                return self._with(level)
            except (LevelFailed, StartFailed) as failure:
                self._trials.fail(level.name, str(failure))
            finally:
                level.close()
        return self._leave(Result.FAILED, None, "no level is left to run the program with")

    def _owner(self) -> str | None:
        """Whose restart the work is in."""
        made = [one["level"] for one in self._restarts.told()]
        return next((n for n in reversed(made) if self._trials.failed(str(n)) is None), None)

    # ── one level ─────────────────────────────────────────────────────────────────────────
    def _with(self, level: Level) -> int:
        self._trials.choose(level.name, level.kind.value)
        program = self._begin(level)
        try:
            return self._attend(level, program)
        except Fenced as fenced:
            self._events.emit(Event.FENCED, newer=fenced.newer)
            log.warning("overtaken by link %d: nothing of this link counts", fenced.newer)
            return EXIT_SAVED
        finally:
            program.end()
            self._stop_relaying()

    def _begin(self, level: Level) -> Program:
        """From the newest restart that the level can go on from, or from the beginning."""
        skipped: list[str] = []
        refused = False

        def skip(key: CheckpointKey, why: str) -> None:
            skipped.append(f"{key.directory_name}: {why}")
            log.warning("skipped %s: %s", key.directory_name, why)

        for restart in self._restarts.newest(level.name, skip):
            if self._trials.went_nowhere(restart.key.directory_name):
                skip(restart.key, "links that went on from it failed")
                continue
            began = time.monotonic()
            try:
                program = self._resume(level, restart)
            except NotHere:
                raise  # no restart of it goes on here and now; another link may do
            except ResumeFailed as error:
                if error.passes:  # to begin anew would write over the work
                    raise NotHere(str(error)) from error
                refused = True
                skip(restart.key, f"did not restart: {error}")
                continue
            self._events.emit(
                Event.RESTORED,
                step=restart.key.step,
                checkpoint=restart.key.directory_name,
                tier="restarts",
                skipped=skipped,
                seconds=round(time.monotonic() - began, 3),
            )
            return program
        if skipped and (refused or level.kind is not Kind.APPLICATION):
            why = "no restart of it could be gone on from: " + "; ".join(skipped)
            if refused and not self._trials.survived(level.name):
                raise LevelFailed(why)
            # Another node may do, and to begin anew would lose everything. An application may
            # have files of its own in place; its first() goes on from those.
            raise ResumeFailed(f"{why}; remove {self._restarts.place} to begin anew")
        if self._restarts.keys():
            log.warning("NO STORED RESTART IS USED: begins anew, unless it has files of its own")
        self._events.emit(Event.STARTED_FRESH, skipped=skipped)
        return self._start(level.first(self._work))

    def _resume(self, level: Level, restart: Restart) -> Program:
        log.info("goes on from %s", restart.key.directory_name)
        program = self._start(level.resume(self._work, restart.path, restart.facts))
        try:
            level.resumed(program, time.monotonic() + RESUME_S + restart.size / SLOW_READ)
        except BaseException:  # nothing of it goes on, then raised again
            program.end()
            self._stop_relaying()  # what is put back is not said again
            raise
        self._trials.survive(level.name)
        self._began_from = restart.key.directory_name
        return program

    def _start(self, start: Start) -> Program:
        if start.output is not None:
            self._stop_relaying()
            self._relay = Relay(start.output)
        try:
            return Program(start.argv, start.cwd, start.environ, start.output)
        except OSError as error:
            raise SpecError(f"{start.argv[0]}: {error.strerror}") from error

    def _stop_relaying(self) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relay = None

    def _attend(self, level: Level, program: Program) -> int:
        self._tried_at = time.monotonic()
        while True:
            code = program.wait(time.monotonic() + TICK_S)
            if code is not None:
                return self._after(level, program, code)
            why = self._why_end(level)
            if why is not None:
                return self._end_link(level, program, why)
            if time.monotonic() >= self._tried_at + self._pause_s(level):
                self._save(level, program, f"every {self._interval_s:g} s", last=False)

    def _pause_s(self, level: Level) -> float:
        """The first save comes early: it shows whether the level works, and guards the start."""
        known = self._trials.has_saved(level.name)
        return self._interval_s if known else min(self._interval_s, FIRST_S)

    def _why_end(self, level: Level) -> str | None:
        """The first word is read by the link runner."""
        generation = self._lease.generation
        notice = read_notice(self._place.notice_file(generation))
        if notice is not None:
            return "notice: " + ", ".join(dict.fromkeys(notice.sources))
        halted = self._place.halted()
        if halted is not None:
            return f"halt: {halted}"
        end = self._place.deadline(generation)
        if end is None:
            return None
        link_s = end - self._entered
        needed = self._lead(level, link_s) + margin(link_s)
        left = end - time.time()
        return f"deadline: {left:.1f} s left" if left <= needed else None

    def _lead(self, level: Level, link_s: float) -> float:
        """What the save itself said, what saves have taken, a rehearsal, or the level's guess."""
        if self._told_lead_s is not None:
            return self._told_lead_s
        if self._save_s is not None:
            return SAVE_FACTOR * self._save_s
        guess = level.lead_s if self._lead_s is None else self._lead_s
        return min(guess, LEAD_SHARE * link_s)

    def _until(self) -> float:
        """By when a last save must be over, in time.monotonic()."""
        end = self._place.deadline(self._lease.generation)
        if end is None:
            return time.monotonic() + UNKNOWN_END_S
        left = end - time.time() - margin(end - self._entered) / 2
        return time.monotonic() + max(left, 1.0)

    def _soon(self, began: float) -> float:
        """By when one of many saves must be over: the end of the link is not slept through."""
        until = began + max(self._interval_s, UNKNOWN_END_S)
        end = self._place.deadline(self._lease.generation)
        return until if end is None else min(until, max(self._until(), began + 1.0))

    # ── saves ─────────────────────────────────────────────────────────────────────────────
    def _save(self, level: Level, program: Program, reason: str, *, last: bool) -> Restart | None:
        """None: none was made; the program goes on if it can."""
        self._tried_at = began = time.monotonic()
        until = self._until() if last else self._soon(began)
        moment = Moment(until=until, last=last)
        self._events.emit(Event.SAVE_STARTED, step=self._step(), reason=reason)
        try:
            restart = self._make(level, program, moment, reason)
        except NotNow as error:
            self._events.emit(Event.SAVE_FAILED, step=self._step(), error=str(error))
            log.warning("no save now: %s", error)
            return None
        except NothingNew as nothing:
            self._events.emit(Event.SAVE_SKIPPED, step=self._step(), reason=str(nothing))
            return None
        except (SaveFailed, OSError) as error:
            self._save_failed(level, program, error)
            return None
        self._save_s = time.monotonic() - began
        self._stall_s += self._save_s
        self._trials.save(level.name)
        self._began_from = None
        self._events.emit(
            Event.COMMITTED,
            step=restart.key.step,
            checkpoint=restart.key.directory_name,
            tier="restarts",
            bytes=restart.size,
            stall_s=round(self._save_s, 3),
            save_s=round(self._save_s, 3),
            training_s=self._working_s(),
        )
        for key in self._restarts.retain(self._keep, level.name):
            self._events.emit(Event.REMOVED, checkpoint=key.directory_name, tier="restarts")
        return restart

    def _make(self, level: Level, program: Program, moment: Moment, reason: str) -> Restart:
        with self._restarts.stage(self._lease.generation) as staging:
            level.ask(program, staging.path, moment)
            saved = level.wait(program, staging.path, moment)
            self._told_lead_s = saved.lead_s
            before = self._step()
            return staging.commit(
                level=level.name,
                step=before + 1 if saved.step is None else saved.step,
                reason=reason,
                facts=saved.facts,
                guard=self._lease.check,
            )

    def _save_failed(self, level: Level, program: Program, error: Exception) -> None:
        self._events.emit(Event.SAVE_FAILED, step=self._step(), error=str(error))
        log.warning("save failed: %s", error)
        if self._trials.has_saved(level.name):
            return
        if program.poll() is not None:
            raise LevelFailed(f"its first save failed and ended the program: {error}")
        by_storage = isinstance(error, OSError) or isinstance(error.__cause__, OSError)
        passing = by_storage or getattr(error, "passing", False)
        if not passing:
            self._trials.fail(level.name, f"its first save failed: {error}")

    # ── the end ───────────────────────────────────────────────────────────────────────────
    def _end_link(self, level: Level, program: Program, why: str) -> int:
        self._events.emit(Event.STOPPING, step=self._step(), reason=why)
        self._save(level, program, why, last=True)
        code = program.poll()
        program.end()
        if code is not None and self._is_complete(level, code):
            return self._complete()
        newest = self._newest()
        untold = level.kind is not Kind.PLAIN and self._trials.failed(level.name) is None
        if newest is None and why.startswith("deadline") and untold:
            self._trials.fail(level.name, "nothing was saved in a whole link")
        if newest is None:
            return self._leave(Result.SAVED, 0, f"{why}; nothing could be saved")
        return self._leave(Result.SAVED, newest.step, why)

    def _after(self, level: Level, program: Program, code: int) -> int:
        """It has ended by itself."""
        if self._is_complete(level, code):
            return self._complete()
        if code == EXIT_SAVED:
            return code  # its own word, and nobody else's: judged by that
        own = level.own_failure(code)
        if own is not None and not self._trials.has_saved(level.name):
            raise LevelFailed(own)
        saved = self._save(level, program, f"it ended with code {code}", last=True)
        if code == EXIT_COMPLETE:
            step = self._step()
            if saved is None and not self._saved_here():
                reason = "it ended with code 0 but the work is not complete, and nothing was saved"
                return self._leave(Result.FAILED, step, reason)
            return self._leave(Result.SAVED, step, "ended before the work was complete")
        return self._leave(Result.FAILED, self._step(), how_it_ended(code))

    def _is_complete(self, level: Level, code: int) -> bool:
        if code != EXIT_COMPLETE:
            return False  # whatever its files look like: they may be of an earlier run
        complete = level.is_complete(self._work, code)
        return code == EXIT_COMPLETE if complete is None else complete

    def _complete(self) -> int:
        self._lease.check()
        code = self._leave(Result.COMPLETE, None, "complete")
        self._place.write_done(Done(self._lease.generation, None))
        return code

    def _leave(self, result: Result, step: int | None, reason: str) -> int:
        generation = self._lease.generation
        if result is Result.FAILED and self._began_from is not None:
            self._trials.go_nowhere(self._began_from)
        self._events.emit(
            Event.ENDED,
            step=self._step(),
            training_s=self._working_s(),
            stall_s=round(self._stall_s, 3),
            complete=result is Result.COMPLETE,
            reason=reason,
        )
        write_outcome(
            self._place.outcome_file(generation), Outcome(result, generation, step, reason)
        )
        log.info("%s: %s", result.value, reason)
        codes = {Result.COMPLETE: EXIT_COMPLETE, Result.SAVED: EXIT_SAVED}
        return codes.get(result, EXIT_FAILED)

    def _working_s(self) -> float:
        """What the program has had of this link."""
        return round(time.time() - self._entered - self._stall_s, 3)

    def _newest(self) -> CheckpointKey | None:
        keys = self._restarts.keys()
        return keys[-1] if keys else None

    def _saved_here(self) -> bool:
        newest = self._newest()
        return newest is not None and newest.generation == self._lease.generation

    def _step(self) -> int:
        newest = self._newest()
        return 0 if newest is None else newest.step
