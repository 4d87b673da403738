"""Who may publish; a save that hung may not take the place of what was saved meanwhile."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_ckpt.engine import published as room
from hpc_ckpt.engine.orders import Order
from hpc_ckpt.engine.published import Guard, Published
from hpc_ckpt.errors import BrokenOff, Fenced
from hpc_ckpt.events import Event, EventLog, read
from hpc_ckpt.format.manifest import Manifest, ShardRecord, digest
from hpc_ckpt.lease import acquire_standalone
from hpc_ckpt.rundir import CheckpointKey, RunDir
from hpc_ckpt.tiers.directory import DirectoryTier
from hpc_ckpt.tiers.stack import Stack


def manifest(step: int) -> Manifest:
    shard = ShardRecord("rank-00000.safetensors", 1, 4096, (digest(b"x"),))
    return Manifest(
        chain="c", generation=1, step=step, revision=0, parent=None, epoch=0, wall_time=0.0,
        reason="", metrics={}, world_size=1, threads=1, versions={}, tree={}, aliases={},
        shards=(shard,),
    )  # fmt: skip


RUN = DirectoryTier("runs", name="run")


def order(*, given_up: bool) -> Any:
    return SimpleNamespace(given_up=given_up, tier=DirectoryTier("nowhere", name="fast"))


def test_one_that_was_given_up_does_not_outrank_a_later_save_of_its_step() -> None:
    """It would become a revision of it, or the same name with another state in another tier."""
    published, key = Published(lambda order: None), CheckpointKey(1, 4)
    published.check(order(given_up=True), key)
    published.add(manifest(4), 0)
    with pytest.raises(BrokenOff, match="saved again"):
        published.check(order(given_up=True), key)
    published.check(order(given_up=False), key)
    published.check(order(given_up=True), CheckpointKey(1, 3))


def test_the_lease_is_looked_at() -> None:
    """For the tier that the save goes to."""
    asked: list[str] = []

    def fenced(order: Order) -> None:
        asked.append(order.tier.name)
        raise Fenced(1, 2)

    with pytest.raises(Fenced):
        Published(fenced).check(order(given_up=False), CheckpointKey(1, 4))
    assert ["fast"] == asked


def test_an_older_one_that_comes_late_is_not_the_newest() -> None:
    """The drain brings an older one home while a newer one is committed."""
    published, newer = Published(lambda order: None), CheckpointKey(1, 3)
    published.stands(CheckpointKey(1, 1), "run", lasts=True)
    published.stands(newer, "run", lasts=True)
    published.stands(CheckpointKey(1, 2), "fast", lasts=False)
    assert (newer, newer) == (published.newest, published.lasting)


def test_one_that_would_go_with_the_job_does_not_last() -> None:
    """Until it is brought home."""
    published, older, newer = (
        Published(lambda order: None),
        CheckpointKey(1, 1),
        CheckpointKey(1, 2),
    )
    published.stands(older, "run", lasts=True)
    published.stands(newer, "fast", lasts=False)
    assert (newer, older) == (published.newest, published.lasting)
    published.stands(newer, "run", lasts=True)
    assert newer == published.lasting


def test_damage_takes_it_away() -> None:
    """A link must not say that it has saved what the next one cannot restore."""
    lost: list[Path] = []
    published = Published(lambda order: None, lost.append)
    older, newer = CheckpointKey(1, 1), CheckpointKey(1, 2)
    for key in (older, newer):
        published.stands(key, "run", lasts=True)
    published.gone(RUN, [newer])
    assert (older, older) == (published.newest, published.lasting)
    published.gone(RUN, [older, newer])
    assert (None, None) == (published.newest, published.lasting)
    assert [RUN.path_of(newer), RUN.path_of(older)] == lost


def test_damage_in_one_tier_leaves_the_other() -> None:
    """It is gone where it was to last, and still the newest."""
    published, older, newer = (
        Published(lambda order: None),
        CheckpointKey(1, 1),
        CheckpointKey(1, 2),
    )
    published.stands(older, "run", lasts=True)
    published.stands(newer, "fast", lasts=False)
    published.stands(newer, "run", lasts=True)
    published.gone(RUN, [newer])
    assert (newer, older) == (published.newest, published.lasting)


def test_old_ones_that_go_change_nothing() -> None:
    """Retention; nor does what was never published here."""
    lost: list[Path] = []
    published, newest = Published(lambda order: None, lost.append), CheckpointKey(1, 3)
    for step in (1, 2, 3):
        published.stands(CheckpointKey(1, step), "run", lasts=True)
    gone = [CheckpointKey(1, 1), CheckpointKey(1, 2), CheckpointKey(1, 9)]
    published.gone(RUN, gone)
    assert [] == lost
    assert (newest, newest) == (published.newest, published.lasting)


@pytest.mark.parametrize(
    "act",
    [
        lambda published: published.stands(CheckpointKey(1, 2), "run", lasts=True),
        lambda published: published.gone(RUN, [CheckpointKey(1, 1)]),
        lambda published: published.add(manifest(4), 0),
    ],
)
def test_one_at_a_time(act: Callable[[Published], None]) -> None:
    """The drain and a save that hung come between: the newest would be chosen of half a change."""
    published = Published(lambda order: None)
    published.stands(CheckpointKey(1, 1), "run", lasts=True)
    thread = threading.Thread(target=act, args=(published,))
    with published._lock:
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert CheckpointKey(1, 1) == published.newest
    thread.join(20)
    assert not thread.is_alive()


# ── a run directory that does not answer ──────────────────────────────────────────────────
class Home:
    """A stack whose lease answers as it is told to."""

    def __init__(self, place: Path) -> None:
        self.answer: Callable[[], None] = lambda: None
        self.stack = Stack(
            [DirectoryTier(place / "fast", name="fast"), DirectoryTier(place / "run", name="root")]
        )
        self.fast, self.root = self.stack.tiers
        self._events = EventLog(place / "events.jsonl")
        self.guard = Guard(self._lease, self.stack, self._events)

    def _lease(self) -> None:
        self.answer()

    def told(self) -> list[str]:
        self._events.flush()
        records = read(self._events.path)
        return [r["tier"] for r in records if r["event"] == Event.TIER_FAILED.value]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def away() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture(params=["EIO", "hangs"])
def silence(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], None]]:
    over = threading.Event()

    def hang() -> None:
        over.wait(60)

    monkeypatch.setattr(room, "LEASE_S", 0.05)
    yield away if request.param == "EIO" else hang
    over.set()


def test_a_run_directory_that_does_not_answer_keeps_nobody_from_another_tier(
    home: Home, silence: Callable[[], None]
) -> None:
    """It is said once; readers never choose what an overtaken generation commits late."""
    home.answer = silence
    for _ in range(3):
        home.guard.for_commit(home.fast)
    assert ["root"] == home.told()


def test_nothing_is_removed_while_nobody_can_tell_who_holds_it(
    home: Home, silence: Callable[[], None]
) -> None:
    home.answer = silence
    with pytest.raises(OSError, match=r"Input/output error|does not answer"):
        home.guard.for_removal(home.fast)


def test_a_commit_in_the_run_directory_needs_its_answer(home: Home) -> None:
    home.answer = away
    with pytest.raises(OSError, match="Input/output error"):
        home.guard.for_commit(home.root)
    assert [] == home.told()


def test_a_run_directory_that_answers_again_is_believed(home: Home) -> None:
    """And the next time that it does not is told of again."""

    def fenced() -> None:
        raise Fenced(1, 2)

    for answer in (away, lambda: None, away):
        home.answer = answer
        home.guard.for_commit(home.fast)
    assert ["root", "root"] == home.told()
    home.answer = fenced
    for tier in (home.fast, home.root):
        with pytest.raises(Fenced):
            home.guard.for_commit(tier)


def test_one_that_hangs_is_asked_once_and_known_to_hang(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each save after the first would wait again; and the next goes elsewhere."""
    over, asked = threading.Event(), []

    def hang() -> None:
        asked.append(1)
        over.wait(60)

    monkeypatch.setattr(room, "LEASE_S", 0.05)
    home.answer = hang
    for _ in range(3):
        home.guard.for_commit(home.fast)
    assert (1, True) == (len(asked), home.stack.hangs(home.root))
    over.set()


