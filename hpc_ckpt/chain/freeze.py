"""The code of a chain as it was at submission, kept in the run directory for every link."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path

from ..errors import SpecError
from ..provenance import ask_git
from ..units import format_size
from .spec import PinCode

COPY = "code-"
MOST_FILES = 20_000
MOST_BYTES = 2 << 30


def is_frozen(cwd: Path, home: Path) -> bool:
    """Whether it is the copy of an earlier submission: a chain that is resumed keeps its code."""
    real = Path(os.path.realpath(cwd))
    return real.name.startswith(COPY) and str(real.parent) == os.path.realpath(home)


def freeze(kind: PinCode, cwd: Path, home: Path) -> Path:
    """The working directory of the copy, a new one in `home` for each submission."""
    if is_frozen(cwd, home):
        return cwd
    target = home / f"{COPY}{1 + len(list(home.glob(f'{COPY}*'))):04d}"
    if kind is PinCode.COMMIT:
        return _from_commit(cwd, target)
    _copy(_files_of(cwd, target), cwd, target)
    return target


def _from_commit(cwd: Path, target: Path) -> Path:
    top = ask_git(cwd, "rev-parse", "--show-toplevel")
    archive = ask_git(cwd, "archive", "--format=tar", "HEAD")
    if top is None or archive is None:
        raise SpecError(f"pin.code: {cwd} is no git repository with a commit; write copy")
    if ask_git(cwd, "status", "--porcelain", "--untracked-files=no", "--", "."):
        raise SpecError(
            "pin.code: there are changes that no commit has; commit them, or write copy"
        )
    target.mkdir(mode=0o700)
    with tarfile.open(fileobj=io.BytesIO(archive)) as unpacking:
        unpacking.extractall(target, filter="data")
    return target


def _files_of(cwd: Path, target: Path) -> list[Path]:
    """What git has or would add; without git everything that is not hidden."""
    listed = ask_git(cwd, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed is not None:
        names = [os.fsdecode(name) for name in listed.split(b"\0") if name]
        found: Iterable[Path] = (cwd / name for name in names)
    else:
        found = _visible(cwd)
    root = target.parent
    own = root if root != cwd and root.is_relative_to(cwd) else target
    return [path for path in found if path.is_file() and not path.is_relative_to(own)]


def _visible(cwd: Path) -> Iterable[Path]:
    for folder, below, names in os.walk(cwd):
        below[:] = [name for name in below if not name.startswith(".")]
        yield from (Path(folder) / name for name in names if not name.startswith("."))


def _copy(files: list[Path], cwd: Path, target: Path) -> None:
    if not files:
        raise SpecError(f"pin.code: there is no file in {cwd} to copy; submit it where its code is")
    size = sum(path.stat().st_size for path in files)
    if len(files) > MOST_FILES or size > MOST_BYTES:
        raise SpecError(
            f"pin.code: {len(files)} files, {format_size(size)} in {cwd} are too much to copy; "
            "keep data elsewhere, or write commit"
        )
    target.mkdir(mode=0o700)
    for path in files:
        place = target / path.relative_to(cwd)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, place)
