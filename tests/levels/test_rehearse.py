"""A rehearsal: run, saved, killed, gone on, in a copy of the directory."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from molecules import argon, require

from hpc_ckpt import processes
from hpc_ckpt.chain.layers import load
from hpc_ckpt.chain.planning import make_plan

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
    ours = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    return subprocess.run(
        [*CLI, *words], cwd=place, env={"PATH": paths, "HOME": str(place), **ours},
        capture_output=True, text=True, timeout=120,
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


def test_a_program_with_restart_files_of_its_own_is_tried_with_them_first(
    place: Path, criu: Path
) -> None:
    """Every level that might do is tried; the spec names the best that survived."""
    require("gmx")
    argon(place, 50_000_000)
    command = ["gmx", "mdrun", "-deffnm", "prod", "-nt", "1", "-cpt", "0.02"]
    done = rehearse(place, "--run=4s", "--json", "-o", "s.yaml", "--", *command, path=criu)
    assert 0 == done.returncode, done.stderr
    found = json.loads(done.stdout[: done.stdout.rindex("]") + 1])
    assert [("gromacs", True), ("criu", True)] == [
        (one["level"], one["survived"]) for one in found if one["level"] != "dmtcp"
    ]
    spec = load("s.yaml", profile="local", cwd=place, environ={"HOME": str(place)}).spec
    assert ("application", "gromacs") == (spec.level, spec.recipe)
    assert not (place / "prod.cpt").exists()


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


def test_a_program_that_fails_is_not_called_short(place: Path, criu: Path) -> None:
    done = rehearse(place, "--level=criu", "--run=2s", "--", "bash", "-c", "exit 3", path=criu)
    assert 1 == done.returncode
    assert "before any save: exit code 3; mend the command" in done.stdout


SOLVER = """#!/usr/bin/env python3
import os, sys, time
step = int(open("state.dat").read().split()[1]) if "--from" in sys.argv else 0
while step < 100000:
    time.sleep(0.05)
    step += 1
    open("state.new", "w").write(f"step {step} end\\n")
    os.replace("state.new", "state.dat")
"""
PROGRESS = {"file": "{restart}", "regex": r"step (\d+)"}
GOES_ON = {"resume": {"append": ["--from {restart}"]}}


def solver(place: Path, file: str, change: dict[str, object]) -> None:
    (place / "solver").write_text(SOLVER)
    (place / "solver").chmod(0o755)
    recipe = {
        "recognise": {"programs": ["solver"]},
        "restart": "state.dat",
        "save": {"lead": "1s"},
        "progress": PROGRESS,
        "complete": {"exit_code": 0},
        "sane": {"ends": r"end\n"},
        **change,
    }
    (place / file).parent.mkdir(exist_ok=True)
    told = {key: item for key, item in recipe.items() if item is not None}
    (place / file).write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("change", "survived", "said"),
    [
        (GOES_ON, True, "gone on from step "),
        ({"resume": {"append": ["--form {restart}"]}}, False, "look at 'resume' in the recipe"),
        ({"progress": None}, True, "whether from there cannot be told: the recipe shows no"),
    ],
)
def test_a_program_that_begins_anew_has_not_survived(
    place: Path, change: dict[str, object], survived: bool, said: str
) -> None:
    solver(place, "recipes/solver.yaml", change)
    done = rehearse(place, "--run=4s", "--json", "--", "./solver")
    found = json.loads(done.stdout)
    assert [("solver", survived)] == [(one["level"], one["survived"]) for one in found[:1]]
    assert said in found[0]["why"]


def test_what_a_program_leaves_running_is_ended_with_it(place: Path) -> None:
    """A daemon of each of its two runs: on a login node it would stay for good."""
    solver(place, "recipes/solver.yaml", GOES_ON)
    pids, began = place / "pids", "import os, sys, time\n"
    helper = f'os.system("setsid sleep 1000 & echo $! >> {pids}")\n'
    script = (place / "solver").read_text()
    (place / "solver").write_text(script.replace(began, began + helper))
    done = rehearse(place, "--level=application", "--run=2s", "--json", "--", "./solver")
    assert [True] == [one["survived"] for one in json.loads(done.stdout)], done.stderr
    left = [int(pid) for pid in pids.read_text().split()]
    there = [pid for pid in left if processes.stat_of(pid) is not None]
    for pid in there:
        os.kill(pid, signal.SIGKILL)
    assert (2, []) == (len(left), there)


@pytest.mark.parametrize(
    ("file", "wanted"),
    [("recipes/solver.yaml", "solver"), ("mine/solver.yaml", "mine/solver.yaml")],
)
def test_a_recipe_can_be_named_and_the_spec_names_it(place: Path, file: str, wanted: str) -> None:
    """Also one that is chosen by nobody else: it was not run, or lies where nobody looks."""
    solver(place, file, {**GOES_ON, "recognise": {"programs": ["other", "solver"]}})
    done = rehearse(place, "--recipe", wanted, "--run=4s", "-o", "s.yaml", "--", "./solver")
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "solver: survives" in done.stdout and "criu" not in done.stdout
    environ = {"HOME": str(place), "PATH": "/usr/bin:/bin"}
    loaded = load("s.yaml", profile="local", cwd=place, environ=environ)
    assert wanted == loaded.spec.recipe
    assert "solver" == make_plan(loaded, cwd=place, environ=environ).level.chosen


def test_the_advice_on_a_recipe_that_was_not_run_can_be_followed(place: Path) -> None:
    """With a stand-in that hears VASP's STOPCAR."""
    shown = subprocess.run(
        [*CLI[:-1], "recipes", "vasp"], cwd=place, capture_output=True, text=True, check=True
    ).stdout
    assert "rehearse it before you trust it: hpc-ckpt rehearse --recipe vasp -- CMD" in shown
    told = rehearse(place, "--level=application", "--", "vasp_std")
    assert 2 == told.returncode and "hpc-ckpt rehearse --recipe vasp -- CMD" in told.stderr
    (place / "vasp_std").write_text(
        "#!/bin/sh\nwhile ! test -e STOPCAR; do cat POSCAR > CONTCAR; sleep 0.2; done\n"
    )
    (place / "vasp_std").chmod(0o755)
    (place / "POSCAR").write_text("a position of some atoms\n" * 9)
    done = rehearse(place, "--recipe=vasp", "--run=2s", "--", "./vasp_std")
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "vasp: survives" in done.stdout and 'recipe: "vasp"\n' in done.stdout


def test_a_recipe_is_no_other_level(place: Path) -> None:
    done = rehearse(place, "--recipe=lammps", "--level=criu", "--", "lmp", "-in", "a")
    assert 2 == done.returncode
    assert "--recipe" in done.stderr and "--level" in done.stderr


def test_where_nothing_fits_it_says_why_not(place: Path) -> None:
    done = rehearse(place, "--", sys.executable, "count.py")
    assert 1 == done.returncode
    assert "not dmtcp" in done.stdout and "not criu" in done.stdout
    assert "begins anew" in done.stdout


def test_a_program_with_a_checkpointer_needs_none(place: Path) -> None:
    (place / "train.py").write_text("from hpc_ckpt import Checkpointer\n")
    done = rehearse(place, "--", "python", "train.py")
    assert (0, True) == (done.returncode, "nothing to rehearse" in done.stdout)
