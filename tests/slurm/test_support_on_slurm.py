"""What user support would insist on, in real chains: sharing, pinned code, bounded logs, one id."""

from __future__ import annotations

import json
import stat
import sys
import time
from pathlib import Path

import pytest
from chains import PROFILE, submit_chain
from devcluster import DevCluster

from hpc_ckpt.chain.ledger import read_status
from hpc_ckpt.rundir import RunDir

pytestmark = pytest.mark.slurm

SUBMIT = ["submit", "--profile", "./site.yaml", "--partition", "lowpriority", "--root", "run",
          "--link-time", "3 min"]  # fmt: skip
CHATTY = """
echo "$WANDB_RUN_ID $(cat version)" >>"$HPC_CKPT_ROOT/told"
[ "$HPC_CKPT_GENERATION" = 1 ] || exit 0
while [ ! -e "$HPC_CKPT_NOTICE" ]; do head -c 400000 /dev/zero | tr '\\0' x; sleep 0.2; done
exit 75
"""


def test_links_share_code_id_and_group_and_keep_their_logs_small(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """The second link runs what was there when the chain was submitted, not what is there now."""
    (tmp_path / "version").write_text("first")
    spec = {
        "command": ["bash", "-c", CHATTY],
        "pin": {"code": "copy"},
        "sharing": "group",
        "log_limit": "2M",
    }
    chain = submit_chain(idle_cluster, tmp_path, spec=spec)
    told = chain.rundir.root / "told"
    chain.wait_for(told.exists)
    (tmp_path / "version").write_text("second")
    time.sleep(6)
    chain.end_in(1, 1)
    chain.wait_for_done()
    first, second = told.read_text().splitlines()
    assert first == second
    assert first.startswith("train-") and first.endswith(" first")
    logs = sum(path.stat().st_size for path in chain.rundir.logs.glob("link-00000001.log*"))
    assert logs < 5_000_000  # what is written between two looks, at 2 MB a second, comes on top
    assert chain.ledger("link.log_cut")
    modes = {stat.S_IMODE(place.stat().st_mode) for place in chain.rundir.places}
    assert {0o2770} == modes
    assert 0o660 == stat.S_IMODE(chain.rundir.ledger_file(1).stat().st_mode)


def test_a_chain_can_be_submitted_from_inside_a_job(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """Nothing of the surrounding allocation reaches it: neither its size nor its limits."""
    (tmp_path / "site.yaml").write_text(json.dumps(PROFILE))
    words = [*SUBMIT, "--", "true"]
    inside = ["srun", "-N2", "-n1", "-t9", "-D", str(tmp_path), "--mem=200",
              sys.executable, "-m", "hpc_ckpt.cli", *words]  # fmt: skip
    idle_cluster.run(*inside, timeout=60)
    rundir = RunDir(tmp_path / "run")
    end = time.monotonic() + 60
    while rundir.done() is None and time.monotonic() < end:
        time.sleep(0.2)
    assert ["complete"] == [link.cause for link in read_status(rundir).links]


def test_other_packages_than_at_submission_are_said(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """With pin.environment a link does not start in an environment that has changed."""
    prefix = tmp_path / "venv"
    site = prefix / "lib" / "python3.11" / "site-packages"
    (site / "numpy-1.0.dist-info").mkdir(parents=True)
    (prefix / "bin").mkdir()
    (prefix / "bin" / "activate").write_text("")
    (tmp_path / "site.yaml").write_text(json.dumps(PROFILE | {"directives": {"extra": ["--hold"]}}))
    words = [*SUBMIT, "--set", "pin.environment=true", "--", "true"]
    idle_cluster.run("env", "-C", str(tmp_path), f"VIRTUAL_ENV={prefix}", sys.executable, "-m",
                     "hpc_ckpt.cli", *words)  # fmt: skip
    (site / "numpy-1.0.dist-info").rename(site / "numpy-2.0.dist-info")
    rundir = RunDir(tmp_path / "run")
    idle_cluster.run("scontrol", "release", json.loads(rundir.chain_file.read_text())["jobs"][0])
    end = time.monotonic() + 60
    while not rundir.halt_file.exists() and time.monotonic() < end:
        time.sleep(0.2)
    link = read_status(rundir).links[0]
    assert "could not start" == link.cause
    assert link.reason.endswith("gone numpy-1.0; new numpy-2.0")
