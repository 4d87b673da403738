"""Where the data is: what counts as used, what a resumed program is given, what is refused."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import gc
import json
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
)

from hpc_ckpt.errors import UnsupportedLoader, UserError
from hpc_ckpt.state import rng
from hpc_ckpt.state.data import DataState, untracked


class Numbers(Dataset[Any]):
    """Each item is its index."""

    def __init__(self, size: int = 12) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Both(Numbers):
    """Reads one index or several."""

    def __getitem__(self, index: Any) -> Any:
        return torch.as_tensor(index)


class Noise(Numbers):
    """Each item is random."""

    def __getitem__(self, index: int) -> Any:
        return torch.rand(1), random.random(), np.random.rand()


class Drawn(Sampler[int]):
    """Draws from Python's course, hidden inside a sampler of torch."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(12), 12))


def go_on() -> bool:
    return False


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), **{"batch_size": 3, **options})


def read(state: DataState, source: Any, name: str = "train") -> list[list[int]]:
    return [batch.tolist() for batch in state.batches(source, name, stopped=go_on)]


def resumed_from(state: DataState) -> DataState:
    """What the next link has: the stored values, in another process."""
    fresh = DataState(seed=0)
    fresh.load_state_dict(json.loads(json.dumps(state.state_dict())))
    return fresh


def ambient() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def test_a_batch_that_was_not_confirmed_is_read_again() -> None:
    """A save between two confirms keeps the last confirmed count."""
    state = DataState(seed=1)
    batches = iter(state.batches(loader(), "train", stopped=go_on))
    next(batches), next(batches)
    state.confirm()
    next(batches)
    assert [[6, 7, 8], [9, 10, 11]] == read(resumed_from(state), loader())


def test_a_pass_that_ran_to_its_end_counts_without_a_confirm() -> None:
    """Epoch-end code runs on what was read, so a save there must not read it again."""
    state = DataState(seed=1)
    read(state, loader())
    assert [] == read(resumed_from(state), loader())


def test_after_a_save_at_the_last_batch_only_the_rest_of_the_epoch_is_left() -> None:
    """The pass yields nothing; what follows in the epoch runs once; the next epoch is whole."""
    state = DataState(seed=1)
    state.begin_epoch(3)
    for place, _ in enumerate(state.batches(loader(), "train", stopped=go_on)):
        state.confirm()
        if place == 3:
            break
    again = resumed_from(state)
    assert 3 == again.epoch
    again.begin_epoch(3)
    assert [] == read(again, loader())
    again.end_epoch()
    again.begin_epoch(4)
    assert 4 == len(read(again, loader()))


def test_a_save_between_epochs_is_of_the_next_one() -> None:
    """After the body of an epoch nothing of it is left to do."""
    state = DataState(seed=1)
    state.begin_epoch(0)
    read(state, loader())
    state.end_epoch()
    again = resumed_from(state)
    assert (1, {}) == (again.epoch, again.positions)


def test_passes_of_an_epoch_are_told_apart() -> None:
    """Earlier passes yield nothing, the restored one goes on, later ones are whole."""
    state = DataState(seed=1)
    state.begin_epoch(2)
    read(state, loader())
    batches = iter(state.batches(loader(), "train", stopped=go_on))
    next(batches)
    state.confirm()
    again = resumed_from(state)
    again.begin_epoch(2)
    assert [0, 3, 4] == [len(read(again, loader())) for _ in range(3)]


def test_a_save_before_the_data_is_reached_again_loses_nothing() -> None:
    """A link that ends while the program is still on its way keeps the restored position."""
    state = DataState(seed=1)
    read(state, loader())
    batches = iter(state.batches(loader(), "train", stopped=go_on))
    next(batches)
    state.confirm()
    once = resumed_from(state)
    assert state.state_dict() == once.state_dict()
    assert [] == read(once, loader())
    assert state.state_dict() == once.state_dict()
    twice = resumed_from(once)
    assert [0, 3] == [len(read(twice, loader())) for _ in range(2)]


def test_names_are_kept_apart() -> None:
    """Two sources read side by side each go on where they were."""
    state = DataState(seed=1)
    left = iter(state.batches(loader(), "left", stopped=go_on))
    right = iter(state.batches(loader(batch_size=2), "right", stopped=go_on))
    next(left), next(right), next(right)
    state.confirm()
    again = resumed_from(state)
    assert [[4, 5], [6, 7], [8, 9], [10, 11]] == read(again, loader(batch_size=2), "right")
    assert [[3, 4, 5], [6, 7, 8], [9, 10, 11]] == read(again, loader(), "left")


