"""Puts a saved state back into the program's own objects, in place.

compare() changes nothing and lists what does not fit; load() then changes what does. Containers
take the saved keys and length, and what they hold is restored in place as far as it can be.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from . import generators, modules, optimizers
from .generators import is_generator

MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_Tensor, _Array = torch.Tensor, np.ndarray


def is_stateful(value: object) -> bool:
    """Whether it gives and takes its state itself."""
    if isinstance(value, type):
        return False
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def holds_stateful(value: object, seen: set[int] | None = None) -> bool:
    """Whether replacing the value would lose an object that only the program can make."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, (dict, list, tuple)):
        return any(holds_stateful(item, seen) for item in _children(value))
    return is_stateful(value) or isinstance(value, torch.Generator) or is_generator(value)


def _children(value: Any) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value


# ── compare ───────────────────────────────────────────────────────────────────────────────
def compare(current: Any, saved: Any, path: str, *, top: bool = False) -> list[str]:
    """What keeps `saved` from fitting; a tracked object itself (`top`) cannot be replaced."""
    if is_stateful(current):
        return _compare_stateful(current, saved, path)
    if is_generator(current):
        return generators.differences(current, saved, path)
    kind = _same_kind(current, saved)
    if kind is None:
        if top or holds_stateful(current):
            return [f"{path}: {_noun(saved)} in the checkpoint, {_noun(current)} here"]
        return []
    if kind in (_Tensor, _Array):
        return _compare_memory(current, saved, path)
    if kind is dict:
        return _compare_items(current, saved, path)
    if kind in (list, tuple):
        return _compare_items(dict(enumerate(current)), dict(enumerate(saved)), path)
    return []


def _same_kind(current: object, saved: object) -> type | None:
    """What both are, if they can be restored one from the other."""
    kinds = (torch.Tensor, np.ndarray, torch.Generator, dict, list, tuple, set, bytearray)
    for kind in kinds:
        if isinstance(current, kind):
            return kind if isinstance(saved, kind) else None
    return object


def _compare_stateful(current: Any, saved: Any, path: str) -> list[str]:
    optimizer = optimizers.unwrapped(current)
    if optimizer is not None:
        return optimizers.differences(optimizer, saved, path)
    if modules.is_plain_module(current):
        return [str(item) for item in modules.differences(current, saved, path)]
    return []


def _compare_memory(current: Any, saved: Any, path: str) -> list[str]:
    found = []
    if tuple(current.shape) != tuple(saved.shape):
        found.append(f"{path}: {_shapes(current, saved)}")
    if current.dtype != saved.dtype:
        found.append(f"{path}: dtype {saved.dtype} in the checkpoint, {current.dtype} here")
    if isinstance(current, torch.Tensor) and _form(current) != _form(saved):
        found.append(f"{path}: {_form(saved)} in the checkpoint, {_form(current)} here")
    return found


def _shapes(current: Any, saved: Any) -> str:
    return f"shape {tuple(saved.shape)} in the checkpoint, {tuple(current.shape)} here"


def _form(value: torch.Tensor) -> str:
    # torch copies compressed tensors onto each other only with equal counts.
    compressed = value.layout not in (torch.strided, torch.sparse_coo)
    return f"{value.layout} with {value._nnz()} values" if compressed else str(value.layout)


def _compare_items(current: dict[Any, Any], saved: dict[Any, Any], path: str) -> list[str]:
    found = []
    for key, item in current.items():
        place = f"{path}.{key}"
        if key in saved:
            found += compare(item, saved[key], place)
        elif holds_stateful(item):
            found.append(f"{place}: not in the checkpoint")
    return found


