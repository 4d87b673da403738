"""Slurm, seen from inside one of its allocations: what the link runner asks it.

Standard library only: the link runner imports it on the compute node.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .. import resources
from ..errors import SchedulerError
from ..lease import Holder
from . import slurm
from .backend import Cause, JobRecord
from .evidence import of_state
from .reasons import never_begins
from .slurm import Runner, run_command

log = logging.getLogger("hpc_ckpt.link")

UNKNOWN_RUN_S = 90
"""slurmstepd tries once a minute to report a step whose end the controller did not hear. Until it
has, its node refuses to start the job again, and Slurm holds a job that a node refuses."""


def _unless_hidden(holder: Holder) -> bool | None:
    """Of a job that Slurm does not show: it is over, or another user's and hidden."""
    return None if holder.is_foreign else False


@dataclass
class SlurmBackend:
    """Slurm, seen from inside one job or array member."""

    environ: Mapping[str, str]
    kill_wait_s: float = 30.0
    cpus: int | None = None
    run: Runner = run_command
    name: str = "slurm"
    enforces_end: bool = True
    _killed_at: float | None = field(default=None, init=False)
    """Unix seconds, once Slurm was seen to end the job."""

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
            return _unless_hidden(holder) if slurm.is_forgotten(error) else None
        if not text.strip():
            return _unless_hidden(holder)
        return any(state in slurm.LIVE_STATES for state in text.split())

    @property
    def nodes(self) -> str | None:
        return self.environ.get("SLURM_JOB_NODELIST") or self.node

    def surely_gone(self, holder: Holder, nodes: str | None) -> bool:
        """A node that answers has ended what a job left there before Slurm called the job over.
        One that was set down was not asked; one whose job still runs has ended nothing."""
        if self.probe(holder) is not False:
            return False
        states = self._states(nodes)
        return slurm.answer(states) and not slurm.are_ending(states)

    def ended_whole(self, code: int) -> bool:
        """srun gives its step up when a node of it is set down, at times with code 0, and leaves it
        behind when it is killed."""
        return code >= 0 and slurm.answer(self._states(self.nodes))

    def _states(self, nodes: str | None) -> str:
        """Also of those in partitions that a site hides."""
        if nodes is None:
            return ""
        try:
            return self.run(["sinfo", "--all", "--noheader", f"--nodes={nodes}", "--format=%T"])
        except SchedulerError:
            return ""

    def like(self, node: str) -> list[str]:
        """Of this job's partition, with the same GPUs and features: what it asked for is there."""
        partition = self.environ.get("SLURM_JOB_PARTITION")
        if partition is None:
            return []
        asked = ["sinfo", "--noheader", "--Node", f"--partition={partition}"]
        try:
            return slurm.nodes_like(node, self.run([*asked, "--format=%N|%T|%G|%f"]))
        except SchedulerError:
            return []

    def look(self) -> JobRecord:
        try:
            return self.asked()
        except SchedulerError:
            return JobRecord()

    def asked(self) -> JobRecord:
        """The same for one who must have an answer: SchedulerError if there is none."""
        record = self._shown()
        if record is None:
            return JobRecord()
        said = slurm.job_record(record, self.restarts)
        back = said.restarted and record.get("JobState") != "RUNNING"
        return self._with_kill_wait(said) if said.ending or back else said

    def _with_kill_wait(self, said: JobRecord) -> JobRecord:
        """EndTime of a job that is being ended is when that began, or is about a run to come."""
        if self._killed_at is None:
            now = time.time()
            began = now if said.restarted or said.end is None else min(said.end, now)
            self._killed_at = began + self.kill_wait_s
        return replace(said, end=self._killed_at)

    def record(self) -> Mapping[str, str] | None:
        """This job in scontrol's words; None if it has no answer."""
        try:
            return self._shown()
        except SchedulerError:
            return None

    def _shown(self) -> Mapping[str, str] | None:
        if self.job is None:
            return None
        return slurm.parse_record(self.run(["scontrol", "-o", "show", "job", self.job]))

    def see_that_it_begins(self) -> None:
        """Called where this job is said to be pending already. That is what was wanted, unless the
        controller came back without what it knew of this run: then it starts the job again where
        this one is not yet gone."""
        record = self.record()
        if self.job is None or record is None:
            return
        try:
            if never_begins(record.get("Reason", "")):
                slurm.release(self.job, self.run)
            elif slurm.is_unknown_run(record, self.restarts):
                log.warning("Slurm has lost the start of this job; the next link waits for its end")
                slurm.update_job(self.job, self.run, StartTime=f"now+{UNKNOWN_RUN_S}")
        except SchedulerError as error:
            log.warning("it may not begin by itself (hpc-ckpt status says so): %s", error.stderr)

    def explain(self, holder: Holder) -> JobRecord:
        """scontrol remembers a job for MinJobAge; sacct, where it answers, for years."""
        if holder.job is None:
            return JobRecord()
        try:
            text = self.run(["scontrol", "-o", "show", "job", holder.job])
            record = slurm.past_record(slurm.parse_record(text), holder.restarts)
        except SchedulerError as error:
            record = JobRecord(unanswered=slurm.is_away(error))
        if record.cause not in (None, Cause.REQUEUED):
            return record
        # Put back into the queue is all that scontrol says of a failed node.
        state = slurm.accounted_state(holder.job, holder.restarts, self.run)
        if state is None or of_state(state) is None:
            return record
        cause = of_state(state)
        return JobRecord(record.end, cause, f"sacct: {state}", certain=cause is Cause.CANCELLED)

    def cancelled_members(self, before: str | None = None) -> list[tuple[str, int]] | None:
        """Members of this array that began and were cancelled; Slurm remembers them for a while."""
        asked = self.array or before
        if asked is None:
            return []
        try:
            text = self.run(["scontrol", "-o", "show", "job", asked])
        except SchedulerError as error:
            return None if slurm.is_away(error) else []
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
