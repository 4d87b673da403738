"""GROMACS and LAMMPS as chains on a real Slurm: a time limit, a SIGKILL, truncated files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from chains import SubmittedChain, cli, commits, submit_chain
from devcluster import DevCluster
from molecules import (
    argon,
    cut,
    gromacs_steps,
    kill,
    lammps_steps,
    last_step,
    lennard_jones,
    require,
    thermo,
    uninterrupted,
)

from hpc_ckpt.chain.ledger import read_status
from hpc_ckpt.levels.restarts import Restarts

pytestmark = pytest.mark.slurm

ENDS_IN_S = 8
# An MPI program that a step starts by itself wants Slurm's PMI, which Debian's OpenMPI has not.
MPIRUN = ["mpirun", "--mca", "plm", "isolated", "--mca", "ras", "^slurm", "--allow-run-as-root",
          "-np", "1"]  # fmt: skip


def submit(cluster: DevCluster, place: Path, command: list[str], like: str) -> SubmittedChain:
    spec: dict[str, Any] = {
        "name": like,
        "command": command,
        "recipe": {"like": like, "name": like, "save": {"lead": "3s"}},
        "checkpoint": {"policy": "every 1s"},
    }
    return submit_chain(cluster, place, spec=spec)


def wait_for_commit(chain: SubmittedChain, number: int) -> None:
    chain.wait_for(lambda: any(g == number for _, g, _ in commits(chain.rundir)))


def at_the_limit(chain: SubmittedChain, number: int) -> None:
    """The link runs into its end and saves."""
    wait_for_commit(chain, number)
    chain.end_in(number, ENDS_IN_S)
    link = chain.wait_for_end(number)
    assert "time limit" == link.cause
    assert link.step_to > link.step_from


def killed_with_truncated_files(
    chain: SubmittedChain, number: int, program: tuple[str, str]
) -> None:
    """Program and steward die at once; what they wrote last is cut off, in both places."""
    place = chain.rundir.root.parent
    wait_for_commit(chain, number)
    assert 2 == kill(place, *program)
    for path in (*place.glob("ck.*"), *place.glob("*.cpt")):
        cut(path)
    store = Restarts(chain.rundir)
    newest = store.path_of(store.keys()[-1])
    for path in newest.glob("files/0000/*"):
        cut(path)
    chain.wait_for_end(number)


def assert_went_on(chain: SubmittedChain) -> str:
    chain.wait_for_done()
    chain.wait_for_end(3)
    links = read_status(chain.rundir).links
    assert "complete" == links[-1].cause
    assert links[2].step_from > 0
    third = chain.rundir.log_file(3).read_text()
    assert "skipped step-" in third  # the one that was cut off
    assert "goes on from step-" in third
    chain.wait_for(lambda: chain.waiting() == [])
    files = sorted(chain.rundir.logs.glob("link-*.log"))
    return "".join(path.read_text() for path in files)


def test_gromacs(idle_cluster: DevCluster, tmp_path: Path) -> None:
    require("gmx")
    steps = gromacs_steps(20)
    argon(tmp_path, steps)
    command = ["gmx", "mdrun", "-deffnm", "prod", "-nt", "1", "-cpt", "0.01"]
    chain = submit(idle_cluster, tmp_path, command, "gromacs")
    at_the_limit(chain, 1)
    assert "Finished mdrun" in (tmp_path / "prod.log").read_text()
    assert chain.rundir.done() is None
    killed_with_truncated_files(chain, 2, ("gmx", "mdrun"))
    assert_went_on(chain)
    assert steps == last_step(tmp_path / "prod.cpt")
    assert (tmp_path / "prod.gro").exists()


def test_lammps(idle_cluster: DevCluster, tmp_path: Path) -> None:
    require("lmp")
    steps = lammps_steps(20)  # not done before it is killed, on a fast machine either
    lennard_jones(tmp_path, steps)
    chain = submit(idle_cluster, tmp_path, [*MPIRUN, "lmp", "-in", "in.lj"], "lammps")
    at_the_limit(chain, 1)
    killed_with_truncated_files(chain, 2, ("lmp", "in.lj"))
    text = assert_went_on(chain)
    assert uninterrupted(tmp_path / "whole", steps) == thermo(text)


def test_a_stop_reaches_gromacs_behind_srun(idle_cluster: DevCluster, tmp_path: Path) -> None:
    """mdrun is no descendant of srun; without its own TERM it would run on to -maxh."""
    require("gmx")
    argon(tmp_path, 100_000_000)
    mdrun = ["gmx", "mdrun", "-deffnm", "prod", "-nt", "1", "-cpt", "0.02"]
    chain = submit(idle_cluster, tmp_path, ["srun", "--ntasks=1", *mdrun], "gromacs")
    wait_for_commit(chain, 1)
    saved = commits(chain.rundir)
    began = time.monotonic()
    assert 0 == cli(idle_cluster, tmp_path, "stop", "run").returncode
    link = chain.wait_for_end(1)
    assert time.monotonic() - began < 30, chain.story()
    assert "Received the TERM signal" in (tmp_path / "prod.log").read_text()
    assert link.step_to == last_step(tmp_path / "prod.cpt")
    assert len(commits(chain.rundir)) > len(saved)
