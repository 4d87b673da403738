"""Checkpoints nobody can vouch for: manifests, shards, directories and trees, mutated at will.

Whatever is in them, reading gives a value or one of our errors: nothing outside is opened, no
code is run, no memory is taken on a file's word. Digests are made good after every mutation, so
that it reaches the code behind them.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import collections
import contextlib
import copy
import enum
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import zoneinfo
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hpc_ckpt
from hpc_ckpt import Checkpointer
from hpc_ckpt.errors import CheckpointError, HpcCkptError
from hpc_ckpt.format.defects import DefectKind
from hpc_ckpt.format.image import HEADER_CAP, parse_shard_name, read_header
from hpc_ckpt.format.manifest import Manifest
from hpc_ckpt.format.verify import open_verified, verify
from hpc_ckpt.rundir import MANIFEST_NAME, CheckpointKey
from hpc_ckpt.state.tree import decode

SHARD = "rank-00000.safetensors"
PAGE = 4096
ROOM = 512 * 1024**2
"""Of address space for one reading: threads, their stacks and arenas, and little else."""
Record = dict[str, Any]

fuzzed = settings(
    max_examples=int(os.environ.get("HPC_CKPT_FUZZ", "100")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


# ── what is watched ───────────────────────────────────────────────────────────────────────
RUNS_CODE = {
    "compile", "exec", "import", "code.__new__", "marshal.loads", "pickle.find_class",
    "ctypes.dlopen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn",
    "os.system", "subprocess.Popen", "socket.connect", "urllib.Request",
}  # fmt: skip
CHANGES_FILES = {
    "os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir",
    "os.symlink", "os.truncate", "os.utime", "shutil.rmtree",
}  # fmt: skip


@dataclass
class Watch:
    """What the interpreter was asked to do during one reading, as its audit events say."""

    opened: list[str] = field(default_factory=list)
    others: list[tuple[str, str]] = field(default_factory=list)

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            if not isinstance(arguments[0], int):
                self.opened.append(os.fsdecode(arguments[0]))
        elif event in RUNS_CODE or event in CHANGES_FILES:
            self.others.append((event, str(arguments[:1])))


WATCHING: list[Watch] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    for watch in WATCHING:
        watch.see(event, arguments)


sys.addaudithook(_hook)  # stays for the life of the process, and looks only while asked to


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Within: little memory, and an eye on everything."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    seen = Watch()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    WATCHING.append(seen)
    try:
        yield seen
    finally:
        WATCHING.clear()
        resource.setrlimit(resource.RLIMIT_AS, before)


def is_time_zone(event: tuple[str, str]) -> bool:
    """zoneinfo looks for a zone it does not know in the package of that name."""
    return event[0] == "import" and "tzdata" in event[1]


def harmless(seen: Watch, checkpoint: Path | None) -> None:
    """Nothing was run, nothing changed, and nothing opened but files of checkpoints there."""
    assert [] == [event for event in seen.others if not is_time_zone(event)]
    assert [] == [name for name in seen.opened if not allowed(name, checkpoint)]


def allowed(name: str, checkpoint: Path | None) -> bool:
    if name.startswith(zoneinfo.TZPATH):
        return ".." not in Path(name).parts
    if checkpoint is None:
        return False
    if not Path(name).is_absolute():  # opened beside a directory that was itself opened
        return parse_shard_name(name) is not None
    path = Path(name)
    if path in (checkpoint, *(checkpoint / each for each in (MANIFEST_NAME, SHARD))):
        return True
    sibling = path if path.parent == checkpoint.parent else path.parent
    return sibling.parent == checkpoint.parent and CheckpointKey.parse(sibling.name) is not None


def attempt(read: Callable[[], object]) -> object:
    """What it gives, or None where it refuses in our own words; anything else is a failure."""
    try:
        return read()
    except HpcCkptError:
        return None


# ── a real checkpoint ─────────────────────────────────────────────────────────────────────
class Color(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    left: object
    right: object


def state() -> Record:
    shared = [1, 2]
    return {
        "tensors": [torch.arange(6.0).reshape(2, 3), torch.ones(2, dtype=torch.bfloat16)],
        "sparse": torch.eye(3).to_sparse_coo(),
        "arrays": [np.arange(3, dtype="f4"), np.zeros(2, "i4,f8"), np.array(["ab"])],
        "plain": [2**70, 10**400, float("inf"), b"x", 1j, ..., range(3), slice(1, None), "\ud800"],
        "dates": [datetime(2020, 1, 2, tzinfo=zoneinfo.ZoneInfo("UTC")), timedelta(1)],
        "sets": [{1, 2}, frozenset({(1, "a")}), PurePosixPath("a/b"), collections.Counter("ab")],
        "numpy": [np.float32(1), np.dtype("i4,f8"), torch.float16, torch.device("cpu")],
        "others": [Pair(1, [2]), torch.Size([1]), torch.Generator(), {1: {"leaf": "plain"}}],
        "shared": [shared, shared],
    }


@dataclass(frozen=True)
class Sample:
    """A checkpoint that a Checkpointer wrote, taken apart."""

    path: Path
    record: Record
    shard: bytes

    @property
    def header(self) -> Record:
        header: Record = json.loads(self.shard[8 : self.start])
        return header

    @property
    def start(self) -> int:
        return 8 + int.from_bytes(self.shard[:8], "little")


def make_sample(root: Path) -> Sample:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with Checkpointer(root, model=model, optimizer=optimizer, state=state()) as ckpt:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        ckpt.step(loss=1.0)
    path = hpc_ckpt.latest(root)
    hpc_ckpt.load(path)  # everything that is imported on the way is imported now
    record = json.loads((path / MANIFEST_NAME).read_bytes())
    del record["digest"]
    return Sample(path, record, (path / SHARD).read_bytes())


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return make_sample(tmp_path_factory.mktemp("sample") / "run")


class Raw(str):
    """JSON text that json.dumps would not write."""


def text_of(value: object) -> str:
    if isinstance(value, Raw):
        return value
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{text_of(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(text_of, value)) + "]"
    return json.dumps(value)


def signed(record: Record, *, twice: str = "") -> bytes:
    """A manifest with a good digest; `twice` names a key whose line is repeated."""
    lines = [f'"{key}": {text_of(value)},\n' for key, value in record.items()]
    lines += [line for line in lines if line.startswith(f'"{twice}"')]
    return resigned(("{\n" + "".join(lines)).encode("ascii", "backslashreplace"))


def resigned(body: bytes) -> bytes:
    return body + f'"digest": "{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode()


def headed(header: object, data: bytes = b"") -> bytes:
    """A shard with this header, padded as it must be."""
    text = text_of(header).encode("utf-8", "surrogatepass")
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text + data


def with_shard(record: Record, shard: bytes) -> Record:
    """The record, as if that were its shard."""
    chunk = record["shards"][0]["chunk"]
    digests = [
        xxhash.xxh3_128_hexdigest(shard[at : at + chunk]) for at in range(0, len(shard), chunk)
    ]
    entry = {"file": SHARD, "size": len(shard), "chunk": chunk, "digests": digests}
    return {**record, "shards": [entry]}


@contextlib.contextmanager
def on_disk(manifest: bytes, shard: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place).resolve() / "step-000000001-g00000001"
        path.mkdir()
        (path / MANIFEST_NAME).write_bytes(manifest)
        (path / SHARD).write_bytes(shard)
        yield path


# ── mutations ─────────────────────────────────────────────────────────────────────────────
LONG = "1" * 5000
"""More digits than int() takes."""
NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 4095, 4096, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63),
     10**30, 0.5, 1e308, True, Raw("1e999"), Raw("NaN"), Raw("-Infinity"), Raw("-0"),
     Raw("9" * 400), Raw("9" * 4000), Raw("9" * 5000)]
)  # fmt: skip
NAMES = st.sampled_from(
    ["", ".", "..", "../x", "../../../etc/passwd", "/etc/passwd", "/dev/zero", "a\0b", "a/b", "~",
     "\ud800", "rank-00000.safetensors", "rank-00001.safetensors", "rank-0.safetensors",
     "rank-00000.1.safetensors", "../rank-00000.safetensors",
     "rank-\u0660\u0660\u0660\u0660\u0661.safetensors", "MANIFEST.json", "PIN", "$tensor",
     "step-000000000-g00000001", "step-000000002-g00000001",
     "__metadata__", "__class__", "__reduce__", "os.system", "float32", "qint8", "<f4", "|O",
     "<U99", "<m8", "cuda", "meta", "cpu", "coo", "csr", "Color", "RED", "x" * 3000,
     f"rank-{LONG}.safetensors", f"step-{LONG}-g00000001", "\ufb01"]
)  # fmt: skip
DEEP = st.sampled_from([10, 100, 383, 385, 500, 900, 990, 5000]).flatmap(
    lambda depth: st.sampled_from(
        [Raw("[" * depth + "]" * depth), Raw('{"a":' * depth + "1" + "}" * depth)]
    )
)
JUNK = st.recursive(
    st.none() | NUMBERS | NAMES | DEEP | st.text(max_size=4) | st.builds(lambda: [1] * 70),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)


def places(node: object) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    items: Any = ()
    if isinstance(node, dict):
        items = node.items()
    elif isinstance(node, list):
        items = enumerate(node)
    return [place for key, child in items for place in [(node, key), *places(child)]]


def mutate(value: Any, data: st.DataObject) -> None:
    """Replace, remove, double, rename or swap something somewhere; or shift a number."""
    found = places(value)
    if not found:
        return
    parent, key = data.draw(st.sampled_from(found), label="place")
    action = data.draw(st.sampled_from(["junk", "junk", "delete", "swap", "rename", "near"]))
    if action == "junk":
        parent[key] = data.draw(JUNK)
    elif action == "delete":
        del parent[key]
    elif action == "swap":
        other, other_key = data.draw(st.sampled_from(found), label="other")
        parent[key] = copy.deepcopy(other[other_key])
    elif action == "rename" and isinstance(parent, dict):
        parent[data.draw(NAMES)] = parent.pop(key)
    elif action == "near" and type(parent[key]) is int:
        parent[key] += data.draw(st.sampled_from([-1, 1, 8, 4096, 2**40]))


def mutated(value: Any, data: st.DataObject) -> Any:
    changed = copy.deepcopy(value)
    for _ in range(data.draw(st.integers(1, 3), label="mutations")):
        mutate(changed, data)
    return changed


def spoiled(data: bytes, draw: st.DataObject) -> bytes:
    """Bytes flipped, taken out, put in, or cut off."""
    spoilt = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 3), label="spots")):
        at = draw.draw(st.integers(0, max(len(spoilt) - 1, 0)))
        length = draw.draw(st.sampled_from([1, 2, 8, 100]))
        new = draw.draw(st.binary(max_size=8) | st.sampled_from([b"\xff" * 8, b"[" * 2000, b'"']))
        spoilt[at : at + length] = new
    return bytes(spoilt)


# ── fuzzing ───────────────────────────────────────────────────────────────────────────────
@fuzzed
@given(st.data())
def test_a_mutated_manifest_is_read_or_refused(sample: Sample, data: st.DataObject) -> None:
    """Field by field: what comes out was checked, or a ManifestError says what is wrong."""
    twice = data.draw(st.sampled_from(["", "", "", "step", "tree", "shards"]))
    content = signed(mutated(sample.record, data), twice=twice)
    with watched() as seen:
        manifest = attempt(lambda: Manifest.from_bytes(content))
    harmless(seen, None)
    if isinstance(manifest, Manifest):
        assert "" == twice
        assert manifest == Manifest.from_bytes(manifest.to_bytes())
        assert all(parse_shard_name(shard.file) is not None for shard in manifest.shards)


@fuzzed
@given(st.data())
def test_spoiled_bytes_of_a_manifest_are_read_or_refused(
    sample: Sample, data: st.DataObject
) -> None:
    """Text that is no JSON, or another one."""
    body = signed(sample.record)[:-47]
    content = resigned(spoiled(body, data))
    with watched() as seen:
        attempt(lambda: Manifest.from_bytes(content))
    harmless(seen, None)


@fuzzed
@given(st.data())
def test_a_mutated_header_is_read_or_refused(sample: Sample, data: st.DataObject) -> None:
    """Every leaf that comes out lies inside the file."""
    shard = headed(mutated(sample.header, data), sample.shard[sample.start :])
    with watched() as seen:
        leaves = attempt(lambda: read_header(shard))
    harmless(seen, None)
    if isinstance(leaves, dict):
        assert all(0 <= leaf.start <= leaf.end <= len(shard) for leaf in leaves.values())


@fuzzed
@given(st.data())
def test_spoiled_bytes_of_a_header_are_read_or_refused(sample: Sample, data: st.DataObject) -> None:
    """Also the first eight, which say how much to read."""
    shard = spoiled(sample.shard[: sample.start], data) + sample.shard[sample.start :]
    size = data.draw(st.sampled_from([None, len(shard), len(shard) - 1, 2**62]))
    with watched() as seen:
        attempt(lambda: read_header(shard, size))
    harmless(seen, None)


@fuzzed
@given(st.data())
def test_a_mutated_directory_is_loaded_or_refused(sample: Sample, data: st.DataObject) -> None:
    """verify() never raises, opening refuses what verify() finds, and loading only in our words."""
    record, shard = sample.record, sample.shard
    if data.draw(st.booleans(), label="header too"):
        header = headed(mutated(sample.header, data), shard[sample.start :])
        shard = data.draw(st.sampled_from([header, spoiled(shard, data)]))
        record = with_shard(record, shard)
    if data.draw(st.booleans(), label="manifest too"):
        record = mutated(record, data)
    with on_disk(signed(record), shard) as path, watched() as seen:
        found = [d for d in verify(path) if d.kind is not DefectKind.UNEXPECTED_FILE]
        opened = attempt(lambda: open_verified(path))
        attempt(lambda: hpc_ckpt.load(path))
    harmless(seen, path)
    assert (opened is None) == bool(found)


@fuzzed
@given(st.data())
def test_a_mutated_tree_of_a_real_checkpoint_is_decoded_or_refused(
    sample: Sample, data: st.DataObject
) -> None:
    """Whatever the tree says about leaves that are sound."""
    leaves = LEAVES.setdefault(sample.path, open_verified(sample.path))
    text = text_of(mutated(sample.record["tree"], data))
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return
    like = data.draw(st.sampled_from([None, {"tracked": {"state": {"others": [Pair(0, 0)]}}}]))
    with watched() as seen, contextlib.suppress(CheckpointError):
        decode(tree, leaves.leaf, like=like)
    harmless(seen, None)


LEAVES: dict[Path, Any] = {}


# ── one by one ────────────────────────────────────────────────────────────────────────────
def test_the_watch_sees(tmp_path: Path) -> None:
    """Otherwise everything above would pass for the wrong reason."""
    (tmp_path / "x").write_bytes(b"x")
    with watched() as seen:
        (tmp_path / "x").read_bytes()
        eval("1 + 1")
        threading.Thread(target=(tmp_path / "x").read_bytes).start()
        with pytest.raises((OSError, MemoryError)):
            bytearray(2 * ROOM)
    assert 2 == seen.opened.count(str(tmp_path / "x"))
    with pytest.raises(AssertionError):
        harmless(seen, tmp_path / "elsewhere")
    assert "compile" in [event for event, _ in seen.others]
    assert allowed("/etc/passwd", tmp_path) is False
    assert allowed(str(tmp_path / "../x"), tmp_path) is False


def test_the_sample_itself_is_sound(sample: Sample) -> None:
    """Signed again and put on disk it is the checkpoint it was."""
    with on_disk(signed(sample.record), sample.shard) as path, watched() as seen:
        assert [] == verify(path)
        assert hpc_ckpt.load(path)["progress"]["step"] == 1
    harmless(seen, path)
    assert [] != seen.opened


@pytest.mark.parametrize("bracket", ["list", "map"])
@pytest.mark.parametrize(
    "where", ["chain", "step", "parent", "wall_time", "metrics", "shards", "tree", "aliases"]
)
def test_any_depth_of_nesting_is_refused(sample: Sample, where: str, bracket: str) -> None:
    """Around the interpreter's own limit too, where a message about it could pass that limit."""
    limit = sys.getrecursionlimit()
    for depth in [*range(limit - 150, limit + 10, 3), 10 * limit]:
        opening, closing = ("[", "]") if bracket == "list" else ('{"a":', "}")
        deep = Raw(opening * depth + "1" + closing * depth)
        content = signed({**sample.record, where: deep})
        with pytest.raises(HpcCkptError):  # a tree may be refused as late as by its decoder
            decode(Manifest.from_bytes(content).tree, read_eight)
        header = headed({"a": {"dtype": "U8", "shape": deep, "data_offsets": [0, 0]}})
        with pytest.raises(HpcCkptError):
            read_header(header)


