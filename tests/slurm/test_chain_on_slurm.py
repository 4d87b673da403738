"""Whole chains on a real Slurm: time limits, preemption, SIGKILL, overlap; the same weights."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from devcluster import DevCluster, Options

from hpc_ckpt import events, lease
from hpc_ckpt.chain.ledger import LinkSummary, State, read_status
from hpc_ckpt.format.verify import open_verified, verify
from hpc_ckpt.rundir import RunDir

pytestmark = pytest.mark.slurm

PROGRAM = Path(__file__).parent / "programs" / "train.py"
EPOCHS = 34
STEPS = 25 * EPOCHS
STEP_S = 0.1
SAVE_EVERY = 20
GRACE_S = 10
PROFILE = """
cluster: dev
partitions:
  gpu: {max_time: 8h, gpus: []}
  lowpriority: {max_time: 24h, preempt: {mode: requeue, grace: 10s}}
signal: {name: USR1, lead: 10s}
kill_wait: %s
directives: {extra: [--hold]}
"""


@dataclass
class SubmittedChain:
    """A chain on the cluster, and what a test does to it."""

    cluster: DevCluster
    rundir: RunDir
    array: str

    def release(self, *, minutes: int) -> None:
        """Lower the limit of the held members: Slurm counts whole minutes, tests have seconds."""
        self.cluster.run("scontrol", "update", f"jobid={self.array}", f"timelimit={minutes}")
        self.cluster.run("scontrol", "release", self.array)

    def link(self, number: int) -> LinkSummary | None:
        links = read_status(self.rundir).links
        return next((link for link in links if link.generation == number), None)

    def wait_for(self, what: Callable[[], object], timeout_s: float = 90.0) -> None:
        end = time.monotonic() + timeout_s
        while not what():
            if time.monotonic() > end:
                raise TimeoutError(self.story())
            time.sleep(0.1)

    def story(self) -> str:
        files = [*self.rundir.ledger.iterdir(), *self.rundir.logs.iterdir()]
        told = "\n".join(f"── {path.name}\n{path.read_text()[-2000:]}" for path in sorted(files))
        return f"{told}\n{self.cluster.run('squeue', '-a').stdout}"

    def wait_for_steps(self, number: int, steps: int) -> None:
        """Until link `number` has made that many steps."""

        def made() -> bool:
            link = self.link(number)
            return link is not None and link.step_now >= link.step_from + steps

        self.wait_for(made)

    def wait_for_end(self, number: int) -> LinkSummary:
        self.wait_for(lambda: (link := self.link(number)) is not None and link.ended is not None)
        link = self.link(number)
        assert link is not None
        return link

    def job_of(self, number: int) -> str:
        holder = lease.holder_of(self.rundir, number)
        assert holder is not None and holder.job is not None
        return holder.job

    def end_in(self, number: int, seconds: int) -> None:
        """Move the end of a running link, as an operator or a preemption does."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))
        self.cluster.run("scontrol", "update", f"jobid={self.job_of(number)}", f"EndTime={moment}")

    def preempt(self) -> None:
        """A job of the higher partition that needs every node."""
        nodes = len(self.cluster.nodes)
        wanted = ["sbatch", "-p", "gpu", f"-N{nodes}", "--exclusive", "-o", "/dev/null", "-t", "5"]
        self.cluster.run(*wanted, "--wrap", "sleep 1")

    def kill_program(self, number: int) -> None:
        """SIGKILL to the training process alone, on its node."""
        log = self.rundir.log_file(number)
        pid = re.search(r"pid (\d+)", log.read_text())
        assert pid is not None
        os.kill(int(pid[1]), signal.SIGKILL)

    def left_in_queue(self) -> list[str]:
        return self.cluster.run("squeue", "-h", "-r", "-o", "%i %T", "-j", self.array,
                                check=False).stdout.split()  # fmt: skip


Submit = Callable[..., SubmittedChain]


