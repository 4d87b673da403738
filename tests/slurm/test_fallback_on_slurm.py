"""From level to level in a real chain: DMTCP is not there or does not work, CRIU is not permitted.

In DMTCP's place is the stand-in of tests/levels; test_dmtcp_on_slurm.py has the real one.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dmtcp_stand_in
import pytest
from chains import TRACKING, SubmittedChain, cli, recorded, submit_chain
from chains_of_programs import undisturbed, write_program
from devcluster import DevCluster

pytestmark = pytest.mark.slurm

ROUNDS = 200
DEVCLUSTER = Path(__file__).parents[2] / "slurm" / "devcluster" / "devcluster.py"
WITHOUT = ["setpriv", "--bounding-set=-sys_admin,-checkpoint_restore"]
"""Root without what CRIU needs: a real refusal, and the files can still be read."""


def submit(cluster: DevCluster, place: Path, criu: Path, rounds: int = ROUNDS) -> SubmittedChain:
    """Where it is submitted, DMTCP and CRIU are both there."""
    spec = {
        "name": "count",
        "command": write_program(place, "c", rounds),
        "checkpoint": {"policy": "every 1 s"},
    }
    tools = {"dmtcp": {"path": str(place / "dmtcp")}, "criu": {"path": str(criu / "criu")}}
    return submit_chain(cluster, place, spec=spec, profile={"tools": tools}, held=True)


def assert_saved_by_criu(chain: SubmittedChain, place: Path) -> list[str]:
    """Through a time limit to the right result; why DMTCP was not used, link by link."""
    chain.release(minutes=3)
    chain.wait_for(lambda: recorded(chain, "save.committed"))
    chain.end_in(1, 6)
    assert "time limit" == chain.wait_for_end(1).cause, chain.story()
    chain.wait_for_done()
    chain.wait_for_end(2)
    links = chain.ledger("link.ended")
    assert ["criu", "criu"] == [link["level"] for link in links], chain.story()
    assert 1 == len(recorded(chain, "restored")), chain.story()
    text = (place / "result").read_text()
    assert undisturbed([str(place / "count"), str(ROUNDS)], place) == text
    return [str(link["rejected"]["dmtcp"]) for link in links]


def test_without_dmtcp_on_the_node_criu_saves(
    idle_cluster: DevCluster, tmp_path: Path, criu: Path
) -> None:
    dmtcp_stand_in.install(tmp_path / "dmtcp" / "bin")
    chain = submit(idle_cluster, tmp_path, criu)
    shutil.rmtree(tmp_path / "dmtcp")
    reasons = assert_saved_by_criu(chain, tmp_path)
    assert all("no dmtcp_launch there" in why for why in reasons), reasons
    shown = cli(idle_cluster, tmp_path, "history", "run")
    assert "no dmtcp_launch there" in " ".join(shown.stdout.split()), shown


def test_a_program_that_dmtcp_cannot_launch_is_saved_by_criu(
    idle_cluster: DevCluster, tmp_path: Path, criu: Path
) -> None:
    """Once tried it is not tried again: the second link knows."""
    place = dmtcp_stand_in.install(tmp_path / "dmtcp" / "bin")
    launch = place / "dmtcp_launch"
    launch.write_text(launch.read_text().replace("exec", "export STAND_IN=launch-99\nexec"))
    chain = submit(idle_cluster, tmp_path, criu)
    reasons = assert_saved_by_criu(chain, tmp_path)
    assert all("an assertion of DMTCP failed (code 99)" in why for why in reasons), reasons
    assert 1 == chain.rundir.log_file(1).read_text().count("level: dmtcp")
    assert "level: dmtcp" not in chain.rundir.log_file(2).read_text()


@pytest.fixture
def restricted(cluster_directory: Path) -> Iterator[DevCluster]:
    """A cluster on whose nodes nobody may use CRIU."""
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv (util-linux) is not installed")
    up = [sys.executable, str(DEVCLUSTER), "up", str(cluster_directory), "--nodes", "1"]
    how = ["--proctrack", TRACKING.value]
    subprocess.run([*WITHOUT, *up, *how], check=True, stdout=subprocess.DEVNULL, timeout=60)
    found = DevCluster.open(cluster_directory)
    assert found is not None
    with found:
        yield found


def test_where_criu_is_not_permitted_the_chain_is_plain_and_warns(
    restricted: DevCluster, tmp_path: Path, criu: Path
) -> None:
    """What is submitted with both ends with neither; each says why."""
    dmtcp_stand_in.install(tmp_path / "dmtcp" / "bin")
    chain = submit(restricted, tmp_path, criu, rounds=20)
    shutil.rmtree(tmp_path / "dmtcp")
    chain.release(minutes=3)
    chain.wait_for_done()
    chain.wait_for_end(1)
    (link,) = chain.ledger("link.ended")
    assert "plain" == link["level"]
    assert "no dmtcp_launch there" in link["rejected"]["dmtcp"]
    assert "CAP_CHECKPOINT_RESTORE" in link["rejected"]["criu"]
    assert "THIS PROGRAM IS NOT SAVED AT ALL" in chain.rundir.log_file(1).read_text()
