"""How long a call takes."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import gc
import time
from collections.abc import Callable


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def rest(gib: float) -> None:
    """Before a first save, for everybody: as a program has that has just begun to train."""
    time.sleep(2.0 + gib)


def collect_garbage() -> None:
    """Not in the middle of what is timed."""
    gc.collect()
