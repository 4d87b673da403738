"""A program that recovers, drains, retains and sweeps, and is killed somewhere in between.

drain_child.py ROOT POINT NTH     dies at the NTH time POINT is reached
drain_child.py ROOT               runs to its end and prints every point it reached

ROOT/fast has the checkpoints 1 to 5, of which 4 and 5 use shards of 3. ROOT/run has 1, 2 and 4, a
pinned 3 that is damaged where 5 needs it and intact where 4 does, and what an earlier death left: 2
is hidden, and so is a pinned 4 that has been replaced since.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from hpc_ckpt import fsio
from hpc_ckpt.events import EventLog
from hpc_ckpt.format.image import lay_out
from hpc_ckpt.format.manifest import ShardRecord
from hpc_ckpt.format.verify import PIN_NAME
from hpc_ckpt.rundir import CheckpointKey
from hpc_ckpt.settings import Keep
from hpc_ckpt.testing import PlainLeaf, image_of, kill_at, make_checkpoint, plain_manifest
from hpc_ckpt.tiers.base import Committed, Tier
from hpc_ckpt.tiers.directory import DirectoryTier
from hpc_ckpt.tiers.drain import drain
from hpc_ckpt.tiers.draining import Drainer
from hpc_ckpt.tiers.retention import retain
from hpc_ckpt.tiers.stack import Stack

CHUNK = 8192


def key(step: int) -> CheckpointKey:
    return CheckpointKey(1, step)


def leaves(step: int) -> list[PlainLeaf]:
    return [PlainLeaf(f"layer.{n}.{step}", bytes([step, n]) * 300) for n in range(90)]


def tiers(root: Path) -> tuple[DirectoryTier, DirectoryTier]:
    return (
        DirectoryTier(root / "fast", name="local", chunk=CHUNK),
        DirectoryTier(root / "run", name="root", chunk=CHUNK),
    )


def pass_guard() -> None:
    """Nobody is fenced here."""


def prepare(source: DirectoryTier, target: DirectoryTier) -> None:
    for step in (1, 2, 3):
        make_checkpoint(source, key(step), leaves(step), header_cap=4096)
    damaged, intact = source.manifest(key(3)).shards[:2]
    refer(source, 4, replace(intact, holder=key(3).directory_name))
    refer(source, 5, replace(damaged, holder=key(3).directory_name))
    for step in (1, 2, 3, 4):
        drain(source, target, key(step), pass_guard)
    shard_file = target.path_of(key(3)) / source.manifest(key(3)).shards[0].file
    data = bytearray(shard_file.read_bytes())
    data[-1] ^= 1
    shard_file.write_bytes(data)
    target.pin(key(3))
    abandoned = target.stage(key(3)).__enter__()
    (abandoned.path / "rank-00000.safetensors").write_bytes(b"half")
    target.path_of(key(2)).rename(target._hidden("was", key(2)))
    replaced = target._hidden("was", key(4))
    shutil.copytree(target.path_of(key(4)), replaced)
    (replaced / PIN_NAME).touch()


def refer(tier: DirectoryTier, step: int, held: ShardRecord) -> None:
    """A checkpoint with one shard of its own and one of another's."""
    with tier.stage(key(step)) as staging:
        (layout,) = lay_out(leaves(step), first_part=7)
        shard = staging.write_shard(layout, image_of(layout, leaves(step)))
        staging.refer(held)
        staging.commit(plain_manifest(key(step), [shard, held]), pass_guard)


def main(root: Path) -> None:
    prepare(*tiers(root))
    source, target = tiers(root)
    seen: list[str] = []
    if len(sys.argv) > 2:
        kill_at(sys.argv[2], int(sys.argv[3]))
    else:
        fsio.observe(seen.append)

    def tidy(tier: Tier, committed: Committed) -> None:
        retain(tier, Keep(last=2), generation=1, committed=committed.key, guard=pass_guard)
        tier.sweep(1)

    target.recover()
    events = EventLog(root / "events.jsonl")
    stack = Stack([source, target])
    drainer = Drainer(stack, guard=lambda tier: None, events=events, after=tidy)
    drainer.order(key(5), source)
    drained = drainer.close(60)
    print("\n".join(seen) if drained else "not drained")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
