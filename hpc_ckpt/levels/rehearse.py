"""Try a command before it is trusted to a level: run it briefly, save, kill, go on.

Everything happens in a copy of the working directory and of what its links lead to, so that a
rehearsal leaves no traces there; a path that the command writes out is the real one. What it
measures sets how early a last save must begin and how often saves pay.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import HpcCkptError
from ..rundir import CheckpointKey, RunDir
from .base import Level, Moment, Start, Work
from .program import Program
from .restarts import Restart, Restarts
from .workcopy import copy_work

RUN_S = 5.0
SAVE_S = 300.0
RESUME_S = 120.0
STAYS_S = 2.0
"""A program that is still there this long after it went on has survived."""
MOST_COPIED = 2 * 1024**3
LEAST_INTERVAL_S = 60.0
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
    work: Work, levels: Sequence[Level], *, run_s: float = RUN_S, in_place: bool = False
) -> Iterator[Rehearsal]:
    """One level after the other, each in a fresh copy of the working directory."""
    for level in levels:
        with _place(work, in_place=in_place) as (there, root):
            try:
                yield _one(there, level, RunDir(root), run_s)
            finally:
                level.close()


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


def _one(work: Work, level: Level, place: RunDir, run_s: float) -> Rehearsal:
    why = level.probe(work)
    if why is not None:
        return Rehearsal(level=level.name, survived=False, why=why)
    place.create()
    try:
        return _tried(work, level, Restarts(place), run_s)
    except (HpcCkptError, OSError) as error:
        return Rehearsal(level=level.name, survived=False, why=str(error))


def _tried(work: Work, level: Level, restarts: Restarts, run_s: float) -> Rehearsal:
    program = _start(work, level.first(work))
    try:
        code = program.wait(time.monotonic() + run_s)
        if code is not None:
            why = level.own_failure(code) or (
                f"it ended with code {code} within {run_s:g} s: too short to be saved; "
                "rehearse a longer run"
            )
            return Rehearsal(level=level.name, survived=False, why=why)
        began = time.monotonic()
        restart = _save(level, program, restarts)
        save_s = time.monotonic() - began
    finally:
        program.end()
    began = time.monotonic()
    survived, why = _goes_on(work, level, restart)
    return Rehearsal(
        level=level.name,
        survived=survived,
        why=why,
        size=restart.size,
        save_s=round(save_s, 3),
        resume_s=round(time.monotonic() - began - (STAYS_S if survived else 0.0), 3),
    )


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


def _goes_on(work: Work, level: Level, restart: Restart) -> tuple[bool, str]:
    program = _start(work, level.resume(work, restart.path, restart.facts))
    try:
        level.resumed(program, time.monotonic() + RESUME_S)
        code = program.wait(time.monotonic() + STAYS_S)
    finally:
        program.end()
    if code is None or level.is_complete(work, code) or code == 0:
        return True, "saved, killed, and gone on"
    return False, f"it ended with code {code} right after it went on"
