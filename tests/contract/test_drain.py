"""Drain: a checkpoint arrives byte for byte or not at all, whatever the two tiers do."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt import events, fsio
from hpc_ckpt.errors import CheckpointError, CorruptCheckpoint, Fenced, NoCheckpoint
from hpc_ckpt.events import Event, EventLog
from hpc_ckpt.format.defects import Defect, DefectKind
from hpc_ckpt.format.image import lay_out
from hpc_ckpt.format.verify import PIN_NAME
from hpc_ckpt.rundir import MANIFEST_NAME, CheckpointKey
from hpc_ckpt.settings import Best, Keep
from hpc_ckpt.testing import FaultyTier, PlainLeaf, image_of, make_checkpoint, plain_manifest
from hpc_ckpt.tiers import asking, draining
from hpc_ckpt.tiers.backlog import LAG
from hpc_ckpt.tiers.base import Committed, Tier
from hpc_ckpt.tiers.directory import DirectoryTier
from hpc_ckpt.tiers.drain import drain
from hpc_ckpt.tiers.draining import NICE, Drainer
from hpc_ckpt.tiers.retention import lacking, retain
from hpc_ckpt.tiers.stack import Stack
from hpc_ckpt.tiers.staging import DirectoryStaging
from hpc_ckpt.tiers.wishes import Survives, TierWish
from hpc_ckpt.tiers.writing import Pace

KEY = CheckpointKey(1, 10)
LEAVES = [PlainLeaf("w", bytes(range(256)) * 100), PlainLeaf("b", bytes(61))]
OTHER = [PlainLeaf("w", bytes(range(256)) * 100), PlainLeaf("b", bytes(60) + b"\1")]
FULL = OSError(errno.ENOSPC, "No space left on device")
TARGETS: dict[str, Callable[[Path], DirectoryTier]] = {
    "directory": lambda path: DirectoryTier(path, name="root", chunk=4096),
    "directory of another chunk": lambda path: DirectoryTier(path, name="root", chunk=65536),
    "faulty, without faults": lambda path: FaultyTier(path, name="root", chunk=4096),
}


@pytest.fixture
def source(tmp_path: Path) -> FaultyTier:
    return FaultyTier(tmp_path / "fast" / "checkpoints", name="local", chunk=8192)


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> DirectoryTier:
    return TARGETS[request.param](tmp_path / "run" / "checkpoints")


@pytest.fixture(autouse=True)
def _no_observer_is_left() -> Iterator[None]:
    yield
    fsio.observe(None)


def free() -> None:
    """A guard that lets everything pass."""


def files(tier: Tier, key: CheckpointKey) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in tier.path_of(key).iterdir()}


def damage(tier: DirectoryTier, key: CheckpointKey, name: str, at: int = -1) -> None:
    path = tier.path_of(key) / name
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def shard_of(tier: DirectoryTier, key: CheckpointKey) -> str:
    return tier.manifest(key).shards[0].file


def make_dependent(tier: DirectoryTier, key: CheckpointKey, holder: CheckpointKey) -> Committed:
    """A checkpoint with one shard of its own and all of an older one's."""
    leaves = [PlainLeaf(f"own.{key.step}", str(key.step).encode() * 3000)]
    held = [
        replace(record, holder=record.holder or holder.directory_name)
        for record in tier.manifest(holder).shards
    ]
    with tier.stage(key) as staging:
        (layout,) = lay_out(leaves)
        shards = [staging.write_shard(layout, image_of(layout, leaves))]
        for record in held:
            staging.refer(record)
        return staging.commit(plain_manifest(key, [*shards, *held]), free)


# ── one checkpoint ────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("header_cap", [4096, 64 * 1024**2])
def test_what_arrives_is_what_was_committed(
    source: FaultyTier, target: DirectoryTier, header_cap: int
) -> None:
    """The same bytes in every file, the same key, whole and private; the source stays."""
    leaves = [PlainLeaf(f"layer.{n}", bytes([n]) * 700) for n in range(100)]
    make_checkpoint(source, KEY, leaves, header_cap=header_cap, metrics={"loss": 0.5})
    committed = drain(source, target, KEY, free)
    assert (KEY, target.path_of(KEY), False) == (committed.key, committed.path, committed.reused)
    assert files(source, KEY) == files(target, KEY)
    assert sum(map(len, files(target, KEY).values())) == committed.size
    assert ([], []) == (source.verify(KEY), target.verify(KEY))
    assert [KEY.directory_name] == fsio.names_in(target.path)
    modes = {path.stat().st_mode & 0o777 for path in target.path_of(KEY).iterdir()}
    assert ({0o600}, 0o700) == (modes, target.path_of(KEY).stat().st_mode & 0o777)


def test_a_revision_keeps_its_number(source: FaultyTier, target: DirectoryTier) -> None:
    """The target has no revision 0, and must not make this one its own."""
    make_checkpoint(source, KEY, LEAVES)
    second = make_checkpoint(source, KEY, OTHER).key
    drain(source, target, second, free)
    assert ([second], 1) == (target.keys(), target.manifest(second).revision)


def test_what_is_there_and_whole_is_left_alone(source: FaultyTier, target: DirectoryTier) -> None:
    """Nothing is written; the directory is synced, for whoever died before doing that."""
    make_checkpoint(source, KEY, LEAVES)
    drain(source, target, KEY, free)
    seen: list[str] = []
    fsio.observe(seen.append)
    again = drain(source, target, KEY, free)
    assert (True, []) == (again.reused, seen)
    assert sum(map(len, files(target, KEY).values())) == again.size


