"""Generators that a program makes for itself are tracked like any other state."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_ckpt import Checkpointer
from hpc_ckpt.errors import RestoreMismatch, UnsupportedState
from hpc_ckpt.state.registry import Registry

MAKE: dict[str, Any] = {
    "numpy": np.random.default_rng,
    "philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
    "twister": lambda seed: np.random.Generator(np.random.MT19937(seed)),
    "bits": np.random.SFC64,
    "legacy": np.random.RandomState,
    "python": random.Random,
    "torch": lambda seed: torch.Generator().manual_seed(seed),
}


def draw(generator: Any) -> list[float]:
    if isinstance(generator, torch.Generator):
        return torch.randn(3, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1) for _ in range(3)]
    if isinstance(generator, np.random.BitGenerator):
        return generator.random_raw(3).tolist()  # type: ignore[no-any-return]
    return generator.normal(size=3).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("inside", [False, True])
def test_a_generator_goes_on_where_it_was(tmp_path: Path, name: str, inside: bool) -> None:
    """Tracked itself, or in a dict with other things; the program's own object is used."""
    first = MAKE[name](5)
    draw(first)
    with Checkpointer(tmp_path, rng={"g": first, "n": 1} if inside else first) as ckpt:
        ckpt.step()
    expected = draw(first)
    second = MAKE[name](99)
    held = {"g": second, "n": 0}
    with Checkpointer(tmp_path, rng=held if inside else second):
        assert second is held["g"]
        assert expected == draw(second)


def test_another_kind_is_a_difference() -> None:
    """Named, and nothing is changed."""
    here = np.random.default_rng(1)
    saved = Registry({"rng": np.random.Generator(np.random.Philox(1))}).capture()
    before = here.bit_generator.state
    with pytest.raises(RestoreMismatch, match="rng: Philox in the checkpoint, PCG64 here"):
        Registry({"rng": here}).restore(saved, path=Path("x"))
    assert before == here.bit_generator.state
    with pytest.raises(RestoreMismatch, match="holds no state of a Random there"):
        Registry({"rng": random.Random(1)}).restore({"rng": {"a": 1}}, path=Path("x"))


@pytest.mark.parametrize("pos", [-1, 625, "x", None])
def test_a_position_that_cannot_be_is_refused(pos: Any) -> None:
    """numpy would read beyond its words."""
    here = np.random.RandomState(1)
    saved = Registry({"rng": here}).capture()
    saved["rng"]["state"]["pos"] = pos
    with pytest.raises(RestoreMismatch, match="rng: "):
        Registry({"rng": here}).restore(saved, path=Path("x"))


def test_the_systems_generator_has_no_state() -> None:
    with pytest.raises(UnsupportedState, match="cannot be restored in place"):
        Registry({"rng": random.SystemRandom()})
