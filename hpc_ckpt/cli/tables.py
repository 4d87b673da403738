"""How things look in a terminal: tables from records, nothing else."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..chain.ledger import ChainStatus, LinkSummary, NextJob, State
from ..units import format_duration, format_size
from .plaintext import moment, shown

if TYPE_CHECKING:  # at run time `status` would pay for pydantic and hashing
    from ..chain.layers import Row
    from ..chain.sweep import SweepStatus
    from ..format.manifest import Manifest

_STATE_STYLE = {
    State.COMPLETE: "green",
    State.RUNNING: "cyan",
    State.STOPPED: "red",
    State.BETWEEN: "yellow",
    State.NEW: "dim",
}


def console() -> Console:
    """Wide where nobody looks at it: a file or a pipe must get whole lines.

    Brackets are what people wrote, never markup: `[gpu, low]` would be gone.
    """
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)


def chain_table(status: ChainStatus) -> Table:
    """One row per link: what it did and what it cost."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("link", justify="right")
    table.add_column("job")
    table.add_column("steps", justify="right")
    table.add_column("why it ended", overflow="fold")
    table.add_column("time", justify="right")
    table.add_column("stall", justify="right")
    table.add_column("lost", justify="right")
    table.add_column("goodput", justify="right")
    for link in status.links:
        table.add_row(*_link_row(link))
    return table


def _link_row(link: LinkSummary) -> list[RenderableType]:
    return [
        str(link.generation),
        link.job or "local",
        f"{link.step_from} → {link.step_now if link.ended is None else link.step_to}",
        _why(link),
        short(link.allocated_s),
        short(link.stall_s),
        count(link.lost_steps, "step") if link.lost_steps else "0",
        f"{100 * link.goodput:.0f} %",
    ]


def _why(link: LinkSummary) -> Text:
    style = {
        "complete": "green",
        "running": "cyan",
        "crashed": "red",
        "killed": "red",
        "lost": "red",
    }
    told = link.cause in ("killed", "lost", "crashed", "could not start") and link.reason
    what = link.reason if link.reason.startswith(link.cause) else f"{link.cause}: {link.reason}"
    return Text(what if told else link.cause, style.get(link.cause, ""))


def status_head(status: ChainStatus) -> Text:
    return Text.assemble(
        (status.name, "bold"),
        "  ",
        (status.state.value, _STATE_STYLE[status.state]),
        f"  step {status.step}" if status.links else "",
        f"  ({status.reason})" if status.reason else "",
    )


def status_view(status: ChainStatus) -> Group:
    """What `hpc-ckpt status` prints."""
    parts: list[RenderableType] = [status_head(status), Text(status.root, "dim")]
    if status.remark:
        parts.append(Text(status.remark, "yellow"))
    if status.next_job is not None:
        parts.append(Text(f"next: job {_waits(status.next_job)}"))
    if status.links:
        parts += [Text(), chain_table(status), Text(), Text(totals(status), "dim")]
    if status.last_lines:
        parts += [Text(), Text("last lines of the program:", "bold"), *map(Text, status.last_lines)]
    return Group(*parts)


def _waits(job: NextJob) -> str:
    """Slurm has no reason yet for a job that has just come."""
    known = job.reason not in ("", "None")
    return f"{job.id}, pending ({job.reason})" if known else f"{job.id}, pending"


def sweep_view(status: SweepStatus) -> Group:
    """A sweep: how many members are where, and those that are not complete."""
    counts = ", ".join(f"{number} {state}" for state, number in sorted(status.counts.items()))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("member", "state", "step", "links", ""):
        table.add_column(name, justify="right" if name in ("step", "links") else "left")
    for member in status.members:
        style = _STATE_STYLE.get(State(member.state), "")
        table.add_row(
            member.name,
            Text(member.state, style),
            str(member.step),
            str(member.links),
            member.reason,
        )
    head = Text.assemble(
        (status.name, "bold"), f"  {count(len(status.members), 'member')}: {counts}"
    )
    told = [Text(status.remark, "yellow")] if status.remark else []
    if status.waiting:
        why = ", ".join(f"{number} ({reason})" for reason, number in status.waiting.items())
        told.append(Text(f"pending: {why}"))
    return Group(head, Text(status.root, "dim"), *told, Text(), table)


def totals(status: ChainStatus) -> str:
    return (
        f"{count(len(status.links), 'link')}, {short(status.allocated_s)} allocated, "
        f"goodput {100 * status.goodput:.0f} %, {count(status.lost_steps, 'step')} lost, "
        f"stall {short(status.stall_s)}"
    )


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def live_view(status: ChainStatus, total_steps: int | None, title: str) -> Group:
    """A chain while it runs."""
    reached = max((link.step_now for link in status.links), default=0)
    parts: list[RenderableType] = [Text(title, "bold"), chain_table(status)]
    if total_steps:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=total_steps, completed=min(reached, total_steps), width=50),
            f"step {reached} of {total_steps}",
        )
        parts.append(bar)
    return Group(*parts)


def checkpoint_table(rows: Iterable[tuple[str, Manifest | None, str]]) -> Table:
    """One row per checkpoint: (directory name, manifest or None, remark)."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("checkpoint", "epoch", "saved", "size", "why", "metrics"):
        table.add_column(name, overflow="fold", justify="right" if name == "size" else "left")
    for name, manifest, remark in rows:
        table.add_row(*_checkpoint_row(name, manifest, remark))
    return table


def _checkpoint_row(name: str, manifest: Manifest | None, remark: str) -> list[RenderableType]:
    if manifest is None:
        return [name, "", "", "", Text(shown(remark), "red"), ""]
    return [
        name,
        str(manifest.epoch),
        _moment(manifest.wall_time),
        format_size(sum(shard.size for shard in manifest.shards)),
        shown(f"{manifest.reason}{' · ' + remark if remark else ''}"),
        shown(", ".join(f"{key} {value:.4g}" for key, value in manifest.metrics.items())),
    ]


def origin_table(rows: Sequence[Row], *, origin: bool) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for row in rows:
        table.add_row(row.key, row.value, *([Text(row.origin, "dim")] if origin else []))
    return table


def short(seconds: float) -> str:
    """Durations to three digits: nobody reads milliseconds of an hour."""
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds else "0 s"
    return format_duration(round(seconds))


def _moment(unix_s: float) -> str:
    recent = time.time() - unix_s < 86400
    return moment(unix_s, "%H:%M:%S" if recent else "%Y-%m-%d %H:%M")
