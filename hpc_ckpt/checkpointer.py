"""Checkpointer: the facade a training script uses. It wires the rooms and decides nothing.

runtime/ enters the run directory, acts at each step and ends the link; engine/ saves and
restores; state/ knows the tracked objects and the data position.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from . import testing
from .engine.persist import Pending
from .engine.restore import Restored
from .engine.shelf import best, latest, load
from .errors import LinkEnded, UserError
from .policy.base import Policy
from .runtime.ending import Ending
from .runtime.running import Running, Wishes
from .runtime.session import enter
from .settings import Keep
from .state.plain import as_plain
from .state.registry import Registry

__all__ = ["Checkpointer", "Pending", "Restored", "best", "latest", "load"]

PATIENCE_S = 60.0
"""How long a program that leaves the block waits for work that is not its final save."""
PATIENCE_INTERRUPTED_S = 5.0


class Checkpointer:
    """Makes a training loop resumable; use it as a context manager.

    Entering restores the newest valid checkpoint. Leaving without an exception writes a final
    checkpoint and DONE. When the link must end, step() saves and raises LinkEnded, and from then
    on nothing the program does can make it look complete.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        policy: str | Policy | None = None,
        keep: int | Mapping[str, Any] | Keep | None = None,
        tiers: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        settings: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        seed: int | None = None,
        strict: bool = False,
        strict_restore: bool = True,
        **tracked: Any,
    ) -> None:
        self._root = root
        self._call = {"policy": policy, "keep": keep, "tiers": tiers}
        self._settings = settings
        self._seed = seed
        self._strict = strict
        self._strict_restore = strict_restore
        self._registry = Registry(tracked)
        self._described: dict[str, Any] = {}
        self._running: Running | None = None
        self._left: Running | None = None

    # ── entering and leaving ──────────────────────────────────────────────────────────────
    def __enter__(self) -> Checkpointer:
        if self._running is not None or self._left is not None:
            raise UserError("a Checkpointer can be entered once; make another one")
        testing.arm_from_environment()
        with ExitStack() as undo:
            session = enter(
                self._root, call=self._call, settings=self._settings, environ=os.environ
            )
            undo.callback(session.close)
            wishes = Wishes(
                registry=self._registry,
                seed=torch.initial_seed() if self._seed is None else self._seed,
                strict=self._strict,
                strict_restore=self._strict_restore,
                described=self._described,
            )
            self._running = Running(session, wishes, undo)
            undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._running is not None and self._running.pid != os.getpid():
            return  # a forked child leaves its parent's block: nothing here is its own
        live = self._entered()
        self._running, self._left = None, live
        patience = PATIENCE_INTERRUPTED_S if isinstance(error, KeyboardInterrupt) else PATIENCE_S
        try:
            if not live.ending.latched:
                live.leave(error, patience)
        finally:
            live.close(patience)
        if live.ending.latched and not isinstance(error, LinkEnded):
            live.ending.raise_here()

    # ── loops ─────────────────────────────────────────────────────────────────────────────
    def epochs(self, n: int) -> Iterator[int]:
        """Epoch numbers up to `n`; goes on with the epoch in which the last link stopped."""
        live = self._entered()
        live.rewind_rng()
        while not live.ending.latched and live.data.epoch < n:
            with live.epoch():
                yield live.data.epoch

    def batches(
        self, loader: Iterable[Any], name: str = "train", track: bool = True
    ) -> Iterable[Any]:
        """The batches of `loader`; goes on with the one after the last that was trained on.

        After a resume the first one has the number `.start`, for loops that count:
        `enumerate(batches, batches.start)`. With track=False (evaluation) nothing is kept and
        the random numbers are left alone.
        """
        live = self._entered()
        if track:
            return live.data.batches(
                loader, name, stopped=lambda: live.ending.latched, resumed=live.rewind_rng
            )
        return _until_latched(live.data.evaluation(loader, name, live.step), live.ending)

    def steps(self, n: int | None = None) -> Iterator[int]:
        """Step numbers, up to `n` over the whole chain: for loops without epochs."""
        live = self._entered()
        live.rewind_rng()
        while not live.ending.latched and (n is None or live.step < n):
            live.in_iteration = True
            yield live.step

    # ── at the end of an iteration ────────────────────────────────────────────────────────
    def step(self, loss: Any = None, metrics: Mapping[str, Any] | None = None) -> None:
        """The last line of an iteration; saves when due, and raises LinkEnded to end the link."""
        live = self._entered()
        if live.ending.latched:
            live.ending.raise_here()
            return
        with live.stalling():
            may_save = live.advance()
            live.metrics.give(live.step, loss, metrics)
            live.boundary.reached(live.place, may_save=may_save)

    def poll(self) -> bool:
        """For long evaluations: whether the link must end, so that you can cut them short.

        Ends the link here if the last step is already saved; otherwise the next step() does.
        """
        live = self._entered()
        if live.ending.latched:
            live.ending.raise_here()
            return True
        with live.stalling():
            live.boundary.heartbeat(live.place)
            reason = live.triggers.reason_to_stop(live.boundary.surroundings())
            if reason is not None and not live.boundary.end_if_saved(live.place, reason):
                live.told_to_stop = reason
        return reason is not None

    def save(self, reason: str = "asked for by the program", wait: bool = False) -> Pending:
        """Save now, between two iterations; inside one, or while busy, at the next step() that
        may save: with gradient accumulation the one after the optimizer's next step.

        Call it last: a resumed run goes on with the next batch, or after the last batch with
        the next epoch.
        """
        live = self._entered()
        if live.ending.latched:
            live.ending.raise_here()
            return live.boundary.refuse(reason)
        inside = live.inside_iteration()
        if wait and inside:
            raise UserError("save(wait=True) inside an iteration: call it after step()")
        if wait and live.accumulating:
            warnings.warn(
                "save(wait=True) between the micro-batches of an accumulation: their gradients "
                "are not saved. Call it after the optimizer has stepped",
                RuntimeWarning,
                stacklevel=2,
            )
        if inside or (not wait and (live.accumulating or not live.engine.ready)):
            return live.boundary.request(reason)
        with live.stalling():
            if wait:
                return live.boundary.save_and_wait(live.place_between(), reason)
            return live.boundary.save(live.place_between(), reason)

    def describe(self, **values: Any) -> None:
        """Hyper-parameters and the like, kept with every checkpoint from now on.

        Text, numbers, truth values, None, and lists and dicts of those; `hpc-ckpt ls --long`
        shows them. A value given again replaces the one before.
        """
        self._described.update({name: as_plain(value, name) for name, value in values.items()})

    # ── what is known ─────────────────────────────────────────────────────────────────────
    @property
    def should_stop(self) -> bool:
        """The link is over and saved; for loops in threads, where LinkEnded is not raised."""
        return self._known().ending.latched

    @property
    def restored(self) -> Restored | None:
        """Where this process went on from; None: it started afresh."""
        return self._known().restored

    @property
    def global_step(self) -> int:
        """Calls of step() over the whole chain."""
        return self._known().step

    @property
    def epoch(self) -> int:
        """The epoch that is going on, or the next one to begin."""
        return self._known().data.epoch

    @property
    def metrics(self) -> dict[str, float]:
        """The newest value of each metric given to step()."""
        return self._known().metrics.read()

    def _entered(self) -> Running:
        if self._running is None:
            raise UserError("use the Checkpointer inside its block: with Checkpointer(…) as ckpt:")
        if self._running.pid != os.getpid():
            raise UserError("a forked process cannot use its parent's Checkpointer")
        return self._running

    def _known(self) -> Running:
        """What was so in the block is still known after it."""
        return self._left or self._entered()


def _until_latched(source: Iterator[Any], ending: Ending) -> Iterator[Any]:
    while not ending.latched:
        try:
            item = next(source)
        except StopIteration:
            return
        yield item
