"""Snapshot: a consistent copy of the state in memory, already laid out as the file image.

Copies; it neither writes nor decides when. The buffer is made once and reused, so a save costs
one copy and no allocation.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..format.image import DATA_ALIGNMENT, ImageLayout, lay_out
from ..state.tree import Encoded, Leaf, copy_into, encode


@dataclass(frozen=True)
class Snapshot:
    """One rank's state as it will lie on disk. Valid until the buffer's next take()."""

    tree: Any
    aliases: dict[str, str]
    layouts: tuple[ImageLayout, ...]
    images: tuple[memoryview, ...]

    @property
    def size(self) -> int:
        return sum(layout.size for layout in self.layouts)


def check(state: object) -> None:
    """Raise UnsupportedState now rather than at the first save; copies nothing."""
    lay_out(encode(state).leaves)


class ImageBuffer:
    """Page-aligned memory that is the file image; grows, and is reused otherwise."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def take(self, state: object) -> Snapshot:
        """Copy the state. When this returns, training may change every object again."""
        encoded = encode(state)
        layouts = lay_out(encoded.leaves)
        images = self._images(layouts)
        for layout, image in zip(layouts, images, strict=True):
            image[: len(layout.header)] = layout.header
        _copy(encoded, layouts, images)
        return Snapshot(encoded.tree, encoded.aliases, layouts, images)

    def _images(self, layouts: Iterable[ImageLayout]) -> tuple[memoryview, ...]:
        starts, end = [], 0
        for layout in layouts:
            starts.append((end, end + layout.size))
            end += -(-layout.size // DATA_ALIGNMENT) * DATA_ALIGNMENT
        view = memoryview(self._of_size(end))
        return tuple(view[start:stop] for start, stop in starts)

    def _of_size(self, size: int) -> mmap.mmap:
        if self._memory is None or len(self._memory) < size:
            self._memory = None  # given back before the larger one is asked for
            self._memory = _allocate(size)
        return self._memory


def _allocate(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Data workers are forked: without this every page written after a fork would exist twice.
    memory.madvise(mmap.MADV_DONTFORK)
    return memory


def _copy(
    encoded: Encoded, layouts: tuple[ImageLayout, ...], images: tuple[memoryview, ...]
) -> None:
    leaves: dict[str, Leaf] = {leaf.name: leaf for leaf in encoded.leaves}
    for layout, image in zip(layouts, images, strict=True):
        for name, (start, end) in layout.spans.items():
            copy_into(image[start:end], leaves[name].value)
