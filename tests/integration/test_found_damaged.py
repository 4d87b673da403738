"""What the process itself finds damaged after a commit: what is said of it, and saved again."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bad_days import HalfFrozen, damaged_once_durable, flip, told_of_damage, valid
from test_tiers import recorded, settle

from hpc_ckpt import Checkpointer, LinkEnded, fsio
from hpc_ckpt.engine.tidying import Tidier
from hpc_ckpt.events import Event
from hpc_ckpt.policy.interval import EverySteps
from hpc_ckpt.rundir import Outcome, Result, RunDir
from hpc_ckpt.runtime import boundary
from hpc_ckpt.runtime.waiting import look_s, spare_s
from hpc_ckpt.tiers.directory import DirectoryTier
from hpc_ckpt.tiers.wishes import Survives
from hpc_ckpt.triggers import Surroundings, Triggers

FOURTH = "step-000000004-g00000001"


def run(rundir: RunDir, *, told_at: int | None = None) -> Checkpointer:
    """Four steps, the last but one saved, or the one before it where it is told to stop."""
    model, policy = torch.nn.Linear(60, 60), f"every {told_at - 1 if told_at else 3} steps"
    with Checkpointer(rundir.root, policy=policy, keep=1, model=model) as ckpt:
        for step in ckpt.steps(4):
            if step == told_at:
                os.kill(os.getpid(), signal.SIGTERM)
                while not ckpt.poll():
                    time.sleep(0.01)
            ckpt.step()
            ckpt._entered().engine.wait(20)
    return ckpt


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody breaks a look off, as the lookout does once a second when the link must end."""
    monkeypatch.setattr(Tidier, "break_off", lambda self: None)


def outcome_of(rundir: RunDir) -> Outcome:
    outcome = rundir.outcome(1)
    assert outcome is not None
    return outcome


def ended_with_damage(rundir: RunDir) -> Outcome:
    """Told to stop; its last save is damaged as soon as it is durable."""
    with (
        damaged_once_durable(rundir.root, FOURTH, f"{FOURTH}/*.safetensors"),
        pytest.raises(LinkEnded),
    ):
        run(rundir, told_at=3)
    return outcome_of(rundir)


@contextmanager
def damaged_at_every_commit(rundir: RunDir, name: str) -> Iterator[None]:
    def damage(point: str) -> None:
        if point == "commit.durable":
            for path in set(rundir.checkpoints.glob(f"{name}*/*.safetensors")) - done:
                done.add(path)
                flip(path, 9000)

    done: set[Path] = set()
    before = fsio.observe(damage)
    try:
        yield
    finally:
        fsio.observe(before)


@pytest.mark.usefixtures("looked_at")
def test_a_last_save_that_is_found_damaged_is_saved_again(rundir: RunDir) -> None:
    """All of it is still in memory, and there is time."""
    outcome = ended_with_damage(rundir)
    assert (Result.SAVED, 4) == (outcome.outcome, outcome.step)
    assert valid(rundir.root)[f"{FOURTH}-r1"]


