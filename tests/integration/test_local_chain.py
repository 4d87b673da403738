"""The link runner and the local backend with plain shell programs: no torch, no Slurm."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_ckpt import events, lease
from hpc_ckpt.chain.backend import Cause
from hpc_ckpt.chain.budget import budget_spent
from hpc_ckpt.chain.ledger import State, read_status
from hpc_ckpt.chain.local import Incident, LocalChain
from hpc_ckpt.chain.orders import Orders
from hpc_ckpt.chain.verdict import judge
from hpc_ckpt.errors import RootError
from hpc_ckpt.events import Event
from hpc_ckpt.rundir import MANIFEST_NAME, CheckpointKey, RunDir

Chain = Callable[..., RunDir]


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    """A run directory whose command is a bash script."""

    def make(script: str, *, max_links: int = 9, kill_wait: str = "2s") -> RunDir:
        rundir = RunDir(tmp_path / "run")
        rundir.create()
        record = {
            "chain": "test",
            "name": "test",
            "argv": ["bash", "-c", script],
            "cwd": str(tmp_path),
            "threads": 1,
            "spec": {"chain": {"max_links": max_links}},
            "profile": {"signal": {"name": "USR1"}, "kill_wait": kill_wait},
        }
        rundir.chain_file.write_text(json.dumps(record))
        return rundir

    return make


def run(rundir: RunDir, *, links: int = 5, link_time_s: float = 20.0, **more: object) -> bool:
    local = LocalChain(rundir, links=links, link_time_s=link_time_s, kill_wait_s=2.0, **more)  # type: ignore[arg-type]
    return local.run()


def causes(rundir: RunDir) -> list[str]:
    return [link.cause for link in read_status(rundir).links]


def commit(rundir: RunDir, generation: int, step: int) -> str:
    """Bash that leaves what the runner takes for a committed checkpoint."""
    place = rundir.checkpoints / CheckpointKey(generation, step).directory_name
    return f"mkdir -p {place}; touch {place}/{MANIFEST_NAME}"


def test_exit_75_goes_on_and_exit_0_is_done(chain: Chain) -> None:
    """The exit codes of a command that knows nothing of us."""
    rundir = chain("[ $HPC_CKPT_GENERATION -ge 3 ] || exit 75")
    assert run(rundir) is True
    assert ["saved and left", "saved and left", "complete"] == causes(rundir)
    assert {"generation": 3, "step": None} == json.loads(rundir.done_file.read_text())


def test_the_command_is_told_everything_by_environment(chain: Chain, tmp_path: Path) -> None:
    """All paths absolute; the thread count is pinned."""
    rundir = chain(f"env > {tmp_path}/env; pwd > {tmp_path}/cwd")
    run(rundir)
    lines = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    assert rundir.environment(1, "local").items() <= lines.items()
    assert "1" == lines["OMP_NUM_THREADS"]
    assert f"{tmp_path}\n" == (tmp_path / "cwd").read_text()
    assert all(
        Path(rundir.environment(1, "local")[name]).is_absolute()
        for name in (
            "HPC_CKPT_ROOT",
            "HPC_CKPT_NOTICE",
            "HPC_CKPT_DEADLINE",
            "HPC_CKPT_OUTCOME",
            "HPC_CKPT_SETTINGS",
        )
    )


def test_two_links_without_progress_stop_the_chain(chain: Chain) -> None:
    """A crash loop does not burn the allocation; the reason is said."""
    rundir = chain("exit 3")
    assert run(rundir) is False
    status = read_status(rundir)
    assert (State.STOPPED, "no progress in two links running") == (status.state, status.reason)
    assert ["crashed", "crashed"] == causes(rundir)
    assert ["exit code 3", "exit code 3"] == [link.reason for link in status.links]


def test_crashes_with_progress_between_them_go_on(chain: Chain) -> None:
    """Only standing still counts."""
    rundir = chain("true")
    script = "; ".join(
        f"[ $HPC_CKPT_GENERATION = {g} ] && {{ {commit(rundir, g, 10 * g)}; kill -9 $$; }}"
        for g in (1, 2, 3)
    )
    chain(script + "; exit 0")
    assert run(rundir) is True
    assert ["killed", "killed", "killed", "complete"] == causes(rundir)


def test_the_budget_of_links_ends_the_chain(chain: Chain) -> None:
    """max_links holds even where more tokens are left."""
    rundir = chain("exit 75", max_links=2)
    assert run(rundir) is False
    assert "the budget of 2 links is spent" == read_status(rundir).reason
    assert 2 == lease.highest(rundir)


def test_a_command_that_cannot_start_is_a_failed_link(chain: Chain) -> None:
    """The ledger names the program and the reason."""
    rundir = chain("true")
    record = json.loads(rundir.chain_file.read_text())
    rundir.chain_file.write_text(json.dumps({**record, "argv": ["/no/such/program"]}))
    assert run(rundir) is False
    link = read_status(rundir).links[0]
    assert ("could not start", "/no/such/program: No such file or directory") == (
        link.cause,
        link.reason,
    )


def test_the_end_of_a_link_is_a_notice_then_the_kill_wait(chain: Chain) -> None:
    """The command hears of it through the file; nobody signals it before the kill."""
    rundir = chain(
        "trap 'touch signalled' TERM USR1; "
        "while [ ! -e $HPC_CKPT_NOTICE ]; do sleep 0.1; done; cat $HPC_CKPT_DEADLINE; exit 75"
    )
    started = time.time()
    run(rundir, links=1, link_time_s=1.5)
    assert ["time limit"] == causes(rundir)
    assert not (rundir.root.parent / "signalled").exists()
    notice = rundir.notice(1)
    assert notice is not None and notice.time >= started + 1.4
    deadline = rundir.deadline(1)
    assert deadline is not None and abs(deadline - started - 1.5) < 1.0


def test_a_deaf_command_and_its_children_are_killed_after_the_kill_wait(chain: Chain) -> None:
    """Nothing of a link outlives it."""
    rundir = chain("trap '' TERM USR1; sleep 300 & echo $! > child; sleep 300")
    run(rundir, links=1, link_time_s=0.5)
    assert ["time limit"] == causes(rundir)
    child = int((rundir.root.parent / "child").read_text())
    assert not Path(f"/proc/{child}").exists() or _is_zombie(child)


def test_what_a_killed_command_leaves_is_ended_before_the_next_link_and_nothing_else(
    chain: Chain, tmp_path: Path
) -> None:
    """In a session of its own, and with no parent: only the link runner can know of it."""
    second = "kill -0 $(cat pid) && touch both; exit 0"
    first = "setsid sleep 1000 & echo $! > pid; kill -9 $$"
    rundir = chain(f"[ $HPC_CKPT_GENERATION = 1 ] || {{ {second}; }}; {first}")
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as bystander:
        try:
            assert run(rundir) is True
            assert bystander.poll() is None
        finally:
            bystander.kill()
    assert not (tmp_path / "both").exists()
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_orphans_that_end_do_not_stay_as_zombies(chain: Chain, tmp_path: Path) -> None:
    """They are the runner's children then; a command may leave thousands of them."""
    count = f"ps --ppid $PPID -o stat= | grep -c Z > {tmp_path}/zombies"
    run(chain(f"for i in 1 2 3; do (sleep 0.1 &); done; sleep 2.5; {count}; exit 0"))
    assert "0\n" == (tmp_path / "zombies").read_text()


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_command_starts_with_default_signals_and_nothing_blocked(chain: Chain) -> None:
    """Ignored and blocked signals are inherited across exec; the runner undoes both."""
    rundir = chain("grep -E 'SigIgn|SigBlk' /proc/self/status > signals")
    script = f"trap '' TERM USR1; exec {sys.executable} -I -m hpc_ckpt.chain.link"
    subprocess.run(["bash", "-c", f"{script} --backend=local --root={rundir.root}"], check=True)
    masks = {
        line.split()[0]: int(line.split()[1], 16)
        for line in (rundir.root.parent / "signals").read_text().splitlines()
    }
    watched = 1 << signal.SIGTERM - 1 | 1 << signal.SIGUSR1 - 1 | 1 << signal.SIGCHLD - 1
    assert {"SigBlk:": 0, "SigIgn:": 0} == {name: bits & watched for name, bits in masks.items()}


