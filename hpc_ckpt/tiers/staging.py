"""A checkpoint being written into a directory tier, and the commit that makes it visible.

Who may publish is the caller's business: it passes a guard.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from .. import fsio
from ..errors import CheckpointError, CorruptCheckpoint
from ..format.defects import Defect, DefectKind
from ..format.image import DATA_ALIGNMENT, ImageLayout
from ..format.manifest import Manifest, ShardRecord, digest
from ..format.reading import Broken, shard_file
from ..format.verify import PIN_NAME, verify
from ..rundir import MANIFEST_NAME, CheckpointKey
from .base import Committed
from .wholeness import broken, holds
from .writing import Pace, write_chunk, write_image

if TYPE_CHECKING:
    from .directory import DirectoryTier

_OCCUPIED = (errno.EEXIST, errno.ENOTEMPTY)

YOUNG_S = 24 * 3600.0
"""No site removes what is younger."""


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
        self._tier.references.release(self._holders)
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
        """This checkpoint uses a shard that an older one holds; readers must be able to open it."""
        if record.holder is None:
            raise ValueError(f"{record.file}: no holder is named")
        if not self._tier.references.refer(record.holder):
            raise FileNotFoundError(errno.ENOENT, "is being removed", record.holder)
        self._holders.append(record.holder)
        try:
            with shard_file(self.path, record) as descriptor:
                _keep_young(descriptor, self._tier.path / record.holder / MANIFEST_NAME)
        except Broken as broken:
            missing = broken.defect.kind is DefectKind.SHARD_MISSING
            code = errno.ENOENT if missing else errno.EIO
            raise OSError(code, str(broken.defect)) from None
        self._written[record.place] = record

    def commit(
        self,
        manifest: Manifest,
        guard: Callable[[], None],
        elsewhere: Manifest | None = None,
    ) -> Committed:
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
            numbered = replace(manifest, revision=_revision(newest, elsewhere, manifest))
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
        path = self._tier.path_of(self._key)
        room: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        self._write_manifest(data)
        if fsio.is_directory(path):
            if holds(self._tier, manifest):
                guard()
                fsio.sync_directory(self._tier.path)
                return Committed(self._key, path, _size_of(path, manifest), reused=True)
            if not broken(self._tier, self._key):
                raise CheckpointError(f"{path}: another state is there under the same name")
            guard()
            if self._tier.pinned(self._key):  # published with it: no moment without a pin
                (self.path / PIN_NAME).touch(mode=fsio.file_mode(self.path))
            room = self._tier.replacing(self._key)
        with room:
            if not self._publish(self._key, data, guard):
                raise CheckpointError(f"{path}: made by another process in this very moment")
        self._tier.remember(manifest)
        return Committed(self._key, path, _size_of(path, manifest))


def _revision(here: CheckpointKey | None, elsewhere: Manifest | None, manifest: Manifest) -> int:
    """One name, one state, over all tiers: readers take the same name for the same thing."""
    if elsewhere is None or (here is not None and here >= elsewhere.key):
        return 0 if here is None else here.revision + 1
    return elsewhere.revision + (not elsewhere.same_content(manifest))


def _keep_young(shard: int, manifest: Path) -> None:
    """Scratch file systems remove what is old: what the newest checkpoint needs is not."""
    with contextlib.suppress(OSError):  # another owner's: then the site has to spare it
        if os.fstat(shard).st_mtime < time.time() - YOUNG_S:
            os.utime(shard)
            os.utime(manifest)


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
