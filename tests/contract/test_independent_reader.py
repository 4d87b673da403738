"""docs/format.md is enough: sixty lines written from it read what a Checkpointer wrote."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import ast
import collections
import math
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from independent_reader import load
from torch import nn

import hpc_ckpt
from hpc_ckpt import Checkpointer
from hpc_ckpt.format.verify import verify
from hpc_ckpt.state import plain, tensors, untree

READER = Path(__file__).with_name("independent_reader.py")
PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
DTYPES = {
    torch.float64: "<f8", torch.float32: "<f4", torch.float16: "<f2", torch.bfloat16: "<u2",
    torch.int64: "<i8", torch.int32: "<i4", torch.int16: "<i2", torch.int8: "|i1",
    torch.uint8: "|u1", torch.uint16: "<u2", torch.uint32: "<u4", torch.uint64: "<u8",
    torch.bool: "|b1", torch.complex64: "<c8", torch.complex128: "<c16",
    torch.float8_e4m3fn: "|u1", torch.float8_e5m2: "|u1",
}  # fmt: skip
"""How the reader hands out each dtype: numpy has no bfloat16 and no 8-bit floats."""


class Tied(nn.Module):
    """Two names for one memory, as in every language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3).to(torch.bfloat16)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in C order, through another door than the product's."""
    if not tensor.numel():
        return b""
    flat = tensor.detach().resolve_conj().clone().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist())


def same(expected: object, actual: object) -> bool:
    """Equal in value, and 1, 1.0 and True are three values; memory is compared by its bytes."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, np.ndarray)
        form = (np.dtype(DTYPES[expected.dtype]), tuple(expected.shape), bits(expected))
        return form == (actual.dtype, actual.shape, actual.tobytes())
    if isinstance(expected, (np.ndarray, np.generic)):
        assert isinstance(actual, (np.ndarray, np.generic))
        form = (expected.dtype, expected.shape, expected.tobytes())
        return form == (actual.dtype, actual.shape, actual.tobytes())
    if isinstance(expected, dict):
        assert isinstance(actual, dict)
        keys = [same(a, b) for a, b in zip(expected, actual, strict=True)]
        return all(keys) and all(same(expected[key], actual[key]) for key in expected)
    if type(expected) is not type(actual):
        return False
    if isinstance(expected, (list, tuple)):
        assert isinstance(actual, (list, tuple))
        return all(same(a, b) for a, b in zip(expected, actual, strict=True))
    return repr(expected) == repr(actual) if type(expected) is float else expected == actual


def tensors_of_every_kind() -> dict[str, Any]:
    torch.manual_seed(0)
    kinds = {str(dtype): (torch.randn(2, 3) * 50).abs().to(dtype) for dtype in DTYPES}
    image = torch.randn(2, 3, 4, 5)
    return {
        **kinds,
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 4),
        "transposed": torch.arange(6).reshape(2, 3).t(),
        "channels last": image.to(memory_format=torch.channels_last),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "strange name \N{SNOWMAN} ../$x": torch.ones(1),
    }


def plain_values() -> dict[Any, Any]:
    shared = [1, {"$shared": 2}]
    return {
        "integers": [0, -1, 2**63, -(2**1023), 2**1024, -(10**400)],
        "floats": [0.1, 1.0, -0.0, 0.0, 1e-8, 1e16, 5e-324, math.inf, -math.inf, math.nan],
        "others": [None, True, False, "text \N{SNOWMAN}\U0001f600\n", b"\x00\xff", 1 - 2j, ""],
        "nested": {"a": [(1, [2.0, ("3",)]), {}, []]},
        7: {-1: "integer keys", (1, "two"): None, "$dollar": 1.5, None: 2, True: 3},
        "sets": [{1, 2}, frozenset({"a"})],
        "maps": [collections.OrderedDict(b=1, a=2), collections.defaultdict(int, x=1)],
        "twice": [shared, shared],
        "numpy": [np.float32(0.1), np.int64(-3), np.bool_(True)],
        "leaf": "a plain key of that name",
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of a real run, and what was in memory when it was made."""
    root = tmp_path_factory.mktemp("run")
    torch.manual_seed(1)
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.125)
    arrays = {
        "float": np.linspace(0, 1, 5, dtype="f4"),
        "big-endian": np.arange(4, dtype=">f8"),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "text": np.array(["a", "bc"]),
        "date": np.array(["2020-01-02"], "M8[us]"),
    }
    values, kinds = plain_values(), tensors_of_every_kind()
    tracked: dict[str, Any] = {"arrays": arrays, "values": values, "kinds": kinds}
    with Checkpointer(root, model=model, optimizer=optimizer, **tracked) as ckpt:
        hidden = model.norm(model.embedding(torch.tensor([1, 2])).to(torch.bfloat16))
        model.head(hidden.float()).sum().backward()
        optimizer.step()
        ckpt.step(loss=0.5)
    tracked["model"], tracked["optimizer"] = model.state_dict(), optimizer.state_dict()
    return hpc_ckpt.latest(root), tracked


@pytest.mark.parametrize("name", ["model", "optimizer", "kinds", "arrays", "values"])
def test_the_reader_finds_what_was_saved(saved: tuple[Path, dict[str, Any]], name: str) -> None:
    """Every value of the right type, every tensor to the bit, every key in its order."""
    path, tracked = saved
    _, state = load(path)
    assert same(tracked[name], state["tracked"][name])


