"""What logs and the scheduler say about the end of a link. Pure: text in, findings out.

Standard library only: the link runner asks it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from .backend import Cause, JobRecord

TAIL_BYTES = 64 * 1024
LINES_SHOWN = 8
LONGEST_LINE = 300
GRACE_SLACK_S = 2.0
OUTLIVED_SLACK_S = 30.0
"""A kill may come later than the kill wait after TERM; and who saves at a TERM that somebody sent
by hand takes its time."""

_CANCELLED = re.compile(
    r"\*\*\* (JOB|STEP) \S+ ON \S+ CANCELLED AT (\S+?)(?: DUE TO ([A-Z ]+?))?(?:,[^*]*)? \*\*\*"
)
_DUE_TO = {
    "TIME LIMIT": Cause.TIME_LIMIT,
    "PREEMPTION": Cause.PREEMPTED,
    "NODE FAILURE": Cause.NODE_FAILURE,
    "JOB REQUEUE": Cause.REQUEUED,
}
_NODE_FAILED = re.compile(r"^srun: error: Node failure on \S+$", re.MULTILINE)
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|\bMemoryError\b|std::bad_alloc|Cannot allocate memory"
    r"|cannot allocate vector of (?:size|length) \d"  # R
    r"|forrtl: severe \(\d+\): insufficient virtual memory",  # Fortran of Intel
    re.IGNORECASE,
)
"""Words of the program: it may have caught the error, asked for less and gone on."""
_KILLED_FOR_MEMORY = re.compile(
    r"\boom[-_ ]?kill|OOM Killed|out of memory: kill"
    # slurmstepd of older Slurm versions; newer ones tell of an oom_kill event.
    r"|exceeded memory limit \(\d+ > \d+\), being killed"
    r"|slurmstepd\S*: error: Exceeded (?:job|step) memory limit at some point",
    re.IGNORECASE,
)
ENDING_LINES = 50
_TRACEBACK = "Traceback (most recent call last)"
_STATES = {
    "TIMEOUT": Cause.TIME_LIMIT,
    "PREEMPTED": Cause.PREEMPTED,
    "NODE_FAIL": Cause.NODE_FAILURE,
    "BOOT_FAIL": Cause.NODE_FAILURE,
    "OUT_OF_MEMORY": Cause.OUT_OF_MEMORY,
    "CANCELLED": Cause.CANCELLED,
    "REQUEUED": Cause.REQUEUED,
    "DEADLINE": Cause.TIME_LIMIT,
}


_VAGUE = frozenset({Cause.REQUEUED, Cause.CANCELLED})


class Finding(NamedTuple):
    """One thing somebody said, and what it means; None: nothing by itself."""

    cause: Cause | None
    said: str
    certain: bool = False
    """Whatever others say."""
    warning: bool = False
    """Nobody has ended it yet, and its program was told by the notice file alone."""


class Grace:
    """Of a preemption: the time in which somebody may still cancel the job."""

    def __init__(self) -> None:
        self._end: float | None = None

    def is_cut_short(self, record: JobRecord) -> bool:
        """A preempted job that is being ended, but not requeued, before its grace is over."""
        if record.cause is Cause.PREEMPTED and not record.ending:
            self._end = record.end
        return (
            record.cause is Cause.PREEMPTED
            and record.ending
            and not record.restarted
            and self._end is not None
            and time.time() < self._end - GRACE_SLACK_S
        )


def is_outlived(term_at: float | None, record: JobRecord, kill_wait_s: float) -> bool:
    """Whether a TERM, at that moment of the monotonic clock, ended nothing: the kill would have
    followed it by now, and the job simply runs on."""
    late = term_at is not None and time.monotonic() >= term_at + kill_wait_s + OUTLIVED_SLACK_S
    return late and record.runs_on


def of_state(state: str) -> Cause | None:
    """What a job state of scontrol or sacct means ('CANCELLED by 1000', 'NODE_FAIL')."""
    words = re.split(r"[\s+,]", state.strip(), maxsplit=1)
    return _STATES.get(words[0])


def in_log(text: str, since: float, *, steps: bool = True) -> list[Finding]:
    """slurmstepd's words in a log, as far as they were said after `since`.

    A log is appended to by every run of a job: older words are about older runs. Without `steps`
    only of the job: the command may have steps of its own, and which is the link's is not known.
    """
    found = []
    for line in text.splitlines():
        match = _CANCELLED.search(line)
        if match is None or not _is_after(match[2], since):
            continue
        if match[1] == "STEP" and not steps:
            continue
        # Without a reason it says nothing: at the start of a preemption's grace it reads so too.
        found.append(Finding(_DUE_TO.get(match[3] or ""), _shown(line)))
    return found


def by_srun(text: str) -> list[Finding]:
    """The link's own srun, in what the batch job wrote during this link: it gives its step up when
    a node of it is set down, and may return 0."""
    return [Finding(Cause.NODE_FAILURE, _shown(line)) for line in _NODE_FAILED.findall(text)]


def _is_after(moment: str, since: float) -> bool:
    with contextlib.suppress(ValueError, OverflowError):
        return time.mktime(time.strptime(moment, "%Y-%m-%dT%H:%M:%S")) >= int(since)
    return True  # a site's own time format: better heard twice than not at all


def out_of_memory(text: str) -> Finding | None:
    """The last line of a log that speaks of memory that was not there."""
    lines = text.splitlines()
    begin = _last_words(lines)
    for place in reversed(range(len(lines))):
        by_program = place >= begin and _OUT_OF_MEMORY.search(lines[place])
        if by_program or _KILLED_FOR_MEMORY.search(lines[place]):
            return Finding(Cause.OUT_OF_MEMORY, _shown(lines[place]))
    return None


def _last_words(lines: Sequence[str]) -> int:
    """Where a program's begin. Each of its ranks may have left a traceback, one after the other."""
    begin = max(0, len(lines) - ENDING_LINES)
    for place in reversed(range(len(lines))):
        if place < begin:
            break
        if _TRACEBACK in lines[place]:
            begin = max(0, place - ENDING_LINES)
    return begin


def strongest(findings: Iterable[Finding]) -> Cause | None:
    """The first cause that somebody named; what may stand for others only if there is no other.

    Without a grace, scontrol calls a preemption a requeue, and slurmstepd what it is.
    """
    named = [finding for finding in findings if finding.cause is not None]
    certain = [finding for finding in named if finding.certain]
    clear = [finding for finding in named if finding.cause not in _VAGUE]
    return next((finding.cause for finding in [*certain, *clear, *named]), None)


def tail(path: Path, begin: int = 0) -> str:
    """The end of a file from `begin` on; nothing where it cannot be read."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(min(begin, size), size - TAIL_BYTES))
            return stream.read(TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def last_lines(text: str, count: int = LINES_SHOWN) -> list[str]:
    """For people: the last lines with something on them."""
    return [_shown(line) for line in text.splitlines() if line.strip()][-count:]


def _shown(line: str) -> str:
    printable = "".join(character for character in line.strip() if character.isprintable())
    return printable if len(printable) <= LONGEST_LINE else printable[: LONGEST_LINE - 1] + "…"