def test_a_preempted_link_gets_its_grace_and_does_not_count_as_stuck(chain: Chain) -> None:
    """A chain never stops because of a preemption, even one that comes before it is ready."""
    rundir = chain("while [ ! -e $HPC_CKPT_NOTICE ]; do sleep 0.1; done; exit 1")
    at_once = Incident(preempt_when=lambda: True, grace_s=1)
    run(rundir, links=3, incidents=dict.fromkeys(range(1, 4), at_once))
    assert ["preempted"] * 3 == causes(rundir)
    assert rundir.halted() is None
    notice = rundir.notice(1)
    assert notice is not None and notice.sources[0] == "SIGTERM"


def test_preempted_links_do_not_use_up_the_budget(chain: Chain) -> None:
    """A chain never stops because of a preemption."""
    rundir = chain("while [ ! -e $HPC_CKPT_NOTICE ]; do sleep 0.1; done; exit 75", max_links=2)
    at_once = Incident(preempt_when=lambda: True, grace_s=1)
    run(rundir, links=4, incidents=dict.fromkeys(range(1, 5), at_once))
    assert ["preempted"] * 4 == causes(rundir)
    assert rundir.halted() is None


def test_starts_are_bounded_even_when_nothing_is_ever_recorded(chain: Chain) -> None:
    """Links whose node goes each time leave no record; the chain still ends one day."""
    rundir = chain("true", max_links=1)
    for generation in range(1, 11):
        (rundir.lease / f"{generation:08d}").write_text("{}")
        (rundir.lease / f"{generation:08d}.released").touch()
    assert "started 10 times without progress" in (
        budget_spent(rundir, 10, Orders.read(rundir)) or ""
    )
    assert budget_spent(rundir, 9, Orders.read(rundir)) is None


