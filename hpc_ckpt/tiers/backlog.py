"""The checkpoints that wait to be drained: one order each, the newest first, a few at most.

Whoever uses it holds a lock of its own; tiers/draining.py has the thread.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..rundir import CheckpointKey
from .base import Tier

LAG = 2
"""At most so many checkpoints wait to be drained."""


@dataclass
class Order:
    """One checkpoint on its way down."""

    key: CheckpointKey
    source: Tier
    targets: list[Tier]
    """Where it has not arrived yet."""
    ready: bool = field(default=True)
    """False: it failed, and waits for the next order."""
    believed: frozenset[str] = frozenset()
    """Names of targets that have it if they list it; they are not read."""
    looked_for: bool = False
    """Found in its tier, not ordered: it does not wait in the queue."""


class Backlog:
    """Ordered, and not yet begun or failed."""

    def __init__(self) -> None:
        self._orders: list[Order] = []

    def __len__(self) -> int:
        return len(self._orders)

    def __iter__(self) -> Iterator[Order]:
        return iter(tuple(self._orders))

    def __contains__(self, key: CheckpointKey) -> bool:
        return any(order.key == key for order in self._orders)

    def put(self, order: Order) -> list[Order]:
        """In place of an older order of the same checkpoint; what is too much comes back."""
        others = [waiting for waiting in self._orders if waiting.key != order.key]
        ordered = sorted([order, *others], key=lambda one: one.key, reverse=True)
        self._orders = ordered[:LAG]
        return ordered[LAG:]

    def take(self, order: Order) -> None:
        self._orders.remove(order)

    def ready(self) -> Order | None:
        """The newest that has not failed since the last order."""
        return next((order for order in self._orders if order.ready), None)

    def again(self) -> None:
        for order in self._orders:
            order.ready = True

    def clear(self) -> None:
        self._orders = []
