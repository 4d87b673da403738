"""The files that a program under DMTCP writes, as they are at the moment of its images.

DMTCP saves memory, not files. Every thread of every process stands still from before the first
image is begun until after it has its name, and runs on at once. Within that time the processes
are stopped, so that it lasts, and the files that are written in place are copied.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import processes
from ..preflight import check_storage
from . import openfiles
from .base import NoRoom, NotNow, SaveFailed
from .footprint import living
from .openfiles import COPIES, RECORD, TooLarge, TooSlow, Written, stored, written_by
from .program import Program

log = logging.getLogger("hpc_ckpt.steward")

LOOK_EVERY_S = 0.002
"""An image of the smallest program takes DMTCP some tens of milliseconds."""
_STOPPED = "TtZX"


class WrittenFiles:
    """Of one checkpoint. Either copied for certain, or not known()."""

    def __init__(
        self, program: Program, images: Path, into: Path, besides: tuple[Path, ...]
    ) -> None:
        """`besides`: where DMTCP has files of its own. Raises SaveFailed."""
        self._program = program
        self._images = images
        self._into = into
        # As the kernel spells them: $TMPDIR may be a link.
        self._besides = tuple(f"{place.resolve()}/" for place in (*besides, images, into))
        self._seen = False
        """Whether they were looked at, and copied, while the program stood still."""
        self._failed: SaveFailed | NotNow | OSError | None = None
        self.room = 0
        """What the images need."""
        self.rest_s = 0.0
        """The same, of time: what a save takes without these copies, and some."""
        self.copying_s = 0.0
        self._look()

    def _look(self) -> None:
        """Before a checkpoint. DMTCP opens for writing, meanwhile, every file that is mapped to be
        shared, if only to be read."""
        self._known = _with_starts(living(self._program.tree()))
        self.before = self._now()
        self._only_read = openfiles.only_read_by(list(self._known)) - self.before.keys()

    @property
    def size(self) -> int:
        """Of what is to be copied, about. What is too large is known while it stands still."""
        return _bytes_of(self._in_place(self.before).values())

    def watch(self, command: subprocess.Popen[bytes], until: float) -> None:
        """Until the images are begun, or are there, or will not come."""
        self._forget()
        while time.monotonic() < until and self._program.poll() is None:
            if command.poll() not in (None, 0) or self._have_looked(until):
                return
            time.sleep(LOOK_EVERY_S)

    def known(self) -> bool:
        """Once the images are there. False: something is written in place, and nobody knows
        what it was at the moment of the images."""
        if isinstance(self._failed, (SaveFailed, NotNow)):
            raise self._failed
        if isinstance(self._failed, TooLarge):
            raise SaveFailed(self._failed.strerror)
        if isinstance(self._failed, TooSlow):
            raise NotNow(self._failed.strerror)
        if self._failed is not None:
            raise SaveFailed(f"its files could not be copied: {self._failed}") from self._failed
        now = self._now() if self._only_read or not self._seen else {}
        if self._seen and not self._only_read & now.keys():  # or the program has it open itself
            return True
        if not (self._seen or self._in_place(self.before) or self._in_place(now)):
            return True
        self._look()
        return False

    # ── while it stands still ─────────────────────────────────────────────────────────────
    def _have_looked(self, until: float) -> bool:
        """What goes wrong is told in known(): a checkpoint that has begun must be waited for."""
        try:
            begun = self._is_being_made()
            if begun is None:
                return False
            if begun and (self._in_place(self.before) or self._in_place(self._now_standing())):
                self._copy(until)
            else:
                self._seen = self._is_being_made() is True
        except (SaveFailed, NotNow, OSError) as error:
            self._forget()  # the room is the images'
            self._failed = error
        return True

    def _copy(self, until: float) -> None:
        with _stopped(self._known, self._program, until) as still:
            if not still or self._is_being_made() is not True:
                return
            began = time.monotonic()
            try:
                record = {"files": self._stored(until - min(self.rest_s, (until - began) / 2))}
            except BaseException:  # the room is the images', before any of them is written
                self._forget()
                raise
            if record["files"]:
                (self._into / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
            self._seen = True
            self.copying_s += time.monotonic() - began
        for told in openfiles.warnings(record):
            log.warning("%s", told)

    def _stored(self, until: float) -> list[dict[str, Any]]:
        found = self._in_place(self._now_standing()).values()
        more = _bytes_of(found)
        if more > self.size:  # than there was room for when the checkpoint was asked for
            need = max(0, self.room - _taken_in(self._images)) + more
            problem = check_storage(self._into, need, len(found) + 1)
            if problem is not None:
                raise NoRoom(f"its files could not be copied: {problem}")
        return stored(found, self._into, until)

    def _is_being_made(self) -> bool | None:
        """None: no image is begun. False: one has its name, and its process may run again."""
        names = [path.name for path in self._images.iterdir()]
        if any(name.endswith(".dmtcp") for name in names):
            return False
        return True if any(name.endswith(".temp") for name in names) else None

    def _forget(self) -> None:
        self._seen, self._failed = False, None
        shutil.rmtree(self._into / COPIES, ignore_errors=True)
        (self._into / RECORD).unlink(missing_ok=True)

    # ── looking ───────────────────────────────────────────────────────────────────────────
    def _now(self) -> dict[str, Written]:
        """Without what they have from this process: its output."""
        ours = written_by([os.getpid()])
        return {
            path: one
            for path, one in _written_by(self._program).items()
            if path not in ours and not self._is_dmtcps(path)
        }

    def _now_standing(self) -> dict[str, Written]:
        return {path: one for path, one in self._now().items() if path not in self._only_read}

    def _is_dmtcps(self, path: str) -> bool:
        return path.startswith(self._besides) or openfiles.is_not_the_programs(path)

    @staticmethod
    def _in_place(written: dict[str, Written]) -> dict[str, Written]:
        return {path: one for path, one in written.items() if one.in_place}


def _bytes_of(found: Iterable[Written]) -> int:
    """Of what is to be copied. One that is too large fails the save."""
    sizes = (one.size for one in found if not one.is_left_out)
    return sum(size for size in sizes if size <= openfiles.COPY_MOST)


def _taken_in(images: Path) -> int:
    """By what there is of them."""
    return sum(path.stat().st_blocks * 512 for path in images.iterdir())


def _written_by(program: Program) -> dict[str, Written]:
    """Raises SaveFailed: what cannot be seen may be written in place."""
    while True:
        pids = list(living(program.tree()))
        try:
            return written_by(pids)
        except OSError as error:
            if pids == list(living(pids)):  # or one has ended meanwhile
                why = f"the files it has open cannot be looked at: {error}"
                raise SaveFailed(why) from (None if isinstance(error, PermissionError) else error)


def _with_starts(pids: Iterable[int]) -> dict[int, int]:
    """A pid alone may be somebody else's by the time that it is told something."""
    stats = ((pid, processes.stat_of(pid)) for pid in pids)
    return {pid: stat.started for pid, stat in stats if stat is not None}


def _stop(found: Iterable[int], told: list[int]) -> None:
    for pid in set(found) - set(told):
        told.append(pid)
        _tell(pid, signal.SIGSTOP)


def _unchanged(known: Mapping[int, int]) -> list[int]:
    return [pid for pid, started in _with_starts(known).items() if started == known[pid]]


@contextlib.contextmanager
def _stopped(known: Mapping[int, int], program: Program, until: float) -> Iterator[bool]:
    """Whether every thread of its processes has stopped in time. Those that are `known` first:
    to look for others on a node of thousands takes as long as DMTCP for a small image."""
    pids: list[int] = []
    try:
        _stop(_unchanged(known), pids)
        _stop(program.tree(), pids)
        while not all(map(_has_stopped, pids)) and time.monotonic() < until:
            time.sleep(LOOK_EVERY_S)
        yield all(map(_has_stopped, pids))
    finally:
        for pid in pids:
            _tell(pid, signal.SIGCONT)


def _has_stopped(pid: int) -> bool:
    """One that writes an image stops when it is through with this piece of it."""
    try:
        threads = [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return True  # it has ended
    stats = map(processes.stat_of, threads)
    return all(stat is None or stat.state in _STOPPED for stat in stats)


def _tell(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
