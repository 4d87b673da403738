"""When a chain stops by itself: budgets, failed links in a row, no progress."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt import lease
from hpc_ckpt.chain.backend import Cause
from hpc_ckpt.chain.budget import links_left, reason_to_stop, seconds_left
from hpc_ckpt.chain.orders import Orders
from hpc_ckpt.chain.past import bad_hosts, past_links
from hpc_ckpt.events import Event, EventLog
from hpc_ckpt.rundir import RunDir

Past = Callable[..., tuple[RunDir, Orders]]


@pytest.fixture
def past(tmp_path: Path) -> Past:
    """A chain whose links ended as (cause, progress), a minute each, on alternating hosts."""

    def make(*ends: tuple[str | None, bool | None], **chain: Any) -> tuple[RunDir, Orders]:
        rundir = RunDir(tmp_path / "run")
        rundir.create()
        record = {
            "argv": ["true"],
            "cwd": "/",
            "gpus": 4,
            "spec": {"chain": {"max_links": 9, **chain}},
            "profile": {"signal": {"name": "USR1"}, "kill_wait": "5s"},
        }
        rundir.chain_file.write_text(json.dumps(record))
        for place, (cause, progress) in enumerate(ends):
            number = place + 1
            (rundir.lease / f"{number:08d}").write_text("{}")
            start = 1000.0 + 100 * number
            lines = [{"time": start, "event": "link.started", "node": f"n{place % 2}"}]
            if cause is not None:
                lines.append(
                    {
                        "time": start + 60,
                        "event": "link.ended",
                        "cause": cause,
                        "progress": progress,
                    }
                )
            rundir.ledger_file(number).write_text("\n".join(map(json.dumps, lines)))
        return rundir, Orders.read(rundir)

    return make


def verdict(made: tuple[RunDir, Orders]) -> str | None:
    rundir, orders = made
    return reason_to_stop(rundir, lease.highest(rundir), orders)


def test_preemptions_and_failed_nodes_never_stop_a_chain(past: Past) -> None:
    ends = [("preempted", None), ("node failure", None), (None, None)] * 5
    assert verdict(past(*ends)) is None


@pytest.mark.parametrize("submission", ["a", "b"])
def test_a_link_that_started_nothing_hides_no_end_before_it(past: Past, submission: str) -> None:
    """It was told to stop before it could find that out. Whoever submits again knows of it."""
    rundir, orders = past(("cancelled", None), ("stopped by signal", None))
    for number, of in ((1, "a"), (2, submission)):
        lines = [json.loads(line) for line in rundir.ledger_file(number).read_text().splitlines()]
        lines[0]["submission"] = of
        lines[-1]["code"] = 143 if number == 1 else None
        rundir.ledger_file(number).write_text("\n".join(map(json.dumps, lines)))
    assert (reason_to_stop(rundir, 2, orders) is not None) is (submission == "a")


def test_no_number_of_preemptions_stops_a_chain_that_gets_on(past: Past) -> None:
    """Starts that got nowhere are bounded, and counted from the last that did."""
    fruitful, in_vain = ("preempted", True), ("preempted", None)
    assert verdict(past(*[fruitful] * 30, *[in_vain] * 9, max_links=1)) is None
    said = verdict(past(*[fruitful] * 30, *[in_vain] * 10, max_links=1))
    assert "started 10 times without progress for a budget of 1 links" == said


def test_failed_links_in_a_row_are_counted_and_any_other_end_begins_anew(past: Past) -> None:
    crash = ("crashed", True)
    assert verdict(past(crash, crash, ("time limit", True), crash, crash, retries=2)) is None


def test_more_than_the_retries_stop_it(past: Past) -> None:
    said = verdict(past(*[("crashed", True)] * 3, retries=2))
    assert "3 failed links in a row (chain.retries: 2): crashed" == said


def test_out_of_memory_can_be_made_to_halt(past: Past) -> None:
    said = verdict(past(("out of memory", True), on_out_of_memory="halt"))
    assert "a link ended: out of memory" == said


@pytest.mark.parametrize(
    ("reaction", "said"), [("halt", "cancelled by the user"), ("continue", None)]
)
def test_a_cancelled_link(past: Past, reaction: str, said: str | None) -> None:
    assert said == verdict(past(("cancelled", None), on_cancel=reaction))


def test_preemption_can_be_made_to_halt(past: Past) -> None:
    assert "a link ended: preempted" == verdict(past(("preempted", True), on_preemption="halt"))


def test_no_progress_twice_among_those_that_tell(past: Past) -> None:
    stuck, other = ("crashed", False), ("preempted", None)
    assert verdict(past(stuck, other)) is None
    assert "no progress in two links running" == verdict(past(stuck, other, stuck))


def test_hours(past: Past) -> None:
    ends = [("time limit", True)] * 3
    assert "the budget of 0.05 hours is spent (3m)" == verdict(past(*ends, max_hours=0.05))


def test_what_a_link_left_of_the_budget_it_was_ended_by_is_no_link(past: Past) -> None:
    """Of an hour it leaves some minutes for its last save: a next one would load, and end."""
    rundir, orders = past(("time limit", True), max_hours=0.02)
    assert verdict((rundir, orders)) is None
    ledger = rundir.ledger_file(1)
    ledger.write_text(ledger.read_text().replace('"progress"', '"budget_end": true, "progress"'))
    assert "the budget of 0.02 hours is spent (1m)" == verdict((rundir, orders))
    ledger.write_text(ledger.read_text().replace("time limit", "preempted"))
    assert verdict((rundir, orders)) is None


def test_gpu_hours_count_every_gpu(past: Past) -> None:
    ends = [("time limit", True)] * 3
    made = past(*ends, max_gpu_hours=0.2)
    assert "0.2 GPU hours is spent" in (verdict(made) or "")
    rundir, orders = past(*ends, max_gpu_hours=0.4)
    assert 180.0 == seconds_left(rundir, 4, orders)


def test_restarts(past: Past) -> None:
    ends = [("preempted", None)] * 3
    assert verdict(past(*ends, max_restarts=3)) is None
    assert "the budget of 2 restarts is spent" == verdict(past(*ends, max_restarts=2))


def test_links_that_may_follow_the_one_under_way(past: Past) -> None:
    ended = (("time limit", True), ("preempted", True), ("time limit", True))
    rundir, orders = past(*ended, (None, None))
    assert 9 - 2 - 1 == links_left(rundir, 4, orders)
    assert 9 - 2 - 1 == links_left(rundir, 4, orders, Cause.TIME_LIMIT)


def test_a_link_that_does_not_count_leaves_its_place_to_another(past: Past) -> None:
    """Once that is seen, or written down; nor does one count that never began."""
    ended = (("time limit", True), ("time limit", True))
    rundir, orders = past(*ended, (None, None), max_links=3)
    assert (0, 1) == (
        links_left(rundir, 3, orders),
        links_left(rundir, 3, orders, Cause.PREEMPTED),
    )
    rundir, orders = past(*ended, ("preempted", True), max_links=3)
    assert (1, 1) == (links_left(rundir, 3, orders), links_left(rundir, 4, orders))


def test_bad_hosts_are_those_that_failed_last_and_never_all_of_them(past: Past) -> None:
    bad, good = ("node failure", None), ("time limit", True)
    rundir, _ = past(bad, good, bad, good)
    assert ["n0"] == bad_hosts(past_links(rundir, 0, 4), 2)
    assert [] == bad_hosts(past_links(rundir, 0, 1), 1)
    assert [] == bad_hosts(past_links(rundir, 0, 4), 0)


def test_a_chain_never_excludes_every_host_it_knows(past: Past) -> None:
    """It would wait in the queue for ever."""
    bad = ("node failure", None)
    rundir, _ = past(bad, bad, bad, bad)
    assert {"n0", "n1"} == {link.host for link in past_links(rundir, 0, 4)}
    assert [] == bad_hosts(past_links(rundir, 0, 4), 2)


def test_a_host_that_is_gone_is_no_alternative(past: Past) -> None:
    """n1 failed as a node and may be down: n0, bad as it is, stays."""
    rundir, _ = past(("killed", False), ("node failure", None), ("killed", False))
    assert [] == bad_hosts(past_links(rundir, 0, 3), 2)


def test_a_crash_after_progress_is_the_programs(past: Past) -> None:
    good = ("time limit", True)
    rundir, _ = past(("crashed", True), good, ("crashed", True), good)
    assert [] == bad_hosts(past_links(rundir, 0, 4), 2)
    rundir, _ = past(("crashed", False), good, ("crashed", False), good)
    assert ["n0"] == bad_hosts(past_links(rundir, 0, 4), 2)


def test_a_host_gets_another_chance(past: Past) -> None:
    """Twenty links later."""
    bad, good = ("node failure", None), ("time limit", True)
    rundir, _ = past(bad, good, bad, *([good] * 40))
    links = [link for link in past_links(rundir, 0, 43) if link.generation < 4 or link.host == "n1"]
    assert ["n0"] == bad_hosts(links[:10], 2)
    assert [] == bad_hosts(links, 2)


def test_what_the_next_link_found_out_of_the_last_counts(past: Past) -> None:
    """A cancelled link that could not say so itself still halts the chain."""
    rundir, orders = past((None, None))
    EventLog(rundir.ledger_file(2)).emit(
        Event.LINK_EXPLAINED, generation=1, cause="cancelled", progress=None
    )
    assert "cancelled by the user" == reason_to_stop(rundir, 1, orders)
