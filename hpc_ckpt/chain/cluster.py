"""What is known of a live cluster at one moment: records, and what follows from them.

survey.py fills them from Slurm's answers; doctor.py compares them with a profile.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from .profile import PreemptMode

N = TypeVar("N", int, float)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Of `scontrol show config`, what a chain depends on; None is what it does not say."""

    cluster: str | None
    version: str | None
    proctrack: str | None
    """cgroup, linuxproc or pgid."""
    kill_wait_s: float | None
    requeue: bool | None
    """The default of jobs that say neither --requeue nor --no-requeue."""
    requeue_delay_s: float
    """How long a requeued job waits at least before it may start again."""
    preempt_type: str
    """none, partition_prio or qos."""
    user_signal: bool
    """Whether a preempted job gets the signal of its --signal when the grace begins."""
    max_array: int | None
    """The greatest index and one."""
    max_jobs: int | None
    kill_on_bad_exit: bool | None
    min_job_age_s: float | None
    over_time_s: float | None
    """How long a job may run over its limit; None: not said, or without end."""
    append: bool | None
    accounting: str | None
    """slurmdbd, or what else there is; None: no accounting."""
    limited: bool
    """Whether the limits of associations and QoS are enforced."""
    hides_jobs: bool
    """Of others."""


@dataclass(frozen=True, kw_only=True)
class ClusterPartition:
    """One line of `scontrol -o show partition`."""

    name: str
    default: bool
    max_time_s: float | None
    """None: no limit."""
    preempt_mode: PreemptMode | None
    """What would happen to its jobs; None: nothing."""
    grace_s: float
    tier: int
    qos: str | None
    nodes: frozenset[str] | None
    """None: not known."""
    accounts: tuple[str, ...] | None
    """Who may use it; None: everybody."""
    state: str


@dataclass(frozen=True)
class ClusterNode:
    name: str
    gpus: tuple[str, ...]
    """Types; an empty text is a GPU without one."""
    partitions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Association:
    """What one user may do under one account."""

    account: str
    qos: tuple[str, ...]
    default_qos: str | None
    max_jobs: int | None
    """Running at once."""
    max_submit: int | None
    """In the queue, running ones included."""
    max_wall_s: float | None = None
    partition: str | None = None
    """The only one it is for; None: all that have none of their own."""
    default_account: str | None = None
    """Of a job that names none."""

    @property
    def qos_used(self) -> str:
        """The one of a job that names none."""
        if self.default_qos is None and len(self.qos) == 1:
            return self.qos[0]
        return self.default_qos or "normal"


@dataclass(frozen=True, kw_only=True)
class Qos:
    name: str
    preempts: tuple[str, ...]
    mode: PreemptMode | None
    """None: the cluster's own."""
    grace_s: float
    max_submit: int | None
    max_wall_s: float | None
    max_jobs: int | None = None
    over_partition: bool = False
    """Whether it counts before the QoS of a partition."""


