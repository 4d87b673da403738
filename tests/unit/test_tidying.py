"""What follows a commit: in which order, and what it does not trust."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_ckpt import fsio
from hpc_ckpt.engine import tidying
from hpc_ckpt.engine.tidying import Tidier
from hpc_ckpt.errors import CorruptCheckpoint, Fenced
from hpc_ckpt.events import Event, EventLog, read
from hpc_ckpt.format.image import lay_out
from hpc_ckpt.lease import Lease, acquire_standalone
from hpc_ckpt.rundir import CheckpointKey, RunDir
from hpc_ckpt.settings import Best, Keep
from hpc_ckpt.testing import PlainLeaf, image_of, make_checkpoint, plain_manifest
from hpc_ckpt.tiers.base import Committed, Tier
from hpc_ckpt.tiers.directory import DirectoryTier


def fail(error: Fenced) -> None:
    raise error


def taken(rundir: RunDir) -> Lease:
    rundir.create()
    return acquire_standalone(rundir)


def tidier(rundir: RunDir, keep: Keep) -> Tidier:
    log = EventLog(rundir.events_file(1, "node"))
    return Tidier(keep, taken(rundir), log, on_fenced=fail)


def test_what_was_set_aside_goes_before_anything_else(tmp_path: Path) -> None:
    """A whole copy had taken its name; when that goes by retention, it must not come back. The
    tier may not have answered when the process began."""
    rundir = RunDir(tmp_path)
    rundir.create()
    tier = DirectoryTier(rundir.checkpoints)
    old, new = CheckpointKey(1, 1), CheckpointKey(1, 2)
    make_checkpoint(tier, old, [PlainLeaf("w", b"12345678")])
    was = f".was-g{old.generation:08d}-{old.directory_name}-{fsio.unique_suffix()}"
    (tier.path / was).mkdir()
    committed = make_checkpoint(tier, new, [PlainLeaf("w", b"87654321")])
    tidier(rundir, Keep(last=1)).tidy(tier, committed)
    assert [new.directory_name] == fsio.names_in(tier.path)


def test_nothing_goes_while_the_run_directory_does_not_say_who_holds_it(tmp_path: Path) -> None:
    """Neither old checkpoints nor leftovers: they may be a newer generation's to keep."""
    rundir = RunDir(tmp_path)
    rundir.create()
    tier = DirectoryTier(tmp_path / "fast", name="fast")
    for step in (1, 2):
        committed = make_checkpoint(tier, CheckpointKey(1, step), [PlainLeaf("w", b"12345678")])
    before = fsio.names_in(tier.path)

    def silent(asked: Tier) -> None:
        raise TimeoutError(f"it does not answer, for {asked.name}")

    log = EventLog(rundir.events_file(1, "node"))
    one = Tidier(Keep(last=1), taken(rundir), log, on_fenced=fail, guard=silent)
    one.tidy(tier, committed)
    assert before == fsio.names_in(tier.path)
    (said,) = [r for r in read(log.path) if r["event"] == Event.RETENTION_FAILED.value]
    assert "for fast" in said["error"]


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ([OSError(errno.EIO, "one"), OSError(errno.EIO, "two")], 1),
        ([OSError(errno.EIO, "one"), OSError(errno.ESTALE, "two")], 2),
        ([CorruptCheckpoint(Path(name), ["damaged"]) for name in ("step-1", "step-2")], 2),
    ],
)
def test_storage_that_is_away_is_told_once_and_damage_every_time(
    tmp_path: Path, errors: list[Exception], told: int
) -> None:
    """A disk that damages whatever is written to it must not fall silent after the first."""
    rundir, left = RunDir(tmp_path), iter(errors)
    rundir.create()
    tier = DirectoryTier(rundir.checkpoints)

    def raise_next(asked: Tier) -> None:
        raise next(left)

    log = EventLog(rundir.events_file(1, "node"))
    one = Tidier(Keep(last=1), taken(rundir), log, on_fenced=fail, guard=raise_next)
    for step in range(1, 1 + len(errors)):
        one.tidy(tier, make_checkpoint(tier, CheckpointKey(1, step), [PlainLeaf("w", b"12345678")]))
    said = [r for r in read(log.path) if r["event"] == Event.RETENTION_FAILED.value]
    assert told == len(said)


# ── damage ────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def tier(rundir: RunDir) -> DirectoryTier:
    return DirectoryTier(rundir.checkpoints, chunk=4096)


def save(tier: DirectoryTier, step: int, holder: int | None = None, **fields: object) -> Committed:
    """Its own shard, in the first file or the third, and those of the holder."""
    key, own = CheckpointKey(1, step), [PlainLeaf(f"own{step}", bytes([step]) * 300)]
    held = []
    if holder is not None:
        name = CheckpointKey(1, holder)
        held = [replace(one, holder=name.directory_name) for one in tier.manifest(name).shards]
    (layout,) = lay_out(own, first_part=2 if held else 0)
    with tier.stage(key) as staging:
        mine = staging.write_shard(layout, image_of(layout, own))
        for record in held:
            staging.refer(record)
        return staging.commit(plain_manifest(key, [mine, *held], **fields), lambda: None)


