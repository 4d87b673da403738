"""The steward: runs one link of a program that cannot be changed, and saves for it.

It stands where a program with a Checkpointer would: told by the notice and deadline files, it
leaves events, restarts, an outcome and an exit code. Which level saves is tried in the order of
chain.json; one that turns out not to work here gives way to the next.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..errors import EXIT_COMPLETE, EXIT_SAVED, Fenced
from ..events import Event, EventLog
from ..lease import Lease
from ..policy.interval import EveryTime
from ..preflight import check_storage
from ..rundir import CheckpointKey, Result, RunDir
from ..settings import Settings
from .base import (
    AnotherCommand,
    Kind,
    Level,
    LevelFailed,
    NotHere,
    NotThisFile,
    OwnFiles,
    ResumeFailed,
    Start,
    StartFailed,
    Work,
    passes,
)
from .ending import Ending
from .forwarding import Forwarding
from .launching import Launching
from .moments import Moments, back_by
from .orphans import Orphans
from .program import Program, crashed, ended_from_outside, how_it_ended
from .record import Trials
from .restarts import Restart, Restarts
from .saving import Saves

log = logging.getLogger("hpc_ckpt.steward")

TICK_S = 0.25
INTERVAL_S = 600.0
FIRST_S = 60.0
SOON_S = 60.0
"""A program that fails this soon after it went on may have failed because of that."""
AGAIN = 2
"""How often a link goes on from the same restart, if the program fails soon after."""
LEAST_ROOM = 1024**2
_Skip = Callable[[CheckpointKey, str], None]


class _Gone(Exception):
    """The program has failed soon after it went on from a restart."""


class _Speaks(Exception):
    """The program has a Checkpointer."""


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
        link_environ: Mapping[str, str] | None = None,
        orphans: Orphans | None = None,
    ) -> None:
        """`link_environ`: for a program that turns out to save for itself."""
        self._place = place
        self._lease = Lease(place, generation)
        self._work = work
        self._levels = levels
        self._events = events
        self._link_environ = link_environ
        self._launching = Launching(orphans)
        policy = settings.policy
        self._interval_s = policy.seconds if isinstance(policy, EveryTime) else INTERVAL_S
        self._restarts = Restarts(place)
        self._trials = Trials(place, generation, events)
        self._moments = Moments(place, generation, self._interval_s, lead_s)
        self._saves = Saves(
            self._restarts,
            self._lease,
            events,
            self._trials,
            self._moments,
            settings.keep.last,
            work.argv,
        )
        self._ending = Ending(place, self._lease, work, events, self._saves, self._moments)
        self._forwarding = Forwarding(work.environ, lead_s)
        self._began_from: str | None = None
        """The restart this link went on from, until it has saved itself."""
        self._went_on = 0.0
        self._failed_after: dict[str, list[str]] = {}
        """Restarts after which the program has failed soon in this link, and how each time."""
        self._crashed = False
        """Not by a code of its own, which may be its own affair."""

    def run(self) -> int:
        """The exit code of the link's program."""
        try:
            self._trials.read()
            self._restarts.sweep(self._lease.generation)
            self._saves.look()
            return self._by_itself() if self._speaks() else self._by_levels()
        except (AnotherCommand, ResumeFailed) as failure:
            if isinstance(failure, AnotherCommand):
                self._place.write_halt(str(failure))  # no later link would find anything else
            return self._leave(Result.FAILED, self._saves.step(), str(failure))
        except OSError as error:
            return self._leave(Result.FAILED, None, f"restarts cannot be read now: {error}")

    def _by_levels(self) -> int:
        self._restarts.check_command(self._work.argv)
        offered = [level.name for level in self._levels]
        owner = self._restarts.owner(offered, self._trials.given_up())
        # One above it in the order has nothing to go on from, and would begin anew.
        for level in sorted(self._levels, key=lambda level: level.name != owner):
            failed = self._given_up(level.name)
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
            except _Speaks:
                self._trials.fail(level.name, "the program has a Checkpointer")
            except ResumeFailed:
                if isinstance(level, OwnFiles):
                    level.leave_newest()
                raise
            finally:
                level.close()
                self._launching.end_orphans()
            if self._speaks():
                return self._by_itself()
        return self._leave(Result.FAILED, None, "no level is left to run the program with")

    def _given_up(self, name: str) -> str | None:
        """One that has no other to give way to is tried again in every link."""
        return self._trials.failed(name) if len(self._levels) > 1 else None

    # ── a program that saves for itself ───────────────────────────────────────────────────
    def _speaks(self) -> bool:
        return self._link_environ is not None and self._place.speaks()

    def _by_itself(self) -> int:
        """As any program with a Checkpointer: it says itself how the link ended."""
        self._trials.choose(Kind.MODEL.value, Kind.MODEL.value)
        start = Start(argv=self._work.argv, cwd=self._work.cwd, environ=self._link_environ or {})
        program = self._launching.start(start)
        try:
            while (code := program.wait(time.monotonic() + TICK_S)) is None:
                self._launching.reap()
        finally:
            program.end()
        return code if code >= 0 else 128 - code

    # ── one level ─────────────────────────────────────────────────────────────────────────
    def _with(self, level: Level) -> int:
        self._trials.choose(level.name, level.kind.value)
        self._moments.expect(self._trials.cost(level.name))
        self._failed_after.clear()
        self._crashed = False
        while True:
            program = self._begin(level)
            try:
                return self._attend(level, program)
            except _Gone as gone:
                log.warning("%s", gone)
            except Fenced as fenced:
                self._events.emit(Event.FENCED, newer=fenced.newer)
                log.warning("overtaken by link %d: nothing of this link counts", fenced.newer)
                return EXIT_SAVED
            finally:
                program.end()
                self._launching.stop_relaying()
            self._launching.end_orphans()

    def _begin(self, level: Level) -> Program:
        """From the newest restart that the level can go on from, or from the beginning."""
        work = replace(self._work, store_s=self._moments.hand_out())
        skipped: list[str] = []
        refused = False
        self._saves.goes_on_from(None)

        def skip(key: CheckpointKey, why: str) -> None:
            self._saves.skipped.add(key)
            skipped.append(f"{key.directory_name}: {why}")
            log.warning("skipped %s: %s", key.directory_name, why)

        for restart in self._candidates(level, skip):
            began = time.monotonic()
            try:
                program = self._resume(level, work, restart)
            except NotHere:
                raise  # no restart of it goes on here and now; another link may do
            except ResumeFailed as error:
                if passes(error):  # to begin anew would write over the work
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
        if skipped:
            self._check_beginning_anew(level, skipped, refused=refused)
        if self._saves.newest() is not None:
            log.warning("NO STORED RESTART IS USED: begins anew, unless it has files of its own")
        start = self._first(level, work)
        self._events.emit(Event.STARTED_FRESH, skipped=skipped)
        return self._launching.start(start)

    def _first(self, level: Level, work: Work) -> Start:
        try:
            return level.first(work)
        except (StartFailed, NotHere) as error:
            gives_way = self._trials.gives_way(level.name, error)
            raise (StartFailed if gives_way else NotHere)(str(error)) from error

    def _candidates(self, level: Level, skip: _Skip) -> Iterator[Restart]:
        """Newest first; those after which earlier links failed only if no other is left."""
        spare = []
        for restart in self._restarts.newest(level.name, skip):
            name = restart.key.directory_name
            ends = self._failed_after.get(name, [])
            if len(ends) >= AGAIN:
                skip(restart.key, f"{ends[-1]}: the program failed soon after it had gone on")
            elif self._trials.went_nowhere(name):
                spare.append(restart)
            else:
                yield restart
        yield from spare

    def _check_beginning_anew(self, level: Level, skipped: list[str], *, refused: bool) -> None:
        """Raises where that would write over work which a later attempt may go on from."""
        gone = bool(self._failed_after)
        own_files = level.kind is Kind.APPLICATION
        if own_files and not refused and not gone:
            return  # it may have files of its own in place; its first() goes on from those
        why = "no restart of it could be gone on from: " + "; ".join(skipped)
        # A program that ends with a code of its own after one restart may have come to its end;
        # an application that fails with files that are whole may only miss its licence today.
        by_restart = self._crashed or len(self._failed_after) > 1
        blamed = not own_files and (by_restart if gone else refused)
        if blamed and not self._trials.survived(level.name):
            full = check_storage(self._work.cwd, LEAST_ROOM, 1)
            if full is not None:
                raise NotHere(f"{why}; {full}")
            raise LevelFailed(why)
        by_program = gone or own_files
        mend = "mend the program, or its surroundings, and resume the chain; " if by_program else ""
        anew = f"remove {self._restarts.place} to begin anew"
        if own_files:
            anew += f" (and its files in {self._work.cwd}, if it goes on from those by itself)"
        raise ResumeFailed(f"{why}; {mend}{anew}")

    def _resume(self, level: Level, work: Work, restart: Restart) -> Program:
        try:
            return self._resume_once(level, work, restart)
        except NotThisFile as error:
            log.warning("%s, from what lay in place: now from what was saved", error)
            return self._resume_once(level, work, restart)

    def _resume_once(self, level: Level, work: Work, restart: Restart) -> Program:
        log.info("goes on from %s", restart.key.directory_name)
        program = self._launching.start(level.resume(work, restart.path, restart.facts))
        try:
            level.resumed(program, back_by(restart.size))
        except BaseException:  # nothing of it goes on, then raised again
            program.end()
            self._launching.stop_relaying()  # what is put back is not said again
            self._launching.end_orphans()
            raise
        self._saves.goes_on_from(restart)
        self._began_from, self._went_on = restart.key.directory_name, time.monotonic()
        return program

    def _attend(self, level: Level, program: Program) -> int:
        self._saves.tried_at = time.monotonic()
        while True:
            code = program.wait(time.monotonic() + TICK_S)
            if self._speaks():
                raise _Speaks
            if code is not None:
                return self._after(level, program, code)
            self._launching.reap()
            if self._began_from is not None and time.monotonic() >= self._went_on + SOON_S:
                self._trials.survive(level.name)
            why = self._moments.why_end(level)
            if why is not None:
                return self._end_link(level, program, why)
            if time.monotonic() >= self._saves.tried_at + self._pause_s(level):
                self._save(level, program, f"every {self._interval_s:g} s", last=False)

    def _pause_s(self, level: Level) -> float:
        """The first save comes early: it shows whether the level works, and guards the start."""
        known = self._trials.has_saved(level.name)
        return self._interval_s if known else min(self._interval_s, FIRST_S)

    def _save(self, level: Level, program: Program, reason: str, *, last: bool) -> Restart | None:
        restart = self._saves.make(level, program, reason, last=last)
        if restart is not None and self._began_from is not None:
            self._trials.survive(level.name)
            self._began_from = None
        return restart

    # ── the end ───────────────────────────────────────────────────────────────────────────
    def _end_link(self, level: Level, program: Program, why: str) -> int:
        self._events.emit(Event.STOPPING, step=self._saves.step(), reason=why)
        if why.startswith("notice"):
            until = self._moments.moment(time.monotonic(), last=True).until
            self._forwarding.ask(level, program, until)
        saved = self._save(level, program, why, last=True)
        code = program.poll()
        program.end()
        if code == EXIT_SAVED and saved is None:
            return code  # its own word, and nobody else's: judged by that
        complete = None if code is None else self._ending.if_complete(level, code)
        if complete is not None:
            return complete
        step, no_room, failed = self._saves.step(), self._saves.no_room, self._saves.failed
        if self._saves.any_here():
            told = "" if failed is None else f"; the last save failed: {failed}"
            return self._leave(Result.SAVED, step, f"{why}{told}")
        if no_room is not None:
            return self._leave(Result.SAVED, step, f"{why}; nothing could be saved: {no_room}")
        if why.startswith("deadline") and not self._saves.not_now:
            self._blame(level)
        told = "" if failed is None else f": {failed}"
        return self._leave(Result.SAVED, step, f"{why}; nothing could be saved{told}")

    def _blame(self, level: Level) -> None:
        """It saved nothing in all that it had of this link."""
        untold = level.kind is not Kind.PLAIN and self._trials.failed(level.name) is None
        if not untold or self._saves.newest() is not None:
            return
        if self._trials.never_saves(level.name, time.time() - self._moments.entered):
            self._trials.fail(level.name, "nothing was saved in a whole link, or in two short ones")

    def _after(self, level: Level, program: Program, code: int) -> int:
        """It has ended by itself."""
        complete = self._ending.if_complete(level, code)
        if complete is not None:
            return complete
        if code == EXIT_SAVED:
            return code  # its own word, and nobody else's: judged by that
        told = self._moments.why_told()
        if code == EXIT_COMPLETE and told is not None:
            return self._end_link(level, program, told)  # it has heard of that before us
        if self._saves.ended_by_storage is not None:
            reason = f"ended by a save without room for it: {self._saves.ended_by_storage}"
            return self._leave(Result.FAILED, self._saves.step(), reason)
        own = level.own_failure(code)
        if own is not None and not self._trials.has_saved(level.name):
            raise LevelFailed(own)
        saved = self._save(level, program, f"it ended with code {code}", last=True)
        step = self._saves.step()
        if code == EXIT_COMPLETE:
            if saved is None and not self._saves.any_here():
                reason = "it ended with code 0 but the work is not complete, and nothing was saved"
                return self._leave(Result.FAILED, step, reason)
            return self._leave(Result.SAVED, step, "ended before the work was complete")
        self._check_restart(level, code)
        return self._leave(Result.FAILED, step, how_it_ended(code))

    def _check_restart(self, level: Level, code: int) -> None:
        """Raises _Gone where the restart may be why the program failed."""
        restart, after_s = self._began_from, time.monotonic() - self._went_on
        if restart is None or after_s >= SOON_S or ended_from_outside(code):
            return
        self._crashed |= crashed(code) or level.own_failure(code) is not None
        ends = self._failed_after.setdefault(restart, [])
        ends.append(how_it_ended(code))
        if len(ends) == 1:
            self._trials.go_nowhere(restart)
        self._began_from = None
        raise _Gone(f"{ends[-1]}, {after_s:.0f} s after it had gone on from {restart}")

    def _leave(self, result: Result, step: int | None, reason: str) -> int:
        if result is Result.FAILED and self._began_from is not None:
            self._trials.go_nowhere(self._began_from)
        return self._ending.leave(result, step, reason)
