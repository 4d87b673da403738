"""Data workers: kept, ended, and sheltered from what a scheduler sends to every process."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, get_worker_info

from hpc_ckpt.state.data import DataState, untracked

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # few cores
]


class Pids(Dataset[Any]):
    """Each item is the process that read it."""

    def __init__(self) -> None:
        self.offset = 0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        return os.getpid() + self.offset


def go_on() -> bool:
    return False


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Pids(), **{"batch_size": 2, "num_workers": 2, **options})


def pids_of(batches: Any) -> set[int]:
    return {int(pid) for batch in batches for pid in batch}


def set_offset(worker_id: int) -> None:
    """What users write: reach the worker's copy of the dataset through the worker's record."""
    worker = get_worker_info()
    if worker is not None and type(worker.dataset) is Pids:
        worker.dataset.offset = 10_000_000


def send(pids: set[int], *signals: int) -> None:
    """From another process, as a scheduler's daemon does."""
    for number in signals:
        subprocess.run(["kill", f"-{int(number)}", *map(str, pids)], check=True)


def test_persistent_workers_are_kept_between_passes() -> None:
    """They are the same processes in every epoch, and end when the state is closed."""
    state, source = DataState(seed=1), loader(persistent_workers=True)
    passes = []
    for epoch in range(3):
        state.begin_epoch(epoch)
        passes.append(pids_of(state.batches(source, "train", stopped=go_on)))
        state.end_epoch()
    assert [passes[0]] * 3 == passes
    assert passes[0] == {child.pid for child in multiprocessing.active_children()}
    state.close()
    assert [] == multiprocessing.active_children()


def test_workers_end_with_a_loader_that_is_dropped() -> None:
    """Nothing here keeps a loader, or workers that persist for it, alive."""
    state, source = DataState(seed=1), loader(persistent_workers=True)
    list(state.batches(source, "train", stopped=go_on))
    del source
    assert [] == multiprocessing.active_children()


@pytest.mark.parametrize("persistent", [False, True])
def test_a_stopped_pass_leaves_no_workers(persistent: bool) -> None:
    """Batches that were fetched ahead are dropped, without a hang or a warning."""
    state, source, seen = DataState(seed=1), loader(persistent_workers=persistent), []
    for batch in state.batches(source, "train", stopped=lambda: len(seen) == 2):
        seen.append(batch)
    assert 2 == len(seen)
    assert [] == multiprocessing.active_children()


def test_batches_fetched_ahead_are_not_counted() -> None:
    """Workers read ahead; a batch counts when the program had it and confirmed it."""
    state = DataState(seed=1)
    batches = iter(state.batches(loader(prefetch_factor=4), "train", stopped=go_on))
    next(batches)
    state.confirm()
    assert 1 == state.state_dict()["outside"]["train"]["used"]


def test_a_program_may_break_off_a_pass() -> None:
    """The next pass over the same loader is whole."""
    state, source = DataState(seed=1), loader(persistent_workers=True)
    for _ in state.batches(source, "train", stopped=go_on):
        break
    assert 8 == len(list(state.batches(source, "train", stopped=go_on)))
    state.close()


def test_workers_see_the_users_dataset() -> None:
    """get_worker_info().dataset is the user's own object, which worker_init_fn may change."""
    source = loader(worker_init_fn=set_offset)
    found = pids_of(DataState(seed=1).batches(source, "train", stopped=go_on))
    assert min(found) > 10_000_000


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_outlive_signals_that_are_not_their_owners(method: str) -> None:
    """Else a worker would take the main process with it before the last save."""
    source = loader(multiprocessing_context=method)
    batches = iter(DataState(seed=1).batches(source, "train", stopped=go_on))
    workers = pids_of([next(batches), next(batches)])
    send(workers, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    assert workers == pids_of(batches)


def test_workers_of_untracked_loaders_outlive_them_too() -> None:
    """A notice may come during evaluation; the user's loader is not changed for it."""
    source = loader(worker_init_fn=set_offset)
    batches = untracked(source)
    workers = {pid - 10_000_000 for pid in pids_of([next(batches), next(batches)])}
    send(workers, signal.SIGTERM, signal.SIGUSR1)
    assert 6 == len(list(batches))
    assert source.worker_init_fn is set_offset


def test_untracked_persistent_workers_are_kept() -> None:
    """Evaluation does not start its workers again every time."""
    source = loader(persistent_workers=True)
    passes = [pids_of(untracked(source)) for _ in range(2)]
    assert passes[0] == passes[1]
    del source
    assert [] == multiprocessing.active_children()


PROGRAM = """
import os, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from hpc_ckpt.state.data import DataState, untracked
data = TensorDataset(torch.arange(64))
loader = DataLoader(data, batch_size=2, num_workers=2, persistent_workers="kept" in sys.argv[1])
tracked = DataState(seed=1).batches(loader, "train", stopped=lambda: False)
batches = untracked(loader) if "untracked" in sys.argv[1] else iter(tracked)
next(batches), next(batches)
{end}
"""


@pytest.mark.parametrize(
    ("workers", "end", "code"),
    [
        ("kept", "sys.exit(75)", 75),
        ("ended", "sys.exit(75)", 75),
        ("untracked", "sys.exit(75)", 75),
        ("kept", "os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_workers_end_with_their_owner(workers: str, end: str, code: int) -> None:
    """An iterator may be alive when the process ends: no hang, no noise, nobody left behind."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end), workers],
        capture_output=True,  # returns only when every worker has closed its end too
        timeout=60,
        check=False,
    )
    assert (code, b"") == (ended.returncode, ended.stderr)
