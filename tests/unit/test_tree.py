"""The state tree, case by case: every tag, every dtype, ties, refusals."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import collections
import enum
import json
import math
import typing
import warnings
from datetime import date, datetime, time, timedelta, timezone
from pathlib import Path, PurePosixPath, PureWindowsPath
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch

from hpc_ckpt.errors import CheckpointError, UnsupportedState, UserError
from hpc_ckpt.state.tree import Encoded, copy_into, decode, encode


class Color(enum.Enum):
    RED = "r"
    GREEN = "g"


class Level(enum.IntEnum):
    LOW = 1


class Word(str, enum.Enum):
    YES = "yes"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Point(typing.NamedTuple):
    x: int
    y: object


def stored(encoded: Encoded) -> dict[str, bytearray]:
    """The bytes of every leaf name, as a checkpoint would give them."""
    data = {}
    for leaf in encoded.leaves:
        data[leaf.name] = bytearray(leaf.nbytes)
        copy_into(memoryview(data[leaf.name]), leaf.value)
    for alias, name in encoded.aliases.items():
        data[alias] = data[name]
    return data


def through_json(state: object, **options: object) -> object:
    encoded = encode(state)
    tree = json.loads(json.dumps(encoded.tree, allow_nan=False))
    data = stored(encoded)
    return decode(tree, lambda name: memoryview(data[name]), **options)  # type: ignore[arg-type]  # options vary


@pytest.fixture
def quiet() -> object:
    """torch warns once per process about half-complex, sparse and quantised tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


PLAIN = [
    None,
    True,
    0,
    -(2**200),
    1.5,
    5e-324,
    -0.0,
    math.inf,
    -math.inf,
    "text",
    "$tensor",
    "\ud83d\ude00",
    "\udc80",
    b"\x00\xff",
    bytearray(b"ab"),
    complex(-0.0, math.inf),
    (),
    (1, [2, (3,)]),
    [],
    {},
    {"$tuple": [1]},
    {1: "int", "1": "str", (1,): "tuple", None: "none", 2.5: "float", b"1": "bytes"},
    {True: 1, "True": 2},
    {"\ud800": 1},
    {1, "a", (2, 3)},
    frozenset({frozenset({1}), 2}),
    collections.Counter({3: 2, "a": -1}),
    collections.OrderedDict([("b", 1), ("a", 2)]),
    range(3, 2**70, 2),
    slice(None, 3, -1),
    ...,
    date(1, 1, 1),
    time(1, 2, 3, 4, fold=1),
    time(1, tzinfo=timezone.utc),
    datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("UTC")),
    datetime(2024, 2, 29, tzinfo=timezone(timedelta(hours=-3, microseconds=1), "odd")),
    timedelta(days=-1, microseconds=1),
    Path("/a/b"),
    Path("x\udcff"),
    PurePosixPath("."),
    PureWindowsPath("c:/a"),
    np.dtype("<f4"),
    np.dtype([("a", ">i4", (2,)), ("b", [("c", "S3")])]),
    torch.float8_e5m2,
    torch.device("cuda", 3),
    torch.Size([2, 0]),
    np.float64(1.5),
    np.float32(-0.0),
    np.bool_(True),
    np.str_(""),
    np.str_("naïve"),
    np.bytes_(b"a\x00b"),
    np.datetime64("2020-01-01", "D"),
    np.timedelta64(3, "25s"),
    np.longdouble("1.25"),
    np.uint64(2**64 - 1),
    np.complex64(1j),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_equal_and_of_its_type(value: object) -> None:
    """Exactly: equality alone would let True pass for 1."""
    back = through_json({"k": value})["k"]  # type: ignore[index]  # a dict
    assert (type(value), value) == (type(back), back)
    if not isinstance(value, (set, frozenset)):  # whose order is not theirs
        assert repr(value) == repr(back)


def test_an_integer_of_any_size_comes_back() -> None:
    """Python refuses to write very long ones in decimal."""
    assert [10**5000, -(10**5000)] == through_json([10**5000, -(10**5000)])


def test_nan_comes_back_as_nan() -> None:
    """Inside containers too, where == cannot tell."""
    back = through_json([math.nan, complex(math.nan, 1), {math.nan: 1}])
    assert isinstance(back, list) and math.isnan(back[0]) and math.isnan(back[1].real)
    assert math.isnan(next(iter(back[2])))


