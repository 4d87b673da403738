"""Lease files that a site has purged, or that nobody has copied: the numbers go on all the same."""

from __future__ import annotations

import pytest

from hpc_ckpt import lease
from hpc_ckpt.chain.claim import counted_anew
from hpc_ckpt.chain.link import LinkRunner
from hpc_ckpt.chain.local import LocalBackend
from hpc_ckpt.chain.orders import Orders
from hpc_ckpt.chain.past import jobs_of, past_links
from hpc_ckpt.chain.submit import take_up_again
from hpc_ckpt.events import Event, EventLog
from hpc_ckpt.rundir import MANIFEST_NAME, CheckpointKey, RunDir


@pytest.fixture
def purged(rundir: RunDir) -> RunDir:
    """Link 50 has saved; no lease is left."""
    saved = rundir.checkpoints / CheckpointKey(50, 7).directory_name
    saved.mkdir()
    (saved / MANIFEST_NAME).write_text("{}")
    EventLog(rundir.ledger_file(50)).emit(Event.LINK_STARTED, step=0)
    return rundir


def test_a_submission_counts_from_what_was_saved_last(purged: RunDir) -> None:
    """Links of before are none of its own."""
    assert (0, 50) == (lease.highest(purged), lease.last(purged))
    assert 50 == counted_anew(purged)["after_generation"]


def test_a_chain_that_is_taken_up_again_runs(purged: RunDir) -> None:
    """Its first link asks whether the budget is spent before it has a lease."""
    take_up_again(purged)
    LinkRunner(purged, Orders.read(purged), LocalBackend(kill_wait_s=5.0)).run()
    assert 51 == lease.highest(purged)


def test_before_it_has_a_lease_a_link_has_the_number_that_it_will_take(purged: RunDir) -> None:
    """What it writes while its set-up fails goes into that ledger, not into an old one."""
    take_up_again(purged)
    runner = LinkRunner(purged, Orders.read(purged), LocalBackend(kill_wait_s=5.0))
    runner._ledger.emit(Event.CHAIN_EXTENDED, job="99", links=1)
    assert purged.ledger_file(51).exists()
    assert ["99"] == jobs_of(purged)


def test_nothing_is_known_of_links_that_are_none(rundir: RunDir) -> None:
    assert [] == past_links(rundir, 50, 0)
