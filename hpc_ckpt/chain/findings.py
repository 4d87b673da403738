"""What a check of a site found: one record for each thing that was looked at."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Grade(str, Enum):
    OK = "ok"
    NOTE = "note"
    """Worth knowing; chains work."""
    WRONG = "wrong"
    """Chains fail, wait for nothing or lose work."""


@dataclass(frozen=True)
class Finding:
    what: str
    grade: Grade
    seen: str
    """What the cluster does."""
    said: str = ""
    """What the profile says, as one would write it."""
    advice: str = ""


def ok(what: str, seen: str, said: str = "") -> Finding:
    return Finding(what, Grade.OK, seen, said)


def note(what: str, seen: str, said: str = "", advice: str = "") -> Finding:
    return Finding(what, Grade.NOTE, seen, said, advice)


def wrong(what: str, seen: str, said: str, advice: str) -> Finding:
    return Finding(what, Grade.WRONG, seen, said, advice)
