"""The order of torch's samplers from any batch on is the one that iterating them gives."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from hpc_ckpt.state.slicing import sliced

DATA = list(range(23))


def samplers() -> dict[str, Any]:
    return {
        "sequential": lambda: SequentialSampler(DATA),
        "random": lambda: RandomSampler(DATA),
        "some": lambda: RandomSampler(DATA, num_samples=9),
        "own generator": lambda: RandomSampler(DATA, generator=torch.Generator().manual_seed(4)),
        "distributed": lambda: DistributedSampler(DATA, 4, 1, seed=9),
        "in order": lambda: DistributedSampler(DATA, 4, 3, shuffle=False),
        "cut": lambda: DistributedSampler(DATA, 4, 2, drop_last=True),
        "more ranks than data": lambda: DistributedSampler(DATA[:3], 8, 7),
    }


@pytest.mark.parametrize("name", samplers())
@pytest.mark.parametrize(
    ("batch", "drop_last"),
    [(None, False), *((size, cut) for size in (1, 4, 23, 50) for cut in (False, True))],
)
@pytest.mark.parametrize("skip", [0, 1, 3, 40])
def test_equal_to_iterating(name: str, batch: int | None, drop_last: bool, skip: int) -> None:
    """Item for item, from the same random numbers."""

    def loader() -> DataLoader[Any]:
        sampler = samplers()[name]()
        options: dict[str, Any] = {} if batch is None else {"drop_last": drop_last}
        return DataLoader(DATA, batch_size=batch, sampler=sampler, **options)

    torch.manual_seed(3)
    one = loader()
    source = one.sampler if one.batch_sampler is None else one.batch_sampler
    expected = list(islice(iter(source), skip, None))
    torch.manual_seed(3)
    found = sliced(loader(), skip)
    assert found is not None
    assert expected == list(found)


class Own(RandomSampler):
    """The program's; may do anything."""


class OwnBatches(BatchSampler):
    """The same."""


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(DATA, sampler=Own(DATA)),
        lambda: DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)),
        lambda: DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=40)),
        lambda: DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 23, 23)),
        lambda: DataLoader(DATA, batch_sampler=OwnBatches(SequentialSampler(DATA), 4, False)),
    ],
)
def test_others_are_left_to_themselves(loader: Any) -> None:
    """Nothing is guessed about a class that torch did not make."""
    assert sliced(loader(), 2) is None


@pytest.mark.parametrize("name", samplers())
def test_a_default_device_does_not_move_the_order(name: str) -> None:
    """Indices are drawn where their generator is; torch's own samplers fail there."""
    torch.manual_seed(3)
    expected = list(samplers()[name]())
    torch.manual_seed(3)
    with torch.device("meta"):
        found = sliced(DataLoader(DATA, batch_size=None, sampler=samplers()[name]()), 0)
        assert found is not None
        assert expected == list(found)
