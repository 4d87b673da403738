"""Slurm's answers, pasted from a real 22.05, turned into facts; and what is asked of it."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_ckpt.chain import slurm
from hpc_ckpt.chain.allocation import SlurmBackend
from hpc_ckpt.chain.backend import Cause, JobRecord
from hpc_ckpt.errors import SchedulerError
from hpc_ckpt.lease import Holder

RUNNING = (
    "JobId=11 ArrayJobId=10 ArrayTaskId=1 ArrayTaskThrottle=1 JobName=wrap UserId=root(0) "
    "JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 "
    "RunTime=00:00:02 TimeLimit=00:03:00 SubmitTime=1794804131 StartTime=1794804131 "
    "EndTime=1794804311 Deadline=N/A PreemptEligibleTime=1794804131 PreemptTime=None "
    "SuspendTime=None Partition=lowpriority AllocNode:Sid=localhost:1148 NodeList=c1 CPUs/Task=1 "
    "TRES=cpu=1,mem=100M,node=1,billing=1 Command=/a path/with Words=in it WorkDir=/tmp Power= \n"
)
PARTITIONS = (
    "PartitionName=gpu AllowGroups=ALL Default=YES QoS=N/A MaxTime=08:00:00 Nodes=c[1-4]\n"
    "PartitionName=lowpriority Default=NO GraceTime=10 MaxTime=1-00:00:00 PreemptMode=REQUEUE\n"
    "PartitionName=long Default=NO MaxTime=UNLIMITED State=UP\n"
)


def edited(**changes: str) -> dict[str, str]:
    return {**slurm.parse_record(RUNNING), **changes}


def test_a_record_is_read_field_by_field() -> None:
    """Values may hold spaces, equals signs and nothing at all."""
    record = slurm.parse_record(RUNNING)
    assert ("11", "RUNNING", "1794804311") == (
        record["JobId"], record["JobState"], record["EndTime"],
    )  # fmt: skip
    assert ("cpu=1,mem=100M,node=1,billing=1", "") == (record["TRES"], record["Power"])


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, None),
        ({"JobState": "COMPLETING", "Reason": "TimeLimit"}, Cause.TIME_LIMIT),
        ({"PreemptTime": "1794804200"}, Cause.PREEMPTED),
        ({"JobState": "COMPLETING", "PreemptTime": "1794804200", "Restarts": "1"}, Cause.PREEMPTED),
        ({"JobState": "COMPLETING", "Restarts": "1"}, Cause.REQUEUED),
        ({"JobState": "COMPLETING"}, Cause.CANCELLED),
        ({"JobState": "CANCELLED"}, Cause.CANCELLED),
    ],
)
def test_the_cause_is_read_from_the_record(changes: dict[str, str], cause: Cause | None) -> None:
    """As seen on a real cluster at the moment TERM arrives."""
    found = slurm.job_record(edited(**changes), 0)
    assert (1794804311.0, cause) == (found.end, found.cause)
    assert ("COMPLETING" in changes.get("JobState", "")) == found.ending
    assert found.said.startswith("scontrol: JobState=")


def test_when_a_job_was_in_the_queue() -> None:
    """What is not known is left out."""
    times = {"SubmitTime": "100", "EligibleTime": "Unknown", "StartTime": "130"}
    found = slurm.job_record(edited(**times), 0).queued
    assert {"submitted": 100.0, "allocated": 130.0} == found.known()


@pytest.mark.parametrize("text", ["Unknown", "N/A", "None", "2026-11-16T04:00:00", None])
def test_a_time_that_is_none_is_unknown(text: str | None) -> None:
    """No end is better than a wrong one."""
    assert slurm.parse_time(text) is None


def test_partitions_with_their_limits() -> None:
    """UNLIMITED is no limit."""
    found = slurm.parse_partitions(PARTITIONS)
    assert [("gpu", True, 28800.0), ("lowpriority", False, 86400.0), ("long", False, None)] == [
        (p.name, p.default, p.max_time_s) for p in found
    ]


@pytest.mark.parametrize(
    ("text", "job"), [("812\n", "812"), ("812;cluster\n", "812"), ("sbatch: note\n9\n", "9")]
)
def test_the_id_of_a_submitted_job(text: str, job: str) -> None:
    """With --parsable, whatever a site's plugin prints before it."""
    assert job == slurm.parse_submitted(text)


def test_an_answer_that_makes_no_sense_is_an_error() -> None:
    """It is shown as it came."""
    with pytest.raises(SchedulerError, match="what now"):
        slurm.parse_submitted("what now")


class Asked:
    """Records what is asked; answers from a table, or fails."""

    def __init__(self, answer: str | SchedulerError = "") -> None:
        self.answer = answer
        self.commands: list[list[str]] = []

    def __call__(self, argv: Sequence[str]) -> str:
        self.commands.append(list(argv))
        if isinstance(self.answer, SchedulerError):
            raise self.answer
        return self.answer


GONE = SchedulerError(["squeue"], 1, "slurm_load_jobs error: Invalid job id specified")
MUTE = SchedulerError(["squeue"], None, "")


