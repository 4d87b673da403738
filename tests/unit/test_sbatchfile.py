"""Batch scripts read as sbatch reads them: its words, its options, and where it stops."""

import pytest

from hpc_ckpt.chain.sbatchfile import Given, read_script
from hpc_ckpt.errors import SpecError


def options(*lines: str) -> dict[str, str | None]:
    script = read_script("\n".join(["#!/bin/bash", *lines, ""]), "job.sbatch")
    return {given.name: given.value for given in script.options}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("#SBATCH --time=10:00", {"time": "10:00"}),
        ("#SBATCH --time 10:00", {"time": "10:00"}),
        ("#SBATCH\t-t\t10:00", {"time": "10:00"}),
        ("#SBATCH -t10:00", {"time": "10:00"}),
        ("#SBATCH -p gpu,lowpriority", {"partition": "gpu,lowpriority"}),
        ("#SBATCH -N 1 -n4 -c 8", {"nodes": "1", "ntasks": "4", "cpus-per-task": "8"}),
        ("#SBATCH -J 'two words'", {"job-name": "two words"}),
        ('#SBATCH --comment="a # b"', {"comment": "a # b"}),
        ('#SBATCH --comment="say \\"hi\\""', {"comment": 'say "hi"'}),
        ("#SBATCH --comment=a\\ b", {"comment": "a b"}),
        ("#SBATCH --comment=it\\'s", {"comment": "it's"}),
        ("#SBATCH --array=1-10%1  # ten, one at a time", {"array": "1-10%1"}),
        ("#SBATCH --array=1-10%1#ten", {"array": "1-10%1"}),
        ("#SBATCH --exclusive", {"exclusive": None}),
        ("#SBATCH --exclusive=user --hold", {"exclusive": "user", "hold": None}),
        ("#SBATCH -Hv", {"hold": None, "verbose": None}),
        ("#SBATCH -k", {"no-kill": None}),
        ("#SBATCH --job=x", {"job-name": "x"}),
        ("#SBATCH --workdir=/data", {"chdir": "/data"}),
        ("#SBATCH --tasks-per-node=4", {"ntasks-per-node": "4"}),
        ("#SBATCH --from-the-future=3 --another", {"from-the-future": "3", "another": None}),
        ("#SBATCH --from-the-future 3", {"from-the-future": "3"}),
        ("#SLURM --qos=high", {"qos": "high"}),
        ("#SBATCH--qos=high", {"qos": "high"}),
        ("#SBATCH", {}),
        ("#SBATCH # nothing", {}),
    ],
)
def test_words_and_options(line: str, expected: dict[str, str | None]) -> None:
    """Short and long forms, quotes, comments, abbreviations."""
    assert expected == options(line)


def test_only_what_stands_before_the_first_command_counts() -> None:
    """Comments and empty lines do not end it; `##SBATCH` and ` #SBATCH` are comments."""
    text = (
        "#!/bin/bash\n"
        "# a comment\n"
        "##SBATCH --qos=no\n"
        " #SBATCH --qos=no\n"
        "\n"
        "#SBATCH --qos=yes\n"
        "echo first\n"
        "#SBATCH --account=late\n"
    )
    script = read_script(text, "job.sbatch")
    assert (Given("qos", "yes", 6),) == script.options
    kept = [(line.number, line.text) for line in script.body]
    assert (2, "# a comment") in kept
    assert (8, "#SBATCH --account=late") in kept
    assert all(number != 6 for number, _ in kept)


def test_a_value_may_stand_in_the_next_line() -> None:
    """sbatch makes one row of words of all lines."""
    assert {"time": "5"} == options("#SBATCH --time", "#SBATCH 5")


def test_lines_are_counted_from_the_top_of_the_file() -> None:
    """So that a person finds them."""
    script = read_script("#!/bin/bash\n\n#SBATCH -p a\n#SBATCH -t 1\n", "job.sbatch")
    assert [3, 4] == [given.line for given in script.options]


@pytest.mark.parametrize(
    ("shebang", "shell"),
    [
        ("#!/bin/bash", ("bash",)),
        ("#!/bin/bash -l", ("bash", "-l")),
        ("#! /bin/sh", ("sh",)),
        ("#!/usr/bin/env bash", ("bash",)),
        ("#!/usr/bin/env -S bash -eu", ("bash", "-eu")),
        ("#!/usr/bin/zsh", ("zsh",)),
    ],
)
def test_the_shell_of_the_first_line(shebang: str, shell: tuple[str, ...]) -> None:
    """By name: the path is the node's business."""
    assert shell == read_script(f"{shebang}\ntrue\n", "job.sbatch").shell


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "job.sbatch:1: not a batch script"),
        ("echo\n", "job.sbatch:1: not a batch script"),
        ("#!/usr/bin/python3\n", "job.sbatch:1: .* is not a shell's script"),
        ("#!/bin/csh\n", "is not a shell's script"),
        ("#!/bin/bash\r\n", "line ends of Windows"),
        ("#!/bin/bash\n\0", "NUL"),
        ("#!/bin/bash\n#SBATCH gpu\n", "job.sbatch:2: 'gpu' is not an option"),
        ("#!/bin/bash\n#SBATCH --comment='x\n", "job.sbatch:2: no closing '"),
        ("#!/bin/bash\n#SBATCH : -n 1\n", "job.sbatch:2: unexpected ':'"),
        ("#!/bin/bash\n#SBATCH hetjob\n", "job.sbatch:2: heterogeneous"),
        ("#!/bin/bash\n#SBATCH --gpus-per=1\n", "--gpus-per could be --gpus-per-node"),
        ("#!/bin/bash\n#SBATCH -Z\n", "sbatch has no option -Z"),
        ("#!/bin/bash\n#SBATCH --hold=1\n", "--hold takes no value"),
        ("#!/bin/bash\n#SBATCH --time\n", "--time needs a value"),
    ],
)
def test_what_sbatch_refuses_is_refused(text: str, message: str) -> None:
    """With the line."""
    with pytest.raises(SpecError, match=message):
        read_script(text, "job.sbatch")
