"""What logs say of a link's end: slurmstepd's words, and memory that was not there."""

import time
from pathlib import Path

import pytest

from hpc_ckpt.chain import evidence
from hpc_ckpt.chain.backend import Cause

STEPD = "slurmstepd: error: *** JOB 12 ON c1 CANCELLED AT 2026-11-17T10:20:30{} ***"
MOMENT = time.mktime((2026, 11, 17, 10, 20, 30, 0, 0, -1))


@pytest.mark.parametrize(
    ("due", "cause"),
    [
        (" DUE TO TIME LIMIT", Cause.TIME_LIMIT),
        (" DUE TO PREEMPTION", Cause.PREEMPTED),
        (" DUE TO JOB REQUEUE", Cause.REQUEUED),
        (" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", Cause.NODE_FAILURE),
        ("", None),
    ],
)
def test_the_words_of_slurmstepd(due: str, cause: Cause | None) -> None:
    """Without a reason it may be a scancel or the start of a grace: that says nothing."""
    (finding,) = evidence.in_log(f"hello\n{STEPD.format(due)}\n", MOMENT - 5)
    assert cause == finding.cause
    assert "CANCELLED AT" in finding.said


def test_words_about_an_earlier_run_are_not_heard() -> None:
    """A requeued job goes on in the same log."""
    assert [] == evidence.in_log(STEPD.format(" DUE TO PREEMPTION"), MOMENT + 5)


@pytest.mark.parametrize(("steps", "heard"), [(True, [Cause.TIME_LIMIT]), (False, [])])
def test_a_step_is_spoken_of_as_a_job(steps: bool, heard: list[Cause]) -> None:
    """It may be one that the program started: who asks knows whether that counts."""
    line = "srun: error: *** STEP 12.0 ON c1 CANCELLED AT 2026-11-17T10:20:30 DUE TO TIME LIMIT ***"
    assert heard == [f.cause for f in evidence.in_log(line, 0, steps=steps)]


def test_a_job_is_always_spoken_of() -> None:
    line = STEPD.format(" DUE TO TIME LIMIT")
    assert [Cause.TIME_LIMIT] == [f.cause for f in evidence.in_log(line, 0, steps=False)]


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "MemoryError",
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate; MemoryError",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks "
        "have been OOM Killed.",
        "bash: fork: Cannot allocate memory",
        "slurmstepd: error: StepId=812.0 exceeded memory limit (2097152 > 1048576), being killed",
        "slurmstepd: error: Job 812 exceeded memory limit (2097152 > 1048576), being killed",
        "slurmstepd: error: Exceeded job memory limit at some point.",
        "slurmstepd-n1: error: Exceeded step memory limit at some point.",
        "Error: cannot allocate vector of size 7.5 Gb",
        "Error: cannot allocate vector of length 4000000000",
        "forrtl: severe (41): insufficient virtual memory",
    ],
)
def test_memory_that_was_not_there(line: str) -> None:
    found = evidence.out_of_memory(f"step 1\n{line}\n")
    assert found is not None and found.cause is Cause.OUT_OF_MEMORY


@pytest.mark.parametrize(
    "line",
    [
        "room for rooms",
        "bloom_killed",
        "ValueError: bad memory",
        "warning: cache exceeded memory limit (8 > 4), dropping entries",
        "Exceeded job memory limit at some point in the simulated cluster",
        "note: cannot allocate vector of names, using the default",
        "insufficient virtual memory is reported by model B",
    ],
)
def test_ordinary_words_are_no_memory_failure(line: str) -> None:
    assert evidence.out_of_memory(line) is None


STEPS = "".join(f"step {number}: loss 0.5\n" for number in range(60))
CAUGHT = "step 10: CUDA out of memory, batch halved to 16, going on\n"
TRACEBACK = "Traceback (most recent call last):\n" + 30 * '  File "a.py", line 3, in f\n'


@pytest.mark.parametrize(
    ("text", "short"),
    [
        (CAUGHT + STEPS + TRACEBACK + "FileNotFoundError: 'x'\n", False),
        (TRACEBACK + CAUGHT + STEPS, False),
        (CAUGHT + STEPS[:500], True),
        (STEPS + TRACEBACK + CAUGHT + 3 * (TRACEBACK + "RuntimeError: a rank is gone\n"), True),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\n" + STEPS, True),
        ("Out of memory: Killed process 4242 (python)\n" + STEPS, True),
    ],
    ids=["caught", "caught, with its traceback", "at the end", "in one rank", "stepd", "kernel"],
)
def test_an_error_that_was_caught_long_before_the_end_is_not_why(text: str, short: bool) -> None:
    """A program asks for less, and goes on; nobody goes on whom the kernel has killed."""
    assert short is (evidence.out_of_memory(text) is not None)


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("CANCELLED by 1000", Cause.CANCELLED),
        ("NODE_FAIL", Cause.NODE_FAILURE),
        ("OUT_OF_MEMORY", Cause.OUT_OF_MEMORY),
        ("CANCELLED+", Cause.CANCELLED),
        ("COMPLETED", None),
        ("", None),
    ],
)
def test_states(state: str, cause: Cause | None) -> None:
    assert cause == evidence.of_state(state)


def test_the_tail_of_a_log_is_bounded_and_begins_where_asked(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"old\n" + b"x" * evidence.TAIL_BYTES + b"\nlast \xff\x1b[31m\n\n")
    text = evidence.tail(log)
    assert evidence.TAIL_BYTES >= len(text)
    assert ["last \ufffd[31m"] == evidence.last_lines(text, 1)
    assert "" == evidence.tail(log, 10**9)
    assert "" == evidence.tail(tmp_path / "none")
