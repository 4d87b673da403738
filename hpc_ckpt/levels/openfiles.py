"""The files that a program has open for writing: recorded at a save, rolled back before a restart.

CRIU saves memory, not files, and refuses a file whose size is another one by then. Recorded
while the program stands still. A file that is only appended to is cut back to its size; one
that is written in place is copied into the restart, and put back from there.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import namespaces
from .base import ResumeFailed
from .program import tree_of
from .restarts import copy_in, put_back

RECORD = "openfiles.json"
COPIES = "copies"
COPY_MOST = 4 * 1024**3
"""Of a file written in place; a larger one makes the save fail rather than the result wrong."""
LOOK_AT = 1000
_MAPPED = re.compile(r"\S+ rw.s \S+ \S+ [1-9]\d* +(/.*)")
_NOT_FILES = ("/proc/", "/sys/", "/dev/dri/", "/dev/nvidia")


@dataclass
class Written:
    """One file, however often it is open."""

    path: str
    size: int
    in_place: bool
    """Bytes before its end may change."""


# ── at a save ─────────────────────────────────────────────────────────────────────────────
def written_by(pids: list[int]) -> dict[str, Written]:
    """The regular files that these processes have open or mapped for writing, by path."""
    found: dict[str, Written] = {}
    for pid in pids:
        for one in (*_open_in(pid), *_mapped_in(pid)):
            known = found.setdefault(one.path, one)
            known.in_place = known.in_place or one.in_place
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
    at_end = bool(flags & os.O_APPEND) or position == info.st_size
    yield Written(path, info.st_size, access == os.O_RDWR or not at_end)


def _mapped_in(pid: int) -> Iterator[Written]:
    with contextlib.suppress(FileNotFoundError):
        text = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
        for line in text.splitlines():
            match = _MAPPED.fullmatch(line)
            if match is None or match[1].startswith(_NOT_FILES):
                continue
            with contextlib.suppress(FileNotFoundError):  # deleted: CRIU keeps it
                info = Path(match[1]).stat()
                if stat.S_ISREG(info.st_mode):
                    yield Written(match[1], info.st_size, True)


def _names(place: Path) -> list[str]:
    try:
        return sorted(path.name for path in place.iterdir())
    except FileNotFoundError:
        return []


def record(root: int, into: Path) -> None:
    """Of a process tree that stands still."""
    entries = []
    for number, one in enumerate(written_by(tree_of(root)).values()):
        entry: dict[str, Any] = {"path": one.path, "size": one.size, "copy": None}
        if one.in_place:
            if one.size > COPY_MOST:
                raise OSError(0, f"{one.path}: written in place, and too large to be copied")
            entry["copy"] = f"{COPIES}/{number}"
            copy_in(Path(one.path), into / COPIES / str(number))
        entries.append(entry)
    found = {
        "files": entries,
        "last_pid": namespaces.last_pid(),
        "beside": _sizes(Path(f"/proc/{root}/cwd").readlink()),
    }
    (into / RECORD).write_text(json.dumps(found, indent=1), encoding="utf-8")


def _sizes(place: Path) -> dict[str, int]:
    """Of the files in the working directory: for a warning, so not more than a few."""
    with os.scandir(place) as found:
        some = itertools.islice((e for e in found if e.is_file(follow_symlinks=False)), LOOK_AT)
        return {entry.path: entry.stat().st_size for entry in some}


# ── before a restart ──────────────────────────────────────────────────────────────────────
def read(restart: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((restart / RECORD).read_bytes()))
    except (OSError, ValueError) as error:
        raise ResumeFailed(f"{RECORD}: {error}") from error


def roll_back(restart: Path, found: Mapping[str, Any]) -> list[str]:
    """Every file as it was at the save, or none touched; says what was done."""
    for entry in found["files"]:
        if entry["copy"] is None:
            _check(Path(entry["path"]), int(entry["size"]))
    told = []
    for entry in found["files"]:
        path, size = Path(entry["path"]), int(entry["size"])
        try:
            if entry["copy"] is not None:
                put_back(restart / entry["copy"], path)
                told.append(f"{path} put back")
            elif path.stat().st_size > size:
                os.truncate(path, size)
                told.append(f"{path} cut back to {size} bytes")
        except OSError as error:
            raise ResumeFailed(f"{path}: not as it was at the save: {error.strerror}") from error
    return told


def grown(found: Mapping[str, Any]) -> list[str]:
    """Files beside the program that are longer than at the save, and that nobody rolls back: it
    opens and closes them for every line, and what it wrote since may come twice."""
    known = {entry["path"] for entry in found["files"]}
    return [
        path
        for path, size in found["beside"].items()
        if path not in known and Path(path).is_file() and Path(path).stat().st_size > size
    ]


def _check(path: Path, size: int) -> None:
    try:
        now = path.stat().st_size
    except OSError as error:
        detail = f"{path}: the program had it open for writing, and it is gone: {error.strerror}"
        raise ResumeFailed(detail) from error
    if now < size:
        raise ResumeFailed(
            f"{path}: {now} bytes, but the program had written {size} when it was saved; "
            "something has cut or replaced it since"
        )


if __name__ == "__main__":
    try:
        record(int(sys.argv[1]), Path(sys.argv[2]))
    except OSError as error:
        sys.exit(f"hpc-ckpt: {error.filename or ''} {error.strerror}")
