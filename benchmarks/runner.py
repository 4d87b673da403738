"""Runs one job in a process of its own, and says why if it fails. Never two at once."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import disk, memory

PROJECT = Path(__file__).resolve().parent.parent
LOOK_S = 0.5
LEAST_FREE = 1 << 30
"""Below this the job is ended: the machine is not to swap or kill for a benchmark."""
LONGEST_REASON = 120


class Runner:
    """Each job gets a fresh directory below `scratch`, and leaves nothing there."""

    def __init__(self, scratch: Path, patience_s: float) -> None:
        self._scratch = scratch
        self._patience_s = patience_s
        self._count = 0

    def directory(self) -> Path:
        self._count += 1
        path = self._scratch / f"{self._count:05}"
        path.mkdir(parents=True)
        return path

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """In a directory that is removed afterwards."""
        directory = self.directory()
        try:
            return self.run_in(directory, job)
        finally:
            disk.remove(directory)

    def run_in(self, directory: Path, job: dict[str, Any]) -> dict[str, Any]:
        """The job as a record, with `result` or `failed`."""
        output, errors = directory.with_suffix(".json"), directory.with_suffix(".txt")
        record: dict[str, Any] = {**job, "load_before": os.getloadavg()[0]}
        began = time.monotonic()
        process = self._start({**job, "directory": str(directory)}, output, errors)
        try:
            why = self._wait(process)
            record["took_s"] = round(time.monotonic() - began, 1)
            if why is None:
                record["result"] = json.loads(output.read_text())
            else:
                record["failed"] = why or _last_words(errors, directory)
        finally:
            _end(process)
            output.unlink(missing_ok=True)
            errors.unlink(missing_ok=True)
        return record

    def _start(self, job: dict[str, Any], output: Path, errors: Path) -> subprocess.Popen[bytes]:
        with errors.open("wb") as stream:
            return subprocess.Popen(
                [sys.executable, "-m", "benchmarks.one", json.dumps(job), str(output)],
                cwd=PROJECT,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def _wait(self, process: subprocess.Popen[bytes]) -> str | None:
        """None: it ended well. Otherwise why not; empty if its own last words say it."""
        until, why = time.monotonic() + self._patience_s, ""
        while process.poll() is None:
            if memory.available() < LEAST_FREE:
                why = "needs more memory than there is"
            elif time.monotonic() > until:
                why = f"no end after {self._patience_s:g} s"
            if why:
                _end(process)
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
        if process.returncode < 0 and not why:
            why = f"killed by {signal.Signals(-process.returncode).name}"
        return None if process.returncode == 0 else why


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and what it has started and left."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HPC_CKPT", "SLURM"))}
    return {**kept, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}


def _last_words(errors: Path, directory: Path) -> str:
    """The exception's own line, without the paths of this machine."""
    lines = [line.strip() for line in errors.read_text(errors="replace").splitlines()]
    told = [
        line for line in lines if re.match(r"[\w.]*(Error|Exception|Saved|Content|Exit)\b", line)
    ]
    words = (told or lines or ["no reason given"])[-1]
    for path in (directory, directory.parent, PROJECT, Path.home()):
        words = words.replace(str(path), "…")
    return words[:LONGEST_REASON]
