"""Under which account and QoS Slurm will count a job: as sbatch itself would say."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ckpt.chain import submit
from hpc_ckpt.chain.layers import load
from hpc_ckpt.chain.survey import LiveLimits


@pytest.mark.parametrize(
    ("more", "environ", "expected"),
    [
        ({}, {}, (None, None)),
        ({"account": "a", "qos": "q"}, {}, ("a", "q")),
        ({"account": "a", "sbatch": ["--account=b", "--qos few"]}, {}, ("b", "few")),
        ({"account": "a"}, {"SBATCH_ACCOUNT": "c", "SBATCH_QOS": "r"}, ("a", "r")),
    ],
)
def test_account_and_qos_as_sbatch_understands_them(
    more: dict[str, object],
    environ: dict[str, str],
    expected: tuple[str | None, str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, object] = {}

    def limits(*_: object, **where: object) -> LiveLimits:
        asked.update(where)
        return LiveLimits()

    class Found:
        maintenance = ()

    monkeypatch.setattr(submit, "take_survey", Found)
    monkeypatch.setattr(submit, "limits", limits)
    (tmp_path / "site.yaml").write_text("cluster: lab\n")
    spec = {"command": "true", "partition": "gpu", **more}
    loaded = load(spec, profile=str(tmp_path / "site.yaml"), live_cluster=None, cwd=tmp_path,
                  environ=environ)  # fmt: skip
    submit.make_plan(loaded, cwd=tmp_path, environ=environ, live=True)
    assert expected == (asked["account"], asked["qos"])
    assert ("gpu",) == asked["partitions"]
