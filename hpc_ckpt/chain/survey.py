"""What a live cluster says of itself: seven questions, and pure parsers of Slurm's answers.

What nobody may ask or nobody answers is None, never an error; only a cluster that does not
answer at all is one. The records are in cluster.py.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import getpass
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..errors import SchedulerError, SpecError
from ..units import expand_nodes, parse_duration
from .cluster import (
    Association,
    ClusterConfig,
    ClusterNode,
    ClusterPartition,
    Maintenance,
    Qos,
    QueuedJob,
    Rule,
    least,
)
from .cluster import Survey as Survey
from .hidden import are_hidden
from .profile import PreemptMode, Profile
from .slurm import Runner, parse_record, run_command

ASK_TIMEOUT_S = 15.0
ACCOUNTING_TIMEOUT_S = 5.0
"""A data base that is out of reach makes sacctmgr try again for a long time."""
USUAL_REQUEUE_DELAY_S = 120
"""Slurm's own cred_expire."""
ASSOCIATION = (
    "Account", "QOS", "DefaultQOS", "MaxJobs", "MaxSubmit", "GrpSubmit", "MaxWall", "Partition",
    "DefaultAccount",
)  # fmt: skip
QOS = (
    "Name", "Preempt", "PreemptMode", "GraceTime", "MaxSubmitJobsPU", "MaxWall", "MaxJobsPU",
    "Flags",
)  # fmt: skip
QUEUED = "--format=%a|%q"
IN_THE_QUEUE = "--states=PENDING,RUNNING,SUSPENDED,CONFIGURING"
"""What counts against a limit; a job that is being cleaned up does not."""
_NOTHING = frozenset({"", "(null)", "n/a", "none"})

T = TypeVar("T")


@dataclass(frozen=True)
class Bound:
    most: float
    by: str
    """Who says so, for people."""


@dataclass(frozen=True)
class LiveLimits:
    """What holds for a chain that is submitted now; None: not known, or no bound."""

    max_array: int | None = None
    """The greatest index and one."""
    submit: Bound | None = None
    """How many more jobs this user may have in the queue."""
    wall: Bound | None = None
    """How long a job may run, in seconds; Slurm lets a longer one wait for ever."""
    running: Bound | None = None
    """How many jobs this user may have running."""


def limits(
    survey: Survey,
    profile: Profile,
    *,
    account: str | None = None,
    qos: str | None = None,
    partitions: Sequence[str] = (),
) -> LiveLimits:
    """The tightest of what the profile and the cluster say, over all partitions asked for."""
    asked = [one for one in survey.partitions if one.name in partitions]
    asked = asked or [one for one in survey.partitions if one.default]
    every = [survey.rules(account, qos, one) for one in asked]
    submit = _deciding(every, lambda rule: rule.max_submit)
    wall = _deciding(every, lambda rule: rule.max_wall_s)
    running = _deciding(every, lambda rule: rule.max_jobs)
    own = _room("the profile", profile.limits.max_submit, len(survey.queued or ()))
    return LiveLimits(
        max_array=least(profile.limits.max_array, survey.config.max_array),
        submit=_tightest(own, *(_room(one.by, one.max_submit, one.queued) for one in submit)),
        wall=_tightest(*(_bound(one.by, one.max_wall_s) for one in wall)),
        running=_tightest(*(_bound(one.by, one.max_jobs) for one in running)),
    )


def _deciding(
    every: Iterable[Iterable[Rule]], limit: Callable[[Rule], float | None]
) -> Iterator[Rule]:
    """Of each partition's rules the first that has the limit."""
    for rules in every:
        yield from [rule for rule in rules if limit(rule) is not None][:1]


def _room(by: str, most: int | None, queued: int) -> Bound | None:
    if most is None:
        return None
    there = f", {queued} are there" if queued else ""
    return Bound(max(0, most - queued), f"{by} allows {most} in the queue{there}")


def _bound(by: str, most: float | None) -> Bound | None:
    return None if most is None else Bound(most, by)


def _tightest(*bounds: Bound | None) -> Bound | None:
    known = [bound for bound in bounds if bound is not None]
    return min(known, key=lambda bound: bound.most, default=None)


def ask(argv: Sequence[str]) -> str:
    return run_command(argv, ACCOUNTING_TIMEOUT_S if argv[0] == "sacctmgr" else ASK_TIMEOUT_S)


