"""Damage to checkpoints of a real run: found by name, and a restore takes the next older one.

test_corruption.py sweeps checkpoints made by hand; here they are a Checkpointer's own, with a
shard that several of them share, and what counts is where the next run goes on.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import hpc_ckpt
from hpc_ckpt import Checkpointer, events
from hpc_ckpt.errors import NewerCheckpoint, NoCheckpoint
from hpc_ckpt.events import Event
from hpc_ckpt.format.defects import DefectKind
from hpc_ckpt.format.verify import verify
from hpc_ckpt.rundir import MANIFEST_NAME, CheckpointKey, RunDir

PAGE = 4096
STEPS = 6
SHARD = "rank-00000.safetensors"
ITEMS = 20_000
"""Of the frozen parameter: large enough to be written once and referred to afterwards."""


class Program:
    """A model with a frozen part, an optimizer with moments, and a mark in every leaf."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.model = torch.nn.Linear(32, 16)
        self.model.frozen = torch.nn.Parameter(
            torch.rand(ITEMS, generator=generator), requires_grad=False
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.notes: dict[str, Any] = {"seen": [], "none": torch.zeros(0, 3)}

    def enter(self, root: Path) -> Checkpointer:
        return Checkpointer(
            root,
            policy="every hour",
            keep=50,
            model=self.model,
            optimizer=self.optimizer,
            notes=self.notes,
        )

    def advance(self, ckpt: Checkpointer) -> None:
        inputs = torch.full((4, 32), 0.5 + ckpt.global_step)
        self.model(inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.notes["seen"].append(ckpt.global_step)
        ckpt.step()

    def fingerprint(self) -> str:
        """Every bit that training has changed."""
        digest = xxhash.xxh3_128()
        for value in self.model.state_dict().values():
            digest.update(value.numpy().tobytes())
        for state in self.optimizer.state_dict()["state"].values():
            digest.update(b"".join(state[name].numpy().tobytes() for name in sorted(state)))
        digest.update(repr(self.notes).encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class Made:
    """A finished run of six checkpoints, and what the program was at each."""

    root: Path
    fingerprints: dict[int, str]

    def copy(self, place: Path) -> RunDir:
        shutil.copytree(self.root, place, symlinks=True)
        return RunDir(place)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("made") / "run"
    torch.manual_seed(0)
    program, fingerprints = Program(), {}
    with pytest.raises(KeyboardInterrupt), program.enter(root) as ckpt:
        for _ in ckpt.steps(STEPS):
            program.advance(ckpt)
            ckpt.save(wait=True)
            fingerprints[ckpt.global_step] = program.fingerprint()
        raise KeyboardInterrupt  # not complete: the next one goes on
    assert STEPS == len(set(fingerprints.values()))
    return Made(root, fingerprints)


@pytest.fixture
def rundir(made: Made, tmp_path: Path) -> RunDir:
    return made.copy(tmp_path / "run")


def path_of(rundir: RunDir, step: int) -> Path:
    return rundir.checkpoints / CheckpointKey(1, step).directory_name


def record_of(checkpoint: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((checkpoint / MANIFEST_NAME).read_bytes())
    return record


def files_of(checkpoint: Path) -> list[Path]:
    """Its manifest and every shard it uses, wherever that lies."""
    shards = record_of(checkpoint)["shards"]
    places = [checkpoint.parent / s.get("in", checkpoint.name) / s["file"] for s in shards]
    return [checkpoint / MANIFEST_NAME, *places]


def test_the_run_shares_a_shard(made: Made) -> None:
    """Otherwise what is said below about references would be said about nothing."""
    newest = path_of(RunDir(made.root), STEPS)
    assert 3 == len(files_of(newest))
    assert 1 == len({shard["in"] for shard in record_of(newest)["shards"] if "in" in shard})
    assert [[]] * STEPS == [verify(path_of(RunDir(made.root), n + 1)) for n in range(STEPS)]


# ── damage ────────────────────────────────────────────────────────────────────────────────
def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def change_digit(manifest: Path) -> None:
    """Another digest, spelled as a digest is."""
    data = bytearray(manifest.read_bytes())
    data[-10] = ord("1") if data[-10] == ord("0") else ord("0")
    manifest.write_bytes(data)


def zero(path: Path, start: int) -> None:
    data = bytearray(path.read_bytes())
    data[start : start + PAGE] = bytes(len(data[start : start + PAGE]))
    path.write_bytes(data)


def resign(checkpoint: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the manifest and give it a good digest, as docs/format.md defines it."""
    record = record_of(checkpoint)
    del record["digest"]
    edit(record)
    lines = [f'"{k}": {json.dumps(v, separators=(",", ":"))},\n' for k, v in record.items()]
    body = ("{\n" + "".join(lines)).encode()
    tail = f'"digest": "{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'
    (checkpoint / MANIFEST_NAME).write_bytes(body + tail.encode())


def take_from_older(checkpoint: Path, name: str) -> None:
    """Each file is perfect where it belongs; here it is another step's."""
    older = checkpoint.parent / CheckpointKey(1, STEPS - 1).directory_name
    (checkpoint / name).write_bytes((older / name).read_bytes())


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(checkpoint: Path) -> None:
        path = checkpoint / SHARD
        path.rename(checkpoint.parent.parent / "elsewhere")
        make(path)

    return damage


def edit_text(checkpoint: Path) -> None:
    path = checkpoint / MANIFEST_NAME
    path.write_bytes(path.read_bytes().replace(b'"lr":0.1', b'"lr":0.2'))


def forget_leaf(record: dict[str, Any]) -> None:
    text = json.dumps(record["tree"]).replace("tracked.model.bias", "tracked.model.bios")
    record["tree"] = json.loads(text)


def unknown_tag(record: dict[str, Any]) -> None:
    record["tree"]["tracked"]["notes"] = {"$from_the_future": []}


def unknown_dtype(record: dict[str, Any]) -> None:
    text = json.dumps(record["tree"])
    record["tree"] = json.loads(text.replace('"dtype": "float32"', '"dtype": "float128"', 1))


NEWER: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "version": ("format version 2", lambda r: r.update(format_version=2)),
    "tag": ("unknown tag '$from_the_future'", unknown_tag),
    "dtype": ("this torch has no dtype 'float128'", unknown_dtype),
}
"""What a newer version may write, and an older one cannot tell from nonsense."""


def wrong_shape(record: dict[str, Any]) -> None:
    text = json.dumps(record["tree"])
    node = '{"leaf": "tracked.model.bias", "dtype": "float32", "shape": [16]}'
    assert node in text
    record["tree"] = json.loads(text.replace(node, node.replace("[16]", "[17]")))


def too_large_a_nothing(record: dict[str, Any]) -> None:
    record["tree"]["tracked"]["notes"]["none"]["$tensor"].update(shape=[0, 2**62], order=[1, 0])


def leaf_is_a_list(record: dict[str, Any]) -> None:
    fields = record["tree"]["tracked"]["model"]["$ordereddict"]["items"][0][1]["$tensor"]
    fields["leaf"] = [fields["leaf"]]


def parameter_is_a_list(record: dict[str, Any]) -> None:
    record["tree"]["tracked"]["optimizer"]["param_groups"][0]["params"][0] = [0]


INFINITE = {"$float": "inf"}
ODD = "does not hold what a run saves"

M, S = MANIFEST_NAME, SHARD
DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "flip-header": ("chunk-digest", lambda c: flip(c / S, 100)),
    "flip-length": ("chunk-digest", lambda c: flip(c / S, 1)),
    "flip-data": ("chunk-digest", lambda c: flip(c / S, PAGE + 5)),
    "flip-last-byte": ("chunk-digest", lambda c: flip(c / S, -1)),
    "zero-first-page": ("chunk-digest", lambda c: zero(c / S, 0)),
    "zero-data-page": ("chunk-digest", lambda c: zero(c / S, PAGE)),
    "cut-to-nothing": ("shard-size", lambda c: os.truncate(c / S, 0)),
    "cut-to-a-page": ("shard-size", lambda c: os.truncate(c / S, PAGE)),
    "cut-by-a-byte": ("shard-size", lambda c: os.truncate(c / S, (c / S).stat().st_size - 1)),
    "grown": ("shard-size", lambda c: (c / S).write_bytes((c / S).read_bytes() + bytes(PAGE))),
    "shard-of-another-step": ("chunk-digest", lambda c: take_from_older(c, S)),
    "shard-missing": ("shard-missing", lambda c: (c / S).unlink()),
    "shard-is-a-fifo": ("unreadable", replace_by(os.mkfifo)),
    "shard-is-a-link": ("unreadable", replace_by(lambda p: p.symlink_to("../../elsewhere"))),
    "shard-is-a-directory": ("unreadable", replace_by(Path.mkdir)),
    "manifest-flipped": ("manifest-digest", lambda c: flip(c / M, 50)),
    "manifest-digest-wrong": ("manifest-digest", lambda c: change_digit(c / M)),
    "manifest-edited": ("manifest-digest", edit_text),
    "manifest-of-another-step": ("key-mismatch", lambda c: take_from_older(c, M)),
    "manifest-cut": ("manifest-unreadable", lambda c: os.truncate(c / M, 500)),
    "manifest-empty": ("manifest-unreadable", lambda c: os.truncate(c / M, 0)),
    "manifest-zeroed": ("manifest-unreadable", lambda c: zero(c / M, 0)),
    "manifest-missing": ("manifest-missing", lambda c: (c / M).unlink()),
    "field-wrong": ("manifest-field", lambda c: resign(c, lambda r: r.update(epoch=-1))),
    "key-wrong": ("key-mismatch", lambda c: resign(c, lambda r: r.update(step=STEPS + 1))),
    "leaf-not-stored": ("leaf-missing", lambda c: resign(c, forget_leaf)),
    "alias-to-nowhere": (
        "leaf-missing",
        lambda c: resign(c, lambda r: r.update(aliases={"a": "nowhere"})),
    ),
    "alias-of-a-stored-name": (
        "leaf-duplicate",
        lambda c: resign(
            c, lambda r: r.update(aliases={"tracked.model.bias": "tracked.model.weight"})
        ),
    ),
    # Nothing that verify looks at is wrong here: the tree makes no sense to its decoder.
    "shape-wrong": ("has 64 bytes, its node says 68", lambda c: resign(c, wrong_shape)),
    "no-items-but-large": ("array is too big", lambda c: resign(c, too_large_a_nothing)),
    "tree-is-a-number": (ODD, lambda c: resign(c, lambda r: r.update(tree=5))),
    "tree-is-nothing": (ODD, lambda c: resign(c, lambda r: r.update(tree=None))),
    "leaf-is-a-list": ("text was expected, not list", lambda c: resign(c, leaf_is_a_list)),
    "parameter-is-a-list": (ODD, lambda c: resign(c, parameter_is_a_list)),
    "epoch-is-infinite": (
        ODD,
        lambda c: resign(c, lambda r: r["tree"]["data"].update(epoch=INFINITE)),
    ),
    "step-is-infinite": (
        ODD,
        lambda c: resign(c, lambda r: r["tree"]["progress"].update(step=INFINITE)),
    ),
}


def go_on(rundir: RunDir) -> tuple[Checkpointer, str, Program]:
    """Enter as a new process would, with objects that hold something else; then one more step."""
    torch.manual_seed(99)
    program = Program()
    with torch.no_grad():
        for parameter in program.model.parameters():
            parameter.fill_(float("nan"))
    with program.enter(rundir.root) as ckpt:
        restored = program.fingerprint()
        program.advance(ckpt)
    return ckpt, restored, program


@pytest.mark.parametrize("name", DAMAGE)
def test_a_restore_passes_over_what_is_broken_and_says_why(
    made: Made, rundir: RunDir, name: str
) -> None:
    """The next older one, to the bit, whatever the broken one had put into the objects."""
    words, damage = DAMAGE[name]
    newest = path_of(rundir, STEPS)
    damage(newest)
    before = sorted(path.name for path in newest.iterdir())
    ckpt, restored, _ = go_on(rundir)
    assert ckpt.restored is not None
    assert (STEPS - 1, made.fingerprints[STEPS - 1]) == (ckpt.restored.step, restored)
    (skipped,) = ckpt.restored.skipped
    assert newest == skipped.path
    assert words in skipped.reason
    assert before == sorted(path.name for path in newest.iterdir()), "evidence was touched"
    (recorded,) = [
        record
        for path in rundir.events.glob("00000002-*")
        for record in events.read(path)
        if record["event"] == Event.RESTORED.value
    ]
    assert [str(skipped)] == recorded["skipped"]


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_found_is_what_verify_calls_it(rundir: RunDir, name: str) -> None:
    """One name per invariant, the same for `hpc-ckpt verify` as for a restore."""
    words, damage = DAMAGE[name]
    damage(path_of(rundir, STEPS))
    kinds = {defect.kind.value for defect in verify(path_of(rundir, STEPS))}
    if words in {kind.value for kind in DefectKind}:
        assert words in kinds
        assert path_of(rundir, STEPS - 1) == hpc_ckpt.latest(rundir.root)
    else:
        assert set() == kinds


def test_the_run_goes_on_from_there_as_if_the_broken_one_had_never_been(
    made: Made, rundir: RunDir
) -> None:
    """The step that was lost is done again and comes out the same, under a newer generation."""
    flip(path_of(rundir, STEPS) / SHARD, PAGE)
    ckpt, _, program = go_on(rundir)
    assert STEPS == ckpt.global_step
    assert made.fingerprints[STEPS] == program.fingerprint()
    newest = hpc_ckpt.latest(rundir.root)
    assert CheckpointKey(2, STEPS).directory_name == newest.name
    assert [] == verify(newest)


@pytest.mark.parametrize("name", NEWER)
def test_nothing_goes_back_behind_what_a_newer_version_has_made(rundir: RunDir, name: str) -> None:
    """It is sound: what was saved after an older one would outrank it, and retention remove it."""
    words, edit = NEWER[name]
    newest = path_of(rundir, STEPS)
    resign(newest, edit)
    before = sorted(path.name for path in rundir.checkpoints.iterdir())
    with pytest.raises(NewerCheckpoint, match=r"not damaged.*Upgrade.*move it away") as caught:
        go_on(rundir)
    assert newest == caught.value.path
    assert words in str(caught.value)
    with pytest.raises(NewerCheckpoint, match=newest.name):
        hpc_ckpt.load(newest)
    assert before == sorted(path.name for path in rundir.checkpoints.iterdir())


def test_several_broken_ones_are_all_passed_over(made: Made, rundir: RunDir) -> None:
    """Each with its own reason, newest first."""
    os.truncate(path_of(rundir, STEPS) / SHARD, 5000)
    (path_of(rundir, STEPS - 1) / MANIFEST_NAME).unlink()
    flip(path_of(rundir, STEPS - 2) / SHARD, PAGE)
    ckpt, restored, _ = go_on(rundir)
    assert ckpt.restored is not None
    assert made.fingerprints[STEPS - 3] == restored
    reasons = [one.reason for one in ckpt.restored.skipped]
    words = ["shard-size", "manifest-missing", "chunk-digest"]
    assert [True] * 3 == [word in reason for word, reason in zip(words, reasons, strict=True)]


def test_a_stray_file_is_no_reason_to_go_back(made: Made, rundir: RunDir) -> None:
    """Network file systems make such files by themselves."""
    (path_of(rundir, STEPS) / ".nfs0001").write_bytes(b"")
    ckpt, restored, _ = go_on(rundir)
    assert ckpt.restored is not None
    assert (STEPS, ()) == (ckpt.restored.step, ckpt.restored.skipped)
    assert made.fingerprints[STEPS] == restored


# ── what several checkpoints share ────────────────────────────────────────────────────────
def shared_shard(rundir: RunDir) -> tuple[Path, int]:
    """The file that the newest one refers to, and the step of the checkpoint that holds it."""
    (record,) = (s for s in record_of(path_of(rundir, STEPS))["shards"] if "in" in s)
    key = CheckpointKey.parse(record["in"])
    assert key is not None
    return rundir.checkpoints / record["in"] / record["file"], key.step


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: flip(path, PAGE + 1), "chunk-digest"),
        (lambda path: os.truncate(path, PAGE), "shard-size"),
        (Path.unlink, "shard-missing"),
    ],
    ids=["flip", "cut", "missing"],
)
def test_a_broken_shared_shard_breaks_all_that_refer_to_it(
    made: Made, rundir: RunDir, damage: Callable[[Path], object], words: str
) -> None:
    """None of them is loaded with another's bytes; the newest that does without it is."""
    path, holder = shared_shard(rundir)
    assert 1 < holder < STEPS
    damage(path)
    ckpt, restored, _ = go_on(rundir)
    assert ckpt.restored is not None
    assert (holder - 1, made.fingerprints[holder - 1]) == (ckpt.restored.step, restored)
    assert STEPS - holder + 1 == len(ckpt.restored.skipped)
    assert all(words in one.reason for one in ckpt.restored.skipped)


