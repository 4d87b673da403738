"""A chain's history as people see it: merged from what runner and runtime wrote."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt.chain.ledger import ChainStatus, State, read_status
from hpc_ckpt.lease import Holder
from hpc_ckpt.rundir import MANIFEST_NAME, CheckpointKey, RunDir

START = 1000.0


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    directory = RunDir(tmp_path / "run")
    directory.create()
    return directory


def wrote(rundir: RunDir, generation: int, *records: tuple[str, float, dict[str, Any]]) -> None:
    """link.* and chain.* by the runner, everything else by the runtime; a lease for both."""
    holder = Holder(job=f"7_{generation}", host="elsewhere")
    (rundir.lease / f"{generation:08d}").write_text(json.dumps(vars(holder)))
    for event, after_s, fields in records:
        runner = event.startswith(("link.", "chain."))
        path = rundir.ledger_file(generation) if runner else rundir.events_file(generation, "n")
        with path.open("a") as stream:
            stream.write(json.dumps({"time": START + after_s, "event": event, **fields}) + "\n")


def status(rundir: RunDir, after_s: float = 100.0) -> ChainStatus:
    return read_status(rundir, START + after_s)


def test_a_chain_that_has_not_begun(rundir: RunDir) -> None:
    """No links, no state but that."""
    found = status(rundir)
    assert (State.NEW, (), 0.0) == (found.state, found.links, found.goodput)


def test_a_running_link_counts_up_to_now(rundir: RunDir) -> None:
    """Its newest step comes from heartbeats; nothing is lost yet."""
    wrote(rundir, 1, ("link.started", 0, {"step": 0}), ("progress", 8, {"step": 40}))
    (link,) = status(rundir, 10).links
    assert ("running", 40, 0, 10.0, 0) == (
        link.cause, link.step_now, link.step_to, link.allocated_s, link.lost_steps,
    )  # fmt: skip
    assert State.RUNNING == status(rundir, 10).state


def test_a_link_begins_when_it_begins(rundir: RunDir) -> None:
    """Not when a set-up that failed stopped the chain, before anybody had this generation."""
    stopped = {"reason": "module load x failed on n1", "last_lines": []}
    wrote(rundir, 1, ("chain.stopped", 0, stopped), ("link.started", 90, {"step": 0}))
    (link,) = status(rundir, 100).links
    assert (START + 90, 10.0) == (link.started, link.allocated_s)


NOTHING = ("chain.nothing_follows", 1, {"reason": "no job may be submitted here"})
STOPPED = ("chain.stopped", 5, {"reason": "6 failed links", "last_lines": ["ZeroDivisionError"]})


def after(rundir: RunDir, generation: int) -> None:
    rundir.chain_file.write_text(json.dumps({"after_generation": generation}))


def test_a_link_that_nothing_follows_says_so(rundir: RunDir) -> None:
    wrote(rundir, 1, ("link.started", 0, {"step": 0}), NOTHING)
    assert "nothing follows this link: no job may be submitted here" == status(rundir, 10).remark


def test_what_a_failed_set_up_said_is_not_said_of_the_link_that_came_later(rundir: RunDir) -> None:
    """Nobody had this generation then: its ledger is that of the link that was submitted next."""
    wrote(rundir, 1, NOTHING, ("link.started", 90, {"step": 0}))
    assert (State.RUNNING, "") == (status(rundir).state, status(rundir).remark)


def test_a_link_that_is_about_to_begin_has_said_nothing_yet(rundir: RunDir) -> None:
    """It waits for the last program; one that went on without having begun is over."""
    wrote(rundir, 1, NOTHING)
    assert "" == status(rundir).remark
    (rundir.lease / "00000001.released").touch()
    assert "nothing follows this link" in status(rundir).remark


def test_what_ended_an_earlier_submission_is_not_said_of_this_one(rundir: RunDir) -> None:
    wrote(rundir, 1, ("link.started", 0, {"step": 0}), NOTHING, ("link.ended", 2, {"cause": "x"}))
    after(rundir, 1)
    assert (State.BETWEEN, "") == (status(rundir).state, status(rundir).remark)


@pytest.mark.parametrize(("submission", "shown"), [(0, ("ZeroDivisionError",)), (1, ())])
def test_last_lines_are_of_the_submission_that_stopped(
    rundir: RunDir, submission: int, shown: tuple[str, ...]
) -> None:
    """The newer one was stopped by its set-up: no program had said anything."""
    ended = ("link.ended", 4, {"cause": "crashed"})
    wrote(rundir, 1, ("link.started", 0, {"step": 0}), ended, STOPPED)
    after(rundir, submission)
    rundir.write_halt("module load x failed on n1")
    assert (State.STOPPED, shown) == (status(rundir).state, status(rundir).last_lines)


def test_goodput_is_committed_training_over_allocated_time(rundir: RunDir) -> None:
    """Stall, start-up and what was not committed do not count."""
    wrote(
        rundir,
        1,
        ("link.started", 0, {"step": 0}),
        ("save.started", 5, {"step": 50}),
        ("save.committed", 6, {"step": 50, "stall_s": 0.5, "training_s": 4.0}),
        ("save.started", 8, {"step": 80}),
        ("link.ended", 10, {"cause": "killed", "reason": "killed by SIGKILL", "step": 50}),
    )
    (link,) = status(rundir).links
    assert (0.4, 0.5, 30) == (link.goodput, link.stall_s, link.lost_steps)
    assert (0, 50) == (link.step_from, link.step_to)


def test_lost_steps_count_from_where_the_next_link_went_on(rundir: RunDir) -> None:
    """A damaged newest checkpoint costs more than the kill did."""
    wrote(
        rundir,
        1,
        ("link.started", 0, {"step": 0}),
        ("save.committed", 6, {"step": 50}),
        ("link.ended", 10, {"cause": "time limit", "step": 50}),
    )
    wrote(rundir, 2, ("link.started", 11, {"step": 50}), ("restored", 12, {"step": 20}))
    first, second = status(rundir, 20).links
    assert (30, 20) == (first.lost_steps, second.step_from)


def test_a_link_without_a_record_of_its_end_is_lost(rundir: RunDir) -> None:
    """Its runner went with it; the last thing known of it is its end."""
    wrote(rundir, 1, ("link.started", 0, {"step": 0}), ("progress", 7, {"step": 9}))
    wrote(rundir, 2, ("link.started", 30, {"step": 0}))
    first = status(rundir).links[0]
    assert ("lost", START + 7) == (first.cause, first.ended)


def test_what_the_next_link_found_out_is_told_of_it(rundir: RunDir) -> None:
    wrote(rundir, 1, ("link.started", 0, {"step": 0}), ("progress", 7, {"step": 9}))
    told = {"generation": 1, "cause": "node failure", "evidence": ["sacct: NODE_FAIL"]}
    wrote(rundir, 2, ("link.explained", 29, told), ("link.started", 30, {"step": 0}))
    first = status(rundir).links[0]
    assert ("node failure", ("sacct: NODE_FAIL",)) == (first.cause, first.evidence)


def test_long_after_its_deadline_a_silent_link_is_taken_for_dead(rundir: RunDir) -> None:
    """Nobody need ask the scheduler for that."""
    wrote(rundir, 1, ("link.started", 0, {"step": 0}))
    rundir.write_deadline(1, START + 60)
    assert State.RUNNING == status(rundir, 100).state
    assert State.BETWEEN == status(rundir, 1000).state


def test_a_plain_program_without_a_runner_has_links_too(rundir: RunDir) -> None:
    """`python train.py` takes generations of its own."""
    wrote(rundir, 1, ("started_fresh", 0, {}), ("ended", 9, {"step": 5, "complete": True}))
    (link,) = status(rundir).links
    assert ("complete", START + 9) == (link.cause, link.ended)


def test_a_plain_program_tells_why_it_ended(rundir: RunDir) -> None:
    """In the same words as a link's."""
    ended = {"step": 5, "complete": False, "reason": "notice: SIGTERM"}
    wrote(rundir, 1, ("started_fresh", 0, {}), ("ended", 9, ended))
    wrote(rundir, 2, ("restored", 10, {"step": 5}), ("ended", 19, {**ended, "reason": ""}))
    assert ["stopped by signal", "crashed"] == [link.cause for link in status(rundir).links]


