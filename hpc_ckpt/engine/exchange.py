"""Checkpoints in and out: torch's and safetensors' files become ours, and ours theirs.

A program of its own (`hpc-ckpt import` and `export` start it), for it needs torch. Files of torch
are read with weights_only: what would run code is refused.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .. import fsio, provenance
from ..errors import HpcCkptError, RootError, UserError
from ..format.manifest import FORMAT_VERSION, Manifest
from ..format.verify import open_reader
from ..making import prepare
from ..rundir import CheckpointKey, RunDir
from ..tiers.directory import DirectoryTier
from .labels import versions
from .restore import state_of
from .snapshot import Camera

TORCH_NAMES = (".pt", ".pth", ".bin", ".ckpt")
SAFETENSORS_NAME = ".safetensors"
_EPOCH_KEYS = ("epoch",)
_STEP_KEYS = ("global_step", "step", "iteration")
_ENDINGS = ("_state_dict", "_state")


# ── out ───────────────────────────────────────────────────────────────────────────────────
def export(checkpoint: Path, target: Path, part: str | None = None, *, force: bool = False) -> str:
    """Write what was tracked, or one part of it; returns what was done, for people."""
    write = _writer(target)
    if not target.parent.is_dir():
        raise UserError(f"{target} cannot be written: {target.parent} is not a directory")
    if fsio.exists(target) and not force:
        raise UserError(f"{target} exists; choose another name, or say --force")
    state = state_of(open_reader(checkpoint), map_location="cpu")
    value = _part(state["tracked"], part)
    draft = target.with_name(f".{target.name}.tmp-{fsio.unique_suffix()}")
    try:
        told = write(value, draft)
        with draft.open("rb") as stream:
            os.fsync(stream.fileno())
        draft.replace(target)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)
    return f"wrote {target}: {told}"


def _writer(target: Path) -> Callable[[Any, Path], str]:
    if target.suffix == SAFETENSORS_NAME:
        return _write_safetensors
    if target.suffix in TORCH_NAMES:
        return _write_torch
    known = ", ".join((*TORCH_NAMES, SAFETENSORS_NAME))
    raise UserError(f"{target.name}: its ending must be one of {known}")


def _part(tracked: Any, part: str | None) -> Any:
    value = tracked
    for name in part.split(".") if part else ():
        if not isinstance(value, dict) or name not in value:
            held = ", ".join(map(str, value)) if isinstance(value, dict) else "nothing"
            raise UserError(f"--part {part}: there is no {name!r}; it holds {held}")
        value = value[name]
    return value


def _write_torch(value: Any, path: Path) -> str:
    torch.save(value, path)
    return ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__


def _write_safetensors(value: Any, path: Path) -> str:
    named: dict[str, torch.Tensor] = {}
    others = 0
    for name, item in _flattened(value, ""):
        if isinstance(item, torch.Tensor):
            named[name] = item.detach().contiguous().clone()  # tied ones are written twice
        else:
            others += 1
    if not named:
        raise UserError("there are no tensors in it, and a safetensors file holds nothing else")
    save_file(named, path, metadata={"format": "pt"})
    left_out = f", {others} values that are no tensors left out" if others else ""
    return f"{len(named)} tensors{left_out}"


def _flattened(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(str(number), item) for number, item in enumerate(value)]
    else:
        yield path, value
        return
    for name, item in items:
        yield from _flattened(item, f"{path}.{name}" if path else name)


# ── in ────────────────────────────────────────────────────────────────────────────────────
@dataclass
class Sorted:
    """What a file of somebody else's holds, as a run would have tracked it."""

    tracked: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    epoch: int = 0
    left_out: list[str] = field(default_factory=list)


def import_file(
    source: Path,
    root: Path,
    *,
    step: int | None = None,
    epoch: int | None = None,
    rename: Mapping[str, str] | None = None,
    skip: Collection[str] = (),
) -> str:
    """Make a run directory with one checkpoint; returns what was done, for people."""
    found = sorted_out(_read(source), rename or {}, skip)
    found.step = found.step if step is None else step
    found.epoch = found.epoch if epoch is None else epoch
    rundir = RunDir(root)
    if fsio.is_directory(rundir.checkpoints) and rundir.committed():
        raise RootError(root, "it has checkpoints already; import into a new one")
    path = _commit(found, source, rundir)
    left_out = f"; left out: {', '.join(found.left_out)}" if found.left_out else ""
    return (
        f"wrote {path}: {', '.join(found.tracked)}; goes on after step {found.step} with epoch "
        f"{found.epoch}{left_out}. The program has to track parts of these names; --skip leaves "
        "one out, --rename OLD=NEW gives it another"
    )