def test_a_checkpoint_that_went_breaks_those_that_refer_to_it(made: Made, rundir: RunDir) -> None:
    """Somebody deleted a directory by hand: the others say what they miss."""
    _, holder = shared_shard(rundir)
    shutil.rmtree(path_of(rundir, holder))
    ckpt, _, _ = go_on(rundir)
    assert ckpt.restored is not None
    assert holder - 1 == ckpt.restored.step
    missing = CheckpointKey(1, holder).directory_name
    assert all(missing in one.reason for one in ckpt.restored.skipped)


def test_when_nothing_is_left_nothing_is_begun(rundir: RunDir) -> None:
    """Starting afresh would throw the work away; a person decides."""
    for step in range(1, STEPS + 1):
        (path_of(rundir, step) / MANIFEST_NAME).write_bytes(b"")
    with pytest.raises(NoCheckpoint, match="Move it away to start afresh"):
        go_on(rundir)


# ── sweeps over every file of a real checkpoint ───────────────────────────────────────────
def named(path: Path, checkpoint: Path) -> str:
    return path.name if path.parent == checkpoint else f"{path.parent.name}/{path.name}"


def check_found(checkpoint: Path, path: Path, expected: set[str]) -> None:
    found = verify(checkpoint)
    assert 1 == len(found)
    assert named(path, checkpoint) == found[0].file
    assert found[0].kind.value in expected


