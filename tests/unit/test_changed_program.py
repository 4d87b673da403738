"""Loading into a program that has changed: compiled parts, near names, devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpc_ckpt import Checkpointer, latest, load
from hpc_ckpt.errors import RestoreMismatch, UserError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)


def compiled(kind: str, net: Net) -> nn.Module:
    """As a program would; nothing is called, so nothing is really compiled."""
    if kind == "whole":
        return torch.compile(net, backend="eager")  # type: ignore[return-value]
    if kind == "part":
        net.first = torch.compile(net.first, backend="eager")  # type: ignore[assignment]
    return net


def values(net: Any) -> list[torch.Tensor]:
    return [value.clone() for value in net.state_dict().values()]


@pytest.mark.parametrize("before", ["plain", "whole", "part"])
@pytest.mark.parametrize("after", ["plain", "whole", "part"])
def test_names_do_not_depend_on_what_is_compiled(tmp_path: Path, before: str, after: str) -> None:
    """Either way, and without the compiler's names in the checkpoint."""
    torch.manual_seed(1)
    saved = compiled(before, Net())
    with Checkpointer(tmp_path, model=saved) as ckpt:
        ckpt.step()
    assert not any("_orig_mod" in key for key in load(latest(tmp_path))["tracked"]["model"])
    torch.manual_seed(2)
    here = compiled(after, Net())
    with Checkpointer(tmp_path, model=here):
        pass
    assert all(map(torch.equal, values(saved), values(here)))


def test_a_difference_names_what_is_nearest(tmp_path: Path) -> None:
    """A renamed layer is the usual reason; all of it in one message, and nothing is changed."""
    with Checkpointer(tmp_path, model=Net()) as ckpt:
        ckpt.step()
    here = Net()
    here.first_layer = here.first
    del here.first
    before = values(here)
    with pytest.raises(RestoreMismatch) as caught:
        Checkpointer(tmp_path, model=here).__enter__()
    told = str(caught.value)
    assert "first_layer.weight: not in the checkpoint (the nearest name there is" in told
    assert "'first.weight')" in told
    assert "first.bias: in the checkpoint, but not in the module (the nearest name" in told
    assert all(map(torch.equal, before, values(here)))


def test_not_strict_says_what_was_left_out(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, model=Net()) as ckpt:
        ckpt.step()
    here = Net()
    here.last = nn.Linear(4, 3)
    here.extra = nn.Linear(1, 1)
    with (
        pytest.warns(RuntimeWarning, match="last.weight: shape") as caught,
        Checkpointer(tmp_path, model=here, strict_restore=False),
    ):
        pass
    assert "extra.weight: not in the checkpoint" in str(caught[0].message)


@pytest.mark.parametrize(
    "where",
    [
        "meta", torch.device("meta"), {"cpu": "meta"}, {"cpu": "meta", "cuda:0": "cpu"},
        lambda storage, name: torch.UntypedStorage(0, device="meta") if name == "cpu" else storage,
    ],
)  # fmt: skip
def test_map_location_is_as_torch_has_it(tmp_path: Path, where: Any) -> None:
    """A device, a dict of devices, or a function."""
    with Checkpointer(tmp_path, weight=torch.arange(3.0)) as ckpt:
        ckpt.step()
    found = load(latest(tmp_path), map_location=where)["tracked"]["weight"]
    assert "meta" == found.device.type


@pytest.mark.parametrize("where", [{"cuda:0": "meta"}, lambda storage, name: None, None])
def test_what_nobody_places_comes_to_where_it_was(tmp_path: Path, where: Any) -> None:
    with Checkpointer(tmp_path, weight=torch.arange(3.0)) as ckpt:
        ckpt.step()
    found = load(latest(tmp_path), map_location=where)["tracked"]["weight"]
    assert [0.0, 1.0, 2.0] == found.tolist()


@pytest.mark.parametrize(
    ("where", "what"),
    [(3.5, "give a device"), ("nowhere", "not a device"), (lambda s, n: 3, "not a storage")],
)
def test_a_wrong_map_location_is_said(tmp_path: Path, where: Any, what: str) -> None:
    with Checkpointer(tmp_path, weight=torch.arange(3.0)) as ckpt:
        ckpt.step()
    with pytest.raises(UserError, match=what):
        load(latest(tmp_path), map_location=where)