def submit_chain(
    cluster: DevCluster, place: Path, *arguments: str, kill_wait: str = "5s", max_links: int = 9
) -> SubmittedChain:
    """`hpc-ckpt submit spec.yaml` as a user would; held until release()."""
    (place / "site.yaml").write_text(PROFILE % kill_wait)
    spec = {
        "name": "train",
        "command": [sys.executable, str(PROGRAM), *arguments],
        "root": "run",
        "partition": "lowpriority",
        "chain": {"link_time": "3 min", "max_links": max_links},
        "checkpoint": {"policy": f"every {SAVE_EVERY} steps", "keep": {"last": 3}},
    }
    (place / "train.yaml").write_text(json.dumps(spec))
    done = subprocess.run(
        [sys.executable, "-m", "hpc_ckpt.cli", "submit", "train.yaml", "--profile", "./site.yaml"],
        cwd=place,
        env=cluster.environment,
        capture_output=True,
        text=True,
    )
    assert 0 == done.returncode, done.stderr
    array = re.search(r"submitted array (\d+)", done.stdout)
    assert array is not None
    return SubmittedChain(cluster, RunDir(place / "run"), array[1])


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Weights of the same program without any interruption."""
    root = tmp_path_factory.mktemp("reference") / "run"
    environment = {**os.environ, "HPC_CKPT_ROOT": str(root), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(PROGRAM), str(EPOCHS), "0"], env=environment, check=True)
    return weights(RunDir(root))


def weights(rundir: RunDir) -> dict[str, bytes]:
    """Every leaf of the final checkpoint: model, optimizer state and RNG alike."""
    opened = open_verified(rundir.checkpoints / rundir.committed()[-1].directory_name)
    assert opened.manifest.step == STEPS
    return {name: bytes(opened.leaf(name)) for name in opened.leaves}


def assert_finished(chain: SubmittedChain, reference: dict[str, bytes]) -> None:
    """DONE, the rest of the array cancelled, all checkpoints valid, the same bytes."""
    status = read_status(chain.rundir)
    assert (State.COMPLETE, STEPS) == (status.state, status.step)
    done = chain.rundir.done()
    assert done is not None and done.step == STEPS
    chain.wait_for(lambda: chain.left_in_queue() == [])
    assert lease.highest(chain.rundir) < 9
    for key in chain.rundir.committed():
        assert [] == verify(chain.rundir.checkpoints / key.directory_name)
    assert reference == weights(chain.rundir)


def commits(chain: SubmittedChain, number: int, step: int) -> list[float]:
    """When a link committed a step."""
    paths = chain.rundir.events.glob(f"{number:08d}-*")
    records = [record for path in paths for record in events.read(path)]
    return [r["time"] for r in records if r["event"] == "save.committed" and r["step"] == step]


def check_deadline(chain: SubmittedChain, number: int) -> None:
    """The link runs into its time limit and saves because of it, without any notice."""
    link = chain.wait_for_end(number)
    assert "time limit" == link.cause
    assert link.reason.startswith("deadline")
    (saved,) = commits(chain, number, link.step_to)
    notice = chain.rundir.notice(number)
    assert notice is None or notice.time > saved  # the program was on its way out by then
    deadline = chain.rundir.deadline(number)
    assert deadline is not None
    assert 0 < deadline - saved < 20  # as late as is safe
    assert 0 == link.lost_steps


def check_notice(chain: SubmittedChain, number: int) -> None:
    """The end is moved close: Slurm's signal becomes a notice, and the link saves on it."""
    chain.wait_for_steps(number, 15)
    chain.end_in(number, 8)
    link = chain.wait_for_end(number)
    assert "time limit" == link.cause
    assert link.reason.startswith("notice")
    notice = chain.rundir.notice(number)
    assert notice is not None and "SIGUSR1" in notice.sources
    assert 0 == link.lost_steps


def check_preemption(chain: SubmittedChain, number: int) -> None:
    """TERM reaches the step only; the shim tells, and the save is made within the grace."""
    chain.wait_for_steps(number, 15)
    asked = time.time()
    chain.preempt()
    link = chain.wait_for_end(number)
    assert "preempted" == link.cause
    notice = chain.rundir.notice(number)
    assert notice is not None and any("shim" in source for source in notice.sources)
    assert link.ended is not None and link.ended - asked < GRACE_S
    assert 0 == link.lost_steps


def check_kill(chain: SubmittedChain, number: int) -> None:
    """SIGKILL leaves no outcome; what was not committed is made again, exactly."""
    chain.wait_for_steps(number, SAVE_EVERY + 5)
    chain.kill_program(number)
    link = chain.wait_for_end(number)
    assert ("killed", "killed by SIGKILL") == (link.cause, link.reason)
    assert link.step_to > link.step_from