def test_the_end_of_the_program_is_not_the_end_of_the_link(rundir: RunDir) -> None:
    """Between the two the runner judges."""
    wrote(rundir, 1, ("link.started", 0, {"step": 0}), ("ended", 9, {"step": 5}))
    assert status(rundir, 10).links[0].ended is None


@pytest.mark.parametrize(
    ("make", "state", "reason"),
    [
        (lambda r: r.write_halt("no progress in two links running"), State.STOPPED,
         "no progress in two links running"),
        (lambda r: r.done_file.write_text('{"generation": 1, "step": null}'), State.COMPLETE, ""),
        (lambda r: r.done_file.write_text('{"generation": 1, "step": 5}'), State.BETWEEN, ""),
        (lambda r: None, State.BETWEEN, ""),
    ],
)  # fmt: skip
def test_where_a_chain_stands(rundir: RunDir, make: Any, state: State, reason: str) -> None:
    """DONE that names a checkpoint nobody has does not count."""
    wrote(rundir, 1, ("link.started", 0, {"step": 0}), ("link.ended", 5, {"cause": "saved"}))
    make(rundir)
    assert (state, reason) == (status(rundir).state, status(rundir).reason)


def test_torn_and_foreign_lines_are_passed_over(rundir: RunDir) -> None:
    """A killed writer leaves half a line; a later version writes events we do not know."""
    wrote(rundir, 1, ("link.started", 0, {"step": 3}), ("from.the.future", 1, {"x": 1}))
    with rundir.ledger_file(1).open("a") as stream:
        stream.write('{"time": 1002.0, "event": "link.en')
    (link,) = status(rundir).links
    assert 3 == link.step_from


def test_the_newest_step_is_that_of_the_newest_checkpoint(rundir: RunDir) -> None:
    """By (generation, step), not by the greatest step."""
    for key in (CheckpointKey(1, 90), CheckpointKey(2, 30)):
        place = rundir.checkpoints / key.directory_name
        place.mkdir()
        (place / MANIFEST_NAME).touch()
    assert 30 == status(rundir).step
