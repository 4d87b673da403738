"""Which checkpoints of a tier are being referred to, and which are being removed; never both.

In memory only: what hangs in a file system holds a mark, and never the lock that others need.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class References:
    """Whoever comes first has it. By names of checkpoints."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._referred: Counter[str] = Counter()
        self._removing: set[str] = set()

    def refer(self, name: str) -> bool:
        """Until release(), it is not removed; False: that has begun already."""
        with self._lock:
            if name in self._removing:
                return False
            self._referred[name] += 1
            return True

    def release(self, names: Iterable[str]) -> None:
        with self._lock:
            self._referred.subtract(names)

    @contextmanager
    def removing(self, name: str) -> Iterator[bool]:
        """Inside, nothing new refers to it; False: something does, or another removes it."""
        with self._lock:
            free = not self._referred[name] and name not in self._removing
            if free:
                self._removing.add(name)
        try:
            yield free
        finally:
            if free:
                with self._lock:
                    self._removing.discard(name)
