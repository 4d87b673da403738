"""The remembered form of a state: the next state of the same form needs no new encoding.

Training changes bytes and a few numbers, hardly ever the form. An outline holds what stays (the
tree's text, the names and sizes of leaves) and walks the next state only far enough to see that
it still fits and to take what changed. Whatever does not fit exactly is no match: the state is
then encoded afresh by tree.py.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import numpy as np
import torch

from ..format.manifest import TreeText, json_text
from . import tensors, tree
from .leaves import Value
from .plain import ENCODERS, Node, joined
from .signature import Signature

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_METADATA = "_metadata"
_TEXT = {str}
_KEYS = {str, int, bool, NoneType}
"""Types whose equal values of equal type are the same."""


class _NoOutline(Exception):
    """The state has a form that is not remembered."""


@dataclass(frozen=True)
class LeafShape:
    """What a layout needs to know of a leaf."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass
class Match:
    """What a fitting state has to give: leaves in the outline's order, and new plain values."""

    values: list[Value] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    """Where each value lies; of tensors on a device, there."""
    plains: list[Node] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    """Of the containers met: one met twice is shared, which an outline does not know."""
    encoder: tree.Encoder = field(default_factory=tree.Encoder)


class Outline:
    """Made of one state; fits those of the same containers, keys, dtypes, shapes and ties.

    Keeps nothing of the program's alive but keys and numbers.
    """

    def __init__(self, state: object) -> None:
        marks = _Marks()
        self._form = marks.form(state, "", 0)
        encoded = tree.encode(marks.marked(state, self._form))
        if encoded.shares:
            raise _NoOutline
        self.leaves = tuple(
            LeafShape(one.name, one.dtype, one.shape, one.nbytes) for one in encoded.leaves
        )
        self.aliases = encoded.aliases
        self._fragments = _split(json_text(encoded.tree), marks.tokens)
        first = Match()
        if not self._form.match(state, first):
            raise _NoOutline
        numbers = {name: number for number, name in enumerate(encoded.order)}
        self.stored = [numbers[leaf.name] for leaf in encoded.leaves]
        """For each leaf: which value of a match it is; the others are aliases."""
        self._signature = Signature(first.values)

    def match(self, state: object) -> Match | None:
        """What the state has, if it is of this form."""
        found = Match()
        if not self._form.match(state, found) or found.encoder.shares:
            return None
        if len(set(found.ids)) != len(found.ids):
            return None
        addresses = self._signature.addresses_if_fitting(found.values)
        if addresses is None:
            return None
        found.addresses = addresses
        return found

    def tree(self, found: Match) -> TreeText:
        """The state's tree; cheap, and needs nothing of the program's."""
        texts = [json_text(node) for node in found.plains]
        return TreeText("".join(_interleaved(self._fragments, texts)))


def outline_of(state: object) -> Outline | None:
    """None for forms that are not remembered: shared containers, sparse tensors, generators."""
    try:
        return Outline(state)
    except _NoOutline:
        return None


# ── forms ─────────────────────────────────────────────────────────────────────────────────
class _Form(ABC):
    @abstractmethod
    def match(self, value: Any, found: Match) -> bool: ...


@dataclass(frozen=True)
class _LeafForm(_Form):
    kind: Any

    def match(self, value: Any, found: Match) -> bool:
        if type(value) is not self.kind:
            return False
        found.values.append(value)
        return True


@dataclass(frozen=True)
class _PlainForm(_Form):
    """Holds no leaf; encoded anew each time, for it is small and may be anything."""

    path: str
    depth: int

    def match(self, value: Any, found: Match) -> bool:
        encoder = found.encoder
        found.plains.append(encoder.value(value, self.path, self.depth))
        return not encoder.book.leaves


@dataclass(frozen=True)
class _MetadataForm(_Form):
    """torch's version numbers of a module's parts: many, and they hardly ever change."""

    known: str
    node: Node

    def match(self, value: Any, found: Match) -> bool:
        # As text: 1 and True are equal in Python, and so are dicts of another order.
        if repr(value) != self.known or not _is_two_levels(value):
            return False
        found.plains.append(self.node)
        return True


