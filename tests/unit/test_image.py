"""The file image: valid safetensors, page-aligned, gapless; and the strict header reader."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from hpc_ckpt.errors import HeaderError, UnsupportedState
from hpc_ckpt.format import image
from hpc_ckpt.format.image import (
    DATA_ALIGNMENT,
    HEADER_CAP,
    ITEM_BITS,
    header_length,
    lay_out,
    parse_shard_name,
    read_header,
    shard_name,
)
from hpc_ckpt.testing import PlainLeaf, image_of

NUMPY_DTYPES = {
    "F64": "<f8", "I64": "<i8", "U64": "<u8", "C64": "<c8", "F32": "<f4", "I32": "<i4",
    "U32": "<u4", "F16": "<f2", "I16": "<i2", "U16": "<u2", "I8": "i1", "U8": "u1", "BOOL": "?",
}  # fmt: skip


@dataclass(frozen=True)
class Spec:
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def sample_leaves() -> list[PlainLeaf]:
    return [
        PlainLeaf("bytes", b"\x07" * 3, "U8"),
        PlainLeaf("half", np.arange(3, dtype="<f2").tobytes(), "F16"),
        PlainLeaf("wide", np.arange(5, dtype="<f8").tobytes(), "F64"),
        PlainLeaf("empty", b"", "F32"),
        PlainLeaf("single", np.arange(7, dtype="<f4").tobytes(), "F32"),
    ]


def write(path: Path, leaves: list[PlainLeaf]) -> Path:
    (layout,) = lay_out(leaves)
    path.write_bytes(image_of(layout, leaves))
    return path


# ── conformance with the real library ─────────────────────────────────────────────────────
def test_safetensors_reads_every_numpy_dtype(tmp_path: Path) -> None:
    """Shards are valid safetensors files: any tool opens them."""
    arrays = {name: np.arange(6).astype(code).reshape(2, 3) for name, code in NUMPY_DTYPES.items()}
    specs = [Spec(name, name, (2, 3), array.nbytes) for name, array in arrays.items()]
    (layout,) = lay_out(specs)
    leaves = [PlainLeaf(name, array.tobytes(), name) for name, array in arrays.items()]
    path = tmp_path / layout.file_name
    path.write_bytes(image_of(layout, leaves))
    loaded = safetensors.numpy.load_file(path)
    assert set(loaded) == set(arrays)
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)


def test_torch_reads_the_dtypes_numpy_lacks(tmp_path: Path) -> None:
    """bfloat16 and float8 come back bit for bit."""
    tensors = {
        "BF16": torch.randn(4, 5).to(torch.bfloat16),
        "F8_E4M3": torch.randn(9).to(torch.float8_e4m3fn),
        "F8_E5M2": torch.randn(3).to(torch.float8_e5m2),
    }
    specs = [Spec(n, n, tuple(t.shape), t.numel() * t.itemsize) for n, t in tensors.items()]
    (layout,) = lay_out(specs)
    leaves = [
        PlainLeaf(n, t.reshape(-1).view(torch.uint8).numpy().tobytes(), n)
        for n, t in tensors.items()
    ]
    path = tmp_path / layout.file_name
    path.write_bytes(image_of(layout, leaves))
    loaded = safetensors.torch.load_file(path)
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8))


def test_safe_open_gives_our_metadata_and_a_scalar(tmp_path: Path) -> None:
    """The header names its maker; a 0-dim leaf keeps its empty shape."""
    (layout,) = lay_out([Spec("scalar", "F64", (), 8)])
    path = tmp_path / layout.file_name
    path.write_bytes(layout.header + np.float64(2.5).tobytes())
    with safetensors.safe_open(path, framework="numpy") as opened:
        assert opened.metadata() == {"format": "hpc_ckpt", "version": "1"}
        assert opened.get_tensor("scalar") == np.array(2.5)
        assert opened.get_tensor("scalar").shape == ()


def test_no_leaves_still_make_a_valid_file(tmp_path: Path) -> None:
    """A rank without tensors has a shard like any other."""
    (layout,) = lay_out([])
    assert (layout.size, layout.spans) == (DATA_ALIGNMENT, {})
    path = tmp_path / layout.file_name
    path.write_bytes(layout.header)
    assert safetensors.numpy.load_file(path) == {}
    assert read_header(path.read_bytes()) == {}


@pytest.mark.parametrize(
    "name", ["", "model.weight", "größe/雪/🧊", 'quo"te\\back', "new\nline", "\0", "\u2028", "~"]
)
def test_any_unicode_name_is_kept(tmp_path: Path, name: str) -> None:
    """Names are the user's keys; the header holds them as they are."""
    path = write(tmp_path / "x.safetensors", [PlainLeaf(name, b"\1\2\3")])
    assert list(safetensors.numpy.load_file(path)) == [name]
    assert list(read_header(path.read_bytes())) == [name]


