"""Try a command before it is trusted to a level: run it briefly, save, kill, go on.

Everything happens in a copy of the working directory and of what its links lead to, so that a
rehearsal leaves no traces there; a path that the command writes out is the real one. What it
measures sets how early a last save must begin and how often saves pay.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import HpcCkptError
from ..rundir import CheckpointKey, RunDir
from .base import Kind, Level, Moment, NothingNew, Saved, SaveFailed, Start, Work
from .orphans import Orphans
from .program import Program, how_it_ended
from .restarts import Restart, Restarts
from .workcopy import copy_work

RUN_S = 5.0
SAVE_S = 300.0
RESUME_S = 120.0
STAYS_S = 2.0
"""A program that is still there this long after it went on has survived."""
AT_ONCE_S = 1.0
NEXT_S = 30.0
"""How long a restart file is waited for that shows from where a program has gone on."""
LOOK_EVERY_S = 0.1
MOST_COPIED = 2 * 1024**3
LEAST_INTERVAL_S = 60.0
GONE_ON = "saved, killed, and gone on"
LEAD_FACTOR, LEAD_SLACK_S = 2.0, 5.0


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What came of one level."""

    level: str
    survived: bool
    why: str
    size: int | None = None
    save_s: float | None = None
    resume_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def lead_s(self) -> float | None:
        """How long before the end of a link the last save must begin."""
        return None if self.save_s is None else math.ceil(LEAD_FACTOR * self.save_s + LEAD_SLACK_S)

    def interval_s(self, mtbf_s: float) -> float | None:
        """Young's: what saves cost and what a failure costs are in balance."""
        if self.save_s is None:
            return None
        return max(LEAST_INTERVAL_S, math.sqrt(2 * self.save_s * mtbf_s))


def rehearse(
    work: Work,
    levels: Sequence[Level],
    *,
    run_s: float = RUN_S,
    in_place: bool = False,
    orphans: Orphans | None = None,
) -> Iterator[Rehearsal]:
    """One level after the other, each in a fresh copy of the working directory. `orphans`: of a
    process that has no other children; what the program leaves running is then ended."""
    for level in levels:
        with _place(work, in_place=in_place) as (there, root):
            try:
                found = _one(there, level, RunDir(root), run_s, orphans)
            finally:
                level.close()
                _end(orphans)
        yield found


def best(found: Iterable[Rehearsal]) -> Rehearsal | None:
    """The first, in the order of choice, that survived."""
    return next((one for one in found if one.survived), None)


@contextmanager
def _place(work: Work, *, in_place: bool) -> Iterator[tuple[Work, Path]]:
    with tempfile.TemporaryDirectory(prefix="hpc-ckpt-rehearsal-") as name:
        scratch = Path(name, "scratch")
        scratch.mkdir()
        cwd = work.cwd
        if not in_place:
            cwd = Path(name, "work")
            copy_work(work.cwd, cwd, MOST_COPIED)
        yield replace(work, cwd=cwd, scratch=scratch), Path(name, "run")


def _one(
    work: Work, level: Level, place: RunDir, run_s: float, orphans: Orphans | None
) -> Rehearsal:
    why = level.probe(work)
    if why is not None:
        return Rehearsal(level=level.name, survived=False, why=why)
    place.create()
    try:
        return _tried(work, level, Restarts(place), run_s, orphans)
    except (HpcCkptError, OSError) as error:
        return Rehearsal(level=level.name, survived=False, why=str(error))


def _tried(
    work: Work, level: Level, restarts: Restarts, run_s: float, orphans: Orphans | None
) -> Rehearsal:
    program = _start(work, level.first(work))
    try:
        code = program.wait(time.monotonic() + run_s)
        if code is not None:
            why = level.own_failure(code) or _too_soon(code, run_s)
            return Rehearsal(level=level.name, survived=False, why=why)
        began = time.monotonic()
        restart = _save(level, program, restarts)
        save_s = time.monotonic() - began
    finally:
        program.end()
        _end(orphans)  # or they would go on beside what goes on
    survived, why, resume_s = _goes_on(work, level, restart)
    return Rehearsal(
        level=level.name,
        survived=survived,
        why=why,
        size=restart.size,
        save_s=round(save_s, 3),
        resume_s=round(resume_s, 3),
    )


