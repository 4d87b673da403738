"""Whether a tier has a checkpoint whole: asked before one is drained to it, or replaced."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import errno

from ..errors import CheckpointError, NewerCheckpoint
from ..format.defects import DefectKind
from ..format.manifest import Manifest
from ..rundir import CheckpointKey
from .base import Tier


def holds(tier: Tier, manifest: Manifest) -> bool:
    """Whether the tier has this checkpoint under its key, whole and with the same state."""
    try:
        same = tier.manifest(manifest.key).same_content(manifest)
    except CheckpointError:
        return False
    return same and not broken(tier, manifest.key)


def broken(tier: Tier, key: CheckpointKey) -> bool:
    """Whether a reader would refuse it. A file that somebody put beside the others is no
    reason: the whole directory would be removed for it. Nor is one that cannot be read now.
    NewerCheckpoint if only a newer version can tell."""
    found = [one for one in tier.verify(key) if one.kind is not DefectKind.UNEXPECTED_FILE]
    for one in found:
        if one.kind is DefectKind.UNSUPPORTED_VERSION:
            raise NewerCheckpoint(tier.path_of(key), one.detail)
    unread = [one for one in found if one.passing]
    if unread:
        raise OSError(errno.EIO, f"could not be read: {unread[0]}", str(tier.path_of(key)))
    return bool(found)
