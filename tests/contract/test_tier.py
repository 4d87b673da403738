"""What every tier promises, run over each implementation."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

from hpc_ckpt import fsio
from hpc_ckpt.errors import CorruptCheckpoint, Fenced, NoCheckpoint
from hpc_ckpt.format.defects import DefectKind
from hpc_ckpt.format.image import lay_out
from hpc_ckpt.rundir import MANIFEST_NAME, CheckpointKey
from hpc_ckpt.testing import FaultyTier, PlainLeaf, image_of, make_checkpoint, plain_manifest
from hpc_ckpt.tiers.base import Tier
from hpc_ckpt.tiers.directory import DirectoryTier

KEY = CheckpointKey(1, 10)
LEAVES = [PlainLeaf("w", bytes(range(256)) * 40), PlainLeaf("b", bytes(64), "F64")]
OTHER = [PlainLeaf("w", bytes(range(256)) * 40), PlainLeaf("b", bytes(63) + b"\1", "F64")]
FIRST, LAST = (fsio.KILL_POINTS.index(p) for p in ("stage.created", "commit.guarded"))
BEFORE_THE_RENAME = fsio.KILL_POINTS[FIRST : LAST + 1]
TIERS: dict[str, Callable[[Path], DirectoryTier]] = {
    "directory": lambda path: DirectoryTier(path, chunk=4096),
    "faulty, without faults": lambda path: FaultyTier(path, chunk=4096),
}


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> DirectoryTier:
    return TIERS[request.param](tmp_path / "checkpoints")


@pytest.fixture(autouse=True)
def _no_observer_is_left() -> Iterator[None]:
    yield
    fsio.observe(None)


def leftovers(tier: DirectoryTier) -> list[str]:
    return [name for name in fsio.names_in(tier.path) if name.startswith(".")]


def abandon(tier: DirectoryTier, key: CheckpointKey) -> str:
    """What a killed writer leaves: a staging directory nobody will finish."""
    staging = tier.stage(key)
    staging.__enter__()
    (layout,) = lay_out(LEAVES)
    staging.write_shard(layout, image_of(layout, LEAVES))
    return staging.path.name


def test_a_tier_is_a_tier(tier: DirectoryTier) -> None:
    """The protocol, as a type checker and a person would read it."""
    checked: Tier = tier
    assert checked.name == "shared"


# ── write and read back ───────────────────────────────────────────────────────────────────
def test_what_was_committed_is_read_back(tier: DirectoryTier) -> None:
    """Bytes, dtypes, shapes and the manifest; an alias gives the leaf it stands for."""
    bodies = ({"leaf": "w"}, {"leaf": "b"}, {"leaf": "tied", "tied": "w"})
    tree = [{"$tensor": body} for body in bodies]
    committed = make_checkpoint(tier, KEY, LEAVES, tree=tree, aliases={"tied": "w"}, epoch=3)
    assert (committed.key, committed.reused) == (KEY, False)
    assert committed.size == sum(p.stat().st_size for p in committed.path.iterdir())
    opened = tier.open(KEY)
    assert (opened.path, opened.manifest.epoch) == (tier.path_of(KEY), 3)
    assert {name: bytes(opened.leaf(name)) for name in ("w", "b", "tied")} == {
        "w": LEAVES[0].data,
        "b": LEAVES[1].data,
        "tied": LEAVES[0].data,
    }
    assert opened.leaf_info("b") == ("F64", (8,))
    assert tier.manifest(KEY) == opened.manifest
    assert (tier.keys(), tier.verify(KEY), leftovers(tier)) == ([KEY], [], [])


def test_the_shards_open_in_any_tool(tier: DirectoryTier) -> None:
    """Split or not, each is a valid safetensors file."""
    leaves = [PlainLeaf(f"layer.{n}", bytes([n])) for n in range(100)]
    committed = make_checkpoint(tier, KEY, leaves, header_cap=4096)
    shards = sorted(committed.path.glob("*.safetensors"))
    assert len(shards) > 1
    found = {n: a.tobytes() for p in shards for n, a in safetensors.numpy.load_file(p).items()}
    assert found == {leaf.name: leaf.data for leaf in leaves}
    assert bytes(tier.open(KEY).leaf("layer.77")) == bytes([77])


def test_a_checkpoint_without_leaves_is_a_checkpoint(tier: DirectoryTier) -> None:
    """State may be nothing but numbers in the tree."""
    make_checkpoint(tier, KEY, [], tree={"step": 10})
    assert tier.verify(KEY) == []
    assert tier.open(KEY).manifest.tree == {"step": 10}


def test_leaves_are_views_of_one_buffer_per_shard(tier: DirectoryTier) -> None:
    """Nothing is copied: what is written through one view is seen through the next."""
    make_checkpoint(tier, KEY, LEAVES)
    opened = tier.open(KEY)
    opened.leaf("w")[0] = 99
    assert opened.leaf("w")[0] == 99
    with pytest.raises(KeyError):
        opened.leaf("unknown")


def test_what_is_handed_out_is_what_was_hashed(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that gives another header the second time is not believed."""
    committed = make_checkpoint(tier, KEY, LEAVES)
    reader = tier.reader(KEY)
    (place,) = reader.raw
    header = reader.raw[place]
    reader.raw[place] = header.replace(b'"w"', b'"v"')
    assert header != reader.raw[place]
    with pytest.raises(CorruptCheckpoint, match="read twice"):
        reader.load()
    reader.raw[place] = header
    assert committed.path == reader.load().path


