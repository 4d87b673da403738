"""A sweep's members: a grid or a list of values, each an independent chain with its own name.

Pure: what a member's command and name are. sweep.py makes their run directories.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .fields import text

Member = dict[str, str]
"""The values of one member by name, as they are put into the command."""

MOST_MEMBERS = 100_000
_PLACE = re.compile(r"(?<!\$)\{(\w+)\}", re.ASCII)
"""{name} in a command."""
_KEY = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)


def members_of(value: object) -> tuple[Member, ...]:
    """From a grid ({lr: [0.1, 0.01], seed: [1, 2]}) or a list ([{lr: 0.1, seed: 1}, …])."""
    if isinstance(value, Mapping):
        found = _grid(value)
    elif isinstance(value, (list, tuple)):
        found = [_member(item) for item in value]
    else:
        raise ValueError("must be a grid {name: [values]}, or a list of {name: value}")  # noqa: TRY004 - pydantic's
    if len(found) > MOST_MEMBERS:
        raise ValueError(f"{len(found)} members are more than {MOST_MEMBERS}")
    _refuse_twins(found)
    return tuple(found)


def _grid(axes: Mapping[Any, Any]) -> list[Member]:
    names = [_key(name) for name in axes]
    values = [_axis(name, axes[name]) for name in axes]
    count = 1
    for axis in values:
        count *= len(axis)
    if count > MOST_MEMBERS:
        raise ValueError(f"a grid of {count} members is more than {MOST_MEMBERS}")
    return [dict(zip(names, point, strict=True)) for point in itertools.product(*values)]


def _axis(name: object, values: object) -> list[str]:
    items = list(values) if isinstance(values, (list, tuple)) else [values]
    if not items:
        raise ValueError(f"{name}: no values")
    return [text(item) for item in items]


def _member(item: object) -> Member:
    if not isinstance(item, Mapping) or not item:
        raise ValueError(f"{item!r} is no member; write {{name: value}}")
    return {_key(name): text(value) for name, value in item.items()}


def _key(name: object) -> str:
    if not isinstance(name, str) or _KEY.fullmatch(name) is None:
        raise ValueError(f"{name!r} cannot name a value: letters, digits and _ only")
    return name


def _refuse_twins(found: Sequence[Member]) -> None:
    seen: set[str] = set()
    for member in found:
        name = member_name(member)
        if name in seen:
            raise ValueError(f"two members are called {name!r}")
        seen.add(name)


def member_name(member: Mapping[str, str]) -> str:
    """Its directory and job name: lr-0.1_seed-1."""
    parts = (f"{key}-{value}" for key, value in member.items())
    return re.sub(r"[^\w.+=@-]+", "-", "_".join(parts)).strip("-.")[:120] or "member"


def command_of(command: str | tuple[str, ...], member: Mapping[str, str]) -> str | tuple[str, ...]:
    """The command with {name} replaced by the member's value; ${name} is bash's and stays."""
    if isinstance(command, str):
        return _fill(command, {key: shlex.quote(value) for key, value in member.items()})
    return tuple(_fill(word, member) for word in command)


def _fill(where: str, values: Mapping[str, str]) -> str:
    return _PLACE.sub(lambda match: values.get(match[1], match[0]), where)


def unused(command: str | tuple[str, ...], names: Iterable[str]) -> list[str]:
    """Those that the command does not mention."""
    whole = command if isinstance(command, str) else " ".join(command)
    mentioned = {match[1] for match in _PLACE.finditer(whole)}
    return [name for name in names if name not in mentioned]
