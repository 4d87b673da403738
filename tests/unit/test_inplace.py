"""Restoring straight into the program's memory: where it is done, and where doubt forbids it."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpc_ckpt import Checkpointer
from hpc_ckpt.engine.restore import state_of
from hpc_ckpt.errors import RestoreMismatch
from hpc_ckpt.format.verify import Reader, open_reader
from hpc_ckpt.state import inplace, modules
from hpc_ckpt.state.registry import Registry
from hpc_ckpt.state.tree import encode


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("HPC_CKPT"):
            monkeypatch.delenv(name)


# ── modules ───────────────────────────────────────────────────────────────────────────────
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight


class Untied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9, bias=False)


class Everything(nn.Module):
    """Buffers, a 0-dim one, several dtypes, nothing at all, and memory that is not in C order."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.half = nn.Linear(3, 3).bfloat16()
        self.wide = nn.Parameter(torch.randn(700, 700))
        self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("flags", torch.rand(5) > 0.5)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("forgotten", torch.randn(3), persistent=False)


class LoadsItself(nn.Module):
    """Takes its state by code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.randn(3))
        self.asked = 0

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.asked += 1
        with torch.no_grad():
            self.weight.copy_(state_dict[f"{prefix}weight"])


def module_of(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(*parts)


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(30, 20),
    "batch norm": lambda: module_of(nn.Linear(3, 4), nn.BatchNorm1d(4)),
    "tied": Tied,
    "everything": Everything,
    "recurrent": lambda: nn.LSTM(3, 4, num_layers=2),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "empty": nn.ReLU,
}


def randomized(module: nn.Module, seed: int) -> nn.Module:
    """Other values in the same memory."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for value in module.state_dict().values():
            if value.is_floating_point() or value.is_complex():
                value.normal_()
            else:
                value.random_(0, 2)
    return module


def values_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def pointers_of(module: nn.Module) -> dict[str, int]:
    return {name: value.data_ptr() for name, value in module.state_dict().items()}


