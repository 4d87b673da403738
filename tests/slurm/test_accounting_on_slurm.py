"""A cluster with accounting: sacct as evidence, and the limits that sacctmgr knows."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from chains import (
    MOST_LOST,
    PROFILE,
    SAVE_EVERY,
    TRACKING,
    assert_finished,
    cli,
    note,
    run_undisturbed,
    submit_chain,
)
from devcluster import DevCluster, Options

from hpc_ckpt.chain.profile import Profile
from hpc_ckpt.chain.survey import limits, take_survey

pytestmark = pytest.mark.slurm

EPOCHS = 6
WORDS = (str(EPOCHS), "0.05")


@pytest.fixture(scope="module")
def accounted(accounting_installed: None) -> Iterator[DevCluster]:
    options = Options(proctrack=TRACKING, accounting=True, limits=True)
    with (
        tempfile.TemporaryDirectory(prefix="hpc-slurm-") as directory,
        DevCluster.start(Path(directory), options=options) as running,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SLURM_CONF", str(running.layout.conf))
        for words in (
            ("add", "qos", "few", "MaxSubmitJobsPerUser=3"),
            ("add", "account", "lab"),
            ("add", "qos", "many", "MaxSubmitJobsPerUser=20"),
            ("add", "qos", "blocked", "MaxJobsPerUser=0"),
            (
                "add",
                "user",
                "root",
                "account=lab",
                "qos=normal,few,many,blocked",
                "MaxSubmitJobs=7",
            ),
            ("add", "account", "brief"),
            ("add", "user", "root", "account=brief", "MaxWall=60"),
        ):
            running.run("sacctmgr", "-i", *words)
        yield running


def test_a_failed_node_is_known_from_sacct(accounted: DevCluster, tmp_path: Path) -> None:
    """scontrol says only that the job was put back; the ledger quotes what sacct says."""
    chain = submit_chain(accounted, tmp_path, *WORDS, spec={"chain": {"max_links": 5}})
    chain.wait_for_steps(1, SAVE_EVERY + 5)
    chain.kill_node_of(1)
    chain.wait_for_done(180)
    first = chain.link(1)
    assert first is not None
    assert "node failure" == first.cause, first
    assert "sacct: NODE_FAIL" in first.evidence
    reference = run_undisturbed(tmp_path / "reference", EPOCHS)
    assert_finished(chain, reference, EPOCHS)
    lost = chain.steps_lost(1)
    assert 0 <= lost < MOST_LOST
    note("node failure, with accounting", "node failure, quoted from sacct; went on", first, lost)


def test_limits_of_association_and_qos_bound_an_array(
    accounted: DevCluster, tmp_path: Path
) -> None:
    """More links than the user may have in the queue are not asked for at once."""
    site = Profile(cluster="dev")
    survey = take_survey()
    assert limits(survey, site).submit is None
    bounds = [limits(survey, site, account="lab", qos=qos).submit for qos in (None, "few", "many")]
    assert [7, 3, 20] == [None if bound is None else bound.most for bound in bounds]
    chain = submit_chain(accounted, tmp_path, *WORDS, spec={"account": "lab", "qos": "few"})
    waiting = accounted.run("squeue", "-h", "-r", "-o", "%i").stdout.split()
    accounted.run("scancel", chain.array)
    assert 3 == len(waiting)


def hold(cluster: DevCluster, count: int, *options: str) -> str:
    """So many jobs that wait."""
    wanted = ["sbatch", "--parsable", "--hold", f"--array=1-{count}", "-o", "/dev/null", *options]
    return cluster.run(*wanted, "--wrap", "true").stdout.strip()


def submit(cluster: DevCluster, place: Path, **spec: object) -> subprocess.CompletedProcess[str]:
    (place / "site.yaml").write_text(json.dumps(PROFILE))
    (place / "t.yaml").write_text(json.dumps({"command": "true", "root": "run", **spec}))
    return cli(cluster, place, "submit", "t.yaml", "--profile", "./site.yaml")


def test_what_is_queued_already_is_taken_off(accounted: DevCluster, tmp_path: Path) -> None:
    """Slurm would refuse the whole array; where there is no room nothing is submitted.

    A QoS with a limit of its own counts before the account: Slurm itself goes that way.
    """
    hold(accounted, 5, "-A", "lab", "-p", "gpu")
    try:
        first = submit(
            accounted, tmp_path, account="lab", sbatch=["--hold"], chain={"max_links": 9}
        )
        full = submit(accounted, tmp_path, account="lab", root="other")
        many = hold(accounted, 8, "-A", "lab", "--qos", "many")
    finally:
        accounted.run("scancel", "--account=lab", check=False)
    assert 0 == first.returncode, first.stderr
    assert "takes 2 links at once instead of 9: account 'lab' allows 7 in the" in first.stdout
    assert 2 == full.returncode, full.stdout
    assert "no job can be submitted now: account 'lab' allows 7 in the queue" in full.stderr
    assert many.isdecimal()


def test_a_link_that_could_never_start_is_refused(accounted: DevCluster, tmp_path: Path) -> None:
    """Slurm takes it and lets it wait for ever."""
    two_hours = {"chain": {"link_time": "2h"}}
    long = submit(accounted, tmp_path, account="brief", **two_hours)
    assert 2 == long.returncode, long.stdout
    assert "chain.link_time: 2h is more than account 'brief' allows (1h)" in long.stderr
    blocked = submit(accounted, tmp_path, account="lab", qos="blocked", **two_hours)
    assert "no link could ever start: QoS 'blocked' allows no running jobs" in blocked.stderr
    fits = submit(accounted, tmp_path, account="brief")
    accounted.run("scancel", "--account=brief", check=False)
    assert 0 == fits.returncode, fits.stderr
    assert "of 1h each" in fits.stdout
