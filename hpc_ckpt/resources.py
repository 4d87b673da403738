"""Finds the files that travel with the package: templates, site profiles, examples.

They live in top-level folders that people edit. A wheel carries them inside the package; a
checkout or an editable install has them beside it. Standard library only: the link runner
needs the shim.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_IN_CHECKOUT = {"templates": "templates", "clusters": "slurm/clusters", "examples": "examples"}


def folder(kind: str, package: Path = _PACKAGE) -> Path:
    """The directory of 'templates', 'clusters' or 'examples'.

    The one inside the package wins: beside an installed package lie other people's folders.
    """
    packaged = package / kind
    return packaged if packaged.is_dir() else package.parent / _IN_CHECKOUT[kind]


def find(name: str, package: Path = _PACKAGE) -> Path:
    """The shipped file `name`, such as 'templates/shim.sh'; FileNotFoundError if it is not there.

    Its absence is a broken installation, not a user's mistake.
    """
    kind, _, rest = name.partition("/")
    path = folder(kind, package) / rest
    if not path.is_file():
        raise FileNotFoundError(f"{path}: missing; install hpc_ckpt again")
    return path
