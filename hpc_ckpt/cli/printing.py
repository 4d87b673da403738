"""What the verbs about runs print, line by line."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from .. import lease
from ..chain.following import Follower, chosen_link, newest_with_output, read_log
from ..rundir import RunDir
from .options import EXIT_INTERRUPTED

if TYPE_CHECKING:  # at run time `logs` would pay for pydantic
    from pathlib import Path

    from ..chain.plan import Plan
    from ..chain.stopping import How, Stopped
    from ..chain.support import Report

MOST_PLACES = 20


# ── logs ──────────────────────────────────────────────────────────────────────────────────
def print_log(rundir: RunDir, wanted: int | None, lines: int | None, *, as_json: bool) -> None:
    link = chosen_link(rundir, wanted)
    out = _Output(rundir, as_json=as_json)
    for text in read_log(rundir.log_file(link), lines):
        out.add(link, text)
    out.end()


def follow_logs(rundir: RunDir, wanted: int | None, lines: int, *, as_json: bool) -> int:
    """Until the chain is over or Ctrl-C."""
    link = newest_with_output(rundir) if wanted is None else chosen_link(rundir, wanted)
    out = _Output(rundir, as_json=as_json, headers=True)
    try:
        for piece in Follower(rundir, link, lines=lines).pieces():
            out.add(piece.link, piece.text)
    except KeyboardInterrupt:
        out.end()
        return EXIT_INTERRUPTED
    out.end()
    return 0


class _Output:
    """Text as it comes, or one JSON object a line; a header where another link begins."""

    def __init__(self, rundir: RunDir, *, as_json: bool, headers: bool = False) -> None:
        self._rundir = rundir
        self._as_json = as_json
        self._headers = headers
        self._link: int | None = None
        self._open = ""
        """What follows the last line break."""

    def add(self, link: int, text: str) -> None:
        if link != self._link:
            self.end()
            self._link = link
            if self._headers and not self._as_json:
                _write(_header(self._rundir, link) + "\n")
        if self._as_json:
            *whole, self._open = (self._open + text).split("\n")
            _write("".join(self._record(line) for line in whole))
        elif text:
            _write(text)
            self._open = text.rpartition("\n")[2]

    def end(self) -> None:
        if self._open:
            _write(self._record(self._open) if self._as_json else "\n")
        self._open = ""

    def _record(self, line: str) -> str:
        return json.dumps({"link": self._link, "line": line}) + "\n"


def _header(rundir: RunDir, link: int) -> str:
    holder = lease.holder_of(rundir, link) or lease.Holder()
    where = f", job {holder.job}" if holder.job else ""
    return f"── link {link}{where} on {holder.host or 'an unknown host'} ──"


def _write(text: str) -> None:
    """As it is, whatever the terminal's encoding: what a program prints is not ours to judge."""
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    sys.stdout.buffer.flush()


# ── stop, resume, report ──────────────────────────────────────────────────────────────────
def say_stopped(rundir: RunDir, stopped: Stopped, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"root": str(rundir.root), **dataclasses.asdict(stopped)}))
        return
    print(f"halted: {rundir.root}")
    if stopped.cancelled:
        print(f"cancelled what was pending of array {', '.join(stopped.cancelled)}")
    if stopped.killed is not None:
        print(f"link {stopped.link} did not end in time: job {stopped.killed} was cancelled")
    elif not stopped.ended:
        print(_still_running(stopped))
    print(f"go on with:  {_again(rundir)}")


def _still_running(stopped: Stopped) -> str:
    from ..chain.stopping import How

    if stopped.how is How.AFTER_CHECKPOINT:
        return f"link {stopped.link} ends after its next checkpoint; take it back: remove 'halt'"
    return f"link {stopped.link} was asked to save and end"


def _again(rundir: RunDir) -> str:
    local = (rundir.chain() or {}).get("backend") == "local"
    return "the same 'hpc-ckpt run'" if local else f"hpc-ckpt resume {rundir.root}"


def say_submitted(plan: Plan, jobs: list[str]) -> None:
    job = " ".join(jobs)
    print("\n".join(plan.describe()))
    print(f"submitted {'array' if plan.array else 'job'} {job}")
    print(f"look at it:  hpc-ckpt status {plan.root}")
    print(f"stop it:     hpc-ckpt stop {plan.root}   (saves first; scancel {job} ends it at once)")


def say_sweep_stopped(root: Path, how: How, *, as_json: bool) -> None:
    from ..chain.stopping import stop_sweep

    found = stop_sweep(root, how)
    if as_json:
        print(json.dumps({"root": str(root), **dataclasses.asdict(found)}))
        return
    print(f"halted {len(found.stopped)} members of {root}; {len(found.running)} of them ran")
    if found.killed:
        print(f"did not end in time, their jobs were cancelled: {', '.join(found.killed)}")
    print(f"go on with:  hpc-ckpt resume {root}   (or one of its members)")


def say_reported(report: Report) -> None:
    print(f"{report.path}: {report.files} files")
    if report.places:
        print(f"taken out ({len(report.places)}; all of them in redacted.txt):")
        for place in report.places[:MOST_PLACES]:
            print(f"  {place}")
    else:
        print("nothing looked like a secret")
    if report.left_out:
        print(f"left out for size: {len(report.left_out)} files (left-out.txt)")
    print("look into it before you send it: only you know all of your secrets")
