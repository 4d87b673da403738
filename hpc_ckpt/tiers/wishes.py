"""Which tiers a run asks for: names of the site's storage and directories of the user's own.

Text in, wishes out. Nothing here looks at a disk: tiers/stack.py opens what was wished for.
Standard library only; the spec is checked with it at submission, and the running program's
settings are read with it on the node, where $TMPDIR and the like get their values.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ..errors import SpecError
from ..units import parse_size

HOME = "root"
"""The name of the run directory's own tier, which every stack has."""
STORAGE_KEYS = ("path", "survives", "quota", "purge")

_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*", re.ASCII)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^{}]*))?\})", re.ASCII)


class Survives(str, Enum):
    """The worst that a checkpoint in a tier outlives."""

    PROCESS = "process"
    """The program's death; not the end of the job, nor the node's."""
    NODE = "node"


@dataclass(frozen=True)
class TierWish:
    """One tier that was asked for."""

    name: str
    path: Path | None = None
    """Absolute; None: the run directory's own checkpoints."""
    survives: Survives = Survives.NODE
    quota: int | None = None
    """Bytes one user may have there, as far as the site says."""


ONLY_HOME = (TierWish(HOME),)


# ── what may be written ───────────────────────────────────────────────────────────────────
def parse_entries(value: object, where: str = "tiers") -> tuple[str, ...]:
    """The entries of a list, or of one text with commas between them or a JSON list in it.

    A path object is a directory even without a slash, and gets one.
    """
    items = _listed(value, where)
    entries = tuple(_entry(item, where) for item in items)
    for index, entry in enumerate(entries):
        if entry in entries[:index]:
            raise SpecError(f"{where}: {entry!r} is named twice; name it once")
    return entries


def _listed(value: object, where: str) -> Sequence[object]:
    if isinstance(value, os.PathLike):
        return [value]
    if isinstance(value, (list, tuple)):
        return value
    if not isinstance(value, str):
        raise SpecError(f"{where}: write a list of names and directories, as in [local, root]")
    if value.lstrip().startswith("["):
        return _from_json(value, where)
    return [part for part in value.split(",") if part.strip()]


def _from_json(text: str, where: str) -> list[object]:
    try:
        items = json.loads(text)
    except ValueError:
        raise SpecError(f"{where}: {text!r} is not a list; write local,root") from None
    return list(items)


def _entry(item: object, where: str) -> str:
    if isinstance(item, os.PathLike):
        shown = os.fsdecode(item)
        return shown if "/" in shown else f"./{shown}"
    if not isinstance(item, str) or not item.strip():
        raise SpecError(f"{where}: {item!r} is neither a name nor a directory")
    if "\0" in item:
        raise SpecError(f"{where}: {item!r} contains a NUL character, which no path can")
    return item.strip()


def is_path(entry: str) -> bool:
    return "/" in entry


def check_names(entries: Iterable[str], known: Iterable[str], where: str = "tiers") -> None:
    """Raise a SpecError for the first name that is neither the home nor the site's storage."""
    names = sorted({*known, HOME})
    for entry in entries:
        if not is_path(entry) and entry not in names:
            raise SpecError(f"{where}: {_unknown(entry, names)}")


def _unknown(entry: str, names: list[str]) -> str:
    if entry.startswith(("$", "~")):
        return f"{entry!r} is no name, and a directory is written with a slash: {entry + '/'!r}"
    near = difflib.get_close_matches(entry, names, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(names)}."
    return f"no storage is named {entry!r}. {hint} A directory is written with a slash: './{entry}'"


def check_storage_name(name: str) -> str:
    """A name the site may give to a storage; raises SpecError."""
    if name == HOME:
        raise SpecError(f"{name!r} is the run directory's own tier; choose another name")
    if _NAME.fullmatch(name) is None:
        raise SpecError(f"{name!r} cannot be a name: letters, digits and . _ - + only")
    return name


