"""Storage on a bad day: names over several tiers, damaged holders, retention, hanging saves."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import hpc_ckpt
from hpc_ckpt import Checkpointer, LinkEnded, events, fsio
from hpc_ckpt.errors import BrokenOff
from hpc_ckpt.format.verify import verify as verify_checkpoint
from hpc_ckpt.rundir import Result, RunDir
from hpc_ckpt.tiers.directory import DirectoryTier
from hpc_ckpt.tiers.staging import DirectoryStaging

told_of_damage = pytest.mark.filterwarnings("ignore:a checkpoint is damaged:RuntimeWarning")
NEVER = "every 1000000 steps"


class _Out(Exception):
    """Leaves a block without a final checkpoint."""


@contextmanager
def killed(*arguments: Any, **more: Any) -> Iterator[Checkpointer]:
    with suppress(_Out), Checkpointer(*arguments, policy=NEVER, **more) as ckpt:
        yield ckpt
        ckpt._entered().engine.wait(20)
        raise _Out


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def recorded(root: Path, name: str) -> list[dict[str, Any]]:
    every = (record for path in (root / "events").iterdir() for record in events.read(path))
    return [record for record in every if record["event"] == name]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def valid(root: Path) -> dict[str, bool]:
    tier = DirectoryTier(root / "checkpoints")
    keys = tier.keys()
    return {key.directory_name: not tier.verify(key) for key in keys}


def test_two_states_of_one_step_never_have_one_name_in_two_tiers(
    root: Path, tmp_path: Path
) -> None:
    """The first is in the fast tier and on its way down when the second goes to the home."""
    go, w = threading.Event(), torch.zeros(1000)
    before = fsio.observe(lambda point: go.wait(20) if point == "drain.opened" else None)
    try:
        with killed(root, tiers=[str(tmp_path / "fast")], w=w) as ckpt:
            w.fill_(1)
            ckpt.step()
            ckpt.save().wait()
            w.fill_(2)
            ckpt.save(wait=True)
            go.set()
            assert ckpt._entered().engine._drainer.wait(20)
    finally:
        go.set()
        fsio.observe(before)
    assert [] == recorded(root, "drain.failed")
    again = torch.zeros(1000)
    with killed(root, tiers=[str(tmp_path / "fast")], w=again):
        assert 2.0 == again[0].item()
    assert 2.0 == hpc_ckpt.load(hpc_ckpt.latest(root))["tracked"]["w"][0].item()


class HalfFrozen(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Parameter(torch.ones(100_000), requires_grad=False)
        self.w = torch.nn.Parameter(torch.zeros(1000))


@told_of_damage
@pytest.mark.parametrize("keep", [1, 3])
def test_a_damaged_holder_is_found_and_its_bytes_are_written_again(root: Path, keep: int) -> None:
    """They were in memory all the time: the damage costs one save, not the chain."""
    model = HalfFrozen()
    optimizer = torch.optim.SGD([model.w], lr=0.1)
    with killed(root, keep=keep, model=model, optimizer=optimizer) as ckpt:
        for number in range(8):
            model.w.grad = torch.ones(1000)
            optimizer.step()
            ckpt.step()
            ckpt.save(wait=True)
            ckpt._entered().engine.wait(20)
            if number == 2:
                (held,) = (root / "checkpoints").glob("*/rank-00000.1.safetensors")
                flip(held, 9000)
    assert recorded(root, "holder.damaged")
    found = valid(root)
    assert found[max(found)]
    with killed(root, model=HalfFrozen(), optimizer=optimizer) as ckpt:
        assert ckpt.restored is not None and 8 == ckpt.restored.step


@contextmanager
def damaged_once_durable(root: Path, name: str, file: str) -> Iterator[None]:
    """As soon as that checkpoint is committed, before anything reads it back."""
    checkpoints = root / "checkpoints"

    def damage(point: str) -> None:
        if point == "commit.durable" and (checkpoints / name).is_dir() and not done:
            done.extend(checkpoints.glob(file))
            for path in done:
                flip(path, 9000)

    done: list[Path] = []
    before = fsio.observe(damage)
    try:
        yield
    finally:
        fsio.observe(before)


@pytest.mark.parametrize(
    ("model", "file"),
    [
        (torch.nn.Linear(60, 60), "step-000000003-*/rank-00000.safetensors"),
        (HalfFrozen(), "*/rank-00000.1.safetensors"),
    ],
)
def test_a_link_does_not_end_as_saved_by_what_it_knows_to_be_damaged(
    root: Path, model: torch.nn.Module, file: str
) -> None:
    """All of it is in memory: the next step() saves it again, and says so."""
    name = "step-000000003-g00000001"
    with (
        damaged_once_durable(root, name, file),
        warnings.catch_warnings(record=True) as caught,
        suppress(LinkEnded),
        Checkpointer(root, policy="every 1 steps", keep=1, model=model) as ckpt,
    ):
        warnings.simplefilter("always")
        for _ in range(9):
            ckpt.step()
            ckpt._entered().engine.wait(20)
            if ckpt.global_step == 3:
                RunDir(root).give_notice(1, "test")
                while not ckpt.poll():
                    time.sleep(0.02)
    warned = [str(one.message) for one in caught]
    assert any("is damaged; training goes on" in text for text in warned)
    outcome = RunDir(root).outcome(1)
    assert outcome is not None and (Result.SAVED, 4) == (outcome.outcome, outcome.step)
    with killed(root, model=model) as again:
        assert again.restored is not None and 4 == again.restored.step


@pytest.mark.parametrize("broken", [1, 2])
def test_what_was_restored_is_not_removed_in_favour_of_what_is_broken(
    root: Path, broken: int
) -> None:
    """Broken ones do not count among those to keep, and the one that was read stays a while."""
    w, keep = torch.zeros(1000), 1 + broken
    with killed(root, keep=keep, w=w) as ckpt:
        for _ in range(4):
            w.add_(1)
            ckpt.step()
            ckpt.save(wait=True)
    for name in sorted(valid(root))[-broken:]:
        flip(root / "checkpoints" / name / "rank-00000.safetensors", -1)
    with killed(root, keep=keep, w=w) as ckpt:
        restored = ckpt.restored
        assert restored is not None and 4 - broken == restored.step
        w.add_(1)
        ckpt.step()
        ckpt.save(wait=True)
    assert valid(root)[restored.path.name]


@pytest.fixture
def decaying() -> Iterator[set[int]]:
    """Shards of these steps are damaged in the moment in which they are committed."""
    steps: set[int] = set()
    yield steps
    fsio.observe(None)


def decay_at_commit(root: Path, steps: set[int]) -> None:
    def damage(point: str) -> None:
        if point == "commit.durable":
            newest = RunDir(root).committed()[-1]
            if newest.step in steps:
                steps.remove(newest.step)
                path = root / "checkpoints" / newest.directory_name / "rank-00000.safetensors"
                flip(path, -1)

    fsio.observe(damage)


@told_of_damage
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("keep", [{"last": 2}, {"last": 2, "every": 3}, {"last": 1}])
def test_the_last_that_was_read_goes_only_after_another_was(
    root: Path, decaying: set[int], keep: dict[str, int], resumed: bool
) -> None:
    """A disk that goes bad may spoil all that follow: then nothing more is removed."""
    w = torch.zeros(1000)
    decaying |= set(range(8, 20))
    decay_at_commit(root, decaying)
    for first, last in ((0, 2), (2, 12)) if resumed else ((0, 12),):
        with killed(root, keep=keep, w=w) as ckpt:
            for _ in range(first, last):
                w.add_(1)
                ckpt.step()
                ckpt.save(wait=True)
                ckpt._entered().engine.wait(20)
    assert recorded(root, "retention.failed")
    fsio.observe(None)
    with killed(root, keep=keep, w=w) as ckpt:
        assert ckpt.restored is not None and ckpt.restored.step in (6, 7)
        for _ in range(4):
            w.add_(1)
            ckpt.step()
            ckpt.save(wait=True)
            ckpt._entered().engine.wait(20)
    assert keep["last"] <= len(valid(root)) <= 6, "what is broken goes when its time has come"
    assert all(valid(root).values())


def test_what_is_kept_is_read_once_in_a_while_and_not_at_every_save(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading takes from training what writing does."""
    read, real = [], DirectoryTier.verify

    def verify(self: DirectoryTier, key: Any, *stop: Any) -> Any:
        read.append(key.step)
        return real(self, key)

    monkeypatch.setattr(DirectoryTier, "verify", verify)
    w = torch.zeros(1000)
    with killed(root, keep=3, w=w) as ckpt:
        for _ in range(12):
            w.add_(1)
            ckpt.step()
            ckpt.save(wait=True)
            ckpt._entered().engine.wait(20)
    assert [4, 7, 10] == read


