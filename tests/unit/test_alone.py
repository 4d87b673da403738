"""A program that writes files of its own is started only when the last link's is gone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from links import make_chain

from hpc_ckpt import events, lease
from hpc_ckpt.chain import slurm
from hpc_ckpt.chain.allocation import SlurmBackend
from hpc_ckpt.chain.alone import LONGEST_S, wait_until_alone
from hpc_ckpt.chain.link import LinkRunner
from hpc_ckpt.chain.local import LocalBackend
from hpc_ckpt.chain.orders import Orders
from hpc_ckpt.chain.surroundings import ENV_FENCE, environment
from hpc_ckpt.chain.sweep import running_link
from hpc_ckpt.errors import SchedulerError
from hpc_ckpt.lease import Holder
from hpc_ckpt.rundir import RunDir


class Nodes:
    """What sinfo says of the node of the last link, and squeue of its job, which is over."""

    def __init__(self, state: str | None, job: str | None = "") -> None:
        self.state, self.job = state, job
        self.asked: list[list[str]] = []

    def __call__(self, argv: Sequence[str]) -> str:
        said = self.job if argv[0] == "squeue" else self.state
        if argv[0] != "squeue":
            self.asked.append(list(argv))
        if said is None:
            raise SchedulerError(argv, None, "no answer from the scheduler")
        return f"{said}\n"

    @property
    def backend(self) -> SlurmBackend:
        return SlurmBackend({"SLURM_JOB_ID": "22"}, run=self)


class Pauses:
    """Time that passes only in pauses; the last link says that it is gone after so many."""

    def __init__(self, released: Path, after: int | None = None) -> None:
        self.now, self._released, self._after = 0.0, released, after

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self._after is not None and self.now >= self._after:
            self._released.touch()


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    """Link 1 started a program on n1 and left no word; link 2 did not get that far; 3 begins."""
    place = RunDir(tmp_path / "run")
    place.create()
    for number in (1, 2, 3):
        (place.lease / f"{number:08d}").write_text(json.dumps({"job": "20", "host": "elsewhere"}))
    started = {"time": 1.0, "event": "link.started", "node": "n1", "step": 0}
    place.ledger_file(1).write_text(json.dumps(started) + "\n")
    return place


def waited(rundir: RunDir, backend: Any, after: int | None = None) -> tuple[bool, float]:
    pauses = Pauses(rundir.lease / "00000001.released", after)
    known = wait_until_alone(rundir, 3, backend, sleep=pauses.sleep, clock=lambda: pauses.now)
    return known, pauses.now


def test_a_node_that_answers_has_ended_what_was_there(rundir: RunDir) -> None:
    """It is that of the last link that started a program; asked once, no waiting."""
    nodes = Nodes("idle")
    assert (True, 0.0) == waited(rundir, nodes.backend)
    assert [["sinfo", "--all", "--noheader", "--nodes=n1", "--format=%T"]] == nodes.asked


@pytest.mark.parametrize("state", ["down*", "down", "idle*", "completing", "mixed+", None])
def test_a_node_that_does_not_answer_is_waited_for(rundir: RunDir, state: str | None) -> None:
    """Its shim kills what it finds overtaken, and says so."""
    assert (True, 3.0) == waited(rundir, Nodes(state).backend, after=3)


def test_the_wait_has_an_end(rundir: RunDir) -> None:
    """A node without power says nothing."""
    assert (False, LONGEST_S) == waited(rundir, Nodes("down*").backend)


@pytest.mark.parametrize("job", ["RUNNING", "COMPLETING", "SUSPENDED", None])
def test_a_job_that_still_runs_has_ended_nothing(rundir: RunDir, job: str | None) -> None:
    """Its node answers: a job between the two was cancelled, and this one began beside it. The
    lease was taken over, so that the shim there ends the program and says so."""
    nodes = Nodes("allocated", job)
    assert (True, 3.0) == waited(rundir, nodes.backend, after=3)
    assert [] == nodes.asked


def test_a_job_that_ends_meanwhile_is_seen(rundir: RunDir) -> None:
    """Without a word of its own, as one that is killed."""
    nodes = Nodes("allocated", "RUNNING")
    pauses = Pauses(rundir.lease / "never")

    def sleep(seconds: float) -> None:
        pauses.sleep(seconds)
        nodes.job = "" if pauses.now > 10 else nodes.job

    assert wait_until_alone(rundir, 3, nodes.backend, sleep=sleep, clock=lambda: pauses.now)
    assert 30.0 == pauses.now


def test_a_job_that_slurm_has_forgotten_is_over(rundir: RunDir) -> None:
    def run(argv: Sequence[str]) -> str:
        if argv[0] == "squeue":
            raise SchedulerError(argv, 1, "slurm_load_jobs error: Invalid job id specified")
        return "idle\n"

    assert (True, 0.0) == waited(rundir, SlurmBackend({"SLURM_JOB_ID": "22"}, run=run))


def test_a_link_that_said_so_is_gone(rundir: RunDir) -> None:
    nodes = Nodes("down*")
    (rundir.lease / "00000001.released").touch()
    assert (True, 0.0) == waited(rundir, nodes.backend)
    assert [] == nodes.asked


def test_a_program_that_its_link_has_left_is_waited_for(rundir: RunDir) -> None:
    """Until the shim has taken the mark away."""
    mark = rundir.lease / "00000001.left"
    mark.touch()
    (rundir.lease / "00000001.released").touch()
    pauses = Pauses(rundir.lease / "never")

    def sleep(seconds: float) -> None:
        pauses.sleep(seconds)
        if pauses.now == 5:
            mark.unlink()

    backend = Nodes("down*").backend
    assert wait_until_alone(rundir, 3, backend, sleep=sleep, clock=lambda: pauses.now)
    assert 5.0 == pauses.now


def test_where_nothing_was_started_nothing_is_waited_for(tmp_path: Path) -> None:
    place = RunDir(tmp_path / "run")
    place.create()
    assert wait_until_alone(place, 1, Nodes("down*").backend, sleep=lambda _: None)


def told(rundir: RunDir, generation: int, *records: tuple[str, dict[str, Any]]) -> None:
    lines = [json.dumps({"time": 2.0, "event": event, **fields}) for event, fields in records]
    rundir.ledger_file(generation).write_text("\n".join(lines) + "\n")


BEGAN = ("link.started", {"node": "n2", "step": 0})
NO_CODE = ("link.ended", {"cause": "stopped by signal", "code": None})
COULD_NOT = ("link.ended", {"cause": "could not start", "code": None})
WITH_CODE = ("link.ended", {"cause": "crashed", "code": 1})
PHASE = ("chain.phase_done", {"phase": 0})


@pytest.mark.parametrize(
    ("second", "asked"),
    [
        ([BEGAN, NO_CODE], "n1"),
        ([BEGAN, COULD_NOT], "n1"),
        ([BEGAN], "n2"),
        ([BEGAN, WITH_CODE], "n2"),
        ([BEGAN, PHASE, COULD_NOT], "n2"),
    ],
)
def test_a_link_that_started_no_program_is_passed_over(
    rundir: RunDir, second: list[tuple[str, dict[str, Any]]], asked: str
) -> None:
    """What is waited for is the program of a link before it. Of one whose end nobody wrote down,
    or whose second command could not be started, something may be left."""
    told(rundir, 2, *second)
    nodes = Nodes("idle")
    assert (True, 0.0) == waited(rundir, nodes.backend)
    assert f"--nodes={asked}" in nodes.asked[0]


def test_on_this_machine_the_process_tells(rundir: RunDir) -> None:
    here = Holder.here()
    assert not LocalBackend().surely_gone(here, None)
    gone = Holder(host=here.host, boot=here.boot, pid=here.pid, started=here.started + 1)
    assert LocalBackend().surely_gone(gone, None)


@pytest.mark.parametrize("text", ["idle\nmixed\n", "drained", "allocated", "idle~"])
def test_states_of_nodes_that_answer(text: str) -> None:
    assert slurm.answer(text)
    assert not slurm.are_ending(text)


@pytest.mark.parametrize("text", ["", "idle\ndown*", "mixed*", "down"])
def test_one_that_nobody_knows_or_that_is_down_does_not(text: str) -> None:
    assert not slurm.answer(text)


def test_a_node_that_answers_later_is_asked_again(rundir: RunDir) -> None:
    """Another job was being ended there."""
    nodes = Nodes("mixed+")
    pauses = Pauses(rundir.lease / "never")

    def sleep(seconds: float) -> None:
        pauses.sleep(seconds)
        nodes.state = "mixed" if pauses.now > 10 else nodes.state

    assert wait_until_alone(rundir, 3, nodes.backend, sleep=sleep, clock=lambda: pauses.now)
    assert (30.0, 2) == (pauses.now, len(nodes.asked))


def test_of_a_link_on_several_nodes_every_one_is_asked(rundir: RunDir) -> None:
    started = {"time": 1.0, "event": "link.started", "node": "n1", "nodes": "n[1-2]", "step": 0}
    rundir.ledger_file(1).write_text(json.dumps(started) + "\n")
    nodes = Nodes("idle")
    assert (True, 0.0) == waited(rundir, nodes.backend)
    assert [["sinfo", "--all", "--noheader", "--nodes=n[1-2]", "--format=%T"]] == nodes.asked


@pytest.mark.parametrize(
    ("code", "state", "whole"),
    [
        (0, "mixed", True),
        (1, "mixed+", True),
        (75, "completing", True),
        (0, "down*", False),
        (0, "mixed*\nidle", False),
        (0, None, False),
        (-9, "mixed", False),
    ],
)
def test_a_step_that_srun_has_left_behind_is_not_over(
    code: int, state: str | None, whole: bool
) -> None:
    backend = SlurmBackend({"SLURM_JOB_NODELIST": "n[1-2]"}, run=Nodes(state))
    assert whole is backend.ended_whole(code)


@pytest.mark.parametrize(("alone", "whole"), [(True, True), (True, False), (False, False)])
def test_the_lease_of_a_program_that_may_live_is_released_with_a_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool, whole: bool
) -> None:
    """The link itself is over: nobody takes it for one that runs."""
    place = make_chain(tmp_path, alone=alone)
    monkeypatch.setattr(LocalBackend, "ended_whole", lambda self, code: whole)
    assert 0 == LinkRunner(place, Orders.read(place), LocalBackend(kill_wait_s=5.0)).run()
    assert lease.released(place, 1)
    assert running_link(place) is None
    assert (whole or not alone) is lease.program_gone(place, 1)


def test_whether_a_program_is_left_is_asked_last_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun may return before Slurm sets the node down."""
    place = make_chain(tmp_path, alone=True)
    seen: list[str] = []

    def ended_whole(self: LocalBackend, code: int) -> bool:
        seen.extend(record["event"] for record in events.read(place.ledger_file(1)))
        return True

    monkeypatch.setattr(LocalBackend, "ended_whole", ended_whole)
    assert 0 == LinkRunner(place, Orders.read(place), LocalBackend(kill_wait_s=5.0)).run()
    assert 1 == seen.count("link.ended")


