"""Two links at once, as two plain processes: waiting, fencing, and who is chosen."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hpc_ckpt import latest, lease
from hpc_ckpt.format.verify import open_verified
from hpc_ckpt.lease import Holder, Waiting
from hpc_ckpt.rundir import CheckpointKey, RunDir
from hpc_ckpt.testing import make_checkpoint
from hpc_ckpt.tiers.directory import DirectoryTier

TRAINER = """
import sys, time
from pathlib import Path
import torch
from hpc_ckpt import Checkpointer, fsio

place, total = Path(sys.argv[1]), int(sys.argv[2])
stall_at = sys.argv[3] if len(sys.argv) > 3 else None
value = torch.zeros(4)
reached = 0

def hold(point):
    global reached
    reached += point == stall_at
    if point == stall_at and reached == 2:
        (place / "holding").touch()
        while not (place / "go").exists():
            time.sleep(0.02)

if stall_at:
    fsio.observe(hold)
with Checkpointer(value=value, policy="every 10 steps") as ckpt:
    for _ in ckpt.steps(total):
        value += 1
        ckpt.step()
        if ckpt.global_step % 10 == 0:
            time.sleep(0.1)
"""


def link(rundir: RunDir, place: Path, *words: str) -> subprocess.Popen[bytes]:
    """A process with a generation of its own, as a link runner would start it."""
    waiting = Waiting(probe=lambda _: False, limit_s=0)
    generation = lease.acquire(rundir, Holder.here(), waiting).generation
    environment = {**os.environ, **rundir.environment(generation, "local")}
    return subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(place), *words],
        env=environment,
        stderr=subprocess.DEVNULL,
    )


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def prepared(tmp_path: Path) -> RunDir:
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    record = {"chain": "overlap", "spec": {"checkpoint": {"policy": "every 10 steps"}}}
    rundir.chain_file.write_text(json.dumps(record))
    return rundir


def test_an_overtaken_process_publishes_nothing_and_says_so(tmp_path: Path) -> None:
    """It finds out at its commit, ends as fenced, and writes no outcome."""
    rundir = prepared(tmp_path)
    first = link(rundir, tmp_path, "1000", "shard.synced")
    until((tmp_path / "holding").exists)
    second = link(rundir, tmp_path, "15")
    assert 0 == second.wait(timeout=60)
    (tmp_path / "go").touch()
    assert 75 == first.wait(timeout=60)
    assert rundir.outcome(1) is None
    assert [(1, 10), (2, 15)] == [
        (k.generation, k.step) for k in rundir.committed() if k.step != 20
    ]
    assert [] == list(rundir.checkpoints.glob(".tmp-g00000001*"))


def test_a_process_held_between_look_and_rename_does_no_harm(tmp_path: Path) -> None:
    """The newer generation commits, and sweeps away what the older one was about to rename."""
    rundir = prepared(tmp_path)
    first = link(rundir, tmp_path, "1000", "commit.guarded")
    until((tmp_path / "holding").exists)
    second = link(rundir, tmp_path, "12")
    assert 0 == second.wait(timeout=60)
    (tmp_path / "go").touch()
    assert 75 == first.wait(timeout=60)
    chosen = open_verified(latest(rundir.root)).manifest
    assert (2, 12) == (chosen.generation, chosen.step)


def test_a_commit_that_slipped_past_the_look_is_never_chosen(tmp_path: Path) -> None:
    """The race between look and rename is resolved by the reader: (generation, step)."""
    rundir = prepared(tmp_path)
    tier = DirectoryTier(rundir.checkpoints)
    make_checkpoint(tier, CheckpointKey(2, 12))
    make_checkpoint(tier, CheckpointKey(1, 2000))
    assert rundir.checkpoints / CheckpointKey(2, 12).directory_name == latest(rundir.root)


def test_a_late_commit_before_the_newer_one_has_any_is_a_legitimate_continuation(
    tmp_path: Path,
) -> None:
    """Nothing is thrown away for nothing."""
    rundir = prepared(tmp_path)
    first = link(rundir, tmp_path, "1000", "commit.guarded")
    until((tmp_path / "holding").exists)
    lease.acquire(rundir, Holder.here(), Waiting(probe=lambda _: False, limit_s=0))
    (tmp_path / "go").touch()
    first.wait(timeout=60)
    assert 20 == open_verified(latest(rundir.root)).manifest.step


def test_a_stopped_process_wakes_up_fenced(tmp_path: Path) -> None:
    """SIGSTOP and SIGCONT, as a suspended job: when it wakes the world has moved on."""
    rundir = prepared(tmp_path)
    first = link(rundir, tmp_path, "100000")
    until(lambda: any(key.step >= 20 for key in rundir.committed()))
    first.send_signal(signal.SIGSTOP)
    newest = max(key.step for key in rundir.committed())
    second = link(rundir, tmp_path, str(newest + 5))
    assert 0 == second.wait(timeout=60)
    first.send_signal(signal.SIGCONT)
    assert 75 == first.wait(timeout=60)
    assert 2 == rundir.committed()[-1].generation
