"""The machine and the versions a result belongs to."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import datetime
import os
import platform
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from . import memory
from .runner import PROJECT
from .states import GIB

PACKAGES = (
    "hpc_ckpt",
    "torch",
    "numpy",
    "safetensors",
    "torchsnapshot",
    "lightning",
    "orbax-checkpoint",
    "jax",
    "torch_checkpointing",
)


def describe(scratch: Path) -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory.total() / GIB, 1),
        "kernel": platform.release(),
        "file_system": _file_system(scratch),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _git("describe", "--always", "--dirty", "--abbrev=12"),
        # What was measured, also once its commit is one of another name.
        "tree": _git("rev-parse", "--short=12", "HEAD:hpc_ckpt"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "load_before": os.getloadavg()[0],
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _file_system(path: Path) -> str:
    """Type and options of the mount that holds the scratch directory."""
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        if path.resolve().is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, f"{kind} ({options})")
    return best[1]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _git(*words: str) -> str:
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(
            ["git", *words],
            cwd=PROJECT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    return "unknown"