def test_a_step_that_was_not_waited_for_may_be_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the scheduler would say of its nodes."""

    def broken(*_: object) -> int:
        raise RuntimeError("x")

    place = make_chain(tmp_path, alone=True)
    monkeypatch.setattr(LinkRunner, "_wait_for", broken)
    with pytest.raises(RuntimeError):
        LinkRunner(place, Orders.read(place), LocalBackend(kill_wait_s=5.0)).run()
    assert lease.released(place, 1)
    assert not lease.program_gone(place, 1)


@pytest.mark.parametrize("alone", [True, False])
def test_the_shim_is_told_which_lease_ends_it(tmp_path: Path, alone: bool) -> None:
    """Only where the program cannot be fenced; that of a link around this one does not count."""
    place = make_chain(tmp_path, alone=alone)
    found = environment({ENV_FENCE: "/x"}, place, Orders.read(place), 7, "slurm")
    expected = str(tmp_path / "lease" / "00000008") if alone else None
    assert expected == found.get(ENV_FENCE)


def test_a_chain_that_is_stopped_while_its_link_waits_starts_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_chain(tmp_path / "chain", alone=True)

    def waits(*_: object) -> bool:
        place.write_halt("by the user")
        return False

    monkeypatch.setattr("hpc_ckpt.chain.link.told_while_waiting", waits)
    assert 0 == LinkRunner(place, Orders.read(place), LocalBackend(kill_wait_s=5.0)).run()
    assert [] == list(events.read(place.ledger_file(1)))
