"""GPUs that are asked for by directives count as those of `resources`: DMTCP saves none."""

from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt.chain import planning
from hpc_ckpt.chain.demands import asks_for_gpus
from hpc_ckpt.chain.layers import load
from hpc_ckpt.errors import SpecError

PROFILE = "cluster: lab\ntools: {dmtcp: {module: dmtcp/3.0}}\n"


@pytest.mark.parametrize(
    ("lines", "asked"),
    [
        (["--gres=gpu:1"], True),
        (["--gres gpu"], True),
        (["--gres=lustre:1,gpu:a100:2"], True),
        (["--constraint=ib --gpus-per-node=1"], True),
        (["--constraint=ib -G 2"], True),
        (["--gpus=a100:1"], True),
        (["--gpus-per-task=1"], True),
        (["--tres-per-task=cpu=2,gres/gpu=1"], True),
        (["--gres=lustre:1"], False),
        (["--gres=none"], False),
        (["--gres=gpu:1", "--gres=gpu:0"], False),
        (["--gpus=0"], False),
        (["--mem-per-gpu=4G", "--constraint=gpu"], False),
        ([], False),
    ],
)
def test_directives_that_ask_for_gpus(lines: list[str], asked: bool) -> None:
    assert asked is asks_for_gpus(lines)


@pytest.mark.parametrize(
    ("spec", "extra"),
    [
        ({"resources": {"gpus": "1"}}, ""),
        ({"sbatch": ["--gres=gpu:1"]}, ""),
        ({}, "directives: {extra: [--gpus-per-node=1]}\n"),
    ],
)
def test_they_are_a_reason_that_the_plan_says(
    tmp_path: Path, spec: dict[str, Any], extra: str
) -> None:
    (tmp_path / "lab.yaml").write_text(PROFILE + extra)
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    asked = {"command": ["/bin/sleep", "9"], **spec}
    loaded = load(asked, profile=str(tmp_path / "lab.yaml"), cwd=tmp_path, environ=environ)
    plan = planning.make_plan(loaded, cwd=tmp_path, environ=environ)
    assert "GPUs are asked for" in dict(plan.level.rejected)["dmtcp"]
    assert "dmtcp" not in [entry["name"] for entry in plan.level.entries]


def test_a_budget_of_gpu_hours_that_could_not_be_counted_is_refused(tmp_path: Path) -> None:
    """It would never end the chain: the number of GPUs in a directive is not known."""
    (tmp_path / "lab.yaml").write_text(PROFILE)
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}

    def planned(**spec: Any) -> int:
        asked = {"command": ["/bin/sleep", "9"], "chain": {"max_gpu_hours": 8}, **spec}
        loaded = load(asked, profile=str(tmp_path / "lab.yaml"), cwd=tmp_path, environ=environ)
        return planning.make_plan(loaded, cwd=tmp_path, environ=environ).gpus

    with pytest.raises(SpecError, match=r"max_gpu_hours: .* say resources: \{gpus: N\}"):
        planned(sbatch=["--gres=gpu:1"])
    assert 2 == planned(sbatch=["--gres=gpu:2"], resources={"gpus": 2})
