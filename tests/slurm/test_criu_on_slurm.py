"""A C program that knows nothing of it, saved by CRIU on a real Slurm: time limit, SIGKILL."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "levels"))

from chains import SubmittedChain, submit_chain
from chains_of_programs import undisturbed, write_program
from devcluster import DevCluster

from hpc_ckpt import events
from hpc_ckpt.levels.program import tree_of

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


def recorded(chain: SubmittedChain, name: str) -> list[dict[str, object]]:
    if not chain.rundir.events.is_dir():
        return []
    every = (r for path in sorted(chain.rundir.events.iterdir()) for r in events.read(path))
    return [record for record in every if record["event"] == name]


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
    _kill_link(chain, 2)
    chain.wait_for_done()
    assert 2 == len(recorded(chain, "restored")), chain.story()
    text = result.read_text()
    result.unlink()
    assert undisturbed([str(tmp_path / "count"), str(ROUNDS)], tmp_path) == text


def _kill_link(chain: SubmittedChain, number: int) -> None:
    """SIGKILL to the program and its keepers, as the kernel does when memory runs out."""
    found = next(
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if "hpc_ckpt.levels.steward" in _text(path)
        and f"HPC_CKPT_ROOT={chain.rundir.root}\0" in _text(path.with_name("environ"))
    )
    for pid in reversed(tree_of(found)):
        os.kill(pid, signal.SIGKILL)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
