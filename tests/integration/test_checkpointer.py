"""Checkpointer in one process: what it restores, records, refuses, and leaves behind."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpc_ckpt
from hpc_ckpt import Checkpointer, LinkEnded, events, latest, load
from hpc_ckpt.engine.persist import Pending
from hpc_ckpt.errors import (
    EXIT_SAVED,
    HpcCkptError,
    NoCheckpoint,
    RestoreMismatch,
    RootError,
    SpecError,
    UnsupportedState,
    UserError,
)
from hpc_ckpt.events import Event
from hpc_ckpt.policy.base import Decision, Progress
from hpc_ckpt.rundir import MANIFEST_NAME, Done, Result, RunDir


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a plain `python train.py`."""
    for name in list(os.environ):
        if name.startswith(("HPC_CKPT", "TORCHELASTIC")):
            monkeypatch.delenv(name)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def rundir(root: Path) -> RunDir:
    return RunDir(root)


class Counter:
    """The smallest thing with a state."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def loader(samples: int = 8, batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(samples)), batch_size=batch_size, shuffle=True)


def recorded(rundir: RunDir, event: Event) -> list[dict[str, Any]]:
    paths = sorted(rundir.events.glob("*.jsonl"))
    return [r for path in paths for r in events.read(path) if r["event"] == event.value]


def steps_of(rundir: RunDir) -> list[int]:
    return [key.step for key in rundir.committed()]


def manifest_of(rundir: RunDir, number: int = -1) -> dict[str, Any]:
    key = rundir.committed()[number]
    path = rundir.checkpoints / key.directory_name / MANIFEST_NAME
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def link(monkeypatch: pytest.MonkeyPatch, rundir: RunDir, generation: int = 1) -> None:
    """What the link runner prepares."""
    rundir.create()
    (rundir.lease / f"{generation:08d}").write_text("{}")
    for name, value in rundir.environment(generation, "local").items():
        if name != "HPC_CKPT_SETTINGS":
            monkeypatch.setenv(name, value)


# ── entering ──────────────────────────────────────────────────────────────────────────────
def test_a_fresh_start_restores_nothing(root: Path, rundir: RunDir) -> None:
    """Nothing there: restored is None, the step is 0, and the event says so."""
    with Checkpointer(root, counter=Counter()) as ckpt:
        assert (None, 0, 0, False) == (
            ckpt.restored, ckpt.global_step, ckpt.epoch, ckpt.should_stop,
        )  # fmt: skip
    assert 1 == len(recorded(rundir, Event.STARTED_FRESH))


def test_what_was_left_is_restored(root: Path) -> None:
    """The record names step, epoch, generation, path and tier; objects are filled in place."""
    counter, array, tensor = Counter(), np.zeros(3), torch.zeros(2)
    with Checkpointer(root, counter=counter, array=array, tensor=tensor) as ckpt:
        for _ in ckpt.epochs(2):
            counter.value, array[:], tensor[:] = 41, 7.0, 8.0
            ckpt.step()
    again, array, tensor = Counter(), np.zeros(3), torch.zeros(2)
    with Checkpointer(root, counter=again, array=array, tensor=tensor) as ckpt:
        restored = ckpt.restored
        assert restored is not None
        assert (2, 2, 1, "root", ()) == (
            restored.step, restored.epoch, restored.generation, restored.tier, restored.skipped,
        )  # fmt: skip
        assert hpc_ckpt.latest(root) == restored.path
        assert (41, [7.0] * 3, [8.0] * 2) == (again.value, array.tolist(), tensor.tolist())
        assert 2 == ckpt.global_step


def test_objects_that_do_not_fit_are_refused(root: Path) -> None:
    """All differences at once; strict_restore=False lets them pass with a warning."""
    with Checkpointer(root, model=nn.Linear(2, 2)) as ckpt:
        ckpt.step()
    with pytest.raises(RestoreMismatch), Checkpointer(root, model=nn.Linear(3, 3)):
        pass
    wider = nn.Sequential(nn.Linear(2, 2))
    with pytest.warns(Warning), Checkpointer(root, strict_restore=False, model=wider):
        pass


def test_a_failed_entry_leaves_the_root_free(root: Path, rundir: RunDir) -> None:
    """After a refusal the lease is given back and the signals are as before."""
    before = signal.getsignal(signal.SIGTERM)
    with Checkpointer(root, model=nn.Linear(2, 2)) as ckpt:
        ckpt.step()
    with pytest.raises(RestoreMismatch), Checkpointer(root, model=nn.Linear(3, 3)):
        pass
    assert before == signal.getsignal(signal.SIGTERM)
    with Checkpointer(root, model=nn.Linear(2, 2)) as ckpt:
        assert ckpt.restored is not None
    assert all((rundir.lease / f"{g:08d}.released").exists() for g in (1, 2, 3))


def test_a_state_without_a_representation_is_refused_at_once(root: Path) -> None:
    """No pickle: the error names the key, before any training."""

    class Odd(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"thing": object()}

    with pytest.raises(UnsupportedState, match="thing"), Checkpointer(root, odd=Odd()):
        pass


def test_a_root_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file in the way is the user's to mend."""
    (tmp_path / "file").write_text("")
    with pytest.raises(RootError, match="file"), Checkpointer(tmp_path / "file" / "run"):
        pass


