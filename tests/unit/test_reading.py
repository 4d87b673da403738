"""Reading a shard: every byte compared with its digest on the way to where it belongs."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import array
import errno
import fcntl
import os
import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt import fsio
from hpc_ckpt.errors import CorruptCheckpoint, ManifestError, NoCheckpoint
from hpc_ckpt.format import reading
from hpc_ckpt.format.defects import Defect, DefectKind
from hpc_ckpt.format.image import StoredLeaf, lay_out
from hpc_ckpt.format.manifest import ShardRecord
from hpc_ckpt.format.reading import shard_file
from hpc_ckpt.format.verify import Reader, open_reader, verify
from hpc_ckpt.rundir import MANIFEST_NAME, CheckpointKey
from hpc_ckpt.testing import PlainLeaf, image_of, make_checkpoint, plain_manifest
from hpc_ckpt.tiers.directory import DirectoryTier

PAGE, CHUNK = fsio.PAGE, 2 * fsio.PAGE
OLD, KEY = CheckpointKey(1, 10), CheckpointKey(1, 20)
SHARD = "rank-00000.safetensors"
STEADY = "rank-00000.1.safetensors"


def leaf(name: str, size: int, dtype: str = "U8") -> PlainLeaf:
    return PlainLeaf(name, random.Random(name).randbytes(size), dtype)


LEAVES = [
    leaf("over chunks", 3 * CHUNK + 40, "F64"),
    leaf("small", 24, "F64"),
    leaf("to a chunk's end", 5 * CHUNK - 3 * CHUNK - 64 - PAGE, "F64"),
    leaf("exactly two", 2 * CHUNK, "F32"),
    leaf("tiny", 4, "F32"),
    leaf("nothing", 0, "F32"),
    leaf("rest", 2 * CHUNK + 1),
]
"""The header is one page: chunk borders fall inside leaves, between them and at their ends."""


@pytest.fixture
def tier(tmp_path: Path) -> DirectoryTier:
    return DirectoryTier(tmp_path / "checkpoints", chunk=CHUNK)


@pytest.fixture
def reader(tier: DirectoryTier) -> Reader:
    make_checkpoint(tier, KEY, LEAVES)
    return tier.reader(KEY)


@pytest.fixture(params=["cached", "direct", "buffered"])
def path_of_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the bytes come: from the page cache, past it, or through it for want of direct I/O."""
    chosen: str = request.param
    choose(monkeypatch, chosen)
    return chosen