@dataclass(frozen=True)
class QueuedJob:
    """One job of this user, or one index of an array."""

    account: str
    qos: str


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What one association or QoS allows this user."""

    by: str
    """Which one, for people."""
    max_jobs: int | None
    max_submit: int | None
    max_wall_s: float | None
    queued: int
    """How many jobs in the queue it counts."""


@dataclass(frozen=True, kw_only=True)
class Maintenance:
    """A reservation in which no job runs."""

    name: str
    start: float | None
    """Unix seconds."""
    end: float | None
    nodes: int | None


@dataclass(frozen=True, kw_only=True)
class Survey:
    """One cluster at one moment."""

    config: ClusterConfig
    partitions: tuple[ClusterPartition, ...]
    nodes: tuple[ClusterNode, ...] | None = None
    associations: tuple[Association, ...] | None = None
    qos: tuple[Qos, ...] | None = None
    maintenance: tuple[Maintenance, ...] | None = None
    queued: tuple[QueuedJob, ...] | None = None
    """This user's."""

    def partition(self, name: str) -> ClusterPartition | None:
        return next((one for one in self.partitions if one.name == name), None)

    def preempted(self, partition: ClusterPartition) -> PreemptMode | None:
        """What happens to its jobs when a partition of a higher tier wants their nodes."""
        if self.config.preempt_type != "partition_prio":
            return None
        rivals = (other for other in self.partitions if other.tier > partition.tier)
        return partition.preempt_mode if any(_shared(partition, one) for one in rivals) else None

    def preempted_qos(self) -> list[Qos]:
        """Those that another one may preempt."""
        if self.config.preempt_type != "qos":
            return []
        prey = {name for one in self.qos or () for name in one.preempts}
        return [one for one in self.qos or () if one.name in prey]

    def max_time_s(self, partition: ClusterPartition) -> float | None:
        """Its own limit, or that of its QoS where that is tighter."""
        walls = [one.max_wall_s for one in self.qos or () if one.name == partition.qos]
        return least(partition.max_time_s, *walls)

    def gpu_types(self, partition: ClusterPartition) -> tuple[str, ...] | None:
        """Empty: it has no GPUs. None: not known, or they have no types."""
        if self.nodes is None:
            return None
        here = [node for node in self.nodes if partition.name in node.partitions]
        found = {kind for node in here for kind in node.gpus}
        named = tuple(sorted(found - {""}))
        return named if named or not found else None

    def submit_limits(self) -> list[int]:
        """Every bound on the jobs that this user may have in the queue, under any account."""
        if not self.config.limited:
            return []
        mine = self.associations or ()
        used = {one.qos_used for one in mine}
        of_qos = [one.max_submit for one in self.qos or () if one.name in used]
        bounds = [*(one.max_submit for one in mine), *of_qos]
        return [bound for bound in bounds if bound is not None]

    def rules(
        self, account: str | None, qos: str | None, partition: ClusterPartition | None
    ) -> list[Rule]:
        """What is enforced for such a job, in Slurm's order: of each limit the first one counts."""
        if not self.config.limited:
            return []
        mine = self._association(account, None if partition is None else partition.name)
        used = qos or (None if mine is None else mine.qos_used)
        of_job = self._qos(used)
        of_partition = self._qos(None if partition is None else partition.qos)
        first = [of_partition, of_job]
        if of_job is not None and of_job.over_partition:
            first.reverse()
        found = [self._rule_of_qos(one) for one in dict.fromkeys(first) if one is not None]
        return found if mine is None else [*found, self._rule_of_account(mine)]

    def _association(self, account: str | None, partition: str | None) -> Association | None:
        """The one that Slurm takes; None: there is none, or it cannot be told."""
        every = self.associations or ()
        named = account or next((one.default_account for one in every), None)
        mine = [one for one in every if one.account == named]
        own = [one for one in mine if one.partition is not None and one.partition == partition]
        return next(iter([*own, *(one for one in mine if one.partition is None)]), None)

    def _qos(self, name: str | None) -> Qos | None:
        return next((one for one in self.qos or () if one.name == name), None)

    def _rule_of_qos(self, one: Qos) -> Rule:
        queued = sum(job.qos == one.name for job in self.queued or ())
        return _rule(f"QoS {one.name!r}", one, queued)

    def _rule_of_account(self, one: Association) -> Rule:
        queued = sum(job.account == one.account for job in self.queued or ())
        return _rule(f"account {one.account!r}", one, queued)


def _rule(by: str, one: Qos | Association, queued: int) -> Rule:
    return Rule(
        by=by,
        max_jobs=one.max_jobs,
        max_submit=one.max_submit,
        max_wall_s=one.max_wall_s,
        queued=queued,
    )


def _shared(one: ClusterPartition, other: ClusterPartition) -> bool:
    return one.nodes is None or other.nodes is None or not one.nodes.isdisjoint(other.nodes)


def least(*bounds: N | None) -> N | None:
    return min((bound for bound in bounds if bound is not None), default=None)
