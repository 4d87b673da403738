"""Submission of a sweep, and again: one array, each index a chain with its own run directory."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import fsio, lease
from ..errors import RootError, SpecError, Unanswered
from ..rundir import RunDir
from . import setup
from .claim import (
    claimed,
    create,
    put_back,
    refuse_if_held,
    refuse_live_jobs,
    unanswered,
)
from .command import check_command
from .directives import dependency_of
from .layers import Loaded
from .members import command_of, member_name
from .plan import Plan
from .profile import Backend
from .render import render
from .runs import remember
from .submit import (
    SCRIPT_NAME,
    Pinned,
    check_live,
    pin,
    sbatch,
    take_up_again,
    uninterrupted,
    write_chain,
)
from .sweep import SWEEP_FILE, SweepMember, arrays_of, members, own_jobs, read_sweep

Wanted = tuple[int, str, dict[str, str]]
"""Index, name and values of one member."""


def submit_sweep(loaded: Loaded, plan: Plan, *, environ: Mapping[str, str]) -> str:
    """The id of the array. Members that are complete are left alone, the others go on."""
    if plan.backend is not Backend.SLURM:
        raise SpecError("members: a sweep needs a Slurm; run one member with 'hpc-ckpt run'")
    wanted: list[Wanted] = [
        (place + 1, name, dict(loaded.spec.members[place]))
        for place, name in enumerate(plan.members)
    ]
    _check(loaded, plan, wanted, environ)
    script = render(plan, python=sys.executable)
    logs = _make_root(plan)
    with uninterrupted(), claimed(logs):
        refuse_if_at_work(plan.root)
        left = [one for one in wanted if RunDir(plan.root / one[1]).done() is None]
        if not left:
            raise RootError(plan.root, "every member is complete; choose another root")
        job = _submit(loaded, plan, wanted, left, script)
    remember(plan.root, plan.name, environ)
    return job


def refuse_if_at_work(root: Path, chosen: Sequence[SweepMember] | None = None) -> None:
    """All of a sweep, or some members: each has jobs of its own once it has submitted itself."""
    arrays = arrays_of(root)
    indices = None if chosen is None else [member.index for member in chosen]
    if chosen is None:
        chosen = [member for member in members(root) if member.rundir.done() is None]
        submitted = arrays
    else:
        submitted = [f"{array}_{member.index}" for array in arrays for member in chosen]
    own = (job for member in chosen for job in own_jobs(member, arrays))
    unknown = refuse_live_jobs(root, [*submitted, *own], root / SCRIPT_NAME, indices)
    record = read_sweep(root)
    if unknown and record is not None:
        _write(root, {**record, "jobs": [*arrays, *unknown]})  # what is known can be stopped
    if unknown:
        raise RootError(root, unanswered(root, unknown))
    refuse_if_held([member.rundir for member in chosen])


def resume_members(root: Path, names: Collection[str] | None = None) -> tuple[str, list[str]]:
    """Members of a stopped sweep again, as they were submitted: the array's id, and their names.

    All that are not complete, or those that are named. No spec is needed: the script is there.
    """
    record, script = read_sweep(root), root / SCRIPT_NAME
    if record is None or not script.is_file():
        raise RootError(root, "no submitted sweep there; submit one with a spec")
    with uninterrupted(), claimed(root / "logs"):
        chosen = [m for m in members(root) if names is None or m.name in names]
        left = [member for member in chosen if member.rundir.done() is None]
        if not left:
            raise RootError(root, "the work is complete; there is nothing to take up")
        refuse_if_at_work(root, None if names is None else left)
        files = [file for m in left for file in (m.rundir.chain_file, m.rundir.halt_file)]
        with put_back([*files, root / SWEEP_FILE], []):
            setup.forget(root / "logs")
            for member in left:
                take_up_again(member.rundir)
            indices = [member.index for member in left]
            options = _waits_no_more(script, members(root))
            job = _sbatch(script, indices, record.get("parallel"), *options)
            if isinstance(job, str):
                _write(root, {**record, "jobs": [*arrays_of(root), job]})
    if isinstance(job, Unanswered):
        raise job
    return job, [member.name for member in left]


def _sbatch(script: Path, indices: list[int], throttle: object, *options: str) -> str | Unanswered:
    """An answer that is lost is no failure yet: the array may exist, and needs its files."""
    array = f"--array={_indices(indices, throttle)}"
    try:
        return sbatch(script, array, *options, indices=indices)  # none of them lives, as was asked
    except Unanswered as lost:
        return lost


def _waits_no_more(script: Path, every: Iterable[SweepMember]) -> list[str]:
    """What the array had to wait for is over once a member has begun; the script still says it."""
    lines = script.read_text(encoding="utf-8", errors="replace").splitlines()
    asked = dependency_of(line for line in lines if line.startswith("#SBATCH"))
    begun = asked is not None and any(lease.highest(member.rundir) for member in every)
    return ["--dependency="] if begun else []


def _make_root(plan: Plan) -> Path:
    """The sweep's own directory, for the user alone or for the group; its logs, for Slurm."""
    plan.root.parent.mkdir(parents=True, exist_ok=True)
    for place in (plan.root, plan.root / "logs"):
        if not place.exists():
            place.mkdir(mode=fsio.PRIVATE_DIRECTORY)
            place.chmod(fsio.GROUP_DIRECTORY if plan.group else fsio.PRIVATE_DIRECTORY)
    return plan.root / "logs"


