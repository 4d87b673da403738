"""The random numbers of the process: captured, restored, set aside, reseeded."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hpc_ckpt.state import rng, tree


def draw() -> tuple[Any, ...]:
    """One value of each kind that leaves something behind in a generator."""
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(3).tolist(),
        torch.randn(1).tolist(),
    )


@pytest.fixture(autouse=True)
def known_start() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def test_restored_courses_draw_the_same_again() -> None:
    """All three courses go on from the capture, cached Gaussians included."""
    random.gauss(0, 1), np.random.randn()
    state = rng.capture()
    expected = [draw() for _ in range(3)]
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    rng.restore(state)
    assert expected == [draw() for _ in range(3)]


def test_a_capture_does_not_move_with_its_course() -> None:
    """Drawing after a capture leaves the capture alone, and it can be used twice."""
    state = rng.capture()
    expected = draw()
    rng.restore(state)
    draw()
    rng.restore(state)
    assert expected == draw()


def test_a_capture_holds_only_what_the_state_tree_can_store() -> None:
    """Dicts, lists, numbers, strings, None, arrays and tensors: nothing that needs pickle."""

    def kinds(node: Any) -> set[type]:
        if isinstance(node, dict):
            return set().union(*(kinds(value) for value in node.values()), map(type, node))
        if isinstance(node, list):
            return set().union(*map(kinds, node)) if node else set()
        return {type(node)}

    allowed = {str, int, float, bool, type(None), np.ndarray, torch.Tensor}
    assert set() == kinds(rng.capture()) - allowed


def test_a_capture_comes_back_through_the_state_tree() -> None:
    """Encoded and decoded, a capture restores the same draws."""
    encoded = tree.encode(rng.capture())
    leaves = {leaf.name: memoryview(bytearray(leaf.nbytes)) for leaf in encoded.leaves}
    for leaf in encoded.leaves:
        tree.copy_into(leaves[leaf.name], leaf.value)
    expected = draw()
    rng.restore(tree.decode(json.loads(json.dumps(encoded.tree)), leaves.__getitem__))
    assert expected == draw()


@pytest.mark.parametrize("fails", [False, True])
def test_preserved_puts_the_courses_back(fails: bool) -> None:
    """Whatever happens inside, the next draw is the one that was due."""
    state = rng.capture()
    expected = draw()
    rng.restore(state)
    try:
        with rng.preserved():
            draw()
            rng.seed_all(5)
            if fails:
                raise OSError
    except OSError:
        pass
    assert expected == draw()


def test_preserved_keeps_torchs_initial_seed() -> None:
    """Programs derive seeds from torch.initial_seed(); it must not change behind them."""
    with rng.preserved():
        rng.seed_all(5)
    assert 3 == torch.initial_seed()


def test_seed_all_depends_only_on_its_parts() -> None:
    """The same parts give the same draws, whatever was drawn before."""
    rng.seed_all(7, "train", 2)
    expected = draw()
    draw()
    rng.seed_all(np.int64(7), "train", 2)  # type: ignore[arg-type]  # an epoch may come from numpy
    assert expected == draw()


def test_seed_all_is_the_same_in_every_process() -> None:
    """Nothing of a process, such as its hash seed, enters."""
    program = (
        "import random, numpy, torch; from hpc_ckpt.state import rng; rng.seed_all(7, 'train', 2);"
        "print([random.random(), float(numpy.random.rand()), torch.rand(2).tolist()])"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    rng.seed_all(7, "train", 2)
    expected = [random.random(), float(np.random.rand()), torch.rand(2).tolist()]
    assert expected == json.loads(printed.stdout)


def test_seeds_are_frozen() -> None:
    """A change of these numbers would change the order of every chain that is under way."""
    rng.seed_all(7, "train", 2)
    assert (1794088621, 1198660849) == (random.getrandbits(32), np.random.randint(2**32))
    assert 4286441205962287567 == rng.seed_of(7, "train", 2) == torch.initial_seed()


def test_different_parts_give_different_courses() -> None:
    """Neither moving a boundary between parts nor an int for its digits is the same."""
    parts: list[tuple[int | str, ...]] = [(1,), ("1",), (1, 1), (11,), ("a", "bc"), ("ab", "c")]
    seen = []
    for each in parts:
        rng.seed_all(*each)
        seen.append(draw())
    for course in zip(*seen, strict=True):
        assert len(parts) == len(set(map(str, course)))


class Devices:
    """Two devices that remember their states, in the shape of torch.cuda."""

    def __init__(self, count: int, *, awake: bool = True) -> None:
        self.states = [torch.full((4,), index, dtype=torch.uint8) for index in range(count)]
        self.awake = awake

    def is_initialized(self) -> bool:
        return self.awake

    def get_rng_state(self, index: int = 0) -> torch.Tensor:
        return self.states[index].clone()

    def set_rng_state(self, state: torch.Tensor, index: int = 0) -> None:
        self.states[index] = state.clone()


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    def plug(devices: Devices, kind: str = "cuda") -> Devices:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(devices.states))
        here = SimpleNamespace(type=kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: here)
        monkeypatch.setattr(torch, "get_device_module", lambda device: devices)
        return devices

    return plug


@pytest.mark.parametrize("count", [1, 2])
def test_device_courses_are_captured_and_restored(plug_in: Any, count: int) -> None:
    """Every device of the accelerator is part of the capture."""
    devices = plug_in(Devices(count))
    state = rng.capture()
    devices.states = [torch.zeros(4, dtype=torch.uint8) + 99 for _ in range(count)]
    rng.restore(state)
    assert [[index] * 4 for index in range(count)] == [s.tolist() for s in devices.states]


def test_devices_that_are_gone_or_new_are_left_alone(plug_in: Any) -> None:
    """A capture of two devices restores the one that is here; another kind restores nothing."""
    plug_in(Devices(2))
    state = rng.capture()
    fewer = plug_in(Devices(1))
    fewer.states[0] += 7
    rng.restore(state)
    assert [[0] * 4] == [s.tolist() for s in fewer.states]
    other = plug_in(Devices(1), kind="xpu")
    other.states[0] += 7
    rng.restore(state)
    assert [[7] * 4] == [s.tolist() for s in other.states]


def test_a_sleeping_device_is_not_woken(plug_in: Any) -> None:
    """Nothing was drawn from it, and waking it would cost memory on the device."""
    plug_in(Devices(1, awake=False))
    assert {} == rng.capture()["devices"]


def test_seed_all_leaves_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked data worker that touches a device generator dies."""
    touched = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", touched.append)
    torch.manual_seed(1)
    assert [1] == touched
    rng.seed_all(1)
    assert [1] == touched
