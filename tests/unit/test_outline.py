"""The remembered form of a state: a match says exactly what a fresh encoding would have said."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import gc
import random
import re
import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from hpc_ckpt.errors import UnsupportedState
from hpc_ckpt.format.manifest import json_text
from hpc_ckpt.state import rng
from hpc_ckpt.state.leaves import Value, copy_into
from hpc_ckpt.state.outline import Match, Outline, outline_of
from hpc_ckpt.state.tree import encode
from hpc_ckpt.state.untree import MAX_DEPTH


# ── what is compared ──────────────────────────────────────────────────────────────────────
def bytes_of(value: Value, nbytes: int) -> bytes:
    target = bytearray(nbytes)
    copy_into(memoryview(target), value)
    return bytes(target)


def by_encoding(state: object) -> dict[str, Any]:
    """What a checkpoint of the state holds, from the encoder alone."""
    encoded = encode(state)
    return {
        "tree": json_text(encoded.tree),
        "aliases": encoded.aliases,
        "leaves": [
            (leaf.name, leaf.dtype, leaf.shape, bytes_of(leaf.value, leaf.nbytes))
            for leaf in encoded.leaves
        ],
    }


def by_outline(outline: Outline, found: Match) -> dict[str, Any]:
    """The same, from a remembered form."""
    stored = zip(outline.leaves, outline.stored, strict=True)
    return {
        "tree": outline.tree(found).text,
        "aliases": outline.aliases,
        "leaves": [
            (leaf.name, leaf.dtype, leaf.shape, bytes_of(found.values[number], leaf.nbytes))
            for leaf, number in stored
        ],
    }


def assert_faithful(outline: Outline, state: object) -> None:
    """The state is of this form, and nothing of it is lost or old."""
    found = outline.match(state)
    assert found is not None
    assert by_encoding(state) == by_outline(outline, found)
    assert list(map(address_of, found.values)) == found.addresses


def assert_never_wrong(outline: Outline, state: object) -> None:
    """No match, or exactly what encode() says; an error only where that has one too."""
    try:
        found = outline.match(state)
    except UnsupportedState as error:
        with pytest.raises(UnsupportedState, match=re.escape(str(error))):
            encode(state)
        return
    assert found is None or by_encoding(state) == by_outline(outline, found)


def address_of(value: Value) -> int:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    place: int = value.__array_interface__["data"][0]
    return place


def made_of(state: object) -> Outline:
    outline = outline_of(state)
    assert outline is not None
    return outline


# ── generated states ──────────────────────────────────────────────────────────────────────
# A recipe is made into a state again and again, each time with other numbers in other memory.
@dataclass(frozen=True)
class Plain:
    value: object


@dataclass(frozen=True)
class Memory:
    """A leaf; the same kind and number in one state is the same memory."""

    kind: str
    number: int
    parameter: bool = False


@dataclass(frozen=True)
class Box:
    """A container; metadata is what a module's state_dict() carries."""

    kind: str
    keys: tuple[object, ...]
    items: tuple[Any, ...]
    version: int | None = None


Recipe = Plain | Memory | Box


def _numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


