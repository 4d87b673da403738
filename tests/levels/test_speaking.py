"""Programs that save for themselves: recognised behind scripts, and if not, heard of later."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import dmtcp_stand_in
import pytest
from chains_of_programs import LocalChain

from hpc_ckpt.levels import speaking
from hpc_ckpt.levels.base import Work
from hpc_ckpt.levels.choose import choose
from hpc_ckpt.levels.speaking import speaks_for_itself

TRAIN = "from hpc_ckpt import Checkpointer\n"


def spoken(place: Path, command: str) -> str | None:
    found = speaks_for_itself(Work(argv=tuple(shlex.split(command)), cwd=place, environ={}))
    return None if found is None else found.why


def write(place: Path, **files: str) -> None:
    for name, text in files.items():
        path = place / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("bash run.sh", "module load x\npython train.py --lr 0.1\n"),
        ("./run.sh", '#!/bin/bash\nset -e\npython "$(dirname "$0")/train.py" "$@"\n'),
        ("bash -c './run.sh 3'", "srun python train.py\n"),
        ("srun bash run.sh", "if true; then\n  torchrun --nproc 1 ./train.py; fi\n"),
        ("./run.sh", "cd src && python deep.py\n"),
        ("./run.sh", "HERE=$(pwd)\npython ${HERE}/train.py\n"),
        ("./run.sh", "source env.sh\npython -m src.deep\n"),
        ("./run.sh", "echo it's a quote too few\npython train.py\n"),
        ("./run.sh", "./second.sh\n"),
        ("./run", "#!/usr/bin/env bash\nexec python train.py\n"),
        ("bash run", "exec python train.py\n"),
        ("make train", ""),
        ("make -C . DEBUG=1", ""),
        ("bash -c 'make -j 2 train'", ""),
    ],
)
def test_a_checkpointer_behind_scripts_is_seen(tmp_path: Path, command: str, script: str) -> None:
    write(
        tmp_path,
        train_py=TRAIN,
        src__deep_py=TRAIN,
        run_sh=script,
        run=script,
        second_sh="python train.py\n",
        Makefile="PY ?= python\nSCRIPT = train.py\n\nall: data train  # first\ndata:\n\ttouch d\n"
        "train: data\n\t@$(PY) $(SCRIPT)\n",
    )
    assert spoken(tmp_path, command) is not None


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("bash run.sh", "python other.py\n"),
        ("bash run.sh", "# python train.py\npython other.py\n"),
        ("bash run.sh", "cp train.py backup/; echo train.py\npython other.py\n"),
        ("bash run.sh", "./run.sh\n"),
        ("bash run.sh", "./a.sh\n"),  # a.sh → b.sh → c.sh → train.py: too deep
        ("make data", ""),
        ("make nothing", ""),
        ("make for-ever", ""),
        ("./missing.sh", ""),
    ],
)
def test_what_only_lies_there_is_not(tmp_path: Path, command: str, script: str) -> None:
    """Taken for one that saves for itself, a program would never be saved."""
    write(
        tmp_path,
        train_py=TRAIN,
        other_py="print(1)\n",
        run_sh=script,
        a_sh="./b.sh\n",
        b_sh="./c.sh\n",
        c_sh="python train.py\n",
        Makefile="data:\n\tpython other.py\ntrain: data\n\tpython train.py\n"
        "for-ever:\n\tmake for-ever\n",
    )
    assert spoken(tmp_path, command) is None


def test_how_the_command_comes_to_it_is_said(tmp_path: Path) -> None:
    write(tmp_path, run_sh="python train.py\n", train_py=TRAIN)
    assert "train.py uses hpc_ckpt (by way of run.sh)" == spoken(tmp_path, "bash run.sh")


@pytest.mark.parametrize(
    ("command", "script", "expected"),
    [
        ("bash run.sh", "./simulate || exit 75\n", False),
        ("bash run.sh", 'while [ ! -s "$HPC_CKPT_NOTICE" ]; do ./simulate; done\n', False),
        ("bash run.sh", "python train.py; [ $? != 75 ] || exit 75\n", True),
        ("bash -c 'python train.py; [ $? != 75 ] || exit 75'", "", True),
        ("bash -c './simulate || exit 75'", "", False),
        ("bash run.sh", 'cd "$HPC_CKPT_ROOT/work" && gmx mdrun\n', None),
        ("""bash -c 'cd "$HPC_CKPT_ROOT" && gmx mdrun'""", "", None),
    ],
)
def test_only_what_a_checkpointer_keeps_is_fenced(
    tmp_path: Path, command: str, script: str, expected: bool | None
) -> None:
    """A script that answers the notice writes files of its own: two of them would both write."""
    write(tmp_path, run_sh=script, train_py=TRAIN)
    found = speaks_for_itself(Work(argv=tuple(shlex.split(command)), cwd=tmp_path, environ={}))
    assert expected == (None if found is None else found.by_checkpointer)
    chosen = choose(Work(argv=tuple(shlex.split(command)), cwd=tmp_path, environ={}))
    assert bool(expected) == chosen.fenced
    forced = choose(Work(argv=tuple(shlex.split(command)), cwd=tmp_path, environ={}), "model")
    assert (expected is not False) == forced.fenced


def test_not_more_than_some_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, run_sh="python other.py; python train.py\n", train_py=TRAIN, other_py="")
    monkeypatch.setattr(speaking, "MOST_FILES", 2)
    assert spoken(tmp_path, "bash run.sh") is None
    monkeypatch.setattr(speaking, "MOST_FILES", 3)
    assert spoken(tmp_path, "bash run.sh") is not None


HIDDEN = """
import time
from hpc_ckpt import Checkpointer
state = {"n": 0}
with Checkpointer(state=state) as ckpt:
    for _ in ckpt.steps(60):
        state["n"] += 1
        time.sleep(0.1)
        ckpt.step()
open("result", "w").write(str(state["n"]))
"""


def hidden(tmp_path: Path) -> LocalChain:
    (tmp_path / "go").write_text("import inner\n")
    (tmp_path / "inner.py").write_text(HIDDEN)
    return LocalChain(tmp_path, dmtcp_stand_in.install(tmp_path / "bin"))


def test_a_checkpointer_that_nothing_shows_saves_for_itself_all_the_same(tmp_path: Path) -> None:
    """Put under DMTCP, it finds no root; it says so, and is started again with all it needs."""
    chain = hidden(tmp_path)
    try:
        chain.start([sys.executable, "go"], link_s=60, level="auto")
        chain.wait_for((tmp_path / "run/control/speaks").exists)
        chain.wait_for(lambda: chain.levels()["chosen"].get("1") == "model")
        chain.wait_for(lambda: chain.events("restored") or chain.events("started_fresh")[1:])
        chain.rundir.give_notice(1, "test")
        assert 0 == chain.finish(), chain.story()
    finally:
        chain.close()
    assert "60" == (tmp_path / "result").read_text()
    assert {"1": "model", "2": "model"} == chain.levels()["chosen"]
    assert "the program has a Checkpointer" in chain.levels()["failed"]["dmtcp"]
    assert chain.rundir.committed()
    assert 1 == chain.story().count("as with level: model")


def test_a_level_that_was_asked_for_is_kept_and_the_error_says_what_to_write(
    tmp_path: Path,
) -> None:
    chain = hidden(tmp_path)
    try:
        assert 0 != chain.run([sys.executable, "go"], link_s=60, level="dmtcp")
    finally:
        chain.close()
    assert "level: model" in chain.story()
