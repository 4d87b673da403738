"""Reading a checkpoint without trusting it: every byte is checked before anyone uses it.

verify() lists what is wrong with a directory; open_verified() reads each byte once, checks it,
and hands out views of what it read. Neither writes, repairs or chooses between checkpoints.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import fsio
from ..errors import CorruptCheckpoint, HeaderError, ManifestError, NoCheckpoint
from ..rundir import MANIFEST_NAME, CheckpointKey
from .defects import Defect, DefectKind
from .image import StoredLeaf, header_length, read_header
from .manifest import MANIFEST_CAP, Manifest, ShardRecord, digest

__all__ = [
    "PIN_NAME",
    "Defect",
    "DefectKind",
    "OpenCheckpoint",
    "open_verified",
    "read_manifest",
    "verify",
]

PIN_NAME = "PIN"
"""A file of this name keeps a checkpoint from retention; its content means nothing."""

# O_NONBLOCK: a FIFO under a shard's name must not hang the reader before it is refused.
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class _Broken(Exception):
    """Carries one defect out of a reading step."""

    def __init__(self, kind: DefectKind, file: str, detail: str) -> None:
        super().__init__(detail)
        self.defect = Defect(kind, file, detail)


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint in memory, every byte of it verified."""

    path: Path
    manifest: Manifest
    leaves: dict[str, tuple[StoredLeaf, memoryview]]
    """Stored leaves by name; use leaf() and leaf_info(), which know aliases too."""

    def leaf(self, name: str) -> memoryview:
        """The bytes of a leaf, a writable view into the buffer that was read."""
        return self._find(name)[1]

    def leaf_info(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) as stored."""
        stored = self._find(name)[0]
        return stored.dtype, stored.shape

    def _find(self, name: str) -> tuple[StoredLeaf, memoryview]:
        return self.leaves[self.manifest.aliases.get(name, name)]


def verify(directory: Path) -> list[Defect]:
    """What is wrong with a checkpoint; empty means every invariant holds.

    Never raises for bad content. Memory: one chunk, whatever the size of the shards.
    """
    try:
        manifest = _load_manifest(directory)
    except _Broken as broken:
        return [broken.defect]
    defects = _check_name(directory, manifest) + _stray_files(directory, manifest)
    headers: dict[str, dict[str, StoredLeaf]] = {}
    for record in manifest.shards:
        found, leaves = _verify_shard(directory, record)
        defects += found
        headers[record.file] = leaves
    return defects or _check_leaves(manifest, headers)


def open_verified(directory: Path) -> OpenCheckpoint:
    """Read and check every byte once; raises CorruptCheckpoint with all defects found.

    A stray file is verify's to report, not a reason to go back to an older checkpoint: network
    file systems make such files by themselves (.nfs…). NoCheckpoint means the directory is not
    there, or went while it was being read.
    """
    try:
        manifest = _load_manifest(directory)
    except _Broken as broken:
        raise _rejected(directory, [broken.defect]) from None
    defects = _check_name(directory, manifest)
    headers: dict[str, dict[str, StoredLeaf]] = {}
    buffers: dict[str, memoryview] = {}
    for record in manifest.shards:
        found, headers[record.file], buffers[record.file] = _load_shard(directory, record)
        defects += found
    defects = defects or _check_leaves(manifest, headers)
    if defects:
        raise _rejected(directory, defects)
    leaves = {
        name: (stored, buffers[file][stored.start : stored.end])
        for file, header in headers.items()
        for name, stored in header.items()
    }
    return OpenCheckpoint(directory, manifest, leaves)


def read_manifest(directory: Path) -> Manifest:
    """The manifest alone, checked by its own digest; the shards are not looked at."""
    try:
        return _load_manifest(directory)
    except _Broken as broken:
        raise _rejected(directory, [broken.defect]) from None


def _rejected(directory: Path, defects: list[Defect]) -> CorruptCheckpoint | NoCheckpoint:
    if not directory.is_dir():
        return NoCheckpoint(directory)
    return CorruptCheckpoint(directory, defects)


# ── the manifest and what surrounds it ────────────────────────────────────────────────────
def _load_manifest(directory: Path) -> Manifest:
    try:
        with _regular_file(directory, MANIFEST_NAME, DefectKind.MANIFEST_MISSING) as descriptor:
            data = _read_manifest_bytes(descriptor)
        return Manifest.from_bytes(data)
    except ManifestError as error:
        defect = error.defect
        if not isinstance(defect, Defect):
            raise
        raise _Broken(defect.kind, defect.file, defect.detail) from None


def _read_manifest_bytes(descriptor: int) -> bytes:
    size = os.fstat(descriptor).st_size
    if size > MANIFEST_CAP:
        detail = f"{size} bytes; no manifest is larger than {MANIFEST_CAP}"
        raise _Broken(DefectKind.MANIFEST_UNREADABLE, MANIFEST_NAME, detail)
    buffer = bytearray(size)
    filled = _read_into(descriptor, memoryview(buffer), 0)
    return bytes(buffer[:filled])


def _check_name(directory: Path, manifest: Manifest) -> list[Defect]:
    """A directory that is named like a checkpoint must be that checkpoint.

    Under any other name it is a copy somebody made, and none the worse for it.
    """
    named = CheckpointKey.parse(directory.name)
    if named is None or named == manifest.key:
        return []
    detail = f"says {manifest.key.directory_name}, the directory is {directory.name}"
    return [Defect(DefectKind.KEY_MISMATCH, MANIFEST_NAME, detail)]


def _stray_files(directory: Path, manifest: Manifest) -> list[Defect]:
    """Files in the directory that the manifest does not know."""
    known = {MANIFEST_NAME, PIN_NAME, *(record.file for record in manifest.shards)}
    try:
        names = fsio.names_in(directory)
    except OSError as error:
        return [Defect(DefectKind.UNREADABLE, ".", str(error))]
    strays = [name for name in names if name not in known]
    detail = "the manifest does not name it; move it out of the checkpoint"
    return [Defect(DefectKind.UNEXPECTED_FILE, name, detail) for name in strays]


# ── shards ────────────────────────────────────────────────────────────────────────────────
def _verify_shard(
    directory: Path, record: ShardRecord
) -> tuple[list[Defect], dict[str, StoredLeaf]]:
    """Chunk by chunk through one buffer, then the header again by itself."""
    try:
        with _regular_file(directory, record.file, DefectKind.SHARD_MISSING) as descriptor:
            _check_size(descriptor, record)
            buffer = memoryview(bytearray(min(record.chunk, record.size)))
            defects = _check_chunks(descriptor, record, lambda start, end: buffer[: end - start])
            return defects, {} if defects else _stream_header(descriptor, record)
    except _Broken as broken:
        return [broken.defect], {}


def _load_shard(
    directory: Path, record: ShardRecord
) -> tuple[list[Defect], dict[str, StoredLeaf], memoryview]:
    """The whole shard in page-aligned memory, checked as it comes in."""
    nothing = memoryview(b"")
    try:
        with _regular_file(directory, record.file, DefectKind.SHARD_MISSING) as descriptor:
            _check_size(descriptor, record)
            buffer = memoryview(mmap.mmap(-1, record.size)) if record.size else nothing
            defects = _check_chunks(descriptor, record, lambda start, end: buffer[start:end])
        return defects, {} if defects else _parse_header(buffer, record), buffer
    except _Broken as broken:
        return [broken.defect], {}, nothing


@contextmanager
def _regular_file(directory: Path, name: str, missing: DefectKind) -> Iterator[int]:
    """An open descriptor; every way in which the file cannot be read becomes a defect."""
    try:
        descriptor = os.open(directory / name, _OPEN_FLAGS)
    except FileNotFoundError:
        raise _Broken(missing, name, f"not in {directory}") from None
    except OSError as error:
        raise _Broken(DefectKind.UNREADABLE, name, error.strerror or str(error)) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _Broken(DefectKind.UNREADABLE, name, "not a regular file")
        yield descriptor
    except OSError as error:
        raise _Broken(DefectKind.UNREADABLE, name, error.strerror or str(error)) from None
    finally:
        os.close(descriptor)


def _check_size(descriptor: int, record: ShardRecord) -> None:
    """Before anything is allocated: the manifest's number must be the file's."""
    size = os.fstat(descriptor).st_size
    if size != record.size:
        detail = f"{size} bytes, the manifest says {record.size}"
        raise _Broken(DefectKind.SHARD_SIZE, record.file, detail)


def _check_chunks(
    descriptor: int, record: ShardRecord, place: Callable[[int, int], memoryview]
) -> list[Defect]:
    """Read each chunk into the place given for it; one defect for each that differs."""
    defects = []
    for number, expected in enumerate(record.digests):
        start = number * record.chunk
        end = min(start + record.chunk, record.size)
        view = place(start, end)
        if _read_into(descriptor, view, start) != end - start:
            detail = f"ended inside chunk {number} while it was being read"
            raise _Broken(DefectKind.SHARD_SIZE, record.file, detail)
        found = digest(view)
        if found != expected:
            detail = (
                f"chunk {number} (bytes {start} to {end}) has {found}, the manifest says {expected}"
            )
            defects.append(Defect(DefectKind.CHUNK_DIGEST, record.file, detail))
    return defects


def _read_into(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill the view from the file at `offset`; returns less only at the end of the file."""
    filled = 0
    while filled < len(view):
        count = os.preadv(descriptor, [view[filled:]], offset + filled)
        if count == 0:
            break
        filled += count
    return filled


