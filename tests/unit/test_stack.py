"""The stack: order, the search over all tiers, what was measured, and the last save's tier."""

from __future__ import annotations

import errno
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt.errors import CorruptCheckpoint, SpecError
from hpc_ckpt.format.defects import DefectKind
from hpc_ckpt.rundir import CheckpointKey, RunDir
from hpc_ckpt.testing import FaultyTier, PlainLeaf, make_checkpoint
from hpc_ckpt.tiers import asking
from hpc_ckpt.tiers.base import Tier
from hpc_ckpt.tiers.directory import DirectoryTier
from hpc_ckpt.tiers.stack import RECENT_RATES, Stack, open_stack
from hpc_ckpt.tiers.wishes import Survives, TierWish

GIB = 1024**3
OLD, MIDDLE, NEW = (CheckpointKey(1, step) for step in (10, 20, 30))


def stack_of(place: Path, *names: str, fragile: tuple[str, ...] = ()) -> Stack:
    tiers = [FaultyTier(place / name, name=name) for name in names]
    wishes = {name: TierWish(name, place, Survives.PROCESS) for name in fragile}
    return Stack(tiers, wishes=wishes)


def one_gib(tier: Tier) -> int:
    """What there is to be written, wherever."""
    return GIB


def order_of(stack: Stack) -> list[tuple[int, str]]:
    return [(key.step, tier.name) for key, tier in stack.newest_first()]


# ── order ─────────────────────────────────────────────────────────────────────────────────
def test_the_first_is_the_fastest_and_the_home_is_found_anywhere(tmp_path: Path) -> None:
    """The home is last unless the list names it elsewhere."""
    stack = stack_of(tmp_path, "local", "root", "archive")
    assert ("local", "root", "archive") == tuple(tier.name for tier in stack.tiers)
    assert ("local", "root") == (stack.first.name, stack.home.name)
    assert stack.tiers[2] is stack.named("archive")
    with pytest.raises(KeyError):
        stack.named("nowhere")


def test_a_stack_without_home_or_with_two_of_one_name_is_a_mistake(tmp_path: Path) -> None:
    """Of whoever builds it: every stack has exactly one home."""
    with pytest.raises(KeyError):
        stack_of(tmp_path, "local")
    with pytest.raises(ValueError, match="same name"):
        stack_of(tmp_path, "root", "root")


@pytest.mark.parametrize(
    ("failed", "expected"),
    [
        ("local", ["root", "shared", "archive"]),
        ("shared", ["root", "archive"]),
        ("root", ["shared", "archive"]),
    ],
)
def test_a_save_that_fails_goes_to_the_home_and_then_to_what_the_next_link_can_find(
    tmp_path: Path, failed: str, expected: list[str]
) -> None:
    stack = stack_of(tmp_path, "local", "shared", "root", "archive", fragile=("local",))
    assert expected == [tier.name for tier in stack.instead_of(stack.named(failed))]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("local", ["root", "shared", "archive"]),
        ("shared", ["root", "archive"]),
        ("root", ["archive"]),
        ("archive", ["root"]),
    ],
)
def test_a_checkpoint_is_drained_to_the_home_first_and_then_to_all_below(
    tmp_path: Path, source: str, expected: list[str]
) -> None:
    """Also from below: the home must have it in the end."""
    stack = stack_of(tmp_path, "local", "shared", "root", "archive")
    assert expected == [tier.name for tier in stack.targets(stack.named(source))]


# ── reading ───────────────────────────────────────────────────────────────────────────────
def test_the_newest_comes_first_and_of_equals_the_fastest(tmp_path: Path) -> None:
    """Every checkpoint of every tier, once."""
    stack = stack_of(tmp_path, "local", "shared", "root")
    for name, keys in {"local": [NEW], "shared": [OLD, NEW], "root": [OLD, MIDDLE]}.items():
        for key in keys:
            make_checkpoint(stack.named(name), key)
    expected = [(30, "local"), (30, "shared"), (20, "root"), (10, "shared"), (10, "root")]
    assert expected == order_of(stack)


def test_a_newer_one_that_appears_on_the_way_is_taken_next(tmp_path: Path) -> None:
    """A writer may have moved on while the newest was being read."""
    stack = stack_of(tmp_path, "local", "root")
    make_checkpoint(stack.home, MIDDLE)
    make_checkpoint(stack.home, OLD)
    found = stack.newest_first()
    assert (MIDDLE, stack.home) == next(found)
    make_checkpoint(stack.first, NEW)
    assert [(NEW, stack.first), (OLD, stack.home)] == list(found)


def test_nothing_anywhere_is_nothing(tmp_path: Path) -> None:
    """And no directory is made by looking."""
    assert [] == order_of(stack_of(tmp_path, "local", "root"))
    assert [] == list(tmp_path.iterdir())


