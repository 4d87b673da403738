"""A sweep on disk: one array, each of whose indices is a chain with a run directory of its own.

    ROOT/sweep.json        the members in order of their indices, and the jobs
    ROOT/chain.sbatch      the one script
    ROOT/<member>/         a run directory as any other; its chain.json names the sweep

Standard library only: the link runner finds its member here.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import lease
from ..errors import RootError, SpecError
from ..rundir import RunDir
from .ledger import State, is_gone, may_be_over
from .past import jobs_beside_sweep
from .patience import why_unread

SWEEP_FILE = "sweep.json"


@dataclass(frozen=True, eq=False)
class SweepMember:
    index: int
    name: str
    values: dict[str, str]
    rundir: RunDir


@dataclass(frozen=True)
class MemberStatus:
    """One row of a sweep's table, read from names alone: a sweep has a thousand of them."""

    index: int
    name: str
    state: str
    step: int
    links: int
    reason: str


@dataclass(frozen=True)
class SweepStatus:
    root: str
    name: str
    members: tuple[MemberStatus, ...]
    jobs: tuple[str, ...]
    remark: str = ""
    """What its user should know now."""
    waiting: dict[str, int] = field(default_factory=dict)
    """How many of its jobs are pending for which reason, where the scheduler was asked."""

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(member.state for member in self.members))


def is_sweep(root: str | os.PathLike[str]) -> bool:
    return Path(root, SWEEP_FILE).exists()


def read_sweep(root: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What sweep.json says; None where there is no sweep."""
    path = Path(root) / SWEEP_FILE
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        cause = error if isinstance(error, OSError) else None
        raise RootError(Path(root), f"its {SWEEP_FILE} cannot be read: {error}") from cause
    if not isinstance(record, dict) or not isinstance(record.get("members"), list):
        raise RootError(Path(root), f"its {SWEEP_FILE} is not a sweep's")
    return record


def members(root: str | os.PathLike[str]) -> Iterator[SweepMember]:
    record = read_sweep(root) or {}
    for place, member in enumerate(record.get("members") or ()):
        name = str(member["name"])
        values = {str(key): str(value) for key, value in member["values"].items()}
        yield SweepMember(place + 1, name, values, RunDir(Path(root) / name))


def member_root(root: Path, index: int) -> Path:
    """The run directory of the member with that array index."""
    found = [member.rundir.root for member in members(root) if member.index == index]
    if not found:
        message = f"{root / SWEEP_FILE}: no member {index}; submit the sweep again"
        raise SpecError(message) from why_unread(root / SWEEP_FILE)
    return found[0]


def all_over(rundir: RunDir) -> bool:
    """Whether nothing more will run: of this chain, or of the sweep it belongs to."""
    sweep = (rundir.chain() or {}).get("sweep")
    return not sweep or all(may_be_over(member.rundir) for member in members(sweep))


def arrays_of(root: str | os.PathLike[str]) -> list[str]:
    """The arrays that were submitted for it, oldest first."""
    return [str(job) for job in (read_sweep(root) or {}).get("jobs") or ()]


def own_jobs(member: SweepMember, arrays: Sequence[str]) -> list[str]:
    """What a member submitted by itself, and the job that holds it: not its indices in `arrays`."""
    rundir, indices = member.rundir, {f"{array}_{member.index}" for array in arrays}
    last = lease.highest(rundir)
    if not last:
        return []
    holder = None if lease.released(rundir, last) else lease.holder_of(rundir, last)
    held = [holder.job] if holder is not None and holder.job is not None else []
    return [job for job in dict.fromkeys([*jobs_beside_sweep(rundir), *held]) if job not in indices]


def running_link(rundir: RunDir, now: float | None = None) -> int | None:
    """The link that holds it, as far as files can tell."""
    last = lease.highest(rundir)
    if not last or lease.released(rundir, last):
        return None
    return None if is_gone(rundir, last, time.time() if now is None else now) else last


def sweep_status(root: str | os.PathLike[str], now: float | None = None) -> SweepStatus:
    record = read_sweep(root)
    if record is None:
        raise RootError(Path(root), "no sweep there; give the root of a sweep")
    return SweepStatus(
        root=str(root),
        name=str(record.get("name") or Path(root).name),
        members=tuple(_member_status(member, now) for member in members(root)),
        jobs=tuple(str(job) for job in record.get("jobs") or ()),
    )


def _member_status(member: SweepMember, now: float | None) -> MemberStatus:
    rundir = member.rundir
    links = lease.highest(rundir)
    newest = rundir.newest()
    state, reason = _state(rundir, links, now)
    return MemberStatus(
        index=member.index,
        name=member.name,
        state=state.value,
        step=0 if newest is None else newest.step,
        links=links,
        reason=reason,
    )


def _state(rundir: RunDir, links: int, now: float | None) -> tuple[State, str]:
    if rundir.done() is not None:
        return State.COMPLETE, ""
    if running_link(rundir, now) is not None:
        return State.RUNNING, ""
    halted = rundir.halted()
    if halted is not None:
        return State.STOPPED, halted
    return (State.BETWEEN if links else State.NEW), ""
