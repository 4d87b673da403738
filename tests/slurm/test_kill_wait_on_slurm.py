"""Between the polite signal and the fatal one, and after a warning alone: on a real Slurm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from chains import PROGRAM, submit_chain
from devcluster import DevCluster

from hpc_ckpt.rundir import Result

pytestmark = pytest.mark.slurm

SLOW = """
import os, runpy, sys, time
fsync = os.fsync
def slowly(descriptor):
    time.sleep(0.4)
    fsync(descriptor)
os.fsync = slowly
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("how", ["scancel", "limit"])
def test_a_final_save_of_seconds_is_waited_for_in_the_kill_wait(
    idle_cluster: DevCluster, tmp_path: Path, how: str
) -> None:
    """What scontrol calls the end of a job that is being ended is already over."""
    (tmp_path / "slow.py").write_text(SLOW)
    words = [sys.executable, "slow.py", str(PROGRAM), "40", "0.05"]
    spec = {"command": words, "checkpoint": {"policy": "every 100000 steps"}, "level": "model"}
    chain = submit_chain(idle_cluster, tmp_path, spec=spec)
    chain.wait_for(lambda: chain.rundir.log_file(1).exists())
    chain.wait_for(lambda: any("restored" in r or "fresh" in r for r in told(chain.rundir.events)))
    if how == "scancel":
        chain.scancel(1)
    else:
        chain.end_in(1, 1)
    link = chain.wait_for_end(1)
    outcome = chain.rundir.outcome(1)
    assert outcome is not None
    assert Result.SAVED is outcome.outcome
    assert "failed" not in outcome.reason
    assert outcome.step == link.step_to == chain.rundir.committed()[-1].step


def told(events: Path) -> list[str]:
    return [line for path in events.glob("*.jsonl") for line in path.read_text().splitlines()]


def test_a_command_that_ends_by_itself_after_the_warning_is_complete(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """Slurm has warned of the limit, and ended nothing."""
    command = "touch begun; while [ ! -e go ]; do sleep 0.2; done"
    chain = submit_chain(idle_cluster, tmp_path, spec={"command": command, "level": "plain"})
    chain.wait_for((tmp_path / "begun").exists)
    chain.end_in(1, 45)
    chain.wait_for(lambda: chain.rundir.notice(1) is not None)
    (tmp_path / "go").touch()
    assert "complete" == chain.wait_for_end(1).cause
    assert chain.rundir.done() is not None
