"""What a cluster says of itself, pasted from Slurm, turned into records.

The 22.05 answers are whole lines of a real one; those of other versions are in the form that
these print, shortened to what is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hpc_ckpt.chain import survey
from hpc_ckpt.chain.cluster import ClusterConfig, ClusterNode, Maintenance
from hpc_ckpt.chain.profile import PreemptMode, Profile
from hpc_ckpt.chain.survey import Bound, LiveLimits, limits, take_survey
from hpc_ckpt.errors import SchedulerError

CONFIG_22 = """\
Configuration data as of 2026-11-17T01:00:00
AccountingStorageEnforce = none
AccountingStorageType   = accounting_storage/none
AuthInfo                = socket=/tmp/c/run/munge.socket,cred_expire=5
ClusterName             = devcluster17000
JobFileAppend           = 0
JobRequeue              = 1
KillOnBadExit           = 0
KillWait                = 5 sec
MaxArraySize            = 1001
MaxJobCount             = 10000
MinJobAge               = 300 sec
OverTimeLimit           = 0 min
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
ProctrackType           = proctrack/cgroup
SchedulerParameters     = batch_sched_delay=0,sched_interval=2,bf_interval=2
SlurmctldParameters     = preempt_send_user_signal
SLURM_VERSION           = 22.05.8

Cgroup Support Configuration:
AllowedRAMSpace         = 100.0%

