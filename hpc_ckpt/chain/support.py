"""One archive that tells others everything about a chain but its secrets and its weights.

Every text goes through redact.py. Bounded: heads and tails of what is long, and a list of what
was left out. Nothing is followed out of the run directory.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import platform
import stat
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import RootError, SchedulerError, SpecError
from ..rundir import MANIFEST_NAME, RunDir
from ..units import format_size
from . import slurm
from .redact import Place, redact

MOST_BYTES = 16 * 1024**2
"""Of all texts together, before they are compressed."""
END_BYTES = 64 * 1024
"""The head and the tail of a long file, each."""
WHOLE_BYTES = 1024**2
"""Records of the chain itself are kept whole up to this."""
MOST_FILES = 2000
LARGEST_MANIFEST = 8 * 1024**2
NEWEST_JOBS = 5
PACKAGES = ("torch", "numpy", "pydantic", "typer", "rich", "submitit", "jinja2", "safetensors")
_WITHOUT = frozenset({"tree", "aliases", "shards", "digest"})
"""Of a manifest: what grows with the model, or is the program's own state."""

Ask = Callable[[list[str]], str]


@dataclass(frozen=True)
class Report:
    """What was written, for people."""

    path: Path
    files: int
    places: tuple[Place, ...]
    left_out: tuple[str, ...]


@dataclass
class _Archive:
    """Texts on their way into a tar file."""

    tar: tarfile.TarFile
    folder: str
    room: int
    files: int = 0
    places: list[Place] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    _same: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, text: str) -> None:
        shown = self._shown(name)
        if self.files >= MOST_FILES or len(text) > self.room:
            self.left_out.append(shown)
            return
        clean, places = redact(text, shown)
        self.places += places
        self.put(shown, clean)

    def _shown(self, name: str) -> str:
        """The name without secrets; what is then the same as another's gets a number."""
        clean, places = redact(name, name)
        if not places:
            return name
        self._same[clean] = self._same.get(clean, 0) + 1
        shown = clean if self._same[clean] == 1 else f"{clean}-{self._same[clean]}"
        self.places += [Place(shown, 0, f"{place.what}, in the name") for place in places]
        return shown

    def put(self, name: str, text: str) -> None:
        data = text.encode("utf-8", "replace")
        entry = tarfile.TarInfo(f"{self.folder}/{name}")
        entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
        self.tar.addfile(entry, io.BytesIO(data))
        self.room -= len(data)
        self.files += 1


def default_name(rundir: RunDir, now: float | None = None) -> str:
    moment = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return f"hpc-ckpt-support-{rundir.root.name}-{moment}.tar.gz"


def write_report(
    rundir: RunDir, target: Path, *, environ: Mapping[str, str], ask: Ask = slurm.run_command
) -> Report:
    """Write the archive; a new file that only its owner may read."""
    if not rundir.lease.is_dir():
        raise RootError(rundir.root, "no run there; give the root of a run")
    with _new_file(target) as stream, tarfile.open(fileobj=stream, mode="w:gz") as tar:
        folder = target.name.removesuffix(".gz").removesuffix(".tar")
        archive = _Archive(tar, redact(folder, "")[0], room=MOST_BYTES)
        archive.add("about.json", json.dumps(_about(rundir, environ), indent=1) + "\n")
        for name, text in _records(rundir):
            archive.add(name, text)
        for name, text in _scheduler(rundir, ask):
            archive.add(name, text)
        for name, text in _bulk(rundir):
            archive.add(name, text)
        archive.put("redacted.txt", "".join(f"{place}\n" for place in archive.places))
        archive.put("left-out.txt", "".join(f"{name}\n" for name in archive.left_out))
    return Report(target, archive.files, tuple(archive.places), tuple(archive.left_out))


@contextlib.contextmanager
def _new_file(target: Path) -> Iterator[io.BufferedWriter]:
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise SpecError(f"{target}: is there already; name another file with -o") from None
    except OSError as error:
        raise SpecError(f"{target}: {error.strerror}; name another file with -o") from None
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
    except BaseException:  # half an archive is worse than none
        target.unlink(missing_ok=True)
        raise


