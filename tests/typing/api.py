"""The public API as a user writes it; checked by mypy only, never run."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpc_ckpt
from hpc_ckpt import (
    Chain,
    ChainTask,
    Checkpointer,
    HpcCkptError,
    LinkEnded,
    best,
    executor,
    latest,
    load,
    submit,
)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loader = DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=2)
    with Checkpointer("runs/x", policy="every 3 steps", keep=2, tiers="local", model=model) as ckpt:
        if ckpt.restored is not None:
            step: int = ckpt.restored.step
            del step
        for epoch in ckpt.epochs(3):
            for batch in ckpt.batches(loader):
                loss: torch.Tensor = model(batch).sum()
                optimizer.step()
                ckpt.step(loss=loss, metrics={"epoch": epoch})
            if ckpt.poll():
                break
        pending = ckpt.save(reason="milestone")
        if not pending.done():
            pending.wait(10.0)


def run_again() -> int:
    try:
        train(nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)], lr=0.1))
    except LinkEnded as end:
        return int(end.code or 0)
    except HpcCkptError as error:
        return error.exit_code
    return 0


def several_places() -> Checkpointer:
    return Checkpointer("runs/x", tiers=["local", Path("/scratch/x"), "root"])


def through_submitit() -> list[float]:
    jobs = executor("explorer", folder="logs", time="8h", partition="gpu", gpus=1)
    command = jobs.submit(ChainTask(["python", "train.py"], "runs/x", max_restarts=40))
    sweep = jobs.map_array(ChainTask(run_again, Path("runs/{}")), [0.1, 0.01])
    return [command.result(), *(job.result() for job in sweep)]


def look() -> None:
    print(load(latest("runs/x"), map_location="cpu"), best("runs/x", "accuracy", mode="max"))
    chain: Chain = submit({"command": "python train.py"}, profile="explorer")
    print(chain.status().goodput, chain.job_ids, chain.wait(timeout_s=1.0), chain.stop())
    version: str = hpc_ckpt.__version__
    print(version)