def test_dict_order_is_kept() -> None:
    """Optimizers rely on the order of their state."""
    assert ["b", "a", "c"] == list(through_json({"b": 1, "a": 2, "c": 3}))  # type: ignore[call-overload]  # a dict
    assert [2, "a", 1] == list(through_json({2: 1, "a": 2, 1: 3}))  # type: ignore[call-overload]  # a dict


@pytest.mark.parametrize("factory", [list, int, dict, set, float, None])
def test_a_defaultdict_keeps_its_factory(factory: object) -> None:
    """Known factories travel by name."""
    back = through_json(collections.defaultdict(factory, {1: 2}))  # type: ignore[arg-type]  # each is one
    assert isinstance(back, collections.defaultdict)
    assert (factory, {1: 2}) == (back.default_factory, dict(back))


def test_module_state_keeps_its_metadata() -> None:
    """load_state_dict() looks there for the versions of a module's parts."""
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    back = through_json(state)
    assert vars(state)["_metadata"] == vars(back)["_metadata"]
    assert isinstance(back, collections.OrderedDict) and list(state) == list(back)


WRITTEN = [
    (-0.0, {"$float": "-0x0.0p+0"}),
    (math.inf, {"$float": "inf"}),
    (math.nan, {"$float": "nan"}),
    (1j, {"$complex": [0.0, 1.0]}),
    (2**1024, {"$int": hex(2**1024)}),
    ("\ud800", {"$str": "7aCA"}),
    (b"a", {"$bytes": "YQ=="}),
    (bytearray(b"a"), {"$bytearray": "YQ=="}),
    ((1,), {"$tuple": [1]}),
    ({"a": 1}, {"a": 1}),
    ({"$a": 1}, {"$dict": [["$a", 1]]}),
    ({2, 1}, {"$set": [1, 2]}),
    (frozenset(), {"$frozenset": []}),
    (range(3), {"$range": [0, 3, 1]}),
    (slice(3), {"$slice": [None, 3, None]}),
    (..., {"$ellipsis": []}),
    (collections.Counter("a"), {"$counter": [["a", 1]]}),
    (collections.OrderedDict(a=1), {"$ordereddict": {"items": [["a", 1]]}}),
    (collections.defaultdict(int), {"$defaultdict": {"factory": "int", "items": []}}),
    (Point(1, 2), {"$namedtuple": {"class": "Point", "fields": ["x", "y"], "items": [1, 2]}}),
    (Color.RED, {"$enum": {"class": "Color", "member": "RED"}}),
    (Access(3), {"$enum": {"class": "Access", "bits": 3}}),
    (date(2024, 1, 2), {"$date": [2024, 1, 2]}),
    (time(1), {"$time": {"at": [1, 0, 0, 0, 0], "zone": None}}),
    (timedelta(1), {"$timedelta": [1, 0, 0]}),
    (Path("a"), {"$path": ["PosixPath", "a"]}),
    (np.float32(1), {"$scalar": {"dtype": "<f4", "data": "AACAPw=="}}),
    (np.dtype("i4"), {"$numpy_dtype": "<i4"}),
    (torch.int8, {"$torch_dtype": "int8"}),
    (torch.device("cpu"), {"$device": "cpu"}),
    (torch.Size([2]), {"$size": [2]}),
    (torch.ones(2), {"$tensor": {"leaf": "state", "dtype": "float32", "shape": [2]}}),
    (np.ones(2, ">f4"), {"$array": {"leaf": "state", "dtype": ">f4", "shape": [2]}}),
]


@pytest.mark.parametrize(("value", "expected"), WRITTEN, ids=lambda item: type(item).__name__)
def test_the_written_form_of_each_tag_is_fixed(value: object, expected: object) -> None:
    """Checkpoints on disk outlive the program that wrote them."""
    assert expected == encode(value).tree


def test_sharing_and_ties_are_written_at_their_first_place() -> None:
    """The definition comes before every reference to it."""
    shared, tensor = [1], torch.ones(1)
    meaning = {"dtype": "float32", "shape": [1]}
    assert [
        {"$shared": {"id": 0, "value": [1]}},
        {"$ref": 0},
        {"$tensor": {"leaf": "2", **meaning}},
        {"$tensor": {"leaf": "3", "tied": "2", **meaning}},
    ] == encode([shared, shared, tensor, tensor]).tree


