"""The same chain by requeue, afterany and resubmit; exclusion of hosts, mail, moved deadlines."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from chains import SAVE_EVERY, assert_finished, run_undisturbed, submit_chain
from devcluster import DevCluster

from hpc_ckpt import lease
from hpc_ckpt.chain.history import read_history
from hpc_ckpt.chain.ledger import State, read_status

pytestmark = pytest.mark.slurm

EPOCHS = 8
WORDS = (str(EPOCHS), "0.05")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return run_undisturbed(tmp_path_factory.mktemp("reference") / "run", EPOCHS)


@pytest.mark.parametrize("strategy", ["requeue", "afterany", "resubmit"])
def test_each_strategy_completes_after_a_limit_and_a_preemption(
    idle_cluster: DevCluster, tmp_path: Path, reference: dict[str, bytes], strategy: str
) -> None:
    """Whatever follows a link, it goes on at the same step, and nothing stays behind."""
    site = {"chain": {"strategy": strategy, "submit_from_compute_nodes": True}}
    chain = submit_chain(
        idle_cluster, tmp_path, *WORDS, profile=site, spec={"chain": {"max_links": 4}}
    )
    chain.wait_for_steps(1, SAVE_EVERY + 5)
    chain.end_in(1, 1)
    first = chain.wait_for_end(1)
    assert "time limit" == first.cause
    chain.wait_for_steps(2, SAVE_EVERY + 5)
    chain.preempt()
    second = chain.wait_for_end(2)
    assert "preempted" == second.cause
    chain.wait_for_done()
    assert (0, 0) == (first.lost_steps, second.lost_steps)
    assert_finished(chain, reference, EPOCHS)
    jobs = {chain.job_of(link.generation) for link in read_status(chain.rundir).links}
    assert (1 if strategy == "requeue" else 2) <= len(jobs)
    if strategy == "requeue":
        assert {chain.array} == jobs
    for began in chain.ledger("link.started"):
        assert began["submitted"] <= began["eligible"] <= began["allocated"] <= began["time"]
    waits = [link.wait_s for link in read_history(chain.rundir).links]
    assert all(wait is not None and wait < 60 for wait in waits), waits


@pytest.mark.parametrize("reaction", ["halt", "continue"])
@pytest.mark.parametrize("strategy", ["requeue", "afterany", "resubmit"])
def test_scancel_of_the_running_job_means_what_was_asked_for(
    idle_cluster: DevCluster, tmp_path: Path, strategy: str, reaction: str
) -> None:
    """Whatever waits behind it: the chain, or that link alone."""
    site = {"chain": {"strategy": strategy, "submit_from_compute_nodes": True}}
    spec = {"chain": {"on_cancel": reaction, "max_links": 4}}
    chain = submit_chain(idle_cluster, tmp_path, *WORDS, profile=site, spec=spec)
    chain.wait_for_steps(1, SAVE_EVERY + 5)
    chain.scancel(1)
    first = chain.wait_for_end(1)
    assert ("cancelled", 0) == (first.cause, first.lost_steps)
    if reaction == "continue":
        chain.wait_for_done()
    else:
        chain.wait_for_state(State.STOPPED)
    chain.wait_for(lambda: chain.waiting() == [])
    links = read_status(chain.rundir).links
    assert (2 if reaction == "continue" else 1) == len(links)


def test_a_requeue_after_the_limit_even_if_the_program_does_not_leave(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """The runner asks when TERM comes: it may be killed with its program a moment later."""
    site = {"chain": {"strategy": "requeue"}}
    chain = submit_chain(idle_cluster, tmp_path, "4", "0.02", "--hold-at", "31", profile=site)
    chain.wait_for((tmp_path / "holding").exists)
    chain.end_in(1, 1)
    chain.wait_for(lambda: lease.highest(chain.rundir) == 2, timeout_s=60)
    (tmp_path / "go").touch()
    chain.wait_for_done()
    first = chain.link(1)
    assert first is not None and "time limit" == first.cause


def test_a_host_on_which_links_fail_gets_no_further_ones(
    idle_cluster: DevCluster, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    """Another host must be known first: a chain never excludes the only one there is."""
    site: dict[str, Any] = {"chain": {"exclude_after": 1}}
    chain = submit_chain(idle_cluster, tmp_path, *WORDS, profile=site)
    chain.wait_for_steps(1, SAVE_EVERY + 5)
    bad = chain.kill_node_of(1)
    chain.wait_for_steps(2, SAVE_EVERY + 5)
    assert bad != chain.node_of(2)
    chain.end_in(2, 1)
    chain.wait_for_end(2)
    chain.wait_for_done()
    (excluded,) = chain.ledger("chain.hosts_excluded")
    assert [bad] == excluded["hosts"]
    assert bad not in {chain.node_of(n) for n in range(2, lease.highest(chain.rundir) + 1)}
    assert_finished(chain, reference, EPOCHS)


def test_one_mail_for_the_whole_chain(idle_cluster: DevCluster, tmp_path: Path) -> None:
    mails = idle_cluster.directory / "log" / "mail.txt"
    before = mails.read_text() if mails.exists() else ""
    chain = submit_chain(idle_cluster, tmp_path, "6", "0.05", spec={"mail": "me@example.org"})
    chain.wait_for_steps(1, SAVE_EVERY + 5)
    chain.end_in(1, 1)
    chain.wait_for_end(1)
    chain.wait_for_done()
    chain.wait_for(lambda: mails.exists() and mails.read_text() != before, timeout_s=30)
    time.sleep(3)
    new = mails.read_text().removeprefix(before).splitlines()
    assert 1 == len([line for line in new if "me@example.org" in line]), new


def test_a_mail_for_a_chain_that_runs_out_of_links(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """One token, and no compute node may submit more: the work is not complete."""
    mails = idle_cluster.directory / "log" / "mail.txt"
    before = mails.read_text() if mails.exists() else ""
    spec = {
        "command": "sleep 2; exit 75",
        "mail": "me@example.org",
        "chain": {"strategy": "array"},
    }
    chain = submit_chain(idle_cluster, tmp_path, spec=spec, profile={"limits": {"max_array": 2}})
    chain.wait_for(lambda: mails.exists() and mails.read_text() != before, timeout_s=90)
    assert (1, None) == (lease.highest(chain.rundir), chain.rundir.halted())
    new = mails.read_text().removeprefix(before).splitlines()
    assert 1 == len([line for line in new if "me@example.org" in line]), new


def test_a_limit_that_is_extended_while_the_link_runs_is_used(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """The runner looks once before the end it knows; the program then works on."""
    chain = submit_chain(idle_cluster, tmp_path, "60", "0.05", held=True)
    chain.release(minutes=1)
    chain.wait_for_steps(1, 5)
    first = chain.rundir.deadline(1)
    assert first is not None
    chain.cluster.run("scontrol", "update", f"jobid={chain.job_of(1)}", "timelimit=2")
    chain.wait_for(lambda: (chain.rundir.deadline(1) or 0) >= first + 50, timeout_s=70)
    chain.wait_for(lambda: time.time() > first + 5, timeout_s=70)
    link = chain.link(1)
    assert link is not None and link.ended is None


def test_a_limit_that_slurm_shortens_is_the_deadline(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """--time-min: a reservation in a few minutes lets only a short link start."""
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 240))
    idle_cluster.run(
        "scontrol", "create", "reservation", "reservationname=maintenance", f"starttime={start}",
        "duration=60", "users=root", "nodes=ALL", "flags=maint",
    )  # fmt: skip
    try:
        spec = {"chain": {"link_time": "30 min", "min_time": "3 min"}}
        chain = submit_chain(idle_cluster, tmp_path, "60", "0.05", spec=spec)
        chain.wait_for_steps(1, 5)
        deadline = chain.rundir.deadline(1)
        assert deadline is not None and deadline < time.time() + 245
    finally:
        idle_cluster.reset()
        idle_cluster.run("scontrol", "delete", "reservation=maintenance", check=False)


def test_without_a_known_end_the_link_runs_until_it_is_told(
    idle_cluster: DevCluster, tmp_path: Path
) -> None:
    """TimeLimit=UNLIMITED: no deadline file, saves by policy, TERM still a notice."""
    idle_cluster.run("scontrol", "update", "partitionname=lowpriority", "maxtime=INFINITE")
    try:
        chain = submit_chain(idle_cluster, tmp_path, *WORDS, held=True)
        chain.cluster.run("scontrol", "update", f"jobid={chain.array}", "timelimit=UNLIMITED")
        chain.cluster.run("scontrol", "release", chain.array)
        chain.wait_for_steps(1, SAVE_EVERY + 5)
        chain.preempt()
        link = chain.wait_for_end(1)
        assert ("preempted", 0) == (link.cause, link.lost_steps)
    finally:
        idle_cluster.run("scontrol", "update", "partitionname=lowpriority", "maxtime=24:00:00")