def member(ask: Asked, **environ: str) -> SlurmBackend:
    given = {"SLURM_JOB_ID": "10", "SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "4"}
    return SlurmBackend({**given, **environ}, run=ask)


def test_ids_are_array_qualified_everywhere() -> None:
    """The last member's bare id is the id of the whole array."""
    ask = Asked(RUNNING)
    backend = member(ask, SLURM_RESTART_COUNT="2")
    backend.look()
    assert [["scontrol", "-o", "show", "job", "10_4"]] == ask.commands
    holder = backend.holder()
    assert ("10_4", "10", 2) == (holder.job, holder.array, holder.restarts)


@pytest.mark.parametrize(
    ("answer", "alive"),
    [("RUNNING\n", True), ("COMPLETING\n", True), ("PENDING\n", False), ("", False), (GONE, False),
     (MUTE, None)],
)  # fmt: skip
def test_a_holder_is_looked_up_once(answer: str | SchedulerError, alive: bool | None) -> None:
    """Running or completing: it may still write. No answer: nobody can tell."""
    ask = Asked(answer)
    assert alive == member(ask).probe(Holder(job="10_3"))
    assert 1 == len(ask.commands)


def test_ourselves_before_a_requeue_are_gone() -> None:
    """Slurm ends the old run before it begins the new one; nobody is asked."""
    ask = Asked("RUNNING")
    assert member(ask, SLURM_RESTART_COUNT="1").probe(Holder(job="10_4", restarts=0)) is False
    assert [] == ask.commands


def test_no_answer_is_no_fact() -> None:
    """A scheduler that does not answer must not end a link."""
    assert JobRecord() == member(Asked(MUTE)).look()
    assert JobRecord() == member(Asked(MUTE)).explain(Holder(job="10_3"))


@pytest.mark.parametrize(
    ("record", "cause"),
    [
        ("JobId=10 JobState=TIMEOUT Reason=TimeLimit Restarts=0", Cause.TIME_LIMIT),
        ("JobId=10 JobState=CANCELLED Reason=None Restarts=0", Cause.CANCELLED),
        ("JobId=10 JobState=NODE_FAIL Reason=None Restarts=0", Cause.NODE_FAILURE),
        ("JobId=10 JobState=OUT_OF_MEMORY Reason=OutOfMemory Restarts=0", Cause.OUT_OF_MEMORY),
        ("JobId=10 JobState=PENDING Reason=BeginTime Restarts=1", Cause.REQUEUED),
        ("JobId=10 JobState=COMPLETED Reason=None Restarts=0", None),
    ],
)
def test_how_an_earlier_job_ended_is_asked_of_slurm(record: str, cause: Cause | None) -> None:
    """A run that was followed by another one of the same job was put back into the queue."""
    told = member(Asked(record)).explain(Holder(job="10_3", restarts=0))
    assert cause == told.cause
    assert "JobState=" in told.said


def test_requeue_tolerates_a_job_that_slurm_has_requeued_itself() -> None:
    pending = SchedulerError(["scontrol"], 1, "Job is pending execution for job 10_4")
    slurm.requeue("10_4", Asked(pending))
    with pytest.raises(SchedulerError):
        slurm.requeue(
            "10_4",
            Asked(SchedulerError(["scontrol"], 1, "Requested operation is presently disabled")),
        )


def test_nothing_of_an_allocation_is_inherited_by_a_nested_submission() -> None:
    inside = {"SLURM_JOB_ID": "1", "SBATCH_PARTITION": "gpu", "PMI_RANK": "0", "PMIX_X": "1",
              "SLURM_CONF": "/etc/slurm.conf", "HOME": "/home/me", "SRUN_DEBUG": "3"}  # fmt: skip
    assert {"SLURM_CONF", "HOME"} == set(slurm.clean_environment(inside))


def test_the_step_is_one_srun_with_the_shim(tmp_path: Path) -> None:
    """Explicitly without kill-on-bad-exit; percent signs in the log's path are no patterns."""
    argv = member(Asked()).step(["python", "x y.py"], tmp_path / "50%A.log")
    assert "srun" == argv[0]
    assert "--kill-on-bad-exit=0" in argv
    assert f"--output={tmp_path}/50%%A.log" in argv
    assert ["bash", "python", "x y.py"] == [argv[-4], *argv[-2:]]
    assert argv[-3].endswith("templates/shim.sh")


def test_one_forgotten_job_does_not_hide_the_others() -> None:
    """squeue refuses a list with an id it has forgotten; then each is asked by itself."""

    class Forgetful(Asked):
        def __call__(self, argv: Sequence[str]) -> str:
            super().__call__(argv)
            if "5" in argv[-1].partition("=")[2].split(","):
                raise GONE
            return "8\n8\n"

    assert ["8"] == slurm.live_jobs(["5", "8"], Forgetful())


def test_what_waits_for_ever_is_no_successor() -> None:
    """Held, but not by its user, or behind something that will never be: a chain that counts on it
    ends silently."""
    ask = Asked(
        "10_5 JobArrayTaskLimit\n10_6 JobHeldUser\n10_7 JobHeldAdmin\n"
        "10_8 launch failed requeued held\n11 DependencyNeverSatisfied\n12 Dependency\n13\n"
        "14 JobHoldMaxRequeue\n15 None\n"
    )
    assert ["10_5", "10_6", "12", "13", "15"] == slurm.pending(["10", "11"], ask)
    assert "--format=%i %r" in ask.commands[0]
