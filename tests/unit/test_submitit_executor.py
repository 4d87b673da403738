"""The executor for a site: the script's text, the names of parameters, who is done."""

import os
import stat
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import submitit
from submitit.core.utils import DelayedSubmission

from hpc_ckpt.chain import site as site_room
from hpc_ckpt.chain import tasks
from hpc_ckpt.chain.allocation import UNKNOWN_RUN_S
from hpc_ckpt.chain.backend import JobRecord
from hpc_ckpt.chain.plan import DEFAULT_LINKS
from hpc_ckpt.chain.profile import Profile
from hpc_ckpt.chain.site import Site, directive, scrubbed, setup_lines
from hpc_ckpt.chain.succession import AWAY_RETRY_S
from hpc_ckpt.chain.tasks import ChainTask, QueueWatcher, SiteExecutor, executor
from hpc_ckpt.errors import RootError, SchedulerError, SpecError
from hpc_ckpt.rundir import RunDir

PROFILE: dict[str, Any] = {
    "cluster": "test",
    "signal": {"name": "USR1", "lead": "120s"},
    "environment": {"modules": ["cuda/12"], "prologue": "export A=1\nexport B=2\n"},
    "directives": {"extra": ["--constraint=ib", "--exclusive"], "skip": ["--mem"]},
}


@pytest.fixture
def on_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """submitit looks for srun on the PATH; nothing is submitted here."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in {"srun": "", "squeue": "echo 41_2"}.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")


def made(tmp_path: Path, profile: dict[str, Any] = PROFILE, **asked: Any) -> SiteExecutor:
    site = Site(Profile(**{**PROFILE, **profile}), on_slurm=True, record={})
    found = SiteExecutor(tmp_path / "logs", site)
    found.update_parameters(**asked)
    return found


def script(found: SiteExecutor) -> str:
    inner = found._executor
    return inner._make_submission_file_text(inner._submitit_command_str, "uid")


def test_one_setting_of_the_signal_for_script_and_runtime(on_slurm: None, tmp_path: Path) -> None:
    """submitit's own is USR2, in the script and in the job."""
    text = script(made(tmp_path))
    assert "#SBATCH --signal=USR1@120\n" in text
    assert "export SUBMITIT_PREEMPT_SIGNAL=USR1\n" in text
    assert "USR2@" not in text


def test_the_script_has_what_the_profile_says(on_slurm: None, tmp_path: Path) -> None:
    """Requeue, directives, modules and prologue; no wckey; ranks do not end each other."""
    text = script(made(tmp_path, time="8h", partition="gpu", gpus=2, mem_gb=4))
    for line in (
        "#SBATCH --requeue",
        "#SBATCH --constraint=ib",
        "#SBATCH --exclusive",
        "#SBATCH --time=480",
        "#SBATCH --partition=gpu",
        "#SBATCH --gpus-per-node=2",
        "export A=1",
    ):
        assert f"{line}\n" in text
    assert "--mem=" not in text
    assert "wckey" not in text
    assert "module load cuda/12 || " in text
    assert "--kill-on-bad-exit=0 --wait=0" in text
    assert text.index("module load") < text.index("export A=1") < text.index("\nsrun ")


def test_a_site_that_does_not_requeue(on_slurm: None, tmp_path: Path) -> None:
    """Slurm is told so as well: a job that comes back uncalled would be the second one."""
    text = script(made(tmp_path, {"chain": {"requeue": False}}))
    assert "#SBATCH --no-requeue\n" in text
    assert "#SBATCH --requeue\n" not in text


