"""A few chunks of what a checkpoint refers to, after each save, round and round."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_ckpt.engine.scrub import CHUNKS, Scrubber
from hpc_ckpt.format.image import lay_out
from hpc_ckpt.rundir import MANIFEST_NAME, CheckpointKey
from hpc_ckpt.testing import PlainLeaf, image_of, make_checkpoint, plain_manifest
from hpc_ckpt.tiers.directory import DirectoryTier

CHUNK = 4096
COUNT = 10
HOLDER, DEPENDENT = CheckpointKey(1, 1), CheckpointKey(1, 2)
SHARD = "rank-00000.safetensors"
ROUND = -(-COUNT // CHUNKS)


@pytest.fixture
def tier(tmp_path: Path) -> DirectoryTier:
    """A checkpoint that refers to ten chunks of another, and has a shard of its own."""
    tier = DirectoryTier(tmp_path, chunk=CHUNK)
    still = [PlainLeaf("still", bytes(range(256)) * ((COUNT - 1) * CHUNK // 256))]
    make_checkpoint(tier, HOLDER, still)
    held = replace(tier.manifest(HOLDER).shards[0], holder=HOLDER.directory_name)
    assert COUNT == len(held.digests)
    own = [PlainLeaf("moving", b"12345678")]
    (layout,) = lay_out(own, first_part=7)
    with tier.stage(DEPENDENT) as staging:
        mine = staging.write_shard(layout, image_of(layout, own))
        staging.refer(held)
        staging.commit(plain_manifest(DEPENDENT, [mine, held]), lambda: None)
    return tier


def looks(scrubber: Scrubber, tier: DirectoryTier, number: int = ROUND) -> list[list[str]]:
    return [scrubber.damaged(tier, DEPENDENT) for _ in range(number)]


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def test_what_is_sound_is_not_suspected(tier: DirectoryTier) -> None:
    """However often it is looked at."""
    assert [[]] * 2 * ROUND == looks(Scrubber(), tier, 2 * ROUND)


@pytest.mark.parametrize("chunk", range(COUNT))
def test_every_chunk_has_its_turn(tier: DirectoryTier, chunk: int) -> None:
    """A few at a time, each within one round; and again in the next."""
    flip(tier.path_of(HOLDER) / SHARD, chunk * CHUNK + 5)
    scrubber = Scrubber()
    found = looks(scrubber, tier)
    assert [HOLDER.directory_name] == found[chunk // CHUNKS]
    assert [[]] * (chunk // CHUNKS) == found[: chunk // CHUNKS]
    assert [HOLDER.directory_name] in looks(scrubber, tier)


def test_each_tier_has_a_place_of_its_own(tier: DirectoryTier) -> None:
    """Looking at one does not move the other on."""
    flip(tier.path_of(HOLDER) / SHARD, 5)
    scrubber, other = Scrubber(), DirectoryTier(tier.path, name="other", chunk=CHUNK)
    assert [HOLDER.directory_name] == scrubber.damaged(tier, DEPENDENT)
    assert [HOLDER.directory_name] == scrubber.damaged(other, DEPENDENT)


@pytest.mark.parametrize("loss", ["gone", "cut"])
def test_a_shard_that_is_lost_is_damage(tier: DirectoryTier, loss: str) -> None:
    """Found at once: none of its chunks need be looked at."""
    path = tier.path_of(HOLDER) / SHARD
    path.unlink() if loss == "gone" else os.truncate(path, CHUNK)
    assert [HOLDER.directory_name] == Scrubber().damaged(tier, DEPENDENT)


def test_its_own_shards_are_not_its_holders(tier: DirectoryTier) -> None:
    """They were written a moment ago; what reads them back is retention's."""
    flip(tier.path_of(DEPENDENT) / "rank-00000.7.safetensors", -1)
    assert [[]] * ROUND == looks(Scrubber(), tier)


@pytest.mark.parametrize("name", [SHARD, MANIFEST_NAME])
def test_what_cannot_be_read_just_now_is_not_damage(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It is asked again after the next save."""
    flip(tier.path_of(HOLDER) / SHARD, 5)
    real = os.open

    def refusing(path: object, *rest: object, **more: object) -> int:
        if str(path).endswith(name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *rest, **more)  # type: ignore[arg-type]  # as it was called

    scrubber = Scrubber()
    with monkeypatch.context() as moment:
        moment.setattr(os, "open", refusing)
        assert [] == scrubber.damaged(tier, DEPENDENT)
    assert [HOLDER.directory_name] in looks(scrubber, tier)