@pytest.mark.parametrize("umask", [0o000, 0o177])
def test_directories_and_files_are_private(tier: DirectoryTier, umask: int) -> None:
    """0700 and 0600, whatever the umask."""
    before = os.umask(umask)
    try:
        committed = make_checkpoint(tier, KEY, LEAVES)
        tier.pin(KEY)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in committed.path.iterdir()}
    directories = [stat.S_IMODE(p.stat().st_mode) for p in (tier.path, committed.path)]
    assert (modes, directories) == ({0o600}, [0o700, 0o700])


# ── keys ──────────────────────────────────────────────────────────────────────────────────
def test_keys_come_oldest_first_and_pass_over_strangers(tier: DirectoryTier) -> None:
    """(generation, step, revision); temporary and foreign names are not checkpoints."""
    keys = [CheckpointKey(2, 5), CheckpointKey(1, 30), CheckpointKey(1, 20)]
    for key in keys:
        make_checkpoint(tier, key, LEAVES)
    abandon(tier, CheckpointKey(1, 40))
    (tier.path / "notes").mkdir()
    (tier.path / "step-1-g1").mkdir()
    assert tier.keys() == sorted(keys) == keys[::-1]


def test_an_absent_tier_has_no_keys_and_nothing_to_sweep(tier: DirectoryTier) -> None:
    """Looking does not create the directory."""
    assert tier.keys() == []
    tier.sweep(99)
    tier.remove(KEY)
    assert not tier.path.exists()


# ── commit ────────────────────────────────────────────────────────────────────────────────
def test_nothing_is_visible_before_the_commit(tier: DirectoryTier) -> None:
    """A reader sees a checkpoint whole or not at all; the guard runs at the last moment."""
    seen: list[tuple[list[CheckpointKey], bool]] = []

    def guard() -> None:
        (staging,) = leftovers(tier)
        seen.append((tier.keys(), (tier.path / staging / MANIFEST_NAME).exists()))

    make_checkpoint(tier, KEY, LEAVES, guard=guard)
    assert seen == [([], True)]
    assert tier.keys() == [KEY]


