"""A sweep is stopped and taken up as a whole or by member, with few questions to the scheduler."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from sweeps import make_sweep

from hpc_ckpt.chain import slurm, unanswered
from hpc_ckpt.chain.stopping import How, stop_sweep
from hpc_ckpt.chain.sweeping import refuse_if_at_work, resume_members
from hpc_ckpt.errors import RootError, SchedulerError
from hpc_ckpt.rundir import Done, RunDir

FORGOTTEN = "scancel: error: Kill job error on job id 7: Invalid job id specified\n"


class Scheduler:
    """Remembers what it was asked; `live` are the jobs that it still knows."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.live: set[str] = set()
        self.script = "/elsewhere/chain.sbatch"
        self.says = ""

    def __call__(self, argv: Sequence[str], *_: object) -> str:
        self.asked.append(list(argv))
        if argv[0] == "scancel" and self.says:
            raise SchedulerError(argv, 1, self.says)
        if argv[0] == "squeue":
            return "".join(f"{job}|RUNNING|None|{self.script}\n" for job in sorted(self.live))
        return "9\n" if argv[0] == "sbatch" else ""

    def of(self, command: str) -> list[list[str]]:
        return [argv[1:] for argv in self.asked if argv[0] == command]


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    double = Scheduler()
    monkeypatch.setattr(slurm, "run_command", double)
    assert 1 == len(slurm.in_queue.__defaults__ or ())
    monkeypatch.setattr(slurm.in_queue, "__defaults__", (double,))
    monkeypatch.setitem(unanswered.submit.__kwdefaults__ or {}, "run", double)
    return double


def runs(rundir: RunDir, job: str, link: int = 1) -> None:
    holder = {"host": "elsewhere", "job": job, "array": job.partition("_")[0]}
    (rundir.lease / f"{link:08d}").write_text(json.dumps(holder))


def extended(rundir: RunDir, job: str, link: int = 1) -> None:
    """As a link that has submitted the next one."""
    told = {"time": time.time(), "event": "chain.extended", "job": job, "links": 1}
    rundir.ledger_file(link).write_text(json.dumps(told) + "\n")


class Pauses:
    """Time that passes only in pauses."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_member_that_cannot_be_written_to_does_not_keep_the_others(
    tmp_path: Path, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_sweep(tmp_path, 2)
    for number, rundir in enumerate((first, second), 1):
        runs(rundir, f"7_{number}")
    writes = RunDir.write_halt

    def full(rundir: RunDir, reason: str) -> None:
        if rundir.root == first.root:
            raise OSError(errno.ENOSPC, "No space left on device")
        writes(rundir, reason)

    monkeypatch.setattr(RunDir, "write_halt", full)
    with pytest.raises(RootError, match="'scancel 7_1' ends what runs"):
        stop_sweep(tmp_path, How.SAVE)
    assert second.halted() is not None and second.notice(1) is not None
    assert [["--state=PENDING", "7"]] == scheduler.of("scancel")


# ── stop ──────────────────────────────────────────────────────────────────────────────────
def test_a_thousand_members_are_stopped_by_one_scancel(
    tmp_path: Path, scheduler: Scheduler
) -> None:
    made = make_sweep(tmp_path, 1000)
    for number, rundir in enumerate(made):
        runs(rundir, f"7_{number + 1}")
    found = stop_sweep(tmp_path, How.SAVE)
    assert 1000 == len(found.stopped) == len(found.running)
    assert [["--state=PENDING", "7"]] == scheduler.of("scancel")
    assert all(rundir.notice(1) is not None and rundir.halted() for rundir in made)


def test_now_after_a_first_stop_ends_what_still_runs(tmp_path: Path, scheduler: Scheduler) -> None:
    """A member that was halted before is not over as long as its link runs."""
    first, second, third = make_sweep(tmp_path, 3)
    runs(first, "7_1")
    runs(second, "7_2")
    third.write_halt("no progress")
    stop_sweep(tmp_path, How.SAVE)
    (second.lease / "00000001.released").touch()
    pauses = Pauses()
    found = stop_sweep(tmp_path, How.NOW, sleep=pauses.sleep, clock=pauses.clock)
    assert (("x-0",), ("x-0",)) == (found.stopped, found.killed)
    notice = first.notice(1)
    assert notice is not None and notice.hurry
    assert ["7_1"] == scheduler.of("scancel")[-1]
    assert "no progress" == third.halted()


def test_successors_are_cancelled_too(tmp_path: Path, scheduler: Scheduler) -> None:
    """With resubmit they are jobs of their own; one that is forgotten is no error."""
    first, second = make_sweep(tmp_path, 2)
    for rundir, job in ((first, "7_1"), (second, "7_2")):
        runs(rundir, job)
    extended(first, "8")
    scheduler.says = FORGOTTEN
    stop_sweep(tmp_path, How.AFTER_CHECKPOINT)
    assert ["--state=PENDING", "7"] == scheduler.of("scancel")[-1]
    assert first.notice(1) is None
    stop_sweep(tmp_path, How.SAVE)
    assert ["--state=PENDING", "7", "8"] == scheduler.of("scancel")[-1]
    scheduler.says = "scancel: error: no answer\n"
    with pytest.raises(SchedulerError):
        stop_sweep(tmp_path, How.SAVE)


@pytest.mark.parametrize("verb", ["stop", "resume"])
def test_sweep_json_is_not_read_for_every_member(
    verb: str, tmp_path: Path, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cost is counted, not timed: it names all members, so once each costs their square."""
    for number, rundir in enumerate(make_sweep(tmp_path, 50)):
        runs(rundir, f"7_{number + 1}")
    read, opened = Path.read_bytes, []

    def counted(path: Path) -> bytes:
        opened.append(path.name)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    if verb == "stop":
        stop_sweep(tmp_path, How.SAVE)
    else:
        resume_members(tmp_path)
    assert 0 < opened.count("sweep.json") < 10


