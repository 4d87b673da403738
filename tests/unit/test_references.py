"""Removing a checkpoint while others refer to it, in storage that hangs or not."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_ckpt.format.image import lay_out
from hpc_ckpt.format.manifest import ShardRecord
from hpc_ckpt.rundir import CheckpointKey
from hpc_ckpt.testing import PlainLeaf, image_of, make_checkpoint, plain_manifest
from hpc_ckpt.tiers import staging as staging_module
from hpc_ckpt.tiers.directory import DirectoryTier

HOLDER = CheckpointKey(1, 10)
WAIT_S = 20.0


@pytest.fixture
def tier(tmp_path: Path) -> DirectoryTier:
    tier = DirectoryTier(tmp_path / "checkpoints", chunk=4096)
    make_checkpoint(tier, HOLDER, [PlainLeaf("still", bytes(range(256)))])
    return tier


def held(tier: DirectoryTier, holder: CheckpointKey = HOLDER) -> ShardRecord:
    (record,) = tier.manifest(holder).shards
    return replace(record, holder=holder.directory_name)


def save(tier: DirectoryTier, step: int, *records: ShardRecord) -> None:
    key, own = CheckpointKey(1, step), [PlainLeaf("moving", bytes([step % 256]) * 10)]
    (layout,) = lay_out(own, first_part=7)
    with tier.stage(key) as staging:
        mine = staging.write_shard(layout, image_of(layout, own))
        for record in records:
            staging.refer(record)
        staging.commit(plain_manifest(key, [mine, *records]), lambda: None)


class Hang:
    """The first call that fits does not come back until it is over."""

    def __init__(self) -> None:
        self.begun, self.over = threading.Event(), threading.Event()

    def here(self) -> None:
        if not self.begun.is_set():
            self.begun.set()
            self.over.wait(WAIT_S)


@pytest.fixture
def hang() -> Iterator[Hang]:
    hang = Hang()
    yield hang
    hang.over.set()


def started(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def hang_in_a_removal(where: str, hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, look = Path.rename, DirectoryTier._is_held

    def renaming(self: Path, target: Path) -> Path:
        if ".trash-" in str(target):
            hang.here()
        return rename(self, target)

    def looking(self: DirectoryTier, key: CheckpointKey) -> bool:
        hang.here()
        return look(self, key)

    if where == "rename":
        monkeypatch.setattr(Path, "rename", renaming)
    else:
        monkeypatch.setattr(DirectoryTier, "_is_held", looking)


# ── storage that hangs ────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("where", ["rename", "look"])
def test_a_removal_that_hangs_holds_up_no_save(
    tier: DirectoryTier, hang: Hang, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Nor the removal of another."""
    save(tier, 11)
    hang_in_a_removal(where, hang, monkeypatch)
    removal = started(lambda: tier.remove(HOLDER))
    assert hang.begun.wait(WAIT_S)
    saved, removed = started(lambda: save(tier, 20)), started(lambda: tier.remove(_key(11)))
    for thread in (saved, removed):
        thread.join(WAIT_S / 2)
    assert (False, False) == (saved.is_alive(), removed.is_alive())
    assert {HOLDER, _key(20)} == set(tier.keys())
    hang.over.set()
    removal.join(WAIT_S)
    assert [_key(20)] == tier.keys()


@pytest.mark.parametrize("where", ["rename", "look"])
def test_what_is_being_removed_is_not_referred_to(
    tier: DirectoryTier, hang: Hang, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It is there to be seen, but its removal may end any moment; a second removal leaves it to
    the first."""
    hang_in_a_removal(where, hang, monkeypatch)
    record = held(tier)
    removal = started(lambda: tier.remove(HOLDER))
    assert hang.begun.wait(WAIT_S)
    with pytest.raises(FileNotFoundError, match="removed"):
        save(tier, 20, record)
    assert not tier.remove(HOLDER)
    hang.over.set()
    removal.join(WAIT_S)
    assert [] == tier.keys()


def test_a_look_at_a_holder_that_hangs_holds_up_no_other_save(
    tier: DirectoryTier, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a removal; the holder stays while it hangs, and after it."""
    real, record = staging_module._keep_young, held(tier)

    def keep_young(shard: int, manifest: Path) -> None:
        hang.here()
        real(shard, manifest)

    monkeypatch.setattr(staging_module, "_keep_young", keep_young)
    save(tier, 11)
    slow = started(lambda: save(tier, 20, record))
    assert hang.begun.wait(WAIT_S)
    saved = started(lambda: save(tier, 30))
    removed = started(lambda: tier.remove(_key(11)) and tier.remove(HOLDER))
    for thread in (saved, removed):
        thread.join(WAIT_S / 2)
    assert (False, False) == (saved.is_alive(), removed.is_alive())
    hang.over.set()
    slow.join(WAIT_S)
    assert not tier.remove(HOLDER)
    assert {HOLDER: [], _key(20): [], _key(30): []} == _defects(tier)


# ── storage that does not ─────────────────────────────────────────────────────────────────
def test_a_removal_that_came_to_nothing_is_forgotten(tier: DirectoryTier) -> None:
    """Held by another, pinned or failed: it can be referred to, and removed later."""
    save(tier, 20, held(tier))
    assert not tier.remove(HOLDER)
    save(tier, 30, held(tier))
    for step in (20, 30):
        assert tier.remove(_key(step))
    assert tier.remove(HOLDER)


def test_a_dependent_that_is_committed_during_a_removal_keeps_its_holder(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was referred to before the removal began, and published while that looked who holds."""
    real, record = DirectoryTier._is_held, held(tier)

    def late(self: DirectoryTier, key: CheckpointKey) -> bool:
        with pytest.raises(FileNotFoundError):
            save(self, 20, record)
        return real(self, key)

    with tier.stage(_key(30)) as staging:
        staging.refer(record)
        assert not tier.remove(HOLDER)
        staging.commit(plain_manifest(_key(30), [record]), lambda: None)
        assert not tier.remove(HOLDER)
    monkeypatch.setattr(DirectoryTier, "_is_held", late)
    assert not tier.remove(HOLDER)
    assert {HOLDER: [], _key(30): []} == _defects(tier)


def test_a_race_leaves_no_dependent_without_its_holder(tier: DirectoryTier) -> None:
    """Whoever comes first: the other one gives way."""
    for step in range(100, 160, 2):
        holder, together = _key(step), threading.Barrier(3)
        make_checkpoint(tier, holder, [PlainLeaf("still", bytes(256))])
        record = held(tier, holder)
        removed: list[bool] = []

        def refer(step: int = step, record: ShardRecord = record) -> None:
            together.wait()  # noqa: B023 - ended within this turn
            with contextlib.suppress(FileNotFoundError):
                save(tier, step + 1, record)

        def remove(holder: CheckpointKey = holder) -> None:
            together.wait()  # noqa: B023
            removed.append(tier.remove(holder))  # noqa: B023

        threads = [started(work) for work in (refer, remove, remove)]
        for thread in threads:
            thread.join(WAIT_S)
        assert (holder in set(tier.keys())) is not any(removed)
    assert [[]] * len(tier.keys()) == list(_defects(tier).values())


def _key(step: int) -> CheckpointKey:
    return CheckpointKey(1, step)


def _defects(tier: DirectoryTier) -> dict[CheckpointKey, list[object]]:
    return {key: list(tier.verify(key)) for key in tier.keys()}  # noqa: SIM118 - a tier
