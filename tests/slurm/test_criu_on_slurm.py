"""A C program that knows nothing of it, saved by CRIU on a real Slurm: time limit, SIGKILL."""

from __future__ import annotations

from pathlib import Path

import pytest
from chains import SubmittedChain, kill_steward, recorded, submit_chain
from chains_of_programs import undisturbed, write_program
from devcluster import DevCluster

pytestmark = pytest.mark.slurm

ROUNDS = 250


@pytest.fixture
def chain(idle_cluster: DevCluster, tmp_path: Path, criu: Path) -> SubmittedChain:
    spec = {
        "name": "count",
        "command": write_program(tmp_path, "c", ROUNDS),
        "level": "criu",
        "checkpoint": {"policy": "every 1 s"},
    }
    tools = {"tools": {"criu": {"path": str(criu / "criu")}}}
    return submit_chain(idle_cluster, tmp_path, spec=spec, profile=tools)


def test_a_chain_of_a_c_program(chain: SubmittedChain, tmp_path: Path) -> None:
    """Ended by its time limit, then killed, it ends as one that was never stopped."""
    result = tmp_path / "result"

    def rounds() -> int:
        return result.read_text().count("\n") if result.exists() else 0

    chain.wait_for(lambda: rounds() > 5)
    chain.end_in(1, 6)
    link = chain.wait_for_end(1)
    assert "time limit" == link.cause, chain.story()
    chain.wait_for(lambda: len(recorded(chain, "restored")) == 1)
    saved = len(recorded(chain, "save.committed"))
    chain.wait_for(lambda: len(recorded(chain, "save.committed")) > saved)
    kill_steward(chain)
    chain.wait_for_done()
    assert 2 == len(recorded(chain, "restored")), chain.story()
    text = result.read_text()
    result.unlink()
    assert undisturbed([str(tmp_path / "count"), str(ROUNDS)], tmp_path) == text
