"""Buffers made before they are needed, in the background: the kernel finds their pages there.

How many a camera has, and how large they are, is its own affair.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
from collections.abc import Callable

from .. import preflight
from ..errors import one_line
from .persist import Worker
from .snapshot import Camera

log = logging.getLogger("hpc_ckpt")

WORTH_WARMING = 64 * 1024**2


class Warming:
    """At most one buffer at a time, in a thread of its own: a save may hang in its file system."""

    def __init__(self, camera: Camera) -> None:
        self._camera = camera
        self._worker = Worker("hpc-ckpt-buffers")
        self.active = False

    def first(self, size: int) -> None:
        """So that the first save need not."""
        if size >= WORTH_WARMING:
            self._in_background(lambda: self._camera.warm(size))

    def second(self) -> None:
        """A save found no buffer: make the second one, if there is memory for it."""
        if not self.active and self._camera.can_grow:
            self._in_background(self.grow)

    def grow(self, *, last: bool = False) -> None:
        if preflight.check_memory(self._camera.size) is None:
            self._camera.grow(last=last)

    def wait(self, timeout: float | None = None) -> bool:
        return self._worker.wait(timeout)

    def close(self) -> None:
        self._worker.close(0.0)

    def _in_background(self, work: Callable[[], None]) -> None:
        self.active = True
        try:
            self._worker.start(lambda: self._warm(work))
        except RuntimeError as error:  # no thread: the next save makes its own buffer
            self.active = False
            log.warning("no thread for a buffer: %s", error)

    def _warm(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - a device's allocator raises what it likes; the next save asks again
            log.warning("no memory for a buffer yet: %s", one_line(error))
        finally:
            self.active = False
