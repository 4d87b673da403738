"""A snapshot is of one moment, whatever changes a program's memory and when.

Each case changes state in its own way: in step(), in forward, behind torch's back, or not at all
because a step was skipped. The save is held back while training goes on for some steps; what is
then written must be what was there at its boundary.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpc_ckpt import Checkpointer, fsio, load
from hpc_ckpt.rundir import RunDir

Train = Callable[[], None]
WIDTH = 6


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def backward(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(5, WIDTH)).square().mean()
    loss.backward()
    return loss


def plain(make: Callable[[Any], Any], model: nn.Module | None = None) -> tuple[Any, Train]:
    model = model or network()
    optimizer = make(model.parameters())

    def train() -> None:
        optimizer.zero_grad()
        backward(model)
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, train


def with_closure() -> tuple[Any, Train]:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return backward(model)

    return {"model": model, "optimizer": optimizer}, lambda: optimizer.step(closure)  # type: ignore[arg-type]


def sparse() -> tuple[Any, Train]:
    table = nn.Embedding(9, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(list(table.parameters()), lr=0.1)

    def train() -> None:
        optimizer.zero_grad()
        table(torch.randint(0, 9, (3,))).square().mean().backward()
        optimizer.step()

    return {"model": table, "optimizer": optimizer}, train


def scaled(*, overflow: bool) -> tuple[Any, Train]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    calls = [0]

    def train() -> None:
        calls[0] += 1
        optimizer.zero_grad()
        loss = model(torch.randn(5, WIDTH)).square().mean()
        scaler.scale(loss).backward()
        if overflow and calls[0] in (1, 4):  # a save waits where the last step was skipped
            model[0].weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()

    return {"model": model, "optimizer": optimizer, "scaler": scaler}, train


class Twice(torch.optim.SGD):
    """A subclass that calls its parent's step()."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Wrapped:
    """As accelerate wraps an optimizer: its own hooks cannot be registered."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)


def closure_first() -> tuple[Any, Train]:
    """As Lightning trains: forward and backward are inside step()."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return backward(model)

    return {"model": model, "optimizer": optimizer}, lambda: optimizer.step(closure)  # type: ignore[arg-type]


def zero_redundancy() -> tuple[Any, Train]:
    """Its own state_dict() is a collective that has to come first; the local part is tracked."""
    # Here, because it warns when it is imported.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = network()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.1)

    def train() -> None:
        zero.zero_grad()
        backward(model)
        zero.step()

    return {"model": model, "optimizer": zero.optim}, train


