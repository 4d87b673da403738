"""A program's output stays below a limit. Standard library only: the link runner asks it."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
from pathlib import Path

OLD_SUFFIX = ".old"
COPY_BYTES = 1 << 20


def cut(path: Path, limit: int) -> int:
    """Once it is larger than half the limit, what is there becomes FILE.old; bytes dropped.

    The writer has the file open for appending and goes on at its new end. What it writes between
    the copy and the cut is lost: a few lines of gigabytes.
    """
    half = limit // 2
    try:
        if path.stat().st_size <= half:
            return 0
        old = path.with_name(path.name + OLD_SUFFIX)
        dropped = old.stat().st_size if old.exists() else 0
        _copy_tail(path, old, half)
        os.truncate(path, 0)
    except OSError:
        return 0  # a full disk is told by whoever writes there
    return dropped


def _copy_tail(source: Path, target: Path, most: int) -> None:
    with source.open("rb") as reading, target.open("wb") as writing:
        size = reading.seek(0, os.SEEK_END)
        reading.seek(max(0, size - most))
        while data := reading.read(COPY_BYTES):
            writing.write(data)