@pytest.mark.parametrize("trusted", [True, False])
def test_what_is_there_already_is_made_durable(
    source: FaultyTier, target: DirectoryTier, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    """Whoever made it may have died between the rename and the sync of its name."""
    make_checkpoint(source, KEY, LEAVES)
    drain(source, target, KEY, free)
    synced: list[Path] = []
    monkeypatch.setattr(fsio, "sync_directory", lambda path: synced.append(Path(path)))
    settled = {KEY} if trusted else set()
    assert drain(source, target, KEY, free, settled=settled).reused
    assert [target.path] == synced


def test_what_is_there_and_broken_is_replaced(source: FaultyTier, target: DirectoryTier) -> None:
    """A full copy is published before the broken one is deleted; a pin stays a pin."""
    make_checkpoint(source, KEY, LEAVES)
    drain(source, target, KEY, free)
    target.pin(KEY)
    damage(target, KEY, shard_of(target, KEY))
    seen: list[str] = []
    fsio.observe(seen.append)
    assert not drain(source, target, KEY, free).reused
    fsio.observe(None)
    assert seen.index("drain.synced") < seen.index("commit.renamed") < seen.index("remove.renamed")
    assert ([], True) == (target.verify(KEY), target.pinned(KEY))


@pytest.mark.parametrize("pinned", [True, False])
def test_a_death_while_a_broken_one_is_replaced_never_brings_it_back(
    source: FaultyTier, target: DirectoryTier, pinned: bool
) -> None:
    """Its pin is the new one's from the first moment; what was set aside goes before anything else
    may, for it would come back as soon as its name is free."""
    make_checkpoint(source, KEY, LEAVES)
    drain(source, target, KEY, free)
    target.pin(KEY, pinned=pinned)
    damage(target, KEY, shard_of(target, KEY))

    def die(point: str) -> None:
        if point == "commit.renamed":
            raise KeyboardInterrupt

    fsio.observe(die)
    with pytest.raises(KeyboardInterrupt):
        drain(source, target, KEY, free)
    fsio.observe(None)
    fresh = DirectoryTier(target.path)
    assert ([], pinned) == (fresh.verify(KEY), fresh.pinned(KEY))
    fresh.recover()
    assert [KEY.directory_name] == fsio.names_in(target.path)
    assert (not pinned) == fresh.remove(KEY)
    fresh.sweep(KEY.generation)
    assert [[]] * pinned == [fresh.verify(key) for key in fresh.keys()]  # noqa: SIM118 - not a dict


def test_a_pin_that_was_set_while_a_broken_one_is_replaced_stays(
    source: FaultyTier, target: DirectoryTier
) -> None:
    """It lies in what was set aside, and goes over before that is deleted."""
    make_checkpoint(source, KEY, LEAVES)
    drain(source, target, KEY, free)
    damage(target, KEY, shard_of(target, KEY))

    def pin(point: str) -> None:
        if point == "replace.hidden":
            (was,) = target.path.glob(".was-*")
            (was / PIN_NAME).touch()

    fsio.observe(pin)
    drain(source, target, KEY, free)
    fsio.observe(None)
    assert ([], True) == (target.verify(KEY), target.pinned(KEY))


def test_what_is_intact_in_a_broken_one_stays_if_the_new_one_fails(
    source: FaultyTier, target: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others refer to its other shards: until a whole one is published, it stays."""
    make_checkpoint(source, KEY, [PlainLeaf(f"w{n}", bytes([n]) * 900) for n in range(90)],
                    header_cap=4096)  # fmt: skip
    first, second = source.manifest(KEY).shards[:2]
    dependent = CheckpointKey(1, 20)
    with source.stage(dependent) as staging:
        held = replace(second, holder=KEY.directory_name)
        (layout,) = lay_out(LEAVES, first_part=7)
        own = staging.write_shard(layout, image_of(layout, LEAVES))
        staging.refer(held)
        staging.commit(plain_manifest(dependent, [own, held]), free)
    drain(source, target, dependent, free)
    damage(target, KEY, first.file)
    assert [] == target.verify(dependent)

    def full(*_: object) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    for step in ("_write_manifest", "_publish"):
        with monkeypatch.context() as moment:
            moment.setattr(DirectoryStaging, step, full)
            with pytest.raises(OSError, match="No space"):
                drain(source, target, KEY, free)
        assert [] == target.verify(dependent)
    drain(source, target, KEY, free)
    assert ([], []) == (target.verify(KEY), target.verify(dependent))


def test_what_cannot_be_read_now_is_not_replaced(
    source: FaultyTier, target: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the moment says nothing about what is there."""
    make_checkpoint(source, KEY, LEAVES)
    drain(source, target, KEY, free)
    unread = Defect(DefectKind.UNREADABLE, shard_of(target, KEY), "I/O error", passing=True)
    monkeypatch.setattr(target, "verify", lambda key: [unread])
    before = files(target, KEY)
    with pytest.raises(OSError, match="could not be read"):
        drain(source, target, KEY, free)
    assert before == files(target, KEY)


def test_a_file_that_somebody_put_there_is_no_damage(
    source: FaultyTier, target: DirectoryTier
) -> None:
    """verify names it, but it must not be deleted with the whole directory."""
    make_checkpoint(source, KEY, LEAVES)
    drain(source, target, KEY, free)
    (target.path_of(KEY) / "notes").write_text("best run so far")
    assert drain(source, target, KEY, free).reused
    assert "best run so far" == (target.path_of(KEY) / "notes").read_text()


def test_the_same_state_under_another_manifest_is_reused(
    source: FaultyTier, target: DirectoryTier
) -> None:
    """A final save may have gone straight to the target, with another reason and time."""
    make_checkpoint(source, KEY, LEAVES, reason="policy")
    make_checkpoint(DirectoryTier(target.path, chunk=8192), KEY, LEAVES, reason="deadline")
    assert drain(source, target, KEY, free).reused
    assert "deadline" == target.manifest(KEY).reason


def test_another_state_of_the_same_name_is_never_replaced(
    source: FaultyTier, target: DirectoryTier
) -> None:
    """Both are whole: somebody has to look."""
    make_checkpoint(source, KEY, LEAVES)
    make_checkpoint(target, KEY, OTHER)
    before = files(target, KEY)
    with pytest.raises(CheckpointError, match="another state is there under the same name"):
        drain(source, target, KEY, free)
    assert (before, [KEY.directory_name]) == (files(target, KEY), fsio.names_in(target.path))


# ── damage and errors ─────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("at", [0, 9000, -1])
def test_damage_never_spreads(source: FaultyTier, target: DirectoryTier, at: int) -> None:
    """Found while copying, named with the source's path, and nothing is left in the target."""
    make_checkpoint(source, KEY, LEAVES)
    shard = shard_of(source, KEY)
    damage(source, KEY, shard, at)
    with pytest.raises(CorruptCheckpoint, match=rf"{shard}: chunk-digest: chunk \d") as caught:
        drain(source, target, KEY, free)
    assert (source.path_of(KEY), []) == (caught.value.path, fsio.names_in(target.path))


def _shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _become_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _become_a_link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to("../elsewhere")


@pytest.mark.parametrize(
    ("break_it", "defect"),
    [
        (Path.unlink, "shard-missing"),
        (_shorten, "shard-size"),
        (_lengthen, "shard-size"),
        (_become_a_fifo, "unreadable"),
        (_become_a_link, "unreadable"),
    ],
)
def test_a_shard_that_is_not_what_it_was_is_refused(
    source: FaultyTier, target: DirectoryTier, break_it: Callable[[Path], object], defect: str
) -> None:
    """By its named defect, without hanging, and with nothing left in the target."""
    make_checkpoint(source, KEY, LEAVES)
    break_it(source.path_of(KEY) / shard_of(source, KEY))
    with pytest.raises(CorruptCheckpoint, match=defect):
        drain(source, target, KEY, free)
    assert [] == fsio.names_in(target.path)


def test_a_damaged_manifest_is_refused(source: FaultyTier, target: DirectoryTier) -> None:
    """Also one of another checkpoint under this name."""
    make_checkpoint(source, KEY, LEAVES)
    other = make_checkpoint(source, CheckpointKey(1, 20), LEAVES).path
    manifest = source.path_of(KEY) / MANIFEST_NAME
    good = manifest.read_bytes()
    for bad, defect in (
        (good[:-1], "manifest-unreadable"),
        (good.replace(b'"step": 10', b'"step": 11'), "manifest-digest"),
        ((other / MANIFEST_NAME).read_bytes(), "key-mismatch"),
    ):
        manifest.write_bytes(bad)
        with pytest.raises(CorruptCheckpoint, match=defect):
            drain(source, target, KEY, free)
    manifest.unlink()
    with pytest.raises(CorruptCheckpoint, match="manifest-missing"):
        drain(source, target, KEY, free)
    assert not target.path.exists()


def test_a_checkpoint_that_went_is_absent_and_not_broken(
    source: FaultyTier, target: DirectoryTier
) -> None:
    """Retention of the source comes first, or in the middle."""
    with pytest.raises(NoCheckpoint):
        drain(source, target, KEY, free)
    leaves = [PlainLeaf(f"layer.{n}", bytes([n]) * 700) for n in range(100)]
    make_checkpoint(source, KEY, leaves, header_cap=4096)

    def remove(point: str) -> None:
        if point == "drain.synced":
            fsio.observe(None)
            source.remove(KEY)

    fsio.observe(remove)
    with pytest.raises(NoCheckpoint):
        drain(source, target, KEY, free)
    assert [] == fsio.names_in(target.path)


@pytest.mark.parametrize("operation", ["stage", "adopt", "commit_as", "keys", "verify"])
def test_an_error_of_the_target_leaves_no_trace(
    source: FaultyTier, tmp_path: Path, operation: str
) -> None:
    """It arrives as it is; the next attempt works."""
    target = FaultyTier(tmp_path / "run" / "checkpoints")
    make_checkpoint(source, KEY, LEAVES)
    if operation == "verify":
        drain(source, target, KEY, free)
    target.fail_at(operation, FULL, times=1)
    if operation == "keys":
        drain(source, target, KEY, free)  # a copy asks for no list
    else:
        with pytest.raises(OSError, match="No space left"):
            drain(source, target, KEY, free)
        assert [] == [name for name in fsio.names_in(target.path) if name.startswith(".")]
        target.heal()
        drain(source, target, KEY, free)
    assert [] == target.verify(KEY)


@pytest.mark.parametrize(
    "point", [p for p in fsio.KILL_POINTS if p.startswith(("drain.", "manifest.", "stage."))]
)
def test_an_error_at_any_point_before_the_rename_leaves_no_trace(
    source: FaultyTier, target: DirectoryTier, point: str
) -> None:
    """No descriptor either: a drain runs for weeks."""
    make_checkpoint(source, KEY, LEAVES)

    def fail(reached: str) -> None:
        if reached == point:
            raise OSError(errno.EIO, "Input/output error")

    before = len(list(Path("/proc/self/fd").iterdir()))
    fsio.observe(fail)
    with pytest.raises(OSError, match="Input/output error"):
        drain(source, target, KEY, free)
    fsio.observe(None)
    assert ([], before) == (fsio.names_in(target.path), len(list(Path("/proc/self/fd").iterdir())))
    assert not drain(source, target, KEY, free).reused


def test_a_fenced_generation_drains_nothing(source: FaultyTier, target: DirectoryTier) -> None:
    """The guard is asked at the last moment, when all bytes are there."""
    make_checkpoint(source, KEY, LEAVES)

    def fenced() -> None:
        (staging,) = fsio.names_in(target.path)
        assert (target.path / staging / MANIFEST_NAME).exists()
        raise Fenced(1, 2)

    with pytest.raises(Fenced):
        drain(source, target, KEY, fenced)
    assert [] == fsio.names_in(target.path)


def test_the_steps_of_a_drain_come_in_their_order(
    source: FaultyTier, target: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shard, manifest, staging directory, guard, rename, parent: each durable before the next."""
    make_checkpoint(source, KEY, [PlainLeaf("b", b"x")])
    target.path.mkdir(parents=True)
    seen: list[str] = []
    real = os.fsync

    def recording(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        seen.append("sync " + ("staging" if name.startswith(".tmp-") else name))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    fsio.observe(seen.append)
    drain(source, target, KEY, lambda: seen.append("guard"))
    assert [
        "stage.created",
        "drain.opened",
        "drain.chunk",
        "drain.written",
        "sync rank-00000.safetensors",
        "drain.synced",
        "manifest.opened",
        "manifest.written",
        "sync MANIFEST.json",
        "manifest.synced",
        "sync staging",
        "commit.staged",
        "guard",
        "commit.guarded",
        "commit.renamed",
        "sync checkpoints",
        "commit.durable",
    ] == seen[seen.index("stage.created") :]


def test_an_adopted_checkpoint_must_be_what_was_staged(
    source: FaultyTier, target: DirectoryTier
) -> None:
    """Another revision, a shard too few, a chunk too few or too many: never committed."""
    committed = make_checkpoint(source, KEY, LEAVES)
    manifest = source.manifest(KEY)
    data = (committed.path / MANIFEST_NAME).read_bytes()
    image = memoryview((committed.path / manifest.shards[0].file).read_bytes())
    chunks = [image[start : start + 8192] for start in range(0, len(image), 8192)]
    with target.stage(KEY) as staging, pytest.raises(ValueError, match="other shards"):
        staging.commit_as(data, manifest, free)
    for wrong in (chunks[:-1], [*chunks, chunks[0]]):
        with target.stage(KEY) as staging, pytest.raises(ValueError, match="zip"):
            staging.adopt(manifest.shards[0], wrong)
    later = CheckpointKey(1, 10, 1)
    with target.stage(later) as staging:
        staging.adopt(manifest.shards[0], chunks)
        with pytest.raises(ValueError, match="staged"):
            staging.commit_as(data, manifest, free)
    assert [] == fsio.names_in(target.path)


def test_a_drain_is_paced_by_the_bytes_it_has_copied(
    source: FaultyTier, target: DirectoryTier
) -> None:
    """After each chunk, so that training keeps its machine."""
    committed = make_checkpoint(source, KEY, LEAVES)
    taken: list[int] = []
    drain(source, target, KEY, free, taken.append)
    size = (committed.path / shard_of(source, KEY)).stat().st_size
    assert (size, {8192}) == (sum(taken), set(taken[:-1]))


def test_a_target_without_direct_writes_is_written_all_the_same(
    source: FaultyTier, target: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused when asked for, or only at the first write: the bytes are the same."""
    make_checkpoint(source, KEY, LEAVES)
    monkeypatch.setattr(fsio, "set_direct", lambda descriptor, *, direct: not direct)
    drain(source, target, KEY, free)
    monkeypatch.undo()
    real, refused = fsio.write_at, [True]

    def refuse_once(descriptor: int, view: memoryview, offset: int) -> None:
        if refused.pop() if refused else False:
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor, view, offset)

    second = CheckpointKey(1, 20)
    make_checkpoint(source, second, LEAVES)
    monkeypatch.setattr(fsio, "write_at", refuse_once)
    drain(source, target, second, free)
    for key in (KEY, second):
        assert ([], files(source, key)) == (target.verify(key), files(target, key))


# ── shards that an older checkpoint holds ─────────────────────────────────────────────────
def test_what_holds_a_shard_arrives_first(source: FaultyTier, target: DirectoryTier) -> None:
    """In the target as in the source: the holder is durable before its dependent is visible."""
    second, third = CheckpointKey(1, 20), CheckpointKey(2, 30)
    make_checkpoint(source, KEY, LEAVES)
    make_dependent(source, second, KEY)
    make_dependent(source, third, second)
    published: list[list[int]] = []
    drain(source, target, third, lambda: published.append([k.step for k in target.keys()]))  # noqa: SIM118 - not a mapping
    assert [[], [10], [10, 20]] == published
    keys = [KEY, second, third]
    assert (keys, [[], [], []]) == (target.keys(), [target.verify(key) for key in keys])
    assert [files(source, key) for key in keys] == [files(target, key) for key in keys]


def test_a_holder_is_read_once_and_not_at_every_drain(source: FaultyTier, tmp_path: Path) -> None:
    """Frozen weights would otherwise cost a read of all of them for each checkpoint."""
    target = FaultyTier(tmp_path / "run" / "checkpoints", chunk=8192)
    make_checkpoint(source, KEY, LEAVES)
    settled: set[CheckpointKey] = set()
    drain(source, target, KEY, free, settled=settled)
    target.fail_at("verify", FULL)
    second = make_dependent(source, CheckpointKey(1, 20), KEY).key
    drain(source, target, second, free, settled=settled)
    assert {KEY, second} == settled
    target.heal()
    target.remove(KEY)
    third = make_dependent(source, CheckpointKey(1, 30), KEY).key
    drain(source, target, third, free, settled=settled)
    assert [[], [], []] == [target.verify(key) for key in (KEY, second, third)]


def test_a_holder_that_was_damaged_there_is_mended_and_told(
    source: FaultyTier, target: DirectoryTier
) -> None:
    """Whoever knows of the damage would go on distrusting all that refer to it."""
    told: list[CheckpointKey] = []
    make_checkpoint(source, KEY, LEAVES)
    second = make_dependent(source, CheckpointKey(1, 20), KEY).key
    drain(source, target, second, free)
    damage(target, KEY, shard_of(target, KEY))
    settled: set[CheckpointKey] = set()
    for _ in range(2):
        drain(source, target, second, free, None, settled, told.append)
    assert ([KEY], {KEY, second}) == (told, settled)
    assert [] == target.verify(second)


def test_a_damaged_holder_keeps_its_dependent_from_arriving(
    source: FaultyTier, target: DirectoryTier
) -> None:
    """Otherwise the target would list a checkpoint that cannot be restored."""
    make_checkpoint(source, KEY, LEAVES)
    second = make_dependent(source, CheckpointKey(1, 20), KEY).key
    damage(source, KEY, shard_of(source, KEY))
    with pytest.raises(CorruptCheckpoint, match="chunk-digest"):
        drain(source, target, second, free)
    assert [] == fsio.names_in(target.path)


# ── in the background ─────────────────────────────────────────────────────────────────────
class Bench:
    """A stack of faulty tiers, a drainer, and what it said."""

    def __init__(
        self, place: Path, *names: str, keep: Keep | None = None, fragile: tuple[str, ...] = ()
    ) -> None:
        self.tiers = {name: FaultyTier(place / name, name=name, chunk=8192) for name in names}
        wishes = {name: TierWish(name, place, Survives.PROCESS) for name in fragile}
        self.stack = Stack(list(self.tiers.values()), wishes=wishes)
        self.events = EventLog(place / "events.jsonl")
        self.after: list[tuple[str, int]] = []
        self.damaged: list[str] = []
        self.guard: Callable[[Tier], None] = lambda tier: None
        self.drainer = Drainer(
            self.stack,
            guard=lambda tier: self.guard(tier),  # noqa: PLW0108 - a test may replace it
            events=self.events,
            after=lambda tier, committed: self.after.append((tier.name, committed.key.step)),
            lacking=lambda source, home: lacking(source, home, keep or Keep(last=1)),
            damaged=lambda _, name: self.damaged.append(name),
        )

    def save(self, step: int, *, wait: bool = True) -> CheckpointKey:
        first = self.stack.first
        leaves = [PlainLeaf("w", step.to_bytes(4, "big") * 5000)]
        key = make_checkpoint(first, CheckpointKey(1, step), leaves).key
        self.drainer.order(key, first)
        if wait:
            self.drainer.wait(30)
        return key

    def told(self, event: Event) -> list[dict[str, Any]]:
        self.events.flush()
        return [r for r in events.read(self.events.path) if r["event"] == event.value]

    def steps(self, name: str) -> list[int]:
        return [key.step for key in self.tiers[name].keys()]  # noqa: SIM118 - not a mapping


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(*names: str, **options: Any) -> Bench:
        made.append(Bench(tmp_path, *names, **options))
        return made[-1]

    yield make
    for one in made:
        one.drainer.close(10)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """A target that hangs at the first byte until the event is set."""
    opened = threading.Event()
    fsio.observe(lambda point: opened.wait(60) if point == "drain.opened" else None)
    yield opened
    opened.set()
    fsio.observe(None)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def test_a_commit_is_drained_to_every_tier_below(bench: Callable[..., Bench]) -> None:
    """One event and one call for retention each; the rate is noted for the choice at the end."""
    one = bench("local", "shared", "root")
    key = one.save(5)
    assert ([5], [5], True) == (one.steps("shared"), one.steps("root"), one.drainer.wait(0))
    assert [("root", 5), ("shared", 5)] == one.after
    drained = one.told(Event.DRAINED)
    size = one.tiers["root"].manifest(key).shards[0].size
    assert [("root", size), ("shared", size)] == [(r["tier"], r["bytes"]) for r in drained]
    assert {key.directory_name} == {r["checkpoint"] for r in drained}
    assert all(r["seconds"] >= 0 for r in drained)
    known = [one.stack.expected_s(tier, size) is not None for tier in one.stack.tiers]
    assert ([False, True, True], 0) == (known, one.drainer.lag)


def test_each_tier_is_asked_for_by_its_own_name(bench: Callable[..., Bench]) -> None:
    """A run directory that does not answer keeps a copy from no other tier."""
    one, asked = bench("local", "shared", "root"), list[str]()
    one.guard = lambda tier: asked.append(tier.name)
    one.save(5)
    assert ["root", "shared"] == asked


def test_a_drain_that_is_held_goes_on_afterwards(bench: Callable[..., Bench]) -> None:
    """A save that somebody waits for has the storage for itself; who holds back does not hang."""
    one = bench("local", "root")
    one.drainer.hold(one.stack.first)
    one.save(5, wait=False)
    assert not one.drainer.wait(0.2)
    assert (1, []) == (one.drainer.lag, one.steps("root"))
    one.drainer.go_on()
    assert one.drainer.wait(30)
    assert [5] == one.steps("root")


def test_what_would_go_with_the_job_gives_way_only_in_its_own_target(
    bench: Callable[..., Bench],
) -> None:
    """While the last save is written elsewhere it has no time to lose: it may be all that the
    next link finds."""
    one = bench("local", "root", "archive", fragile=("local",))
    one.drainer.hold(one.stack.home)
    one.save(5, wait=False)
    assert not one.drainer.wait(0.2)
    assert [] == one.steps("root")
    one.drainer.hold(one.stack.first)
    assert one.drainer.wait(30)
    assert ([5], [5]) == (one.steps("root"), one.steps("archive"))


def test_a_run_without_other_tiers_starts_no_thread(bench: Callable[..., Bench]) -> None:
    """Nothing to do is nothing done."""
    one = bench("root")
    one.save(5)
    assert "hpc-ckpt-drain" not in {thread.name for thread in threading.enumerate()}
    assert (0, True) == (one.drainer.lag, one.drainer.close(0))


def test_an_order_never_waits_for_the_storage(
    bench: Callable[..., Bench], gate: threading.Event
) -> None:
    """Whoever commits goes on; the thread is a daemon with a name."""
    one = bench("local", "root")
    one.save(1, wait=False)
    (thread,) = [t for t in threading.enumerate() if t.name == "hpc-ckpt-drain"]
    assert thread.daemon
    until(lambda: os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) >= NICE)
    assert (False, 1) == (one.drainer.wait(0.01), one.drainer.lag)
    gate.set()
    assert (True, 0) == (one.drainer.wait(30), one.drainer.lag)


def test_the_newest_goes_first_and_the_lag_is_bounded(
    bench: Callable[..., Bench], gate: threading.Event
) -> None:
    """While one is under way at most LAG wait; the oldest are given up, and that is said."""
    one = bench("local", "root")
    one.save(1, wait=False)
    until(lambda: one.drainer.lag == 1 and not one.drainer._waiting)
    for step in (2, 3, 4, 5):
        one.save(step, wait=False)
    assert LAG + 1 == one.drainer.lag
    gate.set()
    assert one.drainer.wait(30)
    assert [("root", 1), ("root", 5), ("root", 4)] == one.after
    dropped = one.told(Event.DRAIN_DROPPED)
    assert [2, 3] == [CheckpointKey.parse(r["checkpoint"]).step for r in dropped]  # type: ignore[union-attr]
    assert {"more than 2 were waiting, and newer ones go first"} == {r["reason"] for r in dropped}
    assert 5 == one.steps("root")[-1]


def test_a_failure_is_told_and_tried_again_with_the_next_order(
    bench: Callable[..., Bench],
) -> None:
    """Not in a loop: a full disk is full for a while."""
    one = bench("local", "root")
    one.tiers["root"].fail_at("adopt", FULL)
    one.save(1)
    assert (1, False, []) == (one.drainer.lag, one.drainer.wait(0.05), one.steps("root"))
    (failure,) = one.told(Event.DRAIN_FAILED)
    assert ("root", "OSError: [Errno 28] No space left on device") == (
        failure["tier"], failure["error"],
    )  # fmt: skip
    one.tiers["root"].heal()
    one.save(2)
    assert ([1, 2], [("root", 2), ("root", 1)]) == (one.steps("root"), one.after)


def test_a_failing_tier_does_not_keep_the_others_from_theirs(bench: Callable[..., Bench]) -> None:
    """And only what is missing is tried again."""
    one = bench("local", "shared", "root")
    one.tiers["shared"].fail_at("stage", FULL)
    one.save(1)
    one.save(2)
    assert ([1, 2], []) == (one.steps("root"), one.steps("shared"))
    one.tiers["shared"].heal()
    assert one.drainer.close(30)
    assert [1, 2] == one.steps("shared")
    assert [("root", 1), ("root", 2), ("shared", 2), ("shared", 1)] == one.after


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether there is a thread for the next drains to be had, one by one; then always."""
    answers: list[bool] = []
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "hpc-ckpt-drain" and answers and not answers.pop(0):
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    return answers


def test_without_a_thread_an_order_waits_for_the_next(
    bench: Callable[..., Bench], threads: list[bool]
) -> None:
    """It is told; whoever commits or waits is not held up."""
    one = bench("local", "root")
    threads.append(False)
    one.save(1)
    assert (1, False, []) == (one.drainer.lag, one.drainer.wait(30), one.steps("root"))
    (failure,) = one.told(Event.DRAIN_FAILED)
    assert ("root", "RuntimeError: can't start new thread") == (failure["tier"], failure["error"])
    one.save(2)
    assert ([1, 2], True) == (one.steps("root"), one.drainer.wait(0))


@pytest.mark.parametrize("again", [True, False])
def test_closing_asks_for_a_thread_once_more_and_does_not_wait_for_none(
    bench: Callable[..., Bench], threads: list[bool], again: bool
) -> None:
    """The newest must reach the home at last; where it cannot, the program ends all the same."""
    one = bench("local", "root")
    threads += [False, again]
    one.save(1)
    began = time.monotonic()
    assert (again, [1] * again) == (one.drainer.close(30), one.steps("root"))
    assert time.monotonic() - began < 10


def test_the_home_comes_before_a_tier_that_hangs(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """The chain is judged by its home."""
    one = bench("local", "shared", "root")
    opened = threading.Event()
    real = one.tiers["shared"].stage

    def hang(key: CheckpointKey) -> Any:
        opened.wait(60)
        return real(key)

    one.tiers["shared"].stage = hang  # type: ignore[method-assign]
    one.save(1, wait=False)
    until(lambda: one.steps("root") == [1])
    assert ([], False) == (one.steps("shared"), one.drainer.wait(0.01))
    opened.set()
    assert one.drainer.wait(30)


def test_whoever_waits_for_the_home_does_not_wait_for_another_tier(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a link there may be less time than it takes to be sure that one hangs."""
    one = bench("local", "shared", "root", fragile=("local",))
    opened, asked, real = threading.Event(), threading.Event(), one.tiers["shared"].stage
    monkeypatch.setattr(draining, "IN_THE_WAY_S", 0.5)

    def hang(key: CheckpointKey) -> Any:
        asked.set()
        opened.wait(60)
        return real(key)

    one.tiers["shared"].stage = hang  # type: ignore[method-assign]
    try:
        one.save(1, wait=False)
        assert asked.wait(30)
        one.save(2, wait=False)
        one.drainer.hurry()
        one.drainer.insist(20, enough=lambda: one.steps("root") == [1, 2])
        assert [1, 2] == one.steps("root")
    finally:
        opened.set()


def test_a_drain_that_hangs_is_left_behind(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes later still gets to the home: the fast tier may go with the node. What hangs is
    not tried again before it has come back."""
    one = bench("local", "shared", "root")
    monkeypatch.setattr(draining, "STUCK_S", 0.1)
    opened, real = threading.Event(), one.tiers["shared"].stage
    asked: list[int] = []

    def hang(key: CheckpointKey) -> Any:
        asked.append(key.step)
        opened.wait(60)
        return real(key)

    one.tiers["shared"].stage = hang  # type: ignore[method-assign]
    one.save(1, wait=False)
    until(lambda: asked == [1])
    time.sleep(0.2)
    one.save(2)
    one.save(3)
    assert ([1, 2, 3], [], [1]) == (one.steps("root"), one.steps("shared"), asked)
    failed = {(r["tier"], r["checkpoint"][:14]) for r in one.told(Event.DRAIN_FAILED)}
    assert {("shared", f"step-{step:09d}") for step in (1, 2, 3)} == failed
    assert not one.drainer.wait(0)
    opened.set()
    until(lambda: one.steps("shared") == [1])
    until(lambda: one.drainer._hung == set())
    one.save(4)
    assert one.drainer.close(30)
    assert ([1, 2, 3, 4], 4) == (one.steps("root"), one.steps("shared")[-1])


def _in_the_listing(one: Bench, hang: Callable[[], None]) -> None:
    real, home = one.tiers["root"].keys, one.tiers["root"]

    def keys() -> list[CheckpointKey]:
        if threading.current_thread().name == "hpc-ckpt-drain":
            hang()
        return real()

    home.keys = keys  # type: ignore[method-assign]


def _in_a_look(one: Bench, hang: Callable[[], None]) -> None:
    real = one.drainer._lacking
    assert real is not None

    def look(source: Tier, home: Tier) -> Any:
        if source.name == "shared":
            hang()
        return real(source, home)

    one.drainer._lacking = look


@pytest.mark.parametrize(
    ("where", "told"),
    [
        (_in_the_listing, ("drain.failed", "step-000000001-g00000001")),
        (_in_a_look, ("drain.failed", None)),
    ],
)
def test_a_thread_that_hangs_beside_the_copy_is_left_behind(
    bench: Callable[..., Bench],
    monkeypatch: pytest.MonkeyPatch,
    where: Callable[[Bench, Callable[[], None]], None],
    told: tuple[str, str | None],
) -> None:
    """In the home's listing, or a look at what it lacks: the others get theirs, somebody is told,
    and everything goes on when it has come back."""
    one = bench("local", "shared", "root")
    opened, hanging = threading.Event(), threading.Event()
    monkeypatch.setattr(draining, "STUCK_S", 1.0)  # a busy machine stands still for less

    def hang() -> None:
        hanging.set()
        opened.wait(60)

    where(one, hang)
    try:
        one.save(1, wait=False)
        assert hanging.wait(30)
        time.sleep(1.1)
        for step in (2, 3):
            one.save(step, wait=False)
            until(lambda: step in one.steps("shared"))  # noqa: B023 - called at once
        one.events.flush()
        said = [r for r in events.read(one.events.path) if "it hangs" in r.get("error", "")]
        assert told == (said[0]["event"], said[0].get("checkpoint"))
        assert (False, 1) == (one.drainer.wait(0), len(one.drainer._hung))
    finally:
        opened.set()
    until(lambda: one.drainer._hung == set())
    one.save(4)
    assert one.drainer.close(30)
    assert (4, 4) == (one.steps("root")[-1], one.steps("shared")[-1])


@pytest.mark.parametrize("names", [("local", "root"), ("local", "shared", "root")])
def test_retention_that_hangs_keeps_nothing_from_the_home(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    """The copy did not hang: later ones arrive, and only what follows them there is left out
    until the hung one comes back. Told once."""
    one = bench(*names, fragile=("local",))
    opened, asked = threading.Event(), list[int]()
    monkeypatch.setattr(draining, "STUCK_S", 1.0)  # a busy machine stands still for less

    def after(tier: Tier, committed: Committed) -> None:
        if tier.name == "root":
            asked.append(committed.key.step)
            opened.wait(60)

    one.drainer._after = after
    try:
        one.save(1, wait=False)
        until(lambda: asked == [1])
        time.sleep(1.1)
        for step in (2, 3):
            one.save(step)
        assert ([1, 2, 3], [1]) == (one.steps("root"), asked)
        assert one.steps(names[1]) == [1, 2, 3]
        assert (True, set()) == (one.drainer.wait(0), one.drainer.hanging)
        assert (1, []) == (len(one.told(Event.RETENTION_FAILED)), one.told(Event.DRAIN_FAILED))
    finally:
        opened.set()
    until(lambda: one.drainer._hung == set())
    one.save(4)
    assert one.drainer.close(30)
    assert [1, 4] == asked


def test_retention_that_comes_back_says_nothing_of_a_copy_that_hangs(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the same way, later: that is still not to be gone."""
    one = bench("local", "root")
    opened, staged, real = threading.Event(), threading.Event(), one.tiers["root"].stage
    asked: list[int] = []
    monkeypatch.setattr(draining, "STUCK_S", 0.5)

    def after(tier: Tier, committed: Committed) -> None:
        asked.append(committed.key.step)
        opened.wait(60)

    def stage(key: CheckpointKey) -> Any:
        if key.step == 2:
            asked.append(key.step)
            staged.wait(60)
        return real(key)

    one.drainer._after = after
    one.tiers["root"].stage = stage  # type: ignore[method-assign]
    try:
        for step in (1, 2):
            one.save(step, wait=False)
            until(lambda: step in asked)  # noqa: B023 - called at once
            time.sleep(0.6)
        one.save(3, wait=False)
        opened.set()
        until(lambda: not any(turn.arrived for turn in one.drainer._hung))
        assert {"root"} == one.drainer.hanging
    finally:
        opened.set()
        staged.set()
    until(lambda: one.drainer._hung == set())


def test_a_thread_left_behind_begins_nothing_when_it_comes_back(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its look is out of date, and another thread is at work."""
    one = bench("local", "shared", "root", keep=Keep(last=1, every=1))
    opened, hanging = threading.Event(), threading.Event()
    real = one.drainer._lacking
    assert real is not None
    lost = make_checkpoint(one.tiers["shared"], CheckpointKey(1, 1), LEAVES).key

    def look(source: Tier, home: Tier) -> Any:
        found = real(source, home)
        if source.name == "shared" and not hanging.is_set():
            hanging.set()
            opened.wait(60)
        return found

    monkeypatch.setattr(draining, "STUCK_S", 0.1)
    one.drainer._lacking = look
    one.save(2, wait=False)
    assert hanging.wait(30)
    (left,) = [t for t in threading.enumerate() if t.name == "hpc-ckpt-drain"]
    time.sleep(0.2)
    one.save(3)
    opened.set()
    left.join(30)
    assert (False, None) == (left.is_alive(), one.drainer._current)
    assert [2, 3] == one.steps("root")
    one.save(4)
    assert (True, [lost.step, 2, 3, 4]) == (one.drainer.close(30), one.steps("root"))


def test_retention_that_gets_on_does_not_hang(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-back moves with each chunk, and holds back for the training's sake; many removals
    move one by one."""
    one = bench("local", "root")
    now, seen = [0.0], []
    one.drainer._clock = lambda: now[0]
    monkeypatch.setattr(draining, "STUCK_S", 10.0)

    def step(seconds: float) -> None:
        now[0] += seconds
        with one.drainer._changed:
            one.drainer._leave_behind()
        seen.append(one.drainer._hung == set())

    def paced() -> bool:
        step(1000.0)
        return False

    def after(tier: Tier, committed: Committed) -> None:
        assert [] == tier.verify(committed.key, paced)
        step(9.0)
        for number in range(3):
            tier.remove(CheckpointKey(1, 100 + number))
            step(9.0)

    one.drainer._after = after
    one.save(1)
    assert (True, [True] * len(seen)) == (len(seen) > 5, seen)
    assert [] == one.told(Event.RETENTION_FAILED)
    assert one.drainer.close(30)


def test_a_drain_that_is_slow_or_paced_does_not_hang(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets on, or it holds back for the training's sake."""
    one = bench("local", "root")
    monkeypatch.setattr(draining, "STUCK_S", 0.1)
    go_on = threading.Event()

    class Slow(Pace):
        def took(self, nbytes: int) -> None:
            go_on.wait(60)

    one.drainer._new_pace = Slow
    one.save(1, wait=False)
    time.sleep(0.3)
    one.save(2, wait=False)
    go_on.set()
    assert one.drainer.close(30)
    assert ([], [1, 2]) == (one.told(Event.DRAIN_FAILED), one.steps("root"))


def test_a_tier_that_does_not_answer_keeps_nothing_from_the_others(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The home gets the next ones too; what is missing is tried again when it answers."""
    one = bench("local", "shared", "root")
    monkeypatch.setattr(asking, "PATIENCE_S", 0.2)
    answers, real = threading.Event(), one.tiers["shared"].keys

    def late() -> list[CheckpointKey]:
        answers.wait(60)
        return real()

    one.tiers["shared"].keys = late  # type: ignore[method-assign]
    one.save(1)
    one.save(2)
    assert [1, 2] == one.steps("root")
    failed = {(r["tier"], r["error"].partition(":")[0]) for r in one.told(Event.DRAIN_FAILED)}
    assert {("shared", "TimeoutError")} == failed
    answers.set()
    until(lambda: not one.stack.hangs(one.tiers["shared"]))
    assert one.drainer.close(30)
    assert [1, 2] == one.steps("shared")


def test_a_checkpoint_that_retention_took_is_given_up(bench: Callable[..., Bench]) -> None:
    """The source may keep less than the lag; nothing is retried for ever."""
    one = bench("local", "root")
    one.tiers["root"].fail_at("adopt", FULL, times=1)
    key = one.save(1)
    one.tiers["local"].remove(key)
    one.save(2)
    (dropped,) = one.told(Event.DRAIN_DROPPED)
    assert (key.directory_name, "no longer in tier local") == (
        dropped["checkpoint"], dropped["reason"],
    )  # fmt: skip
    assert ([2], 0) == (one.steps("root"), one.drainer.lag)


def test_damage_is_told_and_does_not_spread(bench: Callable[..., Bench]) -> None:
    """The next checkpoint is drained as if nothing had been."""
    one = bench("local", "root")
    one.tiers["root"].fail_at("adopt", FULL, times=1)
    key = one.save(1)
    damage(one.tiers["local"], key, shard_of(one.tiers["local"], key))
    one.save(2)
    assert ([2], 1) == (one.steps("root"), one.drainer.lag)
    assert "chunk-digest" in one.told(Event.DRAIN_FAILED)[-1]["error"]
    assert {key.directory_name} == set(one.damaged), "whoever refers to it has to know"


def test_storage_that_fails_is_no_damage(bench: Callable[..., Bench]) -> None:
    """What others refer to is believed until its bytes are seen to be others."""
    one = bench("local", "root")
    one.tiers["root"].fail_at("adopt", FULL, times=1)
    one.save(1)
    assert ([], []) == (one.steps("root"), one.damaged)


def test_a_fenced_drainer_stops(bench: Callable[..., Bench]) -> None:
    """What an overtaken generation has left is the next one's to drain."""
    one = bench("local", "root")

    def fenced(tier: Tier) -> None:
        raise Fenced(1, 2)

    one.guard = fenced
    one.save(1)
    one.guard = lambda tier: None
    one.save(2)
    assert ([], 0) == (one.steps("root"), one.drainer.lag)
    assert one.drainer.fenced is not None
    assert (False, False) == (one.drainer.wait(0), one.drainer.close(0))
    assert 1 == len(one.told(Event.DRAIN_FAILED))


def test_an_error_in_retention_does_not_undo_the_copy(bench: Callable[..., Bench]) -> None:
    """Nor does it stop the thread."""
    one = bench("local", "root")
    one.drainer._after = lambda tier, committed: 1 / 0  # type: ignore[assignment,return-value]
    one.save(1)
    one.save(2)
    assert ([1, 2], 0) == (one.steps("root"), one.drainer.lag)


def test_retention_of_the_target_follows_each_drain(bench: Callable[..., Bench]) -> None:
    """The callback has what retain() needs."""
    one = bench("local", "root")

    def keep_two(tier: Tier, committed: Committed) -> None:
        retain(tier, Keep(last=2), generation=1, committed=committed.key, guard=free)

    one.drainer._after = keep_two
    for step in (1, 2, 3, 4):
        one.save(step)
    assert [3, 4] == one.steps("root")


def test_the_same_checkpoint_is_ordered_once(
    bench: Callable[..., Bench], gate: threading.Event
) -> None:
    """A second save at one step reuses the first, and so does its order."""
    one = bench("local", "root")
    one.save(1, wait=False)
    until(lambda: not one.drainer._waiting)
    for _ in range(3):
        one.save(2, wait=False)
    assert 2 == one.drainer.lag
    gate.set()
    assert one.drainer.wait(30)
    assert [("root", 1), ("root", 2)] == one.after


def test_closing_tries_once_more_and_says_what_is_left(bench: Callable[..., Bench]) -> None:
    """The newest must reach the home at last."""
    one = bench("local", "root")
    one.tiers["root"].fail_at("adopt", FULL, times=1)
    one.save(1)
    assert (True, [1]) == (one.drainer.close(30), one.steps("root"))
    one.save(2)
    assert ([1], True) == (one.steps("root"), one.drainer.close(0))
    other = bench("local", "archive", "root")
    other.tiers["root"].fail_at("adopt", FULL)
    other.save(3)
    assert (False, [3]) == (other.drainer.close(30), other.steps("archive"))
    assert "hpc-ckpt-drain" not in {thread.name for thread in threading.enumerate()}


def test_closing_leaves_a_hanging_file_system_behind(
    bench: Callable[..., Bench], gate: threading.Event
) -> None:
    """A finished program ends; what waits behind it is not begun any more."""
    one = bench("local", "root")
    one.save(1, wait=False)
    until(lambda: not one.drainer._waiting)
    one.save(2, wait=False)
    began = time.monotonic()
    assert one.drainer.close(0.05) is False
    assert time.monotonic() - began < 5
    gate.set()
    until(lambda: one.steps("root") == [1])
    until(lambda: "hpc-ckpt-drain" not in {thread.name for thread in threading.enumerate()})
    assert [1] == one.steps("root")


def test_who_waits_is_not_paced(bench: Callable[..., Bench]) -> None:
    """A drain at a byte a second ends at once when the program ends."""
    one = bench("local", "root")
    one.drainer._new_pace = lambda: Pace(1.0)
    one.save(1, wait=False)
    until(lambda: one.drainer.lag == 1 and not one.drainer._waiting)
    assert one.drainer.wait(0.05) is False
    one.save(2, wait=False)
    began = time.monotonic()
    assert one.drainer.close(30)
    assert time.monotonic() - began < 10
    assert [1, 2] == one.steps("root")


def test_time_spent_waiting_for_others_is_no_part_of_the_rate(
    bench: Callable[..., Bench],
) -> None:
    """Otherwise a polite drain would make the home look too slow for the final save."""
    one = bench("local", "root")
    now = [0.0]
    one.drainer._clock = lambda: now[0]

    class Slow(Pace):
        def took(self, nbytes: int) -> None:
            now[0] += 1000.0

    def tick(point: str) -> None:
        now[0] += point == "drain.chunk"

    one.drainer._new_pace = Slow
    fsio.observe(tick)
    key = one.save(1)
    (shard,) = one.tiers["root"].manifest(key).shards
    assert float(len(shard.digests)) == one.stack.expected_s(one.stack.home, shard.size)
    assert one.told(Event.DRAINED)[0]["seconds"] > 1000


def test_a_new_link_catches_up_with_what_the_last_one_left(bench: Callable[..., Bench]) -> None:
    """To the tiers that do not list it; those that do are not read again."""
    one = bench("local", "shared", "root")
    first = one.stack.first
    key = make_checkpoint(first, KEY, LEAVES).key
    drain(first, one.tiers["shared"], key, free)
    one.tiers["shared"].fail_at("verify", FULL)
    one.drainer.catch_up(key, first)
    assert (True, [("root", 10)]) == (one.drainer.wait(30), one.after)
    one.drainer.catch_up(key, first)
    assert (True, 0, 1) == (one.drainer.wait(30), one.drainer.lag, len(one.after))


# ── what is to stay ───────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("hurried", [False, True])
def test_what_is_to_stay_arrives_though_it_was_given_up(
    bench: Callable[..., Bench], gate: threading.Event, hurried: bool
) -> None:
    """In turn with the newest, or after them when somebody waits for the end."""
    one = bench("local", "root", keep=Keep(last=1, every=2))
    one.save(1, wait=False)
    until(lambda: one.drainer.lag == 1 and not one.drainer._waiting)
    for step in (2, 3, 4, 5, 6):
        one.save(step, wait=False)
    if hurried:
        one.drainer.hurry()
    gate.set()
    assert one.drainer.close(30) if hurried else one.drainer.wait(30)
    assert ([1, 6, 5, 2, 4] if hurried else [1, 2, 6, 4, 5]) == [step for _, step in one.after]


def test_a_new_link_looks_for_what_is_to_stay(bench: Callable[..., Bench]) -> None:
    """Also where the newest is in the home already."""
    one = bench("local", "root", keep=Keep(last=1, every=2))
    for step in (2, 3, 4, 5):
        make_checkpoint(one.stack.first, CheckpointKey(1, step), LEAVES)
    newest = make_checkpoint(one.stack.home, CheckpointKey(1, 7), LEAVES).key
    one.drainer.catch_up(newest, one.stack.home)
    assert (True, [2, 4, 7]) == (one.drainer.wait(30), one.steps("root"))


def test_what_the_home_would_not_keep_is_not_looked_for(bench: Callable[..., Bench]) -> None:
    """The best of one tier is not the best of all: it would come and go again and again."""
    one = bench("local", "root", keep=Keep(last=1, best=Best(metric="score")))
    scores = {"local": {2: 0.5, 3: 0.1}, "root": {1: 0.9}}
    for name, of_steps in scores.items():
        for step, score in of_steps.items():
            key = CheckpointKey(1, step)
            make_checkpoint(one.tiers[name], key, LEAVES, metrics={"score": score})
    one.drainer.catch_up(CheckpointKey(1, 1), one.stack.home)
    assert (True, [1]) == (one.drainer.wait(30), one.steps("root"))
    make_checkpoint(one.stack.first, CheckpointKey(1, 4), LEAVES, metrics={"score": 1.5})
    one.drainer.catch_up(CheckpointKey(1, 1), one.stack.home)
    assert (True, [1, 4]) == (one.drainer.wait(30), one.steps("root"))


def test_what_is_damaged_is_looked_for_once(bench: Callable[..., Bench]) -> None:
    """It is told, and said again at the end; the others arrive. A full disk is asked again."""
    one = bench("local", "root", keep=Keep(last=1, every=2))
    for step in (2, 4):
        make_checkpoint(one.stack.first, CheckpointKey(1, step), LEAVES)
    damaged = CheckpointKey(1, 2)
    damage(one.tiers["local"], damaged, shard_of(one.tiers["local"], damaged))
    one.tiers["root"].fail_at("commit_as", FULL, times=2)
    one.save(5)
    assert [] == one.steps("root"), "full for the newest, and for the one that is to stay"
    one.save(7)
    assert [4, 5, 7] == one.steps("root")
    one.save(9)
    failed = [r["checkpoint"] for r in one.told(Event.DRAIN_FAILED)]
    assert 1 == failed.count(damaged.directory_name)
    assert one.drainer.close(30) is False


def test_a_tier_that_cannot_be_looked_at_holds_nothing_up(bench: Callable[..., Bench]) -> None:
    """The next order looks again."""
    one = bench("local", "archive", "root", keep=Keep(last=1, every=2))
    make_checkpoint(one.tiers["archive"], CheckpointKey(1, 2), LEAVES)
    one.tiers["archive"].fail_at("keys", OSError(errno.EIO, "Input/output error"))
    one.save(3)
    assert [3] == one.steps("root")
    one.tiers["archive"].heal()
    one.save(5)
    assert [2, 3, 5] == one.steps("root")
