"""The manifest: its exact bytes, its digest, and every field it refuses."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from hpc_ckpt.errors import ManifestError
from hpc_ckpt.format.defects import Defect, DefectKind
from hpc_ckpt.format.image import ITEM_BITS
from hpc_ckpt.format.manifest import CHUNK, Manifest, ShardRecord, digest
from hpc_ckpt.rundir import CheckpointKey
from hpc_ckpt.testing import plain_manifest

KEYS = [
    "format_version", "chain", "generation", "step", "revision", "parent", "epoch", "wall_time",
    "reason", "metrics", "world_size", "threads", "versions", "tree", "aliases", "shards", "digest",
]  # fmt: skip
TAIL_BYTES = 47


def sample(**fields: Any) -> Manifest:
    shard = ShardRecord("rank-00000.safetensors", 5000, 4096, ("0" * 32, "f" * 32))
    values: dict[str, Any] = {
        "parent": "step-000000003-g00000002",
        "metrics": {"loss": 0.1, "größe": -1e300},
        "versions": {"torch": "2.13.0"},
        "tree": {"model": {"~": "tensor", "leaf": "w"}, "list": [1, 1.5, None, True, "é\ud800"]},
        "aliases": {"head": "w"},
    }
    return plain_manifest(CheckpointKey(7, 12), [shard], **{**values, **fields})


def signed(record: dict[str, Any]) -> bytes:
    """A manifest built by hand, with a good digest: what docs/format.md says, not our code."""
    lines = [
        f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))},\n" for k, v in record.items()
    ]
    body = ("{\n" + "".join(lines)).encode()
    return body + b'"digest": "' + xxhash.xxh3_128(body).hexdigest().encode() + b'"\n}\n'


def defect_of(data: bytes) -> Defect:
    with pytest.raises(ManifestError) as caught:
        Manifest.from_bytes(data)
    defect = caught.value.defect
    assert isinstance(defect, Defect)
    return defect


def edited(edit: Callable[[dict[str, Any]], object]) -> bytes:
    record = json.loads(sample().to_bytes())
    del record["digest"]
    edit(record)
    return signed(record)


# ── bytes ─────────────────────────────────────────────────────────────────────────────────
def test_the_keys_stand_in_their_order_one_to_a_line() -> None:
    """The order is part of the format; `digest` is last."""
    text = sample().to_bytes().decode("ascii")
    assert list(json.loads(text)) == KEYS
    assert [line.split('"')[1] for line in text.splitlines()[1:-1]] == KEYS


def test_the_digest_covers_all_bytes_before_its_line() -> None:
    """Recomputed here from the definition: XXH3-128 of everything before the last 47 bytes."""
    data = sample().to_bytes()
    body, tail = data[:-TAIL_BYTES], data[-TAIL_BYTES:]
    assert tail == b'"digest": "' + xxhash.xxh3_128(body).hexdigest().encode() + b'"\n}\n'
    assert body.endswith(b"\n")
    assert data == edited(lambda record: None)


def test_a_manifest_comes_back_from_its_bytes() -> None:
    """from_bytes ∘ to_bytes = id."""
    manifest = sample()
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert manifest.key == CheckpointKey(7, 12)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1 + 0.2])
def test_every_float_metric_comes_back_bit_for_bit(value: float) -> None:
    """JSON has no NaN or infinity; they are written as text and the file stays valid JSON."""
    data = sample(metrics={"loss": value}).to_bytes()
    json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    restored = Manifest.from_bytes(data).metrics["loss"]
    assert (restored.hex(), type(restored)) == (value.hex(), float)


def test_a_manifest_with_nan_equals_its_copy() -> None:
    """NaN differs from itself; a manifest does not differ from what is read back."""
    manifest = sample(metrics={"loss": float("nan")})
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_every_flipped_bit_is_found() -> None:
    """All bits of all bytes, the digest's own line included."""
    data = bytearray(sample().to_bytes())
    missed = []
    for position in range(len(data) * 8):
        data[position // 8] ^= 1 << position % 8
        try:
            Manifest.from_bytes(bytes(data))
        except ManifestError:
            pass
        else:
            missed.append(position)
        data[position // 8] ^= 1 << position % 8
    assert missed == []


def test_every_truncation_and_extension_is_found() -> None:
    """A manifest that was cut off anywhere, or went on, is not a manifest."""
    data = sample().to_bytes()
    found = {defect_of(data[:length]).kind for length in range(len(data))}
    assert found == {DefectKind.MANIFEST_UNREADABLE}
    assert defect_of(data + b"\n").kind == DefectKind.MANIFEST_UNREADABLE
    assert defect_of(data + data).kind == DefectKind.MANIFEST_DIGEST


def test_the_digest_must_be_lower_case() -> None:
    """One spelling only: otherwise a flipped bit of the digest could go unseen."""
    written = (sample(step=step).to_bytes() for step in range(100))
    data = next(data for data in written if data[-36:-4].upper() != data[-36:-4])
    upper = data[:-36] + data[-36:-4].upper() + data[-4:]
    assert defect_of(upper).kind == DefectKind.MANIFEST_UNREADABLE


# ── fields ────────────────────────────────────────────────────────────────────────────────
def test_an_edited_manifest_is_found_by_its_digest() -> None:
    """An editor does not know the digest."""
    data = sample().to_bytes().replace(b'"step": 12', b'"step": 13')
    assert defect_of(data).kind == DefectKind.MANIFEST_DIGEST


def test_an_unknown_version_says_to_upgrade() -> None:
    """A newer format may have other keys; the version is judged first."""
    defect = defect_of(edited(lambda r: r.update(format_version=2, future="yes")))
    assert defect.kind == DefectKind.UNSUPPORTED_VERSION
    assert "upgrade hpc_ckpt" in defect.detail


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "unknown key": lambda r: r.update(extra=1),
    "missing key": lambda r: r.pop("reason"),
    "other order": lambda r: r.update(epoch=r.pop("epoch")),
    "version text": lambda r: r.update(format_version="1"),
    "version bool": lambda r: r.update(format_version=True),
    "chain empty": lambda r: r.update(chain=""),
    "chain number": lambda r: r.update(chain=1),
    "generation negative": lambda r: r.update(generation=-1),
    "generation float": lambda r: r.update(generation=7.0),
    "step bool": lambda r: r.update(step=True),
    "step huge": lambda r: r.update(step=2**63),
    "revision null": lambda r: r.update(revision=None),
    "parent path": lambda r: r.update(parent="../step-000000003-g00000002"),
    "parent number": lambda r: r.update(parent=3),
    "epoch text": lambda r: r.update(epoch="0"),
    "wall_time negative": lambda r: r.update(wall_time=-1.0),
    "wall_time text": lambda r: r.update(wall_time="now"),
    "reason null": lambda r: r.update(reason=None),
    "metrics list": lambda r: r.update(metrics=[]),
    "metric text": lambda r: r.update(metrics={"loss": "low"}),
    "metric bool": lambda r: r.update(metrics={"loss": True}),
    "metric too large": lambda r: r.update(metrics={"loss": 10**400}),
    "world_size zero": lambda r: r.update(world_size=0),
    "threads zero": lambda r: r.update(threads=0),
    "versions numbers": lambda r: r.update(versions={"torch": 2}),
    "aliases list": lambda r: r.update(aliases=[]),
    "aliases null": lambda r: r.update(aliases={"a": None}),
    "shards map": lambda r: r.update(shards={}),
    "shards none": lambda r: r.update(shards=[]),
    "shards twice": lambda r: r.update(shards=r["shards"] * 2),
    "shard text": lambda r: r.update(shards=["rank-00000.safetensors"]),
    "shard with more": lambda r: r["shards"][0].update(extra=1),
    "shard with less": lambda r: r["shards"][0].pop("chunk"),
    "file number": lambda r: r["shards"][0].update(file=1),
    "file elsewhere": lambda r: r["shards"][0].update(file="../rank-00000.safetensors"),
    "file absolute": lambda r: r["shards"][0].update(file="/etc/passwd"),
    "file not a shard": lambda r: r["shards"][0].update(file="MANIFEST.json"),
    "rank beyond the world": lambda r: r["shards"][0].update(file="rank-00001.safetensors"),
    "size negative": lambda r: r["shards"][0].update(size=-1),
    "size text": lambda r: r["shards"][0].update(size="5000"),
    "chunk zero": lambda r: r["shards"][0].update(chunk=0),
    "chunk odd": lambda r: r["shards"][0].update(chunk=4097),
    "chunk huge": lambda r: r["shards"][0].update(chunk=2**40, digests=["0" * 32]),
    "digests too few": lambda r: r["shards"][0].update(digests=["0" * 32]),
    "digests too many": lambda r: r["shards"][0].update(digests=["0" * 32] * 3),
    "digests text": lambda r: r["shards"][0].update(digests="0" * 32),
    "digest short": lambda r: r["shards"][0].update(digests=["0" * 31, "0" * 32]),
    "digest upper case": lambda r: r["shards"][0].update(digests=["A" * 32, "0" * 32]),
    "digest number": lambda r: r["shards"][0].update(digests=[0, 1]),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_field_is_a_named_defect(case: str) -> None:
    """A good digest only says that nobody touched the bytes, not that they make sense."""
    assert defect_of(edited(WRONG[case])).kind == DefectKind.MANIFEST_FIELD


@pytest.mark.parametrize(
    "body",
    [b"[\n", b'{\n"a": 1, "a": 2,\n', b"{\n\xff\n", b"{\nnonsense,\n", b'{\n"a": ' + b"[" * 99999],
)
def test_bytes_that_are_not_json_are_unreadable_even_when_signed(body: bytes) -> None:
    """Also what would exhaust a parser's stack, and a key that comes twice."""
    data = body + b'"digest": "' + digest(body).encode() + b'"\n}\n'
    assert defect_of(data).kind == DefectKind.MANIFEST_UNREADABLE


def nested(depth: int) -> list[Any]:
    tree: list[Any] = []
    for _ in range(depth):
        tree = [tree]
    return tree


@pytest.mark.parametrize(
    "tree",
    [(1, 2), {1: 2}, math.inf, {"a": [math.nan]}, b"x", {"a": {"b": {1}}}, object(), nested(99999)],
    ids=["tuple", "int key", "inf", "nan", "bytes", "set", "object", "deep"],
)
def test_a_tree_that_would_not_come_back_as_it_is_is_never_written(tree: object) -> None:
    """json.dumps would turn a tuple into a list and 1 into "1" without a word."""
    with pytest.raises(ManifestError, match="tree"):
        sample(tree=tree)


def test_a_number_too_long_for_text_is_refused_when_written() -> None:
    """Python will not print it; the error names the field instead of a limit."""
    with pytest.raises(ManifestError, match="tree: cannot be written"):
        sample(tree=10**5000).to_bytes()


def test_a_key_twice_inside_the_tree_is_refused() -> None:
    """Which of the two counts would depend on the reader."""
    body = sample(tree={"a": 1}).to_bytes()[:-TAIL_BYTES].replace(b'{"a":1}', b'{"a":1,"a":2}')
    data = body + b'"digest": "' + digest(body).encode() + b'"\n}\n'
    assert defect_of(data).kind == DefectKind.MANIFEST_UNREADABLE


# ── content ───────────────────────────────────────────────────────────────────────────────
def test_same_content_looks_at_state_and_not_at_circumstances() -> None:
    """When, why and how well may differ; what would be restored may not."""
    manifest = sample()
    circumstances = {"wall_time": 5.0, "reason": "signal", "metrics": {}, "revision": 3}
    assert manifest.same_content(replace(manifest, **circumstances))
    shard = replace(manifest.shards[0], digests=("1" * 32, "f" * 32))
    for change in ({"tree": {}}, {"aliases": {}}, {"epoch": 1}, {"shards": (shard,)}):
        assert not manifest.same_content(replace(manifest, **change))


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0)])
def test_values_that_python_calls_equal_are_still_different_state(one: Any, other: Any) -> None:
    """Reusing the first for the second would restore another type or sign."""
    assert not sample(tree={"a": one}).same_content(sample(tree={"a": other}))


def test_chunks_are_sixteen_mebibytes() -> None:
    """A contract: readers of other versions count chunks by the manifest, people by this."""
    assert CHUNK == 16 * 1024**2
    assert digest(b"") == "99aa06d3014798d86001c324468d497f"


def test_the_example_in_the_documentation_is_a_manifest() -> None:
    """docs/format.md shows real bytes, digest included."""
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    block = text.partition("manifest-example")[2].partition("```json\n")[2].partition("```")[0]
    manifest = Manifest.from_bytes(block.encode())
    assert manifest.key == CheckpointKey(7, 12000)
    assert manifest.metrics["best"] == math.inf
    assert manifest.to_bytes() == block.encode()


def test_the_documentation_names_every_defect_and_every_dtype() -> None:
    """A reader written from the page alone must know them all."""
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    words = {kind.value for kind in DefectKind} | set(ITEM_BITS) | set(KEYS)
    assert sorted(word for word in words if f"`{word}`" not in text) == []
