"""A rehearsal: run, saved, killed, gone on, in a copy of the directory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_ckpt.chain.layers import load

CLI = [sys.executable, "-m", "hpc_ckpt.cli", "rehearse"]
COUNT = """
import time
with open("out", "a", buffering=1) as file:
    for i in range(100000):
        file.write(f"{i}\\n")
        time.sleep(0.02)
"""


def rehearse(
    place: Path, *words: str, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    paths = f"{path}:/usr/bin:/bin:/usr/sbin:/sbin" if path else "/usr/bin:/bin"
    return subprocess.run(
        [*CLI, *words], cwd=place, env={"PATH": paths, "HOME": str(place)}, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "count.py").write_text(COUNT)
    return tmp_path


def test_what_survives_is_said_with_size_and_time_and_leaves_no_trace(
    place: Path, criu: Path
) -> None:
    command = [sys.executable, "count.py"]
    done = rehearse(place, "--level=criu", "--run=2s", "--json", "--", *command, path=criu)
    assert 0 == done.returncode, done.stderr
    (found,) = json.loads(done.stdout)
    assert ("criu", True) == (found["level"], found["survived"])
    assert found["size"] > 10_000 and found["save_s"] > 0 and found["resume_s"] > 0
    assert ["count.py"] == [path.name for path in place.iterdir() if path.name != ".local"]


def test_a_program_that_writes_through_a_link_changes_nothing_real(place: Path, criu: Path) -> None:
    real = place.parent / f"{place.name}-results"
    real.mkdir()
    (real / "out").write_text("mine\n")
    (place / "results").symlink_to(real)
    (place / "count.py").write_text(COUNT.replace('"out"', '"results/out"'))
    command = [sys.executable, "count.py"]
    done = rehearse(place, "--level=criu", "--run=1s", "--json", "--", *command, path=criu)
    assert 0 == done.returncode, done.stderr
    assert "mine\n" == (real / "out").read_text()


def test_the_spec_that_it_writes_can_be_submitted(place: Path, criu: Path) -> None:
    command = [sys.executable, "count.py"]
    done = rehearse(place, "--level=criu", "--run=1s", "-o", "s.yaml", "--", *command, path=criu)
    assert 0 == done.returncode, done.stderr
    spec = load("s.yaml", profile="local", cwd=place, environ={"HOME": str(place)}).spec
    assert "criu" == spec.level
    assert spec.lead is not None
    assert "auto" != spec.checkpoint.policy


def test_a_program_that_is_over_too_soon_says_so(place: Path, criu: Path) -> None:
    done = rehearse(place, "--level=criu", "--run=2s", "--", "true", path=criu)
    assert 1 == done.returncode
    assert "too short to be saved" in done.stdout


def test_where_nothing_fits_it_says_why_not(place: Path) -> None:
    done = rehearse(place, "--", sys.executable, "count.py")
    assert 1 == done.returncode
    assert "not dmtcp" in done.stdout and "not criu" in done.stdout
    assert "begins anew" in done.stdout


def test_a_program_with_a_checkpointer_needs_none(place: Path) -> None:
    (place / "train.py").write_text("from hpc_ckpt import Checkpointer\n")
    done = rehearse(place, "--", "python", "train.py")
    assert (0, True) == (done.returncode, "nothing to rehearse" in done.stdout)
