"""Where a command calls a program, and how its words are changed."""

import shlex
import subprocess

import pytest

from hpc_ckpt.levels.invocation import Invocation, find, is_repeated

GMX = (["gmx*"], ["mdrun"])


def found(*argv: str, environ: dict[str, str] | None = None) -> Invocation:
    call = find(argv, *GMX, environ or {})
    assert call is not None
    return call


@pytest.mark.parametrize(
    "argv",
    [
        ("gmx", "mdrun", "-deffnm", "prod"),
        ("/opt/bin/gmx_mpi", "mdrun", "-deffnm", "prod"),
        ("mpirun", "-np", "4", "gmx_mpi", "mdrun", "-deffnm", "prod"),
        ("bash", "-c", "gmx mdrun -deffnm prod"),
        ("bash", "-o", "pipefail", "-c", "cd x && gmx mdrun -deffnm 'prod' > out 2>&1 | tee log"),
        ("bash", "-lc", "module load gmx; gmx grompp -o a.tpr\nOMP=1 gmx mdrun \\\n -deffnm prod"),
        ("bash", "-c", "gmx mdrun -deffnm $NAME # a comment"),
        ("bash", "-c", 'gmx mdrun -deffnm "${NAME}"'),
        ("gmx", "mdrun", "-deffnm", "prod", "-c", "out.gro"),
        ("srun", "-c", "4", "gmx_mpi", "mdrun", "-deffnm", "prod", "-c", "out.gro"),
        ("bash", "run.sh", "-c", "4", "gmx", "mdrun", "-deffnm", "prod"),
        ("srun", "-c", "4", "/bin/bash", "-e", "-o", "pipefail", "-c", "gmx mdrun -deffnm prod"),
    ],
)
def test_a_call_is_found_and_stays_as_it_was(argv: tuple[str, ...]) -> None:
    call = found(*argv, environ={"NAME": "prod"})
    assert "prod" == call.option(["-deffnm"])
    assert argv == call.argv()


@pytest.mark.parametrize(
    "argv",
    [
        ("gmx", "grompp"),
        ("bash", "-c", "echo gmx; echo mdrun"),
        ("bash", "-c", "gmx grompp && echo mdrun"),
        ("bash", "-c", "gmx mdrun 'a quote too few"),
        ("python", "mdrun.py"),
    ],
)
def test_what_is_no_such_call(argv: tuple[str, ...]) -> None:
    assert None is find(argv, *GMX, {})


def test_an_option_is_replaced_where_it_stands_or_added_to_this_call_alone() -> None:
    call = found("bash", "-c", "gmx mdrun -cpi old.cpt -nt 1 > out; echo done")
    text = call.with_option(["-cpi", "a b.cpt"]).with_option(["-maxh", "1.5"]).argv()[-1]
    assert "gmx mdrun -cpi 'a b.cpt' -nt 1 > out -maxh 1.5; echo done" == text
    assert ("gmx", "mdrun", "-cpi", "x y") == found("gmx", "mdrun").with_option(
        ["-cpi", "x y"]
    ).argv()


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("gmx mdrun -cpi -deffnm prod", "gmx mdrun -cpi new.cpt -deffnm prod"),
        ("gmx mdrun -deffnm prod -cpi", "gmx mdrun -deffnm prod -cpi new.cpt"),
        ("gmx mdrun -deffnm prod -cpi > out.log", "gmx mdrun -deffnm prod -cpi new.cpt > out.log"),
        ("gmx mdrun -deffnm prod -cpi 2>&1|cat", "gmx mdrun -deffnm prod -cpi new.cpt 2>&1|cat"),
        ("gmx mdrun -deffnm prod -cpi &> o", "gmx mdrun -deffnm prod -cpi new.cpt &> o"),
        ("gmx mdrun -deffnm prod -cpi && echo y", "gmx mdrun -deffnm prod -cpi new.cpt && echo y"),
        ("gmx mdrun -cpi '>odd' -deffnm prod", "gmx mdrun -cpi new.cpt -deffnm prod"),
    ],
)  # fmt: skip
def test_an_option_that_may_stand_alone_takes_no_other_word_for_its_value(
    text: str, changed: str
) -> None:
    """The next option, or a redirection, would be lost."""
    call = found("bash", "-c", text)
    assert changed == call.with_option(["-cpi", "new.cpt"]).argv()[-1]
    assert "prod" == call.option(["-deffnm"])


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("snakemake -j 1 -- all", "snakemake -j 1 --nolock -d new -- all"),
        ("snakemake -d old -- -d all > o", "snakemake -d new --nolock -- -d all > o"),
        ("snakemake -d -- all", "snakemake -d new --nolock -- all"),
        ("snakemake -j 1 all", "snakemake -j 1 all --nolock -d new"),
        ("srun -- snakemake all", "srun -- snakemake all --nolock -d new"),
    ],
)
def test_options_stand_before_the_end_of_options(text: str, changed: str) -> None:
    """Behind it they would be files that nobody can make."""
    call = find(("bash", "-c", text), ["snakemake"], [], {})
    assert call is not None
    assert changed == call.with_words(["--nolock"]).with_option(["-d", "new"]).argv()[-1]


def test_a_value_may_be_a_negative_number_and_one_that_is_missing_is_none() -> None:
    call = found("gmx", "mdrun", "-nsteps", "-1", "-cpi", "-s", "a.tpr", "-cpo")
    assert ("-1", None, "a.tpr", None) == tuple(
        call.option([name]) for name in ("-nsteps", "-cpi", "-s", "-cpo")
    )


def test_the_changed_text_is_what_a_shell_runs() -> None:
    call = find(("bash", "-c", "printf '<%s>' a 'b c' | cat"), ["printf"], [], {})
    assert call is not None
    argv = call.with_words(["$HOME", "it's"]).with_swapped("a", "A;").argv()
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert "<A;><b c><$HOME><it's>" == done.stdout


def test_options_of_two_words_redirections_and_equal_signs() -> None:
    call = find(("bash", "-c", "lmp -var n 5 -var m 6 --log=x.log < in.lj"), ["lmp"], [], {})
    assert call is not None
    assert "6" == call.option(["-var m"])
    assert "in.lj" == call.option(["-in", "<"])
    assert "x.log" == call.option(["--log"])
    assert "in" == call.word(r"(.+)\.lj")


@pytest.mark.parametrize("before", ["module load lammps/2021", "which lmp", "echo lmp -in a"])
def test_a_program_that_is_only_named_is_not_called(before: str) -> None:
    argv = ("bash", "-c", f"{before} && lmp -in in.lj")
    call = find(argv, ["lmp", "lammps", "2021"], [], {})
    assert call is not None
    assert "in.lj" == call.option(["-in"])
    assert not is_repeated(argv, ["lmp", "lammps", "2021"], [], {})


def test_without_programs_the_first_call_is_meant() -> None:
    call = find(("bash", "-c", "A=1 ./old 5 && rm x"), [], [], {})
    assert call is not None
    assert ["./old", "5"] == shlex.split(" ".join(word.text for word in call.words))
