"""Host memory of a process and its children, from /proc."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def resident() -> int:
    return _field("self", "VmRSS")


def peak() -> int:
    """The most that was resident since forget_peak()."""
    return _field("self", "VmHWM")


def forget_peak() -> None:
    with suppress(OSError):  # not permitted in some containers: the peak is then an upper bound
        (PROC / "self/clear_refs").write_text("5")


def children() -> int:
    """Private memory of every process below this one; what it shares is counted here already."""
    return sum(_field(str(pid), "RssAnon") for pid in _below(os.getpid()))


def available() -> int:
    return _entry((PROC / "meminfo").read_text(), "MemAvailable")


def total() -> int:
    return _entry((PROC / "meminfo").read_text(), "MemTotal")


def _field(pid: str, name: str) -> int:
    try:
        return _entry((PROC / pid / "status").read_text(), name)
    except OSError:
        return 0


def _entry(text: str, name: str) -> int:
    for line in text.splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _below(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in (PROC / str(pid) / "task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *_below(int(child))]
    return found


def condition(size: int) -> None:
    """Let a virtual machine's host find as much free memory as will be asked for.

    What it has taken back costs up to seconds for each GiB at the first touch, at random; the
    limits are measured in memory that was touched before, and peers load for a second time.
    """
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for start in range(0, size, mmap.PAGESIZE):
            memory[start] = 1