def assert_same(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == actual.keys()
    assert [] == [name for name in expected if not torch.equal(expected[name], actual[name])]


# ── saving and restoring ──────────────────────────────────────────────────────────────────
def save(root: Path, **tracked: Any) -> Path:
    """A committed checkpoint of these objects."""
    with Checkpointer(root, **tracked) as ckpt:
        ckpt.step()
    return root


def newest(root: Path) -> Reader:
    return open_reader(sorted((root / "checkpoints").glob("step-*"))[-1])


def restore(root: Path, **tracked: Any) -> None:
    with Checkpointer(root, **tracked) as ckpt:
        assert ckpt.restored is not None


def targets_of(root: Path, **tracked: Any) -> dict[str, torch.Tensor]:
    return Registry(tracked).targets(newest(root).manifest.tree)


# ── read to where it belongs ──────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", PLAIN)
def test_a_module_is_restored_in_its_own_memory(tmp_path: Path, name: str) -> None:
    """Every value, and no parameter or buffer has moved."""
    saved = randomized(PLAIN[name](), 1)
    save(tmp_path, model=saved)
    here = randomized(PLAIN[name](), 2)
    before = pointers_of(here)
    restore(tmp_path, model=here)
    assert_same(values_of(saved), values_of(here))
    assert before == pointers_of(here)


@pytest.mark.parametrize("name", PLAIN)
def test_the_bytes_take_no_detour(tmp_path: Path, name: str) -> None:
    """The reader is given the module's memory: for all of it, or what is a plain stretch."""
    save(tmp_path, model=randomized(PLAIN[name](), 1))
    here = PLAIN[name]()
    targets = targets_of(tmp_path, model=here)
    expected = {}
    for leaf in encode({"tracked": {"model": here.state_dict()}}).leaves:
        assert isinstance(leaf.value, torch.Tensor)
        if leaf.nbytes and leaf.value.is_contiguous():
            expected[leaf.name] = (leaf.value.data_ptr(), leaf.nbytes)
    assert expected == {key: (one.data_ptr(), one.nbytes) for key, one in targets.items()}


def test_what_is_read_in_place_is_not_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No second copy of a model that may fill half of the memory."""
    saved = randomized(PLAIN["batch norm"](), 1)
    save(tmp_path, model=saved)
    here = randomized(PLAIN["batch norm"](), 2)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(modules.Module, "load_state_dict", refuse)
    restore(tmp_path, model=here)
    assert_same(values_of(saved), values_of(here))


def test_an_optimizer_and_a_scheduler_are_no_obstacle(tmp_path: Path) -> None:
    """Their state is small or made anew, and it is right."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Linear(5, 3)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(2, 5)).sum().backward()
        optimizer.step()
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)

    model, optimizer, scheduler = make()
    save(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)
    here = make()
    assert targets_of(tmp_path, model=here[0], optimizer=here[1], scheduler=here[2])
    restore(tmp_path, model=here[0], optimizer=here[1], scheduler=here[2])
    assert_same(values_of(model), values_of(here[0]))
    moments = [state["exp_avg"] for state in here[1].state_dict()["state"].values()]
    expected = [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
    assert [True] * 2 == [torch.equal(a, b) for a, b in zip(expected, moments, strict=True)]


def test_memory_shared_by_two_modules_is_read_once(tmp_path: Path) -> None:
    """A weight that two tracked objects have in common."""

    def make() -> dict[str, nn.Module]:
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        return {"first": first, "second": second}

    saved = make()
    save(tmp_path, **saved)
    here = make()
    assert {"tracked.first.weight", "tracked.first.bias", "tracked.second.bias"} == set(
        targets_of(tmp_path, **here)
    )
    restore(tmp_path, **here)
    for name, module in saved.items():
        assert_same(values_of(module), values_of(here[name]))
    assert here["first"].weight is here["second"].weight


def test_tied_here_and_not_in_the_checkpoint(tmp_path: Path) -> None:
    """The later of the two wins, as it does in load_state_dict()."""
    saved = randomized(Untied(), 1)
    save(tmp_path, model=saved)
    expected, here = Tied(), Tied()
    expected.load_state_dict(saved.state_dict())
    restore(tmp_path, model=here)
    assert_same(values_of(expected), values_of(here))


def test_tied_in_the_checkpoint_and_not_here(tmp_path: Path) -> None:
    """Both get the value, each in its own memory."""
    saved, here = randomized(Tied(), 1), Untied()
    save(tmp_path, model=saved)
    restore(tmp_path, model=here)
    assert_same(values_of(saved), values_of(here))
    assert here.head.weight.data_ptr() != here.embedding.weight.data_ptr()


def test_gradients_are_asked_for_as_before(tmp_path: Path) -> None:
    """Neither is a parameter exchanged nor is its flag touched."""
    save(tmp_path, model=nn.Linear(3, 2))
    here = nn.Linear(3, 2)
    here.bias.requires_grad_(False)
    weight, bias = here.weight, here.bias
    restore(tmp_path, model=here)
    assert (True, True) == (here.weight is weight, here.bias is bias)
    assert (True, False) == (weight.requires_grad, bias.requires_grad)
    here(torch.ones(1, 3)).sum().backward()
    assert weight.grad is not None


def test_a_decoded_state_lies_in_the_module(tmp_path: Path) -> None:
    """What state_of() gives for a leaf with a target is the target's memory, already filled."""
    saved = nn.Linear(3, 2)
    save(tmp_path, model=saved)
    here, reader = nn.Linear(3, 2), newest(tmp_path)
    targets = Registry({"model": here}).targets(reader.manifest.tree)
    state = state_of(reader, targets=targets)["tracked"]["model"]
    assert pointers_of(here) == {name: value.data_ptr() for name, value in state.items()}
    assert_same(values_of(saved), values_of(here))


def test_a_defect_that_is_found_half_way_leaves_nothing_mixed(tmp_path: Path) -> None:
    """The older checkpoint that is taken instead overwrites all that was read of the newer."""
    model = nn.ParameterList([torch.randn(40_000) for _ in range(4)])
    with Checkpointer(tmp_path, model=model) as ckpt:
        for seed in (1, 2):
            randomized(model, seed)
            ckpt.step()
            ckpt.save(wait=True)
    path = newest(tmp_path).path / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    here = nn.ParameterList([torch.zeros(40_000) for _ in range(4)])
    with Checkpointer(tmp_path, model=here) as ckpt:
        assert ckpt.restored is not None
        assert (1, 1) == (ckpt.restored.step, len(ckpt.restored.skipped))
        assert_same(values_of(randomized(model, 1)), values_of(here))
        ckpt.step()


# ── optimizers ────────────────────────────────────────────────────────────────────────────
def stepped(make: Callable[[Any], torch.optim.Optimizer], seed: int) -> tuple[Any, Any]:
    """A model and an optimizer with state, both of random content."""
    model = randomized(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), seed)
    optimizer = make(model.parameters())
    for _ in range(seed + 1):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    rows = optimizer.state_dict()["state"].values()
    return [value for row in rows for value in row.values() if isinstance(value, torch.Tensor)]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_has_stepped_is_restored_in_its_own_memory(
    tmp_path: Path, name: str
) -> None:
    """Every value and every setting; no tensor of its state has moved, and it goes on alike."""
    model, optimizer = stepped(OPTIMIZERS[name], 2)
    optimizer.param_groups[0]["lr"] = 0.03
    save(tmp_path, model=model, optimizer=optimizer)
    here, again = stepped(OPTIMIZERS[name], 1)
    before = [value.data_ptr() for value in state_tensors(again)]
    restore(tmp_path, model=here, optimizer=again)
    assert before == [value.data_ptr() for value in state_tensors(again)]
    assert 0.03 == again.param_groups[0]["lr"]
    for trained, by in ((model, optimizer), (here, again)):
        by.zero_grad()
        trained(torch.ones(1, 4)).sum().backward()
        by.step()
    assert_same(values_of(model), values_of(here))
    assert all(map(torch.equal, state_tensors(optimizer), state_tensors(again)))


