"""The order of torch's own samplers from any batch on, without drawing what lies before it.

Gives exactly what iterating them gives. A sampler of any other class, or one whose order cannot
be computed at once, has none here: its indices are drawn one by one.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

Indices = Sequence[int] | torch.Tensor


def sliced(loader: DataLoader[Any], skip: int) -> Iterator[Any] | None:
    """What the loader's sampler would give from its item number `skip` on; None if unknown.

    Nothing is drawn before the first item is asked for.
    """
    batch_sampler = loader.batch_sampler
    if batch_sampler is None:
        known = _order_of(loader.sampler)
        return None if known is None else _singly(known, skip)
    if type(batch_sampler) is not BatchSampler:
        return None
    known = _order_of(batch_sampler.sampler)
    return None if known is None else _in_batches(known, batch_sampler, skip)


def _singly(order: Callable[[], Indices], skip: int) -> Iterator[int]:
    indices = order()
    for number in range(skip, len(indices)):
        yield int(indices[number])


def _in_batches(
    order: Callable[[], Indices], batches: BatchSampler, skip: int
) -> Iterator[list[int]]:
    indices, size = order(), batches.batch_size
    end = len(indices) // size * size if batches.drop_last else len(indices)
    for start in range(skip * size, end, size):
        piece = indices[start : min(start + size, end)]
        yield piece.tolist() if isinstance(piece, torch.Tensor) else list(piece)


def _order_of(sampler: Any) -> Callable[[], Indices] | None:
    """How to get all indices of a pass at once."""
    if type(sampler) is SequentialSampler:
        return lambda: range(len(sampler))
    if type(sampler) is DistributedSampler:
        return lambda: _distributed(sampler)
    if type(sampler) is RandomSampler and _is_one_permutation(sampler):
        return lambda: _random(sampler)
    return None


def _is_one_permutation(sampler: RandomSampler) -> bool:
    return not sampler.replacement and 0 < sampler.num_samples <= len(sampler.data_source)


def _random(sampler: RandomSampler) -> torch.Tensor:
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator()
        drawn = torch.empty((), dtype=torch.int64, device="cpu").random_()
        generator.manual_seed(int(drawn.item()))
    return _permutation(len(sampler.data_source), generator)[: sampler.num_samples]


def _permutation(count: int, generator: torch.Generator) -> torch.Tensor:
    """Where the generator is: a program's default device may be another."""
    return torch.randperm(count, generator=generator, device=generator.device)


def _distributed(sampler: DistributedSampler[Any]) -> torch.Tensor:
    count = len(sampler.dataset)  # type: ignore[arg-type]
    if sampler.shuffle:
        generator = torch.Generator()
        generator.manual_seed(sampler.seed + sampler.epoch)
        indices = _permutation(count, generator)
    else:
        indices = torch.arange(count, device="cpu")
    if sampler.total_size > count:
        indices = indices.repeat(-(-sampler.total_size // count))
    return indices[: sampler.total_size][sampler.rank :: sampler.num_replicas]
