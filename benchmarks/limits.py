"""What the machine can do: memcpy, direct writes and direct reads of the same bytes."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from . import disk
from .clock import collect_garbage, seconds
from .memory import condition
from .states import Shape, build, views

PAGE = 4096
BLOCK = 16 << 20
SMALL = 64 << 10
"""Below this a piece is counted by its number, not by its bytes."""
THREADS = (1, 2)
NEW_READS = 2
"""Into new memory: at 4 GiB each takes 9 s on a host that takes free memory back."""


class Target:
    """Warm page-aligned memory with one place for each piece of a state."""

    def __init__(self, pieces: list[np.ndarray]) -> None:
        size = sum(piece.nbytes for piece in pieces)
        self.memory = private_memory(-(-size // PAGE) * PAGE)
        self.array = np.frombuffer(self.memory, dtype=np.uint8)
        self.array.fill(1)
        ends = np.cumsum([piece.nbytes for piece in pieces])
        places = [self.array[end - p.nbytes : end] for p, end in zip(pieces, ends, strict=True)]
        pairs = list(zip(places, pieces, strict=True))
        self.large = [pair for pair in pairs if pair[1].nbytes >= SMALL]
        self.small = [pair for pair in pairs if pair[1].nbytes < SMALL]

    def copy_large(self) -> None:
        _copy(self.large)

    def copy_small(self) -> None:
        _copy(self.small)

    def mover(self) -> Callable[[], None]:
        """The same copies by memmove, addresses looked up beforehand."""
        moves = [
            (place.ctypes.data, piece.ctypes.data, piece.nbytes)
            for place, piece in (*self.large, *self.small)
        ]

        def move() -> None:
            for to, source, size in moves:
                ctypes.memmove(to, source, size)

        return move


def private_memory(size: int) -> mmap.mmap:
    """In huge pages where the system has them: what a copy can be given at its best."""
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _copy(pairs: list[tuple[np.ndarray, np.ndarray]]) -> None:
    copyto = np.copyto
    for place, piece in pairs:
        copyto(place, piece)


def write(path: Path, memory: mmap.mmap, threads: int) -> None:
    """All of it with O_DIRECT, then fsync of the file and of the directory."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    try:
        _in_blocks(memory, threads, lambda view, offset: os.pwrite(descriptor, view, offset))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    disk.sync_directory(path.parent)


def read(path: Path, memory: mmap.mmap, threads: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        _in_blocks(memory, threads, lambda view, offset: os.preadv(descriptor, [view], offset))
    finally:
        os.close(descriptor)


def _in_blocks(memory: mmap.mmap, threads: int, move: Callable[[memoryview, int], int]) -> None:
    offsets = iter(range(0, len(memory), BLOCK))
    taking = threading.Lock()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                with taking:
                    offset = next(offsets, None)
                if offset is None:
                    return
                _whole(memoryview(memory)[offset : offset + BLOCK], offset, move)
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that asked
            failures.append(error)

    crew = [threading.Thread(target=work) for _ in range(threads - 1)]
    for one in crew:
        one.start()
    work()
    for one in crew:
        one.join()
    if failures:
        raise failures[0]


def _whole(view: memoryview, offset: int, move: Callable[[memoryview, int], int]) -> None:
    done = 0
    while done < len(view):
        moved = move(view[done:], offset + done)
        if moved <= 0:
            raise OSError(f"direct I/O stopped at byte {offset + done}")
        done += moved


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Every limit `saves` times; the state changes between copies as it does between saves."""
    state = build(job["gib"], Shape(job["shape"]))
    target = Target(views(state.flat()))
    move = target.mover()
    move()
    result: dict[str, Any] = {
        "state_bytes": state.size,
        "pieces": len(target.large) + len(target.small),
        "small_pieces": len(target.small),
        "memcpy_large_s": [],
        "memcpy_small_s": [],
        "memmove_s": [],
    }
    for _ in range(job["saves"] + 1):
        state.advance()
        collect_garbage()
        result["memcpy_large_s"].append(seconds(target.copy_large))
        result["memcpy_small_s"].append(seconds(target.copy_small))
        state.advance()
        result["memmove_s"].append(seconds(move))
    result["write_s"] = {str(threads): [] for threads in THREADS}
    result["read_s"] = {str(threads): [] for threads in THREADS}
    result["read_new_s"] = []
    for turn in range(job["saves"] + 1):
        for threads in THREADS:
            _measure_disk(Path(job["directory"]), target.memory, threads, result, warm=turn > 0)
    return result


def _measure_disk(
    directory: Path, memory: mmap.mmap, threads: int, result: dict[str, Any], *, warm: bool
) -> None:
    """The first turn is not kept: a device may be slow on blocks it never held."""
    place = directory / "raw"
    place.mkdir()
    written = seconds(lambda: write(place / "bytes", memory, threads))
    if warm:
        result["write_s"][str(threads)].append(written)
        took = seconds(lambda: read(place / "bytes", memory, threads))
        result["read_s"][str(threads)].append(took)
        if threads == THREADS[-1] and len(result["read_new_s"]) < NEW_READS:
            result["read_new_s"].append(_read_into_new_memory(place / "bytes", len(memory)))
    disk.remove(place)


def _read_into_new_memory(path: Path, size: int) -> float:
    """As a program has to that starts again: every page is touched for the first time."""
    condition(size)  # as for hpc_ckpt: a host that has to find the pages first is not measured
    with private_memory(size) as memory:
        return seconds(lambda: read(path, memory, THREADS[-1]))
