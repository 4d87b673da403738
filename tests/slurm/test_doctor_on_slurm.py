"""profile generate and doctor on a real Slurm, with the trial job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from devcluster import DevCluster

from hpc_ckpt.chain.layers import load
from hpc_ckpt.chain.profile import PreemptMode, Profile

pytestmark = pytest.mark.slurm

CLI = [sys.executable, "-m", "hpc_ckpt.cli"]


def cli(cluster: DevCluster, place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**cluster.environment, "HOME": str(place / "home")}
    return subprocess.run(
        [*CLI, *words], cwd=place, env=environ, capture_output=True, text=True, timeout=200
    )


def generated(cluster: DevCluster, place: Path) -> Profile:
    done = cli(cluster, place, "profile", "generate", "-o", "site.yaml")
    assert 0 == done.returncode, done.stderr
    environ = {"XDG_CONFIG_HOME": str(place)}
    return load({"command": "x"}, profile="./site.yaml", cwd=place, environ=environ).profile


def diagnosed(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    assert done.stdout, done.stderr
    return {finding["what"]: finding for finding in json.loads(done.stdout)["findings"]}


def left(cluster: DevCluster) -> str:
    """What is in the queue; a job that was cancelled needs a moment to be gone."""
    deadline = time.monotonic() + 20
    while (text := cluster.run("squeue", "-h").stdout) and time.monotonic() < deadline:
        time.sleep(0.2)
    return text


def test_a_generated_profile_is_well_and_signals_are_heard(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """generate, load, doctor with its job: nothing is wrong, and nothing is left."""
    profile = generated(idle_cluster, tmp_path)
    low = profile.partitions["lowpriority"].preempt
    assert low is not None
    assert (PreemptMode.REQUEUE, "10s", "5s", "8h") == (
        low.mode, low.grace, profile.kill_wait, profile.partitions["gpu"].max_time,
    )  # fmt: skip
    words = ("doctor", "--profile", "./site.yaml", "--json")
    done = cli(idle_cluster, tmp_path, *words)
    found = diagnosed(done)
    wrong = {what: one for what, one in found.items() if one["grade"] == "wrong"}
    assert ({}, 0) == (wrong, done.returncode)
    heard = {what: one["seen"] for what, one in found.items() if "heard by" in one["seen"]}
    assert {
        "USR1 to the step", "TERM to the step", "USR1 to the batch process",
        "the warning before the end", "TERM at the end",
    } == set(heard)  # fmt: skip
    assert "the batch process and the shim" in heard["TERM at the end"]
    assert {"ok"} == {
        found[what]["grade"]
        for what in ("trial job", "interpreter on the node", "scontrol on the node", "root")
    }
    assert "works" == found["sbatch on the node"]["seen"]
    assert "" == left(idle_cluster)
    assert ["site.yaml"] == [path.name for path in tmp_path.iterdir()]


def test_what_is_wrong_is_found_without_a_job(idle_cluster: DevCluster, tmp_path: Path) -> None:
    """Exit 1, each with what to write; the table fits 80 columns."""
    generated(idle_cluster, tmp_path)
    text = (tmp_path / "site.yaml").read_text()
    text = text.replace("kill_wait: 5s", "kill_wait: 30s").replace("grace: 10s", "grace: 120s")
    (tmp_path / "site.yaml").write_text(text)
    words = ("doctor", "--profile", "./site.yaml", "--no-job")
    done = cli(idle_cluster, tmp_path, *words, "--json")
    found = diagnosed(done)
    assert 1 == done.returncode
    assert "write kill_wait: 5s" == found["time to end"]["advice"]
    assert "write preempt: {mode: requeue, grace: 10s}" == found["partition lowpriority"]["advice"]
    shown = cli(idle_cluster, tmp_path, *words)
    assert (1, True) == (shown.returncode, "3 wrong" in shown.stdout)
    assert "" == left(idle_cluster)


def test_a_profile_that_promises_too_much_of_the_nodes(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """Storage, tools and modules are looked at with the node's eyes."""
    generated(idle_cluster, tmp_path)
    with (tmp_path / "site.yaml").open("a") as stream:
        stream.write(
            "storage:\n"
            f"  good: {{path: {tmp_path}, survives: process}}\n"
            "  bad: {path: $NO_SUCH_VARIABLE, survives: process}\n"
            "tools: {criu: {path: /no/such/criu}, dmtcp: {module: no-such-module}}\n"
        )
    done = cli(idle_cluster, tmp_path, "doctor", "--profile", "./site.yaml", "--json",
               "--partition", "lowpriority")  # fmt: skip
    found = diagnosed(done)
    wrong = {what for what, one in found.items() if one["grade"] == "wrong"}
    assert {"storage bad", "tool criu", "module no-such-module"} == wrong
    assert "ok" == found["storage good"]["grade"]


def test_a_signal_to_doctor_takes_the_job_away(idle_cluster: DevCluster, tmp_path: Path) -> None:
    """Ctrl-C in the middle of it."""
    generated(idle_cluster, tmp_path)
    command = [*CLI, "doctor", "--profile", "./site.yaml"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=idle_cluster.environment, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        assert "submitted" in running.stderr.readline()
        os.kill(running.pid, signal.SIGINT)
        assert 130 == running.wait(timeout=60)
    assert "" == left(idle_cluster)
    assert ["site.yaml"] == [path.name for path in tmp_path.iterdir()]


def test_a_partition_that_is_not_there(idle_cluster: DevCluster, tmp_path: Path) -> None:
    """The user's mistake, before anything is submitted."""
    done = cli(idle_cluster, tmp_path, "doctor", "--partition", "nope")
    assert (2, True) == (done.returncode, "it has cancel, gpu" in done.stderr)


def test_a_busy_cluster_is_nobodys_fault(idle_cluster: DevCluster, tmp_path: Path) -> None:
    """The job did not start in the time it was given: a note, and it is taken away."""
    generated(idle_cluster, tmp_path)
    nodes = f"-N{len(idle_cluster.nodes)}"
    script = ["--exclusive", "-o", "/dev/null", "--wrap", "sleep 100"]
    busy = idle_cluster.run("sbatch", "--parsable", nodes, *script).stdout.strip()
    words = ("doctor", "--profile", "./site.yaml", "--json", "--wait", "3s")
    done = cli(idle_cluster, tmp_path, *words)
    found = diagnosed(done)["trial job"]
    assert (0, "note", True) == (done.returncode, found["grade"], "PENDING" in found["seen"])
    assert [busy] == idle_cluster.run("squeue", "-h", "-o", "%i").stdout.split()
