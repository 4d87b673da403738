"""Hosts on which links failed get no further ones, and those excluded before stay excluded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from links import make_chain

from hpc_ckpt import events
from hpc_ckpt.chain.backend import Cause
from hpc_ckpt.chain.link import LinkRunner
from hpc_ckpt.chain.local import LocalBackend
from hpc_ckpt.chain.lookback import avoid_bad_hosts
from hpc_ckpt.chain.orders import Orders
from hpc_ckpt.chain.past import hosts_excluded
from hpc_ckpt.chain.succession import InOneProcess
from hpc_ckpt.chain.verdict import Verdict
from hpc_ckpt.events import Event, EventLog
from hpc_ckpt.rundir import Result, RunDir


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
    rundir = make_chain(tmp_path / "run", spec={"exclude": ["n9"]})
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


@pytest.mark.parametrize("name", ["setup-bad-nodes", "no-runner-nodes"])
def test_a_host_that_gets_no_link_anyway_is_no_other(rundir: RunDir, name: str) -> None:
    """Without n3 all that the chain knows would be excluded, and it would wait for ever."""
    (rundir.logs / name).write_text("n3\n")
    succession = Avoiding()
    look_back(rundir, succession)
    assert [["n9", "n3"]] == succession.told
    assert [] == hosts_excluded(rundir)


def test_nor_is_one_that_its_user_excluded(rundir: RunDir) -> None:
    record = json.loads(rundir.chain_file.read_text())
    record["spec"]["exclude"] = ["n[3-9]"]
    rundir.chain_file.write_text(json.dumps(record))
    look_back(rundir, Avoiding())
    assert [] == hosts_excluded(rundir)


# ── a host or the program ─────────────────────────────────────────────────────────────────
def ended(tmp_path: Path, *hosts: str) -> tuple[LinkRunner, RunDir]:
    """A good link on n1, then failed ones on these hosts, the last of which has just ended."""
    rundir = make_chain(tmp_path / "chain")
    ends = [("n1", "time limit", True), *((host, "crashed", False) for host in hosts)]
    for number, (host, cause, progress) in enumerate(ends, 1):
        runner = LinkRunner(rundir, Orders.read(rundir), LocalBackend(kill_wait_s=5.0))
        runner._succession = Avoiding()
        (rundir.lease / f"{number:08d}").write_text("{}")
        log = EventLog(rundir.ledger_file(number))
        log.emit(Event.LINK_STARTED, node=host, step=0)
        log.emit(Event.LINK_ENDED, cause=cause, progress=progress)
        runner._decide_chain(Verdict(Result.FAILED, Cause.CRASHED, "exit code 1"))
    return runner, rundir


def test_two_failures_on_one_host_exclude_it_before_they_end_the_chain(tmp_path: Path) -> None:
    """An idle broken node takes one link after the other, while others would do."""
    runner, rundir = ended(tmp_path, "n2", "n2")
    assert ["n2"] == hosts_excluded(rundir)
    assert rundir.halted() is None
    assert runner._goes_on


@pytest.mark.parametrize("then", ["n3", "n2"])
def test_a_third_failure_ends_it_wherever_that_is(tmp_path: Path, then: str) -> None:
    """Elsewhere it is the program; on the same host the exclusion did not help."""
    _, rundir = ended(tmp_path, "n2", "n2", then)
    assert "no progress in two links running" == rundir.halted()


def test_two_failures_on_two_hosts_end_it(tmp_path: Path) -> None:
    _, rundir = ended(tmp_path, "n2", "n3")
    assert "no progress in two links running" == rundir.halted()
