"""Whose a file is. Standard library only: the link runner is built on this."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
from pathlib import Path

from . import fsio


def is_of_another(path: Path) -> bool:
    """Whether another user wrote it. Storage may show everybody's files as those of some other id:
    then only what this process writes beside it tells; where it can write nothing, it is no."""
    try:
        owner = path.stat().st_uid
        return os.geteuid() not in (0, owner) and owner != owner_of_new(path.parent)
    except OSError:
        return False


def owner_of_new(directory: Path) -> int:
    """Whom storage names as the owner of what this process writes there."""
    draft = directory / f".owner.tmp-{fsio.unique_suffix()}"
    descriptor = fsio.create_file(draft)
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        draft.unlink(missing_ok=True)
