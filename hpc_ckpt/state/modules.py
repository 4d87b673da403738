"""nn.Modules among the tracked objects: what does not fit, found before anything is changed.

Module.load_state_dict() copies what fits and then complains; it casts dtypes in silence. Parts
that load themselves (they override _load_from_state_dict or have pre-hooks, as observers that
change shape do) are left to their own judgement.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

_EXTRA_STATE = "_extra_state"
"""torch's name for what set_extra_state() takes."""


@dataclass(frozen=True)
class Difference:
    """One key of a module that does not fit; `loadable` if torch can cast it."""

    path: str
    key: str
    what: str
    loadable: bool = False

    def __str__(self) -> str:
        place = f"{self.path}.{self.key}" if self.key else self.path
        return f"{place}: {self.what}"


def is_plain_module(value: object) -> bool:
    """A module that gives and takes its state in torch's own way."""
    if not isinstance(value, Module):
        return False
    kind = type(value)
    return kind.load_state_dict is Module.load_state_dict and kind.state_dict is Module.state_dict


def differences(module: Module, saved: Any, path: str) -> list[Difference]:
    if not isinstance(saved, dict) or not all(isinstance(key, str) for key in saved):
        return [Difference(path, "", "the checkpoint holds no module state under this name")]
    here = module.state_dict()
    if _is_loaded(module, saved, here):
        return []
    itself = prefixes_that_load_themselves(module)
    found = [
        Difference(path, key, "not in the checkpoint")
        for key in here
        if key not in saved and not key.startswith(itself)
    ]
    for key, value in saved.items():
        if key.startswith(itself):
            continue
        if key not in here:
            found.append(Difference(path, key, "in the checkpoint, but not in the module"))
        else:
            found += _compare(here[key], value, path, key)
    return found


def _compare(here: Any, saved: Any, path: str, key: str) -> list[Difference]:
    if not isinstance(here, torch.Tensor):
        return []  # extra state: the module's own affair
    if not isinstance(saved, torch.Tensor):
        return [Difference(path, key, f"{type(saved).__name__} in the checkpoint, a tensor here")]
    if here.shape != saved.shape:
        shapes = f"shape {tuple(saved.shape)} in the checkpoint, {tuple(here.shape)} here"
        return [Difference(path, key, shapes)]
    if here.dtype != saved.dtype:
        dtypes = f"dtype {saved.dtype} in the checkpoint, {here.dtype} here"
        return [Difference(path, key, dtypes, torch.can_cast(saved.dtype, here.dtype))]
    return []


def load(module: Module, saved: Any, path: str) -> None:
    """Load what fits; strict in torch's sense if all of it does."""
    if isinstance(saved, dict) and _is_loaded(module, saved, module.state_dict()):
        return
    found = differences(module, saved, path)
    unfit = {item.key for item in found if not item.loadable}
    if "" in unfit:
        return
    fitting = OrderedDict((key, value) for key, value in saved.items() if key not in unfit)
    if hasattr(saved, "_metadata"):
        vars(fitting)["_metadata"] = saved._metadata
    module.load_state_dict(fitting, strict=not unfit)


def _is_loaded(module: Module, saved: dict[str, Any], here: dict[str, Any]) -> bool:
    """Whether every value lies in the module's own memory already, and nobody asks to be told."""
    if saved.keys() != here.keys() or not all(
        isinstance(value, torch.Tensor)
        and isinstance(here[key], torch.Tensor)
        and value.data_ptr() == here[key].data_ptr() != 0
        and value.shape == here[key].shape
        and value.dtype == here[key].dtype
        for key, value in saved.items()
    ):
        return False
    if any(part._load_state_dict_post_hooks for part in module.modules()):
        return False
    return not prefixes_that_load_themselves(module) and not any(map(_is_extra_state, saved))


def is_loaded_by_itself(key: str, itself: tuple[str, ...]) -> bool:
    """Whether the module's own code takes the value; `itself` are the prefixes of such parts."""
    return key.startswith(itself) or _is_extra_state(key)


def _is_extra_state(key: str) -> bool:
    return key.rpartition(".")[2] == _EXTRA_STATE


def prefixes_that_load_themselves(module: Module) -> tuple[str, ...]:
    """Of the parts whose own code takes their state."""
    return tuple(
        f"{name}." if name else ""
        for name, part in module.named_modules(remove_duplicate=False)
        if _loads_itself(part)
    )


def _loads_itself(part: Module) -> bool:
    method = type(part)._load_from_state_dict
    stock = method is Module._load_from_state_dict or method.__module__.startswith("torch.nn.")
    return not stock or bool(part._load_state_dict_pre_hooks)
