"""Public doubles and a self-test: a clock, small checkpoints, a tier that fails, and death.

For tests of code that uses hpc_ckpt, and for users who want to see their own chain survive:

    HPC_CKPT_FAULT=kill@commit.guarded:2 python train.py

kills the process with SIGKILL the second time it reaches the kill point `commit.guarded`, just
before its second checkpoint becomes visible. The names are hpc_ckpt.fsio.KILL_POINTS. Nothing
here is used by a run that does not ask for it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import difflib
import os
import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import fsio
from .errors import SpecError
from .format.defects import Defect
from .format.image import HEADER_CAP, ITEM_BITS, ImageLayout, lay_out
from .format.manifest import CHUNK, FORMAT_VERSION, TAIL_BYTES, Manifest, ShardRecord, digest
from .format.reading import never
from .format.verify import OpenCheckpoint, Reader
from .rundir import MANIFEST_NAME, CheckpointKey
from .tiers.base import Committed, Tier
from .tiers.directory import DirectoryTier
from .tiers.staging import DirectoryStaging
from .tiers.writing import Pace

ENV_FAULT = "HPC_CKPT_FAULT"
OPERATIONS = (
    "keys",
    "manifest",
    "verify",
    "open",
    "stage",
    "write_shard",
    "commit",
    "adopt",
    "commit_as",
    "pin",
    "remove",
    "sweep",
)
"""What a FaultyTier can be told to fail at."""

_FAULT = re.compile(r"kill@([a-z._]+)(?::([1-9]\d{0,8}))?")


class FakeClock:
    """A clock that moves only when told; stands in for time.monotonic or time.time."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def sleep(self, seconds: float) -> None:
        """Stands in for time.sleep."""
        self.advance(seconds)


@dataclass
class _Fault:
    error: BaseException
    times: int | None


class FaultyTier(DirectoryTier):
    """A real directory tier whose operations fail when told to.

    >>> FaultyTier("/scratch/x").fail_at("write_shard", OSError(28, "No space left on device"))
    FaultyTier('/scratch/x', name='shared')
    """

    def __init__(
        self, path: str | os.PathLike[str], *, name: str = "shared", chunk: int = CHUNK
    ) -> None:
        super().__init__(path, name=name, chunk=chunk)
        self._planned: dict[str, _Fault] = {}

    def fail_at(
        self, operation: str, error: BaseException, *, times: int | None = None
    ) -> FaultyTier:
        """Raise `error` at the next `times` calls of an operation, or until heal()."""
        if operation not in OPERATIONS:
            raise ValueError(f"{operation!r} is not one of {', '.join(OPERATIONS)}")
        self._planned[operation] = _Fault(error, times)
        return self

    def heal(self) -> None:
        """No operation fails any more."""
        self._planned.clear()

    def meet(self, operation: str) -> None:
        """Raise what is planned for this operation, if anything."""
        fault = self._planned.get(operation)
        if fault is None:
            return
        if fault.times is not None:
            fault.times -= 1
            if fault.times <= 0:
                del self._planned[operation]
        raise fault.error

    def keys(self) -> list[CheckpointKey]:
        self.meet("keys")
        return super().keys()

    def manifest(self, key: CheckpointKey) -> Manifest:
        self.meet("manifest")
        return super().manifest(key)

    def verify(self, key: CheckpointKey, stop: Callable[[], bool] = never) -> list[Defect]:
        self.meet("verify")
        return super().verify(key, stop)

    def open(self, key: CheckpointKey) -> OpenCheckpoint:
        self.meet("open")
        return super().open(key)

    def reader(self, key: CheckpointKey, stop: Callable[[], bool] = never) -> Reader:
        self.meet("open")
        return super().reader(key, stop)

    def stage(self, key: CheckpointKey) -> DirectoryStaging:
        self.meet("stage")
        return _FaultyStaging(self, key)

    def pin(self, key: CheckpointKey, *, pinned: bool = True) -> None:
        self.meet("pin")
        super().pin(key, pinned=pinned)

    def remove(self, key: CheckpointKey) -> bool:
        self.meet("remove")
        return super().remove(key)

    def sweep(self, generation: int) -> None:
        self.meet("sweep")
        super().sweep(generation)


