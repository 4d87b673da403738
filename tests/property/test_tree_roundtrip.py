"""The state tree under generated states and under mutated trees."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import collections
import contextlib
import copy
import enum
import json
import math
import typing
import warnings
from datetime import timezone
from pathlib import PurePosixPath

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hpc_ckpt.errors import CheckpointError, UnsupportedState
from hpc_ckpt.state.tree import Encoded, copy_into, decode, encode


class Color(enum.Enum):
    RED = 1
    GREEN = 2


class Pair(typing.NamedTuple):
    left: object
    right: object


# ── states ────────────────────────────────────────────────────────────────────────────────
TEXT = st.text(st.characters(), max_size=6) | st.text("\ud83d\ude00$a.~", max_size=4)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**2000, max_value=2**2001),
    st.floats(),
    TEXT,
    st.binary(max_size=8),
    st.complex_numbers(),
    st.sampled_from([..., Color.RED, torch.float16, torch.device("cpu"), torch.Size([1, 2])]),
    st.builds(PurePosixPath, st.text("ab/.", max_size=5)),
    st.dates(),
    st.timedeltas(),
    st.times(timezones=st.sampled_from([None, timezone.utc])),
    st.datetimes(timezones=st.sampled_from([None, timezone.utc])),
    st.builds(range, st.integers(), st.integers(), st.integers(min_value=1)),
    hnp.from_dtype(np.dtype("f4")),
    hnp.from_dtype(np.dtype("M8[us]")),
)
KEYS = st.recursive(
    SCALARS.filter(lambda value: value == value),  # a nan is not its own key
    lambda inner: st.lists(inner, max_size=2).map(tuple) | st.frozensets(inner, max_size=2),
    max_leaves=3,
)
TENSORS = st.builds(
    lambda dtype, shape: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
ARRAYS = hnp.arrays(
    hnp.scalar_dtypes() | hnp.byte_string_dtypes() | hnp.unicode_string_dtypes(),
    hnp.array_shapes(min_dims=0, min_side=0, max_side=3),
).filter(lambda array: array.dtype.kind != "O")


def containers(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    dicts = st.dictionaries(KEYS, inner, max_size=3)
    lists = st.lists(inner, max_size=3)
    return st.one_of(
        lists,
        lists.map(tuple),
        dicts,
        st.dictionaries(TEXT, inner, max_size=3),
        dicts.map(collections.OrderedDict),
        dicts.map(lambda items: collections.defaultdict(list, items)),
        st.dictionaries(KEYS, st.integers(), max_size=3).map(collections.Counter),
        st.sets(KEYS, max_size=3),
        st.frozensets(KEYS, max_size=3),
        st.binary(max_size=4).map(bytearray),
        st.builds(Pair, inner, inner),
        st.builds(slice, inner, inner, inner),
        inner.map(lambda item: [item, item]),  # shared
    )


STATES = st.recursive(SCALARS | TENSORS | ARRAYS, containers, max_leaves=12)


# ── sameness ──────────────────────────────────────────────────────────────────────────────
def described(value: object) -> object:
    """Plain text of value and types, so that 1, True and 1.0 differ and nan equals nan."""
    name = type(value).__name__
    if isinstance(value, torch.Tensor):
        flat = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return name, value.dtype, tuple(value.shape), flat
    if isinstance(value, np.ndarray):
        return name, value.dtype.str, value.shape, value.tobytes(), value.flags.fnc
    if isinstance(value, np.generic):
        return name, value.dtype.str, value.tobytes()
    if isinstance(value, dict):
        return name, [(described(key), described(item)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return name, sorted(repr(described(item)) for item in value)
    if isinstance(value, (list, tuple)):
        return name, [described(item) for item in value]
    if isinstance(value, slice):
        return name, [described(item) for item in (value.start, value.stop, value.step)]
    if type(value) is int:
        return name, hex(value)
    return name, repr(value)


def stored(encoded: Encoded) -> dict[str, memoryview]:
    data = {}
    for leaf in encoded.leaves:
        data[leaf.name] = memoryview(bytearray(leaf.nbytes))
        copy_into(data[leaf.name], leaf.value)
    return data | {alias: data[name] for alias, name in encoded.aliases.items()}


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STATES)
def test_any_state_comes_back_exactly(state: object) -> None:
    """encode → JSON text → decode gives the same values, types and order."""
    encoded = encode(state, name="s")
    tree = json.loads(json.dumps(encoded.tree, allow_nan=False).encode("ascii"))
    back = decode(tree, stored(encoded).__getitem__, like=state)
    assert described(state) == described(back)
    assert encoded.tree == encode(back, name="s").tree


# ── hostile trees ─────────────────────────────────────────────────────────────────────────
def seed() -> Encoded:
    """One of every tag."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eye, line = torch.eye(4), torch.ones(4)
        quantized = torch.quantize_per_channel(eye, line, torch.zeros(4).long(), 0, torch.qint8)
        plain = torch.quantize_per_tensor(eye, 0.1, 0, torch.quint4x2)
        sparse = [eye.to_sparse_coo(), eye.to_sparse_csr(), eye.to_sparse_bsc((2, 2))]
    shared = [1]
    state = {
        "tensors": [eye, eye, eye.t()[1:], eye.to(torch.complex128), torch.tensor(1)],
        "odd": [quantized, plain, sparse, torch.Generator()],
        "image": torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last),
        "arrays": [np.arange(3), np.zeros((2, 2), "i4,f8", order="F"), np.array("ab")],
        "plain": [10**400, math.inf, "\ud800", b"a", 1j, ..., range(3), slice(1, None)],
        "types": [np.dtype("i4,f8"), torch.float32, torch.device("cpu"), torch.Size([1])],
        "scalars": [np.float32(1), np.str_("a"), np.datetime64("2020-01-01")],
        "dicts": [{1: 2}, collections.Counter([1]), collections.defaultdict(int, {1: 2})],
        "module": torch.nn.Linear(1, 1).state_dict(),
        "sets": [{1, 2}, frozenset({(1, 2)}), bytearray(b"a"), PurePosixPath("a")],
        "classes": [Color.RED, Pair(1, 2)],
        "shared": [shared, shared],
    }
    return encode(state)


