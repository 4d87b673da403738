"""How a link ended, where its program left no outcome: what was seen outranks an exit code of 0."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from hpc_ckpt.chain.allocation import SlurmBackend
from hpc_ckpt.chain.backend import Cause
from hpc_ckpt.chain.evidence import Finding
from hpc_ckpt.chain.verdict import Logs, Verdict, explain, judge
from hpc_ckpt.events import Event, EventLog
from hpc_ckpt.rundir import (
    MANIFEST_NAME,
    CheckpointKey,
    Done,
    Outcome,
    Result,
    RunDir,
    write_outcome,
)


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    return rundir


def commit(rundir: RunDir, generation: int, step: int) -> None:
    """As a Checkpointer does: the checkpoint, and the event of it."""
    place = rundir.checkpoints / CheckpointKey(generation, step).directory_name
    place.mkdir()
    (place / MANIFEST_NAME).touch()
    rundir.events_file(generation, "n1").write_text(json.dumps({"event": "save.committed"}))


@pytest.mark.parametrize(
    "cause",
    [Cause.NODE_FAILURE, Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.REQUEUED, Cause.CANCELLED],
)
def test_a_command_that_slurm_ended_is_not_complete(rundir: RunDir, cause: Cause) -> None:
    """srun returned 0 after its node was set down."""
    verdict = judge(rundir, 1, 0, Finding(cause, "scontrol: …"))
    assert (Result.FAILED, cause) == (verdict.result, verdict.cause)
    assert f"returned 0, but it was ended: {cause.value}" in verdict.reason
    assert rundir.done() is None


@pytest.mark.parametrize(
    "cause",
    [Cause.NODE_FAILURE, Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.REQUEUED, Cause.CANCELLED],
)
def test_nor_is_one_behind_a_steward_that_has_only_its_exit_code(
    rundir: RunDir, cause: Cause
) -> None:
    told = Outcome(Result.COMPLETE, 1, None, "exit code 0", by_code=True)
    write_outcome(rundir.outcome_file(1), told)
    verdict = judge(rundir, 1, 0, Finding(cause, "scontrol: …"))
    assert (Result.FAILED, cause) == (verdict.result, verdict.cause)
    assert rundir.done() is None
    assert Result.COMPLETE is judge(rundir, 1, 0, None).result
    assert rundir.done() is not None


def test_what_a_checkpointer_says_of_the_work_counts_whatever_slurm_did(rundir: RunDir) -> None:
    write_outcome(rundir.outcome_file(1), Outcome(Result.COMPLETE, 1, None, "complete"))
    rundir.write_done(Done(1, None))
    verdict = judge(rundir, 1, 0, Finding(Cause.PREEMPTED, "scontrol: …"))
    assert Result.COMPLETE is verdict.result


def test_the_log_alone_tells_of_a_failed_node(rundir: RunDir, tmp_path: Path) -> None:
    logs = Logs.of(rundir, 1, tmp_path / "batch.log")
    line = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-17T10:20:30 DUE TO "
    logs.batch.write_text(f"{line}NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***\n")
    assert Cause.NODE_FAILURE is judge(rundir, 1, 0, None, logs).cause
    assert rundir.done() is None


STEP_OVER = "*** STEP 7.3 ON n1 CANCELLED AT 2026-11-17T10:20:30 DUE TO TIME LIMIT ***"


def test_a_step_inside_the_command_may_end_without_it(rundir: RunDir, tmp_path: Path) -> None:
    """Its `srun -t 5` of a helper: the command went on, and says itself that it is complete."""
    logs = Logs.of(rundir, 1, tmp_path / "batch.log")
    rundir.log_file(1).write_text(f"slurmstepd: error: {STEP_OVER}\nall work done\n")
    verdict = judge(rundir, 1, 0, None, logs)
    assert (Result.COMPLETE, ("exit code 0",)) == (verdict.result, verdict.evidence)
    assert rundir.done() is not None


def test_of_a_command_that_failed_a_step_may_tell_why(rundir: RunDir, tmp_path: Path) -> None:
    """It may be the link's own."""
    logs = Logs.of(rundir, 1, tmp_path / "batch.log")
    rundir.log_file(1).write_text(f"slurmstepd: error: {STEP_OVER}\n")
    assert Cause.TIME_LIMIT is judge(rundir, 1, 143, None, logs).cause


