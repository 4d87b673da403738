"""Places for runs with a second tier."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_ckpt.rundir import RunDir


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    for name in list(os.environ):
        if name.startswith("HPC_CKPT"):
            monkeypatch.delenv(name)
    return RunDir(tmp_path / "run")


@pytest.fixture
def fast(tmp_path: Path) -> Path:
    return tmp_path / "fast"
