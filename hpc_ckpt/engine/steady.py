"""Leaves that do not change: which to expect, and where their bytes lie already.

What to expect is a guess from samples, and may be wrong. Whether bytes are the same is decided
by their digests alone.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ..format.image import ImageLayout
from ..format.manifest import CHUNK, ShardRecord, digest
from .snapshot import Snapshot

LEAST = 64 * 1024
"""Smaller leaves are written each time: a file of their own would cost more."""
SHARE = 0.1
"""New steady leaves are set apart only if they are this part of all bytes."""

_PAGE = 4096


class Steady:
    """Learns from each snapshot; used by one persist thread alone, but for what others read."""

    def __init__(self, expected: Iterable[str] = (), known: Iterable[ShardRecord] = ()) -> None:
        self.expected = frozenset(expected)
        """Names of leaves to be set apart in the next snapshot."""
        self._known = {record.digests: record for record in known}
        self._samples: dict[str, tuple[str, ...]] = {}
        self._step: int | None = None
        self._refused: set[str] = set()
        """Changed although they were expected not to: not guessed at again."""
        self._forgotten: set[str] = set()
        """Holders that are damaged. Another thread finds that out: a save under way may still
        name one, and must not bring it back."""

    def held(
        self,
        layout: ImageLayout,
        image: memoryview,
        chunk: int = CHUNK,
        *,
        known: tuple[str, ...] | None = None,
    ) -> ShardRecord | None:
        """The record of the older shard with exactly these bytes, if there is one.

        `known`: the image's digests, if somebody has made them.
        """
        if not any(record.size == layout.size for record in self._known.values()):
            return None
        digests = known or tuple(
            digest(image[start : start + chunk]) for start in range(0, layout.size, chunk)
        )
        found = self._known.get(digests)
        if found is None:
            self._refuse(layout, digests, chunk)
        elif found.chunk == chunk and found.holder not in self._forgotten:
            return found
        return None

    def _refuse(self, layout: ImageLayout, digests: tuple[str, ...], chunk: int) -> None:
        """Whatever lies in a chunk that changed is not steady."""
        for record in self._known.values():
            if record.size != layout.size or record.chunk != chunk:
                continue
            pairs = zip(digests, record.digests, strict=True)
            changed = {number for number, (a, b) in enumerate(pairs) if a != b}
            for name, (start, end) in layout.spans.items():
                if changed & set(range(start // chunk, -(-end // chunk))):
                    self._refused.add(name)
        self.expected = frozenset(self.expected - self._refused)

    def forget(self, holder: str) -> None:
        """What lies there is damaged: its bytes are written again."""
        self._forgotten.add(holder)
        self._known = {d: record for d, record in self._known.items() if record.holder != holder}

    def left_to_write(self, snapshot: Snapshot, is_there: Callable[[str], bool]) -> int:
        """Bytes of a snapshot that no older checkpoint is expected to hold.

        `is_there`: whether a checkpoint of that name lies where it is to be written.
        """
        known = {r.size for r in self._known.values() if is_there(r.holder or "")}
        return sum(
            layout.size
            for layout, steady in zip(snapshot.layouts, snapshot.steady, strict=True)
            if not (steady and layout.size in known)
        )

    def committed(self, record: ShardRecord, holder: str) -> None:
        """A shard of steady leaves is durable; from now on it can be referred to."""
        holder = record.holder or holder
        if holder not in self._forgotten:
            self._known = {record.digests: replace(record, holder=holder)}

    def suggest(self, found: Mapping[str, tuple[int, int]]) -> None:
        """Leaves that nothing is known to change: bytes of each, and of all leaves together."""
        large = {name: size for name, (size, _) in found.items() if size >= LEAST}
        total = next((total for _, total in found.values()), 0)
        self._expect(large, total)

    def _expect(self, found: Mapping[str, int], total: int) -> None:
        fresh = {name: size for name, size in found.items() if name not in self._refused}
        if fresh and sum(fresh.values()) >= SHARE * total:
            self.expected = frozenset({*self.expected, *fresh})

    def learn(self, snapshot: Snapshot, step: int) -> None:
        """Look at a few pages of each large leaf; equal at two steps makes it a candidate."""
        if step == self._step:
            return
        self._step = step
        found: dict[str, int] = {}
        for layout, image, steady in zip(
            snapshot.layouts, snapshot.images, snapshot.steady, strict=True
        ):
            for name, (start, end) in layout.spans.items():
                if steady or end - start < LEAST or name in self._refused:
                    continue
                before = self._samples.get(name, ())
                sample = _sample(image, start, end, before)
                if sample == before:
                    found[name] = end - start
                self._samples[name] = sample
        self._expect(found, snapshot.size)


def _sample(image: memoryview, start: int, end: int, before: tuple[str, ...]) -> tuple[str, ...]:
    """Digests of its first, middle and last page, up to the first that differs from before.

    Most leaves change at every step: one page says so. Equal to `before` it is only whole.
    """
    middle = (start + end) // 2
    found: list[str] = []
    for number, page in enumerate((start, middle, end - _PAGE)):
        found.append(digest(image[page : page + _PAGE]))
        if number < len(before) and found[number] != before[number]:
            break
    return tuple(found)