def check_storage_path(path: str) -> str:
    """A path that will be absolute once it is expanded; raises SpecError."""
    if not path.startswith(("/", "$", "~")):
        raise SpecError(f"{path!r} must be absolute, or begin with a variable such as $TMPDIR")
    return path


def anchored(entries: Iterable[str], cwd: Path) -> tuple[str, ...]:
    """Relative directories as seen from `cwd`; what the node must expand is left alone."""
    return parse_entries(
        [
            os.path.abspath(cwd / entry)  # noqa: PTH100 - resolve() would follow links
            if is_path(entry) and not entry.startswith(("$", "~"))
            else entry
            for entry in entries
        ]
    )


# ── on the node ───────────────────────────────────────────────────────────────────────────
def parse_tiers(
    value: object,
    storage: object,
    *,
    environ: Mapping[str, str],
    cwd: Path,
    where: str = "tiers",
) -> tuple[TierWish, ...]:
    """What to open, fastest first; the home comes last unless it is named elsewhere.

    `storage` is the profile's section: name → {path, survives, quota}.
    """
    entries = parse_entries(value, where)
    known = _storage(storage)
    check_names(entries, known, where)
    if HOME not in entries:
        entries = (*entries, HOME)
    wishes = []
    for entry in entries:
        if entry == HOME:
            wishes.append(TierWish(HOME))
        elif is_path(entry):
            wishes.append(TierWish(entry, cwd / expand(entry, environ, where)))
        else:
            wishes.append(_wish(entry, known[entry], environ))
    return tuple(wishes)


def _storage(storage: object) -> Mapping[str, Any]:
    if not isinstance(storage, Mapping):
        raise SpecError("storage: write {local: {path: $TMPDIR, survives: process}}")
    for name in storage:
        try:
            check_storage_name(str(name))
        except SpecError as error:
            raise SpecError(f"storage: {error}") from None
    return storage


def _wish(name: str, record: object, environ: Mapping[str, str]) -> TierWish:
    where = f"storage.{name}"
    if not isinstance(record, Mapping) or not isinstance(record.get("path"), str):
        raise SpecError(f"{where}: write {{path: $TMPDIR, survives: process}}")
    for key in record:
        if key not in STORAGE_KEYS:
            raise SpecError(f"{where}: unknown key {key!r}. Known: {', '.join(STORAGE_KEYS)}.")
    path = Path(expand(record["path"], environ, f"{where}.path"))
    if not path.is_absolute():
        raise SpecError(f"{where}.path: {record['path']!r} is {str(path)!r} here; it must begin "
                        "with a slash")  # fmt: skip
    quota = record.get("quota")
    return TierWish(
        name,
        path,
        _survives(record.get("survives"), where),
        None if quota is None else parse_quota(quota, f"{where}.quota"),
    )


def _survives(value: object, where: str) -> Survives:
    try:
        return Survives(value)
    except ValueError:
        words = " or ".join(member.value for member in Survives)
        raise SpecError(f"{where}.survives: must be {words}, not {value!r}") from None


def parse_quota(value: Any, where: str) -> int:
    """Bytes; a quota of nothing would refuse every checkpoint."""
    try:
        size = parse_size(value)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
    if size <= 0:
        raise SpecError(f"{where}: must be more than nothing; leave it out where there is none")
    return size


def expand(path: str, environ: Mapping[str, str], where: str) -> str:
    """`path` with ~, $NAME, ${NAME} and ${NAME:-otherwise} as they are on this node."""
    if path == "~" or path.startswith("~/"):
        path = "$HOME" + path[1:]
    elif path.startswith("~"):
        raise SpecError(f"{where}: {path!r}: another user's home is written out in full")

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        found = environ.get(name) or match[3]
        if not found:
            raise SpecError(
                f"{where}: ${name} is not set on this node; set it, or say what to use "
                f"instead: ${{{name}:-/tmp}}"
            )
        return found

    return _VARIABLE.sub(value, path)
