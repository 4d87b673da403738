"""Leaves that are large enough for the C library to stream are moved in few pieces."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from hpc_ckpt import fsio
from hpc_ckpt.engine import moves as moving
from hpc_ckpt.engine.copying import Copier

MIB = 1024**2
SIZES = [MIB // 2, 2 * MIB, 5 * MIB + 4, 3 * MIB - 4, 9 * MIB]


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each move; a stream begins at two MiB here."""
    seen: list[int] = []
    real = ctypes.memmove

    def memmove(target: int, source: int, length: int) -> Any:
        seen.append(length)
        return real(target, source, length)

    monkeypatch.setattr(ctypes, "memmove", memmove)
    monkeypatch.setattr(moving, "_STREAMED", 2 * MIB)
    return seen


def test_no_piece_of_a_leaf_is_cut_below_what_is_streamed(moves: list[int]) -> None:
    """Every byte arrives, in the order of sizes, whoever moves which piece."""
    values = [torch.randint(256, (size,), dtype=torch.uint8) for size in SIZES]
    ends = [sum(map(fsio.round_up, SIZES[: number + 1])) for number in range(len(SIZES))]
    places = [
        (end - fsio.round_up(size), end - fsio.round_up(size) + size)
        for size, end in zip(SIZES, ends, strict=True)
    ]
    buffer = memoryview(fsio.allocate(ends[-1]))
    Copier(buffer, places).copy(values)
    for value, (start, end) in zip(values, places, strict=True):
        assert value.numpy().tobytes() == buffer[start:end].tobytes()
    assert sum(SIZES) - MIB // 2 == sum(moves)
    assert [] == [length for length in moves if length < 2 * MIB]
    assert 1 + 2 + 1 + 4 == len(moves)