@pytest.mark.usefixtures("looked_at")
def test_without_time_for_another_save_the_one_before_is_named(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the next link will find is known before the outcome is written."""
    monkeypatch.setattr(boundary, "spare_s", lambda *_: 0.0)
    outcome = ended_with_damage(rundir)
    assert (Result.SAVED, 2) == (outcome.outcome, outcome.step)
    assert "step 4 was damaged since" in outcome.reason
    assert [2, 4] == [record["step"] for record in recorded(rundir, Event.COMMITTED)]


def test_work_is_not_done_beside_a_damaged_checkpoint(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DONE would end the chain, with nothing whole to show for it. Reading it back takes time."""
    real = DirectoryTier.verify

    def verify(self: DirectoryTier, *arguments: Any) -> Any:
        time.sleep(0.5)
        return real(self, *arguments)

    monkeypatch.setattr(DirectoryTier, "verify", verify)
    with damaged_once_durable(rundir.root, FOURTH, f"{FOURTH}/*.safetensors"):
        run(rundir)
    done = rundir.done()
    assert done is not None
    assert (4, True) == (done.step, valid(rundir.root)[f"{FOURTH}-r1"])
    assert Result.COMPLETE is outcome_of(rundir).outcome


def test_a_link_that_is_overtaken_while_its_last_save_is_read_back_is_not_done(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer one goes on from that save, perhaps further than this one was to go."""
    real = DirectoryTier.verify

    def verify(self: DirectoryTier, key: Any, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.5)
        (rundir.lease / "00000002").write_text('{"job": "2"}')
        return real(self, key, *arguments, **options)

    monkeypatch.setattr(DirectoryTier, "verify", verify)
    with pytest.raises(LinkEnded, match="fenced"):
        run(rundir)
    assert rundir.done() is None
    assert Result.SAVED is outcome_of(rundir).outcome  # said before that wait, in case of a kill
    assert valid(rundir.root)[FOURTH]


def test_storage_that_spoils_the_last_save_twice_leaves_the_work_to_the_next_link(
    rundir: RunDir,
) -> None:
    """Which goes on from what is whole."""
    with (
        damaged_at_every_commit(rundir, FOURTH),
        pytest.raises(LinkEnded, match="the work is done, but"),
    ):
        run(rundir)
    outcome = outcome_of(rundir)
    assert (None, Result.SAVED, 3) == (rundir.done(), outcome.outcome, outcome.step)
    run(rundir)
    assert rundir.done() is not None


def test_the_look_at_a_last_save_is_over_in_time_for_another() -> None:
    """It costs no link its end; without a known end somebody may kill it soon."""
    triggers = Triggers(EverySteps(1), entered_s=0.0, deadline_s=1000.0)

    def around(left_s: float | None) -> Surroundings:
        return Surroundings(
            now_s=0.0 if left_s is None else 1000.0 - left_s,
            deadline_s=None if left_s is None else 1000.0,
            save_s=20.0,
        )

    for left_s in (1000.0, 60.0, 10.0):
        now = around(left_s)
        assert look_s(triggers, now) + 20.0 <= left_s
        assert look_s(triggers, now) <= spare_s(triggers, now)
    assert look_s(triggers, around(10.0)) < 0
    assert 20.0 <= look_s(triggers, around(None)) < 60.0


# ── two tiers ─────────────────────────────────────────────────────────────────────────────
def settings(fast: Path) -> dict[str, Any]:
    storage = {"local": {"path": str(fast), "survives": Survives.PROCESS.value}}
    return {"storage": storage, "tiers": ["local", "root"]}


@told_of_damage
@pytest.mark.parametrize(
    ("model", "file"),
    [
        (torch.nn.Linear(60, 60), "step-000000003-*/rank-00000.safetensors"),
        (HalfFrozen(), "*/rank-00000.1.safetensors"),
    ],
)
def test_what_is_damaged_in_the_home_is_brought_there_again(
    rundir: RunDir, fast: Path, model: torch.nn.Module, file: str
) -> None:
    """With what it refers to: another tier has all of it, and would go with the job."""
    third = "step-000000003-g00000001"
    with (
        damaged_once_durable(rundir.root, third, file),
        pytest.raises(LinkEnded),
        Checkpointer(
            rundir.root, settings=settings(fast), policy="every 1 steps", keep=1, model=model
        ) as ckpt,
    ):
        engine = ckpt._entered().engine
        for _ in range(3):
            ckpt.step()
            assert engine.wait(20)
            engine._drainer.wait(20)
        assert engine.newest != engine.lasting, "the damage is known"
        engine.bring_home(20)
        engine._drainer.wait(20)
        assert engine.newest == engine.lasting, "also after retention there"
        os.kill(os.getpid(), signal.SIGTERM)
        while not ckpt.poll():
            time.sleep(0.01)
    outcome = outcome_of(rundir)
    assert (Result.SAVED, 3) == (outcome.outcome, outcome.step)
    assert valid(rundir.root)[third]


def test_damage_that_a_drain_meets_takes_the_checkpoint_away(rundir: RunDir, fast: Path) -> None:
    """It does not count as saved any more, and the program is told."""
    done = threading.Event()

    def damage(point: str) -> None:
        if point == "commit.durable" and not done.is_set():
            for path in fast.glob("*/checkpoints/step-*/rank-00000.safetensors"):
                done.set()
                flip(path, 9000)

    before = fsio.observe(damage)
    try:
        with Checkpointer(
            rundir.root, tiers=[fast], policy="every hour", model=torch.nn.Linear(60, 60)
        ) as ckpt:
            ckpt.step()
            settle(ckpt.save())
            engine, until = ckpt._entered().engine, time.monotonic() + 20
            while engine.newest is not None and time.monotonic() < until:
                time.sleep(0.01)
            assert engine.newest is None
            with pytest.warns(RuntimeWarning, match="is damaged"):
                ckpt.step()
    finally:
        fsio.observe(before)
    assert recorded(rundir, Event.DRAIN_FAILED)
