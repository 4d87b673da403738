"""Files as the harness sees them: sync, drop from the page cache, warm, count, remove."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

BLOCK = 16 << 20
SETTLE_S = 0.1


def files(path: Path) -> list[Path]:
    """Every regular file below, or the file itself."""
    if path.is_file():
        return [path]
    return sorted(p for p in path.rglob("*") if p.is_file() and not p.is_symlink())


def size(path: Path) -> int:
    return sum(p.stat().st_size for p in files(path))


def sync(path: Path) -> None:
    """fsync every file and directory below, then the directory that names them."""
    for one in (*_tree(path), path.parent):
        descriptor = os.open(one, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _tree(path: Path) -> Iterator[Path]:
    yield from files(path)
    yield from (p for p in path.rglob("*") if p.is_dir())
    yield path


def drop_cache(path: Path) -> None:
    """The next read comes from the device; only clean pages can go, so sync first."""
    for one in files(path):
        descriptor = os.open(one, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def warm_cache(path: Path) -> None:
    """The next read comes from memory."""
    buffer = bytearray(BLOCK)
    for one in files(path):
        with one.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def remove(path: Path) -> None:
    """Delete, make that durable, and let the device come to rest."""
    shutil.rmtree(path, ignore_errors=True)
    sync_directory(path.parent)
    time.sleep(SETTLE_S)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
