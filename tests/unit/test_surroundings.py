"""What a link gives to its program, what it keeps of its output, and what it compares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt.chain import logcap, pinning
from hpc_ckpt.chain.orders import Orders
from hpc_ckpt.chain.surroundings import environment
from hpc_ckpt.rundir import RunDir


def orders(rundir: RunDir, **more: Any) -> Orders:
    rundir.create()
    record = {
        "chain": "0123-4567-89ab-cdef",
        "name": "train",
        "argv": ["true"],
        "cwd": "/",
        "threads": 2,
        "spec": {"chain": {"max_links": 1}, **more.pop("spec", {})},
        "profile": {"signal": {"name": "USR1"}, "kill_wait": "5s"},
        **more,
    }
    rundir.chain_file.write_text(json.dumps(record))
    return Orders.read(rundir)


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def test_trackers_find_the_same_run_in_every_link(rundir: RunDir) -> None:
    told = orders(rundir)
    first, second = (environment({}, rundir, told, number, "slurm") for number in (1, 2))
    for name in ("WANDB_RUN_ID", "MLFLOW_RUN_NAME", "TENSORBOARD_LOGGING_DIR", "HPC_CKPT_RUN_ID"):
        assert first[name] == second[name]
    assert ("train-0123456789ab", "allow") == (first["WANDB_RUN_ID"], first["WANDB_RESUME"])
    assert "MLFLOW_RUN_ID" not in first
    (rundir.root / "mlflow-run-id").write_text("abc123\n")
    assert "abc123" == environment({}, rundir, told, 3, "slurm")["MLFLOW_RUN_ID"]


def test_ids_that_the_user_set_stay(rundir: RunDir) -> None:
    given = {"WANDB_RUN_ID": "mine", "OMP_NUM_THREADS": "7"}
    found = environment(given, rundir, orders(rundir), 1, "slurm")
    assert ("mine", "7") == (found["WANDB_RUN_ID"], found["OMP_NUM_THREADS"])


def test_a_member_of_a_sweep_knows_its_values(rundir: RunDir) -> None:
    member = {"index": 3, "name": "lr-0.1", "values": {"lr": "0.1"}}
    found = environment({}, rundir, orders(rundir, member=member), 1, "slurm")
    assert ("lr-0.1", "0.1") == (found["HPC_CKPT_MEMBER"], found["HPC_CKPT_MEMBER_LR"])


def test_a_signal_that_was_asked_for_reaches_the_shim(rundir: RunDir) -> None:
    told = orders(rundir, spec={"forward": {"signal": "USR2", "to": "workers"}})
    assert "USR2 workers" == environment({}, rundir, told, 1, "slurm")["HPC_CKPT_FORWARD"]


def test_output_stays_below_its_limit_and_the_newest_is_kept(tmp_path: Path) -> None:
    """The writer has the file open for appending, as srun has."""
    log = tmp_path / "link.log"
    with log.open("ab", buffering=0) as writer:
        for number in range(1000):
            writer.write(b"line %04d %s\n" % (number, b"x" * 90))
            logcap.cut(log, 10_000)
            kept = sum(path.stat().st_size for path in tmp_path.iterdir())
            assert 10_200 >= kept
    lines = (tmp_path / "link.log.old").read_bytes() + log.read_bytes()
    assert lines.endswith(b"line 0999 " + b"x" * 90 + b"\n")
    assert lines.count(b"\n") >= 40


def test_a_log_that_cannot_be_cut_is_left_alone(tmp_path: Path) -> None:
    assert 0 == logcap.cut(tmp_path / "none", 10)


def environment_with(prefix: Path, *names: str) -> str:
    for name in names:
        (prefix / "lib" / "python3.11" / "site-packages" / f"{name}.dist-info").mkdir(parents=True)
    return str(prefix)


def test_packages_that_changed_are_named(tmp_path: Path) -> None:
    prefix = environment_with(tmp_path / "env", "numpy-2.0.0", "torch-2.6.0")
    pinned = pinning.record([prefix])
    assert pinning.changed(pinned) is None
    environment_with(tmp_path / "env", "numpy-2.1.0")
    site = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    (site / "numpy-2.0.0.dist-info").rmdir()
    said = pinning.changed(pinned)
    assert said is not None and said.endswith("gone numpy-2.0.0; new numpy-2.1.0")
