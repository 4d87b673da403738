"""What tests of links have in common."""

from __future__ import annotations

from pathlib import Path

import pytest
from links import make_chain

from hpc_ckpt.rundir import RunDir


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    """A chain that was submitted and has no link yet."""
    return make_chain(tmp_path / "run")
