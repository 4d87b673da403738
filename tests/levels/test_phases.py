"""A chain of several commands, at any mixture of levels, in one run directory."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from chains_of_programs import undisturbed, write_program
from dmtcp_stand_in import install

from hpc_ckpt import events, fsio
from hpc_ckpt.chain import phases
from hpc_ckpt.chain.claim import refuse_another_command
from hpc_ckpt.chain.ledger import State, read_status
from hpc_ckpt.chain.orders import Orders
from hpc_ckpt.chain.patience import by_storage
from hpc_ckpt.errors import RootError, SpecError
from hpc_ckpt.levels.restarts import Restarts
from hpc_ckpt.making import prepare
from hpc_ckpt.rundir import Done, RunDir

REAL_DMTCP = True
CLI = [sys.executable, "-m", "hpc_ckpt.cli"]
MODEL = """
import torch
from hpc_ckpt import Checkpointer
model = torch.nn.Linear(2, 2)
with Checkpointer(model=model) as ckpt:
    for _ in ckpt.steps(20):
        ckpt.step()
"""
SLOW_MODEL = """
import time
import torch
from hpc_ckpt import Checkpointer
model = torch.nn.Linear(2, 2)
with Checkpointer(model=model, policy="every 5 steps") as ckpt:
    for _ in ckpt.steps(60):
        time.sleep(0.05)
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


def started(place: Path, spec: dict[str, object], path: str) -> subprocess.Popen[bytes]:
    (place / "spec.yaml").write_text(json.dumps({"root": "run", **spec}))
    with (place / "said").open("wb") as said:
        return subprocess.Popen(
            [*CLI, "run", "spec.yaml"],
            cwd=place,
            env={**os.environ, "PATH": f"{path}:{os.environ['PATH']}"},
            stdout=said,
            stderr=subprocess.STDOUT,
        )


@pytest.mark.parametrize("level", ["criu", "dmtcp"])
def test_a_phase_at_system_level_and_one_at_model_level_are_one_chain(
    tmp_path: Path, level: str, request: pytest.FixtureRequest
) -> None:
    """The first is stopped and gone on from, the second too: one ledger, status and report."""
    if level == "dmtcp" and shutil.which("dmtcp_launch") is None:
        pytest.skip("dmtcp_launch is not on PATH")
    path = str(request.getfixturevalue("criu")) if level == "criu" else "/usr/bin"
    (tmp_path / "train.py").write_text(SLOW_MODEL)
    command = write_program(tmp_path, "c", 60)
    expected = undisturbed(command, tmp_path)
    later = {"command": [sys.executable, "train.py"]}
    child = started(tmp_path, {"command": command, "level": level, "then": [later]}, path)
    rundir, result = RunDir(tmp_path / "run"), tmp_path / "result"
    until(lambda: result.exists() and result.read_text().count("\n") > 10, child)
    rundir.give_notice(1, "test")
    until(lambda: any(rundir.checkpoints.glob("step-*")), child)
    rundir.give_notice(2, "test")
    assert 0 == child.wait(100), (tmp_path / "said").read_text()
    assert expected == result.read_text()
    status = read_status(rundir)
    assert (State.COMPLETE, 3, 60) == (status.state, len(status.links), status.step)
    told = [(n, r) for n in (1, 2, 3) for r in events.read(rundir.ledger_file(n))]
    ends = [(n, r) for n, r in told if r["event"] in ("chain.phase_done", "link.ended")]
    assert [(1, level), (2, level), (2, None), (3, None)] == [(n, r.get("level")) for n, r in ends]
    assert "no file that the command shows imports hpc_ckpt" in ends[1][1]["rejected"]["model"]
    for verb in ("status", "history", "report --for-support"):
        shown = subprocess.run(
            [*CLI, *verb.split(), "run"], cwd=tmp_path, capture_output=True, text=True
        )
        assert 0 == shown.returncode, shown