def test_no_root_at_all_is_an_error() -> None:
    """Neither the argument nor the environment names one."""
    with pytest.raises(SpecError, match="HPC_CKPT_ROOT"), Checkpointer():
        pass


def test_the_root_may_come_from_the_environment(
    root: Path, rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`root` defaults to $HPC_CKPT_ROOT; outside a link the argument wins."""
    monkeypatch.setenv("HPC_CKPT_ROOT", str(root))
    with Checkpointer() as ckpt:
        ckpt.step()
    assert [1] == steps_of(rundir)
    other = root.parent / "other"
    with Checkpointer(other) as ckpt:
        ckpt.step()
    assert [1] == steps_of(RunDir(other))


def test_in_a_link_the_chains_root_wins(
    root: Path, rundir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The environment beats the call, and a difference is told."""
    link(monkeypatch, rundir)
    other = root.parent / "other"
    with caplog.at_level(logging.INFO), Checkpointer(other) as ckpt:
        ckpt.step()
    assert ([1], False) == (steps_of(rundir), other.exists())
    assert "is used instead of" in caplog.text


def test_a_tier_nobody_knows_is_refused_before_anything_is_taken(root: Path) -> None:
    """With what is known; nothing half-made is left behind."""
    with pytest.raises(SpecError, match=r"no storage is named 'local'\. Known: root\."):
        Checkpointer(root, tiers=["local"]).__enter__()
    assert not root.exists()


def test_a_tier_that_is_the_run_directory_is_refused(root: Path) -> None:
    """And no generation is used up by it."""
    with pytest.raises(SpecError, match="are the same directory"):
        Checkpointer(root, tiers=[root]).__enter__()
    assert [] == list(RunDir(root).lease.iterdir())
    with Checkpointer(root) as ckpt:
        ckpt.step()
    assert [1] == steps_of(RunDir(root))


def test_a_root_in_use_is_refused(root: Path) -> None:
    """Two Checkpointers on one root at once, in one process or in two."""
    with Checkpointer(root), pytest.raises(RootError, match="in use"), Checkpointer(root):
        pass
    code = "import sys; from hpc_ckpt import Checkpointer; Checkpointer(sys.argv[1]).__enter__()"
    with Checkpointer(root):
        tried = subprocess.run(
            [sys.executable, "-c", code, str(root)], capture_output=True, text=True
        )
    assert "in use by process" in tried.stderr


def test_settings_reach_the_policy_and_retention(
    root: Path, rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environment over call, as settings.py says."""
    monkeypatch.setenv("HPC_CKPT__CHECKPOINT__KEEP__LAST", "2")
    with Checkpointer(root, policy="every 1 steps", keep={"last": 9}) as ckpt:
        for _ in ckpt.steps(5):
            ckpt.step()
            ckpt.save(wait=True)
    assert 2 == len(rundir.committed())


def test_auto_is_explained_once(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Notes of the settings are logged."""
    with caplog.at_level(logging.INFO), Checkpointer(root, policy="auto"):
        pass
    assert 1 == caplog.text.count("policy 'auto' means")


def test_it_is_used_inside_its_block_and_once(root: Path) -> None:
    """Before, and a second time, the error says what to do."""
    ckpt = Checkpointer(root)
    with pytest.raises(UserError, match="inside its block"):
        ckpt.step()
    with ckpt:
        ckpt.step()
    with pytest.raises(UserError, match="inside its block"):
        ckpt.step()
    assert 1 == ckpt.global_step
    with pytest.raises(UserError, match="once"), ckpt:
        pass


def test_two_that_start_at_once_agree_on_the_chain(root: Path, rundir: RunDir) -> None:
    """chain.json is made once and kept."""
    with Checkpointer(root):
        first = rundir.chain()
    with Checkpointer(root):
        assert first == rundir.chain()
    assert first is not None
    assert first["chain"] == manifest_of(rundir)["chain"]


def test_a_changed_thread_count_is_told(root: Path) -> None:
    """Another thread count may change the last bits."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with Checkpointer(root) as ckpt:
            ckpt.step()
        torch.set_num_threads(2)
        with pytest.warns(RuntimeWarning, match="saved with 1 threads"), Checkpointer(root):
            pass
    finally:
        torch.set_num_threads(threads)


# ── loops ─────────────────────────────────────────────────────────────────────────────────
def test_every_sample_exactly_once_per_epoch_across_restarts(root: Path) -> None:
    """A run that fails in the middle goes on with the batch after the last saved step."""
    seen: list[tuple[int, list[int]]] = []

    def run(fail_at: int | None) -> None:
        torch.manual_seed(5)
        with Checkpointer(root, policy="every 1 steps") as ckpt:
            for epoch in ckpt.epochs(2):
                for (batch,) in ckpt.batches(loader()):
                    if ckpt.global_step == fail_at:
                        raise ZeroDivisionError
                    seen.append((epoch, batch.tolist()))
                    ckpt.step()
                    ckpt.save(wait=True)

    with pytest.raises(ZeroDivisionError):
        run(fail_at=6)
    run(fail_at=None)
    for epoch in (0, 1):
        samples = sorted(number for e, batch in seen if e == epoch for number in batch)
        assert list(range(8)) == samples


def test_steps_count_over_the_whole_chain(root: Path) -> None:
    """steps(n) goes on where the last process stopped."""
    with Checkpointer(root) as ckpt:
        assert [0, 1, 2] == [step for step in ckpt.steps(3) if ckpt.step() is None]
    with Checkpointer(root) as ckpt:
        assert [3, 4] == [step for step in ckpt.steps(5) if ckpt.step() is None]


def test_random_numbers_go_on_where_they_were(root: Path) -> None:
    """Python, numpy and torch; what is drawn before the loop on the way back is taken back."""

    def draw() -> tuple[float, float, float]:
        return random.random(), torch.rand(1).item(), float(np.random.rand())

    def run(place: Path, until: int) -> list[tuple[float, float, float]]:
        drawn = []
        with Checkpointer(place) as ckpt:
            draw()
            for _ in ckpt.steps(until):
                drawn.append(draw())
                ckpt.step()
        return drawn

    def seed(number: int) -> None:
        random.seed(number)
        np.random.seed(number)
        torch.manual_seed(number)

    seed(3)
    whole = run(root, 4)
    seed(3)
    parted = run(root.parent / "parted", 2)
    seed(99)
    assert whole == parted + run(root.parent / "parted", 4)


def test_evaluation_leaves_no_trace(root: Path) -> None:
    """batches(track=False) moves neither the position nor the random numbers."""
    with Checkpointer(root) as ckpt:
        for _ in ckpt.epochs(1):
            for _ in ckpt.batches(loader()):
                before = torch.get_rng_state()
                assert 4 == len(list(ckpt.batches(loader(), track=False)))
                assert torch.equal(before, torch.get_rng_state())
                ckpt.step()
        assert 4 == ckpt.global_step


def test_a_save_after_the_last_batch_is_of_the_next_epoch(root: Path) -> None:
    """A per-epoch scheduler that stepped before the save is not stepped again on resume."""
    counter = Counter()
    with pytest.raises(ZeroDivisionError), Checkpointer(root, scheduler=counter) as ckpt:
        for _ in ckpt.epochs(3):
            for _ in ckpt.batches(loader()):
                ckpt.step()
            counter.value += 1
            ckpt.save("epoch", wait=True)
            raise ZeroDivisionError
    counter = Counter()
    with Checkpointer(root, scheduler=counter) as ckpt:
        for _ in ckpt.epochs(3):
            for _ in ckpt.batches(loader()):
                ckpt.step()
            counter.value += 1
    assert (3, 12) == (counter.value, ckpt.global_step)


# ── saving ────────────────────────────────────────────────────────────────────────────────
def test_a_save_can_be_waited_for(root: Path, rundir: RunDir) -> None:
    """The pending record gives the path once it is committed."""
    with Checkpointer(root) as ckpt:
        ckpt.step()
        pending = ckpt.save("now")
        path = pending.wait(timeout=30)
        assert (True, hpc_ckpt.latest(root)) == (pending.done(), path)
        assert "now" == manifest_of(rundir)["reason"]


def test_a_save_inside_an_iteration_waits_for_its_end(root: Path, rundir: RunDir) -> None:
    """In the middle of an iteration the state is that of no step."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with Checkpointer(root, optimizer=optimizer) as ckpt:
        for _ in ckpt.batches(loader()):
            parameter.grad = torch.ones(1)
            optimizer.step()
            pending = ckpt.save("asked inside")
            assert (None, False) == (pending.step, pending.done())
            with pytest.raises(UserError, match="after the next step"):
                pending.wait()
            with pytest.raises(UserError, match="after step"):
                ckpt.save(wait=True)
            ckpt.step()
            pending.wait(timeout=30)
            break
        assert (1, "asked inside") == (pending.step, manifest_of(rundir)["reason"])


class _Lost(Exception):
    """What training raises in the middle of an iteration."""


def test_whoever_waits_for_a_save_hears_that_no_step_comes_any_more(root: Path) -> None:
    """Else a thread that waits for it keeps a failed program until its time limit."""
    with pytest.raises(_Lost), Checkpointer(root, w=torch.zeros(3)) as ckpt:
        for _ in ckpt.steps(3):
            pending = ckpt.save("asked inside")
            raise _Lost
    assert pending.done()
    with pytest.raises(HpcCkptError, match="left before the step was over"):
        pending.committed(0)


def test_whoever_waits_for_a_save_hears_that_it_cannot_be_made(root: Path) -> None:
    """The step() that was to take it raises; another thread may wait all the same."""
    part: dict[str, object] = {}
    with pytest.raises(UnsupportedState), Checkpointer(root, part=part) as ckpt:
        for _ in ckpt.steps(3):
            pending = ckpt.save("asked inside")
            part["new"] = object()
            ckpt.step()
    assert pending.done()


def test_metrics_of_a_checkpoint_are_those_given_since_the_one_before(
    root: Path, rundir: RunDir
) -> None:
    """An accuracy that was measured for other weights is not written beside these."""
    with Checkpointer(root, keep=9) as ckpt:
        ckpt.step(loss=torch.tensor(1.5, requires_grad=True), metrics={"accuracy": 0.5})
        ckpt.save(wait=True)
        ckpt.step(loss=0.25)
        ckpt.save(wait=True)
        assert {"loss": 0.25, "accuracy": 0.5} == ckpt.metrics
    assert {"loss": 1.5, "accuracy": 0.5} == manifest_of(rundir, 0)["metrics"]
    assert {"loss": 0.25} == manifest_of(rundir, 1)["metrics"]


def test_a_loss_is_read_only_when_it_is_needed(root: Path) -> None:
    """Reading a tensor waits for the device: not at every step."""

    class Costly:
        reads = 0

        def item(self) -> float:
            Costly.reads += 1
            return 1.0

    with Checkpointer(root) as ckpt:
        for _ in ckpt.steps(200):
            ckpt.step(loss=Costly())
    assert 1 <= Costly.reads <= 5


def test_best_and_latest_find_their_checkpoints(root: Path, rundir: RunDir) -> None:
    """By metric among the valid ones; broken ones are passed over."""
    with Checkpointer(root, keep=9) as ckpt:
        for accuracy in (0.1, 0.9, 0.3):
            ckpt.step(metrics={"accuracy": accuracy})
            ckpt.save(wait=True)
    assert hpc_ckpt.best(root, "accuracy").name.startswith("step-000000002")
    assert hpc_ckpt.best(root, "accuracy", mode="min").name.startswith("step-000000001")
    (hpc_ckpt.best(root, "accuracy") / "rank-00000.safetensors").write_bytes(b"")
    assert hpc_ckpt.best(root, "accuracy").name.startswith("step-000000003")
    with pytest.raises(NoCheckpoint, match="'f1'"):
        hpc_ckpt.best(root, "f1")
    with pytest.raises(NoCheckpoint):
        hpc_ckpt.latest(root.parent / "nowhere")


def test_load_gives_the_state_tree(root: Path) -> None:
    """Without any of the program's objects."""
    model = nn.Linear(2, 1)
    with Checkpointer(root, model=model) as ckpt:
        ckpt.step()
    state = hpc_ckpt.load(hpc_ckpt.latest(root))
    assert torch.equal(model.weight, state["tracked"]["model"]["weight"])
    assert {"step": 1, "epoch": 0} == state["progress"]


def test_training_does_not_wait_for_a_save_under_way(root: Path, rundir: RunDir) -> None:
    """A slow storage: steps go on, the skipped save is recorded once per busy period."""
    gate, entered = threading.Event(), threading.Event()

    def slow(point: str) -> None:
        if point == "shard.opened" and not gate.is_set():
            entered.set()
            gate.wait(30)

    hpc_ckpt.fsio.observe(slow)
    try:
        with Checkpointer(root, policy="every 1 steps") as ckpt:
            ckpt.step()
            assert entered.wait(30)
            for _ in range(5):
                ckpt.step()
            assert ([], 6) == (rundir.committed(), ckpt.global_step)
            gate.set()
    finally:
        hpc_ckpt.fsio.observe(None)
    assert [2] == [r["step"] for r in recorded(rundir, Event.SAVE_SKIPPED)]


def test_a_snapshot_is_of_its_step(root: Path, rundir: RunDir) -> None:
    """What training changes while the save is written does not get into it."""
    gate = threading.Event()
    hpc_ckpt.fsio.observe(lambda point: gate.wait(30) if point == "shard.opened" else None)
    tensor, array, table = torch.zeros(1000), np.zeros(1000), {"n": [0]}
    try:
        with Checkpointer(root, keep=9, tensor=tensor, array=array, table=table) as ckpt:
            ckpt.step()
            pending = ckpt.save()
            tensor += 1
            array += 1
            table["n"][0] = 1
            gate.set()
            tracked = hpc_ckpt.load(pending.wait(timeout=30))["tracked"]
    finally:
        hpc_ckpt.fsio.observe(None)
    assert (0.0, 0.0, [0]) == (
        tracked["tensor"].sum().item(), tracked["array"].sum(), tracked["table"]["n"],
    )  # fmt: skip


def test_heartbeats_and_the_summary_are_recorded(root: Path, rundir: RunDir) -> None:
    """Progress about once a second, and one record at the end."""
    with Checkpointer(root) as ckpt:
        end = time.monotonic() + 2.3
        while time.monotonic() < end:
            time.sleep(0.01)
            ckpt.step(loss=float("nan"))
    beats = recorded(rundir, Event.PROGRESS)
    assert 1 <= len(beats) <= 3
    assert beats[0]["loss"] is None
    (ended,) = recorded(rundir, Event.ENDED)
    assert (ckpt.global_step, True) == (ended["step"], ended["complete"])
    assert 2.0 < ended["training_s"] < 2.6


# ── leaving ───────────────────────────────────────────────────────────────────────────────
def test_leaving_cleanly_is_complete(root: Path, rundir: RunDir) -> None:
    """A final checkpoint, the outcome, DONE, and the lease given back."""
    with Checkpointer(root) as ckpt:
        ckpt.step()
    outcome = rundir.outcome(1)
    assert outcome is not None
    assert (Done(1, 1), Result.COMPLETE, 1) == (rundir.done(), outcome.outcome, outcome.step)
    assert "complete" == manifest_of(rundir)["reason"]
    assert (rundir.lease / "00000001.released").exists()


def test_leaving_with_an_exception_is_not(root: Path, rundir: RunDir) -> None:
    """The last committed checkpoint stays, there is no DONE, the outcome gives the reason."""
    with pytest.raises(ZeroDivisionError), Checkpointer(root) as ckpt:
        ckpt.step()
        ckpt.save()
        raise ZeroDivisionError("two\nlines")
    outcome = rundir.outcome(1)
    assert outcome is not None
    assert (None, [1]) == (rundir.done(), steps_of(rundir))
    assert (Result.FAILED, 1, "ZeroDivisionError: two lines") == (
        outcome.outcome, outcome.step, outcome.reason,
    )  # fmt: skip


def test_a_program_that_exits_inside_the_block_is_not_complete(root: Path, rundir: RunDir) -> None:
    """sys.exit(0) in the middle of the work must not look like its end."""
    with pytest.raises(SystemExit), Checkpointer(root) as ckpt:
        ckpt.step()
        sys.exit(0)
    outcome = rundir.outcome(1)
    assert outcome is not None
    assert (Result.FAILED, None) == (outcome.outcome, rundir.done())


def test_done_stays_when_there_is_nothing_to_do(root: Path, rundir: RunDir) -> None:
    """A second start of finished work writes no checkpoint and keeps DONE as it was."""
    for _ in range(2):
        with Checkpointer(root) as ckpt:
            for _ in ckpt.steps(2):
                ckpt.step()
    assert (Done(1, 2), [2]) == (rundir.done(), steps_of(rundir))


def test_done_is_taken_back_when_the_work_goes_on(root: Path, rundir: RunDir) -> None:
    """More steps than before: the first one removes DONE, the end writes it anew."""
    with Checkpointer(root) as ckpt:
        for _ in ckpt.steps(2):
            ckpt.step()
    with Checkpointer(root) as ckpt:
        assert Done(1, 2) == rundir.done()
        for _ in ckpt.steps(3):
            ckpt.step()
            assert not rundir.done_file.exists()
    assert (Done(2, 3), 1) == (rundir.done(), len(recorded(rundir, Event.REOPENED)))


def test_training_goes_on_where_done_cannot_be_taken_back_at_once(
    root: Path, rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning; every further step tries again, so that DONE does not stand for long."""
    with Checkpointer(root) as ckpt:
        for _ in ckpt.steps(1):
            ckpt.step()
    unlink, refusals = Path.unlink, iter([OSError(30, "Read-only file system")] * 2)

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == rundir.done_file:
            for error in refusals:
                raise error
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    stands = []
    with pytest.warns(RuntimeWarning, match="Read-only") as told, Checkpointer(root) as ckpt:
        for _ in ckpt.steps(5):
            ckpt.step()
            stands.append(rundir.done_file.exists())
    assert ([True, True, False, False], 1) == (stands, len(told))
    assert (Done(2, 5), 1) == (rundir.done(), len(recorded(rundir, Event.REOPENED)))


def test_a_program_may_have_a_default_device(root: Path) -> None:
    """Buffers are the CPU's and tensors are rebuilt there, wherever new ones of it would be."""

    def tracked(fill: float) -> dict[str, torch.Tensor]:
        image = torch.full((2, 3, 4, 5), fill, device="cpu")
        empty = torch.zeros(0, 3, device="cpu")
        return {"image": image.to(memory_format=torch.channels_last), "empty": empty}

    with torch.device("meta"):  # the one that every build of torch has
        with Checkpointer(root, policy="every step", **tracked(2.0)) as ckpt:
            for _ in ckpt.steps(2):
                ckpt.step()
        again = tracked(0.0)
        with Checkpointer(root, **again) as ckpt:
            assert ckpt.restored is not None
        state: Any = load(latest(root))
    assert [2.0, 2.0] == [
        float(image.mean()) for image in (again["image"], state["tracked"]["image"])
    ]


# ── the latch ─────────────────────────────────────────────────────────────────────────────
def stopped(root: Path, **options: Any) -> Checkpointer:
    """A Checkpointer whose link is about to be ended by a signal."""
    return Checkpointer(root, policy="every hour", **options)


def test_the_end_is_raised_again_and_again(root: Path, rundir: RunDir) -> None:
    """Every further step() raises, loops stop, and leaving raises too."""
    with pytest.raises(LinkEnded) as left, stopped(root) as ckpt:
        ckpt.step()
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(3):
            with pytest.raises(LinkEnded, match="notice: SIGTERM"):
                ckpt.step()
        assert ckpt.should_stop
        assert ([], [], [], []) == (
            list(ckpt.epochs(9)), list(ckpt.batches(loader())), list(ckpt.steps(9)),
            list(ckpt.batches(loader(), track=False)),
        )  # fmt: skip
    assert (EXIT_SAVED, 2, [2], None) == (
        left.value.code, ckpt.global_step, steps_of(rundir), rundir.done(),
    )  # fmt: skip


def test_an_error_after_the_end_does_not_hide_it(root: Path, rundir: RunDir) -> None:
    """The link is saved, whatever the program stumbles over afterwards."""
    with pytest.raises(LinkEnded), stopped(root) as ckpt:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(LinkEnded):
            ckpt.step()
        raise ZeroDivisionError
    outcome = rundir.outcome(1)
    assert outcome is not None
    assert Result.SAVED == outcome.outcome


def test_in_a_thread_the_end_is_told_and_raised_on_leaving(root: Path, rundir: RunDir) -> None:
    """SystemExit in a thread ends nothing: step() returns, loops stop, the block raises."""
    trained: list[int] = []

    def work(ckpt: Checkpointer) -> None:
        for step in ckpt.steps(1000):
            trained.append(step)
            if step == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.3)
            ckpt.step()

    with pytest.raises(LinkEnded), stopped(root) as ckpt:
        thread = threading.Thread(target=work, args=(ckpt,))
        thread.start()
        thread.join()
        assert ckpt.should_stop
        refused: list[Pending] = []
        late = threading.Thread(target=lambda: refused.append(ckpt.save("too late")))
        late.start()
        late.join()
        with pytest.raises(HpcCkptError, match="not saved: link ended"):
            refused[0].wait()
    assert (4, [4], None) == (len(trained), steps_of(rundir), rundir.done())


def test_outside_the_main_thread_the_notice_file_still_works(
    root: Path, rundir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    """There Python allows no signal callbacks; that is said, and the rest works."""

    def work() -> None:
        with stopped(root) as ckpt:
            rundir.give_notice(1, "test")
            for _ in ckpt.steps():
                time.sleep(0.01)
                ckpt.step()

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    outcome = rundir.outcome(1)
    assert outcome is not None
    assert (Result.SAVED, "notice: test") == (outcome.outcome, outcome.reason)
    assert "signals are left alone" in caplog.text
    assert (None, before) == (rundir.done(), signal.getsignal(signal.SIGTERM))


# ── poll ──────────────────────────────────────────────────────────────────────────────────
def test_poll_ends_the_link_when_the_step_is_saved_already(root: Path, rundir: RunDir) -> None:
    """A long evaluation after a save need not be finished."""
    with pytest.raises(LinkEnded), stopped(root) as ckpt:
        ckpt.step()
        ckpt.save()
        assert not ckpt.poll()
        os.kill(os.getpid(), signal.SIGTERM)
        ckpt.poll()
        raise AssertionError("poll() returned")
    assert ([1], 1) == (steps_of(rundir), getattr(rundir.outcome(1), "step", None))


def test_poll_says_so_when_only_a_step_can_save(root: Path, rundir: RunDir) -> None:
    """Between two boundaries the state is not saved; the next step() does it."""
    with pytest.raises(LinkEnded), stopped(root) as ckpt:
        ckpt.step()
        os.kill(os.getpid(), signal.SIGTERM)
        assert ckpt.poll()
        assert [] == rundir.committed()
        ckpt.step()
    assert [2] == steps_of(rundir)


def test_leaving_because_poll_said_so_is_not_completion(root: Path, rundir: RunDir) -> None:
    """The newest checkpoint stands, and the work goes on in the next link."""
    with pytest.raises(LinkEnded), stopped(root) as ckpt:
        ckpt.step()
        ckpt.save(wait=True)
        ckpt.step()
        os.kill(os.getpid(), signal.SIGTERM)
        if ckpt.poll():
            pass
    outcome = rundir.outcome(1)
    assert outcome is not None
    assert (None, Result.SAVED, 1) == (rundir.done(), outcome.outcome, outcome.step)


# ── optimizers ────────────────────────────────────────────────────────────────────────────
def test_hooks_are_found_behind_wrappers_and_removed(root: Path, rundir: RunDir) -> None:
    """A wrapper without hooks keeps the optimizer in `.optimizer`."""

    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer
            self.param_groups = optimizer.param_groups
            self.state_dict = optimizer.state_dict
            self.load_state_dict = optimizer.load_state_dict
            self.step = optimizer.step
            self.zero_grad = optimizer.zero_grad

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with Checkpointer(root, policy="every 1 steps", optimizer=Wrapper(optimizer)) as ckpt:
        ckpt.step()
        assert [] == recorded(rundir, Event.SAVE_STARTED)
        optimizer.step()
        ckpt.step()
    assert [2] == [
        r["step"] for r in recorded(rundir, Event.SAVE_STARTED) if r["reason"] != "complete"
    ]
    assert 0 == len(optimizer._optimizer_step_post_hooks)


def test_an_optimizer_without_hooks_lets_every_call_save(root: Path, rundir: RunDir) -> None:
    """What cannot be listened to counts as always stepped."""

    class Homemade(Counter):
        param_groups: list[dict[str, Any]]

        def __init__(self) -> None:
            super().__init__()
            self.param_groups = []

        def step(self) -> None:
            self.value += 1

    with Checkpointer(root, policy="every 1 steps", optimizer=Homemade()) as ckpt:
        ckpt.step()
    assert 1 in [r["step"] for r in recorded(rundir, Event.SAVE_STARTED)]


# ── signals ───────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def own_dispositions() -> Iterator[None]:
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, disposition in before.items():
        signal.signal(number, disposition)


def test_everything_global_is_put_back(root: Path, own_dispositions: None) -> None:
    """Callbacks, the wakeup descriptor, threads and descriptors are as they were."""
    mine = lambda *_: None  # noqa: E731 - an object of our own to find again
    signal.signal(signal.SIGTERM, mine)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end)
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    with Checkpointer(root) as ckpt:
        ckpt.step()
        assert mine is not signal.getsignal(signal.SIGTERM)
    assert mine is signal.getsignal(signal.SIGTERM)
    assert write_end == signal.set_wakeup_fd(-1)
    assert open_before == len(list(Path("/proc/self/fd").iterdir()))
    assert not [t.name for t in threading.enumerate() if t.name.startswith("hpc-ckpt")]
    os.close(read_end)
    os.close(write_end)


def test_a_forked_child_dies_of_term_and_ignores_the_sites_signal(root: Path) -> None:
    """It must neither save nor tell its parent that a signal came."""
    with warnings.catch_warnings(), stopped(root) as ckpt:
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads: on purpose
        ckpt.step()
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(9)
        time.sleep(0.2)
        os.kill(child, signal.SIGUSR1)
        time.sleep(0.2)
        assert (0, 0) == os.waitpid(child, os.WNOHANG)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert signal.SIGTERM == os.WTERMSIG(status)
        time.sleep(1.2)
        ckpt.step()
        assert not ckpt.should_stop


def test_a_forked_child_that_leaves_the_block_ends_nothing(root: Path, rundir: RunDir) -> None:
    """It neither writes an outcome nor gives back its parent's lease, and may not step."""
    with warnings.catch_warnings(), Checkpointer(root) as ckpt:
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads: on purpose
        ckpt.step()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                ckpt.step()
            except UserError:
                ckpt.__exit__(None, None, None)
                code = 0
            os._exit(code)
        _, status = os.waitpid(child, 0)
        assert (0, None) == (os.waitstatus_to_exitcode(status), rundir.outcome(1))
        assert not (rundir.lease / "00000001.released").exists()
        ckpt.step()
    assert Done(1, 2) == rundir.done()


def test_the_profiles_signal_is_caught(root: Path, tmp_path: Path) -> None:
    """A site that warns with USR2 says so in its profile."""
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"signal": {"name": "USR2"}}))
    with pytest.raises(LinkEnded), stopped(root, settings=settings) as ckpt:
        os.kill(os.getpid(), signal.SIGUSR2)
        ckpt.step()