@dataclass(frozen=True)
class _MappingForm(_Form):
    kind: Any
    keys: tuple[Any, ...]
    key_types: list[type]
    items: tuple[_Form, ...]
    metadata: _Form | None

    def match(self, value: Any, found: Match) -> bool:
        if type(value) is not self.kind or tuple(value) != self.keys:
            return False
        if [*map(type, value)] != self.key_types:
            return False
        found.ids.append(id(value))
        for form, item in zip(self.items, value.values(), strict=True):
            if not form.match(item, found):
                return False
        return _match_metadata(self.metadata, value, found)


@dataclass(frozen=True)
class _LeavesForm(_Form):
    """A mapping of nothing but leaves, taken as a whole: most of every state is in these."""

    kind: Any
    keys: tuple[Any, ...]
    key_types: list[type]
    types: list[type]
    metadata: _Form | None

    def match(self, value: Any, found: Match) -> bool:
        if type(value) is not self.kind or tuple(value) != self.keys:
            return False
        items = value.values()
        if [*map(type, items)] != self.types or [*map(type, value)] != self.key_types:
            return False
        found.ids.append(id(value))
        found.values.extend(items)
        if self.kind is dict:
            return True
        return _match_metadata(self.metadata, value, found)


@dataclass(frozen=True)
class _TableForm(_Form):
    """A dict of dicts that all have the same keys and hold nothing but leaves of the same types:
    what an optimizer keeps of each parameter."""

    keys: tuple[Any, ...]
    key_types: list[type]
    row: _LeavesForm

    def match(self, value: Any, found: Match) -> bool:
        if type(value) is not dict or tuple(value) != self.keys:
            return False
        if [*map(type, value)] != self.key_types:
            return False
        rows, columns, ids, values = value.values(), self.row.keys, found.ids, found.values
        if {*map(type, rows)} != {dict}:
            return False
        before = len(values)
        ids.append(id(value))
        for row in rows:
            if tuple(row) != columns or {*map(type, row)} != _TEXT:
                return False
            values.extend(row.values())
        ids.extend(map(id, rows))
        return [*map(type, values[before:])] == self.row.types * len(self.keys)


def _match_metadata(form: _Form | None, value: Any, found: Match) -> bool:
    """Nothing but `_metadata` may be attached: anything else has to be refused by encode()."""
    attributes = vars(value) if type(value) is OrderedDict else {}
    if form is None:
        return not attributes
    return len(attributes) == 1 and form.match(attributes.get(_METADATA), found)


@dataclass(frozen=True)
class _SequenceForm(_Form):
    kind: Any
    items: tuple[_Form, ...]

    def match(self, value: Any, found: Match) -> bool:
        if type(value) is not self.kind or len(value) != len(self.items):
            return False
        if self.kind is list:
            found.ids.append(id(value))
        return all(form.match(item, found) for form, item in zip(self.items, value, strict=True))


