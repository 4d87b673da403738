"""System level: DMTCP."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .base import Kind, Moment, NothingNew, ResumeFailed, Saved, Start, Work
from .program import Program


class Dmtcp:
    """In the making."""

    name = "dmtcp"
    kind = Kind.SYSTEM
    lead_s = 30.0

    def __init__(self, tool: Mapping[str, Any] | None = None) -> None:
        self._tool = tool

    def probe(self, work: Work) -> str | None:
        return "not available in this version"

    def first(self, work: Work) -> Start:
        return Start(argv=work.argv, cwd=work.cwd, environ=work.environ)

    def resume(self, work: Work, restart: Path, facts: Mapping[str, Any]) -> Start:
        raise ResumeFailed("there is nothing to go on from")

    def resumed(self, program: Program, until: float) -> None:
        return

    def ask(self, program: Program, into: Path, moment: Moment) -> None:
        raise NothingNew("not available in this version")

    def wait(self, program: Program, into: Path, moment: Moment) -> Saved:
        raise NothingNew("not available in this version")

    def is_complete(self, work: Work, code: int) -> bool | None:
        return None

    def own_failure(self, code: int) -> str | None:
        return None

    def progress(self, program: Program) -> int | None:
        return None

    def close(self) -> None:
        return
