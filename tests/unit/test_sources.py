"""Kinds of data sources: who is asked for its place, who is counted, who is refused."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from hpc_ckpt.errors import CheckpointError, UnsupportedLoader
from hpc_ckpt.state import sources
from hpc_ckpt.state.data import DataState
from hpc_ckpt.state.leaves import copy_into
from hpc_ckpt.state.tree import decode, encode

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:batches.*does not say where it is:RuntimeWarning"),
]
SIZE = 17


@pytest.fixture(autouse=True)
def told_nothing_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_told", set())


def drawn(index: int) -> tuple[int, float, float, float]:
    return index, random.random(), float(np.random.random()), torch.rand(()).item()


class Stream(IterableDataset[Any]):
    """Every n-th number for each worker; keeps its place."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.done = 0
        self.reads = 0

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        mine = range(first, self.size, stride)
        while self.done < len(mine):
            index = mine[self.done]
            self.done += 1
            self.reads += 1
            yield drawn(index)
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class Forgetful(IterableDataset[Any]):
    def __init__(self) -> None:
        self.reads = 0

    def __iter__(self) -> Iterator[Any]:
        order = list(range(SIZE))
        random.shuffle(order)
        for index in order:
            self.reads += 1
            yield drawn(index)


class Walk:
    """An iterator that keeps its place; what makes it does not."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> Any:
        if self.at == SIZE:
            raise StopIteration
        self.at += 1
        return drawn(self.at - 1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Walked(IterableDataset[Any]):
    def __iter__(self) -> Walk:
        return Walk()


Walked.__iter__.__annotations__["return"] = Walk


class Own:
    """The program's own loader, which keeps its place."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < SIZE:
            self.at += 1
            yield drawn(self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": torch.arange(self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Listed:
    def __iter__(self) -> Iterator[Any]:
        order = list(range(SIZE))
        random.shuffle(order)
        return map(drawn, order)


def torchdata_stream() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Forgetful(), batch_size=3)


KINDS: dict[str, Any] = {
    "stream": lambda: DataLoader(Stream(), batch_size=3),
    "stream, cut": lambda: DataLoader(Stream(), batch_size=3, drop_last=True),
    "stream, one by one": lambda: DataLoader(Stream(), batch_size=None),
    "stream, 1 worker": lambda: DataLoader(Stream(), batch_size=3, num_workers=1),
    "stream, 2 workers": lambda: DataLoader(Stream(), batch_size=2, num_workers=2),
    "stream, 3 workers, persistent": lambda: DataLoader(
        Stream(), batch_size=1, num_workers=3, persistent_workers=True
    ),
    "short stream, 3 workers": lambda: DataLoader(Stream(7), batch_size=2, num_workers=3),
    "walked": lambda: DataLoader(Walked(), batch_size=3),
    "forgetful": lambda: DataLoader(Forgetful(), batch_size=3),
    "forgetful, 2 workers": lambda: DataLoader(Forgetful(), batch_size=3, num_workers=2),
    "torchdata, a stream": torchdata_stream,
    "own": Own,
    "listed": Listed,
}


def go_on() -> bool:
    return False


def plain(batch: Any) -> Any:
    return [torch.as_tensor(part).tolist() for part in batch]


def epochs(state: DataState, loader: Any, stop_at: tuple[int, int] | None = None) -> list[Any]:
    """Two epochs of batches; or up to a batch of one of them, which is used."""
    found: list[Any] = []
    for epoch in range(state.epoch, 2):
        state.begin_epoch(epoch)
        batches = state.batches(loader, "train", stopped=go_on)
        for number, batch in enumerate(batches, 1):
            found.append((epoch, plain(batch)))
            state.confirm()
            if stop_at == (epoch, number):
                return found
        state.end_epoch()
    return found


def through_a_checkpoint(value: Any) -> Any:
    """What is kept must survive being written."""
    encoded = encode(value)
    kept = {}
    for leaf in encoded.leaves:
        kept[leaf.name] = memoryview(bytearray(leaf.nbytes))
        copy_into(kept[leaf.name], leaf.value)
    return decode(encoded.tree, lambda name: kept[encoded.aliases.get(name, name)])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("stop_at", [(0, 1), (0, 3), (1, 2)])