# ── what goes in ──────────────────────────────────────────────────────────────────────────
def _about(rundir: RunDir, environ: Mapping[str, str]) -> dict[str, Any]:
    ours = {k: v for k, v in sorted(environ.items()) if k.startswith(("HPC_CKPT", "SLURM"))}
    return {
        "hpc_ckpt": __version__,
        "python": sys.version,
        "system": platform.platform(),
        "host": platform.node(),
        "made": round(time.time(), 3),
        "root": str(rundir.root),
        "packages": {name: _version(name) for name in PACKAGES},
        "environment": ours,
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _records(rundir: RunDir) -> Iterator[tuple[str, str]]:
    """The chain's own files, which say most and are small."""
    yield "files.txt", _listing(rundir)
    for name in ("chain.json", "chain.sbatch", "halt", "DONE"):
        yield from _file(rundir, rundir.root / name, WHOLE_BYTES)
    for folder in (rundir.lease, rundir.ledger, rundir.control):
        for path in _inside(folder):
            yield from _file(rundir, path, WHOLE_BYTES)


def _bulk(rundir: RunDir) -> Iterator[tuple[str, str]]:
    """What can be long, the newest first: it is left out from its end."""
    for key in reversed(rundir.committed()):
        path = rundir.checkpoints / key.directory_name / MANIFEST_NAME
        yield str(path.relative_to(rundir.root)), _manifest_head(path)
    for path in [*reversed(_inside(rundir.logs)), *reversed(_inside(rundir.events))]:
        yield from _file(rundir, path, 2 * END_BYTES)


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if ".tmp-" not in path.name)
    except OSError:
        return []


def _file(rundir: RunDir, path: Path, most: int) -> Iterator[tuple[str, str]]:
    """Whole, or its head and tail. Links are not followed: a group shares run directories."""
    data = _ends(path, most)
    if data is not None:
        yield str(path.relative_to(rundir.root)), data.decode("utf-8", "replace")


def _ends(path: Path, most: int) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        if status.st_size <= most:
            return stream.read(most)
        # At line breaks: half a secret would not be known for one.
        head = stream.read(most // 2).rpartition(b"\n")[0]
        stream.seek(-(most // 2), os.SEEK_END)
        tail = stream.read(most // 2).partition(b"\n")[2]
        between = format_size(status.st_size - len(head) - len(tail))
        return head + f"\n[… {between} left out …]\n".encode() + tail


def _manifest_head(path: Path) -> str:
    """What a checkpoint says of itself, without state, digests and the names of leaves."""
    data = _ends(path, LARGEST_MANIFEST)
    try:
        record = json.loads(data or b"")
        told = {key: value for key, value in record.items() if key not in _WITHOUT}
        tree = record.get("tree")
        told["about"] = tree.get("about") if isinstance(tree, dict) else None
        told["shards"] = [
            {key: shard.get(key) for key in ("file", "size", "holder")}
            for shard in record["shards"]
        ]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        return f"not a manifest: {error!r}; {len(data or b'')} bytes\n"
    return json.dumps(told, indent=1) + "\n"


def _listing(rundir: RunDir) -> str:
    lines = []
    for folder, folders, names in os.walk(rundir.root):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            with contextlib.suppress(OSError):
                status = path.lstat()
                moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.st_mtime))
                kind = stat.filemode(status.st_mode)
                shown = path.relative_to(rundir.root)
                lines.append(f"{kind} {status.st_size:>14} {moment} {shown}")
            if len(lines) >= 10 * MOST_FILES:
                return "\n".join([*lines, "…", ""])
    return "\n".join([*lines, ""])


def _scheduler(rundir: RunDir, ask: Ask) -> Iterator[tuple[str, str]]:
    """What Slurm still knows; where it does not answer the archive says so."""
    chain = rundir.chain() or {}
    if chain.get("backend") == "local":
        return
    jobs = [str(job) for job in chain.get("jobs") or ()]
    questions = {f"slurm/job-{job}.txt": ["scontrol", "show", "job", job]
                 for job in jobs[-NEWEST_JOBS:]}  # fmt: skip
    questions["slurm/config.txt"] = ["scontrol", "show", "config"]
    questions["slurm/partitions.txt"] = ["scontrol", "show", "partition"]
    for name, question in questions.items():
        try:
            yield name, ask(question)
        except SchedulerError as error:
            yield name, f"{error}\n"
            if error.returncode in (None, 127):
                return  # no Slurm here, or one that hangs: the others would take as long
