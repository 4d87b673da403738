"""SIGKILL at every named point: the newest checkpoint is the old one or the new one, never none."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from hpc_ckpt import fsio
from hpc_ckpt.errors import SpecError
from hpc_ckpt.rundir import CheckpointKey
from hpc_ckpt.settings import Keep
from hpc_ckpt.testing import PlainLeaf, arm_from_environment, kill_at, make_checkpoint
from hpc_ckpt.tiers.directory import DirectoryTier
from hpc_ckpt.tiers.retention import retain

CHILD = Path(__file__).with_name("commit_child.py")
OF_DRAINS = ("drain.", "replace.", "recover.")
"""They are tried by test_drain_kills.py."""
POINTS = tuple(point for point in fsio.KILL_POINTS if not point.startswith(OF_DRAINS))
BEFORE_THE_RENAME = ("stage.", "shard.", "manifest.", "commit.staged", "commit.guarded")


def run_child(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    root.mkdir()
    return subprocess.run(
        [sys.executable, str(CHILD), str(root), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture(scope="module")
def announced(tmp_path_factory: pytest.TempPathFactory) -> Counter[str]:
    """How often the child reaches each point when nobody kills it."""
    done = run_child(tmp_path_factory.mktemp("dry") / "run")
    assert done.returncode == 0, done.stderr
    return Counter(done.stdout.split())


def test_the_child_reaches_exactly_the_listed_points(announced: Counter[str]) -> None:
    """No point is announced that is not listed, and none is listed that is never reached."""
    assert set(announced) == set(POINTS)


def visible_steps(point: str, nth: int, announced: Counter[str]) -> list[int]:
    """Which checkpoints a reader must find after a death there."""
    if point.startswith(BEFORE_THE_RENAME):
        return [1, 2, 3]
    if point.startswith("commit."):
        return [1, 2, 3, 4]
    if point.startswith("remove."):
        removals = announced["remove.renamed"]
        gone = -(-nth * removals // announced[point])
        return [1, 2, 3, 4][gone:]
    return [3, 4]


@pytest.mark.parametrize("point", POINTS)
def test_a_death_anywhere_loses_nothing_committed(
    tmp_path: Path, announced: Counter[str], point: str
) -> None:
    """At every occurrence of the point: exactly the expected checkpoints are visible, every one
    of them is valid, the record is whole, and the next run clears up.
    """
    for nth in range(1, announced[point] + 1):
        root = tmp_path / str(nth)
        died = run_child(root, point, str(nth))
        assert died.returncode == -signal.SIGKILL, died.stderr
        tier = DirectoryTier(root / "checkpoints", chunk=8192)
        steps = [key.step for key in tier.keys()]  # noqa: SIM118 - not a mapping
        assert steps == visible_steps(point, nth, announced)
        assert [tier.verify(CheckpointKey(1, step)) for step in steps] == [[] for _ in steps]
        renamed = point in ("atomic.renamed", "atomic.durable")
        assert (root / "outcome").read_bytes() == (b"new" if renamed else b"old")
        check_next_run_clears_up(root, tier, steps[-1])


def check_next_run_clears_up(root: Path, tier: DirectoryTier, newest: int) -> None:
    """The next generation goes on from the newest, commits, retains, sweeps."""
    assert bytes(tier.open(CheckpointKey(1, newest)).leaf("layer.7")) == bytes([newest, 7]) * 300
    key = make_checkpoint(tier, CheckpointKey(2, newest + 1), [PlainLeaf("w", b"next")]).key
    retain(tier, Keep(last=1), generation=2, committed=key, guard=lambda: None)
    tier.sweep(2)
    assert fsio.names_in(tier.path) == [key.directory_name]
    assert tier.verify(key) == []
    fsio.write_atomic(root / "outcome", b"next")
    assert (root / "outcome").read_bytes() == b"next"


def test_the_environment_arms_the_self_test(tmp_path: Path) -> None:
    """HPC_CKPT_FAULT=kill@POINT:N is what a user sets to see a chain survive."""
    code = (
        "from hpc_ckpt import fsio; from hpc_ckpt.testing import arm_from_environment\n"
        "print(arm_from_environment(), flush=True)\n"
        f"for n in range(3): fsio.write_atomic({str(tmp_path / 'x')!r}, str(n).encode())"
    )
    environment = {**os.environ, "HPC_CKPT_FAULT": "kill@atomic.synced:2"}
    died = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (died.returncode, died.stdout) == (-signal.SIGKILL, "True\n"), died.stderr
    assert (tmp_path / "x").read_bytes() == b"0"


@pytest.mark.parametrize(
    "text", ["kill", "kill@", "kill@shard.written:0", "kill@shard.written:x", "stop@shard.written"]
)
def test_a_malformed_fault_is_the_users_mistake(text: str) -> None:
    """Said at once: a self-test that silently does nothing proves nothing."""
    with pytest.raises(SpecError, match="HPC_CKPT_FAULT"):
        arm_from_environment({"HPC_CKPT_FAULT": text})
    assert fsio.observe(None) is None


def test_an_unknown_point_is_named_with_the_nearest() -> None:
    """A typo must not arm nothing."""
    with pytest.raises(SpecError, match=r"Did you mean 'shard\.written'"):
        arm_from_environment({"HPC_CKPT_FAULT": "kill@shard.writen"})
    with pytest.raises(SpecError, match="unknown kill point"):
        kill_at("nowhere")


def test_without_the_variable_nothing_is_armed() -> None:
    """A run that does not ask for a fault has none."""
    assert arm_from_environment({}) is False
    assert fsio.observe(None) is None
