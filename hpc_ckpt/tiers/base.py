"""The contract of a tier: a place checkpoints live, with a speed and a failure domain."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..format.defects import Defect
from ..format.image import ImageLayout
from ..format.manifest import Manifest, ShardRecord
from ..format.reading import never
from ..format.verify import OpenCheckpoint, Reader
from ..rundir import CheckpointKey
from .writing import Pace


@dataclass(frozen=True)
class Committed:
    """A checkpoint that is durable in its tier."""

    key: CheckpointKey
    path: Path
    size: int
    """Bytes of all files in its directory."""
    reused: bool = False
    """The same state was there already under this key; nothing new was kept."""


@dataclass(frozen=True)
class Summary:
    """What retention needs of a manifest."""

    metrics: Mapping[str, float]
    holders: frozenset[CheckpointKey]
    """Older checkpoints that hold shards of it."""


class Staging(Protocol):
    """A checkpoint being written; readers cannot see it."""

    def write_shard(
        self, layout: ImageLayout, image: memoryview, pace: Pace | None = None
    ) -> ShardRecord:
        """Called once per file. When it returns the bytes are on stable storage."""

    def refer(self, record: ShardRecord) -> None:
        """Instead of writing it again: a shard that an older checkpoint of this tier holds.
        Raises OSError if it is not there, or a reader would not open it: a link is not followed."""

    def commit(
        self,
        manifest: Manifest,
        guard: Callable[[], None],
        elsewhere: Manifest | None = None,
    ) -> Committed:
        """Called once, last. `elsewhere` has the same generation and step in another tier: the
        same state gets its name, another one the next revision. `guard` runs right before the
        checkpoint becomes visible, and raises to stop it. When this returns, a crash of the node
        can no longer lose it."""

    def adopt(self, record: ShardRecord, chunks: Iterable[memoryview]) -> None:
        """In a drain, once per file that this checkpoint holds itself: write a shard whose
        record is known. Raises CorruptCheckpoint at the first chunk that is not what its digest
        says; a chunk may be overwritten as soon as the next is asked for."""

    def commit_as(self, data: bytes, manifest: Manifest, guard: Callable[[], None]) -> Committed:
        """Called once, last, in a drain: publish exactly these manifest bytes under exactly
        this key. What is there already is reused if it restores to the same state, removed
        first if it is broken, and never replaced otherwise (CheckpointError)."""


class Tier(Protocol):
    """A place checkpoints live. Every OSError reaches the caller as it is."""

    name: str

    def keys(self) -> list[CheckpointKey]:
        """Every checkpoint that is there, oldest first; says nothing of validity."""

    def path_of(self, key: CheckpointKey) -> Path: ...

    def manifest(self, key: CheckpointKey) -> Manifest:
        """Cheap: only the manifest is read and checked. Raises CheckpointError."""

    def summary(self, key: CheckpointKey) -> Summary:
        """The same for those that ask often: read once, for a manifest never changes."""

    def verify(self, key: CheckpointKey, stop: Callable[[], bool] = never) -> list[Defect]:
        """Reads every byte; empty means valid. Never raises for bad content; BrokenOff once
        `stop` says so."""

    def open(self, key: CheckpointKey) -> OpenCheckpoint:
        """Raises CorruptCheckpoint, or NoCheckpoint if it went in the meantime."""

    def reader(self, key: CheckpointKey, stop: Callable[[], bool] = never) -> Reader:
        """The same, with the leaves yet to be read; `stop` is asked while it looks for what is
        wrong with a broken one."""

    def stage(self, key: CheckpointKey) -> AbstractContextManager[Staging]:
        """Leaving the block without a commit leaves nothing behind."""

    def pinned(self, key: CheckpointKey) -> bool: ...

    def pin(self, key: CheckpointKey, *, pinned: bool = True) -> None:
        """Keep a checkpoint from retention, or give it up again."""

    def remove(self, key: CheckpointKey) -> bool:
        """When this returns no reader sees it; that it had already gone is fine.
        False: another checkpoint refers to it, or it is pinned, so it stays."""

    def recover(self) -> None:
        """Before anything is read by whoever has the lease: what a killed writer was about to
        replace gets its name back or, where a whole copy has that already, goes; and what it hid
        to remove though it was pinned comes back."""

    def sweep(self, generation: int) -> None:
        """Delete what killed writers up to this generation left behind, but for what recover()
        puts back. Called only after a commit of this generation: nothing older can be committed
        any more."""