@pytest.mark.parametrize(
    "change",
    [
        {"parent": f"step-{LONG}-g00000001"},
        {"file": f"rank-{LONG}.safetensors"},
        {"file": f"rank-00000.{LONG}.safetensors"},
        {"in": f"step-{LONG}-g00000001"},
    ],
    ids=["parent", "rank", "part", "holder"],
)
def test_names_with_thousands_of_digits_are_refused(sample: Sample, change: Record) -> None:
    """Each says in our words that it is no name."""
    record = copy.deepcopy(sample.record)
    (record if "parent" in change else record["shards"][0]).update(change)
    with pytest.raises(HpcCkptError):
        Manifest.from_bytes(signed(record))


def test_a_time_beyond_all_floats_is_refused(sample: Sample) -> None:
    """What was read can be written again."""
    with pytest.raises(HpcCkptError):
        Manifest.from_bytes(signed({**sample.record, "wall_time": Raw("1" + "0" * 400)}))


@pytest.mark.parametrize("moment", ["1e15", "1e300"])
def test_a_time_beyond_all_calendars_does_not_stop_a_listing(
    sample: Sample, tmp_path: Path, moment: str
) -> None:
    """One strange manifest must not hide the other checkpoints."""
    run = tmp_path / "run"
    shutil.copytree(sample.path.parent.parent, run)
    manifest = run / "checkpoints" / sample.path.name / MANIFEST_NAME
    manifest.write_bytes(signed({**sample.record, "wall_time": Raw(moment)}))
    listed = subprocess.run(
        [sys.executable, "-m", "hpc_ckpt.cli", "ls", str(run)], capture_output=True, text=True
    )
    assert 0 == listed.returncode, listed.stderr[-500:]


