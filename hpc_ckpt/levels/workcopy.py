"""A copy of a working directory in which a program can do no harm.

Links that lead out of the directory are followed: a program that writes through one would
change the real files. Everything is copied once, however many links lead to it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
import shutil
from collections import deque
from functools import cached_property
from pathlib import Path

from ..errors import SpecError
from ..units import format_size

LEFT_OUT = ".git"
CHAIN = "chain.json"
RUNS = "runs"
"""Left out where chains have been submitted; others may have data of that name."""
_NOT_FILES = (Path("/proc"), Path("/sys"))


def copy_work(source: Path, target: Path, most: int) -> None:
    """`target` is made. Raises SpecError where there are more than `most` bytes."""
    plan = _Plan(source.resolve(), most)
    try:
        plan.make()
        plan.carry_out(target)
    except OSError as error:
        raise SpecError(
            f"{error.filename or source}: could not be copied for a rehearsal: {error.strerror}; "
            "rehearse in another directory, or with --in-place"
        ) from error


class _Plan:
    """What lies where in the copy; nothing is written before all of it is known."""

    def __init__(self, source: Path, most: int) -> None:
        self._source = source
        self._most = most
        self._size = 0
        self._placed: dict[Path, Path] = {}
        """Real files and directories, and where they are in the copy."""
        self._files: list[Path] = []
        self._directories: list[Path] = []
        self._links: list[tuple[Path, Path]] = []
        """Places in the copy that lead to others in it."""
        self._devices: list[tuple[Path, Path]] = []
        self._pending: deque[tuple[Path, Path]] = deque()

    def make(self) -> None:
        self._walk(self._source, Path())
        while self._pending:
            self._follow(*self._pending.popleft())

    def _walk(self, real: Path, place: Path) -> None:
        """Links wait until all that lies in the directory itself has its place."""
        self._placed[real] = place
        self._directories.append(real)
        for entry in sorted(real.iterdir()):
            there = place / entry.name
            if not entry.is_symlink() and self._stays_behind(entry):
                continue
            if entry.is_symlink():
                self._pending.append((entry, there))
            elif entry in self._placed:
                self._links.append((there, self._placed[entry]))
            elif entry.is_dir():
                self._walk(entry, there)
            elif entry.is_file():
                self._add(entry, there, entry)

    def _add(self, real: Path, place: Path, named: Path) -> None:
        self._placed[real] = place
        self._files.append(real)
        self._size += real.stat().st_size
        if self._size > self._most:
            raise SpecError(
                f"{self._source} and what its links lead to have more than "
                f"{format_size(self._most)} (at {named}), too much to copy for a rehearsal; "
                "rehearse in a smaller directory, or with --in-place"
            )

    def _follow(self, link: Path, place: Path) -> None:
        try:
            real = link.resolve()
        except (OSError, RuntimeError):
            return  # leads to itself
        known = next((path for path in (real, *real.parents) if path in self._placed), None)
        if known is not None and (known == real or self._is_ours(real)):
            self._links.append((place, self._placed[known] / real.relative_to(known)))
        elif any(real.is_relative_to(path) for path in _NOT_FILES):
            self._devices.append((place, real))
        elif real.is_dir():
            self._walk(real, place)
        elif real.is_file():
            self._add(real, place, link)
        elif real.exists():
            self._devices.append((place, real))

    def _is_ours(self, real: Path) -> bool:
        """In the directory itself, there or not; not in what is left out of the copy."""
        if not real.is_relative_to(self._source):
            return False
        return not any(map(self._stays_behind, (real, *real.parents)))

    def _stays_behind(self, real: Path) -> bool:
        if real.name == LEFT_OUT:
            return real.is_relative_to(self._source)
        return real == self._source / RUNS and self._has_chains

    @cached_property
    def _has_chains(self) -> bool:
        """Of a submission, or of the members of a sweep."""
        names = (CHAIN, f"*/{CHAIN}", f"*/*/{CHAIN}")
        return any(any((self._source / RUNS).glob(name)) for name in names)

    def carry_out(self, target: Path) -> None:
        for real in self._directories:
            (target / self._placed[real]).mkdir(parents=True, exist_ok=True)
        for real in self._files:
            shutil.copy2(real, target / self._placed[real])
        for place, other in self._links:
            leads = os.path.relpath(target / other, (target / place).parent)
            (target / place).symlink_to(leads)
        for place, real in self._devices:
            (target / place).symlink_to(real)
        for real in reversed(self._directories):
            shutil.copystat(real, target / self._placed[real])
