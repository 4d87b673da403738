"""What spec and profile are made of: sections that refuse unknown keys, and checked texts.

Durations and sizes stay the text they were written as, so that chain.json and `config show`
say what the user said; whoever needs a number parses it again with units.py.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ..errors import SpecError
from ..units import parse_duration, parse_size

T = TypeVar("T")
MEBIBYTE = 1 << 20


class Section(BaseModel):
    """A mapping of a spec or profile."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    not_available: ClassVar[tuple[str, ...]] = ()
    """Keys of the design that are not built: refused in other words than a misspelt key."""

    @model_validator(mode="before")
    @classmethod
    def _nothing_said(cls, value: Any) -> Any:
        return cls.said(value) if isinstance(value, Mapping) else value

    @classmethod
    def said(cls, value: Mapping[str, Any]) -> dict[str, Any]:
        """Without the known keys that have no value (`partition:`): their defaults apply."""
        known = cls.model_fields
        return {key: item for key, item in value.items() if item is not None or key not in known}


def checked(parse: Callable[[Any], T]) -> Callable[[Any], T]:
    """A parser of the house as pydantic wants it: a ValueError, so that the origin is added."""

    def check(value: Any) -> T:
        try:
            return parse(value)
        except SpecError as error:
            raise ValueError(str(error).removeprefix(": ")) from None

    return check


def text(value: object) -> str:
    """Text that can be given to a program; numbers of a Python caller become text."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"must be text, not {_kind(value)}")  # noqa: TRY004 - pydantic's
    shown = str(value)
    if "\0" in shown:
        raise ValueError("contains a NUL character, which no program can be given")
    try:
        os.fsencode(shown)
    except UnicodeEncodeError:
        raise ValueError("contains a character that cannot be written as UTF-8") from None
    return shown


def _kind(value: object) -> str:
    names = {dict: "a mapping", list: "a list", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), repr(value))


def line(value: object) -> str:
    """Text on one line and not empty: what an #SBATCH line can carry."""
    shown = text(value).strip()
    if not shown:
        raise ValueError("must not be empty")
    if not shown.isprintable():
        raise ValueError("must be one line without control characters")
    return shown


def words(value: object) -> list[str]:
    """A list of words, or the same as one text with commas between them."""
    items = re.split(r"[,\s]+", text(value).strip()) if not isinstance(value, list) else value
    found = [line(item) for item in items if item != ""]
    for word in found:
        if re.search(r"[,\s]", word):
            raise ValueError(f"{word!r} must be one word")
    return found


def _duration(value: object) -> str:
    shown = text(value).strip()
    parse_duration(shown)
    return shown


def _some_duration(value: object) -> str:
    shown = _duration(value)
    if parse_duration(shown) <= 0:
        raise ValueError("must be longer than nothing")
    return shown


def _memory(value: object) -> str:
    shown = text(value).strip()
    size = parse_size(shown)
    if 0 < size < MEBIBYTE:
        raise ValueError(f"{shown!r} is less than 1 MiB; say the unit: 512M, 32G")
    return shown


def _count(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"must be a whole number, not {value!r}")  # noqa: TRY004 - pydantic's
    return value


Line = Annotated[str, BeforeValidator(line)]
Words = Annotated[tuple[str, ...], BeforeValidator(words)]
Duration = Annotated[str, BeforeValidator(checked(_some_duration))]
DurationOrZero = Annotated[str, BeforeValidator(checked(_duration))]

Memory = Annotated[str, BeforeValidator(checked(_memory))]
Count = Annotated[int, BeforeValidator(_count), Field(ge=1)]