def test_without_epochs_finished_passes_yield_nothing() -> None:
    """A program that counts its epochs itself is followed by the number of its passes."""
    state = DataState(seed=1)
    for _ in range(2):
        read(state, loader(shuffle=True))
    batches = iter(state.batches(loader(shuffle=True), "train", stopped=go_on))
    next(batches)
    state.confirm()
    again = resumed_from(state)
    assert [0, 0, 3, 4] == [len(read(again, loader(shuffle=True))) for _ in range(4)]


def test_a_pass_outside_the_epochs_is_not_made_again() -> None:
    """A warm-up before the epochs stays done, however many epochs have passed since."""
    state = DataState(seed=1)
    read(state, loader())
    state.begin_epoch(0)
    read(state, loader())
    state.end_epoch()
    again = resumed_from(state)
    assert [] == read(again, loader())
    again.begin_epoch(1)
    assert 4 == len(read(again, loader()))


def test_the_length_is_what_is_left() -> None:
    """Progress bars show the batches that will come."""
    state = DataState(seed=1)
    batches = state.batches(loader(), "train", stopped=go_on)
    assert 4 == len(batches)
    next(iter(batches))
    state.confirm()
    again = resumed_from(state)
    assert [3, 4] == [len(again.batches(loader(), "train", stopped=go_on)) for _ in range(2)]
    read(state, loader())
    done = resumed_from(state)
    assert [0, 0] == [len(done.batches(loader(), "train", stopped=go_on)) for _ in range(2)]


class Boastful(Drawn):
    def __len__(self) -> int:
        return 99


def test_nothing_is_left_of_a_pass_that_ended_early() -> None:
    """Some samplers promise more than they give; a pass that is over has no batch left."""
    state, source = DataState(seed=1), loader(sampler=Boastful())
    read(state, source)
    assert 0 == len(resumed_from(state).batches(source, "train", stopped=go_on))


def test_a_stopped_pass_ends_before_the_next_fetch_and_is_not_over() -> None:
    """When the link ends nothing more is read, and the rest is left for the next one."""
    state = DataState(seed=1)
    seen: list[Any] = []
    for batch in state.batches(loader(), "train", stopped=lambda: len(seen) == 2):
        seen.append(batch)
        state.confirm()
    assert 2 == len(seen)
    assert [[6, 7, 8], [9, 10, 11]] == read(resumed_from(state), loader())


def test_a_restored_pass_says_when_it_is_taken_up() -> None:
    """Before its first batch, or at once when none is left; a fresh pass says nothing."""
    state = DataState(seed=1)
    read(state, loader())
    batches = iter(state.batches(loader(), "train", stopped=go_on))
    next(batches)
    state.confirm()
    again, calls = resumed_from(state), []
    for _ in range(3):
        for _batch in again.batches(
            loader(), "train", stopped=go_on, resumed=lambda: calls.append("taken up")
        ):
            calls.append("batch")
        calls.append("end")
    assert ["end", "taken up", *["batch"] * 3, "end", *["batch"] * 4, "end"] == calls


def test_the_checkpoints_seed_wins() -> None:
    """The order of an epoch is that of the chain, not of the process."""
    state = DataState(seed=11)
    state.begin_epoch(0)
    expected = read(state, loader(shuffle=True))
    fresh = resumed_from(DataState(seed=11))
    fresh.begin_epoch(0)
    assert expected == read(fresh, loader(shuffle=True))
    assert expected != read(DataState(seed=12), loader(shuffle=True))


def test_ranks_share_the_order_and_not_the_augmentation() -> None:
    """A sampler that deals out one permutation needs it equal; equal noise would be waste."""
    ranks = [DataState(seed=1, rank=rank) for rank in (0, 1)]
    orders = [read(rank, loader(shuffle=True)) for rank in ranks]
    assert orders[0] == orders[1]
    noise = [str(list(rank.batches(DataLoader(Noise()), "noise", stopped=go_on))) for rank in ranks]
    assert noise[0] != noise[1]


def test_a_distributed_sampler_is_told_the_epoch() -> None:
    """Without set_epoch every epoch would have the same order."""
    sampler = DistributedSampler(Numbers(), num_replicas=2, rank=0)
    state = DataState(seed=1)
    told = []
    for epoch in (0, 1):
        state.begin_epoch(epoch)
        read(state, loader(sampler=sampler))
        told.append(sampler.epoch)
        state.end_epoch()
    sampler.set_epoch(7)
    read(state, loader(sampler=sampler))
    assert [0, 1, 7] == [*told, sampler.epoch]


@pytest.mark.parametrize("shuffle", [False, True])
def test_reading_leaves_the_main_process_alone(shuffle: bool) -> None:
    """Neither the host's courses nor the loader and its generator are moved."""
    generator = torch.Generator().manual_seed(4)
    source = DataLoader(Noise(), batch_size=3, shuffle=shuffle, generator=generator)
    before, owned = dict(vars(source)), generator.get_state()
    ambient_state = rng.capture()
    expected = [ambient() for _ in range(4)]
    rng.restore(ambient_state)
    state = DataState(seed=1)
    assert expected == [ambient() for _ in state.batches(source, "train", stopped=go_on)]
    assert before == vars(source)
    assert torch.equal(owned, generator.get_state())


