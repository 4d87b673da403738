"""Very many tensors of one element: what each tensor costs, whatever its size."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from . import disk
from .clock import collect_garbage, rest
from .grid import timed_save
from .ours import Background, Run
from .peers import BY_NAME, Peer
from .states import tensors


class Elements:
    """A plain dict of tensors; a state to every peer."""

    def __init__(self, count: int) -> None:
        self._named = tensors(count)

    def flat(self) -> dict[str, torch.Tensor]:
        return self._named

    nested = flat

    def advance(self) -> None:
        torch._foreach_add_(list(self._named.values()), 1.0)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    state = Elements(job["count"])
    directory = Path(job["directory"])
    if job["name"] == "hpc_ckpt":
        samples = _ours(state, directory, job["saves"] + 1)
    else:
        samples = _theirs(BY_NAME[job["name"]](), state, directory, job["saves"] + 1)
    return {key: [one[key] for one in samples] for key in ("block_s", "durable_s")}


def _ours(state: Elements, directory: Path, times: int) -> list[dict[str, Any]]:
    run = Run(directory, Background.policy, {"state": state.flat()})
    with run.entered():
        rest(0)
        return [run.background(state) for _ in range(times)]


def _theirs(peer: Peer, state: Elements, directory: Path, times: int) -> list[dict[str, Any]]:
    peer.prepare(state, directory)
    samples = []
    for step in range(times):
        state.advance()
        collect_garbage()
        samples.append(timed_save(peer, step))
        disk.remove(peer.path(step))
    return samples
