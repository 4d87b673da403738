"""Tasks through submitit's local executor: real processes, real signals, real pickles."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import submitit
from submitit.core.utils import FailedJobError, UncompletedJobError

from hpc_ckpt import Chain, ChainTask, LinkEnded, executor, lease
from hpc_ckpt.chain.ledger import read_status
from hpc_ckpt.chain.site import slurm
from hpc_ckpt.errors import RootError
from hpc_ckpt.rundir import RunDir

# The job's process cannot import a test module: its functions travel in the pickle.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> submitit.AutoExecutor:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(slurm, "cluster_name", lambda: None)
    return executor("local", tmp_path / "logs", time=1)


def until(what: Callable[[], object], within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not what():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.02)


def announce(root: Path, generation: int) -> None:
    """Tell the test which process to signal."""
    (root / f"pid-{generation}.tmp").write_text(str(os.getpid()))
    (root / f"pid-{generation}.tmp").rename(root / f"pid-{generation}")


def process_of(place: RunDir, generation: int) -> int:
    path = place.root / f"pid-{generation}"
    until(path.exists)
    return int(path.read_text())


def work_in_links(links: int, argument: list[str]) -> tuple[int, str, list[str]]:
    """One step a link; ends each link but the last when it is noticed."""
    root, generation = Path(os.environ["HPC_CKPT_ROOT"]), int(os.environ["HPC_CKPT_GENERATION"])
    seen = list(argument)
    argument.append("changed by the work")
    announce(root, generation)
    if generation < links:
        notice = Path(os.environ["HPC_CKPT_NOTICE"])
        while not notice.exists():
            time.sleep(0.02)
        raise LinkEnded("notice: test")
    return generation, os.environ["SUBMITIT_PREEMPT_SIGNAL"], seen


def test_a_function_goes_on_in_the_next_link_more_often_than_submitit_would(
    jobs: submitit.AutoExecutor, tmp_path: Path
) -> None:
    """Every end of a short job is a time-out for submitit, which bears three; and the work
    begins each time with the arguments it was given, not with what became of them."""
    job = jobs.submit(ChainTask(work_in_links, "run"), 6, ["as given"])
    place = RunDir(tmp_path / "run")
    for generation in range(1, 6):
        number = signal.SIGTERM if generation % 2 else signal.SIGUSR1
        os.kill(process_of(place, generation), number)
    assert (6, "USR1", ["as given"]) == job.result()
    causes = [link.cause for link in read_status(place).links]
    by_turns = ["saved and left", "time limit"] * 3
    assert [*by_turns[:5], "complete"] == causes


def test_a_half_written_pickle_does_not_poison_the_next_requeue(
    jobs: submitit.AutoExecutor, tmp_path: Path
) -> None:
    """submitit refuses to write where a killed link has left its temporary file."""
    job = jobs.submit(ChainTask(work_in_links, "run"), 2, [])
    place = RunDir(tmp_path / "run")
    pid = process_of(place, 1)
    for path in (job.paths.submitted_pickle, job.paths.result_pickle):
        path.with_suffix(".pkl.save_tmp").write_bytes(b"half of it")
    os.kill(pid, signal.SIGUSR1)
    assert 2 == job.result()[0]


def deaf(root: str) -> str:
    """Knows nothing of notices; only the second link is quick."""
    generation = int(os.environ["HPC_CKPT_GENERATION"])
    if generation == 1:
        time.sleep(60)
    return f"{root} {generation}"


def test_a_function_that_ends_no_link_is_put_back_at_its_limit(
    tmp_path: Path, jobs: submitit.AutoExecutor
) -> None:
    """As submitit would do it, but in the last moment: it might have finished."""
    jobs.update_parameters(local_timeout_min=0.1)
    job = jobs.submit(ChainTask(deaf, "runs/{}"), "a b")
    assert "a b 2" == job.result()
    place = RunDir(tmp_path / "runs/a-b")
    assert ["time limit", "complete"] == [link.cause for link in read_status(place).links]
    notice = place.notice(1)
    assert notice is not None and ("SIGUSR1",) == notice.sources
    deadline = place.deadline(1)
    assert deadline is not None
    assert 2 < deadline - notice.time < 5  # half of six seconds before the end


def stuck() -> None:
    time.sleep(60)


def test_one_that_never_gets_anywhere_ends_with_a_clear_error(
    tmp_path: Path, jobs: submitit.AutoExecutor
) -> None:
    """Two links, then no third."""
    jobs.update_parameters(local_timeout_min=0.1)
    job = jobs.submit(ChainTask(stuck, "run"))
    with pytest.raises(FailedJobError, match="no progress in two links running"):
        job.result()
    assert 2 == lease.highest(RunDir(tmp_path / "run"))


COMMAND = """
echo "link $HPC_CKPT_GENERATION of $1"
[ "$HPC_CKPT_GENERATION" = 1 ] || exit "$2"
echo $PPID >pid-1.tmp; mv pid-1.tmp "$HPC_CKPT_ROOT/pid-1"
while [ ! -e "$HPC_CKPT_NOTICE" ]; do sleep 0.05; done
exit 75
"""


@pytest.mark.parametrize("last", [0, 3])
def test_a_plain_command_is_requeued(
    jobs: submitit.AutoExecutor, tmp_path: Path, last: int
) -> None:
    """submitit's CommandFunction is not, and keeps all output in memory."""
    job = jobs.submit(ChainTask(["bash", "-c", COMMAND, "bash"], "run"), "one", last)
    os.kill(process_of(RunDir(tmp_path / "run"), 1), signal.SIGUSR1)
    if last == 0:
        assert 0 == job.result()
    else:
        with pytest.raises(FailedJobError, match="bash: exit code 3"):
            job.result()
    said = job.stdout() or ""
    assert "link 1 of one\n" in said
    assert "link 2 of one\n" in said


