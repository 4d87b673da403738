"""No level at all: the program begins anew in every link. What is left when nothing else works."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .base import Kind, Moment, NothingNew, ResumeFailed, Saved, Start, Work
from .program import Program

log = logging.getLogger("hpc_ckpt.steward")

WARNING = (
    "this program is not saved at all: each link begins anew, and the work is done only if one "
    "link is long enough for all of it"
)


class Plain:
    """Runs the command; exit code 75 is its own word that it has saved."""

    name = "plain"
    kind = Kind.PLAIN
    lead_s = 0.0

    def probe(self, work: Work) -> str | None:
        return None

    def first(self, work: Work) -> Start:
        log.warning("%s", WARNING.upper())
        return Start(argv=work.argv, cwd=work.cwd, environ=work.environ)

    def resume(self, work: Work, restart: Path, facts: Mapping[str, Any]) -> Start:
        raise ResumeFailed("there is nothing to go on from")

    def resumed(self, program: Program, until: float) -> None:
        return

    def ask(self, program: Program, into: Path, moment: Moment) -> None:
        raise NothingNew(WARNING)

    def wait(self, program: Program, into: Path, moment: Moment) -> Saved:
        raise NothingNew(WARNING)

    def is_complete(self, work: Work, code: int) -> bool | None:
        return None

    def own_failure(self, code: int) -> str | None:
        return None

    def close(self) -> None:
        return
