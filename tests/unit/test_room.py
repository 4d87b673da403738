"""Room for what a run will save: memory asked at once, storage beside the training."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt import events, preflight
from hpc_ckpt.errors import UserError
from hpc_ckpt.events import Event, EventLog
from hpc_ckpt.rundir import CheckpointKey
from hpc_ckpt.runtime.room import Room
from hpc_ckpt.tiers.directory import DirectoryTier
from hpc_ckpt.tiers.stack import Stack
from hpc_ckpt.tiers.wishes import HOME, TierWish

MIB = 1024**2
PATIENCE_S = 30.0
"""Only a broken room waits this long."""


class House:
    """A fast tier above the run directory's own, each with a quota or none."""

    def __init__(
        self,
        path: Path,
        *,
        fast_quota: int | None = None,
        home_quota: int | None = None,
        memory: int | None = None,
        keep: int = 0,
        kind: Callable[..., DirectoryTier] = DirectoryTier,
    ) -> None:
        fast, home = kind(path / "fast", name="fast"), DirectoryTier(path / "home", name=HOME)
        wishes = {
            "fast": TierWish("fast", path / "fast", quota=fast_quota),
            HOME: TierWish(HOME, quota=home_quota),
        }
        self.events = path / "events.jsonl"
        self.fast = fast
        self.room = Room(
            Stack([fast, home], wishes=wishes), EventLog(self.events), memory, keep=keep
        )

    def look(self, size: int) -> None:
        """Ask the tiers, and wait for their answer as no program does."""
        self.room.check_storage(size)
        for thread in threading.enumerate():
            if thread.name == "hpc-ckpt-preflight":
                thread.join(PATIENCE_S)

    def told(self) -> list[Any]:
        records = [r for r in events.read(self.events) if r["event"] == Event.NO_ROOM.value]
        return [record["tier"] for record in records]


# ── memory ────────────────────────────────────────────────────────────────────────────────
def test_a_snapshot_above_the_setting_is_refused(tmp_path: Path) -> None:
    """At once, by the setting's name; exactly as much is allowed."""
    room = House(tmp_path, memory=5 * MIB).room
    room.check_memory(5 * MIB)
    with pytest.raises(UserError, match=r"checkpoint\.memory allows"):
        room.check_memory(5 * MIB + 1)


def test_more_than_the_node_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is killed at its first save has lost what came before."""
    monkeypatch.setattr(preflight, "free_memory", lambda **_: 3 * MIB)
    room = House(tmp_path).room
    room.check_memory(3 * MIB)
    with pytest.raises(UserError, match="are free on this node"):
        room.check_memory(3 * MIB + 1)


# ── storage ───────────────────────────────────────────────────────────────────────────────
def test_enough_room_is_not_worth_a_word(tmp_path: Path) -> None:
    """Nothing is told, nothing is made in the tiers."""
    house = House(tmp_path, fast_quota=MIB, home_quota=MIB)
    house.look(MIB)
    assert ([], []) == (house.room.take_problems(fresh=True), house.told())
    assert not house.fast.path.exists()


def test_a_home_without_room_is_an_error_before_anything_was_saved(tmp_path: Path) -> None:
    """Hours of work could not be kept."""
    house = House(tmp_path, home_quota=MIB)
    house.look(MIB + 1)
    with pytest.raises(UserError, match="its quota is"):
        house.room.take_problems(fresh=True)
    assert [HOME] == house.told()


def test_later_it_is_a_warning(tmp_path: Path) -> None:
    """What was saved stands; the problem is told once and names its place."""
    house = House(tmp_path, home_quota=MIB)
    house.look(MIB + 1)
    (problem,) = house.room.take_problems(fresh=False)
    assert str(tmp_path / "home") in problem
    assert [] == house.room.take_problems(fresh=True)


def test_another_tier_without_room_is_a_warning_from_the_start(tmp_path: Path) -> None:
    """The run directory is used instead."""
    house = House(tmp_path, fast_quota=MIB)
    house.look(MIB + 1)
    (problem,) = house.room.take_problems(fresh=True)
    assert str(tmp_path / "fast") in problem
    assert ["fast"] == house.told()


def test_without_a_thread_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that could not ask for room goes on all the same."""

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    house = House(tmp_path, fast_quota=MIB, home_quota=MIB)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    house.look(MIB + 1)
    assert ([], []) == (house.room.take_problems(fresh=True), house.told())


def test_every_tier_is_asked(tmp_path: Path) -> None:
    """One without room does not hide the next."""
    house = House(tmp_path, fast_quota=MIB, home_quota=MIB)
    house.look(MIB + 1)
    assert 2 == len(house.room.take_problems(fresh=False))
    assert ["fast", HOME] == house.told()


def test_room_for_one_is_not_room_for_those_that_are_kept(tmp_path: Path) -> None:
    """Said at the start, as a warning: the first saves do fit."""
    house = House(tmp_path, home_quota=3 * MIB, keep=3)
    house.look(MIB)
    (problem,) = house.room.take_problems(fresh=True)
    assert "3 checkpoints are kept" in problem
    assert [HOME] == house.told()


def test_what_is_there_already_needs_no_more_room(tmp_path: Path) -> None:
    """A later link asks only for what is still to come."""
    house = House(tmp_path, home_quota=3 * MIB, keep=3)
    for step in (1, 2):
        (tmp_path / "home" / CheckpointKey(1, step).directory_name).mkdir(parents=True)
    house.look(MIB)
    assert [] == house.room.take_problems(fresh=True)


def test_nothing_is_known_before_the_tiers_were_asked(tmp_path: Path) -> None:
    """No answer is no problem."""
    assert [] == House(tmp_path, home_quota=1).room.take_problems(fresh=True)


def test_what_is_asked_is_what_a_checkpoint_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes and files, in the directory that holds the tier's checkpoints."""
    asked: list[Any] = []

    def check(place: Path, size: int, files: int, *, quota: int | None) -> None:
        asked.append((place, size, files >= 3, quota))

    monkeypatch.setattr(preflight, "check_storage", check)
    House(tmp_path, home_quota=7).look(99)
    assert [(tmp_path / "fast", 99, True, None), (tmp_path / "home", 99, True, 7)] == asked


def test_a_tier_that_hangs_does_not_hold_up_training(tmp_path: Path) -> None:
    """Asked in a thread that keeps no program from ending; the answer comes out later."""
    begun, freed = threading.Event(), threading.Event()

    class Hanging(DirectoryTier):
        def path_of(self, key: CheckpointKey) -> Path:
            begun.set()
            assert freed.wait(PATIENCE_S)
            return super().path_of(key)

    house = House(tmp_path, fast_quota=MIB, kind=Hanging)
    house.room.check_storage(MIB + 1)
    assert begun.wait(PATIENCE_S)
    assert [] == house.room.take_problems(fresh=True)
    (thread,) = [t for t in threading.enumerate() if t.name == "hpc-ckpt-preflight"]
    assert thread.daemon
    freed.set()
    thread.join(PATIENCE_S)
    assert 1 == len(house.room.take_problems(fresh=True))
