"""Copies from a device, without one: the order of what is asked of streams, events and memory.

torch.Stream, torch.Event and torch.accelerator are replaced by doubles that write down what is
asked of them; tensors of a class of their own stand in for those in a device's memory.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hpc_ckpt import fsio
from hpc_ckpt.engine import copying
from hpc_ckpt.engine.copying import Copier, _DeviceCopy, buffer_for

CPU = torch.device("cpu")
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class Record:
    """What was asked, in order; a test may look around whenever something is."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.look: Callable[[str], None] = lambda what: None

    def __call__(self, what: str) -> None:
        self.asked.append(what)
        self.look(what)


class Stream:
    def __init__(self, record: Record, name: str, device: torch.device) -> None:
        self._record, self.name, self.device = record, name, device

    def wait_stream(self, other: Stream) -> None:
        self._record(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self._record("host waits for a stream")


class Event:
    def __init__(self, record: Record) -> None:
        self._record = record

    def record(self, stream: Stream) -> None:
        self._record(f"event on {stream.name}")

    def synchronize(self) -> None:
        self._record("host waits for the event")


class Accelerator:
    """As torch.accelerator: choosing a stream chooses its device too."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._streams: dict[torch.device, Stream] = {}
        self.device = CPU

    def current_stream(self, device: torch.device) -> Stream:
        return self._streams.setdefault(device, Stream(self._record, "training", device))

    def set_stream(self, stream: Stream) -> None:
        self._streams[stream.device] = stream
        self.device = stream.device
        self._record(f"on {stream.name}")

    def synchronize(self, device: torch.device | None = None) -> None:
        self._record("host waits for the device")

    def current_device_index(self) -> int:
        return self.device.index or 0

    def set_device_index(self, index: int) -> None:
        self.device = torch.device(self.device.type, index)


class DeviceTensor(torch.Tensor):
    """Lies in host memory, and tells when its bytes are copied out of it."""

    told: Record
    error: Exception | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.copy_:
            waits = "" if (kwargs or {}).get("non_blocking") else ", waiting"
            cls.told(f"copy of {args[1].nbytes} bytes{waits}")
            if cls.error is not None:
                raise cls.error
        return super().__torch_function__(func, types, args, kwargs or {})


class Torch:
    """torch as copying.py sees it, with doubles for what needs a device."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self.accelerator = Accelerator(record)

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self._record, "side", device)

    def Event(self, device: torch.device) -> Event:
        return Event(self._record)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def record() -> Record:
    return Record()


@pytest.fixture
def doubles(record: Record, monkeypatch: pytest.MonkeyPatch) -> Iterator[Torch]:
    double = Torch(record)
    DeviceTensor.told, DeviceTensor.error = record, None
    monkeypatch.setattr(copying, "torch", double)
    monkeypatch.setattr(copying, "on_device", lambda value: isinstance(value, DeviceTensor))
    bound = functools.partial(_DeviceCopy, accelerator=double.accelerator)
    monkeypatch.setattr(copying, "_DeviceCopy", bound)
    yield double
    DeviceTensor.error = None


def on_device(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32).as_subclass(DeviceTensor)


def pairs(*values: torch.Tensor) -> list[tuple[memoryview, torch.Tensor]]:
    return [(memoryview(bytearray(value.nbytes)), value) for value in values]


def plain(value: torch.Tensor) -> bytes:
    return bytes(value.as_subclass(torch.Tensor).resolve_conj().contiguous().numpy().tobytes())


# ── one device ────────────────────────────────────────────────────────────────────────────
def test_the_order_of_a_copy(doubles: Torch, record: Record) -> None:
    """After all that training has queued, on a stream beside it, with an event behind it."""
    copy = _DeviceCopy(CPU, doubles.accelerator)
    given = pairs(on_device(1, 2, 3), on_device(4, 5))
    copy.begin(given)
    assert [
        "side waits for training",
        "on side",
        "copy of 12 bytes",
        "copy of 8 bytes",
        "event on side",
        "on training",
    ] == record.asked
    assert [plain(value) for _, value in given] == [bytes(target) for target, _ in given]


def test_the_host_waits_for_the_event_and_for_nothing_else(doubles: Torch, record: Record) -> None:
    """Never for the device: training may have queued hours of work behind the copies."""
    copy = _DeviceCopy(CPU, doubles.accelerator)
    copy.begin(pairs(on_device(1)))
    assert not [what for what in record.asked if what.startswith("host")]
    record.asked.clear()
    copy.wait()
    assert ["host waits for the event"] == record.asked


def test_the_training_stream_is_put_back_when_a_copy_fails(doubles: Torch, record: Record) -> None:
    """What the program queues next must not land on our stream."""
    training = doubles.accelerator.current_stream(CPU)
    DeviceTensor.error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        _DeviceCopy(CPU, doubles.accelerator).begin(pairs(on_device(1)))
    assert doubles.accelerator.current_stream(CPU) is training
    begun = ["side waits for training", "on side", "copy of 4 bytes"]
    assert [*begun, "event on side", "on training"] == record.asked


