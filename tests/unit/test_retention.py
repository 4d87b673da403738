"""Which checkpoints may go, and how they go."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_ckpt.errors import Fenced
from hpc_ckpt.rundir import MANIFEST_NAME, CheckpointKey
from hpc_ckpt.settings import Best, Keep
from hpc_ckpt.testing import PlainLeaf, make_checkpoint
from hpc_ckpt.tiers.directory import DirectoryTier
from hpc_ckpt.tiers.retention import Entry, retain, surplus


def key(step: int, generation: int = 1, revision: int = 0) -> CheckpointKey:
    return CheckpointKey(generation, step, revision)


def steps_removed(
    entries: Sequence[Entry], keep: Keep, newest: CheckpointKey | None = None, own: int = 1
) -> list[int]:
    newest = newest or max(entry.key for entry in entries)
    gone = surplus(entries, keep, own_generation=own, committed=newest)
    return [key.step for key in gone]


def plain(*steps: int) -> list[Entry]:
    return [Entry(key(step)) for step in steps]


def test_the_newest_n_stay() -> None:
    """Oldest first, whatever order the entries come in."""
    assert steps_removed(plain(40, 10, 30, 20), Keep(last=2)) == [10, 20]


def test_every_nth_step_stays() -> None:
    """Multiples are kept for ever."""
    assert steps_removed(plain(5, 10, 15, 20, 25), Keep(last=1, every=10)) == [5, 15]


@pytest.mark.parametrize(("mode", "best"), [("max", 20), ("min", 10)])
def test_the_best_stays(mode: str, best: int) -> None:
    """By the metric, upwards or downwards."""
    values = {10: 0.1, 20: 0.9, 30: 0.5, 40: 0.3}
    entries = [Entry(key(step), {"score": value}) for step, value in values.items()]
    keep = Keep(last=1, best=Best(metric="score", mode=mode))
    assert steps_removed(entries, keep) == sorted({10, 20, 30} - {best})


def test_of_equally_good_ones_the_newest_is_best() -> None:
    """A tie is decided the way readers decide: the newer one."""
    entries = [Entry(key(step), {"score": 1.0}) for step in (10, 20)] + plain(30)
    assert steps_removed(entries, Keep(last=1, best=Best(metric="score"))) == [10]


@pytest.mark.parametrize("mode", ["max", "min"])
def test_nan_and_no_value_are_never_best(mode: str) -> None:
    """A diverged run must not push out its best checkpoint."""
    values = {10: math.nan, 20: 2.0, 30: math.nan}
    entries = [Entry(key(step), {"loss": value}) for step, value in values.items()]
    entries += plain(40, 50)
    assert steps_removed(entries, Keep(last=1, best=Best(metric="loss", mode=mode))) == [10, 30, 40]


def test_without_any_value_best_keeps_nothing_more() -> None:
    """A metric nobody logs is not an error."""
    assert steps_removed(plain(10, 20), Keep(last=1, best=Best(metric="typo"))) == [10]


def test_pins_stay() -> None:
    """The user's word is last."""
    assert steps_removed([Entry(key(10), pinned=True), *plain(20, 30)], Keep(last=1)) == [20]


def test_the_newest_verified_and_all_above_it_stay() -> None:
    """What is newer may be broken: it counts for nothing, and the good one never goes."""
    assert steps_removed(plain(10, 20, 30, 40, 50), Keep(last=1), newest=key(30)) == [10, 20]
    assert steps_removed(plain(10, 20, 30, 40, 50), Keep(last=2), newest=key(30)) == [10]


def test_a_generation_above_our_own_is_not_ours_to_remove() -> None:
    """Even if the newest verified one is newer still."""
    entries = [Entry(key(5, 1)), Entry(key(5, 2)), Entry(key(5, 3))]
    gone = surplus(entries, Keep(last=1), own_generation=1, committed=key(5, 3))
    assert gone == [key(5, 1)]


def test_revisions_are_counted_one_by_one() -> None:
    """-r1 is newer than the plain one of the same step."""
    entries = [Entry(key(5)), Entry(key(5, revision=1))]
    gone = surplus(entries, Keep(last=1), own_generation=1, committed=key(5, revision=1))
    assert gone == [key(5)]


def test_where_all_are_broken_nothing_goes() -> None:
    """The committed one too, by what it refers to: no moment to remove anything."""
    entries = plain(10, 20, 30)
    broken = [entry.key for entry in entries]
    gone = surplus(entries, Keep(last=1), own_generation=1, committed=key(30), known_broken=broken)
    assert gone == []


