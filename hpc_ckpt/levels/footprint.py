"""Processes as an image sees them: how much of them would be written, and for which processor."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
OVERHEAD = 32 * 1024**2
"""Of one image, over what is mapped."""
_FEATURE = re.compile(r"(avx|sse|ssse|amx|fma|bmi|sha|vaes|aes|popcnt|movbe|asimd|sve)\w*")


def living(pids: Iterable[int]) -> dict[int, str]:
    """Those that run, with their names; not zombies."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            text = (PROC / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
            if text.rpartition(")")[2].split()[0] not in "ZX":
                found[pid] = text.partition("(")[2].rpartition(")")[0]
    return found


def image_bytes(pid: int) -> int:
    """About the size of an uncompressed image: private memory that is in use, and every mapped
    file whole, libraries too."""
    return OVERHEAD + _mapped_files(pid) + _anonymous(pid)


def _mapped_files(pid: int) -> int:
    total = 0
    for line in _lines(pid, "maps"):
        span, _, rest = line.partition(" ")
        fields = rest.split(None, 4)
        if len(fields) >= 4 and fields[3] != "0" and fields[0].startswith("r"):
            low, _, high = span.partition("-")
            total += int(high, 16) - int(low, 16)
    return total


def _anonymous(pid: int) -> int:
    counts = {}
    for line in _lines(pid, "smaps_rollup"):
        name, _, rest = line.partition(":")
        if rest.endswith(" kB"):
            counts[name] = 1024 * int(rest.split()[0])
    return counts.get("Anonymous", 0) + counts.get("Swap", 0)


def _lines(pid: int, name: str) -> list[str]:
    try:
        return (PROC / str(pid) / name).read_text(errors="replace").splitlines()
    except OSError:
        return []


# ── processors ────────────────────────────────────────────────────────────────────────────
def processor_features(cpuinfo: Path = PROC / "cpuinfo") -> list[str]:
    """Instruction sets that a program may have chosen its code by; empty: nobody tells."""
    with contextlib.suppress(OSError), cpuinfo.open(errors="replace") as stream:
        for line in stream:
            name, _, rest = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return sorted(word for word in rest.split() if _FEATURE.fullmatch(word))
    return []


def missing_features(before: Iterable[str], cpuinfo: Path = PROC / "cpuinfo") -> list[str]:
    """Those the program may be using that this machine has not."""
    here = processor_features(cpuinfo)
    return sorted(set(before) - set(here)) if here else []
