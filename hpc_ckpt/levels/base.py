"""The contract of a level: how a program that cannot be changed is saved and brought back.

The steward drives one of these through a link; the link runner knows only the steward.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ..errors import HpcCkptError
from .program import Program


class Kind(str, Enum):
    """The three levels that people name; `plain` is none of them."""

    MODEL = "model"
    APPLICATION = "application"
    SYSTEM = "system"
    PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the user asked to be run, and what is known of the place."""

    argv: tuple[str, ...]
    cwd: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    scratch: Path | None = None
    """A directory of this link for sockets, port files and the like."""
    kept: Path | None = None
    """A directory of the chain for what a program writes over more than one link."""
    noted: Path | None = None
    """That of its restarts, for what must be known as long as they are there: whoever removes it
    begins anew."""
    log: Path | None = None
    """What the program prints is there a moment later."""
    store_s: float = 0.0
    """What to keep free before the end of a link for storing what the program writes: as long as
    that took in earlier links, and some."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """How to start the program now."""

    argv: tuple[str, ...]
    cwd: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    """The whole environment."""
    output: Path | None = None
    """Where its output goes instead of the steward's own; the steward passes it on."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What a level may know when it is asked for a save."""

    until: float
    """time.monotonic() by which it must be over."""
    last: bool = False
    """Nothing of this program need go on afterwards."""
    store_s: float = 0.0
    """Of that time, for storing what the program has written: as long as it took, and some."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a save has put into its directory."""

    step: int | None = None
    """The evidence of progress, and all there is of it: grows with the work and with nothing
    else. The chain stops after two links in which it did not. None: the level cannot tell, and
    saves are counted."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What resume() needs beside the files; kept in the manifest as JSON."""
    lead_s: float | None = None
    """How long the program itself takes to write for a last save, where this one does not show
    it; None: the whole of this one does."""
    waited_s: float = 0.0
    """Of this save, for the program to write: counted in lead_s, not in what the rest took."""


class SaveFailed(HpcCkptError):
    """No restart came of it; the program may or may not still run."""


class NothingNew(HpcCkptError):
    """There is nothing that the last restart does not have; nothing is wrong."""


class NotNow(NothingNew):
    """No restart came of it, for a reason that passes: the program has only just begun, no space,
    no time. Says nothing against the level."""


class StillSaving(NotNow):
    """A save outlasted its time and cannot be stopped: what it writes into must stay for now."""


class NoRoom(NotNow):
    """The storage is full, over quota, or does not take anything now."""


class LevelFailed(Exception):
    """This level does not work for this program here; the next one may."""


class StartFailed(HpcCkptError):
    """The level cannot start the program here; the next one may."""


class ResumeFailed(HpcCkptError):
    """This restart cannot be gone on from; an older one may."""


class NotThisFile(ResumeFailed):
    """Something newer that lay in place was not taken; the restart itself was not tried yet."""


def passes(error: BaseException) -> bool:
    """Caused by a bad day of this node or its storage: it says nothing against a level, nor
    against what the level has saved."""
    return _number_of(error) in _PASSING


def may_last(error: BaseException) -> bool:
    """Of what passes: a site may have set its nodes up so."""
    return _number_of(error) in (errno.EROFS, errno.EACCES)


def _number_of(error: BaseException) -> int | None:
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__
    return None if found is None else found.errno


_PASSING = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS, errno.EACCES, errno.EMFILE,
     errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT, errno.ESHUTDOWN, errno.ENOTCONN, errno.EREMOTEIO,
     errno.ECOMM, errno.EINTR, errno.EAGAIN}
)  # fmt: skip


class NotHere(ResumeFailed):
    """Nothing is started or gone on from on this node now; nothing is wrong with any restart."""


class AnotherCommand(HpcCkptError):
    """What is saved is the work of another command: to go on from it would give that one's result,
    to begin anew would write over it."""


class AnotherLevel(AnotherCommand):
    """What is saved is the work of a level that is not among those to go on with: any of them would
    begin anew over it."""


class Level(Protocol):
    """Every path it is given is absolute. Nothing here writes outside `into`, `scratch` and,
    in resume(), the files that the program itself reads."""

    name: str
    kind: Kind

    @property
    def lead_s(self) -> float:
        """How long a last save takes if none has been measured yet."""

    def probe(self, work: Work) -> str | None:
        """Why it cannot be used here for this; None: it can. Starts nothing that lasts."""

    def first(self, work: Work) -> Start:
        """Raises StartFailed; NotHere: another link may do."""

    def resume(self, work: Work, restart: Path, facts: Mapping[str, Any]) -> Start:
        """Put the files of a restart, all verified, where the program looks for them."""

    def resumed(self, program: Program, until: float) -> None:
        """Wait until the program runs again, at most to this moment of time.monotonic().
        Raises ResumeFailed."""

    def ask(self, program: Program, into: Path, moment: Moment) -> None:
        """Ask for a save, and return at once if it can. Raises SaveFailed, NothingNew."""

    def wait(self, program: Program, into: Path, moment: Moment) -> Saved:
        """Until the save that was asked for is over and everything it needs is in `into`,
        synced or not. Raises SaveFailed, NothingNew."""

    def is_complete(self, work: Work, code: int) -> bool | None:
        """Whether the work is done, now that the program has ended; None: code 0 says it."""

    def own_failure(self, code: int) -> str | None:
        """Why an end with this code, before any save, is the level's doing; None: it is not."""

    def close(self) -> None:
        """The link is over: end what the level itself has started."""


@runtime_checkable
class OwnFiles(Protocol):
    """A level whose restarts are files of the program, in the places where people look for them."""

    def leave_newest(self) -> None:
        """The program went on from none of those that resume() was given: what lies there now is
        the last one tried, and the newest has to lie there when the link fails."""
