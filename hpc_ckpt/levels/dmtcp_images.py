"""The images of DMTCP in a directory, and what is told of files that were cut since."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .base import NotHere, ResumeFailed
from .footprint import missing_features

log = logging.getLogger("hpc_ckpt.steward")

_MAGIC = (b"DMTCP_CHECKPOINT_IMAGE", b"\x1f\x8b")


def check_images(images: list[Path], facts: Mapping[str, Any]) -> None:
    expected = facts.get("images")
    if not images or (expected is not None and [p.name for p in images] != sorted(expected)):
        raise ResumeFailed(f"images {[p.name for p in images]}, expected {expected}")
    for path in images:
        with path.open("rb") as stream:
            if not stream.read(64).startswith(_MAGIC):
                raise ResumeFailed(f"{path.name} is not an image of DMTCP")
    missing = missing_features(facts.get("processor", ()))
    if missing:
        raise NotHere(
            f"the program began on a processor with {', '.join(missing)}, which this node has "
            "not; keep the chain on nodes of one kind (a Slurm --constraint)"
        )


def warn_of_gaps(written: Mapping[str, int]) -> None:
    """DMTCP goes on in a file that is shorter than it was, or makes it anew, without a word."""
    for path, size in written.items():
        try:
            now = Path(path).stat().st_size
        except OSError:
            now = 0
        if now < size:
            log.warning(
                "%s has %d bytes, %d at the save: WHAT WAS CUT OFF STAYS LOST", path, now, size
            )


def images_in(place: Path) -> list[str]:
    """Their names, once all are whole."""
    found = sorted(path.name for path in place.iterdir())
    if any(name.endswith(".temp") for name in found):
        return []
    return [name for name in found if name.endswith(".dmtcp")]


def move_up(place: Path, into: Path) -> list[str]:
    """The names of the images; litter of DMTCP, and what it writes late, stays behind."""
    names = images_in(place)
    for path in sorted(place.iterdir()):
        path.rename(into / path.name)
    place.rmdir()
    return names


def clear(place: Path) -> None:
    """For the images of another checkpoint."""
    for path in place.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