def test_tied_memory_is_stored_once_and_found_under_both_names(
    saved: tuple[Path, dict[str, Any]],
) -> None:
    """The alias is in the manifest, and its bytes are those of the leaf it stands for."""
    manifest, state = load(saved[0])
    assert {"tracked.model.head.weight": "tracked.model.embedding.weight"} == manifest["aliases"]
    model = state["tracked"]["model"]
    assert model["embedding.weight"].tobytes() == model["head.weight"].tobytes()


def test_what_occurred_twice_is_one_object(saved: tuple[Path, dict[str, Any]]) -> None:
    """Not a copy: a program that changed one would expect the other to change."""
    first, second = load(saved[0])[1]["tracked"]["values"]["twice"]
    assert first is second


def test_the_reader_agrees_with_the_product(saved: tuple[Path, dict[str, Any]]) -> None:
    """Also on what the test did not choose: random numbers, positions, progress."""
    theirs, ours = load(saved[0])[1], hpc_ckpt.load(saved[0])
    assert {"step": 1, "epoch": 0} == theirs["progress"]
    assert all(same(ours[part], theirs[part]) for part in ("rng", "data", "progress"))


def test_the_reader_refuses_a_flipped_bit(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """The digests it computes are those the page defines, not merely some text."""
    for name in ("MANIFEST.json", "rank-00000.safetensors"):
        for file in saved[0].iterdir():
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= file.name == name
            (tmp_path / file.name).write_bytes(data)
        with pytest.raises(AssertionError, match="damaged"):
            load(tmp_path)


def test_what_an_older_checkpoint_holds_is_found_there(tmp_path: Path) -> None:
    """A frozen part of more than one chunk: written once, read from its holder."""
    torch.manual_seed(4)
    frozen = nn.ParameterList([nn.Parameter(torch.randn(5_000_000), requires_grad=False)])
    moving = torch.zeros(3)
    with Checkpointer(tmp_path, base=frozen, moving=moving) as ckpt:
        for _ in range(2):
            moving += 1
            ckpt.step()
            ckpt.save(wait=True)
    path = hpc_ckpt.latest(tmp_path)
    manifest, state = load(path)
    held = [shard for shard in manifest["shards"] if "in" in shard]
    assert [True] == [len(shard["digests"]) > 1 for shard in held]
    assert same(frozen.state_dict(), state["tracked"]["base"])
    assert same(moving, state["tracked"]["moving"])


# ── the rules of the game ─────────────────────────────────────────────────────────────────
def test_the_reader_is_short_and_stands_alone(saved: tuple[Path, dict[str, Any]]) -> None:
    """Sixty lines, numpy, and xxhash for the digests, which numpy has not; no module of ours, of
    torch or of safetensors is loaded while it reads."""
    source = READER.read_text()
    assert len(source.splitlines()) <= 60
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(source))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert {"json", "base64", "functools", "pathlib", "numpy", "xxhash"} == imported
    code = (
        "import sys; from pathlib import Path; from independent_reader import load\n"
        "load(Path(sys.argv[1]))\n"
        "print(sorted({'torch', 'hpc_ckpt', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(saved[0])],
        cwd=READER.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "[]\n" == done.stdout, done.stderr


def block(marker: str) -> str:
    return PAGE.partition(marker)[2].partition("```json\n")[2].partition("```")[0]


def test_the_example_of_the_page_is_a_checkpoint(tmp_path: Path) -> None:
    """Manifest and shard as the page spells them out: both readers load them."""
    text = block("header-example").rstrip("\n").encode().ljust(4088)
    shard = struct.pack("<Q", 4088) + text + struct.pack("<6f", *range(6))
    path = tmp_path / "step-000012000-g00000007"
    path.mkdir()
    (path / "MANIFEST.json").write_text(block("manifest-example"))
    (path / "rank-00000.safetensors").write_bytes(shard)
    assert [] == verify(path)
    weight = torch.arange(6.0).reshape(2, 3)
    expected = {
        "model": {"weight": weight, "tied": weight},
        "betas": (0.9, 0.999),
        "state": {0: -math.inf},
    }
    assert same(expected, load(path)[1])
    ours = hpc_ckpt.load(path)
    assert ours["model"]["weight"] is ours["model"]["tied"]
    assert expected["betas"] == ours["betas"]


def test_the_page_names_every_tag_and_no_other() -> None:
    """What a writer may write is on the page, and nothing else is."""
    read = {*plain.DECODERS, *untree._CONTAINERS, *untree._FOREIGN}
    read |= {"$tensor", "$array", "$sparse", "$quantized", "$generator"}
    source = "".join(path.read_text() for path in Path(untree.__file__).parent.glob("*.py"))
    assert read >= set(re.findall(r'"(\$[a-z_]+)"', source))
    section = PAGE.partition("## 4. The tree")[2].partition("## 5. ")[0]
    assert read == set(re.findall(r'\{"(\$[a-z_]+)":', section)) - {"$b"}


def test_the_page_names_every_dtype_that_has_a_name_in_a_shard() -> None:
    """torch's name beside the shard's, one table row each."""
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    for ours, stored in tensors._STORED.items():
        assert [row for row in rows if f"`{ours}`" in row and f"`{stored}`" in row], ours


def test_the_page_lists_the_factories() -> None:
    """A defaultdict of anything else cannot be read."""
    (row,) = (line for line in PAGE.splitlines() if '`{"$defaultdict"' in line)
    assert [f"`{name}`" for name in untree.FACTORIES if f"`{name}`" not in row] == []
