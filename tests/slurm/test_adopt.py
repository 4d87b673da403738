"""Adopted batch scripts, and the ways to stop, on a real Slurm."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from devcluster import DevCluster

from hpc_ckpt import lease
from hpc_ckpt.chain.ledger import State, read_status
from hpc_ckpt.rundir import RunDir

pytestmark = pytest.mark.slurm

TRAIN = Path(__file__).parent / "programs" / "train.py"
ADOPTED = """\
#!/bin/bash
#SBATCH --job-name=adopted
#SBATCH -p gpu
#SBATCH --time=20
#SBATCH --nodes=1
#SBATCH --ntasks=4
#SBATCH --comment="two words"
#SBATCH --output=adopted-%j.out

echo "tasks $SLURM_NTASKS"
srun bash -c 'echo "rank $SLURM_PROCID of $SLURM_NTASKS"'
srun -n 2 hostname
echo x >>state
[ "$(wc -l <state)" -ge 2 ] || exit 75
"""
PROFILE = "cluster: dev\nsignal: {name: USR1, lead: 10s}\nkill_wait: 5s\n"


def cli(cluster: DevCluster, place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpc_ckpt.cli", *words],
        cwd=place,
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


def wait_for(what: Callable[[], object], rundir: RunDir, timeout_s: float = 90.0) -> None:
    end = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > end:
            files = [*rundir.ledger.iterdir(), *rundir.logs.iterdir()]
            raise TimeoutError("\n".join(f"── {p.name}\n{p.read_text()[-2000:]}" for p in files))
        time.sleep(0.1)


def test_an_adopted_script_runs_as_a_chain(idle_cluster: DevCluster, tmp_path: Path) -> None:
    """Its four tasks are four inside the one step, its sruns do not wait, it goes on once."""
    (tmp_path / "job.sbatch").write_text(ADOPTED)
    (tmp_path / "dev.yaml").write_text(PROFILE)
    done = cli(idle_cluster, tmp_path, "adopt", "job.sbatch", "--submit", "--yes",
               "--profile", "./dev.yaml")  # fmt: skip
    assert 0 == done.returncode, done.stderr
    rundir = RunDir(tmp_path / "runs" / "adopted")
    job = re.search(r"submitted job (\d+)", done.stdout)
    assert job is not None, done.stdout  # it writes files of its own: no array
    shown = idle_cluster.run("scontrol", "-o", "show", "job", job[1]).stdout
    assert "Comment=two words" in shown
    wait_for(lambda: rundir.done() is not None, rundir)
    wait_for(lambda: read_status(rundir).links[-1].ended is not None, rundir)
    assert ["saved and left", "complete"] == [link.cause for link in read_status(rundir).links]
    log = rundir.log_file(1).read_text()
    assert "tasks 4\n" in log
    assert {f"rank {n} of 4" for n in range(4)} == set(re.findall(r"rank \d of \d", log))
    assert not list(tmp_path.glob("adopted-*.out"))
    told = cli(idle_cluster, tmp_path, "logs", "last", "-f", "--link", "1").stdout
    assert ["1", "2"] == re.findall(r"^── link (\d)", told, re.MULTILINE)


def test_its_spec_can_be_submitted_later(idle_cluster: DevCluster, tmp_path: Path) -> None:
    """-o, then submit."""
    (tmp_path / "job.sbatch").write_text(ADOPTED)
    (tmp_path / "dev.yaml").write_text(PROFILE)
    wrote = cli(idle_cluster, tmp_path, "adopt", "job.sbatch", "-o", "job.yaml")
    assert 0 == wrote.returncode, wrote.stderr
    done = cli(idle_cluster, tmp_path, "submit", "job.yaml", "--profile", "./dev.yaml")
    assert 0 == done.returncode, done.stderr
    rundir = RunDir(tmp_path / "runs" / "adopted")
    wait_for(lambda: rundir.done() is not None, rundir)


# ── stop ──────────────────────────────────────────────────────────────────────────────────
def start_training(cluster: DevCluster, place: Path, *program: str) -> RunDir:
    (place / "dev.yaml").write_text(PROFILE)
    spec = {
        "name": "train",
        "command": list(program) or [sys.executable, str(TRAIN), "40", "0.1"],
        "root": "run",
        "partition": "lowpriority",
        "chain": {"link_time": "20 min", "max_links": 4},
        "checkpoint": {"policy": "every 30 steps"},
    }
    (place / "train.yaml").write_text(json.dumps(spec))
    done = cli(cluster, place, "submit", "train.yaml", "--profile", "./dev.yaml")
    assert 0 == done.returncode, done.stderr
    return RunDir(place / "run")


def queue(cluster: DevCluster) -> list[str]:
    return cluster.run("squeue", "-h", "-r", "-o", "%i %T").stdout.split()


def test_stop_after_the_next_checkpoint(idle_cluster: DevCluster, tmp_path: Path) -> None:
    """Not a step is saved for it, and the link itself cancels what is pending."""
    rundir = start_training(idle_cluster, tmp_path)
    wait_for(lambda: any(link.step_now for link in read_status(rundir).links), rundir)
    assert 0 == cli(idle_cluster, tmp_path, "stop", "last", "--after-checkpoint").returncode
    wait_for(lambda: read_status(rundir).state is State.STOPPED, rundir)
    (link,) = read_status(rundir).links
    assert ("halted", 0) == (link.cause, link.step_to % 30)
    assert rundir.notice(1) is None
    wait_for(lambda: queue(idle_cluster) == [], rundir)


def test_stop_now_cancels_a_job_that_does_not_listen(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """After some seconds; nothing of the array stays. Then it can be taken up again."""
    script = "echo begun; [ $HPC_CKPT_GENERATION -gt 1 ] && exit 0; while :; do sleep 1; done"
    rundir = start_training(idle_cluster, tmp_path, "bash", "-c", script)
    wait_for(rundir.log_file(1).exists, rundir)
    told = json.loads(cli(idle_cluster, tmp_path, "stop", "run", "--now", "--json").stdout)
    holder = lease.holder_of(rundir, 1)
    assert holder is not None
    assert ("now", holder.job) == (told["how"], told["killed"])
    wait_for(lambda: queue(idle_cluster) == [], rundir)
    assert State.STOPPED is read_status(rundir).state
    again = cli(idle_cluster, tmp_path, "resume", "run")
    assert 0 == again.returncode, again.stderr
    wait_for(lambda: rundir.done() is not None, rundir)
    complete = cli(idle_cluster, tmp_path, "resume", "run")
    assert (2, True) == (complete.returncode, "the work is complete" in complete.stderr)


def test_a_live_chain_is_not_resumed(idle_cluster: DevCluster, tmp_path: Path) -> None:
    """It says which job it is and how to stop it; and a report is made of it."""
    rundir = start_training(idle_cluster, tmp_path, "sleep", "600")
    wait_for(rundir.log_file(1).exists, rundir)
    done = cli(idle_cluster, tmp_path, "resume", "run")
    assert (2, True) == (done.returncode, "is a chain on it already" in done.stderr)
    packed = cli(idle_cluster, tmp_path, "report", "--for-support", "last", "-o", "r.tar.gz")
    assert 0 == packed.returncode, packed.stderr
    listed = subprocess.run(["tar", "tzf", tmp_path / "r.tar.gz"], capture_output=True, text=True)
    assert "slurm/config.txt" in listed.stdout
    assert re.search(r"slurm/job-\d+\.txt", listed.stdout)