# ── sizes nobody should believe ───────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("claim", "words"),
    [
        (2**64 - 1, "the file has"),
        (2**63, "the file has"),
        (2**40, "the file has"),
        (HEADER_CAP - 8, "the file has"),
        (2 * PAGE, "not at a multiple of 4096"),
        (0, "not at a multiple of 4096"),
    ],
)
def test_a_header_length_is_not_believed(sample: Sample, claim: int, words: str) -> None:
    """Whatever the first eight bytes say, it is compared with the file before it is read."""
    shard = claim.to_bytes(8, "little") + sample.shard[8:]
    with on_disk(signed(with_shard(sample.record, shard)), shard) as path, watched() as seen:
        (defect,) = verify(path)
        assert attempt(lambda: hpc_ckpt.load(path)) is None
    harmless(seen, path)
    assert DefectKind.SHARD_HEADER == defect.kind
    assert words in defect.detail


def test_a_header_is_no_longer_than_the_cap() -> None:
    """Not even in a file that is large enough for it."""
    length = HEADER_CAP + PAGE - 8
    with pytest.raises(HpcCkptError, match=f"more than {HEADER_CAP}"):
        read_header(length.to_bytes(8, "little"), 2**40)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F64", "shape": [2**61], "data_offsets": [0, 2**63]},
        {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]},
        {"dtype": "U8", "shape": [2**32] * 1000, "data_offsets": [0, 8]},
        {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]},
        {"dtype": "U8", "shape": [8, 0, 2**63], "data_offsets": [0, 8]},
    ],
    ids=["items", "offsets", "dimensions", "half-a-byte", "nothing"],
)
def test_a_leaf_larger_than_its_file_is_refused(sample: Sample, entry: Record) -> None:
    """Offsets and shapes are compared with the file before anything is made of them."""
    shard = headed({"a": entry}, bytes(8))
    with on_disk(signed(with_shard(sample.record, shard)), shard) as path, watched() as seen:
        assert [DefectKind.SHARD_HEADER] == [defect.kind for defect in verify(path)]
        assert attempt(lambda: hpc_ckpt.load(path)) is None
    harmless(seen, path)


