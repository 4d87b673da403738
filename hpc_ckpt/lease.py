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
import errno
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import fsio, ownership, processes
from .errors import Fenced, RootError
from .rundir import CheckpointKey, RunDir

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
    file: Path | None = field(default=None, compare=False, repr=False)
    """Where it was read: that is no part of who it is, and tells by whom it was written."""

    @property
    def is_foreign(self) -> bool:
        """Of another user, whose jobs and processes may be hidden from this one."""
        return self.file is not None and ownership.is_of_another(self.file)

    def record(self) -> dict[str, Any]:
        """For a file."""
        return {name: value for name, value in vars(self).items() if name != "file"}

    @classmethod
    def here(cls, *, job: str | None = None, array: str | None = None, restarts: int = 0) -> Holder:
        pid = os.getpid()
        return cls(job, array, restarts, socket.gethostname(), pid, _boot_id(), _ticks(pid) or 0.0)


Probe = Callable[[Holder], "bool | None"]
"""Is this holder alive? None: nobody can tell."""


class Lease:
    """The right to publish as one generation."""

    def __init__(self, rundir: RunDir, generation: int, seat: Path | None = None) -> None:
        self.rundir = rundir
        self.generation = generation
        self._seat = seat
        self._place = _identity(rundir.lease)

    def check(self) -> None:
        """Raise Fenced if a newer generation exists. Every commit looks here first.

        OSError where this generation is not there either, as in a run directory that is unmounted:
        nobody can tell then, and what is written to the bare place would be hidden. A file that a
        purge of old ones took out of the same directory is not missed.
        """
        taken = generations(self.rundir)
        newest = max(taken, default=0)
        if newest > self.generation:
            raise Fenced(self.generation, newest)
        if self.generation not in taken and _identity(self.rundir.lease) != self._place:
            gone = file_of(self.rundir, self.generation)
            raise FileNotFoundError(errno.ENOENT, "the lease is not there any more", str(gone))

    def release(self, *, program_left: bool = False) -> None:
        """Say that this generation publishes nothing more, so that the next need not wait.

        `program_left`: what it started may live all the same; whoever must be alone waits for that.
        """
        with contextlib.suppress(OSError):  # the next one then asks the scheduler instead
            if program_left and not released(self.rundir, self.generation):
                fsio.write_atomic(_left_file(self.rundir, self.generation), b"")
            fsio.write_atomic(_released_file(self.rundir, self.generation), b"")

    def leave(self) -> None:
        """What join() took: another program of this link may have it."""
        if self._seat is not None:
            with contextlib.suppress(OSError):  # the next one sees that its process is gone
                self._seat.unlink()


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
            last = max(highest(rundir), _saved(rundir))
            _wait_for_release(rundir, last, waiting, end)
            try:
                taken = _link(claim, file_of(rundir, last + 1))
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


def join(rundir: RunDir, generation: int) -> Lease:
    """The lease of a program inside a link, one program at a time: two would publish as one
    generation, and each restore what the other has saved."""
    while True:
        last = max(_seats(rundir, generation), default=0)
        _refuse_if_seated(rundir, _seat_file(rundir, generation, last))
        seat = _seat_file(rundir, generation, last + 1)
        try:
            if not _linked(rundir, seat):
                continue
        except OSError:  # full or read-only: training goes on, and saves where it can
            return Lease(rundir, generation)
        joined = Lease(rundir, generation, seat)
        try:
            for number in _seats(rundir, generation):  # one that left meanwhile made room for two
                _refuse_if_seated(rundir, _seat_file(rundir, generation, number))
        except RootError:
            joined.leave()
            raise
        return joined


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


def _refuse_if_seated(rundir: RunDir, seat: Path) -> None:
    holder = _read_holder(seat)
    # Its own: this process has begun anew by exec, or asks whether it is alone.
    if holder is None or holder == Holder.here() or alive_here(holder) is False:
        return
    raise RootError(
        rundir.root,
        f"process {holder.pid} on {holder.host} saves into it as this link's program; only one "
        "program of a link can. Track everything in one Checkpointer, or start the other with "
        "'env -u HPC_CKPT_GENERATION' and a root of its own",
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


def last(rundir: RunDir) -> int:
    """The newest that is known of, also where its file is gone; the next to be taken follows it."""
    return max(highest(rundir), _saved(rundir))


def file_of(rundir: RunDir, generation: int) -> Path:
    """Its existence means that the generation is taken, and all before it are fenced."""
    return rundir.lease / f"{generation:08d}"


def released(rundir: RunDir, generation: int) -> bool:
    return fsio.exists(_released_file(rundir, generation))


def program_gone(rundir: RunDir, generation: int) -> bool:
    """Whether it was said that nothing of this generation is left: the shim takes the mark away
    once it has ended the program."""
    return released(rundir, generation) and not fsio.exists(_left_file(rundir, generation))


def holder_of(rundir: RunDir, generation: int) -> Holder | None:
    """Who took it; None if there is no such generation or its file cannot be understood."""
    return _read_holder(file_of(rundir, generation))


def _saved(rundir: RunDir) -> int:
    """The newest generation that has saved: its file may be gone, purged or not copied, and what
    is saved by a lower one would not be chosen. By names: what cannot be read counts as well."""
    names = (*fsio.names_in(rundir.checkpoints), *fsio.names_in(rundir.restarts))
    keys = (CheckpointKey.parse(name) for name in names)
    return max((key.generation for key in keys if key is not None), default=0)


def _read_holder(file: Path) -> Holder | None:
    try:
        record = json.loads(file.read_bytes())
        known = {name: record[name] for name in Holder().record() if name in record}
        return Holder(**known, file=file)
    except (OSError, ValueError, TypeError):
        return None


def taken_at(rundir: RunDir, generation: int) -> float:
    """When its holder asked for it, unix seconds of the file system; 0.0 for no such generation."""
    try:
        return file_of(rundir, generation).stat().st_mtime
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
    try:
        return _claim(rundir, holder)
    except OSError as error:
        raise RootError(rundir.root, f"cannot take a lease: {error.strerror}") from error


def _claim(rundir: RunDir, holder: Holder) -> Path:
    claim = rundir.lease / f".claim.tmp-{fsio.unique_suffix()}"
    fsio.write_atomic(claim, (json.dumps(holder.record()) + "\n").encode())
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


def _linked(rundir: RunDir, seat: Path) -> bool:
    claim = _claim(rundir, Holder.here())
    try:
        return _link(claim, seat)
    except FileNotFoundError:  # swept by somebody who took it for a leftover
        return False
    finally:
        with contextlib.suppress(OSError):
            claim.unlink()


def _seats(rundir: RunDir, generation: int) -> list[int]:
    """Those taken by programs of a link: the last one counts, others were killed in theirs."""
    try:
        names = os.listdir(rundir.lease)  # noqa: PTH208 - names only, no Path per entry
    except OSError:
        return []
    found = (name.partition(f"{generation:08d}.program-") for name in names)
    return [
        int(number) for before, mark, number in found if mark and not before and number.isdecimal()
    ]


def _identity(place: Path) -> tuple[int, int] | None:
    try:
        found = place.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino)


def _seat_file(rundir: RunDir, generation: int, number: int) -> Path:
    return rundir.lease / f"{generation:08d}.program-{number}"


def _released_file(rundir: RunDir, generation: int) -> Path:
    return rundir.lease / f"{generation:08d}.released"


def _left_file(rundir: RunDir, generation: int) -> Path:
    return rundir.lease / f"{generation:08d}.left"


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
