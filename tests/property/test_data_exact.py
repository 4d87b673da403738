"""A run that is stopped and resumed reads what an uninterrupted one reads, bit for bit."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from hpc_ckpt.state import rng
from hpc_ckpt.state.data import DataState

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # few cores
]

EPOCHS = 3
KINDS = ("sequential", "shuffled", "weighted", "uneven", "single", "own generator", "distributed")


class Augmented(Dataset[Any]):
    """Items that draw from every course, as augmentation does."""

    def __init__(self, size: int, *, tells_worker: bool = False) -> None:
        self.size = size
        self.tells_worker = tells_worker

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        worker = get_worker_info()
        return {
            "index": torch.tensor(index),
            "torch": torch.randn(2, dtype=torch.float64),
            "python": random.gauss(0, 1),
            "numpy": float(np.random.randn()),
            "worker": worker.id if worker is not None and self.tells_worker else -1,
        }


class Uneven(Sampler[list[int]]):
    """A batch sampler that draws from two courses at every batch."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        left = list(np.random.permutation(self.size))
        while left:
            count = random.randint(1, 4)
            yield [int(index) for index in left[:count]]
            left = left[count:]


def collate(items: Any) -> dict[str, Any]:
    """Mixes the batch, as MixUp does."""
    batch = default_collate(items) if isinstance(items, list) else dict(items)
    return {**batch, "mixed": torch.rand(1, dtype=torch.float64), "mixed too": np.random.rand()}


@dataclass(frozen=True)
class Case:
    kind: str
    size: int = 11
    drop_last: bool = False
    workers: int = 0
    persistent: bool = False
    tells_worker: bool = False

    def loader(self) -> DataLoader[Any]:
        dataset = Augmented(self.size, tells_worker=self.tells_worker)
        common: dict[str, Any] = {
            "collate_fn": collate,
            "num_workers": self.workers,
            "persistent_workers": self.persistent,
        }
        if self.kind == "uneven":
            return DataLoader(dataset, batch_sampler=Uneven(self.size), **common)
        if self.kind == "single":
            return DataLoader(dataset, batch_size=None, shuffle=True, **common)
        common.update(batch_size=3, drop_last=self.drop_last)
        if self.kind == "weighted":
            weights = [1.0 + index for index in range(self.size)]
            return DataLoader(dataset, sampler=WeightedRandomSampler(weights, self.size), **common)
        if self.kind == "distributed":
            halves = DistributedSampler(dataset, num_replicas=2, rank=1)
            return DataLoader(dataset, sampler=halves, **common)
        generator = torch.Generator() if self.kind == "own generator" else None
        return DataLoader(dataset, shuffle=self.kind != "sequential", generator=generator, **common)


def plain(batch: dict[str, Any]) -> str:
    """All of a batch, exactly."""
    values = {
        key: value.tolist() if hasattr(value, "tolist") else value for key, value in batch.items()
    }
    return json.dumps(values)


def step() -> tuple[float, float, float]:
    """What a training step draws in the main process, such as dropout."""
    return float(torch.rand(1, dtype=torch.float64)), random.gauss(0, 1), float(np.random.randn())


class Run:
    """A training program, as the checkpointer drives it; 'saved' is its only checkpoint."""

    def __init__(self, saved: tuple[str, dict[str, Any]] | None = None) -> None:
        self.log: list[tuple[int, str, tuple[float, float, float]]] = []
        self.data = DataState(seed=5)
        torch.manual_seed(40), random.seed(41), np.random.seed(42)
        if saved is not None:
            torch.manual_seed(99), random.seed(99), np.random.seed(99)
            self.data.load_state_dict(json.loads(saved[0]))
            rng.restore(saved[1])

    def __call__(self, case: Case, *, passes: int = 1, stop_after: int | None = None) -> Any:
        loader = case.loader()
        try:
            for epoch in range(self.data.epoch, EPOCHS):
                self.data.begin_epoch(epoch)
                for _ in range(passes):
                    for batch in self.data.batches(loader, "train", stopped=lambda: False):
                        self.log.append((epoch, plain(batch), step()))
                        self.data.confirm()
                        if len(self.log) == stop_after:
                            return json.dumps(self.data.state_dict()), rng.capture()
                self.data.end_epoch()
        finally:
            self.data.close()
        return None


