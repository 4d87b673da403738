"""What one machine sees of a profile's places and tools, and whether Slurm answers there.

Run in the job of `hpc-ckpt doctor` on a compute node, as a link is: by an absolute interpreter
with `-I`, standard library only. The login node looks with the same eyes.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import SchedulerError, SpecError
from ..preflight import free_storage
from ..tiers.wishes import expand
from .slurm import Runner, run_command

MOUNTS = Path("/proc/self/mounts")
WANTED_NAME, SIGHT_NAME = "wanted.json", "sight.json"
ANSWER_S = 20.0
SHARED = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "panfs", "wekafs", "pvfs2", "glusterfs",
     "afs", "cifs", "smb3", "orangefs", "daos"}
)  # fmt: skip
IN_MEMORY = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True, kw_only=True)
class Place:
    """A directory as one machine sees it."""

    path: str
    """Expanded on that machine."""
    kind: str | None = None
    """The file system's type, as mounted."""
    free: int | None = None
    problem: str | None = None

    @property
    def shared(self) -> bool:
        """Whether the file system is of a kind that other machines see too."""
        return self.kind is not None and (
            self.kind in SHARED or self.kind.removeprefix("fuse.") in SHARED
        )


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to look at."""

    root: str
    storage: dict[str, str] = field(default_factory=dict)
    """Name and path, not yet expanded."""
    tools: dict[str, str] = field(default_factory=dict)
    slurm: bool = False
    """Whether to try Slurm's commands."""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What was seen; an empty text is no problem, None was not looked at."""

    host: str
    root: Place
    storage: dict[str, Place] = field(default_factory=dict)
    tools: dict[str, str] = field(default_factory=dict)
    scontrol: str | None = None
    sbatch: str | None = None

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Sight:
        """TypeError if the record is of another version."""
        places = {name: Place(**place) for name, place in record["storage"].items()}
        return cls(**{**record, "root": Place(**record["root"]), "storage": places})


def look(
    wanted: Wanted, environ: Mapping[str, str], run: Runner | None = None, mounts: Path = MOUNTS
) -> Sight:
    table = mounted(mounts.read_text(errors="surrogateescape") if mounts.exists() else "")
    asked = run or _ask
    partition = environ.get("SLURM_JOB_PARTITION")
    return Sight(
        host=socket.gethostname(),
        root=_place(wanted.root, environ, table),
        storage={name: _place(path, environ, table) for name, path in wanted.storage.items()},
        tools={name: _tool(path) for name, path in wanted.tools.items()},
        scontrol=_problem(_show_job(environ), asked) if wanted.slurm else None,
        sbatch=_problem(_test_submit(partition), asked) if wanted.slurm else None,
    )


# ── places ────────────────────────────────────────────────────────────────────────────────
def mounted(text: str) -> list[tuple[str, str]]:
    """Mount points and types of /proc/self/mounts, in order: a later one hides an earlier."""
    rows = (line.split(" ") for line in text.splitlines())
    return [(_unescaped(row[1]), row[2]) for row in rows if len(row) > 2]


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def kind_of(path: str, table: Sequence[tuple[str, str]]) -> str | None:
    """The type of the file system that `path` (without links) lies on."""
    best: tuple[int, str] | None = None
    for point, kind in table:
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and (best is None or len(point) >= best[0]):
            best = (len(point), kind)
    return best[1] if best else None


def _place(path: str, environ: Mapping[str, str], table: Sequence[tuple[str, str]]) -> Place:
    try:
        shown = expand(path, environ, path)
    except SpecError as error:
        return Place(path=path, problem=str(error).removeprefix(f"{path}: "))
    if not shown.startswith("/"):
        return Place(path=shown, problem=f"{shown!r} does not begin with a slash there")
    try:
        free = free_storage(shown)
    except OSError as error:
        return Place(path=shown, problem=error.strerror or str(error))
    real = os.path.realpath(free.place)
    writable = os.access(real, os.W_OK | os.X_OK)
    return Place(
        path=shown,
        kind=kind_of(real, table),
        free=free.size,
        problem=None if writable else f"{free.place} cannot be written",
    )


def _tool(path: str) -> str:
    if not Path(path).exists():
        return "not there"
    return "" if os.access(path, os.X_OK) else "cannot be executed"


# ── Slurm's commands ──────────────────────────────────────────────────────────────────────
def _show_job(environ: Mapping[str, str]) -> list[str]:
    return ["scontrol", "-o", "show", "job", environ.get("SLURM_JOB_ID", "")]


def _test_submit(partition: str | None) -> list[str]:
    where = [f"--partition={partition}"] if partition else []
    return ["sbatch", "--test-only", "--time=1", "--ntasks=1", *where, "--wrap=true"]


def _ask(argv: Sequence[str]) -> str:
    return run_command(argv, ANSWER_S)


def _problem(argv: Sequence[str], run: Runner) -> str:
    try:
        run(argv)
    except SchedulerError as error:
        return " ".join(str(error).split())
    return ""


def main(folder: Path) -> None:
    record = json.loads((folder / WANTED_NAME).read_text())
    sight = look(Wanted(**record), os.environ)
    # In place: a client that has looked at the empty file may not see that another replaced it.
    with (folder / SIGHT_NAME).open("a") as stream:
        stream.write(json.dumps(dataclasses.asdict(sight)) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
