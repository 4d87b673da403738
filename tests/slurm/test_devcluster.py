"""The throw-away Slurm does what the tests of the rest of the house rely on."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import devcluster
import pytest
from devcluster import DevCluster, Options, Refused

pytestmark = pytest.mark.slurm


def command(*argv: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run devcluster.py as a developer does."""
    environment = {**os.environ, "PATH": path or os.environ["PATH"]}
    script = str(Path(devcluster.__file__))
    return subprocess.run(
        [sys.executable, script, *argv], env=environment, capture_output=True, text=True, timeout=60
    )


def eventually(condition: Callable[[], bool], *, within_s: float) -> bool:
    """Wait for something a real scheduler does in its own time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def submit(cluster: DevCluster, script: Path, body: str, *options: str) -> str:
    script.write_text(f"#!/bin/bash\n{body}\n")
    output = f"--output={script.with_suffix('.out')}"
    return cluster.run("sbatch", "--parsable", output, *options, str(script)).stdout.strip()


def job_fields(cluster: DevCluster, job: str) -> dict[str, str]:
    text = cluster.run("scontrol", "-o", "show", "job", job).stdout
    return dict(re.findall(r"(\w+)=(\S*)", text))


def job_is(cluster: DevCluster, job: str, state: str) -> Callable[[], bool]:
    return lambda: job_fields(cluster, job)["JobState"] == state


def command_lines() -> str:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # ended while we looked
            continue
    return "\n".join(lines)


def test_has_four_idle_nodes_in_two_partitions(idle_cluster: DevCluster) -> None:
    """A low-priority job may be longer than one in gpu, and both partitions share the nodes."""
    assert list(idle_cluster.node_states().values()) == ["idle"] * 4
    partitions = idle_cluster.run("sinfo", "-h", "-o", "%R %l %D").stdout.splitlines()
    longest = ["cancel 1-00:00:00 4", "gpu 8:00:00 4"]
    longest += ["lowpriority 1-00:00:00 4", "nograce 1-00:00:00 4"]
    assert sorted(partitions) == longest


def test_a_job_sees_the_gpus_it_asked_for(idle_cluster: DevCluster) -> None:
    """Slurm hands out the fake devices as it does real ones."""
    for count, seen in (("1", "0"), ("2", "0,1")):
        done = idle_cluster.run("srun", f"--gres=gpu:{count}", "printenv", "CUDA_VISIBLE_DEVICES")
        assert seen == done.stdout.strip()


def test_no_login_shell_of_the_user_runs(idle_cluster: DevCluster, tmp_path: Path) -> None:
    """A killed node would kill it half-way, and what it held stays locked for that user."""
    job = submit(idle_cluster, tmp_path / "env.sh", "env", "--export=NONE")
    assert eventually(job_is(idle_cluster, job, "COMPLETED"), within_s=20)
    seen = (tmp_path / "env.out").read_text().splitlines()
    assert f"HOME={Path.home()}" in seen
    assert "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" in seen


def test_a_time_limit_is_tested_in_seconds(idle_cluster: DevCluster, tmp_path: Path) -> None:
    """With the tick shim a job ends soon after the end time it was given."""
    job = submit(idle_cluster, tmp_path / "long.sh", "sleep 600", "-t1")
    assert eventually(job_is(idle_cluster, job, "RUNNING"), within_s=10)
    idle_cluster.run("scontrol", "update", f"jobid={job}", "EndTime=now+2")
    assert eventually(job_is(idle_cluster, job, "TIMEOUT"), within_s=12)


def test_preemption_warns_a_step_and_requeues_the_job(
    cluster_directory: Path, tmp_path: Path
) -> None:
    """A job in gpu takes the node: the step hears TERM at once, the job comes back to the queue."""
    trap = (
        f'srun bash -c \'trap "date >> {tmp_path}/terms" TERM; '
        f"touch {tmp_path}/ready; while :; do sleep 0.1; done'"
    )
    options = Options(nodes=1, grace_s=4, kill_wait_s=1)
    with DevCluster.start(cluster_directory, options=options) as cluster:
        low = submit(cluster, tmp_path / "low.sh", trap, "-plowpriority", "--exclusive")
        assert eventually((tmp_path / "ready").exists, within_s=10)
        high = submit(cluster, tmp_path / "high.sh", "sleep 600", "-pgpu", "--exclusive")
        assert eventually((tmp_path / "terms").exists, within_s=4)
        assert job_fields(cluster, low)["JobState"] == "RUNNING"
        assert eventually(job_is(cluster, high, "RUNNING"), within_s=15)
        fields = job_fields(cluster, low)
        assert (fields["JobState"], fields["Restarts"]) == ("PENDING", "1")


def test_a_killed_node_loses_its_job_and_comes_back(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """kill_node is a power cut: nothing of the job is left, and Slurm requeues it."""
    node = idle_cluster.nodes[1]
    job = submit(idle_cluster, tmp_path / "pinned.sh", "sleep 600.125", f"-w{node}")
    assert eventually(lambda: "sleep 600.125" in command_lines(), within_s=10)
    idle_cluster.kill_node(node)
    assert "sleep 600.125" not in command_lines()
    assert eventually(job_is(idle_cluster, job, "PENDING"), within_s=30)
    idle_cluster.restart_node(node)
    assert not idle_cluster.node_states()[node].endswith("*")


def test_two_clusters_run_side_by_side(idle_cluster: DevCluster, cluster_directory: Path) -> None:
    """A job goes to the cluster it was given to, and stopping one leaves the other alone."""
    with DevCluster.start(cluster_directory, options=Options(nodes=2)) as second:
        for cluster in (idle_cluster, second):
            name = cluster.run("srun", "printenv", "SLURMD_NODENAME").stdout.strip()
            assert name in cluster.nodes
        assert not set(idle_cluster.nodes) & set(second.nodes)
    assert list(idle_cluster.node_states().values()) == ["idle"] * 4


def test_an_old_record_does_not_lead_to_a_newer_cluster(
    idle_cluster: DevCluster, cluster_directory: Path, tmp_path: Path
) -> None:
    """Ports and node names are used again; down in an old directory must not end others' jobs."""
    dataclasses.replace(idle_cluster.layout, root=cluster_directory).save()
    job = submit(idle_cluster, tmp_path / "job.sh", "sleep 600.75")
    assert eventually(lambda: "sleep 600.75" in command_lines(), within_s=10)
    assert command("status", str(cluster_directory)).returncode == 1
    assert command("down", str(cluster_directory)).returncode == 0
    assert "sleep 600.75" in command_lines()
    assert job_is(idle_cluster, job, "RUNNING")()


