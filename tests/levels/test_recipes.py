"""Recipes: every shipped one is sound, mistakes are said by file and key, a person's own count."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from molecules import require

from hpc_ckpt.chain.spec import Spec
from hpc_ckpt.errors import SpecError
from hpc_ckpt.levels.application import Application
from hpc_ckpt.levels.base import Work
from hpc_ckpt.levels.choose import choose, levels_of
from hpc_ckpt.levels.recipe import NOT_RUN, Recipe, load_recipes, matching, recipe_of, untried

PROJECT = Path(__file__).parents[2]
SHIPPED = {recipe.name: recipe for recipe in load_recipes(Path("/nowhere"), {})}
NAMES = {
    "gromacs", "lammps", "openmm", "namd", "quantum-espresso", "cp2k", "vasp", "gaussian", "orca",
    "amber", "keras", "r", "matlab", "octave", "julia", "nextflow", "snakemake", "generic",
}  # fmt: skip
TRIED = {
    "gromacs", "lammps", "keras", "generic", "quantum-espresso", "openmm", "r", "octave", "cp2k",
    "snakemake",
}  # fmt: skip
READS = 'if "${mode} == start" then "read_data a" else "read_restart ${restart}"\n'
GOOD: dict[str, Any] = {"name": "mine", "restart": "x.rst", "complete": {"exit_code": 0}}


def work(place: Path, *argv: str) -> Work:
    return Work(argv=argv, cwd=place, environ={})


def test_all_that_are_promised_are_shipped() -> None:
    assert NAMES == set(SHIPPED)
    assert TRIED == {name for name, recipe in SHIPPED.items() if recipe.was_tried}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_recipe_comes_back_from_json(name: str) -> None:
    recipe = SHIPPED[name]
    again = Recipe.from_json(json.loads(json.dumps(recipe.to_json())))
    assert vars(again) | {"origin": ""} == vars(recipe) | {"origin": ""}
    assert "like" not in recipe.to_json()


@pytest.mark.parametrize(
    ("command", "files", "name", "restarts"),
    [
        ("gmx mdrun -s a.tpr", {}, "gromacs", ["state.cpt"]),
        ("srun gmx_mpi mdrun -deffnm md -cpo x", {}, "gromacs", ["x.cpt"]),
        ("lmp -in in.x", {"in.x": READS + "restart 100 a.rst b.rst\nrun 9 upto\n"}, "lammps",
         ["a.rst", "b.rst"]),
        ("lmp < in.x", {"in.x": READS + "restart 100 r.*\nrun 9 upto\n"}, "lammps", ["r.7"]),
        (
            "namd3 +p4 run.namd > log",
            {"run.namd": "outputName sim\nnumsteps 9\n"},
            "namd",
            ["sim.restart.coor", "sim.restart.vel", "sim.restart.xsc"],
        ),
        ("mpirun pw.x -in s.in", {"s.in": "&control\n prefix='si'\n/"}, "quantum-espresso",
         ["si.save/data-file-schema.xml", "si.save/wfc1.dat", "si.md"]),
        ("cp2k.psmp -i h.inp", {"h.inp": "&GLOBAL\n PROJECT h2o\n"}, "cp2k", ["h2o-1.restart"]),
        ("vasp_std", {}, "vasp", ["CONTCAR"]),
        ("g16 a.com", {"a.com": "%chk=a\n# opt\n"}, "gaussian", ["a.chk"]),
        ("/opt/orca/orca a.inp > a.out", {}, "orca", ["a.gbw"]),
        ("pmemd.cuda -O -i mdin -r out.rst7", {"mdin": "total 5 ps\n"}, "amber", ["out.rst7"]),
        ("Rscript s.R", {"s.R": "x <- readRDS('s.rds')\nsaveRDS(x, 's.rds')"},
         "r", ["s.rds"]),
        ("matlab -batch s", {"s.m": "load('s.mat')\nsave('s.mat')"}, "matlab", ["s.mat"]),
        ("julia s.jl", {"s.jl": 'deserialize("s.jls"); serialize("s.jls", x)'}, "julia", ["s.jls"]),
        ("python -u s.py", {"s.py": "s.loadCheckpoint('c.chk')\ns.saveCheckpoint('c.new')\n"
         "os.replace('c.new', 'c.chk')"}, "openmm", ["c.chk"]),
        ("python s.py", {"s.py": "import keras\nF='t/{epoch}.keras'\nfor epoch in "
         "range(begin, 9): m.save(F)\nload_model(F)"},
         "keras", ["t/5.keras"]),
        ("nextflow run main.nf", {}, "nextflow", [".nextflow/history"]),
        ("snakemake -j4", {}, "snakemake", [".snakemake/metadata/x"]),
    ],
)  # fmt: skip
def test_a_command_is_recognised_and_its_restart_files_are_found(
    tmp_path: Path, command: str, files: dict[str, str], name: str, restarts: list[str]
) -> None:
    for path, text in (files | dict.fromkeys(restarts, "x")).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    this = work(tmp_path, "bash", "-o", "pipefail", "-c", command)
    recipe = matching(SHIPPED.values(), this) or untried(SHIPPED.values(), this)
    assert recipe is not None
    assert name == recipe.name
    level = Application(recipe)
    assert None is level.probe(this)
    level.first(this)
    seen = [str(Path(p).relative_to(tmp_path)) for p in level._collector.stamps()]
    assert restarts == seen


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("gmx mdrun -deffnm prod -c out.gro", "gromacs"),
        ("pmemd -O -i mdin -c inpcrd", "amber"),
        ("snakemake -c 1", "snakemake"),
    ],
)
def test_an_option_of_the_program_is_no_text_for_a_shell(
    tmp_path: Path, command: str, name: str
) -> None:
    this = work(tmp_path, *command.split())
    recipe = matching(SHIPPED.values(), this) or untried(SHIPPED.values(), this)
    assert recipe is not None
    assert name == recipe.name


@pytest.mark.parametrize(
    "command",
    [
        "make snakemake",
        "python3 sim.py --out results/snakemake",
        "python3 ./sim.py snakemake",
        "python -m sim --out snakemake",
        "conda run -n snakemake python3 sim.py",
        "conda run --no-capture-output -n snakemake python3 sim.py",
        "srun -J snakemake ./sim",
        "srun --job-name snakemake python sim.py",
        "mpirun -np 4 ./sim --out snakemake",
        "bash run.sh snakemake",
        "bash -c 'A=1 nohup ./sim --out snakemake'",
        "./sim /scratch/snakemake",
        "rm -rf snakemake",
        "apptainer exec snakemake python3 sim.py",
    ],
)
def test_a_program_that_is_only_an_argument_is_not_recognised(tmp_path: Path, command: str) -> None:
    """The recipe would be taken for a program that it knows nothing of."""
    assert None is matching(SHIPPED.values(), work(tmp_path, *shlex.split(command)))


@pytest.mark.parametrize(
    "lead",
    [
        "",
        "mpirun -np 4",
        "mpirun --oversubscribe",
        "mpirun --bind-to core --mca btl self,vader -x A=1",
        "mpiexec -genv OMP_NUM_THREADS 4 -n 4",
        "mpiexec.hydra -some-new-option 4 -hostfile ./hosts",
        "srun",
        "srun -l",
        "srun -n4 --mpi=pmix --cpu-bind cores",
        "srun --new-option x ./select_gpu",
        "srun -n 4 /opt/site/bind_gpu.sh",
        "./select_gpu.sh",
        "env OMP_NUM_THREADS=4",
        "env -u A -i B=1 nice -n 5",
        "taskset -c 0-3",
        "taskset 0x3",
        "numactl -C 0-3 -l",
        "timeout -k 5 60",
        "timeout --foreground 1h",
        "/usr/bin/time -v",
        "nice -n 10",
        "nohup",
        "conda run -n env python -m",
        "conda run -n snakemake",
        "time -p",
        "uvx",
        "sudo -u me",
        "pipx run",
        "conda run --no-capture-output -p /opt/env",
        "python -m",
        "python3.11 -u -W ignore -m",
        "python /opt/env/bin/",
        "apptainer exec img.sif",
        "apptainer exec --nv -B /a:/b img.sif",
        "singularity run --some-new-option img.sif",
        "mpirun -np 2 apptainer exec snakemake",
        "mpirun -np 2 bash -c",
        "bash -c 'cd . && time A=1 env B=2",
        "bash -c 'mkdir -p out; if true; then exec",
    ],
)
def test_a_program_is_recognised_behind_those_that_start_it(tmp_path: Path, lead: str) -> None:
    quoted = "'" if lead.count("'") == 1 else ""
    command = f"{lead}{'' if lead.endswith('/') else ' '}snakemake{quoted} "
    argv = shlex.split(command) if quoted else [*shlex.split(command), "-j", "4"]
    found = matching(SHIPPED.values(), work(tmp_path, *argv))
    assert found is not None and "snakemake" == found.name


def test_who_names_a_recipe_knows_his_launcher_best(tmp_path: Path) -> None:
    this = work(tmp_path, "mylaunch", "--with", "it", "snakemake", "-j", "4")
    assert None is matching(SHIPPED.values(), this)
    assert "snakemake" == choose(this, recipes=SHIPPED.values(), recipe="snakemake").chosen


@pytest.mark.parametrize(
    "text",
    [
        "gmx mdrun -deffnm nvt; gmx mdrun -deffnm prod",
        "gmx mdrun -deffnm nvt && /opt/bin/gmx_mpi mdrun -deffnm prod > out",
        "for i in nvt prod; do gmx mdrun -deffnm $i; done",
        "for i in nvt prod; do gmx grompp -o $i; gmx mdrun -deffnm $i; done",
        "while ! test -e end; do true; gmx mdrun -deffnm prod; done",
    ],
)
def test_several_calls_are_not_judged_by_the_first(tmp_path: Path, text: str) -> None:
    """The end of the first would be taken for the end of all."""
    this = work(tmp_path, "bash", "-c", text)
    said = Application(SHIPPED["gromacs"]).probe(this)
    assert said is not None and said.startswith("several calls of gmx mdrun: ")
    assert "then:" in said
    choice = choose(this, recipes=SHIPPED.values())
    assert said == dict(choice.rejected)["gromacs"]
    with pytest.raises(SpecError, match="recipe gromacs: several calls"):
        choose(this, recipes=SHIPPED.values(), recipe="gromacs")


@pytest.mark.parametrize(
    "text",
    [
        "gmx grompp -o prod.tpr; gmx mdrun -deffnm prod; gmx energy",
        "for i in a b; do gmx grompp -o $i; done; gmx mdrun -deffnm prod",
        "if test -e a; then gmx mdrun -deffnm prod; fi; for i in x; do cat $i; done",
    ],
)
def test_one_call_among_others_is_taken(tmp_path: Path, text: str) -> None:
    assert None is Application(SHIPPED["gromacs"]).probe(work(tmp_path, "bash", "-c", text))


@pytest.mark.parametrize(
    "text",
    [
        "cd sim && gmx mdrun -deffnm prod",
        "set -e\ncd 'sim'\nexport A=1\ngmx mdrun -deffnm prod",
        "if cd -P sim; then gmx mdrun; fi",
        "pushd $HOME; gmx mdrun",
        "cd; gmx mdrun",
        "cd $UNKNOWN && gmx mdrun",
    ],
)
def test_a_command_that_goes_elsewhere_is_refused(tmp_path: Path, text: str) -> None:
    """Its restart files would be looked for here, and every link begin at 0."""
    (tmp_path / "sim").mkdir()
    this = replace(work(tmp_path, "bash", "-c", text), environ={"HOME": "/"})
    said = Application(SHIPPED["gromacs"]).probe(this)
    assert said is not None and "submit from that directory" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("srun -n 4 --chdir=sim gmx_mpi mdrun", "'--chdir=sim' comes before gmx_mpi mdrun"),
        ("srun --chdir sim gmx_mpi mdrun", "'--chdir sim'"),
        ("srun -D sim gmx_mpi mdrun", "'-D sim'"),
        ("srun -Dsim gmx_mpi mdrun", "'-Dsim'"),
        ("mpirun -np 4 -wdir sim gmx_mpi mdrun", "'-wdir sim'"),
        ("mpiexec --wdir sim gmx_mpi mdrun", "'--wdir sim'"),
        ("/opt/ompi/bin/mpirun -wd sim env A=1 gmx_mpi mdrun", "'-wd sim'"),
        ("env -C sim gmx mdrun", "'-C sim'"),
        ("env A=1 --chdir=sim gmx mdrun", "'--chdir=sim'"),
        ("srun -D sim bash -c 'gmx_mpi mdrun'", "'-D sim'"),
        ("bash -c 'ulimit -s unlimited; srun -D sim gmx_mpi mdrun'", "'-D sim'"),
        ("apptainer exec --pwd /data img.sif gmx mdrun", "'--pwd /data'"),
        ("apptainer exec -B sim:/data --pwd /data img.sif gmx mdrun", "'--pwd /data'"),
        ("conda run -n gmx --cwd sim gmx mdrun", "'--cwd sim'"),
    ],
)
def test_a_launcher_that_takes_a_program_elsewhere_is_refused(
    tmp_path: Path, text: str, said: str
) -> None:
    """As `cd` is: nothing would be found to save, and every link begin at 0."""
    (tmp_path / "sim").mkdir()
    why = Application(SHIPPED["gromacs"]).probe(work(tmp_path, *shlex.split(text)))
    assert why is not None and said in why and "submit from that directory" in why


@pytest.mark.parametrize(
    "text",
    [
        "srun -n 4 -C haswell --constraint=sim gmx_mpi mdrun -deffnm prod -c sim",
        "srun -D . gmx_mpi mdrun",
        "srun --chdir={here} gmx_mpi mdrun",
        "mpirun -np 4 gmx_mpi mdrun",
        "mpirun -np 4 -x D -host sim gmx_mpi mdrun",
        "env OMP_NUM_THREADS=4 gmx mdrun",
        "taskset -c 0-3 gmx mdrun",
        "numactl -C 0-3 gmx mdrun",
        "env A=1 numactl -C 0-3 gmx mdrun",
        "conda run -n env gmx mdrun",
        "apptainer exec img.sif gmx mdrun",
        "apptainer exec --bind {here}:/data:rw,/scratch --pwd /data img.sif gmx mdrun",
        "apptainer exec --bind={here}:/data --workdir /tmp/x --pwd /data img.sif gmx mdrun",
    ],
)
def test_a_launcher_that_stays_here_is_taken(tmp_path: Path, text: str) -> None:
    argv = shlex.split(text.format(here=tmp_path))
    assert None is Application(SHIPPED["gromacs"]).probe(work(tmp_path, *argv))


@pytest.mark.parametrize(
    "option", ["-d wd", "--directory wd", "--directory=wd", "-d {here}/wd", "-d sub/../wd"]
)
def test_the_directory_that_snakemake_is_given_has_its_restart_files(
    tmp_path: Path, option: str
) -> None:
    """Without them the second link would find a lock, and end."""
    (tmp_path / "wd/.snakemake/locks").mkdir(parents=True)
    (tmp_path / "wd/.snakemake/locks/0.input.lock").write_text("x")
    (tmp_path / "sub").mkdir()
    this = work(tmp_path, "snakemake", *option.format(here=tmp_path).split(), "-j", "1")
    level = Application(SHIPPED["snakemake"])
    assert None is level.probe(this)
    level._open(this)
    lock = tmp_path / "wd/.snakemake/locks/0.input.lock"
    assert [lock] == [Path(path).resolve() for path in level._collector.stamps()]
    facts = level._collector.collect(tmp_path).facts()
    assert (*this.argv, "--rerun-incomplete", "--nolock") == level.resume(
        this, tmp_path, facts
    ).argv
    said = level.probe(work(tmp_path, "snakemake", "-dwd", "-j", "1"))
    assert "as two words" in (said or "")


@pytest.mark.parametrize(
    "text",
    ["cd . && gmx mdrun", 'cd "$HERE"; gmx mdrun', "gmx mdrun && cd sim", "echo cd; gmx mdrun"],
)
def test_a_command_that_stays_is_taken(tmp_path: Path, text: str) -> None:
    this = replace(work(tmp_path, "bash", "-c", text), environ={"HERE": str(tmp_path)})
    assert None is Application(SHIPPED["gromacs"]).probe(this)


@pytest.mark.parametrize(
    ("name", "script", "text", "file"),
    [
        ("r", "s.R", 'd <- readRDS("in.rds")\nsaveRDS(r, "result.rds")', None),
        ("r", "s.R", 'd <- readRDS("in.rds")\nx <- readRDS("s.rds")\nsaveRDS(x, "s.rds")', "s.rds"),
        ("r", "s.R", 'keep <- function(x) saveRDS(x, "s.rds")\nx <- readRDS("s.rds")', "s.rds"),
        ("r", "s.R", 'F <- "s.rds"\nx <- readRDS(F)\nsaveRDS(x, F)', "s.rds"),
        ("r", "s.R", 'I <- "in.rds"\nO <- "o.rds"\nx <- readRDS(I)\nsaveRDS(x, O)', None),
        ("r", "s.R", 'x <- readRDS("s.rds")\nsaveRDS(x, "n.rds")\nfile.rename("n.rds", "s.rds")',
         "s.rds"),
        ("matlab", "s.m", "load('in.mat')\nsave('out.mat')", None),
        ("octave", "s.m", "load('s.mat')\nsave('n.mat')\nmovefile('n.mat', 's.mat')", "s.mat"),
        ("matlab", "s.m", "f = 's.mat';\nload(f)\nsave(f, 'x')", "s.mat"),
        ("julia", "s.jl", 'x = deserialize("in.jls"); serialize("out.jls", x)', None),
        ("julia", "s.jl", 'const F = "s.jls"\nx = deserialize(F)\nserialize(F, x)', "s.jls"),
    ],
)  # fmt: skip
def test_an_input_is_not_taken_for_a_restart_file(
    tmp_path: Path, name: str, script: str, text: str, file: str | None
) -> None:
    (tmp_path / script).write_text(text)
    for data in ("in.rds", "s.rds", "in.mat", "s.mat", "in.jls", "s.jls"):
        (tmp_path / data).write_text("x")
    program = {"r": "Rscript", "matlab": "matlab", "octave": "octave", "julia": "julia"}[name]
    this, level = work(tmp_path, program, script), Application(SHIPPED[name])
    if file is None:
        assert "does not show {" in (level.probe(this) or "")
        return
    assert None is level.probe(this)
    level.first(this)
    assert [str(tmp_path / file)] == list(level._collector.stamps())


SAVES = 'import keras\nCK = keras.ModelCheckpoint("ck/{epoch:03d}.keras")\n'


@pytest.mark.parametrize(
    ("script", "taken"),
    [
        ('m = load_model("pretrained.keras")\n', False),
        ('m = load_model(filepath="base/pretrained.keras")\nm.fit(x, initial_epoch=0)\n', False),
        ('initial_epoch = 0\nm = load_model("pretrained.keras")\n', False),
        ('images = glob.glob("data/*.png")\nm.load_weights("imagenet.h5")\n', False),
        ("m = keras.models.load_model(sys.argv[1])\n", False),
        ("m = load_model(last)\nm.fit(x, initial_epoch = 0)\n", False),
        ('files = glob("data/*")\nm = load_model(args.pretrained)\nm.fit(x)\n', False),
        ("m = load_model(last)\nfor epoch in range(EPOCHS):\n    m.save(F)\n", False),
        ("m = load_model(last)\nm.fit(x, initial_epoch=done)\n", True),
        ("m = load_model(last)\nm.fit(x, initial_epoch=int(last.stem) if last else 0)\n", True),
        ("m = load_model(last)\nfor epoch in range(done + 1, EPOCHS):\n    m.save(F)\n", True),
        ("for epoch in tqdm(range(len(files), 10)):\n    m = load_model(last)\n", True),
        ("for epoch in range(int(last.stem) + 1 if last else 0, 10):\n    load_model(x)\n", True),
        ("m = load_model(last)\nfor epoch in range(0, 10):\n    m.save(F)\n", False),
        ("m = load_model(last)\nfor epoch in tqdm(range(EPOCHS), desc=x):\n    m.save(F)\n", False),
        ("m.load_weights(tf.train.latest_checkpoint('ck'))\n", True),
        ('m = load_model("base.keras")\nm.fit(x, callbacks=[BackupAndRestore("b")])\n', True),
    ],
)
def test_a_script_of_keras_has_to_begin_at_a_later_epoch(
    tmp_path: Path, script: str, taken: bool
) -> None:
    """One that loads a model, of whatever training, and counts from the first, gets nowhere."""
    (tmp_path / "s.py").write_text(SAVES + script)
    choice = choose(work(tmp_path, "python", "s.py"), recipes=SHIPPED.values())
    if taken:
        assert "keras" == choice.chosen
        return
    assert "keras" not in [entry["name"] for entry in choice.entries]
    said = dict(choice.rejected)["keras"]
    assert "a first epoch that is not always the first (initial_epoch" in said
    assert "every link would begin anew" in said


@pytest.mark.parametrize(
    "command", ["python s.py", "Rscript s.R", "gmx grompp", "julia s.jl", "./old", "echo lmp.txt"]
)
def test_a_command_that_shows_nothing_is_not_recognised(tmp_path: Path, command: str) -> None:
    """A script that does not load what it saves would begin anew in every link."""
    for name in ("s.py", "s.R", "s.jl"):
        (tmp_path / name).write_text("saveRDS(x); serialize(x); model.save('x')")
    this = work(tmp_path, *command.split())
    assert (None, None) == (matching(SHIPPED.values(), this), untried(SHIPPED.values(), this))


@pytest.mark.parametrize(
    "text",
    [
        "&control\n outdir = './t/' ! a / b\n/\n&system\n nat = 1\n/\n",
        "&CONTROL prefix = 'a', nstep = 9 /  ! short\n&system nat = 1 /\n",
    ],
)
def test_lines_for_pw_go_to_the_end_of_the_first_namelist(tmp_path: Path, text: str) -> None:
    """Where they outrank what the user wrote."""
    (tmp_path / "a.in").write_text(text)
    this, level = work(tmp_path, "pw.x", "-in", "a.in"), Application(SHIPPED["quantum-espresso"])
    start = level.resume(this, tmp_path, {"restart": "x", "files": []})
    assert ("pw.x", "-in", "a.in.link") == start.argv
    control, _, rest = (tmp_path / "a.in.link").read_text().partition("&system")
    assert "restart_mode = 'restart'\n/" in control
    assert text.partition("&system")[2] == rest
    assert text == (tmp_path / "a.in").read_text()


def test_a_recipe_that_was_not_run_has_to_be_named(tmp_path: Path) -> None:
    this = work(tmp_path, "mpirun", "vasp_std")
    assert None is matching(SHIPPED.values(), this)
    said = (
        "recipe vasp knows this command but was not run here: name it with recipe: vasp, after "
        "hpc-ckpt rehearse --recipe vasp -- CMD"
    )
    choice = choose(this, recipes=SHIPPED.values())
    assert "vasp" not in [entry["name"] for entry in choice.entries]
    assert said == dict(choice.rejected)["application"]
    with pytest.raises(SpecError, match=said):
        choose(this, "application", recipes=SHIPPED.values())
    assert "vasp" == choose(this, recipes=SHIPPED.values(), recipe="vasp").chosen


def test_others_files_in_a_project_are_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    others = {
        "list.yaml": "[pancakes, soup]",
        "empty.yaml": "",
        "torn.yaml": "{a: [",
        "chef.yml": "{{ cookbook }}: 1",
        "server.yaml": "{restart: always, image: web, complete: true}",
        "taste.yaml": "{like: [salt], restart: no}",
    }
    for name, text in others.items():
        (folder / name).write_text(text)
    (folder / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    assert set(SHIPPED) == {recipe.name for recipe in load_recipes(tmp_path, {})}
    done = subprocess.run(
        [sys.executable, "-m", "hpc_ckpt.cli", "run", "--root", "run", "--", "true"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr
    with pytest.raises(SpecError, match=r"list\.yaml: must be a mapping"):
        recipe_of("list", SHIPPED.values(), tmp_path)
    with pytest.raises(SpecError, match=r"server\.yaml: unknown key 'image'"):
        recipe_of("server", SHIPPED.values(), tmp_path)
    for text in ("{recognise: {programs: [x]}, restrat: r}", "{like: gromax}"):
        (folder / "mine.yaml").write_text(text)
        with pytest.raises(SpecError, match=r"mine\.yaml: "):
            load_recipes(tmp_path, {})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"restrat": "x"}, "unknown key 'restrat'. Did you mean 'restart'?"),
        ({"restart": None}, "restart: missing; write the pattern"),
        ({"complete": None}, "complete: missing; write how to tell"),
        ({"complete": {}}, "complete: says nothing"),
        ({"complete": {"exit_code": "ok"}}, "complete: exit_code: 'ok' is not an exit code"),
        ({"complete": {"text": "x"}}, "'text' or 'no_text' and the file, 'in', belong together"),
        ({"complete": {"step": {"value": 1}}}, "'step' and 'target' belong together"),
        ({"name": "dmtcp"}, "name: 'dmtcp' cannot be one"),
        ({"save": {"signal": "KILL"}}, "save: signal: no program hears SIGKILL"),
        ({"save": {"signal": "USR7"}}, "save: signal: 'USR7' is not a signal"),
        ({"save": {"signal": "USR1", "file": "STOP"}}, "write one of signal, file, command"),
        ({"save": {"lead": "soon"}}, "save: lead: 'soon' is not a duration"),
        ({"save": {"stops": "maybe"}}, "save: stops: write true or false"),
        ({"restart": {"files": "x", "pick": "oldest"}}, "restart: pick: write newest or all"),
        ({"resume": {"append": ["-c {restrat}"]}}, "{restrat} is not known; define it under"),
        ({"resume": {"set": ["-c"]}}, "write an option and its value"),
        ({"resume": {"append": ["'"]}}, "No closing quotation"),
        ({"progress": {"file": "x", "regex": "("}}, "progress: regex: not a regular expression"),
        ({"progress": {"file": "x", "regex": "step"}}, "progress: regex: 'step' has no groups"),
        ({"progress": {"name": r"(\d)(\d)"}}, "has 2 groups: put the number"),
        ({"progress": {"file": "x", "bytes": "..."}}, "progress: bytes: '...' has no groups"),
        ({"complete": []}, "complete: missing; write how to tell"),
        ({"progress": {"command": "x"}}, "'command' needs 'regex'"),
        ({"progress": {"value": 1, "plus": {"command": "x"}}}, "plus: 'command' needs 'regex'"),
        ({"progress": {"file": "x", "count": "y"}}, "write one of command, file"),
        ({"sane": {"begins": "é€"}}, "sane: begins: must be Latin-1"),
        ({"values": {"a": {"file": "x"}}}, "values: a: 'file' and 'regex' belong together"),
        ({"values": ["a"]}, "values: must be a mapping"),
        ({"recognise": {"words": "x"}}, "recognise: programs: missing"),
        ({"like": "gromax"}, "like: no recipe 'gromax'; known: amber"),
        ({"also": [{"at_most": "1G"}]}, "also: files: missing"),
        ({"first": "x"}, "first: must be a mapping"),
    ],
)
def test_a_mistake_is_said_by_its_file_and_key(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    source = {key: item for key, item in {**GOOD, **change}.items() if item is not None}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(source))
    with pytest.raises(SpecError, match=re.escape(said)) as caught:
        recipe_of("./mine.yaml", SHIPPED.values(), tmp_path)
    assert str(caught.value).startswith("./mine.yaml: ")


def test_a_persons_own_recipes_outrank_and_may_build_on_the_shipped(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home / ".config/hpc_ckpt/recipes", here / "recipes"):
        folder.mkdir(parents=True)
    (home / ".config/hpc_ckpt/recipes/gromacs.yaml").write_text(
        "{like: gromacs, save: {lead: 9 min}}"
    )
    (here / "recipes/mine.yaml").write_text("{like: gromacs, recognise: {programs: [mygmx]}}")
    (here / "recipes/soup.yaml").write_text("{name: Soup, of: [water, salt]}")
    (here / "recipes/soup.txt").write_text("]")
    known = {r.name: r for r in load_recipes(here, {"HOME": str(home)})}
    assert NAMES | {"mine"} == set(known)
    assert 540 == known["gromacs"].save.lead_s
    assert known["gromacs"].save.stops
    assert NOT_RUN == known["mine"].tried  # that the shipped one was tried says nothing of it
    assert ("mygmx",) == known["mine"].recognised.programs
    found = matching(known.values(), work(here, "mygmx", "mdrun"))
    assert found is not None and "mine" == found.name


def test_a_spec_names_a_recipe_a_file_or_writes_it_down(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("{restart: x.rst, complete: {exit_code: 0}}")
    this = work(tmp_path, "./old", "5")
    for wanted in ("generic", "./r.yaml", {**GOOD}):
        spec = Spec.model_validate({"command": ["./old", "5"], "recipe": wanted})
        choice = choose(this, recipes=SHIPPED.values(), recipe=spec.recipe)
        (level,) = levels_of(choice.entries)
        assert level.name == choice.chosen
    with pytest.raises(SpecError, match="no recipe 'genric'; known: amber"):
        choose(this, recipes=SHIPPED.values(), recipe="genric")
    with pytest.raises(SpecError, match="recipe gromacs: no word of the command is one of gmx"):
        choose(this, recipes=SHIPPED.values(), recipe="gromacs")


def test_what_a_recipe_cannot_read_from_the_command_is_a_reason_to_look_further(
    tmp_path: Path,
) -> None:
    this = work(tmp_path, "lmp", "-in", "missing.in")
    choice = choose(this, recipes=SHIPPED.values())
    assert "lammps" in dict(choice.rejected)
    assert "does not show {a}" in dict(choice.rejected)["lammps"]


@pytest.mark.parametrize(
    ("runs", "refused"),
    [
        ("run 20000\n", "run 20000"),
        ("run 500 upto\n  run ${n} pre no # upto\n", "run ${n} pre no"),
        ("run 20000\nrun  0\n", "run 20000"),
        ("run 20000 upto\n", None),
        ("run 500\nrun 20000 upto\n", "run 500"),
        ("label loop\nrun 500\nnext i\njump SELF loop\nrun 20000 upto\n", "run 500"),
        ('if "$(step) < 500" then "run 500 upto"\nrun 20000 upto\nrun  0 # energies\n', None),
        ("run ${n} upto\n", None),
        ("run $n upto\n", None),
        ("run 20000 &\n  upto\n", None),
        ("run 20000 start 0 stop 20000 upto\n", None),
        ("# run 500\ninclude in.run\n", None),
    ],
)
def test_lammps_whose_last_run_is_no_upto_is_refused(
    tmp_path: Path, runs: str, refused: str | None
) -> None:
    """Each link would do all its steps again, and end beyond the last one."""
    (tmp_path / "in.x").write_text(f"{READS}restart 100 ck.a ck.b\n{runs}write_restart ck.c\n")
    this = work(tmp_path, "lmp", "-in", "in.x")
    said = Application(SHIPPED["lammps"]).probe(this)
    if refused is None:
        assert said is None
    else:
        assert said is not None and said.startswith(f"in.x: '{refused}': ")
        assert "write 'run N upto'" in said


@pytest.mark.parametrize(
    ("command", "line", "said"),
    [
        ("lmp -in in.x", "log none\n", "in.x: 'log none': the log tells"),
        ("lmp -in in.x", "  log prod.log append\n", "leave append out"),
        ("lmp -in in.x -log none", "", "-log none: its log tells"),
        ("lmp -in in.x", "echo screen\n", "in.x: 'echo screen': the log tells which step"),
        ("lmp -in in.x -echo none", "", "-echo none: its log tells which step"),
        ("lmp -in in.x -e none", "", "-e none: its log tells which step"),
        ("lmp -e screen -in in.x", "", "-e screen: its log tells which step"),
        ("lmp -in in.x", "thermo_style custom temp step\n", "begin the columns with step"),
        ("lmp -in in.x", "thermo_style multi\n", "have 'write_restart FILE' behind the run"),
        ("lmp -in in.x", "thermo_style custom &\n  temp step\n", "begin the columns with step"),
        ("lmp -in in.x", "thermo_style one\nthermo_style multi\n", "begin the columns with step"),
        ("lmp -in in.x", "thermo_modify flush yes line multi\n", "leave that out, or have"),
        ("lmp -in in.x", "thermo_modify colname step Schritt\n", "leave that out, or have"),
    ],
)
def test_lammps_without_a_log_of_its_own_is_refused(
    tmp_path: Path, command: str, line: str, said: str
) -> None:
    (tmp_path / "in.x").write_text(f"{line}{READS}restart 100 ck.a ck.b\nrun 500 upto\n")
    choice = choose(work(tmp_path, "bash", "-c", command), recipes=SHIPPED.values())
    assert said in dict(choice.rejected)["lammps"]


def probe_lammps(place: Path, script: str) -> str | None:
    """Why a script that can go on is refused."""
    (place / "in.x").write_text(READS + script)
    return Application(SHIPPED["lammps"]).probe(work(place, "lmp", "-in", "in.x"))


@pytest.mark.parametrize(
    "style",
    [
        "custom step temp",
        "custom &\n  step temp",
        "one",
        "multi\nthermo_style custom step temp",
        "custom temp step\nwrite_restart ck.last",
        "custom step temp\nthermo_modify line one flush yes",
        "custom step temp\nthermo_modify line multi\nwrite_restart ck.last",
        "custom temp step\nwrite_restart ck.last noinit # the end",
    ],
)
def test_lammps_that_tells_its_step_is_taken(tmp_path: Path, style: str) -> None:
    script = f"restart 100 ck.a ck.b\nrun 500 upto\nthermo_style {style}\n"
    assert probe_lammps(tmp_path, script) is None


@pytest.mark.parametrize("name", ["end.*.rst", "ck.${mode}", "$n", "ck.%"])
def test_a_file_whose_name_only_lammps_knows_does_not_tell_the_step(
    tmp_path: Path, name: str
) -> None:
    """The work would never be complete."""
    script = f"thermo_style custom temp\nrun 500 upto\nwrite_restart {name}\n"
    said = probe_lammps(tmp_path, f"restart 100 ck.a ck.b\n{script}")
    assert "begin the columns with step" in (said or "")


@pytest.mark.parametrize("option", ["-var", "-v"])
def test_variables_of_the_command_do_not_outrank_what_lammps_is_told(
    tmp_path: Path, option: str
) -> None:
    """It takes the first of two: with mode start in the command every link would begin anew."""
    require("lmp")
    script = 'variable mode index start\nprint "is ${mode}, ${restart}"\n'
    (tmp_path / "in.x").write_text(f"{script}{READS}restart 9 ck.a ck.b\nrun 9 upto\n")
    (tmp_path / "ck.a").write_text("x")
    text = f"OMP_NUM_THREADS=1 lmp {option} mode start {option} restart none -log l < in.x"
    this, level = work(tmp_path, "bash", "-c", text), Application(SHIPPED["lammps"])
    assert None is level.probe(this)
    assert this.argv == level.first(this).argv
    argv = level.resume(this, tmp_path, {"restart": "ck.a", "files": []}).argv
    assert text.replace("lmp", "lmp -var mode resume -var restart ck.a") == argv[-1]
    said = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True).stdout
    assert "is resume, ck.a" in said


PART = "restart 100 ck.a ck.b\n"
LIMIT = "timer timeout ${timeout} every 100\n"
RESET = 'if "${mode} == start" then "run 500" "reset_timestep 0"\n'
LIMITED = 'if "${mode} == start" then &\n "timer timeout 0:10" &\n "run 5" &\n "reset_timestep 0"\n'


@pytest.mark.parametrize(
    ("script", "refused"),
    [
        (LIMIT + RESET + PART, "timer timeout ${timeout} every 100"),
        ("timer full timeout 1:0\nrun 5\nreset_timestep 0\n" + PART, "timer full timeout 1:0"),
        (LIMITED + PART, '"timer timeout 0:10" &'),
        (PART + RESET, "restart 100 ck.a ck.b"),
        (PART + RESET + "restart 100 pr.a pr.b\n", "restart 100 ck.a ck.b"),
        ("timer timeout off\n" + RESET + PART + LIMIT, None),
        ("restart 0\n# restart 5 a b\n" + RESET + LIMIT + PART, None),
        (LIMIT + PART + "# reset_timestep 0\n", None),
    ],
)
def test_lammps_whose_equilibration_could_be_cut_and_left_out_is_refused(
    tmp_path: Path, script: str, refused: str | None
) -> None:
    """When the time is over LAMMPS passes over every later run, resets the step all the same, and
    a later link begins behind it. So would one that goes on from a restart file of that part."""
    said = probe_lammps(tmp_path, f"{script}run 9000 upto\nwrite_restart ck.last\n")
    if refused is None:
        assert said is None
    else:
        assert said is not None and said.startswith(f"in.x: '{refused}': ")
        assert "two commands with 'then:'" in said


GUARDED = 'if "${mode} == start" then "run 500"\n'
STEPPED = 'if "$(step) < 500" then "run 500 upto"\n'
JUMP = 'if "${mode} == resume" then "jump SELF go_on"\n'
OVER = "run 500\nlabel go_on\n"


@pytest.mark.parametrize(
    ("script", "refused"),
    [
        (LIMIT + GUARDED + PART, LIMIT),
        (PART + GUARDED + LIMIT, PART),
        (PART + GUARDED.replace("500", "500 upto"), PART),
        (PART + GUARDED.replace("500", "${n} upto"), PART),
        (PART + "if '${restart} == none' then 'fix 2 all nvt' &\n 'run 500 upto'\n", PART),
        (PART + 'if "$(step) == 0" then "run 500 upto"\n', PART),
        (PART + STEPPED.replace(" upto", ""), PART),
        (LIMIT + 'if "${mode} == start" then "minimize 0 1e-6 9 9"\n' + PART, LIMIT),
        (PART + JUMP + OVER, PART),
        (JUMP + PART + OVER, JUMP),
        (GUARDED + PART + LIMIT, None),
        (JUMP + OVER + PART + LIMIT, None),
        (PART + LIMIT + STEPPED, None),
        (PART + 'if "$(step) >= 500" then "jump SELF go_on"\nrun 500 upto\nlabel go_on\n', None),
        (PART + "# " + GUARDED, None),
        (PART + GUARDED.replace("500", "0"), None),
        ("timer timeout off\nrestart 0\n" + GUARDED + PART, None),
    ],
)
def test_lammps_whose_guarded_run_could_be_cut_and_left_out_is_refused(
    tmp_path: Path, script: str, refused: str | None
) -> None:
    """A link that goes on leaves it out, finished or not; by its step it does what is left."""
    said = probe_lammps(tmp_path, f"{script}run 9000 upto\nwrite_restart ck.last\n")
    if refused is None:
        assert said is None
    else:
        assert said is not None and said.startswith(f"in.x: '{refused.strip()}': ")
        assert """write 'if "$(step) < N" then "run N upto"', make it a command""" in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("minimize 1e-4 1e-6 100 1000", "every link would do it again"),
        ("velocity all create 3.0 87287", "every link would do it again"),
        ("reset_timestep 0 # now", "every link would do it again"),
        ("run 500 upto", "later links are beyond that step"),
        ('if "${mode} == start" then "velocity all create 3.0 87287"', None),
        ("velocity all zero linear", None),
        ("jump SELF on\nminimize 0 1e-6 9 9\nreset_timestep 0\nlabel on", None),
    ],
)
def test_what_lammps_must_not_do_again_to_what_it_goes_on_from_is_refused(
    tmp_path: Path, line: str, said: str | None
) -> None:
    why = probe_lammps(tmp_path, f"{line}\nrestart 100 ck.a ck.b\nrun 500 upto\n")
    assert why is None if said is None else said in (why or "")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("fix h all halt 100 tlimit > 3500", "taken for complete; use 'timer timeout'"),
        ("fix h all halt 100 diskfree < 1e3 path /tmp error soft", "taken for complete"),
        ('if "1" then "fix h all halt 9 tlimit > 5"', "taken for complete"),
        ("fix h all halt 100 v_t > 2.0 error continue message no", "leave 'message no' out"),
        ("fix h all halt 100 v_t > 2.0 error continue message yes", None),
        ("fix h all halt 100 bondmax > 1.5", None),
    ],
)
def test_a_halt_that_is_no_end_of_the_work_is_refused(
    tmp_path: Path, line: str, said: str | None
) -> None:
    why = probe_lammps(tmp_path, f"restart 100 ck.a ck.b\n{line}\nrun 500 upto\n")
    assert why is None if said is None else said in (why or "")


@pytest.mark.parametrize(
    ("script", "files"),
    [
        ("restart 10000 poly.restart", ["poly.restart.*"]),
        ("restart 10000 poly.restart # each", ["poly.restart.*"]),
        ("restart 100000 arch.rst\nrestart 1000 ck.a ck.b", ["ck.a", "ck.b", "arch.rst.*"]),
        ("restart 500 eq.a eq.b\nrun 0\nrestart 500 ck.a ck.b", ["ck.a", "ck.b"]),
        ("restart v_s x", ["x.*"]),
        ("restart ${n} ck.a ck.b", ["ck.a", "ck.b"]),
        ("restart 9 ${x}.a ${x}.b\nrestart 9 ck.a ck.b", ["ck.a", "ck.b"]),
        ('if "1" then "restart 9 a b"\nrestart 9 ck.a ck.b', ["ck.a", "ck.b"]),
        ("restart 100 ck.*.rst", ["ck.*.rst"]),
        ("restart 100 ck.a ck.b\r", ["ck.a", "ck.b"]),
        ("restart 100 ck.a ck.b\nwrite_restart last\nrestart 0", ["ck.a", "ck.b", "last"]),
    ],
)
def test_every_form_of_lammps_restarts_is_found(
    tmp_path: Path, script: str, files: list[str]
) -> None:
    assert probe_lammps(tmp_path, f"{script}\nrun 500 upto\n") is None
    level = Application(SHIPPED["lammps"])
    level.first(work(tmp_path, "lmp", "-in", "in.x"))
    filled = [level._values.fill(pattern) for pattern in SHIPPED["lammps"].restart.files]
    assert files == [text for text in filled if text is not None]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("restart 100 ck.%", "leave the % out"),
        ("restart 100 ck.a.% ck.b.% nfile 4", "leave the % out"),
        ("restart 100 ck.a &\n  ck.b", "write 'restart N ck.a ck.b' in one line"),
        ("restart $(v_n * 10) ck.a ck.b", "write 'restart N ck.a ck.b' in one line"),
        ('restart 100 "ck.a" "ck.b"', "write 'restart N ck.a ck.b' in one line"),
        ("restart 100 ${name}.a ${name}.b", "in.x: 'restart 100 ${name}.a ${name}.b': its files"),
        ("restart 100 $n.a $n.b # both", "without a variable in the names"),
        ("units lj\nrestart 100 ${name}.*", "in.x: 'restart 100 ${name}.*': its files"),
        ('if "${k} > 0" then "restart 100 ck.a ck.b"', "on a line of its own"),
    ],
)
def test_lammps_restarts_that_would_not_be_found_are_refused(
    tmp_path: Path, line: str, said: str
) -> None:
    """Also if it has another file: all but what that one has would be lost in a kill."""
    why = probe_lammps(tmp_path, f"{line}\nrun 500 upto\nwrite_restart ck.last\n")
    assert said in (why or "")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("minimize 1e-4 1e-6 100 1000\n", "its last run is 'run N upto'"),
        ("minimize 1e-4 1e-6 100 1000\nrun 0\n# run 500 upto\n", "its last run is 'run N upto'"),
        ("run 500 upto\nlog post.log\nrun 0\n", "in.x: 'log post.log': the log of the last run"),
        ("run 0\nlog prod.log\nrun 500 upto\n", None),
        ('log prod.log\nif "1" then "run 500 upto"\n', None),
        ("log prod.log\njump in.more\n", None),
    ],
)
def test_lammps_that_would_never_be_complete_is_refused(
    tmp_path: Path, script: str, said: str | None
) -> None:
    why = probe_lammps(tmp_path, f"restart 100 ck.a ck.b\n{script}")
    assert why is None if said is None else said in (why or "")


def test_the_log_of_a_link_that_was_killed_is_no_script(tmp_path: Path) -> None:
    """It has the beginning of one: a run that is no upto, and no restart file behind it yet."""
    (tmp_path / "in.x").write_text(
        f"{READS}restart 100 ck.a ck.b\nthermo_style custom temp\n"
        'if "$(step) < 100" then "run 100 upto"\nrun 500 upto\nwrite_restart ck.last\n'
    )
    (tmp_path / "x.log").write_text("LAMMPS (29 Sep 2021)\nthermo_style custom temp\nrun 100\n")
    this = work(tmp_path, "lmp", "-in", "in.x", "-log", "x.log")
    assert Application(SHIPPED["lammps"]).probe(this) is None


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("N=1; gmx mdrun -deffnm run$N", "cannot be known: {cpt} is 'run$N.cpt'; write it out"),
        ("gmx mdrun -deffnm `cat name`", "cannot be known: {cpt} is '`cat.cpt'"),
        ("gmx mdrun -deffnm $(cat name)", "cannot be known: {cpt} is '$.cpt'"),
        ("N=1; gmx mdrun -cpo a -s $N -c $N", "the work cannot be told: {final} is '$N.gro'"),
        ("gmx_mpi mdrun -multidir a b", "-multidir: restart files in several directories"),
        ("gmx mdrun -h", "-h: nothing is run"),
        ("lmp -in in.x -partition 2x1", "-partition: several logs"),
        ("lmp -in in.var", "'restart 100 ${name}.a ${name}.b': its files would not be found"),
        ("snakemake -j 1 -n", "-n: nothing is run"),
        ("snakemake -np", "nothing is run"),
        ("snakemake -pn", "nothing is run"),
        ("snakemake -rpn all", "nothing is run"),
        ("snakemake -Fnr all", "nothing is run"),
        ("gmx mdrun -s a.tpr -rerun old.xtc", "-rerun: it goes through a trajectory"),
        ("snakemake --dry-run all", "--dry-run: nothing is run"),
    ],
)
def test_a_command_whose_files_cannot_be_known_is_refused(
    tmp_path: Path, command: str, said: str
) -> None:
    """Nothing would be saved in the first link, and the second would begin anew."""
    for name, restart in (("in.x", "ck.a ck.b"), ("in.var", "${name}.a ${name}.b")):
        (tmp_path / name).write_text(f"{READS}restart 100 {restart}\nrun 500 upto\n")
    choice = choose(work(tmp_path, "bash", "-c", command), recipes=SHIPPED.values())
    assert said in " ".join(why for _, why in choice.rejected)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("snakemake -j 50 --cluster 'sbatch -c 1'", "outlive the link"),
        ("snakemake -j 50 --cluster=sbatch", "outlive the link"),
        ("snakemake -j 50 --cluster-generic-submit-cmd sbatch", "outlive the link"),
        ("snakemake --slurm --default-resources slurm_account=x", "outlive the link"),
        ("snakemake --drmaa", "outlive the link"),
        ("snakemake --executor slurm -j 9", "outlive the link"),
        ("snakemake --executor=lsf -j 9", "outlive the link"),
        ("snakemake -e cluster-generic -j 9", "outlive the link"),
        ("snakemake --profile slurm", "write its other options into the command"),
        ("snakemake --prof slurm", "write its other options into the command"),
        ("snakemake --workflow-profile=p", "write its other options into the command"),
        ("snakemake --workflow-profile none -j 4", None),
        ("bash -c 'SNAKEMAKE_PROFILE=p snakemake -j 4'", "write its other options into the"),
        ("bash -c 'export SNAKEMAKE_PROFILE=p; snakemake -j 4'", "write its other options into"),
        ("nextflow run main.nf -process.executor slurm", "outlive the link"),
        ("nextflow run main.nf -process.executor=lsf", "outlive the link"),
        ("snakemake -j 4 --executor local", None),
        ("snakemake -pr -snew.smk -Cn=1 -j1 final", None),
        ("snakemake -e local --executor=local -c 4 all", None),
        ("snakemake --use-conda --configfile cluster.yaml --cores 4", None),
        ("nextflow run main.nf -process.executor local -profile docker", None),
    ],
)
def test_a_workflow_that_submits_jobs_of_its_own_is_refused(
    tmp_path: Path, command: str, said: str | None
) -> None:
    """Those that still run would be submitted again, and write the same files."""
    this = work(tmp_path, *shlex.split(command))
    why = Application(SHIPPED["snakemake" if "snakemake" in command else "nextflow"]).probe(this)
    assert why is None if said is None else said in (why or "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("executor: slurm\n", "executor: slurm"),
        ("cores: 4\ncluster-generic-submit-cmd: sbatch\n", "cluster-generic-submit-cmd"),
        ("executor: local\ncores: 4\n", None),
        ("cores: 4\nset-threads: {cluster: 3}\n", None),
    ],
)
@pytest.mark.parametrize("place", ["profiles/default", "workflow/profiles/default"])
def test_a_profile_that_snakemake_reads_unasked_counts_too(
    tmp_path: Path, place: str, text: str, said: str | None
) -> None:
    """From its release 8 on. And one that the environment names."""
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "config.v8+.yaml").write_text(text)
    level, this = Application(SHIPPED["snakemake"]), work(tmp_path, "snakemake", "-j4")
    why = level.probe(this)
    assert why is None if said is None else said in (why or "")
    named = replace(this, environ={**this.environ, "SNAKEMAKE_PROFILE": "site"})
    assert "SNAKEMAKE_PROFILE: a profile" in (level.probe(named) or "")
    for word in ("--workflow-profile=none", "--executor=local"):
        assert None is level.probe(work(tmp_path, "snakemake", "-j4", word))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("process.executor = 'slurm'\n", "process.executor = 'slurm'"),
        ('process {\n    cpus = 2\n    executor = "slurm"\n}\n', 'executor = "slurm"'),
        ("process.executor = 'pbs'\nprofiles {\n  a { cpus = 1 }\n}\n", "executor = 'pbs'"),
        ("profiles {\n  site { process.executor = 'pbs' }\n}\n", "executor = 'pbs'"),
        ("profiles {\n  a { cpus = 1 }\n}\nprocess.executor = 'pbs'\n", "executor = 'pbs'"),
        ("profiles {\n  site {\n    // executor = 'pbs'\n  }\n}\n", None),
        ("/* none\n yet */\nprocess {\n  // as lsf\n  executor = 'lsf'\n}\n", "executor = 'lsf'"),
        ("process.executor = 'lsf'\n/* none\n yet */\n", "executor = 'lsf'"),
        ("process.executor = 'lsf'\nparams.reads = '*/*.fq'\n", "executor = 'lsf'"),
        ("process {\n    cpus = 2\n    // executor = 'slurm'\n}\n", None),
        ("process.cpus = 2 // or executor = 'slurm'\n", None),
        ("process { /* executor = 'slurm' */ }\n", None),
        ("/*\nprocess.executor = 'slurm'\n*/\n", None),
        ("executor {\n  // name = 'lsf'\n  queueSize = 5\n}\n", None),
        ("executor {\n  // by\n  name = 'lsf'\n}\n", "name = 'lsf'"),
        ("process { executor='sge' }\n", "executor='sge'"),
        ("process.executor = params.where\n", "params.where"),
        ("executor {\n  queueSize = 5\n  name = 'lsf'\n}\n", "name = 'lsf'"),
        ("executor.name = 'lsf'\n", "name = 'lsf'"),
        ("executor.name = 'local'\n", None),
        ("process.executor = 'local'\n", None),
        ("// executor = 'slurm'\nprocess { executor = \"local\" }\n", None),
        ("executor {\n    queueSize = 5\n}\nexecutor.queueSize = 4\n", None),
        ("params.my_executor = 'slurm'\n", None),
    ],
)
def test_the_executor_that_nextflow_reads_unasked_counts_too(
    tmp_path: Path, text: str, said: str | None
) -> None:
    (tmp_path / "nextflow.config").write_text(text)
    level = Application(SHIPPED["nextflow"])
    why = level.probe(work(tmp_path, "nextflow", "run", "main.nf"))
    assert why is None if said is None else said in (why or "")
    assert said is None or "with -process.executor local in the command" in (why or "")
    local = work(tmp_path, "nextflow", "run", "main.nf", "-process.executor=local")
    assert None is level.probe(local)


def test_what_the_configuration_of_a_workflow_says_is_its_own_affair(tmp_path: Path) -> None:
    """Keys of the user's, and no options of Snakemake."""
    (tmp_path / "config.yaml").write_text("cluster: leiden\nslurm: no\nclusters: 8\n")
    this = work(tmp_path, "snakemake", "-j4", "--configfile", "config.yaml")
    assert None is Application(SHIPPED["snakemake"]).probe(this)


