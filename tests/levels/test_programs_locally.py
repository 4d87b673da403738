"""Quantum ESPRESSO, OpenMM, R and Snakemake as chains on this machine: real limits, real kills."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from molecules import cut, kill, require
from recipe_chains import at_first_restart, chain, logs
from small_programs import ARGON, SQUARES, WALK, energies, hydrogen

from hpc_ckpt.levels.restarts import Restarts
from hpc_ckpt.rundir import RunDir

STEPS = 10
CLOSE = 1e-6
"""In Ry, after ten steps with energies that are converged to 1e-8."""
PW = "pw.x -in md.in > md.out 2>&1"


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, float], float]:
    """The energies of a run without a disturbance, and the seconds it took."""
    require("pw.x")
    place = tmp_path_factory.mktemp("whole")
    hydrogen(place, STEPS)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    subprocess.run(["bash", "-c", PW], cwd=place, env=environment, check=True)
    return energies(place / "md.out"), time.monotonic() - began


@pytest.fixture
def undisturbed(whole: tuple[dict[int, float], float]) -> dict[int, float]:
    return whole[0]


def test_quantum_espresso_stopped_at_limits_goes_on_to_the_last_step_and_no_further(
    tmp_path: Path, whole: tuple[dict[int, float], float]
) -> None:
    """nstep is the length of the whole, though pw.x counts anew in each link."""
    undisturbed, seconds = whole
    hydrogen(tmp_path, STEPS)
    status = chain(
        tmp_path, PW, "quantum-espresso", f"{6 + seconds / 3:.0f}s",
        recipe={"like": "quantum-espresso", "name": "qe", "save": {"lead": "3s"}},
    )  # fmt: skip
    assert "complete" == status["state"]
    assert len(status["links"]) > 1
    assert "Program stopped by user request" in (tmp_path / "md.out.1").read_text()
    assert "JOB DONE." in (tmp_path / "md.out.1").read_text()
    assert undisturbed == pytest.approx(energies(*tmp_path.glob("md.out*")), abs=CLOSE)
    assert list(range(1, STEPS + 1)) == sorted(undisturbed)
    assert 1 < min(energies(tmp_path / "md.out"))


def test_quantum_espresso_killed_and_damaged_goes_on_from_the_save_before(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    hydrogen(tmp_path, STEPS)

    def strike() -> None:
        kill(tmp_path, "pw.x", "-in")
        for name in ("h2.save/data-file-schema.xml", "h2.md"):
            cut(tmp_path / "tmp" / name)
        (tmp_path / "tmp" / "h2.restart_scf").write_text("of another moment")
        store = Restarts(RunDir(tmp_path / "run"))
        (stored,) = store.path_of(store.keys()[-1]).glob("files/*/data-file-schema.xml")
        cut(stored)

    striking = at_first_restart(tmp_path, strike, number=2)
    status = chain(tmp_path, PW, "quantum-espresso", "60s")
    striking.join()
    assert ["killed", "complete"] == [link["cause"] for link in status["links"]]
    assert "skipped step-" in logs(tmp_path)
    assert (tmp_path / "tmp" / "h2.restart_scf.aside").exists()
    last = energies(tmp_path / "md.out")
    assert (1 < min(last)) and STEPS == max(last)
    assert last == pytest.approx({step: undisturbed[step] for step in last}, abs=CLOSE)


def _steps_of(seconds: float, command: list[str], place: Path) -> int:
    """So many that this machine is busy with them for that long."""
    took = []
    for steps in (200, 2200):
        with tempfile.TemporaryDirectory(dir=place) as alone:
            began = time.monotonic()
            subprocess.run([*command, str(steps)], cwd=alone, check=True)
            took.append(time.monotonic() - began)
    return 200 * math.ceil(10 * seconds / max(0.01, took[1] - took[0]))


def test_openmm_goes_on_bit_for_bit_after_a_kill_and_truncated_files(
    tmp_path: Path,
) -> None:
    """On the Reference platform."""
    if importlib.util.find_spec("openmm") is None and os.environ.get("CI") != "true":
        pytest.skip("openmm is in the extra 'dev'")
    (tmp_path / "whole").mkdir()
    (tmp_path / "md.py").write_text(ARGON)
    command = [sys.executable, str(tmp_path / "md.py")]
    steps = _steps_of(14, command, tmp_path)  # not done before the second save
    subprocess.run([*command, str(steps)], cwd=tmp_path / "whole", check=True)

    def strike() -> None:
        kill(tmp_path, "python", "md.py")
        cut(tmp_path / "md.chk")
        store = Restarts(RunDir(tmp_path / "run"))
        (stored,) = store.path_of(store.keys()[-1]).glob("files/*/md.chk")
        cut(stored)

    striking = at_first_restart(tmp_path, strike, number=2)
    status = chain(tmp_path, f"{sys.executable} md.py {steps}", "openmm", "8s")
    striking.join()
    assert "complete" == status["state"]
    assert "killed" == status["links"][0]["cause"]
    assert "skipped step-" in logs(tmp_path)
    began = [int(n) for n in re.findall(r"goes on after (\d+)", logs(tmp_path))]
    assert began == sorted(began) and began[0] > 0
    whole = (tmp_path / "whole" / "final.xml").read_text()
    assert whole == (tmp_path / "final.xml").read_text()


def test_r_goes_on_bit_for_bit_after_limits_a_kill_and_a_truncated_file(tmp_path: Path) -> None:
    require("Rscript")
    (tmp_path / "whole").mkdir()
    (tmp_path / "walk.R").write_text(WALK)
    command = ["Rscript", str(tmp_path / "walk.R"), "600"]
    subprocess.run(command, cwd=tmp_path / "whole", check=True)

    def strike() -> None:
        kill(tmp_path, "R", "--file=walk.R")
        cut(tmp_path / "walk.rds")

    striking = at_first_restart(tmp_path, strike)
    status = chain(tmp_path, "Rscript walk.R 600", "r", "5s")
    striking.join()
    assert "complete" == status["state"]
    causes = [link["cause"] for link in status["links"]]
    assert "killed" == causes[0] and "time limit" in causes[1:]
    began = [int(n) for n in re.findall(r"goes on after (\d+)", logs(tmp_path))]
    assert len(causes) - 1 == len(began) and began == sorted(began) and began[0] > 0
    whole = (tmp_path / "whole" / "result.txt").read_text()
    assert whole == (tmp_path / "result.txt").read_text()


def test_r_killed_before_any_save_is_not_hindered_by_the_half_of_a_file(tmp_path: Path) -> None:
    require("Rscript")
    (tmp_path / "walk.R").write_text(WALK)

    def strike() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end and not (tmp_path / "walk.rds").exists():
            time.sleep(0.02)
        kill(tmp_path, "R", "--file=walk.R")
        cut(tmp_path / "walk.rds")

    striking = threading.Thread(target=strike)
    striking.start()
    late = {"policy": "every 10m"}
    status = chain(tmp_path, "Rscript walk.R 100", "r", "60s", checkpoint=late)
    striking.join()
    assert "complete" == status["state"]
    assert (tmp_path / "walk.rds.aside").exists()
    assert (tmp_path / "result.txt").exists()


def test_snakemake_makes_again_only_what_a_kill_left_half(tmp_path: Path) -> None:
    """Killed in its very first job; later stopped at limits, where what runs may finish."""
    require("snakemake")
    (tmp_path / "Snakefile").write_text(SQUARES)

    def strike() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end and not list((tmp_path / "part").glob("*")):
            time.sleep(0.02)
        kill(tmp_path, "python", "/usr/bin/snakemake")

    striking = threading.Thread(target=strike)
    striking.start()
    status = chain(tmp_path, "snakemake -j1", "snakemake", "13s")
    striking.join()
    assert "complete" == status["state"]
    causes = [link["cause"] for link in status["links"]]
    assert "killed" == causes[0] and "time limit" in causes[1:]
    squares = (tmp_path / "squares.txt").read_text().split()
    assert [str(n * n) for n in range(12)] == squares
    first, *rest = (tmp_path / "tried.txt").read_text().split()
    assert sorted(str(n) for n in range(12)) == sorted(rest) and first in rest
