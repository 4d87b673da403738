"""torch optimizers among the tracked objects: finding them, and loading their state exactly.

Optimizer.load_state_dict() casts floating state to the parameter's dtype (float32 moments of
bfloat16 parameters lose half their bits) and rebuilds text as nonsense; load() mends both.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer


def optimizers_in(tracked: Iterable[object]) -> list[Optimizer]:
    """Each optimizer once, in the order tracked, also inside containers and wrappers."""
    found: dict[int, Optimizer] = {}
    for value in _flattened(tracked, set()):
        optimizer = unwrapped(value)
        if optimizer is not None:
            found.setdefault(id(optimizer), optimizer)
    return list(found.values())


def _flattened(values: Iterable[object], seen: set[int]) -> Iterator[object]:
    for value in values:
        if isinstance(value, (dict, list, tuple)):
            if id(value) not in seen:
                seen.add(id(value))
                inner = value.values() if isinstance(value, dict) else value
                yield from _flattened(inner, seen)
        else:
            yield value


def unwrapped(value: object) -> Optimizer | None:
    """The optimizer whose hooks fire; None for anything else.

    A scheduler also has `.optimizer`, but it does not step it: zero_grad() tells them apart.
    """
    inner = getattr(value, "optimizer", None)
    if isinstance(inner, Optimizer) and inner is not value and _is_wrapper(value):
        return unwrapped(inner)
    return value if isinstance(value, Optimizer) else None


def _is_wrapper(value: object) -> bool:
    return callable(getattr(value, "step", None)) and callable(getattr(value, "zero_grad", None))


def differences(optimizer: Optimizer, saved: Any, path: str) -> list[str]:
    """Why load_state_dict() would refuse the saved state; one of its own form is its affair."""
    if not _is_standard(saved):
        if _loads_itself(optimizer):
            return []
        return [f"{path}: the checkpoint holds no optimizer state under this name"]
    groups, here = saved["param_groups"], optimizer.param_groups
    if len(groups) != len(here):
        return [f"{path}: {len(groups)} parameter groups in the checkpoint, {len(here)} here"]
    found = []
    for index, (old, new) in enumerate(zip(groups, here, strict=True)):
        had, has = len(_parameters(old)), len(new["params"])
        place = f"{path}.param_groups.{index}"
        if had != has:
            found.append(f"{place}: {had} parameters in the checkpoint, {has} here")
        elif not _loads_itself(optimizer):
            found += _other_settings(old, new, place)
            found += _other_shapes(saved["state"], _parameters(old), new["params"], place)
    return found


def _other_settings(old: Any, new: dict[str, Any], place: str) -> list[str]:
    """Each has settings that the other lacks: another optimizer. A newer torch only adds some."""
    before, here = set(old), {key for key in new if not key.startswith("_")}
    if not (before - here and here - before):
        return []
    had, has = ", ".join(sorted(before - here)), ", ".join(sorted(here - before))
    return [f"{place}: of another optimizer: {had} in the checkpoint, {has} here"]


_LIKE_PARAMETER = frozenset(
    {"acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq",
     "momentum_buffer", "prev", "square_avg", "step_size", "sum"}
)  # fmt: skip
"""State of torch's optimizers that has its parameter's shape."""


def _other_shapes(state: Any, names: list[Any], here: list[Any], place: str) -> list[str]:
    found = []
    for number, (name, parameter) in enumerate(zip(names, here, strict=True)):
        row = state.get(name)
        for key, value in row.items() if isinstance(row, dict) else ():
            if key not in _LIKE_PARAMETER or not isinstance(value, torch.Tensor):
                continue
            if value.ndim and value.shape != parameter.shape:
                had, has = tuple(value.shape), tuple(parameter.shape)
                found.append(
                    f"{place}.params.{number}: {key} of shape {had} in the checkpoint, the "
                    f"parameter has {has} here"
                )
                break
    return found


def _is_standard(saved: Any) -> bool:
    if not isinstance(saved, dict) or not isinstance(saved.get("state"), dict):
        return False
    return isinstance(saved.get("param_groups"), list)


def _loads_itself(optimizer: Optimizer) -> bool:
    return type(optimizer).load_state_dict is not Optimizer.load_state_dict


def _parameters(group: Any) -> list[Any]:
    parameters = group.get("params") if isinstance(group, dict) else None
    return parameters if isinstance(parameters, list) else []


def load(value: Any, saved: Any) -> None:
    """load_state_dict(), and every saved value as it was; `value` is an optimizer or wraps one.

    An optimizer with a load_state_dict() of its own knows best and is left alone.
    """
    optimizer = unwrapped(value)
    if optimizer is value and _is_loaded(optimizer, saved):
        state = optimizer.state
        optimizer.load_state_dict({**saved, "state": {}})
        optimizer.state = state
        return
    value.load_state_dict(saved)
    if optimizer is not None and not _loads_itself(optimizer):
        _reinstate(optimizer, saved)


def _is_loaded(optimizer: Optimizer, saved: Any) -> bool:
    """Whether its state is made of the saved tensors already, and nobody asks to be told."""
    if _loads_itself(optimizer) or optimizer._optimizer_load_state_dict_pre_hooks:
        return False
    if optimizer._optimizer_load_state_dict_post_hooks or not saved["state"]:
        return False
    rows = optimizer.state_dict()["state"]
    return rows.keys() == saved["state"].keys() and all(
        isinstance(row, dict)
        and row.keys() == rows[number].keys()
        and all(value is rows[number][key] for key, value in row.items())
        for number, row in saved["state"].items()
    )


def _reinstate(optimizer: Optimizer, saved: Any) -> None:
    """After load_state_dict(saved): every saved value again, in its own dtype."""
    names = chain.from_iterable(_parameters(group) for group in saved["param_groups"])
    here = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for name, parameter in zip(names, here, strict=True):
        if name in saved["state"] and parameter in optimizer.state:
            loaded = optimizer.state[parameter]
            optimizer.state[parameter] = _exact(loaded, saved["state"][name])


def _exact(loaded: Any, saved: Any) -> Any:
    """The loaded value where it is the saved one; what the optimizer converted stays."""
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device, copy=True)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        for key in loaded.keys() & saved.keys():
            loaded[key] = _exact(loaded[key], saved[key])
        return loaded
    if type(loaded) is type(saved) and type(saved) in (list, tuple) and len(loaded) == len(saved):
        return type(saved)(_exact(a, b) for a, b in zip(loaded, saved, strict=True))
    return saved if type(saved) in (str, bytes) else loaded
