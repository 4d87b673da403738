"""Generations: who may publish into a run directory.

One file per generation, taken by link(2), which is atomic on local file systems and NFS alike;
no clocks, no locks. `--array=…%1` is a throttle and not a lock: Slurm starts the next index
while the last one is still in its kill wait, so a new generation first waits (bounded) for the
holder of the last one. What the scheduler says of a holder is passed in as a probe.

Standard library only: the link runner is built on this.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from . import fsio, processes
from .errors import Fenced, RootError
from .rundir import RunDir

LOOK_EVERY_S = 1.0
PROBE_EVERY_S = 30.0
"""A good citizen asks the scheduler about a holder no more often than this."""

_GENERATION = re.compile(r"\d{8,}")


@dataclass(frozen=True)
class Holder:
    """Who took a generation; enough to ask whether it still lives."""

    job: str | None = None
    """The scheduler's id of this array member, such as 812_3."""
    array: str | None = None
    restarts: int = 0
    host: str = ""
    pid: int = 0
    boot: str = ""
    started: float = 0.0
    """The process's start in clock ticks since boot: pids are reused, this pair is not."""

    @classmethod
    def here(cls, *, job: str | None = None, array: str | None = None, restarts: int = 0) -> Holder:
        pid = os.getpid()
        return cls(job, array, restarts, socket.gethostname(), pid, _boot_id(), _ticks(pid) or 0.0)


Probe = Callable[[Holder], "bool | None"]
"""Is this holder alive? None: nobody can tell."""


class Lease:
    """The right to publish as one generation."""

    def __init__(self, rundir: RunDir, generation: int) -> None:
        self.rundir = rundir
        self.generation = generation

    def check(self) -> None:
        """Raise Fenced if a newer generation exists. Every commit looks here first."""
        newest = highest(self.rundir)
        if newest > self.generation:
            raise Fenced(self.generation, newest)

    def release(self) -> None:
        """Say that this generation publishes nothing more, so that the next need not wait."""
        with contextlib.suppress(OSError):  # the next one then asks the scheduler instead
            fsio.write_atomic(_released_file(self.rundir, self.generation), b"")


@dataclass(frozen=True)
class Waiting:
    """How to wait for the holder of the last generation."""

    probe: Probe
    limit_s: float
    """The kill wait and some: after this the holder is overtaken and fenced."""
    sleep: Callable[[float], object] = time.sleep
    """May raise to give up, as the runner does when it is told to stop meanwhile."""
    clock: Callable[[], float] = time.monotonic


def acquire(rundir: RunDir, holder: Holder, waiting: Waiting) -> Lease:
    """Take the next generation once the last one's holder is gone, or the wait is over."""
    end = waiting.clock() + waiting.limit_s
    claim = _write_claim(rundir, holder)
    try:
        while True:
            last = highest(rundir)
            _wait_for_release(rundir, last, waiting, end)
            try:
                taken = _link(claim, rundir.lease / f"{last + 1:08d}")
            except FileNotFoundError:  # swept by somebody who took it for a leftover
                claim = _write_claim(rundir, holder)
                continue
            if taken:
                fsio.sync_directory(rundir.lease)
                return Lease(rundir, last + 1)
    finally:
        with contextlib.suppress(OSError):
            claim.unlink()


def acquire_standalone(rundir: RunDir) -> Lease:
    """The lease of a plain `python train.py`: refuses a root that somebody is using."""

    def refuse(holder: Holder) -> bool:
        _refuse_if_alive(rundir, holder)
        return False

    # The probe is asked again about whoever wins a race for the same generation.
    return acquire(rundir, Holder.here(), Waiting(probe=refuse, limit_s=math.inf))