Slurmctld(primary) at localhost is UP
"""
CONFIG_20 = """\
Configuration data as of 2022-04-27T10:07:02
AccountingStorageEnforce = associations,limits,qos
AccountingStorageType   = accounting_storage/slurmdbd
AuthInfo                = (null)
ClusterName             = old
JobRequeue              = 0
KillOnBadExit           = 1
KillWait                = 60 sec
MaxArraySize            = 40001
MaxJobCount             = 100000
MinJobAge               = 30 sec
OverTimeLimit           = UNLIMITED
PreemptMode             = GANG,SUSPEND
PreemptType             = preempt/qos
ProctrackType           = proctrack/linuxproc
SchedulerParameters     = bf_continue,max_array_tasks=2000,requeue_delay=10
SlurmctldParameters     = enable_configless
SLURM_VERSION           = 20.11.6
"""
CONFIG_25 = """\
Configuration data as of 2026-04-21T06:19:30
AccountingStorageType   = (null)
AuthInfo                = (null)
ClusterName             = linux
JobFileAppend           = 1
JobRequeue              = 1
KillOnBadExit           = 0
KillWait                = 30 sec
MaxArraySize            = 1001
PreemptMode             = OFF
PreemptParameters       = send_user_signal,youngest_first
PreemptType             = (null)
ProctrackType           = proctrack/pgid
SlurmctldParameters     = (null)
SLURM_VERSION           = 25.11.4
"""
PARTITIONS_22 = """\
PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=08:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=c17000n[1-4] PriorityJobFactor=1 PriorityTier=10 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=UP TotalCPUs=32 TotalNodes=4 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=32,mem=32000M,node=4,billing=32
PartitionName=lowpriority AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=10 Hidden=NO MaxNodes=UNLIMITED MaxTime=1-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=c17000n[1-4] PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=REQUEUE State=UP TotalCPUs=32 TotalNodes=4 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=32,mem=32000M,node=4,billing=32
"""  # noqa: E501 - pasted
PARTITIONS_25 = """\
PartitionName=cpu AllowAccounts=ALL Default=YES QoS=short DefaultTime=NONE ExclusiveTopo=NO GraceTime=0 MaxTime=UNLIMITED NodeSets=cpus Nodes=c[1-2] PriorityTier=1 OverTimeLimit=NONE PreemptMode=GANG,SUSPEND State=UP TRES=cpu=24
PartitionName=lab AllowAccounts=lab-a,lab-b Default=NO QoS=N/A GraceTime=0 MaxTime=03:00:00 Nodes=(null) PriorityTier=20 PreemptMode=OFF State=DRAIN TRES=(null)
"""  # noqa: E501 - in the form of 25.11
NODES_22 = """\
NodeName=c17000n1 Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=8 CPUTot=8 CPULoad=1.49 AvailableFeatures=(null) ActiveFeatures=(null) Gres=gpu:2 NodeAddr=127.0.0.1 NodeHostName=vm Port=17011 Version=22.05.8 OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=8000 AllocMem=0 FreeMem=18436 Sockets=8 Boards=1 State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=gpu,lowpriority  BootTime=2026-11-16T21:13:14 SlurmdStartTime=2026-11-17T01:55:47 CfgTRES=cpu=8,mem=8000M,billing=8 AllocTRES= CapWatts=n/a CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s
"""  # noqa: E501 - pasted
NODES = """\
NodeName=c1 Arch=x86_64 CoresPerSocket=18 CPUAlloc=8 AvailableFeatures=(null) Gres=gpu:a100:4(S:0-1),gpu:v100:2,lscratch:3200 NodeAddr=c1 Version=23.02.7 OS=Linux 5.15.0-91-generic #101-Ubuntu SMP State=MIXED MCS_label=N/A Partitions=gpu,cpu CfgTRES=cpu=28,gres/gpu=6
NodeName=c2 Arch=x86_64 Gres=gpu:2 OS=Linux 6.1 State=IDLE Partitions=old Reason=a b
NodeName=c3 Arch=x86_64 Gres=(null) State=IDLE Partitions=cpu
"""  # noqa: E501 - in the form of 23.02
RESERVATIONS = """\
ReservationName=root_1 StartTime=1794884148 EndTime=1794887748 Duration=01:00:00 Nodes=c17000n[1-4] NodeCnt=4 CoreCnt=32 Features=(null) PartitionName=(null) Flags=MAINT,IGNORE_JOBS,SPEC_NODES,ALL_NODES TRES=cpu=32 Users=root Groups=(null) Accounts=(null) Licenses=(null) State=INACTIVE BurstBuffer=(null) Watts=n/a MaxStartDelay=(null)
ReservationName=course StartTime=1794870000 EndTime=1794873600 Duration=01:00:00 Nodes=c1 NodeCnt=1 Flags=SPEC_NODES Users=anna State=INACTIVE
"""  # noqa: E501 - pasted
ASSOCIATIONS = (
    "lab|slow||4|20||1-00:00:00||lab\n"
    "lab|slow||0|3||01:00:00|tiny|lab\n"
    "physics|normal,preempt|normal||||||lab\n"
    "root|normal|||||||lab\n"
)
QOS = (
    "normal||cluster|00:00:00|100||7|\n"
    "preempt||requeue|00:02:00|5000|||OverPartQOS,DenyOnLimit\n"
    "urgent|preempt|cluster|00:00:00|2|12:00:00||\n"
    "short||cluster|00:00:00||02:00:00||\n"
    "slow||cluster|00:00:00||||\n"
)
PARTITIONS = """\
PartitionName=gpu Default=YES QoS=N/A MaxTime=UNLIMITED
PartitionName=cpu Default=NO QoS=short MaxTime=UNLIMITED
PartitionName=tiny Default=NO QoS=N/A MaxTime=UNLIMITED
"""
QUEUE = "lab|slow\nlab|slow\nphysics|normal\n"


def profile(**keys: object) -> Profile:
    return Profile.model_validate({"cluster": "lab", **keys})


class Cluster:
    """Answers from a table; what is not in it is refused."""

    def __init__(self, **answers: str) -> None:
        self.answers = answers
        self.commands: list[list[str]] = []

    def __call__(self, argv: Sequence[str]) -> str:
        self.commands.append(list(argv))
        for word, answer in self.answers.items():
            if word in argv:
                return answer
        raise SchedulerError(argv, 1, "access denied")


def test_the_configuration_of_22() -> None:
    """Every value that a chain depends on."""
    expected = ClusterConfig(
        cluster="devcluster17000",
        version="22.05.8",
        proctrack="cgroup",
        kill_wait_s=5.0,
        requeue=True,
        requeue_delay_s=5.0,
        preempt_type="partition_prio",
        user_signal=True,
        max_array=1001,
        max_jobs=10000,
        kill_on_bad_exit=False,
        min_job_age_s=300.0,
        over_time_s=0.0,
        append=False,
        accounting=None,
        limited=False,
        hides_jobs=False,
    )
    assert expected == survey.parse_config(CONFIG_22)


def test_the_configuration_of_20() -> None:
    """UNLIMITED is no number; what the scheduler's own parameters say is tighter."""
    found = survey.parse_config(CONFIG_20)
    assert ("20.11.6", "linuxproc", 60.0, False, True) == (
        found.version, found.proctrack, found.kill_wait_s, found.requeue, found.kill_on_bad_exit,
    )  # fmt: skip
    assert (10.0, "qos", 2001, None, False, "slurmdbd") == (
        found.requeue_delay_s, found.preempt_type, found.max_array, found.over_time_s,
        found.user_signal, found.accounting,
    )  # fmt: skip