def test_an_optimizer_that_has_not_stepped_gets_state_of_its_own(tmp_path: Path) -> None:
    """The usual case: a program that has just begun."""
    model, optimizer = stepped(OPTIMIZERS["adam"], 2)
    save(tmp_path, model=model, optimizer=optimizer)
    here = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    again = torch.optim.Adam(here.parameters())
    assert 4 == len(targets_of(tmp_path, model=here, optimizer=again))
    restore(tmp_path, model=here, optimizer=again)
    assert all(map(torch.equal, state_tensors(optimizer), state_tensors(again)))


def test_who_asks_to_be_told_of_a_loaded_state_is_told(tmp_path: Path) -> None:
    """A hook sees the whole saved state, wherever its bytes lie."""
    model, optimizer = stepped(OPTIMIZERS["adam"], 2)
    save(tmp_path, model=model, optimizer=optimizer)
    here, again = stepped(OPTIMIZERS["adam"], 1)
    seen: list[int] = []
    again.register_load_state_dict_pre_hook(lambda _, state: seen.append(len(state["state"])))
    restore(tmp_path, model=here, optimizer=again)
    assert [4] == seen
    assert all(map(torch.equal, state_tensors(optimizer), state_tensors(again)))


def test_two_parameters_with_one_state_are_not_filled_twice(tmp_path: Path) -> None:
    """Saved apart, one here: reading both into one place would mix them."""
    model, optimizer = stepped(OPTIMIZERS["momentum"], 2)
    save(tmp_path, model=model, optimizer=optimizer)
    here, again = stepped(OPTIMIZERS["momentum"], 1)
    first, second = (again.state[here[n].bias] for n in (0, 1))
    second["momentum_buffer"] = first["momentum_buffer"][:2]
    assert not any(
        "optimizer" in name for name in targets_of(tmp_path, model=here, optimizer=again)
    )
    restore(tmp_path, model=here, optimizer=again)
    assert all(map(torch.equal, state_tensors(optimizer), state_tensors(again)))


# ── parts with code of their own ──────────────────────────────────────────────────────────
def test_a_part_that_loads_itself_is_asked(tmp_path: Path) -> None:
    """Its memory is its own business; the others' is filled in place."""
    saved = module_of(nn.Linear(2, 3), LoadsItself())
    save(tmp_path, model=saved)
    here = module_of(nn.Linear(2, 3), LoadsItself())
    assert {"tracked.model.0.weight", "tracked.model.0.bias"} == set(
        targets_of(tmp_path, model=here)
    )
    restore(tmp_path, model=here)
    assert_same(values_of(saved), values_of(here))
    assert 1 == here[1].asked  # type: ignore[index] # a Sequential


