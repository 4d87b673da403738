"""The smallest real inputs for programs that have recipes, each of some seconds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

_POINTS = 401

HYDROGEN = """&control
  calculation = 'md'
  prefix = 'h2', outdir = './tmp/', pseudo_dir = '.'
  nstep = {steps} ! in all
  dt = 5
/
&system
  ibrav = 1, celldm(1) = 15.0, nat = 2, ntyp = 1, ecutwfc = 90, nosym = .true.
/
&electrons
  conv_thr = 1d-8
/
&ions
/
ATOMIC_SPECIES
H 1.008 H.UPF
ATOMIC_POSITIONS bohr
H 0 0 0
H 1.5 0.1 0.05
K_POINTS gamma
"""
UPF = """<UPF version="2.0.1">
<PP_HEADER element="H" pseudo_type="NC" relativistic="no" is_ultrasoft="F" is_paw="F"
 is_coulomb="F" has_so="F" has_wfc="F" has_gipaw="F" core_correction="F" functional="PZ"
 z_valence="1.0" l_max="0" l_local="0" mesh_size="{points}" number_of_wfc="1" number_of_proj="0"/>
<PP_MESH mesh="{points}">
{r}{rab}</PP_MESH>
{local}<PP_NONLOCAL>
</PP_NONLOCAL>
<PP_PSWFC>
{wave}</PP_PSWFC>
{density}</UPF>
"""
ARGON = """
import os
import sys
from pathlib import Path

import openmm
from openmm import app

STEPS = int(sys.argv[1])
system, force, places = openmm.System(), openmm.NonbondedForce(), []
force.setNonbondedMethod(openmm.NonbondedForce.CutoffPeriodic)
force.setCutoffDistance(0.9)
system.setDefaultPeriodicBoxVectors((2, 0, 0), (0, 2, 0), (0, 0, 2))
topology = app.Topology()
chain = topology.addChain()
for n in range(64):
    system.addParticle(39.948)
    force.addParticle(0.0, 0.34, 0.997)
    topology.addAtom("AR", None, topology.addResidue("AR", chain))
    places.append((0.5 * (n // 16), 0.5 * (n // 4 % 4), 0.5 * (n % 4)))
system.addForce(force)
integrator = openmm.LangevinMiddleIntegrator(100, 1, 0.002)
integrator.setRandomNumberSeed(7)
platform = openmm.Platform.getPlatformByName("Reference")
simulation = app.Simulation(topology, system, integrator, platform)
if Path("md.chk").exists():
    simulation.loadCheckpoint("md.chk")
    print("goes on after", simulation.currentStep, flush=True)
else:
    simulation.context.setPositions(places)
    simulation.context.setVelocitiesToTemperature(100, 7)
while simulation.currentStep < STEPS:
    simulation.step(min(200, STEPS - simulation.currentStep))
    simulation.saveCheckpoint("md.chk.new")
    os.replace("md.chk.new", "md.chk")
state = simulation.context.getState(positions=True, velocities=True)
Path("final.xml").write_text(openmm.XmlSerializer.serialize(state))
"""
WALK = """
total <- as.integer(commandArgs(trailingOnly = TRUE)[1])
file <- "walk.rds"
if (file.exists(file)) {
  state <- readRDS(file)
  assign(".Random.seed", state$seed, envir = globalenv())
  cat("goes on after", state$round, "\\n")
} else {
  set.seed(7)
  state <- list(round = 0L, x = rnorm(1000))
}
while (state$round < total) {
  for (i in 1:200) state$x <- tanh(state$x + rnorm(1000))
  state$round <- state$round + 1L
  state$seed <- .Random.seed
  saveRDS(state, "walk.rds.new")
  file.rename("walk.rds.new", file)
}
cat(sprintf("%a", state$x), file = "result.txt")
"""
SQUARES = """
rule all:
    input: "squares.txt"
rule square:
    output: "part/{n}.txt"
    shell:
        "echo {wildcards.n} >> tried.txt; echo half > {output}; sleep 1; "
        "echo $(( {wildcards.n} * {wildcards.n} )) > {output}"
rule gather:
    input: expand("part/{n}.txt", n=range(12))
    output: "squares.txt"
    shell: "cat {input} > {output}"
"""


def hydrogen(place: Path, steps: int) -> None:
    """md.in, and a soft proton for it: -2 erf(2r)/r, with the density of a hydrogen atom."""
    place.mkdir(exist_ok=True)
    (place / "md.in").write_text(HYDROGEN.format(steps=steps))
    r = [1e-4 * math.exp(0.03 * i) for i in range(_POINTS)]
    text = UPF.format(
        points=_POINTS,
        r=_column("PP_R", r),
        rab=_column("PP_RAB", (0.03 * x for x in r)),
        local=_column("PP_LOCAL", (-2 * math.erf(2 * x) / x for x in r)),
        wave=_column("PP_CHI.1", (2 * x * math.exp(-x) for x in r), ' l="0" occupation="1.0"'),
        density=_column("PP_RHOATOM", (4 * x * x * math.exp(-2 * x) for x in r)),
    )
    (place / "H.UPF").write_text(text)


def _column(tag: str, numbers: Iterable[float], more: str = "") -> str:
    lines = "\n".join(f"{x:.15e}" for x in numbers)
    return f'<{tag} type="real" size="{_POINTS}"{more}>\n{lines}\n</{tag}>\n'


def energies(*outputs: Path) -> dict[int, float]:
    """The total energy at each step of a molecular dynamics of pw.x."""
    found: dict[int, float] = {}
    for path in outputs:
        energy = None
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("!"):
                energy = float(line.split()[-2])
            step = re.search(r"Entering Dynamics:\s+iteration =\s+(\d+)", line)
            if step is not None and energy is not None:
                found[int(step[1])] = energy
    return found