def _end(orphans: Orphans | None) -> None:
    if orphans is not None:
        orphans.end()


def _too_soon(code: int, run_s: float) -> str:
    if code == 0:
        return f"it was done within {run_s:g} s: too short to be saved; rehearse a longer run"
    return f"it ended within {run_s:g} s, before any save: {how_it_ended(code)}; mend the command"


def _start(work: Work, start: Start) -> Program:
    """What it prints is not for the screen."""
    output = start.output or (work.scratch or Path.cwd()) / "output"
    return Program(start.argv, start.cwd, start.environ, output)


def _save(level: Level, program: Program, restarts: Restarts) -> Restart:
    moment = Moment(until=time.monotonic() + SAVE_S, last=True)
    with restarts.stage(1) as staging:
        level.ask(program, staging.path, moment)
        saved = level.wait(program, staging.path, moment)
        made = staging.commit(
            level=level.name,
            step=saved.step or 1,
            reason="rehearsal",
            facts=saved.facts,
            guard=lambda: None,
        )
    return restarts.open(CheckpointKey(made.key.generation, made.key.step))


def _goes_on(work: Work, level: Level, restart: Restart) -> tuple[bool, str, float]:
    """Whether, why, and how long it took to be back."""
    began = time.monotonic()
    program = _start(work, level.resume(work, restart.path, restart.facts))
    after = _After(level, program, work.scratch or work.cwd)
    try:
        own_files = level.kind is Kind.APPLICATION
        saved = after.look(AT_ONCE_S) if own_files else None
        looked_s = time.monotonic() - began if own_files else 0.0
        level.resumed(program, time.monotonic() + RESUME_S)
        resume_s = time.monotonic() - began - looked_s
        if own_files and restart.facts.get("step") is not None:
            saved = saved or after.asked()
        code = program.wait(time.monotonic() + (0.0 if saved else STAYS_S))
    finally:
        program.end()
    if code and not (saved or level.is_complete(work, code)):
        return False, f"it ended with code {code} right after it went on", resume_s
    if own_files and (saved or code is None):
        return *_from_there(restart, saved), resume_s
    return True, GONE_ON, resume_s


def _from_there(restart: Restart, saved: Saved | None) -> tuple[bool, str]:
    """A program that runs may have begun anew: what it writes next shows it."""
    before = restart.facts.get("step")
    if before is None:
        return True, f"{GONE_ON}; whether from there cannot be told: the recipe shows no progress"
    if saved is None or saved.step is None:
        return True, f"{GONE_ON}; whether from there cannot be told: no restart file came of it"
    if saved.step >= before:
        return True, f"{GONE_ON} from step {before}"
    why = "it does not take its restart file; look at 'resume' in the recipe"
    return False, f"saved at step {before}, and then at step {saved.step}, anew: {why}"


class _After:
    """What a program writes after it has gone on."""

    def __init__(self, level: Level, program: Program, place: Path) -> None:
        self._level = level
        self._program = program
        self._place = place

    def asked(self) -> Saved | None:
        """Asked for, or waited for."""
        into = Path(tempfile.mkdtemp(dir=self._place))
        moment = Moment(until=time.monotonic() + NEXT_S, last=True)
        try:
            self._level.ask(self._program, into, moment)
            return self._level.wait(self._program, into, moment)
        except (SaveFailed, NothingNew):
            return self.look(moment.until - time.monotonic())

    def look(self, seconds: float) -> Saved | None:
        """What it writes by itself."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            into = Path(tempfile.mkdtemp(dir=self._place))
            try:
                return self._level.wait(self._program, into, Moment(until=time.monotonic()))
            except (SaveFailed, NothingNew):
                shutil.rmtree(into, ignore_errors=True)
            if self._program.wait(time.monotonic() + LOOK_EVERY_S) is not None:
                return None
        return None