# ── a policy of one's own ─────────────────────────────────────────────────────────────────
def test_a_policy_object_sees_the_measurements(root: Path, rundir: RunDir) -> None:
    """Anything with decide() works, and is given what was measured."""
    seen: list[Progress] = []

    class Third:
        def decide(self, progress: Progress) -> Decision:
            seen.append(progress)
            return Decision(progress.step == 3, "the third")

        def __str__(self) -> str:
            return "third"

    with Checkpointer(root, policy=Third()) as ckpt:
        for _ in ckpt.steps(3):
            ckpt.step()
        ckpt.save(wait=True)
        ckpt.step()
    assert [1, 2, 3, 4] == [progress.step for progress in seen]
    assert (None, 0) == (seen[0].save_s, seen[0].saved_step)
    assert (seen[3].save_s or 0) > 0
    assert "the third" == manifest_of(rundir, 0)["reason"]


# ── who may use it ────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_several_processes_are_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each rank would publish its own state as the whole."""
    monkeypatch.setenv(name, "2")
    with pytest.raises(UserError, match=f"{name}=2.*not available in this version"):
        Checkpointer(root).__enter__()
    assert not root.exists()


def test_a_halted_root_is_not_run_by_hand_without_a_word(root: Path, rundir: RunDir) -> None:
    """The message names the file that keeps it."""
    rundir.create()
    rundir.write_halt("stopped by the user")
    with pytest.raises(RootError, match=r"halted .stopped by the user.; delete .*halt to go on"):
        Checkpointer(root).__enter__()