def test_stop_leaves_no_process_of_a_running_job(cluster_directory: Path, tmp_path: Path) -> None:
    """Not even a job's child with an empty environment or a session of its own survives."""
    sleeps = ("sleep 600.25", "sleep 600.375", "sleep 600.5")
    body = "env -i {} &\n(setsid {} &)\nsrun {}".format(*sleeps)
    cluster = DevCluster.start(cluster_directory, options=Options(nodes=2))
    try:
        submit(cluster, tmp_path / "job.sh", body)
        assert eventually(lambda: all(line in command_lines() for line in sleeps), within_s=10)
    finally:
        cluster.stop()
    alive = command_lines()
    assert not [line for line in (*sleeps, str(cluster_directory)) if line in alive]
    assert not list(Path("/sys/fs/cgroup").glob(f"*/*{cluster.nodes[0]}*"))
    cluster.stop()


def test_stop_spares_a_shell_that_only_uses_the_cluster(cluster_directory: Path) -> None:
    """A developer's shell with SLURM_CONF set is not part of the cluster."""
    cluster = DevCluster.start(cluster_directory, options=Options(nodes=1))
    with subprocess.Popen(["sleep", "60"], env=cluster.environment) as shell:
        cluster.stop()
        assert shell.poll() is None
        shell.kill()


def test_up_twice_in_one_directory_is_refused(cluster_directory: Path) -> None:
    """The second up says so and changes nothing; down works, also twice."""
    where = str(cluster_directory)
    try:
        first = command("up", where, "--nodes", "2", "--tick", "30")
        assert (first.returncode, first.stderr) == (0, "")
        again = command("up", where)
        assert again.returncode == 2
        assert "already up" in again.stderr
        status = command("status", where)
        assert status.returncode == 0
        assert "process tracking: " in status.stdout
        assert command("env", where).stdout == f"export SLURM_CONF={where}/etc/slurm.conf\n"
    finally:
        downs = [command("down", where).returncode for _ in range(2)]
    assert downs == [0, 0]
    assert command("status", where).returncode == 1


def test_a_long_and_odd_path_works(cluster_directory: Path) -> None:
    """Sockets allow 107 bytes and slurm.conf no blanks: such a directory gets a short link."""
    directory = cluster_directory / ("long and odd " * 10) / "#1"
    with DevCluster.start(directory, options=Options(nodes=1)) as cluster:
        assert cluster.nodes == cluster.run("srun", "printenv", "SLURMD_NODENAME").stdout.split()
        link = cluster.layout.root
    assert not link.parent.exists()


def test_a_directory_with_other_files_is_refused(cluster_directory: Path) -> None:
    """Starting clears the directory, so it must not be somebody's."""
    (cluster_directory / "thesis.tex").touch()
    with pytest.raises(Refused, match="not empty"):
        DevCluster.start(cluster_directory)


def test_missing_programs_are_named_with_their_packages(cluster_directory: Path) -> None:
    """One message says what to install."""
    done = command("up", str(cluster_directory), path=str(cluster_directory))
    assert done.returncode == 2
    assert "slurm-client gcc libc6-dev" in done.stderr


def test_accounting_is_the_clusters_own_and_ends_with_it(
    accounting_installed: None, cluster_directory: Path, tmp_path: Path
) -> None:
    """sacct knows a job; afterwards neither a daemon nor the database is left."""
    options = Options(nodes=1, accounting=True)
    with DevCluster.start(cluster_directory, options=options) as cluster:
        job = submit(cluster, tmp_path / "job.sh", "true")
        ask = ("sacct", "-n", "-X", "-P", "-o", "State", "-j", job)
        assert eventually(lambda: "COMPLETED" in cluster.run(*ask).stdout, within_s=15)
        assert f"--datadir={cluster_directory}/db" in command_lines()
        secret = (cluster_directory / "etc" / "slurmdbd.conf").stat().st_mode & 0o777
        assert 0o600 == secret
    assert str(cluster_directory) not in command_lines()
    assert not (cluster_directory / "db").exists()


def test_the_packages_of_accounting_are_named_only_when_it_is_asked_for(
    cluster_directory: Path,
) -> None:
    """A cluster without it needs none of them."""
    for asked, named in ((["--accounting"], True), ([], False)):
        done = command("up", str(cluster_directory), *asked, path=str(cluster_directory))
        assert done.returncode == 2
        assert ("mariadb-server" in done.stderr) == named
