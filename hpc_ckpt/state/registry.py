"""The registry: the program's tracked objects by name, their state now, and back into them.

Asked at registration whether everything can be saved and restored, so that the answer comes
before the first hour of work. What a state becomes on disk is tree.py's; how a saved one goes
back is fit.py's.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from ..errors import RestoreMismatch, UnsupportedState
from . import fit, generators, inplace, modules, tree
from .optimizers import optimizers_in
from .plain import joined, kind_of


class Registry:
    """What a program tracks. Holds references; never copies state."""

    def __init__(self, tracked: Mapping[str, object]) -> None:
        self.tracked = {name: modules.uncompiled(value) for name, value in tracked.items()}
        for name, value in self.tracked.items():
            _check_name(name)
            _check_kind(name, value)
        for name, state in self.capture().items():
            tree.encode(state, name=name)
            _check_in_place(self.tracked[name], name, set())

    def capture(self) -> dict[str, Any]:
        """The state now: references, valid until the program goes on."""
        capture = _Capture(_live_state_of)
        return {name: capture.state(value, name) for name, value in self.tracked.items()}

    def templates(self) -> dict[str, Any]:
        """What decode() takes as `like`: the classes, Parameters and devices of the program."""
        capture = _Capture(_state_of)
        return {name: capture.state(value, name) for name, value in self.tracked.items()}

    def restore(
        self, saved: Mapping[str, Any], *, strict: bool = True, path: Path | None = None
    ) -> list[str]:
        """Put a decoded state back in place; return the differences that were passed over.

        Strict: any difference raises RestoreMismatch, with all of them, before anything has
        changed. An object whose own load_state_dict() fails can only be named afterwards, and is
        passed over in neither case: it may be loaded by half, and what the run saved with it would
        outrank this checkpoint.
        """
        differences = self._differences(saved)
        if strict and differences:
            raise RestoreMismatch(path, differences)
        faults: list[str] = []
        for name, value in self.tracked.items():
            if name in saved:
                fit.load(value, saved[name], name, faults)
        if faults:
            raise RestoreMismatch(path, faults, passable=False)
        return differences

    def targets(self, saved: Any) -> dict[str, torch.Tensor]:
        """Own tensors into which leaves of a state tree can be read, by leaf name."""
        return inplace.targets(self.tracked, saved.get("tracked") if isinstance(saved, dict) else 0)

    def frozen(self) -> set[int]:
        """Addresses of parameters that ask for no gradient and that no optimizer has."""
        tracked = (value for value in self.tracked.values() if isinstance(value, torch.nn.Module))
        found = {p.data_ptr() for m in tracked for p in m.parameters() if not p.requires_grad}
        groups = (group for optimizer in self.optimizers() for group in optimizer.param_groups)
        return found - {p.data_ptr() for group in groups for p in group["params"]}

    def optimizers(self) -> list[Optimizer]:
        """The tracked torch optimizers whose step hooks tell when parameters change."""
        return optimizers_in(self.tracked.values())

    def _differences(self, saved: Mapping[str, Any]) -> list[str]:
        missing = [name for name in self.tracked if name not in saved]
        extra = [name for name in saved if name not in self.tracked]
        found = [
            f"{name}: not in the checkpoint{near}"
            for name, near in modules.with_near(missing, extra)
        ]
        found += [
            f"{name}: in the checkpoint, but not tracked{near}"
            for name, near in modules.with_near(extra, missing)
        ]
        for name, value in self.tracked.items():
            if name in saved:
                found += fit.compare(value, saved[name], name, top=True)
        return found


class _Capture:
    """One walk; a container seen twice gives one state, so that sharing is seen by encode()."""

    def __init__(self, state_of: Callable[[Any, str], Any]) -> None:
        self._state_of = state_of
        self._done: dict[int, Any] = {}
        self._open: set[int] = set()

    def state(self, value: Any, path: str) -> Any:
        if fit.is_stateful(value):
            return self._once(value, path, self._state_of)
        if generators.is_generator(value):
            return self._once(value, path, lambda one, _: generators.state_of(one))
        if type(value) in fit.MAPPINGS:
            return self._once(value, path, self._mapping)
        if isinstance(value, (list, tuple)):
            return self._once(value, path, self._sequence)
        return value

    def _once(self, value: Any, path: str, capture: Any) -> Any:
        mark = id(value)
        if mark in self._open:
            raise UnsupportedState(path, "it contains itself; break the cycle")
        if mark not in self._done:
            self._open.add(mark)
            self._done[mark] = capture(value, path)
            self._open.remove(mark)
        return self._done[mark]

    def _mapping(self, value: Any, path: str) -> Any:
        if _STATELESS.issuperset(map(type, value.values())):
            return value
        states = {key: self.state(item, joined(path, key)) for key, item in value.items()}
        changed = {key: state for key, state in states.items() if state is not value[key]}
        if not changed:
            return value
        copied = value.copy()
        for key, state in changed.items():  # one by one: Counter.update() would add
            copied[key] = state
        return copied

    def _sequence(self, value: Any, path: str) -> Any:
        if _STATELESS.issuperset(map(type, value)):
            return value
        states = [self.state(item, joined(path, index)) for index, item in enumerate(value)]
        if all(state is item for state, item in zip(states, value, strict=True)):
            return value
        return states if type(value) is list else tuple.__new__(type(value), states)


_STATELESS = frozenset({
    torch.Tensor, torch.nn.Parameter, np.ndarray, int, float, bool, str, bytes, type(None),
})  # fmt: skip
"""Neither give a state of their own nor hold something that does."""


def _live_state_of(value: Any, path: str) -> Any:
    """The same with the module's own parameters: they are only read, and need not be detached."""
    if modules.is_plain_module(value):
        # A hook that changes what it is given in place may not do so to a parameter.
        with suppress(Exception):
            state = modules.state_dict(value, keep_vars=True)
            # A parameter of another class is a plain tensor only once it is detached.
            if {*map(type, state.values())} <= {torch.Tensor, torch.nn.Parameter}:
                return state
    return _state_of(value, path)


