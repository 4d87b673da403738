"""The kinds of data sources, and how each is read from a given place on.

A map-style DataLoader needs a count and no more. A source that keeps its own place is asked for
it. Anything else that can be iterated is read from its beginning and counted, and said so.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import random
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe

from ..errors import UnsupportedLoader
from . import rng
from .loading import (
    Order,
    Tag,
    Twin,
    followed_generators,
    index_sampler,
    iterates_as_torch_does,
    sheltered,
)
from .loading import start as begin
from .streams import Stream, keeps_its_place

log = logging.getLogger("hpc_ckpt")


class Source(ABC):
    """What can be read in passes."""

    reads_here = True
    """This process reads and collates, and must draw as a worker would."""

    @abstractmethod
    def open(self, tag: Tag, start: int, kept: Any) -> Iterator[Any]:
        """The batches from number `start` on; `kept` is what keep() said when it stood there."""

    def keep(self) -> Any:
        """What has to be kept beside the count to go on from here; None if nothing."""
        return None

    needs_only_a_count = False
    """It can be opened at any batch, and nothing before that is read."""

    outlives_a_pass = False
    """What it says of itself after a pass matters for the next one."""

    @abstractmethod
    def __len__(self) -> int:
        """Batches of a whole pass; TypeError if unknown."""


def source_of(loader: Any, twin: Callable[[DataLoader[Any]], Twin]) -> Source:
    """The right kind; `twin` gives the private twin of a map-style loader."""
    if is_map_style(loader):
        return _MapStyle(loader, twin)
    if _is_stream(loader):
        return _Streamed(loader)
    if keeps_its_place(loader) and isinstance(loader, Iterable) and not _is_torchdata(loader):
        return _Stateful(loader)
    if not isinstance(loader, Iterable) and not hasattr(type(loader), "__getitem__"):
        kind = f"{type(loader).__module__}.{type(loader).__qualname__}"
        raise UnsupportedLoader(f"batches(): {kind} cannot be iterated")
    return _Counted(loader)


def is_map_style(loader: Any) -> bool:
    if not isinstance(loader, DataLoader):
        return False
    if isinstance(loader.dataset, (IterableDataset, MapDataPipe)):
        return False
    return _reads_as_torch_does(loader)


def _is_stream(loader: Any) -> bool:
    """Of a dataset that keeps its own place."""
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset):
        return False
    return _reads_as_torch_does(loader) and _stream_keeps_its_place(loader.dataset)


def _reads_as_torch_does(loader: DataLoader[Any]) -> bool:
    """torchdata's loader keeps books of its own while it iterates, and reads as torch's does."""
    return _is_torchdata(loader) or iterates_as_torch_does(loader)


def _is_torchdata(loader: object) -> bool:
    """What it keeps of a dataset that keeps nothing is a count, without the random numbers."""
    return type(loader).__module__.startswith("torchdata.stateful_dataloader")


def _stream_keeps_its_place(dataset: Any) -> bool:
    """Itself, or the iterators it makes: torchdata's convention allows both."""
    if keeps_its_place(dataset):
        return True
    made = getattr(type(dataset).__iter__, "__annotations__", {}).get("return")
    return isinstance(made, type) and keeps_its_place(made)


class _MapStyle(Source):
    needs_only_a_count = True

    def __init__(self, loader: DataLoader[Any], twin: Callable[[DataLoader[Any]], Twin]) -> None:
        self._loader = loader
        self._twin = twin
        self.reads_here = loader.num_workers == 0
        _warn_of_generators(loader)

    def __len__(self) -> int:
        return len(index_sampler(self._loader))  # type: ignore[arg-type]  # samplers without a length raise TypeError, as in torch

    def open(self, tag: Tag, start: int, kept: Any) -> Iterator[Any]:
        order = Order(self._loader, tag, skip=start)
        first = next(order, None)
        if first is None:  # starting workers only to find nothing left would cost seconds
            return iter(())
        rng.seed_all(*tag, "workers")
        return self._twin(self._loader).start(chain((first,), order))


class _Streamed(Source):
    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._stream = Stream(loader)
        self.reads_here = loader.num_workers == 0

    def __len__(self) -> int:
        return len(self._loader)

    def open(self, tag: Tag, start: int, kept: Any) -> Iterator[Any]:
        rng.seed_all(*tag, "workers")
        return self._stream.open(tag, kept)

    def keep(self) -> Any:
        return self._stream.keep()


