"""GROMACS and LAMMPS as chains on this machine: real programs, real limits, real kills."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from pathlib import Path

import pytest
from molecules import (
    argon,
    cut,
    gromacs_steps,
    kill,
    lammps_steps,
    last_step,
    lennard_jones,
    require,
    thermo,
    uninterrupted,
)
from recipe_chains import at_first_restart, chain, cli, logs

from hpc_ckpt.levels.restarts import Restarts
from hpc_ckpt.rundir import RunDir


def test_gromacs_is_complete_by_its_steps_alone(tmp_path: Path) -> None:
    """A stop by -maxh ends with code 0 and "Finished mdrun": no reason to believe it."""
    require("gmx")
    steps = gromacs_steps(12)  # more than one link can do, on a fast machine too
    argon(tmp_path, steps)
    status = chain(
        tmp_path, "cd . && gmx mdrun -deffnm prod -nt 1 -cpt 0.01 > out.txt 2>&1", "gromacs", "7s"
    )
    assert "complete" == status["state"]
    assert len(status["links"]) > 1
    assert "Finished mdrun" in (tmp_path / "prod.log").read_text()
    assert steps == last_step(tmp_path / "prod.cpt")
    assert (tmp_path / "prod.gro").exists()
    assert "-cpi prod.cpt -maxh 0.0" in logs(tmp_path)
    reached = [link["step_to"] for link in status["links"]]
    assert reached == sorted(reached)


@pytest.mark.parametrize("code", ["1", "0"])
def test_what_an_earlier_run_of_gromacs_left_completes_nothing(tmp_path: Path, code: str) -> None:
    """Its .cpt is at nsteps, its log says so; this run finds no .tpr and dies."""
    require("gmx")
    argon(tmp_path, 100)
    run = ["gmx", "mdrun", "-deffnm", "prod", "-nt", "1"]
    subprocess.run(run, cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "prod.tpr").unlink()
    command = f"gmx mdrun -deffnm prod -nt 1 > out.txt 2>&1 || exit {code}"
    spec = {"command": command, "root": "run", "recipe": "gromacs", "chain": {"max_links": "2"}}
    (tmp_path / "spec.yaml").write_text(json.dumps(spec))
    assert 0 != cli(tmp_path, "run", "spec.yaml").returncode
    told = json.loads(cli(tmp_path, "status", "run", "--json").stdout)
    assert "complete" != told["state"]


def test_gromacs_that_stops_by_its_own_clock_goes_on(tmp_path: Path) -> None:
    """Code 0 before the work is done means saved, not complete."""
    require("gmx")
    argon(tmp_path, 120_000)
    recipe = {"like": "gromacs", "save": {"lead": "2s"}, "first": {"set": ["-maxh 0.0003"]}}
    status = chain(
        tmp_path, "gmx mdrun -deffnm prod -nt 1 > out.txt 2>&1", "gromacs", "60s", recipe=recipe
    )
    first, *_, last = status["links"]
    assert ("saved and left", "complete") == (first["cause"], last["cause"])
    assert "ended before the work was complete" == first["reason"]
    assert 120_000 == last_step(tmp_path / "prod.cpt")


@pytest.mark.parametrize(
    ("written", "options", "left"),
    [
        (1000, "-nsteps 120000", "prod.gro"),
        (500_000, "-nsteps 120000", "prod.gro"),
        (120_000, "-noappend", "prod.part0002.gro"),
        (120_000, "-noappend -c out.pdb", "out.part0002.pdb"),
        (120_000, "-c out.pdb", "out.pdb"),
    ],
)
def test_gromacs_comes_to_the_end_that_its_options_say(
    tmp_path: Path, written: int, options: str, left: str
) -> None:
    """Its first link stops by its own clock, with code 0. -nsteps outranks the .tpr, and mdrun
    counts it anew in every link."""
    require("gmx")
    argon(tmp_path, written)
    recipe = {"like": "gromacs", "save": {"lead": "2s"}, "first": {"set": ["-maxh 0.0003"]}}
    command = f"gmx mdrun -deffnm prod -nt 1 {options} > out.txt 2>&1"
    status = chain(tmp_path, command, "gromacs", "60s", recipe=recipe)
    assert ["saved and left", "complete"] == [link["cause"] for link in status["links"]]
    assert 120_000 == last_step(tmp_path / "prod.cpt")
    assert (tmp_path / left).exists()


def test_lammps_goes_on_exactly_after_limits_a_kill_and_a_truncated_file(tmp_path: Path) -> None:
    require("lmp")
    steps = lammps_steps(12)  # more than one link can do, on a fast machine too
    reference = uninterrupted(tmp_path / "whole", steps)
    lennard_jones(tmp_path, steps)
    hurt: list[int] = []

    def strike() -> None:
        hurt.append(kill(tmp_path, "lmp", "in.lj"))
        for path in tmp_path.glob("ck.*"):
            cut(path)

    striking = at_first_restart(tmp_path, strike)
    status = chain(tmp_path, "lmp -in in.lj", "lammps", "7s")
    striking.join()
    assert [2] == hurt
    assert "complete" == status["state"]
    causes = [link["cause"] for link in status["links"]]
    assert "complete" == causes[-1] and {"killed", "saved and left"} <= set(causes)
    assert "goes on from step-" in logs(tmp_path)
    assert reference == thermo(logs(tmp_path))
    assert steps in reference


def test_a_first_part_that_is_guarded_by_its_step_is_done_whole(tmp_path: Path) -> None:
    """Killed in the middle of it, and cut by the limit: the next link does what is left of it."""
    require("lmp")
    first, steps = lammps_steps(8), lammps_steps(12)
    lennard_jones(tmp_path, steps)
    script = (tmp_path / "in.lj").read_text()
    guarded = f'if "$(step) < {first}" then "run {first} upto"\nunfix eq\nrun {steps} upto\n'
    script = script.replace(f"run {steps} upto\n", guarded)
    script = script.replace(
        "thermo 1000\n", "fix eq all temp/rescale 100 1 1 0.02 1\nthermo 1000\n"
    )
    (tmp_path / "in.lj").write_text(script)
    (tmp_path / "whole").mkdir()
    alone = ["lmp", "-in", str(tmp_path / "in.lj")]
    whole = subprocess.run(
        alone, cwd=tmp_path / "whole", check=True, capture_output=True, text=True
    )
    striking = at_first_restart(tmp_path, lambda: kill(tmp_path, "lmp", "in.lj"))
    status = chain(tmp_path, "lmp -in in.lj", "lammps", "7s")
    striking.join()
    assert "complete" == status["state"]
    assert 0 < status["links"][0]["step_to"] < first
    assert thermo(whole.stdout) == thermo(logs(tmp_path))
    assert {first, steps} <= set(thermo(logs(tmp_path)))


def test_what_was_written_after_the_last_save_is_not_lost(tmp_path: Path) -> None:
    """The steward is killed long after its last save; the program's own newer file counts."""
    require("lmp")
    steps = lammps_steps(12)  # not done before the first save on a fast machine
    reference = uninterrupted(tmp_path / "whole", steps)
    lennard_jones(tmp_path, steps)

    def strike() -> None:
        (key,) = Restarts(RunDir(tmp_path / "run")).keys()
        end = time.monotonic() + 30
        while time.monotonic() < end:
            done = thermo((tmp_path / "log.lammps").read_text(errors="replace"))
            if done and max(done) >= key.step + 3000:
                break
            time.sleep(0.05)
        kill(tmp_path, "lmp", "in.lj")

    striking = at_first_restart(tmp_path, strike)
    status = chain(tmp_path, "lmp -in in.lj", "lammps", "60s", checkpoint={"policy": "every 4s"})
    striking.join()
    assert "newer than what was saved, and whole" in logs(tmp_path)
    assert reference == thermo(logs(tmp_path))
    assert "complete" == status["state"]


