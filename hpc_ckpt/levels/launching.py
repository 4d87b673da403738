"""Starts the program of a link, passes on what it prints, and ends what it leaves behind."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from ..errors import SpecError
from .base import Start
from .orphans import Orphans
from .program import Program
from .relay import Relay


class Launching:
    """Of one link; one program at a time."""

    def __init__(self, orphans: Orphans | None = None) -> None:
        self._orphans = orphans
        self._relay: Relay | None = None

    def start(self, start: Start) -> Program:
        if start.output is not None:
            self.stop_relaying()
            self._relay = Relay(start.output)
        try:
            return Program(start.argv, start.cwd, start.environ, start.output)
        except OSError as error:
            raise SpecError(f"{start.argv[0]}: {error.strerror}") from error

    def stop_relaying(self) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relay = None

    def reap(self) -> None:
        if self._orphans is not None:
            self._orphans.reap()

    def end_orphans(self) -> None:
        """Or they would go on beside the next attempt."""
        if self._orphans is not None:
            self._orphans.end()
