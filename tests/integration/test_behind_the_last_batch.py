"""A link that ends right after the last batch of an epoch: the next has only its end left."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hpc_ckpt import Checkpointer


class Interrupted(Exception):
    """Ends a run without a final checkpoint."""


def save_behind_the_last_batch(root: Path) -> None:
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2)
    with pytest.raises(Interrupted), Checkpointer(root, value=torch.zeros(2)) as ckpt:
        for _ in ckpt.epochs(2):
            for _ in ckpt.batches(loader):
                ckpt.step()
                if ckpt.global_step == 4:
                    ckpt.save(wait=True)
                    raise Interrupted


def go_on(root: Path) -> list[float]:
    """As a plain program does, which uses what its loop has set."""
    ends: list[float] = []
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2)
    with Checkpointer(root, value=torch.zeros(2)) as ckpt:
        for _ in ckpt.epochs(2):
            for (batch,) in ckpt.batches(loader):
                last = batch.sum().item()
                ckpt.step()
            ends.append(last)
    return ends


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before 3.11")
def test_a_program_that_misses_what_its_loop_sets_is_told_why(tmp_path: Path) -> None:
    """The same program never fails without restarts: the traceback alone would puzzle anybody."""
    save_behind_the_last_batch(tmp_path)
    with pytest.raises(UnboundLocalError) as caught:
        go_on(tmp_path)
    (note,) = caught.value.__notes__
    assert "behind the last batch of epoch 0" in note
    assert "before the loop, or track it" in note


def test_a_mistake_of_another_kind_gets_no_such_word(tmp_path: Path) -> None:
    """A name that is missing while batches are left is the program's own."""
    with pytest.raises(NameError) as caught, Checkpointer(tmp_path, value=torch.zeros(2)) as ckpt:
        for _ in ckpt.epochs(1):
            raise NameError("a slip")
    assert [] == getattr(caught.value, "__notes__", [])