# ── retain ────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def tier(tmp_path: Path) -> DirectoryTier:
    tier = DirectoryTier(tmp_path / "checkpoints")
    for step in (10, 20, 30, 40):
        make_checkpoint(
            tier, key(step), [PlainLeaf("w", bytes([step]))], metrics={"loss": 100.0 - step}
        )
    return tier


def nobody() -> None:
    """A guard that lets everything pass."""


def test_retain_removes_what_is_surplus_and_says_so(tier: DirectoryTier) -> None:
    """And nothing else: what stays is still valid."""
    removed = retain(tier, Keep(last=2), generation=1, committed=key(40), guard=nobody)
    assert removed == [key(10), key(20)]
    assert tier.keys() == [key(30), key(40)]
    assert [tier.verify(key(step)) for step in (30, 40)] == [[], []]
    assert not [name for name in tier.path.iterdir() if name.name.startswith(".")]


def test_retain_reads_metrics_from_the_manifests(tier: DirectoryTier) -> None:
    """The lowest loss is the last one here, the highest the first."""
    keep = Keep(last=1, best=Best(metric="loss", mode="max"))
    removed = retain(tier, keep, generation=1, committed=key(40), guard=nobody)
    assert removed == [key(20), key(30)]


def test_a_broken_manifest_has_no_metrics_and_stops_nothing(tier: DirectoryTier) -> None:
    """Retention must work on a directory with damage in it."""
    (tier.path_of(key(10)) / MANIFEST_NAME).write_bytes(b"")
    keep = Keep(last=1, best=Best(metric="loss", mode="max"))
    removed = retain(tier, keep, generation=1, committed=key(40), guard=nobody)
    assert removed == [key(10), key(30)]


def test_a_pin_file_keeps_a_checkpoint(tier: DirectoryTier) -> None:
    """Pinning is a file named PIN; the checkpoint stays valid with it."""
    tier.pin(key(10))
    removed = retain(tier, Keep(last=1), generation=1, committed=key(40), guard=nobody)
    assert removed == [key(20), key(30)]
    assert tier.verify(key(10)) == []
    tier.pin(key(10), pinned=False)
    removed = retain(tier, Keep(last=1), generation=1, committed=key(40), guard=nobody)
    assert removed == [key(10)]


def test_a_pin_set_while_retention_runs_is_seen(tier: DirectoryTier) -> None:
    """Looked at again right before each removal."""
    removed = retain(
        tier,
        Keep(last=1),
        generation=1,
        committed=key(40),
        guard=lambda: tier.pin(key(20)),
    )
    assert removed == [key(10), key(30)]


def test_the_guard_is_asked_before_each_removal(tier: DirectoryTier) -> None:
    """Fenced between two removals: the second does not happen."""
    calls: list[int] = []

    def guard() -> None:
        calls.append(len(tier.keys()))
        if len(calls) == 2:
            raise Fenced(1, 2)

    with pytest.raises(Fenced):
        retain(tier, Keep(last=1), generation=1, committed=key(40), guard=guard)
    assert calls == [4, 3]
    assert tier.keys() == [key(20), key(30), key(40)]


def test_nothing_goes_when_the_newest_verified_is_not_here(tier: DirectoryTier) -> None:
    """It lives in another tier, or has gone: this is no moment to delete anything."""
    removed = retain(tier, Keep(last=1), generation=1, committed=key(50), guard=nobody)
    assert removed == []
    assert len(tier.keys()) == 4


def test_a_pin_set_in_the_last_moment_is_seen(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the last look and the rename all manifests are read, which may take seconds."""
    real = DirectoryTier._is_held

    def slow(self: DirectoryTier, one: CheckpointKey) -> bool:
        held = real(self, one)
        if one == key(20):
            self.pin(one)
        return held

    monkeypatch.setattr(DirectoryTier, "_is_held", slow)
    removed = retain(tier, Keep(last=1), generation=1, committed=key(30), guard=lambda: None)
    assert (False, True) == (key(20) in removed, key(20) in tier.keys())  # noqa: SIM118 - a tier
    assert key(10) in removed
    assert [] == tier.verify(key(20))


def test_a_pin_set_right_after_the_last_look_of_retention_is_seen(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was told that it is pinned finds it."""
    real, looks = DirectoryTier.pinned, []

    def late(self: DirectoryTier, one: CheckpointKey) -> bool:
        found = real(self, one)
        if one == key(20):
            looks.append(found)
            if len(looks) == 2:  # the first makes the list
                self.pin(one)
        return found

    monkeypatch.setattr(DirectoryTier, "pinned", late)
    removed = retain(tier, Keep(last=1), generation=1, committed=key(30), guard=nobody)
    assert ([key(10)], [False, False]) == (removed, looks[:2])
    assert ([], True) == (tier.verify(key(20)), tier.pinned(key(20)))
