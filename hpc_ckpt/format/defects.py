"""The names of everything that can be wrong with a checkpoint, one per invariant.

Only names: format/verify.py finds defects, format/manifest.py raises some of them.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class DefectKind(str, Enum):
    """One member per invariant of docs/format.md."""

    MANIFEST_MISSING = "manifest-missing"
    MANIFEST_UNREADABLE = "manifest-unreadable"
    """Not framed as a manifest, or not JSON: cut off, overwritten, or another file."""
    MANIFEST_DIGEST = "manifest-digest"
    MANIFEST_FIELD = "manifest-field"
    UNSUPPORTED_VERSION = "unsupported-version"
    KEY_MISMATCH = "key-mismatch"
    """The directory's name says another generation, step or revision than its manifest."""
    SHARD_MISSING = "shard-missing"
    SHARD_SIZE = "shard-size"
    CHUNK_DIGEST = "chunk-digest"
    SHARD_HEADER = "shard-header"
    LEAF_MISSING = "leaf-missing"
    LEAF_DUPLICATE = "leaf-duplicate"
    LEAF_TIED = "leaf-tied"
    """The tree says of a leaf that it is another's memory, or does not, and aliases differ."""
    UNEXPECTED_FILE = "unexpected-file"
    UNREADABLE = "unreadable"
    """The file system gave an error, or the name is not a regular file."""


@dataclass(frozen=True)
class Defect:
    """One finding: which invariant, in which file, and what was seen."""

    kind: DefectKind
    file: str
    detail: str
    passing: bool = field(default=False, compare=False)
    """The file system gave an error: it may be well again the next time somebody looks."""

    def __str__(self) -> str:
        return f"{self.file}: {self.kind.value}: {self.detail}"
