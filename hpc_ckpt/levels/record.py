"""What is known of levels in one chain: tried, chosen, failed, and why."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import logging
from typing import Any

from .. import fsio
from ..events import Event, EventLog
from ..rundir import RunDir, read_surely
from .base import NotHere, StartFailed, may_last, passes
from .moments import Cost

log = logging.getLogger("hpc_ckpt.steward")

TRIES = 2
"""Links that may fail after the same restart before an older one is tried first, or in which a
level may fail to start, or to save anything, before it gives way."""
WHOLE_S = 3600.0
"""A shorter link may end before a program comes to write its first restart file."""


class Trials:
    """One file for the chain, control/levels.json; only the holder of the lease writes it."""

    def __init__(self, place: RunDir, generation: int, events: EventLog) -> None:
        self._path = place.levels_file
        self._generation = generation
        self._events = events
        self._record: dict[str, Any] = {}

    def read(self) -> None:
        """What earlier links have noted. Raises OSError: else it would be written over."""
        self._record = read_surely(self._path) or {}

    def choose(self, name: str, kind: str) -> None:
        log.info("level: %s", name)
        self._events.emit(Event.LEVEL_CHOSEN, level=name, kind=kind)
        self._note("chosen", {**self._of("chosen"), str(self._generation): name})

    def reject(self, name: str, why: str) -> None:
        """Not now; the next link asks again."""
        log.warning("level %s: %s", name, why)
        self._events.emit(Event.LEVEL_REJECTED, level=name, reason=why, lasting=False)
        self._note("rejected", {**self._of("rejected"), name: why})

    def fail(self, name: str, why: str) -> None:
        """Not again in this chain."""
        log.warning("level %s does not work for this program here: %s", name, why)
        self._events.emit(Event.LEVEL_REJECTED, level=name, reason=why, lasting=True)
        self._note("failed", {**self._of("failed"), name: why})

    def failed(self, name: str) -> str | None:
        why = self._of("failed").get(name)
        return None if why is None else f"failed in an earlier attempt: {why}"

    def given_up(self) -> frozenset[str]:
        """All that have failed."""
        return frozenset(self._of("failed"))

    def save(self, name: str, cost: Cost) -> None:
        self._once("saved", name)
        self._note("costs", {**self._of("costs"), name: [round(cost.store_s, 3), cost.lead_s]})
        if name in self._of("failed"):  # an earlier save had failed: it works after all
            self._note("failed", {k: why for k, why in self._of("failed").items() if k != name})

    def cost(self, name: str) -> Cost | None:
        """Of its last save, in whichever link that was."""
        try:
            store_s, lead_s = self._of("costs")[name]
            return Cost(float(store_s), None if lead_s is None else float(lead_s))
        except (KeyError, TypeError, ValueError):
            return None

    def has_saved(self, name: str) -> bool:
        """A level that has saved once is not given up for one save that failed."""
        return name in self._of("saved")

    def gives_way(self, name: str, error: StartFailed | NotHere) -> bool:
        """Whether a level that did not start is given up, for the whole chain. Want of space is no
        reason; a busy node, or one set up otherwise, is in the second link."""
        busy = isinstance(error, NotHere) and not passes(error)
        return self._never_starts(name) if busy or may_last(error) else not passes(error)

    def _never_starts(self, name: str) -> bool:
        return self._count("unstarted", name) >= TRIES

    def never_saves(self, name: str, seconds: float) -> bool:
        """Whether a level is given up that had so long of a link and saved nothing. A long one is
        enough: the second of that kind would end the chain."""
        return self._count("unsaved", name) >= TRIES or seconds >= WHOLE_S

    def survive(self, name: str) -> None:
        self._once("survived", name)

    def survived(self, name: str) -> bool:
        """Whether a program has gone on from any restart of it, and was not gone soon after."""
        return name in self._of("survived")

    def go_nowhere(self, restart: str) -> None:
        """A link went on from it and failed before it had saved itself."""
        self._count("nowhere", restart)

    def went_nowhere(self, restart: str) -> bool:
        return int(self._of("nowhere").get(restart) or 0) >= TRIES

    def _once(self, key: str, name: str) -> None:
        if name not in self._of(key):
            self._note(key, {**self._of(key), name: self._generation})

    def _count(self, key: str, name: str) -> int:
        """How often, with this time."""
        times = int(self._of(key).get(name) or 0) + 1
        self._note(key, {**self._of(key), name: times})
        return times

    def _of(self, key: str) -> dict[str, Any]:
        found = self._record.get(key)
        return found if isinstance(found, dict) else {}

    def _note(self, key: str, value: dict[str, Any]) -> None:
        self._record[key] = value
        data = (json.dumps(self._record, indent=1) + "\n").encode()
        try:
            fsio.write_atomic(self._path, data)
        except OSError as error:
            log.warning("%s: %s", self._path, error)
