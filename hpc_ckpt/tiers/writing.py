"""How a file image gets onto a disk: in chunks, each hashed and written once, at a given pace.

Direct I/O where the file system has it, so that a checkpoint neither waits for the page cache
nor drives the program's data out of it; buffered otherwise. What is written where, and when it
counts, is directory.py's.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import ctypes
import errno
import math
import os
import threading
import time
from collections.abc import Callable
from functools import partial

from .. import fsio
from ..format.manifest import digest
from ..parallel import Row, start_threads

THREADS = 2
"""At full speed: one writes, the other hashes, and writes too when that is done. Each doing both
by turns leaves the disk waiting (ADR 6)."""

BEHIND = 4
"""So many chunks the page cache may be ahead of the disk: the fsync at the end is short, and
what is written moves as fast as the disk does."""

_START = 2
"""SYNC_FILE_RANGE_WRITE."""
_FINISH = 1 | 2 | 4
"""And wait, before and after."""
_LEFT_TO_FSYNC = frozenset(
    (errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.ESPIPE, errno.ENOTSUP, errno.EINTR)
)
"""Not to be had here, or interrupted: it says nothing of the bytes."""


class Pace:
    """How fast a persist may go: paced, in one thread, until somebody is in a hurry.

    One for each persist; whoever waits for it may call hurry() from any thread.
    """

    def __init__(
        self,
        bytes_per_s: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._hurry = threading.Event()
        self._began_s: float | None = None
        self._done = 0
        self._help: Callable[[], None] | None = None
        self.waited_s = 0.0
        """Seconds spent on holding back."""
        self.moved_s = -math.inf
        """When the last chunk was written."""
        if bytes_per_s is None:
            self._hurry.set()

    @property
    def hurried(self) -> bool:
        return self._hurry.is_set()

    @property
    def threads(self) -> int:
        return THREADS if self.hurried else 1

    def hurry(self) -> None:
        """No more holding back, and one more thread for what is left."""
        if self._hurry.is_set():
            return
        self._hurry.set()
        work = self._help
        if work is not None:
            # Not this thread: whoever is in a hurry must be able to give up on a file system.
            start_threads(THREADS - 1, work, "hpc-ckpt-hurry")

    def hold(self, work: Callable[[], None] | None) -> None:
        """What hurry() helps with."""
        self._help = work

    def took(self, nbytes: int) -> None:
        """Called after so many bytes; waits until they may have been written."""
        self.moved_s = now = self._clock()
        if self._bytes_per_s is None or self._hurry.is_set():
            return
        if self._began_s is None:
            self._began_s = now
        self._done += nbytes
        ahead = self._began_s + self._done / self._bytes_per_s - now
        if ahead > 0:
            self._hurry.wait(ahead)
            self.moved_s = self._clock()
            self.waited_s += self.moved_s - now


def write_image(descriptor: int, image: memoryview, chunk: int, pace: Pace) -> tuple[str, ...]:
    """Write the image from the file's beginning; returns one digest per chunk.

    Not yet synced. Memory that begins at a page and is readable to the end of its last one is
    written directly; the file is cut to its size afterwards.
    """
    return _ImageWrite(descriptor, image, chunk, pace).run()


class _ImageWrite:
    def __init__(self, descriptor: int, image: memoryview, chunk: int, pace: Pace) -> None:
        self._descriptor = descriptor
        self._image = image
        self._chunk = chunk
        self._pace = pace
        self._digests = [""] * -(-len(image) // chunk)
        self._whole = _whole_pages(image)
        self._direct = self._whole is not None and fsio.set_direct(descriptor, direct=True)

    def run(self) -> tuple[str, ...]:
        # Rows know this object and not the other way round: a cycle would keep the image alive.
        hashes = Row(len(self._digests), self._hash_one)
        writes = Row(len(self._digests), partial(self._write_one, hashes))

        def hash_then_write() -> None:
            hashes.help()
            writes.help()

        self._pace.hold(hash_then_write)
        try:
            with hashes, writes:
                start_threads(self._pace.threads - 1, hash_then_write)
                writes.help()
                if not writes.failed:
                    hashes.help()
        finally:
            self._pace.hold(None)
        writes.check()
        hashes.check()
        if self._whole is not None:
            os.ftruncate(self._descriptor, len(self._image))
        return tuple(self._digests)

    def _hash_one(self, number: int) -> None:
        self._digests[number] = digest(self._view(number))

    def _write_one(self, hashes: Row, number: int) -> None:
        if not self._pace.hurried:
            hashes.help(1)
        view = self._view(number)
        self._write(view, number * self._chunk)
        fsio.reached("shard.chunk")
        self._pace.took(len(view))

    def _view(self, number: int) -> memoryview:
        start = number * self._chunk
        return self._image[start : start + self._chunk]

    def _write(self, view: memoryview, start: int) -> None:
        if self._direct and self._whole is not None:
            try:
                whole = self._whole[start : start + fsio.round_up(len(view))]
                fsio.write_at(self._descriptor, whole, start)
            except OSError as error:
                if not fsio.lacks_direct(error):
                    raise
                # Said only at the first write by file systems that take the flag at open.
                fsio.set_direct(self._descriptor, direct=False)
                self._direct = False
            else:
                return
        fsio.write_at(self._descriptor, view, start)
        _write_back(self._descriptor, start, len(view), _START)
        behind = start - BEHIND * self._chunk
        if behind >= 0:
            _write_back(self._descriptor, behind, self._chunk, _FINISH)


def write_chunk(descriptor: int, chunk: memoryview, offset: int, *, direct: bool) -> bool:
    """Whole pages directly, the rest of the file's last one not; whether direct still works."""
    whole = len(chunk) // fsio.PAGE * fsio.PAGE if direct else 0
    try:
        fsio.write_at(descriptor, chunk[:whole], offset)
    except OSError as error:
        if not fsio.lacks_direct(error):
            raise
        whole = 0
    if whole < len(chunk):
        direct = False
        fsio.set_direct(descriptor, direct=False)
        fsio.write_at(descriptor, chunk[whole:], offset + whole)
    return direct


def _whole_pages(image: memoryview) -> memoryview | None:
    """The image up to the end of its last page, if it begins at a page and that is its memory.

    Only a view of a longer exporter can be lengthened: the exporter tells.
    """
    if not len(image) or image.obj is None or image.readonly:
        return None
    base = memoryview(image.obj).cast("B")
    start = fsio.address(image) - fsio.address(base)
    end = start + fsio.round_up(len(image))
    if fsio.address(image) % fsio.PAGE or end > len(base):
        return None
    return base[start:end]


def _write_back(descriptor: int, start: int, length: int, how: int) -> None:
    """Buffered: let the disk begin now, or wait until it has these bytes.

    What it could not write is raised: the kernel tells of that once, and the fsync at the end
    would succeed.
    """
    if _sync_file_range is None:
        return
    begin, size = ctypes.c_int64(start), ctypes.c_int64(length)
    if _sync_file_range(descriptor, begin, size, how) == -1:
        number = ctypes.get_errno()
        if number not in _LEFT_TO_FSYNC:
            raise OSError(number, os.strerror(number))


_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
