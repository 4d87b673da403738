"""Hosts on which links failed get no further ones, and those excluded before stay excluded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_ckpt import events
from hpc_ckpt.chain.lookback import avoid_bad_hosts
from hpc_ckpt.chain.orders import Orders
from hpc_ckpt.chain.past import hosts_excluded
from hpc_ckpt.chain.succession import InOneProcess
from hpc_ckpt.events import EventLog
from hpc_ckpt.rundir import RunDir


class Avoiding(InOneProcess):
    """Remembers which hosts it was told to avoid."""

    def __init__(self, *, can: bool = True) -> None:
        self.told: list[list[str]] = []
        self._can = can

    def avoid(self, hosts: Sequence[str]) -> bool:
        self.told.append(list(hosts))
        return self._can


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    """n1 was excluded before; n2 failed twice since, n3 once; the user never wanted n9."""
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    record = {
        "argv": ["true"],
        "cwd": "/",
        "spec": {"chain": {"max_links": 9}, "exclude": ["n9"]},
        "profile": {"signal": {"name": "USR1"}, "kill_wait": "5s"},
    }
    rundir.chain_file.write_text(json.dumps(record))
    for number, host in enumerate(("n1", "n1", "n2", "n3", "n2"), 1):
        (rundir.lease / f"{number:08d}").write_text("{}")
        lines: list[dict[str, object]] = [
            {"time": number, "event": "link.started", "node": host},
            {"time": number, "event": "link.ended", "cause": "crashed", "progress": False},
        ]
        if number == 3:
            lines.append({"time": number, "event": "chain.hosts_excluded", "hosts": ["n1"]})
        rundir.ledger_file(number).write_text("".join(json.dumps(one) + "\n" for one in lines))
    return rundir


def look_back(rundir: RunDir, succession: Avoiding) -> None:
    (rundir.lease / "00000006").write_text("{}")
    ledger = EventLog(rundir.ledger_file(6))
    avoid_bad_hosts(rundir, 5, Orders.read(rundir), succession, ledger)


def test_the_whole_list_is_told_again(rundir: RunDir) -> None:
    """Slurm replaces ExcNodeList: a list of the new ones alone would let the others in again."""
    succession = Avoiding()
    look_back(rundir, succession)
    assert [["n9", "n1", "n2"]] == succession.told
    assert ["n1", "n2"] == hosts_excluded(rundir)
    look_back(rundir, succession)
    assert 1 == len(succession.told)


def test_what_could_not_be_excluded_is_tried_again(rundir: RunDir) -> None:
    """Nothing is written down that Slurm did not take."""
    succession = Avoiding(can=False)
    look_back(rundir, succession)
    assert ["n1"] == hosts_excluded(rundir)
    assert [] == list(events.read(rundir.ledger_file(6)))
    look_back(rundir, succession)
    assert 2 == len(succession.told)
