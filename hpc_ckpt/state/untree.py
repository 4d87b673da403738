"""Reads what tree.py wrote; every node is checked, and every fault names its place.

Private to this package: decode() in tree.py is the way in.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, Flag
from typing import Any

import torch

from . import arrays, rebuild
from .leaves import Read
from .plain import (
    DECODERS,
    Node,
    broken,
    bytes_from,
    has_surrogates,
    integer,
    joined,
    newer,
    record,
    sequence,
    text,
)
from .records import record_class

MAX_DEPTH = 64
"""Containers within containers, on both ways; far from Python's own limit."""

_MAX_NESTING = 6 * MAX_DEPTH
"""Of the JSON text: one container takes at most that many brackets per level."""

FACTORIES: dict[str, Callable[[], object] | None] = {
    "list": list,
    "int": int,
    "dict": dict,
    "set": set,
    "float": float,
    "None": None,
}
"""What a defaultdict may be of."""


class _Classes:
    """A `like` for dict keys and set members, which have no place: classes by name."""

    def __init__(self, members: Iterable[object]) -> None:
        self.found: dict[str, type] = {}
        self._collect(members, 0)

    def _collect(self, members: Iterable[object], depth: int) -> None:
        for member in members:
            if isinstance(member, Enum):
                self.found.setdefault(type(member).__qualname__, type(member))
            elif isinstance(member, (tuple, frozenset)) and depth < MAX_DEPTH:
                if hasattr(type(member), "_fields"):
                    self.found.setdefault(type(member).__name__, type(member))
                self._collect(member, depth + 1)


