"""Checkpoints in and out: torch's and safetensors' files, through the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hpc_ckpt import Checkpointer, latest
from hpc_ckpt.engine.exchange import import_file, sorted_out
from hpc_ckpt.errors import UserError


def cli(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpc_ckpt.cli", *words], capture_output=True, text=True, check=False
    )


def parts(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def run(root: Path, seed: int = 1) -> dict[str, Any]:
    made = parts(seed)
    with Checkpointer(root, **made) as ckpt:
        ckpt.describe(lr=0.1, name="small", layers=[3, 4, 2])
        ckpt.step()
    return made


def equal(one: Any, other: Any) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_export_is_what_torch_load_opens(tmp_path: Path) -> None:
    """Everything that was tracked, under its names; loaded as any training script does."""
    made = run(tmp_path / "run")
    done = cli("export", str(latest(tmp_path / "run")), str(tmp_path / "all.pt"))
    assert (0, "") == (done.returncode, done.stderr)
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    other = parts(2)
    other["model"].load_state_dict(found["model"])
    other["optimizer"].load_state_dict(found["optimizer"])
    assert equal(made["model"], other["model"])
    state = other["optimizer"].state_dict()["state"][0]["exp_avg"]
    assert torch.equal(made["optimizer"].state_dict()["state"][0]["exp_avg"], state)


def test_one_part_as_safetensors(tmp_path: Path) -> None:
    """A model's weights under their own names."""
    made = run(tmp_path / "run")
    target = tmp_path / "model.safetensors"
    done = cli("export", str(latest(tmp_path / "run")), str(target), "--part", "model")
    assert 0 == done.returncode, done.stderr
    found = load_file(target)
    assert found.keys() == made["model"].state_dict().keys()
    assert all(torch.equal(found[key], value) for key, value in made["model"].state_dict().items())


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["model.txt"], "ending must be one of"),
        (["there.pt"], "exists; choose another name"),
        (["new.pt", "--part", "modle"], "there is no 'modle'; it holds model, optimizer"),
        (["no/such/place.pt"], "cannot be written"),
    ],
)
def test_an_export_that_cannot_be_says_why(tmp_path: Path, words: list[str], what: str) -> None:
    run(tmp_path / "run")
    (tmp_path / "there.pt").write_text("mine")
    name, *rest = words
    done = cli("export", str(latest(tmp_path / "run")), str(tmp_path / name), *rest)
    assert 2 == done.returncode
    assert what in done.stderr
    assert "Traceback" not in done.stderr
    assert "mine" == (tmp_path / "there.pt").read_text()
    assert {"run", "there.pt"} == {path.name for path in tmp_path.iterdir()}


def test_a_program_goes_on_from_an_imported_file(tmp_path: Path) -> None:
    """Weights, optimizer, step and epoch; the random numbers stay the program's own."""
    made = parts(1)
    saved = {
        "model_state_dict": made["model"].state_dict(),
        "optimizer_state_dict": made["optimizer"].state_dict(),
        "epoch": 4,
        "global_step": 500,
        "loss": 0.25,
    }
    torch.save(saved, tmp_path / "old.pt")
    done = cli("import", str(tmp_path / "old.pt"), str(tmp_path / "run"))
    assert 0 == done.returncode, done.stderr
    assert "goes on after step 500 with epoch 5; left out: loss" in done.stdout
    assert 0 == cli("verify", str(tmp_path / "run")).returncode
    other = parts(2)
    with Checkpointer(tmp_path / "run", seed=7, **other) as ckpt:
        assert ckpt.restored is not None
        assert (500, 5) == (ckpt.global_step, ckpt.epoch)
        assert equal(made["model"], other["model"])
        ckpt.step()
    assert 501 == int(latest(tmp_path / "run").name.split("-")[1])