def test_a_pipe_that_a_command_names_is_not_waited_for(tmp_path: Path) -> None:
    """Nor one that a value would be read from. In a process of its own, which can be ended."""
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "INCAR")
    code = (
        "from pathlib import Path\n"
        "from hpc_ckpt.levels.base import Work\n"
        "from hpc_ckpt.levels.choose import choose\n"
        "from hpc_ckpt.levels.recipe import load_recipes, matching, recipe_of\n"
        "from hpc_ckpt.levels.application import Application\n"
        "here = Path('.').resolve()\n"
        "found = load_recipes(Path('/nowhere'), {})\n"
        "work = Work(argv=('python', 'pipe', 'own.py'), cwd=here, environ={})\n"
        "assert [] == [one.name for one in found if one.knows(work)]\n"
        "own = {'name': 'own', 'recognise': {'programs': ['python']}, 'restart': '{x}',\n"
        "       'values': {'x': {'file': 'INCAR', 'regex': 'x'}}, 'complete': {'exit_code': 0}}\n"
        "print(Application(recipe_of(own, found, here)).probe(work))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=20
    )
    assert 0 == done.returncode, done.stderr
    assert "{x}" in done.stdout


@pytest.mark.parametrize("command", ["lmp -in in.x -log log.$SLURM_JOB_ID", "gmx mdrun -deffnm $N"])
def test_what_only_the_job_knows_is_left_to_the_node(tmp_path: Path, command: str) -> None:
    """At submission its variables, and those of modules, are not there."""
    (tmp_path / "in.x").write_text(f"{READS}restart 100 ck.a ck.b\nrun 500 upto\n")
    this = work(tmp_path, "bash", "-c", command)
    recipe = SHIPPED["lammps" if command.startswith("lmp") else "gromacs"]
    assert recipe.name == choose(this, recipes=[recipe]).chosen
    there = replace(this, environ={"HPC_CKPT_DEADLINE": "/run/control/deadline-1"})
    assert recipe.name != choose(there, recipes=[recipe]).chosen


