"""Copies in host memory: many pieces in few calls, which threads share.

Threads that come back to the interpreter for every piece wait for each other there. torch takes
a whole list of pieces in one call; each is shorter than what it would share out by OpenMP, whose
barriers stall for seconds beside a busy neighbour.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial

import torch

from .. import fsio
from ..parallel import Row
from ..state.leaves import view_at

THREADS = 2
"""Training waits for the copy, so its cores are free."""
_ALONE = 32_767
"""Elements that torch copies in the thread it is called in, whatever they are."""
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
_MIB = 1024**2
_BATCH = 4 * _MIB
"""What a thread takes at a time. Leaves are cut into such slices for good, and these into what is
copied alone only while they are copied: otherwise a large state would have millions of pieces."""
_WORTH_A_THREAD = 8 * _MIB
_STREAMED = 192 * _MIB
"""Moves of at least so much go past the caches in glibc (three quarters of what it takes for the
shared cache; 192 MiB is its usual answer), which is far faster: they are not cut smaller."""

Slices = tuple[torch.Tensor, ...]


class Moves:
    """Copies stretches of host memory, again and again, each to its place in one buffer.

    Only addresses are remembered: nothing of the program's is kept alive.
    """

    def __init__(self, buffer: memoryview, places: Sequence[tuple[int, int]]) -> None:
        self._base = fsio.address(buffer)
        self._places = places
        self._slices: dict[int, tuple[int, Slices, Slices]] = {}
        """Of each stretch: where it lay, what is copied to where."""
        self._planned: tuple[list[int], list[int]] = ([], [])
        self._batches: list[Callable[[], object]] = []
        self._total = 0

    def learn(self, lies_at: Sequence[int], numbers: Sequence[int]) -> None:
        """What run() would find out the first time."""
        wanted = (list(numbers), [lies_at[number] for number in numbers])
        if wanted != self._planned:
            self._planned = ([], [])  # an error on the way leaves no plan of something else
            self._batches = self._plan(*wanted)
            self._planned = wanted

    def run(self, lies_at: Sequence[int], numbers: Sequence[int]) -> None:
        self.learn(lies_at, numbers)
        batches = self._batches

        def move(number: int) -> None:
            batches[number]()

        Row(len(batches), move).run(THREADS if self._total >= _WORTH_A_THREAD else 1)

    def _plan(self, numbers: list[int], addresses: list[int]) -> list[Callable[[], object]]:
        """The streamed ones first: at the end no thread is left alone with one of them."""
        streams: list[Callable[[], object]] = []
        batches = _Batches()
        self._total = 0
        for number, address in zip(numbers, addresses, strict=True):
            start, end = self._places[number]
            self._total += end - start
            if end - start >= _STREAMED:
                streams += _streams(self._base + start, address, end - start)
            else:
                batches.add(*self._cut(number, address))
        return streams + batches.calls()

    def _cut(self, number: int, address: int) -> tuple[Slices, Slices]:
        known = self._slices.get(number)
        if known is None or known[0] != address:
            start, end = self._places[number]
            place, size = self._base + start, end - start
            width, word = next(one for one in _WORDS if (place | address) % one[0] == 0)
            whole = size // width * width
            known = self._slices[number] = (
                address,
                _slices(place, whole, size, word),
                _slices(address, whole, size, word),
            )
        return known[1:]


class _Batches:
    """As many slices as one thread takes at a time; those to be cut apart from the short ones."""

    def __init__(self) -> None:
        self._long = _Filling()
        self._short = _Filling()

    def add(self, targets: Slices, sources: Slices) -> None:
        for target, source in zip(targets, sources, strict=True):
            (self._long if target.numel() > _ALONE else self._short).add(target, source)

    def calls(self) -> list[Callable[[], object]]:
        long = [partial(_copy_long, *batch) for batch in self._long.batches]
        return [*long, *(partial(torch._foreach_copy_, *batch) for batch in self._short.batches)]


class _Filling:
    """Batches, each filled before the next is begun."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._room = 0

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._room <= 0:
            self.batches.append(([], []))
            self._room = _BATCH
        targets, sources = self.batches[-1]
        targets.append(target)
        sources.append(source)
        self._room -= target.nbytes


def _copy_long(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    torch._foreach_copy_(_cut_up(targets), _cut_up(sources))


def _cut_up(slices: list[torch.Tensor]) -> list[torch.Tensor]:
    return [piece for one in slices for piece in torch.split(one, _ALONE)]


def _slices(place: int, whole: int, size: int, word: torch.dtype) -> Slices:
    """Memory by its address: whole words, of which there is one at least, then the odd bytes."""
    # Tensors of inference mode could not be written to outside of it.
    with torch.inference_mode(mode=False):
        words = torch.frombuffer(view_at(place, whole), dtype=word)
        slices = torch.split(words, _BATCH // word.itemsize)
        if whole == size:
            return slices
        tail = torch.frombuffer(view_at(place + whole, size - whole), dtype=torch.uint8)
    return (*slices, tail)


def _streams(place: int, address: int, size: int) -> list[Callable[[], object]]:
    step = fsio.round_up(-(-size // (size // _STREAMED)))
    return [
        partial(ctypes.memmove, place + offset, address + offset, min(step, size - offset))
        for offset in range(0, size, step)
    ]
