"""The registry: what may be tracked, capture, and restore in place."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import collections
import copy
import enum
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from hpc_ckpt.errors import RestoreMismatch, UnsupportedState
from hpc_ckpt.state.registry import Registry
from hpc_ckpt.state.tree import copy_into, decode, encode


def saved(registry: Registry) -> Any:
    """The captured state after a way through bytes and JSON."""
    encoded = encode(registry.capture())
    data = {}
    for leaf in encoded.leaves:
        data[leaf.name] = memoryview(bytearray(leaf.nbytes))
        copy_into(data[leaf.name], leaf.value)
    data |= {alias: data[name] for alias, name in encoded.aliases.items()}
    tree = json.loads(json.dumps(encoded.tree, allow_nan=False))
    return decode(tree, data.__getitem__, like=registry.templates())


class Meter:
    """A user's own stateful object."""

    def __init__(self) -> None:
        self.total = 0

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.total = state["total"]


class Phase(enum.Enum):
    WARM = 1
    COLD = 2


def net(width: int = 3) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.BatchNorm1d(width))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    parameter = next(model.parameters())
    for step in range(steps):
        x = torch.linspace(-1, 1, 8).reshape(4, 2).to(parameter.dtype) + step

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).float().square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]  # torch wants float


# ── registration ──────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("value", [3, "text", None, (1, 2), {1}, object(), Meter])
def test_what_cannot_be_restored_in_place_is_refused_by_name(value: object) -> None:
    """A tracked object is the program's own; a number cannot be changed under it."""
    with pytest.raises(UnsupportedState, match="'thing'"):
        Registry({"thing": value})


@pytest.mark.parametrize("name", ["", "a.b", "1a", "a b", "class"])
def test_names_are_identifiers(name: str) -> None:
    """They become the first part of leaf names and arguments of Checkpointer()."""
    with pytest.raises(UnsupportedState, match="identifier"):
        Registry({name: {}})


def test_an_unrepresentable_object_shows_at_registration() -> None:
    """Before the first hour of work, naming the key."""
    with pytest.raises(UnsupportedState, match=r"'run\.a\.1'.*cannot be saved without pickle"):
        Registry({"run": {"a": [1, object()]}})


class Broken(Meter):
    def state_dict(self) -> dict[str, int]:
        raise RuntimeError("call consolidate first")


def test_a_failing_state_dict_names_the_object() -> None:
    """The user sees which object and why."""
    with pytest.raises(UnsupportedState, match=r"'parts\.0'.*RuntimeError: call consolidate"):
        Registry({"parts": [Broken()]})


def test_a_cycle_through_tracked_containers_is_refused() -> None:
    """Also where the walk looks for stateful objects."""
    inner: list[object] = [Meter()]
    inner.append(inner)
    with pytest.raises(UnsupportedState, match=r"'a\.1'.*contains itself"):
        Registry({"a": inner})


@pytest.mark.parametrize(
    "value",
    [
        np.broadcast_to(np.arange(3), (2, 3)),
        torch.ones(1).expand(3),
        [{"x": torch.ones(2, 1).expand(2, 3)}],
    ],
    ids=["array", "tensor", "nested"],
)
def test_memory_that_cannot_be_written_is_refused(value: object) -> None:
    """It could be saved, but never restored in place."""
    with pytest.raises(UnsupportedState, match="in place"):
        Registry({"a": value})


# ── capture ───────────────────────────────────────────────────────────────────────────────
def test_capture_copies_nothing() -> None:
    """References to live memory and to plain containers."""
    model, plain, array = net(), {"a": [1]}, np.ones(2)
    state = Registry({"model": model, "plain": plain, "array": array}).capture()
    assert model[0].weight.data_ptr() == state["model"]["0.weight"].data_ptr()
    assert plain is state["plain"]
    assert array is state["array"]


def test_capture_takes_the_state_of_objects_inside_containers() -> None:
    """Containers are walked; their types and the original stay."""
    meter = Meter()
    tracked = {"all": collections.OrderedDict(m=[meter, (meter, 1)], x=2)}
    state = Registry(tracked).capture()["all"]
    assert collections.OrderedDict(m=[{"total": 0}, ({"total": 0}, 1)], x=2) == state
    assert meter is tracked["all"]["m"][0]  # type: ignore[index]  # a list


