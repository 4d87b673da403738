"""Before a restart: the files of a program as they were at the save.

CRIU saves memory, not files, and refuses a file whose size is another one by then.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .base import ResumeFailed
from .openfiles import RECORD
from .restarts import put_back


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