# ── classes the program supplies ──────────────────────────────────────────────────────────
def test_an_enum_needs_the_class_in_like() -> None:
    """The checkpoint names the class, the tracked state supplies it."""
    state = {"a": [Color.RED], "b": Level.LOW, "c": Word.YES, "d": Access.READ | Access.WRITE}
    like = {"a": [Color.GREEN], "b": Level.LOW, "c": Word.YES, "d": Access.READ}
    back = through_json(state, like=like)
    assert state == back
    assert (Level, Word) == (type(back["b"]), type(back["c"]))  # type: ignore[index]  # a dict


@pytest.mark.parametrize("member", [Color.RED, Level.LOW, Word.YES, Access(3)])
@pytest.mark.parametrize("like", [None, {"k": 1}, {"k": enum.Enum("Other", "RED").RED}])
def test_an_enum_is_refused_without_its_class(member: object, like: object) -> None:
    """Never silently its value, and the message names the key."""
    with pytest.raises(CheckpointError, match=r"'k'.*enum"):
        through_json({"k": member}, like=like)


def test_enums_and_namedtuples_as_keys_and_members() -> None:
    """Keys and members have no place, so any key or member of that class will do."""
    state = {(Color.RED, Point(1, Level.LOW)): {Color.RED, Word.YES}}
    like = {
        (Color.GREEN, Point(0, Level.LOW)): {Color.GREEN},
        (Color.RED, Point(1, Level.LOW)): {Word.YES, Color.GREEN},
    }
    back = through_json(state, like=like)
    assert state == back
    assert Point is type(next(iter(back))[1])  # type: ignore[call-overload]  # a dict


def test_an_enum_that_lost_its_member_is_refused() -> None:
    """A renamed member is named, not guessed."""
    tree = encode({"k": Color.RED}).tree
    tree["k"]["$enum"]["member"] = "BLUE"
    with pytest.raises(CheckpointError, match="no member 'BLUE'"):
        decode(tree, dict[str, memoryview]().__getitem__, like={"k": Color.RED})


def test_a_namedtuple_takes_the_class_of_like_or_a_fresh_one() -> None:
    """Fields and class name are kept either way."""
    state = [Point(1, torch.ones(2))]
    known = through_json(state, like=[Point(0, 0)])
    fresh = through_json(state)
    assert isinstance(known, list) and isinstance(fresh, list)
    assert Point is type(known[0])
    assert ("Point", ("x", "y"), 1) == (type(fresh[0]).__name__, fresh[0]._fields, fresh[0].x)


# ── references ────────────────────────────────────────────────────────────────────────────
def test_shared_containers_stay_shared() -> None:
    """One list in two places is one list again."""
    shared: list[object] = [1]
    mapping = {1: shared}
    back = through_json({"a": shared, "b": [shared, mapping], "c": mapping, "d": [1]})
    assert isinstance(back, dict)
    assert back["a"] is back["b"][0] is back["c"][1]
    assert back["c"] is back["b"][1]
    assert back["a"] is not back["d"]


def test_a_cycle_is_refused_by_name() -> None:
    """It could not be written, and must not hang."""
    inner: list[object] = []
    inner.append({"x": inner})
    with pytest.raises(UnsupportedState, match=r"'a\.0\.x'.*contains itself"):
        encode({"a": inner})


def test_depth_is_bounded_on_both_ways() -> None:
    """A clear error, never RecursionError."""
    deep: object = 1
    for _ in range(200):
        deep = [deep]
    with pytest.raises(UnsupportedState, match="nested more than"):
        encode(deep)
    with pytest.raises(CheckpointError, match="nested more than"):
        decode(deep, dict[str, memoryview]().__getitem__)
    for _ in range(100_000):
        deep = {"$tuple": [deep]}
    with pytest.raises(CheckpointError, match="nested more than"):
        decode(deep, dict[str, memoryview]().__getitem__)
    while isinstance(deep, (dict, list)):  # unpeel: freeing it at once would recurse
        deep = deep["$tuple"][0] if isinstance(deep, dict) else deep[0]