class _Stateful(Source):
    """A loader of another library, or of the program's own, that keeps its place."""

    outlives_a_pass = True

    def __init__(self, loader: Any) -> None:
        self._loader: Any = sheltered(loader) if isinstance(loader, DataLoader) else loader

    def __len__(self) -> int:
        return len(self._loader)

    def open(self, tag: Tag, start: int, kept: Any) -> Iterator[Any]:
        if kept is not None:
            self._loader.load_state_dict(kept)
        return _seeded(lambda: iter(self._loader), tag, start)

    def keep(self) -> Any:
        return self._loader.state_dict()


class _Counted(Source):
    """Anything else: read again from its first batch, under the same random numbers."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        kind = f"{type(loader).__module__}.{type(loader).__qualname__}"
        _tell_once(
            f"batches(): {kind} does not say where it is, so its batches are counted: a resumed "
            "run reads and drops those before its place, and is exact only if they come in the "
            "same order again. Give it state_dict() and load_state_dict(), or use a DataLoader "
            "over a map-style dataset"
        )

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # TypeError if it has no length

    def open(self, tag: Tag, start: int, kept: Any) -> Iterator[Any]:
        return _seeded(self._begin, tag, start)

    def _begin(self) -> Iterator[Any]:
        if isinstance(self._loader, DataLoader):
            return begin(sheltered(self._loader, for_one_pass=True))
        return iter(self._loader)


def _seeded(begin: Callable[[], Iterator[Any]], tag: Tag, start: int) -> Iterator[Any]:
    """What is random while item i is read depends only on the tag and i."""
    rng.seed_all(*tag, "begin")
    source = begin()
    return _reseeding(source, tag, start)


def _reseeding(source: Iterator[Any], tag: Tag, start: int) -> Iterator[Any]:
    number = start
    while True:
        rng.seed_all(*tag._replace(number=number))
        try:
            item = next(source)
        except StopIteration:
            return
        yield item
        del item  # else this one is still held while the next is read
        number += 1


# ── what cannot be followed ───────────────────────────────────────────────────────────────
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_DEPTH = 6
_MOST = 2_000
"""So many objects are looked into; a dataset may hold millions."""
_told: set[str] = set()


def _warn_of_generators(loader: DataLoader[Any]) -> None:
    """A generator of the program's own goes on drawing where the process that has it stands."""
    seen = {id(one) for one in followed_generators(loader)}
    order = index_sampler(loader)
    for owner, place in (
        (loader.dataset, "dataset"),
        (order, "sampler"),
        (loader.collate_fn, "collate_fn"),
    ):
        found = _generator_in(owner, place, seen)
        if found is None:
            continue
        _tell_once(
            f"batches(): {found} is a generator of {type(owner).__qualname__}'s own: what it "
            "draws depends on how often the run was resumed and on the number of workers. Draw "
            "from torch, numpy or random without a generator: they are seeded anew for every batch"
        )


def _generator_in(owner: Any, place: str, seen: set[int]) -> str | None:
    """The nearest one among what was not seen yet, which grows."""
    waiting = deque([(owner, place, 0)])
    while waiting and len(seen) < _MOST:
        value, path, depth = waiting.popleft()
        for name, inner in _attributes(value):
            if id(inner) in seen:
                continue
            if isinstance(inner, _GENERATORS):
                return f"{path}.{name}"
            seen.add(id(inner))
            if depth < _DEPTH:
                waiting.append((inner, f"{path}.{name}", depth + 1))
    return None


_OPAQUE = (torch.Tensor, np.ndarray, type, ModuleType, str, bytes, int, float, FunctionType)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object of the program's own holds; not what lies in tensors, modules and data."""
    if isinstance(value, (list, tuple)):
        if len(value) <= 32:
            yield from ((str(number), item) for number, item in enumerate(value))
    elif isinstance(value, dict):
        if len(value) <= 32:
            yield from ((str(key), item) for key, item in value.items())
    elif not isinstance(value, _OPAQUE):
        yield from list(getattr(value, "__dict__", {}).items())


def _tell_once(message: str) -> None:
    if message in _told:
        return
    _told.add(message)
    log.warning("%s", message)
    warnings.warn(message, RuntimeWarning, stacklevel=4)
