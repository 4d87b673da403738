"""Slurm's answers, pasted from a real 22.05, turned into facts; and what is asked of it."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_ckpt.chain import site, slurm, survey
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
    "text",
    [
        RUNNING.rstrip()
        + " Comment=my run JobState=CANCELLED by me AdminComment=moved EndTime=5\n",
        re.sub("JobName=\\S+", "JobName=my JobState=CANCELLED EndTime=5", RUNNING),
    ],
)
def test_what_people_write_into_a_record_is_no_field_of_it(text: str) -> None:
    """A comment, or a name, that says how a job stands."""
    record = slurm.parse_record(text)
    assert ("RUNNING", "1794804311") == (record["JobState"], record["EndTime"])


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
        ({"JobState": "NODE_FAIL", "Reason": "NodeDown"}, Cause.NODE_FAILURE),
        ({"JobState": "BOOT_FAIL"}, Cause.NODE_FAILURE),
    ],
)
def test_the_cause_is_read_from_the_record(changes: dict[str, str], cause: Cause | None) -> None:
    """As seen on a real cluster at the moment TERM arrives."""
    found = slurm.job_record(edited(**changes), 0)
    assert (1794804311.0, cause) == (found.end, found.cause)
    assert ("COMPLETING" in changes.get("JobState", "")) == found.ending
    assert found.said.startswith("scontrol: JobState=")


SUSPENDED_ONCE = {"PreemptTime": "1794804200", "SuspendTime": "1794804260"}


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, None),
        ({"SuspendTime": "1794804200"}, None),
        ({"JobState": "COMPLETING"}, Cause.CANCELLED),
        ({"JobState": "COMPLETING", "Reason": "TimeLimit"}, Cause.TIME_LIMIT),
        ({"JobState": "COMPLETING", "Restarts": "1"}, Cause.PREEMPTED),
        ({"SuspendTime": "1794804199"}, Cause.PREEMPTED),
    ],
)
def test_a_job_that_was_suspended_and_resumed_is_not_preempted_ever_after(
    changes: dict[str, str], cause: Cause | None
) -> None:
    """Slurm takes the PreemptTime away when it requeues, not when it resumes. One that an operator
    had suspended before is preempted as any."""
    assert cause is slurm.job_record(edited(**{**SUSPENDED_ONCE, **changes}), 0).cause


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


def test_nodes_of_a_hidden_partition_are_seen() -> None:
    """sinfo shows one that is named, and refuses --all then; else it shows hidden ones by --all."""
    ask = Asked("n1|idle|(null)|x\nn2|idle|(null)|x\n")
    backend = SlurmBackend({"SLURM_JOB_PARTITION": "gpu", "SLURMD_NODENAME": "n1"}, run=ask)
    assert ["n2"] == backend.like("n1")
    backend.ended_whole(0)
    assert [False, True] == ["--all" in command for command in ask.commands]


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
    unanswered = JobRecord(unanswered=True)
    assert unanswered == member(Asked(MUTE)).explain(Holder(job="10_3"))


def test_a_job_that_slurm_has_forgotten_is_an_answer() -> None:
    """Nobody needs to ask again."""
    forgotten = SchedulerError(["scontrol"], 1, "Invalid job id specified")
    assert JobRecord() == member(Asked(forgotten)).explain(Holder(job="10_3"))


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
    reasons = {
        "10_5": "JobArrayTaskLimit", "10_6": "JobHeldUser", "10_7": "JobHeldAdmin",
        "10_8": "launch failed requeued held", "11": "DependencyNeverSatisfied",
        "12": "Dependency", "13": "", "14": "JobHoldMaxRequeue", "15": "None",
    }  # fmt: skip
    ask = Asked("".join(f"{job}|PENDING|{why}|/r/chain.sbatch\n" for job, why in reasons.items()))
    found = slurm.in_queue(ask)
    assert ["10_5", "10_6", "12", "13", "15"] == [one.id for one in found if one.will_begin]
    assert [
        ["squeue", "--me", "--all", "--array", "--noheader", "--format=%i|%T|%r|%o"]
    ] == ask.commands


@pytest.mark.parametrize(
    ("reason", "begins"),
    [("BadConstraints", False), ("PartitionTimeLimit", False), ("InvalidAccount", False),
     ("InvalidQOS", False), ("AccountNotAllowed", False), ("QOSNotAllowed", False),
     ("ReservationDeleted", False), ("QOSMaxWallDurationPerJobLimit", False),
     ("AssocMaxWallDurationPerJobLimit", False), ("QOSMaxGRESPerJob", False),
     ("AssocMaxCpuPerNode", False), ("QOSMinGRES", False),
     ("Constraints", True), ("PartitionDown", True), ("PartitionNodeLimit", True),
     ("ReqNodeNotAvail, UnavailableNodes:n1", True), ("AssocGrpCPUMinutesLimit", True),
     ("AssocMaxJobsLimit", True), ("QOSMaxCpuPerUserLimit", True), ("MaxGRESPerAccount", True),
     ("QOSGrpWallLimit", True), ("Reservation", True)],
)  # fmt: skip
def test_what_the_site_does_not_give_is_no_successor(reason: str, begins: bool) -> None:
    """An account or a limit that changed stays changed; other jobs end, and nodes come back."""
    assert begins == slurm.InQueue("10_5", "PENDING", reason).will_begin


def test_the_queue_of_a_user() -> None:
    """Members belong to their array; a script may have any character in its name."""
    text = "812_3|RUNNING|None|/a b|c/chain.sbatch\n815|PENDING|Priority|(null)\n"
    member, job = slurm.parse_queue(text)
    assert ("812", "/a b|c/chain.sbatch") == (member.array, member.script)
    assert not member.will_begin and job.will_begin
    assert member.is_of({"812"}) and member.is_of({"812_3"}) and not member.is_of({"812_4", "3"})
    assert job.is_of(["815"])


def test_what_a_site_hides_is_seen_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hidden partition can be submitted to, and jobs in it count."""
    asked: list[list[str]] = []

    def run(argv: Sequence[str]) -> str:
        asked.append(list(argv))
        return "ClusterName = x\n" if "config" in argv else ""

    monkeypatch.setattr(slurm, "run_command", run)
    slurm.live_partitions(run)
    site.queue()
    survey.take_survey(run)
    of_queue = [argv for argv in asked if argv[0] == "squeue"]
    assert 2 == len(of_queue)
    assert all("--all" in argv for argv in [asked[0], *of_queue])


def test_a_users_own_view_of_the_queue_is_not_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SQUEUE_STATES=R would hide what is pending, SINFO_PARTITION the nodes of other partitions."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for command, variable in (("squeue", "SQUEUE_STATES"), ("sinfo", "SINFO_PARTITION")):
        (tmp_path / command).write_text(f'#!/bin/bash\necho "${{{variable}-all}}"\n')
        (tmp_path / command).chmod(0o755)
        monkeypatch.setenv(variable, "R")
        assert "all\n" == slurm.run_command([command])
