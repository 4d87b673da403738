"""Drain: copy one committed checkpoint to another tier, byte for byte.

Every chunk is compared with its digest on the way, so that damage stays where it is. The commit
point is the tier's own. What is drained when is tiers/draining.py's.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from .. import fsio
from ..errors import CorruptCheckpoint, ManifestError, NoCheckpoint
from ..format.defects import DefectKind
from ..format.manifest import Manifest, ShardRecord
from ..format.reading import Broken, read_into, regular_file, shard_file
from ..format.verify import manifest_bytes
from ..rundir import MANIFEST_NAME, CheckpointKey
from .base import Committed, Tier
from .wholeness import holds


def drain(
    source: Tier,
    target: Tier,
    key: CheckpointKey,
    guard: Callable[[], None],
    pace: Callable[[int], None] | None = None,
    settled: set[CheckpointKey] | None = None,
    arrived: Callable[[CheckpointKey], None] = lambda holder: None,
) -> Committed:
    """Copy one checkpoint, after the older ones that hold shards of it.

    What is there already, whole and with the same state, is left alone; `settled` are those that
    need not be read again to know it, and grows; `arrived` hears of each holder that was not among
    them, and is whole now. `pace` is called with the bytes just copied,
    and may sleep. Raises CorruptCheckpoint if the source is damaged, NoCheckpoint if it has
    gone, and every OSError of the target as it is.
    """
    settled = set() if settled is None else settled
    directory = source.path_of(key)
    data, manifest = _read_manifest(directory, key)
    committed = _present(target, manifest, trusted=key in settled)
    if committed is None:
        for holder in sorted(manifest.holders):  # older ones: this comes to an end
            known = holder in settled
            drain(source, target, holder, guard, pace, settled, arrived)
            if not known:
                arrived(holder)
        committed = _copy(directory, target, data, manifest, guard, pace)
    settled.add(key)
    return committed


def _copy(
    directory: Path,
    target: Tier,
    data: bytes,
    manifest: Manifest,
    guard: Callable[[], None],
    pace: Callable[[int], None] | None,
) -> Committed:
    with target.stage(manifest.key) as staging:
        for record in manifest.shards:
            if record.holder is not None:
                staging.refer(record)
                continue
            with closing(_chunks(directory, record, pace)) as chunks:
                try:
                    staging.adopt(record, chunks)
                except CorruptCheckpoint as error:
                    raise CorruptCheckpoint(directory, error.defects) from None
        return staging.commit_as(data, manifest, guard)


def _present(target: Tier, manifest: Manifest, *, trusted: bool) -> Committed | None:
    path = target.path_of(manifest.key)
    if not fsio.is_directory(path) or not (trusted or holds(target, manifest)):
        return None
    # Whoever made it may have died between the rename and this.
    fsio.sync_directory(path.parent)
    size = sum(entry.stat().st_size for entry in path.iterdir())
    return Committed(manifest.key, path, size, reused=True)


def _read_manifest(directory: Path, key: CheckpointKey) -> tuple[bytes, Manifest]:
    with (
        _refusing(directory),
        regular_file(directory, MANIFEST_NAME, DefectKind.MANIFEST_MISSING) as descriptor,
    ):
        data = manifest_bytes(descriptor)
        try:
            manifest = Manifest.from_bytes(data)
        except ManifestError as error:
            raise CorruptCheckpoint(directory, [error.defect]) from None
        if manifest.key != key:
            detail = f"says {manifest.key.directory_name}, the directory is {directory.name}"
            raise Broken(DefectKind.KEY_MISMATCH, MANIFEST_NAME, detail)
        return data, manifest


def _chunks(
    directory: Path, record: ShardRecord, pace: Callable[[int], None] | None
) -> Generator[memoryview, None, None]:
    """The chunks of a shard, each in the same page-aligned memory."""
    buffer = memoryview(fsio.allocate(min(record.chunk, record.size)))
    with _refusing(directory), shard_file(directory, record) as descriptor:
        cached = fsio.is_cached(descriptor, record.size)
        for start in range(0, record.size, record.chunk):
            chunk = buffer[: min(record.chunk, record.size - start)]
            if read_into(descriptor, chunk, start) != len(chunk):
                detail = f"ended after byte {start} while it was being read"
                raise Broken(DefectKind.SHARD_SIZE, record.file, detail)
            if not cached:  # what nobody reads again must not drive out what somebody will
                os.posix_fadvise(descriptor, start, len(chunk), os.POSIX_FADV_DONTNEED)
            yield chunk
            if pace is not None:
                pace(len(chunk))


@contextmanager
def _refusing(directory: Path) -> Iterator[None]:
    """A defect becomes CorruptCheckpoint, or NoCheckpoint if it was removed meanwhile."""
    try:
        yield
    except Broken as broken:
        if not fsio.is_directory(directory):
            raise NoCheckpoint(directory) from None
        raise CorruptCheckpoint(directory, [broken.defect]) from None
