"""Any command and any root arrive as they were written, through bash and through #SBATCH."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hpc_ckpt import resources
from hpc_ckpt.chain.activation import Activation, Kind
from hpc_ckpt.chain.directives import Directive
from hpc_ckpt.chain.plan import plan_chain
from hpc_ckpt.chain.profile import Profile
from hpc_ckpt.chain.record import chain_record
from hpc_ckpt.chain.render import render, sbatch_line
from hpc_ckpt.chain.spec import Spec

CWD = Path("/work")
NASTY = "$(touch x) `id` $HOME \"'\\ {{ 1 }} {% raw %} #!;&|<>*?~ ü 日本 \t"
text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
bytes_as_text = st.binary(max_size=20).map(lambda b: os.fsdecode(b.replace(b"\0", b"")))
words = st.one_of(text, bytes_as_text)
places = words.map(lambda word: word.translate({10: "_", 13: "_", 92: "_"}))
quick = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def profile(**keys: object) -> Profile:
    return Profile.model_validate({"cluster": "lab", **keys})


@pytest.fixture
def stub(tmp_path: Path) -> str:
    """An interpreter that says what it was given, in a directory with a difficult name."""
    path = tmp_path / "it's $HOME `x`" / "python"
    path.parent.mkdir()
    path.write_text("#!/bin/bash\nfor word; do printf '%s\\0' \"$word\"; done\n")
    path.chmod(0o755)
    return str(path)


def said(output: bytes) -> list[str]:
    return [os.fsdecode(word) for word in output.split(b"\0")[:-1]]


@quick
@example(place=NASTY.replace("\\", ""))
@example(place="-n")
@given(place=places)
def test_any_root_reaches_the_runner(stub: str, place: str) -> None:
    """The whole script is run by bash: nothing in a directive or a name is executed."""
    spec = Spec.model_validate({"command": "x", "root": f"/r/{place}"})
    prefix = Activation(Kind.PREFIX, f"/envs/{place}")
    plan = plan_chain(spec, profile(), cwd=CWD / place, activations=[prefix])
    script = os.fsencode(render(plan, python=stub))
    done = subprocess.run(["bash"], input=script, capture_output=True, env={"PATH": "/bin"})
    runner = ["-I", "-m", "hpc_ckpt.chain.link", "--root", str(plan.root)]
    expected = [*runner, "--backend", "slurm", "--strategy", "array", "--set-up"]
    assert (0, expected) == (done.returncode, said(done.stdout))


@quick
@example(argv=[NASTY, "", "-x", "a\nb"])
@given(argv=st.lists(words, max_size=4))
def test_any_argv_reaches_the_program(stub: str, argv: list[str]) -> None:
    """Through chain.json and the shim."""
    spec = Spec.model_validate({"command": [stub, *argv], "root": "/r"})
    plan = plan_chain(spec, profile(), cwd=CWD)
    record = json.loads(json.dumps(chain_record(spec, profile(), plan, chain="x", created=0.0)))
    shim = str(resources.find("templates/shim.sh"))
    done = subprocess.run(["bash", shim, *record["argv"]], capture_output=True)
    assert (0, argv) == (done.returncode, said(done.stdout))


@quick
@example(command=NASTY)
@given(command=words.filter(str.strip))
def test_any_command_line_reaches_bash(command: str) -> None:
    """Unchanged: bash alone gives it a meaning."""
    spec = Spec.model_validate({"command": command, "root": "/r"})
    plan = plan_chain(spec, profile(), cwd=CWD)
    record = json.loads(json.dumps(chain_record(spec, profile(), plan, chain="x", created=0.0)))
    assert (["bash", "-o", "pipefail", "-c", command], command) == (
        record["argv"],
        record["command"],
    )


@settings(deadline=None)
@example(value=NASTY)
@given(value=text.map(lambda word: word.translate({10: "_", 13: "_"})))
def test_slurm_reads_back_what_a_directive_says(value: str) -> None:
    """By the rules of Slurm's own reader of #SBATCH lines, written out below."""
    assert f"--output={value}" == slurm_argument(sbatch_line(Directive("--output", value)))


def slurm_argument(line: str) -> str:
    """src/common/slurm_opt.c: quotes of both kinds, backslash everywhere, # begins a comment."""
    argument, quote, escaped = "", "", False
    for character in line:
        if escaped:
            argument, escaped = argument + character, False
        elif character == "\\":
            escaped = True
        elif quote:
            argument, quote = (
                (argument, "") if character == quote else (argument + character, quote)
            )
        elif character in "\"'":
            quote = character
        elif character == "#" or character.isspace():
            break
        else:
            argument += character
    return argument
