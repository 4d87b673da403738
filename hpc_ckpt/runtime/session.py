"""Entering: where this process works, as which generation, and what it was told.

Reads the environment of a link, or takes a lease of its own for a plain `python train.py`. It
loads no state and starts no thread.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .. import events, fsio, lease, preflight, rundir
from ..engine.underway import STUCK_S
from ..errors import LinkEnded, RootError, SpecError, UserError
from ..events import Event, EventLog
from ..lease import Lease
from ..making import prepare
from ..rundir import RunDir
from ..settings import Settings, resolve
from ..tiers.stack import Stack, open_stack
from .lookout import Places

log = logging.getLogger("hpc_ckpt")

HEARTBEAT_S = 1.0
HEARTBEAT_SLURM_S = 30.0
"""On a cluster many chains share one file system."""
TELLING_S = 1.0
"""An event log that hangs holds up no save, and no step, for longer."""

_here: set[Path] = set()
"""Roots in use by this process: its own lease would not tell a second user apart."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """One process's stay in a run directory."""

    rundir: RunDir
    chain: str
    settings: Settings
    stack: Stack
    lease: Lease
    standalone: bool
    """This process took the lease itself, and gives it back."""
    places: Places
    outcome_file: Path
    events: EventLog
    heartbeat_s: float

    @property
    def generation(self) -> int:
        return self.lease.generation

    def close(self) -> None:
        """Nothing is published after this."""
        self.events.close()
        if self.standalone:
            self.lease.release()
        self.lease.leave()
        _here.discard(self.rundir.root)


def enter(
    root: str | os.PathLike[str] | None,
    *,
    call: Mapping[str, Any],
    settings: str | os.PathLike[str] | Mapping[str, Any] | None,
    environ: Mapping[str, str],
) -> Session:
    """Take up the run directory; raises UserError and leaves nothing half-made."""
    _refuse_several_ranks(environ)
    in_link = rundir.ENV_GENERATION in environ
    if not in_link and rundir.ENV_STEWARD in environ:
        _speak_up(Path(environ[rundir.ENV_STEWARD]))
    place = RunDir(_choose_root(root, environ, in_link=in_link))
    resolved = resolve(
        call=call, file=environ.get(rundir.ENV_SETTINGS) or settings, environ=environ
    )
    for note in resolved.notes:
        log.info("%s", note)
    if place.root in _here:
        raise RootError(place.root, "already in use by another Checkpointer of this process")
    halted = None if in_link else place.halted()
    if halted is not None:
        raise RootError(place.root, f"halted ({halted}); delete {place.halt_file} to go on")
    chain = prepare(place)
    stack = open_stack(
        resolved.tiers,
        rundir=place,
        chain=chain,
        goes_with_the_job=partial(_goes_with_the_job, environ=environ),
    )
    held = lease.join(place, _generation(environ)) if in_link else lease.acquire_standalone(place)
    _here.add(place.root)
    for directory in (place.root, place.control, place.lease):
        fsio.sweep_temporaries(directory)
    return _session(place, chain, resolved, stack, held, environ if in_link else {})


def _goes_with_the_job(path: Path, *, environ: Mapping[str, str]) -> bool:
    """Another job may be on another node, or have another directory there. A chain of links on
    one machine stays where it is, even if that is inside of a job."""
    in_job = "SLURM_JOB_ID" in environ and environ.get(rundir.ENV_BACKEND) != "local"
    return in_job and preflight.on_this_node(path)


def _session(
    place: RunDir,
    chain: str,
    settings: Settings,
    stack: Stack,
    held: Lease,
    link: Mapping[str, str],
) -> Session:
    generation = held.generation
    slurm = link.get(rundir.ENV_BACKEND) == "slurm"
    return Session(
        rundir=place,
        chain=chain,
        settings=settings,
        stack=stack,
        lease=held,
        standalone=not link,
        places=Places(
            place,
            Path(link.get(rundir.ENV_NOTICE) or place.notice_file(generation)),
            Path(link.get(rundir.ENV_DEADLINE) or place.deadline_file(generation)),
        ),
        outcome_file=Path(link.get(rundir.ENV_OUTCOME) or place.outcome_file(generation)),
        events=EventLog(place.events_file(generation, _node(link)), patience_s=TELLING_S),
        heartbeat_s=HEARTBEAT_SLURM_S if slurm else HEARTBEAT_S,
    )


def _choose_root(
    root: str | os.PathLike[str] | None, environ: Mapping[str, str], *, in_link: bool
) -> str | os.PathLike[str]:
    given = environ.get(rundir.ENV_ROOT)
    if root is None:
        if given:
            return given
        chained = rundir.ENV_NOTICE in environ and not in_link
        raise SpecError(
            f"no run directory: pass Checkpointer(root, …) or set ${rundir.ENV_ROOT}"
            + ("; in a chain that saves the program from outside: level: model" if chained else "")
        )
    if not in_link or not given:
        return root
    if RunDir(root).root != RunDir(given).root:
        log.info("the chain's run directory %s is used instead of %s", given, root)
    return given


def _speak_up(told: Path) -> None:
    """A level was to save this program from outside; brought back by it, this process would take
    itself for a link that is long over."""
    try:
        told.touch()
    except OSError as error:
        detail = f"cannot be written ({error.strerror}); write level: model in the spec"
        raise RootError(told, detail) from error
    log.warning(
        "the program has a Checkpointer, which no file of the command shows: the chain starts it "
        "again and lets it save for itself, as with level: model"
    )
    raise LinkEnded("started again at level model")


def _refuse_several_ranks(environ: Mapping[str, str]) -> None:
    """Each of several ranks would publish its own state as the whole, and lose the others'."""
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        count = environ.get(name, "1")
        if count.isdecimal() and int(count) > 1:
            raise UserError(
                f"{name}={count}: programs of several processes are not available in this "
                "version; run one process"
            )


def _generation(environ: Mapping[str, str]) -> int:
    text = environ[rundir.ENV_GENERATION]
    if not text.isdecimal():
        raise SpecError(f"environment variable {rundir.ENV_GENERATION}: {text!r} is not a number")
    return int(text)


def _node(link: Mapping[str, str]) -> str:
    name = link.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    return re.sub(r"[^A-Za-z0-9._-]", "_", name) or "node"


# ── the run directory ─────────────────────────────────────────────────────────────────────
def known_save_s(place: RunDir, generation: int) -> float | None:
    """The slowest save of the newest earlier generation that committed one; of those that seemed
    to hang, which have no full_s, only where no other is on record."""
    files: dict[int, list[Path]] = {}
    for path in place.events.glob("*.jsonl"):
        number = path.name.partition("-")[0]
        if number.isdecimal() and int(number) < generation:
            files.setdefault(int(number), []).append(path)
    # A paced save takes longer than one that has to be done in time.
    for said in ("full_s", "save_s"):
        for earlier in sorted(files, reverse=True):
            slowest = _slowest_save(files[earlier], said)
            if slowest is not None:
                return slowest if said == "full_s" else min(slowest, STUCK_S)
    return None


def _slowest_save(paths: list[Path], said: str) -> float | None:
    records = (record for path in paths for record in events.read(path))
    committed = (r for r in records if r["event"] == Event.COMMITTED.value)
    seconds = [r.get(said, r.get("save_s")) for r in committed]
    return max((float(s) for s in seconds if isinstance(s, (int, float))), default=None)