def test_a_size_in_the_manifest_is_not_believed(sample: Sample) -> None:
    """The file's own size is asked first."""
    record = copy.deepcopy(sample.record)
    record["shards"][0].update(size=2**40, chunk=2**30, digests=["0" * 32] * 1024)
    with on_disk(signed(record), sample.shard) as path, watched() as seen:
        assert [DefectKind.SHARD_SIZE] == [defect.kind for defect in verify(path)]
        assert attempt(lambda: hpc_ckpt.load(path)) is None
    harmless(seen, path)


def test_a_manifest_that_is_all_hole_costs_little(sample: Sample) -> None:
    """A gigabyte of nothing on disk must not become three in memory."""
    with on_disk(b"", sample.shard) as path:
        os.truncate(path / MANIFEST_NAME, 1024**3)
        with watched():
            found = verify(path)
    assert [DefectKind.MANIFEST_UNREADABLE] == [defect.kind for defect in found]


def leaf(**fields: Any) -> Record:
    return {"leaf": "eight", "dtype": "uint8", "shape": [8], **fields}


HOSTILE: dict[str, Any] = {
    "tensor-shape": {"$tensor": leaf(shape=[2**40])},
    "tensor-shape-times": {"$tensor": leaf(shape=[2**62, 2**62, 2**62])},
    "tensor-negative": {"$tensor": leaf(shape=[-8])},
    "tensor-order": {"$tensor": leaf(order=[5])},
    "tensor-dtype": {"$tensor": leaf(dtype="float1024")},
    "tensor-quantised": {"$tensor": leaf(dtype="qint8")},
    "tensor-no-leaf": {"$tensor": leaf(leaf="../../etc/passwd")},
    "array-void": {"$array": leaf(dtype="|V999999999999999999", shape=[1])},
    "array-object": {"$array": leaf(dtype="|O", shape=[1])},
    "array-object-inside": {"$array": leaf(dtype=[["a", "|O8"]], shape=[1])},
    "array-dimensions": {"$array": leaf(dtype="|u1", shape=[1] * 70 + [8])},
    "array-record": {"$array": leaf(dtype=[["a", "<f8", [2**31, 2**31]]], shape=[1])},
    "scalar-text": {"$scalar": {"dtype": "<U999999999", "data": ""}},
    "sparse": {"$sparse": {"layout": "csr", "shape": [2**40, 2], "crow_indices": leaf(),
                           "col_indices": leaf(), "values": leaf()}},
    "sparse-outside": {"$sparse": {"layout": "coo", "shape": [1], "coalesced": True,
                       "indices": leaf(dtype="int64", shape=[1, 1]), "values": leaf(shape=[1])}},
    "quantised": {"$quantized": {"dtype": "qint8", "shape": [2**40], "data": leaf(),
                                 "scale": 1.0, "zero_point": 0}},
    "generator": {"$generator": {"device": "cpu", "state": leaf()}},
    "zone-outside": {"$time": {"at": [1, 2, 3, 4, 0], "zone": {"key": "../../../etc/passwd"}}},
    "zone-absolute": {"$time": {"at": [1, 2, 3, 4, 0], "zone": {"key": "/etc/passwd"}}},
    "zone-nul": {"$time": {"at": [1, 2, 3, 4, 0], "zone": {"key": "UTC\0"}}},
    "enum": {"$enum": {"class": "Color", "member": "RED"}},
    "ref-first": [{"$ref": 0}, {"$shared": {"id": 0, "value": []}}],
    "ref-to-itself": {"$shared": {"id": 0, "value": [{"$ref": 0}]}},
    "tag-not-alone": {"$tuple": [], "other": 1},
    "tag-of-python": {"$reduce": ["os.system", ["true"]]},
    "namedtuple-keyword": {"$namedtuple": {"class": "A", "fields": ["class"], "items": [1]}},
    "namedtuple-code": {"$namedtuple": {"class": "A", "fields": ["a=print()"], "items": [1]}},
    "key-not-hashable": {"$dict": [[{"$dict": []}, 1]]},
    "key-twice": {"$dict": [[1, 1], [True, 2]]},
    "base64": {"$bytes": "!"},
    "tensor-dimensions": {"$tensor": leaf(shape=[1] * 70 + [8])},
    # Two names, and one after a compiler has normalised them.
    "namedtuple-equal-names": {"$namedtuple": {"class": "A", "fields": ["fi", "\ufb01"],
                                               "items": [1, 2]}},
    "member-without-hash": {"$set": [{"$scalar": {"dtype": "<m8", "data": "AAAAAAAAAAA="}}]},
    "tensor-of-nothing": {"$tensor": leaf(leaf="none", dtype="float32", shape=[0, 2**62],
                                           order=[1, 0])},
    "array-of-nothing": {"$array": leaf(leaf="none", dtype="<f4", shape=[0, 2**62], order="F")},
    "shared-negative": {"$shared": {"id": -1, "value": []}},
    "shared-tuple": {"$shared": {"id": 0, "value": {"$tuple": []}}},
    "shared-frozenset": {"$shared": {"id": 0, "value": {"$frozenset": []}}},
    "shared-twice": {"$shared": {"id": 0, "value": {"$shared": {"id": 1, "value": []}}}},
    "shared-tensor": {"$shared": {"id": 0, "value": {"$tensor": leaf()}}},
    "key-deeper-than-its-text": [
        {"$shared": {"id": 0, "value": {"$tuple": []}}},
        *({"$shared": {"id": n, "value": {"$tuple": [{"$ref": n - 1}] * 2}}} for n in range(1, 99)),
        {"$dict": [[{"$ref": 98}, 1]]},
    ],
    "key-is-a-tensor": {"$dict": [[{"$tensor": leaf()}, 1]]},
    "key-holds-a-tensor": {"$dict": [[{"$tuple": [1, {"$tensor": leaf()}]}, 1]]},
    "member-is-a-tensor": {"$set": [{"$tensor": leaf()}]},
    "int-that-needs-no-tag": {"$int": "0x" + "f" * 256},
    "text-that-needs-no-tag": {"$str": "YWJj"},
    "surrogate": "\ud800",
    "surrogate-in-a-key": {"\ud800": 1},
    "span-of-a-day": {"$timedelta": [0, 86400, 0]},
    "span-of-a-second": {"$timedelta": [0, 0, 10**6]},
    "span-negative": {"$timedelta": [0, -1, 0]},
    "key-twice-and-long": {"$dict": [[{"$int": "0x" + "f" * 10000}, 1],
                                     [{"$int": "0x" + "f" * 10000}, 2]]},
}  # fmt: skip