def whole(case: Case, **how: Any) -> list[Any]:
    run = Run()
    run(case, **how)
    return run.log


def in_two_links(first: Case, second: Case, stop_after: int, **how: Any) -> list[Any]:
    before = Run()
    saved = before(first, stop_after=stop_after, **how)
    after = Run(saved)
    after(second, **how)
    return before.log + after.log


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    size=st.integers(2, 14),
    drop_last=st.booleans(),
    passes=st.integers(1, 2),
    data=st.data(),
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    kind: str, size: int, drop_last: bool, passes: int, data: st.DataObject
) -> None:
    """Batches, augmentation, collation and the main process's draws, for any place to stop."""
    case = Case(kind, size, drop_last)
    expected = whole(case, passes=passes)
    if expected:
        stop_after = data.draw(st.integers(1, len(expected)))
        assert expected == in_two_links(case, case, stop_after, passes=passes)


@settings(max_examples=15, deadline=None)
@given(kind=st.sampled_from(KINDS), stops=st.lists(st.integers(1, 6), min_size=2, max_size=4))
def test_many_short_links_equal_one_long_run(kind: str, stops: list[int]) -> None:
    """A chain saves what it restored, again and again."""
    log: list[Any] = []
    saved = None
    for stop_after in (*stops, None):
        run = Run(saved)
        saved = run(Case(kind), stop_after=stop_after)
        log += run.log
        if saved is None:
            break
    assert whole(Case(kind)) == log


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    ("kind", "stop_after"),
    [("shuffled", 3), ("uneven", 2), ("single", 16), ("own generator", 8), ("weighted", 5)],
)
def test_data_workers_change_nothing(kind: str, stop_after: int, persistent: bool) -> None:
    """Two workers read what none reads, resumed in the middle or at an epoch's end."""
    alone = Case(kind)
    helped = replace(alone, workers=2, persistent=persistent)
    assert whole(alone) == in_two_links(helped, helped, stop_after)


@pytest.mark.parametrize(("first", "second"), [(0, 2), (2, 0), (2, 3)])
def test_the_number_of_workers_may_change_between_links(first: int, second: int) -> None:
    """A link on a node with other cores reads the same."""
    case = Case("shuffled")
    links = (replace(case, workers=first), replace(case, workers=second))
    assert whole(case) == in_two_links(*links, 6)


def test_a_dataset_sees_the_worker_it_would_have_seen() -> None:
    """The worker's id belongs to the batch, though a resume deals batches to others."""
    case = Case("shuffled", workers=2, tells_worker=True)
    assert whole(case) == in_two_links(case, case, 3)
    workers = [json.loads(batch)["worker"][0] for _, batch, _ in whole(case)]
    assert [0, 1, 0, 1] * EPOCHS == workers


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from(("sequential", "shuffled", "uneven", "own generator")),
    stop_after=st.integers(1, 12),
)
def test_every_sample_is_used_once_per_epoch(kind: str, stop_after: int) -> None:
    """What both links used together is each epoch exactly."""
    used: Counter[tuple[int, int]] = Counter()
    for epoch, batch, _ in in_two_links(Case(kind), Case(kind), stop_after):
        used.update((epoch, index) for index in json.loads(batch)["index"])
    assert Counter((epoch, index) for epoch in range(EPOCHS) for index in range(11)) == used


@pytest.mark.parametrize("kind", ["shuffled", "weighted", "own generator"])
def test_epochs_and_passes_differ(kind: str) -> None:
    """Each epoch and pass has an order and augmentation of its own."""
    log = [json.loads(batch) for _, batch, _ in whole(Case(kind), passes=2)]
    orders = {str([batch["index"] for batch in log[at : at + 4]]) for at in range(0, len(log), 4)}
    assert EPOCHS * 2 == len(orders)
    assert len(log) == len({str(batch["torch"]) for batch in log})
