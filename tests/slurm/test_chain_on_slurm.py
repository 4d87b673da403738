"""Whole chains on a real Slurm: time limits, preemption, SIGKILL, overlap; the same weights."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chains import (
    GRACE_S,
    SAVE_EVERY,
    TRACKING,
    SubmittedChain,
    assert_finished,
    cli,
    commits,
    note,
    run_undisturbed,
    submit_chain,
)
from devcluster import DevCluster, Options

from hpc_ckpt import lease
from hpc_ckpt.chain.ledger import State, read_status

pytestmark = pytest.mark.slurm

EPOCHS = 34
STEP_S = 0.1


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Weights of the same program without any interruption."""
    return run_undisturbed(tmp_path_factory.mktemp("reference") / "run", EPOCHS)


def commits_of(chain: SubmittedChain, number: int, step: int) -> list[float]:
    """When a link committed a step."""
    found = commits(chain.rundir)
    return [moment for moment, generation, made in found if (generation, made) == (number, step)]


def check_deadline(chain: SubmittedChain, number: int) -> None:
    """The link runs into its time limit and saves because of it, without any notice."""
    link = chain.wait_for_end(number)
    assert "time limit" == link.cause
    assert link.reason.startswith("deadline")
    (saved,) = commits_of(chain, number, link.step_to)
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
    chain = submit_chain(idle_cluster, tmp_path, str(EPOCHS), str(STEP_S), held=True)
    chain.release(minutes=1)
    check_deadline(chain, 1)
    check_notice(chain, 2)
    check_preemption(chain, 3)
    chain.wait_for(lambda: chain.rundir.done() is not None, timeout_s=150)
    assert len(read_status(chain.rundir).links) >= 4
    assert_finished(chain, reference, EPOCHS)


def test_the_same_with_the_program_killed_in_one_link(
    idle_cluster: DevCluster, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    """Nothing committed is lost, nothing is done twice in the result."""
    chain = submit_chain(idle_cluster, tmp_path, str(EPOCHS), str(STEP_S), held=True)
    chain.release(minutes=1)
    check_kill(chain, 1)
    check_deadline(chain, 2)
    check_preemption(chain, 3)
    check_notice(chain, 4)
    chain.wait_for(lambda: chain.rundir.done() is not None, timeout_s=150)
    assert_finished(chain, reference, EPOCHS)


def test_the_next_link_waits_for_a_save_made_in_the_kill_wait(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """Slurm starts the next index on another node while the last one is still saving."""
    chain = submit_chain(idle_cluster, tmp_path, "4", "0.02", "--hold-at", "31", held=True)
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
    (saved,) = commits_of(chain, 1, first.step_to)
    assert saved > started(chain, 2)
    lost = chain.steps_lost(1)
    assert 0 == lost
    note(
        "time limit, in a step that is longer than what is left",
        "saved in the kill wait, while the next index already waited for it",
        first,
        lost,
    )


def started(chain: SubmittedChain, index: int) -> float:
    """When Slurm started an array member, whole seconds."""
    shown = chain.cluster.run("scontrol", "-o", "show", "job", f"{chain.array}_{index}").stdout
    moment = re.search(r"StartTime=(\S+)", shown)
    assert moment is not None
    return time.mktime(time.strptime(moment[1], "%Y-%m-%dT%H:%M:%S"))


@pytest.fixture
def patient_cluster(cluster_directory: Path) -> Iterator[DevCluster]:
    """One that leaves a job minutes between TERM and KILL."""
    options = Options(proctrack=TRACKING, kill_wait_s=150)
    with DevCluster.start(cluster_directory, options=options) as running:
        yield running


def test_a_late_save_of_an_overtaken_link_is_never_chosen(
    patient_cluster: DevCluster, tmp_path: Path
) -> None:
    """The wait for a holder is bounded; after it the old one is fenced, whatever it still does."""
    words = ("40", "0.05", "--hold-at", "31")
    chain = submit_chain(patient_cluster, tmp_path, *words, profile={"kill_wait": "0s"}, held=True)
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
    lost = chain.steps_lost(1)
    assert lost >= 31 - SAVE_EVERY
    note(
        "the same, and the next link does not wait for it",
        "its late save was never published; the next went on from the one before",
        first,
        lost,
    )


def test_stop_saves_cancels_the_rest_and_submit_takes_it_up_again(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """halt + notice + cancel of what is pending."""
    chain = submit_chain(idle_cluster, tmp_path, "4", "0.05", held=True)
    chain.release(minutes=3)
    chain.wait_for_steps(1, 10)
    verb = [sys.executable, "-m", "hpc_ckpt.cli", "stop", "run"]
    subprocess.run(verb, cwd=tmp_path, env=idle_cluster.environment, check=True)
    link = chain.wait_for_end(1)
    assert "halted" == link.cause
    chain.wait_for(lambda: chain.left_in_queue() == [])
    assert State.STOPPED == read_status(chain.rundir).state
    again = submit_chain(idle_cluster, tmp_path, "4", "0.0", held=True)
    again.release(minutes=3)
    again.wait_for(lambda: again.rundir.done() is not None)
    second = again.link(2)
    assert second is not None and link.step_to == second.step_from
    assert [chain.array, again.array] == json.loads(chain.rundir.chain_file.read_text())["jobs"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--partition", "nope"], "partition: this cluster has no 'nope'; it has cancel, gpu"),
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
