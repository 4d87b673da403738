"""The files that a program has open for writing, recorded at a save; rollback.py puts them back.

Run while the program stands still, and by criu, so it imports little. Of a file that is only
appended to the size is enough; one that is written in place is copied into the restart, with
what SQLite has beside it, open at that moment or not.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from . import namespaces
from .program import tree_of

RECORD = "openfiles.json"
COPIES = "copies"
COPY_MOST = 64 * 1024**3
"""Of a file written in place: what there is room for. The program stands still for that long; of a
larger one the save fails rather than that the result is wrong."""
COPY_AT_END_MOST = 4 * 1024**3
"""Of one that is at its end, as most that are merely opened for reading too."""
TOO_LARGE = "written in place, and too large to be copied"
TOO_SLOW = "written in place, and not copied in the time that there was"
BLOCK = 4 * 1024**2
UNCOPIED = "too large to be copied: what the program changes before its end since stays changed"
COMPANIONS = ("-journal", "-wal", "-shm")
LOOK_AT = 1000
_SQLITE = b"SQLite format 3\0"
_MAPPED = re.compile(r"\S+ r(.).s \S+ \S+ [1-9]\d* +(/.*)")
_NOT_FILES = ("/proc/", "/sys/", "/dev/dri/", "/dev/nvidia")
_NOT_THE_PROGRAMS = ("dmtcpSharedArea", "gconv-modules.cache")
"""DMTCP has the first for itself, in the directory of one link; the other is of the system."""


class Written(NamedTuple):
    """One file, however often it is open."""

    path: str
    size: int
    in_place: bool
    """Bytes before its end may change."""
    at_end: bool = False
    """Not mapped, and at its end wherever it is open: certain while the program stands still."""

    @property
    def is_left_out(self) -> bool:
        """Its size is enough, as it is no database."""
        large = self.at_end and self.size > COPY_AT_END_MOST
        return large and not is_database(Path(self.path))


class TooLarge(OSError):
    """No trouble of the storage."""

    def __init__(self, path: str) -> None:
        super().__init__(0, f"{path}: {TOO_LARGE}")


class TooSlow(OSError):
    """Another save may have more time, or find a faster storage."""

    def __init__(self, path: str) -> None:
        super().__init__(0, f"{path}: {TOO_SLOW}")


def written_by(pids: list[int]) -> dict[str, Written]:
    """The regular files that these processes have open or mapped for writing, by path."""
    found: dict[str, Written] = {}
    for pid in pids:
        for one in (*_open_in(pid), *_mapped_in(pid)):
            known = found.setdefault(one.path, one)
            found[one.path] = known._replace(
                in_place=known.in_place or one.in_place, at_end=known.at_end and one.at_end
            )
    return found


def _open_in(pid: int) -> Iterator[Written]:
    place = Path(f"/proc/{pid}/fd")
    for name in _names(place):
        with contextlib.suppress(FileNotFoundError):
            yield from _described(place / name, Path(f"/proc/{pid}/fdinfo/{name}"))


def _described(link: Path, info_file: Path) -> Iterator[Written]:
    info = link.stat()
    path = str(link.readlink())
    if not stat.S_ISREG(info.st_mode) or info.st_nlink == 0 or path.startswith(_NOT_FILES):
        return
    told = dict(line.split(":", 1) for line in info_file.read_text().splitlines() if ":" in line)
    flags, position = int(told["flags"], 8), int(told["pos"])
    access = flags & os.O_ACCMODE
    if access == os.O_RDONLY:
        return
    appended = bool(flags & os.O_APPEND)
    at_end = appended or position >= info.st_size  # greater: it runs, and has written since
    yield Written(path, info.st_size, access == os.O_RDWR or not at_end, at_end)


def _mapped_in(pid: int) -> Iterator[Written]:
    with contextlib.suppress(FileNotFoundError):
        for path in (path for path, writable in _shared_by(pid) if writable):
            with contextlib.suppress(FileNotFoundError):  # deleted: CRIU keeps it
                info = Path(path).stat()
                if stat.S_ISREG(info.st_mode):
                    yield Written(path, info.st_size, True)


def only_read_by(pids: list[int]) -> set[str]:
    """The files that these processes share with others by a mapping, none of them for writing."""
    found: dict[str, bool] = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for path, writable in _shared_by(pid):
                found[path] = writable or found.get(path, False)
    return {path for path, writable in found.items() if not writable}


def _shared_by(pid: int) -> Iterator[tuple[str, bool]]:
    """Mapped files, and whether for writing."""
    text = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
    for match in filter(None, map(_MAPPED.fullmatch, text.splitlines())):
        if not match[2].startswith(_NOT_FILES):
            yield match[2], match[1] == "w"


def is_not_the_programs(path: str) -> bool:
    """Nothing to be put back, in restarts of older versions either."""
    return Path(path).name.startswith(_NOT_THE_PROGRAMS)


def _names(place: Path) -> list[str]:
    try:
        return sorted(path.name for path in place.iterdir())
    except FileNotFoundError:
        return []


def record(root: int, into: Path, until: float = math.inf) -> None:
    """Of a process tree that stands still."""
    found = {
        "files": stored(written_by(tree_of(root)).values(), into, until),
        "last_pid": namespaces.last_pid(),
        "beside": _sizes(Path(f"/proc/{root}/cwd").readlink()),
    }
    (into / RECORD).write_text(json.dumps(found, indent=1), encoding="utf-8")


def stored(written: Iterable[Written], into: Path, until: float = math.inf) -> list[dict[str, Any]]:
    """What a record says of these files; those that are written in place are copied, `until` that
    moment of the monotonic clock. A companion that is not in it came later, and goes before a
    restart."""
    entries = []
    for number, one in enumerate(_with_companions(list(written))):
        entry: dict[str, Any] = {"path": one.path, "size": one.size, "copy": None}
        if one.in_place and one.is_left_out:
            entry["uncopied"] = True
        elif one.in_place and one.size > COPY_MOST:
            raise TooLarge(one.path)
        elif one.in_place:
            entry["copy"] = f"{COPIES}/{number}"
            (into / COPIES).mkdir(exist_ok=True)
            _copy(Path(one.path), into / COPIES / str(number), until)
        entries.append(entry)
    return entries


def _copy(source: Path, target: Path, until: float) -> None:
    """Raises TooSlow: the program stands still meanwhile, and somebody may end it."""
    with source.open("rb") as old, target.open("wb") as new:
        while block := old.read(BLOCK):
            if time.monotonic() >= until:
                raise TooSlow(str(source))
            new.write(block)
    shutil.copystat(source, target)


def warnings(found: Mapping[str, Any]) -> list[str]:
    """Of a record: what a restart may not bring back as it was."""
    return [f"{entry['path']}: {UNCOPIED}" for entry in found["files"] if entry.get("uncopied")]


def _with_companions(written: list[Written]) -> list[Written]:
    """A journal of the modes PERSIST and TRUNCATE is open in a transaction only."""
    known = {one.path for one in written}
    databases = (o.path for o in written if o.in_place and is_database(Path(o.path)))
    found = companions(databases)
    more = [path for path in found if path not in known]
    return [*written, *(Written(path, Path(path).stat().st_size, True) for path in more)]


def is_database(path: Path) -> bool:
    """Of SQLite: beside any other file such a name means nothing."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(_SQLITE)) == _SQLITE
    except OSError:
        return False


def companions(paths: Iterable[str]) -> list[str]:
    """What is there of that which SQLite has beside these files."""
    names = (f"{path}{ending}" for path in paths for ending in COMPANIONS)
    return [name for name in names if Path(name).is_file()]


def _sizes(place: Path) -> dict[str, int]:
    """Of the files in the working directory: for a warning, so not more than a few."""
    with os.scandir(place) as found:
        some = itertools.islice((e for e in found if e.is_file(follow_symlinks=False)), LOOK_AT)
        return {entry.path: entry.stat().st_size for entry in some}


if __name__ == "__main__":
    try:
        record(int(sys.argv[1]), Path(sys.argv[2]), *map(float, sys.argv[3:]))
    except OSError as error:
        sys.exit(f"hpc-ckpt: {error.filename or ''} {error.strerror}")
