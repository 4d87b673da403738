"""`ls`: what a manifest says is shown, whatever it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ckpt.cli.listing import describe_checkpoints, list_checkpoints
from hpc_ckpt.rundir import CheckpointKey, RunDir
from hpc_ckpt.testing import make_checkpoint
from hpc_ckpt.tiers.directory import DirectoryTier

REASON = "caf\udce9 \x1b[2J\x1b]0;title\x07 [bold]"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two checkpoints, of which the first says odd things, within the format."""
    rundir = RunDir(tmp_path)
    rundir.checkpoints.mkdir()
    odd = {"reason": REASON, "metrics": {"loss\n\x1b[31m": 1.0}, "wall_time": 1e18}
    tree = {"about": {"described": {"data\x1b[31m": "x"}}}
    tier = DirectoryTier(rundir.checkpoints)
    make_checkpoint(tier, CheckpointKey(1, 1), tree=tree, **odd)
    make_checkpoint(tier, CheckpointKey(1, 2), reason="the next")
    return tmp_path


@pytest.mark.parametrize("long", [False, True])
def test_what_a_manifest_says_does_nothing_to_the_terminal(
    root: Path, long: bool, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """No control character, no error for what no terminal can write, nothing taken for markup."""
    describe_checkpoints(root) if long else list_checkpoints(root, as_json=False)
    said = capfdbinary.readouterr().out.decode()
    assert r"caf\udce9 \x1b[2J\x1b]0;title\x07 [bold]" in said
    assert "the next" in said
    assert [] == [one for one in said if one != "\n" and not one.isprintable()]