def _refuse_if_alive(rundir: RunDir, holder: Holder) -> None:
    alive = alive_here(holder)
    if alive:
        raise RootError(
            rundir.root,
            f"in use by process {holder.pid} on this host; stop it first, or choose another root",
        )
    if alive is None and holder.job is not None:
        raise RootError(
            rundir.root,
            f"belongs to a submitted chain; its last link (job {holder.job}) ran on "
            f"{holder.host} and did not report its end. Stop the chain with "
            f"'hpc-ckpt stop {rundir.root}', or choose another root",
        )


# ── reading ───────────────────────────────────────────────────────────────────────────────
def generations(rundir: RunDir) -> list[int]:
    """Every generation ever taken, in order."""
    try:
        names = os.listdir(rundir.lease)  # noqa: PTH208 - names only, no Path per entry
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if _GENERATION.fullmatch(name))


def highest(rundir: RunDir) -> int:
    """The newest generation, or 0."""
    return max(generations(rundir), default=0)


def released(rundir: RunDir, generation: int) -> bool:
    return _released_file(rundir, generation).exists()


def holder_of(rundir: RunDir, generation: int) -> Holder | None:
    """Who took it; None if there is no such generation or its file cannot be understood."""
    try:
        record = json.loads((rundir.lease / f"{generation:08d}").read_bytes())
        known = {name: record[name] for name in asdict(Holder()) if name in record}
        return Holder(**known)
    except (OSError, ValueError, TypeError):
        return None


def taken_at(rundir: RunDir, generation: int) -> float:
    """When its holder asked for it, unix seconds of the file system; 0.0 for no such generation."""
    try:
        return (rundir.lease / f"{generation:08d}").stat().st_mtime
    except OSError:
        return 0.0


def started_at(holder: Holder) -> float:
    """When a holder on this host, in this boot, began; unix seconds."""
    ago = time.clock_gettime(time.CLOCK_BOOTTIME) - holder.started / processes.TICKS
    return time.time() - ago


def alive_here(holder: Holder) -> bool | None:
    """Whether the holder's process lives on this host; None if it ran somewhere else."""
    if holder.host != socket.gethostname():
        return None
    if holder.boot != _boot_id():
        return False
    ticks = _ticks(holder.pid)
    return ticks is not None and ticks == holder.started


# ── taking ────────────────────────────────────────────────────────────────────────────────
def _write_claim(rundir: RunDir, holder: Holder) -> Path:
    claim = rundir.lease / f".claim.tmp-{fsio.unique_suffix()}"
    try:
        fsio.write_atomic(claim, (json.dumps(asdict(holder)) + "\n").encode())
    except OSError as error:
        raise RootError(rundir.root, f"cannot take a lease: {error.strerror}") from error
    return claim


def _wait_for_release(rundir: RunDir, generation: int, waiting: Waiting, end: float) -> None:
    holder = holder_of(rundir, generation)
    next_probe = waiting.clock()
    while holder is not None and not released(rundir, generation):
        now = waiting.clock()
        if now >= end or highest(rundir) > generation:
            return
        if now >= next_probe:
            if waiting.probe(holder) is False:
                return
            next_probe = now + PROBE_EVERY_S
        waiting.sleep(min(LOOK_EVERY_S, max(end - now, 0.01)))


def _link(claim: Path, target: Path) -> bool:
    """True if we own `target` now. NFS may report an error for a link that was made, and repeat
    a request that was carried out: then it exists, and is ours."""
    try:
        os.link(claim, target)
    except FileExistsError:
        return claim.stat().st_nlink == 2
    except OSError:
        if claim.stat().st_nlink != 2:
            raise
    return claim.stat().st_nlink == 2


def _released_file(rundir: RunDir, generation: int) -> Path:
    return rundir.lease / f"{generation:08d}.released"


# ── this machine ──────────────────────────────────────────────────────────────────────────
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _ticks(pid: int) -> float | None:
    """Start time of a living process in clock ticks since boot; None for none or a zombie."""
    stat = processes.stat_of(pid)
    return None if stat is None or stat.ended else float(stat.started)