def test_a_resumed_pass_reads_what_one_pass_reads(name: str, stop_at: tuple[int, int]) -> None:
    """Samples, order, and everything random while they are read."""
    whole = epochs(DataState(seed=5), KINDS[name]())
    first = DataState(seed=5)
    random.seed(99)  # the program's own course is elsewhere
    begun = epochs(first, KINDS[name](), stop_at)
    kept = through_a_checkpoint(first.state_dict())
    first.close()
    torch.manual_seed(77)
    second = DataState(seed=0)
    second.load_state_dict(kept)
    assert whole == begun + epochs(second, KINDS[name]())


@pytest.mark.parametrize("name", KINDS)
def test_the_programs_own_course_is_left_alone(name: str) -> None:
    """Whoever reads, draws from numbers of their own."""
    torch.manual_seed(1)
    expected = torch.rand(3).tolist()
    torch.manual_seed(1)
    epochs(DataState(seed=5), KINDS[name](), (0, 2))
    assert expected == torch.rand(3).tolist()


def test_a_stream_is_not_read_again() -> None:
    """What keeps its place goes there; nothing before it is read."""
    first = DataState(seed=5)
    epochs(first, DataLoader(Stream(), batch_size=3), (0, 4))
    second = DataState(seed=5)
    second.load_state_dict(first.state_dict())
    stream = Stream()
    second.begin_epoch(0)
    batches = iter(second.batches(DataLoader(stream, batch_size=3), "train", stopped=go_on))
    next(batches)
    assert 3 == stream.reads


def test_a_batch_that_was_not_used_is_read_again() -> None:
    """The source is then ahead of what counts."""
    state = DataState(seed=5)
    state.begin_epoch(0)
    batches = iter(state.batches(DataLoader(Stream(), batch_size=3), "train", stopped=go_on))
    next(batches)
    state.confirm()
    state.state_dict()
    unused = plain(next(batches))
    second = DataState(seed=5)
    second.load_state_dict(state.state_dict())
    second.begin_epoch(0)
    again = second.batches(DataLoader(Stream(), batch_size=3), "train", stopped=go_on)
    assert unused == plain(next(iter(again)))


def test_another_number_of_workers_is_said() -> None:
    """Each worker keeps its own place, and they cannot be shared out anew."""
    first = DataState(seed=5)
    epochs(first, DataLoader(Stream(), batch_size=3, num_workers=2), (0, 2))
    second = DataState(seed=5)
    second.load_state_dict(first.state_dict())
    second.begin_epoch(0)
    other = DataLoader(Stream(), batch_size=3)
    with pytest.raises(CheckpointError, match="read by 2 data workers and now has 1"):
        next(iter(second.batches(other, "train", stopped=go_on)))


def test_what_is_counted_says_so_once() -> None:
    """With the remedy."""
    state = DataState(seed=5)
    state.begin_epoch(0)
    with pytest.warns(RuntimeWarning, match="reads and drops those before its place") as caught:
        state.batches(Listed(), "train", stopped=go_on)
    assert "state_dict() and load_state_dict()" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.batches(Listed(), "other", stopped=go_on)


def test_an_iterator_has_one_pass() -> None:
    """Given again, nobody could tell where its second pass began."""
    state = DataState(seed=5)
    numbers = (n for n in range(5))
    state.begin_epoch(0)
    assert [0, 1, 2, 3, 4] == list(state.batches(numbers, "train", stopped=go_on))
    state.end_epoch()
    state.begin_epoch(1)
    with pytest.raises(UnsupportedLoader, match="second pass"):
        state.batches(numbers, "train", stopped=go_on)


def test_what_cannot_be_iterated_is_refused() -> None:
    with pytest.raises(UnsupportedLoader, match=r"builtins\.int cannot be iterated"):
        DataState(seed=5).batches(5, "train", stopped=go_on)