SEED = seed()
SEED_DATA = stored(SEED)
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers()
    | st.floats()
    | st.sampled_from([2**63, -1, 2**31, "cpu", "cuda", "meta", "float32", "qint8", "<f4", "|O"])
    | st.sampled_from(["inf", "0x1", "AAAA", "coo", "csr", "tensors.0", "Color", "RED", "F"])
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)


def places(node: object) -> list[tuple[typing.Any, typing.Any]]:
    items: typing.Iterable[tuple[object, object]] = ()
    if isinstance(node, dict):
        items = node.items()
    elif isinstance(node, list):
        items = enumerate(node)
    return [place for key, child in items for place in [(node, key), *places(child)]]


def mutate(tree: object, data: st.DataObject) -> None:
    """Replace, delete, duplicate, rename or swap something somewhere."""
    parent, key = data.draw(st.sampled_from(places(tree)), label="place")
    other, other_key = data.draw(st.sampled_from(places(tree)), label="other")
    action = data.draw(st.sampled_from(["junk", "delete", "swap", "rename", "near"]))
    if action == "junk":
        parent[key] = data.draw(JUNK)
    elif action == "delete":
        del parent[key]
    elif action == "swap":
        parent[key] = copy.deepcopy(other[other_key])
    elif action == "rename" and isinstance(parent, dict):
        parent[data.draw(TEXT | st.sampled_from(TAGS))] = parent.pop(key)
    elif action == "near" and type(parent[key]) is int:
        parent[key] += data.draw(st.sampled_from([-1, 1, 2**62, -(2**63)]))


TAGS = sorted({key for node, key in places(SEED.tree) if isinstance(key, str) and key[0] == "$"})


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_mutated_tree_gives_a_state_or_a_checkpoint_error(data: st.DataObject) -> None:
    """Nothing else may leak out: no builtin error, no crash, no warning."""
    tree = copy.deepcopy(SEED.tree)
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(tree, data)
    like = {"classes": [Color.GREEN, Pair(0, 0)]}
    with contextlib.suppress(CheckpointError):
        decode(tree, SEED_DATA.__getitem__, like=like)


@settings(max_examples=200, deadline=None)
@given(JUNK)
def test_junk_gives_a_value_or_a_checkpoint_error(tree: object) -> None:
    """The same for trees that were never ours."""
    with contextlib.suppress(CheckpointError):
        decode(tree, SEED_DATA.__getitem__)


@settings(max_examples=100, deadline=None)
@given(STATES, st.integers(0, 70))
def test_a_nested_state_is_written_or_refused(state: object, depth: int) -> None:
    """Whatever encode() accepts, decode() reads; the limit is one and the same."""
    for level in range(depth):
        state = [state] if level % 2 else {level: state}
    try:
        encoded = encode(state)
    except UnsupportedState:
        assert depth > 50
        return
    back = decode(encoded.tree, stored(encoded).__getitem__, like=state)
    assert described(state) == described(back)
