"""Damage of every kind to every file of a checkpoint: all of it found, each by its name."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from hpc_ckpt.errors import CheckpointError, CorruptCheckpoint, NewerCheckpoint
from hpc_ckpt.format.defects import DefectKind
from hpc_ckpt.format.verify import open_verified, verify
from hpc_ckpt.rundir import MANIFEST_NAME, CheckpointKey
from hpc_ckpt.testing import PlainLeaf, make_checkpoint
from hpc_ckpt.tiers.directory import DirectoryTier

PAGE = 4096
CHUNK = 8192
TAIL_BYTES = 47
FIRST, SECOND = "rank-00000.safetensors", "rank-00000.1.safetensors"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Three shards of which two are equally large, several chunks each, no zero pages."""
    noise = random.Random(1)
    leaves = [PlainLeaf(f"layer.{n:03}.weight", noise.randbytes(500)) for n in range(130)]
    tier = DirectoryTier(tmp_path, chunk=CHUNK)
    tree = [{"$tensor": {"leaf": leaf.name}} for leaf in leaves]
    path = make_checkpoint(
        tier,
        CheckpointKey(2, 30),
        leaves,
        header_cap=PAGE,
        tree={"model": tree, "tied": {"$tensor": {"leaf": "tied", "tied": leaves[0].name}}},
        aliases={"tied": "layer.000.weight"},
        metrics={"loss": 0.25},
        parent="step-000000020-g00000001",
    ).path
    sizes = sorted(p.stat().st_size for p in path.glob("*.safetensors"))
    assert len(sizes) == 3
    assert sizes[1] == sizes[2] > 2 * CHUNK
    return path


def shards(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("*.safetensors"))


def found(checkpoint: Path) -> list[tuple[DefectKind, str]]:
    """What verify finds; opening must refuse with the same findings, but for stray files."""
    defects = verify(checkpoint)
    broken = [defect for defect in defects if defect.kind is not DefectKind.UNEXPECTED_FILE]
    if [DefectKind.UNSUPPORTED_VERSION] == [defect.kind for defect in broken]:
        with pytest.raises(NewerCheckpoint, match=broken[0].detail):
            open_verified(checkpoint)
    elif broken:
        with pytest.raises(CorruptCheckpoint) as caught:
            open_verified(checkpoint)
        assert list(caught.value.defects) == broken
    else:
        open_verified(checkpoint)
    return [(defect.kind, defect.file) for defect in defects]


def damaged(path: Path, variants: Iterator[bytes]) -> Iterator[bytes]:
    """Put each variant in the file's place, one after the other, and the original back."""
    original = path.read_bytes()
    try:
        for variant in variants:
            path.write_bytes(variant)
            yield variant
    finally:
        path.write_bytes(original)


