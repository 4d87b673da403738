"""The path at which DMTCP writes and reads images: the same in every link of a chain.

An image names, by absolute path, the directory *_files that was written beside it, and DMTCP
looks nowhere else for it. A job's own temporary directory has another name in the next job, so
the path lies in /tmp, and what is seen at it is changed from save to save.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import fcntl
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from .base import NotHere, ResumeFailed

PARENT = Path("/tmp")
"""On every node; the name in it is random, and the directory nobody else's."""
ENV_FILE = "dmtcp_env.txt"
"""DMTCP's plugin looks for it beside the images."""
_NAME = re.compile(r"hpc-ckpt-dmtcp-[0-9a-f]{16}")


class Window:
    """Held by one link on one node at a time; gone after close()."""

    def __init__(self, place: str | None = None) -> None:
        """`place`: that of the link before. Raises ResumeFailed; NotHere where this node does not
        let it be made or held, which says nothing of any image."""
        if place is None:
            self.place = PARENT.resolve() / f"hpc-ckpt-dmtcp-{secrets.token_hex(8)}"
        else:
            self.place = Path(place)
        if _NAME.fullmatch(self.place.name) is None or not self.place.is_absolute():
            raise ResumeFailed(f"{self.place} is not a directory this level has made")
        self.unfinished: Path | None = None
        """Where a save is still being written that nobody waits for any longer: seen here until
        it is over, as DMTCP ends a program whose images it cannot name."""
        self._held = -1
        try:
            self._held = self._hold()
            self.images = self.place.resolve() / "images"
            self._idle = self.place / "idle"
            for path in (self.images, self._idle):
                _remove(path)
                path.mkdir()
        except OSError as error:
            self.close()
            why = f"{self.place}: {error.strerror}; images are only found at the path they were"
            raise NotHere(f"{why} written to") from error

    def _hold(self) -> int:
        """The lock also keeps cleaners of /tmp away."""
        self.place.mkdir(mode=0o700, exist_ok=True)
        held = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _check_owner(held)
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:  # the lock is given back, then raised again
            os.close(held)
            raise
        return held

    def show(self, paths: Iterable[Path], variables: str) -> None:
        """For a restart. DMTCP goes on writing where it has read: links keep it off the files."""
        for path in paths:
            (self.images / path.name).symlink_to(path)
        (self.images / ENV_FILE).write_text(variables, encoding="utf-8")

    def point(self, target: Path) -> None:
        """The next images go there."""
        self.place.mkdir(mode=0o700, exist_ok=True)
        _remove(self.images)
        self.images.symlink_to(target)

    def rest(self) -> None:
        """Nothing is asked for: a checkpoint that somebody else asks for (a stray USR2 is
        enough) must find a directory, or the program dies, and none that counts."""
        self._idle.mkdir(exist_ok=True)
        self.point(self._idle)

    def forget_unfinished(self) -> None:
        """It is over, and counts for nothing."""
        if self.unfinished is not None:
            self.rest()
            shutil.rmtree(self.unfinished, ignore_errors=True)
            self.unfinished = None

    def stray_age_s(self) -> float:
        """How long ago the newest image was written that nobody here has asked for."""
        images = self.images.glob("*.dmtcp") if self.unfinished is None else ()
        found = [path for path in images if not path.is_symlink()]
        return time.time() - max((path.stat().st_mtime for path in found), default=-math.inf)

    def close(self) -> None:
        if self.unfinished is not None:
            shutil.rmtree(self.unfinished, ignore_errors=True)
        if self._held >= 0:
            shutil.rmtree(self.place, ignore_errors=True)
            os.close(self._held)
            self._held = -1


def _check_owner(descriptor: int) -> None:
    if os.fstat(descriptor).st_uid != os.geteuid():
        raise PermissionError(1, "it belongs to somebody else")


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
