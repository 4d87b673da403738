"""How a pass is read: its order, the twin of the user's loader, and what runs in data workers.

Knows nothing of positions or checkpoints; data.py says which pass and where it starts.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from multiprocessing import resource_tracker
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from . import rng
from .slicing import sliced

OUTSIDE = -1
"""The epoch of passes that are made outside epochs()."""


def iterates_as_torch_does(loader: DataLoader[Any]) -> bool:
    """False for subclasses that put something of their own between dataset and batch."""
    return all(
        getattr(type(loader), method) is getattr(DataLoader, method)
        for method in ("__iter__", "_get_iterator")
    )


# ── the order of a pass


class Tag(NamedTuple):
    """Names one batch of the whole run."""

    seed: int
    name: str
    epoch: int
    pass_number: int
    rank: int
    number: int


class Tagged(NamedTuple):
    """What is asked of a data worker: the samples of one batch, and which batch it is."""

    tag: Tag
    indices: Any


class Order(Iterator[Tagged]):
    """The index lists of one pass, drawn from a private course of random numbers.

    Neither the host's courses nor the generators of the loader are moved by it.
    """

    def __init__(self, loader: DataLoader[Any], tag: Tag, *, skip: int) -> None:
        # Ranks that share out one order between them must draw the same one.
        course = (*tag[:4], "order")
        self._tag = tag
        self._number = skip
        self._generators = followed_generators(loader)
        self._own = [
            torch.Generator(device=g.device).manual_seed(rng.seed_of(*course, place)).get_state()
            for place, g in enumerate(self._generators)
        ]
        self._host = None if _draw_from_torch_only(loader) else rng.host_state_of(*course)
        self._source: Iterator[Any] = self._privately(lambda: _begin(loader, tag.epoch, skip))

    def __next__(self) -> Tagged:
        indices = self._privately(lambda: next(self._source))
        number, self._number = self._number, self._number + 1
        return Tagged(self._tag._replace(number=number), indices)

    def _privately(self, draw: Callable[[], Any]) -> Any:
        if self._host is None:
            return self._with_own_generators(draw)
        with rng.preserved():
            rng.set_host_state(self._host)
            try:
                return self._with_own_generators(draw)
            finally:
                self._host = rng.host_state()

    def _with_own_generators(self, draw: Callable[[], Any]) -> Any:
        theirs = [generator.get_state() for generator in self._generators]
        self._set_generators(self._own)
        try:
            return draw()
        finally:
            self._own = [generator.get_state() for generator in self._generators]
            self._set_generators(theirs)

    def _set_generators(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def index_sampler(loader: DataLoader[Any]) -> Iterable[Any]:
    """What decides which samples come together and when."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    """The samplers that have a part in the order; one may draw from another."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [loader.batch_sampler, loader.sampler]
    while waiting:
        sampler = waiting.pop(0)
        if sampler is not None and id(sampler) not in found:
            found[id(sampler)] = sampler
            waiting.append(getattr(sampler, "sampler", None))
    return list(found.values())


def _draw_from_torch_only(loader: DataLoader[Any]) -> bool:
    """True for torch's own samplers: three courses need not be swapped at every batch."""
    return all(type(each).__module__.startswith("torch.utils.data") for each in _samplers(loader))


def followed_generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Those that are given a private course for each pass."""
    owned = [getattr(owner, "generator", None) for owner in (loader, *_samplers(loader))]
    known = [torch.default_generator, *(g for g in owned if isinstance(g, torch.Generator))]
    return list({id(generator): generator for generator in known}.values())


def _begin(loader: DataLoader[Any], epoch: int, skip: int) -> Iterator[Any]:
    for sampler in _samplers(loader):
        # Outside epochs() the program counts its epochs itself and tells the sampler.
        if epoch != OUTSIDE and callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)
    known = sliced(loader, skip)
    if known is not None:
        return known
    source = iter(index_sampler(loader))
    deque(islice(source, skip), maxlen=0)
    return source


# ── the twin, and what runs inside its workers


COPIED = (
    "collate_fn", "multiprocessing_context", "num_workers", "persistent_workers",
    "pin_memory", "pin_memory_device", "prefetch_factor", "timeout",
)  # fmt: skip
"""What a private loader takes over from the user's."""