class _FaultyStaging(DirectoryStaging):
    def __init__(self, tier: FaultyTier, key: CheckpointKey) -> None:
        super().__init__(tier, key)
        self._faulty = tier

    def write_shard(
        self, layout: ImageLayout, image: memoryview, pace: Pace | None = None
    ) -> ShardRecord:
        self._faulty.meet("write_shard")
        return super().write_shard(layout, image, pace)

    def commit(
        self,
        manifest: Manifest,
        guard: Callable[[], None],
        elsewhere: Manifest | None = None,
    ) -> Committed:
        self._faulty.meet("commit")
        return super().commit(manifest, guard, elsewhere)

    def adopt(self, record: ShardRecord, chunks: Iterable[memoryview]) -> None:
        self._faulty.meet("adopt")
        super().adopt(record, chunks)

    def commit_as(self, data: bytes, manifest: Manifest, guard: Callable[[], None]) -> Committed:
        self._faulty.meet("commit_as")
        return super().commit_as(data, manifest, guard)


@dataclass(frozen=True)
class PlainLeaf:
    """A leaf with one dimension, given as its bytes."""

    name: str
    data: bytes
    dtype: str = "U8"

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.data) * 8 // ITEM_BITS[self.dtype],)

    @property
    def nbytes(self) -> int:
        return len(self.data)


def image_of(layout: ImageLayout, leaves: Sequence[PlainLeaf]) -> memoryview:
    """The file image of one layout with its leaves copied in."""
    image = bytearray(layout.size)
    image[: len(layout.header)] = layout.header
    for leaf in leaves:
        if leaf.name in layout.spans:
            start, end = layout.spans[leaf.name]
            image[start:end] = leaf.data
    return memoryview(image)


def plain_manifest(key: CheckpointKey, shards: Sequence[ShardRecord], **fields: Any) -> Manifest:
    """A manifest with the dullest values; `fields` replaces any of them."""
    values: dict[str, Any] = {
        "chain": "00000000-0000-0000-0000-000000000000",
        "generation": key.generation,
        "step": key.step,
        "revision": key.revision,
        "parent": None,
        "epoch": 0,
        "wall_time": 0.0,
        "reason": "test",
        "metrics": {},
        "world_size": 1,
        "threads": 1,
        "versions": {},
        "tree": {},
        "aliases": {},
        "shards": tuple(shards),
    }
    return Manifest(**{**values, **fields})


def make_checkpoint(
    tier: Tier,
    key: CheckpointKey,
    leaves: Sequence[PlainLeaf] = (),
    *,
    guard: Callable[[], None] = lambda: None,
    header_cap: int = HEADER_CAP,
    **fields: Any,
) -> Committed:
    """Stage, write and commit a small checkpoint whose tree names every leaf."""
    fields.setdefault("tree", [{"$tensor": {"leaf": leaf.name}} for leaf in leaves])
    with tier.stage(key) as staging:
        shards = [
            staging.write_shard(layout, image_of(layout, leaves))
            for layout in lay_out(leaves, header_cap=header_cap)
        ]
        return staging.commit(plain_manifest(key, shards, **fields), guard)


def make_newer(checkpoint: Path) -> None:
    """Give a checkpoint the next format version, and a digest that fits."""
    manifest = checkpoint / MANIFEST_NAME
    now, then = (
        b'"format_version": %d' % number for number in (FORMAT_VERSION, FORMAT_VERSION + 1)
    )
    body = manifest.read_bytes()[:-TAIL_BYTES].replace(now, then, 1)
    manifest.write_bytes(body + b'"digest": "%s"\n}\n' % digest(body).encode("ascii"))


def kill_at(point: str, nth: int = 1) -> None:
    """SIGKILL this process the `nth` time it reaches a kill point."""
    if point not in fsio.KILL_POINTS:
        raise SpecError(_unknown_point(point))
    left = nth

    def watch(reached: str) -> None:
        nonlocal left
        if reached != point:
            return
        left -= 1
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    fsio.observe(watch)


def arm_from_environment(environ: Mapping[str, str] | None = None) -> bool:
    """Do what HPC_CKPT_FAULT asks ("kill@POINT" or "kill@POINT:N"); False if it is not set."""
    text = (os.environ if environ is None else environ).get(ENV_FAULT)
    if text is None or not text.strip():
        return False
    match = _FAULT.fullmatch(text.strip())
    if match is None:
        raise SpecError(f"{ENV_FAULT}={text!r}: write kill@POINT or kill@POINT:N")
    try:
        kill_at(match[1], int(match[2] or 1))
    except SpecError as error:
        raise SpecError(f"{ENV_FAULT}={text!r}: {error}") from None
    return True


def _unknown_point(point: str) -> str:
    near = difflib.get_close_matches(point, fsio.KILL_POINTS, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(fsio.KILL_POINTS)}."
    return f"unknown kill point {point!r}. {hint}"
