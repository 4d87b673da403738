"""A dependency of the user's beside the one by which links follow each other.

sbatch takes one: that of the command line, in place of the script's.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chains import PROFILE, cli, wait_until
from devcluster import DevCluster

from hpc_ckpt import lease
from hpc_ckpt.chain.past import jobs_of
from hpc_ckpt.rundir import RunDir

pytestmark = pytest.mark.slurm


def holding(cluster: DevCluster) -> str:
    """A job that others can wait for: it runs until it is cancelled."""
    asked = ["sbatch", "--parsable", "-p", "gpu", "-o", "/dev/null", "--wrap", "sleep 120"]
    return cluster.run(*asked).stdout.strip()


def submit(cluster: DevCluster, place: Path, strategy: str, *directives: str) -> RunDir:
    rules = {"strategy": strategy, "submit_from_compute_nodes": True}
    (place / "site.yaml").write_text(json.dumps({**PROFILE, "chain": rules}))
    spec: dict[str, Any] = {
        "name": "waits",
        "command": "sleep 1; exit 75",
        "root": "run",
        "partition": "lowpriority",
        "chain": {"link_time": "3 min", "max_links": 3},
        "sbatch": list(directives),
    }
    (place / "spec.yaml").write_text(json.dumps(spec))
    done = cli(cluster, place, "submit", "spec.yaml", "--profile", "./site.yaml")
    assert 0 == done.returncode, done.stderr
    assert "is for the first link; those after it wait for the link before" in done.stdout
    return RunDir(place / "run")


def dependency(cluster: DevCluster, job: str) -> str:
    shown = cluster.run("scontrol", "-o", "show", "job", job).stdout
    found = re.search(r" Dependency=(\S+)", shown)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("strategy", ["array", "afterany", "resubmit"])
def test_the_first_link_waits_and_the_others_follow(
    idle_cluster: DevCluster, tmp_path: Path, strategy: str
) -> None:
    """Once the job it waited for is over, so is the wait: also of links that are submitted then."""
    other = holding(idle_cluster)
    rundir = submit(idle_cluster, tmp_path, strategy, f"--dependency=afterany:{other}")
    assert f"afterany:{other}" in dependency(idle_cluster, jobs_of(rundir)[0])
    assert 0 == lease.highest(rundir)
    idle_cluster.run("scancel", other)
    wait_until(lambda: lease.highest(rundir) == 2, 60)
    cli(idle_cluster, tmp_path, "stop", "run", "--now")
    wait_until(lambda: idle_cluster.run("squeue", "-h").stdout == "", 60)
    again = holding(idle_cluster)  # what a spec names may be anything by then
    resumed = cli(idle_cluster, tmp_path, "resume", "run", "--json")
    assert 0 == resumed.returncode, resumed.stderr
    new = json.loads(resumed.stdout)["jobs"][0]
    assert "(null)" == dependency(idle_cluster, new)
    idle_cluster.run("scancel", again)


def test_what_can_never_begin_does_not_begin_with_its_second_link(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """Slurm cancels the first job then, and afterany alone would start the next one."""
    other = holding(idle_cluster)
    wanted = (f"--dependency=afterok:{other}", "--kill-on-invalid-dep=yes")
    rundir = submit(idle_cluster, tmp_path, "afterany", *wanted)
    jobs = jobs_of(rundir)
    assert 3 == len(jobs)
    assert f"afterok:{other}" in dependency(idle_cluster, jobs[1])
    idle_cluster.run("scancel", other)
    wait_until(lambda: idle_cluster.run("squeue", "-h").stdout == "", 60)
    assert 0 == lease.highest(rundir)
