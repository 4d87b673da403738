"""The demonstration: one program, once undisturbed and once as a chain that is disturbed.

Runs the shipped example on the local backend. The first run is the reference and the yardstick:
its length decides how short the links of the second must be. The second loses its time limit,
is killed in the middle of a save, is preempted, and must end with the same bytes.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .. import resources
from ..errors import CheckpointError
from ..format.verify import open_verified
from ..rundir import RunDir
from .layers import Loaded, Option, Places, load
from .ledger import ChainStatus, read_status
from .local import Incident, LocalChain
from .submit import prepare

EPOCHS = 12
STEPS_PER_EPOCH = 50
BATCH = 32
TOTAL_STEPS = EPOCHS * STEPS_PER_EPOCH
SAVE_EVERY = 20
LINKS = 8
"""Tokens; four are needed, the rest is for a machine that is suddenly slower."""
KILL_POINT = "kill@manifest.written:3"
PREEMPT_AFTER = 60
"""Steps into the third link."""
SHARE = 0.25
"""Of the work that fits into a link: even at twice the reference's speed the first one is cut."""
GRACE_S = 10.0

Look = Callable[[], ChainStatus]
Show = Callable[[str, Look], None]
"""By what name, and how to look: that reads the whole history."""


@dataclass(frozen=True)
class Comparison:
    """The weights of two final checkpoints, byte by byte."""

    leaves: int
    bytes: int
    different: tuple[str, ...]


def run_reference(root: Path, show: Show) -> ChainStatus:
    """The program without any disturbance."""
    rundir = _prepare(root, link_time_s=600)
    _run(rundir, 600, {}, lambda look: show("undisturbed", look))
    return _finished(rundir)


def run_disturbed(root: Path, reference: ChainStatus, show: Show) -> ChainStatus:
    """The same program as a chain of short links: time limit, SIGKILL, preemption, and done."""
    rundir = _prepare(root, link_time_s=_link_time(reference, SHARE))
    short_s, long_s = _link_time(reference, SHARE), _link_time(reference, 2.0)
    # Only the first is cut by its limit: on a machine that turns slow the others would be, too.
    incidents = {number: Incident(link_time_s=long_s) for number in range(4, LINKS + 1)}
    incidents |= {
        1: Incident(),
        2: Incident(link_time_s=long_s, environment={"HPC_CKPT_FAULT": KILL_POINT}),
        3: Incident(
            link_time_s=long_s,
            preempt_when=lambda: _steps_of(rundir, 3) >= PREEMPT_AFTER,
            grace_s=GRACE_S,
        ),
    }
    _run(rundir, short_s, incidents, lambda look: show("a chain", look))
    return _finished(rundir)


def compare(one: Path, other: Path) -> Comparison:
    """Whether two runs ended with the same weights, bit for bit."""
    left, right = _final_weights(one), _final_weights(other)
    different = [name for name in sorted({*left, *right}) if left.get(name) != right.get(name)]
    return Comparison(len(left), sum(map(len, left.values())), tuple(different))


def _link_time(reference: ChainStatus, share: float) -> float:
    """Start-up, and that share of the reference's work."""
    link = reference.links[-1]
    return (link.allocated_s - link.useful_s) + share * link.useful_s


def _prepare(root: Path, link_time_s: float) -> RunDir:
    nowhere = Path("/nonexistent")
    places = Places(resources.folder("clusters"), site=nowhere, user=None, project=nowhere)
    program = resources.find("examples/demo.py")
    spec = {
        "name": "demo",
        "command": [sys.executable, str(program), f"--epochs={EPOCHS}",
                    f"--pictures={BATCH * STEPS_PER_EPOCH}"],
        "root": str(root),
        "resources": {"cpus": 1},
        "chain": {"link_time": f"{link_time_s}s", "max_links": LINKS},
        "checkpoint": {"policy": f"every {SAVE_EVERY} steps"},
    }  # fmt: skip
    options = [Option("demo", "kill_wait", "5s")]
    loaded: Loaded = load(spec, options=options, profile="local", cwd=Path.cwd(), environ={},
                          places=places)  # fmt: skip
    return prepare(loaded, cwd=Path.cwd(), environ={}).rundir


def _run(
    rundir: RunDir,
    link_time_s: float,
    incidents: Mapping[int, Incident],
    show: Callable[[Look], None],
) -> None:
    LocalChain(
        rundir,
        links=LINKS,
        link_time_s=link_time_s,
        kill_wait_s=5.0,
        incidents=incidents,
        on_tick=lambda: show(partial(read_status, rundir)),
    ).run()


def _finished(rundir: RunDir) -> ChainStatus:
    status = read_status(rundir)
    if rundir.done() is None:
        raise CheckpointError(
            f"{rundir.root}: the demo did not finish ({status.reason or 'out of links'}); "
            f"its output is in {rundir.logs}"
        )
    return status


def _steps_of(rundir: RunDir, generation: int) -> int:
    links = [link for link in read_status(rundir).links if link.generation == generation]
    return max((link.step_now - link.step_from for link in links), default=0)


def _final_weights(root: Path) -> dict[str, bytes]:
    rundir = RunDir(root)
    newest = rundir.committed()[-1]
    opened = open_verified(rundir.checkpoints / newest.directory_name)
    names = [name for name in opened.leaves if ".model." in f".{name}"]
    return {name: bytes(opened.leaf(name)) for name in names}
