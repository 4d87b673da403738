"""Which processes and cgroups of this machine belong to a devcluster, and how they are ended.

Processes are found in /proc by the paths of the cluster they carry, never by name alone: another
Slurm on the machine, or a shell that merely has SLURM_CONF set, is left in peace.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from devcluster_conf import DevClusterError, Layout

PROC = Path("/proc")
CGROUP_ROOT = Path("/sys/fs/cgroup")
POLL_S = 0.02
# slurmscriptd is slurmctld's helper; srun and sbatch --wait would ask a dead controller for ever.
# Not salloc: the shell of a person runs in it.
CONTROLLER_SIDE = ("slurmscriptd", "srun", "sbatch")


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A live process as /proc showed it; a zombie is not one."""

    pid: int
    parent: int
    name: str
    argv: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A process that belongs to the cluster; node is None for the controller's side."""

    pid: int
    name: str
    node: str | None


def scan() -> dict[int, Process]:
    """Return every live process of the machine by pid."""
    found = (_read_process(int(entry.name)) for entry in PROC.iterdir() if entry.name.isdigit())
    return {process.pid: process for process in found if process is not None}


def _read_process(pid: int) -> Process | None:
    try:
        stat = (PROC / str(pid) / "stat").read_text(errors="replace")
        cmdline = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:  # it ended while we looked
        return None
    # The name is in parentheses and may itself contain some.
    name = stat[stat.index("(") + 1 : stat.rindex(")")]
    state, parent = stat[stat.rindex(")") + 2 :].split()[:2]
    # Daemons are children of pid 1, and in a container that reaps late or never.
    if state in "ZX":
        return None
    argv = cmdline.decode(errors="surrogateescape").rstrip("\0").split("\0")
    return Process(pid=pid, parent=int(parent), name=name, argv=argv)


def _environ(pid: int) -> dict[str, str]:
    try:
        raw = (PROC / str(pid) / "environ").read_bytes()
    except OSError:  # ended, or of another user
        return {}
    pairs = (item.partition("=") for item in raw.decode(errors="surrogateescape").split("\0"))
    return {key: value for key, _, value in pairs}