def read_eight(name: str) -> memoryview:
    return {"eight": memoryview(bytearray(b"\1" * 8)), "none": memoryview(b"")}[name]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_node_is_refused(name: str) -> None:
    """By a CheckpointError that says where it stands; no other error, no warning, no memory."""
    with watched() as seen, pytest.raises(CheckpointError, match="state tree of the checkpoint"):
        decode({"a": [HOSTILE[name]]}, read_eight)
    harmless(seen, None)


def test_a_named_tuple_is_made_without_compiling_anything() -> None:
    """The names of its fields come from the checkpoint; text made of them is not to be run."""
    tree = {"$namedtuple": {"class": "Point", "fields": ["x", "y"], "items": [1, 2]}}
    with watched() as seen:
        point: Any = decode(tree, read_eight)
    assert (1, 2) == (point.x, point.y)
    assert [] == seen.others


def test_a_shared_list_may_hold_the_name_of_a_tag() -> None:
    """Not hostile at all: what encode() wrote must come back."""
    tree = [{"$shared": {"id": 0, "value": ["$shared"]}}, {"$ref": 0}]
    assert [["$shared"], ["$shared"]] == decode(tree, read_eight)


@pytest.mark.parametrize("top", [None, True, 5, 1.5, "x", [], {}, {"$float": "inf"}], ids=repr)
def test_a_tree_may_be_a_single_value(sample: Sample, top: object) -> None:
    """docs/format.md allows a scalar node, also on its own."""
    record = {**sample.record, "tree": top, "aliases": {}}
    with on_disk(signed(record), sample.shard) as path:
        assert [] == verify(path)
        expected = float("inf") if top == {"$float": "inf"} else top
        assert expected == hpc_ckpt.load(path)


