"""The manifest: index and commit record of one checkpoint, and the digest it is built on.

Turns a record into bytes and bytes into a record that has been checked field by field. It
touches no disk; format/verify.py compares a manifest with the files beside it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import xxhash

from ..errors import ManifestError
from ..rundir import MANIFEST_NAME, CheckpointKey
from .defects import Defect, DefectKind
from .image import parse_shard_name, unique_keys

FORMAT_VERSION: Final = 1
CHUNK = 16 * 1024**2
"""Shards carry one digest for every chunk of this many bytes."""
CHUNK_STEP = 4096
CHUNK_CAP = 1024**3
MANIFEST_CAP = 1024**3
"""No manifest is larger. Parsed, one takes some thirty times its bytes at the worst."""

_COUNT_CAP = 2**63 - 1
_DIGEST = re.compile(r"[0-9a-f]{32}")
_TAIL = re.compile(rb'"digest": "([0-9a-f]{32})"\n\}\n')
_TAIL_BYTES = TAIL_BYTES = 47
_SHARD_KEYS = ("file", "size", "chunk", "digests")
_HOLDER_KEY = "in"


def digest(data: bytes | bytearray | memoryview) -> str:
    """XXH3-128 (seed 0), 32 lower-case hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


class Digester:
    """The same of bytes that come one piece after the other."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, data: memoryview) -> None:
        self._hash.update(data)

    def text(self) -> str:
        return self._hash.hexdigest()


@dataclass(frozen=True)
class ShardRecord:
    """What the manifest says of one shard file."""

    file: str
    size: int
    chunk: int
    digests: tuple[str, ...]
    holder: str | None = None
    """Directory name of the older checkpoint that holds the file; None: this one does."""

    def __post_init__(self) -> None:
        _require(isinstance(self.file, str), "shards", "file is not text")
        named = parse_shard_name(self.file) is not None
        _require(named, "shards", f"{self.file!r} is not the name of a shard")
        _check_count("shards: size", self.size)
        _check_count("shards: chunk", self.chunk, least=CHUNK_STEP)
        fits = self.chunk % CHUNK_STEP == 0 and self.chunk <= CHUNK_CAP
        _require(fits, "shards", f"chunk {self.chunk} is not a multiple of 4096 up to 1 GiB")
        hexadecimal = all(isinstance(d, str) and _DIGEST.fullmatch(d) for d in self.digests)
        _require(hexadecimal, "shards", f"{self.file}: a digest is not 32 hexadecimal digits")
        expected = -(-self.size // self.chunk)
        _require(
            len(self.digests) == expected,
            "shards",
            f"{self.file}: {len(self.digests)} digests for {expected} chunks",
        )
        _check_directory("shards: in", self.holder)

    @property
    def place(self) -> str:
        """The file as seen from the checkpoint: its name, after its holder's if there is one."""
        return self.file if self.holder is None else f"{self.holder}/{self.file}"

    def same_bytes(self, other: ShardRecord) -> bool:
        """Whether both name the same content, wherever it lies."""
        return replace(self, holder=None) == replace(other, holder=None)

    @classmethod
    def from_json(cls, record: object) -> ShardRecord:
        keys = tuple(record) if isinstance(record, dict) else ()
        shaped = keys in (_SHARD_KEYS, (*_SHARD_KEYS, _HOLDER_KEY))
        if not shaped or not isinstance(record, dict):
            wanted = ", ".join(_SHARD_KEYS)
            raise _field_error("shards", f"each must have exactly {wanted}, and may have 'in'")
        _require(isinstance(record["digests"], list), "shards", "digests is not a list")
        held = _HOLDER_KEY in record
        _require(not held or record[_HOLDER_KEY] is not None, "shards", "in: must be text")
        return cls(
            file=record["file"],
            size=record["size"],
            chunk=record["chunk"],
            digests=tuple(record["digests"]),
            holder=record.get(_HOLDER_KEY),
        )

    def to_json(self) -> dict[str, Any]:
        values = (self.file, self.size, self.chunk, list(self.digests))
        held = {} if self.holder is None else {_HOLDER_KEY: self.holder}
        return dict(zip(_SHARD_KEYS, values, strict=True)) | held