def until(what: Callable[[], object], child: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end and child.poll() is None
        time.sleep(0.05)


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


def test_each_mpirun_of_a_chain_at_level_dmtcp_is_run(tmp_path: Path) -> None:
    """What the script keeps of the first, its DONE too, is not the second's."""
    tools = install(tmp_path / "bin")
    mpirun = tools / "mpirun"
    mpirun.write_text('#!/bin/bash\nshift 2\nexec "$@"\n')
    mpirun.chmod(0o755)
    (tmp_path / "a.sh").write_text("echo $1 begins >> order; sleep 0.5; echo $1 ends >> order")
    first, second = (
        {"command": ["mpirun", "-np", "1", "bash", "a.sh", name], "level": "dmtcp"}
        for name in ("first", "second")
    )
    child = started(tmp_path, {**first, "then": [second]}, str(tools))
    assert 0 == child.wait(60), (tmp_path / "said").read_text()
    expected = ["first begins", "first ends", "second begins", "second ends"]
    assert expected == (tmp_path / "order").read_text().splitlines()
    assert State.COMPLETE is read_status(RunDir(tmp_path / "run")).state


@pytest.mark.parametrize("killed_at", range(1, 6))
def test_killed_between_two_commands_nothing_is_done_twice_or_left_out(
    tmp_path: Path, killed_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next link goes on with the second command, and never takes the chain for complete."""
    rundir = RunDir(tmp_path / "run")
    prepare(rundir)
    rundir.write_done(Done(1, None))
    (rundir.restarts / "some").mkdir(parents=True)
    (rundir.root / phases.SCRIPTS / "1").mkdir(parents=True)
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
    assert not (rundir.root / phases.SCRIPTS).exists()


def test_a_halted_chain_does_not_begin_its_next_command(tmp_path: Path) -> None:
    """`hpc-ckpt stop` while the first one is at its end; resumed, the second one is left."""
    spec = {
        "command": "echo first >> order; echo test > $HPC_CKPT_ROOT/halt",
        "level": "plain",
        "then": [{"command": "echo second >> order", "level": "plain"}],
    }
    run(tmp_path, spec)
    rundir = RunDir(tmp_path / "run")
    assert (None, 1) == (rundir.done(), rundir.phase())
    assert ["first"] == (tmp_path / "order").read_text().splitlines()
    assert 0 == run(tmp_path, spec).returncode
    assert ["first", "second"] == (tmp_path / "order").read_text().splitlines()


def test_a_phase_that_storage_does_not_tell_is_not_the_first(tmp_path: Path) -> None:
    """The first command would be run again over the work of the second: that link fails."""
    done = run(tmp_path, {"command": "echo 1 >> ran", "level": "plain", "then": [
        {"command": "echo 2 >> ran", "level": "plain"}
    ]})  # fmt: skip
    assert 0 == done.returncode, done.stderr
    rundir = RunDir(tmp_path / "run")
    rundir.phase_file.unlink()
    rundir.phase_file.mkdir()  # an OSError that is not "no such file"
    for look in (rundir.phase, rundir.is_entering_phase):
        with pytest.raises(IsADirectoryError):
            look()
    assert rundir.done() is not None
    with pytest.raises(SpecError, match=r"phase\.json: cannot be read") as error:
        Orders.read(rundir)
    assert by_storage(error.value)  # and so waited for
    environ = {**os.environ, **rundir.environment(3, "local")}
    steward = [sys.executable, "-m", "hpc_ckpt.levels.steward"]
    ended = subprocess.run(steward, env=environ, capture_output=True, text=True)
    assert (1, False) == (ended.returncode, "Traceback" in ended.stderr)
    assert "phase.json" in ended.stderr
    assert ["1", "2"] == (tmp_path / "ran").read_text().split()


def test_another_command_does_not_go_on_from_the_restarts_of_the_first(tmp_path: Path) -> None:
    """Refused before anything is changed; the first one can still be taken up again."""
    recipe = {"name": "t", "restart": "state", "complete": {"file": "result"}}
    spec: dict[str, object] = {"recipe": recipe, "chain": {"retries": 0}}
    first = {**spec, "command": "echo alpha > state; exit 3"}
    assert 1 == run(tmp_path, first).returncode
    rundir = RunDir(tmp_path / "run")
    assert list(rundir.restarts.glob("step-*"))
    before = rundir.chain_file.read_bytes()
    other = {**spec, "command": "touch ran; cp state result"}
    done = run(tmp_path, other)
    assert 2 == done.returncode
    for said in ("another command", "alpha", "cp state result", "another root", "restarts"):
        assert said in done.stderr
    assert (before, False) == (rundir.chain_file.read_bytes(), (tmp_path / "ran").exists())
    resources = {"resources": {"memory": "1G"}}
    assert 1 == run(tmp_path, {**first, **resources}).returncode  # the same command: it goes on
    shutil.rmtree(rundir.restarts)
    assert 0 == run(tmp_path, other).returncode


def test_arguments_of_a_program_with_a_checkpointer_may_change(tmp_path: Path) -> None:
    """Also where a level had saved it before it turned out to have one."""
    rundir = RunDir(tmp_path / "run")
    prepare(rundir)
    rundir.chain_file.write_text(json.dumps(record("1", "dmtcp")))
    refuse_another_command(rundir, record("2", "dmtcp"))
    commit(rundir, "dmtcp")
    with pytest.raises(RootError, match=r"another command: .*train 1"):
        refuse_another_command(rundir, record("2", "dmtcp"))
    refuse_another_command(rundir, record("1", "dmtcp"))
    rundir.speaks_file.touch()
    refuse_another_command(rundir, record("2"))


def record(argument: str, *levels: str) -> dict[str, object]:
    """What chain.json would have of it."""
    return {"argv": ["./train", argument], "levels": [{"name": name} for name in levels]}


def commit(rundir: RunDir, level: str) -> None:
    with Restarts(rundir).stage(1) as staging:
        (staging.path / "state").write_text("7")
        staging.commit(level=level, step=7, reason="", facts={}, guard=lambda: None)


@pytest.mark.parametrize("levels", [(), ("plain",), ("lammps", "plain")])
def test_work_is_not_begun_anew_where_its_level_is_not_offered(
    tmp_path: Path, levels: tuple[str, ...]
) -> None:
    """As from a shell that has not loaded DMTCP's module."""
    rundir = RunDir(tmp_path / "run")
    prepare(rundir)
    rundir.chain_file.write_text(json.dumps(record("1", "dmtcp", "plain")))
    refuse_another_command(rundir, record("1", *levels))
    commit(rundir, "dmtcp")
    with pytest.raises(RootError, match=r"saved by dmtcp.*load the module.*begin anew") as error:
        refuse_another_command(rundir, record("1", *levels))
    assert str(rundir.restarts) in str(error.value)
    refuse_another_command(rundir, record("1", *levels, "dmtcp", "plain"))
    rundir.levels_file.write_text(json.dumps({"failed": {"dmtcp": "does not restart"}}))
    refuse_another_command(rundir, record("1", *levels))


def by_script(command: str, interval: int = 1800) -> dict[str, object]:
    return {
        "argv": ["env", f"INTERVAL={interval}", "bash", "dmtcp.sh", "mpirun", command],
        "levels": [],
        "choice": {"level": "dmtcp"},
        "spec": {"command": ["mpirun", command]},
    }


@pytest.mark.parametrize("kept", ["newest", "DONE"])
def test_another_mpirun_does_not_go_on_from_the_images_of_the_first(
    tmp_path: Path, kept: str
) -> None:
    """Nor is it taken for complete. Another interval is no other command; another level would
    begin anew."""
    rundir = RunDir(tmp_path / "run")
    prepare(rundir)
    first = by_script("./first")
    rundir.chain_file.write_text(json.dumps(first))
    refuse_another_command(rundir, by_script("./second"))
    (rundir.root / phases.SCRIPTS).mkdir()
    (rundir.root / phases.SCRIPTS / kept).write_text("1")
    refuse_another_command(rundir, by_script("./first", 60))
    with pytest.raises(RootError, match=r"another command: .*mpirun ./first.* ./second"):
        refuse_another_command(rundir, by_script("./second"))
    with pytest.raises(RootError, match="saved by dmtcp"):
        refuse_another_command(rundir, {**first, "choice": {"level": "plain"}})


def test_work_of_a_level_is_looked_for_among_those_of_its_command(tmp_path: Path) -> None:
    """The first command of a chain is complete by then; its levels are not the second's."""
    rundir = RunDir(tmp_path / "run")
    prepare(rundir)
    chain = {**record("1", "lammps"), "then": [record("2", "dmtcp", "plain")]}
    rundir.chain_file.write_text(json.dumps(chain))
    rundir.write_phase(1, entering=False)
    commit(rundir, "dmtcp")
    refuse_another_command(rundir, chain)
    with pytest.raises(RootError, match="saved by dmtcp"):
        refuse_another_command(rundir, {**record("1", "dmtcp"), "then": [record("2", "plain")]})