def test_a_tier_that_cannot_be_listed_is_passed_over_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A node-local disk that died must not keep the run from its home."""
    stack = stack_of(tmp_path, "local", "root")
    local = stack.first
    assert isinstance(local, FaultyTier)
    for key in (OLD, NEW):
        make_checkpoint(stack.home, key)
    local.fail_at("keys", OSError(errno.EIO, "Input/output error"))
    with caplog.at_level(logging.WARNING):
        assert [(30, "root"), (10, "root")] == order_of(stack)
    assert ["tier local passed over: [Errno 5] Input/output error"] == caplog.messages


def test_a_home_that_cannot_be_listed_is_an_error(tmp_path: Path) -> None:
    """Starting afresh because of a file system's bad day would throw work away."""
    stack = stack_of(tmp_path, "local", "root")
    home = stack.home
    assert isinstance(home, FaultyTier)
    make_checkpoint(stack.first, OLD)
    home.fail_at("keys", OSError(errno.ESTALE, "Stale file handle"))
    with pytest.raises(OSError, match="Stale"):
        order_of(stack)


def test_a_broken_header_is_damage_however_long_the_look_at_the_rest_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken for a tier that hangs, it would be waited for in every link, and none would begin."""
    local = DirectoryTier(tmp_path / "local", name="local", chunk=8192)
    stack = Stack([local, DirectoryTier(tmp_path / "root", name="root")])
    make_checkpoint(local, NEW, [PlainLeaf("w", bytes(64 * 8192))])
    shard = local.path_of(NEW) / local.manifest(NEW).shards[0].file
    with shard.open("r+b") as file:
        file.seek(9)
        file.write(b"?")
    real = os.preadv

    def slow(*arguments: Any) -> int:
        time.sleep(0.03)
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", slow)
    monkeypatch.setattr(asking, "READING_S", 1.0)
    with pytest.raises(CorruptCheckpoint) as raised:
        stack.reader(local, NEW)
    assert [DefectKind.CHUNK_DIGEST] == [defect.kind for defect in raised.value.defects]


# ── measuring ─────────────────────────────────────────────────────────────────────────────
def test_the_slowest_of_the_recent_rates_counts(tmp_path: Path) -> None:
    """And is forgotten when it is no longer recent; nothing measured is not known."""
    stack = stack_of(tmp_path, "local", "root")
    assert stack.expected_s(stack.home, GIB) is None
    stack.note(stack.home, GIB, 4.0)
    stack.note(stack.home, 2 * GIB, 2.0)
    assert (8.0, None) == (stack.expected_s(stack.home, 2 * GIB), stack.expected_s(stack.first, 1))
    for _ in range(RECENT_RATES):
        stack.note(stack.home, GIB, 1.0)
    assert 2.0 == stack.expected_s(stack.home, 2 * GIB)


def test_a_commit_of_nothing_says_nothing_about_the_rate(tmp_path: Path) -> None:
    """A reused checkpoint is no measurement."""
    stack = stack_of(tmp_path, "root")
    stack.note(stack.home, 0, 1.0)
    assert stack.expected_s(stack.home, GIB) is None


# ── choosing ──────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("rates", "left_s", "expected"),
    [
        ({}, None, "root"),
        ({"root": 99}, None, "root"),
        ({}, 60, "root"),
        ({}, 20, "local"),
        ({"local": 1, "shared": 1}, 60, "root"),
        ({"local": 1, "shared": 1}, 20, "shared"),
        ({"local": 1, "shared": 5, "root": 40}, 60, "root"),
        ({"local": 1, "shared": 5, "root": 41}, 60, "shared"),
        ({"local": 1, "shared": 61, "root": 61}, 60, "local"),
        ({"local": 1, "root": 61}, 60, "local"),
        ({"local": 70, "shared": 80, "root": 90}, 60, "local"),
        ({"local": 80, "shared": 70, "root": 90}, 60, "shared"),
        ({"local": 1, "shared": 5, "root": 61}, -1, "local"),
    ],
)
def test_a_final_save_goes_to_the_home_or_as_far_down_as_time_allows(
    tmp_path: Path, rates: dict[str, float], left_s: float | None, expected: str
) -> None:
    """Rates in seconds per GiB, for a save of one GiB, which may be half as slow again."""
    stack = stack_of(tmp_path, "local", "shared", "root")
    for name, seconds in rates.items():
        stack.note(stack.named(name), GIB, seconds)
    assert expected == stack.choose(one_gib, left_s).name


def test_what_outlives_the_job_is_preferred_wherever_it_stands(tmp_path: Path) -> None:
    """A final save in a job's own directory goes with the job."""
    stack = stack_of(tmp_path, "shared", "local", "root", fragile=("local",))
    for name, seconds in {"shared": 5, "local": 1, "root": 99}.items():
        stack.note(stack.named(name), GIB, seconds)
    assert "shared" == stack.choose(one_gib, 10).name
    assert "local" == stack.choose(one_gib, 2).name
    assert [True, False, True] == [stack.outlives_job(tier) for tier in stack.tiers]