@dataclass(frozen=True)
class TreeText:
    """A state tree already written as JSON, on one line, by whoever knows that it is JSON."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything a checkpoint says about itself, in the order of the file.

    A value that a reader would refuse is refused here, so it is never written.
    """

    format_version: int = FORMAT_VERSION
    chain: str
    generation: int
    step: int
    revision: int
    parent: str | None
    """Directory name of the checkpoint this one continues."""
    epoch: int
    wall_time: float
    """Unix seconds."""
    reason: str
    metrics: dict[str, float]
    world_size: int
    threads: int
    versions: dict[str, str]
    tree: Any
    """The tree of non-tensor state; plain JSON or its TreeText, made and read by state/."""
    aliases: dict[str, str]
    """Name of an alias → name of the leaf that is stored."""
    shards: tuple[ShardRecord, ...]

    def __post_init__(self) -> None:
        _check_version(self.format_version)
        for name in ("generation", "step", "revision", "epoch"):
            _check_count(name, getattr(self, name))
        for name in ("world_size", "threads"):
            _check_count(name, getattr(self, name), least=1)
        _require(isinstance(self.chain, str) and self.chain != "", "chain", "must be text")
        _require(isinstance(self.reason, str), "reason", "must be text")
        _check_directory("parent", self.parent)
        _check_number("wall_time", self.wall_time)
        finite = 0 <= _to_float("wall_time", self.wall_time) < math.inf
        _require(finite, "wall_time", "must be finite and not negative")
        _check_texts("versions", self.versions)
        _check_texts("aliases", self.aliases)
        object.__setattr__(self, "metrics", _checked_metrics(self.metrics))
        _check_tree(self.tree)
        _check_shards(self.shards, self.world_size)
        _check_holders(self.shards, self.key)

    @property
    def key(self) -> CheckpointKey:
        return CheckpointKey(self.generation, self.step, self.revision)

    @property
    def holders(self) -> frozenset[CheckpointKey]:
        """The older checkpoints that hold shards of this one."""
        named = (CheckpointKey.parse(shard.holder) for shard in self.shards if shard.holder)
        return frozenset(key for key in named if key is not None)

    def same_content(self, other: Manifest) -> bool:
        """Whether both restore to the same state; when, why and how well may differ."""
        if (self.epoch, self.aliases) != (other.epoch, other.aliases):
            return False
        pairs = zip(self.shards, other.shards, strict=False)
        if len(self.shards) != len(other.shards) or not all(a.same_bytes(b) for a, b in pairs):
            return False
        # As text: 1, 1.0 and True are equal in Python, and so are 0.0 and -0.0.
        return _line("tree", self.tree) == _line("tree", other.tree)

    def to_bytes(self) -> bytes:
        """The file: one key per line, the digest of all lines before it on the last but one."""
        try:
            lines = [_line(name, value) for name, value in self._to_json().items()]
        except (ValueError, TypeError, RecursionError) as error:
            raise _field_error("tree", f"cannot be written as JSON: {error}") from None
        body = ("{\n" + "".join(lines)).encode("ascii")
        if len(body) + _TAIL_BYTES > MANIFEST_CAP:
            raise _field_error("tree", f"the manifest would pass {MANIFEST_CAP} bytes")
        return body + f'"digest": "{digest(body)}"\n}}\n'.encode("ascii")

    def _to_json(self) -> dict[str, Any]:
        record = {name: getattr(self, name) for name in _NAMES}
        record["metrics"] = {name: _encode_float(value) for name, value in self.metrics.items()}
        record["wall_time"] = float(self.wall_time)
        record["shards"] = [shard.to_json() for shard in self.shards]
        return record

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Check the digest, then every field; raises ManifestError with the defect's name."""
        _check_digest(data)
        record = _parse(data)
        _check_version(record.get("format_version"))
        expected = (*_NAMES, "digest")
        if tuple(record) != expected:
            raise _field_error("keys", f"must be exactly {' '.join(expected)}")
        del record["digest"]
        _require(isinstance(record["shards"], list), "shards", "must be a list")
        record["shards"] = tuple(ShardRecord.from_json(shard) for shard in record["shards"])
        record["metrics"] = _decode_metrics(record["metrics"])
        tree = record["tree"]
        manifest = cls(**{**record, "tree": None})
        # What the parser made is JSON: it need not be walked to know.
        object.__setattr__(manifest, "tree", tree)
        return manifest


_NAMES: Final = tuple(field.name for field in fields(Manifest))


# ── the frame ─────────────────────────────────────────────────────────────────────────────
def _line(name: str, value: object) -> str:
    text = value.text if isinstance(value, TreeText) else json_text(value)
    return f'"{name}": {text},\n'


def json_text(value: object) -> str:
    """A value as a manifest writes it; ValueError for NaN and infinities."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _check_digest(data: bytes) -> None:
    tail = _TAIL.fullmatch(data[-_TAIL_BYTES:])
    if tail is None:
        message = "does not end as a manifest ends; it was cut off or overwritten"
        raise _error(DefectKind.MANIFEST_UNREADABLE, message)
    found = digest(memoryview(data)[:-_TAIL_BYTES])
    if found != tail[1].decode("ascii"):
        message = f"its bytes have digest {found}, it says {tail[1].decode('ascii')}"
        raise _error(DefectKind.MANIFEST_DIGEST, message)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        text = data.decode("ascii")
        record = json.loads(text, parse_constant=_refuse_constant)
        if not _is_as_written(record, text):
            record = json.loads(
                text, object_pairs_hook=unique_keys, parse_constant=_refuse_constant
            )
    except (ValueError, RecursionError) as error:
        raise _error(DefectKind.MANIFEST_UNREADABLE, f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise _error(DefectKind.MANIFEST_UNREADABLE, "not a JSON object")
    return record


def _is_as_written(record: Any, text: str) -> bool:
    """Whether the text is this program's own for this content: then no key comes twice."""
    if not isinstance(record, dict):
        return False
    written = "".join(_line(name, value) for name, value in record.items())
    return text.replace('"\n}\n', '",\n') == "{\n" + written


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_version(version: object) -> None:
    if type(version) is not int or version < 1:
        raise _field_error("format_version", "must be a whole number from 1 on")
    if version != FORMAT_VERSION:
        message = (
            f"format version {version}; this program reads version {FORMAT_VERSION}: "
            "upgrade hpc_ckpt to read it"
        )
        raise _error(DefectKind.UNSUPPORTED_VERSION, message)