def test_a_final_save_waits_less_for_it(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not have the seconds."""
    over = threading.Event()
    monkeypatch.setattr(room, "URGENT_LEASE_S", 0.05)
    monkeypatch.setattr(room, "LEASE_S", 60.0)

    def hang() -> None:
        over.wait(60)

    home.answer = hang
    home.guard.for_commit(home.fast, urgent=True)
    assert ["root"] == home.told()
    over.set()


def test_a_run_directory_that_is_gone_answers_nothing(tmp_path: Path) -> None:
    """Unmounted: a newer generation in it would not be seen, so nothing is removed elsewhere."""
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    lease = acquire_standalone(rundir)
    stack = Stack(
        [DirectoryTier(tmp_path / "fast", name="fast"), DirectoryTier(rundir.root, name="root")]
    )
    fast, root = stack.tiers
    events = EventLog(tmp_path / "events.jsonl")
    guard = Guard(lease.check, stack, events)
    guard.for_removal(fast)
    rundir.root.rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError, match="the lease is not there any more"):
        guard.for_removal(fast)
    guard.for_commit(fast)
    events.flush()
    assert ["root"] == [record["tier"] for record in read(events.path)]
    with pytest.raises(FileNotFoundError, match="the lease is not there any more"):
        guard.for_commit(root)
    (tmp_path / "away").rename(rundir.root)
    guard.for_removal(fast)
