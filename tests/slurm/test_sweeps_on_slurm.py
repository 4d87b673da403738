"""A sweep: one array whose indices are chains of their own."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest
from chains import PROFILE, cli, wait_until
from devcluster import DevCluster

from hpc_ckpt import lease
from hpc_ckpt.chain.ledger import read_status
from hpc_ckpt.chain.sweep import members, sweep_status

pytestmark = pytest.mark.slurm

COUNTER = Path(__file__).parent / "programs" / "counter.py"
LONG, SHORT = 300, 60
"""Totals of members: one that is acted on lives long enough for a busy machine to do so."""


def submit_sweep(
    cluster: DevCluster, place: Path, *, parallel: int | None, **changes: object
) -> str:
    site = {**PROFILE, "chain": {"submit_from_compute_nodes": True}}
    (place / "site.yaml").write_text(json.dumps(site))
    spec = {
        "name": "sweep",
        "command": f"{sys.executable} {COUNTER} $HPC_CKPT_ROOT/state {{total}} {{step}}",
        "root": "sweep",
        "partition": "lowpriority",
        "chain": {"link_time": "3 min", "max_links": 4},
        "members": {"total": [LONG, SHORT], "step": [0.05, 0.06]},
        "parallel": parallel,
        **changes,
    }
    (place / "sweep.yaml").write_text(json.dumps(spec))
    done = cli(cluster, place, "submit", "sweep.yaml", "--profile", "./site.yaml")
    assert 0 == done.returncode, done.stderr
    found = re.search(r"submitted array (\d+)", done.stdout)
    assert found is not None
    return found[1]


def held_back(cluster: DevCluster, array: str) -> tuple[int, int]:
    """How many run, and how many wait though there is room, once Slurm has said why."""
    reason = "JobArrayTaskLimit"

    def rows() -> list[str]:
        return cluster.run("squeue", "-h", "-r", "-j", array, "-o", "%t %r").stdout.splitlines()

    wait_until(lambda: all(row.startswith("R ") or reason in row for row in rows()), 30)
    seen = rows()
    return sum(row.startswith("R ") for row in seen), sum(reason in row for row in seen)


def test_members_are_chains_of_their_own_two_at_a_time(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """One is preempted and goes on in place; each ends at its own total."""
    array = submit_sweep(idle_cluster, tmp_path, parallel=2)
    root = tmp_path / "sweep"
    first = next(iter(members(root))).rundir
    wait_until(lambda: lease.highest(first) == 1 and first.log_file(1).exists())
    assert (2, 2) == held_back(idle_cluster, array)
    holder = lease.holder_of(first, 1)
    assert holder is not None and holder.job is not None
    wait_until(lambda: "from 0" in first.log_file(1).read_text())
    idle_cluster.run("scontrol", "requeue", holder.job)
    wait_until(lambda: sweep_status(root).counts == {"complete": 4})
    totals = [(m.rundir.root / "state").read_text() for m in members(root)]
    assert [str(total) for total in (LONG, LONG, SHORT, SHORT)] == totals
    status = read_status(first)
    assert ["requeued", "complete"] == [link.cause for link in status.links]
    shown = cli(idle_cluster, tmp_path, "status", "sweep")
    assert "4 members: 4 complete" in shown.stdout
    again = cli(idle_cluster, tmp_path, "submit", "sweep.yaml", "--profile", "./site.yaml")
    assert 2 == again.returncode
    assert "every member is complete" in again.stderr


def test_status_of_a_thousand_members_takes_less_than_two_seconds(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """Their files and, as they wait, the queue. The best of three: others use the machine."""
    seeds = {"members": {"seed": list(range(1000))}, "command": "true {seed}"}
    array = submit_sweep(idle_cluster, tmp_path, parallel=2, **seeds, sbatch=["--begin=now+600"])
    idle_cluster.run("scontrol", "hold", f"{array}_7")
    took, shown = [], ""
    for _ in range(3):
        began = time.monotonic()
        shown = cli(idle_cluster, tmp_path, "status", "sweep").stdout
        took.append(time.monotonic() - began)
    assert "1000 members: 1000 not started" in shown
    assert f"job {array}_7 never begins by itself (JobHeldAdmin)" in " ".join(shown.split())
    assert min(took) < 2.0, took


def test_a_sweep_is_stopped_as_a_whole(idle_cluster: DevCluster, tmp_path: Path) -> None:
    array = submit_sweep(idle_cluster, tmp_path, parallel=1)
    root = tmp_path / "sweep"
    first = next(iter(members(root))).rundir
    wait_until(lambda: lease.highest(first) == 1)
    done = cli(idle_cluster, tmp_path, "stop", "sweep")
    assert 0 == done.returncode, done.stderr
    wait_until(lambda: sweep_status(root).counts == {"stopped": 4}, 60)
    left = idle_cluster.run("squeue", "-h", "-r", "-t", "PD", "-j", array, check=False).stdout
    assert "" == left
    again = cli(idle_cluster, tmp_path, "resume", f"sweep/{first.root.name}")
    assert 0 == again.returncode, again.stderr
    wait_until(lambda: first.done() is not None)
    assert {"complete": 1, "stopped": 3} == sweep_status(root).counts
    again = cli(idle_cluster, tmp_path, "resume", "sweep")
    assert 0 == again.returncode, again.stderr
    assert "3 members" in again.stdout
    wait_until(lambda: sweep_status(root).counts == {"complete": 4})


def test_a_cancelled_member_stays_away_and_the_others_go_on(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """Its index would come back by requeue; the rest of the array are other chains."""
    slow = f"{sys.executable} {COUNTER} $HPC_CKPT_ROOT/state {{total}} 0.1"
    array = submit_sweep(
        idle_cluster, tmp_path, parallel=None, members={"total": [LONG, 90]}, command=slow
    )
    root = tmp_path / "sweep"
    wait_until(lambda: sweep_status(root).counts == {"running": 2})
    first, second = (member.rundir for member in members(root))
    wait_until(lambda: first.log_file(1).exists() and "from 0" in first.log_file(1).read_text())
    idle_cluster.run("scancel", f"{array}_1")
    wait_until(lambda: second.done() is not None)
    wait_until(lambda: idle_cluster.run("squeue", "-h").stdout == "", 60)
    status = read_status(first)
    assert ("stopped", "cancelled by the user") == (status.state.value, status.reason)
    assert 1 == lease.highest(first)


def test_now_ends_members_that_were_asked_before(idle_cluster: DevCluster, tmp_path: Path) -> None:
    """Programs that hear nothing: the second stop cancels their jobs."""
    deaf = "trap '' TERM USR1; for i in $(seq 100); do sleep 1; done; : {n}"
    members_wanted = {"n": [1, 2]}
    submit_sweep(idle_cluster, tmp_path, parallel=None, command=deaf, members=members_wanted)
    root = tmp_path / "sweep"
    wait_until(lambda: sweep_status(root).counts == {"running": 2})
    assert 0 == cli(idle_cluster, tmp_path, "stop", "sweep").returncode
    told = json.loads(cli(idle_cluster, tmp_path, "stop", "sweep", "--now", "--json").stdout)
    assert ["n-1", "n-2"] == told["stopped"] == told["killed"]
    wait_until(lambda: sweep_status(root).counts == {"stopped": 2}, 60)


def test_members_that_submit_themselves_keep_their_sweep_alive(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """The first array is over after one link; its successors are found, refused and stopped."""
    array = submit_sweep(
        idle_cluster,
        tmp_path,
        parallel=None,
        command="sleep 3; exit 75; : {n}",
        members={"n": [1, 2]},
        chain={"link_time": "3 min", "max_links": 30, "strategy": "resubmit"},
    )
    root = tmp_path / "sweep"
    wait_until(lambda: all(member.links >= 2 for member in sweep_status(root).members))
    left = idle_cluster.run("squeue", "-h", "-j", array, check=False).stdout
    assert "" == left
    again = cli(idle_cluster, tmp_path, "submit", "sweep.yaml", "--profile", "./site.yaml")
    assert 2 == again.returncode, again.stdout
    assert "is a chain on it already" in again.stderr
    assert 0 == cli(idle_cluster, tmp_path, "stop", "sweep").returncode
    wait_until(lambda: sweep_status(root).counts == {"stopped": 2}, 60)
    wait_until(lambda: idle_cluster.run("squeue", "-h").stdout == "", 60)
