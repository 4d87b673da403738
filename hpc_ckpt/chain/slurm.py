"""Slurm: the only room that runs its commands. Parsers are pure and take pasted output.

Standard library only: the link runner imports it on the compute node.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import SchedulerError
from ..units import parse_duration
from .backend import Cause, JobRecord, Queued
from .evidence import of_state
from .reasons import never_begins

COMMAND_TIMEOUT_S = 30.0
IS_IT_THERE_TIMEOUT_S = 5.0
"""For the question whether there is a Slurm at all: without one its commands may just hang."""
LIVE_STATES = frozenset(
    {"RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING", "STOPPED", "SIGNALING", "STAGE_OUT"}
)
"""States in which a job's processes may still write."""

_AWAY = (
    "unable to contact", "connection refused", "timed out", "unexpected message", "communication",
    "zero bytes", "no answer", "connect failure", "slurmctld is not",
)  # fmt: skip

_IS_UP = re.compile(
    r"(?:idle|mixed|allocated|completing|draining|drained|reserved|planned|maint)[$@^~#!%+-]?"
)

_JOB_NAME = re.compile(r"(?<=\sJobName=).*?(?=\sUserId=)")
_FIELD = re.compile(r"(?:^|\s)([A-Z][\w:/]*)=(.*?)(?=\s[A-Z][\w:/]*=|\s*$)")

Runner = Callable[[Sequence[str]], str]
CallFailed = subprocess.SubprocessError
"""How a Slurm command fails that another library has called."""


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Without what an allocation tells its own steps: a job submitted from inside one would
    otherwise inherit its partition, its size, its binding. Where Slurm is stays known."""
    inherited = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "PMI_", "PMI2_", "PMIX_")
    return {
        name: value
        for name, value in environ.items()
        if name == "SLURM_CONF" or not name.startswith(inherited)
    }


def sbatch_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables a site or a user has set for sbatch, and what they are about."""
    if "SLURM_JOB_ID" in environ:
        return {}  # inside a job they are that job's
    kept = ("account", "partition", "qos", "constraint", "reservation")
    named = {f"SBATCH_{key.upper()}": key for key in kept}
    return {name: key for name, key in named.items() if environ.get(name)}


def run_command(argv: Sequence[str], timeout_s: float | None = COMMAND_TIMEOUT_S) -> str:
    """Output of a Slurm command; SchedulerError if it fails, is missing or does not answer."""
    inside = "SLURM_JOB_ID" in os.environ
    environment = clean_environment(os.environ) if inside else dict(os.environ)
    if argv[0] == "sbatch":
        # They outrank the script's own lines, and would be gone when the chain extends itself.
        environment = {k: v for k, v in environment.items() if not k.startswith("SBATCH_")}
    # A user's own choice of states or partitions would hide jobs and nodes from us.
    own = ("SQUEUE_", "SINFO_")
    environment = {k: v for k, v in environment.items() if not k.startswith(own)}
    environment["SLURM_TIME_FORMAT"] = "%s"  # times as unix seconds
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",  # a path may hold any byte
            timeout=timeout_s,
            env=environment,
            check=False,
        )
    except FileNotFoundError:
        raise SchedulerError(argv, 127, f"no command {argv[0]!r} on this machine") from None
    except subprocess.TimeoutExpired:
        raise SchedulerError(argv, None, "no answer from the scheduler") from None
    if done.returncode != 0:
        raise SchedulerError(argv, done.returncode, done.stderr or done.stdout)
    return done.stdout


# ── parsing ───────────────────────────────────────────────────────────────────────────────
def parse_record(text: str) -> dict[str, str]:
    """`scontrol -o show …` as a mapping; values with spaces are cut at the next Key=.

    People may write Key=value into a comment or a name. The first of a key counts, for comments
    come late; the name of a job comes early, and ends where its user is told.
    """
    named = _JOB_NAME.search(text)
    fields = {} if named is None else {"JobName": named[0]}
    for match in _FIELD.finditer(_JOB_NAME.sub("", text, count=1)):
        fields.setdefault(match[1], match[2].strip())
    return fields


