"""Tiny systems for GROMACS and LAMMPS, made from scratch, and what tests do to their programs."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

TOPOLOGY = """[ defaults ]
1 1 no 1 1
[ atomtypes ]
AR 18 39.948 0 A 0.00622127 9.69576e-06
[ moleculetype ]
AR 1
[ atoms ]
1 AR 1 AR AR 1 0
[ system ]
argon
[ molecules ]
AR 216
"""
PARAMETERS = """integrator = md
dt = 0.002
nsteps = {steps}
cutoff-scheme = Verlet
coulombtype = cut-off
rcoulomb = 1.0
rvdw = 1.0
tcoupl = v-rescale
tc-grps = System
tau-t = 0.5
ref-t = 100
gen-vel = yes
gen-temp = 100
gen-seed = 1
ld-seed = 7
nstxout-compressed = 10000
nstlog = 10000
nstenergy = 10000
"""
LAMMPS = """variable mode index start
variable timeout index off
timer timeout ${{timeout}} every 1000
units lj
atom_style atomic
if "${{mode}} == start" then &
  "lattice fcc 0.8442" &
  "region box block 0 5 0 5 0 5" &
  "create_box 1 box" &
  "create_atoms 1 box" &
  "mass 1 1.0" &
  "velocity all create 3.0 87287" &
else "read_restart ${{restart}}"
pair_style lj/cut 2.5
pair_coeff 1 1 1.0 1.0 2.5
neighbor 0.3 bin
neigh_modify every 20 delay 0 check no
fix 1 all nve
thermo 1000
thermo_modify flush yes format float %20.15g
restart 1000 ck.a ck.b
run {steps} upto
write_restart ck.last
"""
THERMO = re.compile(r"^ +\d+(?: +-?[\d.]+(?:e[-+]?\d+)?){5} *$", re.MULTILINE)


def require(program: str) -> None:
    """Skip on a person's own machine without it; in CI that is a failure."""
    if shutil.which(program) is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{program} is required here: make packages")
        pytest.skip(f"{program} is not installed")


def argon(place: Path, steps: int) -> None:
    """prod.tpr: 216 atoms on a grid."""
    rows = [(x, y, z) for x in range(6) for y in range(6) for z in range(6)]
    atoms = "".join(
        f"{n:5d}{'AR':<5}{'AR':>5}{n:5d}" + "".join(f"{0.5 * c + 0.1:8.3f}" for c in row) + "\n"
        for n, row in enumerate(rows, 1)
    )
    (place / "conf.gro").write_text(f"argon\n216\n{atoms}   3.0 3.0 3.0\n")
    (place / "topol.top").write_text(TOPOLOGY)
    (place / "run.mdp").write_text(PARAMETERS.format(steps=steps))
    subprocess.run(
        ["gmx", "grompp", "-f", "run.mdp", "-c", "conf.gro", "-p", "topol.top", "-o", "prod.tpr"],
        cwd=place, check=True, capture_output=True,
    )  # fmt: skip


def lennard_jones(place: Path, steps: int) -> None:
    (place / "in.lj").write_text(LAMMPS.format(steps=steps))


def thermo(text: str) -> dict[int, str]:
    """Each line of thermodynamic output by its step; lines of one step must not differ."""
    found: dict[int, str] = {}
    for match in THERMO.finditer(text):
        line = " ".join(match[0].split())
        assert line == found.setdefault(int(line.split()[0]), line)
    return found


@functools.cache
def gromacs_steps(seconds: float) -> int:
    """So many that this machine is busy with them for that long."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        argon(place, 20_000)
        run = ["gmx", "mdrun", "-deffnm", "prod", "-nt", "1"]
        subprocess.run(run, cwd=place, check=True, capture_output=True)
        took = re.search(
            r"^ +Time: +[\d.]+ +([\d.]+)", (place / "prod.log").read_text(), re.MULTILINE
        )
    assert took is not None
    return 10_000 * max(10, math.ceil(2 * seconds / float(took[1])))


@functools.cache
def lammps_steps(seconds: float) -> int:
    """So many that this machine is busy with them for that long; thousands, as restarts are."""
    with tempfile.TemporaryDirectory() as place:
        lennard_jones(Path(place), 6000)
        run = ["lmp", "-in", "in.lj"]
        said = subprocess.run(run, cwd=place, check=True, capture_output=True, text=True).stdout
    took = re.search(r"^Loop time of ([\d.]+) on", said, re.MULTILINE)
    assert took is not None
    return 1000 * max(12, math.ceil(6 * seconds / float(took[1])))


def uninterrupted(place: Path, steps: int) -> dict[int, str]:
    place.mkdir()
    lennard_jones(place, steps)
    done = subprocess.run(
        ["lmp", "-in", "in.lj"], cwd=place, check=True, capture_output=True, text=True
    )
    return thermo(done.stdout)


def last_step(cpt: Path) -> int:
    told = subprocess.run(["gmx", "dump", "-cp", str(cpt)], capture_output=True, text=True).stdout
    match = re.search(r"^step = (\d+)", told, re.MULTILINE)
    assert match is not None
    return int(match[1])


def processes(place: Path, program: str, word: str) -> list[int]:
    """Those of a program that run in a directory with this word in their command."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                here = (path / "cwd").readlink()
                line = (path / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if here == place and Path(line[0]).name.startswith(program) and word in line:
                found.append(int(path.name))
    return found


def kill(place: Path, program: str, word: str) -> int:
    """SIGKILL to the steward and then at once to the program; how many there were."""
    pids = processes(place, "python", "hpc_ckpt.levels.steward")
    pids += processes(place, program, word)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # Slurm may have been as quick
            os.kill(pid, signal.SIGKILL)
    return len(pids)


def cut(path: Path) -> None:
    """A write that was not finished."""
    os.truncate(path, path.stat().st_size // 2)
