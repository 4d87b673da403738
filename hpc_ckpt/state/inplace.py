"""Where saved leaves can be read straight into the program's own memory.

Only the parameters and buffers of plain modules, and only when the whole checkpoint visibly fits
the tracked objects: whoever finds a difference later must find nothing changed. In doubt no leaf
is named; it is then read into memory of its own and copied.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from . import fit, modules, optimizers, tensors, tree
from .plain import Node


class _Doubt(Exception):
    """Something that may not fit."""


def targets(tracked: Mapping[str, Any], saved: Node) -> dict[str, memoryview]:
    """Memory for the leaves of a state tree's `tracked` part, by leaf name; empty in doubt."""
    if not isinstance(saved, dict) or set(saved) != set(tracked):
        return {}
    try:
        return {
            name: memory
            for key, value in tracked.items()
            for name, memory in _targets_of(value, saved[key])
        }
    except _Doubt:
        return {}


def _targets_of(value: Any, node: Node) -> Iterator[tuple[str, memoryview]]:
    if modules.is_plain_module(value):
        yield from _module_targets(value, node)
    elif optimizers.unwrapped(value) is not None:
        _check_optimizer(optimizers.unwrapped(value), node)
    elif not fit.is_stateful(value):
        raise _Doubt  # a tensor, an array or a container: compared only once it is decoded


def _module_targets(module: torch.nn.Module, node: Node) -> Iterator[tuple[str, memoryview]]:
    here = module.state_dict()
    items, metadata = _ordered(node)
    if [key for key, _ in items] != list(here) or metadata != _metadata_node(here):
        raise _Doubt
    itself = modules.prefixes_that_load_themselves(module)
    for key, inner in items:
        fields = inner.get("$tensor") if isinstance(inner, dict) else None
        value = here[key]
        if not isinstance(fields, dict) or not isinstance(value, torch.Tensor):
            raise _Doubt
        if fields.get("dtype") != tensors.name_of(value.dtype):
            raise _Doubt
        if fields.get("shape") != list(value.shape):
            raise _Doubt
        if "tied" in fields or "order" in fields or modules.is_loaded_by_itself(key, itself):
            continue
        if value.nbytes and _is_plain_memory(value):
            yield fields["leaf"], memory_of(value)


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


def _is_plain_memory(value: torch.Tensor) -> bool:
    if value.device.type != "cpu" or value.layout is not torch.strided or value.is_quantized:
        return False
    return value.is_contiguous() and not value.is_conj() and not value.is_neg()


def memory_of(value: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, to be written to."""
    array: Any = value.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
