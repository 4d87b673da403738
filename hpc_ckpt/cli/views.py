"""How a run's history and a chain at work look in a terminal."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import time
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..chain.history import ChainEvent, History, LinkHistory
from ..chain.ledger import ChainStatus
from .plaintext import moment
from .tables import chain_table, short, status_head, totals

BAR_WIDTH = 40
SHORT = "%m-%d %H:%M:%S"


# ── history ───────────────────────────────────────────────────────────────────────────────
def history_view(history: History) -> Group:
    head = Text.assemble((history.name, "bold"), f"  {history.state}")
    if history.reason:
        head.append(f"  ({history.reason})")
    parts: list[RenderableType] = [head, Text(history.root, "dim")]
    if history.links:
        parts += [Text(), _links(history.links)]
    if history.events:
        parts += [Text(), *map(_event, history.events)]
    return Group(*parts)


def _links(links: tuple[LinkHistory, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("link", "began", "waited", "steps", "lost"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("job", "host", "why it ended", "how that is known"):
        table.add_column(name, overflow="fold")
    for link in links:
        table.add_row(
            str(link.generation),
            moment(link.started, SHORT),
            "" if link.wait_s is None else short(link.wait_s),
            f"{link.step_from} → {link.step_to}",
            str(link.lost_steps),
            link.job or "local",
            link.host,
            Text(_why(link)),
            Text("; ".join(link.evidence), "dim"),
        )
    return table


def _why(link: LinkHistory) -> str:
    if not link.reason or link.reason == link.cause:
        return link.cause
    return link.reason if link.reason.startswith(link.cause) else f"{link.cause}: {link.reason}"


def _event(event: ChainEvent) -> Text:
    told = ", ".join(f"{key} {value}" for key, value in event.fields.items() if value is not None)
    text = f"{moment(event.time, SHORT)}  link {event.generation}  {event.event.replace('_', ' ')}"
    return Text(f"{text}: {told}" if told else text)


# ── a chain at work ───────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class AtWork:
    """What the live view shows of one moment."""

    status: ChainStatus
    deadline: float | None
    """Of the running link."""
    total_s: float | None
    """What the user said the work takes."""
    log: tuple[str, ...]


def work_view(seen: AtWork, *, rows: int) -> Group:
    """The newest links, bars, and the last lines of output."""
    status = seen.status
    newest = replace(status, links=status.links[-rows:])
    parts: list[RenderableType] = [status_head(status), Text(status.root, "dim"), Text()]
    if status.links:
        hidden = len(status.links) - len(newest.links)
        parts += [Text(f"… {hidden} before", "dim")] if hidden else []
        parts += [chain_table(newest), Text(totals(status), "dim")]
    parts += _bars(seen)
    if seen.log:
        lines = [Text(printable(line), no_wrap=True, overflow="ellipsis") for line in seen.log]
        parts += [Text(), *lines]
    return Group(*parts, Text("Ctrl-C leaves; the chain goes on", "dim"))


def _bars(seen: AtWork) -> list[RenderableType]:
    table = Table.grid(padding=(0, 1))
    links = seen.status.links
    if links and links[-1].ended is None and seen.deadline is not None:
        length_s = seen.deadline - links[-1].started
        _bar(table, f"link {links[-1].generation}", time.time() - links[-1].started, length_s)
    if seen.total_s:
        _bar(table, "saved work", sum(link.useful_s for link in links), seen.total_s)
    return [Text(), table] if table.row_count else []


def _bar(table: Table, name: str, done_s: float, all_s: float) -> None:
    if all_s <= 0:
        return
    done_s = min(max(done_s, 0.0), all_s)
    bar = ProgressBar(total=all_s, completed=done_s, width=BAR_WIDTH)
    table.add_row(name, bar, f"{short(done_s)} of {short(all_s)}")


def printable(line: str) -> str:
    """A program's line can hold what would move the cursor."""
    return "".join(c if c.isprintable() else " " if c == "\t" else "" for c in line)