def test_a_part_with_a_pre_hook_is_asked(tmp_path: Path) -> None:
    """It may rename, cast or move what it is given."""
    saved = module_of(nn.Linear(2, 3), nn.Linear(3, 1))
    save(tmp_path, model=saved)
    here, seen = module_of(nn.Linear(2, 3), nn.Linear(3, 1)), []
    here[1].register_load_state_dict_pre_hook(  # type: ignore[index, operator] # a Sequential
        lambda module, state, prefix, *rest: seen.append(prefix)
    )
    targets = targets_of(tmp_path, model=here)
    assert {"tracked.model.0.weight", "tracked.model.0.bias"} == set(targets)
    restore(tmp_path, model=here)
    assert ["1."] == seen
    assert_same(values_of(saved), values_of(here))


def test_a_part_without_values_is_asked_too(tmp_path: Path) -> None:
    """What its hook is for is its own affair."""
    save(tmp_path, model=module_of(nn.Linear(2, 3), nn.ReLU()))
    here, seen = module_of(nn.Linear(2, 3), nn.ReLU()), []
    here[1].register_load_state_dict_pre_hook(  # type: ignore[index, operator] # a Sequential
        lambda module, state, prefix, *rest: seen.append(prefix)
    )
    restore(tmp_path, model=here)
    assert ["1."] == seen


def test_a_pre_hook_of_the_whole_leaves_nothing_to_us(tmp_path: Path) -> None:
    """All keys are below it."""
    saved = nn.Linear(2, 3)
    save(tmp_path, model=saved)
    here, seen = nn.Linear(2, 3), []
    here.register_load_state_dict_pre_hook(lambda *_: seen.append(1))
    assert {} == targets_of(tmp_path, model=here)
    restore(tmp_path, model=here)
    assert ([1], True) == (seen, torch.equal(saved.weight, here.weight))


def test_post_hooks_are_called(tmp_path: Path) -> None:
    """Once, when the values are there; with nothing missing and nothing unexpected."""
    saved = module_of(nn.Linear(2, 3), nn.Linear(3, 1))
    save(tmp_path, model=saved)
    here, seen = module_of(nn.Linear(2, 3), nn.Linear(3, 1)), []

    def hook(module: nn.Module, incompatible: Any) -> None:
        seen.append((torch.equal(saved[1].weight, here[1].weight), *map(list, incompatible)))  # type: ignore[index] # a Sequential

    here[1].register_load_state_dict_post_hook(hook)  # type: ignore[index, operator] # a Sequential
    restore(tmp_path, model=here)
    assert [(True, [], [])] == seen
    assert_same(values_of(saved), values_of(here))


class ExtraState(nn.Module):
    """Keeps more than tensors, by torch's own protocol."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.extra, self.given = extra, 0

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.given += 1
        self.extra = state


@pytest.mark.parametrize(
    "extra",
    [
        {"n": 5},
        torch.arange(3.0),
    ],
)
def test_extra_state_is_handed_over(tmp_path: Path, extra: Any) -> None:
    """By set_extra_state(), whatever it is: the module may make something of it."""
    saved = ExtraState(copy.deepcopy(extra))
    save(tmp_path, model=saved)
    here = ExtraState({"n": 0} if isinstance(extra, dict) else torch.zeros(3))
    restore(tmp_path, model=here)
    assert 1 == here.given
    assert str(saved.extra) == str(here.extra)
    assert torch.equal(saved.weight, here.weight)


# ── in doubt ──────────────────────────────────────────────────────────────────────────────
class ExtraKey(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("more", torch.ones(2))


class OwnLoad(nn.Linear):
    """A module with a load_state_dict() of its own is none of our business."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict(*args, **kwargs)


def sgd(model: nn.Module, groups: int = 1) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    split = [{"params": parameters[n::groups]} for n in range(groups)]
    return torch.optim.SGD(split, lr=0.1)