def test_a_command_that_is_not_there(jobs: submitit.AutoExecutor) -> None:
    """Said in one line, with its name."""
    job = jobs.submit(ChainTask(["no-such-program"], "run"))
    with pytest.raises(FailedJobError, match="no command 'no-such-program' on this node"):
        job.result()


def rank_in_links() -> tuple[int, int]:
    """Every rank ends its link by itself; rank 0 takes longer over it."""
    environment = submitit.JobEnvironment()
    rank, generation = environment.global_rank, int(os.environ["HPC_CKPT_GENERATION"])
    if generation == 1:
        announce(Path(os.environ["HPC_CKPT_ROOT"]), rank)
        while not Path(os.environ["HPC_CKPT_NOTICE"]).exists():
            time.sleep(0.02)
        time.sleep(0 if rank else 0.5)
        raise LinkEnded("notice: test")
    return rank, generation


def rank_in_turn() -> int:
    """Rank 0 is over before any other has looked for it."""
    return submitit.JobEnvironment().global_rank


class LateTask(ChainTask):
    """Ranks above 0 come late."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if submitit.JobEnvironment().global_rank:
            time.sleep(4.0)
        return super().__call__(*args, **kwargs)


def test_a_rank_that_comes_late_finds_the_link_of_a_rank_0_that_is_done(
    jobs: submitit.AutoExecutor, tmp_path: Path
) -> None:
    """It would look for a living rank 0 until the launcher kills it."""
    jobs.update_parameters(tasks_per_node=2)
    job = jobs.submit(LateTask(rank_in_turn, "run"))
    assert [0, 1] == job.results()


def test_all_ranks_of_a_job_end_and_come_back(jobs: submitit.AutoExecutor, tmp_path: Path) -> None:
    """submitit's callback lets other ranks than 0 run on until they are killed."""
    jobs.update_parameters(tasks_per_node=2)
    job = jobs.submit(ChainTask(rank_in_links, "run"))
    place = RunDir(tmp_path / "run")
    for pid in [process_of(place, 0), process_of(place, 1)]:
        os.kill(pid, signal.SIGUSR1)
    assert [(0, 2), (1, 2)] == job.results()


def train(epochs: int, step_s: float) -> dict[str, Any]:
    """A deterministic training; the weights as lists."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from hpc_ckpt import Checkpointer

    torch.manual_seed(3)
    data = TensorDataset(torch.randn(80, 8), torch.randint(0, 3, (80,)))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters())
    with Checkpointer(policy="every 7 steps", model=model, optimizer=optimizer) as ckpt:
        for _ in ckpt.epochs(epochs):
            for inputs, labels in ckpt.batches(loader):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(step_s)
                ckpt.step(loss=loss)
                if ckpt.global_step == 12:
                    announce(Path(os.environ["HPC_CKPT_ROOT"]), 1)
    return {
        "restored": ckpt.restored is not None,
        "weights": {name: value.tolist() for name, value in model.state_dict().items()},
    }


def test_a_checkpointer_inside_works_unchanged_and_gives_the_same_weights(
    jobs: submitit.AutoExecutor, tmp_path: Path
) -> None:
    """Interrupted once in an epoch, and not at all."""
    interrupted = jobs.submit(ChainTask(train, "runs/{}"), 4, 0.02)
    place = RunDir(tmp_path / "runs/4")
    os.kill(process_of(place, 1), signal.SIGUSR1)
    whole = jobs.submit(ChainTask(train, "runs/{}-{}"), 4, 0.0)
    assert interrupted.result()["restored"]
    assert not whole.result()["restored"]
    assert whole.result()["weights"] == interrupted.result()["weights"]
    first, second = read_status(place).links
    assert 12 <= first.step_to == second.step_from < 40
    assert 0 == first.lost_steps
    assert "SIGUSR1" in first.reason


def test_a_cancelled_job_leaves_nothing_running(
    jobs: submitit.AutoExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local executor interrupts its processes; a command's own are ended with it."""
    monkeypatch.setattr(submitit.LocalJob, "_results_timeout_s", 1)
    script = "echo $PPID >p; mv p pid-1; sleep 600.03125"
    job = jobs.submit(ChainTask(["bash", "-c", f'cd "$HPC_CKPT_ROOT"; {script}'], "run"))
    process_of(RunDir(tmp_path / "run"), 1)
    job.cancel()
    with pytest.raises((FailedJobError, UncompletedJobError)):
        job.result()
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in lines if b"600.03125" in line]


def test_a_chain_that_is_stopped_ends_and_goes_on_when_submitted_again(
    jobs: submitit.AutoExecutor, tmp_path: Path
) -> None:
    """`hpc-ckpt stop` is the same for all chains; while it runs nobody else gets the root."""
    task = ChainTask(work_in_links, "run")
    job = jobs.submit(task, 3, [])
    process_of(RunDir(tmp_path / "run"), 1)
    with pytest.raises(RootError, match="in use by process"):
        jobs.submit(task, 3, [])
    Chain(tmp_path / "run").stop()
    with pytest.raises(FailedJobError, match="the chain stops: halted"):
        job.result()
    assert 2 == jobs.submit(task, 2, []).result()[0]


def test_submitits_own_executor_works_too_with_its_own_signal(
    jobs: submitit.AutoExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What submitit uses in the job is what the task listens to."""
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "USR2")
    plain = submitit.AutoExecutor(tmp_path / "plain", cluster="local")
    plain.update_parameters(timeout_min=1)
    job = plain.submit(ChainTask(work_in_links, "run"), 2, [])
    os.kill(process_of(RunDir(tmp_path / "run"), 1), signal.SIGUSR2)
    assert (2, "USR2", []) == job.result()