class Twin:
    """A loader of our own that reads the user's dataset by tagged index lists."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        # Not the twin itself: workers end with the last reference, which a cycle would keep.
        self._upcoming = _Upcoming()
        options: dict[str, Any] = {option: getattr(loader, option) for option in COPIED}
        options["worker_init_fn"] = WorkerStart(loader.worker_init_fn)
        # in_order=False is not copied: a count says which batches were used only if in order.
        if loader.batch_sampler is None:
            options.update(sampler=self._upcoming, batch_size=None)
        else:
            options.update(batch_sampler=self._upcoming)
        self._loader = DataLoader(_SeededDataset(loader.dataset), **options)

    def start(self, order: Iterator[Tagged]) -> Iterator[Any]:
        """The batches of 'order'. Unless workers persist they end with the iterator."""
        self._upcoming.order = order
        return start(self._loader)


class _Upcoming:
    """Stands where the sampler stood; each pass puts its order in."""

    def __init__(self) -> None:
        self.order: Iterator[Tagged] = iter(())

    def __iter__(self) -> Iterator[Tagged]:
        return self.order


class _SeededDataset(Dataset[Any]):
    """The user's dataset, read under random numbers that depend only on the tag."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, tagged: Tagged) -> Any:
        _enter_batch(tagged.tag)
        together = getattr(self.dataset, "__getitems__", None)
        if together:
            return together(tagged.indices)
        return [self.dataset[index] for index in tagged.indices]

    def __getitem__(self, tagged: Tagged) -> Any:
        _enter_batch(tagged.tag)
        return self.dataset[tagged.indices]


def _enter_batch(tag: Tag) -> None:
    rng.seed_all(*tag)
    worker = get_worker_info()
    if worker is not None:
        # After a resume torch hands batch k to worker 0, so a dataset that looks at the worker's
        # id would act differently. The record is frozen, hence object.__setattr__.
        object.__setattr__(worker, "id", tag.number % worker.num_workers)
        object.__setattr__(worker, "seed", rng.seed_of(*tag))


_SHELTERED_FROM = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def start(loader: DataLoader[Any]) -> Iterator[Any]:
    """Begin to iterate; workers are born with the signals blocked that would kill them."""
    if loader.num_workers == 0:
        return iter(loader)
    if (loader.multiprocessing_context or multiprocessing).get_start_method() != "fork":
        resource_tracker.ensure_running()  # its own start would unblock SIGTERM half-way
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SHELTERED_FROM)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class WorkerStart:
    """Runs first in every data worker, then what the user asked to run there."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker_id: int) -> None:
        _shelter()
        worker = get_worker_info()
        if worker is not None and isinstance(worker.dataset, _SeededDataset):
            object.__setattr__(worker, "dataset", worker.dataset.dataset)
        if self._then is not None:
            self._then(worker_id)


def _shelter() -> None:
    """Outlive the signals a scheduler sends to every process of a step.

    A worker that dies of one takes the main process with it before the last save. They are
    blocked, not ignored: when the interpreter exits it sends SIGTERM to workers that are left
    and joins them without a limit, so SIGTERM from the owner, and from nobody else, is obeyed.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SHELTERED_FROM)
    # A forked worker shares the owner's wake-up pipe: its signals would look like the owner's.
    signal.set_wakeup_fd(-1)
    owner = multiprocessing.parent_process()
    if owner is not None and owner.pid is not None:
        threading.Thread(
            target=_obey, args=(owner.pid,), name="hpc-ckpt-owner", daemon=True
        ).start()


def _obey(owner: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != owner:
        pass
    os._exit(0)


_evaluation_twins: WeakKeyDictionary[DataLoader[Any], DataLoader[Any]] = WeakKeyDictionary()


def start_sheltered(loader: Iterable[Any]) -> Iterator[Any]:
    """Begin to iterate as the program would have, with workers that outlive a notice."""
    if not isinstance(loader, DataLoader) or not iterates_as_torch_does(loader):
        return iter(loader)
    if loader.num_workers == 0:
        return iter(loader)
    known = _evaluation_twins.get(loader)
    twin = sheltered(loader) if known is None else known  # not by truth: that asks for a length
    if loader.persistent_workers:
        _evaluation_twins[loader] = twin
    return start(twin)


def sheltered(loader: DataLoader[Any], *, for_one_pass: bool = False) -> DataLoader[Any]:
    """The same loader again, with workers that outlive a notice.

    Workers that are kept for another pass go on drawing where the last one ended, which a
    resumed run cannot know: `for_one_pass` has none of those.
    """
    twin = copy.copy(loader)
    twin._iterator = None
    if for_one_pass:
        object.__setattr__(twin, "persistent_workers", False)
    twin.worker_init_fn = WorkerStart(loader.worker_init_fn)
    return twin
