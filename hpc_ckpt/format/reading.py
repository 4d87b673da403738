"""Reading a shard: every chunk once, compared with its digest, and put where it belongs.

Opens and reads; which rules a checkpoint has to keep is verify.py's. Memory: a piece for each
thread, and whatever the caller gives to be filled.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import bisect
import ctypes
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

from .. import fsio
from ..errors import BrokenOff
from ..parallel import Row
from .defects import Defect, DefectKind
from .image import StoredLeaf
from .landing import Landing
from .manifest import Digester, ShardRecord


class Manner(NamedTuple):
    """How a shard is read: by so many threads, each in pieces of this size."""

    threads: int
    piece: int


FROM_DISK = Manner(6, 2 * 1024**2)
"""While some compare and copy, enough reads are under way to keep a disk busy (ADR 9)."""
FROM_CACHE = Manner(2, 512 * 1024)
"""Every byte is a copy by a core; a piece stays in that core's own cache until it is digested."""

ALIGNMENT = 64
"""Of torch's own memory on the CPU."""
_FEW = 64
_LARGE = 64 * 1024
_ARENA = 128 * 1024**2

# O_NONBLOCK: a FIFO under a shard's name must not hang the reader before it is refused.
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Broken(Exception):
    """Carries one defect out of a reading step."""

    def __init__(self, kind: DefectKind, file: str, detail: str, *, passing: bool = False) -> None:
        super().__init__(detail)
        self.defect = Defect(kind, file, detail, passing)


def _refused_by_system(name: str, error: OSError) -> Broken:
    detail = error.strerror or str(error)
    lasting = error.errno in (errno.ELOOP, errno.ENOTDIR)  # not what it should be
    return Broken(DefectKind.UNREADABLE, name, detail, passing=not lasting)


class Span(NamedTuple):
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
        raise _refused_by_system(name, error) from None
    try:
        yield descriptor
    except OSError as error:
        raise _refused_by_system(name, error) from None
    finally:
        os.close(descriptor)


# ── reading ───────────────────────────────────────────────────────────────────────────────
def never() -> bool:
    return False


def read_shard(
    descriptor: int,
    record: ShardRecord,
    spans: Sequence[Span] = (),
    stop: Callable[[], bool] = never,
    landing: Landing | None = None,
) -> list[Defect]:
    """Read and check every chunk; fill the spans, which are sorted, do not overlap, and may
    leave out what nobody wants. One defect for each chunk that differs: then nothing in the
    spans may be used. BrokenOff once `stop` says so, which is asked before each chunk and may make
    the reader wait; or once the landing is closed, through which everything gets into the spans if
    there is one. Who may break it off is in no hurry: then one thread reads.
    """
    return _ShardRead(descriptor, record, spans, stop, landing).run()


