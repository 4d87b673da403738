"""Limits measured between hpc_ckpt's own saves and restores, in the same process.

A disk under a virtual machine, and the caches of its host, change within seconds: what a limit
is worth is seen only right beside what is set against it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from pathlib import Path
from typing import Any

from . import disk
from .clock import collect_garbage, seconds
from .limits import THREADS, Target, read, write
from .states import Flat, views


class Beside:
    """Its memory holds a copy of the state, and exists before anything else is measured."""

    def __init__(self, state: Flat, directory: Path) -> None:
        self._state = state
        self._target = Target(views(state.flat()))
        self._copy()
        self._raw = directory.with_name(f"{directory.name}-raw")
        self._twin = directory / "twin"
        self._seen: dict[str, Any] = {}

    def copy(self) -> None:
        """The memcpy loop, after a step that changed every tensor."""
        self._state.advance()
        collect_garbage()
        self._add("memcpy_large_s", seconds(self._target.copy_large))
        self._add("memcpy_small_s", seconds(self._target.copy_small))

    def copy_restored(self) -> None:
        """The same of what a restore has just filled."""
        self._add("memcpy_s", seconds(self._copy))

    def write(self) -> None:
        """Raw, by one thread and by two."""
        for threads in THREADS:
            self._raw.mkdir()
            took = seconds(lambda n=threads: write(self._raw / "bytes", self._target.memory, n))
            self._seen.setdefault("write_s", {}).setdefault(str(threads), []).append(took)
            disk.remove(self._raw)

    def leave_twin(self) -> None:
        """A file of the same bytes, beside the checkpoint that restores read."""
        self._twin.mkdir()
        write(self._twin / "bytes", self._target.memory, THREADS[-1])

    def read_twin(self) -> None:
        disk.drop_cache(self._twin)
        took = seconds(lambda: read(self._twin / "bytes", self._target.memory, THREADS[-1]))
        self._add("read_s", took)

    def result(self) -> dict[str, Any]:
        return self._seen

    def _copy(self) -> None:
        self._target.copy_large()
        self._target.copy_small()

    def _add(self, key: str, took_s: float) -> None:
        self._seen.setdefault(key, []).append(took_s)
