"""What a devcluster consists of: its options, its places on disk and the text of its configuration.

Nothing here starts or stops anything (devcluster.py does) or looks at processes
(devcluster_procs.py does).
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from pathlib import Path

# slurmctld's own period between two looks at time limits; compiled in, there is no setting for it.
STOCK_TICK_S = 30
GPUS_PER_NODE = 2
PORTS_PER_CLUSTER = 100
MAX_NODES = 64
STATE_FILE = "devcluster.json"


class DevClusterError(Exception):
    """A devcluster could not be started, found or stopped."""

    exit_code = 1


class Refused(DevClusterError):
    """The request cannot be met as asked; nothing was changed."""

    exit_code = 2


class MissingPackages(Refused):
    """Programs are not installed; the message names the Debian packages that bring them."""


class Proctrack(enum.Enum):
    """How slurmd finds the processes of a job when it signals or ends it."""

    AUTO = "auto"
    CGROUP = "cgroup"
    LINUXPROC = "linuxproc"
    PGID = "pgid"


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What can be chosen about a cluster; everything else is fixed so that tests mean the same."""

    proctrack: Proctrack = Proctrack.AUTO
    """AUTO takes cgroup if a job runs under it on this machine, else linuxproc."""
    tick_s: int = 2
    """Seconds between two looks at time limits; 30 is Slurm's own and needs no compiler."""
    nodes: int = 4
    grace_s: int = 10
    """Preemption notice of partition lowpriority, from TERM to the steps to the end of the job."""
    kill_wait_s: int = 5
    """Seconds between TERM and KILL at the end of a job."""
    send_user_signal: bool = False
    """Preemption sends the job's --signal when the grace begins."""
    accounting: bool = False
    """sacct works: a private mariadbd and slurmdbd, three seconds and three packages more."""
    limits: bool = False
    """With accounting: the limits of associations and QOS are enforced."""

    def __post_init__(self) -> None:
        if not 1 <= self.tick_s <= STOCK_TICK_S:
            raise Refused(f"tick {self.tick_s}: must be 1 to {STOCK_TICK_S} seconds")
        if not 1 <= self.nodes <= MAX_NODES:
            raise Refused(f"nodes {self.nodes}: must be 1 to {MAX_NODES}")
        if self.grace_s < 0 or self.kill_wait_s < 0:
            raise Refused("grace and kill-wait are seconds and cannot be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One cluster on disk. Every path in it is short and plain enough for Slurm and for sockets."""

    root: Path
    """The cluster's directory, or a short link to it."""
    port: int
    """The controller's port; the nodes listen from port + 11 on, and carry it in their names."""
    node_count: int
    proctrack: Proctrack
    """What was chosen: never AUTO once the cluster is up."""
    reason: str
    """Why it was chosen, for people."""

    @property
    def conf(self) -> Path:
        return self.root / "etc" / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        return self.root / "run" / "munge.socket"

    @property
    def job_state(self) -> Path:
        """What the controller has saved of its jobs."""
        return self.root / "state" / "job_state"

    @property
    def environments(self) -> Path:
        """What a job under --export=NONE begins with, a file for each user."""
        return self.root / "state" / "env_cache"

    def slurmd_log(self, node: str) -> Path:
        return self.root / "log" / f"slurmd.{node}.log"

    @property
    def database(self) -> Path:
        return self.root / "db"

    @property
    def dbd_log(self) -> Path:
        return self.root / "log" / "slurmdbd.log"

    @property
    def dbd_port(self) -> int:
        return self.port + 3

    @property
    def database_port(self) -> int:
        return self.port + 4

    @property
    def tick_library(self) -> Path:
        return self.root / "lib" / "tick.so"

    @property
    def nodes(self) -> list[str]:
        return [f"c{self.port}n{number}" for number in range(1, self.node_count + 1)]

    @property
    def node_ports(self) -> list[int]:
        return [self.port + 10 + number for number in range(1, self.node_count + 1)]

    def save(self) -> None:
        """Record the cluster, so that another process can ask about it or stop it."""
        facts = {
            "root": str(self.root),
            "port": self.port,
            "node_count": self.node_count,
            "proctrack": self.proctrack.value,
            "reason": self.reason,
        }
        (self.root / STATE_FILE).write_text(json.dumps(facts, indent=2) + "\n")

    @classmethod
    def load(cls, directory: Path) -> Layout | None:
        """Return the cluster recorded in the directory, up or not; None if there never was one."""
        path = directory / STATE_FILE
        try:
            facts = json.loads(path.read_text())
            return cls(
                root=Path(facts["root"]),
                port=int(facts["port"]),
                node_count=int(facts["node_count"]),
                proctrack=Proctrack(facts["proctrack"]),
                reason=str(facts["reason"]),
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise DevClusterError(
                f"{path}: not a record of a devcluster ({error}). If nothing of it runs any more, "
                "delete the directory."
            ) from error


def slurm_conf(
    layout: Layout, options: Options, *, host: str, user: str, accounting: str = ""
) -> str:
    """Return slurm.conf. Timeouts are short because nobody waits for a real network here."""
    return f"""\
ClusterName=devcluster{layout.port}
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={layout.port}
SlurmdPort={layout.port + 1}
AuthType=auth/munge
# A requeued job may start again cred_expire + 1 s later; below 5 Slurm refuses, its own is 120.
AuthInfo=socket={layout.munge_socket},cred_expire=5
StateSaveLocation={layout.root}/state
# --export=NONE: from the state directory, not from a login shell, which killed nodes would kill.
GetEnvTimeout=0
SlurmdSpoolDir={layout.root}/spool/%n
SlurmctldPidFile={layout.root}/run/slurmctld.pid
SlurmdPidFile={layout.root}/run/slurmd.%n.pid
SlurmctldLogFile={layout.root}/log/slurmctld.log
SlurmdLogFile={layout.root}/log/slurmd.%n.log
SlurmctldDebug=debug
SlurmdDebug=debug
MailProg={layout.root}/etc/mail.sh
ProctrackType=proctrack/{layout.proctrack.value}
TaskPlugin=task/none
JobCompType=jobcomp/filetxt
JobCompLoc={layout.root}/log/jobcomp.txt
{accounting}
ReturnToService=2
# The nodes claim more processors than the machine has.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=100
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=2,bf_min_age_reserve=0
{"SlurmctldParameters=preempt_send_user_signal" if options.send_user_signal else ""}
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
MinJobAge=300
KillWait={options.kill_wait_s}
CompleteWait=0
InactiveLimit=0
OverTimeLimit=0
SlurmctldTimeout=10
SlurmdTimeout=5
MessageTimeout=3
BatchStartTimeout=10
# A step that ends while the controller is away is reported a minute later; Slurm's own value.
UnkillableStepTimeout=60
EpilogMsgTime=0
{_node_lines(layout, host)}
{_partition_lines(layout, options)}
"""


def _node_lines(layout: Layout, host: str) -> str:
    return "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
        f"CPUs=8 RealMemory=8000 Gres=gpu:{GPUS_PER_NODE} State=UNKNOWN"
        for name, port in zip(layout.nodes, layout.node_ports, strict=True)
    )


def _partition_lines(layout: Layout, options: Options) -> str:
    nodes = ",".join(layout.nodes)
    return (
        f"PartitionName=gpu Nodes={nodes} Default=YES PriorityTier=10 PreemptMode=OFF "
        "MaxTime=08:00:00 State=UP\n"
        f"PartitionName=lowpriority Nodes={nodes} PriorityTier=1 PreemptMode=REQUEUE "
        f"GraceTime={options.grace_s} MaxTime=24:00:00 State=UP\n"
        f"PartitionName=cancel Nodes={nodes} PriorityTier=1 PreemptMode=CANCEL "
        f"GraceTime={options.grace_s} MaxTime=24:00:00 State=UP\n"
        f"PartitionName=nograce Nodes={nodes} PriorityTier=1 PreemptMode=REQUEUE "
        "GraceTime=0 MaxTime=24:00:00 State=UP"
    )


def mail_script(layout: Layout) -> str:
    """Return the program that Slurm gives its mails to: a line each, for tests to count."""
    return f'#!/bin/sh\necho "$@" >>{layout.root}/log/mail.txt\n'


def login_environment(*, user: str, home: str, shell: str) -> str:
    """Return what a login as the user would set on a machine that nobody has tuned."""
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return f"HOME={home}\nUSER={user}\nLOGNAME={user}\nSHELL={shell}\nPATH={path}\n"


def gres_conf(layout: Layout) -> str:
    """Return gres.conf. A GPU without a device file, or with a plain file, never reaches a job."""
    return f"Name=gpu File={layout.root}/dev/nvidia[0-{GPUS_PER_NODE - 1}]\n"


def cgroup_conf(plugin: str) -> str:
    """Return cgroup.conf for cgroup/v1 or cgroup/v2, without help from systemd.

    It is needed without cgroup tracking too: slurmd loads a plugin in any case, and the one it
    finds by itself may refuse the machine. An idle cgroup/v1 touches nothing.
    """
    return f"CgroupPlugin={plugin}\nIgnoreSystemd=yes\n"
