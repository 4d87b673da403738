"""What a manifest says beside the state: who, when, why, and with which versions."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import platform
import time

import numpy as np
import torch

from .. import __version__
from ..format.manifest import Manifest, ShardRecord
from .orders import Order, Publisher


def manifest_of(
    publisher: Publisher, order: Order, parent: str | None, shards: tuple[ShardRecord, ...]
) -> Manifest:
    """The manifest of a save; the commit gives it its revision."""
    about = order.about
    return Manifest(
        chain=publisher.chain,
        generation=publisher.lease.generation,
        step=about.step,
        revision=0,
        parent=parent,
        epoch=about.epoch,
        wall_time=time.time(),
        reason=about.reason,
        metrics=about.metrics,
        world_size=1,
        threads=torch.get_num_threads(),
        versions=versions(),
        tree=order.snapshot.make_tree(),
        aliases=order.snapshot.aliases,
        shards=shards,
    )


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "hpc_ckpt": __version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
