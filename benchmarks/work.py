"""Something to train while a checkpoint is written: matmuls and a small real model."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import statistics

import torch
from torch import Tensor, nn

from .clock import seconds

STEP_S = 0.030
SIDE = 512


class Work:
    """One step takes about STEP_S with this many threads and nothing beside it."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._factor = torch.randn(SIDE, SIDE)
        self._product = torch.empty(SIDE, SIDE)
        self._inputs = torch.randn(32, 256)
        self.model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self._matmuls = 1
        for _ in range(3):
            self._calibrate()

    def step(self) -> None:
        for _ in range(self._matmuls):
            torch.mm(self._factor, self._factor, out=self._product)
        self.optimizer.zero_grad()
        self.model(self._inputs).square().mean().backward()
        self.optimizer.step()

    def _calibrate(self) -> None:
        """By the faster half: a machine that is disturbed now will not be so all the time."""
        took = statistics.median(sorted(seconds(self.step) for _ in range(40))[:20])
        self._matmuls = max(1, round(self._matmuls * STEP_S / took))


class Loaded:
    """Work whose state carries many bytes more, changed as a whole before each save."""

    def __init__(self, work: Work, ballast: dict[str, Tensor]) -> None:
        self.work = work
        self.ballast = ballast

    def flat(self) -> dict[str, Tensor]:
        model = {name: p.detach() for name, p in self.work.model.named_parameters()}
        return {**model, **self.ballast}

    def advance(self) -> None:
        torch._foreach_add_(list(self.ballast.values()), 1e-3)
