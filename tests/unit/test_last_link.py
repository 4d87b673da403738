"""The last link of a chain that is not complete: nothing runs after it that could say so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from links import chain_record
from sweeps import make_sweep

from hpc_ckpt import events
from hpc_ckpt.chain.allocation import SlurmBackend
from hpc_ckpt.chain.orders import Orders
from hpc_ckpt.chain.succession import Requeue, Successors
from hpc_ckpt.errors import SchedulerError
from hpc_ckpt.events import Event, EventLog
from hpc_ckpt.rundir import RunDir

MAIL = ["scontrol", "update", "jobid=84", "MailUser=me@example.org", "MailType=END,FAIL"]
NOBODY: list[list[str]] = []


class Cluster:
    """Nothing is pending, and no job is taken or put back."""

    def __init__(self) -> None:
        self.told: list[list[str]] = []

    def __call__(self, argv: Sequence[str]) -> str:
        if argv[0] == "sbatch" or argv[1] == "requeue":
            raise SchedulerError(argv, 1, "Requeue is disabled, or no job may be submitted")
        if argv[:2] == ["scontrol", "update"]:
            self.told.append(list(argv))
        return ""


def ends(rundir: RunDir, kind: type[Successors] | type[Requeue], *, early: bool) -> Cluster:
    """Its last link, in job 84: as it begins, or as it ends."""
    cluster = Cluster()
    backend = SlurmBackend({"SLURM_JOB_ID": "84"}, run=cluster)
    ledger = EventLog(rundir.ledger_file(1))
    (rundir.lease / "00000001").touch()
    ledger.emit(Event.LINK_STARTED)
    succession = kind(backend, rundir, Orders.read(rundir), ledger, lambda: 5)
    if early:
        succession.prepare()
    succession.go_on()
    return cluster


def write(rundir: RunDir, **more: Any) -> RunDir:
    spec = {"mail": "me@example.org"}
    rundir.chain_file.write_text(json.dumps(chain_record(spec=spec, jobs=["84"], **more)))
    return rundir


@pytest.mark.parametrize(
    ("kind", "early"),
    [(Successors, True), (Successors, False), (Requeue, False)],
    ids=["out of tokens, as it begins", "out of tokens, as it ends", "requeue refused"],
)
def test_a_chain_that_nothing_follows_sends_its_one_mail(
    rundir: RunDir, kind: type[Successors] | type[Requeue], early: bool
) -> None:
    """By the job of this link, however that ends."""
    assert [MAIL] == ends(write(rundir), kind, early=early).told
    _, said = events.read(rundir.ledger_file(1))
    assert "chain.nothing_follows" == said["event"]


def test_nobody_who_did_not_ask_gets_mail(rundir: RunDir) -> None:
    rundir.chain_file.write_text(json.dumps(chain_record(jobs=["84"])))
    assert NOBODY == ends(rundir, Requeue, early=False).told


def test_a_sweep_sends_one_mail_for_all_members(tmp_path: Path) -> None:
    """By the last one: complete, stopped, or that nothing follows."""
    first, second = make_sweep(tmp_path, 2)
    for number, rundir in enumerate((first, second), 1):
        member = {"index": number, "name": rundir.root.name, "values": {}}
        write(rundir, sweep=str(tmp_path), member=member)
    assert NOBODY == ends(first, Requeue, early=False).told
    assert [MAIL] == ends(second, Requeue, early=False).told


# ── a chain that is over ──────────────────────────────────────────────────────────────────
def test_what_waits_is_cancelled_by_one_scancel(rundir: RunDir) -> None:
    """The newest first: what waits for another could begin when that is gone."""
    rundir.chain_file.write_text(json.dumps(chain_record(jobs=["84", "85", "86"])))
    asked: list[list[str]] = []

    def run(argv: Sequence[str]) -> str:
        asked.append(list(argv))
        return ""

    backend = SlurmBackend({"SLURM_JOB_ID": "84"}, run=run)
    ledger = EventLog(rundir.ledger_file(1))
    made = Successors(backend, rundir, Orders.read(rundir), ledger, lambda: 5)
    assert ["84", "85", "86"] == made.end()
    assert [["scancel", "--state=PENDING", "86", "85", "84"]] == asked


def test_a_controller_that_does_not_answer_is_asked_once(rundir: RunDir) -> None:
    """Half a minute each would hold the allocation for an hour; what waits ends by itself."""
    rundir.chain_file.write_text(json.dumps(chain_record(jobs=["84", "85", "86"])))
    asked: list[list[str]] = []

    def away(argv: Sequence[str]) -> str:
        asked.append(list(argv))
        raise SchedulerError(argv, None, "no answer from the scheduler")

    backend = SlurmBackend({"SLURM_JOB_ID": "84"}, run=away)
    ledger = EventLog(rundir.ledger_file(1))
    assert [] == Successors(backend, rundir, Orders.read(rundir), ledger, lambda: 5).end()
    assert 1 == len(asked)