def take_survey(run: Runner = ask) -> Survey:
    """SchedulerError if the cluster does not answer the first two questions."""
    show, table = ("scontrol", "-o", "show"), ("sacctmgr", "-nP", "show")
    config = parse_config(run(["scontrol", "show", "config"]))
    partitions = parse_partitions(run([*show, "partition"]))
    counted = config.accounting == "slurmdbd"  # elsewhere sacctmgr has nobody to ask
    user = _user()
    who = ["where", f"name={user}", f"cluster={config.cluster}"]  # one data base may serve several
    mine = [*table, "user", *who, "withassoc", f"format={','.join(ASSOCIATION)}"]
    queue = ["squeue", "--all", "--noheader", "--array", f"--user={user}", IN_THE_QUEUE, QUEUED]
    every = [*table, "qos", f"format={','.join(QOS)}"]
    return Survey(
        config=config,
        partitions=partitions,
        nodes=_answer(parse_nodes, [*show, "node"], run),
        maintenance=_answer(parse_maintenance, [*show, "reservation"], run),
        associations=_answer(parse_associations, mine, run) if counted and user else None,
        qos=_answer(parse_qos, every, run) if counted else None,
        queued=_answer(parse_queue, queue, run) if user else None,
    )


def _answer(parse: Callable[[str], T], argv: Sequence[str], run: Runner) -> T | None:
    with contextlib.suppress(SchedulerError):
        return parse(run(argv))
    return None


def _user() -> str | None:
    with contextlib.suppress(KeyError, OSError):  # a number without a name
        return getpass.getuser()
    return None


# ── scontrol show config ──────────────────────────────────────────────────────────────────
def parse_config(text: str) -> ClusterConfig:
    values: dict[str, str] = {}
    for key, value in re.findall(r"^\s*([A-Za-z]\w*)[ \t]*=[ \t]*(.*?)\s*$", text, re.MULTILINE):
        values.setdefault(key, value)
    scheduling = _options(values.get("SchedulerParameters"))
    return ClusterConfig(
        cluster=_text(values.get("ClusterName")),
        version=_text(values.get("SLURM_VERSION")),
        proctrack=_plugin(values.get("ProctrackType")),
        kill_wait_s=_seconds(values.get("KillWait")),
        requeue=_flag(values.get("JobRequeue")),
        requeue_delay_s=_requeue_delay(scheduling, _options(values.get("AuthInfo"))),
        preempt_type=_plugin(values.get("PreemptType")) or "none",
        user_signal=_sends_user_signal(values),
        max_array=least(_count(values.get("MaxArraySize")), _array_tasks(scheduling)),
        max_jobs=_count(values.get("MaxJobCount")),
        kill_on_bad_exit=_flag(values.get("KillOnBadExit")),
        min_job_age_s=_seconds(values.get("MinJobAge")),
        over_time_s=_seconds(values.get("OverTimeLimit")),
        append=_flag(values.get("JobFileAppend")),
        accounting=_plugin(values.get("AccountingStorageType")),
        limited=_enforces_limits(values.get("AccountingStorageEnforce")),
        hides_jobs=are_hidden(text),
    )


def _enforces_limits(value: str | None) -> bool:
    return value is None or not {"limits", "safe", "all"}.isdisjoint(value.lower().split(","))


def _text(value: str | None) -> str | None:
    return None if value is None or value.lower() in _NOTHING else value


def _plugin(value: str | None) -> str | None:
    """`cgroup` of `proctrack/cgroup`; None for `preempt/none`."""
    return _text((value or "").rpartition("/")[2])


def _seconds(value: str | None) -> float | None:
    """Of `30 sec`, `0 min`, `00:02:00` or `1-00:00:00`; None for UNLIMITED and the like."""
    with contextlib.suppress(SpecError):
        return parse_duration(value) if value else None
    return None


def _count(value: str | None) -> int | None:
    return int(value) if value and value.isdecimal() else None


def _flag(value: str | None) -> bool | None:
    return {"1": True, "yes": True, "0": False, "no": False}.get((value or "").lower())


def _options(value: str | None) -> dict[str, str]:
    """`a,b=1` as a mapping."""
    parts = (part.partition("=") for part in (_text(value) or "").split(","))
    return {key.strip(): rest.strip() for key, _, rest in parts}


def _array_tasks(scheduling: Mapping[str, str]) -> int | None:
    tasks = _count(scheduling.get("max_array_tasks"))
    return None if tasks is None else tasks + 1  # our indices begin at 1


def _requeue_delay(scheduling: Mapping[str, str], auth: Mapping[str, str]) -> float:
    said = _count(scheduling.get("requeue_delay")), _count(auth.get("cred_expire"))
    return float(next((one for one in said if one is not None), USUAL_REQUEUE_DELAY_S))


def _sends_user_signal(values: Mapping[str, str]) -> bool:
    """Two names and two places, old and new; slurmctld reads either name."""
    places = ("SlurmctldParameters", "PreemptParameters")
    said = {name for place in places for name in _options(values.get(place))}
    return not said.isdisjoint(("send_user_signal", "preempt_send_user_signal"))


# ── scontrol -o show … ────────────────────────────────────────────────────────────────────
def _records(text: str, key: str) -> list[dict[str, str]]:
    found = (parse_record(line) for line in text.splitlines())
    return [record for record in found if key in record]


