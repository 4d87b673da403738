"""The notice file through launchers, and a real signal where it was asked for."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from chains import EVERYBODY_HEARS, PROGRAM, SAVE_EVERY, SubmittedChain, submit_chain
from devcluster import DevCluster

from hpc_ckpt.chain.ledger import read_status

pytestmark = pytest.mark.slurm

COUNTER = Path(__file__).parent / "programs" / "counter.py"
TOTAL = 120
STEP_S = 0.1
AS_THE_GUIDE_SAYS = ("--ignore", "TERM") if EVERYBODY_HEARS else ()
"""What a program without a Checkpointer must do where everybody hears TERM."""


def launched(launcher: str, program: list[str]) -> list[str]:
    """A Python program behind a launcher, as people write it."""
    python = sys.executable
    before = {
        "plain": [python],
        "srun": ["srun", "--ntasks=1", python],
        "torchrun": [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"],
        # On one node: its daemons on others would be steps of their own, and die of TERM.
        "mpirun": ["mpirun", "--mca", "plm", "isolated", "--mca", "ras", "^slurm",
                   "--allow-run-as-root", "--oversubscribe", "-np", "1", python],
        "accelerate": [python, "-m", "accelerate.commands.launch", "--num_processes=1",
                       "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--cpu"],
    }  # fmt: skip
    if launcher == "srun with shim":
        inner = shlex.join([python, *program])
        return ["bash", "-c", f'exec srun --ntasks=1 bash "$HPC_CKPT_SHIM" {inner}']
    if launcher == "bash":
        deaf = "trap '' TERM; " if EVERYBODY_HEARS else ""
        return ["bash", "-c", f"{deaf}echo begin; {shlex.join([python, *program])}; exit $?"]
    return [*before[launcher], *program]


def contained(place: Path, program: list[str]) -> list[str]:
    """A program in a container of Charliecloud, whose image has nothing of its own but a mark: what
    the host has is bound into it, /tmp with the run directory by ch-run itself."""
    if shutil.which("ch-run") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("ch-run is required here: make packages")
        pytest.skip("ch-run (charliecloud) is not installed")
    image = place / "image"
    bound = sorted({"/usr", sys.prefix, sys.base_prefix, str(Path(__file__).parents[2])})
    for name in ("dev", "proc", "sys", "tmp", "home", "root", "etc", *bound):
        (image / name.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for name in ("hosts", "resolv.conf", "passwd", "group"):
        (image / "etc" / name).touch()
    for name in ("bin", "lib", "lib64"):
        (image / name).symlink_to(f"usr/{name}")
    (image / "inside").touch()
    binds = [word for path in bound for word in ("--bind", f"{path}:{path}")]
    script = f"test -e /inside && exec {shlex.join([sys.executable, *program])}"
    return ["ch-run", *binds, str(image), "--", "/bin/sh", "-c", script]


def counter(place: Path, *more: str) -> list[str]:
    return [str(COUNTER), str(place / "state"), str(TOTAL), str(STEP_S), *more]


def interrupt_and_finish(
    cluster: DevCluster, place: Path, words: list[str], spec: dict[str, Any]
) -> str:
    """Output of a first link that was preempted; the chain then goes on to the end."""
    chain = submit_chain(cluster, place, spec={"command": words, **spec})
    chain.wait_for(lambda: "from 0" in log_of(chain, 1), timeout_s=60)
    chain.preempt()
    assert "preempted" == chain.wait_for_end(1).cause
    chain.wait_for_done()
    assert str(TOTAL) == (place / "state").read_text()
    return log_of(chain, 1)


def log_of(chain: SubmittedChain, number: int) -> str:
    path = chain.rundir.log_file(number)
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("launcher", ["plain", "bash", "srun with shim", "mpirun", "container"])
def test_the_notice_reaches_a_program_behind_a_launcher(
    idle_cluster: DevCluster, tmp_path: Path, launcher: str
) -> None:
    """Unchanged: no launcher is signalled, none has to forward anything. Where everybody hears
    TERM, the program ignores it; an srun of its own kills it all the same, perhaps before it has
    looked at the notice, and the chain comes to its end."""
    program = counter(tmp_path, *AS_THE_GUIDE_SAYS)
    in_container = launcher == "container"
    words = contained(tmp_path, program) if in_container else launched(launcher, program)
    said = interrupt_and_finish(idle_cluster, tmp_path, words, {})
    killed = EVERYBODY_HEARS and launcher == "srun with shim"
    assert killed or "told by notice" in said, said


def test_the_notice_reaches_a_program_that_ignores_term(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """However processes are tracked: what the guide tells to do where everybody hears TERM."""
    words = launched("plain", counter(tmp_path, "--ignore", "TERM"))
    assert "told by notice" in interrupt_and_finish(idle_cluster, tmp_path, words, {})


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "srun"])
def test_the_notice_reaches_a_training_behind_a_launcher_that_does_more(
    idle_cluster: DevCluster, tmp_path: Path, launcher: str
) -> None:
    """Two turn 75 into 1: the outcome file says what happened. Behind srun the training hears
    TERM itself, and takes it for a notice. Where srun hears it too, it kills its tasks: what the
    last save by policy lacks is lost."""
    words = launched(launcher, [str(PROGRAM), "6", "0.05"])
    chain = submit_chain(idle_cluster, tmp_path, spec={"command": words})
    chain.wait_for_steps(1, 25)
    chain.preempt()
    link = chain.wait_for_end(1)
    killed = EVERYBODY_HEARS and launcher == "srun"
    assert "preempted" == link.cause
    assert link.lost_steps <= (SAVE_EVERY if killed else 0)
    chain.wait_for_done()
    assert 150 == read_status(chain.rundir).step


@pytest.mark.parametrize(
    ("launcher", "to"),
    [
        ("plain", "command"),
        ("bash", "command"),
        ("srun with shim", "command"),
        ("mpirun", "command"),
        ("torchrun", "workers"),
    ],
)
def test_a_real_signal_is_forwarded_where_that_was_asked_for(
    idle_cluster: DevCluster, tmp_path: Path, launcher: str, to: str
) -> None:
    """Shells are passed over; srun and mpirun hand USR1 on; torchrun would die of it. Where
    everybody hears TERM, the program ignores that; srun and mpirun end it all the same and hand
    nothing on, and the chain comes to its end."""
    words = launched(launcher, counter(tmp_path, "--on", "USR1", *AS_THE_GUIDE_SAYS))
    spec = {"forward": {"signal": "USR1", "to": to}}
    said = interrupt_and_finish(idle_cluster, tmp_path, words, spec)
    killed = EVERYBODY_HEARS and launcher in ("srun with shim", "mpirun")
    assert killed or "told by signal" in said, said


def test_a_real_signal_reaches_a_program_that_ignores_term(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    words = launched("plain", counter(tmp_path, "--on", "USR1", "--ignore", "TERM"))
    spec = {"forward": {"signal": "USR1", "to": "command"}}
    assert "told by signal" in interrupt_and_finish(idle_cluster, tmp_path, words, spec)


def test_srun_is_never_sent_term(idle_cluster: DevCluster, tmp_path: Path) -> None:
    """It would become KILL: the program behind it gets nothing, and says so in the end."""
    words = launched("srun", counter(tmp_path, "--on", "TERM"))
    spec = {"command": words, "forward": {"signal": "TERM", "to": "command"}}
    chain = submit_chain(idle_cluster, tmp_path, spec=spec)
    chain.wait_for(lambda: "from 0" in log_of(chain, 1), timeout_s=60)
    chain.rundir.give_notice(1, "test")
    time.sleep(4)
    assert chain.link(1).ended is None
