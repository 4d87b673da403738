"""A program that commits, retains, sweeps and writes, and is killed somewhere in between.

commit_child.py ROOT POINT NTH     dies at the NTH time POINT is reached
commit_child.py ROOT               runs to its end and prints every point it reached
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import sys
from pathlib import Path

from hpc_ckpt import fsio
from hpc_ckpt.format.image import lay_out
from hpc_ckpt.rundir import CheckpointKey
from hpc_ckpt.settings import Keep
from hpc_ckpt.testing import PlainLeaf, image_of, kill_at, make_checkpoint
from hpc_ckpt.tiers.directory import DirectoryTier
from hpc_ckpt.tiers.retention import retain


def leaves(step: int) -> list[PlainLeaf]:
    return [PlainLeaf(f"layer.{n}", bytes([step, n]) * 300) for n in range(60)]


def save(tier: DirectoryTier, step: int) -> CheckpointKey:
    return make_checkpoint(tier, CheckpointKey(1, step), leaves(step), header_cap=4096).key


def prepare(root: Path, tier: DirectoryTier) -> None:
    """Three older checkpoints, what earlier deaths left behind, and an older record."""
    for step in (1, 2, 3):
        save(tier, step)
    staging = tier.stage(CheckpointKey(1, 9)).__enter__()
    layout = lay_out(leaves(9))[0]
    staging.write_shard(layout, image_of(layout, leaves(9)))
    (tier.path / ".trash-g00000001-step-000000000-g00000001-x").mkdir()
    fsio.write_atomic(root / "outcome", b"old")


def main(root: Path) -> None:
    prepare(root, DirectoryTier(root / "checkpoints", chunk=8192))
    tier = DirectoryTier(root / "checkpoints", chunk=8192)
    seen: list[str] = []
    if len(sys.argv) > 2:
        kill_at(sys.argv[2], int(sys.argv[3]))
    else:
        fsio.observe(seen.append)
    newest = save(tier, 4)
    retain(tier, Keep(last=2), generation=1, committed=newest, guard=lambda: None)
    tier.sweep(1)
    fsio.write_atomic(root / "outcome", b"new")
    print("\n".join(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