def test_one_flipped_bit_in_every_page_of_every_file_is_found(rundir: RunDir) -> None:
    """The manifest's by its own digest, a shard's by its chunk's, a shared one's too."""
    noise, checkpoint = random.Random(5), path_of(rundir, STEPS)
    pages = 0
    for path in files_of(checkpoint):
        data = path.read_bytes()
        expected = {"manifest-digest"} if path.name == M else {"chunk-digest"}
        for start in range(0, len(data), PAGE):
            # The last 47 bytes of a manifest are its own affair: test_corruption.py.
            end = min(start + PAGE, len(data) - (47 if path.name == M else 0))
            flip(path, noise.randrange(start, end))
            check_found(checkpoint, path, expected)
            path.write_bytes(data)
            pages += 1
    assert pages > 25


def test_every_zeroed_page_of_every_file_is_found(rundir: RunDir) -> None:
    """Pages that were allocated and never written; a manifest's last page holds its digest."""
    checkpoint = path_of(rundir, STEPS)
    for path in files_of(checkpoint):
        data = path.read_bytes()
        manifest = {"manifest-digest", "manifest-unreadable"}
        for start in range(0, len(data), PAGE):
            if not any(data[start : start + PAGE]):
                continue  # it was all zeros: the end of a random generator's state
            zero(path, start)
            check_found(checkpoint, path, manifest if path.name == M else {"chunk-digest"})
            path.write_bytes(data)


