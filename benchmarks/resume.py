"""What it costs to go on in the middle of an epoch of ten million samples."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import statistics
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

from hpc_ckpt.state.loading import Order, Tag

from .clock import collect_garbage, seconds

BATCH = 100
PLACES = (0.0, 0.5, 0.99)


class Many(Dataset[int]):
    """As many samples as asked for, none of which is ever read here."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        raise AssertionError("a sample was read")


def measure(job: dict[str, Any]) -> dict[str, Any]:
    data = Many(job["count"])
    samplers = {
        "random": RandomSampler(data),
        "sequential": None,
        "distributed": DistributedSampler(data, 2, 0),
    }
    permutation = [seconds(lambda: torch.randperm(job["count"])) for _ in range(job["saves"] + 1)]
    result: dict[str, Any] = {"permutation_s": permutation[1:]}
    for name, sampler in samplers.items():
        loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
        batches = len(loader)
        for place in PLACES:
            skip = int(place * (batches - 1))
            took = []
            for _ in range(job["saves"]):
                collect_garbage()
                tag = Tag(1, "train", 0, 0, 0, 0)
                took.append(seconds(lambda: next(Order(loader, tag, skip=skip))))  # noqa: B023 - called at once
            result[f"{name} at {place:.0%}"] = took
    return result


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """Each place as a multiple of one permutation."""
    one = statistics.median(result["permutation_s"])
    return {
        name: statistics.median(took) / one
        for name, took in result.items()
        if name != "permutation_s"
    }
