"""YAML files in which every scalar stays the text its author wrote, and knows its line.

YAML would read `1:30:00` as 5400, `08:00:00` as text, `no` as false and `1_0` as 10; here all
of them are text, and whoever knows what the key means reads them. What the values mean is
spec.py's and profile.py's business, which file wins is layers.py's.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import yaml

from ..errors import SpecError

MAX_BYTES = 1 << 20
MAX_VALUES = 10_000
"""Aliases of aliases grow without end; no spec of a person comes near this."""

Content = Union[None, str, int, float, bool, "list[Value]", "dict[str, Value]"]
_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = frozenset(
    _TAG + kind for kind in ("str", "int", "float", "bool", "null", "timestamp", "value")
)


@dataclass(frozen=True)
class Value:
    """One value of a document and where it came from; mappings and lists hold more of them."""

    content: Content
    origin: str

    def plain(self) -> Any:
        """Without the origins."""
        if isinstance(self.content, dict):
            return {key: value.plain() for key, value in self.content.items()}
        if isinstance(self.content, list):
            return [value.plain() for value in self.content]
        return self.content

    def at(self, path: Sequence[str | int]) -> Value | None:
        """The value at a path of keys and indices, or None."""
        here: Value = self
        for key in path:
            content = here.content
            if isinstance(content, dict) and key in content:
                here = content[str(key)]
            elif isinstance(content, list) and isinstance(key, int) and key < len(content):
                here = content[key]
            else:
                return None
        return here

    def over(self, low: Value) -> Value:
        """This one laid over `low`, mapping by mapping; lists and scalars are replaced whole."""
        if not isinstance(low.content, dict):
            return self
        if self.content is None:
            return low  # an empty section says nothing
        if not isinstance(self.content, dict):
            return self
        merged = dict(low.content)
        for key, value in self.content.items():
            merged[key] = value.over(merged[key]) if key in merged else value
        return Value(merged, self.origin)


def from_python(value: object, origin: str) -> Value:
    """A value given by a program, or by an option of the command line."""
    if isinstance(value, Mapping):
        return Value({str(key): from_python(item, origin) for key, item in value.items()}, origin)
    if isinstance(value, (list, tuple)):
        return Value([from_python(item, origin) for item in value], origin)
    if isinstance(value, os.PathLike):
        return Value(os.fsdecode(value), origin)
    if value is None or isinstance(value, (str, int, float)):
        return Value(value, origin)
    raise SpecError(f"{origin}: {value!r} cannot be written in a spec")


def at_path(path: Sequence[str], value: Value) -> Value:
    """`value` as the only leaf of a document."""
    for key in reversed(path):
        value = Value({key: value}, value.origin)
    return value


def read_file(path: Path, shown: str | None = None) -> Value:
    """The mapping in a YAML file; SpecError names the file and the line."""
    shown = str(path) if shown is None else shown
    return parse(_read_text(path, shown), shown)


def _read_text(path: Path, shown: str) -> str:
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise SpecError(f"{shown}: {error.strerror}") from None
    except ValueError:
        raise SpecError(f"{shown!r}: not a file name") from None
    if len(data) > MAX_BYTES:
        raise SpecError(f"{shown}: larger than 1 MiB, so it is not a spec or profile")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SpecError(f"{shown}:{line}: not UTF-8 text") from None


def parse(text: str, shown: str) -> Value:
    """The mapping in `text`; `shown` is what messages call the file."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            raise SpecError(f"{shown}:1: the file is empty; write at least 'command: …'")
        if not isinstance(node, yaml.MappingNode):
            raise SpecError(f"{shown}:{_line(node)}: must be lines of 'key: value' at the top")
        return _Document(shown).convert(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = shown if mark is None else f"{shown}:{mark.line + 1}"
        raise SpecError(f"{where}: not YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise SpecError(f"{shown}:{line}: not YAML: {error.reason}") from None
    except RecursionError:
        raise SpecError(f"{shown}: nested too deeply") from None


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


class _Document:
    """Turns the nodes of one file into values."""

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self._values = 0

    def _error(self, node: yaml.Node, message: str) -> SpecError:
        return SpecError(f"{self._shown}:{_line(node)}: {message}")

    def convert(self, node: yaml.Node, within: tuple[int, ...]) -> Value:
        self._values += 1
        if self._values > MAX_VALUES or id(node) in within:
            raise self._error(node, "aliases that refer to themselves, or to too much")
        within = (*within, id(node))
        origin = f"{self._shown}:{_line(node)}"
        if isinstance(node, yaml.ScalarNode):
            return Value(self._scalar(node), origin)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return Value([self.convert(item, within) for item in node.value], origin)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return Value(self._mapping(node, within), origin)
        raise self._error(node, f"the tag {node.tag!r} has no meaning here")

    def _scalar(self, node: yaml.ScalarNode) -> str | None:
        if node.tag == _TAG + "null":
            return None
        if node.tag not in _PLAIN_TAGS:
            raise self._error(node, f"the tag {node.tag!r} has no meaning here")
        return str(node.value)

    def _mapping(self, node: yaml.MappingNode, within: tuple[int, ...]) -> dict[str, Value]:
        content: dict[str, Value] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            line = _line(key_node)
            if key in content:
                raise self._error(key_node, f"{key}: written before, in line {lines[key]}")
            value = self.convert(value_node, within)
            content[key] = Value(value.content, f"{self._shown}:{line}")
            lines[key] = line
        return content

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self._error(node, "a key must be a word")
        if node.tag == _TAG + "merge":
            raise self._error(node, "merge keys (<<) are not available; write the keys out")
        return str(node.value)