def _state_of(value: Any, path: str) -> Any:
    try:
        if modules.is_plain_module(value):
            return modules.state_dict(value)
        return value.state_dict()
    except Exception as error:
        raise UnsupportedState(
            path, f"its state_dict() raised {type(error).__name__}: {error}"
        ) from error


# ── registration ──────────────────────────────────────────────────────────────────────────
def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise UnsupportedState(str(name), "the name must be a Python identifier")


def _check_kind(name: str, value: object) -> None:
    in_place = (torch.Tensor, np.ndarray, torch.Generator, list, *fit.MAPPINGS)
    if generators.is_generator(value):
        return
    if not fit.is_stateful(value) and not isinstance(value, in_place):
        raise UnsupportedState(
            name,
            f"a {kind_of(value)} cannot be restored in place; track something with "
            "state_dict()/load_state_dict(), a tensor, an array, a generator of random numbers, or "
            "a dict or list that holds it",
        )


def _check_in_place(value: Any, path: str, seen: set[int]) -> None:
    """Memory that nothing may be written to cannot be restored."""
    if id(value) in seen or fit.is_stateful(value):
        return
    seen.add(id(value))
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        raise UnsupportedState(path, "a read-only array cannot be restored in place; copy() it")
    if isinstance(value, torch.Tensor) and _is_unwritable(value):
        raise UnsupportedState(
            path, "an expanded or inference tensor cannot be restored in place; clone() it"
        )
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            _check_in_place(item, joined(path, key), seen)


def _is_unwritable(value: torch.Tensor) -> bool:
    if value.is_inference():
        return True
    if value.layout is not torch.strided:
        return False
    return any(
        size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True)
    )