def _stream_header(descriptor: int, record: ShardRecord) -> dict[str, StoredLeaf]:
    try:
        length = header_length(os.pread(descriptor, 8, 0), record.size)
    except HeaderError as error:
        raise _Broken(DefectKind.SHARD_HEADER, record.file, str(error)) from None
    buffer = memoryview(bytearray(length))
    _read_into(descriptor, buffer, 0)
    return _parse_header(buffer, record)


def _parse_header(data: memoryview, record: ShardRecord) -> dict[str, StoredLeaf]:
    try:
        return read_header(data, record.size)
    except HeaderError as error:
        raise _Broken(DefectKind.SHARD_HEADER, record.file, str(error)) from None


# ── leaves ────────────────────────────────────────────────────────────────────────────────
def _check_leaves(manifest: Manifest, headers: dict[str, dict[str, StoredLeaf]]) -> list[Defect]:
    """Every name the tree or an alias uses is stored, exactly once."""
    defects = []
    stored: set[str] = set()
    for file, leaves in headers.items():
        for name in leaves:
            if name in stored:
                detail = f"leaf {name!r} is stored in another shard too"
                defects.append(Defect(DefectKind.LEAF_DUPLICATE, file, detail))
            stored.add(name)
    for alias, target in manifest.aliases.items():
        if alias in stored:
            detail = f"alias {alias!r} is also the name of a stored leaf"
            defects.append(Defect(DefectKind.LEAF_DUPLICATE, MANIFEST_NAME, detail))
        if target not in stored:
            detail = f"alias {alias!r} stands for {target!r}, which no shard holds"
            defects.append(Defect(DefectKind.LEAF_MISSING, MANIFEST_NAME, detail))
    for name in dict.fromkeys(_leaf_names(manifest.tree)):
        if name not in stored and name not in manifest.aliases:
            detail = f"the tree needs leaf {name!r}, which no shard holds"
            defects.append(Defect(DefectKind.LEAF_MISSING, MANIFEST_NAME, detail))
    return defects


def _leaf_names(tree: Any) -> Iterator[str]:
    """Names of the leaves a state tree refers to: nodes with a tag ("~") and a "leaf"."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if "~" in node and isinstance(node.get("leaf"), str):
                yield node["leaf"]
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)
