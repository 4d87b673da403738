"""What did not change is not copied again: decided by digests of the program's own memory."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpc_ckpt.engine.persist import persist
from hpc_ckpt.engine.snapshot import Camera
from hpc_ckpt.engine.unmoved import has_digests
from hpc_ckpt.errors import CheckpointError
from hpc_ckpt.format.image import lay_out
from hpc_ckpt.format.manifest import CHUNK, Manifest, ShardRecord, digest
from hpc_ckpt.rundir import CheckpointKey
from hpc_ckpt.state.leaves import view_at
from hpc_ckpt.state.tree import encode
from hpc_ckpt.tiers.directory import DirectoryTier

STEADY = frozenset({"still", "lies"})
WORDS = CHUNK // 4 + 1000
"""So that the leaves of the image meet inside its chunks."""


def state_with(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "moves": torch.rand(1000, generator=generator),
        "still": torch.rand(WORDS, generator=generator),
        "lies": torch.rand(WORDS, generator=generator).to(torch.float16),
    }


def chunks_of(image: memoryview, chunk: int = CHUNK) -> tuple[str, ...]:
    return tuple(digest(image[at : at + chunk]) for at in range(0, len(image), chunk))


def taken_and_told(camera: Camera, state: object) -> tuple[memoryview, ...]:
    """The images of a snapshot, digested as a save does, and given back."""
    snapshot = camera.take(state, STEADY)
    images = snapshot.images
    for number, image in enumerate(images):
        if snapshot.steady[number]:
            snapshot.learn(number, chunks_of(image))
    snapshot.release()
    return images


# ── the comparison ────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("chunk", [4096, 64 * 1024, CHUNK, 2 * CHUNK])
@pytest.mark.parametrize("place", [None, 0, 3, WORDS // 2, WORDS - 1])
def test_one_other_bit_anywhere_is_another_image(chunk: int, place: int | None) -> None:
    """Whatever the chunks: the digests are those of the image that a copy would give."""
    leaves = encode({name: state_with()[name] for name in sorted(STEADY)}).leaves
    (layout,) = lay_out(leaves, first_part=1)
    values = {leaf.name: leaf.value for leaf in leaves}
    image = bytearray(layout.header)
    for name in layout.spans:
        image += bytes(view_at(values[name].data_ptr(), values[name].nbytes))
    expected = chunks_of(memoryview(image), chunk)
    if place is not None:
        values["still"].view(torch.int32)[place] ^= 1
    here = [values[name].data_ptr() for name in layout.spans]
    assert (place is None) == has_digests(layout, here, expected, chunk)


def test_digests_of_another_count_are_of_another_image() -> None:
    """Of an image with other chunks, or cut."""
    leaves = encode({"still": state_with()["still"]}).leaves
    (layout,) = lay_out(leaves, first_part=1)
    assert not has_digests(layout, [leaves[0].value.data_ptr()], ())


# ── the camera ────────────────────────────────────────────────────────────────────────────
def test_what_did_not_change_is_not_copied_again() -> None:
    """Seen by a mark in the buffer, which a copy would have overwritten; the rest is copied."""
    camera, state = Camera(), state_with()
    first = taken_and_told(camera, state)
    first[1][-1] ^= 1
    marked = chunks_of(first[1])
    state["moves"] += 1
    second = camera.take(state, STEADY)
    moved = torch.frombuffer(second.images[0][-4000:], dtype=torch.float32)
    assert ({1}, marked) == (set(second.digests), chunks_of(second.images[1]))
    assert torch.equal(state["moves"], moved)


@pytest.mark.parametrize("place", [0, WORDS // 2, WORDS - 1])
def test_what_changed_is_copied(place: int) -> None:
    """By one bit; and its old digests are forgotten."""
    camera, state = Camera(), state_with()
    taken_and_told(camera, state)
    state["still"].view(torch.int32)[place] ^= 1
    second = camera.take(state, STEADY)
    fresh = Camera().take(state, STEADY)
    assert ({}, chunks_of(fresh.images[1])) == (second.digests, chunks_of(second.images[1]))


def test_the_same_bytes_elsewhere_are_the_same() -> None:
    """An address says nothing."""
    camera, state = Camera(), state_with()
    taken_and_told(camera, state)
    state["still"] = state["still"].clone()
    assert {1} == set(camera.take(state, STEADY).digests)


def test_an_image_nobody_has_digested_is_copied() -> None:
    """The second buffer, or a save that failed."""
    camera, state = Camera(), state_with()
    camera.take(state, STEADY).release()
    assert {} == camera.take(state, STEADY).digests


def test_leaves_that_are_not_one_stretch_are_copied() -> None:
    """Their bytes in file order lie nowhere but in the buffer."""
    camera, state = Camera(), state_with()
    state["still"] = torch.rand(2000, 1000).t()
    taken_and_told(camera, state)
    assert {} == camera.take(state, STEADY).digests


def test_a_buffer_that_has_changed_by_itself_is_not_committed(tmp_path: Path) -> None:
    """Bad memory: what is written must have the digests it was compared by; the next snapshot
    copies it again."""

    def never_reached(_shards: tuple[ShardRecord, ...]) -> Manifest:
        raise AssertionError("a manifest was made")

    camera, state = Camera(), state_with()
    taken_and_told(camera, state)[1][-1] ^= 1
    second = camera.take(state, STEADY)
    tier = DirectoryTier(tmp_path)
    with pytest.raises(CheckpointError, match="is this node's memory sound"):
        persist(second, tier, CheckpointKey(1, 2), never_reached, lambda: None)
    second.release()
    third = camera.take(state, STEADY)
    fresh = Camera().take(state, STEADY)
    assert chunks_of(fresh.images[1]) == chunks_of(third.images[1])
