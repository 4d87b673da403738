"""What storage does not show just now is there: nothing is removed, replaced or passed by for it.

Path.exists() and Path.is_dir() of Python 3.14 say of every error that nothing is there; here they
do so in every Python.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt import fsio
from hpc_ckpt.engine.exchange import export
from hpc_ckpt.errors import CorruptCheckpoint
from hpc_ckpt.format.verify import PIN_NAME
from hpc_ckpt.rundir import MANIFEST_NAME, CheckpointKey
from hpc_ckpt.testing import PlainLeaf, make_checkpoint
from hpc_ckpt.tiers.directory import DirectoryTier
from hpc_ckpt.tiers.drain import drain

KEY = CheckpointKey(1, 10)
LEAVES = [PlainLeaf("w", bytes(range(256)) * 40)]
Unseen = Callable[[str], contextlib.AbstractContextManager[None]]


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> Unseen:
    """Inside, what ends so cannot be looked at, and Python does not say why; it must be raised."""
    real = os.stat

    @contextlib.contextmanager
    def hide(ending: str) -> Iterator[None]:
        def stat(path: Any, *arguments: Any, **more: Any) -> os.stat_result:
            if str(path).endswith(ending):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return real(path, *arguments, **more)

        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", stat)
            patch.setattr(Path, "exists", os.path.exists)
            patch.setattr(Path, "is_dir", os.path.isdir)
            with pytest.raises(OSError, match="Stale"):
                yield

    return hide


@pytest.fixture
def tier(tmp_path: Path) -> DirectoryTier:
    made = DirectoryTier(tmp_path / "fast" / "checkpoints", name="fast", chunk=4096)
    make_checkpoint(made, KEY, LEAVES)
    return made


def hidden(tier: DirectoryTier, kind: str) -> Path:
    """A pinned one, as a process left it that was killed while it was removed, or replaced."""
    tier.pin(KEY)
    name = f".{kind}-g{KEY.generation:08d}-{KEY.directory_name}-{fsio.unique_suffix()}"
    return tier.path_of(KEY).rename(tier.path / name)


def test_a_pin_that_is_not_seen_keeps_its_checkpoint(tier: DirectoryTier, unseen: Unseen) -> None:
    tier.pin(KEY)
    with unseen(PIN_NAME):
        tier.remove(KEY)
    assert ([KEY], [], True) == (tier.keys(), tier.verify(KEY), tier.pinned(KEY))


def test_nor_does_it_go_if_it_was_pinned_in_the_last_moment(
    tier: DirectoryTier, unseen: Unseen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden already, it comes back once the pin is seen."""
    monkeypatch.setattr(tier, "pinned", lambda key: False)
    monkeypatch.setattr(tier, "_is_held", tier.pin)
    with unseen(PIN_NAME):
        tier.remove(KEY)
    fresh = DirectoryTier(tier.path)
    fresh.recover()
    assert ([KEY], [], True) == (fresh.keys(), fresh.verify(KEY), fresh.pinned(KEY))


def test_a_sweep_does_not_take_what_may_be_pinned(tier: DirectoryTier, unseen: Unseen) -> None:
    trash = hidden(tier, "trash")
    with unseen(PIN_NAME):
        tier.sweep(KEY.generation)
    assert trash.is_dir()
    tier.sweep(KEY.generation)
    assert ([KEY], [], True) == (tier.keys(), tier.verify(KEY), tier.pinned(KEY))


def test_a_pin_of_what_was_replaced_is_not_lost(tier: DirectoryTier, unseen: Unseen) -> None:
    was = hidden(tier, "was")
    make_checkpoint(tier, KEY, LEAVES)
    with unseen(f"{was.name}/{PIN_NAME}"):
        tier.recover()
    tier.recover()
    assert (True, False) == (tier.pinned(KEY), was.exists())


def test_a_leftover_whose_name_is_not_seen_stays(tier: DirectoryTier, unseen: Unseen) -> None:
    """Renamed back, it would be in the way of the whole one, or take its place."""
    trash = hidden(tier, "trash")
    make_checkpoint(tier, KEY, LEAVES)
    with unseen(KEY.directory_name):
        tier.sweep(KEY.generation)
    assert (True, [KEY]) == (trash.is_dir(), tier.keys())


def test_a_damaged_one_that_is_not_seen_has_not_gone(tier: DirectoryTier, unseen: Unseen) -> None:
    """Whoever looks for the newest would pass it by in silence."""
    manifest = tier.path_of(KEY) / MANIFEST_NAME
    manifest.write_bytes(manifest.read_bytes()[:-9])
    with unseen(KEY.directory_name):
        tier.manifest(KEY)
    with pytest.raises(CorruptCheckpoint):
        tier.manifest(KEY)


def test_a_source_that_is_not_seen_has_not_gone(
    tier: DirectoryTier, tmp_path: Path, unseen: Unseen
) -> None:
    """The drain would give it up for good."""
    target = DirectoryTier(tmp_path / "run" / "checkpoints")
    (tier.path_of(KEY) / MANIFEST_NAME).unlink()
    with unseen(f"fast/checkpoints/{KEY.directory_name}"):
        drain(tier, target, KEY, lambda: None)


def test_a_target_that_is_not_seen_is_not_copied_to_again(
    tier: DirectoryTier, tmp_path: Path, unseen: Unseen, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = DirectoryTier(tmp_path / "run" / "checkpoints")
    drain(tier, target, KEY, lambda: None)
    staged: list[CheckpointKey] = []
    monkeypatch.setattr(target, "stage", staged.append)
    with unseen(f"run/checkpoints/{KEY.directory_name}"):
        drain(tier, target, KEY, lambda: None)
    assert [] == staged


def test_a_file_that_is_not_seen_is_not_exported_over(
    tier: DirectoryTier, tmp_path: Path, unseen: Unseen
) -> None:
    target = tmp_path / "model.pt"
    target.write_bytes(b"precious")
    with unseen(target.name):
        export(tier.path_of(KEY), target)
    assert b"precious" == target.read_bytes()