def test_a_save_in_an_accumulation_waits_for_the_optimizer(tmp_path: Path) -> None:
    """The gradients of the micro-batches before it would be lost; who cannot wait is told so."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with Checkpointer(tmp_path, policy="every 1000 steps", w=weight, o=optimizer) as ckpt:
        weight.grad = torch.ones(1)
        ckpt.step()
        with pytest.warns(RuntimeWarning, match="micro-batches"):
            ckpt.save(wait=True)
        pending = ckpt.save()
        assert pending.step is None
        optimizer.step()
        ckpt.step()
        assert 2 == pending.step
        pending.wait(10)


def test_a_tuple_is_described_as_a_list(tmp_path: Path) -> None:
    """Any program can read it; what JSON lacks is refused."""
    with Checkpointer(tmp_path, w=torch.ones(1)) as ckpt:
        ckpt.describe(betas=(0.9, 0.999))
        with pytest.raises(UserError, match="no such number"):
            ckpt.describe(best=float("inf"))
        ckpt.step()
    assert {"betas": [0.9, 0.999]} == load(latest(tmp_path))["about"]["described"]


def test_a_save_that_an_interrupt_ended_leaves_nobody_waiting(root: Path) -> None:
    """Ctrl-C while the state is captured: whoever waits for the save hears of it."""

    class Part:
        armed = False

        def state_dict(self) -> dict[str, Any]:
            if self.armed:
                raise KeyboardInterrupt
            return {"x": torch.zeros(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    part = Part()
    with pytest.raises(KeyboardInterrupt), Checkpointer(root, part=part) as ckpt:
        for _ in ckpt.steps(2):
            pending = ckpt.save("asked inside")
            part.armed = ckpt.global_step == 1
            ckpt.step()
    with pytest.raises(HpcCkptError, match="not saved"):
        pending.wait(0)