def test_the_configuration_of_25() -> None:
    """(null) for what is none; the user signal has another name and another place."""
    found = survey.parse_config(CONFIG_25)
    assert ("pgid", "none", True, 120.0, True, None) == (
        found.proctrack, found.preempt_type, found.user_signal, found.requeue_delay_s,
        found.append, found.accounting,
    )  # fmt: skip


def test_an_empty_answer_is_nothing_known() -> None:
    """Never an error."""
    found = survey.parse_config("")
    assert (None, None, None, "none", False) == (
        found.cluster, found.kill_wait_s, found.max_array, found.preempt_type, found.user_signal,
    )  # fmt: skip


def test_partitions() -> None:
    """Limits, tiers, preemption; who may use it."""
    gpu, low = survey.parse_partitions(PARTITIONS_22)
    assert (True, 28800.0, None, 0.0, 10, 4) == (
        gpu.default, gpu.max_time_s, gpu.preempt_mode, gpu.grace_s, gpu.tier, len(gpu.nodes or ()),
    )  # fmt: skip
    assert (False, 86400.0, PreemptMode.REQUEUE, 10.0, 1, None) == (
        low.default, low.max_time_s, low.preempt_mode, low.grace_s, low.tier, low.accounts,
    )  # fmt: skip
    cpu, lab = survey.parse_partitions(PARTITIONS_25)
    assert (None, PreemptMode.SUSPEND, "short") == (cpu.max_time_s, cpu.preempt_mode, cpu.qos)
    assert (("lab-a", "lab-b"), frozenset(), "DRAIN") == (lab.accounts, lab.nodes, lab.state)


def test_gpu_types_of_nodes() -> None:
    """A GPU without a type is one; other gres are none."""
    expected = [("c1", ("a100", "v100")), ("c2", ("",)), ("c3", ())]
    assert expected == [(node.name, node.gpus) for node in survey.parse_nodes(NODES)]


def test_only_maintenance_counts() -> None:
    """A reservation for a course does not stop anybody else."""
    expected = (Maintenance(name="root_1", start=1794884148.0, end=1794887748.0, nodes=4),)
    assert expected == survey.parse_maintenance(RESERVATIONS)
    assert () == survey.parse_maintenance("No reservations in the system\n")


def test_a_time_printed_for_people_is_read_too() -> None:
    """Where SLURM_TIME_FORMAT was not heeded."""
    text = "ReservationName=m StartTime=2026-11-16T04:00:00 EndTime=Unknown Flags=MAINT NodeCnt=1"
    (found,) = survey.parse_maintenance(text)
    assert found.start is not None and found.start > 1.79e9
    assert found.end is None