TENSORS: dict[str, Callable[[int], torch.Tensor]] = {
    "float32": lambda seed: _numbers(seed, 2, 3),
    "turned shape": lambda seed: _numbers(seed, 3, 2),
    "transposed": lambda seed: _numbers(seed, 3, 2).t(),
    "every other": lambda seed: _numbers(seed, 2, 6)[:, ::2],
    "expanded": lambda seed: _numbers(seed, 1, 3).expand(2, 3),
    "bfloat16": lambda seed: _numbers(seed, 5).bfloat16(),
    "float64": lambda seed: _numbers(seed, 5).double(),
    "scalar": torch.tensor,
    "float scalar": lambda seed: _numbers(seed, 1)[0],
    "empty": lambda seed: torch.empty(0, 3),
    "flags": lambda seed: _numbers(seed, 5) > 0,
    "complex": lambda seed: torch.complex(_numbers(seed, 3), _numbers(seed + 1, 3)),
    "conjugated": lambda seed: torch.complex(_numbers(seed, 3), _numbers(seed + 1, 3)).conj(),
    "negated": lambda seed: torch.complex(_numbers(seed, 3), _numbers(seed + 1, 3)).conj().imag,
    "negative": lambda seed: torch._neg_view(_numbers(seed, 3)),
    "channels last": lambda seed: _numbers(seed, 2, 3, 2, 2).to(memory_format=torch.channels_last),
}
ARRAYS: dict[str, Callable[[int], np.ndarray[Any, Any]]] = {
    "array": lambda seed: np.random.default_rng(seed).standard_normal((2, 3)),
    "fortran": lambda seed: np.asfortranarray(np.random.default_rng(seed).standard_normal((2, 3))),
    "big endian": lambda seed: np.arange(seed, seed + 4, dtype=">i4"),
    "text": lambda seed: np.array([str(seed), "b"], dtype="<U12"),
    "fields": lambda seed: np.array([(seed, 2.0)], dtype=[("a", "<i4"), ("b", "<f8")]),
    "no items": lambda seed: np.zeros((0, 2)),
    "0-dim": lambda seed: np.array(float(seed)),
}
KINDS = tuple(TENSORS) + tuple(ARRAYS)
VERSIONS = {1: {"": {"version": 1}}, 2: {"": {"version": 2}}, 3: {"": {"version": 1}, "a": {}}}