def test_a_bare_state_dict_is_the_model(tmp_path: Path) -> None:
    made = parts(1)
    torch.save(made["model"].state_dict(), tmp_path / "weights.pth")
    import_file(tmp_path / "weights.pth", tmp_path / "run", step=3)
    other = parts(2)
    with Checkpointer(tmp_path / "run", model=other["model"]) as ckpt:
        assert 3 == ckpt.global_step
        assert equal(made["model"], other["model"])


def test_an_export_comes_back(tmp_path: Path) -> None:
    made = run(tmp_path / "run")
    for name in ("all.pt", "model.safetensors"):
        part = ["--part", "model"] if "safe" in name else []
        cli("export", str(latest(tmp_path / "run")), str(tmp_path / name), *part)
        import_file(tmp_path / name, tmp_path / f"again-{name}")
        other = parts(2)
        tracked = other if name == "all.pt" else {"model": other["model"]}
        with Checkpointer(tmp_path / f"again-{name}", **tracked):
            assert equal(made["model"], other["model"])


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("evil"),))


def test_nothing_of_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(UserError, match="cannot be read without running code"):
        import_file(tmp_path / "evil.pt", tmp_path / "run")
    assert not (tmp_path / "evil").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "what"),
    [(b"", "cannot be read"), (b"not a file of torch's", "cannot be read"), (None, "no such file")],
)
def test_a_file_that_is_none_says_so(tmp_path: Path, content: bytes | None, what: str) -> None:
    if content is not None:
        (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(UserError, match=what):
        import_file(tmp_path / "x.pt", tmp_path / "run")


def test_a_run_is_not_imported_over(tmp_path: Path) -> None:
    run(tmp_path / "run")
    torch.save(parts(1)["model"].state_dict(), tmp_path / "w.pt")
    done = cli("import", str(tmp_path / "w.pt"), str(tmp_path / "run"))
    assert 2 == done.returncode
    assert "has checkpoints already" in done.stderr


@pytest.mark.parametrize("loaded", [[1], {}, {"epoch": 3, "loss": 1.0}, 5])
def test_what_holds_no_states_is_refused(loaded: Any) -> None:
    with pytest.raises(UserError):
        sorted_out(loaded, {})


def test_parts_can_be_renamed() -> None:
    found = sorted_out({"net": {"w": torch.ones(1)}, "opt_state_dict": {"a": 1}}, {"net": "model"})
    assert ["model", "opt"] == list(found.tracked)


def test_ls_long_tells_where_a_checkpoint_comes_from(tmp_path: Path) -> None:
    """Versions, command and what was described; without torch, so it may run on a login node."""
    run(tmp_path / "run")
    told = cli("ls", "--long", str(tmp_path / "run")).stdout
    for line in ("described   lr = 0.1", 'described   name = "small"', "layers = [3, 4, 2]"):
        assert line in told
    assert f"torch {torch.__version__}" in told
    assert "command     " in told
    assert "code        git " in told


@pytest.mark.parametrize("value", [torch.ones(1), {1: 2}, object(), {"$x": 1}, [b"x"]])
def test_only_plain_values_are_described(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UserError, match="given"):
        Checkpointer(tmp_path, w=torch.ones(1)).describe(given=value)


def test_a_part_that_is_not_tracked_can_be_left_out() -> None:
    """Scripts keep their arguments beside the model; a name that is not there is an error."""
    loaded = {"model": {"w": torch.ones(1)}, "args": {"lr": 0.1}}
    found = sorted_out(loaded, {}, ["args"])
    assert (["model"], ["args"]) == (list(found.tracked), found.left_out)
    for rename, skip in (({"modle": "model"}, []), ({}, ["arg"])):
        with pytest.raises(UserError, match="it holds model, args"):
            sorted_out(loaded, rename, skip)


def test_two_parts_of_one_name_are_not_mixed_up() -> None:
    """Neither is dropped in silence."""
    loaded = {"model": {"a": 1}, "model_state_dict": {"b": 2}}
    with pytest.raises(UserError, match="both called 'model'"):
        sorted_out(loaded, {})
    found = sorted_out(loaded, {"model_state_dict": "other"})
    assert ["model", "other"] == list(found.tracked)