def damage(tier: DirectoryTier, step: int) -> None:
    (shard,) = (tier.path_of(CheckpointKey(1, step))).glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def sound(tier: DirectoryTier) -> dict[int, bool]:
    return {key.step: not tier.verify(key) for key in tier.keys()}  # noqa: SIM118 - a tier


def test_a_damaged_holder_does_not_push_out_what_is_sound(
    rundir: RunDir, tier: DirectoryTier
) -> None:
    """Nor does what refers to it: neither counts, though the holder was read once."""
    tidy = tidier(rundir, Keep(last=2)).tidy
    for step in (10, 20, 30):
        tidy(tier, save(tier, step))
    damage(tier, 30)
    for step in (40, 50):
        tidy(tier, save(tier, step, holder=30))
        assert sound(tier)[20]
    tidy(tier, save(tier, 60))
    assert (True, True) == (sound(tier)[20], sound(tier)[60])
    tidy(tier, save(tier, 70))
    tidy(tier, save(tier, 80))
    assert {70: True, 80: True} == sound(tier)


def test_where_nothing_is_sound_nothing_goes(rundir: RunDir, tier: DirectoryTier) -> None:
    """Somebody may yet save what is intact in them."""
    tidy = tidier(rundir, Keep(last=1)).tidy
    tidy(tier, save(tier, 10))
    damage(tier, 10)
    for step in (20, 30, 40):
        tidy(tier, save(tier, step, holder=10))
    assert {10: False, 20: False, 30: False, 40: False} == sound(tier)


def test_of_what_is_not_wanted_a_sound_one_stays_until_one_was_read(
    rundir: RunDir, tier: DirectoryTier
) -> None:
    """Somebody waits, so the new one is not read back; the newest that goes is a damaged one."""
    one = tidier(rundir, Keep(last=1))
    one.tidy(tier, save(tier, 10))
    save(tier, 15)
    damage(tier, 15)
    one.hurry()
    one.tidy(tier, save(tier, 20, holder=15))  # found here
    one.tidy(tier, save(tier, 30))
    assert sound(tier)[10]
    one.calm()
    one.tidy(tier, save(tier, 40))
    one.tidy(tier, save(tier, 50))
    assert {50: True} == sound(tier)


def test_one_that_was_read_back_whole_is_told(rundir: RunDir, tier: DirectoryTier) -> None:
    """And no other: that it was committed says little of a disk."""
    told: list[Path] = []
    log = EventLog(rundir.events_file(1, "node"))
    one = Tidier(Keep(last=1), taken(rundir), log, on_fenced=fail, on_sound=told.append)
    one.tidy(tier, save(tier, 10))
    committed = save(tier, 20)
    damage(tier, 20)
    one.tidy(tier, committed)
    assert [] == told
    one.tidy(tier, save(tier, 30))
    assert [tier.path_of(CheckpointKey(1, 30))] == told


def test_a_new_one_that_is_damaged_does_not_make_its_holder_so(
    rundir: RunDir, tier: DirectoryTier
) -> None:
    """Which shard is damaged says the read-back; only that is written again."""
    told: list[str] = []
    log = EventLog(rundir.events_file(1, "node"))
    one = Tidier(Keep(last=1), taken(rundir), log, on_fenced=fail, on_damaged=told.append)
    save(tier, 5)
    one.hurry()
    one.tidy(tier, save(tier, 10))
    one.calm()
    committed = save(tier, 20, holder=10)
    damage(tier, 20)
    one.tidy(tier, committed)
    assert [committed.key.directory_name] == told
    assert sound(tier)[10]


def test_damage_that_somebody_else_found_is_of_that_one_alone(
    rundir: RunDir, tier: DirectoryTier
) -> None:
    """Which of its shards it is nobody has said: what refers to another one is sound."""
    gone: list[tuple[str, list[CheckpointKey]]] = []
    log = EventLog(rundir.events_file(1, "node"))
    one = Tidier(
        Keep(last=9), taken(rundir), log, on_fenced=fail,
        on_gone=lambda where, keys: gone.append((where.name, list(keys))),
    )  # fmt: skip
    save(tier, 10)
    committed = save(tier, 20, holder=10)
    one.distrust(tier, CheckpointKey(1, 10).directory_name)
    one.tidy(tier, committed)
    assert [CheckpointKey(1, 10)] == [key for _, keys in gone for key in keys]
    assert {10: True, 20: True} == sound(tier)