class Kitchen:
    """Makes one state of a recipe."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._made: dict[tuple[str, int], Any] = {}

    def make(self, recipe: Recipe) -> Any:
        if isinstance(recipe, Plain):
            return recipe.value
        if isinstance(recipe, Memory):
            return self._memory(recipe)
        items = [self.make(item) for item in recipe.items]
        if recipe.kind == "list":
            return items
        if recipe.kind == "tuple":
            return tuple(items)
        mapping = OrderedDict() if recipe.kind == "ordered" else {}
        mapping.update(zip(recipe.keys, items, strict=True))
        if recipe.kind == "ordered" and recipe.version is not None:
            vars(mapping)["_metadata"] = OrderedDict(
                (name, dict(part)) for name, part in VERSIONS[recipe.version].items()
            )
        return mapping

    def _memory(self, recipe: Memory) -> Value:
        key = (recipe.kind, recipe.number)
        if key not in self._made:
            make: Callable[[int], Any] = {**TENSORS, **ARRAYS}[recipe.kind]
            self._made[key] = make(self._seed + 100 * recipe.number)
        value: Any = self._made[key]
        if isinstance(value, np.ndarray):
            return value.view()
        if recipe.parameter:
            return nn.Parameter(value.detach(), requires_grad=False)
        tensor: torch.Tensor = value.detach()
        return tensor


PLAINS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(),
    st.text('a$"\\é\ud800', max_size=3),
    st.binary(max_size=3),
    st.sampled_from([..., torch.float16, torch.Size([1]), np.float32(1), range(3), 2**2000]),
    st.builds(lambda numbers: [*numbers], st.lists(st.integers(0, 3), max_size=3)),
    st.builds(lambda numbers: {"a": numbers}, st.lists(st.integers(0, 3), max_size=2)),
    st.builds(set, st.lists(st.integers(0, 3), max_size=2)),
    st.builds(lambda n: defaultdict(list, {"n": n}), st.integers(0, 3)),
    st.builds(lambda n: Counter({"n": n}), st.integers(0, 3)),
)
LEAVES = st.builds(
    Memory, st.sampled_from(KINDS), st.sampled_from([0, 0, 1, 2]), st.booleans()
).map(lambda leaf: leaf if leaf.kind in TENSORS else replace(leaf, parameter=False))
KEYS = st.sampled_from(["a", "b", "$a", "0", 0, 1, True, False, 1.0, None, "\ud800"])


@st.composite
def boxes(draw: st.DrawFn, inner: st.SearchStrategy[Recipe]) -> Recipe:
    items = tuple(draw(st.lists(inner, min_size=1, max_size=4)))
    kind = draw(st.sampled_from(["dict", "dict", "ordered", "list", "tuple"]))
    keys = draw(st.lists(KEYS, min_size=len(items), max_size=len(items), unique=True))
    # An OrderedDict always has metadata here; those that get some later have a test below.
    return Box(kind, tuple(keys), items, draw(st.sampled_from([1, 2, 3])))


RECIPES = st.recursive(LEAVES | LEAVES | PLAINS.map(Plain), boxes, max_leaves=8)


def places(recipe: Recipe) -> Iterator[Recipe]:
    yield recipe
    if isinstance(recipe, Box):
        for item in recipe.items:
            yield from places(item)


def changed(recipe: Recipe, number: int, change: Callable[[Recipe], Recipe]) -> Recipe:
    """The recipe with another one at its number-th place."""
    count = iter(range(10**6))

    def walk(one: Recipe) -> Recipe:
        mine = next(count) == number
        if isinstance(one, Box):
            one = replace(one, items=tuple(walk(item) for item in one.items))
        return change(one) if mine else one

    return walk(recipe)


@st.composite
def neighbours(draw: st.DrawFn) -> tuple[Recipe, Recipe]:
    """Two recipes that differ in one or two places, or not at all."""
    first = second = draw(RECIPES)
    for _ in range(draw(st.integers(0, 2))):
        number = draw(st.integers(0, len(list(places(second))) - 1))
        second = changed(second, number, lambda one: draw(changes(one)))
    return first, second


def changes(one: Recipe) -> st.SearchStrategy[Recipe]:
    if isinstance(one, Plain):
        return PLAINS.map(Plain) | LEAVES
    if isinstance(one, Memory):
        others = [replace(one, number=number) for number in (0, 1, 2)]
        return st.sampled_from(others) | LEAVES | PLAINS.map(Plain)
    kinds = st.sampled_from(["dict", "ordered", "list", "tuple"])
    turned = replace(one, keys=one.keys[::-1], items=one.items[::-1])
    keys = st.lists(KEYS, min_size=len(one.items), max_size=len(one.items), unique=True)
    return st.one_of(
        st.builds(lambda kind: replace(one, kind=kind), kinds),
        st.builds(lambda new: replace(one, keys=tuple(new)), keys),
        st.builds(lambda version: replace(one, version=version), st.sampled_from([1, 2, 3])),
        st.sampled_from([turned, replace(one, items=one.items[:-1], keys=one.keys[:-1])]),
        RECIPES,
    )


EXAMPLES = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@EXAMPLES
@given(RECIPES)
def test_an_outline_says_what_the_encoder_says(recipe: Recipe) -> None:
    """Tree text, leaves and aliases, for the state it was made of and for the next one."""
    outline = outline_of(Kitchen(seed=1).make(recipe))
    if outline is not None:
        assert_faithful(outline, Kitchen(seed=1).make(recipe))
        assert_faithful(outline, Kitchen(seed=7).make(recipe))


@EXAMPLES
@given(neighbours())
def test_a_match_is_never_wrong(pair: tuple[Recipe, Recipe]) -> None:
    """For any two states: if the second fits the first one's form, it is what encode() says."""
    outline = outline_of(Kitchen(seed=1).make(pair[0]))
    if outline is None:
        return
    assert_never_wrong(outline, Kitchen(seed=7).make(pair[1]))


@EXAMPLES
@given(RECIPES, RECIPES)
def test_plain_values_are_taken_anew(recipe: Recipe, other: Recipe) -> None:
    """A number or a text may become any other plain value without a new form."""
    values = [one.value for one in places(other) if isinstance(one, Plain)] or [0]
    state = {"leaf": torch.ones(2), "rest": [Kitchen(1).make(recipe), "plain", {"k": 1}]}
    outline = outline_of(state)
    if outline is None:
        return
    for value in values:
        state["rest"][1], state["rest"][2] = value, {"k": value, "other": [value]}
        if type(value) in (list, dict, set, defaultdict, Counter):
            state["rest"][2] = {}  # else it would be shared
        assert_faithful(outline, state)