class _ShardRead:
    def __init__(
        self,
        descriptor: int,
        record: ShardRecord,
        spans: Sequence[Span],
        stop: Callable[[], bool],
        landing: Landing | None,
    ) -> None:
        self._stop = stop
        self._landing = landing
        self._descriptor = descriptor
        self._record = record
        self._spans = spans
        self._starts = [span.start for span in spans]
        self._defects: dict[int, Defect] = {}
        self._own = threading.local()
        cached = fsio.is_cached(descriptor, record.size)
        self._manner = FROM_CACHE if cached else FROM_DISK
        self._direct = not cached and fsio.set_direct(descriptor, direct=True)

    def run(self) -> list[Defect]:
        threads = self._manner.threads if self._stop is never else 1
        Row(len(self._record.digests), self._chunk).run(threads)
        return [defect for _, defect in sorted(self._defects.items())]

    def _chunk(self, number: int) -> None:
        if self._stop():
            raise BrokenOff(f"{self._record.place}: broken off at chunk {number}")
        start = number * self._record.chunk
        end = min(start + self._record.chunk, self._record.size)
        digester = Digester()
        # In pieces that are still in the processor's cache when they are digested and copied.
        for low in range(start, end, self._manner.piece):
            high = min(low + self._manner.piece, end)
            views = self._read(low, high)
            if views is None:
                detail = f"ended inside chunk {number} while it was being read"
                raise Broken(DefectKind.SHARD_SIZE, self._record.place, detail)
            for view in views:
                digester.update(view)
        found, expected = digester.text(), self._record.digests[number]
        if found != expected:
            detail = (
                f"chunk {number} (bytes {start} to {end}) has {found}, the manifest says {expected}"
            )
            self._defects[number] = Defect(DefectKind.CHUNK_DIGEST, self._record.place, detail)

    def _read(self, low: int, high: int) -> Sequence[memoryview] | None:
        """Where the bytes [low, high) of the file are now; None if it ended before."""
        if self._direct:
            try:
                return self._read_directly(low, high)
            except OSError as error:
                if not fsio.lacks_direct(error):
                    raise
            self._give_up_direct()
        return self._read_buffered(low, high)

    def _read_directly(self, low: int, high: int) -> Sequence[memoryview] | None:
        views = self._spanned(low, high)
        if views is not None and len(views) == 1 and fsio.is_aligned(views[0]):
            if _read_pages(self._descriptor, views[0], low) == high - low:
                return views
            return self._read_after_all(low, high)
        whole = self._own_buffer()[: fsio.round_up(high - low)]
        if _read_pages(self._descriptor, whole, low) < high - low:
            return self._read_after_all(low, high)
        return self._scattered(whole[: high - low], low, high)

    def _read_after_all(self, low: int, high: int) -> Sequence[memoryview] | None:
        """A direct read that stops in the middle of a page: the file's end, or a network's way."""
        self._give_up_direct()
        return self._read_buffered(low, high)

    def _give_up_direct(self) -> None:
        """Another thread's next read may still be direct and come here too."""
        fsio.set_direct(self._descriptor, direct=False)
        self._direct = False

    def _read_buffered(self, low: int, high: int) -> Sequence[memoryview] | None:
        views = self._spanned(low, high)
        if views is not None:
            return views if _read_views(self._descriptor, views, low) else None
        view = self._own_buffer()[: high - low]
        if read_into(self._descriptor, view, low) < high - low:
            return None
        return self._scattered(view, low, high)

    def _own_buffer(self) -> memoryview:
        """One piece of this thread's own, with room for the last page of direct I/O."""
        if not hasattr(self._own, "buffer"):
            size = min(self._manner.piece, self._record.size)
            self._own.buffer = memoryview(fsio.allocate(size))
        buffer: memoryview = self._own.buffer
        return buffer

    def _spanned(self, low: int, high: int) -> list[memoryview] | None:
        """The places of all these bytes, in order, if each has one and they are not too many.

        None with a landing: no read may know of them.
        """
        if self._landing is not None:
            return None
        views: list[memoryview] = []
        index = max(bisect.bisect_right(self._starts, low) - 1, 0)
        while low < high:
            if index == len(self._spans) or len(views) == _FEW:
                return None
            span = self._spans[index]
            if not span.start <= low < span.end:
                return None
            end = min(span.end, high)
            views.append(span.target[low - span.start : end - span.start])
            low, index = end, index + 1
        return views

    def _scattered(self, view: memoryview, start: int, end: int) -> Sequence[memoryview]:
        """Copied to where it belongs; what nobody wants is left out."""
        with self._landing.copying(len(view)) if self._landing is not None else nullcontext():
            self._scatter(view, start, end)
        return (view,)

    def _scatter(self, view: memoryview, start: int, end: int) -> None:
        index = max(bisect.bisect_right(self._starts, start) - 1, 0)
        while index < len(self._spans) and self._spans[index].start < end:
            span = self._spans[index]
            low, high = max(span.start, start), min(span.end, end)
            if low < high:
                target = span.target[low - span.start : high - span.start]
                _copy(target, view[low - start : high - start])
            index += 1


def _copy(target: memoryview, source: memoryview) -> None:
    """Large ones without the interpreter's lock: the other threads go on meanwhile."""
    if len(source) < _LARGE or len(target) != len(source):
        target[:] = source  # raises where they differ
    else:
        ctypes.memmove(fsio.address(target), fsio.address(source), len(source))