def _open_files(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for entry in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                yield str(entry.readlink())


def members(layout: Layout) -> list[Member]:
    """Return every process of the cluster: daemons, job steps, and what the jobs started.

    This process and its ancestors are never among them, so a job may stop its own cluster.
    """
    processes = scan()
    nodes: dict[int, str | None] = {}
    for process in processes.values():
        with contextlib.suppress(LookupError):
            nodes[process.pid] = _node_of(process, layout)
    nodes.update(_cgroup_pids(_own_nodes(layout, processes)))
    _add_descendants(nodes, processes)
    spared = _self_and_ancestors(processes)
    return [
        Member(pid=pid, name=processes[pid].name, node=node)
        for pid, node in sorted(nodes.items())
        if pid in processes and pid not in spared
    ]


def _node_of(process: Process, layout: Layout) -> str | None:
    """Return the node a process belongs to, None for the controller's side; LookupError if alien.

    slurmstepd writes its title over its environment, so it is known by the log it keeps open.
    A job is known by SLURMD_NODENAME as well: a shell that only looks at the cluster has no node.
    """
    conf = str(layout.conf)
    if process.name == "munged" and f"--socket={layout.munge_socket}" in process.argv:
        return None
    if process.name == "slurmctld" and conf in process.argv:
        return None
    if process.name == "slurmd" and conf in process.argv and "-N" in process.argv:
        return process.argv[process.argv.index("-N") + 1]
    if process.name == "mariadbd" and f"--datadir={layout.database}" in process.argv:
        return None
    if process.name == "slurmdbd" and str(layout.dbd_log.resolve()) in _open_files(process.pid):
        return None
    if process.name == "slurmstepd":
        logs = {str(layout.slurmd_log(node).resolve()): node for node in layout.nodes}
        for path in _open_files(process.pid):
            if path in logs:
                return logs[path]
    environ = _environ(process.pid)
    if environ.get("SLURM_CONF") != conf:
        raise LookupError(process.pid)
    if environ.get("SLURMD_NODENAME") in layout.nodes:
        return environ["SLURMD_NODENAME"]
    if process.name in CONTROLLER_SIDE:
        return None
    raise LookupError(process.pid)


def own_nodes(layout: Layout) -> list[str]:
    """Return the nodes whose cgroups are this cluster's: all of them, or none.

    The names follow from the port alone. Once a cluster is gone, another may have got its port, and
    an old record must not lead to the jobs of that one.
    """
    return _own_nodes(layout, scan())


def _own_nodes(layout: Layout, processes: dict[int, Process]) -> list[str]:
    conf, names = str(layout.conf), set(layout.nodes)
    others = (p.argv for p in processes.values() if p.name == "slurmd" and conf not in p.argv)
    return [] if any(names.intersection(argv) for argv in others) else layout.nodes


def _add_descendants(nodes: dict[int, str | None], processes: dict[int, Process]) -> None:
    """A program started with an empty environment is still the child of one that is known."""
    grown = True
    while grown:
        new = {
            process.pid: nodes[process.parent]
            for process in processes.values()
            if process.pid not in nodes and process.parent in nodes
        }
        nodes.update(new)
        grown = bool(new)


def _self_and_ancestors(processes: dict[int, Process]) -> set[int]:
    pid, spared = os.getpid(), set[int]()
    while pid in processes and pid not in spared:
        spared.add(pid)
        pid = processes[pid].parent
    return spared


def kill(find: Callable[[], list[Member]], *, within_s: float = 10.0) -> None:
    """SIGKILL what find returns until it returns nothing: a job may fork while we end it."""
    deadline = time.monotonic() + within_s
    while found := find():
        for member in found:
            _kill_one(member)
        if time.monotonic() > deadline:
            left = ", ".join(f"{member.pid} ({member.name})" for member in found)
            raise DevClusterError(f"still alive {within_s:.0f} s after SIGKILL: {left}")
        time.sleep(POLL_S)


def _kill_one(member: Member) -> None:
    try:
        os.kill(member.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise DevClusterError(
            f"process {member.pid} ({member.name}) belongs to another user: "
            "stop the cluster as the user who started it, or as root"
        ) from error


def usable_cgroup_plugin() -> str | None:
    """Return the Slurm plugin for a cgroup tree we may write to; None if there is none.

    It can still fail in Slurm's hands (nested containers): a start with it has to run a job.
    """
    for plugin, place in (("cgroup/v1", CGROUP_ROOT / "freezer"), ("cgroup/v2", CGROUP_ROOT)):
        kind = "cgroup" if plugin == "cgroup/v1" else "cgroup2"
        if _is_mounted(place, kind) and _can_make_cgroup(place):
            return plugin
    return None


def _is_mounted(place: Path, kind: str) -> bool:
    lines = (PROC / "self" / "mounts").read_text(errors="replace").splitlines()
    return any(line.split()[1:3] == [str(place), kind] for line in lines)


def _can_make_cgroup(place: Path) -> bool:
    probe = place / f"devcluster_probe_{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def _cgroups(nodes: list[str]) -> Iterator[tuple[str, Path]]:
    """Yield (node, cgroup) for every cgroup Slurm made for these nodes, the deepest first."""
    for node in nodes:
        tops = [
            *CGROUP_ROOT.glob(f"*/slurm_{node}"),
            *CGROUP_ROOT.glob(f"system.slice/{node}_slurmstepd.scope"),
        ]
        for top in tops:
            for place, _, _ in os.walk(top, topdown=False):
                yield node, Path(place)


def _cgroup_pids(nodes: list[str]) -> dict[int, str | None]:
    pids: dict[int, str | None] = {}
    for node, place in _cgroups(nodes):
        with contextlib.suppress(OSError, ValueError):
            pids.update({int(pid): node for pid in (place / "cgroup.procs").read_text().split()})
    return pids


def thaw_cgroups(nodes: list[str]) -> None:
    """Let frozen jobs run again: not even SIGKILL ends a process of a frozen v1 cgroup."""
    for _, place in _cgroups(nodes):
        for name, word in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
            with contextlib.suppress(OSError):
                if (place / name).exists():
                    (place / name).write_text(word)


def remove_cgroups(nodes: list[str], *, within_s: float = 5.0) -> None:
    """Remove the cgroups of nodes whose processes have ended."""
    deadline = time.monotonic() + within_s
    while left := list(_cgroups(nodes)):
        for _, place in left:
            with contextlib.suppress(OSError):
                place.rmdir()
        # The kernel lets go of a cgroup a moment after its last process.
        if time.monotonic() > deadline:
            names = ", ".join(str(place) for _, place in left)
            raise DevClusterError(f"cannot remove cgroups: {names}")
        time.sleep(POLL_S)
