"""Storage that is full or away for a while: waited for before a link, passed over during one.

Standard library only: the link runner asks it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import errno
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from ..errors import HpcCkptError

log = logging.getLogger("hpc_ckpt.link")

STORAGE_RETRY_S = 30.0
STORAGE_PATIENCE_S = 900.0
"""Then the token is given up; with 20 of them somebody has five hours to make room."""

_MISTAKES = frozenset({
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ELOOP,
    errno.ENAMETOOLONG,
})  # fmt: skip

T = TypeVar("T")


class ToldToStop(Exception):
    """A signal came before the lease was taken."""


def patiently(
    act: Callable[[], T],
    *,
    passes: Callable[[Exception], bool] | None = None,
    sleep: Callable[[float], object] | None = None,
) -> T:
    """A file system that is full or away for a while costs waiting, not the whole array."""
    end = time.monotonic() + STORAGE_PATIENCE_S
    while True:
        try:
            return act()
        except (HpcCkptError, OSError) as error:
            if not (passes or by_storage)(error) or time.monotonic() >= end:
                raise
            log.warning("%s; tried again in %g s", error, STORAGE_RETRY_S)
            (sleep or sleep_unless_told)(STORAGE_RETRY_S)


def by_storage(error: Exception) -> bool:
    return isinstance(error, OSError) or isinstance(error.__cause__, OSError)


def by_mistake(error: Exception) -> bool:
    """Of a place that was never used before: whoever named it cannot have it."""
    found = error if isinstance(error, OSError) else error.__cause__
    return isinstance(found, OSError) and found.errno in _MISTAKES


def sleep_unless_told(seconds: float) -> None:
    """TERM is blocked in the runner, so that it waits to be asked for."""
    if signal.sigtimedwait({signal.SIGTERM}, seconds) is not None:
        raise ToldToStop


def why_unread(path: Path) -> OSError | None:
    """What storage says of a file of a run; None: it answers, also that the run is gone."""
    try:
        path.read_bytes()
    except FileNotFoundError as error:
        # Of storage that is not mounted not even the place for runs is there.
        return None if os.path.exists(path.parent.parent) else error  # noqa: PTH110 - never raises
    except OSError as error:
        return error
    return None


class Unseen:
    """`with` this, what storage does not answer is not seen now, and said once."""

    def __init__(self) -> None:
        self._said = False

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, OSError):
            return False
        if not self._said:
            self._said = True
            log.warning("not seen now, and looked at again: %s", error)
        return True