def doubtful() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """(what was saved, what is tracked now), which do not fit."""
    linear = nn.Linear(4, 3)
    plain = {"model": nn.Linear(4, 3)}
    other = nn.Linear(4, 3)
    return {
        "a key more in the checkpoint": ({"model": ExtraKey()}, plain),
        "a key more here": (plain, {"model": ExtraKey()}),
        "another shape": ({"model": nn.Linear(3, 4)}, plain),
        "another shape of one": ({"model": nn.Linear(4, 3, bias=False)}, plain),
        "another dtype": ({"model": nn.Linear(4, 3).double()}, plain),
        "another dtype of the same size": ({"model": nn.Linear(4, 3).half()}, {
            "model": nn.Linear(4, 3).bfloat16(),
        }),
        "a second model that does not fit": (
            {"model": nn.Linear(4, 3), "other": nn.Linear(2, 2)},
            {"model": nn.Linear(4, 3), "other": nn.Linear(2, 3)},
        ),
        "one object more here": (plain, {"model": nn.Linear(4, 3), "other": nn.Linear(2, 2)}),
        "one object more in the checkpoint": (
            {"model": nn.Linear(4, 3), "other": nn.Linear(2, 2)},
            plain,
        ),
        "an optimizer of more parameters": (
            {"model": linear, "optimizer": sgd(linear)},
            {"model": other, "optimizer": torch.optim.SGD([other.weight], lr=0.1)},
        ),
        "an optimizer of more groups": (
            {"model": linear, "optimizer": sgd(linear, 2)},
            {"model": other, "optimizer": sgd(other)},
        ),
        "a tensor of another shape": (
            {"model": linear, "tensor": torch.ones(3)},
            {"model": other, "tensor": torch.ones(4)},
        ),
        "an array of another dtype": (
            {"model": linear, "array": np.ones(3)},
            {"model": other, "array": np.ones(3, "f4")},
        ),
        "a tensor in a container": (
            {"model": linear, "box": {"deep": [torch.ones(3)]}},
            {"model": other, "box": {"deep": [torch.ones(4)]}},
        ),
        "another kind of container": (
            {"model": linear, "box": {"a": 1}},
            {"model": other, "box": [1]},
        ),
        "a module in a container": (
            {"model": linear, "box": [nn.Linear(2, 2)]},
            {"model": other, "box": [nn.Linear(2, 3)]},
        ),
        "an optimizer where a module was": (
            {"model": linear, "optimizer": nn.Linear(2, 2)},
            {"model": other, "optimizer": sgd(other)},
        ),
        "a module where a number was": ({"model": linear, "other": {"n": 1}}, {
            "model": other, "other": nn.Linear(2, 2),
        }),
    }  # fmt: skip


@pytest.mark.parametrize("case", list(doubtful()))
def test_nothing_is_changed_before_a_mismatch_is_told(tmp_path: Path, case: str) -> None:
    """All differences at once, and the program's objects as they were."""
    saved, here = doubtful()[case]
    randomized(saved["model"], 1)
    save(tmp_path, **saved)
    model = randomized(here["model"], 2)
    before = values_of(model)
    rest = {name: str(value) for name, value in here.items() if name in ("tensor", "box", "array")}
    assert {} == targets_of(tmp_path, **here)
    with pytest.raises(RestoreMismatch):
        restore(tmp_path, **here)
    assert_same(before, values_of(model))
    assert rest == {name: str(here[name]) for name in rest}


class Marked(nn.Parameter):
    """A parameter of a class of its own, as quantizing libraries have them."""


def test_a_parameter_of_another_class_is_saved_as_its_tensor(tmp_path: Path) -> None:
    """state_dict() gives a plain tensor of it, and so it was saved before."""

    def make() -> nn.Module:
        module = nn.Linear(3, 2)
        module.weight = Marked(torch.randn(2, 3))
        return module

    saved, here = make(), make()
    save(tmp_path, model=saved)
    restore(tmp_path, model=here)
    assert_same(values_of(saved), values_of(here))
    assert Marked is type(here.weight)


