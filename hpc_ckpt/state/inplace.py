"""Where saved leaves can be read straight into the program's own memory.

Only the parameters and buffers of plain modules and the state of torch's optimizers, and only
when the whole checkpoint visibly fits the tracked objects: whoever finds a difference later must
find nothing changed. In doubt no leaf is named; it is then read into memory of its own.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch

from . import fit, modules, optimizers, tensors, tree
from .leaves import view_at
from .plain import Node


class _Doubt(Exception):
    """Something that may not fit."""


def targets(tracked: Mapping[str, Any], saved: Node) -> dict[str, torch.Tensor]:
    """The program's own tensors for leaves of a state tree's `tracked` part, by leaf name.

    Each has the form of its leaf and lies in one stretch of host memory. Empty in doubt.
    """
    if not isinstance(saved, dict) or set(saved) != set(tracked):
        return {}
    try:
        found = {
            name: tensor
            for key, value in tracked.items()
            for name, tensor in _targets_of(value, saved[key])
        }
    except _Doubt:
        return {}
    # Two leaves in one place would spoil each other before they are digested.
    return found if _are_apart(found.values()) else {}


def _are_apart(values: Iterable[torch.Tensor]) -> bool:
    places = sorted((value.data_ptr(), value.nbytes) for value in values)
    return all(start + length <= following for (start, length), (following, _) in pairwise(places))


def _targets_of(value: Any, node: Node) -> Iterable[tuple[str, torch.Tensor]]:
    if modules.is_plain_module(value):
        yield from _module_targets(value, node)
    elif (optimizer := optimizers.unwrapped(value)) is not None:
        _check_optimizer(optimizer, node)
        yield from _optimizer_targets(optimizer, node)
    elif not fit.is_stateful(value):
        raise _Doubt  # a tensor, an array or a container: compared only once it is decoded


def _module_targets(module: torch.nn.Module, node: Node) -> Iterable[tuple[str, torch.Tensor]]:
    here = modules.state_dict(module)
    items, metadata = _ordered(node)
    if [key for key, _ in items] != list(here) or metadata != _metadata_node(here):
        raise _Doubt
    itself = modules.prefixes_that_load_themselves(module)
    for key, inner in items:
        value = here[key]
        fields = _fields_if_alike(inner, value)
        if fields is None:
            raise _Doubt
        if _is_one_stretch(fields, value) and not modules.is_loaded_by_itself(key, itself):
            yield fields["leaf"], value


def _fields_if_alike(node: Node, value: object) -> dict[str, Node] | None:
    """A tensor's fields, if the value is a tensor of the same dtype and shape."""
    fields = node.get("$tensor") if isinstance(node, dict) else None
    if not isinstance(fields, dict) or not isinstance(value, torch.Tensor):
        return None
    if not isinstance(fields.get("leaf"), str):
        return None
    alike = fields.get("dtype") == tensors.name_of(value.dtype)
    return fields if alike and fields.get("shape") == list(value.shape) else None


def _is_one_stretch(fields: dict[str, Node], value: torch.Tensor) -> bool:
    """On both sides, and nobody else's."""
    if "tied" in fields or "order" in fields or "device" in fields or not value.numel():
        return False
    return _is_plain_memory(value)


def _ordered(node: Node) -> tuple[list[tuple[Any, Any]], Node]:
    fields = node.get("$ordereddict") if isinstance(node, dict) else None
    if not isinstance(fields, dict) or not isinstance(fields.get("items"), list):
        raise _Doubt
    pairs = fields["items"]
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise _Doubt
    return [(key, value) for key, value in pairs], fields.get("metadata")


def _metadata_node(state: Any) -> Node:
    metadata = vars(state).get("_metadata")
    return None if metadata is None else tree.encode(metadata).tree


def _check_optimizer(optimizer: Any, node: Node) -> None:
    groups = node.get("param_groups") if isinstance(node, dict) else None
    if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups):
        raise _Doubt
    if not isinstance(node.get("state"), dict):
        raise _Doubt
    for old, new in zip(groups, optimizer.param_groups, strict=True):
        numbers = old.get("params") if isinstance(old, dict) else None
        if not isinstance(numbers, list) or len(numbers) != len(new["params"]):
            raise _Doubt


def _optimizer_targets(optimizer: Any, node: Node) -> Iterable[tuple[str, torch.Tensor]]:
    """All tensors of its state, or none: an optimizer that has not stepped yet has none."""
    here, saved = optimizer.state_dict(), node["state"].get("$dict")
    rows = here.get("state") if isinstance(here, dict) else None
    if not isinstance(rows, dict) or not isinstance(saved, list) or len(saved) != len(rows):
        return ()
    found: dict[str, torch.Tensor] = {}
    for pair, (number, row) in zip(saved, rows.items(), strict=True):
        if not isinstance(pair, list) or len(pair) != 2 or pair[0] != number:
            return ()
        if not isinstance(pair[1], dict) or not isinstance(row, dict) or [*pair[1]] != [*row]:
            return ()
        for inner, value in zip(pair[1].values(), row.values(), strict=True):
            fields = _fields_if_alike(inner, value)
            if fields is None or not _is_one_stretch(fields, value):
                return ()
            found[fields["leaf"]] = value
    return found.items()


def _is_plain_memory(value: torch.Tensor) -> bool:
    if not value.is_cpu or value.layout is not torch.strided or value.is_quantized:
        return False
    return value.is_contiguous() and not value.is_conj() and not value.is_neg()


def memory_of(value: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, to be written to while it is alive."""
    return view_at(value.data_ptr(), value.nbytes)
