"""Tasks through submitit on a real Slurm with accounting: limit, preemption, node failure, ranks.

What submitit alone would do at each of these points is in docs/guides/submitit.md.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import submitit
from chains import TRACKING
from devcluster import DevCluster, Options
from submitit.core.utils import FailedJobError, UncompletedJobError

from hpc_ckpt import ChainTask, LinkEnded, executor, lease
from hpc_ckpt.chain import tasks
from hpc_ckpt.chain.ledger import LinkSummary, read_status
from hpc_ckpt.rundir import RunDir

pytestmark = pytest.mark.slurm
# The job's process cannot import a test module: its functions travel in the pickle.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

PROFILE = """
cluster: dev
partitions: {gpu: {}, lowpriority: {}}
signal: {name: USR1, lead: 5s}
kill_wait: 5s
environment: {prologue: export FROM_THE_PROFILE=1}
"""
EPOCHS = 30


@pytest.fixture(scope="module")
def accounted(accounting_installed: None) -> Iterator[DevCluster]:
    """A cluster whose sacct works; submitit believes nothing else."""
    options = Options(proctrack=TRACKING, accounting=True)
    with (
        tempfile.TemporaryDirectory(prefix="hpc-slurm-") as directory,
        DevCluster.start(Path(directory), options=options) as running,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SLURM_CONF", str(running.layout.conf))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield running


@pytest.fixture(scope="module")
def place(accounted: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("work")
    (directory / "site.yaml").write_text(PROFILE)
    return directory


@pytest.fixture(scope="module")
def jobs(place: Path) -> submitit.AutoExecutor:
    return make(place)


def make(place: Path, **asked: Any) -> submitit.AutoExecutor:
    asked = {"time": "3 min", "partition": "lowpriority", "mem_gb": 1, **asked}
    return executor(place / "site.yaml", place / "logs", **asked)


def until(what: Callable[[], object], within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not what():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.1)


def links_of(rundir: RunDir) -> tuple[LinkSummary, ...]:
    return read_status(rundir).links


# ── what the jobs do ──────────────────────────────────────────────────────────────────────
def work_in_links(*_: object) -> dict[str, Any]:
    """Waits in link 1 until it is noticed, and ends that link by itself."""
    environment = submitit.JobEnvironment()
    root, rank = Path(os.environ["HPC_CKPT_ROOT"]), environment.global_rank
    if os.environ["HPC_CKPT_GENERATION"] == "1":
        (root / f"begun-{rank}").write_text(environment.job_id)
        while not Path(os.environ["HPC_CKPT_NOTICE"]).exists():
            time.sleep(0.05)
        time.sleep(0 if rank else 1.0)  # rank 0 has more to save
        raise LinkEnded("notice: test")
    return {
        "link": int(os.environ["HPC_CKPT_GENERATION"]),
        "rank": rank,
        "signal": os.environ["SUBMITIT_PREEMPT_SIGNAL"],
        "prologue": os.environ["FROM_THE_PROFILE"],
        "restarts": os.environ["SLURM_RESTART_COUNT"],
    }


COMMAND = """
echo "link $HPC_CKPT_GENERATION of $1"
[ "$HPC_CKPT_GENERATION" = 1 ] || exit 0
echo "$SLURM_JOB_ID" >"$HPC_CKPT_ROOT/begun-0"
while [ ! -e "$HPC_CKPT_NOTICE" ]; do sleep 0.1; done
exit 75
"""


def train(epochs: int, step_s: float) -> dict[str, Any]:
    """A deterministic training; the weights as lists."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from hpc_ckpt import Checkpointer

    torch.manual_seed(3)
    data = TensorDataset(torch.randn(200, 16), torch.randint(0, 4, (200,)))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters())
    with Checkpointer(policy="every 50 steps", model=model, optimizer=optimizer) as ckpt:
        for _ in ckpt.epochs(epochs):
            for inputs, labels in ckpt.batches(loader):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(step_s)
                ckpt.step(loss=loss)
    return {name: value.tolist() for name, value in model.state_dict().items()}


