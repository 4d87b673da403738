"""A run directory for a program that is started by itself, or for checkpoints that are imported."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import time
import uuid

from . import __version__, fsio
from .errors import RootError
from .rundir import RunDir


def prepare(place: RunDir) -> str:
    """Make the directories and chain.json; returns the chain's id."""
    try:
        place.create()
        if place.chain() is None:
            _create_chain_file(place)
    except OSError as error:
        raise RootError(
            place.root, f"cannot be used as a run directory: {error.strerror or error}"
        ) from error
    chain = (place.chain() or {}).get("chain")
    if not isinstance(chain, str) or not chain:
        raise RootError(
            place.root, "its chain.json cannot be read; restore it, or choose another root"
        )
    return chain


def _create_chain_file(place: RunDir) -> None:
    """Of two that start at once, both use what the first one wrote."""
    record = {"chain": str(uuid.uuid4()), "created": round(time.time(), 3), "version": __version__}
    fsio.write_first(place.chain_file, (json.dumps(record) + "\n").encode())