def choose(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(fsio, "is_cached", lambda descriptor, size: path == "cached")
    if path == "buffered":
        monkeypatch.setattr(fsio, "set_direct", lambda descriptor, direct: not direct)


class Kernel:
    """os.preadv(), which notes which reads were direct and fails or stops short when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.direct: list[bool] = []
        self.before: Callable[[bool], None] = lambda direct: None
        self.most = 1 << 30
        self._real = os.preadv
        monkeypatch.setattr(os, "preadv", self._preadv)

    def _preadv(self, descriptor: int, views: list[Any], offset: int, *flags: int) -> int:
        if flags:
            return self._real(descriptor, views, offset, *flags)
        direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        self.direct.append(direct)
        self.before(direct)
        return self._real(descriptor, [view[: self.most] for view in views], offset)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


# ── targets ───────────────────────────────────────────────────────────────────────────────
def in_pages(size: int) -> memoryview:
    return memoryview(fsio.allocate(size))[:size]


def beside_a_page(size: int) -> memoryview:
    return memoryview(fsio.allocate(size + 1))[1 : size + 1]


def in_words(size: int) -> memoryview:
    """A view whose items are wider than a byte."""
    whole = memoryview(array.array("I", bytes(size // 4 * 4)))
    return whole if size % 4 == 0 and size else memoryview(bytearray(size))


MEMORY: dict[str, Callable[[int], memoryview]] = {
    "bytearray": lambda size: memoryview(bytearray(size)),
    "pages": in_pages,
    "beside a page": beside_a_page,
    "words": in_words,
}


def targets_for(leaves: list[PlainLeaf], memory: str = "bytearray") -> dict[str, memoryview]:
    return {one.name: MEMORY[memory](one.nbytes) for one in leaves}


def content(targets: dict[str, memoryview]) -> dict[str, bytes]:
    return {name: bytes(target) for name, target in targets.items()}


def saved(leaves: list[PlainLeaf]) -> dict[str, bytes]:
    return {one.name: one.data for one in leaves}


@pytest.mark.parametrize("memory", MEMORY)
def test_every_leaf_is_filled(reader: Reader, path_of_bytes: str, memory: str) -> None:
    """Whichever way the bytes come, and wherever they go."""
    targets = targets_for(LEAVES, memory)
    reader.fill(targets)
    assert saved(LEAVES) == content(targets)


def test_memory_of_its_own_is_filled(reader: Reader, path_of_bytes: str) -> None:
    """What the reader makes itself lies so that direct I/O can use it."""
    assert saved(LEAVES) == content(reader.read())


@pytest.mark.parametrize("own", [["small"], ["tiny", "rest"], ["over chunks"], [*saved(LEAVES)]])
def test_some_memory_is_the_callers_and_the_rest_is_new(
    reader: Reader, path_of_bytes: str, own: list[str]
) -> None:
    """Both are filled; what was given is used, and nothing beside it is written to."""
    given = {name: view for name, view in targets_for(LEAVES).items() if name in own}
    places = reader.read(given)
    assert saved(LEAVES) == content(places)
    assert all(places[name] is given[name] for name in own)


def test_new_memory_of_neighbours_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves that follow each other share pages up to a limit; one that is kept keeps few."""
    monkeypatch.setattr(reading, "_ARENA", 10 * PAGE)
    leaves = [
        (str(n), StoredLeaf("U8", (4 * PAGE,), start, start + 4 * PAGE))
        for n, start in enumerate(range(PAGE + 64, 26 * PAGE, 4 * PAGE))
    ]
    places, spans = reading.arenas([*leaves[:3], *leaves[4:]])
    assert [(PAGE + 64, 13 * PAGE + 64), (17 * PAGE + 64, 29 * PAGE + 64)] == [
        (span.start, span.end) for span in spans
    ]
    assert all(
        fsio.address(places[name]) % PAGE == leaf.start % PAGE
        for name, leaf in leaves
        if name in places
    )


def test_new_memory_is_aligned_as_torchs_own(reader: Reader, path_of_bytes: str) -> None:
    """Otherwise sums over what was restored differ in their last bits."""
    places = reader.read({})
    assert {0} == {fsio.address(view) % 64 for view in places.values() if view.nbytes}


@pytest.mark.parametrize(
    "wanted", [[], ["small"], ["tiny", "rest"], ["over chunks", "exactly two"]]
)
def test_only_what_is_wanted_is_filled(
    reader: Reader, path_of_bytes: str, wanted: list[str]
) -> None:
    """Leaves without a target are checked and go nowhere."""
    targets = {name: view for name, view in targets_for(LEAVES).items() if name in wanted}
    reader.fill(targets)
    assert {one.name: one.data for one in LEAVES if one.name in wanted} == content(targets)


def test_nothing_beside_a_target_is_touched(reader: Reader, path_of_bytes: str) -> None:
    """The program's memory lies around it, also in the target's own pages."""
    for one in LEAVES:
        for start in (1, PAGE):
            memory = memoryview(fsio.allocate(one.nbytes + 2 * PAGE))
            memory[:] = b"\x55" * len(memory)
            end = start + one.nbytes
            reader.fill({one.name: memory[start:end]})
            around = bytes(memory[:start]) + bytes(memory[end:])
            assert (one.data, {0x55}) == (bytes(memory[start:end]), set(around))


def test_a_target_of_another_size_is_a_mistake_of_the_caller(reader: Reader) -> None:
    """Found before a byte is read."""
    with pytest.raises(ValueError, match="'small': 25 bytes given for 24"):
        reader.fill({"small": memoryview(bytearray(25))})


def test_a_name_that_is_not_stored_is_passed_over(reader: Reader) -> None:
    """An alias, say: its bytes are those of another leaf."""
    target = memoryview(bytearray(3))
    reader.fill({"unknown": target})
    assert bytes(3) == bytes(target)


@pytest.mark.parametrize("size", [CHUNK - PAGE - 1, CHUNK - PAGE, CHUNK - PAGE + 1, 3 * CHUNK])
def test_files_end_anywhere_in_a_chunk(tier: DirectoryTier, path_of_bytes: str, size: int) -> None:
    """The last page is read whole and used in part."""
    leaves = [leaf("w", size)]
    make_checkpoint(tier, KEY, leaves)
    targets = targets_for(leaves)
    tier.reader(KEY).fill(targets)
    assert (saved(leaves), []) == (content(targets), tier.verify(KEY))


def test_a_large_leaf_is_read_past_the_page_cache_into_place(
    tier: DirectoryTier, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every chunk by one direct read, if the file system has them; the bytes are right."""
    leaves = [leaf("w", 1024**2 + 5 * PAGE + 3)]
    make_checkpoint(tier, KEY, leaves)
    choose(monkeypatch, "direct")
    reader = tier.reader(KEY)
    kernel.direct.clear()
    assert saved(leaves) == content(reader.read())
    assert len(reader.manifest.shards[0].digests) == len(kernel.direct)
    with shard_file(reader.path, reader.manifest.shards[0]) as descriptor:
        assert {fsio.set_direct(descriptor, direct=True)} == set(kernel.direct)


# ── what the kernel says ──────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
@pytest.mark.parametrize("memory", MEMORY)
def test_a_file_system_may_refuse_a_direct_read(
    reader: Reader, kernel: Kernel, monkeypatch: pytest.MonkeyPatch, memory: str, number: int
) -> None:
    """Some take the flag and say so only then; what was refused is read again."""

    def refuse(direct: bool) -> None:
        if direct:
            raise OSError(number, os.strerror(number))

    choose(monkeypatch, "direct")
    kernel.before = refuse
    targets = targets_for(LEAVES, memory)
    reader.fill(targets)
    assert saved(LEAVES) == content(targets)


def test_a_read_may_give_less_than_was_asked_for(
    reader: Reader, kernel: Kernel, path_of_bytes: str
) -> None:
    """The rest is read next."""
    kernel.most = PAGE
    targets = targets_for(LEAVES)
    reader.fill(targets)
    assert saved(LEAVES) == content(targets)


def test_an_error_of_the_disk_is_a_defect(
    reader: Reader, kernel: Kernel, path_of_bytes: str
) -> None:
    """Named with the file and the kernel's own words; an older checkpoint may be whole."""

    def fail(direct: bool) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    kernel.before = fail
    with pytest.raises(CorruptCheckpoint) as caught:
        reader.fill(targets_for(LEAVES))
    assert (Defect(DefectKind.UNREADABLE, SHARD, os.strerror(errno.EIO)),) == caught.value.defects


def test_an_error_of_a_direct_read_is_not_read_around(
    reader: Reader, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails is not taken for one without direct I/O."""
    with shard_file(reader.path, reader.manifest.shards[0]) as descriptor:
        if not fsio.set_direct(descriptor, direct=True):
            pytest.skip("this file system has no direct I/O")

    def fail(direct: bool) -> None:
        if direct:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    choose(monkeypatch, "direct")
    kernel.before = fail
    assert [(DefectKind.UNREADABLE, SHARD)] == defects_of(lambda: reader.fill({}))


# ── damage ────────────────────────────────────────────────────────────────────────────────
def flip(path: Path, *places: int) -> None:
    data = bytearray(path.read_bytes())
    for place in places:
        data[place] ^= 0x10
    path.write_bytes(data)


def defects_of(call: Callable[[], object]) -> list[tuple[DefectKind, str]]:
    with pytest.raises(CorruptCheckpoint) as caught:
        call()
    found = [defect for defect in caught.value.defects if isinstance(defect, Defect)]
    return [(defect.kind, defect.file) for defect in found]


def test_one_flipped_bit_is_found_in_every_page(reader: Reader, path_of_bytes: str) -> None:
    """Also where nobody wants the bytes; the defect names its chunk."""
    path = reader.path / SHARD
    size = path.stat().st_size
    for place in [*range(0, size, PAGE), size - 1]:
        flip(path, place)
        with pytest.raises(CorruptCheckpoint) as caught:
            reader.fill(targets_for(LEAVES[:2]))
        (defect,) = caught.value.defects
        assert isinstance(defect, Defect)
        assert (DefectKind.CHUNK_DIGEST, SHARD) == (defect.kind, defect.file)
        assert defect.detail.startswith(f"chunk {place // CHUNK} ")
        flip(path, place)
    reader.fill(targets_for(LEAVES))


def test_every_damaged_chunk_is_told_in_order(reader: Reader, path_of_bytes: str) -> None:
    """Two threads read; the list is as if it were one."""
    flip(reader.path / SHARD, 5 * CHUNK, CHUNK + 5, 3 * CHUNK - 1)
    with pytest.raises(CorruptCheckpoint) as caught:
        reader.fill({})
    told = [str(defect).split()[3] for defect in caught.value.defects]
    assert ["1", "2", "5"] == told


def test_a_flipped_bit_in_a_small_leaf_is_reported(reader: Reader, path_of_bytes: str) -> None:
    """The targets may have been written to by then: the defect is what says so."""
    flip(reader.path / SHARD, reader.headers[SHARD]["small"].start)
    target = memoryview(bytearray(24))
    assert [(DefectKind.CHUNK_DIGEST, SHARD)] == defects_of(lambda: reader.fill({"small": target}))


@pytest.mark.parametrize("left", [0, PAGE, CHUNK, 4 * CHUNK + 100, 5 * CHUNK - 1])
def test_a_file_that_ends_while_it_is_read(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """Cut by somebody after its size was looked at: a defect, on every way of reading."""
    path = reader.path / SHARD
    whole = path.read_bytes()

    def cut_and_tell(cached: bool) -> bool:
        os.truncate(path, left)
        return cached

    for cached in (True, False):
        path.write_bytes(whole)
        monkeypatch.setattr(fsio, "is_cached", lambda fd, size, told=cached: cut_and_tell(told))
        assert [(DefectKind.SHARD_SIZE, SHARD)] == defects_of(
            lambda: reader.fill(targets_for(LEAVES))
        )


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_not_read(reader: Reader, kernel: Kernel, change: int) -> None:
    """Found before anything is allocated for it."""
    path = reader.path / SHARD
    os.truncate(path, path.stat().st_size + change)
    kernel.direct.clear()
    assert [(DefectKind.SHARD_SIZE, SHARD)] == defects_of(lambda: reader.fill({}))
    assert [] == kernel.direct


def test_a_checkpoint_that_goes_while_it_is_read_is_no_checkpoint(reader: Reader) -> None:
    """Removed by a writer that has moved on: not a defect."""
    shutil.rmtree(reader.path)
    with pytest.raises(NoCheckpoint):
        reader.fill({})


def test_a_header_that_changes_between_two_reads_is_not_believed(
    tier: DirectoryTier, path_of_bytes: str
) -> None:
    """What was parsed must be what was hashed."""
    make_checkpoint(tier, KEY, LEAVES)
    path = tier.path_of(KEY) / SHARD
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"small"', b'"smell"'))
    with pytest.raises(CorruptCheckpoint):
        open_reader(tier.path_of(KEY))
    path.write_bytes(whole)
    reader = tier.reader(KEY)
    reader.raw[SHARD] = reader.raw[SHARD].replace(b'"small"', b'"smell"')
    assert [(DefectKind.SHARD_HEADER, SHARD)] == defects_of(lambda: reader.fill({}))


@pytest.mark.parametrize("number", range(4))
def test_what_is_not_a_regular_file_is_not_read(reader: Reader, number: int) -> None:
    """A link, a FIFO (which would hang), a directory, nothing at all: each is named."""
    path = reader.path / SHARD
    elsewhere = reader.path.parent / "elsewhere"
    path.rename(elsewhere)
    put: list[Callable[[], object]] = [
        lambda: path.symlink_to(elsewhere),
        lambda: os.mkfifo(path),
        path.mkdir,
        lambda: None,
    ]
    put[number]()
    kind = DefectKind.SHARD_MISSING if number == 3 else DefectKind.UNREADABLE
    assert [(kind, SHARD)] == defects_of(lambda: reader.fill({}))
    assert [(kind, SHARD)] == defects_of(lambda: open_reader(reader.path))


def test_a_link_to_a_checkpoint_is_that_checkpoint(reader: Reader, tmp_path: Path) -> None:
    """`ln -s step-… best`: a path that the user gives is followed, as it was before."""
    (tmp_path / "best").symlink_to(reader.path)
    assert [] == verify(tmp_path / "best")
    assert LEAVES[0].data == bytes(open_reader(tmp_path / "best").load().leaf("over chunks"))


# ── shards that an older checkpoint holds ─────────────────────────────────────────────────
MOVING, STILL = [leaf("moving", 100)], [leaf("still", 2 * CHUNK + 7)]


def make_holder(tier: DirectoryTier, key: CheckpointKey = OLD) -> ShardRecord:
    """A checkpoint of two shards; returns what others need to refer to the second."""
    moving, still = lay_out(MOVING), lay_out(STILL, first_part=1)
    with tier.stage(key) as staging:
        records = [
            staging.write_shard(layout, image_of(layout, [*MOVING, *STILL]))
            for layout in (*moving, *still)
        ]
        tree = [{"$tensor": {"leaf": name}} for name in ("moving", "still")]
        staging.commit(plain_manifest(key, records, tree=tree), lambda: None)
    return replace(records[1], holder=key.directory_name)


def make_dependent(tier: DirectoryTier, record: ShardRecord, key: CheckpointKey = KEY) -> Path:
    """A checkpoint that writes one shard and refers to another."""
    (layout,) = lay_out(MOVING)
    with tier.stage(key) as staging:
        own = staging.write_shard(layout, image_of(layout, MOVING))
        staging.refer(record)
        tree = [{"$tensor": {"leaf": name}} for name in ("moving", "still")]
        manifest = plain_manifest(key, [own, record], tree=tree)
        return staging.commit(manifest, lambda: None).path


@pytest.fixture
def dependent(tier: DirectoryTier) -> Path:
    return make_dependent(tier, make_holder(tier))


HELD = f"{OLD.directory_name}/{STEADY}"


def test_a_held_shard_is_read_where_it_lies(dependent: Path, path_of_bytes: str) -> None:
    """The checkpoint has no file of it, and is whole."""
    assert sorted([MANIFEST_NAME, SHARD]) == fsio.names_in(dependent)
    reader = open_reader(dependent)
    targets = targets_for([*MOVING, *STILL])
    reader.fill(targets)
    assert saved([*MOVING, *STILL]) == content(targets)
    assert [] == verify(dependent)
    own, held = reader.manifest.shards
    assert ({"moving"}, {"still"}) == (reader.leaf_names(own), reader.leaf_names(held))
    assert (SHARD, HELD) == (own.place, held.place)


def test_a_link_to_a_dependent_is_that_checkpoint(dependent: Path, tmp_path: Path) -> None:
    """What it refers to lies where the checkpoint itself lies."""
    (tmp_path / "best").symlink_to(dependent)
    assert [] == verify(tmp_path / "best")


def test_each_flipped_bit_of_a_held_shard_is_found(dependent: Path, path_of_bytes: str) -> None:
    """By name of its holder, by verify and by whoever restores."""
    reader, path = open_reader(dependent), dependent.parent / HELD
    for place in range(PAGE, path.stat().st_size, PAGE):
        flip(path, place)
        assert [(DefectKind.CHUNK_DIGEST, HELD)] == defects_of(lambda: reader.fill({}))
        assert [(DefectKind.CHUNK_DIGEST, HELD)] == [(d.kind, d.file) for d in verify(dependent)]
        flip(path, place)


def lose_file(holder: Path) -> None:
    (holder / STEADY).unlink()


def cut_file(holder: Path) -> None:
    os.truncate(holder / STEADY, CHUNK)


def link_file(holder: Path) -> None:
    outside = holder.parent.parent / "outside"
    (holder / STEADY).rename(outside)
    (holder / STEADY).symlink_to(outside)


def link_holder(holder: Path) -> None:
    outside = holder.parent.parent / "outside"
    holder.rename(outside)
    holder.symlink_to(outside)


def file_for_holder(holder: Path) -> None:
    shutil.rmtree(holder)
    holder.write_bytes(b"")


def fifo_for_file(holder: Path) -> None:
    (holder / STEADY).unlink()
    os.mkfifo(holder / STEADY)


HARM: dict[str, tuple[Callable[[Path], object], DefectKind]] = {
    "the file is gone": (lose_file, DefectKind.SHARD_MISSING),
    "the holder is gone": (shutil.rmtree, DefectKind.SHARD_MISSING),
    "the file was cut": (cut_file, DefectKind.SHARD_SIZE),
    "the file is a link": (link_file, DefectKind.UNREADABLE),
    "the holder is a link": (link_holder, DefectKind.UNREADABLE),
    "the holder is a file": (file_for_holder, DefectKind.UNREADABLE),
    "the file is a FIFO": (fifo_for_file, DefectKind.UNREADABLE),
}


@pytest.mark.parametrize("case", HARM)
def test_harm_to_a_holder_is_named(dependent: Path, case: str) -> None:
    """The defect says which holder; a link is not followed, though the right bytes lie there."""
    harm, kind = HARM[case]
    reader = open_reader(dependent)
    harm(dependent.parent / OLD.directory_name)
    assert [(kind, HELD)] == [(defect.kind, defect.file) for defect in verify(dependent)]
    assert [(kind, HELD)] == defects_of(lambda: open_reader(dependent))
    assert [(kind, HELD)] == defects_of(lambda: reader.fill({}))


def test_the_same_name_beside_it_is_a_stray(dependent: Path) -> None:
    """A held shard is not looked for in the checkpoint itself, even if something lies there."""
    (dependent / STEADY).write_bytes(b"not it")
    assert [(DefectKind.UNEXPECTED_FILE, STEADY)] == [
        (defect.kind, defect.file) for defect in verify(dependent)
    ]
    open_reader(dependent).fill({})


@pytest.mark.parametrize(
    "holder",
    ["..", ".", "", "/tmp", "../outside", "step-000000010-g00000001/..", "a/b", "step-1-g1",
     "step-000000010-g00000001\n", "step-000000010-g00000001/", 7, ["x"]],
)  # fmt: skip
def test_a_holder_is_the_plain_name_of_a_checkpoint(tier: DirectoryTier, holder: Any) -> None:
    """Nothing that a manifest says leads outside the directory of checkpoints."""
    record = make_holder(tier)
    with pytest.raises(ManifestError, match="shards: in"):
        replace(record, holder=holder)
    with pytest.raises(ManifestError, match="shards: in"):
        ShardRecord.from_json({**replace(record, holder=None).to_json(), "in": holder})


def test_a_record_says_its_holder_or_nothing(tier: DirectoryTier) -> None:
    """JSON and back; null is not a holder, and the key comes last."""
    held = make_holder(tier)
    own = replace(held, holder=None)
    assert [held, own] == [ShardRecord.from_json(one.to_json()) for one in (held, own)]
    assert (True, False) == ("in" in held.to_json(), "in" in own.to_json())
    with pytest.raises(ManifestError, match="in: must be text"):
        ShardRecord.from_json({**own.to_json(), "in": None})
    with pytest.raises(ManifestError, match="exactly"):
        ShardRecord.from_json({"in": OLD.directory_name, **own.to_json()})
    assert held.same_bytes(own)
    assert not held.same_bytes(replace(held, digests=("0" * 32, *held.digests[1:])))


@pytest.mark.parametrize("key", [OLD, CheckpointKey(1, 9), CheckpointKey(0, 99)])
def test_a_holder_is_older(tier: DirectoryTier, key: CheckpointKey) -> None:
    """Nothing can lead back to where it came from."""
    with pytest.raises(ManifestError, match="is not older"):
        plain_manifest(key, [make_holder(tier)])


def test_a_holder_s_holder_is_not_asked(tier: DirectoryTier) -> None:
    """Whoever refers names the one that has the file: the one between may go."""
    record = make_holder(tier)
    between = make_dependent(tier, record)
    newest = make_dependent(tier, record, CheckpointKey(1, 30))
    shutil.rmtree(between)
    assert [] == verify(newest)


def test_two_threads_may_read_one_shard(reader: Reader) -> None:
    """Each has its own buffer: what one reads is not what another compares."""
    results: list[dict[str, bytes]] = []

    def fill() -> None:
        targets = targets_for(LEAVES)
        reader.fill(targets)
        results.append(content(targets))

    threads = [threading.Thread(target=fill) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [saved(LEAVES)] * 4 == results