def test_four_links_by_limit_notice_and_preemption_give_the_same_weights(
    idle_cluster: DevCluster, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    """The promise of the product, on a real Slurm."""
    chain = submit_chain(idle_cluster, tmp_path, str(EPOCHS), str(STEP_S))
    chain.release(minutes=1)
    check_deadline(chain, 1)
    check_notice(chain, 2)
    check_preemption(chain, 3)
    chain.wait_for(lambda: chain.rundir.done() is not None, timeout_s=150)
    assert len(read_status(chain.rundir).links) >= 4
    assert_finished(chain, reference)


def test_the_same_with_the_program_killed_in_one_link(
    idle_cluster: DevCluster, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    """Nothing committed is lost, nothing is done twice in the result."""
    chain = submit_chain(idle_cluster, tmp_path, str(EPOCHS), str(STEP_S))
    chain.release(minutes=1)
    check_kill(chain, 1)
    check_deadline(chain, 2)
    check_preemption(chain, 3)
    check_notice(chain, 4)
    chain.wait_for(lambda: chain.rundir.done() is not None, timeout_s=150)
    assert_finished(chain, reference)


def test_the_next_link_waits_for_a_save_made_in_the_kill_wait(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """Slurm starts the next index on another node while the last one is still saving."""
    chain = submit_chain(idle_cluster, tmp_path, "4", "0.02", "--hold-at", "31")
    chain.release(minutes=1)
    chain.wait_for((tmp_path / "holding").exists)
    chain.end_in(1, 1)
    chain.wait_for(lambda: f"{chain.array}_2 RUNNING" in " ".join(chain.left_in_queue()))
    assert 1 == lease.highest(chain.rundir)
    (tmp_path / "go").touch()
    first = chain.wait_for_end(1)
    chain.wait_for(lambda: chain.rundir.done() is not None)
    assert "time limit" == first.cause
    assert first.step_to >= 31  # the notice is looked for once a second
    second = chain.link(2)
    assert second is not None
    assert first.step_to == second.step_from
    assert chain.job_of(1) != chain.job_of(2)
    (saved,) = commits(chain, 1, first.step_to)
    assert saved > started(chain, 2)


def started(chain: SubmittedChain, index: int) -> float:
    """When Slurm started an array member, whole seconds."""
    shown = chain.cluster.run("scontrol", "-o", "show", "job", f"{chain.array}_{index}").stdout
    moment = re.search(r"StartTime=(\S+)", shown)
    assert moment is not None
    return time.mktime(time.strptime(moment[1], "%Y-%m-%dT%H:%M:%S"))


@pytest.fixture
def patient_cluster(cluster_directory: Path) -> Iterator[DevCluster]:
    """One that leaves a job minutes between TERM and KILL."""
    options = Options(kill_wait_s=150)
    with DevCluster.start(cluster_directory, options=options) as running:
        yield running


def test_a_late_save_of_an_overtaken_link_is_never_chosen(
    patient_cluster: DevCluster, tmp_path: Path
) -> None:
    """The wait for a holder is bounded; after it the old one is fenced, whatever it still does."""
    chain = submit_chain(patient_cluster, tmp_path, "40", "0.05", "--hold-at", "31", kill_wait="0s")
    chain.release(minutes=2)
    chain.wait_for((tmp_path / "holding").exists)
    chain.end_in(1, 1)
    chain.wait_for(lambda: (link := chain.link(2)) is not None and link.step_to > link.step_from)
    (tmp_path / "go").touch()
    chain.wait_for(lambda: lease.released(chain.rundir, 1))
    first, second = chain.link(1), chain.link(2)
    assert first is not None and second is not None
    assert ("fenced", SAVE_EVERY) == (first.cause, first.step_to)
    assert SAVE_EVERY == second.step_from
    assert chain.rundir.outcome(1) is None or chain.rundir.outcome(1).step == SAVE_EVERY
    assert 2 == chain.rundir.committed()[-1].generation
    assert [] == [k for k in chain.rundir.committed() if k.generation == 1 and k.step > SAVE_EVERY]


def test_stop_saves_cancels_the_rest_and_submit_takes_it_up_again(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """halt + notice + cancel of what is pending."""
    chain = submit_chain(idle_cluster, tmp_path, "4", "0.05")
    chain.release(minutes=3)
    chain.wait_for_steps(1, 10)
    verb = [sys.executable, "-m", "hpc_ckpt.cli", "stop", "run"]
    subprocess.run(verb, cwd=tmp_path, env=idle_cluster.environment, check=True)
    link = chain.wait_for_end(1)
    assert "halted" == link.cause
    chain.wait_for(lambda: chain.left_in_queue() == [])
    assert State.STOPPED == read_status(chain.rundir).state
    again = submit_chain(idle_cluster, tmp_path, "4", "0.0")
    again.release(minutes=3)
    again.wait_for(lambda: again.rundir.done() is not None)
    second = again.link(2)
    assert second is not None and link.step_to == second.step_from
    assert [chain.array, again.array] == json.loads(chain.rundir.chain_file.read_text())["jobs"]


def cli(cluster: DevCluster, place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpc_ckpt.cli", *words],
        cwd=place,
        env=cluster.environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--partition", "nope"], "partition: this cluster has no 'nope'; it has gpu, lowpriority"),
        (["--link-time", "30h"], "1d 6h is more than partition 'gpu' allows (8h)"),
        (["--gpus", "99"], "sbatch refused the chain"),
        (["--set", "constraint=no-such-feature"], "sbatch refused the chain"),
    ],
)
def test_what_the_cluster_refuses_is_one_line_and_leaves_nothing(
    idle_cluster: DevCluster, tmp_path: Path, words: list[str], message: str
) -> None:
    """Exit 2, and the working directory as it was."""
    done = cli(idle_cluster, tmp_path, "submit", *words, "--", "sleep", "1")
    assert (2, "") == (done.returncode, done.stdout)
    assert message in done.stderr
    assert 1 == len(done.stderr.splitlines())
    assert [] == list(tmp_path.iterdir())


def test_a_root_with_a_live_array_is_refused(idle_cluster: DevCluster, tmp_path: Path) -> None:
    """Two chains on one root cannot be, even while the first is still pending."""
    first = cli(idle_cluster, tmp_path, "submit", "--set", "directives.extra=--hold", "--", "true")
    assert 0 == first.returncode, first.stderr
    second = cli(idle_cluster, tmp_path, "submit", "--", "true")
    assert 2 == second.returncode
    assert "is a chain on it already" in second.stderr