# ── restore in place ──────────────────────────────────────────────────────────────────────
def fresh() -> dict[str, Any]:
    """A program's tracked objects at the start."""
    return {
        "tensor": torch.zeros(2),
        "array": np.zeros((2, 2), order="F"),
        "meter": Meter(),
        "generator": torch.Generator(),
        "run": {
            "meters": [Meter(), Meter()],
            "tensor": torch.zeros(3, dtype=torch.bfloat16),
            "deep": {"array": np.zeros(1), "list": [1], "set": {1}, "raw": bytearray(b"a")},
            "pair": (torch.zeros(1), 1),
            "step": 0,
            "phase": Phase.WARM,
            "counts": collections.Counter(a=1),
            "gone": 1,
        },
    }


def advance(tracked: dict[str, Any]) -> None:
    """What the program does to them."""
    tracked["tensor"].fill_(1)
    tracked["array"][:] = [[1, 2], [3, 4]]
    tracked["meter"].total = 5
    tracked["generator"].manual_seed(3)
    run, deep = tracked["run"], tracked["run"]["deep"]
    run["meters"][1].total = 6
    run["tensor"].fill_(2)
    deep["array"][0] = 7
    deep["list"][:] = [3, 2, 1]
    deep["set"].add(2)
    deep["raw"] += b"bc"
    run["pair"][0].fill_(4)
    run |= {"step": 9, "phase": Phase.COLD, "new": [torch.ones(1)]}
    run["counts"]["a"] = 10
    del run["gone"]


@pytest.mark.filterwarnings("ignore:.*not in the checkpoint, and removed:RuntimeWarning")
def test_tracked_memory_and_objects_are_restored_in_place() -> None:
    """Whoever holds a reference sees the restored value."""
    first, second = fresh(), fresh()
    advance(first)
    held = dict(second)
    assert [] == Registry(second).restore(saved(Registry(first)), strict=True)
    assert ([1, 1], 5) == (held["tensor"].tolist(), held["meter"].total)
    assert [[1, 2], [3, 4]] == held["array"].tolist()
    assert torch.equal(
        torch.rand(3, generator=first["generator"]), torch.rand(3, generator=held["generator"])
    )


def test_what_containers_hold_is_restored_in_place() -> None:
    """At any depth; plain values are replaced, keys and their order become the saved ones."""
    first, second = fresh(), fresh()
    advance(first)
    whole = second["run"]
    held, deep = dict(whole), dict(whole["deep"])
    with pytest.warns(RuntimeWarning, match="run: not in the checkpoint, and removed"):
        assert [] == Registry(second).restore(saved(Registry(first)), strict=True)
    assert whole is second["run"]
    assert list(first["run"]) == list(whole)
    assert (9, Phase.COLD, 10) == (whole["step"], whole["phase"], held["counts"]["a"])
    assert ([0, 6], [2, 2, 2]) == ([m.total for m in held["meters"]], held["tensor"].tolist())
    assert ([7], [3, 2, 1]) == (deep["array"].tolist(), deep["list"])
    assert ({1, 2}, b"abc", 4) == (deep["set"], deep["raw"], held["pair"][0].item())
    for key in ("meters", "tensor", "deep", "pair", "counts"):
        assert held[key] is whole[key]
    assert torch.equal(torch.ones(1), whole["new"][0])


def test_lists_take_the_saved_length() -> None:
    """A replay buffer grows and shrinks; what is there is filled in place."""
    short, long = [torch.zeros(1)], [torch.ones(1), torch.ones(1) * 2]
    first = short[0]
    Registry({"a": short}).restore(saved(Registry({"a": long})), strict=True)
    assert [1, 2] == [item.item() for item in short]
    assert first is short[0]
    Registry({"a": long}).restore({"a": [torch.zeros(1)]}, strict=True)
    assert [0] == [item.item() for item in long]


def test_a_shared_list_is_one_list_again() -> None:
    """Sharing survives capture, the checkpoint and restore."""
    shared = [1]
    state = saved(Registry({"a": {"x": shared, "y": shared, "m": Meter()}}))
    target: dict[str, Any] = {"m": Meter()}
    Registry({"a": target}).restore({"a": state["a"]}, strict=True)
    assert target["x"] is target["y"]