def test_what_is_asked_for_later_does_not_push_the_site_out(on_slurm: None, tmp_path: Path) -> None:
    """submitit replaces lists and mappings whole."""
    found = made(tmp_path, setup=["export MINE=1"], srun_args=["--label"])
    found.update_parameters(slurm_additional_parameters={"comment": "x"}, slurm_signal_delay_s=60)
    found.update_parameters(timeout_min=30)
    text = script(found)
    assert "#SBATCH --signal=USR1@60\n" in text
    assert "#SBATCH --comment=x\n" in text
    assert "#SBATCH --requeue\n" in text
    assert "export MINE=1\n" in text
    assert "export SUBMITIT_PREEMPT_SIGNAL=USR1\n" in text
    assert "--wait=0 --label" in text


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"partion": "gpu"}, "unknown key 'partion'. Did you mean 'partition'?"),
        ({"slurm_partion": "gpu"}, "Unknown argument 'partion' for executor 'slurm'"),
        ({"additional_parameters": {"signal": "USR2@5"}}, "signal: the profile alone says which"),
        ({"timeout_min": 1.5}, "expected type"),
        ({"time": "soon"}, "'soon' is not a duration"),
    ],
)
def test_mistakes_are_one_line(
    on_slurm: None, tmp_path: Path, asked: dict[str, Any], message: str
) -> None:
    """submitit answers with pages, or with an assertion."""
    with pytest.raises(SpecError) as error:
        made(tmp_path, **asked)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_link_too_short_for_its_warning_is_refused(on_slurm: None, tmp_path: Path) -> None:
    """submitit's default of five minutes would be warned at the start, every time."""
    found = made(tmp_path)
    with pytest.raises(SpecError, match="time: 5m is too short for a warning 2m before the end"):
        found.submit(ChainTask(print, tmp_path / "run"))


def test_two_tasks_on_one_root_are_refused(on_slurm: None, tmp_path: Path) -> None:
    """They would fence each other."""
    found = made(tmp_path, time="1h")
    with pytest.raises(SpecError, match="would share"):
        found.map_array(ChainTask(print, tmp_path / "run"), [1, 2])


def test_a_root_with_a_job_in_the_queue_is_refused(on_slurm: None, tmp_path: Path) -> None:
    """The member of the array that squeue shows is one of its jobs."""
    place = RunDir(tmp_path / "run")
    place.create()
    place.chain_file.write_text('{"jobs": ["41"]}')
    with pytest.raises(RootError, match="job 41 is a chain on it already"):
        made(tmp_path, time="1h").submit(ChainTask(print, place.root))


def test_healing_lines_find_the_pickle_of_any_folder() -> None:
    """Also of one whose name has quotes, or submitit's patterns."""
    lines = setup_lines(Profile(cluster="x"), Path("/a b/it's/%A/%j"))
    (line,) = [line for line in lines if line.startswith("pickle=")]
    expected = "pickle='/a b/it'\\''s/'\"${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}\"'/'\"$job\"'/'"
    assert expected + "\"$job\"'_submitted.pkl'" == line


def test_directives_as_submitit_wants_them() -> None:
    """Names without dashes, True where there is no value."""
    assert ("constraint", "a&b") == directive("--constraint=a&b")
    assert ("licenses", "fluent:2") == directive("--licenses fluent:2")
    assert ("exclusive", True) == directive("--exclusive")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM", "SBATCH", "PMI", "SUBMITIT", "HPC_CKPT")):
            monkeypatch.delenv(name)


def test_nothing_of_a_job_around_it_reaches_the_new_one(
    environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM_CONF stays: it says which Slurm is meant."""
    inherited = {
        "SLURM_JOB_ID": "7",
        "SLURM_CPU_BIND": "x",
        "SBATCH_PARTITION": "p",
        "PMI_RANK": "0",
        "PMIX_RANK": "0",
        "SUBMITIT_EXECUTOR": "slurm",
        "HPC_CKPT_GENERATION": "3",
    }
    kept = {"SLURM_CONF": "/etc/x", "HPC_CKPT__CHECKPOINT__POLICY": "every 3 steps"}
    for name, value in {**inherited, **kept}.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with scrubbed("USR1"):
        assert set() == set(inherited) & set(os.environ)
        assert kept == {name: os.environ[name] for name in kept}
        assert "USR1" == os.environ["SUBMITIT_PREEMPT_SIGNAL"]
    assert before == dict(os.environ)


def test_on_a_login_node_the_users_own_defaults_for_sbatch_stay(
    environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SBATCH_ACCOUNT in a shell's start-up file is meant."""
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    with scrubbed("USR1"):
        assert "mine" == os.environ["SBATCH_ACCOUNT"]


def test_without_a_slurm_it_is_the_local_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the profile is a cluster's; what only Slurm knows is passed over."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(site_room.slurm, "cluster_name", lambda: None)
    for profile in (None, "local", "explorer"):
        found = executor(profile, partition="gpu", gpus=0, time="10 min")
        assert isinstance(found, submitit.AutoExecutor)
        assert "local" == found.cluster
        assert 10 == found.parameters["timeout_min"]


# ── who is done ───────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("state", "queued", "done"),
    [
        ("RUNNING", False, False),
        ("SUSPENDED", False, False),
        ("REQUEUED", False, False),
        ("NODE_FAIL", True, False),
        ("NODE_FAIL", False, True),
        ("PREEMPTED", True, False),
        ("PREEMPTED", False, True),
        ("TIMEOUT", True, False),
        ("CANCELLED by 0", False, True),
        ("COMPLETED", False, True),
        ("UNKNOWN", True, False),
        ("UNKNOWN", False, True),
        ("UNKNOWN", None, False),
    ],
)
def test_a_job_is_done_when_it_has_left_the_queue(
    monkeypatch: pytest.MonkeyPatch, state: str, queued: bool | None, done: bool
) -> None:
    """submitit believes sacct, which says NODE_FAIL of a job that Slurm runs again."""
    answer = None if queued is None else {"5_1"} if queued else {"6"}
    monkeypatch.setattr(tasks, "queue", lambda: answer)
    watcher = QueueWatcher()
    monkeypatch.setattr(watcher, "get_state", lambda job_id, mode: state)
    watcher.register_job("5_1")
    assert not watcher.is_done("5_1", mode="cache")  # asks nobody, so it cannot know
    assert done == watcher.is_done("5_1")


