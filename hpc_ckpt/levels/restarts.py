"""Restarts: the files a program that cannot be changed goes on from, whole or not at all.

One directory each under restarts/ of the run directory, named like a checkpoint. Everything is
written into a temporary directory, synced, the manifest last; a rename makes it visible. A
restart counts only if every byte is what its manifest says.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from .. import fsio
from ..errors import CorruptCheckpoint
from ..format.manifest import Digester
from ..rundir import MANIFEST_NAME, CheckpointKey, RunDir
from .base import AnotherCommand, AnotherLevel, StillSaving

FORMAT = 1
FILES = "files"
LEAST_KEPT = 2
"""The newest may turn out to be something the program does not take."""
MANIFEST_CAP = 64 * 1024**2
BLOCK = 16 * 1024**2
_TEMPORARY = re.compile(r"\.(?:tmp|trash)-g(\d{8,})-.*")


@dataclass(frozen=True)
class Restart:
    """A restart whose bytes were all checked."""

    key: CheckpointKey
    path: Path
    """The directory of its files."""
    level: str
    size: int
    facts: Mapping[str, Any]


class _NoFile(OSError):
    """Something else lies there."""


class Staging:
    """A restart being made; nobody sees it before commit()."""

    def __init__(self, store: Restarts, generation: int) -> None:
        self._store = store
        self._generation = generation
        self._place = store.place / f".tmp-g{generation:08d}-{fsio.unique_suffix()}"
        self.path = self._place / FILES
        """What a level puts here belongs to the restart."""

    def __enter__(self) -> Staging:
        fsio.make_directory(self._store.place)
        self._place.mkdir(mode=fsio.directory_mode(self._store.place))
        self.path.mkdir(mode=fsio.directory_mode(self._store.place))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, StillSaving):
            return  # sweep() of the next link has it
        with contextlib.suppress(OSError):
            fsio.delete_tree(self._place)

    def commit(
        self,
        *,
        level: str,
        step: int,
        reason: str,
        facts: Mapping[str, Any],
        guard: Callable[[], None],
        argv: Sequence[str] | None = None,
    ) -> Restart:
        """`guard` runs right before it becomes visible, and raises to stop it. `argv`: the command
        whose work it is."""
        records = [_record(path, self.path) for path in _walk(self.path)]
        _sync_directories(self.path)
        key = self._store.free_key(self._generation, step)
        manifest = {
            "format": FORMAT,
            "level": level,
            "generation": key.generation,
            "step": key.step,
            "revision": key.revision,
            "wall_time": round(time.time(), 3),
            "reason": reason,
            "argv": None if argv is None else list(argv),
            "facts": dict(facts),
            "files": records,
        }
        fsio.write_atomic(self._place / MANIFEST_NAME, _seal(manifest))
        fsio.reached("restart.staged")
        guard()
        target = self._store.path_of(key)
        self._place.rename(target)
        fsio.reached("restart.renamed")
        fsio.sync_directory(self._store.place)
        size = sum(record["size"] for record in records)
        return Restart(key, target / FILES, level, size, facts)


class Restarts:
    """All restarts of one chain."""

    def __init__(self, rundir: RunDir) -> None:
        self.place = rundir.restarts

    def path_of(self, key: CheckpointKey) -> Path:
        return self.place / key.directory_name

    def keys(self) -> list[CheckpointKey]:
        """Those with a manifest, oldest first; says nothing of validity."""
        found = (CheckpointKey.parse(name) for name in fsio.names_in(self.place))
        return sorted(
            key
            for key in found
            if key is not None and fsio.is_file(self.path_of(key) / MANIFEST_NAME)
        )

    def stage(self, generation: int) -> Staging:
        return Staging(self, generation)

    def open(self, key: CheckpointKey) -> Restart:
        """Reads every byte; CorruptCheckpoint says what is wrong."""
        place = self.path_of(key)
        manifest = _unseal(place)
        problems = list(_problems(place / FILES, manifest))
        if problems:
            raise CorruptCheckpoint(place, problems)
        size = sum(record["size"] for record in manifest["files"])
        return Restart(key, place / FILES, manifest["level"], size, manifest["facts"])

    def open_named(self, name: str) -> Restart:
        """The same by the name of its directory."""
        key = CheckpointKey.parse(name)
        if key is None:
            raise CorruptCheckpoint(self.place / name, ["not the name of a restart"])
        return self.open(key)

    def told(self) -> list[dict[str, Any]]:
        """For people: what the manifests say, oldest first; nothing is checked but those."""
        found = []
        for key in self.keys():
            try:
                manifest = _unseal(self.path_of(key))
            except CorruptCheckpoint:
                continue
            said = {name: manifest.get(name) for name in ("level", "step", "wall_time", "reason")}
            own = manifest["facts"].get("step")  # the program's number; it may count anew
            said["step"] = said["step"] if own is None else own
            size = sum(int(record["size"]) for record in manifest["files"])
            found.append({"restart": key.directory_name, **said, "bytes": size})
        return found

    def of_another(self, argv: Sequence[str]) -> list[str] | None:
        """A command other than this one whose work is in them; one that an older version made
        does not say."""
        for key in reversed(self.keys()):
            with contextlib.suppress(CorruptCheckpoint):
                made_by = _unseal(self.path_of(key)).get("argv")
                if made_by is not None and made_by != list(argv):
                    return list(made_by)
        return None

    def check_command(self, argv: Sequence[str]) -> None:
        """Raises AnotherCommand."""
        saved = self.of_another(argv)
        if saved is not None:
            raise AnotherCommand(not_its_work(self.place, saved, argv))

    def owner(self, offered: Sequence[str], given_up: Collection[str]) -> str | None:
        """The level that the work is in; one that was given up has had to begin anew by another,
        unless it is the only one that is offered. Raises AnotherLevel."""
        passed = set(given_up) - (set(offered) if len(offered) == 1 else set())
        made = (str(one["level"]) for one in reversed(self.told()))
        found = next((name for name in made if name not in passed), None)
        if found is not None and found not in offered:
            raise AnotherLevel(not_offered(self.place, found, offered))
        return found

    def newest(self, level: str, skip: Callable[[CheckpointKey, str], None]) -> Iterator[Restart]:
        """Valid ones of this level, newest first; `skip` hears of those that are not."""
        for key in reversed(self.keys()):
            try:
                found = self.open(key)
            except CorruptCheckpoint as error:
                skip(key, "; ".join(map(str, error.defects)))
                continue
            if found.level == level:
                yield found

    def free_key(self, generation: int, step: int) -> CheckpointKey:
        taken = [k for k in self.keys() if (k.generation, k.step) == (generation, step)]
        return CheckpointKey(generation, step, taken[-1].revision + 1 if taken else 0)

    def retain(
        self,
        last: int,
        level: str,
        committed: CheckpointKey,
        skipped: Collection[CheckpointKey] = (),
    ) -> list[CheckpointKey]:
        """Right after a commit: of this level all but the newest `last`, at least two, go. Those
        that could not be gone on from do not count, and go with the sound ones around them."""
        own = [key for key in self.keys() if self._level_of(key) == level]
        sound = [key for key in own if key not in skipped][-max(last, LEAST_KEPT) :]
        enough = len(sound) == max(last, LEAST_KEPT)
        surplus = [key for key in own if enough and key < sound[0] and key != committed]
        for key in surplus:
            self._remove(key)
        return surplus

    def sweep(self, generation: int) -> None:
        """What killed links up to this one left behind; only the holder of the lease calls."""
        for name in fsio.names_in(self.place):
            match = _TEMPORARY.fullmatch(name)
            if match is not None and int(match[1]) < generation:
                with contextlib.suppress(OSError):
                    fsio.delete_tree(self.place / name)

    def _level_of(self, key: CheckpointKey) -> str | None:
        try:
            return str(_unseal(self.path_of(key))["level"])
        except (CorruptCheckpoint, OSError):
            return None

    def _remove(self, key: CheckpointKey) -> None:
        trash = self.place / f".trash-g{key.generation:08d}-{fsio.unique_suffix()}"
        with contextlib.suppress(OSError):
            self.path_of(key).rename(trash)
            fsio.delete_tree(trash)


# ── manifest ──────────────────────────────────────────────────────────────────────────────
def _seal(manifest: Mapping[str, Any]) -> bytes:
    body = json.dumps(manifest, sort_keys=True)
    digester = Digester()
    digester.update(memoryview(body.encode()))
    return json.dumps({"manifest": body, "digest": digester.text()}).encode() + b"\n"


def _unseal(place: Path) -> dict[str, Any]:
    path = place / MANIFEST_NAME
    try:
        if path.stat().st_size > MANIFEST_CAP:
            raise CorruptCheckpoint(place, ["manifest: larger than any manifest"])
        outer = json.loads(path.read_bytes())
        body, told = outer["manifest"], outer["digest"]
        digester = Digester()
        digester.update(memoryview(body.encode()))
        if digester.text() != told:
            raise CorruptCheckpoint(place, ["manifest: its digest differs"])
        found = json.loads(body)
        if found["format"] != FORMAT:
            detail = f"manifest: format {found['format']} is not known; upgrade hpc_ckpt"
            raise CorruptCheckpoint(place, [detail])
    except FileNotFoundError as error:
        raise CorruptCheckpoint(place, [f"manifest: {error.strerror}"]) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(place, [f"manifest: {error!r}"]) from None
    return dict(found)


def _problems(place: Path, manifest: Mapping[str, Any]) -> Iterator[str]:
    named = set()
    for record in manifest["files"]:
        name = str(record["name"])
        named.add(name)
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            yield f"{name}: a path outside of the restart"
            continue
        try:
            found = _record(place / name, place)
        except (FileNotFoundError, NotADirectoryError, _NoFile) as error:
            yield f"{name}: {error.strerror}"
            continue
        for field in ("link", "size", "digest"):
            if found.get(field) != record.get(field):
                yield f"{name}: {field} is {found.get(field)}, not {record.get(field)}"
                break
    extra = {str(path.relative_to(place)) for path in _walk(place)} - named
    yield from (f"{name}: not in the manifest" for name in sorted(extra))


def _walk(place: Path) -> list[Path]:
    """Files and links below it, in order."""
    return sorted(p for p in place.rglob("*") if p.is_symlink() or not p.is_dir())


def _record(path: Path, place: Path) -> dict[str, Any]:
    name = str(path.relative_to(place))
    info = path.lstat()
    if stat.S_ISLNK(info.st_mode):
        return {"name": name, "link": str(path.readlink()), "size": 0, "digest": None}
    if not stat.S_ISREG(info.st_mode):
        raise _NoFile(0, "neither a file nor a link")
    digester = Digester()
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        while block := os.read(descriptor, BLOCK):
            digester.update(memoryview(block))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"name": name, "size": info.st_size, "digest": digester.text()}


def _sync_directories(place: Path) -> None:
    for path in (place, *(p for p in place.rglob("*") if p.is_dir() and not p.is_symlink())):
        fsio.sync_directory(path)


# ── files of the program ──────────────────────────────────────────────────────────────────
def copy_in(source: Path, target: Path) -> None:
    """A file of the program into a restart; by reference where the file system can."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def put_back(source: Path, target: Path) -> None:
    """A file of a restart to where the program looks for it: whole, or as it was before."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.tmp-{fsio.unique_suffix()}")
    try:
        shutil.copy2(source, draft)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def not_offered(place: Path, owner: str, offered: Sequence[str]) -> str:
    """What to say where the level that has the work is not one of those to go on with."""
    return (
        f"the work so far was saved by {owner}, in {place}; the levels are now "
        f"{', '.join(offered) or 'none'}, and would begin anew over it. Ask for {owner} by name "
        "(level: or recipe:), load the module that brings it, or remove the directory to begin anew"
    )


def not_its_work(place: Path, saved: Sequence[str], asked: Sequence[str]) -> str:
    """What to say where the restarts there are of another command than the one to be run."""
    return (
        f"the restarts in {place} are of another command: {shlex.join(saved)}; to run "
        f"{shlex.join(asked)} choose another root, or remove that directory to begin anew with it"
    )
