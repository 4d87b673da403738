"""Files that a command names, and the beginning of each."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from .invocation import Invocation

LOOK_INTO = 1024**2
"""Of a script."""


def mentions(call: Invocation, patterns: tuple[str, ...], cwd: Path) -> bool:
    """Whether one of them has all that."""
    return any(
        all(re.search(pattern, text) for pattern in patterns) for _, text in named_files(call, cwd)
    )


def named_files(call: Invocation, cwd: Path) -> Iterator[tuple[Path, str]]:
    # MATLAB names scripts without their ending.
    names = (name for word in call.words[1:] for name in (word.text, f"{word.text}.m"))
    return beginnings(cwd / name for name in names)


def beginnings(paths: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    for path in paths:
        text = beginning(path)
        if text is not None:
            yield path, text


def beginning(path: Path) -> str | None:
    """None: no file, or none that can be read. A pipe would be waited for for ever."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as stream:
            return stream.read(LOOK_INTO).decode("utf-8", "replace")
    except (OSError, ValueError):
        return None