class Decoder:
    """One reading of one tree."""

    def __init__(
        self,
        read: Read,
        map_location: rebuild.MapLocation,
        copy: bool,
        own: Mapping[str, torch.Tensor],
    ) -> None:
        self._tensors = rebuild.TensorReader(read, map_location, copy, own)
        self._arrays = arrays.ArrayReader(read, copy)
        self._shared: dict[int, object] = {}
        self._tuples: dict[tuple[str, ...], type] = {}

    def tree(self, tree: Node, like: object) -> object:
        _check_nesting(tree)
        try:
            return self.value(tree, like, "", 0)
        except RecursionError:
            raise broken("", "references lead deeper than Python goes") from None

    # ── the walk ──────────────────────────────────────────────────────────────────────────
    def value(self, node: Node, like: object, path: str, depth: int) -> Any:
        if type(node) is str:
            if has_surrogates(node):
                raise broken(path, "text with lone surrogates needs a tag")
            return node
        if node is None or type(node) in _THEMSELVES:
            return node
        if type(node) is float:
            if not math.isfinite(node):
                raise broken(path, "a float that is not finite needs a tag")
            return node
        if depth > MAX_DEPTH:
            raise broken(path, f"nested more than {MAX_DEPTH} deep")
        if type(node) is list:
            return self._items(node, like, path, depth)
        if type(node) is not dict:
            raise broken(path, f"{type(node).__name__} is not a JSON value")
        if len(node) == 1 and "$tensor" in node:  # the many
            return self._tensors.tensor(node["$tensor"], path, like)
        if not any(key.startswith("$") for key in node):
            if has_surrogates("".join(node)):
                raise broken(path, "a key with lone surrogates needs a tag")
            return {
                key: self.value(item, _at_key(like, key), joined(path, key), depth + 1)
                for key, item in node.items()
            }
        return self._tagged(node, like, path, depth)

    def _tagged(self, node: dict[str, Node], like: object, path: str, depth: int) -> object:
        if len(node) != 1:
            raise broken(path, f"a tag stands alone, not among {len(node)} keys")
        [(tag, body)] = node.items()
        if tag in DECODERS:
            return DECODERS[tag](body, path)
        if tag in _CONTAINERS:
            return _CONTAINERS[tag](self, body, like, path, depth)
        return self._foreign(tag, body, like, path)

    def _foreign(self, tag: str, body: Node, like: object, path: str) -> object:
        if tag == "$array":
            return self._arrays.array(body, path)
        if tag == "$sparse":
            return self._tensors.sparse(body, path, like)
        if tag == "$quantized":
            return self._tensors.quantized(body, path, like)
        if tag == "$generator":
            return self._tensors.generator(body, path)
        if tag in _FOREIGN:
            return _FOREIGN[tag](body, path)
        raise newer(path, f"unknown tag {tag[:40]!r}")

    # ── sharing ───────────────────────────────────────────────────────────────────────────
    def _define(self, body: Node, like: object, path: str, depth: int) -> object:
        fields = record(body, path, "id value")
        number, inner = integer(fields["id"], path), fields["value"]
        if number < 0 or number in self._shared:
            raise broken(path, "a shared container has one definition")
        if not _can_be_shared(inner):
            raise broken(path, "only what can change is shared")
        value: object = self.value(inner, like, path, depth)
        self._shared[number] = value
        return value

    def _refer(self, body: Node, like: object, path: str, depth: int) -> object:
        number = integer(body, path)
        if number not in self._shared:
            raise broken(path, "a reference to something that is not there yet")
        return self._shared[number]

    # ── containers ────────────────────────────────────────────────────────────────────────
    def _items(self, body: Node, like: object, path: str, depth: int) -> list[Any]:
        return [
            self.value(item, _at_index(like, index), joined(path, index), depth + 1)
            for index, item in enumerate(sequence(body, path))
        ]

    def _tuple(self, body: Node, like: object, path: str, depth: int) -> tuple[Any, ...]:
        return tuple(self._items(body, like, path, depth))

    def _slice(self, body: Node, like: object, path: str, depth: int) -> slice:
        if isinstance(like, slice):
            like = (like.start, like.stop, like.step)
        return slice(*self._items(sequence(body, path, 3), like, path, depth))

    def _pairs(self, body: Node, like: object, path: str, depth: int) -> dict[Any, Any]:
        classes = _Classes(like) if isinstance(like, dict) else None
        found: dict[Any, Any] = {}
        for pair in sequence(body, path):
            key_node, item = sequence(pair, path, 2)
            key = self._hashed(key_node, classes, path, depth)
            if key in found:
                raise broken(path, "a key occurs twice")
            found[key] = self.value(item, _at_key(like, key), joined(path, key), depth + 1)
        return found

    def _hashed(self, node: Node, classes: object, path: str, depth: int) -> Any:
        value = self.value(node, classes, path, depth + 1)
        try:
            hash(value)
        except (TypeError, ValueError):  # numpy's spans of no unit raise the other one
            raise broken(path, f"{type(value).__name__} cannot be a key or member") from None
        if type(node) is dict and _holds_memory(value):
            raise broken(path, "what holds a tensor cannot be a key or member")
        return value

    def _counter(self, body: Node, like: object, path: str, depth: int) -> Counter[Any]:
        counter: Counter[Any] = Counter()
        for key, count in self._pairs(body, like, path, depth).items():
            counter[key] = count
        return counter

    def _ordered(self, body: Node, like: object, path: str, depth: int) -> OrderedDict[Any, Any]:
        fields = record(body, path, "items", "metadata")
        found = OrderedDict(self._pairs(fields["items"], like, path, depth))
        if "metadata" in fields:
            inner = joined(path, "_metadata")
            vars(found)["_metadata"] = self.value(fields["metadata"], None, inner, depth + 1)
        return found

    def _defaultdict(
        self, body: Node, like: object, path: str, depth: int
    ) -> defaultdict[Any, Any]:
        fields = record(body, path, "factory items")
        if text(fields["factory"], path) not in FACTORIES:
            raise broken(path, f"a defaultdict of {fields['factory'][:40]!r}")
        factory = FACTORIES[fields["factory"]]
        return defaultdict(factory, self._pairs(fields["items"], like, path, depth))

    def _set(self, body: Node, like: object, path: str, depth: int) -> set[Any]:
        classes = _Classes(like) if isinstance(like, (set, frozenset)) else _inherited(like)
        members = [self._hashed(item, classes, path, depth) for item in sequence(body, path)]
        found = set(members)
        if len(found) != len(members):
            raise broken(path, "a member of a set occurs twice")
        return found

    def _frozenset(self, body: Node, like: object, path: str, depth: int) -> frozenset[Any]:
        return frozenset(self._set(body, like, path, depth))

    def _bytearray(self, body: Node, like: object, path: str, depth: int) -> bytearray:
        return bytearray(bytes_from(body, path))

    def _enum(self, body: Node, like: object, path: str, depth: int) -> Enum:
        wanted = "class bits" if type(body) is dict and "bits" in body else "class member"
        fields = record(body, path, wanted)
        name = text(fields["class"], path)
        kind = _class_of(like, name)
        if kind is None or not issubclass(kind, Enum):
            raise broken(path, f"a member of enum {name!r}, which the tracked state lacks there")
        if "bits" in fields:
            return _combined(kind, integer(fields["bits"], path), path)
        member: Enum | None = kind.__members__.get(text(fields["member"], path))
        if member is None:
            raise broken(path, f"enum {name!r} has no member {fields['member'][:40]!r}")
        return member

    def _namedtuple(self, body: Node, like: object, path: str, depth: int) -> Any:
        parts = record(body, path, "class fields items")
        names = [text(field, path) for field in sequence(parts["fields"], path)]
        nodes = sequence(parts["items"], path, len(names))
        kind = self._tuple_class(text(parts["class"], path), names, like, path)
        items = [
            self.value(node, _at_index(like, index), joined(path, field), depth + 1)
            for index, (field, node) in enumerate(zip(names, nodes, strict=True))
        ]
        return tuple.__new__(kind, items)

    def _tuple_class(self, name: str, names: list[str], like: object, path: str) -> Any:
        known = _class_of(like, name)
        if known is not None and list(getattr(known, "_fields", ())) == names:
            return known
        key = (name, *names)
        if key not in self._tuples:
            try:
                self._tuples[key] = record_class(name, names)
            except ValueError as error:
                raise broken(path, f"not a namedtuple: {error}") from None
        return self._tuples[key]


