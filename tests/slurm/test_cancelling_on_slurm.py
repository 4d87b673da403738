"""scancel at awkward moments, a controller or a disk that is away: on a real Slurm."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from chains import SubmittedChain, cli, note, submit_chain
from devcluster import DevCluster

from hpc_ckpt import lease

pytestmark = pytest.mark.slurm

DEAF = """
import signal, sys, time
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""


def state_of(chain: SubmittedChain, job: str) -> str:
    return chain.cluster.run("squeue", "-h", "-r", "-o", "%T", "-j", job, check=False).stdout


def has_begun(chain: SubmittedChain) -> bool:
    log = chain.rundir.log_file(1)
    return log.exists() and "deaf" in log.read_text()


def assert_halted(chain: SubmittedChain, words: str) -> None:
    chain.wait_for(lambda: chain.rundir.halted() is not None, timeout_s=60)
    chain.wait_for(lambda: chain.left_in_queue() == [] == chain.waiting())
    assert words in (chain.rundir.halted() or "")


@pytest.mark.parametrize("strategy", ["array", "afterany"])
def test_a_link_cancelled_while_it_is_set_up_halts_the_chain(
    idle_cluster: DevCluster, tmp_path: Path, strategy: str
) -> None:
    """Modules and environments take their time; the program was never started."""
    site = {"environment": {"prologue": "sleep 4"}, "chain": {"strategy": strategy}}
    chain = submit_chain(idle_cluster, tmp_path, "8", "0.05", profile=site)
    first = f"{chain.array}_1" if strategy == "array" else chain.array
    chain.wait_for(lambda: "RUNNING" in state_of(chain, first))
    time.sleep(1.5)
    idle_cluster.run("scancel", first)
    assert_halted(chain, "cancelled")
    assert not any(chain.rundir.checkpoints.iterdir())
    assert lease.highest(chain.rundir) <= 2
    assert not (tmp_path / "reached-1").exists()
    note(
        "scancel while modules and environment are still being set up",
        "halted; the program was not started",
        lost=0,
    )


