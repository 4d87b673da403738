"""Reads a part of what checkpoints refer to after each save, so that damage is found in time."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from ..errors import CheckpointError
from ..format.manifest import ShardRecord, digest
from ..format.reading import Broken, read_into, shard_file
from ..rundir import CheckpointKey
from ..tiers.base import Tier

CHUNKS = 4
"""Of 16 MiB, after each save: a hundredth of a second."""


class Scrubber:
    """Goes round through the shards that the newest checkpoint refers to, chunk by chunk."""

    def __init__(self) -> None:
        self._at: dict[tuple[str, str], int] = {}

    def damaged(self, tier: Tier, key: CheckpointKey) -> list[str]:
        """Names of checkpoints that hold a shard with a chunk that is not what it was.

        What cannot be looked at now says nothing: it is asked again after the next save.
        """
        try:
            shards = tier.manifest(key).shards
        except (CheckpointError, OSError):
            return []
        held = [shard for shard in shards if shard.holder is not None]
        return sorted({str(shard.holder) for shard in held if self._is_damaged(tier, key, shard)})

    def _is_damaged(self, tier: Tier, key: CheckpointKey, shard: ShardRecord) -> bool:
        place = (tier.name, shard.place)
        begin = self._at.get(place, 0)
        count = len(shard.digests)
        numbers = [(begin + n) % count for n in range(min(CHUNKS, count))]
        self._at[place] = (begin + CHUNKS) % count
        try:
            with shard_file(tier.path_of(key), shard) as descriptor:
                return any(not _is_sound(descriptor, shard, number) for number in numbers)
        except Broken as broken:
            return not broken.defect.passing
        except OSError:
            return False


def _is_sound(descriptor: int, shard: ShardRecord, number: int) -> bool:
    start = number * shard.chunk
    chunk = memoryview(bytearray(min(shard.chunk, shard.size - start)))
    return read_into(descriptor, chunk, start) == len(chunk) and (
        digest(chunk) == shard.digests[number]
    )
