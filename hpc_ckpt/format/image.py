"""A shard's file image: where each leaf lies in a valid safetensors file, and reading it back.

Lays out and parses headers; it neither copies leaves nor touches a disk. The header is padded
so that data starts at a page boundary, and leaves lie in descending item size, so that the
staging buffer is the file: no gaps, every leaf aligned to its own items.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..errors import HeaderError, UnsupportedState

DATA_ALIGNMENT = 4096
HEADER_CAP = 64 * 1024**2
"""Longest header written or read; safetensors itself refuses more than 100 MB."""
METADATA_NAME = "__metadata__"
METADATA = {"format": "hpc_ckpt", "version": "1"}
ITEM_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
    "F32": 32, "I32": 32, "U32": 32,
    "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "I8": 8, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E4M3FNUZ": 8, "F8_E5M2": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
"""Every dtype a shard may hold. What is not here is stored as U8 and named in the tree."""

_FILE_NAME = re.compile(r"rank-(\d{5,18})(?:\.([1-9]\d{0,17}))?\.safetensors")
_SPACED_COLON = re.compile(r'"\s+:')
_LENGTH_BYTES = 8
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}


class LeafSpec(Protocol):
    """What the layout needs to know of a leaf; state.tree.Leaf is one."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class ImageLayout:
    """One shard file before its leaves are copied in."""

    file_name: str
    header: bytes
    """Length, JSON and padding; the first bytes of the file, ending at a page boundary."""
    size: int
    """Exact size of the file."""
    spans: dict[str, tuple[int, int]]
    """Where each leaf lies in the file: [start, end)."""


