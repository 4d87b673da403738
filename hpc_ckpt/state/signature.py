"""The memory behind the leaves of a state: what of it must stay the same for a plan to hold."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch

from .arrays import has_metadata
from .leaves import Value


class Signature:
    """Dtype, shape, strides and ties of every value; where they lie may change."""

    def __init__(self, values: list[Value]) -> None:
        self._tensors = [n for n, value in enumerate(values) if isinstance(value, torch.Tensor)]
        self._arrays = [n for n, value in enumerate(values) if isinstance(value, np.ndarray)]
        tensors = enumerate(self._only_tensors(values))
        self._complex = [n for n, tensor in tensors if tensor.dtype.is_complex]
        self._known, _ = self._look(values)
        self._held: list[int] = []
        """Addresses that were seen to have their memory: a storage that is resized moves."""
        self._spans = [_span(tensor) for tensor in self._only_tensors(values)]

    def _only_tensors(self, values: list[Value]) -> list[Any]:
        return [values[n] for n in self._tensors] if self._arrays else list(values)

    def addresses_if_fitting(self, values: list[Value]) -> list[int] | None:
        try:
            found, addresses = self._look(values)
        except (RuntimeError, NotImplementedError):  # sparse and the like have no strides
            return None
        if found != self._known:
            return None
        if addresses != self._held:
            if not self._has_memory(values):
                return None
            self._held = addresses
        return addresses

    def _has_memory(self, values: list[Value]) -> bool:
        """Whether each lies within its storage, which may have been freed or made smaller: a copy
        of what is behind it would end the program."""
        found = self._only_tensors(values)
        sizes = map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, found))
        offsets = map(torch.Tensor.storage_offset, found)
        ends = map(_end, offsets, self._spans)
        return all(map(operator.ge, sizes, ends))

    def _look(self, values: list[Value]) -> tuple[tuple[object, ...], list[int]]:
        """What must stay the same, and where everything lies now."""
        found = self._only_tensors(values)
        arrays: list[Any] = [values[n] for n in self._arrays]
        # Unbound methods: training waits for this, and a bound one for each tensor costs a third.
        pointers = [*map(torch.Tensor.data_ptr, found)]
        places = [array.__array_interface__["data"][0] for array in arrays]
        seen = (
            [t.dtype for t in found],
            [*map(torch.Tensor.size, found)],
            [*map(torch.Tensor.stride, found)],
            [*map(torch.Tensor.is_neg, found)],
            [t.device for t in found] if torch.accelerator.is_available() else None,
            [found[n].is_conj() for n in self._complex],
            [(array.dtype, array.shape, array.strides) for array in arrays],
            [has_metadata(array.dtype) for array in arrays],
            pointers.count(0),  # a tensor without data, on the meta device, lies nowhere
            _ties(pointers),
            _ties(places),
        )
        if not arrays:
            return seen, pointers
        addresses = [0] * len(values)
        for numbers, known in ((self._tensors, pointers), (self._arrays, places)):
            for number, address in zip(numbers, known, strict=True):
                addresses[number] = address
        return seen, addresses


def _span(tensor: Any) -> tuple[int, int]:
    """Elements from its first to its last one, and bytes of each; they follow from what must
    stay the same."""
    if tensor.numel() == 0:
        return 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps), tensor.element_size()


def _end(offset: Any, span: tuple[int, int]) -> int:
    return int(offset + span[0]) * span[1]


def _ties(pointers: list[int]) -> list[int] | None:
    """Which of them lie at the same place; None if no two do."""
    if len(set(pointers)) == len(pointers):
        return None
    first: dict[int, int] = {}
    return [first.setdefault(pointer, number) for number, pointer in enumerate(pointers)]
