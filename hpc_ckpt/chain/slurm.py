"""Slurm: the only room that runs its commands. Parsers are pure and take pasted output.

Standard library only: the link runner imports it on the compute node.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import resources
from ..errors import SchedulerError
from ..lease import Holder
from ..units import parse_duration
from .backend import Cause, JobRecord

COMMAND_TIMEOUT_S = 30.0
IS_IT_THERE_TIMEOUT_S = 5.0
"""For the question whether there is a Slurm at all: without one its commands may just hang."""
LIVE_STATES = frozenset(
    {"RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING", "STOPPED", "SIGNALING", "STAGE_OUT"}
)
"""States in which a job's processes may still write."""

Runner = Callable[[Sequence[str]], str]


def run_command(argv: Sequence[str], timeout_s: float | None = COMMAND_TIMEOUT_S) -> str:
    """Output of a Slurm command; SchedulerError if it fails, is missing or does not answer."""
    environment = {**os.environ, "SLURM_TIME_FORMAT": "%s"}  # times as unix seconds
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
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
    """`scontrol -o show …` as a mapping; values with spaces are cut at the next Key=."""
    return {
        match[1]: match[2].strip()
        for match in re.finditer(r"(?:^|\s)([A-Z][\w:/]*)=(.*?)(?=\s[A-Z][\w:/]*=|\s*$)", text)
    }


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


def job_record(record: Mapping[str, str], restarts_before: int) -> JobRecord:
    """End and cause from one scontrol record of a job that is running or being ended."""
    return JobRecord(
        end=parse_time(record.get("EndTime")),
        cause=_cause(record, restarts_before),
    )


def _cause(record: Mapping[str, str], restarts_before: int) -> Cause | None:
    state = record.get("JobState", "")
    restarts = int(record.get("Restarts") or 0)
    if parse_time(record.get("PreemptTime")) is not None:
        return Cause.PREEMPTED
    if record.get("Reason") == "TimeLimit" or state.startswith("TIMEOUT"):
        return Cause.TIME_LIMIT
    if restarts > restarts_before:
        return Cause.REQUEUED
    if "COMPLETING" in state or state.startswith("CANCELLED"):
        return Cause.CANCELLED
    return None


# ── asking ────────────────────────────────────────────────────────────────────────────────
def submit_script(script: Path) -> str:
    """The id of the array that `script` became.

    Without a limit of ours: sbatch has its own, and one that was cut off may have submitted.
    """
    return parse_submitted(run_command(["sbatch", "--parsable", str(script)], None))


def live_jobs(job_ids: Sequence[str], run: Runner = run_command) -> list[str]:
    """Those of these jobs (arrays) that are pending or running; one squeue for all."""
    if not job_ids:
        return []
    try:
        text = run(["squeue", "--noheader", "--format=%F", f"--jobs={','.join(job_ids)}"])
    except SchedulerError as error:
        if "Invalid job id" in error.stderr:
            # One id that Slurm has forgotten makes squeue refuse them all.
            return [] if len(job_ids) == 1 else [j for i in job_ids for j in live_jobs([i], run)]
        raise
    return sorted(set(text.split()))


def cancel_pending(job_id: str, run: Runner = run_command) -> None:
    """Cancel what has not begun; what runs is asked to save through its notice."""
    run(["scancel", "--state=PENDING", job_id])


def cluster_name() -> str | None:
    """The live cluster's name, or None where no Slurm answers."""
    try:
        text = run_command(["scontrol", "show", "config"], IS_IT_THERE_TIMEOUT_S)
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
    return parse_partitions(run(["scontrol", "-o", "show", "partition"]))


@dataclass
class SlurmBackend:
    """Slurm, seen from inside one array member."""

    environ: Mapping[str, str]
    kill_wait_s: float = 30.0
    cpus: int | None = None
    run: Runner = run_command
    name: str = "slurm"
    enforces_end: bool = True

    @property
    def array(self) -> str | None:
        return self.environ.get("SLURM_ARRAY_JOB_ID")

    @property
    def job(self) -> str | None:
        """Array-qualified: the last member's bare id is the id of the whole array."""
        if self.array is None:
            return self.environ.get("SLURM_JOB_ID")
        return f"{self.array}_{self.environ.get('SLURM_ARRAY_TASK_ID', '0')}"

    @property
    def restarts(self) -> int:
        return int(self.environ.get("SLURM_RESTART_COUNT") or 0)

    def holder(self) -> Holder:
        return Holder.here(job=self.job, array=self.array, restarts=self.restarts)

    def probe(self, holder: Holder) -> bool | None:
        if holder.job is None:
            return None
        if holder.job == self.job and holder.restarts < self.restarts:
            return False  # ourselves before a requeue: Slurm ends that run before this begins
        try:
            text = self.run(["squeue", "--noheader", "--format=%T", f"--jobs={holder.job}"])
        except SchedulerError as error:
            return False if "Invalid job id" in error.stderr else None
        return any(state in LIVE_STATES for state in text.split())

    def look(self) -> JobRecord:
        if self.job is None:
            return JobRecord()
        try:
            text = self.run(["scontrol", "-o", "show", "job", self.job])
        except SchedulerError:
            return JobRecord()
        return job_record(parse_record(text), self.restarts)

    def step(self, argv: Sequence[str], log: Path) -> list[str]:
        """One srun step with the shim as its direct task.

        The shim, and nothing else, hears the scheduler's signals and turns them into the
        notice file. --kill-on-bad-exit=0: a site default of 1 would kill ranks that are still
        saving. --cpus-per-task: srun no longer inherits it from sbatch since Slurm 22.05.
        """
        cpus = [f"--cpus-per-task={self.cpus}"] if self.cpus else []
        escaped = str(log).replace("%", "%%")
        return [
            "srun",
            "--ntasks=1",
            "--kill-on-bad-exit=0",
            "--unbuffered",
            "--open-mode=append",
            f"--output={escaped}",
            *cpus,
            "bash",
            str(resources.find("templates/shim.sh")),
            *argv,
        ]

    def cancel_rest(self) -> str | None:
        """Pending members of this array only; the running link is spared."""
        if self.array is None:
            return None
        try:
            cancel_pending(self.array, self.run)
        except SchedulerError:
            return None  # they end by themselves: a link that finds DONE or halt leaves at once
        return self.array
