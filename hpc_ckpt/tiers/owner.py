"""Whose place in a tier it is: that of one run directory, which has put its name there.

A copy of a run directory has the chain's id too, and a lease of its own: nothing else would keep
it from restoring, or removing, what the original saves in a tier that both use.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import errno
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import fsio
from ..rundir import RunDir

OWNER_NAME = "OWNER.json"
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class Owner:
    """One run directory's claim to its place in one tier; OSErrors reach the caller."""

    place: Path
    """<tier>/<chain>"""
    tier: str
    rundir: RunDir
    chain: str
    _known: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def refusal(self) -> str | None:
        """Asked before anything is read there: why this run directory may not use it.

        Makes no directory: where nothing was saved yet, whoever saves first claims it.
        """
        self._own()
        if not fsio.is_directory(self.place):
            return None
        fsio.sweep_temporaries(self.place)
        return self._claim()

    def claim(self) -> None:
        """Asked before anything is written there. An OSError if it is another's: what was to be
        saved goes to another tier."""
        told = self._claim()
        if told is not None:
            raise PermissionError(errno.EPERM, told)

    def _claim(self) -> str | None:
        own = self._own()
        if not fsio.exists(self._file):
            _write_first(self._file, own)
        recorded = _read(self._file)
        if (own["root"], own["inode"]) == (recorded.get("root"), recorded.get("inode")):
            return None
        if not self._is_here(recorded, own) and self._lives(recorded):
            return self._told(recorded["root"])
        fsio.write_atomic(self._file, _encode(own))
        return None

    @property
    def _file(self) -> Path:
        return self.place / OWNER_NAME

    def _own(self) -> dict[str, Any]:
        """Looked at once, when the link begins: a run directory that does not answer later keeps
        nobody from saving here."""
        if not self._known:
            root = self.rundir.root.resolve()
            found = root.stat()
            self._known.update(root=str(root), device=found.st_dev, inode=found.st_ino)
        return self._known

    def _is_here(self, recorded: dict[str, Any], own: dict[str, Any]) -> bool:
        """The same path, or the same directory under another. The number of a device may be
        another on each node: only as long as it is the same it says something."""
        same = ("device", "inode")
        return own["root"] == recorded.get("root") or all(own[k] == recorded.get(k) for k in same)

    def _lives(self, recorded: dict[str, Any]) -> bool:
        """Whether this chain is in another directory, too; what cannot be looked at may be."""
        root = recorded.get("root")
        if not isinstance(root, str):
            return False
        try:
            other = _read(RunDir(root).chain_file)
            same_directory = self.rundir.root.samefile(root)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        return not same_directory and other.get("chain") == self.chain

    def _told(self, other: str) -> str:
        return (
            f"tier {self.tier!r} has the checkpoints of {other} in {self.place}, and one of the "
            f"two run directories is a copy of the other. Delete {self.rundir.chain_file} to go on "
            f"from the checkpoints in here as a chain of its own, or use another tier; if {other} "
            "is not to go on, move it away, or delete its chain.json"
        )


def _write_first(path: Path, record: dict[str, Any]) -> None:
    try:
        fsio.write_first(path, _encode(record))
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        fsio.write_atomic(path, _encode(record))


def _read(path: Path) -> dict[str, Any]:
    """Empty for what is no JSON object: nobody's."""
    try:
        record = json.loads(path.read_bytes())
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _encode(record: dict[str, Any]) -> bytes:
    return (json.dumps(record) + "\n").encode()
