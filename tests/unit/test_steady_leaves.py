"""Guesses about leaves that do not change, and what is known to hold their bytes."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from hpc_ckpt.engine.snapshot import Snapshot
from hpc_ckpt.engine.steady import LEAST, SHARE, Steady
from hpc_ckpt.format.image import ImageLayout, lay_out
from hpc_ckpt.format.manifest import ShardRecord, digest
from hpc_ckpt.testing import PlainLeaf, image_of

CHUNK = 64 * 1024
HOLDER = "step-000000001-g00000001"


def leaf(name: str, size: int = LEAST, salt: int = 0) -> PlainLeaf:
    return PlainLeaf(name, random.Random(f"{name} {salt}").randbytes(size))


def shard(*leaves: PlainLeaf, part: int = 1) -> tuple[ImageLayout, memoryview]:
    (layout,) = lay_out(list(leaves), first_part=part)
    return layout, image_of(layout, leaves)


def record_of(layout: ImageLayout, image: memoryview, chunk: int = CHUNK) -> ShardRecord:
    digests = tuple(digest(image[at : at + chunk]) for at in range(0, layout.size, chunk))
    return ShardRecord(layout.file_name, layout.size, chunk, digests)


def snapshot(moving: list[PlainLeaf], still: list[PlainLeaf] | None = None) -> Snapshot:
    parts = [shard(*moving, part=0)] + ([shard(*still)] if still else [])
    return Snapshot(
        make_tree=dict,
        aliases={},
        layouts=tuple(layout for layout, _ in parts),
        images=tuple(image for _, image in parts),
        steady=(False, True)[: len(parts)],
        give_back=lambda: None,
    )


# ── where bytes lie already ───────────────────────────────────────────────────────────────
def test_the_same_bytes_are_found_where_they_lie() -> None:
    """Once their shard is durable, under the name of the checkpoint that has it."""
    steady, (layout, image) = Steady(), shard(leaf("w"))
    assert steady.held(layout, image, CHUNK) is None
    record = record_of(layout, image)
    steady.committed(record, HOLDER)
    assert replace(record, holder=HOLDER) == steady.held(layout, image, CHUNK)


def test_one_that_refers_passes_on_who_holds() -> None:
    """A shard that was referred to stays with the one that has the file."""
    steady, (layout, image) = Steady(), shard(leaf("w"))
    record = replace(record_of(layout, image), holder=HOLDER)
    steady.committed(record, "step-000000009-g00000001")
    assert record == steady.held(layout, image, CHUNK)


@pytest.mark.parametrize("found", ["before it is committed", "before it is looked for"])
def test_a_damaged_holder_does_not_come_back_with_a_save_under_way(found: str) -> None:
    """The drain finds the damage while a save that refers to it is on its way to its commit."""
    layout, image = shard(leaf("w"))
    record = replace(record_of(layout, image), holder=HOLDER)
    steady = Steady({"w"}, [record])
    if found == "before it is committed":
        assert record == steady.held(layout, image, CHUNK)
    steady.forget(HOLDER)
    steady.committed(record, "step-000000009-g00000001")
    assert steady.held(layout, image, CHUNK) is None
    assert {"w"} == steady.expected
    again = "step-000000010-g00000001"
    steady.committed(replace(record, holder=None), again)
    assert replace(record, holder=again) == steady.held(layout, image, CHUNK)


def test_what_an_earlier_process_knew_is_known() -> None:
    """Given at the start, from the checkpoint that was restored."""
    layout, image = shard(leaf("w"))
    record = replace(record_of(layout, image), holder=HOLDER)
    steady = Steady({"w"}, [record])
    assert ({"w"}, record) == (steady.expected, steady.held(layout, image, CHUNK))


@pytest.mark.parametrize("place", [0, 5000, LEAST, LEAST + 4095])
def test_one_other_bit_is_other_bytes(place: int) -> None:
    """Anywhere, in the header too."""
    layout, image = shard(leaf("w"))
    steady = Steady({"w"}, [replace(record_of(layout, image), holder=HOLDER)])
    image[place] ^= 1
    assert steady.held(layout, image, CHUNK) is None


@pytest.mark.parametrize(
    "other", [shard(leaf("v")), shard(leaf("w", LEAST + 8)), shard(leaf("w", salt=1))]
)
def test_another_name_size_or_value_is_another_shard(
    other: tuple[ImageLayout, memoryview],
) -> None:
    """All of it is in the digests."""
    layout, image = shard(leaf("w"))
    steady = Steady((), [replace(record_of(layout, image), holder=HOLDER)])
    assert steady.held(*other, CHUNK) is None


def test_chunks_of_another_size_are_not_comparable() -> None:
    """Written again: a manifest cannot promise digests that were not made."""
    layout, image = shard(leaf("w", 3 * CHUNK))
    steady = Steady((), [replace(record_of(layout, image, 2 * CHUNK), holder=HOLDER)])
    assert steady.held(layout, image, CHUNK) is None


def test_bytes_of_another_size_are_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that cannot be the same costs nothing."""
    layout, image = shard(leaf("w"))
    steady = Steady((), [replace(record_of(layout, image), holder=HOLDER)])

    def refuse(_: Any) -> str:
        raise AssertionError("hashed")

    monkeypatch.setattr("hpc_ckpt.engine.steady.digest", refuse)
    assert steady.held(*shard(leaf("w", LEAST + 1)), CHUNK) is None
    assert Steady({"w"}).held(layout, image, CHUNK) is None


