"""Where a result comes from: the command and the version of the code.

Standard library only. Asks git, once, and never fails: what cannot be found out is left out.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

_PATIENCE_S = 10.0


def git_version(directory: Path) -> dict[str, str | bool] | None:
    """Commit and dirty flag of the code in `directory`; None where git has nothing to say."""
    ask = ["git", "-C", str(directory), "status", "--porcelain=v2", "--branch", "-uno"]
    try:
        told = subprocess.run(ask, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = told.stdout.splitlines()
    heads = [line.split()[-1] for line in lines if line.startswith("# branch.oid")]
    if told.returncode != 0 or not heads:
        return None
    return {"git": heads[0], "dirty": any(not line.startswith("#") for line in lines)}


def ask_git(directory: Path, *words: str) -> bytes | None:
    """What git answers; None where it is missing, refuses or knows nothing of the directory."""
    ask = ["git", "-C", str(directory), *words]
    try:
        told = subprocess.run(ask, capture_output=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout if told.returncode == 0 else None


def of_this_program() -> dict[str, Any]:
    """The command as it was given, and the version of the script's own code."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    directory = Path(script).resolve().parent if script else Path.cwd()
    return {"command": list(sys.orig_argv), "code": git_version(directory)}
