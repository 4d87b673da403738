"""Everything random in this process: captured, restored, set aside, reseeded.

The host has three courses of random numbers that programs draw from without naming one: Python's
'random', numpy's global generator and torch's CPU generator. Accelerators have one per device.
Generators that a program makes for itself are not seen here; it tracks them like any other state.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from . import generators

_WORDS = 624
"""Of the Mersenne twister."""

HostState = tuple[Any, Any, torch.Tensor]
"""The three host courses in the form that is quickest to take and put back; not for storing."""


def capture() -> dict[str, Any]:
    """Every course, as ints, floats, arrays and tensors that share no memory with it."""
    return {
        "python": generators.python_state(random),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.default_generator.get_state(),
        "devices": _capture_devices(),
    }


def restore(state: Mapping[str, Any]) -> None:
    """Put back what capture() gave. Devices that are not here now, or were not then, are left."""
    _check_numpy(state["numpy"])
    generators.set_python_state(random, state["python"])
    np.random.set_state(state["numpy"])
    torch.default_generator.set_state(_bytes(state["torch"]))
    _restore_devices(state["devices"])


def _check_numpy(state: Any) -> None:
    """numpy does not check the position, and would read beyond its words."""
    if state["bit_generator"] != "MT19937" or not 0 <= state["state"]["pos"] <= _WORDS:
        raise ValueError("not a state of numpy's generator")


def host_state() -> HostState:
    """The three host courses as they stand."""
    return (
        random.getstate(),
        np.random.get_state(legacy=False),
        torch.default_generator.get_state(),
    )


def host_state_of(*parts: int | str) -> HostState:
    """The host courses as seed_all(*parts) would start them; they are not moved."""
    with preserved():
        seed_all(*parts)
        return host_state()


def set_host_state(state: HostState) -> None:
    """Make the three host courses go on from 'state'."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.default_generator.set_state(state[2])


@contextmanager
def preserved() -> Iterator[None]:
    """Whatever is drawn inside, the host courses go on afterwards as if nothing had been."""
    ambient = host_state()
    try:
        yield
    finally:
        set_host_state(ambient)


def seed_all(*parts: int | str) -> None:
    """Start the three host courses afresh from 'parts', the same in every process and release.

    Device generators are left alone: a forked data worker that touches one dies.
    """
    seed = _digest(parts)
    random.seed(int.from_bytes(seed[:16], "little"))
    np.random.seed(np.frombuffer(seed[16:32], dtype="<u4"))
    torch.default_generator.manual_seed(seed_of(*parts))


def seed_of(*parts: int | str) -> int:
    """One 63-bit seed from 'parts', for generators that have to be seeded one by one."""
    return int.from_bytes(_digest(parts)[32:40], "little") >> 1


def _digest(parts: Sequence[int | str]) -> bytes:
    # repr keeps 1 apart from "1" and ("ab", "c") from ("a", "bc"); hash() would differ between
    # processes, so that no resumed run could find its own order again.
    plain = tuple(str(part) if isinstance(part, str) else int(part) for part in parts)
    return hashlib.blake2b(repr(plain).encode(), digest_size=40).digest()


def _bytes(state: Any) -> torch.Tensor:
    return torch.as_tensor(state, dtype=torch.uint8, device="cpu")


def _device_module() -> tuple[str, Any] | None:
    """The accelerator in use; None when there is none or this process never woke it."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    module = torch.get_device_module(device)
    # Asking a sleeping device for its state would create a context on it, and nothing was drawn.
    awake = getattr(module, "is_initialized", lambda: True)
    return (device.type, module) if awake() else None


def _capture_devices() -> dict[str, list[torch.Tensor]]:
    found = _device_module()
    if found is None:
        return {}
    kind, module = found
    return {kind: [module.get_rng_state(*index) for index in _indices()]}


def _restore_devices(states: Mapping[str, Sequence[Any]]) -> None:
    if not states or not torch.accelerator.is_available():
        return
    device = torch.accelerator.current_accelerator()
    if device is None or device.type not in states:
        return
    module = torch.get_device_module(device)
    for index, state in zip(_indices(), states[device.type], strict=False):
        module.set_rng_state(_bytes(state), *index)


def _indices() -> list[tuple[int, ...]]:
    # A single device is addressed without an index: torch.mps takes none.
    count = torch.accelerator.device_count()
    return [()] if count == 1 else [(index,) for index in range(count)]