def test_code_0_of_a_program_that_was_asked_to_stop_is_not_complete(chain: Chain) -> None:
    """It saves and leaves, as it was told; `resume` would find nothing to take up."""
    rundir = chain("until [ -e $HPC_CKPT_NOTICE ]; do sleep 0.05; done; exit 0")

    def stop() -> None:
        rundir.halt_file.write_text("test")
        rundir.give_notice(1, "test")

    asked = threading.Timer(1.0, stop)
    asked.start()
    assert not run(rundir)
    asked.join()
    assert rundir.done() is None
    assert ["halted"] == causes(rundir)


def test_code_0_of_a_halted_chain_that_was_not_asked_is_complete(chain: Chain) -> None:
    """`stop --after-checkpoint` leaves the program alone."""
    rundir = chain("echo test > $HPC_CKPT_ROOT/halt; exit 0")
    run(rundir)
    assert rundir.done() is not None


def test_an_overtaken_link_is_judged_as_fenced(chain: Chain) -> None:
    """Whatever it says of itself no longer counts."""
    rundir = chain("true")
    for generation in (1, 2):
        (rundir.lease / f"{generation:08d}").write_text("{}")
    verdict = judge(rundir, 1, 0, None)
    assert (None, Cause.FENCED) == (verdict.result, verdict.cause)
    assert rundir.done() is None


def test_code_0_of_a_command_whose_program_was_killed_is_a_failure(chain: Chain) -> None:
    """`train | tee log` returns what tee returns; the runtime always leaves an outcome."""
    rundir = chain("touch $HPC_CKPT_ROOT/events/00000001-node.jsonl; exit 0", max_links=1)
    assert run(rundir) is False
    assert ["killed"] == causes(rundir)
    assert rundir.done() is None


def test_a_halted_chain_starts_nothing(chain: Chain) -> None:
    """halt is looked at before the lease is taken."""
    rundir = chain("true")
    rundir.write_halt("asked by the user")
    assert run(rundir) is False
    assert 0 == lease.highest(rundir)


def test_a_finished_chain_starts_nothing(chain: Chain) -> None:
    """A left-over array index ends at once and takes no generation."""
    rundir = chain("true")
    run(rundir)
    argv = [sys.executable, "-I", "-m", "hpc_ckpt.chain.link", "--backend=local"]
    done = subprocess.run([*argv, f"--root={rundir.root}"], capture_output=True, text=True)
    assert 0 == done.returncode
    assert "the work is complete" in done.stderr
    assert 1 == lease.highest(rundir)


def test_done_counts_only_with_its_checkpoint(chain: Chain) -> None:
    """A DONE that names a checkpoint nobody has is not believed."""
    rundir = chain("exit 75", max_links=1)
    rundir.done_file.write_text('{"generation": 1, "step": 50}')
    assert run(rundir) is False
    assert rundir.done() is None
    (rundir.checkpoints / CheckpointKey(1, 50).directory_name).mkdir(parents=True)
    (rundir.checkpoints / CheckpointKey(1, 50).directory_name / MANIFEST_NAME).touch()
    assert rundir.done() is not None


def test_the_outcome_file_outranks_the_exit_code(chain: Chain) -> None:
    """torchrun turns 75 into 1, srun returns the maximum: the file decides."""
    line = '{"outcome": "saved", "generation": 1, "step": 7, "reason": "deadline: near"}'
    rundir = chain(f"echo '{line}' > $HPC_CKPT_OUTCOME; exit 1", max_links=1)
    run(rundir)
    assert ["time limit"] == causes(rundir)
    ended = [r for r in events.read(rundir.ledger_file(1)) if r["event"] == Event.LINK_ENDED]
    assert ["saved"] == [record["outcome"] for record in ended]


def test_complete_without_done_is_a_failure(chain: Chain) -> None:
    """Completion is judged by DONE and its checkpoint."""
    line = '{"outcome": "complete", "generation": 1, "step": 7, "reason": ""}'
    rundir = chain(f"echo '{line}' > $HPC_CKPT_OUTCOME; exit 0", max_links=1)
    assert run(rundir) is False
    assert ["crashed"] == causes(rundir)