def test_associations_and_qos() -> None:
    """An empty cell is no limit; lines that are none are passed over."""
    lab, tiny, physics, grouped = survey.parse_associations(
        ASSOCIATIONS.replace("root|normal||||", "group|a,b|||500|30") + "sacctmgr: a remark\n"
    )
    assert (4, 20, "slow") == (lab.max_jobs, lab.max_submit, lab.qos_used)
    assert (86400.0, "lab", None, "tiny") == (
        lab.max_wall_s, lab.default_account, lab.partition, tiny.partition,
    )  # fmt: skip
    assert (None, ("normal", "preempt")) == (physics.max_submit, physics.qos)
    assert (30, "normal") == (grouped.max_submit, grouped.qos_used)
    normal, preempt, urgent, short, _ = survey.parse_qos(QOS)
    assert (7, False, True) == (normal.max_jobs, normal.over_partition, preempt.over_partition)
    assert (PreemptMode.REQUEUE, 120.0, 5000) == (preempt.mode, preempt.grace_s, preempt.max_submit)
    assert (None, ("preempt",), 7200.0) == (normal.mode, urgent.preempts, short.max_wall_s)


def surveyed(config: str = CONFIG_22, partition: str = PARTITIONS_22, **more: str) -> survey.Survey:
    return take_survey(Cluster(config=config, partition=partition, **more))


def test_what_is_refused_is_unknown() -> None:
    """Only a cluster that does not answer at all is an error."""
    found = surveyed()
    assert (None, None, None, None) == (
        found.nodes, found.maintenance, found.associations, found.qos,
    )  # fmt: skip
    with pytest.raises(SchedulerError):
        take_survey(Cluster())


def test_the_data_base_is_asked_only_where_there_is_one() -> None:
    """Elsewhere sacctmgr tries again for a long time, or fails."""
    without, accounted = (Cluster(config=text, partition="") for text in (CONFIG_22, CONFIG_20))
    take_survey(without)
    take_survey(accounted)
    assert [0, 2] == [
        sum(argv[0] == "sacctmgr" for argv in one.commands) for one in (without, accounted)
    ]


def test_a_partition_is_preempted_by_a_higher_one_on_its_nodes() -> None:
    """A mode alone preempts nobody."""
    found = surveyed()
    gpu, low = found.partitions
    assert (None, PreemptMode.REQUEUE) == (found.preempted(gpu), found.preempted(low))
    elsewhere = PARTITIONS_22.replace("Nodes=c17000n[1-4]", "Nodes=other[1-4]", 1)
    alone = surveyed(partition=elsewhere)
    assert alone.preempted(alone.partitions[1]) is None
    off = surveyed(config=CONFIG_22.replace("partition_prio", "none"))
    assert off.preempted(off.partitions[1]) is None


def test_preemption_by_qos() -> None:
    """Who is named in another one's list."""
    found = surveyed(config=CONFIG_20, withassoc=ASSOCIATIONS, qos=QOS)
    assert ["preempt"] == [one.name for one in found.preempted_qos()]
    assert [] == surveyed().preempted_qos()


def test_the_limit_of_a_partitions_qos_counts() -> None:
    """The tighter of both."""
    found = surveyed(CONFIG_20, PARTITIONS_25, withassoc=ASSOCIATIONS, qos=QOS)
    assert [7200.0, 10800.0] == [found.max_time_s(one) for one in found.partitions]


def test_gpu_types_of_partitions() -> None:
    """None is not known, or without types; an empty list says there are none."""
    text = "".join(f"PartitionName={name} Nodes=x\n" for name in ("gpu", "old", "cpu", "empty"))
    found = surveyed(partition=text, node=NODES)
    expected = [("a100", "v100"), None, ("a100", "v100"), ()]
    assert expected == [found.gpu_types(one) for one in found.partitions]
    unknown = surveyed(partition=text)
    assert unknown.gpu_types(unknown.partitions[0]) is None


def test_a_node_alone() -> None:
    """Partitions are names."""
    (node,) = survey.parse_nodes(NODES_22)
    assert ClusterNode("c17000n1", ("",), ("gpu", "lowpriority")) == node