def test_a_failed_save_keeps_no_buffer_alive(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the last one may be told to nobody, and is kept with the Checkpointer."""

    def full(self: Any, layout: Any, image: memoryview, pace: Any) -> Any:
        buffers.append(weakref.ref(image.obj))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    buffers: list[weakref.ref[Any]] = []
    with killed(root, w=torch.ones(2)) as ckpt:
        ckpt.step()
        monkeypatch.setattr(DirectoryStaging, "write_shard", full)
        pending = ckpt.save()
        ckpt.step()
        assert ckpt._entered().engine.wait(20)
    assert pending.done()
    assert [None] == [buffer() for buffer in buffers]


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every write into the tier below `fast` hangs until the event is set."""
    opened, real = threading.Event(), DirectoryStaging.write_shard

    def write(self: Any, *arguments: Any) -> Any:
        if "fast" in self.path.parts:
            opened.wait(60)
        return real(self, *arguments)

    monkeypatch.setattr(DirectoryStaging, "write_shard", write)
    yield opened
    opened.set()


def test_a_final_save_does_not_wait_for_one_that_hangs_elsewhere(
    root: Path, tmp_path: Path, hanging: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notice comes while the fast tier hangs: the home gets the final save all the same."""
    monkeypatch.setattr("hpc_ckpt.engine.underway.STUCK_S", 0.5)
    tiers = [str(tmp_path / "fast")]
    began = time.monotonic()
    with (
        pytest.raises(SystemExit),
        Checkpointer(root, policy=NEVER, tiers=tiers, w=torch.ones(2)) as ckpt,
    ):
        ckpt.step()
        ckpt.save()
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(200):
            time.sleep(0.01)
            ckpt.step()
    assert time.monotonic() - began < 20
    assert [key.step for key in RunDir(root).committed()] >= [2]


def test_a_save_that_was_given_up_says_nothing_of_the_next(
    root: Path, tmp_path: Path, hanging: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its age would grow for hours, and the link would end hours early."""
    monkeypatch.setattr("hpc_ckpt.engine.underway.STUCK_S", 0.1)
    with killed(root, tiers=[str(tmp_path / "fast")], w=torch.ones(2)) as ckpt:
        ckpt.step()
        ckpt.save()
        time.sleep(0.3)
        with pytest.warns(RuntimeWarning, match="hangs in tier"):
            ckpt.step()
        ckpt.save(wait=True)
        engine = ckpt._entered().engine
        first = engine.save_s()
        time.sleep(0.5)
        assert first == engine.save_s()
        hanging.set()


def test_after_a_save_that_was_given_up_nothing_is_referred_to(
    root: Path, tmp_path: Path, hanging: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread may still change what is known of steady leaves: they are written again."""
    monkeypatch.setattr("hpc_ckpt.engine.underway.STUCK_S", 0.1)
    model = HalfFrozen()
    optimizer = torch.optim.SGD([model.w], lr=0.1)
    tracked = {"model": model, "optimizer": optimizer}
    tier = DirectoryTier(root / "checkpoints")
    with killed(root, keep=9, tiers=[str(tmp_path / "fast")], **tracked) as ckpt:

        def advance() -> None:
            model.w.grad = torch.ones(1000)
            optimizer.step()
            ckpt.step()

        for _ in range(2):
            advance()
            ckpt.save(wait=True)
        advance()
        ckpt.save()
        time.sleep(0.3)
        with pytest.warns(RuntimeWarning, match="hangs in tier"):
            advance()
        ckpt.save(wait=True)
        found = {key.step: len(tier.manifest(key).holders) for key in tier.keys()}  # noqa: SIM118
        hanging.set()
    assert {1: 0, 2: 1, 4: 0} == {step: found[step] for step in (1, 2, 4)}


@pytest.mark.filterwarnings("ignore:a checkpoint could not be saved")
def test_no_thread_for_a_save_is_a_failed_save(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """step() goes on, the buffer is free again, and the next save is made."""
    real, left = threading.Thread.start, ["hpc-ckpt-persist"]

    def start(self: threading.Thread) -> None:
        if self.name in left:
            left.remove(self.name)
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    with Checkpointer(root, policy="every 1 steps", w=torch.ones(2)) as ckpt:
        for _ in range(5):
            ckpt.step()
            time.sleep(0.05)
        assert ckpt._entered().engine.wait(10)
    assert 1 == len(recorded(root, "save.failed"))
    assert RunDir(root).committed()


@pytest.mark.parametrize("resumed", [False, True])
def test_no_thread_for_a_drain_is_a_drain_for_later(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    """Neither entering nor leaving fails, and the root has everything in the end."""
    real, left = threading.Thread.start, ["hpc-ckpt-drain"]

    def start(self: threading.Thread) -> None:
        if self.name in left:
            left.remove(self.name)
            raise RuntimeError("can't start new thread")
        real(self)

    tiers, w = [tmp_path / "fast", "root"], torch.ones(2)
    if resumed:
        with killed(root, tiers=tiers, w=w) as ckpt:
            ckpt.step()
            ckpt.save()
        shutil.rmtree(root / "checkpoints")
    monkeypatch.setattr(threading.Thread, "start", start)
    began = time.monotonic()
    with Checkpointer(root, policy="every 1 steps", tiers=tiers, w=w) as ckpt:
        for _ in ckpt.steps(6):
            ckpt.step()
            ckpt._entered().engine.wait(20)
    assert time.monotonic() - began < 30
    assert 1 == len([r for r in recorded(root, "drain.failed") if "new thread" in r["error"]])
    assert 6 == RunDir(root).committed()[-1].step
    assert [] == left


def test_a_look_at_every_byte_gives_way_to_a_save_that_is_waited_for(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The final save must not wait for the reading of one that is committed already."""
    looking = threading.Event()
    broken_off: list[int] = []

    def verify(self: DirectoryTier, key: Any, stop: Any) -> Any:
        looking.set()
        until = time.monotonic() + 20
        while not stop():
            assert time.monotonic() < until
            time.sleep(0.005)
        broken_off.append(key.step)
        raise BrokenOff("somebody waits")

    monkeypatch.setattr(DirectoryTier, "verify", verify)
    w = torch.zeros(10)
    with killed(root, keep=1, w=w) as ckpt:
        ckpt.step()
        ckpt.save(wait=True)
        w.fill_(1.0)
        ckpt.step()
        ckpt.save()
        assert looking.wait(10)
        w.fill_(9.0)
        ckpt.step()
        began = time.monotonic()
        ckpt.save(wait=True)
        assert time.monotonic() - began < 15
    assert broken_off
    assert 3 == RunDir(root).committed()[-1].step


@pytest.mark.parametrize("read_first", [True, False])
def test_old_checkpoints_go_though_every_look_is_broken_off(
    root: Path, monkeypatch: pytest.MonkeyPatch, read_first: bool
) -> None:
    """A program that waits for every save would fill its disk. The last one that was read stays,
    with what it refers to."""
    real, reads = DirectoryTier.verify, []

    def verify(self: DirectoryTier, key: Any, stop: Any = None) -> Any:
        reads.append(key.step)
        if read_first and len(reads) == 1:
            return real(self, key)
        raise BrokenOff("somebody waits")

    monkeypatch.setattr(DirectoryTier, "verify", verify)
    w, frozen = torch.zeros(10), torch.randn(2**16)
    with killed(root, keep=2, w=w, frozen=frozen) as ckpt:
        for _ in range(12):
            w += 1
            ckpt.step()
            ckpt.save()
            ckpt._entered().engine.wait(20)
    monkeypatch.undo()
    tier = DirectoryTier(RunDir(root).checkpoints)
    left = {key.step for key in tier.keys()}  # noqa: SIM118 - not a dict
    assert {11, 12} < left
    assert len(left) <= 5
    if read_first:
        assert reads[0] in left
    assert all(not tier.verify(key) for key in tier.keys())  # noqa: SIM118 - not a dict


def test_what_was_read_elsewhere_is_not_referred_to_here(root: Path, tmp_path: Path) -> None:
    """The copy of a holder in the fast tier may be the damaged one; nobody has looked at it."""
    fast, frozen, w = tmp_path / "fast", torch.randn(2**20), torch.zeros(4)
    tiers = [fast, "root"]
    with killed(root, tiers=tiers, w=w, frozen=frozen) as ckpt:
        for _ in range(5):
            w.add_(1)
            ckpt.step()
            ckpt.save()
            ckpt._entered().engine.wait(20)
        ckpt._entered().engine._drainer.wait(20)
    for shard in fast.rglob("rank-00000.1.safetensors"):
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    with killed(root, tiers=tiers, w=w, frozen=frozen) as ckpt:
        assert ckpt.restored is not None and "root" == ckpt.restored.tier
        w.add_(1)
        ckpt.step()
        ckpt.save()
        ckpt._entered().engine.wait(20)
        ckpt._entered().engine._drainer.wait(20)
    (place,) = (path for path in fast.rglob("step-000000006-*") if path.is_dir())
    assert [] == verify_checkpoint(place)
