"""Whether the packages of the program's environment are those of the submission.

Names and versions as directory entries say them: nothing is started, no package is imported.
Standard library only: the link runner asks it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_DISTRIBUTION = re.compile(r"(.+)\.(?:dist-info|egg-info)")
MOST_SHOWN = 5


def installed(prefix: str) -> list[str]:
    """Every distribution below an environment's prefix, as name-version."""
    places = Path(prefix).glob("lib*/python*/site-packages")
    found = {
        match[1]
        for place in places
        for entry in place.iterdir()
        if (match := _DISTRIBUTION.fullmatch(entry.name)) is not None
    }
    return sorted(found)


def record(prefixes: list[str]) -> dict[str, str]:
    """For chain.json: by prefix, the names in one line."""
    return {prefix: " ".join(installed(prefix)) for prefix in prefixes}


def changed(pinned: Mapping[str, str]) -> str | None:
    """What is different from the submission, or None."""
    for prefix, names in pinned.items():
        before, now = set(names.split()), set(installed(prefix))
        if before == now:
            continue
        gone, new = sorted(before - now), sorted(now - before)
        parts = [
            f"{word} {_some(found)}" for word, found in (("gone", gone), ("new", new)) if found
        ]
        return f"the packages in {prefix} are not those of the submission: {'; '.join(parts)}"
    return None


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return ", ".join(names[:MOST_SHOWN]) + more
