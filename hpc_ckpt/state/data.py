"""Where the data is: a resumed run goes on with the very batch, order and augmentation it left.

Restoring random states and skipping batches gives the right order but the wrong augmentation,
because the random states of data workers are lost with them. So nothing here is carried over:
the order of a pass depends only on (seed, name, epoch, pass), and what is random while batch i is
read depends only on that and i, whatever the number of workers. What has to be kept is a count.

The user's loader is never changed; a private twin of it reads the same dataset (loading.py).
That is so for map-style torch DataLoaders; a source that keeps its own place is asked for it as
well, and any other is read again from its beginning (sources.py).
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader

from ..errors import UnsupportedLoader, UserError
from . import rng
from .loading import OUTSIDE, Tag, Twin, start_sheltered
from .sources import Source, is_map_style, source_of

_END = object()


@dataclass(slots=True)
class Position:
    """Where one named data source is."""

    epoch: int
    pass_number: int
    used: int = 0
    """Batches of this pass that are part of the training state."""
    exhausted: bool = False
    kept: tuple[int, Any] | None = None
    """After how many batches the source was asked for its place, and what it said."""
    source: Source | None = None
    yielded: int = field(init=False)
    """Batches handed out; not stored, for one handed out and not confirmed is read again."""

    def __post_init__(self) -> None:
        self.yielded = self.used

    def finish(self) -> Any:
        """The pass ran to its end: all of it counts as used. What its source takes along."""
        self.used, self.exhausted = self.yielded, True
        source = self.source
        self.source = self.kept = None  # a program that makes a loader per epoch gathers none
        return source.keep() if source is not None and source.outlives_a_pass else None

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        record: dict[str, Any] = {
            "pass": self.pass_number,
            "used": self.used,
            "exhausted": self.exhausted,
        }
        # With a batch handed out that is not used yet, the source is ahead of what it may say.
        if self.source is not None and self.yielded == self.used and not self.exhausted:
            said = self.source.keep()
            self.kept = None if said is None else (self.used, said)
        if self.kept is not None and not self.exhausted:
            record["kept"] = {"after": self.kept[0], "state": self.kept[1]}
        return record

    @classmethod
    def from_json(cls, epoch: int, record: Mapping[str, Any]) -> Position:
        kept = record.get("kept")
        return cls(
            epoch,
            int(record["pass"]),
            int(record["used"]),
            bool(record["exhausted"]),
            None if kept is None else (int(kept["after"]), kept["state"]),
        )


class _Scope:
    """The passes of one epoch, or those outside any: the n-th call for a name is its pass n."""

    def __init__(self, epoch: int, restored: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.epoch = epoch
        self.positions = {
            name: Position.from_json(epoch, record) for name, record in (restored or {}).items()
        }
        self._calls: Counter[str] = Counter()

    def take(self, name: str) -> tuple[Position | None, bool]:
        """The position of the next pass (None: it was over before), and whether it goes on."""
        number = self._calls[name]
        self._calls[name] += 1
        known = self.positions.get(name)
        if known is not None and number < known.pass_number:
            return None, False
        if known is not None and number == known.pass_number:
            return known, True
        self.positions[name] = fresh = Position(self.epoch, number)
        return fresh, False

    def to_json(self) -> dict[str, dict[str, Any]]:
        return {name: position.to_json() for name, position in self.positions.items()}


class DataState:
    """The seed, the epoch, and the position of every named data source.

    'rank' keeps the augmentation of ranks apart that share a seed. It is not stored.
    """

    def __init__(self, seed: int, *, rank: int = 0) -> None:
        self.seed = seed
        self.rank = rank
        self._in_epoch = False
        self._inside = _Scope(0)
        self._outside = _Scope(OUTSIDE)
        self._twins: WeakKeyDictionary[DataLoader[Any], dict[str, Twin]] = WeakKeyDictionary()
        self._read_once: list[object] = []
        self._between: dict[str, Any] = {}
        """What sources that outlive a pass said at the end of their last one."""
        self._restored: set[str] = set()
        """Those of them that have to be told so when they are first opened."""

    @property
    def epoch(self) -> int:
        """The epoch that is going on, or the next one to begin."""
        return self._inside.epoch

    @property
    def positions(self) -> dict[str, Position]:
        """The positions that count here: those of the epoch, or those outside any."""
        return (self._inside if self._in_epoch else self._outside).positions

    def begin_epoch(self, epoch: int) -> None:
        """Called at the top of an epoch; one that was restored goes on, any other is fresh."""
        if epoch != self._inside.epoch:
            self._inside = _Scope(epoch)
        self._in_epoch = True

    def end_epoch(self) -> None:
        """Called when the body of an epoch is through; a save from here on is of the next one."""
        self._inside = _Scope(self._inside.epoch + 1)
        self._in_epoch = False

    def confirm(self) -> None:
        """Called when what was computed from the batches handed out is in the tracked state."""
        for scope in (self._inside, self._outside):
            for position in scope.positions.values():
                position.used = position.yielded

    def batches(
        self,
        loader: object,
        name: str,
        *,
        stopped: Callable[[], bool],
        resumed: Callable[[], None] | None = None,
    ) -> Batches:
        """The next pass over 'loader'.

        'stopped' is asked before each fetch. 'resumed' is called when a restored pass is taken
        up again: just before its first batch, or at once if none is left.
        """
        source = source_of(loader, lambda one: self._twin(one, name))
        self._refuse_if_read(loader, name)
        scope = self._inside if self._in_epoch else self._outside
        position, goes_on = scope.take(name)
        return Batches(self, source, name, position, stopped, resumed if goes_on else None)

    def _refuse_if_read(self, loader: object, name: str) -> None:
        """An iterator has one pass in it; a resumed run could not tell where its second began."""
        if not isinstance(loader, Iterator):
            return
        if any(loader is known for known in self._read_once):
            raise UnsupportedLoader(
                f"batches(name={name!r}): the same iterator was given for a second pass. Make it "
                "anew for each pass, or give something that can be iterated again"
            )
        self._read_once.append(loader)

    def close(self) -> None:
        """End the data workers that were kept for the next pass."""
        self._twins.clear()

    def state_dict(self) -> dict[str, Any]:
        """A save between two confirms keeps the last confirmed counts."""
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "positions": self._inside.to_json(),
            "outside": self._outside.to_json(),
            "between": dict(self._between),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stand where 'state' stood; the program is then run again from its top."""
        self.seed = self.seed if state["seed"] is None else int(state["seed"])
        self._in_epoch = False
        self._inside = _Scope(int(state["epoch"]), state["positions"])
        self._outside = _Scope(OUTSIDE, state["outside"])
        self._between = dict(state.get("between") or {})
        self._restored = set(self._between)

    def between(self, name: str) -> Any:
        """For the first pass over a source after a restore: what it said after its last one."""
        if name not in self._restored:
            return None
        self._restored.discard(name)
        return self._between[name]

    def finished(self, name: str, position: Position) -> None:
        said = position.finish()
        if said is not None:
            self._between[name] = said

    def evaluation(self, loader: Any, name: str, step: int) -> Iterator[Any]:
        """A whole pass of which nothing is kept; neither the program's random numbers nor the
        loader's are moved.

        Of a map-style loader, what is random depends only on the seed, the name and the step: a
        resumed run evaluates as the first one did.
        """
        if not is_map_style(loader):
            return untracked(loader)
        return self._evaluated(loader, f"{name} (evaluation)", step)

    def _evaluated(self, loader: DataLoader[Any], name: str, step: int) -> Iterator[Any]:
        source = source_of(loader, lambda one: self._twin(one, name))
        tag = Tag(self.seed, name, self.epoch, step, self.rank, 0)
        with rng.preserved():
            batches = source.open(tag, 0, None)
        while True:
            with rng.preserved() if source.reads_here else nullcontext():
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch
            del batch  # else this one is still held while the next is fetched

    def _unconfirmed(self) -> dict[str, tuple[Position, int]]:
        """Positions with a batch handed out since the last step, and how many they had."""
        return {
            name: (position, position.yielded)
            for scope in (self._inside, self._outside)
            for name, position in scope.positions.items()
            if position.yielded > position.used
        }

    def _is_current(self, name: str, position: Position) -> bool:
        return any(scope.positions.get(name) is position for scope in (self._inside, self._outside))

    def _twin(self, loader: DataLoader[Any], name: str) -> Twin:
        if not loader.persistent_workers:
            return Twin(loader)
        twins = self._twins.setdefault(loader, {})
        if name not in twins:
            twins[name] = Twin(loader)
        return twins[name]