def _noun(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


# ── load ──────────────────────────────────────────────────────────────────────────────────
def load(current: Any, saved: Any, path: str, faults: list[str]) -> Any:
    """Restore what fits; return what belongs in the place of `current`, itself if it can be.

    What an object's own load_state_dict() raises goes to `faults`.
    """
    if is_stateful(current):
        _load_stateful(current, saved, path, faults)
        return current
    if is_generator(current):
        _load_own_generator(current, saved, path, faults)
        return current
    kind = _same_kind(current, saved)
    if kind is None:
        return current if holds_stateful(current) else saved
    if kind in (_Tensor, _Array):
        _load_memory(current, saved, path, faults)
        return current
    if kind in _LOADERS:
        return _LOADERS[kind](current, saved, path, faults)
    return saved


def _load_stateful(current: Any, saved: Any, path: str, faults: list[str]) -> None:
    try:
        if modules.is_plain_module(current):
            modules.load(current, saved, path)
        elif optimizers.unwrapped(current) is None:
            current.load_state_dict(saved)
        elif not _compare_stateful(current, saved, path):
            optimizers.load(current, saved)
    except Exception as error:  # noqa: BLE001 - the object's own code; its fault is reported whole
        faults.append(f"{path}: load_state_dict() raised {type(error).__name__}: {error}")


def _load_memory(current: Any, saved: Any, path: str, faults: list[str]) -> None:
    if tuple(current.shape) != tuple(saved.shape):
        return
    try:
        if isinstance(current, torch.Tensor):
            _copy_tensor(current, saved)
        elif np.can_cast(saved.dtype, current.dtype, "same_kind"):
            np.copyto(current, saved, casting="same_kind")
    except (RuntimeError, TypeError, ValueError) as error:
        faults.append(f"{path}: {error}")


def _copy_tensor(current: torch.Tensor, saved: torch.Tensor) -> None:
    if _form(current) == _form(saved) and torch.can_cast(saved.dtype, current.dtype):
        with torch.no_grad():
            current.copy_(saved)


def _load_generator(current: Any, saved: Any, path: str, faults: list[str]) -> Any:
    try:
        current.set_state(saved.get_state())
    except RuntimeError as error:
        faults.append(f"{path}: {error}")
    return current


def _load_own_generator(current: Any, saved: Any, path: str, faults: list[str]) -> None:
    if generators.differences(current, saved, path):
        return
    try:
        generators.load(current, saved)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        faults.append(f"{path}: {error}")


def _load_dict(current: Any, saved: Any, path: str, faults: list[str]) -> Any:
    items = _merged(current, saved, path, faults)
    gone = [str(key) for key in current if key not in items]
    if gone:
        message = f"{path}: not in the checkpoint, and removed as in the run that was saved: "
        warnings.warn(message + ", ".join(gone), RuntimeWarning, stacklevel=2)
    current.clear()
    for key, item in items.items():  # one by one: Counter.update() would add
        current[key] = item
    return current


def _load_list(current: Any, saved: Any, path: str, faults: list[str]) -> Any:
    items = _merged(dict(enumerate(current)), dict(enumerate(saved)), path, faults)
    current[:] = items.values()
    return current


def _load_tuple(current: Any, saved: Any, path: str, faults: list[str]) -> Any:
    items = _merged(dict(enumerate(current)), dict(enumerate(saved)), path, faults)
    values = list(items.values())
    if len(values) == len(current) and all(map(_is, values, current)):
        return current
    return tuple.__new__(type(saved), values)


def _is(one: object, other: object) -> bool:
    return one is other


def _load_set(current: Any, saved: Any, path: str, faults: list[str]) -> Any:
    current.clear()
    current.update(saved)
    return current


def _load_bytearray(current: Any, saved: Any, path: str, faults: list[str]) -> Any:
    current[:] = saved
    return current


def _merged(
    current: dict[Any, Any], saved: dict[Any, Any], path: str, faults: list[str]
) -> dict[Any, Any]:
    """The saved keys in their order, then the program's objects that the checkpoint lacks."""
    items = {
        key: load(current[key], item, f"{path}.{key}", faults) if key in current else item
        for key, item in saved.items()
    }
    kept = {k: v for k, v in current.items() if k not in items and holds_stateful(v)}
    return items | kept


_LOADERS: dict[type, Any] = {
    torch.Generator: _load_generator,
    dict: _load_dict,
    list: _load_list,
    tuple: _load_tuple,
    set: _load_set,
    bytearray: _load_bytearray,
}