# ── names that lead elsewhere ─────────────────────────────────────────────────────────────
OUTSIDE = ("elsewhere", "../elsewhere", "../../etc/passwd", "/etc/passwd", "/dev/zero", "a\0b", "")


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("key", ["file", "in"])
def test_a_name_that_leads_elsewhere_is_refused(sample: Sample, key: str, name: str) -> None:
    """Before anything of that name is looked at, though a perfect shard lies there."""
    record = copy.deepcopy(sample.record)
    record["shards"][0][key] = name
    with on_disk(signed(record), sample.shard) as path:
        if key == "file":
            (path.parent / "elsewhere").write_bytes(sample.shard)
            (path / "elsewhere").write_bytes(sample.shard)
        else:
            (path.parent / "elsewhere").mkdir()
            (path.parent / "elsewhere" / SHARD).write_bytes(sample.shard)
        with watched() as seen:
            assert [DefectKind.MANIFEST_FIELD] == [defect.kind for defect in verify(path)]
            assert attempt(lambda: hpc_ckpt.load(path)) is None
        assert {str(path / MANIFEST_NAME)} == set(seen.opened)


# ── what is not a file ────────────────────────────────────────────────────────────────────
def as_link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def as_link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def as_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(before)


def as_device(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a device")
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))


@pytest.mark.parametrize("name", [MANIFEST_NAME, SHARD])
@pytest.mark.parametrize(
    "disguise",
    [os.mkfifo, as_link, as_link_to_itself, as_socket, as_device, Path.mkdir],
    ids=["fifo", "link", "loop", "socket", "device", "directory"],
)
def test_what_is_no_file_is_not_read(
    sample: Sample, name: str, disguise: Callable[[Path], object]
) -> None:
    """It neither hangs the reader nor leads it elsewhere."""
    with on_disk(signed(sample.record), sample.shard) as path:
        (path / name).unlink()
        disguise(path / name)
        with watched() as seen:
            assert [DefectKind.UNREADABLE] == [defect.kind for defect in verify(path)]
            assert attempt(lambda: hpc_ckpt.load(path)) is None
        harmless(seen, path)


