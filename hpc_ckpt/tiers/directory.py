"""A tier that is a directory: one sub-directory per checkpoint, made visible by one rename.

Reads and removes; tiers/staging.py writes and commits. It does not decide what to keep
(tiers/retention.py) nor who may write (lease.py; the caller passes a guard).
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from .. import fsio
from ..errors import CheckpointError, CorruptCheckpoint, NewerCheckpoint, NoCheckpoint
from ..format.defects import Defect
from ..format.manifest import CHUNK, Manifest
from ..format.reading import never
from ..format.verify import (
    PIN_NAME,
    OpenCheckpoint,
    Reader,
    open_reader,
    open_verified,
    read_manifest,
    verify,
)
from ..rundir import MANIFEST_NAME, CheckpointKey
from .base import Summary
from .references import References
from .staging import DirectoryStaging

LEFTOVERS = ("tmp", "trash", "was")
"""What a killed writer may leave behind: .NAME-g…"""
_LEFTOVER = re.compile(rf"\.(?:{'|'.join(LEFTOVERS)})-g(\d{{8,}})-.+")
_HIDDEN = re.compile(r"\.(was|trash)-g\d{8,}-(step-\d+-g\d+(?:-r\d+)?)-\d+-\d+-.+")


class DirectoryTier:
    """Checkpoints under one directory, which is made when the first one is staged."""

    def __init__(
        self, path: str | os.PathLike[str], *, name: str = "shared", chunk: int = CHUNK
    ) -> None:
        self.path = Path(path)
        self.name = name
        self.chunk = chunk
        self._live: set[str] = set()
        self._made = False
        self.stands_in: Path | None = None
        """A directory that must be there before this one is made: else it is not mounted."""
        self.claim: Callable[[], None] = lambda: None
        """Called once the directory is made: an OSError keeps everything from being saved there."""
        self.references = References()
        """By what is being written."""
        self._summaries: dict[CheckpointKey, tuple[tuple[int, ...] | None, Summary]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, name={self.name!r})"

    # ── reading ───────────────────────────────────────────────────────────────────────────
    def keys(self) -> list[CheckpointKey]:
        keys = (CheckpointKey.parse(name) for name in fsio.names_in(self.path))
        return sorted(key for key in keys if key is not None)

    def path_of(self, key: CheckpointKey) -> Path:
        return self.path / key.directory_name

    def manifest(self, key: CheckpointKey) -> Manifest:
        return read_manifest(self.path_of(key))

    def summary(self, key: CheckpointKey) -> Summary:
        look = self._look(key)
        known = self._summaries.get(key)
        if known is None or known[0] != look:
            manifest = self.manifest(key)
            known = (look, Summary(manifest.metrics, manifest.holders))
            self._summaries[key] = known
        return known[1]

    def _look(self, key: CheckpointKey) -> tuple[int, ...] | None:
        """Changes when the manifest does, which only damage can do."""
        try:
            found = (self.path_of(key) / MANIFEST_NAME).stat()
        except OSError:
            return None
        return (found.st_ino, found.st_size, found.st_mtime_ns)

    def remember(self, manifest: Manifest) -> None:
        """Just published: it need not be read again to be known."""
        summary = Summary(manifest.metrics, manifest.holders)
        self._summaries[manifest.key] = (self._look(manifest.key), summary)

    def verify(self, key: CheckpointKey, stop: Callable[[], bool] = never) -> list[Defect]:
        return verify(self.path_of(key), stop)

    def open(self, key: CheckpointKey) -> OpenCheckpoint:
        return open_verified(self.path_of(key))

    def reader(self, key: CheckpointKey, stop: Callable[[], bool] = never) -> Reader:
        return open_reader(self.path_of(key), stop)

    # ── writing ───────────────────────────────────────────────────────────────────────────
    def stage(self, key: CheckpointKey) -> DirectoryStaging:
        return DirectoryStaging(self, key)

    def make(self) -> None:
        """Make the directory, the first time. One that was there and is gone is not made again:
        what is written where a file system should be mounted is lost when it comes back."""
        if not self._made:
            if self.stands_in is not None and not fsio.is_directory(self.stands_in):
                away = "the run directory is not there (not mounted?)"
                raise FileNotFoundError(errno.ENOENT, away, str(self.stands_in))
            fsio.make_directory(self.path)
            self.claim()
            self._made = True

    def pinned(self, key: CheckpointKey) -> bool:
        return fsio.exists(self.path_of(key) / PIN_NAME)

    def pin(self, key: CheckpointKey, *, pinned: bool = True) -> None:
        pin = self.path_of(key) / PIN_NAME
        try:
            if pinned:
                pin.touch(mode=fsio.file_mode(pin.parent))
                fsio.sync_directory(pin.parent)
            else:
                pin.unlink(missing_ok=True)
        except FileNotFoundError:
            raise NoCheckpoint(self.path_of(key)) from None

    def remove(self, key: CheckpointKey) -> bool:
        if self.pinned(key):
            return False
        trash = self._hidden("trash", key)
        self._live.add(trash.name)
        try:
            return self._remove(key, trash)
        finally:
            self._live.discard(trash.name)

    def _remove(self, key: CheckpointKey, trash: Path) -> bool:
        # Whoever refers to it is either staged, and then marked, or committed, and then listed:
        # the list is made after the mark, for what is committed meanwhile was marked before.
        with self.references.removing(key.directory_name) as free:
            if not free or self._is_held(key):
                return False
            try:
                self.path_of(key).rename(trash)
            except FileNotFoundError:
                return True
            self._summaries.pop(key, None)
        fsio.reached("remove.renamed")
        if fsio.exists(trash / PIN_NAME):  # set since the first look
            trash.rename(self.path_of(key))
            return False
        self._delete(trash)
        return True

    def _hidden(self, kind: str, key: CheckpointKey) -> Path:
        name = f".{kind}-g{key.generation:08d}-{key.directory_name}-{fsio.unique_suffix()}"
        return self.path / name

    @contextlib.contextmanager
    def replacing(self, key: CheckpointKey) -> Iterator[None]:
        """What is broken makes room for a whole one of the same name, which is published inside.

        It comes back if that fails: others may refer to what is intact in it.
        """
        was = self._hidden("was", key)
        self._live.add(was.name)
        try:
            self.path_of(key).rename(was)
            self._summaries.pop(key, None)
            fsio.reached("replace.hidden")
            try:
                yield
            except BaseException:  # put back, then raised again
                with contextlib.suppress(OSError):
                    was.rename(self.path_of(key))
                raise
            fsio.reached("remove.renamed")
            self._discard(was, key)
        finally:
            self._live.discard(was.name)

    def _is_held(self, key: CheckpointKey) -> bool:
        """Whether a checkpoint refers to this one; a broken one cannot be restored anyway."""
        for other in self.keys():
            try:
                if key in self.summary(other).holders:
                    return True
            except NewerCheckpoint:
                if key < other:  # it may refer to any that is older
                    return True
            except CheckpointError as error:
                if isinstance(error, CorruptCheckpoint) and error.passing:
                    raise  # it may refer to anything
        return False

    def _delete(self, trash: Path) -> None:
        # Without this a crash could bring back the name without all of its files.
        fsio.sync_directory(self.path)
        fsio.delete_tree(trash, point="remove.entry")
        fsio.reached("remove.deleted")

    def _discard(self, was: Path, key: CheckpointKey) -> None:
        """What was set aside, now that a whole one has its name; a pin goes over to that."""
        if fsio.exists(was / PIN_NAME) and not self.pinned(key):
            self.pin(key)
            fsio.reached("replace.pinned")
        self._delete(was)

    def recover(self) -> None:
        for name in fsio.names_in(self.path):
            if name in self._live or self._put_back(name):
                continue
            hidden = _HIDDEN.fullmatch(name)
            key = None if hidden is None else CheckpointKey.parse(hidden[2])
            # Should the whole one go before it, it would come back.
            if hidden is not None and key is not None and hidden[1] == "was":
                self._discard(self.path / name, key)

    def sweep(self, generation: int) -> None:
        for name in fsio.names_in(self.path):
            leftover = _LEFTOVER.fullmatch(name)
            if leftover is None or int(leftover[1]) > generation or name in self._live:
                continue
            if self._put_back(name):
                continue
            fsio.reached("sweep.found")
            fsio.delete_tree(self.path / name, point="sweep.entry")
            fsio.reached("sweep.deleted")

    def _put_back(self, name: str) -> bool:
        """Hidden when its writer was killed: to be replaced, and others may refer to it; or to be
        removed, and somebody had pinned it meanwhile."""
        hidden = _HIDDEN.fullmatch(name)
        key = None if hidden is None else CheckpointKey.parse(hidden[2])
        if hidden is None or key is None or fsio.exists(self.path_of(key)):
            return False
        if hidden[1] == "trash" and not fsio.exists(self.path / name / PIN_NAME):
            return False
        fsio.reached("recover.found")
        (self.path / name).rename(self.path_of(key))
        fsio.reached("recover.renamed")
        fsio.sync_directory(self.path)
        return True
