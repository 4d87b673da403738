"""Named tuples whose class the program does not supply, made without compiling anything.

collections.namedtuple() compiles text with the names in it; these names come from a checkpoint.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import keyword
import unicodedata
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any


class Record(tuple[Any, ...]):
    """What is common to them: the part of a namedtuple's interface that needs no new code."""

    __slots__ = ()
    _fields: tuple[str, ...] = ()

    @classmethod
    def _make(cls, values: Iterable[Any]) -> Record:
        made = tuple.__new__(cls, values)
        if len(made) != len(cls._fields):
            raise TypeError(f"expected {len(cls._fields)} values, got {len(made)}")
        return made

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **changed: Any) -> Record:
        unknown = changed.keys() - set(self._fields)
        if unknown:
            raise ValueError(f"no fields named {sorted(unknown)}")
        return self._make((self._asdict() | changed).values())

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in self._asdict().items())
        return f"{type(self).__name__}({inside})"


def record_class(name: str, fields: Sequence[str]) -> type[Record]:
    """A class with these fields; ValueError for names that no namedtuple could have."""
    for one in (name, *fields):
        plain = unicodedata.normalize("NFKC", one) == one  # as the compiler would have it
        if not plain or not one.isidentifier() or keyword.iskeyword(one):
            raise ValueError(f"{one[:40]!r} is not an identifier")
    if any(field.startswith("_") for field in fields) or len(set(fields)) != len(fields):
        raise ValueError("fields are named once, and not with an underscore first")
    getters = {field: property(itemgetter(number)) for number, field in enumerate(fields)}
    return type(name, (Record,), {"__slots__": (), "_fields": tuple(fields), **getters})
