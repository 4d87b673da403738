"""A cluster with accounting: sacct as evidence, and the limits that sacctmgr knows."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from chains import SAVE_EVERY, assert_finished, run_undisturbed, submit_chain
from devcluster import DevCluster, Options

from hpc_ckpt.chain.profile import Profile
from hpc_ckpt.chain.survey import limits, take_survey

pytestmark = pytest.mark.slurm

EPOCHS = 6
WORDS = (str(EPOCHS), "0.05")


@pytest.fixture(scope="module")
def accounted(accounting_installed: None) -> Iterator[DevCluster]:
    with (
        tempfile.TemporaryDirectory(prefix="hpc-slurm-") as directory,
        DevCluster.start(Path(directory), options=Options(accounting=True, limits=True)) as running,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SLURM_CONF", str(running.layout.conf))
        for words in (
            ("add", "qos", "few", "MaxSubmitJobsPerUser=3"),
            ("add", "account", "lab"),
            ("add", "user", "root", "account=lab", "qos=normal,few", "MaxSubmitJobs=7"),
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


def test_limits_of_association_and_qos_bound_an_array(
    accounted: DevCluster, tmp_path: Path
) -> None:
    """More links than the user may have in the queue are not asked for at once."""
    site = Profile(cluster="dev")
    survey = take_survey()
    assert 7 == limits(survey, site, account=None, qos=None).max_submit
    assert 3 == limits(survey, site, account="lab", qos="few").max_submit
    chain = submit_chain(accounted, tmp_path, *WORDS, spec={"account": "lab", "qos": "few"})
    waiting = accounted.run("squeue", "-h", "-r", "-o", "%i").stdout.split()
    accounted.run("scancel", chain.array)
    assert 3 == len(waiting)