@pytest.mark.parametrize(
    ("said", "where", "most", "by"),
    [
        ({}, {}, 18, "account 'lab' allows 20 in the queue, 2 are there"),
        ({"max_submit": 10}, {}, 7, "the profile allows 10 in the queue, 3 are there"),
        ({"max_submit": 9999}, {}, 18, "account 'lab' allows 20 in the queue, 2 are there"),
        ({}, {"partitions": ("gpu", "tiny")}, 1, "account 'lab' allows 3 in the queue, 2 are"),
        ({}, {"account": "physics"}, 99, "QoS 'normal' allows 100 in the queue, 1 are there"),
        ({}, {"account": "physics", "qos": "preempt"}, 5000, "QoS 'preempt' allows 5000 in the q"),
        ({"max_submit": 2}, {}, 0, "the profile allows 2 in the queue, 3 are there"),
    ],
)
def test_what_is_in_the_queue_counts(
    said: dict[str, int], where: dict[str, Any], most: int, by: str
) -> None:
    """Against the limit that Slurm looks at first, of the jobs that this limit is about."""
    found = surveyed(CONFIG_20, PARTITIONS, withassoc=ASSOCIATIONS, qos=QOS, squeue=QUEUE)
    bound = limits(found, profile(limits=said), **where).submit
    assert bound is not None
    assert most == bound.most
    assert bound.by.startswith(by)


@pytest.mark.parametrize(
    ("where", "wall"),
    [
        ({}, Bound(86400.0, "account 'lab'")),
        ({"partitions": ("cpu",)}, Bound(7200.0, "QoS 'short'")),
        ({"partitions": ("cpu",), "qos": "urgent"}, Bound(7200.0, "QoS 'short'")),
        ({"qos": "urgent"}, Bound(43200.0, "QoS 'urgent'")),
        ({"partitions": ("gpu", "tiny")}, Bound(3600.0, "account 'lab'")),
        ({"account": "physics"}, None),
    ],
)
def test_how_long_a_job_may_run(where: dict[str, Any], wall: Bound | None) -> None:
    """The partition's QoS before the job's, that before the association."""
    found = surveyed(CONFIG_20, PARTITIONS, withassoc=ASSOCIATIONS, qos=QOS)
    assert wall == limits(found, profile(), **where).wall


def test_a_qos_may_count_before_the_partitions() -> None:
    """OverPartQOS."""
    qos = QOS.replace("5000|||Over", "5000|03:00:00||Over")
    found = surveyed(CONFIG_20, PARTITIONS, withassoc=ASSOCIATIONS, qos=qos)
    wall = limits(found, profile(), qos="preempt", partitions=("cpu",)).wall
    assert Bound(10800.0, "QoS 'preempt'") == wall


def test_how_many_jobs_may_run() -> None:
    found = surveyed(CONFIG_20, PARTITIONS, withassoc=ASSOCIATIONS, qos=QOS)
    assert Bound(4, "account 'lab'") == limits(found, profile()).running
    assert Bound(7, "QoS 'normal'") == limits(found, profile(), account="physics").running


def test_an_unknown_limit_is_none() -> None:
    """Nobody says anything."""
    assert LiveLimits() == limits(surveyed(config=""), profile())


def test_limits_that_nobody_enforces_do_not_count() -> None:
    """A site may keep accounts without holding anybody to them."""
    loose = CONFIG_20.replace("associations,limits,qos", "associations")
    found = surveyed(config=loose, withassoc=ASSOCIATIONS, qos=QOS)
    assert LiveLimits(2001) == limits(found, profile())


def test_only_this_clusters_associations_are_asked_for() -> None:
    """One data base may serve several clusters."""
    asked = Cluster(config=CONFIG_20, partition="")
    take_survey(asked)
    (argv,) = [argv for argv in asked.commands if "withassoc" in argv]
    assert "cluster=old" in argv
