"""The TCP connections of a process tree: CRIU must be told what to do with them."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path

_SOCKET = re.compile(r"socket:\[(\d+)\]")
_LISTENS = "0A"
_NOBODYS = "0"
_LOOPBACK_4 = "7F"
_LOOPBACK_6 = "00000000000000000000000001000000"
_MAPPED_4 = "0000000000000000FFFF0000"


class Tcp(str, Enum):
    """What a process tree has of TCP."""

    NONE = "none"
    LISTENS = "listens"
    WITHIN = "within"
    """Connections of the tree with itself only: both ends are saved."""
    OUTSIDE = "outside"


def tcp_of(pids: Iterable[int]) -> Tcp:
    """As seen now; a process that is gone has none."""
    mine: set[str] = set()
    tables: list[str] = []
    for pid in pids:
        mine |= set(_inodes(pid))
        if not tables:
            tables = [*_table(pid, "tcp"), *_table(pid, "tcp6")]
    return judge(tables, mine)


def judge(lines: Iterable[str], inodes: set[str]) -> Tcp:
    """From the lines of /proc/net/tcp and tcp6, without their headings."""
    rows = [fields for line in lines if len(fields := line.split()) >= 10]
    # Nobody's yet, or no longer: waiting to be accepted, or closed at that end.
    ends = {_between(row) for row in rows if row[9] in inodes or row[9] == _NOBODYS}
    found = Tcp.NONE
    for row in rows:
        if row[9] not in inodes:
            continue
        if row[3] == _LISTENS:
            found = Tcp.LISTENS if found is Tcp.NONE else found
        elif not _is_loopback(row[2].partition(":")[0]) or _between(row)[::-1] not in ends:
            return Tcp.OUTSIDE
        else:
            found = Tcp.WITHIN
    return found


def _between(row: list[str]) -> tuple[str, str]:
    """Both ends of a connection, its own first; as the other end has them, too."""
    return row[1].removeprefix(_MAPPED_4), row[2].removeprefix(_MAPPED_4)


def _is_loopback(address: str) -> bool:
    if address == _LOOPBACK_6:
        return True
    if len(address) == 8 or address.startswith(_MAPPED_4):
        return address.endswith(_LOOPBACK_4)
    return False


def _inodes(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                match = _SOCKET.fullmatch(str(link.readlink()))
                if match is not None:
                    yield match[1]


def _table(pid: int, name: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    except OSError:
        return []
