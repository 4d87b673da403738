"""What this process has published last, in whichever tier; and whether a save still may be."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

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
        self._last: Manifest | None = None

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
        if self._last is None or self._last.key <= numbered.key:
            self._last = numbered