# ── states as programs have them ──────────────────────────────────────────────────────────
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(x)))  # type: ignore[no-any-return] # a tensor


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, foreach=False),
    "rmsprop": lambda params: torch.optim.RMSprop(params, centered=True),
    "lbfgs": lambda params: torch.optim.LBFGS(params, max_iter=3, history_size=4),
}


class Program:
    """A small training program and its whole state."""

    def __init__(self, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.model = Tied()
        self.optimizer = optimizer(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.log: dict[str, Any] = {"losses": [], "note": "a"}

    def step(self) -> None:
        def closure() -> float:
            self.optimizer.zero_grad()
            loss = self.model(torch.arange(5)).square().mean()
            loss.backward()
            return loss.item()

        self.optimizer.step(closure)
        self.scheduler.step()
        self.log["losses"].append(random.random())

    def state(self) -> dict[str, Any]:
        return {
            "tracked": {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "log": self.log,
            },
            "rng": rng.capture(),
            "progress": {"step": len(self.log["losses"]), "epoch": 0},
        }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_a_training_program_is_remembered(name: str) -> None:
    """From the second step on the form stays, for every optimizer whose state keeps its form."""
    program = Program(OPTIMIZERS[name])
    for _ in range(6):
        program.step()
    outline = made_of(program.state())
    for _ in range(3):
        assert_faithful(outline, program.state())
        program.step()
    assert {"tracked.model.head.weight": "tracked.model.embedding.weight"} == outline.aliases


def test_two_groups_of_parameters_are_remembered() -> None:
    """Decay for weights and none for biases is how most programs are written."""
    model = Tied()
    groups = [{"params": [model.embedding.weight]}, {"params": model.norm.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    model(torch.arange(5)).square().mean().backward()
    optimizer.step()
    outline = outline_of(optimizer.state_dict())
    assert outline is not None
    assert_faithful(outline, optimizer.state_dict())


def test_two_empty_tuples_are_remembered() -> None:
    """A tuple has no identity that a checkpoint could keep."""
    assert_faithful(made_of({"w": torch.ones(1), "a": (), "b": ()}), {
        "w": torch.ones(1), "a": (), "b": (),
    })  # fmt: skip


def test_new_memory_is_the_same_form() -> None:
    """p.data = … and load_state_dict(assign=True) move a parameter; its form stays."""
    model = nn.Linear(3, 2)
    outline = made_of(model.state_dict())
    model.weight.data = torch.full((2, 3), 7.0)
    assert_faithful(outline, model.state_dict())
    model.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, assign=True)
    assert_faithful(outline, model.state_dict())


def test_one_leaf_and_one_number_are_states_too() -> None:
    """The whole state may be a tensor, an array or a plain value."""
    for state in (torch.ones(2), np.ones(2), 5, None, {}, [], "text"):
        assert_faithful(made_of(state), state)
    assert made_of(5).match(torch.ones(2)) is None
    assert made_of(torch.ones(2)).match(5) is None


def test_the_tree_is_of_the_moment_of_the_match() -> None:
    """It is made later, when training has gone on."""
    state = {"w": torch.ones(1), "log": [1, 2], "n": 5, "deep": {"a": {"b": [1]}}}
    outline, before = made_of(state), by_encoding(state)["tree"]
    found = outline.match(state)
    assert found is not None
    state["log"].append(3)
    state["n"], state["deep"]["a"]["b"][0] = 6, 2
    assert before == outline.tree(found).text


def test_an_outline_keeps_nothing_alive() -> None:
    """Neither the leaves nor the containers of the state that it was made of."""
    array, tensor = np.ones(3), torch.ones(3)
    state = {"array": array, "tensor": tensor, "rest": [tensor], "text": "x"}
    outline = made_of(state)
    assert outline.match(state) is not None
    watched = [weakref.ref(array), weakref.ref(tensor)]
    del state, array, tensor
    gc.collect()
    assert [None, None] == [each() for each in watched]


def test_what_cannot_be_saved_is_refused_as_ever() -> None:
    """By the same error, when the form is found and when a later value has become so."""
    with pytest.raises(UnsupportedState):
        outline_of({"w": torch.ones(1), "bad": object()})
    outline = made_of({"w": torch.ones(1), "bad": 1})
    with pytest.raises(UnsupportedState):
        outline.match({"w": torch.ones(1), "bad": object()})


# ── changes of form ───────────────────────────────────────────────────────────────────────
def ordered(metadata: Any = None, **attributes: Any) -> OrderedDict[str, Any]:
    state: OrderedDict[str, Any] = OrderedDict(w=torch.ones(2))
    if metadata is not None:
        vars(state)["_metadata"] = metadata
    vars(state).update(attributes)
    return state


def three(first: Any, second: Any, third: Any = 0) -> dict[str, Any]:
    return {"a": first, "b": second, "c": third}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def compressed() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it a beta
        return torch.eye(2).to_sparse_csr()


def row(**changes: Any) -> dict[str, Any]:
    return {"m": torch.ones(2), "v": torch.ones(3), **changes}


def table(last: Any, key: Any = 1) -> dict[Any, Any]:
    """As an optimizer keeps its state: rows that are all alike, and one that may not be."""
    return {0: row(), key: last}


ONE, GRID, LINE = torch.ones(2), torch.ones(2, 2), np.ones(2)
TURN = torch.ones(2) * 1j
SHARED: dict[str, Any] = {"w": torch.ones(2)}
VOID: dict[str, Any] = {"w": torch.ones(0)}
PAIR = (torch.ones(2), 1)
ROW = row()
PART = {"version": 1}
NOON = datetime(2020, 1, 1, 12, tzinfo=timezone.utc)
LATER = NOON.astimezone(timezone(timedelta(hours=1)))

CHANGES: dict[str, tuple[Any, Any]] = {
    "order of keys": ({"a": ONE, "b": GRID}, {"b": GRID, "a": ONE}),
    "order of keys, one form": ({"a": ONE, "b": torch.ones(2)}, {"b": ONE, "a": torch.ones(2)}),
    "a key more": ({"a": ONE}, {"a": ONE, "b": GRID}),
    "a key less": ({"a": ONE, "b": GRID}, {"a": ONE}),
    "another key": ({"a": ONE}, {"b": ONE}),
    "key 1 to True": ({1: ONE}, {True: ONE}),
    "key 1 to True beside a number": ({1: ONE, "x": 1}, {True: ONE, "x": 1}),
    "key 1 to 1.0": ({1: ONE, 2: LINE}, {1.0: ONE, 2: LINE}),
    "key 0 to False": ({0: ONE}, {False: ONE}),
    "dtype": ({"a": ONE}, {"a": ONE.double()}),
    "dtype of the same size": ({"a": ONE}, {"a": ONE.int()}),
    "shape": ({"a": torch.ones(4)}, {"a": GRID}),
    "length": ({"a": torch.ones(2)}, {"a": torch.ones(3)}),
    "a dimension": ({"a": torch.ones(())}, {"a": torch.ones(1)}),
    "strides": ({"a": torch.ones(2, 3)}, {"a": torch.ones(3, 2).t()}),
    "channels last": (
        {"a": torch.ones(2, 3, 2, 2)},
        {"a": torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last)},
    ),
    "expanded": ({"a": GRID}, {"a": torch.ones(1, 2).expand(2, 2)}),
    "conjugated": ({"a": TURN}, {"a": TURN.conj()}),
    "negated": ({"a": TURN.imag}, {"a": TURN.conj().imag}),
    "negative": ({"a": ONE}, {"a": torch._neg_view(torch.ones(2))}),
    "a tie made": (three(torch.ones(2), torch.ones(2)), three(ONE, ONE.detach())),
    "a tie broken": (three(ONE, ONE.detach()), three(torch.ones(2), torch.ones(2))),
    "other ties": (three(ONE, ONE, torch.ones(2)), three(ONE, torch.ones(2), ONE)),
    "a tie of arrays made": (three(np.ones(2), np.ones(2)), three(LINE, LINE[:])),
    "a tie of arrays broken": (three(LINE, LINE[:]), three(np.ones(2), np.ones(2))),
    "other ties of arrays": (three(LINE, LINE, np.ones(2)), three(LINE, np.ones(2), LINE)),
    "array dtype": ({"a": LINE}, {"a": LINE.astype("f4")}),
    "array byte order": ({"a": LINE}, {"a": LINE.astype(">f8")}),
    "array shape": ({"a": np.ones(4)}, {"a": np.ones((2, 2))}),
    "array length": ({"a": np.ones(2)}, {"a": np.ones(3)}),
    "array strides": ({"a": np.ones((2, 3))}, {"a": np.asfortranarray(np.ones((2, 3)))}),
    "array to tensor": ({"a": np.ones(2, "f4")}, {"a": ONE}),
    "tensor to array": ({"a": ONE}, {"a": np.ones(2, "f4")}),
    "array to scalar": ({"a": np.array(1.0)}, {"a": np.float64(1.0)}),
    "a container shared": (
        three({"w": torch.ones(2)}, {"w": torch.ones(2)}),
        three(SHARED, SHARED),
    ),
    "a container shared whose leaves were tied": (
        three({"w": SHARED["w"]}, {"w": SHARED["w"]}),
        three(SHARED, SHARED),
    ),
    "a container of nothing shared": (three({"w": ONE[:0]}, {"w": ONE[:0]}), three(VOID, VOID)),
    "a plain container shared": (three(ONE, [1], [1]), three(ONE, PART, PART)),
    "a tuple of leaves shared": (
        three((torch.ones(2), 1), (torch.ones(2), 1)),
        three(PAIR, PAIR),
    ),
    "list to tuple": ({"a": [ONE, GRID]}, {"a": (ONE, GRID)}),
    "tuple to list": ({"a": (ONE, GRID)}, {"a": [ONE, GRID]}),
    "dict to OrderedDict": ({"a": ONE}, OrderedDict(a=ONE)),
    "OrderedDict to dict": (OrderedDict(a=ONE), {"a": ONE}),
    "dict to defaultdict": ({"a": ONE}, defaultdict(list, a=ONE)),
    "an item more": ({"a": [ONE, 1]}, {"a": [ONE, 1, 1]}),
    "an item less": ({"a": [ONE, 1]}, {"a": [ONE]}),
    "a leaf to a number": ({"a": ONE, "b": GRID}, {"a": 1, "b": GRID}),
    "a number to a leaf": ({"a": 1, "b": GRID}, {"a": ONE, "b": GRID}),
    "an empty list filled": ({"a": [], "b": GRID}, {"a": [ONE], "b": GRID}),
    "an empty list filled with no bytes": ({"a": [], "b": GRID}, {"a": [ONE[:0]], "b": GRID}),
    "a number to a generator": ({"a": 1, "b": GRID}, {"a": torch.Generator(), "b": GRID}),
    "metadata of another version": (ordered({"": {"version": 1}}), ordered({"": {"version": 2}})),
    "metadata of another part": (ordered({"": {}}), ordered({"a": {}})),
    "order of metadata": (
        ordered(OrderedDict([("a", {}), ("b", {})])),
        ordered(OrderedDict([("b", {}), ("a", {})])),
    ),
    "metadata of another type": (ordered(OrderedDict()), ordered({})),
    "metadata gone": (ordered({}), ordered()),
    "an attribute beside metadata": (ordered({}), ordered({}, note=1)),
    "an attribute instead of metadata": (ordered({}), ordered(note={})),
    "sparse": ({"a": torch.eye(2)}, {"a": torch.eye(2).to_sparse()}),
    "a row more": ({0: row()}, table(row())),
    "a row less": (table(row()), {0: row()}),
    "a row under True": (table(row()), table(row(), True)),
    "a row under another key": (table(row()), table(row(), 2)),
    "a row in another order": (table(row()), table(dict(reversed(row().items())))),
    "a row with a key more": (table(row()), table(row(more=ONE))),
    "a row with a key less": (table(row()), table({"m": ONE})),
    "a row with another key": (table(row()), table({"m": ONE, "w": torch.ones(3)})),
    "a row of another kind": (table(row()), table(OrderedDict(row()))),
    "a row that is a list": (table(row()), table([ONE, torch.ones(3)])),
    "a row that is a leaf": (table(row()), table(ONE)),
    "a row with a number": (table(row()), table(row(v=1))),
    "a row with an array": (table(row()), table(row(v=np.ones(3, "f4")))),
    "a row with a Parameter": (table(row()), table(row(v=nn.Parameter(torch.ones(3))))),
    "a row of another dtype": (table(row()), table(row(v=torch.ones(3).int()))),
    "a row of another shape": (table(row()), table(row(v=torch.ones(2)))),
    "a row with a tie": (table(row()), table(row(m=ONE, v=ONE))),
    "a row shared": (table(row()), dict.fromkeys((0, 1), ROW)),
    "a row shared whose leaves were tied": ({0: {**ROW}, 1: {**ROW}}, dict.fromkeys((0, 1), ROW)),
    "a table of another kind": (table(row()), OrderedDict(table(row()))),
    "compressed": ({"a": torch.eye(2)}, {"a": compressed()}),
    "Tensor to Parameter": ({"a": torch.ones(2)}, {"a": nn.Parameter(torch.ones(2))}),
    "Parameter to Tensor": ({"a": nn.Parameter(ONE)}, {"a": torch.ones(2)}),
}
DEFECTS: dict[str, tuple[Any, Any]] = {
    "an attribute on an OrderedDict": (ordered(), ordered(note=1)),
    "metadata on an OrderedDict": (ordered(), ordered({})),
    "a tensor without data": ({"a": ONE}, {"a": torch.ones(2, device="meta")}),
    "metadata 1 to True": (ordered({"": {"version": 1}}), ordered({"": {"version": True}})),
    "order inside metadata": (ordered({"": {"a": 1, "b": 2}}), ordered({"": {"b": 2, "a": 1}})),
    "dict to OrderedDict in metadata": (ordered({"": {}}), ordered({"": OrderedDict()})),
    "metadata shared": (
        ordered({"a": {"version": 1}, "b": {"version": 1}}),
        ordered({"a": PART, "b": PART}),
    ),
    "too deep": ({"a": ONE, "b": 1}, {"a": ONE, "b": nested(MAX_DEPTH)}),
    "an array dtype with metadata": (
        {"a": LINE},
        {"a": np.ones(2, np.dtype("f8", metadata={"unit": "m"}))},
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_another_form_is_no_match(case: str) -> None:
    """Whatever does not fit exactly is encoded afresh."""
    before, after = CHANGES[case]
    assert_faithful(made_of(before), before)
    assert made_of(before).match(after) is None
    assert made_of([0, before]).match([0, after]) is None


@pytest.mark.parametrize("case", DEFECTS)
def test_a_subtle_change_of_form_is_no_match(case: str) -> None:
    """Equal to Python, or never looked at, and yet another tree or no tree at all."""
    before, after = DEFECTS[case]
    assert_never_wrong(made_of(before), after)


UNREMEMBERED: dict[str, Callable[[], Any]] = {
    "a container shared": lambda: three(SHARED, SHARED),
    "sparse": lambda: {"a": torch.eye(2).to_sparse()},
    "a generator": lambda: {"a": torch.Generator()},
    "leaves in a defaultdict": lambda: defaultdict(list, a=ONE),
    "leaves in a slice": lambda: slice(ONE, 1),
    "keys that are floats": lambda: {0.0: ONE},
    "keys that are tuples": lambda: {(1,): ONE},
    "keys that are moments": lambda: {NOON: ONE},
    "keys that are numpy's": lambda: {np.int64(1): ONE},
    "metadata of three levels": lambda: ordered({"": {"parts": [1]}}),
}


@pytest.mark.parametrize("case", UNREMEMBERED)
def test_some_forms_are_not_remembered(case: str) -> None:
    """None, and no error: such a state is encoded afresh each time."""
    state = UNREMEMBERED[case]()
    assert encode(state).leaves
    assert outline_of(state) is None
