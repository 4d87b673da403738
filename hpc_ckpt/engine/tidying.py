"""After a commit: what retention no longer wants goes, and what killed writers left behind.

The rule of what to keep is tiers/retention.py's; nothing here can hurt the commit it follows.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
from collections.abc import Callable

from ..errors import CorruptCheckpoint, Fenced
from ..events import Event, EventLog
from ..lease import Lease
from ..settings import Keep
from ..tiers.base import Committed, Tier
from ..tiers.retention import retain

log = logging.getLogger("hpc_ckpt")


class Tidier:
    """Used by the threads that commit; each tier is swept once per process."""

    def __init__(
        self,
        keep: Keep,
        lease: Lease,
        events: EventLog,
        *,
        on_fenced: Callable[[Fenced], None],
    ) -> None:
        self._keep = keep
        self._lease = lease
        self._events = events
        self._on_fenced = on_fenced
        self._swept: set[str] = set()

    def tidy(self, tier: Tier, committed: Committed) -> None:
        try:
            self._read_back(tier, committed)
            removed = retain(
                tier,
                self._keep,
                generation=self._lease.generation,
                newest_verified=committed.key,
                guard=self._lease.check,
            )
            if tier.name not in self._swept:
                tier.sweep(self._lease.generation)
                self._swept.add(tier.name)
        except Fenced as error:
            self._on_fenced(error)
        except Exception as error:  # noqa: BLE001 - the commit stands; the next one tidies again
            said = " ".join(f"{type(error).__name__}: {error}".split())
            self._events.emit(Event.RETENTION_FAILED, tier=tier.name, error=said)
            log.warning("could not remove old checkpoints: %s", error)
        else:
            for key in removed:
                self._events.emit(Event.REMOVED, checkpoint=key.directory_name, tier=tier.name)

    def _read_back(self, tier: Tier, committed: Committed) -> None:
        """Where retention leaves no other copy, this one must be read before the last goes."""
        if self._keep.last > 1:
            return
        defects = tier.verify(committed.key)
        if defects:
            raise CorruptCheckpoint(committed.path, defects)
