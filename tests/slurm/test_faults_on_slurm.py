"""One fault each, on a real Slurm: the work completes with the same weights, or stops and says why.

docs/faults.md has the table. HPC_CKPT_FAULT_TABLE=FILE makes its rows from a run of these tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chains import (
    GRACE_S,
    MOST_LOST,
    SAVE_EVERY,
    SubmittedChain,
    assert_finished,
    assert_nothing_lost,
    assert_one_publisher,
    note,
    run_undisturbed,
    submit_chain,
)
from devcluster import DevCluster

from hpc_ckpt.chain.ledger import State, read_status

pytestmark = pytest.mark.slurm

EPOCHS = 8
STEP_S = 0.05
WORDS = (str(EPOCHS), str(STEP_S))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return run_undisturbed(tmp_path_factory.mktemp("reference") / "run", EPOCHS)


def at_work(chain: SubmittedChain, number: int = 1) -> None:
    """Until a link has something to lose."""
    chain.wait_for_steps(number, SAVE_EVERY + 5)


# ── ends that the chain goes on from ──────────────────────────────────────────────────────
def preempt(chain: SubmittedChain) -> None:
    chain.preempt()


def requeue(chain: SubmittedChain) -> None:
    chain.requeue(1)


def end_by_limit(chain: SubmittedChain) -> None:
    chain.end_in(1, 1)


@pytest.mark.parametrize(
    ("fault", "partition", "inflict", "cause"),
    [
        ("time limit", "lowpriority", end_by_limit, "time limit"),
        ("preemption, REQUEUE, 10 s of grace", "lowpriority", preempt, "preempted"),
        ("preemption, CANCEL, 10 s of grace", "cancel", preempt, "preempted"),
        ("preemption, REQUEUE, no grace", "nograce", preempt, "preempted"),
        ("scontrol requeue", "lowpriority", requeue, "requeued"),
    ],
)
def test_a_link_that_is_told_saves_and_the_next_goes_on(
    idle_cluster: DevCluster,
    tmp_path: Path,
    reference: dict[str, bytes],
    fault: str,
    partition: str,
    inflict: Callable[[SubmittedChain], None],
    cause: str,
) -> None:
    """No step is lost: the notice comes early enough for a save."""
    chain = submit_chain(idle_cluster, tmp_path, *WORDS, spec={"partition": partition})
    at_work(chain)
    inflict(chain)
    link = chain.wait_for_end(1)
    assert cause == link.cause, link
    assert link.evidence
    chain.wait_for_done()
    assert 0 == chain.steps_lost(1)
    assert_finished(chain, reference, EPOCHS)
    note(fault, "saved on the notice; the next link went on", link, 0)


def test_a_node_that_fails_is_recognised_and_the_chain_goes_on(
    idle_cluster: DevCluster, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    """Nobody is told anything; the next link finds out from Slurm what happened."""
    chain = submit_chain(idle_cluster, tmp_path, *WORDS)
    at_work(chain)
    node = chain.kill_node_of(1)
    chain.wait_for_done(180)
    first = chain.link(1)
    assert first is not None
    assert "node failure" == first.cause, first
    assert first.evidence
    lost = chain.steps_lost(1)
    assert 0 <= lost < MOST_LOST
    assert node == chain.node_of(1)
    assert_finished(chain, reference, EPOCHS)
    note("node failure (slurmd and job killed)", "requeued by Slurm; went on", first, lost)


def test_a_controller_that_is_away_disturbs_nothing(
    idle_cluster: DevCluster, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    """slurmctld killed in the middle of a link, and again around the end of one."""
    chain = submit_chain(idle_cluster, tmp_path, *WORDS)
    at_work(chain)
    idle_cluster.kill_controller()
    chain.kill_program(1)  # this link ends while nobody answers
    first = chain.wait_for_end(1)
    time.sleep(3)
    idle_cluster.restart_controller()
    chain.wait_for_done(180)
    assert "killed" == first.cause
    lost = chain.steps_lost(1)
    assert 0 <= lost < MOST_LOST
    assert_finished(chain, reference, EPOCHS)
    note("slurmctld killed, program killed meanwhile", "went on when it was back", first, lost)


def test_a_program_out_of_memory_is_tried_again(
    idle_cluster: DevCluster, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    """The log says what the exit code does not."""
    chain = submit_chain(idle_cluster, tmp_path, *WORDS, "--fault", "memory:70:1")
    chain.wait_for_done()
    first = chain.link(1)
    assert first is not None
    assert "out of memory" == first.cause, first
    assert any("MemoryError" in said for said in first.evidence)
    assert_finished(chain, reference, EPOCHS)
    lost = chain.steps_lost(1)
    assert lost == first.lost_steps  # it could say itself where it was
    note("out of memory in one link", "tried again; went on", first, lost)


def test_a_cancelled_link_is_not_followed_by_the_next_index(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """scancel of one index is scancel of the chain, after a save."""
    chain = submit_chain(idle_cluster, tmp_path, *WORDS)
    at_work(chain)
    chain.scancel(1)
    link = chain.wait_for_end(1)
    assert "cancelled" == link.cause, link
    chain.wait_for_state(State.STOPPED)
    chain.wait_for(lambda: chain.left_in_queue() == [])
    status = read_status(chain.rundir)
    assert (1, "cancelled by the user") == (len(status.links), status.reason)
    assert 0 == chain.steps_lost(1)
    assert link.step_to > link.step_from
    note("scancel of the running index", "saved; the chain stopped: cancelled by the user", link, 0)


def test_a_cancelled_link_is_followed_where_that_was_asked_for(
    idle_cluster: DevCluster, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    chain = submit_chain(idle_cluster, tmp_path, *WORDS, spec={"chain": {"on_cancel": "continue"}})
    at_work(chain)
    chain.scancel(1)
    link = chain.wait_for_end(1)
    assert "cancelled" == link.cause
    chain.wait_for_done()
    assert 0 == chain.steps_lost(1)
    assert_finished(chain, reference, EPOCHS)
    note("scancel with on_cancel: continue", "saved; went on", link, 0)


# ── ends that stop the chain ──────────────────────────────────────────────────────────────
def assert_stopped(chain: SubmittedChain, reason: str) -> Any:
    chain.wait_for_state(State.STOPPED)
    chain.wait_for(lambda: chain.left_in_queue() == [])
    status = read_status(chain.rundir)
    assert reason in status.reason
    assert_one_publisher(chain.rundir)
    assert_nothing_lost(chain.rundir)
    return status


def test_a_crash_loop_stops_with_the_last_lines_of_the_log(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """It got somewhere in the first link, and nowhere in the next two."""
    chain = submit_chain(idle_cluster, tmp_path, "8", "0.01", "--fault", "crash:70")
    status = assert_stopped(chain, "no progress in two links running")
    assert ["crashed"] * 3 == [link.cause for link in status.links]
    assert "RuntimeError: the program is broken at this step" in status.last_lines
    note("crash at the same step in every link", "stopped after two without progress",
         status.links[0], chain.steps_lost(1))  # fmt: skip


def test_failures_in_a_row_are_borne_only_so_often(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    spec = {"chain": {"retries": 0, "on_out_of_memory": "retry"}}
    chain = submit_chain(idle_cluster, tmp_path, "8", "0.01", "--fault", "memory:70", spec=spec)
    status = assert_stopped(chain, "1 failed links in a row (chain.retries: 0): out of memory")
    assert ["out of memory"] == [link.cause for link in status.links]
    note("out of memory, chain.retries: 0", "stopped with the last lines of the log",
         status.links[0], chain.steps_lost(1))  # fmt: skip


def test_a_budget_of_hours_ends_the_link_and_the_chain(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """Twelve seconds: the link saves in time and nothing follows."""
    spec = {"chain": {"max_hours": 12 / 3600}}
    chain = submit_chain(idle_cluster, tmp_path, "80", "0.05", spec=spec)
    status = assert_stopped(chain, "the budget of 0.00333333 hours is spent")
    assert status.allocated_s < 12 + GRACE_S
    assert 0 == chain.steps_lost(1)
    note("budget of hours spent", "saved in time; stopped", status.links[0], 0)


# ── the array runs out ────────────────────────────────────────────────────────────────────
TWO_AT_ONCE = {"limits": {"max_array": 3}}


def test_a_chain_extends_itself_when_the_array_is_used_up(
    idle_cluster: DevCluster, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    """Two indices at once; the last one that runs submits more behind itself."""
    site = {**TWO_AT_ONCE, "chain": {"submit_from_compute_nodes": True}}
    chain = submit_chain(idle_cluster, tmp_path, *WORDS, profile=site)
    for number in (1, 2):
        at_work(chain, number)
        chain.end_in(number, 1)
        assert "time limit" == chain.wait_for_end(number).cause
    chain.wait_for_done()
    (extended,) = chain.ledger("chain.extended")
    assert extended["job"] != chain.array
    third = chain.link(3)
    assert third is not None and str(third.job).startswith(extended["job"])
    assert_finished(chain, reference, EPOCHS)
    note("array exhausted, sbatch allowed on nodes", "extended itself; completed",
         chain.wait_for_end(2), chain.steps_lost(2))  # fmt: skip


def test_where_it_may_not_extend_itself_status_says_so_early(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    chain = submit_chain(idle_cluster, tmp_path, "80", "0.05", profile=TWO_AT_ONCE)
    at_work(chain, 1)
    assert "" == read_status(chain.rundir).remark
    chain.end_in(1, 1)
    chain.wait_for_end(1)
    chain.wait_for_steps(2, 5)
    chain.wait_for(lambda: "nothing follows this link" in read_status(chain.rundir).remark)
    note("array exhausted, sbatch not allowed", "status says so while the last link runs",
         chain.wait_for_end(1), chain.steps_lost(1))  # fmt: skip
