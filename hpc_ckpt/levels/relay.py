"""Passes on what a program writes into a file of its own.

A program whose open files must be of a known size at a restart cannot write into the link's log.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path

LOOK_EVERY_S = 0.5
BLOCK = 1024**2


class Relay:
    """From the end of what the file has now; a file cut back goes on from its new end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = path.stat().st_size if path.exists() else 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpc-ckpt-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """What has been written by now is passed on."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            self._pass_on()
        self._pass_on()

    def _pass_on(self) -> None:
        with contextlib.suppress(OSError), self._path.open("rb") as stream:
            size = stream.seek(0, 2)
            self._at = min(self._at, size)
            stream.seek(self._at)
            while data := stream.read(BLOCK):
                sys.stdout.buffer.write(data)
                self._at += len(data)
            sys.stdout.buffer.flush()