@pytest.mark.parametrize("kind", ["link", "fifo", "file", "missing"])
def test_a_shard_is_not_looked_for_beyond_a_link(sample: Sample, kind: str) -> None:
    """`in` names a directory beside this one; a link of that name could lead anywhere."""
    record = copy.deepcopy(sample.record)
    record["shards"][0]["in"] = "step-000000000-g00000001"
    with on_disk(signed(record), sample.shard) as path:
        beside = path.with_name("step-000000000-g00000001")
        elsewhere = path.with_name("elsewhere")
        elsewhere.mkdir()
        (path / SHARD).rename(elsewhere / SHARD)
        if kind == "link":
            beside.symlink_to(elsewhere)
        elif kind == "fifo":
            os.mkfifo(beside)
        elif kind == "file":
            beside.write_bytes(sample.shard)
        with watched() as seen:
            (defect,) = verify(path)
            assert attempt(lambda: hpc_ckpt.load(path)) is None
        harmless(seen, path)
        expected = DefectKind.SHARD_MISSING if kind == "missing" else DefectKind.UNREADABLE
        assert expected == defect.kind


# ── into a program ────────────────────────────────────────────────────────────────────────
def without(name: str) -> Callable[[Record], object]:
    return lambda tree: tree.pop(name)


TREES: dict[str, Callable[[Record], object]] = {
    "no-tracked": without("tracked"),
    "no-rng": without("rng"),
    "no-data": without("data"),
    "no-progress": without("progress"),
    "step-is-text": lambda tree: tree["progress"].update(step="x"),
    "position-is-a-number": lambda tree: tree["data"].update(positions={"train": 3}),
    "epoch-is-text": lambda tree: tree["data"].update(epoch="x"),
    "numpy-of-another-kind": lambda tree: tree["rng"]["numpy"].update(bit_generator="PCG64"),
    "torch-is-nothing": lambda tree: tree["rng"].update(torch=None),
    "step-is-infinite": lambda tree: tree["progress"].update(step={"$float": "inf"}),
    "epoch-is-infinite": lambda tree: tree["data"].update(epoch={"$float": "inf"}),
    "tracked-is-a-list": lambda tree: tree.update(tracked=[]),
    "positions-are-text": lambda tree: tree["data"].update(positions="x"),
}


