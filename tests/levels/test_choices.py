"""What was chosen for a command, and why nothing else, is kept where people look for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_ckpt import events
from hpc_ckpt.rundir import RunDir


def test_why_a_program_is_not_saved_at_all_is_in_the_ledger_and_the_history(
    tmp_path: Path,
) -> None:
    """No level at all: nobody on the node could say it."""
    (tmp_path / "bin").mkdir()
    for name in ("bash", "git"):
        (tmp_path / "bin" / name).symlink_to(f"/usr/bin/{name}")
    environ = {**os.environ, "PATH": str(tmp_path / "bin")}
    hpc_ckpt = [sys.executable, "-m", "hpc_ckpt.cli"]
    words = ["run", "--root", "run", "--set", "level=auto", "--", "bash", "-c", "exit 0"]
    subprocess.run([*hpc_ckpt, *words], cwd=tmp_path, env=environ, check=True)
    rundir = RunDir(tmp_path / "run")
    (ended,) = (r for r in events.read(rundir.ledger_file(1)) if r["event"] == "link.ended")
    if ended["level"] == "criu":
        pytest.skip("a criu of the system works here, whatever the PATH")
    assert "plain" == ended["level"]
    assert {"model", "application", "dmtcp", "criu"} == set(ended["rejected"])
    shown = subprocess.run(
        [*hpc_ckpt, "history", "run"], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert "not dmtcp:" in shown.stdout
