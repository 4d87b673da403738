"""latest and best: the judgement of a restore, without a run."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from hpc_ckpt.cli import listing
from hpc_ckpt.engine import shelf
from hpc_ckpt.errors import EXIT_FAILED, CorruptCheckpoint, NewerCheckpoint
from hpc_ckpt.rundir import MANIFEST_NAME, CheckpointKey, RunDir
from hpc_ckpt.testing import PlainLeaf, make_checkpoint, make_newer
from hpc_ckpt.tiers.directory import DirectoryTier

OLDER, NEWER = CheckpointKey(1, 1), CheckpointKey(1, 2)
SHARD = "rank-00000.safetensors"


@pytest.fixture
def tier(tmp_path: Path) -> DirectoryTier:
    tier = DirectoryTier(RunDir(tmp_path).checkpoints)
    for number, key in enumerate((OLDER, NEWER)):
        make_checkpoint(tier, key, [PlainLeaf("w", b"12345678")], metrics={"score": number})
    return tier


def refuse_to_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system gives an error for the newer one's manifest."""
    real, ending = os.open, f"{NEWER.directory_name}/{MANIFEST_NAME}"

    def refusing(path: object, *rest: object, **more: object) -> int:
        if str(path).endswith(ending):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *rest, **more)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(os, "open", refusing)


def test_damage_is_gone_back_behind(tier: DirectoryTier, tmp_path: Path) -> None:
    """The newest without defects."""
    (tier.path_of(NEWER) / SHARD).write_bytes(b"")
    assert tier.path_of(OLDER) == shelf.latest(tmp_path) == shelf.best(tmp_path, "score")


def test_a_stray_file_is_no_reason_to_go_back(tier: DirectoryTier, tmp_path: Path) -> None:
    """A restore takes it; network file systems make such files by themselves."""
    (tier.path_of(NEWER) / ".nfs0001").write_text("x")
    assert tier.path_of(NEWER) == shelf.latest(tmp_path) == shelf.best(tmp_path, "score")


def test_what_cannot_be_read_just_now_is_not_gone_back_behind(
    tier: DirectoryTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be sound: the caller asks again, and does not go on from what is older."""
    refuse_to_open(monkeypatch)
    with pytest.raises(OSError, match="could not be read"):
        shelf.latest(tmp_path)
    with pytest.raises(CorruptCheckpoint, match="unreadable"):
        shelf.best(tmp_path, "score")


def test_one_that_a_newer_version_has_made_is_named(tier: DirectoryTier, tmp_path: Path) -> None:
    """Neither the newest nor the best can be told without it; going back would hide it."""
    make_newer(tier.path_of(NEWER))
    with pytest.raises(NewerCheckpoint, match=f"{NEWER.directory_name}.*format version 2"):
        shelf.latest(tmp_path)
    with pytest.raises(NewerCheckpoint, match="Upgrade"):
        shelf.best(tmp_path, "score")


def test_an_older_one_that_a_newer_version_has_made_hides_nothing(
    tier: DirectoryTier, tmp_path: Path
) -> None:
    """What is newer can be read."""
    make_newer(tier.path_of(OLDER))
    assert tier.path_of(NEWER) == shelf.latest(tmp_path)


def test_ls_and_verify_tell_what_a_newer_version_has_made(
    tier: DirectoryTier, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By name, with what to do; the others are told as ever."""
    make_newer(tier.path_of(NEWER))
    listing.list_checkpoints(tmp_path, as_json=True)
    sound, told = json.loads(capsys.readouterr().out)
    assert (OLDER.step, NEWER.directory_name) == (sound["step"], told["checkpoint"])
    assert "Upgrade" in told["defect"]
    assert EXIT_FAILED == listing.verify_checkpoints(tmp_path, as_json=False)
    said = capsys.readouterr().out
    assert f"ok      {OLDER.directory_name}" in said
    assert "unsupported-version: format version 2" in said
    assert "upgrade hpc_ckpt" in said