def test_a_link_whose_parent_is_killed_ends_by_itself(chain: Chain) -> None:
    """SIGKILL of the local runner leaves nothing running for long."""
    rundir = chain("echo $$ > pid; while [ ! -e $HPC_CKPT_NOTICE ]; do sleep 0.1; done; exit 75")
    script = (
        "import sys; from hpc_ckpt.chain.local import LocalChain\n"
        "from hpc_ckpt.rundir import RunDir\n"
        "LocalChain(RunDir(sys.argv[1]), links=1, link_time_s=300, kill_wait_s=2).run()"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(rundir.root)])
    pid_file = rundir.root.parent / "pid"
    _until(lambda: pid_file.exists() and pid_file.read_text().strip() != "")
    parent.kill()
    parent.wait()
    _until(lambda: lease.released(rundir, 1))
    assert ["cancelled"] == causes(rundir)


def test_ctrl_c_asks_for_a_save_and_leaves_nothing_running(chain: Chain) -> None:
    """The link is told, and the runner waits for it."""
    rundir = chain(
        "echo $$ > pid; while [ ! -e $HPC_CKPT_NOTICE ]; do sleep 0.1; done; touch saved; exit 75"
    )
    script = (
        "import sys; from hpc_ckpt.chain.local import LocalChain, Interrupted\n"
        "from hpc_ckpt.rundir import RunDir\n"
        "try: LocalChain(RunDir(sys.argv[1]), links=9, link_time_s=300, kill_wait_s=5).run()\n"
        "except Interrupted: sys.exit(130)"
    )
    # Under nohup and in some CI SIGINT is ignored, which is inherited.
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(rundir.root)],
        preexec_fn=_listen_to_ctrl_c,  # noqa: PLW1509 - this process has one thread
    )
    pid_file = rundir.root.parent / "pid"
    _until(lambda: pid_file.exists() and pid_file.read_text().strip() != "")
    parent.send_signal(signal.SIGINT)
    assert 130 == parent.wait(timeout=20)
    assert (rundir.root.parent / "saved").exists()
    assert not Path(f"/proc/{int(pid_file.read_text())}").exists()
    assert 1 == lease.highest(rundir)


def _listen_to_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_the_next_link_waits_for_the_final_save_of_one_that_overlaps(chain: Chain) -> None:
    """Two links at once, as after Slurm's kill wait: the second goes on from the first's save."""
    rundir = chain("true")
    script = (
        f"[ $HPC_CKPT_GENERATION = 2 ] && {{ ls {rundir.checkpoints} > seen; exit 0; }}; "
        f"touch begun; sleep 2; {commit(rundir, 1, 30)}; exit 75"
    )
    chain(script)
    argv = [sys.executable, "-I", "-m", "hpc_ckpt.chain.link", "--backend=local"]
    first = subprocess.Popen([*argv, f"--root={rundir.root}"])
    _until((rundir.root.parent / "begun").exists)
    second = subprocess.Popen([*argv, f"--root={rundir.root}"])
    assert 0 == second.wait(timeout=30)
    assert 0 == first.wait(timeout=30)
    assert "step-000000030-g00000001\n" == (rundir.root.parent / "seen").read_text()


def _until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the condition did not come true")
        time.sleep(0.05)


def test_a_link_runner_without_orders_says_what_to_do(tmp_path: Path) -> None:
    """A root that is no chain: exit 2, one line."""
    argv = [sys.executable, "-I", "-m", "hpc_ckpt.chain.link", "--backend=local"]
    done = subprocess.run([*argv, f"--root={tmp_path}"], capture_output=True, text=True)
    assert 2 == done.returncode
    assert f"hpc-ckpt: {tmp_path}/chain.json: missing or not JSON; submit the chain again\n" == (
        done.stderr
    )


def test_the_runner_imports_only_the_standard_library(tmp_path: Path) -> None:
    """It runs on the compute node before any environment is set up."""
    script = (
        "import sys, hpc_ckpt.chain.link\n"
        "ours = {n for n in sys.modules if n.split('.')[0] == 'hpc_ckpt'}\n"
        "others = {n.split('.')[0] for n in sys.modules} - set(sys.stdlib_module_names)\n"
        "print(sorted(n for n in others if not n.startswith('_')))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], capture_output=True, text=True, cwd=os.sep
    )
    assert "['hpc_ckpt']\n" == done.stdout


def test_two_local_runners_cannot_share_a_root(chain: Chain) -> None:
    """Not even between two links, when nobody holds the lease."""
    rundir = chain("true")
    first = LocalChain(rundir, links=1, link_time_s=5, kill_wait_s=1)
    with first._alone(), pytest.raises(RootError, match="another 'hpc-ckpt run'"):
        run(rundir)
    assert run(rundir) is True