def test_a_stream_that_the_program_chose_is_waited_for_and_put_back(
    doubles: Torch, record: Record
) -> None:
    """Training is what is current now, not the device's default stream."""
    chosen = Stream(record, "the program's", CPU)
    doubles.accelerator.set_stream(chosen)
    record.asked.clear()
    _DeviceCopy(CPU, doubles.accelerator).begin(pairs(on_device(1)))
    assert ("side waits for the program's", "on the program's") == (
        record.asked[0], record.asked[-1],
    )  # fmt: skip
    assert doubles.accelerator.current_stream(CPU) is chosen


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(4.0).bfloat16(),
        torch.complex(torch.ones(3), torch.arange(3.0)).conj(),
        torch.complex(torch.ones(3), torch.arange(3.0)).conj().imag,
        torch._neg_view(torch.arange(3.0)),
        torch.tensor(7),
        torch.tensor([True, False]),
    ],
    ids=["strided", "bfloat16", "conjugated", "negated", "negative", "scalar", "flags"],
)
def test_the_bytes_are_those_of_the_values_in_order(doubles: Torch, value: torch.Tensor) -> None:
    """Whatever form the tensor has in the device's memory."""
    expected = value.detach().resolve_conj().resolve_neg().contiguous()
    (given,) = pairs(value.as_subclass(DeviceTensor))
    _DeviceCopy(CPU, doubles.accelerator).begin([given])
    assert expected.reshape(-1).view(torch.uint8).numpy().tobytes() == bytes(given[0])


# ── several devices ───────────────────────────────────────────────────────────────────────
def test_the_device_of_the_program_is_as_before(doubles: Torch) -> None:
    """A model on two devices: what the program makes next belongs where it would have gone."""
    accelerator = doubles.accelerator
    accelerator.set_stream(accelerator.current_stream(FIRST))
    for device in (FIRST, SECOND):
        _DeviceCopy(device, accelerator).begin(pairs(on_device(1)))
    assert FIRST == accelerator.device


# ── beside host memory ────────────────────────────────────────────────────────────────────
class Mixed:
    """Values of every kind, and the buffer they are copied to."""

    def __init__(self) -> None:
        self.values = [
            torch.full((5,), 1.0),
            on_device(2, 2, 2),
            torch.full((copying.LARGE,), 3, dtype=torch.uint8),
            torch.full((6, 2), 4.0)[::2],
            on_device(5),
        ]
        ends = [sum(value.nbytes for value in self.values[: n + 1]) for n in range(5)]
        self.places = list(zip([0, *ends], ends, strict=False))
        self.buffer = memoryview(fsio.allocate(ends[-1]))

    def there(self, number: int) -> bool:
        """Whether a value has arrived in the buffer."""
        start, end = self.places[number]
        return plain(self.values[number]) == bytes(self.buffer[start:end])


def test_the_device_begins_first_and_is_waited_for_last(doubles: Torch, record: Record) -> None:
    """So that host memory is copied while the device copies."""
    mixed, host = Mixed(), (0, 2, 3)
    arrived: dict[str, list[bool]] = {}

    def look(what: str) -> None:
        arrived[what] = [mixed.there(number) for number in host]

    record.look = look
    Copier(mixed.buffer, mixed.places).copy(mixed.values)
    assert [False] * 3 == arrived["event on side"]
    assert [True] * 3 == arrived["host waits for the event"]
    assert "host waits for the event" == record.asked[-1]
    assert 1 == sum(what.startswith("host waits") for what in record.asked)
    assert all(mixed.there(number) for number in range(5))


def test_the_device_is_waited_for_when_a_host_copy_fails(
    doubles: Torch, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer is given back then, and the next snapshot would be written over."""

    def fail(target: memoryview, value: torch.Tensor) -> None:
        raise MemoryError

    monkeypatch.setattr(copying, "copy_into", fail)
    mixed = Mixed()
    with pytest.raises(MemoryError):
        Copier(mixed.buffer, mixed.places).copy(mixed.values)
    assert "host waits for the event" == record.asked[-1]


def test_what_was_begun_before_a_device_copy_failed_is_waited_for(
    doubles: Torch, record: Record
) -> None:
    """An event that was never recorded is over at once, and the first copy may still be going."""
    mixed = Mixed()

    def fail_at_the_second(what: str) -> None:
        if what == "copy of 4 bytes":
            raise RuntimeError("lost")

    record.look = fail_at_the_second
    with pytest.raises(RuntimeError, match="lost"):
        Copier(mixed.buffer, mixed.places).copy(mixed.values)
    assert "copy of 12 bytes" in record.asked
    assert "event on side" in record.asked[record.asked.index("copy of 12 bytes") :]
    assert "host waits for the event" == record.asked[-1]


def test_later_copies_bring_later_values(doubles: Torch) -> None:
    """The copier remembers how each value is copied, not what it was."""
    mixed = Mixed()
    copier = Copier(mixed.buffer, mixed.places)
    for _ in range(3):
        copier.copy(mixed.values)
        assert all(mixed.there(number) for number in range(5))
        for value in mixed.values:
            value.add_(1)
        assert not any(mixed.there(number) for number in range(5))


def test_without_a_device_nothing_is_asked_of_one(doubles: Torch, record: Record) -> None:
    """Not even whether there is one."""
    value, buffer = torch.ones(9), memoryview(fsio.allocate(36))
    Copier(buffer, [(0, 36)]).copy([value])
    assert ([], plain(value)) == (record.asked, bytes(buffer[:36]))


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 10**6])
@pytest.mark.parametrize("pinned", [False, True])
def test_a_buffer_is_whole_pages(size: int, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned or not: direct I/O writes from it, header and tail included."""
    asked: list[bool] = []

    class Unpinned:
        def empty(self, *shape: int, pin_memory: bool, **kwargs: Any) -> torch.Tensor:
            asked.append(pin_memory)
            return torch.empty(*shape, **kwargs)

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    monkeypatch.setattr(copying, "torch", Unpinned())
    with torch.device("meta"):  # the program's default device, of whose memory none can be pinned
        buffer = buffer_for(size, pinned=pinned)
    assert ([True] * pinned, 0, 0) == (asked, fsio.address(buffer) % fsio.PAGE, len(buffer) % 4096)
    assert max(size, 1) <= len(buffer) < size + 2 * fsio.PAGE