def test_the_queue_is_asked_at_most_every_30_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting result() looks every second; a new job makes the old answer void."""
    asked: list[int] = []
    monkeypatch.setattr(tasks, "queue", lambda: asked.append(1) or {"5"})
    watcher = QueueWatcher()
    monkeypatch.setattr(watcher, "get_state", lambda job_id, mode: "UNKNOWN")
    watcher.register_job("5")
    for _ in range(20):
        assert not watcher.is_done("5")
    assert 1 == len(asked)
    watcher.register_job("6")
    assert watcher.is_done("6")
    assert 2 == len(asked)


# ── tasks ─────────────────────────────────────────────────────────────────────────────────
def test_the_root_depends_on_the_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value is one word of a path, whatever is in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHO", "me")
    task = ChainTask(print, "runs/${WHO}/lr-{:.2f}-{name}")
    assert tmp_path / "runs/me/lr-0.10-a-b" == task.root_of(0.1, name="a/b")
    assert tmp_path / "runs/-" == ChainTask(print, "runs/{}").root_of("..")
    assert tmp_path / "plain" == ChainTask(print, "plain").root_of(1, 2)
    with pytest.raises(SpecError, match="does not fit the arguments"):
        task.root_of(1)


@pytest.mark.parametrize("work", ["python train.py", [], ["", "x"], 5, None])
def test_work_is_a_function_or_words(work: Any) -> None:
    """A shell line is bash's to run: ["bash", "-c", …]."""
    with pytest.raises(SpecError, match="neither a function nor a list of words"):
        ChainTask(work, "runs/x")


@pytest.mark.parametrize("most", [-1, True, "3"])
def test_max_restarts_is_a_number(most: Any) -> None:
    """Zero means one link."""
    with pytest.raises(SpecError, match="max_restarts"):
        ChainTask(print, "runs/x", max_restarts=most)


