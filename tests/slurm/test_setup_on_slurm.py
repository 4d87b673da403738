"""A node on which no environment can be made, or the runner cannot start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chains import PROFILE, cli, note, wait_until
from devcluster import DevCluster

from hpc_ckpt.chain.ledger import State, read_status
from hpc_ckpt.chain.sweep import sweep_status
from hpc_ckpt.rundir import RunDir

pytestmark = pytest.mark.slurm

MEMBERS = 6


def test_one_broken_node_ends_no_member(idle_cluster: DevCluster, tmp_path: Path) -> None:
    """It is the first that Slurm chooses for each of them; all go on elsewhere, none comes back."""
    bad = idle_cluster.nodes[0]
    prologue = f"""
echo "$SLURMD_NODENAME" >>{tmp_path}/tried
[ "$SLURMD_NODENAME" != {bad} ]
"""
    site = {**PROFILE, "environment": {"prologue": prologue}}
    (tmp_path / "site.yaml").write_text(json.dumps(site))
    spec = {
        "name": "sweep",
        "command": ["bash", "-c", ": HPC_CKPT_NOTICE; echo {x} >>done"],
        "root": "run",
        "partition": "lowpriority",
        "chain": {"link_time": "3 min", "max_links": 2},
        "members": {"x": list(range(MEMBERS))},
    }
    (tmp_path / "s.yaml").write_text(json.dumps(spec))
    done = cli(idle_cluster, tmp_path, "submit", "s.yaml", "--profile", "./site.yaml")
    assert 0 == done.returncode, done.stderr
    wait_until(
        lambda: sweep_status(tmp_path / "run").counts == {"complete": MEMBERS}, timeout_s=360
    )
    tried = (tmp_path / "tried").read_text().split()
    assert bad in tried
    assert tried.count(bad) <= MEMBERS
    assert MEMBERS == len(tried) - tried.count(bad)
    # Two members that begin at the same moment may both find it.
    assert {bad} == set((tmp_path / "run" / "logs" / "setup-bad-nodes").read_text().split())
    note(
        "one node without a working environment, met by all six members of a sweep",
        "excluded for the sweep; all members completed elsewhere",
    )


@pytest.mark.parametrize("strategy", ["array", "requeue", "afterany"])
def test_a_node_without_the_interpreter_takes_no_second_link(
    idle_cluster: DevCluster, tmp_path: Path, strategy: str
) -> None:
    """It is free at once, and the first that Slurm chooses; the same link goes on elsewhere."""
    bad = idle_cluster.nodes[0]
    prologue = f"""
echo "$SLURMD_NODENAME" >>{tmp_path}/tried
if [ "$SLURMD_NODENAME" = {bad} ]; then hpc_ckpt_python=/no/such/python; fi
sleep() {{ :; }}
"""
    site = {**PROFILE, "environment": {"prologue": prologue}}
    (tmp_path / "site.yaml").write_text(json.dumps(site))
    spec = {
        "name": "chain",
        "command": ["bash", "-c", ": HPC_CKPT_NOTICE; echo done >>done"],
        "root": "run",
        "partition": "lowpriority",
        "chain": {"link_time": "3 min", "max_links": 2, "strategy": strategy},
    }
    (tmp_path / "s.yaml").write_text(json.dumps(spec))
    done = cli(idle_cluster, tmp_path, "submit", "s.yaml", "--profile", "./site.yaml")
    assert 0 == done.returncode, done.stderr
    rundir = RunDir(tmp_path / "run")
    wait_until(lambda: read_status(rundir).state is State.COMPLETE, timeout_s=240)
    tried = (tmp_path / "tried").read_text().split()
    assert [bad] == tried[: tried.count(bad)]
    assert [bad] == (rundir.logs / "no-runner-nodes").read_text().split()
    note(
        f"one node without the interpreter, with `{strategy}`",
        "excluded; the same link went on elsewhere, no index was used up",
    )