def flipped(data: bytes, bit: int) -> bytes:
    copy = bytearray(data)
    copy[bit // 8] ^= 1 << bit % 8
    return bytes(copy)


def resigned(checkpoint: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and give it a good digest, as docs/format.md defines it."""
    path = checkpoint / MANIFEST_NAME
    record = json.loads(path.read_bytes())
    del record["digest"]
    edit(record)
    lines = [f'"{k}": {json.dumps(v, separators=(",", ":"))},\n' for k, v in record.items()]
    body = ("{\n" + "".join(lines)).encode()
    path.write_bytes(body + b'"digest": "' + xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n')


def rewrite_shard(checkpoint: Path, name: str, data: bytes) -> None:
    """Replace a shard and let the manifest say so: only its content can be wrong now."""
    (checkpoint / name).write_bytes(data)
    digests = [
        xxhash.xxh3_128_hexdigest(data[start : start + CHUNK])
        for start in range(0, len(data), CHUNK)
    ]

    def edit(record: dict[str, Any]) -> None:
        (shard,) = (shard for shard in record["shards"] if shard["file"] == name)
        shard.update(size=len(data), digests=digests)

    resigned(checkpoint, edit)


# ── sweeps ────────────────────────────────────────────────────────────────────────────────
def test_the_checkpoint_itself_is_sound(checkpoint: Path) -> None:
    """Otherwise everything below would pass for the wrong reason."""
    assert found(checkpoint) == []
    resigned(checkpoint, lambda record: None)
    assert found(checkpoint) == []


def test_one_flipped_bit_in_any_page_of_any_shard_is_found(checkpoint: Path) -> None:
    """By its digest, and the defect names the chunk."""
    noise = random.Random(2)
    count = 0
    for shard in shards(checkpoint):
        data = shard.read_bytes()
        bits = [
            noise.randrange(start, min(start + PAGE, len(data))) * 8 + noise.randrange(8)
            for start in range(0, len(data), PAGE)
        ]
        for bit, _ in zip(bits, damaged(shard, (flipped(data, b) for b in bits)), strict=True):
            assert found(checkpoint) == [(DefectKind.CHUNK_DIGEST, shard.name)]
            assert f"chunk {bit // 8 // CHUNK} " in verify(checkpoint)[0].detail
            count += 1
    assert count == sum(-(-shard.stat().st_size // PAGE) for shard in shards(checkpoint)) > 12


def test_one_flipped_bit_in_any_byte_of_the_manifest_is_found(checkpoint: Path) -> None:
    """Before the digest's line by the digest; in that line by the digest or by its spelling."""
    path = checkpoint / MANIFEST_NAME
    data = path.read_bytes()
    body_bits = (len(data) - TAIL_BYTES) * 8
    bits = [byte * 8 + byte % 8 for byte in range(len(data))]
    bits += range(body_bits - 64, len(data) * 8)
    for bit, _ in zip(bits, damaged(path, (flipped(data, b) for b in bits)), strict=True):
        ((kind, file),) = found(checkpoint)
        assert file == MANIFEST_NAME
        if bit < body_bits:
            assert kind == DefectKind.MANIFEST_DIGEST
        else:
            assert kind in (DefectKind.MANIFEST_DIGEST, DefectKind.MANIFEST_UNREADABLE)


def test_any_truncation_of_a_shard_is_found(checkpoint: Path) -> None:
    """At every page boundary, one byte beside it, and at nothing."""
    for shard in shards(checkpoint):
        data = shard.read_bytes()
        lengths = {0, 1, 7, 8, len(data) - 1}
        lengths |= {page + near for page in range(PAGE, len(data), PAGE) for near in (-1, 0, 1)}
        for _ in damaged(shard, (data[:length] for length in sorted(lengths))):
            assert found(checkpoint) == [(DefectKind.SHARD_SIZE, shard.name)]


def test_a_shard_that_goes_on_is_found(checkpoint: Path) -> None:
    """Also by whole pages of zeros, as an interrupted direct write leaves them."""
    for shard in shards(checkpoint):
        data = shard.read_bytes()
        for _ in damaged(shard, iter([data + b"\0", data + bytes(PAGE), data + data])):
            assert found(checkpoint) == [(DefectKind.SHARD_SIZE, shard.name)]


def test_any_truncation_of_the_manifest_is_found(checkpoint: Path) -> None:
    """Every length from nothing to one byte short."""
    path = checkpoint / MANIFEST_NAME
    data = path.read_bytes()
    for _ in damaged(path, (data[:length] for length in range(len(data)))):
        assert found(checkpoint) == [(DefectKind.MANIFEST_UNREADABLE, MANIFEST_NAME)]


def test_any_zeroed_page_is_found(checkpoint: Path) -> None:
    """What a crash leaves of pages that were allocated and never written."""
    for shard in shards(checkpoint):
        data = shard.read_bytes()
        starts = range(0, len(data), PAGE)
        variants = (data[:s] + bytes(len(data[s : s + PAGE])) + data[s + PAGE :] for s in starts)
        for _ in damaged(shard, variants):
            assert found(checkpoint) == [(DefectKind.CHUNK_DIGEST, shard.name)]
    manifest = checkpoint / MANIFEST_NAME
    manifest.write_bytes(bytes(manifest.stat().st_size))
    assert found(checkpoint) == [(DefectKind.MANIFEST_UNREADABLE, MANIFEST_NAME)]


def test_any_missing_file_is_found(checkpoint: Path) -> None:
    """Each by itself; all of them at once."""
    for path in sorted(checkpoint.iterdir()):
        data = path.read_bytes()
        path.unlink()
        manifest = path.name == MANIFEST_NAME
        kind = DefectKind.MANIFEST_MISSING if manifest else DefectKind.SHARD_MISSING
        assert found(checkpoint) == [(kind, path.name)]
        path.write_bytes(data)
    for path in checkpoint.iterdir():
        path.unlink()
    assert found(checkpoint) == [(DefectKind.MANIFEST_MISSING, MANIFEST_NAME)]


def test_swapped_shards_are_found(checkpoint: Path) -> None:
    """Each is a perfect file; under the other's name it is damage."""
    for one, other, kind in (
        (FIRST, SECOND, DefectKind.CHUNK_DIGEST),
        (FIRST, "rank-00000.2.safetensors", DefectKind.SHARD_SIZE),
    ):
        paths = (checkpoint / one, checkpoint / other)
        contents = [path.read_bytes() for path in paths]
        for path, content in zip(paths, reversed(contents), strict=True):
            path.write_bytes(content)
        assert {(kind, one), (kind, other)} == set(found(checkpoint))
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)


def test_a_manifest_of_another_checkpoint_is_found(checkpoint: Path, tmp_path: Path) -> None:
    """A whole valid manifest, copied to where it does not belong."""
    other = make_checkpoint(DirectoryTier(tmp_path), CheckpointKey(2, 40)).path
    (checkpoint / MANIFEST_NAME).write_bytes((other / MANIFEST_NAME).read_bytes())
    kinds = {kind for kind, _ in found(checkpoint)}
    assert kinds >= {DefectKind.KEY_MISMATCH, DefectKind.SHARD_SIZE, DefectKind.UNEXPECTED_FILE}


def test_every_defect_is_reported_and_not_only_the_first(checkpoint: Path) -> None:
    """One look tells the user everything that is wrong."""
    (checkpoint / FIRST).unlink()
    (checkpoint / "stray").write_bytes(b"")
    second = checkpoint / SECOND
    data = flipped(flipped(second.read_bytes(), 0), CHUNK * 8)
    second.write_bytes(data)
    assert sorted(found(checkpoint)) == [
        (DefectKind.CHUNK_DIGEST, SECOND),
        (DefectKind.CHUNK_DIGEST, SECOND),
        (DefectKind.SHARD_MISSING, FIRST),
        (DefectKind.UNEXPECTED_FILE, "stray"),
    ]


def test_a_copy_under_another_name_is_as_good(checkpoint: Path, tmp_path: Path) -> None:
    """People archive checkpoints under names of their own."""
    copy = checkpoint.rename(tmp_path / "final")
    assert found(copy) == []


# ── one case, at least, for every defect ──────────────────────────────────────────────────
def _edit_text(checkpoint: Path) -> None:
    path = checkpoint / MANIFEST_NAME
    path.write_bytes(path.read_bytes().replace(b'"loss":0.25', b'"loss":0.20'))


def _rename(checkpoint: Path) -> None:
    resigned(checkpoint, lambda record: record.update(step=31))


def _header_with_gap(checkpoint: Path) -> None:
    data = (checkpoint / FIRST).read_bytes()
    rewrite_shard(checkpoint, FIRST, data + b"!")


def _same_leaves_twice(checkpoint: Path) -> None:
    rewrite_shard(checkpoint, SECOND, (checkpoint / FIRST).read_bytes())


def _shard_is_directory(checkpoint: Path) -> None:
    (checkpoint / FIRST).unlink()
    (checkpoint / FIRST).mkdir()


def _node(record: dict[str, Any], name: str) -> dict[str, Any]:
    """The fields of one tensor in the tree."""
    trees = {"tied": record["tree"]["tied"], "stored": record["tree"]["model"][1]}
    fields: dict[str, Any] = trees[name]["$tensor"]
    return fields


@pytest.mark.parametrize(
    ("name", "tied"),
    [("tied", "nowhere"), ("tied", "layer.001.weight"), ("tied", ["layer.000.weight"]),
     ("stored", "layer.000.weight"), ("stored", "nowhere"), ("stored", None)],
)  # fmt: skip
def test_a_tie_is_what_the_aliases_say(checkpoint: Path, name: str, tied: object) -> None:
    """Otherwise two leaves would come back as one, or one as two."""
    resigned(checkpoint, lambda record: _node(record, name).update(tied=tied))
    assert [(DefectKind.LEAF_TIED, MANIFEST_NAME)] == found(checkpoint)


def _drop_shard(checkpoint: Path) -> None:
    resigned(checkpoint, lambda record: record["shards"].pop(0))
    (checkpoint / FIRST).unlink()


CASES: dict[DefectKind, Callable[[Path], object]] = {
    DefectKind.MANIFEST_MISSING: lambda path: (path / MANIFEST_NAME).unlink(),
    DefectKind.MANIFEST_UNREADABLE: lambda path: (path / MANIFEST_NAME).write_bytes(b"{}"),
    DefectKind.MANIFEST_DIGEST: _edit_text,
    DefectKind.MANIFEST_FIELD: lambda path: resigned(path, lambda r: r.update(step=-1)),
    DefectKind.UNSUPPORTED_VERSION: lambda path: resigned(
        path, lambda r: r.update(format_version=2)
    ),
    DefectKind.KEY_MISMATCH: _rename,
    DefectKind.SHARD_MISSING: lambda path: (path / FIRST).unlink(),
    DefectKind.SHARD_SIZE: lambda path: os.truncate(path / FIRST, 5000),
    DefectKind.CHUNK_DIGEST: lambda path: (path / FIRST).write_bytes(
        flipped((path / FIRST).read_bytes(), 70000)
    ),
    DefectKind.SHARD_HEADER: _header_with_gap,
    DefectKind.LEAF_MISSING: _drop_shard,
    DefectKind.LEAF_DUPLICATE: _same_leaves_twice,
    DefectKind.LEAF_TIED: lambda path: resigned(path, lambda r: _node(r, "tied").pop("tied")),
    DefectKind.UNEXPECTED_FILE: lambda path: (path / "notes.txt").write_bytes(b""),
    DefectKind.UNREADABLE: _shard_is_directory,
}


@pytest.mark.parametrize("kind", DefectKind)
def test_each_invariant_has_its_own_defect(checkpoint: Path, kind: DefectKind) -> None:
    """Breaking one invariant gives the defect of that name, and opening refuses."""
    CASES[kind](checkpoint)
    kinds = {kind for kind, _ in found(checkpoint)}
    related = {DefectKind.LEAF_MISSING} if kind == DefectKind.LEAF_DUPLICATE else set()
    assert kinds - related == {kind}


@pytest.mark.parametrize("name", [FIRST, MANIFEST_NAME])
@pytest.mark.parametrize("disguise", ["fifo", "link", "directory"])
def test_only_regular_files_are_read(checkpoint: Path, name: str, disguise: str) -> None:
    """A FIFO must not hang a reader; a link may lead out of the checkpoint."""
    path = checkpoint / name
    elsewhere = checkpoint.parent / "elsewhere"
    path.rename(elsewhere)
    if disguise == "fifo":
        os.mkfifo(path)
    elif disguise == "link":
        path.symlink_to(elsewhere)
    else:
        path.mkdir()
    assert found(checkpoint) == [(DefectKind.UNREADABLE, name)]


def test_an_input_output_error_is_a_defect_and_not_a_crash(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad disk block makes this checkpoint unusable, not the program that looks for one."""
    real = os.preadv

    def failing(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        if offset == CHUNK:
            raise OSError(5, "Input/output error")
        return real(descriptor, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", failing)
    assert {kind for kind, _ in found(checkpoint)} == {DefectKind.UNREADABLE}


def test_a_pin_is_not_a_stray_file(checkpoint: Path) -> None:
    """PIN, whatever is in it."""
    (checkpoint / "PIN").write_bytes(b"by hand")
    assert found(checkpoint) == []


@pytest.mark.parametrize(
    ("aliases", "kind"),
    [
        ({"tied": "nowhere"}, DefectKind.LEAF_MISSING),
        ({"tied": "tied"}, DefectKind.LEAF_MISSING),
        ({}, DefectKind.LEAF_MISSING),
        (
            {"tied": "layer.000.weight", "layer.001.weight": "layer.000.weight"},
            DefectKind.LEAF_DUPLICATE,
        ),
    ],
)
def test_aliases_must_lead_to_a_stored_leaf(
    checkpoint: Path, aliases: dict[str, str], kind: DefectKind
) -> None:
    """One step, to a leaf that is there, under a name of its own."""
    resigned(checkpoint, lambda record: record.update(aliases=aliases))
    assert found(checkpoint) == [(kind, MANIFEST_NAME)]


def test_a_hostile_size_is_not_believed(checkpoint: Path) -> None:
    """The file's own size is compared before anything is allocated."""
    resigned(
        checkpoint,
        lambda r: r["shards"][0].update(size=2**40, chunk=2**30, digests=["0" * 32] * 1024),
    )
    assert found(checkpoint) == [(DefectKind.SHARD_SIZE, FIRST)]


def test_random_bytes_never_crash_a_reader(checkpoint: Path) -> None:
    """Any content of any file: defects, or a CheckpointError, and nothing else."""
    noise = random.Random(3)
    for path in sorted(checkpoint.iterdir()):
        variants = [noise.randbytes(noise.choice([0, 1, 47, 48, 5000])) for _ in range(30)]
        for _ in damaged(path, iter(variants)):
            assert verify(checkpoint)
            with pytest.raises(CheckpointError):
                open_verified(checkpoint)
