"""Whether a tracked optimizer has stepped: between two steps, gradients are not saved.

Listens through step hooks; nothing of the optimizer is replaced.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Iterable

from torch.optim import Optimizer


class StepWatch:
    """Without an optimizer that can be listened to, every call may save."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.waiting = False
        """An optimizer has stepped since the last take()."""
        self._hooks = [one.register_step_post_hook(self._on_step) for one in optimizers]
        self._always = not self._hooks

    def take(self) -> bool:
        """Whether one has stepped since this was last asked."""
        stepped, self.waiting = self.waiting, False
        return stepped or self._always

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _on_step(self, *_: object) -> None:
        self.waiting = True