class Batches:
    """What is left of one pass; can be iterated once."""

    def __init__(
        self,
        state: DataState,
        source: Source,
        name: str,
        position: Position | None,
        stopped: Callable[[], bool],
        resumed: Callable[[], None] | None,
    ) -> None:
        self._state = state
        self._source = source
        self._name = name
        self._position = position
        self._stopped = stopped
        self._resumed = resumed
        self.start = position.used if position is not None else 0
        """The number of the first batch that is left."""
        self._is_over = position is None or position.exhausted
        self._taken = False

    def __len__(self) -> int:
        """Batches of this pass that were left when it was taken up."""
        if self._is_over:
            return 0
        return max(0, len(self._source) - self.start)

    def __iter__(self) -> Iterator[Any]:
        if self._taken:
            raise UserError(
                f"the pass over {self._name!r} was already taken; call batches() inside the "
                "epoch loop, once for each pass"
            )
        self._taken = True
        return self._run()

    def _run(self) -> Iterator[Any]:
        position = self._position
        if position is None or self._stopped():
            return
        with rng.preserved():
            source = self._open(position)
        position.source = self._source
        if self._resumed is not None:
            self._resumed()
        around = self._state._unconfirmed()
        while not self._stopped():
            self._refuse_if_overtaken(position)
            self._refuse_if_nested(around)
            with self._at_home():
                batch = next(source, _END)
            if batch is _END:
                self._state.finished(self._name, position)
                return
            position.yielded += 1
            yield batch
            del batch  # else this one is still held while the next is fetched
        self._state.close()

    def _at_home(self) -> AbstractContextManager[None]:
        """Where this process reads and collates, it must not move the program's own course."""
        return rng.preserved() if self._source.reads_here else nullcontext()

    def _open(self, position: Position) -> Iterator[Any]:
        if position.exhausted:
            return iter(())
        state = self._state
        tag = Tag(state.seed, self._name, position.epoch, position.pass_number, state.rank, 0)
        if self._source.needs_only_a_count:
            return self._source.open(tag, position.used, None)
        between = state.between(self._name)
        after, kept = position.kept or (0, between)
        source = self._source.open(tag, after, kept)
        for _ in islice(source, position.used - after):
            pass  # read again, and dropped
        return source

    def _refuse_if_nested(self, around: Mapping[str, tuple[Position, int]]) -> None:
        """A batch that spans several steps is used and not used: no count can say so."""
        for name, (outer, yielded) in around.items():
            if name != self._name and outer.yielded == yielded == outer.used:
                raise UnsupportedLoader(
                    f"batches(name={self._name!r}) goes on inside one batch of {name!r} with "
                    f"step() in between, so the position of {name!r} cannot be kept. Call step() "
                    f"once per batch of {name!r}, or make it a plain loop outside batches()"
                )

    def _refuse_if_overtaken(self, position: Position) -> None:
        if not self._state._is_current(self._name, position):
            raise UserError(
                f"a newer pass over {self._name!r} was begun while this one goes on, and only one "
                "position per name is kept; give the two loops different names"
            )


def untracked(loader: Iterable[Any]) -> Iterator[Any]:
    """Iterate anything without moving the host's random numbers: for evaluation."""
    with rng.preserved():
        source = start_sheltered(loader)
        own = rng.host_state()
    while True:
        with rng.preserved():
            rng.set_host_state(own)
            item = next(source, _END)
            own = rng.host_state()
        if item is _END:
            return
        yield item
        del item  # else this one is still held while the next is fetched