def test_a_link_cancelled_while_it_waits_for_the_lease_halts_the_chain(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """The one before is deaf, and still in its kill wait: only an array starts the next then."""
    (tmp_path / "deaf.py").write_text(DEAF)
    spec = {"command": "python3 deaf.py", "chain": {"strategy": "array"}}
    chain = submit_chain(idle_cluster, tmp_path, spec=spec)
    chain.wait_for(lambda: has_begun(chain))
    chain.end_in(1, 1)
    second = f"{chain.array}_2"
    chain.wait_for(lambda: "RUNNING" in state_of(chain, second))
    idle_cluster.run("scancel", second)
    assert_halted(chain, "cancelled")
    note("scancel of a link that waits for the one before, which is in its kill wait", "halted")


def test_a_link_cancelled_in_the_grace_of_its_preemption_halts_the_chain(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    (tmp_path / "deaf.py").write_text(DEAF)
    chain = submit_chain(idle_cluster, tmp_path, spec={"command": "python3 deaf.py"})
    chain.wait_for(lambda: has_begun(chain))
    chain.preempt()
    chain.wait_for(lambda: chain.rundir.notice(1) is not None)
    time.sleep(1)
    chain.scancel(1)
    assert_halted(chain, "cancelled")
    note("scancel in the grace of a preemption", "halted: cancelled outranks preempted")


ENDS_WHILE_AWAY = "[ $HPC_CKPT_GENERATION = 1 ] || exit 0; touch {begun}; sleep 8; exit 75"
"""The first link saves and leaves while no controller is there, the second is complete."""


def test_a_job_goes_back_into_the_queue_once_the_controller_is_there_again(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """strategy: requeue has nothing pending behind it."""
    command = ENDS_WHILE_AWAY.format(begun=tmp_path / "begun")
    chain = submit_chain(
        idle_cluster, tmp_path, spec={"command": command, "chain": {"strategy": "requeue"}}
    )
    chain.wait_for((tmp_path / "begun").exists)
    idle_cluster.save_state(chain.array)
    idle_cluster.kill_controller()
    threading.Timer(16.0, idle_cluster.restart_controller).start()
    chain.wait_for_done(180)
    assert 2 == lease.highest(chain.rundir)
    note(
        "slurmctld away when a link of `strategy: requeue` ends",
        "asked again until it was back; went on",
    )


def test_a_job_whose_start_the_controller_has_lost_goes_on_all_the_same(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """It takes the job for one that is pending, would start it again on a node that still has it,
    and hold it when that refuses."""
    command = ENDS_WHILE_AWAY.format(begun=tmp_path / "begun")
    later = {"directives": {"extra": ["--begin=now+8"]}}
    chain = submit_chain(
        idle_cluster,
        tmp_path,
        spec={"command": command, "chain": {"strategy": "requeue"}},
        profile=later,
    )
    idle_cluster.save_state(chain.array)
    saved = idle_cluster.layout.job_state
    before_it_began = saved.read_bytes()
    assert "PENDING" in state_of(chain, chain.array)
    chain.wait_for((tmp_path / "begun").exists)
    idle_cluster.kill_controller()
    saved.write_bytes(before_it_began)
    threading.Timer(12.0, idle_cluster.restart_controller).start()
    chain.wait_for_done(240)
    assert 2 == lease.highest(chain.rundir)
    note(
        "the same, and slurmctld had not saved the start of the job when it was killed",
        "the next start was put off until the node had nothing more of the job; went on",
    )


def test_a_job_that_slurm_holds_is_said_with_what_to_do(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """No link of it runs that could say so."""
    chain = submit_chain(
        idle_cluster, tmp_path, spec={"command": "true", "chain": {"strategy": "requeue"}},
        profile={"directives": {"extra": ["--begin=now+600"]}},
    )  # fmt: skip
    told = json.loads(cli(idle_cluster, tmp_path, "status", "run", "--json").stdout)
    assert "" == told["remark"]
    idle_cluster.run("scontrol", "hold", chain.array)  # by root: an administrator's hold
    told = json.loads(cli(idle_cluster, tmp_path, "status", "run", "--json").stdout)
    assert told["remark"].startswith(f"job {chain.array} never begins by itself (JobHeldAdmin): ")
    shown = cli(idle_cluster, tmp_path, "status", "run").stdout
    assert "never begins by itself" in " ".join(shown.split())
    note(
        "a job that is held, but not by its user",
        "`hpc-ckpt status` says which, why and what to do",
    )


def test_a_chain_cancelled_between_two_links_is_said_to_have_nothing_that_follows(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """scancel of the array while nothing of it runs; a while later, so that it has settled."""
    later = {"directives": {"extra": ["--begin=now+600"]}}
    chain = submit_chain(
        idle_cluster, tmp_path, spec={"command": "true", "chain": {"strategy": "array"}},
        profile=later,
    )  # fmt: skip
    told = json.loads(cli(idle_cluster, tmp_path, "status", "run", "--json").stdout)
    assert ("", f"{chain.array}_1") == (told["remark"], told["next_job"]["id"])
    idle_cluster.run("scancel", chain.array)
    for path in (chain.rundir.chain_file, chain.rundir.lease):
        os.utime(path, (1e9, 1e9))
    told = json.loads(cli(idle_cluster, tmp_path, "status", "run", "--json").stdout)
    assert "nothing of this chain is in this cluster's queue" in told["remark"]
    note(
        "the array cancelled between two links",
        "`hpc-ckpt status` says that nothing of the chain is in the queue, and how to take it up",
    )


def test_a_link_whose_runner_and_job_are_gone_is_not_said_to_run(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """Slurm says so, a while after its last word; its lease was never given back."""
    (tmp_path / "deaf.py").write_text(DEAF)
    chain = submit_chain(
        idle_cluster,
        tmp_path,
        spec={"command": "python3 deaf.py", "chain": {"strategy": "requeue"}},
    )
    chain.wait_for(lambda: has_begun(chain))
    told = json.loads(cli(idle_cluster, tmp_path, "status", "run", "--json").stdout)
    assert ("running", "") == (told["state"], told["remark"])
    idle_cluster.run("scancel", "--full", "--signal=KILL", chain.array)
    chain.wait_for(lambda: state_of(chain, chain.array).strip() == "", timeout_s=60)
    place = chain.rundir
    written = [*place.ledger.iterdir(), *place.events.iterdir()]
    for path in (place.chain_file, place.lease, *written):
        os.utime(path, (1e9, 1e9))
    told = json.loads(cli(idle_cluster, tmp_path, "status", "run", "--json").stdout)
    assert ("between links", "lost") == (told["state"], told["links"][-1]["cause"])
    assert "nothing of this chain is in this cluster's queue" in told["remark"]
    note("runner and job killed", "the same")


def test_a_disk_that_is_full_for_a_while_costs_no_further_links(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """The next link waits inside its allocation until it can take the lease."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=777", "none", place], check=True)
    try:
        filled = place / "filled"
        command = (
            f"[ $HPC_CKPT_GENERATION = 1 ] || exit 0; dd if=/dev/zero of={filled} bs=4k; exit 75"
        )
        root, rules = str(place / "run"), {"strategy": "array"}
        spec = {"command": command, "root": root, "chain": rules}
        chain = submit_chain(idle_cluster, tmp_path, spec=spec)
        chain = SubmittedChain(idle_cluster, type(chain.rundir)(place / "run"), chain.array)
        chain.wait_for(lambda: "RUNNING" in state_of(chain, f"{chain.array}_2"))
        time.sleep(5)
        assert "RUNNING" in state_of(chain, f"{chain.array}_2")
        filled.unlink()
        chain.wait_for_done(90)
        assert 2 == lease.highest(chain.rundir)
        note(
            "root full when the next link begins, made free five seconds later",
            "the link waited for room in its allocation, and went on; no index was used up",
        )
    finally:
        cli(idle_cluster, tmp_path, "stop", str(place / "run"), "--now")
        idle_cluster.run("scancel", "-u", "root", check=False)
        subprocess.run(["umount", "-l", place], check=False)


def test_what_is_set_for_sbatch_is_said_and_the_same_in_every_link(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """SBATCH_TIMELIMIT would outrank the plan in the first job alone."""
    said = {"SBATCH_TIMELIMIT": "1", "SBATCH_PARTITION": "lowpriority"}
    (tmp_path / "t.yaml").write_text("command: ['true']\nroot: run\nchain: {link_time: 10 min}\n")
    done = subprocess.run(
        [sys.executable, "-m", "hpc_ckpt.cli", "submit", "t.yaml"],
        cwd=tmp_path,
        env={**idle_cluster.environment, **said},
        capture_output=True,
        text=True,
    )
    assert 0 == done.returncode, done.stderr
    assert "lowpriority" in done.stdout
    job = re.search(r"submitted job (\d+)", done.stdout)
    assert job is not None, done.stdout
    shown = idle_cluster.run("scontrol", "-o", "show", "job", job[1]).stdout
    assert "TimeLimit=00:10:00" in shown
    assert "Partition=lowpriority" in shown


def runs_of(place: Path) -> int:
    return len((place / "runs").read_text().splitlines())


def test_a_script_that_ends_its_own_group_is_complete(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """`kill 0` reaches the shim too, but no job is being ended: nothing has to run again."""
    cleans_up = "trap \"trap '' TERM; kill 0\" EXIT"
    command = f"{cleans_up}; echo ran >> {tmp_path}/runs; sleep 60 & sleep 1; exit 0"
    chain = submit_chain(idle_cluster, tmp_path, spec={"command": command})
    chain.wait_for_done()
    assert "shim TERM" in chain.rundir.notice_file(1).read_text()
    assert (1, 1) == (runs_of(tmp_path), lease.highest(chain.rundir))
