"""Which runs this user has made, newest last: what `last` means on the command line.

A small file under $XDG_STATE_HOME, one JSON line a run. It is a convenience: whatever is wrong
with it, submitting goes on. Standard library only.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import fsio
from .sweep import is_sweep

MOST_BYTES = 128 * 1024
"""A longer file is cut to its newest KEPT lines."""
KEPT = 200
PATIENCE_S = 2.0
"""For the lock: another submission holds it for milliseconds, a hung file system for ever."""
LAST = "last"


@dataclass(frozen=True)
class Run:
    root: str
    time: float
    name: str


def index_file(environ: Mapping[str, str]) -> Path | None:
    """None where the user has no home to keep it in."""
    state, home = environ.get("XDG_STATE_HOME"), environ.get("HOME")
    if state and Path(state).is_absolute():
        return Path(state) / "hpc_ckpt" / "runs"
    return Path(home) / ".local" / "state" / "hpc_ckpt" / "runs" if home else None


def remember(root: Path, name: str, environ: Mapping[str, str]) -> None:
    """Add a run. Never raises."""
    path = index_file(environ)
    if path is None:
        return
    run = Run(str(root), round(time.time(), 3), name)
    with contextlib.suppress(OSError, ValueError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(path):
            _append(path, run)


def known_runs(environ: Mapping[str, str]) -> list[Run]:
    """Those that still exist, oldest first, each root once; broken lines are passed over."""
    path = index_file(environ)
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    newest: dict[str, Run] = {}
    for run in filter(None, map(_parse, lines)):
        newest.pop(run.root, None)  # again at the end: it is the newest now
        newest[run.root] = run
    return [run for run in newest.values() if is_run(Path(run.root))]


def is_run(root: Path) -> bool:
    """Whether a chain or a sweep of chains lives there."""
    return (root / "lease").is_dir() or is_sweep(root)


def last_run(environ: Mapping[str, str]) -> Path | None:
    runs = known_runs(environ)
    return Path(runs[-1].root) if runs else None


def _parse(line: str) -> Run | None:
    try:
        record = json.loads(line)
        return Run(str(record["root"]), float(record["time"]), str(record["name"]))
    except (ValueError, TypeError, KeyError):
        return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Of its own file: the index itself is replaced when it is cut."""
    descriptor = os.open(path.with_name("runs.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def _append(path: Path, run: Run) -> None:
    line = (json.dumps(asdict(run)) + "\n").encode("utf-8", "surrogateescape")
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, b"\n" * torn + line)
    finally:
        os.close(descriptor)
    if size > MOST_BYTES:
        newest = path.read_bytes().splitlines(keepends=True)[-KEPT:]
        fsio.write_atomic(path, b"".join(newest))
