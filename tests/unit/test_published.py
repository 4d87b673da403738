"""A save that hung may not take the place of what was saved meanwhile."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_ckpt.engine.published import Published
from hpc_ckpt.errors import BrokenOff, Fenced
from hpc_ckpt.format.manifest import Manifest, ShardRecord, digest
from hpc_ckpt.rundir import CheckpointKey


def manifest(step: int) -> Manifest:
    shard = ShardRecord("rank-00000.safetensors", 1, 4096, (digest(b"x"),))
    return Manifest(
        chain="c", generation=1, step=step, revision=0, parent=None, epoch=0, wall_time=0.0,
        reason="", metrics={}, world_size=1, threads=1, versions={}, tree={}, aliases={},
        shards=(shard,),
    )  # fmt: skip


def order(*, given_up: bool) -> Any:
    return SimpleNamespace(given_up=given_up)


def test_one_that_was_given_up_does_not_outrank_a_later_save_of_its_step() -> None:
    """It would become a revision of it, or the same name with another state in another tier."""
    published, key = Published(lambda: None), CheckpointKey(1, 4)
    published.check(order(given_up=True), key)
    published.add(manifest(4), 0)
    with pytest.raises(BrokenOff, match="saved again"):
        published.check(order(given_up=True), key)
    published.check(order(given_up=False), key)
    published.check(order(given_up=True), CheckpointKey(1, 3))


def test_the_lease_is_looked_at() -> None:
    def fenced() -> None:
        raise Fenced(1, 2)

    with pytest.raises(Fenced):
        Published(fenced).check(order(given_up=False), CheckpointKey(1, 4))


class Slow:
    """A key; while it is compared, another thread says what it has published."""

    def __init__(self, key: CheckpointKey, meanwhile: threading.Thread) -> None:
        self._key, self._meanwhile = key, meanwhile

    def __gt__(self, key: CheckpointKey) -> bool:
        self._meanwhile.start()
        self._meanwhile.join(0.2)  # it may have to wait for this very comparison
        return self._key > key

    def __lt__(self, key: CheckpointKey) -> bool:
        return self._key < key


def test_two_threads_that_publish_never_go_back() -> None:
    """The drain brings an older one home while a newer one is committed."""
    published = Published(lambda: None)
    published.stands(CheckpointKey(1, 1), lasts=True)
    newer = CheckpointKey(1, 3)
    other = threading.Thread(target=published.stands, args=(newer,), kwargs={"lasts": True})
    older: Any = Slow(CheckpointKey(1, 2), other)
    published.stands(older, lasts=False)
    other.join(60)
    assert (newer, newer) == (published.newest, published.lasting)
