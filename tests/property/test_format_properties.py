"""Properties of the format and of retention that hold for every input."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_ckpt.format.image import (
    DATA_ALIGNMENT,
    HEADER_CAP,
    ITEM_BITS,
    lay_out,
    read_header,
    shard_name,
)
from hpc_ckpt.format.manifest import Manifest, ShardRecord
from hpc_ckpt.rundir import CheckpointKey
from hpc_ckpt.settings import Best, Keep
from hpc_ckpt.tiers.retention import Entry, surplus

counts = st.integers(0, 2**63 - 1)
any_text = st.text(st.characters(), max_size=8)  # lone surrogates included: JSON escapes them
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
    lambda name: name != "__metadata__"
)
digests = st.text("0123456789abcdef", min_size=32, max_size=32)


# ── manifest ──────────────────────────────────────────────────────────────────────────────
def json_values() -> st.SearchStrategy[Any]:
    scalars = (
        st.none()
        | st.booleans()
        | st.integers(-(2**130), 2**130)
        | st.floats(allow_nan=False, allow_infinity=False)
        | any_text
    )
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4),
        max_leaves=12,
    )


@st.composite
def shard_records(draw: st.DrawFn, world_size: int) -> tuple[ShardRecord, ...]:
    named = st.builds(shard_name, st.integers(0, world_size - 1), st.integers(0, 3))
    files = draw(st.lists(named, min_size=1, max_size=4, unique=True))
    records = []
    for file in files:
        chunk = 4096 * draw(st.integers(1, 2**18))
        hashes = draw(st.lists(digests, min_size=1, max_size=4))
        size = chunk * (len(hashes) - 1) + draw(st.integers(1, chunk))
        records.append(ShardRecord(file, size, chunk, tuple(hashes)))
    return tuple(records)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    world_size = draw(st.integers(1, 10**6))
    parent = draw(st.none() | st.builds(CheckpointKey, counts, counts, counts))
    return Manifest(
        chain=draw(any_text.filter(bool)),
        generation=draw(counts),
        step=draw(counts),
        revision=draw(counts),
        parent=None if parent is None else parent.directory_name,
        epoch=draw(counts),
        wall_time=draw(st.floats(0, 1e15)),
        reason=draw(any_text),
        metrics=draw(st.dictionaries(any_text, st.floats(), max_size=3)),
        world_size=world_size,
        threads=draw(st.integers(1, 10**6)),
        versions=draw(st.dictionaries(any_text, any_text, max_size=3)),
        tree=draw(json_values()),
        aliases=draw(st.dictionaries(any_text, any_text, max_size=3)),
        shards=draw(shard_records(world_size)),
    )


@settings(max_examples=150, deadline=None)
@given(manifests())
def test_a_manifest_comes_back_from_its_bytes(manifest: Manifest) -> None:
    """from_bytes ∘ to_bytes = id, to_bytes ∘ from_bytes = id, and the same content as itself."""
    data = manifest.to_bytes()
    restored = Manifest.from_bytes(data)
    assert restored == manifest
    assert restored.to_bytes() == data
    assert restored.same_content(manifest)
    json.loads(data, parse_constant=_refuse)


def _refuse(name: str) -> object:
    raise AssertionError(f"{name} is not JSON")


# ── layout ────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Spec:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        items = 1
        for extent in self.shape:
            items *= extent
        return items * ITEM_BITS[self.dtype] // 8


whole_bytes = st.sampled_from(sorted(name for name, bits in ITEM_BITS.items() if bits % 8 == 0))
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
leaf_lists = st.lists(
    st.builds(Spec, names, whole_bytes, shapes), max_size=40, unique_by=lambda leaf: leaf.name
)


@settings(max_examples=150, deadline=None)
@given(leaf_lists, st.sampled_from([4096, 8192, HEADER_CAP]))
def test_spans_cover_the_data_exactly(leaves: list[Spec], header_cap: int) -> None:
    """No overlap, no gap, items aligned, item sizes descending, every leaf in one file."""
    layouts = lay_out(leaves, header_cap=header_cap)
    order = [name for layout in layouts for name in layout.spans]
    by_name = {leaf.name: leaf for leaf in leaves}
    assert sorted(order) == sorted(by_name)
    expected = sorted(leaves, key=lambda leaf: (-ITEM_BITS[leaf.dtype], leaf.nbytes % 64 != 0))
    assert order == [leaf.name for leaf in expected]
    for number, layout in enumerate(layouts):
        assert layout.file_name == shard_name(0, number)
        assert len(layout.header) % DATA_ALIGNMENT == 0
        assert len(layout.header) <= header_cap
        position = len(layout.header)
        for name, (start, end) in layout.spans.items():
            leaf = by_name[name]
            assert (start, end - start) == (position, leaf.nbytes)
            assert start % (ITEM_BITS[leaf.dtype] // 8) == 0
            position = end
        assert position == layout.size


@settings(max_examples=75, deadline=None)
@given(leaf_lists)
def test_both_readers_read_what_was_laid_out(leaves: list[Spec]) -> None:
    """Our strict reader and safetensors itself: the same leaves at the same places."""
    (layout,) = lay_out(leaves)
    data = layout.header + bytes(layout.size - len(layout.header))
    ours = read_header(data)
    assert {name: (leaf.start, leaf.end) for name, leaf in ours.items()} == layout.spans
    theirs = {name: (part["dtype"], part["shape"]) for name, part in safetensors.deserialize(data)}
    assert theirs == {leaf.name: (leaf.dtype, list(leaf.shape)) for leaf in leaves}


# ── retention ─────────────────────────────────────────────────────────────────────────────
keys = st.builds(
    CheckpointKey, st.integers(1, 4), st.integers(0, 12).map(lambda n: n * 5), st.integers(0, 1)
)
entries = st.lists(
    st.builds(
        Entry, keys, st.dictionaries(st.just("loss"), st.floats(), max_size=1), st.booleans()
    ),
    min_size=1,
    max_size=20,
    unique_by=lambda entry: entry.key,
)
keeps = st.builds(
    Keep,
    last=st.integers(1, 5),
    every=st.none() | st.integers(1, 30),
    best=st.none() | st.builds(Best, metric=st.just("loss"), mode=st.sampled_from(["max", "min"])),
)


@settings(max_examples=300, deadline=None)
@given(entries, keeps, st.integers(1, 5), st.data())
def test_retention_never_takes_what_it_must_not(
    present: list[Entry], keep: Keep, own: int, data: st.DataObject
) -> None:
    """Pins, the newest verified and all above it, newer generations; and twice is once."""
    newest = data.draw(st.sampled_from([entry.key for entry in present]))
    gone = surplus(present, keep, own_generation=own, committed=newest)
    assert gone == sorted(set(gone))
    pinned = {entry.key for entry in present if entry.pinned}
    assert not pinned & set(gone)
    assert all(key < newest and key.generation <= own for key in gone)
    left = [entry for entry in present if entry.key not in gone]
    assert surplus(left, keep, own_generation=own, committed=newest) == []


@settings(max_examples=200, deadline=None)
@given(entries, keeps, st.data())
def test_retention_keeps_all_that_was_asked_for(
    present: list[Entry], keep: Keep, data: st.DataObject
) -> None:
    """The newest N, every Nth step and the best value are all still there afterwards."""
    newest = max(entry.key for entry in present)
    gone = set(surplus(present, keep, own_generation=9, committed=newest))
    left = [entry for entry in present if entry.key not in gone]
    assert sorted(e.key for e in left)[-keep.last :] == sorted(e.key for e in present)[-keep.last :]
    if keep.every is not None:
        assert all(key.step % keep.every for key in gone)
    if keep.best is not None:
        assert _best_value(left, keep.best) == _best_value(present, keep.best)


def _best_value(present: list[Entry], best: Best) -> float | None:
    values = [entry.metrics["loss"] for entry in present if "loss" in entry.metrics]
    known = [value for value in values if value == value]
    choose = max if best.mode == "max" else min
    return choose(known) if known else None
