"""How a link ends: the latch, the outcome file, DONE.

Once latched it stays so: a swallowed exception or a `break` cannot turn "saved" into
"complete". The watchdog writes an outcome through here too, and never over a final one.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping

from ..errors import EXIT_COMPLETE, EXIT_SAVED, LinkEnded
from ..rundir import Done, Outcome, Result, write_outcome
from .session import Session

log = logging.getLogger("hpc_ckpt")


class Ending:
    """Written once by the training thread; provisionally, before that, by the watchdog."""

    def __init__(self, session: Session, environ: Mapping[str, str] = os.environ) -> None:
        self._session = session
        # A worker's exit code makes torchelastic restart or fail the whole group.
        self._code = EXIT_COMPLETE if "TORCHELASTIC_RUN_ID" in environ else EXIT_SAVED
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._final = False
        self._rescued: int | None = None
        self.done = False
        """DONE was written here."""

    # ── the latch ─────────────────────────────────────────────────────────────────────────
    @property
    def latched(self) -> bool:
        return self._reason is not None

    @property
    def reason(self) -> str:
        """Why the link ended; nothing while it has not."""
        return self._reason or ""

    def latch(self, reason: str) -> None:
        """From here on the link is over, whatever the program does."""
        if self._reason is None:
            self._reason = reason
            log.warning("link ended: %s", reason)

    def error(self) -> LinkEnded:
        return LinkEnded(self._reason or "not latched", code=self._code)

    def raise_here(self) -> None:
        """Raise LinkEnded, in the main thread only: in any other it would end nothing."""
        if threading.current_thread() is threading.main_thread():
            raise self.error()

    # ── the outcome ───────────────────────────────────────────────────────────────────────
    def decide(self, result: Result, step: int | None, reason: str) -> None:
        """The final word on this link; an outcome that cannot be written is only logged.

        The exit code then speaks for it.
        """
        with self._lock:
            self._final = True
            self._write(result, step, reason)

    def rescue(self, step: int, reason: str) -> bool:
        """The watchdog's word; False if it was said of this step or the final one was."""
        with self._lock:
            if self._final or self._rescued == step:
                return False
            self._rescued = step
            self._write(Result.SAVED, step, reason)
            return True

    def complete(self, step: int) -> None:
        """The work is done: outcome first, so that DONE never stands beside another one."""
        generation = self._session.generation
        self.decide(Result.COMPLETE, step, "complete")
        self._session.rundir.write_done(Done(generation, step))
        self.done = True

    def _write(self, result: Result, step: int | None, reason: str) -> None:
        outcome = Outcome(result, self._session.generation, step, reason)
        try:
            write_outcome(self._session.outcome_file, outcome)
        except OSError as error:
            log.warning("could not write the outcome %s: %s", self._session.outcome_file, error)