def test_our_reader_and_the_library_agree(tmp_path: Path) -> None:
    """Two independent readers see the same names, dtypes, shapes and bytes."""
    path = write(tmp_path / "x.safetensors", sample_leaves())
    data = path.read_bytes()
    ours = read_header(data)
    with safetensors.safe_open(path, framework="numpy") as theirs:
        assert set(ours) == set(theirs.keys())
        for name, leaf in ours.items():
            part = theirs.get_slice(name)
            assert (leaf.dtype, list(leaf.shape)) == (part.get_dtype(), part.get_shape())
            assert data[leaf.start : leaf.end] == theirs.get_tensor(name).tobytes()


# ── layout ────────────────────────────────────────────────────────────────────────────────
def test_data_starts_at_a_page_and_leaves_descend_in_item_size() -> None:
    """Descending item size, then the given order: aligned items and no gaps."""
    (layout,) = lay_out(sample_leaves())
    assert list(layout.spans) == ["wide", "empty", "single", "half", "bytes"]
    assert len(layout.header) % DATA_ALIGNMENT == 0
    position = len(layout.header)
    for name, (start, end) in layout.spans.items():
        item = {"wide": 8, "half": 2, "bytes": 1}.get(name, 4)
        assert (start, start % item) == (position, 0)
        position = end
    assert position == layout.size


def test_the_header_is_padded_with_spaces_only() -> None:
    """8 bytes of length, JSON, spaces."""
    (layout,) = lay_out(sample_leaves())
    text = layout.header[8:]
    assert int.from_bytes(layout.header[:8], "little") == len(text)
    assert text.rstrip(b" ").endswith(b"}")
    assert set(json.loads(text)) == {"__metadata__", *layout.spans}


def test_a_header_above_the_cap_splits_the_leaves_over_files(tmp_path: Path) -> None:
    """Every part is a valid file under the cap, and together they hold every leaf once."""
    leaves = [PlainLeaf(f"layer.{n}.weight", bytes([n]) * n) for n in range(200)]
    layouts = lay_out(leaves, rank=3, header_cap=4096)
    assert [layout.file_name for layout in layouts[:3]] == [
        "rank-00003.safetensors",
        "rank-00003.1.safetensors",
        "rank-00003.2.safetensors",
    ]
    assert max(len(layout.header) for layout in layouts) == 4096
    found: dict[str, bytes] = {}
    for layout in layouts:
        path = tmp_path / layout.file_name
        path.write_bytes(image_of(layout, leaves))
        part = safetensors.numpy.load_file(path)
        assert not set(part) & set(found)
        found |= {name: array.tobytes() for name, array in part.items()}
    assert found == {leaf.name: leaf.data for leaf in leaves}


def test_a_split_fills_each_header_as_far_as_it_goes() -> None:
    """The count of bytes that decides the split is exact: one leaf more would not fit."""
    leaves = [Spec(f"n{n}", "U8", (10,), 10) for n in range(300)]
    first, second = lay_out(leaves, header_cap=12288)[:2]
    assert len(first.header) == 12288
    moved = next(iter(second.spans))
    (together,) = lay_out([*leaves[: len(first.spans)], Spec(moved, "U8", (10,), 10)])
    assert len(together.header) == 12288 + DATA_ALIGNMENT


