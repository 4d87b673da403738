"""What the batch script, or the local runner, tells the link runner. Standard library only."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from ..rundir import RunDir
from .allocation import SlurmBackend
from .backend import Backend
from .local import LocalBackend
from .orders import Orders
from .sweep import member_root


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hpc_ckpt.chain.link", description="Run one link.")
    parser.add_argument("--root", required=True, type=Path)
    parser.add_argument("--backend", required=True, choices=("slurm", "local"))
    parser.add_argument("--strategy", help="how links follow each other, should no orders come")
    parser.add_argument("--told", action="store_true", help="TERM came while it was set up")
    parser.add_argument("--set-up", action="store_true", help="its environment was made")
    parser.add_argument("--not-set-up", metavar="WHY", help="its environment could not be made")
    parser.add_argument("--member", type=int, help="of the sweep in --root, by array index")
    parser.add_argument("--end-file", type=Path, help="local: where the end of the link is told")
    return parser.parse_args(argv)


def backend_of(arguments: argparse.Namespace, orders: Orders) -> Backend:
    if arguments.backend == "slurm":
        return SlurmBackend(os.environ, kill_wait_s=orders.kill_wait_s, cpus=orders.threads)
    return LocalBackend(end_file=arguments.end_file, kill_wait_s=orders.kill_wait_s)


def read(root: Path, member: int | None) -> tuple[RunDir, Orders]:
    """The run directory of the chain, and its orders."""
    rundir = RunDir(root if member is None else member_root(root, member))
    return rundir, Orders.read(rundir)