def muon() -> tuple[Any, Train]:
    """Of matrices only."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    return plain(lambda p: torch.optim.Muon(p, lr=0.05), model)


def bounded_table() -> tuple[Any, Train]:
    """Its rows are made shorter in forward."""
    table = nn.Embedding(9, 4, max_norm=0.5)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.5)

    def train() -> None:
        optimizer.zero_grad()
        table(torch.randint(0, 9, (5,))).square().sum().backward()
        optimizer.step()

    return {"model": table, "optimizer": optimizer}, train


def written_behind() -> tuple[Any, Train]:
    """In place, through .data, after the step: no version counter moves."""
    tracked, train = plain(lambda p: torch.optim.SGD(p, lr=0.1))

    def more() -> None:
        train()
        tracked["model"][0].weight.data.mul_(0.9)

    return tracked, more


def copied() -> tuple[Any, Train]:
    """A deep copy of an optimizer and its model has lost its hooks."""
    model = network()
    both = copy.deepcopy((model, torch.optim.Adam(model.parameters(), lr=0.1)))

    def train() -> None:
        both[1].zero_grad()
        backward(both[0])
        both[1].step()

    return {"model": both[0], "optimizer": both[1]}, train


def with_max_norm() -> tuple[Any, Train]:
    """The weight changes in forward."""
    bag = nn.EmbeddingBag(9, 4, max_norm=0.5)
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.5)

    def train() -> None:
        optimizer.zero_grad()
        bag(torch.randint(0, 9, (2, 3))).square().mean().backward()
        optimizer.step()
        bag(torch.randint(0, 9, (2, 3)))

    return {"model": bag, "optimizer": optimizer}, train


def clamped() -> tuple[Any, Train]:
    tracked, train = plain(lambda p: torch.optim.RMSprop(p, lr=0.1))

    def clamp() -> None:
        train()
        with torch.no_grad():
            for one in tracked["model"].parameters():
                one.clamp_(-0.2, 0.2)

    return tracked, clamp


def rebound() -> tuple[Any, Train]:
    """p.data = … moves the memory and tells nobody."""
    tracked, train = plain(lambda p: torch.optim.SGD(p, lr=0.1))

    def rebind() -> None:
        train()
        for one in tracked["model"].parameters():
            one.data = one.data * 0.9

    return tracked, rebind


def tensor_rate() -> tuple[Any, Train]:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def train() -> None:
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        scheduler.step()

    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}, train


def buffers(model: nn.Module) -> tuple[Any, Train]:
    return plain(lambda p: torch.optim.SGD(p, lr=0.1), model)


def compiled_step() -> tuple[Any, Train]:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")

    def train() -> None:
        optimizer.zero_grad()
        backward(model)
        step()

    return {"model": model, "optimizer": optimizer}, train


def averaged() -> tuple[Any, Train]:
    tracked, train = plain(lambda p: torch.optim.SGD(p, lr=0.1))
    average = torch.optim.swa_utils.AveragedModel(tracked["model"])

    def update() -> None:
        train()
        average.update_parameters(tracked["model"])

    return {**tracked, "average": average}, update


def bfloat16() -> tuple[Any, Train]:
    """Parameters of two bytes whose optimizer keeps state of four."""
    model = network().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train() -> None:
        optimizer.zero_grad()
        model(torch.randn(5, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        for row in optimizer.state.values():
            row["momentum_buffer"] = row["momentum_buffer"].bfloat16()
        for row in optimizer.state.values():
            row["master"] = torch.randn(3)

    return {"model": model, "optimizer": optimizer}, train


OPTIMIZERS = {
    name: getattr(torch.optim, name)
    for name in (
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
}
CASES: dict[str, Callable[[], tuple[Any, Train]]] = {
    **{
        name: lambda kind=kind: plain(lambda p: kind(p, lr=0.05))
        for name, kind in OPTIMIZERS.items()
    },  # type: ignore[misc]
    "LBFGS": with_closure,
    "SparseAdam": sparse,
    "foreach": lambda: plain(lambda p: torch.optim.Adam(p, lr=0.1, foreach=True)),
    "fused": lambda: plain(lambda p: torch.optim.Adam(p, lr=0.1, fused=True)),
    "compiled step": compiled_step,
    "scaled": lambda: scaled(overflow=False),
    "scaled, some steps skipped": lambda: scaled(overflow=True),
    "a subclass": lambda: plain(lambda p: Twice(p, lr=0.1)),
    "wrapped": lambda: plain(lambda p: Wrapped(torch.optim.Adam(p, lr=0.1))),
    "deep-copied": copied,
    "closure first": closure_first,
    "zero redundancy": zero_redundancy,
    "Muon": muon,
    "max_norm": with_max_norm,
    "max_norm, a table": bounded_table,
    "written behind": written_behind,
    "clamped": clamped,
    "rebound": rebound,
    "tensor rate": tensor_rate,
    "spectral norm": lambda: buffers(
        nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))
    ),
    "weight norm": lambda: buffers(
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))
    ),
    "batch norm": lambda: buffers(nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4))),
    "observers": lambda: buffers(
        nn.Sequential(torch.ao.quantization.FakeQuantize(), nn.Linear(WIDTH, 2))
    ),
    "averaged": averaged,
    "bfloat16": bfloat16,
}


class Gate:
    """Holds the thread that persists until it is opened."""

    def __init__(self) -> None:
        self.waits = threading.Event()
        self.open = threading.Event()

    def __call__(self, point: str) -> None:
        if point == "shard.opened" and threading.current_thread().name.startswith("hpc-ckpt"):
            self.waits.set()
            self.open.wait(20)


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    previous = fsio.observe(made)
    yield made
    made.open.set()
    fsio.observe(previous)


def states(tracked: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({name: value.state_dict() for name, value in tracked.items()})


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    if isinstance(one, torch.Tensor):
        same = isinstance(other, torch.Tensor) and one.dtype == other.dtype
        return [] if same and torch.equal(one, other) else [path]
    if isinstance(one, np.ndarray):
        return [] if np.array_equal(one, other) else [path]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [path]
        return [
            found for key in one for found in differences(one[key], other[key], f"{path}.{key}")
        ]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [path]
        pairs = enumerate(zip(one, other, strict=True))
        return [found for n, (a, b) in pairs for found in differences(a, b, f"{path}.{n}")]
    return [] if one == other else [path]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_what_is_saved_is_of_one_moment(tmp_path: Path, gate: Gate, name: str) -> None:
    tracked, train = CASES[name]()
    with Checkpointer(tmp_path, policy="every 1000 steps", **tracked) as ckpt:
        for _ in range(2):
            train()
            ckpt.step()
        expected = states(tracked)
        pending = ckpt.save()
        assert gate.waits.wait(20)
        for _ in range(3):
            train()
            ckpt.step()
        assert [] != differences(expected, states(tracked)), "the case changes nothing"
        gate.open.set()
        pending.wait(20)
        (saved,) = [key for key in RunDir(tmp_path).committed() if key.step == 2]
        found = load(RunDir(tmp_path).checkpoints / saved.directory_name)["tracked"]
    assert [] == differences(expected, found)
