"""One training program of many shapes, forked from a process that has imported torch already.

Reads one JSON object per line: the shape of a run. Answers with the child's pid, and with its
exit status when it has ended. The child writes one line per step: step, epoch, bits of the loss,
and the samples it was computed from.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from hpc_ckpt import Checkpointer

SIZE = 22
WIDTH = 4


def sample(index: int) -> dict[str, Any]:
    """Of one number, and of whatever is drawn while it is read."""
    noise = torch.rand(WIDTH) + random.random() + np.random.random()
    return {"index": index, "x": noise + torch.arange(WIDTH) * (index + 1) / SIZE}


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Any]:
        return sample(index)


class Stream(IterableDataset[Any]):
    """Keeps its own place; each worker reads every n-th number."""

    def __init__(self) -> None:
        self.done = 0

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        mine = range(first, SIZE, stride)
        while self.done < len(mine):
            index = mine[self.done]
            self.done += 1
            yield sample(index)
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


class Forgetful(Stream):
    """A stream that cannot say where it is."""

    state_dict = load_state_dict = None  # type: ignore[assignment]


class Uneven(Sampler[list[int]]):
    """Batches of one, two and three, in an order drawn from Python's and torch's courses."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SIZE).tolist()
        while order:
            size = random.choice((1, 2, 3))
            yield order[:size]
            order = order[size:]


def loader_of(shape: dict[str, Any]) -> Any:
    kind, workers = shape["loader"], shape["workers"]
    options: dict[str, Any] = {"num_workers": workers}
    if workers and shape["persistent"]:
        options["persistent_workers"] = True
    data = Numbers()
    if kind == "uneven":
        return DataLoader(data, batch_sampler=Uneven(), **options)
    options |= {"batch_size": shape["batch"], "drop_last": shape["drop_last"]}
    if kind in ("stream", "forgetful stream"):
        return DataLoader(Stream() if kind == "stream" else Forgetful(), **options)
    if kind == "list":
        return _Listed()
    if kind == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(data, shuffle=True, **options)
    samplers: dict[str, Any] = {
        "sequential": dict,
        "shuffled": lambda: {"shuffle": True},
        "own generator": lambda: {
            "shuffle": True, "generator": torch.Generator().manual_seed(5)
        },
        "weighted": lambda: {
            "sampler": WeightedRandomSampler(torch.arange(1.0, SIZE + 1).tolist(), SIZE)
        },
        "distributed": lambda: {"sampler": DistributedSampler(data, 2, 1, seed=3)},
    }  # fmt: skip
    return DataLoader(data, **samplers[kind](), **options)


class _Listed:
    """Any iterable: shuffles itself whenever it is begun."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        order = list(range(SIZE))
        random.shuffle(order)
        for start in range(0, SIZE, 3):
            made = [sample(index) for index in order[start : start + 3]]
            yield {
                "index": torch.tensor([one["index"] for one in made]),
                "x": torch.stack([one["x"] for one in made]),
            }


class Model(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(SIZE, WIDTH, sparse=sparse)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = self.inner(batch["x"].float()) + self.table(batch["index"])
        if len(hidden) > 1:
            hidden = self.norm(hidden)
        return self.drop(hidden).square().mean()


def optimizers_of(name: str, model: Model) -> list[torch.optim.Optimizer]:
    if name == "sparse":
        dense = [*model.inner.parameters(), *model.norm.parameters()]
        return [
            torch.optim.SparseAdam(list(model.table.parameters()), lr=0.01),
            torch.optim.SGD(dense, lr=0.01, momentum=0.9),
        ]
    made: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
        "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2, history_size=3),
        "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    }
    return [made[name](model.parameters())]


def train(shape: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(shape["seed"])
    random.seed(shape["seed"])
    np.random.seed(shape["seed"])
    model = Model(sparse=shape["optimizer"] == "sparse")
    optimizers = optimizers_of(shape["optimizer"], model)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 7, 0.9) for one in optimizers]
    average = torch.optim.swa_utils.AveragedModel(model)
    loader = loader_of(shape)
    log = os.open(shape["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    tracked: dict[str, Any] = {
        "model": model, "optimizers": optimizers, "schedulers": schedulers, "average": average,
    }  # fmt: skip
    with Checkpointer(shape["root"], policy=shape["policy"], keep=2, **tracked) as ckpt:
        for epoch in ckpt.epochs(shape["epochs"]):
            for batch in ckpt.batches(loader):
                loss = step(model, optimizers, batch)
                for one in schedulers:
                    one.step()
                average.update_parameters(model)
                time.sleep(shape["pause"])
                samples = ",".join(map(str, batch["index"].tolist()))
                line = f"{ckpt.global_step + 1} {epoch} {loss.item().hex()} {samples}\n"
                os.write(log, line.encode())
                ckpt.step(loss=loss)
            os.write(log, f"end-of-epoch {epoch} {torch.rand(()).item().hex()} -\n".encode())
    state = model.state_dict() | average.state_dict()
    bits = hashlib.sha256(b"".join(v.numpy().tobytes() for v in state.values())).hexdigest()
    os.write(log, f"complete 0 {bits} -\n".encode())


def step(model: Model, optimizers: list[torch.optim.Optimizer], batch: Any) -> torch.Tensor:
    def closure() -> torch.Tensor:
        for one in optimizers:
            one.zero_grad()
        loss: torch.Tensor = model(batch)
        loss.backward()
        return loss

    if isinstance(optimizers[0], torch.optim.LBFGS):
        found: Any = optimizers[0].step(closure)
        return torch.as_tensor(found)
    loss = closure()
    for one in optimizers:
        one.step()
    return loss


def main() -> None:
    # What is imported at the first use of an optimizer would be imported by every child anew.
    importlib.import_module("torch._dynamo")
    importlib.import_module("torchdata.stateful_dataloader")
    importlib.import_module("hpc_ckpt.checkpointer")
    for line in sys.stdin:
        shape = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with Path(shape["log"] + ".err").open("a") as errors:
                    os.dup2(errors.fileno(), 2)
                os.close(0)
                train(shape)
                code = 0
            except SystemExit as ended:
                code = int(ended.code or 0)
            except BaseException:
                import traceback

                traceback.print_exc()
            os._exit(code)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
