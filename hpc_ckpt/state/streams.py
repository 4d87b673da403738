"""Reading an IterableDataset that keeps its own place, also in data workers.

Each worker reads its part of the stream and says with every batch where it then was. Going on
means that each worker is put back to its place and that the one whose turn it was begins.
Random numbers while a batch is read depend on (seed, epoch, worker, number) alone.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..errors import CheckpointError
from . import rng
from .loading import COPIED, Tag, WorkerStart, start


def keeps_its_place(value: object) -> bool:
    """Whether it can say where it is, and go there."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


@dataclass(frozen=True)
class Place:
    """Where one worker is: its batches so far, and what its dataset says of itself."""

    worker: int
    batches: int = 0
    ended: bool = False
    """Its last batch was its last: what a dataset then says of itself may be its beginning."""
    state: Any = None


class _Framed(NamedTuple):
    """One batch on its way from a worker."""

    batch: Any
    place: Place


class Stream:
    """One pass over a DataLoader whose IterableDataset keeps its own place."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._places = [Place(number) for number in range(max(1, loader.num_workers))]
        self._next = 0

    def keep(self) -> dict[str, Any]:
        """Where every worker was when the batches handed out so far were read."""
        return {
            "next": self._next,
            "workers": [
                {"batches": one.batches, "ended": one.ended, "state": one.state}
                for one in self._places
            ],
        }

    def open(self, tag: Tag, kept: Any) -> Iterator[Any]:
        if kept is not None:
            self._go_to(kept)
        count = len(self._places)
        turn = [self._places[(self._next + number) % count] for number in range(count)]
        source = _Source(self._loader.dataset, tag, turn)
        options: dict[str, Any] = {name: getattr(self._loader, name) for name in COPIED}
        options |= {
            "persistent_workers": False,  # a new pass is told to its workers when they begin
            "worker_init_fn": WorkerStart(self._loader.worker_init_fn),
            "collate_fn": _Framing(source, self._loader.collate_fn),
            "batch_size": self._loader.batch_size,
        }
        if self._loader.batch_size is not None:
            options["drop_last"] = self._loader.drop_last
        return self._unframed(start(DataLoader(source, **options)), source)

    def _go_to(self, kept: Any) -> None:
        workers = kept["workers"]
        if len(workers) != len(self._places):
            raise CheckpointError(
                f"the stream was read by {len(workers)} data workers and now has "
                f"{len(self._places)}: each keeps its own place, so go on with as many"
            )
        self._next = int(kept["next"])
        self._places = [
            Place(number, int(one["batches"]), bool(one["ended"]), one["state"])
            for number, one in enumerate(workers)
        ]

    def _unframed(self, framed: Iterator[_Framed], source: _Source) -> Iterator[Any]:
        while True:
            if self._loader.num_workers == 0:
                source.seed()  # whoever reads here puts the program's own course back each time
            try:
                batch, place = next(framed)
            except StopIteration:
                return
            self._places[place.worker] = place
            self._next = (place.worker + 1) % len(self._places)
            yield batch
            del batch  # else this one is still held while the next is read


class _Source(IterableDataset[Any]):
    """Stands where the user's dataset stood; in each worker it reads the user's, from its place."""

    def __init__(self, dataset: Any, tag: Tag, turn: list[Place]) -> None:
        self.dataset = dataset
        self._tag = tag
        self._turn = turn
        self._place = turn[0]
        self._keeper: Any = dataset
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        self._place = self._turn[worker.id if worker is not None else 0]
        if worker is not None:
            # A dataset that takes its share by the worker's id must find the one it had.
            object.__setattr__(worker, "id", self._place.worker)
            object.__setattr__(worker, "dataset", self.dataset)
        self.seed()
        if not self._place.ended:
            yield from self._begun(self._place.state)
            self._ended = True

    def _begun(self, state: Any) -> Iterator[Any]:
        if keeps_its_place(self.dataset):
            if state is not None:
                self.dataset.load_state_dict(state)
            return iter(self.dataset)
        source: Any = iter(self.dataset)
        self._keeper = source  # its iterator keeps the place
        if state is not None:
            source.load_state_dict(state)
        begun: Iterator[Any] = source
        return begun

    def batch_made(self) -> Place:
        """Where this worker is now; what is random from here on belongs to its next batch."""
        state = self._keeper.state_dict()
        self._place = Place(self._place.worker, self._place.batches + 1, self._ended, state)
        self.seed()
        return self._place

    def seed(self) -> None:
        """What is random while this worker's next batch is read."""
        rng.seed_all(*self._tag, self._place.worker, self._place.batches)


class _Framing:
    """Collates as the user's loader does; runs in the process that reads."""

    def __init__(self, source: _Source, collate: Callable[[Any], Any]) -> None:
        self._source = source
        self._collate = collate

    def __call__(self, samples: Any) -> _Framed:
        return _Framed(self._collate(samples), self._source.batch_made())
