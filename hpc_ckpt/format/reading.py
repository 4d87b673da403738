"""Reading a shard: every chunk once, compared with its digest, and put where it belongs.

Opens and reads; which rules a checkpoint has to keep is verify.py's. Memory: two chunks, and
whatever the caller gives to be filled.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import bisect
import os
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .. import fsio
from ..parallel import Row
from .defects import Defect, DefectKind
from .manifest import ShardRecord, digest

THREADS = 2
"""One reads while the other compares: more gain nothing on any disk that was tried."""

# O_NONBLOCK: a FIFO under a shard's name must not hang the reader before it is refused.
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Broken(Exception):
    """Carries one defect out of a reading step."""

    def __init__(self, kind: DefectKind, file: str, detail: str) -> None:
        super().__init__(detail)
        self.defect = Defect(kind, file, detail)


@dataclass(frozen=True)
class Span:
    """Where a stretch of a file goes: bytes [start, end) of it into the target."""

    start: int
    end: int
    target: memoryview


# ── opening ───────────────────────────────────────────────────────────────────────────────
@contextmanager
def regular_file(directory: Path, name: str, missing: DefectKind) -> Iterator[int]:
    """An open descriptor; every way in which the file cannot be read becomes a defect."""
    with _opened(directory / name, name, missing, _OPEN_FLAGS, None) as descriptor:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Broken(DefectKind.UNREADABLE, name, "not a regular file")
        yield descriptor


@contextmanager
def shard_file(directory: Path, record: ShardRecord) -> Iterator[int]:
    """The shard in this checkpoint, or in the older one that holds it; its size is checked."""
    own, missing = record.holder is None, DefectKind.SHARD_MISSING
    # The path that the caller gave may be a link; a name in a manifest may not lead elsewhere.
    flags = _DIRECTORY_FLAGS if own else _DIRECTORY_FLAGS | os.O_NOFOLLOW
    holder = directory if own else directory.resolve().parent / str(record.holder)
    with (
        _opened(holder, record.place, missing, flags, None) as place,
        _opened(record.file, record.place, missing, _OPEN_FLAGS, place) as descriptor,
    ):
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Broken(DefectKind.UNREADABLE, record.place, "not a regular file")
        # Before anything is allocated: the manifest's number must be the file's.
        size = os.fstat(descriptor).st_size
        if size != record.size:
            detail = f"{size} bytes, the manifest says {record.size}"
            raise Broken(DefectKind.SHARD_SIZE, record.place, detail)
        yield descriptor


@contextmanager
def _opened(
    path: Path | str, name: str, missing: DefectKind, flags: int, place: int | None
) -> Iterator[int]:
    try:
        descriptor = os.open(path, flags, dir_fd=place)
    except FileNotFoundError:
        raise Broken(missing, name, "not there") from None
    except OSError as error:
        raise Broken(DefectKind.UNREADABLE, name, error.strerror or str(error)) from None
    try:
        yield descriptor
    except OSError as error:
        raise Broken(DefectKind.UNREADABLE, name, error.strerror or str(error)) from None
    finally:
        os.close(descriptor)


# ── reading ───────────────────────────────────────────────────────────────────────────────
def read_shard(descriptor: int, record: ShardRecord, spans: Sequence[Span] = ()) -> list[Defect]:
    """Read and check every chunk; fill the spans, which are sorted, do not overlap, and may
    leave out what nobody wants. One defect for each chunk that differs: then nothing in the
    spans may be used.
    """
    return _ShardRead(descriptor, record, spans).run()


class _ShardRead:
    def __init__(self, descriptor: int, record: ShardRecord, spans: Sequence[Span]) -> None:
        self._descriptor = descriptor
        self._record = record
        self._spans = spans
        self._starts = [span.start for span in spans]
        self._defects: dict[int, Defect] = {}
        self._own = threading.local()
        cached = fsio.is_cached(descriptor, record.size)
        self._direct = not cached and fsio.set_direct(descriptor, direct=True)

    def run(self) -> list[Defect]:
        Row(len(self._record.digests), self._chunk).run(THREADS)
        return [defect for _, defect in sorted(self._defects.items())]

    def _chunk(self, number: int) -> None:
        start = number * self._record.chunk
        end = min(start + self._record.chunk, self._record.size)
        place = self._whole_target(start, end)
        view = self._own_buffer()[: end - start] if place is None else place
        if self._read(view, start) != end - start:
            detail = f"ended inside chunk {number} while it was being read"
            raise Broken(DefectKind.SHARD_SIZE, self._record.place, detail)
        found, expected = digest(view), self._record.digests[number]
        if found != expected:
            detail = (
                f"chunk {number} (bytes {start} to {end}) has {found}, the manifest says {expected}"
            )
            self._defects[number] = Defect(DefectKind.CHUNK_DIGEST, self._record.place, detail)
        elif place is None:
            self._scatter(view, start, end)

    def _own_buffer(self) -> memoryview:
        """One chunk of this thread's own, with room for the last page of direct I/O."""
        if not hasattr(self._own, "buffer"):
            size = min(self._record.chunk, self._record.size)
            self._own.buffer = memoryview(fsio.allocate(size))
        buffer: memoryview = self._own.buffer
        return buffer

    def _whole_target(self, start: int, end: int) -> memoryview | None:
        """Where the chunk can be read to without a detour, if one span takes all of it."""
        index = bisect.bisect_right(self._starts, start) - 1
        if index < 0 or self._spans[index].end < end:
            return None
        span = self._spans[index]
        target = span.target[start - span.start : end - span.start]
        return None if self._direct and not fsio.is_aligned(target) else target

    def _scatter(self, view: memoryview, start: int, end: int) -> None:
        index = max(bisect.bisect_right(self._starts, start) - 1, 0)
        while index < len(self._spans) and self._spans[index].start < end:
            span = self._spans[index]
            low, high = max(span.start, start), min(span.end, end)
            if low < high:
                source = view[low - start : high - start]
                span.target[low - span.start : high - span.start] = source
            index += 1

    def _read(self, view: memoryview, offset: int) -> int:
        if not self._direct:
            return read_into(self._descriptor, view, offset)
        whole = view if fsio.is_aligned(view) else self._own_buffer()[: fsio.round_up(len(view))]
        try:
            return min(_read_direct(self._descriptor, whole, offset), len(view))
        except OSError as error:
            if not fsio.lacks_direct(error):
                raise
        # The other thread's next read may still fail this way and come here too.
        fsio.set_direct(self._descriptor, direct=False)
        return read_into(self._descriptor, view, offset)


def _read_direct(descriptor: int, whole: memoryview, offset: int) -> int:
    """Fill whole pages; a short count that is no multiple of a page is the file's end."""
    filled = 0
    while filled < len(whole):
        count = os.preadv(descriptor, [whole[filled:]], offset + filled)
        filled += count
        if count == 0 or count % fsio.PAGE:
            break
    return filled


def read_into(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill the view from the file at `offset`; returns less only at the end of the file."""
    filled = 0
    while filled < len(view):
        count = os.preadv(descriptor, [view[filled:]], offset + filled)
        if count == 0:
            break
        filled += count
    return filled


def spans_of(
    leaves: Mapping[str, tuple[int, int]], targets: Mapping[str, memoryview]
) -> list[Span]:
    """Spans for the leaves (where each lies in the file) that have a target of its size."""
    spans = []
    for name, (start, end) in leaves.items():
        target = targets.get(name)
        if target is None or start == end:
            continue
        if target.nbytes != end - start:
            raise ValueError(f"leaf {name!r}: {target.nbytes} bytes given for {end - start}")
        spans.append(Span(start, end, target.cast("B")))
    return sorted(spans, key=lambda span: span.start)
