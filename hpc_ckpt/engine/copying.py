"""Copies the bytes of leaves into a buffer: host memory by plain moves, devices by a side stream.

Knows addresses and streams, not what the bytes mean; moves.py shares large ones between threads.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from .. import fsio
from ..state.leaves import Value, copy_into, view_at
from .moves import Moves

LARGE = 16 * 1024
"""Leaves from this size on are shared out between threads; below, that costs more than it gains."""


class Copier:
    """Copies values of one form, again and again, each to its place in one buffer."""

    def __init__(self, buffer: memoryview, places: Sequence[tuple[int, int]]) -> None:
        self._targets = [buffer[start:end] for start, end in places]
        self._moves = Moves(buffer, places)
        self._places = places
        self._known: list[int] = [0] * len(places)
        self._sources: list[Any] = [None] * len(places)
        self._kinds: Kinds | None = None

    def copy(
        self,
        values: Sequence[Value],
        addresses: Sequence[int] | None = None,
        left_out: Collection[int] = (),
    ) -> None:
        """All bytes are in the buffer when this returns. The values' form never changes.

        `addresses`: where each lies, if somebody has asked already. `left_out`: plain values, by
        number, whose bytes are in the buffer already.
        """
        kinds = self.kinds(values)
        lies_at = addresses or [address_of(value) for value in values]
        devices = [_DeviceCopy(device) for device in kinds.on_device]
        begun: list[_DeviceCopy] = []
        try:
            for device in devices:
                numbers = kinds.on_device[device.device]
                begun.append(device)
                device.begin([(self._targets[n], values[n]) for n in numbers])
            self._moves.run(lies_at, _rest(kinds.large, left_out))
            self._copy_small(lies_at, _rest(kinds.small, left_out))
            for number in kinds.odd:
                copy_into(self._targets[number], values[number])
        finally:
            # Also after an error: the buffer is given back then, and the device writes into it.
            for device in begun:
                device.wait()

    def kinds(self, values: Sequence[Value]) -> Kinds:
        if self._kinds is None:
            self._kinds = Kinds(values, self._places)
        return self._kinds

    def learn(self, kinds: Kinds, addresses: Sequence[int]) -> None:
        """What copy() would find out the first time; nothing is copied, nothing kept alive."""
        self._kinds = kinds
        self._moves.learn(addresses, kinds.large)
        for number in kinds.small:
            self._source(number, addresses[number])

    def _source(self, number: int, address: int) -> None:
        self._known[number] = address
        self._sources[number] = view_at(address, len(self._targets[number]))

    def _copy_small(self, lies_at: Sequence[int], numbers: Sequence[int]) -> None:
        """Only addresses are remembered: nothing of the program's is kept alive by them."""
        targets, sources, known = self._targets, self._sources, self._known
        for number in numbers:
            if lies_at[number] != known[number]:
                self._source(number, lies_at[number])
            targets[number][:] = sources[number]


def _rest(numbers: list[int], left_out: Collection[int]) -> list[int]:
    return [number for number in numbers if number not in left_out] if left_out else numbers


class Kinds:
    """Which value is copied in which way; of a form, so it holds for all values of that form.

    Made at a step boundary: in between, a program may give a parameter other memory for a while.
    """

    def __init__(self, values: Sequence[Value], places: Sequence[tuple[int, int]]) -> None:
        self.small: list[int] = []
        self.large: list[int] = []
        self.odd: list[int] = []
        """Strided, conjugated or otherwise not a plain stretch of host memory."""
        self.on_device: dict[torch.device, list[int]] = {}
        for number, (value, (start, end)) in enumerate(zip(values, places, strict=True)):
            if start == end:
                continue
            if isinstance(value, torch.Tensor) and on_device(value):
                self.on_device.setdefault(value.device, []).append(number)
            elif not _is_plain(value):
                self.odd.append(number)
            elif end - start < LARGE:
                self.small.append(number)
            else:
                self.large.append(number)
        # The largest first: at the end no thread is left alone with one of them.
        self.large.sort(key=lambda number: places[number][0] - places[number][1])
        self._plain = frozenset({*self.small, *self.large})

    def are_plain(self, numbers: Collection[int]) -> bool:
        """Whether each of these is one stretch of host memory."""
        return self._plain.issuperset(numbers)


def on_device(value: Value) -> bool:
    """Whether the bytes are not in host memory."""
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def _is_plain(value: Value) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_contiguous() and not value.is_conj() and not value.is_neg()
    return bool(value.flags.c_contiguous)


def address_of(value: Any) -> int:
    """Where a leaf's first byte is."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    place: int = value.__array_interface__["data"][0]
    return place


# ── devices ───────────────────────────────────────────────────────────────────────────────
class _DeviceCopy:
    """Device to host on a stream of its own, after all that training has queued before it.

    Waits for an event of that stream, never for the device.
    """

    def __init__(self, device: torch.device, accelerator: Any = torch.accelerator) -> None:
        self.device = device
        self._accelerator = accelerator
        self._stream = torch.Stream(device=device)
        self._event = torch.Event(device=device)

    def begin(self, pairs: Sequence[tuple[memoryview, Any]]) -> None:
        # Choosing a stream chooses its device too: both are put back.
        index = self._accelerator.current_device_index()
        training = self._accelerator.current_stream(self.device)
        self._stream.wait_stream(training)
        self._accelerator.set_stream(self._stream)
        try:
            for target, value in pairs:
                source = value.detach().resolve_conj().resolve_neg().contiguous()
                words = source.reshape(-1).view(torch.uint8)
                torch.frombuffer(target, dtype=torch.uint8).copy_(words, non_blocking=True)
        finally:
            # Behind what was begun, also if not all of it was: wait() has to wait for that.
            self._event.record(self._stream)
            self._accelerator.set_stream(training)
            self._accelerator.set_device_index(index)

    def wait(self) -> None:
        self._event.synchronize()


def buffer_for(size: int, *, pinned: bool) -> memoryview:
    """Page-aligned host memory; pinned where a device copies into it."""
    if not pinned:
        return memoryview(fsio.allocate(size))
    whole = max(fsio.round_up(size), fsio.PAGE)
    # On the CPU whatever the program's default device is; only its memory can be pinned.
    raw = torch.empty(whole + fsio.PAGE, dtype=torch.uint8, device="cpu", pin_memory=True)
    skip = -raw.data_ptr() % fsio.PAGE
    aligned: Any = raw[skip : skip + whole].numpy()
    return memoryview(aligned)
