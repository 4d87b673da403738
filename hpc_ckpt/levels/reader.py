"""One mapping of a recipe, read key by key: what is wrong is said by file and key."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..errors import SpecError
from ..settings import reject_unknown

T = TypeVar("T")


class Reader:
    """One mapping of a recipe; `where` is the file and the keys that lead to it."""

    def __init__(self, value: object, where: str, known: Sequence[str]) -> None:
        if not isinstance(value, Mapping):
            raise SpecError(f"{where}: must be a mapping of 'key: value', not {value!r}")
        reject_unknown(value, known, where)
        self._value = value
        self.where = where

    def has(self, key: str) -> bool:
        return self._value.get(key) is not None

    def raw(self, key: str) -> Any:
        return self._value.get(key)

    def at(self, key: str) -> str:
        return f"{self.where}: {key}"

    def text(self, key: str) -> str | None:
        return _text(self._value[key], self.at(key)) if self.has(key) else None

    def texts(self, key: str) -> tuple[str, ...]:
        """A text or a list of them."""
        if not self.has(key):
            return ()
        value = self._value[key]
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(_text(item, self.at(key)) for item in items)

    def flag(self, key: str, default: bool) -> bool:
        text = str(self._value.get(key, default)).lower()
        if text not in ("true", "false"):
            raise SpecError(f"{self.at(key)}: write true or false, not {text!r}")
        return text == "true"

    def parsed(self, key: str, parse: Callable[[Any], T]) -> T | None:
        if not self.has(key):
            return None
        try:
            return parse(self._value[key])
        except (SpecError, ValueError) as error:
            raise SpecError(f"{self.at(key)}: {str(error).removeprefix(': ')}") from None

    def pattern(self, key: str) -> str | None:
        """A regular expression."""
        return self.patterns(key)[0] if self.has(key) else None

    def reasons(self, key: str, *, regex: bool = False) -> tuple[tuple[str, str], ...]:
        """A mapping of what is meant to why; a list alone gives no reasons."""
        value = self._value.get(key)
        named = value if isinstance(value, Mapping) else dict.fromkeys(self.texts(key), "")
        keys = Reader({key: list(named)}, self.where, (key,))
        found = keys.patterns(key) if regex else keys.texts(key)
        return tuple((text, str(named[text])) for text in found)

    def patterns(self, key: str) -> tuple[str, ...]:
        found = self.texts(key)
        for text in found:
            try:
                re.compile(text)
            except re.error as error:
                raise SpecError(f"{self.at(key)}: not a regular expression: {error}") from None
        return found

    def number(self, key: str) -> str | None:
        """A regular expression whose one group is a number."""
        text = self.pattern(key)
        groups = 1 if text is None else re.compile(text).groups
        if groups != 1:
            raise SpecError(
                f"{self.at(key)}: {text!r} has {groups or 'no'} groups: put the number, and "
                r"nothing else, into ( ), as in 'step (\d+)'; write (?: ) for others"
            )
        return text

    def words(self, key: str) -> tuple[str, ...] | None:
        """A command: a list of words, or one line that is taken apart as a shell would."""
        if not self.has(key):
            return None
        value = self._value[key]
        if isinstance(value, (list, tuple)):
            found = self.texts(key)
        else:
            found = tuple(split(_text(value, self.at(key)), self.at(key)))
        if not found:
            raise SpecError(f"{self.at(key)}: must name a program")
        return found


def _text(value: object, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise SpecError(f"{where}: must be text, not {value!r}")
    text = str(value)
    if not text.strip() or "\0" in text.strip("\0"):
        raise SpecError(f"{where}: must be text that is not empty")
    return text


def split(text: str, where: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SpecError(f"{where}: {text!r}: {error}") from None
