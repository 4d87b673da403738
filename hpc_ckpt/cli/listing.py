"""`ls` and `verify`: what lies in a run's checkpoints directory."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import EXIT_COMPLETE, EXIT_FAILED, CorruptCheckpoint, HpcCkptError, RootError
from ..format.manifest import Manifest
from ..format.verify import PIN_NAME, read_manifest
from ..format.verify import verify as verify_directory
from ..levels.restarts import Restarts
from ..rundir import MANIFEST_NAME, CheckpointKey, RunDir
from ..units import format_size
from .plaintext import moment, shown

PINNED = "pinned"
Listed = tuple[str, "Manifest | None", str]


def list_checkpoints(root: Path, *, as_json: bool) -> None:
    rows = list(_listed(RunDir(root)))
    restarts = Restarts(RunDir(root)).told()
    if restarts and not as_json and not rows:
        _show_restarts(restarts)
        return
    if as_json:
        print(json.dumps([*(_record(row) for row in rows), *restarts]))
    elif not rows:
        print(f"no checkpoints in {root}")
    else:
        from .tables import checkpoint_table, console

        console().print(checkpoint_table(rows))
        _show_restarts(restarts)


def _show_restarts(restarts: Sequence[Mapping[str, Any]]) -> None:
    for one in restarts:
        saved, size = moment(one["wall_time"]), format_size(one["bytes"])
        print(shown(f"{one['restart']}  {one['level']}  {saved}  {size}  {one['reason']}"))


def describe_checkpoints(root: Path) -> None:
    """One paragraph for each: everything a checkpoint remembers of where it comes from."""
    rows = list(_listed(RunDir(root)))
    if not rows:
        print(f"no checkpoints in {root}")
    for name, manifest, remark in rows:
        print(shown(f"{name}{f'  {remark}' if remark else ''}"))
        if manifest is not None:
            for label, text in _told(manifest):
                print(f"    {label:12}{shown(text)}")


def _told(manifest: Manifest) -> Iterator[tuple[str, str]]:
    yield "saved", f"{moment(manifest.wall_time)}, {manifest.reason}"
    yield "position", f"step {manifest.step}, epoch {manifest.epoch}"
    if manifest.metrics:
        yield "metrics", ", ".join(f"{k} {v:.6g}" for k, v in manifest.metrics.items())
    yield "size", format_size(sum(shard.size for shard in manifest.shards))
    if manifest.holders:
        held = sum(shard.size for shard in manifest.shards if shard.holder is not None)
        where = ", ".join(sorted(holder.directory_name for holder in manifest.holders))
        yield "unchanged", f"{format_size(held)} of it in {where}"
    versions = ", ".join(f"{name} {number}" for name, number in manifest.versions.items())
    yield "versions", f"{versions}; {manifest.threads} threads"
    about = _about(manifest)
    code = about.get("code")
    if isinstance(code, dict):
        yield "code", f"git {code.get('git')}{', with changes' if code.get('dirty') else ''}"
    if isinstance(about.get("command"), list):
        yield "command", shlex.join(str(part) for part in about["command"])
    described = about.get("described")
    if isinstance(described, dict):
        for key, value in described.items():
            yield "described", f"{key} = {json.dumps(value)}"


def _about(manifest: Manifest) -> dict[str, Any]:
    """What the program said of itself; checkpoints of other programs may say nothing."""
    about = manifest.tree.get("about") if isinstance(manifest.tree, dict) else None
    return about if isinstance(about, dict) else {}


def _listed(rundir: RunDir) -> Iterator[Listed]:
    if not rundir.checkpoints.is_dir():
        raise RootError(rundir.root, "no run there; give the root of a run")
    found = [_look(rundir.checkpoints / key.directory_name) for key in rundir.committed()]
    users = Counter(
        holder.directory_name for _, manifest, _ in found if manifest for holder in manifest.holders
    )
    for name, manifest, remark in found:
        needed = [f"needed by {users[name]} more"] if manifest and users[name] else []
        yield name, manifest, " · ".join([remark, *needed] if remark else needed)


def _look(directory: Path) -> Listed:
    try:
        return (
            directory.name,
            read_manifest(directory),
            PINNED if (directory / PIN_NAME).exists() else "",
        )
    except HpcCkptError as error:
        return directory.name, None, str(error)


def _record(row: Listed) -> dict[str, object]:
    name, manifest, remark = row
    if manifest is None:
        return {"checkpoint": name, "defect": remark}
    return {
        "checkpoint": name,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "generation": manifest.generation,
        "wall_time": manifest.wall_time,
        "reason": manifest.reason,
        "bytes": sum(shard.size for shard in manifest.shards),
        "metrics": {key: _number(value) for key, value in manifest.metrics.items()},
        "pinned": remark.startswith(PINNED),
        "needs": sorted(holder.directory_name for holder in manifest.holders),
        "threads": manifest.threads,
        "versions": manifest.versions,
        "about": _about(manifest),
    }


def _number(value: float) -> float | str:
    """JSON has no infinities; their names are better than a broken document."""
    return value if value - value == 0 else str(value)


def verify_checkpoints(target: Path, *, as_json: bool) -> int:
    """Every checkpoint of a run, or the one that `target` is."""
    directories = _targets(target)
    found: dict[str, list[Any]] = {str(directory): _defects(directory) for directory in directories}
    if as_json:
        print(json.dumps({name: [str(d) for d in defects] for name, defects in found.items()}))
    else:
        for name, defects in found.items():
            print(f"{'ok      ' if not defects else 'DEFECTS '}{Path(name).name}")
            for defect in defects:
                print(f"        {shown(str(defect))}")
    return EXIT_FAILED if any(found.values()) else EXIT_COMPLETE


def _defects(directory: Path) -> list[Any]:
    if directory.parent.name != "restarts":
        return list(verify_directory(directory))
    try:
        Restarts(RunDir(directory.parent.parent)).open_named(directory.name)
    except CorruptCheckpoint as error:
        return list(error.defects)
    return []


def _targets(target: Path) -> list[Path]:
    target = target.absolute()
    if CheckpointKey.parse(target.name) or (target / MANIFEST_NAME).exists():
        if not target.is_dir():
            raise RootError(target, "no checkpoint there")
        return [target]
    rundir = RunDir(target)
    if not rundir.checkpoints.is_dir():
        raise RootError(target, "neither a run nor a checkpoint")
    names = sorted(path.name for path in rundir.checkpoints.iterdir())
    own = [rundir.checkpoints / name for name in names if CheckpointKey.parse(name)]
    known = Restarts(rundir).keys()
    return [*own, *(rundir.restarts / key.directory_name for key in known)]