def test_the_steps_of_a_commit_come_in_their_order(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards, manifest, staging directory, guard, rename, parent: each durable before the next."""
    tier.path.mkdir()
    seen: list[str] = []
    real = os.fsync

    def recording(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        seen.append("sync " + ("staging" if name.startswith(".tmp-") else name))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    fsio.observe(seen.append)
    make_checkpoint(tier, KEY, [PlainLeaf("b", b"x")], guard=lambda: seen.append("guard"))
    assert seen[seen.index("stage.created") :] == [
        "stage.created",
        "shard.opened",
        "shard.chunk",
        "shard.chunk",
        "shard.written",
        "sync rank-00000.safetensors",
        "shard.synced",
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
    ]


def test_a_fenced_writer_publishes_nothing(tier: DirectoryTier) -> None:
    """The guard raises, the error arrives as it is, and no trace remains."""

    def guard() -> None:
        raise Fenced(1, 2)

    with pytest.raises(Fenced):
        make_checkpoint(tier, KEY, LEAVES, guard=guard)
    assert (tier.keys(), leftovers(tier)) == ([], [])


def test_leaving_without_a_commit_leaves_nothing(tier: DirectoryTier) -> None:
    """With or without an exception."""
    (layout,) = lay_out(LEAVES)
    with tier.stage(KEY) as staging:
        staging.write_shard(layout, image_of(layout, LEAVES))
    with pytest.raises(ZeroDivisionError), tier.stage(KEY):
        raise ZeroDivisionError
    assert fsio.names_in(tier.path) == []


def test_the_same_state_at_the_same_key_is_reused(tier: DirectoryTier) -> None:
    """A second save at one step with equal digests adds nothing; the guard is still asked."""
    first = make_checkpoint(tier, KEY, LEAVES)
    asked: list[int] = []
    second = make_checkpoint(
        tier, KEY, LEAVES, reason="signal", metrics={"loss": 1.0}, guard=lambda: asked.append(1)
    )
    assert (second.key, second.path, second.size) == (first.key, first.path, first.size)
    assert (second.reused, asked) == (True, [1])
    assert (tier.keys(), leftovers(tier)) == ([KEY], [])


def test_another_state_at_the_same_key_is_the_next_revision(tier: DirectoryTier) -> None:
    """Never overwritten; -r1 is newer, and its manifest says so."""
    make_checkpoint(tier, KEY, LEAVES)
    second = make_checkpoint(tier, KEY, OTHER)
    third = make_checkpoint(tier, KEY, LEAVES)
    assert [second.key.revision, third.key.revision] == [1, 2]
    assert tier.manifest(third.key).revision == 2
    assert [tier.verify(key) for key in (KEY, second.key, third.key)] == [[], [], []]
    assert bytes(tier.open(max(tier.keys())).leaf("b")) == LEAVES[1].data


def test_only_the_newest_revision_is_reused(tier: DirectoryTier) -> None:
    """Reusing an older one would leave a different state as the newest."""
    make_checkpoint(tier, KEY, LEAVES)
    make_checkpoint(tier, KEY, OTHER)
    again = make_checkpoint(tier, KEY, OTHER)
    assert (again.key.revision, again.reused) == (1, True)


def test_a_damaged_checkpoint_is_not_reused(tier: DirectoryTier) -> None:
    """Its manifest says the same, its bytes no longer do: the good copy must not be dropped."""
    first = make_checkpoint(tier, KEY, LEAVES)
    shard = first.path / "rank-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    second = make_checkpoint(tier, KEY, LEAVES)
    assert (second.key.revision, second.reused) == (1, False)
    assert tier.verify(second.key) == []


def test_a_name_taken_at_the_last_moment_gives_the_next_revision(tier: DirectoryTier) -> None:
    """The rename itself refuses an occupied name, and the commit goes on beside it."""
    intruder = tier.path_of(KEY)

    def guard() -> None:
        if not intruder.exists():
            intruder.mkdir()
            (intruder / "something").write_bytes(b"")

    committed = make_checkpoint(tier, KEY, LEAVES, guard=guard)
    assert committed.key.revision == 1
    assert tier.verify(committed.key) == []
    assert (intruder / "something").exists()


def test_a_rename_that_worked_and_says_it_failed_is_a_commit(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS may repeat a rename whose answer was lost; the second finds the source gone."""
    real = Path.rename

    def twice(self: Path, target: Path) -> Path:
        real(self, target)
        return real(self, target)

    monkeypatch.setattr(Path, "rename", twice)
    assert make_checkpoint(tier, KEY, LEAVES).key == KEY
    assert tier.verify(KEY) == []


def test_a_manifest_that_does_not_fit_what_was_written_is_refused(tier: DirectoryTier) -> None:
    """Another step, a shard too few or too many: never committed."""
    (layout,) = lay_out(LEAVES)
    with tier.stage(KEY) as staging:
        shard = staging.write_shard(layout, image_of(layout, LEAVES))
        with pytest.raises(ValueError, match="staged"):
            staging.commit(plain_manifest(CheckpointKey(1, 11), [shard]), lambda: None)
    with tier.stage(KEY) as staging, pytest.raises(ValueError, match="other shards"):
        staging.commit(plain_manifest(KEY, [shard]), lambda: None)
    assert fsio.names_in(tier.path) == []


def test_an_image_that_does_not_fit_its_layout_is_refused(tier: DirectoryTier) -> None:
    """Too short, too long, or without its header; padding to a whole page is cut."""
    (layout,) = lay_out(LEAVES)
    image = image_of(layout, LEAVES)
    padded = memoryview(bytes(image) + bytes(-len(image) % 4096))
    with tier.stage(KEY) as staging:
        for wrong in (image[:-1], memoryview(bytes(image) + bytes(4096))):
            with pytest.raises(ValueError, match="laid out"):
                staging.write_shard(layout, wrong)
        with pytest.raises(ValueError, match="header"):
            staging.write_shard(layout, memoryview(bytes(layout.size)))
        shard = staging.write_shard(layout, padded)
        committed = staging.commit(plain_manifest(KEY, [shard]), lambda: None)
    assert (committed.path / layout.file_name).read_bytes() == bytes(image)


# ── errors of the file system ─────────────────────────────────────────────────────────────
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("point", BEFORE_THE_RENAME)
def test_an_error_before_the_rename_leaves_no_trace(
    tier: DirectoryTier, point: str, number: int
) -> None:
    """It arrives as it is; the older checkpoint stands, and the next save works."""
    make_checkpoint(tier, KEY, LEAVES)
    met: list[str] = []

    def fail(reached: str) -> None:
        if reached == point:
            met.append(point)
            raise OSError(number, os.strerror(number))

    newer = CheckpointKey(1, 20)
    fsio.observe(fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        make_checkpoint(tier, newer, OTHER)
    fsio.observe(None)
    assert {point} == set(met)  # two threads may both come by
    assert (tier.keys(), tier.verify(KEY), leftovers(tier)) == ([KEY], [], [])
    assert make_checkpoint(tier, newer, OTHER).key == newer


def test_a_real_short_file_is_an_error_and_not_a_checkpoint(tier: DirectoryTier) -> None:
    """A limit of the kernel cuts the write off in the middle of a shard."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))
    try:
        with pytest.raises(OSError) as caught:
            make_checkpoint(tier, KEY, LEAVES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert fsio.names_in(tier.path) == []


def test_a_failed_sync_after_the_rename_is_told_and_mended_by_the_next_save(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is visible but perhaps not durable: the caller must not believe it is."""

    def fail(reached: str) -> None:
        if reached == "commit.renamed":
            raise OSError(errno.EIO, "cannot sync")

    fsio.observe(fail)
    with pytest.raises(OSError, match="cannot sync"):
        make_checkpoint(tier, KEY, LEAVES)
    assert tier.verify(KEY) == []
    synced: list[Path] = []
    real = fsio.sync_directory
    monkeypatch.setattr(fsio, "sync_directory", lambda path: (synced.append(path), real(path)))
    fsio.observe(None)
    assert make_checkpoint(tier, KEY, LEAVES).reused
    assert synced[-1] == tier.path


# ── concurrent removal ────────────────────────────────────────────────────────────────────
def test_a_checkpoint_that_is_not_there_is_absent_and_not_broken(tier: DirectoryTier) -> None:
    """A reader that meets ENOENT chooses again."""
    for read in (tier.open, tier.manifest, tier.pin):
        with pytest.raises(NoCheckpoint):
            read(KEY)
    assert [defect.kind for defect in tier.verify(KEY)] == [DefectKind.MANIFEST_MISSING]
    assert tier.pinned(KEY) is False


def test_a_checkpoint_removed_while_it_is_read_is_absent(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest was read, then retention of another process came."""
    make_checkpoint(tier, KEY, LEAVES)
    real = os.open

    def removing(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if str(path).endswith(".safetensors"):
            monkeypatch.undo()
            tier.remove(KEY)
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", removing)
    with pytest.raises(NoCheckpoint):
        tier.open(KEY)


def test_a_broken_checkpoint_says_what_is_broken(tier: DirectoryTier) -> None:
    """Nothing broken is ever loaded."""
    committed = make_checkpoint(tier, KEY, LEAVES)
    (committed.path / "rank-00000.safetensors").unlink()
    with pytest.raises(CorruptCheckpoint, match="shard-missing") as caught:
        tier.open(KEY)
    assert list(caught.value.defects) == tier.verify(KEY)


# ── remove and sweep ──────────────────────────────────────────────────────────────────────
def test_remove_takes_one_checkpoint_and_nothing_else(tier: DirectoryTier) -> None:
    """Also one that is damaged or has a directory in it; twice is fine."""
    other = CheckpointKey(1, 20)
    make_checkpoint(tier, KEY, LEAVES)
    make_checkpoint(tier, other, LEAVES)
    (tier.path_of(KEY) / "inner").mkdir()
    tier.remove(KEY)
    tier.remove(KEY)
    assert (tier.keys(), tier.verify(other), leftovers(tier)) == ([other], [], [])


def test_what_is_pinned_is_not_removed(tier: DirectoryTier) -> None:
    """Whenever the pin was set: nobody who removes knows better."""
    make_checkpoint(tier, KEY, LEAVES)
    tier.pin(KEY)
    assert (False, [KEY], []) == (tier.remove(KEY), tier.keys(), tier.verify(KEY))
    tier.pin(KEY, pinned=False)
    assert (True, []) == (tier.remove(KEY), tier.keys())


@pytest.mark.parametrize("operation", ["sweep", "recover"])
def test_a_pin_survives_a_kill_in_the_middle_of_a_removal(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """Pinned while the manifests were read, hidden, and killed before it was put back."""
    make_checkpoint(tier, KEY, LEAVES)
    monkeypatch.setattr(tier, "_is_held", tier.pin)

    def die(point: str) -> None:
        if point == "remove.renamed":
            raise KeyboardInterrupt

    fsio.observe(die)
    with pytest.raises(KeyboardInterrupt):
        tier.remove(KEY)
    fsio.observe(None)
    assert ([], 1) == (tier.keys(), len(leftovers(tier)))
    fresh = DirectoryTier(tier.path)
    fresh.sweep(1) if operation == "sweep" else fresh.recover()
    assert ([KEY], True, []) == (fresh.keys(), fresh.pinned(KEY), fresh.verify(KEY))
    assert [] == leftovers(tier)


def test_a_sweep_leaves_a_removal_under_way_alone(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread: what it is about to put back is its own business."""
    make_checkpoint(tier, KEY, LEAVES)
    monkeypatch.setattr(tier, "_is_held", tier.pin)
    fsio.observe(lambda point: tier.sweep(1) if point == "remove.renamed" else None)
    assert (False, [KEY]) == (tier.remove(KEY), tier.keys())


def test_a_removed_checkpoint_vanishes_before_its_files_go(tier: DirectoryTier) -> None:
    """Renamed first: no reader meets a half-deleted checkpoint."""
    make_checkpoint(tier, KEY, LEAVES)
    seen: list[tuple[str, list[CheckpointKey]]] = []
    fsio.observe(lambda point: seen.append((point, tier.keys())))
    tier.remove(KEY)
    assert {point for point, _ in seen} == {"remove.renamed", "remove.entry", "remove.deleted"}
    assert all(keys == [] for _, keys in seen)


def test_the_new_name_is_durable_before_the_first_file_goes(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a crash could bring back the old name with half of its files."""
    make_checkpoint(tier, KEY, LEAVES)
    seen: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append("sync"))
    fsio.observe(seen.append)
    tier.remove(KEY)
    assert seen[:3] == ["remove.renamed", "sync", "remove.entry"]


def test_sweep_takes_leftovers_up_to_its_generation(tier: DirectoryTier) -> None:
    """Newer generations may still be writing; checkpoints and foreign files are not leftovers."""
    make_checkpoint(tier, CheckpointKey(2, 10), LEAVES)
    abandon(tier, CheckpointKey(1, 5))
    abandon(tier, CheckpointKey(2, 5))
    newer = abandon(tier, CheckpointKey(3, 5))
    (tier.path / ".trash-g00000001-step-000000001-g00000001-x").mkdir()
    (tier.path / ".hidden").mkdir()
    DirectoryTier(tier.path).sweep(2)
    assert leftovers(tier) == [".hidden", newer]
    assert tier.keys() == [CheckpointKey(2, 10)]


def test_sweep_spares_what_this_tier_is_writing(tier: DirectoryTier) -> None:
    """A save under way in another thread of the same generation goes on."""
    (layout,) = lay_out(LEAVES)
    with tier.stage(KEY) as staging:
        tier.sweep(1)
        shard = staging.write_shard(layout, image_of(layout, LEAVES))
        assert staging.commit(plain_manifest(KEY, [shard]), lambda: None).key == KEY


# ── the double ────────────────────────────────────────────────────────────────────────────
def test_a_faulty_tier_fails_where_and_as_often_as_told(tmp_path: Path) -> None:
    """The public double: everything else is the real thing."""
    tier = FaultyTier(tmp_path)
    full = OSError(errno.ENOSPC, "full")
    for operation in ("stage", "write_shard", "commit"):
        tier.fail_at(operation, full, times=1)
        with pytest.raises(OSError, match="full"):
            make_checkpoint(tier, KEY, LEAVES)
        assert fsio.names_in(tmp_path) == []
    make_checkpoint(tier, KEY, LEAVES)
    tier.fail_at("open", full)
    for _ in range(3):
        with pytest.raises(OSError, match="full"):
            tier.open(KEY)
    tier.heal()
    assert tier.open(KEY).manifest.key == KEY
    with pytest.raises(ValueError, match="is not one of"):
        tier.fail_at("explode", full)
