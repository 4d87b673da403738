"""Twenty links, each ended by a fault drawn at random: the same weights as without any."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from chains import (
    MOST_LOST,
    SAVE_EVERY,
    STEPS_AN_EPOCH,
    SubmittedChain,
    assert_finished,
    note,
    run_undisturbed,
    submit_chain,
)
from devcluster import DevCluster

from hpc_ckpt import lease
from hpc_ckpt.chain.ledger import read_status

pytestmark = pytest.mark.slurm

LINKS = 20
STEP_S = 0.04
EPOCHS = 60
"""More than twenty links of some 35 steps can make: the last ones run undisturbed."""


def kill_program(chain: SubmittedChain, number: int) -> None:
    chain.kill_program(number)


def end_soon(chain: SubmittedChain, number: int) -> None:
    chain.end_in(number, 3)


def preempt(chain: SubmittedChain, number: int) -> None:
    chain.preempt(number)  # another node may not be back yet from its power cut


def requeue(chain: SubmittedChain, number: int) -> None:
    chain.requeue(number)


def scancel(chain: SubmittedChain, number: int) -> None:
    chain.scancel(number)


def power_cut(chain: SubmittedChain, number: int) -> None:
    node = chain.kill_node_of(number)
    time.sleep(1)
    chain.cluster.restart_node(node)


def lose_controller(chain: SubmittedChain, number: int) -> None:
    """And the program, while nobody answers."""
    chain.cluster.kill_controller()
    chain.kill_program(number)
    chain.wait_for_end(number)
    chain.cluster.restart_controller()


Fault = Callable[[SubmittedChain, int], None]
FAULTS: tuple[tuple[Fault, set[str]], ...] = (
    (kill_program, {"killed"}),
    (end_soon, {"time limit"}),
    (preempt, {"preempted"}),
    (requeue, {"requeued"}),
    (scancel, {"cancelled"}),
    (power_cut, {"node failure"}),
    (lose_controller, {"killed"}),
)


@pytest.mark.timeout(1500)
def test_twenty_links_with_a_random_fault_each_give_the_same_weights(
    idle_cluster: DevCluster, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    seed = int(os.environ.get("HPC_CKPT_SOAK_SEED") or time.time())
    print(f"HPC_CKPT_SOAK_SEED={seed}")
    chance = random.Random(seed)
    spec = {"chain": {"max_links": 60, "retries": 60, "on_cancel": "continue"}}
    chain = submit_chain(idle_cluster, tmp_path, str(EPOCHS), str(STEP_S), spec=spec)
    # Once without a controller: a step that ends then cannot say so, and Slurm drains its node.
    seen = [*FAULTS, *chance.choices(FAULTS[:-1], k=LINKS - len(FAULTS))]
    chance.shuffle(seen)
    expected: dict[int, set[str]] = {}
    for inflict, causes in seen:
        number = running(chain)
        chain.wait_for_steps(number, SAVE_EVERY + chance.randrange(1, 20))
        inflict(chain, number)
        expected[number] = causes
        chain.wait_for(lambda after=number: lease.highest(chain.rundir) > after, timeout_s=120)
    chain.wait_for_done(300)
    status = read_status(chain.rundir)
    found = {link.generation: link.cause for link in status.links}
    wrong = {n: found.get(n) for n, causes in expected.items() if found.get(n) not in causes}
    assert {} == wrong, (seed, wrong, expected)
    assert len(status.links) > LINKS
    reference = run_undisturbed(tmp_path_factory.mktemp("reference") / "run", EPOCHS)
    assert_finished(chain, reference, EPOCHS)
    assert STEPS_AN_EPOCH * EPOCHS == status.step
    lost = {number: chain.steps_lost(number) for number in expected}
    assert {} == {number: steps for number, steps in lost.items() if not 0 <= steps < MOST_LOST}
    note(
        f"{LINKS} links with a random fault in each",
        "all recognised; completed",
        lost=sum(lost.values()),
    )


def running(chain: SubmittedChain) -> int:
    """The link that is at work now."""
    chain.wait_for(lambda: _at_work(chain) is not None, timeout_s=120)
    number = _at_work(chain)
    assert number is not None
    return number


def _at_work(chain: SubmittedChain) -> int | None:
    links = read_status(chain.rundir).links
    return links[-1].generation if links and links[-1].ended is None else None
