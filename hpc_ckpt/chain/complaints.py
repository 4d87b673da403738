"""What is wrong with a spec or profile, in one line: where, which key, what, what to do."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Union, get_args, get_origin

from pydantic import ValidationError

from .fields import Section
from .yamltext import Value

DEFAULT = "default"
"""The origin of what nobody wrote."""
Path = tuple[str, ...]


def first_complaint(error: ValidationError, model: type[Section], value: Value) -> str:
    """The first mistake; further ones are counted, they often follow from it."""
    complaints = [_complaint(dict(item), model, value) for item in error.errors()]
    # A misspelt key also makes its right spelling "missing": say the cause, not the effect.
    complaints.sort(key=lambda complaint: complaint[0])
    more = f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else ""
    return complaints[0][1] + more


def _complaint(item: dict[str, Any], model: type[Section], value: Value) -> tuple[int, str]:
    loc = tuple(part for part in item["loc"] if part != "[key]")
    key = _dotted(loc)
    if item["type"] == "extra_forbidden":
        return 0, f"{_origin(value, loc)}: {key}: {_unknown(loc, model)}"
    if item["type"] == "missing":
        where = _origin(value, loc) if len(loc) > 1 else _document(value)
        said = f"{key}: missing{_MISSING.get(key, '')}"
        return 2, said if where == DEFAULT else f"{where}: {said}"
    say = _SAYINGS.get(item["type"])
    said = say(item) if say else str(item["msg"]).removeprefix("Value error, ")
    return 1, f"{_origin(value, loc)}: {key}: {said}" if key else f"{_origin(value, loc)}: {said}"


_MISSING = {"command": "; write it in a spec, or after '--' on the command line"}
_SAYINGS: dict[str, Callable[[dict[str, Any]], str]] = {
    "int_parsing": lambda item: f"must be a whole number, not {item['input']!r}",
    "int_from_float": lambda item: f"must be a whole number, not {item['input']!r}",
    "int_type": lambda item: "must be a whole number",
    "greater_than_equal": lambda item: f"must be at least {item['ctx']['ge']}, not {item['input']}",
    "less_than_equal": lambda item: f"must be at most {item['ctx']['le']}, not {item['input']}",
    "bool_parsing": lambda item: f"must be true or false, not {item['input']!r}",
    "bool_type": lambda item: "must be true or false",
    "model_type": lambda item: "must be a mapping of 'key: value'",
    "dict_type": lambda item: "must be a mapping of 'key: value'",
    "string_type": lambda item: "must be text",
    "enum": lambda item: f"must be {item['ctx']['expected']}, not {item['input']!r}",
}


def _dotted(loc: Sequence[str | int]) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in loc).removeprefix(".")


def _origin(value: Value, loc: Sequence[str | int]) -> str:
    """Of the value itself, or of the nearest thing around it that was written."""
    for length in range(len(loc), 0, -1):
        found = value.at(loc[:length])
        if found is not None:
            return found.origin
    return _document(value)


def _document(value: Value) -> str:
    """The file as a whole: no line is to blame for what is not there."""
    return value.origin.rpartition(":")[0] or value.origin


# ── keys ──────────────────────────────────────────────────────────────────────────────────
def _unknown(loc: Sequence[str | int], model: type[Section]) -> str:
    *parents, last = [part for part in loc if isinstance(part, str)]
    section = section_at(model, tuple(parents)) or model
    if last in section.not_available:
        return "not available in this version; remove it"
    return f"unknown key. {_hint(last, section, model)}"


def _hint(key: str, section: type[Section], model: type[Section]) -> str:
    names = list(section.model_fields)
    near = difflib.get_close_matches(key, names, n=1)
    if near:
        return f"Did you mean {near[0]!r}?"
    elsewhere = [path for path in all_paths(model) if path[-1] == key]
    if elsewhere:
        return f"Did you mean {'.'.join(elsewhere[0])!r}?"
    return f"Known: {', '.join(names)}."


def section_at(model: type[Section], path: Path) -> type[Section] | None:
    """The section a path of keys leads to."""
    here: type[Section] | None = model
    rest = list(path)
    while rest and here is not None:
        field = here.model_fields.get(rest.pop(0))
        found, named = _section_in(None if field is None else field.annotation)
        if named and rest:
            rest.pop(0)  # a name of the user's own, such as a partition's
        here = found
    return here


def _section_in(annotation: Any) -> tuple[type[Section] | None, bool]:
    """The section inside a field's type, and whether names stand between."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, False
    if get_origin(annotation) is dict:
        return _section_in(get_args(annotation)[1])[0], True
    if get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            found, named = _section_in(part)
            if found is not None:
                return found, named
    return None, False


def known_path(model: type[Section], path: Path) -> bool:
    """Whether a path names a key of the schema; keys that are not built count."""
    *parents, last = path
    section = section_at(model, tuple(parents))
    if section is None:
        return False
    return last in section.model_fields or last in section.not_available


def all_paths(model: type[Section], prefix: Path = ()) -> Iterable[Path]:
    for name, field in model.model_fields.items():
        yield (*prefix, name)
        section, named = _section_in(field.annotation)
        if section is not None and not named:
            yield from all_paths(section, (*prefix, name))


def nearest(path: Path, models: Iterable[type[Section]]) -> str:
    """The sentence for an option or variable that names no key."""
    known = [".".join(one) for model in models for one in all_paths(model)]
    near = difflib.get_close_matches(".".join(path), known, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
    return f"{'.'.join(path)}: unknown key. {hint}"