def test_each_that_goes_is_told_also_where_the_next_one_cannot(
    rundir: RunDir, tier: DirectoryTier
) -> None:
    """What is not there any more is nobody's newest."""
    gone: list[int] = []
    log = EventLog(rundir.events_file(1, "node"))
    one = Tidier(
        Keep(last=1), taken(rundir), log, on_fenced=fail,
        guard=lambda _: None if len(gone) < 1 else fail(Fenced(1, 2)),
        on_gone=lambda where, keys: gone.extend(key.step for key in keys),
    )  # fmt: skip
    for step in (10, 20):
        save(tier, step)
    committed = save(tier, 30)
    with pytest.raises(Fenced):
        one.tidy(tier, committed)
    assert [10] == gone
    assert {20, 30} == set(sound(tier))


def test_a_file_that_somebody_put_into_a_checkpoint_is_no_damage(
    rundir: RunDir, tier: DirectoryTier
) -> None:
    """A program puts its settings beside the best weights at once: they stay the best."""
    tidy = tidier(rundir, Keep(last=1, best=Best(metric="acc"))).tidy
    for step, acc in ((1, 0.1), (2, 0.9), (3, 0.2), (4, 0.3), (5, 0.4)):
        committed = save(tier, step, metrics={"acc": acc})
        if step == 2:
            (committed.path / "config.json").write_text("{}")
        tidy(tier, committed)
    assert [2, 5] == [key.step for key in tier.keys()]  # noqa: SIM118 - a tier


# ── one at a time ─────────────────────────────────────────────────────────────────────────
class Slow(DirectoryTier):
    """Its first removal does not come back until it is over."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, chunk=4096)
        self.begun, self.over = threading.Event(), threading.Event()

    def remove(self, key: CheckpointKey) -> bool:
        if not self.begun.is_set():
            self.begun.set()
            self.over.wait(20)
        return super().remove(key)


@pytest.fixture
def slow(rundir: RunDir) -> Iterator[Slow]:
    slow = Slow(rundir.checkpoints)
    yield slow
    slow.over.set()


def failures(rundir: RunDir, log: EventLog) -> int:
    log.flush()
    said = read(rundir.events_file(1, "node"))
    return sum(one["event"] == Event.RETENTION_FAILED.value for one in said)


def in_thread(one: Tidier, tier: DirectoryTier, step: int) -> threading.Thread:
    thread = threading.Thread(target=one.tidy, args=(tier, save(tier, step)), daemon=True)
    thread.start()
    return thread


def test_where_one_hangs_the_next_leave_it_alone(
    rundir: RunDir, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is told once; when it has come back all goes on."""
    monkeypatch.setattr(tidying, "STUCK_S", 0.2)
    log = EventLog(rundir.events_file(1, "node"))
    one = Tidier(Keep(last=1), taken(rundir), log, on_fenced=fail)
    one.tidy(slow, save(slow, 10))
    first = in_thread(one, slow, 20)
    assert slow.begun.wait(20)
    for step in (30, 40, 50):
        one.tidy(slow, save(slow, step))
    assert (5, 1) == (len(slow.keys()), failures(rundir, log))
    slow.over.set()
    first.join(20)
    one.tidy(slow, save(slow, 60))
    assert ({60: True}, 1) == (sound(slow), failures(rundir, log))


def test_one_that_does_not_hang_is_waited_for(rundir: RunDir, slow: Slow) -> None:
    """So that saves are not faster than the removal of old ones."""
    log = EventLog(rundir.events_file(1, "node"))
    one = Tidier(Keep(last=1), taken(rundir), log, on_fenced=fail)
    one.tidy(slow, save(slow, 10))
    first = in_thread(one, slow, 20)
    assert slow.begun.wait(20)
    second = in_thread(one, slow, 30)
    second.join(0.2)
    assert second.is_alive()
    slow.over.set()
    for thread in (first, second):
        thread.join(20)
    assert ({30: True}, 0) == (sound(slow), failures(rundir, log))


def test_a_hang_in_one_tier_is_none_in_another(rundir: RunDir, slow: Slow, tmp_path: Path) -> None:
    """Each has its own storage."""
    other, one = DirectoryTier(tmp_path / "other", name="other"), tidier(rundir, Keep(last=1))
    one.tidy(slow, save(slow, 10))
    in_thread(one, slow, 20)
    assert slow.begun.wait(20)
    for step in (10, 20):
        one.tidy(other, save(other, step))
    assert {20: True} == sound(other)


def test_what_is_raised_does_not_keep_the_next_one_out(
    rundir: RunDir, tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever is told of a lease that was lost."""

    def lost(self: Lease) -> None:
        raise Fenced(1, 2)

    one = tidier(rundir, Keep(last=1))
    with monkeypatch.context() as moment:
        moment.setattr(Lease, "check", lost)
        with pytest.raises(Fenced):
            one.tidy(tier, save(tier, 10))
    one.tidy(tier, save(tier, 20))
    assert {20: True} == sound(tier)
