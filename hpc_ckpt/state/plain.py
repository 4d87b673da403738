"""Tags of plain values: numbers, text, bytes, dates, paths. Each tag is written and read here.

A value that JSON keeps exactly stands for itself; any other is an object with one key that
starts with "$". Nothing here knows containers (tree.py) or memory (tensors.py, arrays.py), and
nothing read from a checkpoint is ever used as the name of something to call.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from functools import cache
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath
from types import EllipsisType, NoneType
from typing import Any, NoReturn, TypeVar
from zoneinfo import ZoneInfo

from ..errors import CheckpointError, NewerCheckpoint, UnsupportedState, UserError

Node = Any
"""A JSON value."""

_T = TypeVar("_T")

PLAIN_INT_BITS = 1024
"""Longer integers are written in hex: Python limits the length of decimal text it converts."""

MAX_DIMENSIONS = 64
"""Of numpy, and of torch."""

_INT = {int}
_HEX_INT = re.compile(r"-?0x[0-9a-f]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan, "-0x0.0p+0": -0.0}
_PATHS: dict[str, type[PurePath]] = {
    "PosixPath": PosixPath,
    "PurePosixPath": PurePosixPath,
    "PureWindowsPath": PureWindowsPath,
}


# ── words both directions use ─────────────────────────────────────────────────────────────
def broken(path: str, what: str) -> CheckpointError:
    """The error of a tree that encode() cannot have written."""
    return CheckpointError(f"state tree of the checkpoint, at {path or 'its root'!r}: {what}")


def newer(path: str, what: str) -> NewerCheckpoint:
    """The error of a tree that only a newer version can have written."""
    return NewerCheckpoint(None, f"state tree of the checkpoint, at {path or 'its root'!r}: {what}")


def joined(path: str, key: object) -> str:
    """The readable dotted path of a child; encode() makes leaf names of it."""
    if type(key) is str:
        label = key
    elif key is None or type(key) in (bool, int, float):
        label = str(key) if type(key) is not int or key.bit_length() < 64 else hex(key)
    else:
        label = f"<{type(key).__name__}>"
    return f"{path}.{label}" if path else label


def as_plain(value: object, path: str) -> object:
    """A copy that any program can read as JSON, tuples as lists; UserError if there is none."""
    if isinstance(value, dict):
        for key in value:
            if type(key) is not str or key.startswith("$"):
                raise UserError(f"{path}: the key {key!r} is not text, or begins with '$'")
        return {key: as_plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(item, f"{path}.{number}") for number, item in enumerate(value)]
    if type(value) is float and not math.isfinite(value):
        raise UserError(f"{path}: {value} cannot be described: JSON has no such number")
    if value is not None and type(value) not in (str, int, float, bool):
        raise UserError(
            f"{path}: {kind_of(value)} cannot be described; give text, numbers, truth values, "
            "None, or lists and dicts of those"
        )
    return value


def has_surrogates(text: str) -> bool:
    return not text.isascii() and _SURROGATE.search(text) is not None


def record(node: Node, path: str, required: str, optional: str = "") -> dict[str, Node]:
    """The node as an object with exactly these fields."""
    if type(node) is not dict:
        raise broken(path, f"an object was expected, not {type(node).__name__}")
    wanted = _words(required)
    if node.keys() == wanted:
        return node
    missing, unknown = wanted - node.keys(), node.keys() - wanted - _words(optional)
    if missing or unknown:
        raise broken(path, f"fields missing: {sorted(missing)}; unknown: {sorted(unknown)}")
    return node


@cache
def _words(names: str) -> frozenset[str]:
    return frozenset(names.split())


def text(node: Node, path: str) -> str:
    if type(node) is not str:
        raise broken(path, f"text was expected, not {type(node).__name__}")
    return node


def sequence(node: Node, path: str, length: int | None = None) -> list[Node]:
    if type(node) is not list:
        raise broken(path, f"a list was expected, not {type(node).__name__}")
    if length is not None and len(node) != length:
        raise broken(path, f"{length} items were expected, not {len(node)}")
    return node


def integers(node: Node, path: str, length: int | None = None) -> list[int]:
    items = sequence(node, path, length)
    if set(map(type, items)) <= _INT:  # nearly always
        return items
    return [integer(item, path) for item in items]


def integer(node: Node, path: str) -> int:
    """An integer, plain or in the hex form."""
    if type(node) is int:
        return node
    if type(node) is dict and list(node) == ["$int"]:
        return _decode_int(node["$int"], path)
    raise broken(path, f"an integer was expected, not {type(node).__name__}")


def shape_of(node: Node, path: str) -> tuple[int, ...]:
    shape = tuple(integers(node, path))
    if len(shape) > MAX_DIMENSIONS:
        raise broken(path, f"a shape of {len(shape)} dimensions; there are at most 64")
    if shape and not 0 <= min(shape) <= max(shape) < 2**63:
        raise broken(path, "a shape has sizes between 0 and 2^63")
    return shape


# ── numbers ───────────────────────────────────────────────────────────────────────────────
def _encode_itself(value: Node, path: str) -> Node:
    return value


def _encode_int(value: int, path: str) -> Node:
    return value if value.bit_length() <= PLAIN_INT_BITS else {"$int": hex(value)}


def _decode_int(node: Node, path: str) -> int:
    if _HEX_INT.fullmatch(text(node, path)) is None:
        raise broken(path, "not a hexadecimal integer")
    value = int(node, 16)
    if value.bit_length() <= PLAIN_INT_BITS:
        raise broken(path, f"an integer of {value.bit_length()} bits needs no tag")
    return value


def encode_float(value: float, path: str = "") -> Node:
    if math.isfinite(value) and (value != 0 or math.copysign(1, value) > 0):
        return value
    return {"$float": value.hex()}


def _decode_float(node: Node, path: str) -> float:
    if text(node, path) not in _FLOATS:
        raise broken(path, "not one of the floats that need a tag")
    return float(node) if node == "nan" else _FLOATS[node]  # a new nan: nans are not one key


def floating(node: Node, path: str) -> float:
    """A float, plain or tagged."""
    if type(node) is float and math.isfinite(node):
        return node
    if type(node) is dict and list(node) == ["$float"]:
        return _decode_float(node["$float"], path)
    raise broken(path, "a float was expected")


def _encode_complex(value: complex, path: str) -> Node:
    return {"$complex": [encode_float(value.real), encode_float(value.imag)]}


def _decode_complex(node: Node, path: str) -> complex:
    real, imaginary = sequence(node, path, 2)
    return complex(floating(real, path), floating(imaginary, path))


def _encode_range(value: range, path: str) -> Node:
    return {"$range": [_encode_int(i, path) for i in (value.start, value.stop, value.step)]}


def _decode_range(node: Node, path: str) -> range:
    start, stop, step = integers(node, path, 3)
    if step == 0:
        raise broken(path, "a range needs a step")
    return range(start, stop, step)


# ── text and bytes ────────────────────────────────────────────────────────────────────────
def _encode_str(value: str, path: str) -> Node:
    # Two lone surrogates in a row would come back from JSON as one character.
    if not has_surrogates(value):
        return value
    return {"$str": base64_of(value.encode("utf-8", "surrogatepass"))}


def _decode_str(node: Node, path: str) -> str:
    try:
        value = bytes_from(node, path).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise broken(path, f"not text: {error}") from None
    if not has_surrogates(value):
        raise broken(path, "text without surrogates needs no tag")
    return value


def base64_of(value: bytes | bytearray | memoryview) -> str:
    return base64.b64encode(value).decode("ascii")


def bytes_from(node: Node, path: str) -> bytes:
    try:
        return base64.b64decode(text(node, path), validate=True)
    except ValueError as error:
        raise broken(path, f"not base64: {error}") from None


def _encode_bytes(value: bytes, path: str) -> Node:
    return {"$bytes": base64_of(value)}


def _encode_path(value: PurePath, path: str) -> Node:
    return {"$path": [type(value).__name__, _encode_str(str(value), path)]}


def _decode_path(node: Node, path: str) -> PurePath:
    kind, name = sequence(node, path, 2)
    if text(kind, path) not in _PATHS:
        raise broken(path, f"unknown kind of path {kind!r}")
    if type(name) is dict and list(name) == ["$str"]:
        name = _decode_str(name["$str"], path)
    return _PATHS[kind](text(name, path))


def _encode_ellipsis(value: EllipsisType, path: str) -> Node:
    return {"$ellipsis": []}


def _decode_ellipsis(node: Node, path: str) -> EllipsisType:
    sequence(node, path, 0)
    return ...


# ── dates ─────────────────────────────────────────────────────────────────────────────────
def _encode_date(value: date, path: str) -> Node:
    return {"$date": [value.year, value.month, value.day]}


def _decode_date(node: Node, path: str) -> date:
    year, month, day = integers(node, path, 3)
    return _made(path, lambda: date(year, month, day))


def _encode_timedelta(value: timedelta, path: str) -> Node:
    return {"$timedelta": [value.days, value.seconds, value.microseconds]}


def _decode_timedelta(node: Node, path: str) -> timedelta:
    days, seconds, microseconds = integers(node, path, 3)
    if not (0 <= seconds < 86400 and 0 <= microseconds < 10**6):
        raise broken(path, "a span has less than a day of seconds, and of a second the rest")
    return _made(path, lambda: timedelta(days, seconds, microseconds))


def _clock(value: datetime | time) -> list[int]:
    return [value.hour, value.minute, value.second, value.microsecond, value.fold]


def _encode_time(value: time, path: str) -> Node:
    return {"$time": {"at": _clock(value), "zone": _encode_zone(value.tzinfo, path)}}


def _decode_time(node: Node, path: str) -> time:
    fields = record(node, path, "at zone")
    zone = _decode_zone(fields["zone"], path)
    return _made(path, lambda: _at_clock(integers(fields["at"], path, 5), zone))


def _at_clock(at: list[int], zone: tzinfo | None) -> time:
    hour, minute, second, microsecond, fold = at
    return time(hour, minute, second, microsecond, zone, fold=fold)


def _encode_datetime(value: datetime, path: str) -> Node:
    at = [value.year, value.month, value.day, *_clock(value)]
    return {"$datetime": {"at": at, "zone": _encode_zone(value.tzinfo, path)}}


def _decode_datetime(node: Node, path: str) -> datetime:
    fields = record(node, path, "at zone")
    year, month, day, *at = integers(fields["at"], path, 8)
    zone = _decode_zone(fields["zone"], path)
    return _made(path, lambda: datetime.combine(date(year, month, day), _at_clock(at, zone)))


def _encode_zone(zone: tzinfo | None, path: str) -> Node:
    if zone is None:
        return None
    if type(zone) is timezone:
        # Not in typeshed; tells a name that was given from one that the offset implies.
        arguments = zone.__getinitargs__()  # type: ignore[attr-defined]  # see above
        offset: timedelta = arguments[0]
        name = arguments[1] if len(arguments) > 1 else None
        return {"offset": [offset.days, offset.seconds, offset.microseconds], "name": name}
    if type(zone) is ZoneInfo and zone.key is not None:
        return {"key": zone.key}
    raise UnsupportedState(path, f"a time zone of type {kind_of(zone)}; use a datetime.timezone")


def _decode_zone(node: Node, path: str) -> tzinfo | None:
    if node is None:
        return None
    if type(node) is dict and "key" in node:
        key = text(record(node, path, "key")["key"], path)
        return _made(path, lambda: ZoneInfo(key))
    fields = record(node, path, "offset name")
    offset = _decode_timedelta(fields["offset"], path)
    if fields["name"] is None:
        return _made(path, lambda: timezone(offset))
    name = text(fields["name"], path)
    return _made(path, lambda: timezone(offset, name))


def _made(path: str, make: Callable[[], _T]) -> _T:
    # OSError: a zone's key may name a folder or a file that cannot be read.
    try:
        return make()
    except (ValueError, OverflowError, KeyError, OSError) as error:
        raise broken(path, f"not a date, time or zone: {error}") from None


# ── tables ────────────────────────────────────────────────────────────────────────────────
def kind_of(value: object) -> str:
    kind = type(value)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def refuse(value: object, path: str) -> NoReturn:
    raise UnsupportedState(
        path,
        f"a {kind_of(value)} cannot be saved without pickle; give it "
        "state_dict()/load_state_dict() or keep it out of the tracked state",
    )


ENCODERS: dict[type, Callable[[Any, str], Node]] = {
    NoneType: _encode_itself,
    bool: _encode_itself,
    int: _encode_int,
    float: encode_float,
    str: _encode_str,
    complex: _encode_complex,
    bytes: _encode_bytes,
    range: _encode_range,
    EllipsisType: _encode_ellipsis,
    date: _encode_date,
    time: _encode_time,
    datetime: _encode_datetime,
    timedelta: _encode_timedelta,
    **dict.fromkeys(_PATHS.values(), _encode_path),
}
"""By exact type: a subclass is another type and never becomes its base silently."""

DECODERS: dict[str, Callable[[Node, str], object]] = {
    "$int": _decode_int,
    "$float": _decode_float,
    "$str": _decode_str,
    "$complex": _decode_complex,
    "$bytes": bytes_from,
    "$range": _decode_range,
    "$ellipsis": _decode_ellipsis,
    "$date": _decode_date,
    "$time": _decode_time,
    "$datetime": _decode_datetime,
    "$timedelta": _decode_timedelta,
    "$path": _decode_path,
}
