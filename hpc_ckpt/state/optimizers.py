"""torch optimizers among the tracked objects: finding them, and loading their state exactly.

Optimizer.load_state_dict() casts floating state to the parameter's dtype (float32 moments of
bfloat16 parameters lose half their bits) and rebuilds text as nonsense; reinstate() mends both.
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
        if had != has:
            place = f"{path}.param_groups.{index}"
            found.append(f"{place}: {had} parameters in the checkpoint, {has} here")
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


def reinstate(optimizer: Optimizer | None, saved: Any) -> None:
    """After load_state_dict(saved): every saved value again, in its own dtype.

    An optimizer with a load_state_dict() of its own knows best and is left alone.
    """
    if optimizer is None or _loads_itself(optimizer):
        return
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
