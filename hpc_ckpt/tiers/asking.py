"""Questions to a file system that may hang: asked in a thread, and given up after a while.

Knows no tier's business: it asks, waits, and remembers who has not answered.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 20.0
"""Long for a listing on a bad day, short for a link that could go on without it."""
READING_S = 60.0
"""The same for the next bytes of a checkpoint."""
AGAIN_S = 60.0
"""Who has not answered for so long is asked once more: one request may be lost for ever while
others are answered."""
UNANSWERED = 4
"""No more than so many threads are left behind."""

Answer = TypeVar("Answer")


class Asker:
    """Who has not answered is rarely asked again until it has; safe to share between threads."""

    def __init__(
        self, patience_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._lock = threading.Lock()
        self._silent: dict[str, float] = {}
        """By name: when it was last asked without an answer."""
        self._lost: Counter[str] = Counter()
        """By name: threads that nobody waits for any more."""

    @property
    def silent(self) -> set[str]:
        """Names of those that have not answered yet."""
        with self._lock:
            lost = {name for name, count in self._lost.items() if count >= UNANSWERED}
            return lost.union(self._silent)

    def ask(
        self,
        name: str,
        question: Callable[[], Answer],
        *,
        progress: Callable[[], object] = lambda: None,
        patience_s: float | None = None,
    ) -> Answer:
        """The answer, or what the question raises; TimeoutError if neither comes.

        One that takes long is waited for as long as its `progress` changes.
        """
        patience_s = self._patience_s if patience_s is None else patience_s
        patience_s = PATIENCE_S if patience_s is None else patience_s
        if not self._may_ask(name):
            raise TimeoutError("it has not answered since it was last asked")
        answers: list[Answer] = []
        errors: list[BaseException] = []
        ended, lost = threading.Event(), threading.Event()

        def put() -> None:
            try:
                answers.append(question())
            except BaseException as error:  # noqa: BLE001 - raised where it was asked
                errors.append(error)
            with self._lock:
                ended.set()
                self._silent.pop(name, None)
                self._lost[name] -= lost.is_set()

        try:
            # A daemon: a file system that hangs must not keep a finished program from ending.
            threading.Thread(target=put, name="hpc-ckpt-ask", daemon=True).start()
        except RuntimeError as error:  # no thread to be had: asked here, as if it could not hang
            if name in self.silent:
                raise TimeoutError("it has not answered since it was last asked") from error
            return question()
        if not _wait(ended, progress, patience_s):
            with self._lock:
                if not ended.is_set():  # else it has answered in this very moment
                    lost.set()
                    self._lost[name] += 1
                    self._silent[name] = self._clock()
            raise TimeoutError(f"it does not answer after {patience_s:g} s")
        if errors:
            # Not kept in this frame, which it keeps: what the question filled would stay as well.
            raise errors.pop()
        return answers[0]

    def _may_ask(self, name: str) -> bool:
        """A question that is asked once more counts at once, so that no second one follows it."""
        with self._lock:
            if self._lost[name] >= UNANSWERED:
                return False
            now, since = self._clock(), self._silent.get(name)
            if since is not None:
                if now < since + AGAIN_S:
                    return False
                self._silent[name] = now
            return True


def _wait(ended: threading.Event, progress: Callable[[], object], patience_s: float) -> bool:
    before = progress()
    while not ended.wait(patience_s):
        now = progress()
        if now == before:
            return False
        before = now
    return True
