"""A chain of several commands: each begins when the one before it is complete.

What is left of a complete command goes before the next begins: its DONE, its outcome and its
restarts. Killed anywhere in between, the next link finishes that first.

Standard library only: the link runner asks it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import shutil

from ..rundir import RunDir


def complete(rundir: RunDir, phase: int, generation: int) -> None:
    """The command of this phase is complete; the next one may begin."""
    rundir.write_phase(phase + 1, entering=True)
    enter(rundir, generation)


def enter(rundir: RunDir, generation: int) -> None:
    """Finish what a link that was killed in complete() had begun; nothing otherwise."""
    if not rundir.is_entering_phase():
        return
    rundir.done_file.unlink(missing_ok=True)
    rundir.outcome_file(generation).unlink(missing_ok=True)
    rundir.levels_file.unlink(missing_ok=True)
    shutil.rmtree(rundir.restarts, ignore_errors=True)
    rundir.write_phase(rundir.phase(), entering=False)
