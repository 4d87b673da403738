"""A checkpoint in a tier that may hang while it is read: then its reader gives up on it.

What is left behind is a thread that waits for the file system. It has memory of its own to read
into, and a landing that is closed between it and the program's.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..format.landing import Landing
from ..format.reading import Span
from ..format.verify import Reader

Ask = Callable[[Callable[[], None], Callable[[], int]], None]
"""A question that takes long, and how far it has come."""


@dataclass(frozen=True)
class WatchedReader(Reader):
    """Raises TimeoutError, which is an OSError, when no byte has come for a while."""

    ask: Ask

    def _fill(self, spans: Mapping[str, Sequence[Span]]) -> None:
        landing = Landing()
        try:
            self.ask(lambda: self._fill_through(landing, spans), lambda: landing.landed)
        finally:
            landing.close()


def watched(reader: Reader, ask: Ask) -> WatchedReader:
    return WatchedReader(reader.path, reader.manifest, reader.headers, reader.raw, ask)
