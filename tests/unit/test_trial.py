"""The trial job from the login node's side: what is submitted, and that nothing is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt.chain.probe import Wanted
from hpc_ckpt.chain.profile import Profile
from hpc_ckpt.chain.trial import Attempt, Ear, Request, Trial, run_trial, submission
from hpc_ckpt.errors import RootError, SchedulerError


def request(root: Path, *, limit_s: float = 0.05, **keys: Any) -> Request:
    profile = Profile.model_validate({"cluster": "lab", **keys})
    return Request(profile=profile, root=root, wanted=Wanted(root=str(root)), limit_s=limit_s)


class Queue:
    """A scheduler that takes a job and lets it wait; or fails as told."""

    def __init__(self, **failures: SchedulerError) -> None:
        self.failures = failures
        self.commands: list[list[str]] = []

    def __call__(self, argv: Sequence[str]) -> str:
        self.commands.append(list(argv))
        if argv[0] in self.failures:
            raise self.failures[argv[0]]
        return {"sbatch": "7\n", "squeue": "PENDING (Priority)\n"}.get(argv[0], "")

    def said(self, word: str) -> list[list[str]]:
        return [argv[1:] for argv in self.commands if argv[0] == word]


def test_a_job_like_a_link(tmp_path: Path) -> None:
    """The signal, no environment, and the site's own directives; what is skipped is not there."""
    directives = {"extra": ["--constraint=ib"], "skip": ["--partition"]}
    asked = request(tmp_path, signal={"name": "USR2"}, directives=directives)
    argv = submission(asked, tmp_path / "50%")
    assert {"--signal=B:USR2@90", "--export=NONE", "--no-requeue", "--constraint=ib"} <= set(argv)
    assert f"--output={tmp_path}/50%%/job.log" in argv
    assert not [word for word in argv if word.startswith("--partition")]
    assert argv[-6].endswith("templates/trial.sh")
    assert [str(tmp_path / "50%"), "USR2"] == [argv[-5], argv[-3]]


def test_a_job_that_does_not_start_is_cancelled(tmp_path: Path) -> None:
    """In the time it was given, and nothing stays."""
    queue = Queue()
    trial = run_trial(request(tmp_path), run=queue)
    assert Trial(job="7", state="PENDING (Priority)") == trial
    assert [["7"]] == queue.said("scancel")
    assert [] == list(tmp_path.iterdir())


def test_a_job_that_is_refused(tmp_path: Path) -> None:
    """There is nothing to cancel."""
    queue = Queue(sbatch=SchedulerError(["sbatch"], 1, "sbatch: error: invalid\naccount"))
    trial = run_trial(request(tmp_path), run=queue)
    assert "sbatch: error: invalid account" == trial.refused
    assert [] == queue.said("scancel") + list(tmp_path.iterdir())


def test_an_sbatch_that_was_cut_off_may_have_submitted(tmp_path: Path) -> None:
    """Then the job is cancelled by its name, which no other job has."""
    queue = Queue(sbatch=SchedulerError(["sbatch"], None, "no answer from the scheduler"))
    run_trial(request(tmp_path), run=queue)
    ((name,),) = queue.said("scancel")
    assert name.startswith("--name=hpc-ckpt-doctor-")


def ctrl_c(_seconds: float) -> None:
    raise KeyboardInterrupt


def terminated(_seconds: float) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def hung_up(_seconds: float) -> None:
    os.kill(os.getpid(), signal.SIGHUP)


@pytest.mark.parametrize("sleep", [ctrl_c, terminated, hung_up])
def test_whoever_ends_us_the_job_goes(sleep: Callable[[float], None], tmp_path: Path) -> None:
    """Ctrl-C, TERM and a closed terminal."""
    queue = Queue()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run_trial(request(tmp_path, limit_s=60), run=queue, sleep=sleep)
    assert [["7"]] == queue.said("scancel")
    assert [] == list(tmp_path.iterdir())
    assert before == signal.getsignal(signal.SIGTERM)


def test_a_root_that_cannot_be_written(tmp_path: Path) -> None:
    """Said before anything is submitted."""
    queue = Queue()
    with pytest.raises(RootError, match="cannot be written"):
        run_trial(request(tmp_path / "gone"), run=queue)
    assert [] == queue.commands


def test_an_attempt_reaches_when_all_that_should_have_heard() -> None:
    """Others may hear it too."""
    both = frozenset({Ear.SHIM, Ear.BATCH})
    assert Attempt("x", both, frozenset(Ear)).reached
    assert not Attempt("x", both, frozenset({Ear.SHIM})).reached