@pytest.mark.parametrize(
    "command",
    ["gmx mdrun -deffnm run$N", "gmx mdrun -nt $CORES", "gmx mdrun -deffnm a -c $OTHER"],
)
def test_a_variable_that_is_known_or_names_no_needed_file_does_no_harm(
    tmp_path: Path, command: str
) -> None:
    this = replace(work(tmp_path, "bash", "-c", command), environ={"N": "7"})
    assert "gromacs" == choose(this, recipes=SHIPPED.values()).chosen


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("-cpnum", "-cpnum: "),
        ("-noconfout", "-noconfout: "),
        ("-nsteps -1", "write the number of steps"),
        ("-nsteps $STEPS", "write the number of steps"),
        ("-cpi old.cpt -nt 1 -nsteps 500", "counts from that file"),
        ("-nsteps 500", None),
        ("-cpi old.cpt -noappend -nocpnum -confout", None),
    ],
)
def test_options_of_mdrun_that_no_link_could_go_on_with_are_refused(
    tmp_path: Path, options: str, said: str | None
) -> None:
    this = work(tmp_path, "bash", "-c", f"gmx mdrun -deffnm prod {options}")
    why = Application(SHIPPED["gromacs"]).probe(this)
    assert why is None if said is None else said in (why or "")


@pytest.mark.parametrize(
    ("words", "final"),
    [
        ("-deffnm prod", "prod.gro"),
        ("-c out", "out.gro"),
        ("-c out.gro", "out.gro"),
        ("-c out.pdb", "out.pdb"),
        ("-c out.g96", "out.g96"),
        ("-c x.v2", "x.v2.gro"),
    ],
)
def test_the_final_structure_of_mdrun_has_the_name_that_mdrun_gives_it(
    tmp_path: Path, words: str, final: str
) -> None:
    level = Application(SHIPPED["gromacs"])
    level.first(work(tmp_path, "gmx", "mdrun", *words.split()))
    assert final == level._values.get("final")


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("read_data a\n", False),
        ("read_restart equil.rst\n", False),
        ("read_data a\n# read_restart ${restart}\n", False),
        ("read_data a\nwrite_restart ${restart}\n", False),
        (READS, True),
        ("jump SELF ${mode}\nlabel resume\n  read_restart  ${dir}/${restart} # here\n", True),
    ],
)
def test_a_script_of_lammps_has_to_read_the_file_it_is_given(
    tmp_path: Path, text: str, taken: bool
) -> None:
    """One that does not would begin at 0 in every link."""
    (tmp_path / "in.x").write_text(f"{text}restart 100 ck.a ck.b\nrun 500 upto\n")
    for command in ("lmp -in in.x", "mpirun lmp -log l < in.x"):
        this = work(tmp_path, "bash", "-c", command)
        choice = choose(this, recipes=SHIPPED.values())
        if taken:
            assert "lammps" == choice.chosen
            continue
        assert "lammps" not in [entry["name"] for entry in choice.entries]
        said = dict(choice.rejected)["lammps"]
        assert "every link would begin anew" in said and "read_restart ${restart}" in said
        with pytest.raises(SpecError, match="every link would begin anew"):
            choose(this, recipes=SHIPPED.values(), recipe="lammps")


