"""A link that goes back into the queue, where Slurm says that it is there already."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from links import chain_record

from hpc_ckpt.chain.allocation import UNKNOWN_RUN_S, SlurmBackend
from hpc_ckpt.chain.orders import Orders
from hpc_ckpt.chain.succession import Requeue
from hpc_ckpt.errors import SchedulerError
from hpc_ckpt.events import EventLog
from hpc_ckpt.rundir import RunDir

PENDING = SchedulerError(["scontrol"], 1, "Job is pending execution for job 84")


class Controller:
    """It takes job 84 for pending, and refuses what it is told to."""

    def __init__(self, record: str, *, refuses: str = "") -> None:
        self.record = record
        self.refuses = refuses
        self.told: list[list[str]] = []

    def __call__(self, argv: Sequence[str]) -> str:
        if argv[1] == "requeue":
            raise PENDING
        if "show" in argv:
            return self.record
        self.told.append(list(argv[1:]))
        if argv[1] == self.refuses:
            raise SchedulerError(argv, 1, "Access/permission denied")
        return ""


def go_on(
    rundir: RunDir, controller: Controller, restarts: str = "0", *, unexplained: bool = False
) -> None:
    record = chain_record(spec={"mail": "me@example.org"})
    rundir.chain_file.write_text(json.dumps(record))
    environ = {"SLURM_JOB_ID": "84", "SLURM_RESTART_COUNT": restarts}
    backend = SlurmBackend(environ, run=controller)
    ledger = EventLog(rundir.ledger_file(1))
    orders = Orders.read(rundir)
    Requeue(backend, rundir, orders, ledger, lambda: 5, lambda: unexplained).go_on()


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ("JobId=84 JobState=PENDING Reason=BeginTime Restarts=3", []),
        ("JobId=84 JobState=COMPLETING Reason=None Restarts=3", []),
        ("", []),
        ("JobId=84 JobState=PENDING Reason=None Restarts=2",
         [["update", "jobid=84", f"StartTime=now+{UNKNOWN_RUN_S}"]]),
        ("JobId=84 JobState=PENDING Reason=launch_failed_requeued_held Restarts=3",
         [["release", "84"]]),
    ],
    ids=["requeued", "being requeued", "no answer", "start lost", "held"],
)  # fmt: skip
def test_a_job_that_is_pending_already_is_seen_to_begin(
    rundir: RunDir, record: str, told: list[list[str]]
) -> None:
    """One that Slurm has requeued does so by itself. One whose start the controller has lost waits
    until its node has nothing of it, and one that a node has refused is let go."""
    controller = Controller(record)
    go_on(rundir, controller, restarts="2")
    assert told == controller.told


@pytest.mark.parametrize("refuses", ["update", "release"])
def test_what_slurm_refuses_there_is_said_and_no_end_of_the_chain(
    rundir: RunDir, caplog: pytest.LogCaptureFixture, refuses: str
) -> None:
    """It is in the queue, after all."""
    reason = "None" if refuses == "update" else "JobHeldAdmin"
    controller = Controller(f"JobId=84 JobState=PENDING Reason={reason}", refuses=refuses)
    go_on(rundir, controller)
    assert [refuses] == [words[0] for words in controller.told]
    assert "Access/permission denied" in caplog.text
    assert not rundir.ledger_file(1).exists()


@pytest.mark.parametrize("halted", [None, "enough of it"])
def test_a_chain_that_ends_instead_says_so_by_mail(rundir: RunDir, halted: str | None) -> None:
    """Slurm says only then that its user has cancelled it. What stopped it before stands."""
    if halted is not None:
        rundir.write_halt(halted)
    controller = Controller("JobId=84 JobState=COMPLETING Reason=None Restarts=0")
    go_on(rundir, controller, unexplained=True)
    mail = ["update", "jobid=84", "MailUser=me@example.org", "MailType=END,FAIL"]
    assert [mail] == controller.told
    assert (halted or "cancelled by the user, as Slurm said once it answered") == rundir.halted()
