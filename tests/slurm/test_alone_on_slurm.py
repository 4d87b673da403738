"""Programs that write files of their own never run twice, whatever Slurm believes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
from chains import TRACKING, cli, note, submit_chain, wait_until
from devcluster import DevCluster, Proctrack

from hpc_ckpt import lease
from hpc_ckpt.chain.past import jobs_of

pytestmark = pytest.mark.slurm

WRITER = """\
trap '' TERM
(setsid bash -c 'while :; do echo "$0 $EPOCHREALTIME" >>out; sleep 0.1; done' $$ &)
while :; do echo "$$ $EPOCHREALTIME" >>out; sleep 0.1; done
"""


def writers(place: Path) -> dict[str, tuple[float, float]]:
    """By process, when it first and last wrote."""
    found: dict[str, tuple[float, float]] = {}
    for line in (place / "out").read_text().splitlines() if (place / "out").exists() else ():
        words = line.split()
        if len(words) == 2:
            first = found.get(words[0], (float(words[1]), 0.0))[0]
            found[words[0]] = (first, float(words[1]))
    return found


def kill_all_in(place: Path) -> None:
    """Linuxproc does not find a process whose parent has ended, and waits for its output."""
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if link.readlink() == place:
                os.kill(int(link.parent.name), signal.SIGKILL)


def test_a_program_that_slurm_takes_for_dead_is_gone_before_the_next_begins(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """slurmd alone is killed: the job is started elsewhere while its processes live."""
    (tmp_path / "writer.sh").write_text(WRITER)
    chain = submit_chain(
        idle_cluster,
        tmp_path,
        spec={"command": ["bash", "writer.sh"], "level": "plain", "chain": {"max_links": 3}},
    )
    record = json.loads(chain.rundir.chain_file.read_text())
    assert ("afterany", True) == (record["strategy"], record["alone"])
    assert 3 == len(jobs_of(chain.rundir))
    chain.wait_for(lambda: len(writers(tmp_path)) == 1)
    idle_cluster.kill_slurmd(chain.node_of(1))
    chain.wait_for(lambda: len(writers(tmp_path)) == 2, timeout_s=120)
    chain.wait_for(lambda: sorted(writers(tmp_path).values())[1][0] + 3 < time.time())
    (_, ended), (began, went_on) = sorted(writers(tmp_path).values())
    assert began + 2 < went_on
    assert ended < began
    assert lease.program_gone(chain.rundir, 1)
    assert ["node failure"] == [record["cause"] for record in chain.ledger("link.ended")]
    note(
        "slurmd alone killed, its job alive, a program that writes its own files",
        "the old program was killed by its shim before the new one began",
    )
    assert 0 == cli(idle_cluster, tmp_path, "stop", "run", "--now").returncode
    if TRACKING is Proctrack.LINUXPROC:
        kill_all_in(tmp_path)
    wait_until(lambda: idle_cluster.run("squeue", "-h").stdout == "", 60)
