"""Generators of random numbers that a program makes for itself: numpy's and Python's.

They have no state_dict(); here is what takes its place. torch's are leaves of their own.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import random
from typing import Any

import numpy as np

_NUMPY = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_TWISTER_WORDS = 624


def is_generator(value: object) -> bool:
    return isinstance(value, (*_NUMPY, random.Random)) and not isinstance(
        value, random.SystemRandom
    )


def state_of(value: Any) -> dict[str, Any]:
    """Where it stands, as plain values and arrays of their own."""
    if isinstance(value, random.Random):
        return python_state(value)
    if isinstance(value, np.random.RandomState):
        state: dict[str, Any] = value.get_state(legacy=False)
        return state
    return dict(_bits(value).state)


def differences(value: Any, saved: Any, path: str) -> list[str]:
    """Why the saved state is not one of such a generator."""
    here = state_of(value)
    kinds = [one.get("bit_generator") for one in (saved, here) if isinstance(one, dict)]
    if len(kinds) == 2 and all(type(kind) is str for kind in kinds) and kinds[0] != kinds[1]:
        return [f"{path}: {kinds[0]} in the checkpoint, {kinds[1]} here"]
    if not isinstance(saved, dict) or saved.keys() != here.keys():
        return [f"{path}: the checkpoint holds no state of a {type(value).__qualname__} there"]
    return []


def load(value: Any, saved: Any) -> None:
    """Go on from there; ValueError or TypeError for what no generator can have said."""
    if isinstance(value, random.Random):
        set_python_state(value, saved)
        return
    _check_twister(saved)
    if isinstance(value, np.random.RandomState):
        value.set_state(saved)
    else:
        _bits(value).state = saved


def _bits(value: Any) -> Any:
    return value.bit_generator if isinstance(value, np.random.Generator) else value


def _check_twister(saved: Any) -> None:
    """numpy does not check the position, and would read beyond its words."""
    if saved["bit_generator"] == "MT19937" and not 0 <= saved["state"]["pos"] <= _TWISTER_WORDS:
        raise ValueError("not a state of numpy's generator")


def python_state(value: Any) -> dict[str, Any]:
    """`value`: a random.Random, or the module itself."""
    version, words, gauss = value.getstate()
    return {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss}


def set_python_state(value: Any, saved: Any) -> None:
    words = tuple(np.asarray(saved["words"]).tolist())
    value.setstate((saved["version"], words, saved["gauss"]))