# ── making one ────────────────────────────────────────────────────────────────────────────
class _Marks:
    """Finds the form of a state, and makes the same state with a token for each plain value."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self._secret = secrets.token_hex(8)
        self._seen: set[int] = set()

    def form(self, value: Any, path: str, depth: int) -> _Form:
        kind = type(value)
        if kind in ENCODERS:
            return _PlainForm(path, depth)
        if kind in _TENSORS and tensors.is_flat(value):
            return _LeafForm(kind)
        if kind is np.ndarray:
            return _LeafForm(kind)
        if kind in (dict, OrderedDict):
            return self._mapping(value, path, depth)
        if kind in (list, tuple):
            return self._sequence(value, path, depth)
        return _leafless(value, path, depth)

    def _mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> _Form:
        self._once(value)
        forms = tuple(self.form(item, joined(path, key), depth + 1) for key, item in value.items())
        metadata = _metadata_form(value, path)
        if metadata is None and all(isinstance(form, _PlainForm) for form in forms):
            return _PlainForm(path, depth)
        keys, key_types = tuple(value), [*map(type, value)]
        if not set(key_types) <= _KEYS:  # others may be equal and yet not the same
            raise _NoOutline
        if forms and all(isinstance(form, _LeafForm) for form in forms):
            types = [*map(type, value.values())]
            return _LeavesForm(type(value), keys, key_types, types, metadata)
        table = _table(keys, key_types, forms) if type(value) is dict else None
        return table or _MappingForm(type(value), keys, key_types, forms, metadata)

    def _sequence(self, value: Any, path: str, depth: int) -> _Form:
        if type(value) is list:
            self._once(value)
        forms = tuple(self.form(item, joined(path, n), depth + 1) for n, item in enumerate(value))
        if all(isinstance(form, _PlainForm) for form in forms):
            return _PlainForm(path, depth)
        return _SequenceForm(type(value), forms)

    def _once(self, value: object) -> None:
        if id(value) in self._seen:
            raise _NoOutline
        self._seen.add(id(value))

    def marked(self, value: Any, form: _Form) -> Any:
        if isinstance(form, (_PlainForm, _MetadataForm)):
            self.tokens.append(f"{self._secret}-{len(self.tokens)}")
            return self.tokens[-1]
        if isinstance(form, _SequenceForm):
            items = [self.marked(item, inner) for inner, item in zip(form.items, value)]  # noqa: B905 - made of it
            return form.kind(items)
        if isinstance(form, _MappingForm):
            pairs = zip(form.keys, value.values(), form.items, strict=True)
            copied = form.kind((key, self.marked(item, inner)) for key, item, inner in pairs)
            return self._with_metadata(copied, value, form.metadata)
        if isinstance(form, _TableForm):
            return {key: dict(row) for key, row in value.items()}
        if isinstance(form, _LeavesForm) and form.metadata is not None:
            return self._with_metadata(form.kind(value), value, form.metadata)
        return value

    def _with_metadata(self, copied: Any, value: Any, form: _Form | None) -> Any:
        if form is not None:
            vars(copied)[_METADATA] = self.marked(vars(value)[_METADATA], form)
        return copied


def _table(
    keys: tuple[Any, ...], key_types: list[type], forms: tuple[_Form, ...]
) -> _TableForm | None:
    """None if the rows are not all alike, or have other names than text."""
    first = forms[0] if forms else None
    if not isinstance(first, _LeavesForm) or first.kind is not dict:
        return None
    if set(first.key_types) != _TEXT or any(form != first for form in forms):
        return None
    return _TableForm(keys, key_types, first)


def _metadata_form(value: Mapping[Any, Any], path: str) -> _Form | None:
    attributes = vars(value) if isinstance(value, OrderedDict) else {}
    if not attributes:
        return None
    if set(attributes) != {_METADATA}:
        raise _NoOutline
    metadata, place = attributes[_METADATA], joined(path, _METADATA)
    if not _is_two_levels(metadata) or not all(map(_is_plain, metadata.values())):
        raise _NoOutline
    return _MetadataForm(repr(metadata), _encoded_alone(metadata, place, 0))


def _is_two_levels(metadata: Any) -> bool:
    """As torch makes it: one dict for each part, none of them shared."""
    if type(metadata) not in (dict, OrderedDict):
        return False
    return len({id(part) for part in metadata.values()}) == len(metadata)


def _is_plain(part: object) -> bool:
    return type(part) is dict and all(type(item) in _KEYS for item in part.values())


def _leafless(value: Any, path: str, depth: int) -> _Form:
    _encoded_alone(value, path, depth)
    return _PlainForm(path, depth)


def _encoded_alone(value: Any, path: str, depth: int) -> Node:
    encoder = tree.Encoder()
    node = encoder.value(value, path, depth)
    if encoder.book.leaves or encoder.shares:
        raise _NoOutline
    return node


def _split(text: str, tokens: Iterable[str]) -> list[str]:
    """The text between the tokens, which come in their order."""
    fragments = []
    for token in tokens:
        before, found, text = text.partition(f'"{token}"')
        if not found:
            raise _NoOutline
        fragments.append(before)
    return [*fragments, text]


def _interleaved(fragments: list[str], texts: list[str]) -> Iterable[str]:
    for fragment, text in zip(fragments, texts, strict=False):
        yield fragment
        yield text
    yield fragments[-1]