@pytest.mark.parametrize(
    ("command", "script", "own"),
    [
        ("./a /scratch/hpc_ckpt_runs/sim", "", False),
        ("./a --out=/scratch/hpc_ckpt/sim hpc_ckpt", "", False),
        ("bash -c 'cd /scratch/hpc_ckpt && ./a HPC_CKPT_runs'", "", False),
        ("python -m hpc_ckpt_like.train", "", False),
        ("python s.py", "OUT = '/scratch/hpc_ckpt/runs'\n# import hpc_ckpt\n", False),
        ("python s.py", "import hpc_ckpt_like\n", False),
        ("python s.py", "from hpc_ckpt import Checkpointer\n", True),
        ("python s.py", "try:\n    import torch, hpc_ckpt as h\n", True),
        ("bash -c 'cd . && python s.py'", "import hpc_ckpt.integrations\n", True),
        ("python -m s", "x = 1; from hpc_ckpt.integrations import lightning\n", True),
        ("python s.py", "ckpt = import_module('hpc_ckpt')\n", True),
        ("python -c 'import sys; import hpc_ckpt'", "", True),
        ("python -u -m hpc_ckpt.examples", "", True),
        ("bash -c 'srun python -m hpc_ckpt.examples'", "", True),
        ("bash -c './a; test -e $HPC_CKPT_NOTICE && exit 75'", "", True),
        ("bash -c '[ $HPC_CKPT_GENERATION = 2 ] || ./a'", "", True),
        ("bash -c './a --until \"$HPC_CKPT_NOTICE\"'", "", True),
    ],
)
def test_only_what_uses_the_package_is_left_to_itself(
    tmp_path: Path, command: str, script: str, own: bool
) -> None:
    """Taken for one that saves for itself, a program would never be saved."""
    (tmp_path / "s.py").write_text(script)
    this = work(tmp_path, *shlex.split(command))
    assert own is (choose(this, recipes=SHIPPED.values()).chosen == "model")