def test_a_log_that_the_script_names_tells_the_end_and_is_kept(tmp_path: Path) -> None:
    require("lmp")
    steps = lammps_steps(12)  # not done before the first save on a fast machine
    lennard_jones(tmp_path, steps)
    script = tmp_path / "in.lj"
    script.write_text("log prod.log\n" + script.read_text())
    striking = at_first_restart(tmp_path, lambda: kill(tmp_path, "lmp", "in.lj"))
    status = chain(tmp_path, "lmp -in in.lj", "lammps", "60s")
    striking.join()
    assert ["killed", "complete"] == [link["cause"] for link in status["links"]]
    assert 0 in thermo((tmp_path / "prod.log.1").read_text())
    assert steps in thermo((tmp_path / "prod.log").read_text())


def test_a_link_of_lammps_killed_before_any_save_is_not_lost(tmp_path: Path) -> None:
    require("lmp")
    steps = lammps_steps(4)
    reference = uninterrupted(tmp_path / "whole", steps)
    lennard_jones(tmp_path, steps)

    def strike() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end and not (tmp_path / "ck.b").exists():
            time.sleep(0.02)
        kill(tmp_path, "lmp", "in.lj")

    striking = threading.Thread(target=strike)
    striking.start()
    status = chain(tmp_path, "lmp -in in.lj", "lammps", "60s", checkpoint={"policy": "every 10m"})
    striking.join()
    assert "complete" == status["state"]
    assert "nothing is saved, but ck." in logs(tmp_path)
    assert min(thermo((tmp_path / "log.lammps").read_text())) > 0
    assert reference == thermo(logs(tmp_path))


@pytest.mark.parametrize("damage", ["stored", "in place"])
def test_a_truncated_restart_of_gromacs_is_survived(tmp_path: Path, damage: str) -> None:
    require("gmx")
    steps = gromacs_steps(8)  # not done before the first save on a fast machine
    argon(tmp_path, steps)

    def strike() -> None:
        kill(tmp_path, "gmx", "mdrun")
        store = Restarts(RunDir(tmp_path / "run"))
        cut(tmp_path / "prod.cpt")
        if damage == "stored":
            (stored,) = store.path_of(store.keys()[-1]).glob("files/*/prod.cpt")
            cut(stored)

    striking = at_first_restart(tmp_path, strike)
    status = chain(tmp_path, "gmx mdrun -deffnm prod -nt 1 -cpt 0.01 > o 2>&1", "gromacs", "60s")
    striking.join()
    assert "complete" == status["state"]
    text = logs(tmp_path)
    assert ("skipped step-" if damage == "stored" else "goes on from step-") in text
    assert steps == last_step(tmp_path / "prod.cpt")