def _read(source: Path) -> Any:
    if not source.is_file():
        raise UserError(f"{source}: no such file")
    try:
        if source.suffix == SAFETENSORS_NAME:
            return load_file(source)
        return torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:
        # Of torch, pickle, zip and safetensors: whatever is wrong with the file comes as any of
        # their classes.
        why = " ".join(str(error).split())[:300]
        raise UserError(f"{source} cannot be read without running code from it: {why}") from error


def sorted_out(loaded: Any, rename: Mapping[str, str], skip: Collection[str] = ()) -> Sorted:
    """By the habits of training scripts: parts under their names, counters, and other things."""
    if not isinstance(loaded, dict) or not loaded:
        raise UserError(f"it holds a {type(loaded).__name__}, not a dict of states")
    if all(isinstance(value, torch.Tensor) for value in loaded.values()):
        return Sorted({rename.get("model", "model"): loaded})
    for key in (*rename, *skip):
        if key not in loaded:
            raise UserError(f"there is no {key!r} in it; it holds {', '.join(map(str, loaded))}")
    found = Sorted()
    for key, value in loaded.items():
        if key in skip:
            found.left_out.append(str(key))
        elif key in _STEP_KEYS and type(value) is int:
            found.step = value
        elif key in _EPOCH_KEYS and type(value) is int:
            found.epoch = value + 1  # scripts save the one they have just done
        elif isinstance(value, (dict, list, torch.Tensor)) and key not in rename.values():
            name = rename.get(key, _plain_name(str(key)))
            if name in found.tracked:
                raise UserError(
                    f"{key!r} and another part are both called {name!r}: leave one out with "
                    f"--skip, or give it another name with --rename {key}=NAME"
                )
            found.tracked[name] = value
        else:
            found.left_out.append(str(key))
    if not found.tracked:
        raise UserError(f"no states found in it; it holds {', '.join(map(str, loaded))}")
    return found


def _plain_name(key: str) -> str:
    """model_state_dict → model; state_dict alone is what most call the model."""
    if key == "state_dict":
        return "model"
    for ending in _ENDINGS:
        if key.endswith(ending) and key != ending:
            return key.removesuffix(ending)
    return key


def _commit(found: Sorted, source: Path, rundir: RunDir) -> Path:
    chain = prepare(rundir)
    state: dict[str, Any] = {
        "tracked": found.tracked,
        "rng": None,
        "data": {"seed": None, "epoch": found.epoch, "positions": {}, "outside": {}},
        "progress": {"step": found.step, "epoch": found.epoch},
        "about": {**provenance.of_this_program(), "described": {"imported": source.name}},
    }
    snapshot = Camera().take(state)
    key = CheckpointKey(0, found.step)
    tier = DirectoryTier(rundir.checkpoints)
    with tier.stage(key) as staging:
        pairs = zip(snapshot.layouts, snapshot.images, strict=True)
        shards = tuple(staging.write_shard(layout, image) for layout, image in pairs)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            chain=chain,
            generation=key.generation,
            step=key.step,
            revision=key.revision,
            parent=None,
            epoch=found.epoch,
            wall_time=time.time(),
            reason=f"imported from {source.name}",
            metrics={},
            world_size=1,
            threads=torch.get_num_threads(),
            versions=versions(),
            tree=snapshot.make_tree(),
            aliases=snapshot.aliases,
            shards=shards,
        )
        committed = staging.commit(manifest, lambda: None)
    return committed.path


# ── the program ───────────────────────────────────────────────────────────────────────────
def main(arguments: list[str] | None = None) -> int:
    try:
        sys.stdout.write(_do(_parser().parse_args(arguments)) + "\n")
    except HpcCkptError as error:
        sys.stderr.write(f"hpc-ckpt: {error}\n")
        return error.exit_code
    return 0


def _do(options: argparse.Namespace) -> str:
    if options.verb == "export":
        return export(options.source, options.target, options.part, force=options.force)
    rename = dict(_assignment(text) for text in options.rename)
    return import_file(
        options.source,
        options.target,
        step=options.step,
        epoch=options.epoch,
        rename=rename,
        skip=options.skip,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpc-ckpt")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("export", "import"):
        one = verbs.add_parser(verb)
        one.add_argument("source", type=Path)
        one.add_argument("target", type=Path)
    verbs.choices["export"].add_argument("--part")
    verbs.choices["export"].add_argument("--force", action="store_true")
    verbs.choices["import"].add_argument("--step", type=_count)
    verbs.choices["import"].add_argument("--epoch", type=_count)
    verbs.choices["import"].add_argument("--rename", action="append", default=[])
    verbs.choices["import"].add_argument("--skip", action="append", default=[])
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _assignment(text: str) -> tuple[str, str]:
    old, sign, new = text.partition("=")
    if not sign or not old or not new:
        raise UserError(f"--rename {text}: write OLD=NEW")
    return old, new


if __name__ == "__main__":
    sys.exit(main())
