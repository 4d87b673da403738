"""A chain of several commands, at any mixture of levels, in one run directory."""

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_ckpt import events, fsio
from hpc_ckpt.chain import phases
from hpc_ckpt.chain.ledger import State, read_status
from hpc_ckpt.rundir import Done, RunDir, prepare

CLI = [sys.executable, "-m", "hpc_ckpt.cli"]
MODEL = """
import torch
from hpc_ckpt import Checkpointer
model = torch.nn.Linear(2, 2)
with Checkpointer(model=model) as ckpt:
    for _ in ckpt.steps(20):
        ckpt.step()
"""


def run(place: Path, spec: dict[str, object]) -> subprocess.CompletedProcess[str]:
    (place / "spec.yaml").write_text(json.dumps({"root": "run", **spec}))
    return subprocess.run(
        [*CLI, "run", "spec.yaml"], cwd=place, capture_output=True, text=True, timeout=120
    )


def test_each_command_begins_when_the_one_before_is_complete(tmp_path: Path) -> None:
    """The first in two links, the second with a Checkpointer: one ledger, one status."""
    (tmp_path / "train.py").write_text(MODEL)
    first = "echo first $HPC_CKPT_GENERATION >> order; [ $HPC_CKPT_GENERATION = 2 ] || exit 75"
    spec = {
        "command": first,
        "level": "plain",
        "then": [
            {"command": f"{sys.executable} train.py"},
            {"command": "echo third >> order", "level": "plain"},
        ],
    }
    done = run(tmp_path, spec)
    assert 0 == done.returncode, done.stderr
    assert ["first 1", "first 2", "third"] == (tmp_path / "order").read_text().splitlines()
    rundir = RunDir(tmp_path / "run")
    status = read_status(rundir)
    assert (State.COMPLETE, 2, 20) == (status.state, len(status.links), status.step)
    records = list(events.read(rundir.ledger_file(2)))
    assert [0, 1] == [r["phase"] for r in records if r["event"] == "chain.phase_done"]


def test_two_programs_with_a_checkpointer_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MODEL)
    done = run(tmp_path, {"command": "python train.py", "then": [{"command": "python train.py"}]})
    assert 2 == done.returncode
    assert "only one command of a chain may use a Checkpointer" in done.stderr


def test_a_link_killed_after_done_goes_on_with_the_next_command(tmp_path: Path) -> None:
    """DONE of the first command is there; its runner had no time to write anything more."""
    later = {"command": "echo second >> order", "level": "plain"}
    run(tmp_path, {"command": "echo first >> order", "level": "plain", "then": [later]})
    assert ["first", "second"] == (tmp_path / "order").read_text().split()
    rundir = RunDir(tmp_path / "run")
    rundir.phase_file.unlink()  # as it was after the first command
    rundir.write_done(Done(1, None))
    link = [sys.executable, "-m", "hpc_ckpt.chain.link", "--backend=local"]
    subprocess.run([*link, f"--root={rundir.root}"], check=True)
    assert ["first", "second", "second"] == (tmp_path / "order").read_text().split()
    assert (1, True) == (rundir.phase(), rundir.done() is not None)


@pytest.mark.parametrize("killed_at", range(1, 5))
def test_killed_between_two_commands_nothing_is_done_twice_or_left_out(
    tmp_path: Path, killed_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next link goes on with the second command, and never takes the chain for complete."""
    rundir = RunDir(tmp_path / "run")
    prepare(rundir)
    rundir.write_done(Done(1, None))
    (rundir.restarts / "some").mkdir(parents=True)
    reached = 0

    class Killed(BaseException):
        """As SIGKILL would: nothing after it runs."""

    def before(real: Callable[..., None]) -> Callable[..., None]:
        def wrapped(*words: object, **more: object) -> None:
            nonlocal reached
            reached += 1
            if reached == killed_at:
                raise Killed
            real(*words, **more)

        return wrapped

    monkeypatch.setattr(fsio, "write_atomic", before(fsio.write_atomic))
    monkeypatch.setattr(shutil, "rmtree", before(shutil.rmtree))
    with contextlib.suppress(Killed):
        phases.complete(rundir, 0, 1)
    monkeypatch.undo()
    if rundir.phase() == 0:
        assert rundir.done() is not None  # killed before anything of it was written
    else:
        assert rundir.done() is None
    phases.catch_up(rundir, 1 - rundir.phase(), 2)
    assert (1, None, False) == (rundir.phase(), rundir.done(), rundir.is_entering_phase())
    assert not rundir.restarts.exists()
