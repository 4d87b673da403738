"""Reading a checkpoint without trusting it: every byte is checked before anyone uses it.

verify() lists what is wrong with a directory; a Reader fills the memory it is given, and checks
each byte on the way. Neither writes, repairs or chooses between checkpoints.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import fsio
from ..errors import (
    CheckpointError,
    CorruptCheckpoint,
    HeaderError,
    ManifestError,
    NewerCheckpoint,
    NoCheckpoint,
)
from ..rundir import MANIFEST_NAME, CheckpointKey
from .defects import Defect, DefectKind
from .image import StoredLeaf, header_length, read_header
from .landing import Landing
from .manifest import (
    MANIFEST_CAP,
    TAIL_BYTES,
    Manifest,
    ShardRecord,
    ends_like_a_manifest,
)
from .reading import (
    Broken,
    Span,
    arenas,
    never,
    read_into,
    read_shard,
    regular_file,
    shard_file,
    spans_of,
)

__all__ = [
    "PIN_NAME",
    "Defect",
    "DefectKind",
    "OpenCheckpoint",
    "Reader",
    "manifest_bytes",
    "open_reader",
    "open_verified",
    "read_manifest",
    "verify",
]

PIN_NAME = "PIN"
"""A file of this name keeps a checkpoint from retention; its content means nothing."""

Headers = dict[str, dict[str, StoredLeaf]]
"""By the shard's place."""


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint in memory, every byte of it verified."""

    path: Path
    manifest: Manifest
    leaves: dict[str, tuple[StoredLeaf, memoryview]]
    """Stored leaves by name; use leaf() and leaf_info(), which know aliases too."""

    def leaf(self, name: str) -> memoryview:
        """The bytes of a leaf, a writable view of memory that is its own."""
        return self._find(name)[1]

    def leaf_info(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) as stored."""
        stored = self._find(name)[0]
        return stored.dtype, stored.shape

    def _find(self, name: str) -> tuple[StoredLeaf, memoryview]:
        return self.leaves[self.manifest.aliases.get(name, name)]


@dataclass(frozen=True)
class Reader:
    """A checkpoint whose manifest and headers were read, and whose leaves can now be."""

    path: Path
    manifest: Manifest
    headers: Headers
    raw: dict[str, bytes]
    """The bytes those headers were read from, by the shard's place."""

    def leaf_names(self, record: ShardRecord) -> frozenset[str]:
        """The leaves one shard holds."""
        return frozenset(self.headers[record.place])

    def read(self, own: Mapping[str, memoryview] | None = None) -> dict[str, memoryview]:
        """Every leaf: those in `own` into that memory, the others into new memory.

        Every byte is checked on the way; raises as fill() does.
        """
        own = own or {}
        places, spans = dict(own), {}
        for place, leaves in self.headers.items():
            fresh, filled = arenas((n, leaf) for n, leaf in leaves.items() if n not in own)
            places |= fresh
            spans[place] = sorted(
                [*filled, *spans_of(leaves, own)], key=lambda span: (span.start, span.end)
            )
        self._fill(spans)
        return places

    def fill(self, targets: Mapping[str, memoryview]) -> None:
        """Read and check every byte; put each leaf that has a target there.

        Raises CorruptCheckpoint with every defect found; the targets then hold nothing that may
        be used. NoCheckpoint: it went while it was being read.
        """
        self._fill({place: spans_of(leaves, targets) for place, leaves in self.headers.items()})

    def _fill(self, spans: Mapping[str, Sequence[Span]]) -> None:
        self._fill_through(None, spans)

    def _fill_through(self, landing: Landing | None, spans: Mapping[str, Sequence[Span]]) -> None:
        defects: list[Defect] = []
        for record in self.manifest.shards:
            try:
                defects += self._fill_from(record, spans[record.place], landing)
            except Broken as broken:
                defects.append(broken.defect)
        if defects:
            raise _rejected(self.path, defects)

    def _fill_from(
        self, record: ShardRecord, spans: Sequence[Span], landing: Landing | None
    ) -> list[Defect]:
        header = memoryview(bytearray(len(self.raw[record.place])))
        wanted = [Span(0, len(header), header), *spans]
        with shard_file(self.path, record) as descriptor:
            defects = read_shard(descriptor, record, wanted, landing=landing)
        if not defects and header != self.raw[record.place]:
            # What was parsed must be what was hashed: the disk said something else before.
            detail = "read twice, and not the same"
            defects = [Defect(DefectKind.SHARD_HEADER, record.place, detail)]
        return defects

    def load(self) -> OpenCheckpoint:
        """Every leaf, in new memory."""
        targets = self.read()
        leaves = {
            name: (stored, targets[name])
            for header in self.headers.values()
            for name, stored in header.items()
        }
        return OpenCheckpoint(self.path, self.manifest, leaves)