_THEMSELVES = {bool, int}
_CONTAINERS: dict[str, Callable[[Decoder, Node, object, str, int], object]] = {
    "$shared": Decoder._define,
    "$ref": Decoder._refer,
    "$dict": Decoder._pairs,
    "$tuple": Decoder._tuple,
    "$slice": Decoder._slice,
    "$set": Decoder._set,
    "$frozenset": Decoder._frozenset,
    "$bytearray": Decoder._bytearray,
    "$counter": Decoder._counter,
    "$ordereddict": Decoder._ordered,
    "$defaultdict": Decoder._defaultdict,
    "$enum": Decoder._enum,
    "$namedtuple": Decoder._namedtuple,
}
_FOREIGN: dict[str, Callable[[Node, str], object]] = {
    "$scalar": arrays.decode_scalar,
    "$numpy_dtype": arrays.decode_dtype,
    "$torch_dtype": rebuild.decode_dtype,
    "$device": rebuild.decode_device,
    "$size": rebuild.decode_size,
}


_SHAREABLE = {
    "$dict", "$set", "$bytearray", "$counter", "$ordereddict", "$defaultdict",
    "$generator", "$sparse", "$quantized",
}  # fmt: skip


def _can_be_shared(node: Node) -> bool:
    """Nothing that has a hash: tuples of tuples by reference would be deeper than their text."""
    if type(node) is not dict:
        return type(node) is list
    tags = [key for key in node if key.startswith("$")]
    return not tags or (len(node) == 1 and tags[0] in _SHAREABLE)


def _holds_memory(value: object) -> bool:
    """torch gives tensors a hash; what they hold can change all the same."""
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, (tuple, frozenset)):
        return any(map(_holds_memory, value))
    return isinstance(value, (torch.Tensor, torch.Generator))


def _combined(kind: type[Enum], bits: int, path: str) -> Enum:
    if not issubclass(kind, Flag):
        raise broken(path, f"enum {kind.__qualname__!r} has no combinations")
    try:
        return kind(bits)
    except ValueError as error:
        raise broken(path, f"no such combination: {error}") from None


def _class_of(like: object, name: str) -> Any:
    if isinstance(like, _Classes):
        return like.found.get(name)
    kind = type(like)
    known = kind.__qualname__ if isinstance(like, Enum) else kind.__name__
    return kind if isinstance(like, (Enum, tuple)) and known == name else None


def _inherited(like: object) -> _Classes | None:
    return like if isinstance(like, _Classes) else None


def _at_key(like: object, key: object) -> object:
    if isinstance(like, dict):
        return dict.get(like, key)
    return None


def _at_index(like: object, index: int) -> object:
    """The item there; a list that has grown since takes its last one for a pattern."""
    if isinstance(like, _Classes):
        return like
    if isinstance(like, (list, tuple)) and len(like):
        return like[min(index, len(like) - 1)]
    return None


def _check_nesting(tree: Node) -> None:
    """Before anything recursive sees it; walks level by level."""
    level = [tree] if type(tree) in (dict, list) else []
    for _ in range(_MAX_NESTING):
        inner: list[Node] = []
        for node in level:
            if type(node) is dict and not set(map(type, node)) <= {str}:
                raise broken("", "a JSON object has text for keys")
            if type(node) is list or "$tensor" not in node:  # whose fields are checked one by one
                items = node.values() if type(node) is dict else node
                inner += [item for item in items if type(item) is dict or type(item) is list]
        if not inner:
            return
        level = inner
    raise broken("", f"brackets nested more than {_MAX_NESTING} deep")
