"""Whether a tracked optimizer has stepped: between two steps, gradients are not saved.

Listens through step hooks; nothing of the optimizer is replaced.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

log = logging.getLogger("hpc_ckpt")


class _Removable(Protocol):
    def remove(self) -> None: ...


class StepWatch:
    """Without a tracked optimizer, or with one that has no hooks, every call may save."""

    def __init__(self, optimizers: Iterable[object]) -> None:
        self._stepped = False
        self._hooks: list[_Removable] = []
        tracked = list(optimizers)
        registers = [_register_of(optimizer) for optimizer in tracked]
        self._always = not tracked or None in registers
        if tracked and self._always:
            log.info("an optimizer has no step hooks: every call of step() may save")
        for register in registers:
            if register is not None and not self._always:
                self._hooks.append(register(self._on_step))

    @property
    def waiting(self) -> bool:
        """An optimizer has stepped since the last take(); unknown counts as no."""
        return self._stepped

    def take(self) -> bool:
        """Whether one has stepped since this was last asked."""
        stepped, self._stepped = self._stepped, False
        return stepped or self._always

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _on_step(self, *_: object) -> None:
        self._stepped = True


def _register_of(optimizer: object) -> Callable[[Callable[..., None]], Any] | None:
    """How to hook into it; wrappers keep the real one in `.optimizer`, often without hooks."""
    seen: set[int] = set()
    inner: object = optimizer
    while id(inner) not in seen and hasattr(inner, "optimizer"):
        seen.add(id(inner))
        inner = inner.optimizer
    register = getattr(inner, "register_step_post_hook", None)
    return register if callable(register) else None