def test_a_run_without_other_tiers_has_no_choice(tmp_path: Path) -> None:
    """The home, however slow."""
    stack = stack_of(tmp_path, "root")
    stack.note(stack.home, 1, 1e9)
    assert {"root"} == {stack.choose(one_gib, left).name for left in (None, 0.0, 5.0)}


def test_a_tier_that_hangs_is_the_last_resort(tmp_path: Path) -> None:
    """Even the home: nobody hears of a save that hangs there."""
    stack = stack_of(tmp_path, "local", "shared", "root", fragile=("local",))
    for name in ("local", "shared", "root"):
        stack.note(stack.named(name), GIB, 1)
    assert "shared" == stack.choose(one_gib, 60, {"root"}).name
    assert "shared" == stack.choose(one_gib, None, {"root"}).name
    assert "local" == stack.choose(one_gib, 60, {"root", "shared"}).name
    assert "root" == stack.choose(one_gib, 60, {"root", "shared", "local"}).name


@pytest.mark.parametrize(
    ("hanging", "rates", "left_s", "expected"),
    [
        ({"root"}, {}, 60, "shared"),
        ({"root"}, {"local": 1}, None, "shared"),
        ({"root", "shared"}, {"local": 1, "root": 1}, 60, "root"),
        ({"root", "shared"}, {"local": 1}, None, "root"),
        ({"root", "shared"}, {"local": 1, "root": 50}, 60, "local"),
        ({"root"}, {"local": 70, "shared": 80, "root": 60}, 60, "shared"),
        (set(), {"local": 1, "shared": 5, "root": 61}, -1, "shared"),
    ],
)
def test_the_last_save_goes_with_the_job_only_if_nothing_else_is_in_time(
    tmp_path: Path,
    hanging: set[str],
    rates: dict[str, float],
    left_s: float | None,
    expected: str,
) -> None:
    """A home that hangs may answer again; nobody finds what lies in the job's own directory."""
    stack = stack_of(tmp_path, "local", "shared", "root", fragile=("local",))
    for name, seconds in rates.items():
        stack.note(stack.named(name), GIB, seconds)
    assert expected == stack.choose(one_gib, left_s, hanging, last=True).name


def test_what_a_tier_has_already_need_not_be_written_there(tmp_path: Path) -> None:
    """A tier that lacks the frozen part has to take all of it."""
    stack = stack_of(tmp_path, "local", "root")
    for name in ("local", "root"):
        stack.note(stack.named(name), GIB, 10)
    assert "root" == stack.choose(one_gib, 20).name
    assert "local" == stack.choose(lambda tier: GIB if tier is stack.first else 9 * GIB, 20).name


# ── opening ───────────────────────────────────────────────────────────────────────────────
def test_each_chain_has_its_own_place_in_a_shared_directory(tmp_path: Path) -> None:
    """<path>/<chain>/checkpoints, private; the home is the run directory's own."""
    rundir = RunDir(tmp_path / "run")
    wishes = (TierWish("local", tmp_path / "fast"), TierWish("root"))
    stack = open_stack(wishes, rundir=rundir, chain="0f-1")
    paths = [tier.path_of(OLD).parent for tier in stack.tiers]
    assert [tmp_path / "fast" / "0f-1" / "checkpoints", rundir.checkpoints] == paths
    assert (wishes[0], []) == (stack.wish(stack.first), list(tmp_path.iterdir()))
    rundir.create()
    made = make_checkpoint(stack.first, OLD).path
    modes = [place.stat().st_mode & 0o777 for place in (made, *made.parents[:3])]
    assert [0o700] * 4 == modes
    other = open_stack(wishes, rundir=RunDir(tmp_path / "other"), chain="0f-2")
    assert [] == order_of(other)


@pytest.mark.parametrize("second", ["fast", "link", "fast/../fast", "run", "run/checkpoints"])
def test_two_that_are_the_same_directory_are_refused(tmp_path: Path, second: str) -> None:
    """After links are followed; a copy beside the original protects from nothing."""
    (tmp_path / "fast").mkdir()
    (tmp_path / "link").symlink_to("fast")
    wishes = (TierWish("a", tmp_path / "fast"), TierWish("b", tmp_path / second), TierWish("root"))
    with pytest.raises(SpecError, match=r"tiers: '(a|root)' and 'b' are the same directory \(/"):
        open_stack(wishes, rundir=RunDir(tmp_path / "run"), chain="x")


@pytest.mark.parametrize("chain", ["..", "a/b", "", ".x", "a\n"])
def test_a_chain_id_that_is_no_name_leads_nowhere(tmp_path: Path, chain: str) -> None:
    """chain.json is a file that somebody may have edited."""
    wishes = (TierWish("local", tmp_path / "fast"), TierWish("root"))
    with pytest.raises(SpecError, match=r"chain\.json: the chain's id"):
        open_stack(wishes, rundir=RunDir(tmp_path / "run"), chain=chain)
    only_home = open_stack(wishes[1:], rundir=RunDir(tmp_path / "run"), chain=chain)
    assert isinstance(only_home.home, DirectoryTier)
