"""Looking at checkpoints from outside a run: load one, find the newest or the best.

Reads only; takes no lease and needs no tracked objects.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, CorruptCheckpoint, NewerCheckpoint, NoCheckpoint, SpecError
from ..format.verify import open_reader
from ..rundir import CheckpointKey, RunDir
from ..tiers.directory import DirectoryTier
from ..tiers.wholeness import broken
from .restore import state_of


def load(path: str | os.PathLike[str], map_location: Any = None) -> Any:
    """The state tree of one checkpoint, every byte verified; runs no code of the file's.

    Its keys: `tracked` (what was passed to Checkpointer, by name), `rng`, `data`, `progress`.
    """
    return state_of(open_reader(Path(path)), map_location=map_location)


def latest(root: str | os.PathLike[str]) -> Path:
    """The newest checkpoint of a run directory that a restore would take; raises NoCheckpoint.

    OSError if a newer one cannot be read just now, NewerCheckpoint if only a newer version can
    read it: it may be sound.
    """
    tier = _tier(root)
    return _first_valid(tier, reversed(tier.keys()), "no valid checkpoint there")


def best(root: str | os.PathLike[str], metric: str, mode: str = "max") -> Path:
    """The valid checkpoint with the best value of a metric; of equals the newest."""
    if mode not in ("max", "min"):
        raise SpecError(f"best(): mode must be 'max' or 'min', not {mode!r}")
    tier = _tier(root)
    sign = 1.0 if mode == "max" else -1.0
    scored = sorted((sign * value, key) for key, value in _values(tier, metric))
    return _first_valid(
        tier, (key for _, key in reversed(scored)), f"no valid checkpoint has a {metric!r}"
    )


def _tier(root: str | os.PathLike[str]) -> DirectoryTier:
    return DirectoryTier(RunDir(root).checkpoints)


def _values(tier: DirectoryTier, metric: str) -> Iterable[tuple[CheckpointKey, float]]:
    for key in tier.keys():  # noqa: SIM118 - a tier is not a dict
        try:
            value = tier.manifest(key).metrics.get(metric, math.nan)
        except NewerCheckpoint:  # what value it has cannot be told
            raise
        except CheckpointError as error:  # broken: it could not be loaded either
            if isinstance(error, CorruptCheckpoint) and error.passing:
                raise
            continue
        if not math.isnan(value):
            yield key, value


def _first_valid(tier: DirectoryTier, keys: Iterable[CheckpointKey], why: str) -> Path:
    for key in keys:
        if not broken(tier, key):
            return tier.path_of(key)
    raise NoCheckpoint(tier.path, why)
