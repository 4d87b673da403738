"""Copies that threads share: every byte arrives, whatever its alignment, and no OpenMP is woken."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from hpc_ckpt import fsio
from hpc_ckpt.engine.moves import Moves

KIB = 1024


def bytes_at(buffer: memoryview, start: int, size: int) -> bytes:
    return buffer[start : start + size].tobytes()


@pytest.mark.parametrize("at", range(9))
@pytest.mark.parametrize("to", range(9))
def test_every_byte_arrives_at_any_alignment(at: int, to: int) -> None:
    """Leaves lie without gaps, and a view may begin anywhere; nothing beside is touched."""
    size = 300 * KIB + 5
    source = torch.randint(256, (size + 16,), dtype=torch.uint8)
    buffer = memoryview(fsio.allocate(size + 32))
    buffer[:] = b"\xaa" * len(buffer)
    Moves(buffer, [(to, to + size)]).run([source.data_ptr() + at], [0])
    assert source[at : at + size].numpy().tobytes() == bytes_at(buffer, to, size)
    assert b"\xaa" * to == bytes_at(buffer, 0, to)
    assert b"\xaa" * 16 == bytes_at(buffer, to + size, 16)


def test_odd_bit_patterns_are_kept() -> None:
    """Signalling not-a-numbers, negative zeros and booleans that are neither 0 nor 1 are bytes."""
    source = torch.arange(64 * KIB, dtype=torch.int32).mul_(-2_654_435_761 % 2**31)
    buffer = memoryview(fsio.allocate(source.nbytes))
    for value in (source.view(torch.float32), source.view(torch.bool)):
        buffer[:] = bytes(len(buffer))
        Moves(buffer, [(0, source.nbytes)]).run([value.data_ptr()], [0])
        assert source.numpy().tobytes() == bytes_at(buffer, 0, source.nbytes)


def test_what_moved_or_is_left_out_is_planned_again() -> None:
    """The plan of the last time is used only for the same leaves at the same places."""
    size = 40 * KIB
    first, second, third = (torch.full((size,), n, dtype=torch.uint8) for n in (1, 2, 3))
    buffer = memoryview(fsio.allocate(2 * size))
    moves = Moves(buffer, [(0, size), (size, 2 * size)])
    moves.run([first.data_ptr(), second.data_ptr()], [0, 1])
    assert bytes([1]) * size + bytes([2]) * size == bytes_at(buffer, 0, 2 * size)
    moves.run([third.data_ptr(), second.data_ptr()], [0])
    assert bytes([3]) * size + bytes([2]) * size == bytes_at(buffer, 0, 2 * size)
    second.fill_(4)
    moves.run([third.data_ptr(), second.data_ptr()], [0, 1])
    assert bytes([3]) * size + bytes([4]) * size == bytes_at(buffer, 0, 2 * size)


def test_a_plan_made_in_inference_mode_holds_outside_of_it() -> None:
    """An evaluation may save; the training after it saves too, and the other way round."""
    source = torch.zeros(64 * KIB, dtype=torch.uint8)
    buffer = memoryview(fsio.allocate(source.nbytes))
    moves = Moves(buffer, [(0, source.nbytes)])
    for number, inside in enumerate((True, False, True)):
        source.fill_(number)
        with torch.inference_mode(inside):
            moves.run([source.data_ptr()], [0])
        assert bytes([number]) * source.nbytes == bytes_at(buffer, 0, source.nbytes)


def test_a_large_leaf_is_remembered_as_few_slices() -> None:
    """What is kept grows with the number of leaves, hardly with their bytes."""
    source = torch.zeros(64 * KIB * KIB + 3, dtype=torch.uint8)
    buffer = memoryview(fsio.allocate(len(source)))
    moves = Moves(buffer, [(0, len(source))])
    moves.run([source.data_ptr()], [0])
    assert 16 + 1 == len(moves._batches) == len(moves._slices[0][1])


def test_no_thread_of_openmp_is_woken() -> None:
    """Its barriers stall beside a busy neighbour. A copy torch shares out does start them here."""
    script = """
        import os, time, torch
        from hpc_ckpt import fsio
        from hpc_ckpt.engine.moves import Moves
        torch.set_num_threads(4)
        threads = lambda: len(os.listdir("/proc/self/task"))
        source = torch.frombuffer(bytearray(32 * 2**20), dtype=torch.uint8)
        before = threads()
        sizes = [20 * 1024, 256 * 1024, 1024**2 + 3, 30 * 2**20]
        buffer = memoryview(fsio.allocate(sum(sizes)))
        ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
        places = [(end - size, end) for size, end in zip(sizes, ends)]
        Moves(buffer, places).run([source.data_ptr() + n for n in range(4)], range(4))
        end = time.monotonic() + 10
        while threads() > before and time.monotonic() < end:
            time.sleep(0.01)  # one that was joined is listed for a moment more
        shared = threads()
        torch.empty_like(source).copy_(source)
        print(shared - before, threads() - before > 0)
    """
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "0 True" == told.stdout.strip()
