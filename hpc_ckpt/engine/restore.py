"""Restore: the newest checkpoint without defects, and what was passed over on the way to it.

Reads and chooses. Putting the state into the program's objects is the registry's business.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import (
    CheckpointError,
    CorruptCheckpoint,
    NewerCheckpoint,
    NoCheckpoint,
    RestoreMismatch,
)
from ..format.image import parse_shard_name
from ..format.manifest import Manifest, ShardRecord
from ..format.verify import Reader
from ..rundir import CheckpointKey
from ..state.inplace import memory_of
from ..state.tree import decode
from ..tiers.base import Tier
from ..tiers.stack import Stack

log = logging.getLogger("hpc_ckpt")


@dataclass(frozen=True)
class Skipped:
    """A newer checkpoint that was rejected, and why."""

    path: Path
    reason: str
    tier: str = ""
    damaged: bool = False
    """False: it could not be looked at, or did not fit, which says nothing of its bytes."""
    passing: bool = False
    """It could not be read just now, and may be sound."""

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
class Origin:
    """The checkpoint a process goes on from, as the next saves need to know it."""

    key: CheckpointKey
    tier: Tier
    shards: tuple[ShardRecord, ...]
    """Its shards beside the first; each says who holds it."""
    set_apart: frozenset[str]
    """The leaves in them."""
    broken: Mapping[str, frozenset[CheckpointKey]] = field(default_factory=dict)
    """By tier: newer ones that were found to be damaged."""


@dataclass(frozen=True)
class Found:
    """The newest valid checkpoint, if there is one, and what was newer but not valid."""

    checkpoint: Reader | None
    tier: Tier | None
    skipped: tuple[Skipped, ...]

    def check(self) -> None:
        """NoCheckpoint when there are checkpoints and none can be used: starting afresh would
        throw away work because of a bad node or a file system's bad day."""
        if self.checkpoint is not None or not self.skipped:
            return
        told = "; ".join(str(one) for one in self.skipped)
        lasting = any(one.damaged for one in self.skipped)
        again = "Move" if lasting else "Run it again when they can be read, or move"
        raise NoCheckpoint(
            self.skipped[0].path.parent,
            f"none of its checkpoints can be used ({told}). {again} it away to start afresh, with "
            "objects made anew: parts of what was read may be in those that were tracked",
        )

    @property
    def origin(self) -> Origin | None:
        if self.checkpoint is None or self.tier is None:
            return None
        reader, key = self.checkpoint, self.checkpoint.manifest.key
        further = [r for r in reader.manifest.shards if (parse_shard_name(r.file) or (0, 0))[1]]
        return Origin(
            key=key,
            tier=self.tier,
            shards=tuple(replace(r, holder=r.holder or key.directory_name) for r in further),
            set_apart=frozenset().union(*(reader.leaf_names(r) for r in further)),
            broken=self._broken(),
        )

    def _broken(self) -> dict[str, frozenset[CheckpointKey]]:
        found: dict[str, set[CheckpointKey]] = {}
        for one in self.skipped:
            key = CheckpointKey.parse(one.path.name)
            if one.damaged and key is not None:
                found.setdefault(one.tier, set()).add(key)
        return {tier: frozenset(keys) for tier, keys in found.items()}


def newest(stack: Stack, use: Callable[[Reader], None]) -> Found:
    """Let `use` read the newest checkpoint; if that finds a defect, the next older one.

    Never behind one that is sound: RestoreMismatch and NewerCheckpoint end the search.
    """
    skipped: list[Skipped] = []
    for key, tier in stack.newest_first():
        try:
            reader = stack.reader(tier, key)
            use(reader)
            return Found(reader, tier, tuple(skipped))
        except NoCheckpoint:
            if stack.lists(tier, key):  # not removed since then: a link that leads nowhere now
                why = "it is listed, but not there"
                skipped.append(Skipped(tier.path_of(key), why, tier.name))
        except (RestoreMismatch, NewerCheckpoint):
            raise  # it is sound: what is saved after an older one would outrank it for ever
        except (CheckpointError, OSError) as error:
            log.warning("skipped %s", error)
            skipped.append(_skipped(tier, key, error))
    return Found(None, None, tuple(skipped))


def _skipped(tier: Tier, key: CheckpointKey, error: CheckpointError | OSError) -> Skipped:
    corrupt = isinstance(error, CorruptCheckpoint)
    passing = error.passing if isinstance(error, CorruptCheckpoint) else isinstance(error, OSError)
    return Skipped(
        tier.path_of(key), _why(error), tier.name, damaged=corrupt and not passing, passing=passing
    )


def _why(error: CheckpointError | OSError) -> str:
    if isinstance(error, CorruptCheckpoint):
        return "; ".join(str(defect) for defect in error.defects)
    return str(error)


def state_of(
    checkpoint: Reader,
    *,
    like: object = None,
    map_location: Any = None,
    targets: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """The state tree as it was saved, every byte checked; tensors own their memory.

    `like` is the program's present state of the same form, where there is one: it knows the
    classes and devices that a checkpoint only names. Leaves in `targets` are read into those
    tensors, and nowhere else.
    """
    own = targets or {}
    places = checkpoint.read({name: memory_of(tensor) for name, tensor in own.items()})
    aliases, tree = checkpoint.manifest.aliases, checkpoint.manifest.tree
    try:
        return decode(
            tree,
            lambda name: places[aliases.get(name, name)],
            like=like,
            map_location=map_location,
            copy=False,
            own=own,
        )
    except NewerCheckpoint as error:
        raise NewerCheckpoint(checkpoint.path, error.what) from None


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
    before, now = manifest.versions.get("cpu"), torch.backends.cpu.get_cpu_capability()
    if before is not None and before != now:
        found.append(
            f"saved on a processor with {before}, running on one with {now}: results may differ "
            "in the last bits; set ATEN_CPU_CAPABILITY to the lesser of the two for all links"
        )
    return found
