"""Slurm, seen from inside one of its allocations: what the link runner asks it.

Standard library only: the link runner imports it on the compute node.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import resources
from ..errors import SchedulerError
from ..lease import Holder
from . import slurm
from .backend import Cause, JobRecord
from .evidence import of_state
from .slurm import Runner, run_command


@dataclass
class SlurmBackend:
    """Slurm, seen from inside one job or array member."""

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

    @property
    def node(self) -> str | None:
        return self.environ.get("SLURMD_NODENAME")

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
            return False if slurm.is_forgotten(error) else None
        return any(state in slurm.LIVE_STATES for state in text.split())

    def look(self) -> JobRecord:
        if self.job is None:
            return JobRecord()
        try:
            text = self.run(["scontrol", "-o", "show", "job", self.job])
        except SchedulerError:
            return JobRecord()
        return slurm.job_record(slurm.parse_record(text), self.restarts)

    def explain(self, holder: Holder) -> JobRecord:
        """scontrol remembers a job for MinJobAge; sacct, where it answers, for years."""
        if holder.job is None:
            return JobRecord()
        try:
            text = self.run(["scontrol", "-o", "show", "job", holder.job])
            record = slurm.past_record(slurm.parse_record(text), holder.restarts)
        except SchedulerError:
            record = JobRecord()
        if record.cause not in (None, Cause.REQUEUED):
            return record
        # Put back into the queue is all that scontrol says of a failed node.
        state = slurm.accounted_state(holder.job, holder.restarts, self.run)
        if state is None or of_state(state) is None:
            return record
        cause = of_state(state)
        return JobRecord(record.end, cause, f"sacct: {state}", certain=cause is Cause.CANCELLED)

    def cancelled_members(self) -> list[tuple[str, int]]:
        """Members of this array that began and were cancelled; Slurm remembers them for a while."""
        if self.array is None:
            return []
        try:
            text = self.run(["scontrol", "-o", "show", "job", self.array])
        except SchedulerError:
            return []
        return slurm.cancelled_members(text)

    def step(self, argv: Sequence[str], log: Path) -> list[str]:
        """One srun step with the shim as its direct task.

        The shim, and nothing else, hears the scheduler's signals and turns them into the
        notice file. --kill-on-bad-exit=0: a site default of 1 would kill ranks that are still
        saving. --cpus-per-task: srun no longer inherits it from sbatch since Slurm 22.05.
        --overlap and --mem=0: an srun inside the command finds the whole allocation free.
        """
        cpus = [f"--cpus-per-task={self.cpus}"] if self.cpus else []
        escaped = str(log).replace("%", "%%")
        return [
            "srun",
            "--ntasks=1",
            "--overlap",
            "--mem=0",
            "--kill-on-bad-exit=0",
            "--unbuffered",
            "--open-mode=append",
            f"--output={escaped}",
            *cpus,
            "bash",
            str(resources.find("templates/shim.sh")),
            *argv,
        ]
