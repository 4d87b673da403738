"""Under which account and QoS Slurm will count a job: as sbatch itself would say."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ckpt.chain import planning
from hpc_ckpt.chain.layers import load
from hpc_ckpt.chain.submit import render_loaded
from hpc_ckpt.chain.survey import Bound, LiveLimits
from hpc_ckpt.errors import SpecError
from hpc_ckpt.rundir import Done, RunDir


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

    monkeypatch.setattr(planning, "take_survey", Found)
    monkeypatch.setattr(planning, "limits", limits)
    (tmp_path / "site.yaml").write_text("cluster: lab\n")
    spec = {"command": "true", "partition": "gpu", **more}
    loaded = load(spec, profile=str(tmp_path / "site.yaml"), live_cluster=None, cwd=tmp_path,
                  environ=environ)  # fmt: skip
    planning.make_plan(loaded, cwd=tmp_path, environ=environ, live=True)
    assert expected == (asked["account"], asked["qos"])
    assert ("gpu",) == asked["partitions"]


@pytest.mark.parametrize(("live", "asked"), [("lab", True), ("other", False), (None, False)])
def test_what_is_rendered_is_what_would_be_submitted_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, live: str | None, asked: bool
) -> None:
    """Limits of another cluster than the profile's say nothing of its chain."""

    class Found:
        maintenance = ()

    few = LiveLimits(submit=Bound(3, "MaxSubmitJobs of you"))
    monkeypatch.setattr(planning, "take_survey", Found)
    monkeypatch.setattr(planning, "limits", lambda *_, **__: few)
    monkeypatch.setattr(planning.slurm, "cluster_name", lambda: live)
    (tmp_path / "site.yaml").write_text("cluster: lab\nchain: {strategy: array}\n")
    loaded = load({"command": "true", "chain": {"max_links": 9}},
                  profile=str(tmp_path / "site.yaml"), live_cluster=None, cwd=tmp_path,
                  environ={})  # fmt: skip
    text = render_loaded(loaded, cwd=tmp_path, environ={})
    assert asked == ("--array=1-3%1" in text)


def test_members_that_are_complete_need_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep that is nearly over is submitted again though all of it would not fit."""

    class Found:
        maintenance = ()

    monkeypatch.setattr(planning, "take_survey", Found)
    room = LiveLimits(submit=Bound(1, "QoS 'few'"))
    monkeypatch.setattr(planning, "limits", lambda *_, **__: room)
    (tmp_path / "site.yaml").write_text("cluster: lab\n")
    spec = {"command": "echo {x}", "root": "sweep", "members": {"x": [1, 2, 3]}}
    loaded = load(spec, profile=str(tmp_path / "site.yaml"), cwd=tmp_path, environ={})
    with pytest.raises(SpecError, match="3 are more than this site takes at once"):
        planning.make_plan(loaded, cwd=tmp_path, environ={}, live=True)
    for name in ("x-1", "x-3"):
        rundir = RunDir(tmp_path / "sweep" / name)
        rundir.create()
        rundir.write_done(Done(1, None))
    assert 2 == planning.make_plan(loaded, cwd=tmp_path, environ={}, live=True).complete
