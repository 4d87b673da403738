"""A small training script as a user would write it, with knobs for the tests that run it.

Dropout, augmentation, momentum and a scheduler: everything that goes wrong when a state is not
restored exactly. Each step appends "STEP LOSS" (bits, not digits) to the log.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hpc_ckpt import Checkpointer

torch.set_num_threads(1)


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """48 samples, each augmented with fresh noise whenever it is read."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(48, 6, generator=generator)
        self.y = torch.randn(48, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + 0.1 * torch.randn(6), self.y[index]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--policy", default="every 3 steps")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds per step")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--hang-at", type=int, default=0)
    parser.add_argument("--hang-in", choices=("sleep", "c"), default="sleep")
    parser.add_argument("--swallow", choices=("", "bare", "break"), default="")
    return parser.parse_args()


def hang(where: str) -> None:
    if where == "c":
        # In C code and without the interpreter lock: no signal callback can run.
        hashlib.pbkdf2_hmac("sha512", b"x", b"y", 10**9)
    while True:
        time.sleep(60)


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    for state in optimizer.state_dict()["state"].values():
        digest.update(state["momentum_buffer"].numpy().tobytes())
    digest.update(repr([group["lr"] for group in optimizer.param_groups]).encode())
    return digest.hexdigest()


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=options.workers)
    log = options.out.open("a")
    with Checkpointer(
        options.root, policy=options.policy, model=model, optimizer=optimizer, scheduler=scheduler
    ) as ckpt:
        print("entered", ckpt.restored.step if ckpt.restored else "fresh", flush=True)
        torch.randn(3)  # what a program draws on its way into its loop must not matter
        for epoch in ckpt.epochs(options.epochs):
            for x, y in ckpt.batches(loader):
                loss = nn.functional.mse_loss(model(x), y) / options.accumulate
                loss.backward()
                if (ckpt.global_step + 1) % options.accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                print(ckpt.global_step + 1, loss.item().hex(), file=log, flush=True)
                if ckpt.global_step + 1 == options.hang_at:
                    hang(options.hang_in)
                time.sleep(options.pause)
                try:
                    ckpt.step(loss=loss)
                except:  # noqa: E722 - the mistake this program makes when it is told to
                    if not options.swallow:
                        raise
                if options.swallow == "break" and ckpt.should_stop:
                    break
            scheduler.step()
            del epoch
    print("complete", fingerprint(model, optimizer), flush=True)


if __name__ == "__main__":
    sys.exit(train(parse()))