def wait_for_ever() -> None:
    (Path(os.environ["HPC_CKPT_ROOT"]) / "begun-0").touch()
    while not Path(os.environ["HPC_CKPT_NOTICE"]).exists():
        time.sleep(0.05)
    raise LinkEnded("notice: test")


def lose_node_once() -> int:
    root, generation = Path(os.environ["HPC_CKPT_ROOT"]), int(os.environ["HPC_CKPT_GENERATION"])
    (root / f"node-{generation}").write_text(os.environ["SLURMD_NODENAME"])
    if generation == 1:
        time.sleep(600)
    return generation


def die() -> None:
    os.kill(os.getpid(), 9)


# ── the promise ───────────────────────────────────────────────────────────────────────────
def test_a_function_across_a_limit_and_a_preemption_gives_the_same_result(
    accounted: DevCluster, jobs: submitit.AutoExecutor, place: Path
) -> None:
    """The Checkpointer inside it knows nothing of submitit."""
    job = jobs.submit(ChainTask(train, place / "runs/train"), EPOCHS, 0.03)
    rundir = RunDir(place / "runs/train")
    until(lambda: reached_by_commit(rundir, 1))
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 6))
    accounted.run("scontrol", "update", f"jobid={job.job_id}", f"EndTime={moment}")
    until(lambda: reached_by_commit(rundir, 2))
    # The moved end has become the limit of all further links.
    accounted.run("scontrol", "update", f"jobid={job.job_id}", "timelimit=3")
    preempt(accounted)
    expected = without_interruption(place, train, EPOCHS, 0.0)
    assert expected == job.result()
    first, second, *more = links_of(rundir)
    assert ["time limit", "preempted"] == [first.cause, second.cause]
    assert ["complete"] == [link.cause for link in more]
    assert [0, 0] == [first.lost_steps, second.lost_steps]
    assert first.step_to == second.step_from


def without_interruption(place: Path, function: Callable[..., Any], *args: Any) -> Any:
    """What a plain process gets from it."""
    script = "import sys, cloudpickle as c; f, a, out = c.load(sys.stdin.buffer); "
    script += "c.dump(f(*a), open(out, 'wb'))"
    subprocess.run(
        [sys.executable, "-c", script],
        input=cloudpickle.dumps((function, args, str(place / "expected.pkl"))),
        env={**os.environ, "HPC_CKPT_ROOT": str(place / "runs/whole")},
        check=True,
    )
    return cloudpickle.loads((place / "expected.pkl").read_bytes())


def reached_by_commit(rundir: RunDir, generation: int) -> bool:
    return any(key.generation == generation for key in rundir.committed())


def preempt(cluster: DevCluster) -> None:
    """A job of the higher partition that needs every node."""
    wanted = ["sbatch", "-p", "gpu", f"-N{len(cluster.nodes)}", "--exclusive", "-o", "/dev/null"]
    cluster.run(*wanted, "-t", "5", "--wrap", "sleep 1")


# ── one interruption of many jobs at once ─────────────────────────────────────────────────
@dataclass
class Interrupted:
    """Jobs that were all warned once, with the profile's signal."""

    single: submitit.Job[Any]
    array: list[submitit.Job[Any]]
    command: submitit.Job[Any]
    ranks: submitit.Job[Any]
    text: str
    """The script of the first."""


@pytest.fixture(scope="module")
def interrupted(accounted: DevCluster, jobs: submitit.AutoExecutor, place: Path) -> Interrupted:
    """Slurm takes seconds to bring a job back: they all wait together."""
    several = make(place, tasks_per_node=2)
    command = ["bash", "-c", COMMAND, "bash"]
    found = Interrupted(
        single=jobs.submit(ChainTask(work_in_links, place / "runs/single")),
        array=jobs.map_array(ChainTask(work_in_links, place / "runs/array-{}"), [0.1, 0.01]),
        command=jobs.submit(ChainTask(command, place / "runs/command"), "a chain"),
        ranks=several.submit(ChainTask(work_in_links, place / "runs/ranks")),
        text="",
    )
    names = ["single", "array-0.1", "array-0.01", "command", "ranks"]
    begun = [place / "runs" / name / "begun-0" for name in names]
    until(lambda: all(path.exists() for path in [*begun, place / "runs/ranks/begun-1"]))
    # A link that was killed in the middle of submitit's own rewrite leaves this behind.
    pickle = found.command.paths.submitted_pickle
    pickle.with_suffix(".pkl.save_tmp").write_bytes(b"half of it")
    for path in begun:
        accounted.run("scancel", "--signal=USR1", path.read_text().strip())
    found.text = found.single.paths.submission_file.read_text()
    return found