def verify(directory: Path, stop: Callable[[], bool] = never) -> list[Defect]:
    """What is wrong with a checkpoint; empty means every invariant holds.

    BrokenOff once `stop` says so; never raises for bad content. Memory: a few pieces, whatever
    the size of the shards.
    """
    try:
        manifest = _load_manifest(directory)
    except Broken as broken:
        return [broken.defect]
    defects = _check_name(directory, manifest) + _stray_files(directory, manifest)
    headers: Headers = {}
    for record in manifest.shards:
        found, headers[record.place] = _verify_shard(directory, record, stop)
        defects += found
    return defects or _check_leaves(manifest, headers)


def open_reader(directory: Path, stop: Callable[[], bool] = never) -> Reader:
    """Manifest, sizes and headers; raises CorruptCheckpoint with all defects found so far.

    Where a header is broken every byte is read; `stop` is asked as verify() asks it.

    A stray file is verify's to report, not a reason to go back to an older checkpoint: network
    file systems make such files by themselves (.nfs…). NoCheckpoint means the directory is not
    there, or went while it was being read; NewerCheckpoint that only a newer version can tell.
    """
    try:
        manifest = _load_manifest(directory)
    except Broken as broken:
        raise _rejected(directory, [broken.defect]) from None
    defects = _check_name(directory, manifest)
    headers: Headers = {}
    raw: dict[str, bytes] = {}
    for record in manifest.shards:
        try:
            with shard_file(directory, record) as descriptor:
                raw[record.place] = _header_bytes(descriptor, record)
                headers[record.place] = _parse_header(raw[record.place], record)
        except Broken as broken:
            defects.append(broken.defect)
    defects = defects or _check_leaves(manifest, headers)
    if defects:
        raise _rejected(directory, _in_full(directory, manifest, defects, stop))
    return Reader(directory, manifest, headers, raw)


def open_verified(directory: Path) -> OpenCheckpoint:
    """Read and check every byte once; raises CorruptCheckpoint with all defects found."""
    return open_reader(directory).load()


def _in_full(
    directory: Path, manifest: Manifest, found: list[Defect], stop: Callable[[], bool]
) -> list[Defect]:
    """A header that makes no sense may be a damaged one: the digests know."""
    suspects = {DefectKind.SHARD_HEADER, DefectKind.LEAF_MISSING, DefectKind.LEAF_DUPLICATE}
    if not any(defect.kind in suspects for defect in found):
        return found
    damaged = [
        defect for record in manifest.shards for defect in _verify_shard(directory, record, stop)[0]
    ]
    return _check_name(directory, manifest) + damaged if damaged else found


def read_manifest(directory: Path) -> Manifest:
    """The manifest alone, checked by its own digest; the shards are not looked at."""
    try:
        return _load_manifest(directory)
    except Broken as broken:
        raise _rejected(directory, [broken.defect]) from None


def _rejected(directory: Path, defects: list[Defect]) -> CheckpointError:
    if not fsio.is_directory(directory):
        return NoCheckpoint(directory)
    for defect in defects:
        if defect.kind is DefectKind.UNSUPPORTED_VERSION:
            return NewerCheckpoint(directory, defect.detail)
    return CorruptCheckpoint(directory, defects)


# ── the manifest and what surrounds it ────────────────────────────────────────────────────
def _load_manifest(directory: Path) -> Manifest:
    try:
        with regular_file(directory, MANIFEST_NAME, DefectKind.MANIFEST_MISSING) as descriptor:
            data = manifest_bytes(descriptor)
        return Manifest.from_bytes(data)
    except ManifestError as error:
        defect = error.defect
        if not isinstance(defect, Defect):
            raise
        raise Broken(defect.kind, defect.file, defect.detail) from None


