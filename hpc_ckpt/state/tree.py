"""A nested Python state as JSON plus named leaves, and back, exactly, without pickle.

Plain lists, and dicts whose keys are plain text, are JSON lists and objects; everything else
is an object with one key that starts with "$", its tag. Order is meaning: whoever writes the
JSON must not sort keys. Containers are here; plain values in plain.py, memory in leaves.py,
tensors.py and arrays.py. Reading runs no code of the checkpoint's choosing: classes come only
from the fixed tags and from the objects the program itself passes as `like`.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, Flag
from typing import Any

import numpy as np
import torch

from ..errors import UnsupportedState
from . import arrays, tensors
from .leaves import Leaf, LeafBook, Read, copy_into
from .plain import ENCODERS, Node, base64_of, has_surrogates, joined, refuse
from .rebuild import MapLocation
from .untree import FACTORIES, MAX_DEPTH, Decoder

__all__ = ["Encoded", "Encoder", "Leaf", "copy_into", "decode", "encode"]


@dataclass(frozen=True, eq=False)
class Encoded:
    """A state ready to be laid out and written; the leaves still refer to live memory."""

    tree: Any
    leaves: tuple[Leaf, ...]
    aliases: dict[str, str]
    """Leaf name of tied memory → the name it is stored under."""
    order: tuple[str, ...] = ()
    """Every name, aliases too, in the order in which the state was walked."""
    shares: bool = False
    """Some container is met twice."""


def encode(state: object, *, name: str = "") -> Encoded:
    """Copies nothing. Raises UnsupportedState, naming the key path under `name`."""
    encoder = Encoder()
    tree = encoder.finish(encoder.value(state, name, 0))
    book = encoder.book
    return Encoded(
        tree, tuple(book.leaves), book.aliases, order=tuple(book.order), shares=encoder.shares
    )


def decode(
    tree: Any,
    read: Read,
    *,
    like: object = None,
    map_location: MapLocation = None,
    copy: bool = True,
    own: Mapping[str, torch.Tensor] | None = None,
) -> object:
    """The state that encode() saw. Raises CheckpointError for any tree it did not write.

    `read` gives the bytes of a leaf, aliases resolved. `like` is the program's present state of
    the same form: it supplies enum and namedtuple classes, Parameters and devices. With
    copy=False leaves use the memory `read` gave, where it is writable. `own`: tensors of the
    program that hold the bytes of their leaf already, and have its form.
    """
    return Decoder(read, map_location, copy, own or {}).tree(tree, like)


class Encoder:
    """One walk over a state; see encode()."""

    def __init__(self) -> None:
        self.book = LeafBook()
        self._open: set[int] = set()
        # Keeps every shareable object alive: an id is reused only after its object died.
        self._written: dict[int, tuple[object, Node]] = {}
        self._shared: dict[int, int] = {}

    @property
    def shares(self) -> bool:
        """Some container was met twice."""
        return bool(self._shared)

    # ── the walk ──────────────────────────────────────────────────────────────────────────
    def value(self, value: Any, path: str, depth: int) -> Node:
        encode_plain = ENCODERS.get(type(value))
        if encode_plain is not None:
            return encode_plain(value, path)
        if depth >= MAX_DEPTH:
            raise UnsupportedState(path, f"nested more than {MAX_DEPTH} deep; flatten it")
        if _is_shareable(value):
            return self._once(value, path, depth)
        return self._immutable(value, path, depth)

    def _once(self, value: Any, path: str, depth: int) -> Node:
        mark = id(value)
        if mark in self._open:
            raise UnsupportedState(path, "it contains itself; break the cycle")
        if mark in self._written:
            _, node = self._written[mark]
            return {"$ref": self._shared.setdefault(id(node), len(self._shared))}
        self._open.add(mark)
        node = self._mutable(value, path, depth)
        self._open.remove(mark)
        self._written[mark] = (value, node)
        return node

    def finish(self, tree: Node) -> Node:
        """Mark the nodes that others refer to; only a tree that shares pays for the walk."""
        return self._marked(tree) if self._shared else tree

    def _marked(self, node: Node) -> Node:
        if type(node) is list:
            node[:] = [self._marked(item) for item in node]
        elif type(node) is dict:
            for key, item in node.items():
                node[key] = self._marked(item)
        number = self._shared.get(id(node))
        return node if number is None else {"$shared": {"id": number, "value": node}}

    # ── what can be shared ────────────────────────────────────────────────────────────────
    def _mutable(self, value: Any, path: str, depth: int) -> Node:
        kind = type(value)
        if kind is list:
            return self._items(value, path, depth)
        if kind is dict:
            return self._dict(value, path, depth)
        if kind is set:
            return {"$set": self._members(value, path, depth)}
        if kind is bytearray:
            return {"$bytearray": base64_of(value)}
        if kind is torch.Generator:
            return tensors.encode_generator(value, path, self.book)
        if kind is Counter:
            return {"$counter": self._pairs(value, path, depth)}
        if kind is defaultdict:
            return self._defaultdict(value, path, depth)
        if kind is OrderedDict:
            return self._ordered(value, path, depth)
        return tensors.encode_tensor(value, path, self.book)

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Node:
        if all(map(_is_plain_key, value)):
            return {
                key: self.value(item, joined(path, key), depth + 1) for key, item in value.items()
            }
        return {"$dict": self._pairs(value, path, depth)}

    def _pairs(self, value: Mapping[Any, Any], path: str, depth: int) -> Node:
        return [
            [
                self._without_leaves(key, joined(path, key), depth + 1),
                self.value(item, joined(path, key), depth + 1),
            ]
            for key, item in value.items()
        ]

    def _defaultdict(self, value: defaultdict[Any, Any], path: str, depth: int) -> Node:
        names = [name for name, make in FACTORIES.items() if make is value.default_factory]
        if not names:
            allowed = ", ".join(FACTORIES)
            raise UnsupportedState(
                path, f"a defaultdict of {value.default_factory!r}; it may be of {allowed}"
            )
        return {"$defaultdict": {"factory": names[0], "items": self._pairs(value, path, depth)}}

    def _ordered(self, value: OrderedDict[Any, Any], path: str, depth: int) -> Node:
        node = {"items": self._pairs(value, path, depth)}
        attributes = dict(vars(value))
        if "_metadata" in attributes:  # torch's: the versions of a module's parts
            metadata = attributes.pop("_metadata")
            node["metadata"] = self.value(metadata, joined(path, "_metadata"), depth + 1)
        if attributes:
            raise UnsupportedState(path, f"an OrderedDict with attributes {sorted(attributes)}")
        return {"$ordereddict": node}

    # ── what cannot ───────────────────────────────────────────────────────────────────────
    def _immutable(self, value: Any, path: str, depth: int) -> Node:
        kind = type(value)
        if isinstance(value, torch.Tensor):  # first, for they are the many
            return tensors.encode_tensor(value, path, self.book)
        if kind is tuple:
            return {"$tuple": self._items(value, path, depth)}
        if kind is frozenset:
            return {"$frozenset": self._members(value, path, depth)}
        if kind is slice:
            return {"$slice": self._items((value.start, value.stop, value.step), path, depth)}
        if isinstance(value, Enum):
            return {"$enum": _encode_enum(value, path)}
        if _is_namedtuple(value):
            return self._namedtuple(value, path, depth)
        return self._foreign(value, path)

    def _namedtuple(self, value: Any, path: str, depth: int) -> Node:
        fields = list(value._fields)
        items = [
            self.value(item, joined(path, field), depth + 1)
            for field, item in zip(fields, value, strict=True)
        ]
        return {"$namedtuple": {"class": type(value).__name__, "fields": fields, "items": items}}

    def _foreign(self, value: Any, path: str) -> Node:
        if isinstance(value, np.ndarray):
            return arrays.encode_array(value, path, self.book)
        if isinstance(value, np.generic):
            return arrays.encode_scalar(value, path)
        if isinstance(value, np.dtype):
            return {"$numpy_dtype": arrays.describe(value, path)}
        if type(value) is torch.dtype:
            return {"$torch_dtype": tensors.name_of(value)}
        if type(value) is torch.device:
            return {"$device": str(value)}
        if type(value) is torch.Size:
            return {"$size": list(value)}
        refuse(value, path)

    def _items(self, values: Iterable[Any], path: str, depth: int) -> list[Node]:
        values = list(values)
        if all(type(item) is int for item in values):  # an optimizer's parameter numbers
            encode_int = ENCODERS[int]
            return [encode_int(item, path) for item in values]
        return [
            self.value(item, joined(path, index), depth + 1) for index, item in enumerate(values)
        ]

    def _members(self, values: Iterable[Any], path: str, depth: int) -> list[Node]:
        # A set has no order of its own; equal sets shall give equal trees.
        nodes = [self._without_leaves(item, joined(path, item), depth + 1) for item in values]
        return sorted(nodes, key=lambda node: json.dumps(node, sort_keys=True))

    def _without_leaves(self, value: Any, path: str, depth: int) -> Node:
        before = len(self.book)
        node = self.value(value, path, depth)
        if len(self.book) != before:
            raise UnsupportedState(path, "a set member or dict key that holds a tensor")
        return node


def _is_shareable(value: object) -> bool:
    if type(value) in _SHAREABLE:
        return True
    return isinstance(value, torch.Tensor) and not tensors.is_flat(value)


_SHAREABLE = {
    list, dict, set, bytearray, Counter, defaultdict, OrderedDict, torch.Generator,
}  # fmt: skip


def _is_plain_key(key: object) -> bool:
    return type(key) is str and not key.startswith("$") and not has_surrogates(key)


def _is_namedtuple(value: object) -> bool:
    fields = getattr(type(value), "_fields", None)
    if (
        not isinstance(value, tuple)
        or type(fields) is not tuple
        or getattr(value, "__dict__", None)
    ):
        return False
    return len(fields) == len(value) and all(type(field) is str for field in fields)


def _encode_enum(value: Enum, path: str) -> Node:
    kind = type(value)
    if kind.__members__.get(str(value.name)) is value:
        return {"class": kind.__qualname__, "member": value.name}
    if isinstance(value, Flag) and type(value.value) is int:  # a combination has no name
        return {"class": kind.__qualname__, "bits": ENCODERS[int](value.value, path)}
    return refuse(value, path)
