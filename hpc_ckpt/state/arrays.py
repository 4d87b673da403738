"""numpy's tags: arrays, scalars and dtypes, without objects.

Little-endian numbers are stored as what they are; any other dtype as bytes, with its
description in the node. Whatever numpy would pickle is refused.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import math
import re
from collections.abc import Hashable
from typing import Any

import numpy as np

from ..errors import CheckpointError, UnsupportedState
from .leaves import LeafBook, Read, identity_of_leaf, leaf_bytes
from .plain import (
    Node,
    base64_of,
    broken,
    bytes_from,
    integers,
    record,
    refuse,
    sequence,
    shape_of,
    text,
)

Array = np.ndarray[Any, Any]

_STORED = {
    "<f8": "F64",
    "<f4": "F32",
    "<f2": "F16",
    "<c8": "C64",
    "<i8": "I64",
    "<i4": "I32",
    "<i2": "I16",
    "|i1": "I8",
    "<u8": "U64",
    "<u4": "U32",
    "<u2": "U16",
    "|u1": "U8",
    "|b1": "BOOL",
}
"""numpy's name → safetensors'. A dtype that is not here is stored as U8."""

_SIMPLE = re.compile(r"[<>|](?:[biufcSUV]\d{1,18}|[mM]8(?:\[\d{0,18}[A-Za-zμ]{1,7}\])?)")
_MAX_FIELD_DEPTH = 16


# ── writing ───────────────────────────────────────────────────────────────────────────────
def encode_array(value: Array, path: str, book: LeafBook) -> Node:
    if type(value) is not np.ndarray:
        refuse(value, path)
    descr = describe(value.dtype, path)
    native = _STORED.get(descr) if type(descr) is str else None
    stored = (native or "U8", value.shape if native else (value.nbytes,), value.nbytes)
    address = value.__array_interface__["data"][0]
    # The description as text, for it may be a list.
    tie = ("numpy", address, str(descr), value.shape, value.strides)
    fields = book.add(path, value, stored, tie) | {"dtype": descr, "shape": list(value.shape)}
    if value.flags.f_contiguous and not value.flags.c_contiguous:
        fields["order"] = "F"
    return {"$array": fields}


def encode_scalar(value: np.generic, path: str) -> Node:
    descr = describe(value.dtype, path)
    data = value.tobytes()[: value.dtype.itemsize]  # empty text gives a byte too many
    if type(_scalar(value.dtype, data)) is not type(value):
        refuse(value, path)
    return {"$scalar": {"dtype": descr, "data": base64_of(data)}}


def describe(dtype: np.dtype[Any], path: str) -> Node:
    """The dtype in JSON; refused unless reading it gives the same one."""
    if dtype.hasobject or not getattr(type(dtype), "_legacy", True) or has_metadata(dtype):
        raise UnsupportedState(path, f"dtype {dtype!r} cannot be saved without pickle")
    try:
        descr = _listed(np.lib.format.dtype_to_descr(dtype))
        same = _SIMPLE.fullmatch(descr) is not None if type(descr) is str else True
        same = same and np.lib.format.descr_to_dtype(_tupled(descr, path, 0)) == dtype
    except (ValueError, CheckpointError):
        same = False
    if not same:
        raise UnsupportedState(path, f"dtype {dtype!r} has no portable description")
    return descr


def has_metadata(dtype: np.dtype[Any]) -> bool:
    """Something is attached to it that equality does not see."""
    if dtype.metadata is not None:
        return True
    if dtype.subdtype is not None:
        return has_metadata(dtype.subdtype[0])
    return any(has_metadata(field[0]) for field in (dtype.fields or {}).values())


def _listed(descr: Any) -> Node:
    return [_listed(item) for item in descr] if isinstance(descr, (list, tuple)) else descr


# ── reading ───────────────────────────────────────────────────────────────────────────────
class ArrayReader:
    """Rebuilds arrays; tied leaves come back as one object."""

    def __init__(self, read: Read, copy: bool) -> None:
        self._read = read
        self._copy = copy
        self._seen: dict[Hashable, Array] = {}

    def array(self, node: Node, path: str) -> Array:
        fields = record(node, path, "leaf dtype shape", "tied order")
        key = identity_of_leaf({**fields, "dtype": repr(fields["dtype"])}, path)
        if key not in self._seen:
            self._seen[key] = self._rebuilt(fields, path)
        return self._seen[key]

    def _rebuilt(self, fields: dict[str, Node], path: str) -> Array:
        dtype, shape = decode_dtype(fields["dtype"], path), shape_of(fields["shape"], path)
        if fields.get("order", "F") != "F":
            raise broken(path, "the only order that needs saying is 'F'")
        data = leaf_bytes(self._read, fields["leaf"], path, math.prod(shape) * dtype.itemsize)
        try:
            if not data.nbytes:
                return _allocated(shape, dtype)
            value: Array = np.ndarray(shape, dtype, buffer=data)
        except (ValueError, TypeError, OverflowError, MemoryError) as error:
            raise broken(path, f"numpy refuses it: {error}") from None
        if "order" in fields:
            fortran: Array = value.copy(order="F")
            return fortran
        return value if not self._copy and not data.readonly else _owned(value, data)


def _owned(value: Array, data: memoryview) -> Array:
    # As bytes: numpy would leave out the padding between fields.
    owned = _allocated(value.shape, value.dtype)
    np.copyto(owned.reshape(-1).view(np.uint8), np.frombuffer(data, np.uint8))
    return owned


def _allocated(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    array: Array = np.ndarray(shape, dtype)  # np.empty() would widen a text of no characters
    return array


def decode_scalar(node: Node, path: str) -> object:
    fields = record(node, path, "dtype data")
    dtype, data = decode_dtype(fields["dtype"], path), bytes_from(fields["data"], path)
    if len(data) != dtype.itemsize:
        raise broken(path, f"a {dtype} has {dtype.itemsize} bytes, not {len(data)}")
    try:
        return _scalar(dtype, data)
    except (ValueError, TypeError, OverflowError) as error:
        raise broken(path, f"numpy refuses it: {error}") from None


def _scalar(dtype: np.dtype[Any], data: bytes) -> object:
    value: object = np.ndarray((), dtype, buffer=bytearray(data))[()]
    return value


def decode_dtype(node: Node, path: str) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(_tupled(node, path, 0))
    except (ValueError, TypeError, KeyError, OverflowError, MemoryError) as error:
        raise broken(path, f"not a dtype: {error}") from None
    if dtype.hasobject:
        raise broken(path, "a dtype with objects")
    return dtype


def _tupled(node: Node, path: str, depth: int) -> Any:
    """A description in the form numpy reads: text, or a list of field tuples."""
    if type(node) is str:
        if _SIMPLE.fullmatch(node) is None:
            raise broken(path, f"not a dtype: {node[:40]!r}")
        return node
    if depth > _MAX_FIELD_DEPTH:
        raise broken(path, "a dtype nested too deep")
    return [_field(item, path, depth) for item in sequence(node, path)]


def _field(node: Node, path: str, depth: int) -> tuple[Any, ...]:
    items = sequence(node, path)
    if len(items) not in (2, 3):
        raise broken(path, "a field of a dtype has a name, a dtype and perhaps a shape")
    name = items[0]
    if type(name) is list:  # title and name
        name = tuple(text(part, path) for part in sequence(name, path, 2))
    else:
        name = text(name, path)
    shape = [tuple(integers(part, path)) for part in items[2:]]
    return (name, _tupled(items[1], path, depth + 1), *shape)