class Impostor:
    """Has groups as an optimizer has, and no state."""

    def state_dict(self) -> dict[str, Any]:
        return {"param_groups": [{"params": [0, 1]}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


def test_nothing_is_changed_for_an_optimizer_without_state(tmp_path: Path) -> None:
    """What registry.restore() will refuse has to be in doubt before anything is read."""
    save(tmp_path, model=randomized(nn.Linear(4, 3), 1), optimizer=Impostor())
    here = randomized(nn.Linear(4, 3), 2)
    before = values_of(here)
    with pytest.raises(RestoreMismatch):
        restore(tmp_path, model=here, optimizer=sgd(here))
    assert_same(before, values_of(here))


FITTING: dict[str, Callable[[], dict[str, Any]]] = {
    "a container": lambda: {"model": nn.Linear(4, 3), "box": {"t": torch.ones(3)}},
    "a tensor": lambda: {"model": nn.Linear(4, 3), "tensor": torch.ones(3)},
    "an array": lambda: {"model": nn.Linear(4, 3), "array": np.ones(3)},
    "a generator": lambda: {"model": nn.Linear(4, 3), "generator": torch.Generator()},
}


@pytest.mark.parametrize("case", FITTING)
def test_what_cannot_be_compared_beforehand_is_a_doubt(tmp_path: Path, case: str) -> None:
    """Beside a container all is read into memory of its own, and fits in the end."""
    saved = FITTING[case]()
    randomized(saved["model"], 1)
    save(tmp_path, **saved)
    here = FITTING[case]()
    assert {} == targets_of(tmp_path, **here)
    restore(tmp_path, **here)
    assert_same(values_of(saved["model"]), values_of(here["model"]))


def test_a_module_that_loads_by_itself_gets_no_targets(tmp_path: Path) -> None:
    """Its load_state_dict() is called with tensors of their own."""
    saved = OwnLoad()
    save(tmp_path, model=saved)
    here = OwnLoad()
    assert {} == targets_of(tmp_path, model=here)
    restore(tmp_path, model=here)
    assert_same(values_of(saved), values_of(here))


@pytest.mark.parametrize(
    "node",
    [None, [], 5, {}, {"model": None}, {"model": {}}, {"model": {"$ordereddict": {}}},
     {"model": {"$ordereddict": {"items": [1]}}}, {"model": {"$ordereddict": {"items": [[1]]}}},
     {"model": {"$ordereddict": {"items": [["weight", 1], ["bias", {}]]}}},
     {"model": {"$ordereddict": {"items": [["weight", {"$tensor": 1}], ["bias", 1]]}}}],
)  # fmt: skip
def test_a_tree_that_makes_no_sense_is_a_doubt(node: Any) -> None:
    """No crash, and no target: decode() says what is wrong with it."""
    assert {} == inplace.targets({"model": nn.Linear(2, 2)}, node)


def test_other_versions_of_a_module_are_a_doubt() -> None:
    """Its code may make something else of an old state."""
    module = nn.BatchNorm1d(3)
    state = module.state_dict()
    good = encode({"model": state}).tree
    assert inplace.targets({"model": module}, good)
    vars(state)["_metadata"][""]["version"] = 1
    assert {} == inplace.targets({"model": module}, encode({"model": state}).tree)
    del vars(state)["_metadata"]
    assert {} == inplace.targets({"model": module}, encode({"model": state}).tree)


def test_the_order_of_keys_counts() -> None:
    """Parts that were declared in another order are compared by torch, not by us."""
    module = nn.Linear(2, 2)
    state = module.state_dict()
    state.move_to_end("weight")
    assert {} == inplace.targets({"model": module}, encode({"model": state}).tree)


def test_without_strictness_nothing_is_read_in_place(tmp_path: Path) -> None:
    """A part that is missing keeps what it has; a half-read model would not."""
    saved = randomized(nn.Linear(4, 3), 1)
    save(tmp_path, model=saved, other=nn.Linear(2, 2))
    here, asked = randomized(nn.Linear(4, 3), 2), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inplace, "targets", lambda *_: asked.append(1) or {})
        with pytest.warns(RuntimeWarning), Checkpointer(tmp_path, strict_restore=False, model=here):
            pass
    assert [] == asked
    assert_same(values_of(saved), values_of(here))
