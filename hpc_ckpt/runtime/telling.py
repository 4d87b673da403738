"""What went wrong in the background comes out at a step: as a warning, or, if strict, an error."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import warnings

from ..errors import DamagedCheckpoint, one_line
from .parts import Parts

LEVEL = 4
"""Of the program's line that called step()."""


def tell_failures(parts: Parts) -> None:
    for problem in parts.room.take_problems(fresh=parts.engine.newest is None):
        warnings.warn(
            f"the next checkpoint may not fit: {problem}", RuntimeWarning, stacklevel=LEVEL
        )
    stuck = parts.engine.take_stuck()
    if stuck is not None:
        warnings.warn(stuck, RuntimeWarning, stacklevel=LEVEL)
    error = parts.engine.take_failure()
    if error is None:
        return
    if parts.strict:
        raise error
    damaged = isinstance(error, DamagedCheckpoint)
    what = "is damaged" if damaged else "could not be saved"
    warnings.warn(
        f"a checkpoint {what}; training goes on and the next save tries again: {one_line(error)}",
        RuntimeWarning,
        stacklevel=LEVEL,
    )
