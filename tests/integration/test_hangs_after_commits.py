"""Storage that takes new checkpoints but hangs where old ones are removed: nothing waits for it."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator

import pytest
import torch

from hpc_ckpt import Checkpointer, LinkEnded, checkpointer
from hpc_ckpt.engine import tidying, underway
from hpc_ckpt.events import Event, read
from hpc_ckpt.rundir import CheckpointKey, Result, RunDir
from hpc_ckpt.runtime import boundary
from hpc_ckpt.tiers.directory import DirectoryTier


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Set: the storage answers again."""
    over, before = threading.Event(), {*threading.enumerate()}
    yield over
    over.set()
    for thread in {*threading.enumerate()} - before:  # the next test counts those that hang in it
        if thread.name.startswith("hpc-ckpt-"):
            thread.join(10)


@pytest.fixture
def hung(over: threading.Event, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that hang in a removal, as every removal does."""
    names, real = list[str](), DirectoryTier.remove

    def remove(self: DirectoryTier, key: CheckpointKey) -> bool:
        if not over.is_set():
            names.append(threading.current_thread().name)
            over.wait(60)
        return real(self, key)

    monkeypatch.setattr(DirectoryTier, "remove", remove)
    monkeypatch.setattr(underway, "STUCK_S", 0.5)
    monkeypatch.setattr(tidying, "STUCK_S", 0.5)
    monkeypatch.setattr(checkpointer, "PATIENCE_S", 1.0)
    monkeypatch.setattr(boundary, "LONGEST_FINAL_SAVE_S", 3.0)
    return names


def train(ckpt: Checkpointer, weight: torch.Tensor) -> None:
    weight += 1
    ckpt.step()
    time.sleep(0.01)


def until_it_hangs(ckpt: Checkpointer, weight: torch.Tensor, hung: list[str], name: str) -> None:
    """By saves that are waited for in its thread, or by those of the policy."""
    end = time.monotonic() + 30
    while name not in hung and time.monotonic() < end:
        train(ckpt, weight)
        if name == "hpc-ckpt-urgent":
            ckpt.save(wait=True)
            time.sleep(0.3)  # the next one breaks off what follows this one
    assert name in hung


def test_saves_of_the_policy_go_on(rundir: RunDir, hung: list[str]) -> None:
    weight = torch.zeros(4)
    with Checkpointer(rundir.root, policy="every 1 steps", keep=1, w=weight) as ckpt:
        until_it_hangs(ckpt, weight, hung, "hpc-ckpt-persist")
        step, end = ckpt.global_step, time.monotonic() + 20
        while max(key.step for key in rundir.committed()) <= step + 2 and time.monotonic() < end:
            train(ckpt, weight)
        assert step + 2 < max(key.step for key in rundir.committed())


def told(rundir: RunDir) -> list[str]:
    failed = Event.RETENTION_FAILED.value
    files = rundir.root.rglob("*.jsonl")
    return [one["error"] for file in files for one in read(file) if one["event"] == failed]


def test_one_thread_hangs_and_it_is_told_once(
    rundir: RunDir, hung: list[str], over: threading.Event
) -> None:
    """Saves behind it are as quick as ever; once it comes back, what was left is removed."""
    weight = torch.zeros(4)
    with Checkpointer(rundir.root, policy="every 1 steps", keep=1, w=weight) as ckpt:
        until_it_hangs(ckpt, weight, hung, "hpc-ckpt-persist")
        end = time.monotonic() + 30
        while len(rundir.committed()) < 9 and time.monotonic() < end:
            train(ckpt, weight)
        train(ckpt, weight)
        ckpt.save(wait=True)
        assert len(rundir.committed()) >= 9
        assert ["hpc-ckpt-persist"] == hung
        over.set()
        end = time.monotonic() + 30
        while len(rundir.committed()) > 3 and time.monotonic() < end:
            train(ckpt, weight)
        assert len(rundir.committed()) <= 3
    (error,) = told(rundir)
    assert "TimeoutError" in error


def test_a_save_that_is_waited_for_is_made(rundir: RunDir, hung: list[str]) -> None:
    weight = torch.zeros(4)
    with Checkpointer(rundir.root, policy="every hour", keep=1, w=weight) as ckpt:
        until_it_hangs(ckpt, weight, hung, "hpc-ckpt-urgent")
        train(ckpt, weight)
        assert ckpt.save(wait=True).done()
        assert ckpt.global_step == max(key.step for key in rundir.committed())


def test_whoever_waits_for_a_save_of_the_background_sees_it_done(
    rundir: RunDir, hung: list[str]
) -> None:
    """Without another step(), which would look for what hangs."""
    weight = torch.zeros(4)
    with Checkpointer(rundir.root, policy="every hour", keep=1, w=weight) as ckpt:
        while not hung:
            train(ckpt, weight)
            earlier = ckpt.save()
            while not (earlier.done() or hung):
                time.sleep(0.01)
        train(ckpt, weight)
        while not ckpt._entered().engine.ready:  # a second buffer is being made
            time.sleep(0.01)
        pending = ckpt.save()
        assert pending.step == ckpt.global_step
        assert pending.wait(20).is_dir()


def test_the_work_is_completed(rundir: RunDir, hung: list[str]) -> None:
    weight = torch.zeros(4)
    with Checkpointer(rundir.root, policy="every hour", keep=1, w=weight) as ckpt:
        until_it_hangs(ckpt, weight, hung, "hpc-ckpt-urgent")
        train(ckpt, weight)
    done = rundir.done()
    assert done is not None
    assert ckpt.global_step == done.step


@pytest.mark.parametrize("thread", ["hpc-ckpt-urgent", "hpc-ckpt-persist"])
def test_the_last_save_of_a_link_is_made(rundir: RunDir, hung: list[str], thread: str) -> None:
    """Whichever thread hangs."""
    weight, policy = torch.zeros(4), "every hour" if "urgent" in thread else "every 1 steps"
    with (
        warnings.catch_warnings(),
        pytest.raises(LinkEnded),
        Checkpointer(rundir.root, policy=policy, keep=1, w=weight) as ckpt,
    ):
        warnings.simplefilter("ignore")
        until_it_hangs(ckpt, weight, hung, thread)
        for _ in range(10):
            train(ckpt, weight)
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            train(ckpt, weight)
    outcome = rundir.outcome(1)
    assert outcome is not None
    assert (Result.SAVED, ckpt.global_step) == (outcome.outcome, outcome.step)


def test_a_snapshot_that_waits_is_what_the_link_ends_with(
    rundir: RunDir, hung: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """poll() ends it without another save: none newer comes."""
    monkeypatch.setattr(underway, "STUCK_S", 1.0)
    weight = torch.zeros(4)
    with (
        pytest.raises(LinkEnded),
        Checkpointer(rundir.root, policy="every hour", keep=1, w=weight) as ckpt,
    ):
        while not hung:
            train(ckpt, weight)
            ckpt.save()
            time.sleep(0.1)
        train(ckpt, weight)
        assert ckpt.save().step == ckpt.global_step
        os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            ckpt.poll()
    outcome = rundir.outcome(1)
    assert outcome is not None
    assert (Result.SAVED, ckpt.global_step) == (outcome.outcome, outcome.step)
