"""A sweep on disk: members by index, states read from names, and fast for a thousand of them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from sweeps import make_sweep

from hpc_ckpt.chain.ledger import LONGEST_KILL_WAIT_S
from hpc_ckpt.chain.past import jobs_of
from hpc_ckpt.chain.submit import take_up_again
from hpc_ckpt.chain.sweep import all_over, member_root, members, sweep_status
from hpc_ckpt.errors import RootError, SpecError
from hpc_ckpt.events import Event, EventLog
from hpc_ckpt.rundir import Done, RunDir


def test_an_index_finds_its_member(tmp_path: Path) -> None:
    made = make_sweep(tmp_path, 3)
    assert made[1].root == member_root(tmp_path, 2)
    with pytest.raises(SpecError, match="no member 4"):
        member_root(tmp_path, 4)
    assert ["7_2"] == jobs_of(made[1])


def test_states_of_members(tmp_path: Path) -> None:
    first, second, third = make_sweep(tmp_path, 3)
    first.write_done(Done(1, None))
    second.write_halt("enough")
    (third.lease / "00000001").write_text("{}")
    (third.lease / "00000001.released").touch()
    found = sweep_status(tmp_path)
    assert ["complete", "stopped", "between links"] == [member.state for member in found.members]
    assert {"complete": 1, "stopped": 1, "between links": 1} == found.counts
    assert not all_over(first)
    third.write_halt("enough")
    assert all_over(first)


def begin(member: RunDir, generation: int) -> None:
    (member.lease / f"{generation:08d}").touch()
    EventLog(member.ledger_file(generation)).emit(Event.LINK_STARTED)


def test_what_ended_an_earlier_submission_is_not_the_end_of_this_one(tmp_path: Path) -> None:
    """A member is resumed: the mail of its sweep waits for it."""
    first, second = make_sweep(tmp_path, 2)
    first.write_halt("enough")
    begin(second, 1)
    EventLog(second.ledger_file(1)).emit(Event.NOTHING_FOLLOWS)
    assert all_over(first)
    take_up_again(second)
    assert not all_over(first)
    begin(second, 2)
    EventLog(second.ledger_file(2)).emit(Event.NOTHING_FOLLOWS)
    assert all_over(first)


def test_a_member_that_runs_after_a_failed_set_up_is_not_over(tmp_path: Path) -> None:
    """What was said before anybody had this generation is of an earlier submission."""
    first, second = make_sweep(tmp_path, 2)
    first.write_done(Done(1, None))
    EventLog(second.ledger_file(1)).emit(Event.NOTHING_FOLLOWS)
    begin(second, 1)
    assert not all_over(first)


def test_a_member_that_died_elsewhere_runs_no_more_after_its_deadline(tmp_path: Path) -> None:
    """Its host cannot be asked from here: the rule is that of a chain."""
    (member,) = make_sweep(tmp_path, 1)
    (member.lease / "00000001").write_text(json.dumps({"host": "elsewhere", "job": "7_1"}))
    member.write_deadline(1, 1000.0)
    late = 1000.0 + LONGEST_KILL_WAIT_S
    assert {"running": 1} == sweep_status(tmp_path, late - 1).counts
    assert {"between links": 1} == sweep_status(tmp_path, late + 1).counts


def test_a_sweep_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RootError, match="no sweep there"):
        sweep_status(tmp_path)
    (tmp_path / "sweep.json").write_text("[]")
    with pytest.raises(RootError, match="not a sweep's"):
        list(members(tmp_path))


def test_a_thousand_members_are_read_by_their_names_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cost is counted, not timed: no ledger and no event file is opened."""
    for rundir in make_sweep(tmp_path, 1000):
        (rundir.lease / "00000001").write_text("{}")
        rundir.ledger_file(1).write_text("{}")
    monkeypatch.setattr("hpc_ckpt.events.read", None)
    began = time.perf_counter()
    assert {"running": 1000} == sweep_status(tmp_path).counts
    print(f"{time.perf_counter() - began:.2f} s")