def parse_time(text: str | None) -> float | None:
    """Unix seconds from a time printed with SLURM_TIME_FORMAT=%s; None for Unknown and N/A."""
    if text is None or not re.fullmatch(r"\d+", text):
        return None
    return float(text)


def parse_submitted(text: str) -> str:
    """The job id from `sbatch --parsable` (id, or id;cluster)."""
    match = re.search(r"^(\d+)(?:;\S+)?\s*$", text, re.MULTILINE)
    if match is None:
        raise SchedulerError(["sbatch"], 0, f"could not make sense of its answer {text!r}")
    return match[1]


@dataclass(frozen=True)
class InQueue:
    """One job, or one member of an array, that this user has in the queue."""

    id: str
    """As 812_3 or 815."""
    state: str = ""
    reason: str = ""
    script: str = ""
    """The file that sbatch was given."""

    @property
    def array(self) -> str:
        """The id of all of it, as sbatch said it."""
        return self.id.partition("_")[0]

    @property
    def will_begin(self) -> bool:
        return self.state == "PENDING" and not never_begins(self.reason)

    @property
    def is_stuck(self) -> bool:
        """It waits, or will once it has left its node, for something that does not come."""
        return self.state in ("PENDING", "COMPLETING") and never_begins(self.reason)

    def is_of(self, jobs: Collection[str]) -> bool:
        """Whether it belongs to these, which are whole arrays or single members."""
        return self.id in jobs or self.array in jobs


def parse_queue(text: str) -> list[InQueue]:
    """From `squeue --format="%i|%T|%r|%o"`."""
    lines = (line.strip().split("|", 3) for line in text.splitlines() if line.strip())
    return [InQueue(*fields) for fields in lines]


def answer(states: str) -> bool:
    """From `sinfo --format=%T` of some nodes: all are up. A star says that one does not answer."""
    found = states.split()
    return bool(found) and all(_IS_UP.fullmatch(state) for state in found)


def are_ending(states: str) -> bool:
    """Whether a job is being ended on one of them now."""
    return any(state.startswith("completing") or state.endswith("+") for state in states.split())


def nodes_like(node: str, text: str) -> list[str]:
    """From `sinfo --Node --format=%N|%T|%G|%f`: other ones that take jobs, with the same GPUs and
    features."""
    rows = (line.strip().split("|", 3) for line in text.splitlines() if line.count("|") >= 3)
    every = {name: (state, rest) for name, state, *rest in rows}
    own = every.pop(node, ("", None))[1]
    takes_jobs = ("idle", "mixed", "allocated", "completing", "planned", "reserved")
    return [
        name
        for name, (state, rest) in every.items()
        if rest == own and state.startswith(takes_jobs) and not state.endswith("*")
    ]


def job_record(record: Mapping[str, str], restarts_before: int) -> JobRecord:
    """End and cause from one scontrol record of a job that is running or being ended."""
    state, cause = record.get("JobState", ""), _cause(record, restarts_before)
    return JobRecord(
        end=parse_time(record.get("EndTime")),
        cause=cause,
        said=_said(record),
        ending="COMPLETING" in state,
        certain=_is_cancelled(state),
        restarted=_restarts(record) > restarts_before,
        runs_on=state == "RUNNING" and cause is None,
        queued=Queued(
            submitted=parse_time(record.get("SubmitTime")),
            eligible=parse_time(record.get("EligibleTime")),
            allocated=parse_time(record.get("StartTime")),
        ),
    )


def _cause(record: Mapping[str, str], restarts_before: int) -> Cause | None:
    state = record.get("JobState", "")
    if _is_cancelled(state):
        return Cause.CANCELLED  # somebody did so in the grace of a preemption, too
    if of_state(state) is Cause.NODE_FAILURE:
        return Cause.NODE_FAILURE  # it is not put back: --no-requeue
    if _is_preempted(record, restarts_before):
        return Cause.PREEMPTED
    if record.get("Reason") == "TimeLimit" or state.startswith("TIMEOUT"):
        return Cause.TIME_LIMIT
    if _restarts(record) > restarts_before:
        return Cause.REQUEUED
    return Cause.CANCELLED if "COMPLETING" in state else None


