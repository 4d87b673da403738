"""The set-up of a link in its batch script: modules, prologue, environments. Where it failed, where
it worked, and whether another node may do better.

One broken node must not end a chain, nor all chains of a sweep, which meet it one after the
other because it is always free. In the logs of the chain, or of its sweep, one node a line:

    setup-worked            where it worked
    setup-bad-nodes         where it failed, while others may do: no further link goes there
    setup-failed[-INDEX]    where the last tries of this chain failed, one after the other
    setup-failed-no-runner[-INDEX]   where not even the runner could start: the batch script writes
                            it, a line for each try
    no-runner-nodes         the nodes of these tries, while others may do; not failures of a set-up

Standard library only: the link runner asks it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from ..errors import SchedulerError, SpecError
from ..rundir import RunDir
from ..units import expand_nodes
from . import slurm
from .allocation import SlurmBackend
from .backend import Backend, Succession
from .orders import Orders
from .past import hosts_excluded
from .patience import ToldToStop, sleep_unless_told
from .sweep import arrays_of

log = logging.getLogger("hpc_ckpt.link")

TRIES = 2
"""Running, where it has worked nowhere: then it is the set-up and no node. On the one node where it
has worked, too: others are no way out then."""
TRIES_WHERE_IT_WORKS = 5
PAUSE_S = 60.0
"""Storage of modules that is away for some seconds would otherwise use up all tries at once."""
WORKED, BAD, FAILED = "setup-worked", "setup-bad-nodes", "setup-failed"
NO_RUNNER = f"{FAILED}-no-runner"
WITHOUT_RUNNER = "no-runner-nodes"


def started(orders: Orders) -> None:
    """The runner is there: nodes on which it is not are counted anew."""
    with contextlib.suppress(OSError):
        _own_file(orders, NO_RUNNER).unlink(missing_ok=True)
        without = orders.batch_logs / WITHOUT_RUNNER
        if len(set(_nodes(without))) > 1:  # it was the environment and not the nodes
            without.unlink(missing_ok=True)


def worked(orders: Orders, node: str | None) -> None:
    """The environment is made: what failed before was elsewhere."""
    with contextlib.suppress(OSError):  # nothing but this knowledge is lost
        _failed_file(orders).unlink(missing_ok=True)
        _add(orders.batch_logs / WORKED, node)


def gives_up(orders: Orders, backend: Backend) -> bool:
    """Whether a failure here, the newest one, leaves no hope for another node."""
    with contextlib.suppress(OSError):
        _add(_failed_file(orders), backend.node or "?", again=True)
    tries = _nodes(_failed_file(orders))
    worked_on = set(_nodes(orders.batch_logs / WORKED))
    if len(tries) >= TRIES_WHERE_IT_WORKS:
        return True
    if worked_on - {backend.node}:
        return False
    if worked_on:  # here: what failed elsewhere says nothing of this node
        return tries[-TRIES:] == [backend.node] * TRIES
    # Members of a sweep share what they have seen: two nodes are enough for all of them.
    failed = {*_nodes(orders.batch_logs / BAD), backend.node}
    return len(tries) >= TRIES or len(failed) >= TRIES


def avoid_node(rundir: RunDir, orders: Orders, backend: Backend, succession: Succession) -> None:
    """No further link goes to this node, nor one of another member, if there are others like it."""
    node, logs = backend.node, orders.batch_logs
    if node is None or _asked_by_name(backend):
        return
    bad = bad_nodes(orders)
    hosts = list(dict.fromkeys([*orders.exclude, *hosts_excluded(rundir), *bad, node]))
    if not {*_nodes(logs / WORKED), *backend.like(node)} - one_by_one(hosts):
        return  # a job that may run nowhere would wait for ever
    with contextlib.suppress(OSError):
        _add(logs / BAD, node)
    log.warning("no link is set up on %s any more; others may do", node)
    if orders.member is not None and isinstance(backend, SlurmBackend) and node not in bad:
        _tell_sweep(rundir, backend, [*orders.exclude, *bad, node])
    succession.avoid(hosts)


def told_in_pause() -> bool:
    """Waits before the next try. True: the link was told to stop meanwhile."""
    try:
        sleep_unless_told(PAUSE_S)
    except ToldToStop:
        return True
    return False


def bad_nodes(orders: Orders) -> list[str]:
    """To which no further link goes: the set-up failed there, or the runner could not start."""
    logs = orders.batch_logs
    return list(dict.fromkeys([*_nodes(logs / BAD), *_nodes(logs / WITHOUT_RUNNER)]))


def forget(logs: Path) -> None:
    """A new submission gives every node another chance."""
    for path in (logs / WORKED, logs / BAD, logs / WITHOUT_RUNNER, *logs.glob(f"{FAILED}*")):
        path.unlink(missing_ok=True)


def _asked_by_name(backend: Backend) -> bool:
    """Then others of the partition are none of this job's."""
    record = backend.record() if isinstance(backend, SlurmBackend) else None
    asked = ((record or {}).get(field) for field in ("ReqNodeList", "Reservation"))
    return any(value not in (None, "", "(null)") for value in asked)


def one_by_one(hosts: list[str]) -> set[str]:
    """Some may be lists in Slurm's short form, n[1-3]."""
    found: set[str] = set()
    for host in hosts:
        try:
            found.update(expand_nodes(host))
        except SpecError:
            found.add(host)
    return found


def _tell_sweep(rundir: RunDir, backend: SlurmBackend, hosts: list[str]) -> None:
    """One call for all members that have not begun; Slurm refuses it for those that have."""
    sweep = (rundir.chain() or {}).get("sweep")
    newest = arrays_of(sweep)[-1:] if sweep else []
    for array in dict.fromkeys([*newest, *([backend.array] if backend.array else [])]):
        try:
            slurm.update_job(array, backend.run, ExcNodeList=",".join(hosts))
        except SchedulerError as error:
            log.info("not every member was told: %s", " ".join(error.stderr.split())[:200])


def _failed_file(orders: Orders) -> Path:
    return _own_file(orders, FAILED)


def _own_file(orders: Orders, name: str) -> Path:
    own = "" if orders.member is None else f"-{orders.member.index}"
    return orders.batch_logs / f"{name}{own}"


def _nodes(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return []


def _add(path: Path, node: str | None, *, again: bool = False) -> None:
    if node is not None and (again or node not in _nodes(path)):
        with path.open("a", encoding="utf-8") as stream:
            stream.write(f"{node}\n")
