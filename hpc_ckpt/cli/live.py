"""`watch`: a chain while it runs, as a view, as plain lines, or as JSON. Reads files only."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.live import Live

from ..chain.following import is_over, last_lines, newest_with_output
from ..chain.ledger import ChainStatus, State, read_status
from ..errors import EXIT_COMPLETE, EXIT_FAILED, SpecError
from ..rundir import RunDir
from ..units import parse_duration
from .options import EXIT_INTERRUPTED
from .tables import console, status_view
from .views import AtWork, work_view

REREAD_S = 2.0
LOG_LINES = 8
OTHER_LINES = 12
"""Of the view, beside the table and the log."""


def watch_chain(rundir: RunDir, *, as_json: bool) -> int:
    """Until the chain is over or Ctrl-C; 0 if the work is complete."""
    screen = console()
    try:
        if as_json:
            status = _print_changes(rundir, _json_line)
        elif screen.is_terminal:
            status = _show(rundir, screen)
        else:
            status = _print_changes(rundir, _plain_line)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_COMPLETE if status.state is State.COMPLETE else EXIT_FAILED


def seen_statuses(
    rundir: RunDir, *, sleep: Callable[[float], object] = time.sleep
) -> Iterator[ChainStatus]:
    """The status every two seconds, the last one when the chain is over."""
    while True:
        status = read_status(rundir)
        yield status
        if is_over(status):
            return
        sleep(REREAD_S)


def _show(rundir: RunDir, screen: Console) -> ChainStatus:
    with Live(console=screen, auto_refresh=False, transient=True) as live:
        for status in seen_statuses(rundir):
            rows = max(3, screen.height - LOG_LINES - OTHER_LINES)
            live.update(work_view(_at_work(rundir, status), rows=rows), refresh=True)
    screen.print(status_view(status))
    return status


def _at_work(rundir: RunDir, status: ChainStatus) -> AtWork:
    printed = newest_with_output(rundir)
    log = [] if printed is None else last_lines(rundir.log_file(printed), LOG_LINES)
    deadline = rundir.deadline(status.links[-1].generation) if status.links else None
    return AtWork(status, deadline, _total_time(rundir), tuple(log))


def _total_time(rundir: RunDir) -> float | None:
    try:
        told = (rundir.chain() or {})["spec"]["chain"]["total_time"]
        return None if told is None else parse_duration(told)
    except (KeyError, TypeError, SpecError):
        return None


# ── lines ─────────────────────────────────────────────────────────────────────────────────
def _print_changes(rundir: RunDir, line: Callable[[ChainStatus], str]) -> ChainStatus:
    before: object = None
    for status in seen_statuses(rundir):
        now = _what_counts(status)
        if now != before:
            print(line(status), flush=True)
        before = now
    return status


def _what_counts(status: ChainStatus) -> tuple[object, ...]:
    """Without the seconds, which always change."""
    links = tuple((link.generation, link.cause, link.step_now, link.step_to)
                  for link in status.links)  # fmt: skip
    return (status.state, status.reason, status.remark, status.step, links)


def status_record(status: ChainStatus) -> dict[str, Any]:
    return dataclasses.asdict(status) | {"goodput": status.goodput}


def _json_line(status: ChainStatus) -> str:
    return json.dumps({"time": round(time.time(), 3), **status_record(status)})


def _plain_line(status: ChainStatus) -> str:
    words = [f"{datetime.now():%H:%M:%S}", status.state.value]
    if status.links:
        link = status.links[-1]
        words += [f"link {link.generation}", f"step {link.step_now}", f"saved {status.step}"]
        words += [link.cause] if link.ended is not None else []
    words += [f"({why})" for why in (status.reason, status.remark) if why]
    return "  ".join(words)
