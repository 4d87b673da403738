"""Checkpoints that use shards of older ones: referring, what holds what, and what may go."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_ckpt.errors import CorruptCheckpoint, NewerCheckpoint
from hpc_ckpt.format.image import lay_out
from hpc_ckpt.format.manifest import ShardRecord, TreeText, json_text
from hpc_ckpt.rundir import MANIFEST_NAME, CheckpointKey
from hpc_ckpt.settings import Best, Keep
from hpc_ckpt.testing import PlainLeaf, image_of, make_checkpoint, make_newer, plain_manifest
from hpc_ckpt.tiers.base import Committed
from hpc_ckpt.tiers.directory import DirectoryTier
from hpc_ckpt.tiers.drain import drain
from hpc_ckpt.tiers.retention import Entry, lacking, retain, surplus

STILL = [PlainLeaf("still", bytes(range(256)) * 50)]


def key(step: int, generation: int = 1) -> CheckpointKey:
    return CheckpointKey(generation, step)


def nobody() -> None:
    """A guard that lets everything pass."""


@pytest.fixture
def tier(tmp_path: Path) -> DirectoryTier:
    return DirectoryTier(tmp_path / "checkpoints", chunk=4096)


def make_holder(tier: DirectoryTier, step: int) -> ShardRecord:
    """Returns what others need to refer to its shard."""
    make_checkpoint(tier, key(step), STILL)
    (record,) = tier.manifest(key(step)).shards
    return replace(record, holder=key(step).directory_name)


def make_dependent(
    tier: DirectoryTier, step: int, *records: ShardRecord, **fields: object
) -> Committed:
    """Writes a shard of its own, in a second file, and refers to others."""
    own = [PlainLeaf("moving", bytes([step]) * 10)]
    (layout,) = lay_out(own, first_part=7)
    with tier.stage(key(step)) as staging:
        mine = staging.write_shard(layout, image_of(layout, own))
        for record in records:
            staging.refer(record)
        return staging.commit(plain_manifest(key(step), [mine, *records], **fields), nobody)


# ── referring ─────────────────────────────────────────────────────────────────────────────
def test_a_dependent_counts_only_its_own_bytes(tier: DirectoryTier) -> None:
    """That is what was written, and what its directory takes."""
    committed = make_dependent(tier, 20, make_holder(tier, 10))
    assert sum(file.stat().st_size for file in committed.path.iterdir()) == committed.size
    assert ([], []) == (tier.verify(key(10)), tier.verify(key(20)))


def test_one_must_say_who_holds_it(tier: DirectoryTier) -> None:
    """A record without a holder would be a shard of one's own that was never written."""
    record = replace(make_holder(tier, 10), holder=None)
    with tier.stage(key(20)) as staging, pytest.raises(ValueError, match="no holder"):
        staging.refer(record)


def test_what_is_gone_or_cut_cannot_be_referred_to(tier: DirectoryTier) -> None:
    """An OSError: the caller then writes the shard itself."""
    record = make_holder(tier, 10)
    with tier.stage(key(20)) as staging:
        for wrong in (
            replace(record, holder=key(9).directory_name),
            replace(record, file="rank-00000.3.safetensors"),
        ):
            with pytest.raises(FileNotFoundError):
                staging.refer(wrong)
        os.truncate(tier.path_of(key(10)) / record.file, record.size - 1)
        with pytest.raises(OSError, match=f"{record.size - 1} bytes"):
            staging.refer(record)
        with pytest.raises(ValueError, match="other shards"):
            staging.commit(plain_manifest(key(20), [record]), nobody)


@pytest.mark.parametrize("moved", ["checkpoint", "shard"])
def test_what_a_reader_would_not_follow_cannot_be_referred_to(
    tier: DirectoryTier, tmp_path: Path, moved: str
) -> None:
    """Moved to another disk with a link left in its place: what referred to it would be committed
    and never restored."""
    record = make_holder(tier, 10)
    place = tier.path_of(key(10))
    place = place if moved == "checkpoint" else place / record.file
    place.rename(tmp_path / "archive")
    place.symlink_to(tmp_path / "archive")
    with tier.stage(key(20)) as staging:
        with pytest.raises(OSError, match=record.file):
            staging.refer(record)
        with pytest.raises(ValueError, match="other shards"):
            staging.commit(plain_manifest(key(20), [record]), nobody)


