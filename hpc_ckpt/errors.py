"""Every error of the product, in one tree; each knows the exit code the command line gives it.

HpcCkptError (1)
├── UserError (2)               the user can mend it; nothing was left half-made
│   ├── SpecError               a value in a spec, profile, environment variable or option
│   ├── RootError               a run directory that is unusable or in use
│   ├── UnsupportedState        tracked state that cannot be represented without pickle
│   └── UnsupportedLoader       a data source whose position cannot be kept exactly
├── CheckpointError (1)
│   ├── CorruptCheckpoint       verify found defects
│   ├── NewerCheckpoint         sound, but made by a newer version than this one
│   ├── ManifestError           bytes that are not a manifest, or fields no manifest may have
│   ├── HeaderError             bytes that are not a shard's header
│   ├── NoCheckpoint            nothing there to load
│   ├── BrokenOff               a look at every byte that was not finished
│   ├── StorageHangs            no save can begin while earlier ones hang; a TimeoutError as well
│   └── RestoreMismatch         the program's objects do not fit the checkpoint
├── Fenced (1)                  a newer generation holds the run directory
├── ChainStopped (1)            a chain that must not go on by itself
└── SchedulerError (1)          a scheduler command failed
    └── Unanswered              a submission of which nobody knows whether it was carried out

LinkEnded is not in the tree: it is a SystemExit, so that it ends a program which does not
know about it, and 'except Exception' cannot swallow it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

EXIT_COMPLETE = 0
EXIT_FAILED = 1
EXIT_USER = 2
EXIT_SAVED = 75
"""sysexits' EX_TEMPFAIL: saved, run me again."""


class HpcCkptError(Exception):
    """Anything this product raises on purpose."""

    exit_code = EXIT_FAILED


class UserError(HpcCkptError):
    """Something the user wrote or asked for; the message says what, where and what to do."""

    exit_code = EXIT_USER


class SpecError(UserError):
    """A value in a spec, a profile, an environment variable or an option."""


class RootError(UserError):
    """A run directory that cannot be used."""

    def __init__(self, root: Path, message: str) -> None:
        super().__init__(f"{root}: {message}")
        self.root = root


class UnsupportedState(UserError):
    """Tracked state that cannot be written without pickle."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"tracked state {key!r}: {message}")
        self.key = key


class UnsupportedLoader(UserError):
    """A data source whose position cannot be kept exactly."""


class CheckpointError(HpcCkptError):
    """A checkpoint that is missing, broken or does not fit."""


class CorruptCheckpoint(CheckpointError):
    """Verify found defects; each is named."""

    def __init__(self, path: Path, defects: Iterable[object]) -> None:
        self.path = path
        self.defects = tuple(defects)
        super().__init__(f"{path}: " + "; ".join(str(defect) for defect in self.defects))

    @property
    def passing(self) -> bool:
        """It could not be looked at, which says nothing about what is in it."""
        return any(getattr(defect, "passing", False) for defect in self.defects)


class DamagedCheckpoint(CheckpointError):
    """One that this process has saved, and has found to be damaged since."""


class NewerCheckpoint(CheckpointError):
    """Made by a newer version than this one: no damage, and nothing to go back behind."""

    def __init__(self, path: Path | None, what: str) -> None:
        super().__init__(
            f"{path or 'checkpoint'}: it is not damaged, but made by a newer hpc_ckpt or torch "
            f"({what}). Upgrade to read it, or move it away to go on without it"
        )
        self.path = path
        self.what = what


class ManifestError(CheckpointError):
    """Bytes that are not a manifest, or fields no manifest may have; names the defect."""

    def __init__(self, defect: object) -> None:
        super().__init__(str(defect))
        self.defect = defect


class HeaderError(CheckpointError):
    """Bytes that are not a shard's header; says which rule they break."""


class BrokenOff(CheckpointError):
    """Somebody waits: what was being looked at says nothing."""


class StorageHangs(CheckpointError, TimeoutError):
    """No save can begin: earlier ones hang, and keep what it would need."""


class NoCheckpoint(CheckpointError):
    """No valid checkpoint where one was asked for."""

    def __init__(self, looked_in: Path, why: str = "no checkpoint there") -> None:
        super().__init__(f"{looked_in}: {why}")
        self.looked_in = looked_in


class RestoreMismatch(CheckpointError):
    """The program's objects do not fit the checkpoint; all differences are listed at once."""

    def __init__(
        self, path: Path | None, differences: Sequence[str], *, passable: bool = True
    ) -> None:
        """`passable`: strict_restore=False would let them pass."""
        self.path = path
        self.differences = tuple(differences)
        listing = "\n  ".join(self.differences)
        advice = "\nPass strict_restore=False to load what fits." if passable else ""
        super().__init__(
            f"{path or 'checkpoint'} does not fit the tracked objects:\n  {listing}{advice}"
        )


class Fenced(HpcCkptError):
    """A newer generation holds the run directory; this one may publish nothing more."""

    def __init__(self, generation: int, newer: int) -> None:
        super().__init__(f"generation {generation} was overtaken by generation {newer}")
        self.generation = generation
        self.newer = newer


class ChainStopped(HpcCkptError):
    """A chain that must not go on by itself: halted, cancelled, stuck, or its budget is spent."""

    def __init__(self, root: Path, reason: str, step: int | None = None) -> None:
        saved = "" if step is None else f"; the newest checkpoint is of step {step}"
        super().__init__(f"{root}: the chain stops: {reason}{saved}. Submit it again to go on")
        self.root = root
        self.reason = reason


class SchedulerError(HpcCkptError):
    """A scheduler command failed; carries the command and what it said."""

    def __init__(self, command: Sequence[str], returncode: int | None, stderr: str) -> None:
        self.command = tuple(command)
        self.returncode = returncode
        self.stderr = stderr.strip()
        how = "did not answer in time" if returncode is None else f"exit code {returncode}"
        super().__init__(f"{command[0]} failed ({how}): {self.stderr or 'it said nothing'}")


class Unanswered(SchedulerError):
    """sbatch did not say what became of a submission, and the queue does not tell either."""

    def __str__(self) -> str:
        said = " ".join(self.stderr.split()) or "it said nothing"
        return (
            f"sbatch did not answer ({said}): whether it has submitted is not known. Submit again "
            "later: what it may have left in the queue is looked for first"
        )


class LinkEnded(SystemExit):
    """This link is over; the work is saved and goes on in the next one."""

    def __init__(self, reason: str, *, code: int = EXIT_SAVED) -> None:
        super().__init__(code)
        self.reason = reason

    def __str__(self) -> str:
        return f"link ended: {self.reason}"


def one_line(error: BaseException) -> str:
    """Type and message, for files that are read line by line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