@pytest.mark.parametrize(
    ("leaf", "error", "message"),
    [
        (Spec("__metadata__", "U8", (1,), 1), UnsupportedState, "reserves this name"),
        (Spec("bad\ud800name", "U8", (1,), 1), UnsupportedState, "not valid Unicode"),
        (Spec("x" * 5000, "U8", (1,), 1), UnsupportedState, "too long"),
        (Spec("x", "C128", (1,), 16), ValueError, "not a safetensors dtype"),
        (Spec("x", "F32", (2,), 4), ValueError, "cannot hold"),
        (Spec("x", "F32", (-1,), 4), ValueError, "cannot hold"),
        (Spec("x", "F4", (3,), 1), ValueError, "cannot hold"),
    ],
)
def test_a_leaf_no_file_can_hold_is_refused(
    leaf: Spec, error: type[Exception], message: str
) -> None:
    """Refused before a byte is written, by name."""
    with pytest.raises(error, match=message):
        lay_out([leaf], header_cap=4096)


def test_two_leaves_of_one_name_are_refused() -> None:
    """One of them would be lost."""
    with pytest.raises(ValueError, match="two leaves are named 'x'"):
        lay_out([PlainLeaf("x", b""), PlainLeaf("x", b"1")])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rank-00000.safetensors", (0, 0)),
        ("rank-00012.3.safetensors", (12, 3)),
        ("rank-123456.safetensors", (123456, 0)),
        ("rank-000001.safetensors", None),
        ("rank-00000.0.safetensors", None),
        ("rank-0.safetensors", None),
        ("../rank-00000.safetensors", None),
        ("rank-00000.safetensors\n", None),
        ("rank-٠٠٠٠٠.safetensors", None),
    ],
)
def test_shard_names_have_one_spelling(name: str, expected: tuple[int, int] | None) -> None:
    """A name that is not exactly what shard_name gives is no shard."""
    assert parse_shard_name(name) == expected
    if expected is not None:
        assert shard_name(*expected) == name