def test_script_and_runtime_have_the_profiles_signal(interrupted: Interrupted) -> None:
    """submitit's USR2 would meet a program that waits for USR1."""
    assert "#SBATCH --signal=USR1@5\n" in interrupted.text
    result = interrupted.single.result()
    assert (2, "USR1", "1", "1") == (
        result["link"], result["signal"], result["prologue"], result["restarts"],
    )  # fmt: skip
    said = interrupted.single.stdout() or ""
    assert "Caught signal SIGUSR1" in said


def test_a_short_job_does_not_use_up_submitits_time_outs(interrupted: Interrupted) -> None:
    """Of a job of three minutes every end counts as one, and three are borne."""
    interrupted.single.result()
    said = interrupted.single.stdout() or ""
    assert "this job is timed-out" in (interrupted.single.stderr() or "") + said
    remaining = re.search(r"\((\d+) remaining timeouts\)", said)
    assert remaining is not None and int(remaining[1]) > 10**6


def test_the_members_of_an_array_come_back_one_by_one(
    interrupted: Interrupted, place: Path
) -> None:
    """Each with a root of its own; the requeue of one must not be that of all."""
    assert [(2, "1"), (2, "1")] == [
        (result["link"], result["restarts"]) for result in (j.result() for j in interrupted.array)
    ]
    first = lease.holder_of(RunDir(place / "runs/array-0.1"), 1)
    assert first is not None and interrupted.array[0].job_id == first.job
    assert "_" in interrupted.array[0].job_id


def test_a_plain_command_comes_back_over_a_half_written_pickle(
    interrupted: Interrupted, place: Path
) -> None:
    """submitit never requeues a command at its limit, and refuses a second temporary file."""
    assert 0 == interrupted.command.result()
    said = interrupted.command.stdout() or ""
    assert "link 1 of a chain\n" in said
    assert "link 2 of a chain\n" in said


def test_every_rank_ends_and_comes_back(interrupted: Interrupted, accounted: DevCluster) -> None:
    """submitit lets the others run on; here they leave with 0 while rank 0 still saves."""
    results = interrupted.ranks.results()
    assert [(0, 2), (1, 2)] == [(result["rank"], result["link"]) for result in results]
    said = interrupted.ranks.task(1).stdout() or ""
    assert "Not checkpointing nor requeuing" not in said


# ── the rest ──────────────────────────────────────────────────────────────────────────────
def test_a_node_failure_is_not_the_end_of_a_job(
    accounted: DevCluster, jobs: submitit.AutoExecutor, place: Path
) -> None:
    """sacct says NODE_FAIL, which submitit takes for the end; Slurm runs the job again."""
    job = jobs.submit(ChainTask(lose_node_once, place / "runs/node"))
    record = place / "runs/node/node-1"
    until(record.exists)
    node = record.read_text()
    accounted.kill_node(node)

    def failed() -> bool:
        shown = accounted.run("sacct", "-D", "-X", "-n", "-P", "-j", job.job_id, "-o", "State")
        return "NODE_FAIL" in shown.stdout

    try:
        plain = submitit.SlurmJob[Any](folder=place / "logs", job_id=job.job_id)
        watcher = plain.watcher
        # For about a second, until the second record of the job is in the database.
        until(lambda: watcher.get_state(job.job_id, "force") == "NODE_FAIL" or failed())
        assert watcher.is_done(job.job_id, "cache") == (
            watcher.get_state(job.job_id, "cache") == "NODE_FAIL"
        )
        assert not job.done(force_check=True)
        assert 2 == job.result()
    finally:
        accounted.restart_node(node)
    assert node != (place / "runs/node/node-2").read_text()


