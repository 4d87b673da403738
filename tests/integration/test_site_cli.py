"""`doctor` and `profile generate` as a user meets them on a machine without Slurm."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from hpc_ckpt.chain.findings import note, ok, wrong
from hpc_ckpt.cli.site import findings_table

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """hpc-ckpt in an empty directory where no Slurm command is found."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HPC_CKPT")}
    environment = kept | {"HOME": str(tmp_path / "home"), "PATH": "/nonexistent"}
    environment.pop("XDG_CONFIG_HOME", None)
    (tmp_path / "work").mkdir()

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "hpc_ckpt.cli", *words],
            cwd=tmp_path / "work",
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def test_doctor_without_slurm_looks_at_this_machine(cli: Cli) -> None:
    """And says that it is all it did."""
    done = cli("doctor", "--json")
    told = json.loads(done.stdout)
    assert (0, "local", 0) == (done.returncode, told["cluster"], told["wrong"])
    assert "no Slurm here" in told["findings"][0]["seen"]


def test_doctor_of_a_cluster_needs_the_cluster(cli: Cli) -> None:
    """Exit 2, one line."""
    done = cli("doctor", "--profile", "explorer")
    assert (2, "", 1) == (done.returncode, done.stdout, len(done.stderr.splitlines()))
    assert "run doctor on a login node of explorer" in done.stderr


def test_generate_needs_a_cluster(cli: Cli, tmp_path: Path) -> None:
    """Nothing is written."""
    done = cli("profile", "generate", "-o", "x.yaml")
    assert (2, 1) == (done.returncode, len(done.stderr.splitlines()))
    assert "run it on a login node" in done.stderr
    assert [] == list((tmp_path / "work").iterdir())


def test_generate_does_not_overwrite(cli: Cli, tmp_path: Path) -> None:
    """Unless told to."""
    (tmp_path / "work" / "x.yaml").write_text("mine")
    done = cli("profile", "generate", "-o", "x.yaml")
    assert 2 == done.returncode
    assert "--force" in done.stderr
    assert "mine" == (tmp_path / "work" / "x.yaml").read_text()


def test_the_table_is_readable_at_80_columns() -> None:
    """Long words are folded, none is cut."""
    long = "a sentence that is longer than what is left of a line of eighty columns, by far"
    findings = (
        ok("cluster", "lab"),
        note("partition " + "x" * 40, long),
        wrong("time to end", "KillWait is 5s", "kill_wait: 30s", "write kill_wait: 5s"),
    )
    screen = Console(file=io.StringIO(), width=80)
    screen.print(findings_table(findings))
    shown = screen.file.getvalue()  # type: ignore[attr-defined] # a StringIO
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    for text in ("profile: kill_wait: 30s", "→ write kill_wait: 5s"):
        assert text in shown
