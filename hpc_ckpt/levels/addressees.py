"""Who hears a signal that asks for a save: the program itself, behind shells and launchers.

What `srun` starts is no descendant of it but of Slurm's daemon: on this node it is found by the
job that it belongs to. srun itself would kill its tasks for a signal that ends a program.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import processes
from .invocation import named
from .program import Program

INTERPRETERS = ("python*", "perl", "bash", "sh")
JOB = "SLURM_JOB_ID"
_STEP_LAUNCHER = ("srun",)
_HANDED_ON = frozenset((signal.SIGUSR1, signal.SIGUSR2))
"""By srun, to every task."""


def addressees(
    program: Program, patterns: Sequence[str], number: signal.Signals, environ: Mapping[str, str]
) -> list[int]:
    """The program by its name, in the tree or in a step of the same job on this node; else
    whatever has no children. Nobody: it runs where no signal from here reaches it."""
    tree = program.tree()
    found = [pid for pid in tree if _is_one(pid, patterns)]
    if found:
        return found
    found = _in_steps(patterns, environ, set(tree))
    if found:
        return found
    if number in _HANDED_ON:
        return program.leaves()
    return [pid for pid in program.leaves() if not _is_one(pid, _STEP_LAUNCHER)]


def _in_steps(patterns: Sequence[str], environ: Mapping[str, str], known: set[int]) -> list[int]:
    job = environ.get(JOB)
    if not job:
        return []
    mark = f"{JOB}={job}".encode()
    pids = (pid for pid, stat in processes.every() if not stat.ended and pid not in known)
    return sorted(pid for pid in pids if _is_one(pid, patterns) and mark in _environment(pid))


def _is_one(pid: int, patterns: Sequence[str]) -> bool:
    return any(named(word, patterns) for word in _called(pid))


def _called(pid: int) -> list[str]:
    """The name of a process's program; of a script also its own."""
    words = [os.fsdecode(word) for word in _read(pid, "cmdline").split(b"\0")[:2]]
    return words if named(words[0], INTERPRETERS) else words[:1]


def _environment(pid: int) -> list[bytes]:
    return _read(pid, "environ").split(b"\0")


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # gone, or somebody else's
        return b""