@pytest.mark.parametrize("form", ["in the loader's", "in the user's", "as a sampler"])
def test_a_sampler_inside_torchs_own_is_followed(form: str) -> None:
    """Its order is that of the pass, whatever it draws from, and it moves nothing."""
    inner: Any = BatchSampler(Drawn(), 3, drop_last=False)
    options: dict[str, Any] = {
        "in the loader's": {"sampler": Drawn()},
        "in the user's": {"batch_sampler": inner, "batch_size": 1},
        "as a sampler": {"sampler": inner, "batch_size": None},
    }[form]
    source = DataLoader(Both(), **{"batch_size": 3, **options})
    state = rng.capture()
    expected = ambient()
    rng.restore(state)
    first = read(DataState(seed=1), source)
    assert expected == ambient()
    assert first == read(DataState(seed=1), source)


def test_untracked_reading_leaves_the_main_process_alone() -> None:
    """Evaluation may come and go between two checkpoints; its own batches still differ."""
    state = rng.capture()
    expected = ambient()
    rng.restore(state)
    batches = [str(batch) for batch in untracked(DataLoader(Noise(6), batch_size=2, shuffle=True))]
    assert expected == ambient()
    assert 3 == len(set(batches))
    assert [1, 2] == list(untracked([1, 2]))


def test_a_pass_can_be_taken_once() -> None:
    """One call is one pass; a second loop over it is a mistake that would read nothing."""
    batches = DataState(seed=1).batches(loader(), "train", stopped=go_on)
    list(batches)
    with pytest.raises(UserError, match=r"call batches\(\) inside"):
        iter(batches)


def test_two_passes_of_one_name_at_once_are_refused() -> None:
    """Only one position per name is kept, so the older pass could not be resumed."""
    state = DataState(seed=1)
    older = iter(state.batches(loader(), "train", stopped=go_on))
    next(older)
    next(iter(state.batches(loader(), "train", stopped=go_on)))
    with pytest.raises(UserError, match="different names"):
        next(older)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Sharded(DataLoader[Any]):
    """A loader of another library that moves batches to a device."""

    def __iter__(self) -> Any:
        return iter(())


def test_loaders_are_not_kept_alive() -> None:
    """A program that makes a loader per epoch must not gather them."""
    state = DataState(seed=1)
    source = loader()
    read(state, source)
    gone = weakref.ref(source)
    del source
    gc.collect()
    assert gone() is None


def test_a_batch_that_spans_several_steps_is_refused() -> None:
    """Nested passes with step() inside: the outer batch is used and not used at once."""
    state = DataState(1)
    with pytest.raises(UnsupportedLoader, match=r"inside one batch of 'outer' with step\(\)"):
        for _ in state.batches(loader(), "outer", stopped=go_on):
            for _ in state.batches(loader(), "inner", stopped=go_on):
                state.confirm()


@pytest.mark.parametrize("per_outer", [1, 2])
def test_loops_side_by_side_are_not_nested(per_outer: int) -> None:
    """zip, and a second source drawn from between two steps, keep their positions."""
    state = DataState(1)
    inner = iter(state.batches(loader(), "inner", stopped=go_on))
    for _ in state.batches(loader(), "outer", stopped=go_on):
        drawn = [next(inner, None) for _ in range(per_outer)]
        state.confirm()
        if None in drawn:
            break
    assert state.positions["inner"].exhausted or state.positions["outer"].exhausted


def test_evaluation_is_the_same_whatever_was_evaluated_before() -> None:
    """Its order and its random numbers depend on the seed, the name and the step alone."""

    def made() -> DataLoader[Any]:
        own = torch.Generator().manual_seed(0)
        return DataLoader(Noise(6), batch_size=2, shuffle=True, drop_last=True, generator=own)

    first, source = DataState(seed=3), made()
    list(first.evaluation(source, "valid", 10))
    before = ambient_state()
    second = [str(batch) for batch in first.evaluation(source, "valid", 20)]
    assert before == ambient_state()
    assert second == [str(batch) for batch in DataState(seed=3).evaluation(made(), "valid", 20)]
    assert second != [str(batch) for batch in DataState(seed=3).evaluation(made(), "valid", 10)]


def ambient_state() -> list[Any]:
    return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]


def test_the_first_batch_that_is_left_has_a_number() -> None:
    """For loops that count their batches."""
    state = DataState(seed=1)
    batches = state.batches(loader(), "train", stopped=go_on)
    assert 0 == batches.start
    source = iter(batches)
    next(source), next(source)
    state.confirm()
    again = resumed_from(state).batches(loader(), "train", stopped=go_on)
    assert 2 == again.start