def test_a_tier_may_itself_be_reached_by_a_link(tier: DirectoryTier, tmp_path: Path) -> None:
    """Only names in a manifest may not lead elsewhere: sites link scratch into homes."""
    record = make_holder(tier, 10)
    (tmp_path / "link").symlink_to(tier.path)
    make_dependent(DirectoryTier(tmp_path / "link"), 20, record)
    assert [] == tier.verify(key(20))


def test_a_manifest_names_what_was_referred_to_and_nothing_else(tier: DirectoryTier) -> None:
    """Neither a holder that was not asked for nor one that was forgotten is committed."""
    record, other = make_holder(tier, 10), make_holder(tier, 11)
    for referred, named in ([], [record]), ([record], [other]), ([record, other], [record]):
        with tier.stage(key(20)) as staging:
            for one in referred:
                staging.refer(one)
            with pytest.raises(ValueError, match="other shards"):
                staging.commit(plain_manifest(key(20), named), nobody)
    assert [key(10), key(11)] == tier.keys()


def test_the_same_state_is_reused_wherever_its_bytes_lie(tier: DirectoryTier) -> None:
    """A second save at the same step that wrote the shard again restores to the same."""
    record = make_holder(tier, 10)
    first = make_dependent(tier, 20, record)
    own = [PlainLeaf("moving", bytes([20]) * 10)]
    (layout,) = lay_out(own, first_part=7)
    (still,) = lay_out(STILL)
    with tier.stage(key(20)) as staging:
        records = [
            staging.write_shard(layout, image_of(layout, own)),
            staging.write_shard(still, image_of(still, STILL)),
        ]
        again = staging.commit(plain_manifest(key(20), records), nobody)
    assert (first.key, True) == (again.key, again.reused)


# ── who holds what ────────────────────────────────────────────────────────────────────────
def test_a_summary_tells_metrics_and_holders(tier: DirectoryTier) -> None:
    """Those that hold shards, not the checkpoint before it; by this tier and by a new one."""
    records = [make_holder(tier, 10), make_holder(tier, 11)]
    before = key(11).directory_name
    make_dependent(tier, 20, *records, metrics={"loss": 0.5}, parent=before)
    for one in (tier, DirectoryTier(tier.path)):
        summary = one.summary(key(20))
        assert ({"loss": 0.5}, {key(10), key(11)}) == (summary.metrics, summary.holders)
        assert frozenset() == one.summary(key(10)).holders


