"""What this process has published last, in whichever tier; and whether a save still may be."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from ..errors import BrokenOff
from ..format.manifest import Manifest
from ..rundir import CheckpointKey
from .orders import Order


class Published:
    """Asked and told by the threads that commit."""

    def __init__(self, guard: Callable[[], None]) -> None:
        self._guard = guard
        self._lock = threading.Lock()
        self._last: Manifest | None = None
        self.newest: CheckpointKey | None = None
        """Of this lineage: published here, else the restored one."""
        self.lasting: CheckpointKey | None = None
        """The newest of them that the next link can find."""

    def stands(self, key: CheckpointKey, *, lasts: bool) -> None:
        """It is in some tier; `lasts`: in one that outlives the job."""
        with self._lock:  # the drain, and a save that hung, come between
            self.newest = key if self.newest is None else max(self.newest, key)
            if lasts:
                self.lasting = key if self.lasting is None else max(self.lasting, key)

    def of(self, key: CheckpointKey) -> Manifest | None:
        """What there is of the same step, perhaps in another tier."""
        last = self._last
        same = last is not None and (last.generation, last.step) == (key.generation, key.step)
        return last if same else None

    def check(self, order: Order, key: CheckpointKey) -> None:
        """Raises if the save may not be published: by this process, or not any more."""
        self._guard()
        if order.given_up and self.of(key) is not None:
            raise BrokenOff(f"step {key.step} was saved again while this save of it hung")

    def add(self, manifest: Manifest, revision: int) -> None:
        numbered = replace(manifest, revision=revision)
        with self._lock:
            if self._last is None or self._last.key <= numbered.key:
                self._last = numbered