# ── what to expect ────────────────────────────────────────────────────────────────────────
def test_large_leaves_that_nothing_changes_are_expected() -> None:
    """Small ones would cost more in a file of their own than they save."""
    steady = Steady()
    steady.suggest({"w": (LEAST, 4 * LEAST), "v": (LEAST, 4 * LEAST), "b": (LEAST - 1, 4 * LEAST)})
    assert {"w", "v"} == steady.expected


@pytest.mark.parametrize(("total", "worth"), [(10 * LEAST, True), (10 * LEAST + 10, False)])
def test_a_small_part_of_the_state_is_not_worth_a_file(total: int, worth: bool) -> None:
    """A tenth of all bytes, together."""
    assert 0.1 == SHARE
    steady = Steady()
    steady.suggest({"w": (LEAST, total)})
    assert ({"w"} if worth else set()) == steady.expected


def test_nothing_suggested_is_nothing_expected() -> None:
    """No frozen parameter, no second file."""
    steady = Steady()
    steady.suggest({})
    assert frozenset() == steady.expected


def test_equal_at_two_steps_makes_a_candidate() -> None:
    """One look is no guess."""
    steady = Steady()
    steady.learn(snapshot([leaf("w"), leaf("v", salt=1)]), 1)
    assert frozenset() == steady.expected
    steady.learn(snapshot([leaf("w"), leaf("v", salt=2)]), 2)
    assert {"w"} == steady.expected


def test_the_same_step_twice_says_nothing() -> None:
    """Nothing was trained between the two."""
    steady = Steady()
    for _ in range(3):
        steady.learn(snapshot([leaf("w")]), 1)
    assert frozenset() == steady.expected


@pytest.mark.parametrize("place", [0, LEAST // 2 + 100, LEAST - 1])
def test_the_ends_and_the_middle_are_looked_at(place: int) -> None:
    """A change in any of the three pages is seen."""
    steady, changed = Steady(), bytearray(leaf("w").data)
    changed[place] ^= 1
    steady.learn(snapshot([leaf("w")]), 1)
    steady.learn(snapshot([PlainLeaf("w", bytes(changed))]), 2)
    assert frozenset() == steady.expected


def test_a_leaf_that_changes_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thousand of them are looked at while somebody waits for the save."""
    steady, looks = Steady(), 0

    def count(data: memoryview) -> str:
        nonlocal looks
        looks += 1
        return digest(data)

    monkeypatch.setattr("hpc_ckpt.engine.steady.digest", count)
    for step in range(10):
        steady.learn(snapshot([leaf("w", salt=step)]), step)
    assert (3 + 9, frozenset()) == (looks, steady.expected)


def test_a_leaf_that_does_not_change_any_more_is_expected() -> None:
    """A part that is frozen in the middle of the work: whole looks are compared again."""
    steady = Steady()
    for step, salt in enumerate((1, 2, 3, 3, 3)):
        assert frozenset() == steady.expected
        steady.learn(snapshot([leaf("w", salt=salt)]), step)
    assert {"w"} == steady.expected


def test_small_leaves_are_not_looked_at() -> None:
    """Nor guessed, however steady they are."""
    steady = Steady()
    for step in (1, 2, 3):
        steady.learn(snapshot([leaf("b", LEAST - 1)]), step)
    assert frozenset() == steady.expected


def test_a_leaf_that_is_set_apart_stays_so() -> None:
    """What is in the steady file is judged by its digests, not by samples."""
    steady = Steady({"w"})
    for step in (1, 2):
        steady.learn(snapshot([leaf("v", salt=step)], [leaf("w", salt=step)]), step)
    assert {"w"} == steady.expected


# ── wrong guesses ─────────────────────────────────────────────────────────────────────────
def test_a_leaf_that_changed_is_not_expected_again() -> None:
    """Only what lies in a chunk that changed; neither samples nor suggestions bring it back."""
    before = [leaf("a", 2 * CHUNK), leaf("b", 2 * CHUNK), leaf("c", 2 * CHUNK)]
    layout, image = shard(*before)
    steady = Steady({"a", "b", "c"}, [replace(record_of(layout, image), holder=HOLDER)])
    image[layout.spans["c"][1] - 1] ^= 1
    assert steady.held(layout, image, CHUNK) is None
    assert {"a", "b"} == steady.expected
    steady.suggest({"c": (2 * CHUNK, 3 * CHUNK)})
    for step in (1, 2, 3):
        steady.learn(snapshot([leaf("c", 2 * CHUNK)]), step)
    assert {"a", "b"} == steady.expected


def test_a_change_where_two_leaves_meet_is_both_s() -> None:
    """They share the chunk, and a digest cannot tell them apart."""
    layout, image = shard(leaf("a", 2 * CHUNK), leaf("b", 2 * CHUNK))
    steady = Steady({"a", "b"}, [replace(record_of(layout, image), holder=HOLDER)])
    image[layout.spans["b"][0]] ^= 1
    steady.held(layout, image, CHUNK)
    assert frozenset() == steady.expected


def test_what_was_expected_is_not_changed_under_who_asked() -> None:
    """The camera compares what it was given with what it is given now."""
    steady, (layout, image) = Steady(), shard(leaf("w"))
    steady.suggest({"w": (LEAST, LEAST)})
    given = steady.expected
    steady.committed(record_of(layout, image), HOLDER)
    image[layout.size - 1] ^= 1
    steady.held(layout, image, CHUNK)
    assert ({"w"}, frozenset()) == (given, steady.expected)
