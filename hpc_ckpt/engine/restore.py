"""Restore: the newest checkpoint without defects, and what was passed over on the way to it.

Reads and chooses. Putting the state into the program's objects is the registry's business.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, CorruptCheckpoint, NoCheckpoint
from ..format.manifest import Manifest
from ..format.verify import OpenCheckpoint
from ..rundir import CheckpointKey
from ..state.tree import decode
from ..tiers.base import Tier

log = logging.getLogger("hpc_ckpt")


@dataclass(frozen=True)
class Skipped:
    """A newer checkpoint that was rejected, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path.name}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Restored:
    """Where this process went on from."""

    step: int
    epoch: int
    generation: int
    path: Path
    tier: str
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True)
class Found:
    """The newest valid checkpoint, if there is one, and what was newer but not valid."""

    checkpoint: OpenCheckpoint | None
    skipped: tuple[Skipped, ...]


def newest(tier: Tier) -> Found:
    """Open the newest checkpoint without defects.

    Raises NoCheckpoint when there are checkpoints and none can be used: starting afresh would
    throw away work because of a bad node or a file system's bad day.
    """
    skipped: list[Skipped] = []
    for key in _newest_first(tier):
        try:
            return Found(tier.open(key), tuple(skipped))
        except NoCheckpoint:
            continue  # removed since the list was made
        except (CheckpointError, OSError) as error:
            log.warning("skipped %s", error)
            skipped.append(Skipped(tier.path_of(key), _why(error)))
    if skipped:
        place = skipped[0].path.parent
        told = "; ".join(str(one) for one in skipped)
        raise NoCheckpoint(
            place, f"none of its checkpoints can be used ({told}). Move it away to start afresh"
        )
    return Found(None, ())


def _newest_first(tier: Tier) -> Iterator[CheckpointKey]:
    """Every key once, looking again when the list is used up: a writer may have moved on."""
    tried: set[CheckpointKey] = set()
    while fresh := [key for key in tier.keys() if key not in tried]:  # noqa: SIM118 - not a dict
        tried.add(fresh[-1])
        yield fresh[-1]


def _why(error: CheckpointError | OSError) -> str:
    if isinstance(error, CorruptCheckpoint):
        return "; ".join(str(defect) for defect in error.defects)
    return str(error)


def state_of(checkpoint: OpenCheckpoint, *, like: object = None, map_location: Any = None) -> Any:
    """The state tree as it was saved; tensors own their memory.

    `like` is the program's present state of the same form, where there is one: it knows the
    classes and devices that a checkpoint only names.
    """
    return decode(checkpoint.manifest.tree, checkpoint.leaf, like=like, map_location=map_location)


def differences(manifest: Manifest) -> list[str]:
    """What may change the last bits: another thread count or torch release adds up otherwise."""
    threads, here = torch.get_num_threads(), str(torch.__version__)
    found = []
    if manifest.threads != threads:
        found.append(
            f"saved with {manifest.threads} threads, running with {threads}: results may differ "
            f"in the last bits; set OMP_NUM_THREADS={manifest.threads}"
        )
    saved = manifest.versions.get("torch", "of an unknown version")
    if saved != here:
        found.append(
            f"saved with torch {saved}, running with torch {here}: results may differ in the "
            "last bits"
        )
    return found