def put_tree(edit: Callable[[Record], object], root: Path) -> None:
    """Save once, and put another tree into the checkpoint."""
    with Checkpointer(root, value={"x": 1}) as ckpt:
        ckpt.step()
    path = hpc_ckpt.latest(root)
    record = json.loads((path / MANIFEST_NAME).read_bytes())
    del record["digest"]
    edit(record["tree"])
    (path / MANIFEST_NAME).write_bytes(signed(record))


@pytest.mark.parametrize("name", TREES)
def test_a_tree_of_another_form_is_refused_by_a_run(tmp_path: Path, name: str) -> None:
    """It is passed over like any broken checkpoint; no KeyError meets the user."""
    put_tree(TREES[name], tmp_path / "run")
    with pytest.raises(HpcCkptError), Checkpointer(tmp_path / "run", value={"x": 1}):
        pass


def test_a_random_state_beyond_its_end_does_not_crash_a_run(tmp_path: Path) -> None:
    """numpy reads beyond its array from such a position: a crash, or somebody's memory."""
    put_tree(lambda tree: tree["rng"]["numpy"]["state"].update(pos=10**9), tmp_path / "run")
    code = (
        "import sys, numpy\n"
        "from hpc_ckpt import Checkpointer, HpcCkptError\n"
        "try:\n"
        "    Checkpointer(sys.argv[1], value={'x': 1}).__enter__()\n"
        "except HpcCkptError:\n"
        "    sys.exit(3)\n"
        "numpy.random.rand()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    assert 3 == subprocess.run(command, capture_output=True, timeout=60).returncode
