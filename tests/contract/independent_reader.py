"""A checkpoint, read as docs/format.md says; numpy, and xxhash to assert every digest."""

import json
from base64 import b64decode
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

# Section 4.5: torch's name → numpy's; what numpy has no type for comes as unsigned integers.
ITEMS = {f"{u}int{8 * n}": f"<{k}{n}" for u, k in (("", "i"), ("u", "u")) for n in (1, 2, 4, 8)}
ITEMS |= {f"float{8 * n}": f"<f{n}" for n in (2, 4, 8)} | {"bfloat16": "<u2", "bool": "|b1"}
ITEMS |= {"complex64": "<c8", "complex128": "<c16", "float8_e4m3fn": "|u1", "float8_e5m2": "|u1"}


def load(directory: Path) -> tuple[dict, object]:
    data = (directory / "MANIFEST.json").read_bytes()
    digest = xxhash.xxh3_128_hexdigest(data[:-47])
    assert data[-47:].decode() == f'"digest": "{digest}"\n}}\n', "the manifest is damaged"
    manifest = json.loads(data)
    assert manifest["format_version"] == 1, "made by a newer version"
    leaves: dict[str, bytes] = {}
    for shard in manifest["shards"]:
        place = directory.parent / shard.get("in", directory.name)
        leaves |= read_shard((place / shard["file"]).read_bytes(), shard)
    leaves |= {alias: leaves[name] for alias, name in manifest["aliases"].items()}
    return manifest, decoded(manifest["tree"], leaves, {})


def read_shard(data: bytes, record: dict) -> dict[str, bytes]:
    chunks = [data[at : at + record["chunk"]] for at in range(0, len(data), record["chunk"])]
    assert record["digests"] == [xxhash.xxh3_128_hexdigest(c) for c in chunks], "damaged"
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    spans = {name: e["data_offsets"] for name, e in header.items() if name != "__metadata__"}
    return {name: data[start + first : start + end] for name, (first, end) in spans.items()}


def decoded(node, leaves, shared):
    again = partial(decoded, leaves=leaves, shared=shared)
    if not isinstance(node, dict):
        return [again(part) for part in node] if isinstance(node, list) else node
    tag, body = next(iter(node.items()), ("", None))
    if not tag.startswith("$"):
        return {key: again(part) for key, part in node.items()}
    if tag in ("$tensor", "$array"):
        dtype = np.dtype(ITEMS.get(str(body["dtype"]), body["dtype"]))
        assert len(leaves[body["leaf"]]) == int(np.prod(body["shape"])) * dtype.itemsize
        return np.frombuffer(leaves[body["leaf"]], dtype).reshape(body["shape"])
    if tag in ("$dict", "$counter", "$ordereddict", "$defaultdict"):
        pairs = body if isinstance(body, list) else body["items"]
        return {again(key): again(part) for key, part in pairs}
    if tag == "$shared":
        return shared.setdefault(body["id"], again(body["value"]))
    read = {"$tuple": tuple, "$set": set, "$frozenset": frozenset, "$ref": shared.__getitem__}
    read |= {"$bytes": b64decode, "$int": lambda n: int(n, 16), "$complex": lambda c: complex(*c)}
    read |= {"$float": lambda text: -0.0 if text == "-0x0.0p+0" else float(text)}
    read |= {"$scalar": lambda s: np.frombuffer(b64decode(s["data"]), s["dtype"])[0]}
    return read[tag](again(body))  # an unknown tag is an error, never a guess
