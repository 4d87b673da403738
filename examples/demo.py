"""Train a small convolutional network on pictures it makes itself, across any number of links.

    python examples/demo.py                        plain; press Ctrl-C, run it again: it goes on
    hpc-ckpt run -- python examples/demo.py        as a chain on this machine
    hpc-ckpt submit -- python examples/demo.py     as a chain on a Slurm cluster

The lines with `ckpt` are all that hpc_ckpt adds; everything else is plain PyTorch.
"""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hpc_ckpt import Checkpointer

SHAPES = ("disc", "ring", "square", "cross")


class Pictures(Dataset):
    """Noisy 16×16 pictures of four shapes, drawn and augmented anew each time."""

    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % len(SHAPES)
        place, size = torch.rand(2), 4 + 2 * torch.rand(())  # augmentation: place and size
        y, x = self.rows - 6 - 4 * place[0], self.columns - 6 - 4 * place[1]
        inside = {
            "disc": lambda: torch.hypot(x, y) < size,
            "ring": lambda: (torch.hypot(x, y) - size).abs() < 1,
            "square": lambda: torch.maximum(x.abs(), y.abs()) < size,
            "cross": lambda: torch.minimum(x.abs(), y.abs()) < 1,
        }[SHAPES[label]]
        return (inside().float() + 0.5 * torch.randn(16, 16)).unsqueeze(0), label


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(32 * 16, 128), nn.ReLU(), nn.Linear(128, 4),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--pictures", type=int, default=1600)
    options = parser.parse_args()

    torch.manual_seed(7)
    loader = DataLoader(Pictures(options.pictures), batch_size=32, shuffle=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)

    seen: dict[str, float] = {}  # tracked: a link may have nothing left of an epoch but its end

    root = os.environ.get("HPC_CKPT_ROOT", "runs/demo")
    tracked = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "seen": seen}
    with Checkpointer(root, **tracked) as ckpt:
        if ckpt.restored:
            print(f"going on at step {ckpt.global_step}", flush=True)
        for epoch in ckpt.epochs(options.epochs):
            for pictures, labels in ckpt.batches(loader):
                loss = nn.functional.cross_entropy(model(pictures), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen["loss"] = loss.item()
                ckpt.step(loss=loss)
            scheduler.step()
            print(f"epoch {epoch}: loss {seen['loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