# ── the strict reader ─────────────────────────────────────────────────────────────────────
def file_with(record: Any, data: bytes = b"", *, pad: bytes = b" ") -> bytes:
    text = record if isinstance(record, bytes) else json.dumps(record).encode()
    text += pad * (-(8 + len(text)) % DATA_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: Any, *offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


TWO = {"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 2, 4)}

BROKEN = {
    "no length": (b"\0" * 7, "at least 8"),
    "length beyond the file": ((2**63).to_bytes(8, "little") + b"{}", "the file has 10"),
    "data not at a page": ((2).to_bytes(8, "little") + b"{}", "multiple of 4096"),
    "not an object": (file_with([1]), "one JSON object"),
    "leading space": (file_with(b" {}"), "one JSON object"),
    "padded with zeros": (file_with({}, pad=b"\0"), "one JSON object"),
    "not utf-8": (file_with(b'{"\xff":1}'), "not JSON"),
    "not json": (file_with(b"{nonsense}"), "not JSON"),
    "nested too deeply": (file_with(b'{"a":' + b"[" * 99999 + b"}"), "not JSON"),
    "a giant number": (file_with(b'{"a":' + b"9" * 9999 + b"}"), "not JSON"),
    "a name twice": (file_with(b'{"a":1,"a":2}'), "'a' comes twice"),
    "twice, with space": (file_with(b'{"b" :{"c":1},"a":1,"a":2}'), "'a' comes twice"),
    "twice, escaped": (file_with(b'{"\\u0061":1,"a":2}'), "'a' comes twice"),
    "twice, beside a colon": (file_with(b'{"b":{"c":":"},"a":1,"a":2}'), "'a' comes twice"),
    "a field twice": (file_with(b'{"a":{"dtype":"U8","dtype":"U8"}}'), "'dtype' comes twice"),
    "a field twice, deep": (file_with(b'{"a":[{"b":1,"b":2}]}'), "'b' comes twice"),
    "metadata not text": (file_with({"__metadata__": {"a": 1}}), "map from text to text"),
    "entry not a map": (file_with({"a": 1}), "exactly"),
    "entry with more": (file_with({"a": {**TWO["a"], "x": 1}}, b"12"), "exactly"),
    "entry with less": (file_with({"a": {"dtype": "U8", "shape": [2]}}, b"12"), "exactly"),
    "unknown dtype": (file_with({"a": entry("F7", [2], 0, 2)}, b"12"), "unknown dtype"),
    "dtype not text": (file_with({"a": entry([], [2], 0, 2)}, b"12"), "unknown dtype"),  # type: ignore[arg-type] # meant
    "negative extent": (file_with({"a": entry("U8", [-2], 0, 2)}, b"12"), "lists of counts"),
    "extent not whole": (file_with({"a": entry("U8", [2.0], 0, 2)}, b"12"), "lists of counts"),
    "extent a bool": (file_with({"a": entry("U8", [True], 0, 1)}, b"1"), "lists of counts"),
    "three offsets": (file_with({"a": entry("U8", [2], 0, 1, 2)}, b"12"), "lists of counts"),
    "end before start": (file_with({"a": entry("U8", [2], 2, 0)}, b"12"), "outside the file"),
    "beyond the end": (file_with({"a": entry("U8", [3], 0, 3)}, b"12"), "outside the file"),
    "shape too large": (file_with({"a": entry("U8", [10**9] * 99, 0, 2)}, b"12"), "do not hold"),
    "shape too small": (file_with({"a": entry("U8", [1], 0, 2)}, b"12"), "do not hold"),
    "half a byte": (file_with({"a": entry("F4", [3], 0, 1)}, b"1"), "do not hold"),
    "overlap": (file_with({**TWO, "b": entry("U8", [3], 1, 4)}, b"1234"), "overlaps"),
    "shared bytes": (file_with({**TWO, "b": TWO["a"]}, b"12"), "overlaps"),
    "gap": (file_with({**TWO, "b": entry("U8", [1], 3, 4)}, b"1234"), "leaves a gap"),
    "gap at the start": (file_with({"a": entry("U8", [1], 1, 2)}, b"12"), "leaves a gap"),
    "trailing bytes": (file_with(TWO, b"12345"), "end at byte"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_header_is_refused_by_its_rule(case: str) -> None:
    """Each rule of docs/format.md by itself."""
    data, message = BROKEN[case]
    with pytest.raises(HeaderError, match=message):
        read_header(data)


def test_what_the_rules_allow_is_read() -> None:
    """The file the broken ones are made from is itself accepted."""
    leaves = read_header(memoryview(file_with(TWO, b"1234")))
    assert {name: (leaf.start, leaf.end) for name, leaf in leaves.items()} == {
        "a": (DATA_ALIGNMENT, DATA_ALIGNMENT + 2),
        "b": (DATA_ALIGNMENT + 2, DATA_ALIGNMENT + 4),
    }


def test_a_length_is_checked_before_it_is_believed() -> None:
    """Eight bytes must not make a reader allocate: first the file's size, then the cap."""
    with pytest.raises(HeaderError, match="the file has 100"):
        header_length((2**50).to_bytes(8, "little"), 100)
    with pytest.raises(HeaderError, match="more than"):
        header_length((HEADER_CAP - 8 + DATA_ALIGNMENT).to_bytes(8, "little"), 2**60)
    assert header_length((HEADER_CAP - 8).to_bytes(8, "little"), 2**60) == HEADER_CAP


def test_a_header_longer_than_what_was_given_is_refused() -> None:
    """A caller that read too little learns it, and does not parse half a header."""
    data = file_with(TWO, b"1234")
    with pytest.raises(HeaderError, match="only 100 were given"):
        read_header(data[:100], len(data))


def test_the_library_refuses_what_we_refuse() -> None:
    """Our rules are no looser than safetensors' own, where both have one."""
    ours_alone = {
        "data not at a page", "negative extent", "extent not whole", "a name twice",
        "twice, with space", "twice, escaped", "twice, beside a colon", "a field twice",
        "a field twice, deep",
        "entry with more", "padded with zeros", "leading space",
    }  # fmt: skip
    for case, (data, _) in BROKEN.items():
        if case not in ours_alone:
            with pytest.raises(safetensors.SafetensorError):
                safetensors.deserialize(data)


def test_every_dtype_is_one_the_library_knows() -> None:
    """The table of dtypes has no name that safetensors would reject."""
    for name, bits in ITEM_BITS.items():
        items = 8 if bits % 8 else 1
        (layout,) = lay_out([Spec("x", name, (items,), items * bits // 8)])
        data = layout.header + bytes(layout.size - len(layout.header))
        assert len(safetensors.deserialize(data)) == 1
    assert image.HEADER_CAP < 100_000_000