def test_a_parameter_is_restored_without_a_graph() -> None:
    """In place under no_grad: it stays a leaf that requires gradients."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    Registry({"p": parameter}).restore({"p": torch.ones(2)}, strict=True)
    assert (True, True, [1, 1]) == (
        parameter.is_leaf, parameter.requires_grad, parameter.tolist(),
    )  # fmt: skip


# ── mismatch ──────────────────────────────────────────────────────────────────────────────
def mismatched() -> tuple[dict[str, Any], dict[str, Any]]:
    here = {
        "model": net(4),
        "optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]),
        "tensor": torch.zeros(2),
        "array": np.zeros(2, "f4"),
        "inner": {"m": Meter(), "t": torch.zeros(1), "plain": 1, "list": [Meter(), Meter()]},
        "meter": Meter(),
    }
    there = {
        "model": net(3).state_dict() | {"extra": torch.ones(1)},
        "optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))] * 1).state_dict(),
        "tensor": torch.ones(3),
        "array": np.ones(2, "f8"),
        "inner": {"t": torch.ones(1, dtype=torch.int32), "plain": 2, "list": [{"total": 5}]},
        "old": 1,
    }
    there["model"].pop("0.bias")
    there["optimizer"]["param_groups"][0]["params"] = [0, 1]
    return here, there


def test_a_mismatch_lists_every_difference_and_changes_nothing() -> None:
    """One error for all of them, so that one correction mends all."""
    here, there = mismatched()
    before = copy.deepcopy(here["model"].state_dict())
    with pytest.raises(RestoreMismatch) as caught:
        Registry(here).restore(there, strict=True, path=Path("run/x"))
    assert [
        "meter: not in the checkpoint",
        "old: in the checkpoint, but not tracked",
        "model.0.bias: not in the checkpoint",
        "model.extra: in the checkpoint, but not in the module",
        "model.0.weight: shape (3, 2) in the checkpoint, (4, 2) here",
        "model.1.weight: shape (3,) in the checkpoint, (4,) here",
        "model.1.bias: shape (3,) in the checkpoint, (4,) here",
        "model.1.running_mean: shape (3,) in the checkpoint, (4,) here",
        "model.1.running_var: shape (3,) in the checkpoint, (4,) here",
        "optimizer.param_groups.0: 2 parameters in the checkpoint, 1 here",
        "tensor: shape (3,) in the checkpoint, (2,) here",
        "array: dtype float64 in the checkpoint, float32 here",
        "inner.m: not in the checkpoint",
        "inner.t: dtype torch.int32 in the checkpoint, torch.float32 here",
        "inner.list.1: not in the checkpoint",
    ] == list(caught.value.differences)
    assert str(caught.value).startswith("run/x does not fit")
    assert all(torch.equal(before[k], v) for k, v in here["model"].state_dict().items())
    assert (0, 1) == (here["tensor"].sum(), here["inner"]["plain"])


def test_not_strict_loads_what_fits_and_says_what_did_not() -> None:
    """The same list, as warnings; objects that the checkpoint lacks stay."""
    here, there = mismatched()
    there["model"]["1.num_batches_tracked"] = torch.tensor(7)
    meters = here["inner"]["list"]
    warnings = Registry(here).restore(there, strict=False)
    assert 15 == len(warnings)
    assert 7 == here["model"][1].num_batches_tracked
    assert (4, 2) == tuple(here["model"][0].weight.shape)
    assert [0, 0] == here["tensor"].tolist()
    assert [1, 1] == here["array"].tolist()
    assert (2, 1.0) == (here["inner"]["plain"], here["inner"]["t"].item())
    assert ([5, 0], Meter) == ([m.total for m in meters], type(here["inner"]["m"]))


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (torch.ones(1), 1.0),
        (np.ones(1), torch.ones(1)),
        ({}, []),
        ([], {}),
        (torch.nn.Linear(1, 1), [1]),
        (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), {"a": 1}),
        (torch.Generator(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_another_kind_of_thing_is_a_mismatch(here: object, there: object) -> None:
    """A tracked object cannot be replaced by something else."""
    registry = Registry({"a": here})
    with pytest.raises(RestoreMismatch, match="a: "):
        registry.restore({"a": there}, strict=True)
    assert 1 == len(registry.restore({"a": there}, strict=False))


def test_a_plain_value_inside_a_container_may_change_its_kind() -> None:
    """best = None at the start, a tensor later, or the reverse."""
    target = {"best": None, "last": torch.ones(1), "log": [1]}
    Registry({"a": target}).restore(
        {"a": {"best": torch.ones(2), "last": 3.0, "log": None}}, strict=True
    )
    assert ([1, 1], 3.0, None) == (
        target["best"].tolist(), target["last"], target["log"],  # type: ignore[union-attr]  # now a tensor
    )  # fmt: skip


def test_a_module_of_another_dtype_is_a_mismatch() -> None:
    """torch would cast in silence; not strict casts and says so."""
    state = torch.nn.Linear(1, 1).state_dict()
    target = torch.nn.Linear(1, 1).to(torch.bfloat16)
    with pytest.raises(RestoreMismatch, match=r"m\.weight: dtype torch.float32"):
        Registry({"m": target}).restore({"m": state}, strict=True)
    assert 2 == len(Registry({"m": target}).restore({"m": state}, strict=False))
    assert torch.equal(state["weight"].to(torch.bfloat16), target.weight.detach())


class Resizing(torch.nn.Module):
    """Like quantisation observers: takes whatever shape was saved."""

    seen: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(size))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.seen = torch.empty_like(state_dict[prefix + "seen"])
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_a_part_that_loads_itself_is_not_judged_beforehand() -> None:
    """Its shapes may change on load; the rest of the module is judged."""
    state = torch.nn.Sequential(Resizing(3), torch.nn.Linear(1, 1)).state_dict()
    target = torch.nn.Sequential(Resizing(0), torch.nn.Linear(1, 1))
    Registry({"m": target}).restore({"m": state}, strict=True)
    assert (3,) == tuple(target[0].seen.shape)
    with pytest.raises(RestoreMismatch, match=r"m\.1\.weight"):
        Registry({"m": torch.nn.Sequential(Resizing(0), torch.nn.Linear(2, 1))}).restore(
            {"m": state}, strict=True
        )


def test_an_object_that_refuses_its_state_is_named() -> None:
    """Its own error, under its key, and the others are restored. Whoever asks for what fits does
    not ask for an object that is loaded by half."""
    registry = Registry({"bad": Meter(), "good": Meter()})
    state = {"bad": {"wrong": 1}, "good": {"total": 4}}
    for strict in (True, False):
        with pytest.raises(RestoreMismatch, match=r"bad: load_state_dict\(\) raised KeyError: 'to"):
            registry.restore(state, strict=strict)
    assert 4 == registry.tracked["good"].total  # type: ignore[attr-defined]  # a Meter


def test_an_array_that_cannot_be_cast_is_passed_over_and_said() -> None:
    """A difference like that of a tensor; without strictness it stays as it is."""
    array = np.zeros(2, dtype=np.int64)
    (said,) = Registry({"a": array}).restore({"a": np.ones(2)}, strict=False)
    assert "a: dtype float64 in the checkpoint, int64 here" == said
    assert [0, 0] == array.tolist()


# ── optimizers and schedulers ─────────────────────────────────────────────────────────────
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, history_size=3),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_goes_on_bit_for_bit(kind: str) -> None:
    """Three steps, save, restore elsewhere, three steps: as six."""
    torch.manual_seed(0)
    model = net()
    twin = copy.deepcopy(model)
    optimizer, other = OPTIMIZERS[kind](model.parameters()), OPTIMIZERS[kind](twin.parameters())
    train(model, optimizer)
    state = saved(Registry({"model": model, "optimizer": optimizer}))
    Registry({"model": twin, "optimizer": other}).restore(state, strict=True)
    train(model, optimizer)
    train(twin, other)
    expected, actual = model.state_dict(), twin.state_dict()
    assert all(torch.equal(expected[key], actual[key]) for key in expected)


def test_float32_state_of_bfloat16_parameters_stays_float32() -> None:
    """Optimizer.load_state_dict() alone would round it to bfloat16."""
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    moments = {"exp_avg": torch.full((3,), 0.1), "exp_avg_sq": torch.full((3,), 0.2)}
    nested = {"parts": [torch.full((3,), 0.3), {"x": torch.full((1,), 0.7)}], "mode": "slow"}
    optimizer.state[parameter] = {"step": torch.tensor(5.0), **moments, **nested}
    state = saved(Registry({"o": optimizer}))

    other = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))], lr=0.1)
    Registry({"o": other}).restore(state, strict=True)

    [back] = other.state.values()
    for key, value in moments.items():
        assert (torch.float32, True) == (back[key].dtype, torch.equal(value, back[key]))
    assert torch.equal(nested["parts"][0], back["parts"][0])  # type: ignore[arg-type]  # a tensor
    assert torch.equal(torch.full((1,), 0.7), back["parts"][1]["x"])
    assert ("slow", 5) == (back["mode"], back["step"].item())
    assert back["exp_avg"] is not state["o"]["state"][0]["exp_avg"]


class OwnForm(torch.optim.SGD):
    """An optimizer with a state of its own form."""

    def state_dict(self) -> dict[str, Any]:
        return {"mine": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


def test_an_optimizer_with_its_own_form_of_state_is_its_own_judge() -> None:
    """Distributed and 8-bit ones have such forms."""
    optimizer = OwnForm([torch.nn.Parameter(torch.ones(1))])
    Registry({"o": optimizer}).restore({"o": {"mine": 2}}, strict=True)
    assert {"mine": 2} == optimizer.loaded


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 1, 3]),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=10),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.5),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_goes_on(kind: str) -> None:
    """int keys, inf and Counter survive; the next rates are the same."""

    def make() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[kind](optimizer)

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any) -> list[float]:
        found = []
        for metric in (1.0, 2.0, 3.0):
            optimizer.step()
            scheduler.step(*[metric] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    optimizer, scheduler = make()
    rates(optimizer, scheduler)
    state = saved(Registry({"o": optimizer, "s": scheduler}))
    other, twin = make()
    Registry({"o": other, "s": twin}).restore(state, strict=True)
    assert scheduler.state_dict() == twin.state_dict()
    assert rates(optimizer, scheduler) == rates(other, twin)


class Wrapper:
    """As accelerate and mixed-precision wrappers do it."""

    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer

    def step(self) -> None: ...
    def zero_grad(self) -> None: ...
    def state_dict(self) -> Any:
        return self.optimizer.state_dict()  # type: ignore[attr-defined]  # an optimizer

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)  # type: ignore[attr-defined]  # an optimizer


def test_optimizers_are_found_once_inside_containers_and_wrappers() -> None:
    """A scheduler's optimizer is not tracked by tracking the scheduler."""
    one, two, three, four = (
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(4)
    )
    registry = Registry(
        {
            "model": net(),
            "one": one,
            "more": {"a": [two, one], "b": {"c": Wrapper(three)}},
            "scheduler": lr_scheduler.StepLR(four, 1),
            "plain": {"x": 1},
        }
    )
    assert [one, two, three] == registry.optimizers()


def test_a_wrapped_optimizer_keeps_its_dtypes_too() -> None:
    """The wrapper loads, the inner state is put back exactly."""
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    optimizer.state[parameter] = {"momentum_buffer": torch.full((1,), 0.1)}
    registry = Registry({"o": Wrapper(optimizer)})
    registry.restore(saved(registry), strict=True)
    assert torch.float32 is optimizer.state[parameter]["momentum_buffer"].dtype


def test_tied_weights_stay_tied() -> None:
    """Stored once, restored into one parameter."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    encoded = encode(Registry({"model": model}).capture())
    assert {"model.1.weight": "model.0.weight"} == encoded.aliases
    state = saved(Registry({"model": model}))
    with torch.no_grad():
        model[0].weight.zero_()
    Registry({"model": model}).restore(state, strict=True)
    assert model[0].weight is model[1].weight
    assert torch.equal(state["model"]["1.weight"], model[0].weight.detach())