# ── again ─────────────────────────────────────────────────────────────────────────────────
def test_a_sweep_lives_as_long_as_the_jobs_of_its_members(
    tmp_path: Path, scheduler: Scheduler
) -> None:
    """Its first array may be over and forgotten: members submitted themselves again."""
    first, second = make_sweep(tmp_path, 2)
    runs(first, "7_1")
    (first.lease / "00000001.released").touch()
    extended(first, "8")
    scheduler.live = {"8"}
    with pytest.raises(RootError, match="job 8 is a chain on it already"):
        refuse_if_at_work(tmp_path)
    scheduler.live = {"11_2"}
    runs(second, "11_2")
    with pytest.raises(RootError, match="job 11 is a chain on it already"):
        refuse_if_at_work(tmp_path)
    scheduler.live = set()
    refuse_if_at_work(tmp_path)


def test_a_stopped_sweep_is_taken_up_without_its_spec(tmp_path: Path, scheduler: Scheduler) -> None:
    first, second, third = make_sweep(tmp_path, 3, parallel=2)
    second.write_done(Done(1, None))
    runs(first, "7_1")
    (first.lease / "00000001.released").touch()
    for rundir in (first, third):
        rundir.write_halt("stopped by the user")
    assert ("9", ["x-0", "x-2"]) == resume_members(tmp_path)
    assert "--array=1,3%2" in scheduler.of("sbatch")[0]
    assert ["7", "9"] == json.loads((tmp_path / "sweep.json").read_text())["jobs"]
    assert first.halted() is third.halted() is None
    assert 1 == (first.chain() or {})["after_generation"]


def test_what_a_sweep_had_to_wait_for_is_not_waited_for_again(
    tmp_path: Path, scheduler: Scheduler
) -> None:
    """The script still says it, and Slurm has forgotten that job, or it failed since."""
    (first,) = make_sweep(tmp_path, 1)
    lines = "#!/bin/bash\n#SBATCH --dependency=afterok:12\n"
    (tmp_path / "chain.sbatch").write_text(lines)
    resume_members(tmp_path)
    assert not any("--dependency" in word for word in scheduler.of("sbatch")[-1])
    runs(first, "7_1")
    (first.lease / "00000001.released").touch()
    resume_members(tmp_path)
    assert "--dependency=" in scheduler.of("sbatch")[-1]


def test_one_member_is_taken_up_while_others_run(tmp_path: Path, scheduler: Scheduler) -> None:
    """It is a chain of its own; its own jobs must be over."""
    first, second = make_sweep(tmp_path, 2)
    second.write_halt("stopped by the user")
    runs(first, "7_1")
    scheduler.live = {"7_1"}
    scheduler.script = str(tmp_path / "chain.sbatch")
    assert ("9", ["x-1"]) == resume_members(tmp_path, ["x-1"])
    assert "--array=2" in scheduler.of("sbatch")[0]
    with pytest.raises(RootError, match="job 7 is a chain on it already"):
        resume_members(tmp_path, ["x-0"])
    second.write_done(Done(1, None))
    with pytest.raises(RootError, match="the work is complete"):
        resume_members(tmp_path, ["x-1"])


def test_a_refused_array_leaves_everything_as_it_was(
    tmp_path: Path, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = make_sweep(tmp_path, 1)
    first.write_halt("stopped by the user")
    before = (tmp_path / "sweep.json").read_text()

    def refuse(*_: object) -> str:
        raise SchedulerError(["sbatch"], 1, "AssocMaxSubmitJobLimit")

    monkeypatch.setattr(slurm, "submit_script", refuse)
    with pytest.raises(Exception, match="AssocMaxSubmitJobLimit"):
        resume_members(tmp_path)
    assert "stopped by the user" == first.halted()
    assert before == (tmp_path / "sweep.json").read_text()


# ── the verbs ─────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "verb", [["history"], ["logs"], ["watch"], ["ls"], ["verify"], ["report", "--for-support"]]
)
def test_verbs_about_one_run_name_the_members_of_a_sweep(verb: list[str], tmp_path: Path) -> None:
    make_sweep(tmp_path, 12)
    done = subprocess.run(
        [sys.executable, "-m", "hpc_ckpt.cli", *verb, str(tmp_path)],
        capture_output=True, text=True, check=False, env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert 2 == done.returncode
    assert "a sweep of 12 runs" in done.stderr
    assert f"{tmp_path}/x-0\n" in done.stderr
    assert "…" in done.stderr
    assert "Traceback" not in done.stderr


def test_last_is_a_sweep_for_a_verb(tmp_path: Path) -> None:
    sweep, index = tmp_path / "sweep", tmp_path / "state" / "hpc_ckpt" / "runs"
    sweep.mkdir()
    make_sweep(sweep, 2)
    index.parent.mkdir(parents=True)
    index.write_text(json.dumps({"root": str(sweep), "time": 1.0, "name": "s"}) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "hpc_ckpt.cli", "status", "last", "--json"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
    )  # fmt: skip
    assert {"not started": 2} == json.loads(done.stdout)["counts"]