def test_a_manifest_is_read_once(tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention asks at every commit; only a manifest that changed is read again."""
    make_dependent(tier, 20, make_holder(tier, 10))
    fresh, reads = DirectoryTier(tier.path), []
    real = fresh.manifest
    monkeypatch.setattr(fresh, "manifest", lambda one: reads.append(one) or real(one))
    for _ in range(3):
        assert {key(10)} == fresh.summary(key(20)).holders
    assert [key(20)] == reads
    path = tier.path_of(key(20)) / MANIFEST_NAME
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    fresh.summary(key(20))
    assert [key(20)] * 2 == reads


# ── removing ──────────────────────────────────────────────────────────────────────────────
def test_a_holder_stays_while_something_refers_to_it(tier: DirectoryTier) -> None:
    """Whoever asks: remove() says no, until the last that refers to it has gone."""
    record = make_holder(tier, 10)
    for step in (20, 30):
        make_dependent(tier, step, record)
    assert not tier.remove(key(10))
    assert tier.remove(key(20))
    assert not tier.remove(key(10))
    assert [] == tier.verify(key(30))
    assert tier.remove(key(30))
    assert tier.remove(key(10))
    assert [] == tier.keys()


def test_a_holder_stays_while_a_dependent_is_being_written(tier: DirectoryTier) -> None:
    """From the moment it was referred to; given up again without a commit, it may go."""
    record = make_holder(tier, 10)
    with tier.stage(key(20)) as staging:
        assert tier.remove(key(9))
        staging.refer(record)
        assert not tier.remove(key(10))
    assert tier.remove(key(10))


def test_a_broken_dependent_holds_nothing(tier: DirectoryTier) -> None:
    """It could not be restored anyway."""
    make_dependent(tier, 20, make_holder(tier, 10))
    (tier.path_of(key(20)) / MANIFEST_NAME).write_bytes(b"")
    assert tier.remove(key(10))


# ── retention ─────────────────────────────────────────────────────────────────────────────
def entry(step: int, *holders: int, pinned: bool = False) -> Entry:
    return Entry(key(step), {}, pinned, frozenset(key(one) for one in holders))


def gone(entries: Iterable[Entry], keep: Keep, newest: int) -> list[int]:
    found = surplus(list(entries), keep, own_generation=1, committed=key(newest))
    return [one.step for one in found]


def test_what_a_kept_one_refers_to_stays() -> None:
    """However old; what nothing refers to goes."""
    entries = [entry(1), entry(2), entry(3, 2), entry(4, 2), entry(5, 2)]
    assert [1, 3] == gone(entries, Keep(last=2), 5)


def test_a_holder_goes_with_the_last_that_refers_to_it() -> None:
    """In the same sweep as far as the rule is concerned, dependents or not."""
    entries = [entry(1), entry(2, 1), entry(3), entry(4)]
    assert [1, 2] == gone(entries, Keep(last=2), 4)


def test_holders_stay_in_turn() -> None:
    """A checkpoint kept for another's sake keeps what it refers to itself."""
    entries = [entry(1), entry(2, 1), entry(3, 2), entry(4)]
    assert [4] == gone([*entries, entry(5, 3)], Keep(last=1), 5)


@pytest.mark.parametrize("newest", [3, 4])
def test_pins_and_newer_ones_keep_their_holders(newest: int) -> None:
    """Whatever the reason that it stays."""
    entries = [entry(1), entry(2, 1, pinned=True), entry(3), entry(4)]
    expected = [] if newest == 3 else [3]
    assert expected == gone(entries, Keep(last=1), newest)
    entries = [entry(1), entry(3), entry(4, 1)]
    assert [] == gone(entries, Keep(last=1), 3)


def test_a_holder_that_is_not_there_is_no_matter() -> None:
    """Lost already: nothing can be done about it here."""
    assert [2] == gone([entry(2), entry(3, 1)], Keep(last=1), 3)


@given(
    st.lists(st.sets(st.integers(0, 11), max_size=3), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(0, 11),
)
def test_nothing_that_stays_loses_a_holder(holders: list[set[int]], last: int, newest: int) -> None:
    """For any web of references; and what nothing needs is not kept."""
    entries = [entry(n, *(h for h in held if h < n)) for n, held in enumerate(holders)]
    newest = min(newest, len(entries) - 1)
    removed = set(gone(entries, Keep(last=last), newest))
    staying = [one for one in entries if one.key.step not in removed]
    needed = {holder.step for one in staying for holder in one.holders}
    wanted = set(range(max(0, newest + 1 - last), len(entries)))
    assert set() == needed & removed
    assert wanted | needed == {one.key.step for one in staying}


def test_retain_leaves_every_kept_checkpoint_whole(tier: DirectoryTier) -> None:
    """Manifest by manifest, on a disk."""
    record = make_holder(tier, 1)
    for step in range(2, 6):
        make_dependent(tier, step, record)
    keep = Keep(last=2)
    removed = retain(tier, keep, generation=1, committed=key(5), guard=nobody)
    assert [key(2), key(3)] == removed
    assert [[]] * 3 == [tier.verify(key(step)) for step in (1, 4, 5)]
    for step in (6, 7):
        make_holder(tier, step)
    removed = retain(tier, keep, generation=1, committed=key(7), guard=nobody)
    # The holder is refused while those that refer to it are there, and goes next time.
    removed += retain(tier, keep, generation=1, committed=key(7), guard=nobody)
    assert [key(1), key(4), key(5)] == sorted(removed)
    assert [key(6), key(7)] == tier.keys()


# ── a tree that is text already ───────────────────────────────────────────────────────────
TREE = {"a": [1, 2.5, None, True, "é"], "$b": {"c": []}}


def test_a_tree_as_text_is_written_as_the_tree(tier: DirectoryTier) -> None:
    """The same bytes, and the same content to compare with."""
    record = make_holder(tier, 10)
    plain = plain_manifest(key(20), [record], tree=TREE)
    text = plain_manifest(key(20), [record], tree=TreeText(json_text(TREE)))
    assert plain.to_bytes() == text.to_bytes()
    assert plain.same_content(text)
    other = plain_manifest(key(20), [record], tree=TreeText(json_text({**TREE, "a": 1})))
    assert not text.same_content(other)
    assert plain == type(plain).from_bytes(text.to_bytes())


# ── what a newer version has made ─────────────────────────────────────────────────────────
def test_what_a_newer_version_has_made_stays_with_all_it_may_refer_to(tier: DirectoryTier) -> None:
    """Only that version can tell; it counts for nothing, and what is newer goes as ever."""
    make_dependent(tier, 3, make_holder(tier, 1))
    for step in (2, 4, 5, 6):
        make_checkpoint(tier, key(step))
    make_newer(tier.path_of(key(3)))
    fresh = DirectoryTier(tier.path, chunk=4096)
    removed = retain(fresh, Keep(last=2), generation=1, committed=key(6), guard=nobody)
    assert ([key(4)], [key(step) for step in (1, 2, 3, 5, 6)]) == (removed, fresh.keys())
    assert not fresh.remove(key(1))


def test_what_a_newer_version_has_made_is_not_replaced(tier: DirectoryTier, tmp_path: Path) -> None:
    """A drain takes only what is broken for something to replace."""
    fast = DirectoryTier(tmp_path / "fast", name="fast", chunk=4096)
    for place in (fast, tier):
        make_checkpoint(place, key(1), STILL)
    make_newer(tier.path_of(key(1)))
    with pytest.raises(NewerCheckpoint):
        drain(fast, tier, key(1), nobody)
    with pytest.raises(NewerCheckpoint):
        tier.manifest(key(1))


def test_what_a_newer_version_has_made_is_not_looked_for(
    tier: DirectoryTier, tmp_path: Path
) -> None:
    """This one cannot drain it."""
    fast = DirectoryTier(tmp_path / "fast", name="fast", chunk=4096)
    for step in (2, 4):
        make_checkpoint(fast, key(step), STILL)
    make_newer(fast.path_of(key(2)))
    assert [key(4)] == lacking(fast, tier, Keep(last=1, every=2))


# ── a bad moment ──────────────────────────────────────────────────────────────────────────
def refuse_to_open(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system refuses one manifest, as it does when a process has too many files open."""
    real, ending = os.open, f"{key(step).directory_name}/{MANIFEST_NAME}"

    def refusing(path: object, *rest: object, **more: object) -> int:
        if str(path).endswith(ending):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refusing)


def test_the_best_survives_a_moment_in_which_it_cannot_be_read(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be looked at may be anything: nothing is removed this time."""
    for step, loss in ((1, 0.1), (2, 0.5), (3, 0.6), (4, 0.7)):
        make_checkpoint(tier, key(step), metrics={"loss": loss})
    fresh, keep = (
        DirectoryTier(tier.path, chunk=4096),
        Keep(last=2, best=Best(metric="loss", mode="min")),
    )
    with monkeypatch.context() as moment:
        refuse_to_open(1, moment)
        with pytest.raises(CorruptCheckpoint, match="unreadable"):
            retain(fresh, keep, generation=1, committed=key(4), guard=nobody)
    assert [key(step) for step in (1, 2, 3, 4)] == fresh.keys()
    removed = retain(fresh, keep, generation=1, committed=key(4), guard=nobody)
    assert [key(2)] == removed


def test_a_holder_survives_a_moment_in_which_its_dependent_cannot_be_read(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither retention nor a removal by name takes it away."""
    make_dependent(tier, 3, make_holder(tier, 1))
    make_checkpoint(tier, key(4))
    fresh = DirectoryTier(tier.path, chunk=4096)
    refuse_to_open(3, monkeypatch)
    with pytest.raises(CorruptCheckpoint):
        retain(fresh, Keep(last=2), generation=1, committed=key(4), guard=nobody)
    with pytest.raises(CorruptCheckpoint):
        fresh.remove(key(1))
    assert key(1) in set(fresh.keys())
