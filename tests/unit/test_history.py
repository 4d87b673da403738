"""The history of a chain: causes with their evidence, waits, and events of the whole chain."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt.chain.history import History, read_history
from hpc_ckpt.lease import Holder
from hpc_ckpt.rundir import RunDir

START = 1000.0


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    rundir.chain_file.write_text(json.dumps({"name": "x", "created": START - 60}))
    return rundir


def wrote(rundir: RunDir, generation: int, *records: tuple[str, float, dict[str, Any]]) -> None:
    holder = Holder(job=f"7_{generation}", host="elsewhere")
    (rundir.lease / f"{generation:08d}").write_text(json.dumps(vars(holder)))
    for event, after_s, fields in records:
        runner = event.startswith(("link.", "chain."))
        path = rundir.ledger_file(generation) if runner else rundir.events_file(generation, "n")
        with path.open("a") as stream:
            stream.write(json.dumps({"time": START + after_s, "event": event, **fields}) + "\n")


def history(rundir: RunDir) -> History:
    return read_history(rundir, START + 1000)


def test_a_chain_that_has_not_begun(rundir: RunDir) -> None:
    """Nothing to tell."""
    assert ((), ()) == (history(rundir).links, history(rundir).events)


def test_evidence_of_a_link_that_could_say_it(rundir: RunDir) -> None:
    """As its ledger has it; a single text is a list of one."""
    seen = ["Reason=TimeLimit", "DUE TO TIME LIMIT"]
    wrote(
        rundir, 1, ("link.started", 0, {"step": 0}), ("save.committed", 5, {"step": 40}),
        ("link.ended", 9, {"cause": "time limit", "reason": "deadline", "evidence": seen}),
    )  # fmt: skip
    wrote(
        rundir, 2, ("link.started", 10, {"step": 40}),
        ("link.ended", 12, {"cause": "crashed", "evidence": "exit code 1"}),
    )  # fmt: skip
    first, second = history(rundir).links
    assert ("time limit", tuple(seen)) == (first.cause, first.evidence)
    assert ("7_1", "elsewhere", 0, 40, 0) == (
        first.job, first.host, first.step_from, first.step_to, first.lost_steps,
    )  # fmt: skip
    assert ("exit code 1",) == second.evidence


def test_a_later_link_explains_one_that_was_killed(rundir: RunDir) -> None:
    """Its cause outranks the guess from silence."""
    wrote(rundir, 1, ("link.started", 0, {"step": 0}), ("progress", 5, {"step": 9}))
    told = {"generation": 1, "cause": "node failure", "evidence": ["State=NODE_FAIL"]}
    wrote(rundir, 2, ("link.started", 30, {"step": 0}), ("link.explained", 31, told))
    first = history(rundir).links[0]
    assert ("node failure", ("State=NODE_FAIL",), 9) == (
        first.cause, first.evidence, first.lost_steps,
    )  # fmt: skip


def test_the_level_of_a_link_and_why_none_above_it(rundir: RunDir) -> None:
    """A level that was given up once and works after all is not told twice."""
    said = {"level": "criu", "rejected": {"dmtcp": "not on PATH", "criu": "an older reason"}}
    wrote(
        rundir, 1, ("link.started", 0, {"step": 0}),
        ("link.ended", 9, {"cause": "crashed", "evidence": ["exit code 1"], **said}),
    )  # fmt: skip
    expected = ("exit code 1", "level: criu", "not dmtcp: not on PATH")
    assert expected == history(rundir).links[0].evidence


def test_evidence_from_both_is_told_once(rundir: RunDir) -> None:
    """In the order in which it was found."""
    wrote(
        rundir, 1, ("link.started", 0, {"step": 0}),
        ("link.ended", 5, {"cause": "preempted", "evidence": ["a", "b"]}),
    )  # fmt: skip
    told = {"generation": 1, "cause": "preempted", "evidence": ["b", "c"]}
    wrote(rundir, 2, ("link.explained", 6, told), ("link.started", 7, {"step": 0}))
    assert ("a", "b", "c") == history(rundir).links[0].evidence


def test_waits(rundir: RunDir) -> None:
    """Since the submission, or since the link before."""
    wrote(rundir, 1, ("link.started", 0, {"step": 0}), ("link.ended", 10, {"cause": "x"}))
    wrote(rundir, 2, ("link.started", 40, {"step": 0}), ("link.ended", 50, {"cause": "x"}))
    wrote(rundir, 3, ("link.started", 45, {"step": 0}), ("link.ended", 60, {"cause": "x"}))
    assert [60.0, 30.0, 0.0] == [link.wait_s for link in history(rundir).links]


def queued(submitted: float, allocated: float) -> dict[str, float]:
    return {"step": 0, "submitted": START + submitted, "allocated": START + allocated}


def test_waits_as_the_scheduler_has_them(rundir: RunDir) -> None:
    """Setting up is no waiting; an index waits for nothing before the link before has ended."""
    wrote(rundir, 1, ("link.started", 0, queued(-50, -20)), ("link.ended", 10, {"cause": "x"}))
    wrote(rundir, 2, ("link.started", 40, queued(-50, 35)), ("link.ended", 50, {"cause": "x"}))
    wrote(rundir, 3, ("link.started", 90, queued(60, 80)))
    assert [30.0, 25.0, 20.0] == [link.wait_s for link in history(rundir).links]
    chain = {"name": "x", "created": START - 900, "after_generation": 2}
    rundir.chain_file.write_text(json.dumps(chain))
    assert 20.0 == history(rundir).links[2].wait_s


def test_the_wait_behind_a_link_that_left_no_record(rundir: RunDir) -> None:
    """An index waits since that one was heard of last; a new job since it was submitted."""
    wrote(rundir, 1, ("link.started", 0, queued(-50, -20)))
    wrote(rundir, 2, ("link.started", 40, queued(-50, 35)))
    wrote(rundir, 3, ("link.started", 90, queued(60, 80)))
    assert [30.0, 35.0, 20.0] == [link.wait_s for link in history(rundir).links]


def test_the_wait_after_a_stop_is_not_known(rundir: RunDir) -> None:
    """Nobody wrote down when it was taken up again."""
    chain = {"name": "x", "created": START - 60, "after_generation": 1}
    rundir.chain_file.write_text(json.dumps(chain))
    wrote(rundir, 1, ("link.started", 0, {"step": 0}), ("link.ended", 10, {"cause": "halted"}))
    wrote(rundir, 2, ("link.started", 500, {"step": 0}))
    assert [None, None] == [link.wait_s for link in history(rundir).links]


def test_events_of_the_chain_in_their_order(rundir: RunDir) -> None:
    """Also those of a later version."""
    wrote(rundir, 1, ("link.started", 0, {"step": 0}), ("chain.extended", 5, {"job": "9"}))
    wrote(
        rundir, 2, ("link.started", 6, {"step": 0}), ("chain.excluded", 7, {"host": "c1"}),
        ("chain.stopped", 8, {"reason": "no progress"}),
    )  # fmt: skip
    found = history(rundir).events
    assert ["extended", "excluded", "stopped"] == [event.event for event in found]
    assert [1, 2, 2] == [event.generation for event in found]
    assert {"reason": "no progress"} == found[-1].fields


def test_it_can_be_json(rundir: RunDir) -> None:
    """And evidence that is no list is not evidence."""
    wrote(rundir, 1, ("link.started", 0, {"step": 0}), ("link.ended", 1, {"evidence": 3}))
    record = json.loads(json.dumps(history(rundir).record()))
    assert [] == record["links"][0]["evidence"]