def _is_preempted(record: Mapping[str, str], restarts_before: int) -> bool:
    """Ended by it, or in its grace. One that was suspended keeps its PreemptTime once it is
    resumed: that says nothing of its end."""
    preempted, moved = (parse_time(record.get(name)) for name in ("PreemptTime", "SuspendTime"))
    if preempted is None:
        return False
    suspended = moved is not None and moved >= preempted
    return not suspended or _restarts(record) > restarts_before


def _is_cancelled(state: str) -> bool:
    """In so many words; a preempted job's state is PREEMPTED in the end."""
    return state.startswith("CANCELLED")


def past_record(record: Mapping[str, str], restarts_then: int) -> JobRecord:
    """The same of a job whose run with that many restarts is over.

    Of one that was put back EndTime is a later run's, and SubmitTime the moment of the requeue.
    """
    runs_since = _restarts(record) - restarts_then
    put_back = runs_since > 0
    ended = {0: "EndTime", 1: "SubmitTime"}.get(max(0, runs_since))
    if put_back:
        preempted = parse_time(record.get("PreemptTime")) is not None
        cause: Cause | None = Cause.PREEMPTED if preempted else Cause.REQUEUED
    else:
        cause = of_state(record.get("JobState", ""))
    return JobRecord(
        end=parse_time(record.get(ended)) if ended else None,
        cause=cause,
        said=_said(record),
        ending="COMPLETING" in record.get("JobState", ""),
        certain=cause is Cause.CANCELLED,
        restarted=put_back,
    )


def is_unknown_run(record: Mapping[str, str], restarts: int) -> bool:
    """Whether Slurm takes the run with that many restarts, which is under way, for one to come:
    its controller has lost what it knew of the start."""
    return record.get("JobState") == "PENDING" and _restarts(record) == restarts


def cancelled_members(text: str) -> list[tuple[str, int]]:
    """Of `scontrol -o show job ARRAY`: those that had a node, as (812_3, restarts)."""
    records = map(parse_record, text.splitlines())
    return [
        (_qualified(record), _restarts(record))
        for record in records
        if _is_cancelled(record.get("JobState", ""))
        and record.get("NodeList", "(null)") not in ("", "(null)")
        and "JobId" in record
    ]


def _qualified(record: Mapping[str, str]) -> str:
    """The id of a member as 812_3, that of a job as it is."""
    if {"ArrayJobId", "ArrayTaskId"} <= record.keys():
        return f"{record['ArrayJobId']}_{record['ArrayTaskId']}"
    return record["JobId"]


def _restarts(record: Mapping[str, str]) -> int:
    text = record.get("Restarts") or ""
    return int(text) if text.isdecimal() else 0


def _said(record: Mapping[str, str]) -> str:
    """The fields that tell causes apart, in scontrol's own words."""
    names = ("JobState", "Reason", "Restarts", "PreemptTime", "SuspendTime", "ExitCode")
    told = (f"{name}={record[name]}" for name in names if record.get(name) not in (None, "None"))
    return "scontrol: " + " ".join(told)


# ── asking ────────────────────────────────────────────────────────────────────────────────
def submit_script(script: Path, *options: str) -> str:
    """The id of the job or array that `script` became; `options` outrank its directives.

    Without a limit of ours: sbatch has its own, and one that was cut off may have submitted.
    """
    named = os.path.realpath(script)  # the name that the queue has of it, see unanswered.py
    return parse_submitted(run_command(["sbatch", "--parsable", *options, named], None))