def _check(loaded: Loaded, plan: Plan, wanted: list[Wanted], environ: Mapping[str, str]) -> None:
    if RunDir(plan.root).chain_file.exists():
        raise RootError(plan.root, "has a chain of its own; choose another root for the sweep")
    if read_sweep(plan.root) is not None:
        names = [member.name for member in members(plan.root)]
        if names != list(plan.members):
            raise RootError(plan.root, "is a sweep with other members; choose another root")
    check_command(_member_loaded(loaded, wanted[0][2]).spec, plan, environ)
    check_live(loaded, plan)


def _submit(
    loaded: Loaded, plan: Plan, wanted: list[Wanted], left: list[Wanted], script: str
) -> str:
    """All members are made, then the array is submitted; if that fails all are as before."""
    path, before = plan.root / SCRIPT_NAME, arrays_of(plan.root)
    pinned = pin(loaded, plan, plan.root)
    made = [place for one in left for place in create(RunDir(plan.root / one[1]), group=plan.group)]
    rundirs = [RunDir(plan.root / one[1]) for one in left]
    changed = [file for place in rundirs for file in (place.chain_file, place.halt_file)]
    with put_back([*changed, plan.root / SWEEP_FILE, path], made):
        for one, rundir in zip(left, rundirs, strict=True):
            _write_member(loaded, plan, one, rundir, pinned)
        fsio.write_atomic(path, os.fsencode(script))
        setup.forget(plan.root / "logs")
        _write(plan.root, _record(plan, wanted, before))
        throttle = (plan.array or "").partition("%")[2]
        job = _sbatch(path, [one[0] for one in left], throttle)
        if isinstance(job, str):
            _write(plan.root, _record(plan, wanted, [*before, job]))
    if isinstance(job, Unanswered):
        raise job
    return job


def _write_member(loaded: Loaded, plan: Plan, one: Wanted, rundir: RunDir, pinned: Pinned) -> None:
    index, name, values = one
    mine = replace(plan, root=rundir.root, name=f"{plan.name}-{name}"[:64])
    told = {
        "name": mine.name,
        "sweep": str(plan.root),
        "member": {"index": index, "name": name, "values": values},
    }
    write_chain(rundir, _member_loaded(loaded, values), mine, pinned, told)


def _member_loaded(loaded: Loaded, values: Mapping[str, str]) -> Loaded:
    """The spec with this member's command and root."""
    spec = loaded.spec
    update = {
        "command": command_of(spec.command, values),
        "root": str(Path(spec.root) / member_name(values)),
        "members": (),
    }
    return replace(loaded, spec=spec.model_copy(update=update))


def _indices(wanted: list[int], throttle: object) -> str:
    """As Slurm writes them; `throttle` is how many may run at once."""
    ranges: list[list[int]] = []
    for index in wanted:
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    text = ",".join(f"{a}-{b}" if a < b else str(a) for a, b in ranges)
    return f"{text}%{throttle}" if throttle else text


def _record(plan: Plan, wanted: list[Wanted], jobs: list[str]) -> dict[str, Any]:
    throttle = (plan.array or "").partition("%")[2]
    return {
        "format_version": 1,
        "name": plan.name,
        "parallel": int(throttle) if throttle else None,
        "jobs": jobs,
        "members": [{"name": name, "values": values} for _, name, values in wanted],
    }


def _write(root: Path, record: Mapping[str, Any]) -> None:
    fsio.write_atomic(root / SWEEP_FILE, (json.dumps(record, indent=1) + "\n").encode())