def test_a_recipe_that_was_not_asked_for_has_others_behind_it(tmp_path: Path) -> None:
    this = work(tmp_path, "gmx", "mdrun")
    names = [entry["name"] for entry in choose(this, recipes=SHIPPED.values()).entries]
    assert ("gromacs", "plain") == (names[0], names[-1])
    for asked in ({"wanted": "application"}, {"recipe": "gromacs"}):
        assert 1 == len(choose(this, recipes=SHIPPED.values(), **asked).entries)  # type: ignore[arg-type]


def test_the_node_needs_no_yaml_and_no_pydantic(tmp_path: Path) -> None:
    record = json.dumps(SHIPPED["gromacs"].to_json())
    code = (
        "import json, sys\n"
        "sys.modules.update(dict.fromkeys(['yaml', 'pydantic', 'jinja2', 'rich', 'typer']))\n"
        "import hpc_ckpt.levels.steward\n"
        "from hpc_ckpt.levels.choose import levels_of\n"
        "entry = {'kind': 'application', 'name': 'gromacs', 'recipe': json.loads(sys.argv[1])}\n"
        "print(levels_of([entry])[0].name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, record], capture_output=True, text=True)
    assert (0, "gromacs\n") == (done.returncode, done.stdout), done.stderr


def cli(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpc_ckpt.cli", "recipes", *words]
    return subprocess.run(command, cwd=place, capture_output=True, text=True)


def test_a_mistake_in_a_spec_is_said_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("command: ./old\nrecipe: {like: generic, sav: {}}\n")
    command = [sys.executable, "-m", "hpc_ckpt.cli", "run", "s.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    said = "hpc-ckpt: s.yaml:2: recipe: unknown key 'sav'. Did you mean 'save'?\n"
    assert (2, said) == (done.returncode, done.stderr)
    assert not (tmp_path / "runs").exists()


def test_the_verb_lists_and_shows(tmp_path: Path) -> None:
    listed = cli(tmp_path).stdout
    assert all(re.search(rf"^{name} ", listed, re.MULTILINE) for name in NAMES)
    assert len(NAMES - TRIED) == listed.count(NOT_RUN)
    shown = cli(tmp_path, "vasp").stdout
    assert "not run here" in shown
    assert SHIPPED["vasp"].source == yaml.load(shown, yaml.BaseLoader)
    records = json.loads(cli(tmp_path, "--json").stdout)
    assert {r["name"]: r["was_tried"] for r in records}["gromacs"] is True
    wrong = cli(tmp_path, "vsap")
    assert (2, "") == (wrong.returncode, wrong.stdout)


def test_the_reference_has_a_row_for_each() -> None:
    text = (PROJECT / "docs" / "reference" / "recipes.md").read_text()
    for name, recipe in SHIPPED.items():
        row = re.search(rf"^\| `{name}` \|.*$", text, re.MULTILINE)
        assert row is not None, name
        assert recipe.tried in row[0]
