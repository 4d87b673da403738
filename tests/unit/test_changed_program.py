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


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()


def with_adam(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, width)
    return model, torch.optim.Adam(model.parameters())


def test_a_new_head_takes_the_optimizer_along(tmp_path: Path) -> None:
    """State of another shape is a difference; without strictness the optimizer starts anew."""
    model, optimizer = with_adam(2)
    with Checkpointer(tmp_path, m=model, o=optimizer) as ckpt:
        trained(model, optimizer)
        ckpt.step()
    model, optimizer = with_adam(3)
    with pytest.raises(RestoreMismatch, match=r"o\.param_groups\.0\.params\.0: exp_avg"):
        Checkpointer(tmp_path, m=model, o=optimizer).__enter__()
    with (
        pytest.warns(RuntimeWarning, match="exp_avg"),
        Checkpointer(tmp_path, m=model, o=optimizer, strict_restore=False),
    ):
        trained(model, optimizer)


class OutOfMemory(torch.optim.SGD):
    """Its device has no room for the state."""

    def load_state_dict(self, state_dict: object) -> None:
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("strict", [True, False])
def test_an_optimizer_that_fails_to_load_ends_the_run(tmp_path: Path, strict: bool) -> None:
    """Trained on with a fresh one, its checkpoints would outrank the good one. Only keys that are
    missing or too many may pass."""
    model = nn.Linear(4, 2)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Checkpointer(tmp_path, m=model, o=optimizer) as ckpt:
        trained(model, optimizer)
        ckpt.step()
    before = sorted((tmp_path / "checkpoints").iterdir())
    full = OutOfMemory(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(RestoreMismatch, match="raised RuntimeError: out of memory"):
        Checkpointer(tmp_path, m=model, o=full, strict_restore=strict).__enter__()
    assert before == sorted((tmp_path / "checkpoints").iterdir())


def test_another_optimizer_is_a_difference(tmp_path: Path) -> None:
    """It would fail at its first step, in words that help nobody."""
    model = nn.Linear(4, 2)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Checkpointer(tmp_path, m=model, o=optimizer) as ckpt:
        trained(model, optimizer)
        ckpt.step()
    other = torch.optim.Adam(model.parameters())
    with pytest.raises(RestoreMismatch, match="of another optimizer"):
        Checkpointer(tmp_path, m=model, o=other).__enter__()


def test_keys_that_the_checkpoint_lacks_are_said(tmp_path: Path) -> None:
    """In the run that was saved they were not there."""
    with Checkpointer(tmp_path, s={"best": 1}) as ckpt:
        ckpt.step()
    state = {"best": 0, "patience": 5}
    with pytest.warns(RuntimeWarning, match="patience"), Checkpointer(tmp_path, s=state):
        pass
    assert {"best": 1} == state


def test_another_processor_or_release_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either may change the last bits."""
    with Checkpointer(tmp_path, w=torch.ones(1)) as ckpt:
        ckpt.step()
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ABACUS")
    with pytest.warns(RuntimeWarning) as caught, Checkpointer(tmp_path, w=torch.ones(1)):
        pass
    told = " ".join(str(one.message) for one in caught)
    assert "torch 9.9.9" in told
    assert "ABACUS" in told


@pytest.mark.parametrize("kind", ["weight norm", "spectral norm", "scaler"])
def test_what_has_a_way_of_its_own_comes_back(tmp_path: Path, kind: str) -> None:
    """Parametrised modules and the scaler, through a whole checkpoint."""

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        norms = nn.utils.parametrizations
        if kind == "scaler":
            return torch.amp.GradScaler("cpu", init_scale=2.0**seed)
        wrap = norms.weight_norm if kind == "weight norm" else norms.spectral_norm
        return wrap(nn.Linear(4, 3))

    def told(one: Any) -> list[Any]:
        return [v.tolist() if torch.is_tensor(v) else v for v in one.state_dict().values()]

    saved, here = made(3), made(5)
    with Checkpointer(tmp_path, one=saved) as ckpt:
        ckpt.step()
    with Checkpointer(tmp_path, one=here):
        assert told(saved) == told(here)


def test_a_misspelt_name_is_shown_beside_the_right_one(tmp_path: Path) -> None:
    """In both directions."""
    with Checkpointer(tmp_path, model=nn.Linear(2, 2)) as ckpt:
        ckpt.step()
    with pytest.raises(RestoreMismatch, match="nearest name there is 'model'"):
        Checkpointer(tmp_path, modle=nn.Linear(2, 2)).__enter__()
