"""What exists only between entering a Checkpointer's block and leaving it.

Builds the parts in the order in which they need each other, restores the state into the
program's objects, and takes everything down again.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from signal import SIGTERM
from typing import Any

from .. import provenance
from ..engine import restore, snapshot
from ..engine.engine import Engine
from ..engine.orders import Publisher
from ..engine.restore import Origin, Restored
from ..engine.stepped import StepWatch
from ..errors import CheckpointError, LinkEnded, one_line
from ..events import Event
from ..format.verify import Reader
from ..parallel import uncollected
from ..rundir import Result
from ..state import rng
from ..state.data import DataState
from ..state.registry import Registry
from ..triggers import Triggers
from . import earlier
from .boundary import Boundary
from .ending import Ending
from .lookout import Lookout
from .meter import Meter, Metrics
from .parts import Parts, Place
from .room import Room
from .session import Session, known_save_s
from .signals import SignalWatch

log = logging.getLogger("hpc_ckpt")


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the program asked for, besides the settings."""

    registry: Registry
    seed: int
    strict: bool
    strict_restore: bool
    described: Mapping[str, Any]
    """What describe() was given; grows while the program runs."""


class Running:
    """One stay in the block."""

    def __init__(self, session: Session, wishes: Wishes, undo: ExitStack) -> None:
        entered_s = time.time()
        self.pid = os.getpid()
        self.session = session
        self._wishes = wishes
        self.step = 0
        self.restored: Restored | None = None
        self.in_epoch = False
        self.in_iteration = False
        """A step number was handed out and step() not yet called."""
        self.accumulating = False
        """No optimizer had stepped at the last step(): there are gradients of its batch."""
        self.told_to_stop: str | None = None
        """poll() said so and no step() has come since."""
        self._stepped_here = False
        self._given_up = False
        self._rng: Mapping[str, Any] | None = None
        self._program = provenance.of_this_program()
        self._was_done = self._stands_done = session.rundir.done() is not None
        self._told_of_done = False
        # Before the restore, which may take minutes: a signal then is kept for the first step.
        self._signals = SignalWatch((SIGTERM, session.settings.signal))
        self._signals.install()
        undo.callback(self._signals.remove)
        self.data = DataState(wishes.seed)
        self.stepped = StepWatch(wishes.registry.optimizers())
        undo.callback(self.stepped.close)
        self.metrics = Metrics()
        self.ending = Ending(session)
        origin = self._restore()
        self._room = Room(
            session.stack,
            session.events,
            session.settings.memory,
            keep=session.settings.keep.last,
        )
        self._room.check_memory(snapshot.check(self._capture(self.place)))
        self._build(origin, entered_s)

    def _build(self, origin: Origin | None, entered_s: float) -> None:
        session = self.session
        self.meter = Meter(time.monotonic())
        publisher = Publisher(
            chain=session.chain,
            lease=session.lease,
            stack=session.stack,
            keep=session.settings.keep,
            events=session.events,
            memory=session.settings.memory,
        )
        self.engine = Engine(
            publisher,
            origin=origin,
            step=self.step,
            known_save_s=known_save_s(session.rundir, session.generation),
        )
        self._lookout = Lookout(session.places, self._signals)
        self._lookout.look()
        self.triggers = Triggers(
            session.settings.policy, entered_s=entered_s, deadline_s=self._lookout.deadline_s
        )
        self.boundary = Boundary(
            Parts(
                session=session,
                engine=self.engine,
                lookout=self._lookout,
                triggers=self.triggers,
                meter=self.meter,
                metrics=self.metrics,
                ending=self.ending,
                room=self._room,
                capture=self._capture,
                frozen=self._wishes.registry.frozen,
                strict=self._wishes.strict,
            )
        )
        self._lookout.start(self.boundary.watch)

    # ── state ─────────────────────────────────────────────────────────────────────────────
    @property
    def place(self) -> Place:
        return Place(self.step, self.data.epoch)

    def place_between(self) -> Place:
        """After the last batch of an epoch, what comes next is the next epoch."""
        positions = self.data.positions.values() if self.in_epoch else ()
        over = bool(positions) and all(position.exhausted for position in positions)
        return Place(self.step, self.data.epoch + over)

    def inside_iteration(self) -> bool:
        """A batch or step was handed out, or an optimizer has stepped, since the last step()."""
        handed_out = any(p.yielded != p.used for p in self.data.positions.values())
        return self.in_iteration or handed_out or self.stepped.waiting

    def _capture(self, place: Place) -> dict[str, Any]:
        data = self.data.state_dict()
        if place.epoch != self.data.epoch:
            data = {**data, "epoch": place.epoch, "positions": {}}
        return {
            "tracked": self._wishes.registry.capture(),
            "rng": rng.capture(),
            "data": data,
            "progress": {"step": place.step, "epoch": place.epoch},
            "about": {**self._program, "described": self._wishes.described},
        }

    def _restore(self) -> Origin | None:
        began = time.monotonic()
        self.session.stack.recover()
        found = earlier.find(self.session, self._search)
        for tier, error in self.session.stack.passed_over.items():
            self.session.events.emit(Event.TIER_FAILED, tier=tier, error=error)
        if found.checkpoint is None or found.tier is None:
            self.session.events.emit(Event.STARTED_FRESH)
            return None
        manifest = found.checkpoint.manifest
        skipped = (*earlier.overlooked(self.session, found), *found.skipped)
        for difference in restore.differences(manifest):
            _warn(difference)
        self.restored = Restored(
            step=manifest.step,
            epoch=manifest.epoch,
            generation=manifest.generation,
            path=found.checkpoint.path,
            tier=found.tier.name,
            skipped=skipped,
        )
        self.session.events.emit(
            Event.RESTORED,
            step=manifest.step,
            epoch=manifest.epoch,
            checkpoint=manifest.key.directory_name,
            tier=found.tier.name,
            skipped=[str(one) for one in skipped],
            seconds=round(time.monotonic() - began, 6),
        )
        log.info("restored %s", found.checkpoint.path)
        return found.origin

    def _search(self) -> restore.Found:
        with uncollected():
            return restore.newest(self.session.stack, self._put_back)

    def _put_back(self, checkpoint: Reader) -> None:
        registry, strict = self._wishes.registry, self._wishes.strict_restore
        # A defect that is found half-way leaves them mixed; then the older checkpoint that is
        # taken instead overwrites all of it, or entering fails. Not so if parts may be missing.
        with _refusing(checkpoint):
            targets = registry.targets(checkpoint.manifest.tree) if strict else {}
        with _refusing(checkpoint, _MISREAD):
            state = restore.state_of(
                checkpoint, like={"tracked": registry.templates()}, targets=targets
            )
        step = _step_in(state, checkpoint)
        with _refusing(checkpoint):
            passed = registry.restore(state["tracked"], strict=strict, path=checkpoint.path)
        if passed:
            _warn(f"{checkpoint.path} does not fit the tracked objects: {'; '.join(passed)}")
        with _refusing(checkpoint):
            self.data.load_state_dict(state["data"])
            self.step = step
            # Last: whatever loads state may draw random numbers. An import has none.
            if state["rng"] is not None:
                rng.restore(state["rng"])
            self._rng = state["rng"]

    def rewind_rng(self) -> None:
        """What the program drew on its way back into its loop is taken back.

        In the run that was saved those numbers had been drawn before the save.
        """
        if self._rng is not None and not self._stepped_here:
            rng.restore(self._rng)

    # ── a step ────────────────────────────────────────────────────────────────────────────
    def advance(self) -> bool:
        """One more step is part of the state; whether this is a boundary that may be saved."""
        self.step += 1
        self.data.confirm()
        self.in_iteration = False
        self.told_to_stop = None
        if not self._stepped_here:
            self._stepped_here = True
            self._rng = None
        if self._stands_done:
            self._take_done_back()
        may_save = self.stepped.take()
        self.accumulating = not may_save
        if may_save:
            stolen_s = self.meter.boundary(disturbed=self.engine.busy)
            if stolen_s is not None:
                self.engine.note_stolen(stolen_s)
        return may_save

    def _take_done_back(self) -> None:
        """Storage that refuses it does not end training: the next step tries again."""
        try:
            self.session.rundir.done_file.unlink(missing_ok=True)
        except OSError as error:
            if not self._told_of_done:
                self._told_of_done = True
                _warn(f"DONE cannot be taken back yet, it is tried again: {one_line(error)}")
            return
        self._stands_done = False
        self.session.events.emit(Event.REOPENED, flush=False, step=self.step)

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """One epoch's body; it counts as over only when the loop asks for the next one."""
        self.data.begin_epoch(self.data.epoch)
        self.in_epoch = True
        try:
            yield
        finally:
            self.in_epoch = False
        if not self.ending.latched:
            self.data.end_epoch()

    @contextmanager
    def stalling(self) -> Iterator[None]:
        """Training waits for us inside."""
        self.meter.pause(time.monotonic())
        try:
            yield
        finally:
            self.meter.resume(time.monotonic())

    # ── leaving ───────────────────────────────────────────────────────────────────────────
    def leave(self, error: BaseException | None, patience_s: float) -> None:
        """Not latched: the work is complete, or an exception ends it."""
        if error is not None:
            self._leave_with(error, patience_s)
        elif self.told_to_stop is not None:
            self.engine.wait(self._patience(patience_s))
            self.boundary.end_with_newest(self.told_to_stop)
        elif self._stepped_here or not self._was_done:
            with self.stalling():
                self.boundary.complete(self.place, stepped=self._stepped_here)

    def _leave_with(self, error: BaseException, patience_s: float) -> None:
        """What is under way is still committed; the exception goes on its way."""
        self._explain(error)
        self._given_up = not self.engine.wait(self._patience(patience_s))
        newest = self.engine.lasting
        if self.engine.fenced is not None:
            return
        saved = isinstance(error, LinkEnded) and newest is not None
        self.ending.decide(
            Result.SAVED if saved else Result.FAILED,
            None if newest is None else newest.step,
            one_line(error),
        )

    def _explain(self, error: BaseException) -> None:
        """A trap that no program has without restarts: an epoch whose batches were all used
        before, of which only the end is left, runs none of them."""
        over = any(position.exhausted for position in self.data.positions.values())
        if not isinstance(error, NameError) or self._stepped_here or not over:
            return
        hint = (
            f"hpc_ckpt went on behind the last batch of epoch {self.data.epoch}: only its end is "
            "left, and what the body of the loop would have set is not there. Set it before the "
            "loop, or track it"
        )
        log.warning("%s", hint)
        if hasattr(error, "add_note"):  # from Python 3.11 on: told below the traceback
            error.add_note(hint)

    def _patience(self, limit_s: float) -> float:
        deadline = self._lookout.deadline_s
        return limit_s if deadline is None else max(0.0, min(limit_s, deadline - time.time()))

    def close(self, patience_s: float) -> None:
        """Threads, hooks and signals; nothing of ours is left in the process.

        The run directory is not read: storage that fails now must not fail work that is done.
        """
        try:
            self._take_down(patience_s)
        finally:
            self.session.close()

    def _take_down(self, patience_s: float) -> None:
        self.meter.pause(time.monotonic())
        if not self.engine.close(0.0 if self._given_up else self._patience(patience_s)):
            log.warning("left a save behind that did not end in %g s", patience_s)
        self.boundary.abandon()
        self._lookout.stop()
        self._signals.remove()
        self.stepped.close()
        self.data.close()
        self.session.events.emit(
            Event.ENDED,
            step=self.step,
            training_s=round(self.meter.training_s, 6),
            stall_s=round(self.meter.stall_s, 6),
            complete=self.ending.done or (self._was_done and not self._stepped_here),
            reason=self.ending.reason,
        )


_MISREAD = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Not RuntimeError: a device without memory raises that, and the checkpoint is sound."""
_ODD = (*_MISREAD, RuntimeError)


@contextmanager
def _refusing(checkpoint: Reader, odd: tuple[type[Exception], ...] = _ODD) -> Iterator[None]:
    """A tree of another form than ours is a broken checkpoint, whatever Python calls it."""
    try:
        yield
    except odd as error:
        raise CheckpointError(
            f"{checkpoint.path}: its tree does not hold what a run saves: {one_line(error)}"
        ) from error


def _step_in(state: Any, checkpoint: Reader) -> int:
    """The step in a decoded state, once all of its parts are seen to be there."""
    with _refusing(checkpoint):
        parts = [state[name] for name in ("tracked", "data", "progress")]
        parts += [] if state["rng"] is None else [state["rng"]]
        if not all(isinstance(part, dict) for part in parts):
            raise TypeError("its parts are not maps")
        return int(state["progress"]["step"])


def _warn(message: str) -> None:
    log.warning("%s", message)
    warnings.warn(message, RuntimeWarning, stacklevel=5)