def live_jobs(job_ids: Sequence[str], run: Runner = run_command) -> list[str]:
    """Those of these jobs (arrays) that are pending or running; one squeue for all."""
    if not job_ids:
        return []
    try:
        text = run(["squeue", "--noheader", "--format=%F", f"--jobs={','.join(job_ids)}"])
    except SchedulerError as error:
        if is_forgotten(error):
            # One id that Slurm has forgotten makes squeue refuse them all.
            return [] if len(job_ids) == 1 else [j for i in job_ids for j in live_jobs([i], run)]
        raise
    return sorted(set(text.split()))


def in_queue(run: Runner = run_command) -> list[InQueue]:
    """All that this user has there, members of arrays one by one; one squeue. Also in partitions
    that a site hides: what is not seen would be taken for gone."""
    asked = ["squeue", "--me", "--all", "--array", "--noheader", "--format=%i|%T|%r|%o"]
    return parse_queue(run(asked))


def cancel(job_id: str, run: Runner = run_command) -> None:
    """Cancel all of it, also what runs: TERM, the kill wait, KILL."""
    run(["scancel", job_id])


def requeue(job_id: str, run: Runner = run_command) -> bool:
    """Back into the queue; False: it was there already."""
    try:
        run(["scontrol", "requeue", job_id])
    except SchedulerError as error:
        if "pending" not in error.stderr.lower():
            raise
        return False
    return True


def release(job_id: str, run: Runner = run_command) -> None:
    run(["scontrol", "release", job_id])


def update_job(job_id: str, run: Runner = run_command, **fields: str) -> None:
    run(["scontrol", "update", f"jobid={job_id}", *(f"{k}={v}" for k, v in fields.items())])


def accounted_state(job_id: str, run_number: int, run: Runner = run_command) -> str | None:
    """What sacct has of one run of a job, the first being 0; None without accounting."""
    try:
        text = run(["sacct", "-D", "-X", "-n", "-P", f"--jobs={job_id}", "--format=State"])
    except SchedulerError:
        return None
    states = [line.strip() for line in text.splitlines() if line.strip()]
    return states[run_number] if run_number < len(states) else None


def is_forgotten(error: SchedulerError) -> bool:
    """Whether Slurm knows nothing more of a job: it is over, and its record has gone."""
    return "Invalid job id" in error.stderr


def is_away(error: SchedulerError) -> bool:
    """Whether nobody answered, rather than refused."""
    said = error.stderr.lower()
    return error.returncode is None or any(word in said for word in _AWAY)


def may_have_submitted(error: SchedulerError) -> bool:
    """Whether an sbatch that failed may have done its work all the same: nobody answered, it was
    killed while it waited, or its answer made no sense."""
    return is_away(error) or error.returncode is None or error.returncode <= 0


def cluster_name(run: Runner | None = None) -> str | None:
    """The live cluster's name, or None where no Slurm answers."""
    try:
        asked = ["scontrol", "show", "config"]
        text = run(asked) if run else run_command(asked, IS_IT_THERE_TIMEOUT_S)
    except SchedulerError:
        return None
    match = re.search(r"^ClusterName\s*=\s*(\S+)", text, re.MULTILINE)
    return match[1] if match else None


@dataclass(frozen=True)
class LivePartition:
    """What the cluster itself says of a partition."""

    name: str
    default: bool
    max_time_s: float | None
    """None: no limit."""


def parse_partitions(text: str) -> list[LivePartition]:
    """From `scontrol -o show partition`."""
    records = [parse_record(line) for line in text.splitlines() if line.strip()]
    return [
        LivePartition(
            name=record["PartitionName"],
            default=record.get("Default") == "YES",
            max_time_s=_limit(record.get("MaxTime", "UNLIMITED")),
        )
        for record in records
        if "PartitionName" in record
    ]


def _limit(text: str) -> float | None:
    return None if text in ("UNLIMITED", "NONE", "INFINITE") else parse_duration(text)


def live_partitions(run: Runner = run_command) -> list[LivePartition]:
    """Also those that a site hides: jobs can be submitted to them."""
    return parse_partitions(run(["scontrol", "--all", "-o", "show", "partition"]))
