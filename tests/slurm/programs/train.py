"""A small training whose steps take a given time; deterministic, so that weights can be compared.

    train.py EPOCHS SECONDS_A_STEP [--hold-at STEP] [--fault KIND:STEP[:LINK]]

With --hold-at, link 1 stands still in the middle of that step until the file `go` appears: a
step that is longer than what is left of the allocation. With --fault, the program crashes or
runs out of memory at that step, in every link or in one.

It keeps the number of the step it has made in a file beside the root, one for each link: after a
kill nothing else knows what was lost.
"""

import argparse
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpc_ckpt import Checkpointer

BATCHES = 25


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int)
    parser.add_argument("step_s", type=float)
    parser.add_argument("--hold-at", type=int)
    parser.add_argument("--fault", default="none:-1")
    options = parser.parse_args()
    print(f"pid {os.getpid()}", flush=True)

    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    data = TensorDataset(torch.randn(8 * BATCHES, 16), torch.randint(0, 4, (8 * BATCHES,)))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)

    root = os.environ["HPC_CKPT_ROOT"]
    reached = Path(root).parent / f"reached-{os.environ.get('HPC_CKPT_GENERATION', '0')}"
    made = os.open(reached, os.O_WRONLY | os.O_CREAT, 0o644)
    with Checkpointer(root, model=model, optimizer=optimizer, scheduler=scheduler) as ckpt:
        for _ in ckpt.epochs(options.epochs):
            for inputs, labels in ckpt.batches(loader):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(options.step_s)
                fail(options.fault, ckpt.global_step + 1)
                if options.hold_at == ckpt.global_step + 1 and ckpt.restored is None:
                    hold(Path(root).parent)
                os.pwrite(made, b"%09d" % (ckpt.global_step + 1), 0)
                ckpt.step(loss=loss)
            scheduler.step()


def fail(fault: str, step: int) -> None:
    kind, at, *link = fault.split(":")
    if step != int(at) or (link and link[0] != os.environ["HPC_CKPT_GENERATION"]):
        return
    if kind == "crash":
        raise RuntimeError("the program is broken at this step")
    if kind == "memory":
        bytearray(1 << 62)  # a real MemoryError


def hold(place: Path) -> None:
    (place / "holding").touch()
    while not (place / "go").exists():
        time.sleep(0.05)


if __name__ == "__main__":
    main()