class Noisy(Dataset[Any]):
    def __init__(self, generator: Any) -> None:
        self.transforms = [Jitter(generator)]

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


class Jitter:
    def __init__(self, generator: Any) -> None:
        self.generator = generator


@pytest.mark.parametrize(
    "generator",
    [torch.Generator(), np.random.default_rng(1), np.random.RandomState(1), random.Random(1)],
)
def test_a_generator_of_the_datasets_own_is_said(generator: Any) -> None:
    """Its draws cannot be followed; the warning names it and what to do instead."""
    state = DataState(seed=5)
    with pytest.warns(RuntimeWarning, match=r"dataset\.transforms\.0\.generator") as caught:
        state.batches(DataLoader(Noisy(generator)), "train", stopped=go_on)
    assert "seeded anew for every batch" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.batches(DataLoader(Noisy(None)), "other", stopped=go_on)


class Counting:
    """Keeps its place, and the number of its pass, which outlives a pass."""

    def __init__(self) -> None:
        self.turn = self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 3:
            self.at += 1
            yield self.turn * 10 + self.at
        self.turn, self.at = self.turn + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"turn": self.turn, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.turn, self.at = state["turn"], state["at"]


def test_what_a_source_keeps_between_its_passes_is_kept() -> None:
    """A run that goes on with its next epoch goes on with its loader, too."""

    def epoch(state: DataState, source: Any, number: int) -> list[int]:
        state.begin_epoch(number)
        read = list(state.batches(source, "t", stopped=lambda: False))
        state.end_epoch()
        return read

    first, source = DataState(seed=1), Counting()
    epoch(first, source, 0)
    kept = first.state_dict()
    expected = [epoch(first, source, number) for number in (1, 2)]
    second, fresh = DataState(seed=1), Counting()
    second.load_state_dict(kept)
    assert expected == [epoch(second, fresh, number) for number in (1, 2)]


class Shuffled(torch.utils.data.Sampler[int]):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(8).tolist())

    def __len__(self) -> int:
        return 8


class Holding(Dataset[Any]):
    """Holds something as deep as transforms of transforms do."""

    def __init__(self, inner: Any) -> None:
        self.transform = {"transforms": [inner]}

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


class Flip:
    def __init__(self) -> None:
        self.generator = torch.Generator()


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(range(8), sampler=Shuffled()),  # type: ignore[arg-type]
        lambda: DataLoader(Holding(Flip())),
        lambda: DataLoader(torch.utils.data.Subset(Holding(Flip()), [0, 1])),
    ],
)
def test_generators_are_found_wherever_a_program_puts_them(loader: Any) -> None:
    """In samplers and deep inside datasets; said once."""
    with pytest.warns(RuntimeWarning, match="generator of") as caught:
        DataState(seed=5).batches(loader(), "t", stopped=lambda: False)
    assert 1 == len(caught)


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(range(8), shuffle=True, generator=torch.Generator()),  # type: ignore[arg-type]
        lambda: DataLoader(Holding(random)),
        lambda: DataLoader(Holding(torch)),
    ],
)
def test_what_is_followed_anyway_is_not_warned_of(loader: Any) -> None:
    """Torch's samplers have a private course; a module is not a generator."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataState(seed=5).batches(loader(), "t", stopped=lambda: False)


def test_nothing_is_read_while_skipping() -> None:
    """A resumed pass begins with its own batch's samples."""

    class Told(Dataset[Any]):
        read: list[int] = []  # noqa: RUF012 - the test's own

        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> int:
            self.read.append(index)
            return index

    first = DataState(seed=1)
    source = iter(first.batches(DataLoader(Told(), batch_size=2), "t", stopped=lambda: False))
    for _ in range(4):
        next(source)
    first.confirm()
    second = DataState(seed=1)
    second.load_state_dict(first.state_dict())
    Told.read.clear()
    list(second.batches(DataLoader(Told(), batch_size=2), "t", stopped=lambda: False))
    assert [8, 9, 10, 11] == Told.read