def test_the_deepest_allowed_state_round_trips() -> None:
    """What encode() accepts, json and decode() accept, in every wrapping."""
    deep: object = 1
    for level in range(32):
        shared = [deep]
        deep = collections.OrderedDict({(level,): shared, "again": shared})
    back = through_json(deep)
    for level in reversed(range(32)):  # step by step: '==' would visit 2^32 paths
        assert isinstance(back, collections.OrderedDict)
        assert [(level,), "again"] == list(back)
        assert back["again"] is back[level,]
        [back] = back["again"]
    assert 1 == back


# ── refusals ──────────────────────────────────────────────────────────────────────────────
class Dict(dict):  # type: ignore[type-arg]  # a bare subclass
    pass


class Tensor(torch.Tensor):
    pass


def without_storage(value: torch.Tensor, left: int) -> torch.Tensor:
    """As code that frees or shrinks memory by hand leaves it; copied, it would be the end."""
    value.untyped_storage().resize_(left)
    return value


REFUSED = [
    object(),
    len,
    int,
    Dict(a=1),
    collections.deque([1]),
    collections.UserDict(),
    collections.defaultdict(lambda: 1),
    np.array([object()]),
    np.ma.masked_array([1]),
    np.recarray((1,), dtype=[("a", "i4")]),
    np.ones((1, 1)).view(np.matrix),
    np.array([1], dtype=np.dtype("i4", metadata={"a": 1})),
    torch.empty(2, device="meta"),
    without_storage(torch.ones(2), 0),
    without_storage(torch.ones(4, 4)[1:, ::2], 56),
    torch.ones(2).as_subclass(Tensor),
    torch.nn.UninitializedParameter(),
    {torch.ones(1)},
    {torch.ones(1): 1},
    torch.max(torch.ones(2, 2), 0),
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_what_needs_pickle_is_refused_by_name(value: object) -> None:
    """Exact types only; the message names the key."""
    with pytest.raises(UnsupportedState, match=r"'state\.0\.bad") as caught:
        encode([{"bad": value}], name="state")
    assert caught.value.key.startswith("state.0.bad")


def test_a_storage_that_ends_with_the_last_element_is_enough() -> None:
    """Behind a view there need be nothing."""
    view = without_storage(torch.arange(16.0).reshape(4, 4)[1:, ::2], 60)
    encode({"view": view})


def test_a_string_dtype_is_refused() -> None:
    """numpy keeps its variable strings as objects."""
    with pytest.raises(UnsupportedState):
        encode(np.array(["a"], dtype=np.dtypes.StringDType()))


# ── leaves ────────────────────────────────────────────────────────────────────────────────
DTYPES = sorted(
    {str(d) for d in vars(torch).values() if isinstance(d, torch.dtype) and "quint" not in str(d)}
    - {"torch.qint8", "torch.qint32"}
)


def raw(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def patterned(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Every byte different, so that a swapped or cast item shows."""
    count = math.prod(shape) * dtype.itemsize
    data = torch.arange(1, count + 1, dtype=torch.int64).remainder(251).to(torch.uint8)
    if dtype is torch.bool:
        data = data % 2
    return data.view(dtype).reshape(shape)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3), (1,)])
def test_a_tensor_of_every_dtype_comes_back_bit_for_bit(
    name: str, shape: tuple[int, ...], quiet: object
) -> None:
    """Including those safetensors lacks, 0-dim and empty ones."""
    value = patterned(getattr(torch, name.removeprefix("torch.")), shape)
    back = through_json(value)
    assert isinstance(back, torch.Tensor)
    assert (value.dtype, value.shape, raw(value)) == (back.dtype, back.shape, raw(back))


@pytest.mark.parametrize("name", DTYPES)
def test_the_stored_form_is_what_safetensors_reads(name: str, quiet: object) -> None:
    """dtype, shape and size of a leaf make a valid safetensors header."""
    import safetensors

    [leaf] = encode(patterned(getattr(torch, name.removeprefix("torch.")), (2, 4))).leaves
    data = bytearray(leaf.nbytes)
    copy_into(memoryview(data), leaf.value)
    entry = {"dtype": leaf.dtype, "shape": list(leaf.shape), "data_offsets": [0, leaf.nbytes]}
    header = json.dumps({"t": entry}).encode()
    file = len(header).to_bytes(8, "little") + header + bytes(data)
    [(_, parsed)] = safetensors.deserialize(file)
    assert list(leaf.shape) == parsed["shape"]


VIEWS = {
    "transposed": lambda t: t.t(),
    "strided": lambda t: t[::2, 1:],
    "expanded": lambda t: t[:1].expand(5, -1),
    "offset": lambda t: t[1:],
    "conj": lambda t: t.to(torch.complex64).mul(1j).conj(),
    "conj complex128": lambda t: t.to(torch.complex128).mul(1j).conj(),
    "neg": lambda t: t.to(torch.complex64).conj().imag,
    "bfloat16 strided": lambda t: t.to(torch.bfloat16)[:, ::2],
    "float8 transposed": lambda t: t.to(torch.float8_e4m3fn).t(),
    "requires grad": lambda t: t.clone().requires_grad_(),
    "flipped": lambda t: t.flip(0),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_comes_back_with_its_values(view: str) -> None:
    """Whatever its strides and bits, and without gradients."""
    value = VIEWS[view](torch.arange(12.0).reshape(3, 4))
    back = through_json(value)
    assert isinstance(back, torch.Tensor)
    assert raw(value.detach().resolve_conj().resolve_neg()) == raw(back)
    assert (value.dtype, value.shape, False) == (back.dtype, back.shape, back.requires_grad)


def test_channels_last_comes_back_channels_last() -> None:
    """Fused optimizers refuse state whose strides differ from the parameter's."""
    value = torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    encoded = encode(value)
    back = through_json(value)
    assert isinstance(back, torch.Tensor)
    assert (2, 3, 4, 5) == encoded.leaves[0].shape
    assert value.stride() == back.stride()
    assert torch.equal(value, back)


def quantized() -> dict[str, torch.Tensor]:
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1, 2, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {
            str(d): torch.quantize_per_tensor(x, 0.1, 1, d)
            for d in (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
        }
        found["channel"] = torch.quantize_per_channel(x, scales, zeros, 0, torch.qint8)
        found["float"] = torch.quantize_per_channel(x, scales, scales, 0, torch.quint8)
        found["float4"] = torch.quantize_per_channel(x, scales, scales, 0, torch.quint4x2)
        found["transposed"] = found["torch.qint8"].t()
        found["offset"] = found["torch.qint8"][1:]
        found["empty"] = torch.quantize_per_tensor(x[:0], 0.1, 1, torch.qint8)
    return found


@pytest.mark.parametrize("case", quantized())
def test_a_quantised_tensor_comes_back(case: str) -> None:
    """Bytes, scheme, scale and zero point; 4 and 2 bit ones stay packed."""
    value = quantized()[case]
    back = through_json(value)
    assert isinstance(back, torch.Tensor)
    assert (value.dtype, value.shape, value.qscheme()) == (back.dtype, back.shape, back.qscheme())
    assert torch.equal(value.int_repr(), back.int_repr())
    assert torch.equal(value.dequantize(), back.dequantize())


@pytest.mark.parametrize("layout", ["coo", "uncoalesced", "csr", "csc", "bsr", "bsc", "empty"])
def test_a_sparse_tensor_comes_back(layout: str, quiet: object) -> None:
    """Its parts are leaves; nothing is made dense."""
    dense = torch.eye(4) * torch.arange(1.0, 5.0)
    value = {
        "coo": dense.to_sparse_coo,
        "uncoalesced": lambda: torch.sparse_coo_tensor([[1, 1], [0, 0]], [1.0, 2.0], (2, 2)),
        "csr": dense.to_sparse_csr,
        "csc": dense.to_sparse_csc,
        "bsr": lambda: dense.to_sparse_bsr((2, 2)),
        "bsc": lambda: dense.to_sparse_bsc((2, 2)),
        "empty": lambda: torch.zeros(3, 3).to_sparse_coo(),
    }[layout]()
    back = through_json({"a": value, "b": value})
    assert isinstance(back, dict) and back["a"] is back["b"]
    assert (value.layout, value.shape) == (back["a"].layout, back["a"].shape)
    assert torch.equal(value.to_dense(), back["a"].to_dense())
    if value.layout is torch.sparse_coo:
        assert value.is_coalesced() == back["a"].is_coalesced()
        assert torch.equal(value._indices(), back["a"]._indices())


def test_a_parameter_comes_back_as_like_says() -> None:
    """State is data; only the program's own object makes it a Parameter."""
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    plain = through_json({"p": parameter})
    known = through_json({"p": parameter}, like={"p": parameter})
    assert (torch.Tensor, torch.nn.Parameter) == (type(plain["p"]), type(known["p"]))  # type: ignore[index]  # dicts
    assert known["p"].requires_grad is False  # type: ignore[index]  # a dict


def test_a_generator_goes_on_where_it_was() -> None:
    """Its state is a leaf; the same generator twice is one."""
    generator = torch.Generator().manual_seed(7)
    torch.rand(3, generator=generator)
    back = through_json([generator, generator])
    assert isinstance(back, list) and back[0] is back[1]
    assert torch.equal(torch.rand(5, generator=generator), torch.rand(5, generator=back[0]))


ARRAYS = {
    **{code: np.arange(6).astype(code).reshape(2, 3) for code in "?bhilqBHILQefdgFDG"},
    "big endian": np.arange(6, dtype=">f8"),
    "text": np.array(["a", "bcd"]),
    "bytes": np.array([b"a", b"bcd"]),
    "dates": np.array(["2020-01-01", "NaT"], "M8[ns]"),
    "deltas": np.array([1, 2], "m8[25s]"),
    "records": np.array([(1, 2.5, [1, 2])], [("a", "i1"), ("b", ">f8"), ("c", "u2", (2,))]),
    "aligned": np.zeros(2, np.dtype("i1,i8", align=True)),
    "void": np.array([b"abc"], "V3"),
    "scalar": np.array(3.5),
    "empty": np.empty((0, 4), "f4"),
    "empty text": np.ndarray((2,), "U0"),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "fortran records": np.zeros((2, 3), "i4,f8", order="F"),
    "strided": np.arange(12).reshape(3, 4)[::-2, 1::2],
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_an_array_comes_back_with_dtype_and_order(case: str) -> None:
    """Native numbers as themselves, others through their description."""
    value = ARRAYS[case]
    back = through_json({"a": value})["a"]  # type: ignore[index]  # a dict
    assert (value.dtype, value.shape) == (back.dtype, back.shape)
    assert value.tobytes() == back.tobytes()
    assert value.flags.fnc == back.flags.fnc
    assert back.flags.writeable and back.flags.owndata


# ── ties and names ────────────────────────────────────────────────────────────────────────
def test_tied_tensors_are_stored_once_and_come_back_as_one() -> None:
    """Same memory, dtype, shape and strides; a mere view of it is its own leaf."""
    weight = torch.nn.Parameter(torch.arange(4.0))
    state = {"a": weight, "b": weight.detach(), "view": weight.detach()[:2], "copy": weight.clone()}
    encoded = encode(state, name="model")
    back = through_json(state)
    assert {"model.b": "model.a"} == encoded.aliases
    assert ["model.a", "model.view", "model.copy"] == [leaf.name for leaf in encoded.leaves]
    assert isinstance(back, dict)
    assert back["a"] is back["b"]
    assert torch.equal(weight.detach()[:2], back["view"])


def test_a_conjugate_is_not_tied_to_its_base() -> None:
    """Same pointer, dtype, shape and strides, other values."""
    base = torch.tensor([1 + 2j])
    back = through_json([base, base.conj()])
    assert [1 + 2j, 1 - 2j] == [item.item() for item in back]  # type: ignore[attr-defined]  # a list


def test_tied_arrays_are_stored_once() -> None:
    """The same rule for numpy; a reversed view is another array."""
    array = np.arange(4)
    encoded = encode([array, array[:], array[::-1]])
    back = through_json([array, array[:], array[::-1]])
    assert {"1": "0"} == encoded.aliases
    assert isinstance(back, list)
    assert back[0] is back[1]
    assert [3, 2, 1, 0] == back[2].tolist()


def test_tied_quantised_and_sparse_tensors_come_back_as_one(quiet: object) -> None:
    """state_dict() detaches, so the objects differ and only the memory is shared."""
    value = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    sparse = torch.eye(2).to_sparse_coo()
    back = through_json([value, value.detach(), sparse, sparse.detach()])
    assert isinstance(back, list)
    assert back[0] is back[1] and back[2] is back[3]


def test_leaf_names_are_readable_unique_and_the_same_each_time() -> None:
    """Dotted paths; a collision gets ~2."""
    x = [torch.full((1,), float(i)) for i in range(5)]
    state = {"a": {"b.c": x[0]}, "a.b": {"c": x[1]}, 0: {None: x[2]}, (1,): x[3], "\ud800": x[4]}
    names = [leaf.name for leaf in encode(state).leaves]
    assert ["a.b.c", "a.b.c~2", "0.None", "<tuple>", "\\ud800"] == names
    assert names == [leaf.name for leaf in encode(state).leaves]
    assert ["state"] == [leaf.name for leaf in encode(x[0]).leaves]
    assert ["__metadata__~2"] == [leaf.name for leaf in encode({"__metadata__": x[0]}).leaves]


def test_encoding_copies_nothing() -> None:
    """A leaf is the program's own memory: what changes before copy_into() is what is saved."""
    value = torch.zeros(2)
    encoded = encode({"v": value, "w": np.zeros(1)})
    value.fill_(7)
    data = stored(encoded)
    assert value.numpy().tobytes() == bytes(data["v"])
    assert encoded.leaves[0].value is value


# ── reading ───────────────────────────────────────────────────────────────────────────────
def test_decoded_leaves_own_their_memory_unless_told() -> None:
    """copy=False shares writable memory, and copies what is read-only."""
    for value in (torch.ones(3), np.ones(3)):
        encoded = encode(value)
        data = stored(encoded)["state"]
        read = {"state": memoryview(data)}.__getitem__
        owned, shared = decode(encoded.tree, read), decode(encoded.tree, read, copy=False)
        fixed = bytes(data)
        frozen = decode(encoded.tree, {"state": memoryview(fixed)}.__getitem__, copy=False)
        data[:] = bytes(len(data))
        assert [3.0, 0.0, 3.0] == [float(item.sum()) for item in (owned, shared, frozen)]  # type: ignore[attr-defined]  # tensors
        before = bytes(bytearray(fixed))
        frozen[0] = 2  # type: ignore[index]  # a tensor or an array
        assert before == fixed


def test_leaves_are_read_at_any_offset_of_an_image() -> None:
    """Memory need not be aligned to the item."""
    value = torch.arange(3, dtype=torch.float64).reshape(3, 1).expand(3, 2)
    encoded = encode([value, torch.ones(2, 2).t(), np.arange(3.0)])
    image = bytearray(1000)
    spans, start = {}, 1
    for leaf in encoded.leaves:
        spans[leaf.name] = memoryview(image)[start : start + leaf.nbytes]
        copy_into(spans[leaf.name], leaf.value)
        start += leaf.nbytes + 1
    for copy in (True, False):
        back = decode(encoded.tree, spans.__getitem__, copy=copy)
        assert isinstance(back, list) and torch.equal(value, back[0])
        assert [0, 1, 2] == back[2].tolist()


@pytest.mark.parametrize(
    ("saved", "like", "where", "expected"),
    [
        ("cpu", None, None, "cpu"),
        ("cuda:5", None, None, "cpu"),
        ("cuda:5", None, "meta", "meta"),
        ("cpu", None, torch.device("meta"), "meta"),
        ("cuda:5", torch.ones(1), None, "cpu"),
    ],
)
def test_the_device_is_map_location_then_like_then_saved(
    saved: str, like: object, where: object, expected: str
) -> None:
    """A device that is not here becomes the CPU."""
    encoded = encode(torch.ones(2))
    encoded.tree["$tensor"]["device"] = saved
    data = stored(encoded)
    back = decode(
        encoded.tree,
        lambda name: memoryview(data[name]),
        like=like,
        map_location=where,  # type: ignore[arg-type]  # cases vary
    )
    assert isinstance(back, torch.Tensor) and expected == back.device.type


@pytest.mark.parametrize("where", ["nowhere", {"cpu": "nowhere"}, 3])
def test_a_bad_map_location_is_the_callers_mistake(where: object) -> None:
    """Not the checkpoint's."""
    with pytest.raises(UserError, match="map_location"):
        decode(None, dict[str, memoryview]().__getitem__, map_location=where)  # type: ignore[arg-type]  # wrong on purpose


BROKEN = [
    {"$unknown": 1},
    {"$tuple": 1},
    {"$tuple": [], "x": 1},
    {"$dict": [[1]]},
    {"$dict": [[1, 2], [1, 3]]},
    {"$dict": [[[], 2]]},
    {"$set": [1, 1]},
    {"$set": [{"$tuple": [[]]}]},
    {"$ref": 0},
    {"$shared": {"id": 0, "value": [{"$ref": 0}]}},
    {"$shared": {"id": 0, "value": {"$shared": {"id": 1, "value": []}}}},
    [{"$shared": {"id": 0, "value": [1]}}, {"$shared": {"id": 0, "value": [2]}}],
    {"$int": "12"},
    {"$int": 12},
    {"$float": "1.0"},
    {"$bytes": "é"},
    {"$bytes": "a"},
    {"$str": "/w=="},
    {"$complex": [1.0]},
    {"$range": [1, 2, 0]},
    {"$date": [2024, 13, 1]},
    {"$date": [10**30, 1, 1]},
    {"$timedelta": [10**12, 0, 0]},
    {"$time": {"at": [1, 2, 3, 4, 9], "zone": None}},
    {"$datetime": {"at": [1, 1, 1, 1, 2, 3, 4, 0], "zone": {"key": "../../etc/passwd"}}},
    {"$datetime": {"at": [1, 1, 1, 1, 2, 3, 4, 0], "zone": {"key": "America"}}},
    {"$datetime": {"at": [1, 1, 1, 1, 2, 3, 4, 0], "zone": {"offset": [3, 0, 0], "name": None}}},
    {"$path": ["Path", "x"]},
    {"$numpy_dtype": "|O"},
    {"$numpy_dtype": "f4"},
    {"$numpy_dtype": [["a", "|O8"]]},
    {"$numpy_dtype": [["a", "<f4"], ["a", "<f4"]]},
    {"$numpy_dtype": [["a", "<f4", [2**40, 2**40]]]},
    {"$numpy_dtype": "<U999999999999999999"},
    {"$scalar": {"dtype": "<f4", "data": ""}},
    {"$torch_dtype": "Tensor"},
    {"$device": "nowhere"},
    {"$size": [2**80]},
    {"$namedtuple": {"class": "a b", "fields": [], "items": []}},
    {"$namedtuple": {"class": "A", "fields": ["x", "x"], "items": [1, 2]}},
    {"$namedtuple": {"class": "A", "fields": ["x"], "items": []}},
    {"$defaultdict": {"factory": "eval", "items": []}},
    {"$enum": {"class": "Color", "member": "RED"}},
    {"$tensor": {"leaf": "gone", "dtype": "float32", "shape": [1]}},
    {"$tensor": {"leaf": "x", "dtype": "float32", "shape": [2]}},
    {"$tensor": {"leaf": "x", "dtype": "float32", "shape": [-1]}},
    {"$tensor": {"leaf": "x", "dtype": "qint32", "shape": [1]}},
    {"$tensor": {"leaf": "x", "dtype": "float32", "shape": [1], "order": [1]}},
    {"$tensor": {"leaf": "none", "dtype": "float32", "shape": [0, 2**62, 2**62]}},
    {"$tensor": {"leaf": "x", "dtype": "float32", "shape": [1], "device": "nowhere"}},
    {"$array": {"leaf": "x", "dtype": "<f4", "shape": [1], "order": "K"}},
    {"$array": {"leaf": "none", "dtype": "<f4", "shape": [0, 2**62, 2**62]}},
    {"$array": {"leaf": "x", "dtype": "<f4", "shape": [1] * 100}},
    {"$generator": {"device": "cpu", "state": {"leaf": "x", "dtype": "uint8", "shape": [4]}}},
    {"$sparse": {"layout": "coo"}},
    {"$sparse": 3},
    math.inf,
    {1: 2},
    (1, 2),
]  # fmt: skip


@pytest.mark.parametrize("tree", BROKEN, ids=lambda tree: repr(tree)[:60])
def test_a_broken_tree_is_a_checkpoint_error(tree: object) -> None:
    """Never KeyError, TypeError, ValueError or what torch raises."""
    read = {"x": memoryview(b"abcd"), "none": memoryview(b"")}.__getitem__
    with pytest.raises(CheckpointError, match=r"'here|its root"):
        decode({"here": tree}, read)


def test_copy_into_wants_a_target_of_the_exact_size() -> None:
    """A caller's mistake must not write past a leaf."""
    for value in (torch.ones(2), np.ones(2, "f4")):
        with pytest.raises(ValueError, match="8"):
            copy_into(memoryview(bytearray(9)), value)
