"""A tier that is a directory: one sub-directory per checkpoint, made visible by one rename.

Writes, commits, reads, removes. It does not decide what to keep (tiers/retention.py) nor who
may write (lease.py; the caller passes a guard).
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from .. import fsio
from ..errors import CheckpointError, CorruptCheckpoint, NoCheckpoint
from ..format.defects import Defect, DefectKind
from ..format.image import DATA_ALIGNMENT, ImageLayout
from ..format.manifest import CHUNK, Manifest, ShardRecord, digest
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
from .base import Committed, Summary
from .wholeness import broken, holds
from .writing import Pace, write_chunk, write_image

_LEFTOVER = re.compile(r"\.(?:tmp|trash)-g(\d{8,})-.+")
_OCCUPIED = (errno.EEXIST, errno.ENOTEMPTY)


class DirectoryTier:
    """Checkpoints under one directory, which is made when the first one is staged."""

    def __init__(
        self, path: str | os.PathLike[str], *, name: str = "shared", chunk: int = CHUNK
    ) -> None:
        self.path = Path(path)
        self.name = name
        self.chunk = chunk
        self._live: set[str] = set()
        self._lock = threading.Lock()
        self._made = False
        self._referred: Counter[str] = Counter()
        """Names of checkpoints that something being written refers to."""
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

    def verify(self, key: CheckpointKey) -> list[Defect]:
        return verify(self.path_of(key))

    def open(self, key: CheckpointKey) -> OpenCheckpoint:
        return open_verified(self.path_of(key))

    def reader(self, key: CheckpointKey) -> Reader:
        return open_reader(self.path_of(key))

    # ── writing ───────────────────────────────────────────────────────────────────────────
    def stage(self, key: CheckpointKey) -> DirectoryStaging:
        return DirectoryStaging(self, key)

    def make(self) -> None:
        """Make the directory, the first time. One that was there and is gone is not made again:
        what is written where a file system should be mounted is lost when it comes back."""
        if not self._made:
            fsio.make_directory(self.path)
            self._made = True

    def pinned(self, key: CheckpointKey) -> bool:
        return (self.path_of(key) / PIN_NAME).exists()

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
        # Whoever refers to it is either staged, and then marked, or committed, and then listed.
        with self._lock:
            if self._referred[key.directory_name] or self._is_held(key):
                return False
            trash = self._hide(key)
        self._delete(trash)
        return True

    @contextlib.contextmanager
    def replacing(self, key: CheckpointKey) -> Iterator[None]:
        """What is broken makes room for a whole one of the same name, which is published inside.

        It comes back if that fails: others may refer to what is intact in it.
        """
        trash = self._hide(key)
        try:
            yield
        except BaseException:  # put back, then raised again
            if trash is not None:
                with contextlib.suppress(OSError):
                    trash.rename(self.path_of(key))
            raise
        self._delete(trash)

    def _is_held(self, key: CheckpointKey) -> bool:
        """Whether a checkpoint refers to this one; a broken one cannot be restored anyway."""
        for other in self.keys():
            try:
                if key in self.summary(other).holders:
                    return True
            except CheckpointError as error:
                if isinstance(error, CorruptCheckpoint) and error.passing:
                    raise  # it may refer to anything
        return False

    def _hide(self, key: CheckpointKey) -> Path | None:
        trash = self.path / (
            f".trash-g{key.generation:08d}-{key.directory_name}-{fsio.unique_suffix()}"
        )
        try:
            self.path_of(key).rename(trash)
        except FileNotFoundError:
            return None
        self._summaries.pop(key, None)
        return trash

    def _delete(self, trash: Path | None) -> None:
        if trash is None:
            return
        fsio.reached("remove.renamed")
        # Without this a crash could bring back the name without all of its files.
        fsio.sync_directory(self.path)
        fsio.delete_tree(trash, point="remove.entry")
        fsio.reached("remove.deleted")

    def sweep(self, generation: int) -> None:
        for name in fsio.names_in(self.path):
            leftover = _LEFTOVER.fullmatch(name)
            if leftover is None or int(leftover[1]) > generation or name in self._live:
                continue
            fsio.reached("sweep.found")
            fsio.delete_tree(self.path / name, point="sweep.entry")
            fsio.reached("sweep.deleted")


class DirectoryStaging:
    """A checkpoint being written into a temporary directory of its generation."""

    def __init__(self, tier: DirectoryTier, key: CheckpointKey) -> None:
        self._tier = tier
        self._key = key
        step = f"step-{key.step:09d}"
        self.path = tier.path / f".tmp-g{key.generation:08d}-{step}-{fsio.unique_suffix()}"
        self._written: dict[str, ShardRecord] = {}
        self._holders: list[str] = []

    def __enter__(self) -> DirectoryStaging:
        self._tier._live.add(self.path.name)
        try:
            self._tier.make()
            self.path.mkdir(mode=fsio.PRIVATE_DIRECTORY)
            self.path.chmod(fsio.directory_mode(self.path.parent))
            fsio.reached("stage.created")
        except BaseException:  # discarded, then raised again
            self._discard()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._discard()

    def _discard(self) -> None:
        """After a commit there is nothing of this name left; what resists is swept later."""
        with contextlib.suppress(OSError):
            fsio.delete_tree(self.path)
        self._tier._live.discard(self.path.name)
        with self._tier._lock:
            self._tier._referred.subtract(self._holders)
        self._holders.clear()

    def write_shard(
        self, layout: ImageLayout, image: memoryview, pace: Pace | None = None
    ) -> ShardRecord:
        """Write one file image; `image` is the file, header included, padded at most to a page."""
        image = _checked_image(layout, image)
        descriptor = fsio.create_file(self.path / layout.file_name)
        try:
            fsio.reached("shard.opened")
            digests = write_image(descriptor, image, self._tier.chunk, pace or Pace())
            fsio.reached("shard.written")
            os.fsync(descriptor)
            fsio.reached("shard.synced")
        finally:
            os.close(descriptor)
        record = ShardRecord(layout.file_name, layout.size, self._tier.chunk, digests)
        self._written[record.place] = record
        return record

    def refer(self, record: ShardRecord) -> None:
        """This checkpoint uses a shard that an older one holds; it must be there."""
        if record.holder is None:
            raise ValueError(f"{record.file}: no holder is named")
        with self._tier._lock:
            size = (self._tier.path / record.holder / record.file).stat().st_size
            self._tier._referred[record.holder] += 1
            self._holders.append(record.holder)
        if size != record.size:
            raise OSError(errno.EIO, f"{record.place} has {size} bytes, not {record.size}")
        self._written[record.place] = record

    def commit(self, manifest: Manifest, guard: Callable[[], None]) -> Committed:
        """Publish, or reuse what is there if it restores to the same state."""
        self._check_complete(manifest)
        while True:
            newest = self._newest_revision()
            if newest is not None and self._is_same(newest, manifest):
                guard()
                # The save that made it may have failed at exactly this step.
                fsio.sync_directory(self._tier.path)
                path = self._tier.path_of(newest)
                return Committed(newest, path, _size_of(path, manifest), reused=True)
            revision = 0 if newest is None else newest.revision + 1
            numbered = replace(manifest, revision=revision)
            data = numbered.to_bytes()
            self._write_manifest(data)
            if self._publish(numbered.key, data, guard):
                self._tier.remember(numbered)
                path = self._tier.path_of(numbered.key)
                return Committed(numbered.key, path, _size_of(path, numbered))

    def _check_complete(self, manifest: Manifest) -> None:
        named = (manifest.generation, manifest.step)
        if named != (self._key.generation, self._key.step):
            raise ValueError(f"staged {self._key}, but the manifest is for {manifest.key}")
        if {record.place: record for record in manifest.shards} != self._written:
            raise ValueError("the manifest names other shards than were written")

    def _newest_revision(self) -> CheckpointKey | None:
        named = (self._key.generation, self._key.step)
        present = self._tier.keys()
        return max((key for key in present if (key.generation, key.step) == named), default=None)

    def _is_same(self, key: CheckpointKey, manifest: Manifest) -> bool:
        """Only the newest revision counts, and only if its bytes are still what they were."""
        try:
            same = self._tier.manifest(key).same_content(manifest)
        except CheckpointError:
            return False
        return same and not verify(self._tier.path_of(key))

    def _write_manifest(self, data: bytes) -> None:
        path = self.path / MANIFEST_NAME
        path.unlink(missing_ok=True)
        descriptor = fsio.create_file(path)
        try:
            fsio.reached("manifest.opened")
            fsio.write_all(descriptor, memoryview(data))
            fsio.reached("manifest.written")
            os.fsync(descriptor)
            fsio.reached("manifest.synced")
        finally:
            os.close(descriptor)

    def _publish(self, key: CheckpointKey, manifest: bytes, guard: Callable[[], None]) -> bool:
        """THE COMMIT POINT: before the rename no reader sees the checkpoint, after it every
        reader does, and all of its bytes are on stable storage already. False if the name was
        taken meanwhile.
        """
        fsio.sync_directory(self.path)
        fsio.reached("commit.staged")
        guard()
        fsio.reached("commit.guarded")
        try:
            self.path.rename(self._tier.path_of(key))
        except OSError as error:
            if error.errno in _OCCUPIED:
                return False
            if not self._has_arrived(key, manifest):
                raise
        fsio.reached("commit.renamed")
        fsio.sync_directory(self._tier.path)
        fsio.reached("commit.durable")
        return True

    def _has_arrived(self, key: CheckpointKey, manifest: bytes) -> bool:
        """NFS may repeat a rename whose answer was lost, and report that the source is gone."""
        try:
            return (self._tier.path_of(key) / MANIFEST_NAME).read_bytes() == manifest
        except OSError:
            return False

    # ── a copy of another tier's checkpoint ───────────────────────────────────────────────
    def adopt(self, record: ShardRecord, chunks: Iterable[memoryview]) -> None:
        descriptor = fsio.create_file(self.path / record.file)
        try:
            fsio.reached("drain.opened")
            offset, direct = 0, fsio.set_direct(descriptor, direct=True)
            for number, (chunk, expected) in enumerate(zip(chunks, record.digests, strict=True)):
                found = digest(chunk)
                if found != expected:
                    detail = f"chunk {number} has {found}, the manifest says {expected}"
                    defect = Defect(DefectKind.CHUNK_DIGEST, record.file, detail)
                    raise CorruptCheckpoint(self.path, [defect])
                direct = write_chunk(descriptor, chunk, offset, direct=direct)
                offset += len(chunk)
                fsio.reached("drain.chunk")
            fsio.reached("drain.written")
            os.fsync(descriptor)
            fsio.reached("drain.synced")
        finally:
            os.close(descriptor)
        self._written[record.place] = record

    def commit_as(self, data: bytes, manifest: Manifest, guard: Callable[[], None]) -> Committed:
        self._check_complete(manifest)
        if manifest.key != self._key:
            raise ValueError(f"staged {self._key}, but the manifest is for {manifest.key}")
        path, pinned = self._tier.path_of(self._key), False
        room: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        self._write_manifest(data)
        if path.is_dir():
            if holds(self._tier, manifest):
                guard()
                fsio.sync_directory(self._tier.path)
                return Committed(self._key, path, _size_of(path, manifest), reused=True)
            if not broken(self._tier, self._key):
                raise CheckpointError(f"{path}: another state is there under the same name")
            guard()
            pinned, room = self._tier.pinned(self._key), self._tier.replacing(self._key)
        with room:
            if not self._publish(self._key, data, guard):
                raise CheckpointError(f"{path}: made by another process in this very moment")
        self._tier.remember(manifest)
        if pinned:
            self._tier.pin(self._key)
        return Committed(self._key, path, _size_of(path, manifest))


def _checked_image(layout: ImageLayout, image: memoryview) -> memoryview:
    """Exactly the file's bytes; a buffer padded to a whole page is cut."""
    flat = image.cast("B") if image.format != "B" or image.ndim != 1 else image
    if not layout.size <= len(flat) < layout.size + DATA_ALIGNMENT:
        raise ValueError(f"{layout.file_name}: {len(flat)} bytes given, {layout.size} laid out")
    if flat[: len(layout.header)] != layout.header:
        raise ValueError(f"{layout.file_name}: the image does not begin with its header")
    return flat[: layout.size]


def _size_of(path: Path, manifest: Manifest) -> int:
    own = sum(record.size for record in manifest.shards if record.holder is None)
    return own + (path / MANIFEST_NAME).stat().st_size