def parse_partitions(text: str) -> tuple[ClusterPartition, ...]:
    return tuple(_partition(record) for record in _records(text, "PartitionName"))


def _partition(record: Mapping[str, str]) -> ClusterPartition:
    return ClusterPartition(
        name=record["PartitionName"],
        default=record.get("Default") == "YES",
        max_time_s=_seconds(record.get("MaxTime")),
        preempt_mode=parse_mode(record.get("PreemptMode")),
        grace_s=_seconds(record.get("GraceTime")) or 0.0,
        tier=_count(record.get("PriorityTier")) or 0,
        qos=_text(record.get("QoS")),
        nodes=_nodes(record.get("Nodes")),
        accounts=_accounts(record.get("AllowAccounts")),
        state=record.get("State", "UP"),
    )


def parse_mode(value: str | None) -> PreemptMode | None:
    """Slurm's PreemptMode, as `REQUEUE`, `GANG,SUSPEND`, `OFF`, `cluster`."""
    words = (value or "").lower().split(",")
    return next((mode for mode in PreemptMode if mode.value in words), None)


def _nodes(value: str | None) -> frozenset[str] | None:
    if value is None:
        return None
    with contextlib.suppress(SpecError):
        return frozenset(expand_nodes(_text(value) or ""))
    return None


def _accounts(value: str | None) -> tuple[str, ...] | None:
    return None if value is None or value.upper() == "ALL" else _names(value)


def _names(value: str | None) -> tuple[str, ...]:
    return tuple(name for name in (_text(value) or "").split(",") if name)


def parse_nodes(text: str) -> tuple[ClusterNode, ...]:
    return tuple(
        ClusterNode(record["NodeName"], _gpus(record.get("Gres")), _names(record.get("Partitions")))
        for record in _records(text, "NodeName")
    )


def _gpus(gres: str | None) -> tuple[str, ...]:
    """Types of `gpu:a100:4(S:0-1),gpu:2,lscratch:3200`."""
    plain = re.sub(r"\([^)]*\)", "", gres or "")
    found = [part.split(":") for part in plain.split(",") if re.match(r"gpu(:|$)", part)]
    return tuple("" if len(part) < 3 else part[1] for part in found)


def parse_maintenance(text: str) -> tuple[Maintenance, ...]:
    return tuple(
        Maintenance(
            name=record["ReservationName"],
            start=_moment(record.get("StartTime")),
            end=_moment(record.get("EndTime")),
            nodes=_count(record.get("NodeCnt")),
        )
        for record in _records(text, "ReservationName")
        if "MAINT" in record.get("Flags", "").split(",")
    )


def _moment(value: str | None) -> float | None:
    """Unix seconds, also of a time that was printed without SLURM_TIME_FORMAT."""
    if value and value.isdecimal():
        return float(value)
    with contextlib.suppress(ValueError, OverflowError):
        return time.mktime(time.strptime(value or "", "%Y-%m-%dT%H:%M:%S"))
    return None


# ── sacctmgr -nP show … ───────────────────────────────────────────────────────────────────
def _rows(text: str, columns: Sequence[str]) -> Iterable[dict[str, str]]:
    for line in text.splitlines():
        cells = line.strip().split("|")
        if len(cells) == len(columns):
            yield dict(zip(columns, cells, strict=True))


def parse_associations(text: str) -> tuple[Association, ...]:
    return tuple(
        Association(
            account=row["Account"],
            qos=_names(row["QOS"]),
            default_qos=_text(row["DefaultQOS"]),
            max_jobs=_count(row["MaxJobs"]),
            max_submit=least(_count(row["MaxSubmit"]), _count(row["GrpSubmit"])),
            max_wall_s=_seconds(row["MaxWall"]),
            partition=_text(row["Partition"]),
            default_account=_text(row["DefaultAccount"]),
        )
        for row in _rows(text, ASSOCIATION)
    )


def parse_qos(text: str) -> tuple[Qos, ...]:
    return tuple(
        Qos(
            name=row["Name"],
            preempts=_names(row["Preempt"]),
            mode=parse_mode(row["PreemptMode"]),
            grace_s=_seconds(row["GraceTime"]) or 0.0,
            max_submit=_count(row["MaxSubmitJobsPU"]),
            max_wall_s=_seconds(row["MaxWall"]),
            max_jobs=_count(row["MaxJobsPU"]),
            over_partition="overpartqos" in row["Flags"].lower().split(","),
        )
        for row in _rows(text, QOS)
    )


# ── squeue ────────────────────────────────────────────────────────────────────────────────
def parse_queue(text: str) -> tuple[QueuedJob, ...]:
    rows = (line.strip().split("|") for line in text.splitlines())
    return tuple(QueuedJob(*row) for row in rows if len(row) == 2)