def test_a_pickle_that_was_lost_in_the_rewrite_is_found_again(
    accounted: DevCluster, place: Path
) -> None:
    """Killed between remove and rename, submitit leaves only the temporary file."""
    held = make(place, additional_parameters={"hold": True})
    job = held.submit(ChainTask(os.getcwd, place / "runs/lost"))
    path = job.paths.submitted_pickle
    path.rename(path.with_suffix(".pkl.save_tmp"))
    accounted.run("scontrol", "release", job.job_id)
    assert isinstance(job.result(), str)


def test_a_cancelled_job_saves_and_stays_away(
    accounted: DevCluster, jobs: submitit.AutoExecutor, place: Path
) -> None:
    """scancel sends the same TERM as a preemption."""
    job = jobs.submit(ChainTask(wait_for_ever, place / "runs/cancelled"))
    until((place / "runs/cancelled/begun-0").exists)
    job.cancel()
    with pytest.raises(FailedJobError, match="the chain stops: the job was cancelled"):
        job.result()
    until(lambda: job.job_id not in accounted.run("squeue", "-h", "-o", "%i").stdout.split())


def test_a_job_that_just_dies_is_seen_to_be_over(
    accounted: DevCluster, jobs: submitit.AutoExecutor, place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Also where sacct cannot be asked: it has left the queue."""
    monkeypatch.setattr(submitit.SlurmJob, "_results_timeout_s", 1)
    monkeypatch.setattr(tasks, "ASK_EVERY_S", 1.0)
    job = jobs.submit(ChainTask(die, place / "runs/dies"))
    monkeypatch.setattr(type(job.watcher), "_make_command", lambda self: ["false"])
    with pytest.raises(UncompletedJobError, match="has not produced any output"):
        job.result()


def has_interpreter(folder: Path) -> bool:
    """Whether the Python of a job of that folder has begun."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"submitit.core._submit" in words and b"python" in words[0]:
                return any(os.fsencode(folder) in word for word in words)
    return False


def test_signals_during_the_imports_end_nothing(
    accounted: DevCluster, jobs: submitit.AutoExecutor, place: Path
) -> None:
    """The default action of USR1 is death. Once submitit listens, and before the task does, its
    own answer is to put the job back: it comes again, and does its work then."""
    job = jobs.submit(ChainTask(os.getcwd, place / "runs/early"))
    until(lambda: has_interpreter(jobs.folder))  # before that no shell has heard of signals
    root = RunDir(place / "runs/early")
    for _ in range(8):
        if lease.highest(root):
            break
        # A step that is just being made refuses.
        accounted.run("scancel", "--signal=USR1", job.job_id, check=False)
        time.sleep(0.2)
    assert isinstance(job.result(), str)


def submit_another(place: str) -> Any:
    """From inside a job: a job of its own, not a step of this one."""
    os.environ["SLURM_CPU_BIND"] = "nonsense:0xdead"  # leaks into every srun below
    inner = executor(f"{place}/site.yaml", f"{place}/logs", time="3 min", partition="lowpriority")
    return os.environ["SLURM_JOB_ID"], inner.submit(ChainTask(inside, f"{place}/runs/in")).result()


def inside() -> tuple[str, str]:
    return os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_CPU_BIND", "none")


def test_a_job_submitted_inside_a_job_inherits_nothing_of_it(
    jobs: submitit.AutoExecutor, place: Path
) -> None:
    """SLURM_CONF alone is kept, without which it would look for another cluster."""
    outer, (inner, bound) = jobs.submit(
        ChainTask(submit_another, place / "runs/out"), str(place)
    ).result()
    assert outer != inner
    assert "nonsense" not in bound


def test_a_site_without_requeue_says_so_after_the_save(accounted: DevCluster, place: Path) -> None:
    """The work is not lost; somebody has to submit it again."""
    (place / "strict.yaml").write_text(PROFILE + "chain: {requeue: false}\n")
    jobs = executor(place / "strict.yaml", place / "logs", time="3 min", partition="lowpriority")
    job = jobs.submit(ChainTask(wait_for_ever, place / "runs/strict"))
    until((place / "runs/strict/begun-0").exists)
    accounted.run("scancel", "--signal=USR1", job.job_id)
    with pytest.raises(FailedJobError, match="the work is saved, but"):
        job.result()