def _read_pages(descriptor: int, whole: memoryview, offset: int) -> int:
    """Fill whole pages; a short count that is no multiple of a page is the file's end."""
    filled = 0
    while filled < len(whole):
        count = os.preadv(descriptor, [whole[filled:]], offset + filled)
        filled += count
        if count == 0 or count % fsio.PAGE:
            break
    return filled


def _read_views(descriptor: int, views: Sequence[memoryview], offset: int) -> bool:
    """Fill them one after the other; False if the file ended before."""
    wanted = sum(map(len, views))
    count = os.preadv(descriptor, views, offset)
    if count == wanted:
        return True
    for view in views:  # less than asked for is allowed, and rare
        if read_into(descriptor, view, offset) < len(view):
            return False
        offset += len(view)
    return True


def read_into(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill the view from the file at `offset`; returns less only at the end of the file."""
    filled = 0
    while filled < len(view):
        count = os.preadv(descriptor, [view[filled:]], offset + filled)
        if count == 0:
            break
        filled += count
    return filled


def arenas(
    leaves: Iterable[tuple[str, StoredLeaf]],
) -> tuple[dict[str, memoryview], list[Span]]:
    """Memory for leaves given in file order, and the spans that fill it, in file order too.

    Every leaf is aligned as torch aligns its own: sums over memory that is aligned otherwise may
    differ in their last bits. Leaves that follow each other in the file, and are aligned there,
    share pages that begin where the file's do: whole chunks of them are read into place.
    """
    found: dict[str, memoryview] = {}
    spans: list[Span] = []
    for run in _runs(leaves):
        start = run[0][1].start
        places, size = _placed([leaf for _, leaf in run])
        # Inherited: a data worker that is forked may look at what was restored.
        memory = memoryview(fsio.allocate(size, inherited=True))
        for (name, leaf), place in zip(run, places, strict=True):
            found[name] = memory[place : place + leaf.end - leaf.start]
        if _is_aligned(start):
            spans.append(Span(start, run[-1][1].end, memory[places[0] :][: run[-1][1].end - start]))
        else:
            spans += [Span(leaf.start, leaf.end, found[name]) for name, leaf in run]
    return found, [span for span in spans if span.start < span.end]


def _placed(run: list[StoredLeaf]) -> tuple[list[int], int]:
    """Where each leaf of a run lies in its memory, and the size of that."""
    if _is_aligned(run[0].start):
        skip = run[0].start % fsio.PAGE - run[0].start
        return [leaf.start + skip for leaf in run], run[-1].end + skip
    places, size = [], 0
    for leaf in run:
        places.append(size)
        size += -(-(leaf.end - leaf.start) // ALIGNMENT) * ALIGNMENT
    return places, size


def _runs(leaves: Iterable[tuple[str, StoredLeaf]]) -> Iterator[list[tuple[str, StoredLeaf]]]:
    """Neighbours that are all aligned in the file, or all not."""
    run: list[tuple[str, StoredLeaf]] = []
    for name, leaf in leaves:
        if run and not _belongs(leaf, run[0][1], run[-1][1]):
            yield run
            run = []
        run.append((name, leaf))
    if run:
        yield run


def _belongs(leaf: StoredLeaf, first: StoredLeaf, last: StoredLeaf) -> bool:
    if leaf.start != last.end or leaf.start - first.start >= _ARENA:
        return False
    return _is_aligned(leaf.start) == _is_aligned(first.start)


def _is_aligned(position: int) -> bool:
    return position % ALIGNMENT == 0


def spans_of(leaves: Mapping[str, StoredLeaf], targets: Mapping[str, memoryview]) -> list[Span]:
    """Spans for the leaves, given in file order, that have a target; it must be of their size."""
    spans = []
    for name, leaf in leaves.items():
        target = targets.get(name)
        if target is None or leaf.start == leaf.end:
            continue
        if target.nbytes != leaf.end - leaf.start:
            size = leaf.end - leaf.start
            raise ValueError(f"leaf {name!r}: {target.nbytes} bytes given for {size}")
        spans.append(Span(leaf.start, leaf.end, target.cast("B")))
    return spans
