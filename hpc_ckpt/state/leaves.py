"""Leaves: the flat named buffers of a state, their names, ties, and the copying of their bytes.

A leaf keeps a reference to the program's own memory; bytes move only in copy_into() and fill().
Both go through numpy for memory of the CPU: torch would copy through OpenMP, whose barriers
stall for seconds beside a busy neighbour. What a leaf means is tensors.py's and arrays.py's.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError
from .plain import Node, broken, sequence, text

RESERVED = "__metadata__"
"""Not a tensor name in a safetensors header."""

Value = torch.Tensor | np.ndarray[Any, Any]
Read = Callable[[str], memoryview]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True, eq=False)
class Leaf:
    """One flat named buffer. dtype (safetensors' name), shape and nbytes are as stored."""

    name: str
    value: Value
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class LeafBook:
    """Collects the leaves of one state: unique names, tied memory stored once."""

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.aliases: dict[str, str] = {}
        self.order: list[str] = []
        """Every name that was given, of leaves and aliases, one after the other."""
        self._taken = {RESERVED}
        self._stored: dict[Hashable, str] = {}

    def __len__(self) -> int:
        return len(self.leaves) + len(self.aliases)

    def add(
        self, path: str, value: Value, stored: tuple[str, tuple[int, ...], int], tie: Hashable
    ) -> dict[str, Node]:
        """The fields of the node that name the leaf; `tie` is equal for identical memory."""
        name = self._unique(path)
        self.order.append(name)
        dtype, shape, nbytes = stored
        first = self._stored.setdefault(tie, name) if nbytes else name
        if first != name:
            self.aliases[name] = first
            return {"leaf": name, "tied": first}
        # The leaf holds its value, so no later one can get the same address by chance.
        self.leaves.append(Leaf(name, value, dtype, shape, nbytes))
        return {"leaf": name}

    def _unique(self, path: str) -> str:
        stem = path.encode("utf-8", "backslashreplace").decode() or "state"
        name, number = stem, 1
        while name in self._taken:
            number += 1
            name = f"{stem}~{number}"
        self._taken.add(name)
        return name


def leaf_bytes(read: Read, name: Node, path: str, nbytes: int) -> memoryview:
    """The bytes of a stored leaf, of exactly the size its node promises."""
    try:
        data = memoryview(read(text(name, path)))
    except LookupError:
        raise broken(path, f"the checkpoint has no leaf {name!r}") from None
    if data.nbytes != nbytes:
        raise broken(path, f"leaf {name!r} has {data.nbytes} bytes, its node says {nbytes}")
    return data.cast("B") if data.nbytes else memoryview(b"")


def identity_of_leaf(fields: dict[str, Node], path: str) -> Hashable:
    """The same for one leaf's fields, which are the many."""
    name, order = fields.get("tied", fields["leaf"]), fields.get("order")
    shape = tuple(sequence(fields["shape"], path))
    order = tuple(order) if type(order) is list else order
    key = (name, fields["dtype"], shape, fields.get("device"), order)
    try:
        hash(key)
    except TypeError:  # not repr(): what lies in there may be nested without an end
        raise broken(path, "the fields of a leaf are text and lists of numbers") from None
    return key


def identity(node: Node) -> str:
    """Equal for nodes that mean the same stored memory in the same form."""
    return json.dumps(_without_alias(node), sort_keys=True)


def _without_alias(node: Node) -> Node:
    if type(node) is not dict:
        return node
    fields = {key: _without_alias(item) for key, item in node.items()}
    if "tied" in fields:
        fields["leaf"] = fields.pop("tied")
    return fields


def view_at(place: int, length: int) -> memoryview:
    """Memory by its address; keeps nothing alive."""
    return memoryview((ctypes.c_ubyte * length).from_address(place)).cast("B")


def copy_into(target: memoryview, value: Value) -> None:
    """Copy one leaf's bytes, in C order, into a target of exactly its size."""
    if isinstance(value, torch.Tensor):
        value = _host_words(value)
    if target.nbytes != value.nbytes:
        raise ValueError(f"target has {target.nbytes} bytes, the leaf {value.nbytes}")
    if not value.nbytes:
        return
    if value.flags.c_contiguous:  # one memcpy, whatever the dtype
        np.copyto(np.frombuffer(target, np.uint8), value.reshape(-1).view(np.uint8))
    else:
        np.copyto(np.ndarray(value.shape, value.dtype, buffer=target), value)


def fill(value: torch.Tensor, data: memoryview) -> None:
    """The reverse for a tensor in the CPU's memory, of any strides."""
    words = _words(value)
    if not words.nbytes:
        return
    if words.flags.c_contiguous:
        np.copyto(words.reshape(-1).view(np.uint8), np.frombuffer(data, np.uint8))
    else:
        np.copyto(words, np.ndarray(words.shape, words.dtype, buffer=data))


def _host_words(value: torch.Tensor) -> np.ndarray[Any, Any]:
    plain = value.detach().resolve_conj().resolve_neg()
    if plain.device.type != "cpu":
        plain = plain.contiguous().cpu()
    return _words(plain)


def _words(value: torch.Tensor) -> np.ndarray[Any, Any]:
    """The tensor's memory as numpy sees it: same size and strides, a dtype numpy knows."""
    word = _WORDS.get(value.element_size())
    if word is None:
        raise CheckpointError(f"{value.dtype} has items of {value.element_size()} bytes")
    array: np.ndarray[Any, Any] = value.detach().view(word).numpy()
    return array