# ── the fields ────────────────────────────────────────────────────────────────────────────
def _error(kind: DefectKind, detail: str) -> ManifestError:
    return ManifestError(Defect(kind, MANIFEST_NAME, detail))


def _field_error(name: str, problem: str) -> ManifestError:
    return _error(DefectKind.MANIFEST_FIELD, f"{name}: {problem}")


def _require(condition: bool, name: str, problem: str) -> None:
    if not condition:
        raise _field_error(name, problem)


def _check_count(name: str, value: object, *, least: int = 0) -> None:
    if type(value) is not int or not least <= value <= _COUNT_CAP:
        raise _field_error(name, f"must be a whole number of at least {least}, not {value!r:.60}")


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _field_error(name, f"must be a number, not {value!r:.60}")


def _check_directory(field: str, name: object) -> None:
    known = name is None or (isinstance(name, str) and CheckpointKey.parse(name) is not None)
    _require(known, field, f"must be a checkpoint's name or nothing, not {name!r:.60}")


def _check_texts(name: str, value: object) -> None:
    texts = isinstance(value, dict) and all(
        isinstance(key, str) and isinstance(text, str) for key, text in value.items()
    )
    _require(texts, name, "must be a map from text to text")


def _checked_metrics(metrics: object) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise _field_error("metrics", "must be a map from text to numbers")
    for name, value in metrics.items():
        _require(isinstance(name, str), "metrics", "a name is not text")
        _check_number(f"metrics: {name}", value)
    # One NaN object for all: a manifest then equals what is read back from its bytes.
    return {
        name: math.nan if value != value else _to_float(f"metrics: {name}", value)
        for name, value in metrics.items()
    }


def _to_float(name: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise _field_error(name, "is too large for a float") from None


def ends_like_a_manifest(tail: bytes) -> bool:
    """Whether the last bytes of a file can be a manifest's; says nothing of the rest."""
    return _TAIL.fullmatch(tail[-_TAIL_BYTES:]) is not None


def _encode_float(value: float) -> float | str:
    return value if math.isfinite(value) else value.hex()


def _decode_metrics(metrics: object) -> dict[str, Any]:
    if not isinstance(metrics, dict):
        raise _field_error("metrics", "must be a map from text to numbers")
    special = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    return {
        name: special.get(value, value) if isinstance(value, str) else value
        for name, value in metrics.items()
    }


def _check_tree(tree: object) -> None:
    if isinstance(tree, TreeText):
        return
    try:
        problem = _not_json(tree)
    except RecursionError:
        problem = "is nested too deeply"
    if problem is not None:
        raise _field_error("tree", problem)


def _not_json(value: object) -> str | None:
    """Why a value would not come back from JSON as it is; None if it would."""
    if value is None or type(value) in (str, bool, int):
        return None
    if type(value) is float:
        return None if math.isfinite(value) else f"holds {value!r}, which JSON cannot"
    if type(value) is list:
        return next((why for item in value if (why := _not_json(item)) is not None), None)
    if type(value) is dict:
        if not all(type(key) is str for key in value):
            return "holds a key that is not text"
        return next((why for item in value.values() if (why := _not_json(item)) is not None), None)
    return f"holds a {type(value).__name__}, which JSON cannot"


def _check_shards(shards: object, world_size: int) -> None:
    typed = isinstance(shards, tuple) and all(isinstance(s, ShardRecord) for s in shards)
    if not isinstance(shards, tuple) or not typed:
        raise _field_error("shards", "must be a sequence of shard records")
    _require(len(shards) > 0, "shards", "a checkpoint has at least one")
    places = [shard.place for shard in shards]
    _require(len(set(places)) == len(places), "shards", "two are the same file")
    for shard in shards:
        rank, _ = parse_shard_name(shard.file) or (0, 0)
        _require(rank < world_size, "shards", f"{shard.file}: there are only {world_size} ranks")


def _check_holders(shards: tuple[ShardRecord, ...], key: CheckpointKey) -> None:
    """What holds a shard is older: nothing can lead back to where it came from."""
    for shard in shards:
        older = CheckpointKey.parse(shard.holder) if shard.holder is not None else None
        _require(older is None or older < key, "shards", f"in: {shard.holder} is not older")