@pytest.mark.parametrize("most", [0, True, 1.5])
def test_max_links_is_a_number(most: Any) -> None:
    with pytest.raises(SpecError, match="max_links"):
        ChainTask(print, "runs/x", max_links=most)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (None, DEFAULT_LINKS)),
        ({"max_links": 40}, (None, 40)),
        ({"max_restarts": 40}, (40, None)),
        ({"max_restarts": 40, "max_links": 5}, (40, 5)),
    ],
)
def test_a_task_has_the_budget_of_a_chain(
    asked: dict[str, int],
    expected: tuple[int | None, int | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing runs for ever that nobody has given a number to."""
    told: list[tuple[int | None, int | None]] = []

    class Link:
        def __init__(self, *_: Any, max_restarts: Any, max_links: Any, site: Any) -> None:
            told.append((max_restarts, max_links))

        def run(self, _: Any) -> None:
            return None

    monkeypatch.setattr("hpc_ckpt.chain.tasks.TaskLink", Link)
    ChainTask(print, tmp_path / "run", **asked)()
    assert [expected] == told


def test_both_names_of_submitits_hook_are_there(tmp_path: Path) -> None:
    """Its handler looks for one name, its submission for the other."""
    task = ChainTask(print, tmp_path / "run")
    assert hasattr(task, "checkpoint")
    for hook in (task.checkpoint, task.__submitit_checkpoint__):
        again = hook(1, a=2)
        assert isinstance(again, DelayedSubmission)
        assert (task, (1,), {"a": 2}) == (again.function, again.args, again.kwargs)


def test_a_rewritten_submission_can_be_loaded(tmp_path: Path) -> None:
    """submitit refuses a pickle whose class has another name."""
    again = ChainTask(print, tmp_path / "run").checkpoint("x")
    again.set_timeout(7, 3)
    again.dump(tmp_path / "a.pkl")
    loaded = DelayedSubmission.load(tmp_path / "a.pkl")
    assert (("x",), 7, 3) == (loaded.args, loaded._timeout_min, loaded._timeout_countdown)


def test_called_directly_it_is_a_plain_call(tmp_path: Path) -> None:
    """Without a job around it there is nobody to bring it back."""
    task = ChainTask(lambda x: x + 1, tmp_path / "run")
    assert 3 == task(2)
    assert RunDir(tmp_path / "run").done() is not None


# ── back into the queue ───────────────────────────────────────────────────────────────────
class Controller:
    """scontrol, as often away as `answers` say; then it does what it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[list[str]] = []
        self.slept: list[float] = []
        again = partial(tasks._requeue_patiently, run=self.run, sleep=self.slept.append)
        monkeypatch.setattr(tasks, "_requeue_patiently", again)
        monkeypatch.setattr(tasks, "_sweep", lambda _: None)

    def run(self, argv: Sequence[str]) -> str:
        self.asked.append(list(argv))
        if self.answers and argv[1] == "requeue":
            raise SchedulerError(argv, 1, self.answers.pop(0))
        return ""

    def requeue(self) -> int:
        def trigger() -> None:
            raise subprocess.CalledProcessError(1, ["scontrol", "requeue", "41_2"])

        return tasks._requeue(SimpleNamespace(job_id="41_2"), trigger, JobRecord)  # type: ignore[arg-type] # a double


def test_a_controller_that_is_away_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """submitit asks once, and the task would be over."""
    away = "slurm_requeue error: Unable to contact slurm controller (connect failure)"
    there = Controller(monkeypatch, away, away)
    assert 1 == there.requeue()
    assert [["scontrol", "requeue", "41_2"]] * 3 == there.asked
    assert [AWAY_RETRY_S] * 2 == there.slept


def in_task(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"JOB_ID": "43", "ARRAY_JOB_ID": "41", "ARRAY_TASK_ID": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)


def test_a_task_that_was_cancelled_while_the_controller_was_away_is_not_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Cancelling(Controller):
        def run(self, argv: Sequence[str]) -> str:
            super().run(argv)
            return "JobId=43 JobState=COMPLETING Reason=None Restarts=0" if "show" in argv else ""

    in_task(monkeypatch)
    there = Cancelling(monkeypatch)
    with pytest.raises(SchedulerError, match="the work is saved, but the job was cancelled"):
        there.requeue()
    assert "requeue" not in {words[1] for words in there.asked}


def test_a_task_whose_start_the_controller_has_lost_is_not_begun_beside_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says that the task is pending, though it runs: see test_requeue.py."""

    class Forgetful(Controller):
        def run(self, argv: Sequence[str]) -> str:
            super().run(argv)
            return "JobId=41 JobState=PENDING Reason=None Restarts=0" if "show" in argv else ""

    in_task(monkeypatch)
    there = Forgetful(monkeypatch, "Job is pending execution for job 41_2")
    assert 1 == there.requeue()
    later = ["scontrol", "update", "jobid=41_2", f"StartTime=now+{UNKNOWN_RUN_S}"]
    assert later == there.asked[-1]


def test_a_requeue_that_is_refused_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Controller(monkeypatch, "Requested operation is presently disabled")
    with pytest.raises(SchedulerError, match="the work is saved, but Requested operation"):
        there.requeue()
    assert [] == there.slept
