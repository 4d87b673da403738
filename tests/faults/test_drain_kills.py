"""SIGKILL at every named point of a drain: nothing is lost, nothing damaged is spread."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from hpc_ckpt import fsio
from hpc_ckpt.format.verify import PIN_NAME
from hpc_ckpt.rundir import CheckpointKey
from hpc_ckpt.settings import Keep
from hpc_ckpt.tiers.directory import DirectoryTier
from hpc_ckpt.tiers.drain import drain
from hpc_ckpt.tiers.retention import retain
from hpc_ckpt.tiers.stack import Stack

CHILD = Path(__file__).with_name("drain_child.py")
POINTS = tuple(
    point
    for point in fsio.KILL_POINTS
    if point.startswith(
        ("stage.", "drain.", "manifest.", "commit.", "replace.", "remove.", "recover.", "sweep.")
    )
)
NEWEST, DEPENDENT, HOLDER = (CheckpointKey(1, step) for step in (5, 4, 3))


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
    assert (done.returncode, "not drained" in done.stdout) == (0, False), done.stderr
    return Counter(done.stdout.split())


def test_the_child_reaches_exactly_the_listed_points(announced: Counter[str]) -> None:
    """Every point of a drain is tried, and the points of a save that it shares with one."""
    assert set(announced) == set(POINTS)


@pytest.mark.parametrize("point", POINTS)
def test_a_death_in_a_drain_loses_and_spreads_nothing(
    tmp_path: Path, announced: Counter[str], point: str
) -> None:
    """At every occurrence: the source is untouched, the newest can be restored, what is visible
    in the target is whole (but for what was damaged before), and the next run ends the job.
    """
    for nth in range(1, announced[point] + 1):
        root = tmp_path / str(nth)
        died = run_child(root, point, str(nth))
        assert died.returncode == -signal.SIGKILL, died.stderr
        source = DirectoryTier(root / "fast", name="local", chunk=8192)
        target = DirectoryTier(root / "run", name="root", chunk=8192)
        assert [[]] * 5 == [source.verify(key) for key in keys(source)]
        target.recover()
        check_target(source, target)
        assert (NEWEST, source) == next(Stack([source, target]).newest_first())
        check_next_run_ends_the_job(source, target)


def keys(tier: DirectoryTier) -> list[CheckpointKey]:
    return tier.keys()


def check_target(source: DirectoryTier, target: DirectoryTier) -> None:
    """Older ones may have gone by retention, but only once the newest is there."""
    visible = keys(target)
    broken = [key for key in visible if target.verify(key)]
    assert set(broken) <= {HOLDER}
    assert DEPENDENT in visible
    assert target.pinned(DEPENDENT)
    assert HOLDER not in visible or target.pinned(HOLDER)
    assert [] == [name for name in fsio.names_in(target.path) if name.startswith(".was-")]
    if NEWEST in visible:
        assert [] == broken
        assert HOLDER in visible
    else:
        assert visible[:2] == [CheckpointKey(1, 1), CheckpointKey(1, 2)]
    for key in set(visible) - set(broken):
        assert files(source, key) == files(target, key)


def files(tier: DirectoryTier, key: CheckpointKey) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in tier.path_of(key).iterdir()}
    found.pop(PIN_NAME, None)
    return found


def check_next_run_ends_the_job(source: DirectoryTier, target: DirectoryTier) -> None:
    """The next generation drains what is missing, retains, and sweeps what the dead one left."""
    drain(source, target, NEWEST, lambda: None)
    retain(target, Keep(last=2), generation=2, committed=NEWEST, guard=lambda: None)
    target.sweep(2)
    names = [key.directory_name for key in (HOLDER, DEPENDENT, NEWEST)]
    assert names == sorted(fsio.names_in(target.path))
    assert [[], [], []] == [target.verify(key) for key in keys(target)]
    assert bytes(target.open(NEWEST).leaf("layer.7.5")) == bytes([5, 7]) * 300
