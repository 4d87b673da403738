"""Memory that is filled from a file system which may hang, and may be taken back at any moment.

A read that hangs in the kernel cannot be called off, and writes into the memory it was given
whenever its bytes arrive. So reads that may be given up on go into memory of the reading thread,
and from there into place through a landing: once that is closed, nothing is copied any more.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import BrokenOff


class Landing:
    """Open until closed; safe to share between threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = False
        self._copying = 0
        self._landed = 0

    @property
    def landed(self) -> int:
        """Bytes that have arrived so far: while it grows, somebody is at work."""
        return self._landed

    @contextmanager
    def copying(self, nbytes: int) -> Iterator[None]:
        """Inside, bytes that have been read are copied into place; no file is touched.

        BrokenOff if it is closed already.
        """
        with self._changed:
            if self._closed:
                raise BrokenOff("given up: its bytes came too late")
            self._copying += 1
        try:
            yield
        finally:
            with self._changed:
                self._copying -= 1
                self._landed += nbytes
                self._changed.notify_all()

    def close(self) -> None:
        """When this returns nothing is written into the memory any more, now or later."""
        with self._changed:
            self._closed = True
            # A copy in memory: this ends, whatever the file system does.
            self._changed.wait_for(lambda: self._copying == 0)