def manifest_bytes(descriptor: int) -> bytes:
    size = os.fstat(descriptor).st_size
    if size > MANIFEST_CAP:
        detail = f"{size} bytes; no manifest is larger than {MANIFEST_CAP}"
        raise Broken(DefectKind.MANIFEST_UNREADABLE, MANIFEST_NAME, detail)
    # Before the rest is read: a file of nothing but holes must not become a gigabyte here.
    if not ends_like_a_manifest(os.pread(descriptor, TAIL_BYTES, max(0, size - TAIL_BYTES))):
        detail = "does not end as a manifest ends; it was cut off or overwritten"
        raise Broken(DefectKind.MANIFEST_UNREADABLE, MANIFEST_NAME, detail)
    buffer = bytearray(size)
    filled = read_into(descriptor, memoryview(buffer), 0)
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
    own = (record.file for record in manifest.shards if record.holder is None)
    known = {MANIFEST_NAME, PIN_NAME, *own}
    try:
        names = fsio.names_in(directory)
    except OSError as error:
        return [Defect(DefectKind.UNREADABLE, ".", str(error), passing=True)]
    strays = [name for name in names if name not in known]
    detail = "the manifest does not name it; move it out of the checkpoint"
    return [Defect(DefectKind.UNEXPECTED_FILE, name, detail) for name in strays]


# ── shards ────────────────────────────────────────────────────────────────────────────────
def _verify_shard(
    directory: Path, record: ShardRecord, stop: Callable[[], bool] = never
) -> tuple[list[Defect], dict[str, StoredLeaf]]:
    try:
        with shard_file(directory, record) as descriptor:
            defects = read_shard(descriptor, record, stop=stop)
            header = b"" if defects else _header_bytes(descriptor, record)
        return defects, {} if defects else _parse_header(header, record)
    except Broken as broken:
        return [broken.defect], {}


def _header_bytes(descriptor: int, record: ShardRecord) -> bytes:
    """Of the length it claims, once that was found possible."""
    fsio.set_direct(descriptor, direct=False)
    try:
        length = header_length(os.pread(descriptor, 8, 0), record.size)
    except HeaderError as error:
        raise Broken(DefectKind.SHARD_HEADER, record.place, str(error)) from None
    buffer = bytearray(length)
    read_into(descriptor, memoryview(buffer), 0)
    return bytes(buffer)


def _parse_header(data: bytes, record: ShardRecord) -> dict[str, StoredLeaf]:
    try:
        return read_header(data, record.size)
    except HeaderError as error:
        raise Broken(DefectKind.SHARD_HEADER, record.place, str(error)) from None


# ── leaves ────────────────────────────────────────────────────────────────────────────────
def _check_leaves(manifest: Manifest, headers: Headers) -> list[Defect]:
    """Every name the tree or an alias uses is stored, exactly once, and tied as it says."""
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
    missing: dict[str, Defect] = {}
    ties: list[Defect] = []
    for name, tied in _leaves_in(manifest.tree):
        target = manifest.aliases.get(name, _UNTIED)
        if target is _UNTIED and name not in stored:
            detail = f"the tree needs leaf {name!r}, which no shard holds"
            missing[name] = Defect(DefectKind.LEAF_MISSING, MANIFEST_NAME, detail)
        elif tied != target:
            told = f"is tied to {target!r}" if name in manifest.aliases else "is tied to none"
            detail = f"leaf {name!r} {told}, and the tree does not say so"
            ties.append(Defect(DefectKind.LEAF_TIED, MANIFEST_NAME, detail))
    return [*defects, *missing.values()] or ties


def _leaves_in(tree: Any) -> list[tuple[str, Any]]:
    """The leaves a state tree refers to, and what it says each is tied to: the text under "leaf"
    and "tied" in what a tag holds.

    Such a tag holds records of text and numbers: no other tag lies below it.
    """
    names: list[tuple[str, Any]] = []
    waiting = [tree] if type(tree) is dict or type(tree) is list else []
    while waiting:
        node = waiting.pop()
        if type(node) is dict and len(node) == 1 and not _LEAF_TAGS.isdisjoint(node):
            names.extend(_names_in(*node.values()))
            continue
        inner = node.values() if type(node) is dict else node
        waiting += [one for one in inner if type(one) is dict or type(one) is list]
    return names


_LEAF_TAGS = frozenset({"$tensor", "$array", "$sparse", "$quantized", "$generator"})


_UNTIED: Any = object()


def _names_in(fields: Any) -> list[tuple[str, Any]]:
    """The leaf a tag names, itself or in its parts."""
    if type(fields) is not dict:
        return []
    records = [fields] if "leaf" in fields else fields.values()
    return [
        (one["leaf"], one.get("tied", _UNTIED))
        for one in records
        if type(one) is dict and type(one.get("leaf")) is str
    ]
