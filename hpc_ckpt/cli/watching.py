"""`run` and `demo`: a chain on this machine, shown while it runs."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.live import Live

from ..chain import demo
from ..chain.ledger import ChainStatus, read_status
from ..chain.local import Interrupted, LocalChain
from ..chain.submit import Prepared
from ..errors import EXIT_COMPLETE, EXIT_FAILED, RootError
from ..units import format_size, parse_duration
from .options import EXIT_INTERRUPTED
from .tables import chain_table, console, live_view, short, status_view, totals

REFRESH_S = 0.25


def run_chain(prepared: Prepared, kill_wait: str) -> int:
    rundir, plan = prepared.rundir, prepared.plan
    screen = console()
    print(f"output    {rundir.logs}\n")
    with _live(None) as show:
        chain = LocalChain(
            rundir,
            links=plan.budget,
            link_time_s=plan.link_s,
            kill_wait_s=parse_duration(kill_wait),
            on_tick=lambda: show(plan.name, partial(read_status, rundir)),
        )
        try:
            complete = chain.run()
        except Interrupted:
            complete = None
    screen.print(status_view(read_status(rundir)))
    if complete is None:
        print("\ninterrupted; run the same command to go on")
        return EXIT_INTERRUPTED
    return EXIT_COMPLETE if complete else EXIT_FAILED


@contextmanager
def _live(total_steps: int | None) -> Iterator[demo.Show]:
    """A view that redraws at most four times a second; plain silence where nobody watches. Only
    what is shown is looked at: that reads the whole history."""
    screen = console()
    if not screen.is_terminal:
        yield lambda _title, _look: None
        return
    with Live(console=screen, auto_refresh=False, transient=True) as live:
        last = 0.0

        def show(title: str, look: Callable[[], ChainStatus]) -> None:
            nonlocal last
            if time.monotonic() - last >= REFRESH_S:
                last = time.monotonic()
                live.update(live_view(look(), total_steps, title), refresh=True)

        yield show


def run_demo(root: Path) -> int:
    """Reference run, disturbed chain, table, proof."""
    _clear(root)
    screen = console()
    started = time.monotonic()
    try:
        screen.print("1. The example, undisturbed: the reference.")
        with _live(demo.TOTAL_STEPS) as show:
            reference = demo.run_reference(root / "reference", show)
        screen.print(f"   {totals(reference)}")
        screen.print(
            "2. The same as a chain of short links: one ends by its time limit, one is killed "
            "with SIGKILL in the middle of a save, one is preempted."
        )
        with _live(demo.TOTAL_STEPS) as show:
            status = demo.run_disturbed(root / "chain", reference, show)
    except Interrupted:
        print("interrupted; nothing is left running")
        return EXIT_INTERRUPTED
    screen.print(chain_table(status))
    screen.print(f"   {totals(status)}")
    return _prove(root, time.monotonic() - started)


def _clear(root: Path) -> None:
    """Only what an earlier demo made may be removed."""
    if root.exists() and not {path.name for path in root.iterdir()} <= {"reference", "chain"}:
        raise RootError(root, "is not an earlier demo's; choose another with --root")
    shutil.rmtree(root, ignore_errors=True)


def _prove(root: Path, seconds: float) -> int:
    found = demo.compare(root / "reference", root / "chain")
    if found.different or not found.leaves:
        print(f"3. The final weights DIFFER in {', '.join(found.different)}", file=sys.stderr)
        return EXIT_FAILED
    print(
        f"3. The final weights of both are equal, bit for bit: {found.leaves} tensors, "
        f"{format_size(found.bytes)}, {short(seconds)} for both runs."
    )
    print(f"\nLook around:  hpc-ckpt status {root}/chain    hpc-ckpt ls {root}/chain    "
          f"hpc-ckpt verify {root}/chain")  # fmt: skip
    return EXIT_COMPLETE
