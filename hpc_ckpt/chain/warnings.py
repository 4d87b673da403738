"""What user support would say about where a run directory is. Pure: no file is looked at."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from pathlib import PurePath

from .profile import Profile
from .spec import Spec


def root_warnings(spec: Spec, profile: Profile, *, home: str | None) -> list[str]:
    """One line each; a chain is submitted all the same."""
    return [*_on_home(spec, profile, home), *_in_storage(spec, profile)]


def _on_home(spec: Spec, profile: Profile, home: str | None) -> list[str]:
    if home is None or profile.backend.value == "local" or not _is_below(spec.root, home):
        return []
    places = [place.path for place in profile.storage.values() if place.survives.value == "node"]
    better = f"; {places[0]} is made for it" if places else ""
    return [f"root is on the home directory, which is often small and slow{better}"]


def _in_storage(spec: Spec, profile: Profile) -> list[str]:
    found = []
    for name, place in profile.storage.items():
        if not _is_below(spec.root, place.path.partition("$")[0]):
            continue
        if place.purge is not None:
            found.append(
                f"root is on {name}, where files untouched for {place.purge} are removed: "
                "copy what must stay"
            )
        if place.quota is not None:
            found.append(f"root is on {name}, where one user may have {place.quota}")
    return found


def _is_below(path: str, above: str) -> bool:
    return above not in ("", "/") and PurePath(path).is_relative_to(PurePath(above))
