"""nn.Modules among the tracked objects: what does not fit, found before anything is changed.

Module.load_state_dict() copies what fits and then complains; it casts dtypes in silence. Parts
that load themselves (they override _load_from_state_dict or have pre-hooks, as observers that
change shape do) are left to their own judgement.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch.nn import Module

_EXTRA_STATE = "_extra_state"
"""torch's name for what set_extra_state() takes."""
_COMPILED = "_orig_mod."
"""What torch.compile puts into the names of a part it wraps; a checkpoint has them without it."""
_MOST_SUGGESTIONS = 50
"""Looking for near names costs the square of their number."""


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


def uncompiled(value: Any) -> Any:
    """The program's own module where torch.compile has wrapped it; anything else as it is."""
    # By name: importing the compiler takes seconds.
    wrapped = isinstance(value, Module) and type(value).__name__ == "OptimizedModule"
    return value._orig_mod if wrapped else value


def state_dict(module: Module, *, keep_vars: bool = False) -> Any:
    """Of a plain module, by names that are the same whether or not parts of it are compiled."""
    state = module.state_dict(keep_vars=keep_vars)
    if not any(_COMPILED in key for key in state):
        return state
    plain = OrderedDict((key.replace(_COMPILED, ""), value) for key, value in state.items())
    if len(plain) != len(state):
        return state  # a part of the program's own has that name
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        vars(plain)["_metadata"] = OrderedDict(
            (f"{key}.".replace(_COMPILED, "")[:-1], item) for key, item in metadata.items()
        )
    return plain


def differences(module: Module, saved: Any, path: str) -> list[Difference]:
    if not isinstance(saved, dict) or not all(isinstance(key, str) for key in saved):
        return [Difference(path, "", "the checkpoint holds no module state under this name")]
    here = state_dict(module)
    if _is_loaded(module, saved, here):
        return []
    itself = prefixes_that_load_themselves(module)
    missing = [key for key in here if key not in saved and not key.startswith(itself)]
    extra = [key for key in saved if key not in here and not key.startswith(itself)]
    found = [
        Difference(path, key, f"not in the checkpoint{near}")
        for key, near in with_near(missing, extra)
    ]
    found += [
        Difference(path, key, f"in the checkpoint, but not in the module{near}")
        for key, near in with_near(extra, missing)
    ]
    for key, value in saved.items():
        if key in here and not key.startswith(itself):
            found += _compare(here[key], value, path, key)
    return found


def with_near(names: list[str], others: list[str]) -> Iterator[tuple[str, str]]:
    """Each name, and a note on the most similar one on the other side, if there is one."""
    for number, name in enumerate(names):
        few = number < _MOST_SUGGESTIONS and len(others) <= 40 * _MOST_SUGGESTIONS
        near = get_close_matches(name, others, n=1) if few else []
        yield name, f" (the nearest name there is {near[0]!r})" if near else ""


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
    if isinstance(saved, dict) and _is_loaded(module, saved, state_dict(module)):
        return
    found = differences(module, saved, path)
    unfit = {item.key for item in found if not item.loadable}
    if "" in unfit:
        return
    fitting = OrderedDict((key, value) for key, value in saved.items() if key not in unfit)
    if hasattr(saved, "_metadata"):
        vars(fitting)["_metadata"] = saved._metadata
    module.load_state_dict(_as_compiled(module, fitting), strict=not unfit)


def _as_compiled(module: Module, saved: Any) -> Any:
    """The values by the names that this module has for them."""
    names = {key.replace(_COMPILED, ""): key for key in module.state_dict()}
    if all(name == key for name, key in names.items()):
        return saved
    return OrderedDict((names.get(key, key), value) for key, value in saved.items())


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
        f"{name}.".replace(_COMPILED, "") if name else ""
        for name, part in module.named_modules(remove_duplicate=False)
        if _loads_itself(part)
    )


def _loads_itself(part: Module) -> bool:
    method = type(part)._load_from_state_dict
    stock = method is Module._load_from_state_dict or method.__module__.startswith("torch.nn.")
    return not stock or bool(part._load_state_dict_pre_hooks)
