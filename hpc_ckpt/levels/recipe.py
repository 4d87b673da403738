"""A recipe: the YAML that teaches how an application saves and goes on."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .base import Work


@dataclass(frozen=True)
class Recipe:
    """Checked; as JSON it travels in chain.json, so that the node needs no YAML."""

    name: str
    title: str

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "title": self.title}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Recipe:
        return cls(str(record["name"]), str(record["title"]))


def load_recipes() -> list[Recipe]:
    """Those shipped, and those of the user, which outrank them."""
    return []


def matching(recipes: Iterable[Recipe], work: Work) -> Recipe | None:
    """The recipe that knows this command."""
    return None
