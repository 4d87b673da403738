"""Before a restart: the files of a program as they were at the save.

CRIU saves memory, not files, and refuses a file whose size is another one by then. What is cut
off or replaced is kept until the restart has worked, as a newer one may need it: undo().
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import fsio
from .base import NotHere, ResumeFailed
from .openfiles import RECORD
from .restarts import put_back

JOURNAL = "taken-away.json"


def read(restart: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((restart / RECORD).read_bytes()))
    except (OSError, ValueError) as error:
        raise ResumeFailed(f"{RECORD}: {error}") from error


def roll_back(restart: Path, found: Mapping[str, Any], kept: Path) -> list[str]:
    """Every file as it was at the save, or none touched; says what was done."""
    for entry in found["files"]:
        if entry["copy"] is None:
            _check(Path(entry["path"]), int(entry["size"]))
    try:
        _keep(found, kept)
    except OSError as error:
        shutil.rmtree(kept, ignore_errors=True)
        detail = f"{kept}: what a restart takes away could not be kept: {error.strerror}"
        raise ResumeFailed(detail) from error
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


# ── what is taken away ────────────────────────────────────────────────────────────────────
def _keep(found: Mapping[str, Any], kept: Path) -> None:
    """The journal last: without it nothing was touched."""
    forget(kept)
    kept.mkdir(parents=True)
    entries: list[dict[str, str | int]] = []
    for number, entry in enumerate(found["files"]):
        path, size, name = Path(entry["path"]), int(entry["size"]), str(number)
        if entry["copy"] is not None and path.exists():
            _link_or_copy(path, kept / name)
            entries.append({"path": str(path), "whole": name})
        elif entry["copy"] is None and path.stat().st_size > size:
            _copy_tail(path, size, kept / name)
            entries.append({"path": str(path), "size": size, "tail": name})
    fsio.write_atomic(kept / JOURNAL, json.dumps({"files": entries}).encode())


def _link_or_copy(path: Path, target: Path) -> None:
    """A file that is put back is another one, so that a link keeps this one as it is."""
    try:
        target.hardlink_to(path)
    except OSError:
        shutil.copy2(path, target)
        _sync(target)


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
        if "whole" in entry:
            put_back(kept / entry["whole"], path)
        elif not path.exists() or path.stat().st_size < entry["size"]:
            continue  # somebody else's doing, since
        else:
            os.truncate(path, entry["size"])
            with (kept / entry["tail"]).open("rb") as source, path.open("ab") as stream:
                shutil.copyfileobj(source, stream)
        told.append(f"{path} is again as it was before the restart was tried")
    forget(kept)
    return told


def forget(kept: Path) -> None:
    """The restart has worked. The journal goes first: half a directory must not be put back."""
    (kept / JOURNAL).unlink(missing_ok=True)
    shutil.rmtree(kept, ignore_errors=True)


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
