"""A C program under the real DMTCP on a real Slurm: time limit, SIGKILL, what it cannot launch.

Needs dmtcp_launch on PATH; without it every test here is skipped, and says so.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from chains import SubmittedChain, kill_steward, recorded, submit_chain
from chains_of_programs import undisturbed, write_program
from devcluster import DevCluster

REAL_DMTCP = True
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(shutil.which("dmtcp_launch") is None, reason="dmtcp_launch is not on PATH"),
]

ROUNDS = 300


def submit(
    cluster: DevCluster, place: Path, program: str, criu: Path | None = None
) -> SubmittedChain:
    spec = {
        "name": "count",
        "command": write_program(place, program, ROUNDS),
        "checkpoint": {"policy": "every 1 s"},
    }
    tools = {"tools": {"criu": {"path": str(criu / "criu" if criu else "/nowhere")}}}
    return submit_chain(cluster, place, spec=spec, profile=tools)


def assert_same_result(place: Path) -> None:
    text = (place / "result").read_text()
    assert undisturbed([str(place / "count"), str(ROUNDS)], place) == text


def test_a_chain_of_a_c_program(idle_cluster: DevCluster, tmp_path: Path) -> None:
    """Ended by its time limit, then killed, it ends as one that was never stopped."""
    chain = submit(idle_cluster, tmp_path, "c")
    chain.wait_for(lambda: recorded(chain, "save.committed"))
    chain.end_in(1, 6)
    assert "time limit" == chain.wait_for_end(1).cause, chain.story()
    chain.wait_for(lambda: len(recorded(chain, "restored")) == 1)
    saved = len(recorded(chain, "save.committed"))
    chain.wait_for(lambda: len(recorded(chain, "save.committed")) > saved)
    kill_steward(chain)
    chain.wait_for_done()
    assert 2 == len(recorded(chain, "restored")), chain.story()
    chain.wait_for_end(3)
    links = chain.ledger("link.ended")
    assert {"dmtcp"} == {link["level"] for link in links if "level" in link}
    assert "dmtcp" not in links[-1]["rejected"]
    assert_same_result(tmp_path)


def test_what_dmtcp_cannot_launch_goes_to_criu(
    idle_cluster: DevCluster, tmp_path: Path, criu: Path
) -> None:
    """The ledger says why; the chain does not come back to it."""
    chain = submit(idle_cluster, tmp_path, "link", criu)
    chain.wait_for(lambda: recorded(chain, "save.committed"))
    chain.end_in(1, 6)
    chain.wait_for_end(1)
    chain.wait_for_done()
    chain.wait_for_end(2)
    assert "Unimplemented file type" in chain.rundir.log_file(1).read_text()
    links = chain.ledger("link.ended")
    assert ["criu", "criu"] == [link["level"] for link in links]
    assert "an assertion of DMTCP failed (code 99)" in links[0]["rejected"]["dmtcp"]
    assert 1 == len(recorded(chain, "restored")), chain.story()
    assert_same_result(tmp_path)
