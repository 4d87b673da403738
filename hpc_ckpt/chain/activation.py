"""The virtual or conda environment that is active at submission, to be activated on the node.

The job starts without the submission's environment variables (--export=NONE), so that a chain
does not depend on what happened to be exported; this is the one thing it must not lose.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from ..errors import SpecError


class Kind(str, Enum):
    VENV = "venv"
    CONDA = "conda"
    MICROMAMBA = "micromamba"
    PREFIX = "prefix"
    """A conda environment whose tool is not known: its bin goes on the PATH."""


@dataclass(frozen=True)
class Activation:
    kind: Kind
    prefix: str
    tool: str = ""
    """The conda or micromamba program."""


def active(
    environ: Mapping[str, str], exists: Callable[[str], bool] = os.path.exists
) -> tuple[Activation, ...]:
    """In the order of activation: a virtual environment lies on top of a conda one."""
    found = (_conda(environ), _venv(environ, exists))
    return tuple(activation for activation in found if activation is not None)


def _conda(environ: Mapping[str, str]) -> Activation | None:
    prefix = environ.get("CONDA_PREFIX")
    if not prefix:
        return None
    for kind, variable in ((Kind.CONDA, "CONDA_EXE"), (Kind.MICROMAMBA, "MAMBA_EXE")):
        tool = environ.get(variable)
        if tool:
            return Activation(kind, prefix, tool)
    return Activation(Kind.PREFIX, prefix)


def _venv(environ: Mapping[str, str], exists: Callable[[str], bool]) -> Activation | None:
    prefix = environ.get("VIRTUAL_ENV")
    if not prefix:
        return None
    if not exists(f"{prefix}/bin/activate"):
        raise SpecError(
            f"environment variable VIRTUAL_ENV: {prefix} has no bin/activate, so no link could "
            "activate it; unset VIRTUAL_ENV or activate another environment"
        )
    return Activation(Kind.VENV, prefix)
