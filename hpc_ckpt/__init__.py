"""hpc_ckpt: a chain of short jobs behaves as one long job that cannot be killed.

Importing this package is cheap: each public name is loaded when it is first used, so the
command line on a login node never pays for torch.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .chain.submit import Chain as Chain
    from .chain.submit import submit as submit
    from .chain.tasks import ChainTask as ChainTask
    from .chain.tasks import executor as executor
    from .checkpointer import Checkpointer as Checkpointer
    from .checkpointer import best as best
    from .checkpointer import latest as latest
    from .checkpointer import load as load
    from .errors import HpcCkptError as HpcCkptError
    from .errors import LinkEnded as LinkEnded

_HOMES = {
    "Chain": ".chain.submit",
    "ChainTask": ".chain.tasks",
    "Checkpointer": ".checkpointer",
    "HpcCkptError": ".errors",
    "LinkEnded": ".errors",
    "best": ".checkpointer",
    "executor": ".chain.tasks",
    "latest": ".checkpointer",
    "load": ".checkpointer",
    "submit": ".chain.submit",
}

__all__ = [
    "Chain",
    "ChainTask",
    "Checkpointer",
    "HpcCkptError",
    "LinkEnded",
    "__version__",
    "best",
    "executor",
    "latest",
    "load",
    "submit",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'hpc_ckpt' has no attribute {name!r}")
    return getattr(importlib.import_module(home, __name__), name)


def __dir__() -> list[str]:
    return list(__all__)