class StoredLeaf(NamedTuple):
    """One leaf as a shard's header describes it; start and end are positions in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def shard_name(rank: int, part: int = 0) -> str:
    return f"rank-{rank:05d}{f'.{part}' if part else ''}.safetensors"


def parse_shard_name(name: str) -> tuple[int, int] | None:
    """(rank, part), or None for anything that is not the exact name of a shard."""
    match = _FILE_NAME.fullmatch(name)
    if match is None:
        return None
    rank, part = int(match[1]), int(match[2] or 0)
    return (rank, part) if shard_name(rank, part) == name else None


# ── writing ───────────────────────────────────────────────────────────────────────────────
def lay_out(
    leaves: Sequence[LeafSpec],
    rank: int = 0,
    *,
    first_part: int = 0,
    header_cap: int = HEADER_CAP,
) -> tuple[ImageLayout, ...]:
    """The files that hold one rank's leaves: one, unless its header would pass the cap.

    Descending item size, whole multiples of 64 bytes first, then the given order. No leaves
    still gives one valid file.
    """
    _refuse_duplicates(leaves)
    for leaf in leaves:
        _check_leaf(leaf)
    ordered = sorted(leaves, key=lambda leaf: (-ITEM_BITS[leaf.dtype], leaf.nbytes % 64 != 0))
    parts = _split(ordered, header_cap)
    return tuple(
        _lay_out_file(part, shard_name(rank, number))
        for number, part in enumerate(parts, first_part)
    )


def _refuse_duplicates(leaves: Iterable[LeafSpec]) -> None:
    seen: set[str] = set()
    for leaf in leaves:
        if leaf.name in seen:
            raise ValueError(f"two leaves are named {leaf.name!r}")
        seen.add(leaf.name)


def _check_leaf(leaf: LeafSpec) -> None:
    if leaf.name == METADATA_NAME:
        raise UnsupportedState(leaf.name, "safetensors reserves this name; use another key")
    if leaf.dtype not in ITEM_BITS:
        raise ValueError(f"leaf {leaf.name!r}: {leaf.dtype!r} is not a safetensors dtype")
    expected = _byte_count(leaf.dtype, leaf.shape, limit=leaf.nbytes)
    if expected != leaf.nbytes:
        raise ValueError(
            f"leaf {leaf.name!r}: {leaf.nbytes} bytes cannot hold "
            f"{leaf.dtype} of shape {tuple(leaf.shape)}"
        )
    try:
        leaf.name.encode("utf-8")
    except UnicodeEncodeError:
        message = "its name is not valid Unicode (a lone surrogate); rename the key"
        raise UnsupportedState(leaf.name, message) from None


def _byte_count(dtype: str, shape: Sequence[int], *, limit: int) -> int | None:
    """Bytes of a leaf; None if that is not whole or is above `limit` bytes."""
    items = 0 if 0 in shape else 1
    for extent in shape if items else ():
        items *= extent
        if items > limit * 8:  # also keeps a hostile shape from growing into a giant number
            return None
    whole, rest = divmod(items * ITEM_BITS[dtype], 8)
    return whole if rest == 0 and whole <= limit else None


def _split(leaves: Sequence[LeafSpec], header_cap: int) -> list[list[LeafSpec]]:
    """Consecutive groups whose padded headers each fit under the cap; at least one group."""
    room = header_cap // DATA_ALIGNMENT * DATA_ALIGNMENT - _LENGTH_BYTES
    if sum(map(_most_cost, leaves), 256) <= room:
        return [list(leaves)]
    parts: list[list[LeafSpec]] = [[]]
    used, offset = len(_encode({METADATA_NAME: METADATA})), 0
    empty = used
    for leaf in leaves:
        cost = _entry_cost(leaf, offset)
        if used + cost > room and parts[-1]:
            parts.append([])
            used, offset = empty, 0
            cost = _entry_cost(leaf, offset)
        if used + cost > room:
            raise UnsupportedState(leaf.name[:60] + "…", "its name is too long for a header")
        parts[-1].append(leaf)
        used, offset = used + cost, offset + leaf.nbytes
    return parts


def _entry_cost(leaf: LeafSpec, offset: int) -> int:
    """Bytes this leaf adds to a header: its entry without the braces, and a comma."""
    return len(_encode({leaf.name: _entry(leaf, offset)})) - 1


def _most_cost(leaf: LeafSpec) -> int:
    """No entry costs more: every character escaped, every number of twenty digits."""
    return 6 * len(leaf.name) + 21 * (len(leaf.shape) + 2) + 64


def _entry(leaf: LeafSpec, offset: int) -> dict[str, Any]:
    return {
        "dtype": leaf.dtype,
        "shape": list(leaf.shape),
        "data_offsets": [offset, offset + leaf.nbytes],
    }


def _encode(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def _lay_out_file(leaves: Sequence[LeafSpec], file_name: str) -> ImageLayout:
    record: dict[str, Any] = {METADATA_NAME: METADATA}
    offset = 0
    for leaf in leaves:
        record[leaf.name] = _entry(leaf, offset)
        offset += leaf.nbytes
    text = _encode(record)
    text += b" " * (-(_LENGTH_BYTES + len(text)) % DATA_ALIGNMENT)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    spans = {}
    for leaf in leaves:
        start, end = record[leaf.name]["data_offsets"]
        spans[leaf.name] = (len(header) + start, len(header) + end)
    return ImageLayout(file_name, header, len(header) + offset, spans)


# ── reading ───────────────────────────────────────────────────────────────────────────────
def header_length(prefix: bytes | memoryview, file_size: int) -> int:
    """Length of the whole header, from the first 8 bytes; checked before anyone allocates it."""
    if len(prefix) < _LENGTH_BYTES:
        raise HeaderError(f"the file has {len(prefix)} bytes; a header has at least 8")
    length = _LENGTH_BYTES + int.from_bytes(prefix[:_LENGTH_BYTES], "little")
    if length > file_size:
        raise HeaderError(f"the header claims {length} bytes, the file has {file_size}")
    if length > HEADER_CAP:
        raise HeaderError(f"the header claims {length} bytes, more than {HEADER_CAP}")
    if length % DATA_ALIGNMENT:
        raise HeaderError(f"data starts at byte {length}, not at a multiple of {DATA_ALIGNMENT}")
    return length


def read_header(data: bytes | memoryview, file_size: int | None = None) -> dict[str, StoredLeaf]:
    """The leaves of a shard, in file order; raises HeaderError for the first broken rule.

    `data` holds at least the header; `file_size` is the size of the file, if `data` is less.
    """
    size = len(data) if file_size is None else file_size
    length = header_length(data[:_LENGTH_BYTES], size)
    if len(data) < length:
        raise HeaderError(f"the header has {length} bytes, only {len(data)} were given")
    record = _parse(bytes(data[_LENGTH_BYTES:length]))
    _check_metadata(record.pop(METADATA_NAME, {}))
    leaves = {name: _read_entry(name, entry, length, size) for name, entry in record.items()}
    ordered = sorted(leaves.items(), key=lambda item: (item[1].start, item[1].end))
    _check_contiguous(ordered, length, size)
    return dict(ordered)


def _parse(text: bytes) -> dict[str, Any]:
    stripped = text.rstrip(b" ")
    if not (stripped.startswith(b"{") and stripped.endswith(b"}")):
        raise HeaderError("the header is not one JSON object padded with spaces")
    try:
        decoded = stripped.decode("utf-8")
        record = json.loads(decoded)
        if not _lost_no_key(decoded, record):
            record = json.loads(decoded, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"the header is not JSON: {error}") from None
    return dict(record)


def _lost_no_key(text: str, record: dict[str, Any]) -> bool:
    """Whether no key came twice, where that is easily seen; False says nothing.

    Without escapes, and without space before a colon, '":' ends each key; elsewhere it can only
    begin a text, which makes the count larger. A key that came twice was counted twice.
    """
    if "\\" in text or _SPACED_COLON.search(text):
        return False
    inner = sum(len(entry) for entry in record.values() if type(entry) is dict)
    return text.count('":') == len(record) + inner


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads: the object, or ValueError where a key comes twice. Slow."""
    record: dict[str, Any] = {}
    for name, value in pairs:
        if name in record:
            raise ValueError(f"the key {name!r} comes twice")
        record[name] = value
    return record


def _check_metadata(metadata: object) -> None:
    texts = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if not texts:
        raise HeaderError(f"{METADATA_NAME} is not a map from text to text")


def _read_entry(name: str, entry: object, length: int, size: int) -> StoredLeaf:
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        raise HeaderError(f"leaf {name!r}: its entry must have exactly {sorted(_ENTRY_KEYS)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise HeaderError(f"leaf {name!r}: unknown dtype {dtype!r}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise HeaderError(f"leaf {name!r}: shape and data_offsets must be lists of counts")
    start, end = offsets
    if not start <= end <= size - length:
        raise HeaderError(f"leaf {name!r}: bytes {start} to {end} lie outside the file")
    if _byte_count(dtype, shape, limit=end - start) != end - start:
        raise HeaderError(f"leaf {name!r}: {end - start} bytes do not hold {dtype} of its shape")
    return StoredLeaf(dtype, tuple(shape), length + start, length + end)


def _are_counts(value: object) -> bool:
    if type(value) is not list or (value and set(map(type, value)) != {int}):
        return False
    return not value or min(value) >= 0


def _check_contiguous(ordered: list[tuple[str, StoredLeaf]], length: int, size: int) -> None:
    position = length
    for name, leaf in ordered:
        if leaf.start != position:
            what = "overlaps the leaf before it" if leaf.start < position else "leaves a gap"
            raise HeaderError(f"leaf {name!r}: {what}, at byte {leaf.start} of the file")
        position = leaf.end
    if position != size:
        raise HeaderError(f"the leaves end at byte {position}, the file has {size}")