@pytest.mark.parametrize(("said_by", "failed"), [("batch.log", True), ("program", False)])
def test_the_links_own_srun_tells_of_it_too(
    rundir: RunDir, tmp_path: Path, said_by: str, failed: bool
) -> None:
    """An srun inside the program may go on without a node, and finish the work."""
    batch = tmp_path / "batch.log"
    batch.write_text("srun: error: Node failure on n7\n")  # of an earlier run of the job
    logs = Logs.of(rundir, 1, batch)
    with (batch if said_by == "batch.log" else rundir.log_file(1)).open("a") as stream:
        stream.write("srun: error: Node failure on n1\nsrun: Job step aborted\n")
    verdict = judge(rundir, 1, 0, None, logs)
    assert failed is (verdict.cause is Cause.NODE_FAILURE)
    assert failed is (rundir.done() is None)
    assert failed is ("srun: error: Node failure on n1" in verdict.evidence)


def test_nothing_seen_and_exit_code_0_is_complete(rundir: RunDir) -> None:
    assert Result.COMPLETE is judge(rundir, 1, 0, None).result
    assert rundir.done() is not None


def test_a_last_word_does_not_hide_that_the_program_did_not_go_on(rundir: RunDir) -> None:
    """`python train.py; echo finished`, and Python fails before there is a Checkpointer."""
    commit(rundir, 1, 10)
    verdict = judge(rundir, 2, 0, None)
    assert (Result.FAILED, Cause.CRASHED) == (verdict.result, verdict.cause)
    assert "did not go on from its checkpoints" in verdict.reason
    assert rundir.done() is None
    assert verdict.progress(10, 10) is False


def test_checkpoints_of_an_earlier_command_say_nothing_of_the_next(rundir: RunDir) -> None:
    commit(rundir, 1, 10)
    rundir.write_phase(1, entering=False)
    os.utime(rundir.events_file(1, "n1"), (1000.0, 1000.0))
    assert Result.COMPLETE is judge(rundir, 2, 0, None).result


# ── a link that could not say it itself ───────────────────────────────────────────────────
PUT_BACK = "JobId=10 JobName=x UserId=u(1) JobState=RUNNING Restarts=1 PreemptTime=None\n"


def explained(rundir: RunDir, batch_log: str) -> Verdict:
    """Of link 1, whose job is in the queue again and which noticed nothing."""
    (rundir.lease / "00000001").write_text(json.dumps({"job": "10", "restarts": 0, "host": "n1"}))
    EventLog(rundir.ledger_file(1)).emit(Event.LINK_STARTED, generation=1, step=0)
    batch = rundir.logs / "slurm-10.log"
    batch.write_text(batch_log)
    scheduler = SlurmBackend({}, run=lambda argv: PUT_BACK if argv[0] == "scontrol" else "")
    verdict = explain(rundir, 1, lambda holder, _: scheduler.explain(holder), batch)
    if verdict is None:
        pytest.fail("link 1 has left no record of its end")
    return verdict


@pytest.mark.parametrize(
    ("who", "due"),
    [("JOB 10", " DUE TO JOB REQUEUE"), ("STEP 10.0", " DUE TO JOB REQUEUE"), ("JOB 10", "")],
)
def test_a_requeue_that_slurmstepd_tells_of_is_no_failure_of_the_node(
    rundir: RunDir, who: str, due: str
) -> None:
    """The runner was killed before it could write down that it was told: no host is blamed."""
    now = time.strftime("%Y-%m-%dT%H:%M:%S")
    line = f"slurmstepd: error: *** {who} ON n1 CANCELLED AT {now}{due} ***"
    verdict = explained(rundir, f"{line}\n")
    assert Cause.REQUEUED is verdict.cause
    assert line in verdict.evidence
    assert not any("node failed" in said for said in verdict.evidence)


def test_a_job_put_back_without_a_word_had_a_node_that_failed(rundir: RunDir) -> None:
    verdict = explained(rundir, "")
    assert Cause.NODE_FAILURE is verdict.cause
    assert any("its node failed" in said for said in verdict.evidence)
