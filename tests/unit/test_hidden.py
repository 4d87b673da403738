"""A root that a group shares, in a site that hides the jobs of others."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from sweeps import make_sweep

from hpc_ckpt import lease, ownership
from hpc_ckpt.chain import slurm
from hpc_ckpt.chain.allocation import SlurmBackend
from hpc_ckpt.chain.claim import refuse_if_live
from hpc_ckpt.chain.hidden import LATE_S, are_hidden
from hpc_ckpt.chain.site import refuse_if_live as refuse_task_if_live
from hpc_ckpt.chain.sweeping import refuse_if_at_work
from hpc_ckpt.errors import RootError, SchedulerError
from hpc_ckpt.events import Event, EventLog
from hpc_ckpt.lease import Holder
from hpc_ckpt.rundir import Done, RunDir

FORGOTTEN = SchedulerError(["squeue"], 1, "slurm_load_jobs error: Invalid job id specified")


class Site:
    """Nothing of another's job is shown."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.private = "jobs"
        self.asked = 0
        self.shown: str | SchedulerError = FORGOTTEN
        monkeypatch.setattr(slurm, "run_command", self.run)
        monkeypatch.setattr(slurm.in_queue, "__defaults__", (self.run,))
        monkeypatch.setattr(slurm.live_jobs, "__defaults__", (self.run,))

    def run(self, argv: Sequence[str]) -> str:
        if argv[0] == "scontrol":
            self.asked += 1
            return f"PrivateData             = {self.private}\n"
        if "--me" in argv:
            return ""
        if isinstance(self.shown, SchedulerError):
            raise self.shown
        return self.shown


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(monkeypatch)


@pytest.fixture
def rundir(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Its last link is another member's, which has an hour to go."""
    rundir.root.chmod(0o2770)
    lease.file_of(rundir, 1).write_text(json.dumps(Holder(job="9_1", array="9", host="a").record()))
    rundir.write_deadline(1, time.time() + 3600.0)
    other = os.geteuid() + 1
    monkeypatch.setattr("os.geteuid", lambda: other)
    monkeypatch.setattr(ownership, "owner_of_new", lambda _: other)
    return rundir


def holder(rundir: RunDir) -> Holder:
    found = lease.holder_of(rundir, 1)
    assert found is not None
    return found


@pytest.mark.parametrize("shown", [FORGOTTEN, ""])
def test_a_job_of_another_that_is_not_shown_may_live(
    site: Site, rundir: RunDir, shown: str | SchedulerError
) -> None:
    """Its lease is waited for, and the nodes it ran on are no sign of its end."""
    site.shown = shown
    backend = SlurmBackend({"SLURM_JOB_ID": "20"}, run=site.run)
    assert backend.probe(holder(rundir)) is None
    assert not backend.surely_gone(holder(rundir), "n1")
    assert backend.probe(Holder(**holder(rundir).record())) is False


def test_its_chain_is_not_submitted_again(site: Site, rundir: RunDir) -> None:
    with pytest.raises(RootError, match="job 9_1 of another user") as caught:
        refuse_if_live(rundir)
    assert f"{lease.file_of(rundir, 1)}.released" in str(caught.value)


def test_nor_a_sweep_with_such_a_member(site: Site, tmp_path: Path, rundir: RunDir) -> None:
    for member in make_sweep(tmp_path / "sweep", 2):
        member.write_halt("stopped")
    refuse_if_at_work(tmp_path / "sweep")
    held = tmp_path / "sweep" / "x-1" / "lease"
    lease.file_of(rundir, 1).rename(held / "00000001")
    with pytest.raises(RootError, match="job 9_1 of another user"):
        refuse_if_at_work(tmp_path / "sweep")


@pytest.fixture
def submitted(rundir: RunDir) -> RunDir:
    """No link of it runs, but another member's array waits."""
    rundir.chain_file.write_text(json.dumps({"jobs": ["9"]}))
    lease.Lease(rundir, 1).release()
    return rundir


def test_nor_a_chain_whose_next_link_may_only_wait(site: Site, submitted: RunDir) -> None:
    with pytest.raises(RootError, match=r"another user has submitted it .job 9.") as caught:
        refuse_if_live(submitted)
    assert f"make the file {submitted.halt_file}" in str(caught.value)
    with pytest.raises(RootError, match="another user has submitted it"):
        refuse_task_if_live([submitted], on_slurm=True)


def test_nor_a_sweep_whose_array_may_only_wait(site: Site, tmp_path: Path, rundir: RunDir) -> None:
    made = make_sweep(tmp_path / "sweep", 3)
    with pytest.raises(RootError, match=r"another user has submitted it .job 7_1."):
        refuse_if_at_work(tmp_path / "sweep")
    site.private = "none"
    site.asked = 0
    refuse_if_at_work(tmp_path / "sweep")
    assert (3, 1) == (len(made), site.asked)


@pytest.mark.parametrize("end", ["stopped", "complete", "run out", "shown", "own"])
def test_unless_it_is_over_or_would_be_seen(
    site: Site, submitted: RunDir, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    if end == "stopped":
        submitted.write_halt("by its user")
    if end == "complete":
        submitted.write_done(Done(1, None))
    if end == "run out":
        EventLog(submitted.ledger_file(1)).emit(Event.NOTHING_FOLLOWS)
    if end == "shown":
        site.private = "none"
    if end == "own":
        monkeypatch.setattr(ownership, "owner_of_new", lambda _: submitted.root.stat().st_uid)
    refuse_task_if_live([submitted], on_slurm=True)
    if end != "complete":
        refuse_if_live(submitted)


def test_unless_its_end_has_passed(site: Site, rundir: RunDir) -> None:
    rundir.write_deadline(1, time.time() - LATE_S - 1.0)
    refuse_if_live(rundir)


def test_or_it_has_said_so(site: Site, rundir: RunDir) -> None:
    lease.Lease(rundir, 1).release()
    refuse_if_live(rundir)


def test_or_the_site_shows_the_jobs_of_others(site: Site, rundir: RunDir) -> None:
    site.private = "none"
    refuse_if_live(rundir)


def test_or_it_is_ones_own(site: Site, rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where storage shows everybody's files as those of some other id."""
    own = lease.file_of(rundir, 1).stat().st_uid
    monkeypatch.setattr(ownership, "owner_of_new", lambda _: own)
    refuse_if_live(rundir)
    assert not holder(rundir).is_foreign


@pytest.mark.parametrize(
    ("value", "hidden"),
    [("none", False), ("accounts,jobs,usage", True), ("accounts,usage", False), ("", False)],
)
def test_what_a_site_hides(value: str, hidden: bool) -> None:
    assert hidden is are_hidden(f"PluginDir = /x\nPrivateData             = {value}\nProlog = y\n")
