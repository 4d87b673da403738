"""Before a restart: the files of a program as they were at the save.

CRIU and DMTCP save memory, not files. What is cut off or overwritten is kept until the restart
has worked, as a newer one may need it: undo(). A file stays the same inode throughout: SQLite
writes to no other one.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import fsio
from .base import NotHere, ResumeFailed
from .footprint import living
from .openfiles import COPIES, RECORD, companions, is_database, is_not_the_programs
from .restarts import put_back

log = logging.getLogger("hpc_ckpt.steward")

JOURNAL = "taken-away.json"
GONE_ON_FROM = ".gone-on-from"
"""Beside what is taken away: which restart was the last to work."""
BLOCK = 1024**2
GONE_S = 5.0
"""For processes that were killed: what they are about to write comes first."""
COMMIT_S = 5.0
SYNC_RATE = 100e6
"""Bytes a second that slow storage takes."""
LOOK_EVERY_S = 0.01


class TakenAway:
    """What the restarts of one link have taken from the program's files, until one has worked."""

    def __init__(self) -> None:
        self._kept: Path | None = None
        self._restart = ""
        self._of_others: list[str] = []
        """Files of which somebody else's bytes are taken away, too. Only a last save tells, and
        an older restart may be the one that works."""

    def roll_back(
        self,
        restart: Path,
        found: Mapping[str, Any],
        kept: Path,
        left: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """`kept`: where it lies, the same place in every link. `left`: by left_by()."""
        self._kept, self._restart = kept, restart.parent.name
        try:
            before = undo(kept)  # of a restart that did not work, or was killed
        except OSError as error:
            raise ResumeFailed(f"{kept}: could not be put back: {error}") from error
        # Once a program has gone on from it, or from a newer one, it has written to them itself.
        known = {} if self._restart <= _gone_on_from(kept) else left or {}
        now = {path for path, mark in known.items() if _mark(path) != [*mark]}
        self._of_others = sorted({*self._of_others, *now})
        for told in (*before, *roll_back(restart, found, kept)):
            log.info("%s", told)

    def forget(self) -> None:
        """The program runs again."""
        if self._kept is not None:
            try:
                for told in keep_for_others(self._kept, self._of_others):
                    log.warning("%s", told)
                forget(self._kept)
            except OSError as error:  # or the next link would put it back, over what comes now
                raise ResumeFailed(f"{self._kept}: {error.strerror}") from error
            with contextlib.suppress(OSError):  # only a warning depends on it
                _noted_beside(self._kept).write_text(self._restart, encoding="utf-8")
            self._kept, self._of_others = None, []

    def put_back(self) -> None:
        """No restart has worked: the next link finds the files that this one has found."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        try:
            for told in undo(kept):
                log.info("%s", told)
        except OSError as error:
            log.warning("%s: put back by the next link: %s", kept, error)


def read(restart: Path) -> dict[str, Any]:
    try:
        found = dict(json.loads((restart / RECORD).read_bytes()))
    except (OSError, ValueError) as error:
        raise ResumeFailed(f"{RECORD}: {error}") from error
    found["files"] = [one for one in found["files"] if not is_not_the_programs(one["path"])]
    return found


def roll_back(restart: Path, found: Mapping[str, Any], kept: Path) -> list[str]:
    """Every file as it was at the save, or none touched; says what was done. What is the same is
    left alone: a restart by DMTCP as root has files of the system mapped for writing."""
    later = _came_later(restart, found)
    found = {"files": [entry for entry in found["files"] if not _is_same(restart, entry)]}
    for entry in found["files"]:
        if entry["copy"] is None:
            _check(Path(entry["path"]), int(entry["size"]))
    try:
        _keep(found, later, kept)
    except OSError as error:
        shutil.rmtree(kept, ignore_errors=True)
        detail = f"{kept}: what a restart takes away could not be kept: {error.strerror}"
        raise ResumeFailed(detail) from error
    told = []
    for entry in found["files"]:
        path, size = Path(entry["path"]), int(entry["size"])
        try:
            if entry["copy"] is not None:
                _write(restart / entry["copy"], path)
                told.append(f"{path} put back")
            elif path.stat().st_size > size:
                os.truncate(path, size)
                told.append(f"{path} cut back to {size} bytes")
        except OSError as error:
            raise ResumeFailed(f"{path}: not as it was at the save: {error.strerror}") from error
    for path in later:
        try:
            _remove(path)
        except OSError as error:
            raise ResumeFailed(f"{path}: came after the save: {error.strerror}") from error
        told.append(f"{path} taken away: it came after the save")
    return told


def _came_later(restart: Path, found: Mapping[str, Any]) -> list[Path]:
    """Journals of newer bytes: SQLite would play them back into the older file. Also of a file
    that is the same, as a commit may be in its log alone."""
    known = {str(entry["path"]) for entry in found["files"]}
    copied = [entry for entry in found["files"] if entry["copy"] is not None]
    databases = [str(one["path"]) for one in copied if _is_of_database(restart, one)]
    return [Path(path) for path in companions(databases) if path not in known]


def _is_of_database(restart: Path, entry: Mapping[str, Any]) -> bool:
    """Now, or at the save: one that was empty then was just being made."""
    return is_database(Path(entry["path"])) or is_database(restart / str(entry["copy"]))


def _is_same(restart: Path, entry: Mapping[str, Any]) -> bool:
    """Only of one that was copied."""
    path = Path(entry["path"])
    try:
        if entry["copy"] is None or path.stat().st_size != int(entry["size"]):
            return False
        with path.open("rb") as now, (restart / entry["copy"]).open("rb") as then:
            return all(block == then.read(BLOCK) for block in iter(lambda: now.read(BLOCK), b""))
    except OSError:
        return False  # put back, or told why not


# ── what others have written ──────────────────────────────────────────────────────────────
def left_by(pids: Sequence[int], saved: Path, end: float) -> dict[str, list[int]]:
    """The files that were copied at a last save, as the program has left them, whose processes
    were killed: who finds another size or time has found somebody else's bytes. Nothing where
    `end` is near: the save is not committed yet, and this is for a warning only."""
    until = time.monotonic() + GONE_S
    if end < until + COMMIT_S + _bytes_in(saved / COPIES) / SYNC_RATE:
        return {}
    while living(pids) and time.monotonic() < until:
        time.sleep(LOOK_EVERY_S)
    if not (saved / RECORD).exists():
        return {}
    with contextlib.suppress(ResumeFailed):  # said where it is resumed
        paths = [str(one["path"]) for one in read(saved)["files"] if one["copy"] is not None]
        marks = ((path, _mark(path, sync=True)) for path in paths)
        return {path: mark for path, mark in marks if mark is not None}
    return {}


def _bytes_in(place: Path) -> int:
    try:
        return sum(path.stat().st_size for path in place.iterdir())
    except OSError:
        return 0


def _mark(path: str, *, sync: bool = False) -> list[int] | None:
    """`sync`: what was mapped may get its time only when it is written."""
    try:
        with Path(path).open("rb") as stream:
            if sync:
                os.fsync(stream.fileno())
            info = os.fstat(stream.fileno())
    except OSError:
        return None
    return [info.st_size, info.st_mtime_ns]


def keep_for_others(kept: Path, paths: Sequence[str]) -> list[str]:
    """Where what was taken away of these files stays, for people."""
    try:
        entries = json.loads((kept / JOURNAL).read_bytes())["files"]
    except FileNotFoundError:
        return []
    names = {entry["path"]: entry["whole"] for entry in entries if "whole" in entry}
    named = [path for path in paths if path in names]
    if not named:
        return []
    taken = set(fsio.names_in(kept.parent))
    numbered = (f"{kept.name}.{number}" for number in itertools.count(1))
    place = kept.with_name(next(name for name in numbered if name not in taken))
    kept.rename(place)
    fsio.sync_directory(kept.parent)
    return [
        f"{path}: WAS CHANGED BY SOMEBODY ELSE (a reader of a SQLite file in WAL mode does that, "
        "too) since the program was saved, which goes on with it as it was then; as it was found "
        f"it is kept until you remove it: {place / names[path]}"
        for path in named
    ]


def _noted_beside(kept: Path) -> Path:
    return kept.with_name(kept.name + GONE_ON_FROM)


def _gone_on_from(kept: Path) -> str:
    try:
        return _noted_beside(kept).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


# ── what is taken away ────────────────────────────────────────────────────────────────────
def _keep(found: Mapping[str, Any], later: list[Path], kept: Path) -> None:
    """The journal last: without it nothing was touched."""
    forget(kept)
    if not found["files"] and not later:
        return
    kept.mkdir(parents=True)
    fsio.sync_directory(kept.parent)
    entries: list[dict[str, str | int]] = []
    for number, entry in enumerate(found["files"]):
        path, size, name = Path(entry["path"]), int(entry["size"]), str(number)
        if entry["copy"] is not None and path.exists():
            entries.append(_keep_whole(path, kept / name))
        elif entry["copy"] is not None:
            entries.append({"path": str(path), "absent": 1})
        elif entry["copy"] is None and path.stat().st_size > size:
            _copy_tail(path, size, kept / name)
            entries.append({"path": str(path), "size": size, "tail": name})
    for number, path in enumerate(later, len(found["files"])):
        entries.append(_keep_whole(path, kept / str(number)))
    fsio.write_atomic(kept / JOURNAL, json.dumps({"files": entries}).encode())


def _keep_whole(path: Path, target: Path) -> dict[str, str | int]:
    shutil.copy2(path, target)
    _sync(target)
    return {"path": str(path), "whole": target.name}


def _remove(path: Path) -> None:
    """For good: a power failure does not bring it back."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        fsio.sync_directory(path.parent)


def _write(source: Path, target: Path) -> None:
    """Into the same inode, and durably. Half of it is mended by undo(); the room that it has is
    given up last, so that this needs no more of it."""
    try:
        with source.open("rb") as bytes_, target.open("r+b") as stream:
            shutil.copyfileobj(bytes_, stream, BLOCK)
            stream.truncate()
    except (FileNotFoundError, PermissionError):  # gone, or read-only: only as another one
        put_back(source, target)
    else:
        with contextlib.suppress(PermissionError):  # somebody else's, of a group
            shutil.copystat(source, target)
    _sync(target)
    fsio.sync_directory(target.parent)


def _copy_tail(path: Path, size: int, target: Path) -> None:
    with path.open("rb") as source, target.open("wb") as stream:
        source.seek(size)
        shutil.copyfileobj(source, stream)
    _sync(target)


def _sync(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def undo(kept: Path) -> list[str]:
    """After a restart that did not work, also in a link that was killed: the files as they were
    before. Raises OSError; it can be called again."""
    try:
        journal = json.loads((kept / JOURNAL).read_bytes())
    except FileNotFoundError:
        return []
    told = []
    for entry in journal["files"]:
        path = Path(entry["path"])
        if is_not_the_programs(entry["path"]):
            continue
        if "whole" in entry:
            _write(kept / entry["whole"], path)
        elif "absent" in entry:
            _remove(path)
        elif not path.exists() or path.stat().st_size < entry["size"]:
            continue  # somebody else's doing, since
        else:
            os.truncate(path, entry["size"])
            with (kept / entry["tail"]).open("rb") as source, path.open("ab") as stream:
                shutil.copyfileobj(source, stream)
            _sync(path)
        told.append(f"{path} is again as it was before the restart was tried")
    forget(kept)
    return told


def forget(kept: Path) -> None:
    """The restart has worked. The journal goes first, and for good: neither half a directory nor
    one that a power failure brings back may be put over what the program writes from now on."""
    with contextlib.suppress(FileNotFoundError):
        (kept / JOURNAL).unlink()
        fsio.sync_directory(kept)
    shutil.rmtree(kept, ignore_errors=True)


def forget_all(kept: Path) -> None:
    """A program begins: what is known of an earlier one's restarts is about others."""
    forget(kept)
    with contextlib.suppress(OSError):
        _noted_beside(kept).unlink()


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
        raise (NotHere if _is_away(path.parent) else ResumeFailed)(detail) from error
    if now < size:
        raise ResumeFailed(
            f"{path}: {now} bytes, but the program had written {size} when it was saved; "
            "something has cut or replaced it since"
        )


def _is_away(directory: Path) -> bool:
    """Not only the file in it: an empty one is taken for the place of a mount that is missing."""
    return not fsio.names_in(directory)
