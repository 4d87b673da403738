"""What was restored is the program's own memory: children inherit it, and nothing else holds it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import hpc_ckpt
from hpc_ckpt import Checkpointer

LARGE = 3_000_000
"""Bytes: leaves of a megabyte and more get pages of their own."""


def saved(root: Path) -> torch.Tensor:
    value = torch.randint(0, 256, (LARGE,), dtype=torch.uint8)
    with Checkpointer(root, value=value, holder={"state": value.clone()}) as ckpt:
        ckpt.step()
    return value


def in_a_child(value: torch.Tensor) -> int:
    """The exit status of a forked child that reads and writes every page."""
    child = os.fork()
    if child == 0:
        view = value.numpy()
        view[::512] += 1
        os._exit(int(view.sum()) % 100)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_forked_children_can_use_what_was_loaded(tmp_path: Path) -> None:
    """A data worker reads tensors that the main process loaded."""
    value = saved(tmp_path / "run")
    state = hpc_ckpt.load(hpc_ckpt.latest(tmp_path / "run"))
    loaded = state["tracked"]["value"]
    assert torch.equal(value, loaded)
    expected = value.numpy().copy()
    expected[::512] += 1
    assert int(expected.sum()) % 100 == in_a_child(loaded)
    assert torch.equal(value, loaded), "the child wrote into its parent's memory"


def test_forked_children_can_use_what_was_restored(tmp_path: Path) -> None:
    """The same for state that a Checkpointer put back."""
    value = saved(tmp_path / "run")
    again, holder = torch.zeros_like(value), {"state": torch.zeros_like(value)}
    with Checkpointer(tmp_path / "run", value=again, holder=holder):
        pass
    assert torch.equal(value, again)
    assert in_a_child(again) == in_a_child(value)
    assert in_a_child(holder["state"]) == in_a_child(value)
