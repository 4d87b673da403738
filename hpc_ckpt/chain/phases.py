"""A chain of several commands: each begins when the one before it is complete.

What is left of a complete command goes before the next begins: its DONE, its outcome, its
restarts and what templates/dmtcp.sh keeps of an mpirun. Killed anywhere in between, the next
link finishes that first.

Standard library only: the link runner asks it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import shutil

from ..rundir import RunDir

SCRIPTS = "dmtcp"
"""In the run directory: checkpoints of templates/dmtcp.sh, and its word that it is complete."""


def complete(rundir: RunDir, phase: int, generation: int) -> None:
    """The command of this phase is complete; the next one may begin."""
    rundir.write_phase(phase + 1, entering=True)
    enter(rundir, generation)


def catch_up(rundir: RunDir, phases_left: int, generation: int) -> None:
    """What a link that was killed between two commands had not done yet."""
    enter(rundir, generation)
    if phases_left and rundir.done() is not None:
        complete(rundir, rundir.phase(), generation)


def enter(rundir: RunDir, generation: int) -> None:
    """Finish what a link that was killed in complete() had begun; nothing otherwise."""
    if not rundir.is_entering_phase():
        return
    rundir.done_file.unlink(missing_ok=True)
    rundir.outcome_file(generation).unlink(missing_ok=True)
    rundir.levels_file.unlink(missing_ok=True)
    rundir.speaks_file.unlink(missing_ok=True)
    for place in (rundir.restarts, rundir.root / SCRIPTS):
        old = rundir.root / f".{place.name}-of-phase-{rundir.phase()}"
        with contextlib.suppress(FileNotFoundError):
            place.rename(old)  # the next command must not find any of it
        shutil.rmtree(old, ignore_errors=True)
    rundir.write_phase(rundir.phase(), entering=False)
