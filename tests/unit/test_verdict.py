"""How a link ended, where its program left no outcome: what was seen outranks an exit code of 0."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpc_ckpt.chain.backend import Cause
from hpc_ckpt.chain.evidence import Finding
from hpc_ckpt.chain.verdict import Logs, judge
from hpc_ckpt.rundir import MANIFEST_NAME, CheckpointKey, Result, RunDir


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


def test_the_log_alone_tells_of_a_failed_node(rundir: RunDir, tmp_path: Path) -> None:
    logs = Logs.of(rundir, 1, tmp_path / "batch.log")
    line = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-17T10:20:30 DUE TO "
    rundir.log_file(1).write_text(f"{line}NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***\n")
    assert Cause.NODE_FAILURE is judge(rundir, 1, 0, None, logs).cause
    assert rundir.done() is None


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
