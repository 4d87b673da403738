"""The program's output, link after link: the end of a log, and what is added to it.

Reads files only. A link's log can begin late, grow, be cut short, or never be written at all.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import codecs
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import lease
from ..errors import RootError
from ..rundir import RunDir
from .ledger import ChainStatus, State, has_run_out, may_be_over, read_status

CHUNK = 1 << 16
LOOK_EVERY_S = 1.0
OVER_EVERY_S = 2.0


@dataclass(frozen=True)
class Piece:
    """Some output of one link."""

    link: int
    text: str


def is_over(status: ChainStatus) -> bool:
    """Complete, stopped or run out, and the last link gone: DONE comes before the last words."""
    ended = not status.links or status.links[-1].ended is not None
    if status.state in (State.COMPLETE, State.STOPPED):
        return ended
    return has_run_out(RunDir(status.root), status)


def chain_over(rundir: RunDir) -> bool:
    """The same; the whole ledger is read only when a file says that it may be so."""
    return may_be_over(rundir) and is_over(read_status(rundir))


def links_with_output(rundir: RunDir, after: int = 0) -> list[int]:
    """Those after one: of a long chain on a shared file system not all are looked at."""
    later = [link for link in lease.generations(rundir) if link > after]
    return [link for link in later if rundir.log_file(link).is_file()]


def newest_with_output(rundir: RunDir) -> int | None:
    links = reversed(lease.generations(rundir))
    return next((link for link in links if rundir.log_file(link).is_file()), None)


def chosen_link(rundir: RunDir, wanted: int | None) -> int:
    """The newest link that has printed anything, or the one asked for."""
    if not rundir.lease.is_dir():
        raise RootError(rundir.root, "no run there; give the root of a run")
    known = links_with_output(rundir)
    if wanted is None and known:
        return known[-1]
    if wanted is not None and wanted in known:
        return wanted
    if wanted is None:
        raise RootError(rundir.root, "no link has printed anything yet")
    have = f"it has {', '.join(map(str, known))}" if known else "none has yet"
    raise RootError(rundir.root, f"link {wanted} has no output; {have}")


def read_log(path: Path, lines: int | None = None) -> Iterator[str]:
    """Text of a log, whole or its last `lines`, in pieces."""
    with path.open("rb") as stream:
        if lines is not None:
            stream.seek(start_of_last(path, lines))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while data := stream.read(CHUNK):
            yield decoder.decode(data)
        yield decoder.decode(b"", final=True)


def start_of_last(path: Path, lines: int) -> int:
    """Where the last `lines` lines begin; reads backwards, so a log of gigabytes is no matter."""
    with path.open("rb") as stream:
        size = place = stream.seek(0, os.SEEK_END)
        if lines <= 0:
            return size
        missing = lines
        while place > 0:
            begin = max(0, place - CHUNK)
            stream.seek(begin)
            data = stream.read(place - begin)
            # The line break that ends the last line begins no further one.
            search = len(data) - (1 if place == size and data.endswith(b"\n") else 0)
            while (search := data.rfind(b"\n", 0, search)) >= 0:
                missing -= 1
                if missing == 0:
                    return begin + search + 1
            place = begin
        return 0


def last_lines(path: Path, lines: int) -> list[str]:
    """For a look now and then: of a line without end (a progress bar) only its end is read."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - CHUNK))
            return stream.read(CHUNK).decode("utf-8", "replace").splitlines()[-lines:]
    except OSError:
        return []


class Follower:
    """What the program prints, from one link into the next, until the chain is over."""

    def __init__(
        self,
        rundir: RunDir,
        link: int | None,
        *,
        lines: int,
        over: Callable[[RunDir], bool] = chain_over,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rundir = rundir
        self._link = link
        self._lines = None if link is None else lines
        """Of a log that is there already; later ones are read from their beginning."""
        self._over = over
        self._sleep = sleep
        self._clock = clock
        self._place = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def pieces(self) -> Iterator[Piece]:
        """Ends when the chain is over, with all output given.

        The first piece of every link is empty: that it begins is news too.
        """
        if self._link is not None:
            yield self._begin(self._link)
        next_question = self._clock()
        while True:
            over = False
            if self._clock() >= next_question:
                over = self._over(self._rundir)
                next_question = self._clock() + OVER_EVERY_S
            # After the question: what was printed before the end is read after it was seen.
            yield from self._news()
            if over:
                return
            self._sleep(LOOK_EVERY_S)

    def _begin(self, link: int) -> Piece:
        self._link, self._place = link, 0
        self._decoder.reset()
        if self._lines is not None:
            self._place = start_of_last(self._rundir.log_file(link), self._lines)
            self._lines = None
        return Piece(link, "")

    def _news(self) -> Iterator[Piece]:
        later = links_with_output(self._rundir, self._link or 0)
        if self._link is not None:
            yield from self._added(self._link)
        for link in later:
            yield self._begin(link)
            yield from self._added(link)

    def _added(self, link: int) -> Iterator[Piece]:
        try:
            with self._rundir.log_file(link).open("rb") as stream:
                if stream.seek(0, os.SEEK_END) < self._place:
                    self._place = 0  # somebody cut it short: what is there now is new
                stream.seek(self._place)
                while data := stream.read(CHUNK):
                    self._place += len(data)
                    yield Piece(link, self._decoder.decode(data))
        except OSError:
            return