def test_truncation_of_every_file_at_many_lengths_is_found(rundir: RunDir) -> None:
    """At and beside every page, and anywhere."""
    noise, checkpoint = random.Random(6), path_of(rundir, STEPS)
    for path in files_of(checkpoint):
        data = path.read_bytes()
        lengths = {0, 1, 7, 8, 9, len(data) - 1, *noise.sample(range(len(data)), 20)}
        lengths |= {n + near for n in range(PAGE, len(data), PAGE) for near in (-1, 0, 1)}
        for length in sorted(lengths - {len(data)}):
            path.write_bytes(data[:length])
            expected = {"manifest-unreadable"} if path.name == M else {"shard-size"}
            check_found(checkpoint, path, expected)
        path.write_bytes(data)


def test_swapped_shards_are_found(rundir: RunDir) -> None:
    """The two of one checkpoint, and those of the same name in two checkpoints."""
    checkpoint = path_of(rundir, STEPS)
    _, own, shared = files_of(checkpoint)
    older = path_of(rundir, STEPS - 1) / SHARD
    for other, kind in ((shared, DefectKind.SHARD_SIZE), (older, DefectKind.CHUNK_DIGEST)):
        first, second = own.read_bytes(), other.read_bytes()
        own.write_bytes(second)
        other.write_bytes(first)
        both = {own, other} & set(files_of(checkpoint))
        expected = {(kind, named(path, checkpoint)) for path in both}
        assert expected == {(defect.kind, defect.file) for defect in verify(checkpoint)}
        own.write_bytes(first)
        other.write_bytes(second)
