"""Collects the restart files of a program into a restart, and puts them back."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import fsio
from ..preflight import check_storage
from .base import NoRoom, NothingNew, SaveFailed, Work
from .evidence import Evidence, Stamp, stamp
from .recipe import Recipe
from .restarts import copy_in, put_back
from .values import Values

log = logging.getLogger("hpc_ckpt.steward")

ASIDE = ".aside"
ATTEMPTS = 5
AGAIN_AFTER_S = 0.2
ROOM = 1.1
"""Times what is to be copied: a log grows meanwhile, and others write there too."""
TRIES = 3
"""A file that was never saved and that the program does not take is gone on from so often."""
Stamps = dict[str, Stamp]


class Unsteady(Exception):
    """A file changed while it was copied."""


@dataclass
class Collected:
    """What a restart has, and where each file of it belongs."""

    restart: str = ""
    """The path of the file to go on from, as the program knows it."""
    stored: str | None = None
    """The same inside the restart; None: it was not copied."""
    files: list[dict[str, Any]] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        return {"restart": self.restart, "files": self.files}


class Beginning:
    """What was there before the chain started the program; later links read it."""

    def __init__(self, name: str, work: Work) -> None:
        self._path = _noted(work, f"begun-{name}")
        self.restarts: dict[str, Sequence[int]] = {}
        self.results: dict[str, Sequence[int]] = {}
        self._tried: dict[str, int] = {}
        self.is_known = False
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = {} if self._path is None else json.loads(self._path.read_bytes())
            self.restarts, self.results = dict(record["restarts"]), dict(record["results"])
            self._tried = dict(record["tried"])
            self.is_known = True

    def note(self, restarts: Mapping[str, Stamp], results: Mapping[str, Sequence[int]]) -> None:
        self.restarts, self.results = dict(restarts), dict(results)
        self._write()

    def may_try(self, path: str, mark: Stamp) -> bool:
        key = f"{path} {mark[0]} {mark[1]}"
        self._tried[key] = self._tried.get(key, 0) + 1
        self._write()
        return self._tried[key] <= TRIES

    def _write(self) -> None:
        record = {"restarts": self.restarts, "results": self.results, "tried": self._tried}
        if self._path is None:
            return
        try:
            fsio.make_directory(self._path.parent)
            fsio.write_atomic(self._path, json.dumps(record).encode())
        except OSError as error:
            log.warning("cannot note what was there before: %s: %s", self._path, error)


class Made:
    """The copies that this chain has made once; later links read it."""

    def __init__(self, name: str, work: Work) -> None:
        self._path = _noted(work, f"made-{name}")
        self._made: list[str] = []
        with contextlib.suppress(OSError, ValueError):
            self._made = [] if self._path is None else list(json.loads(self._path.read_bytes()))

    def __contains__(self, path: Path) -> bool:
        return str(path) in self._made

    def add(self, path: Path) -> None:
        """Raises OSError: the next link would take it for one of another chain."""
        self._made.append(str(path))
        if self._path is not None:
            fsio.make_directory(self._path.parent)
            fsio.write_atomic(self._path, json.dumps(self._made).encode())


def _noted(work: Work, name: str) -> Path | None:
    """Of one command, in the directory of the chain's restarts."""
    mark = hashlib.sha256("\0".join(work.argv).encode("utf-8", "surrogateescape")).hexdigest()
    return None if work.noted is None else work.noted / f"{name}-{mark[:12]}.json"


class Collector:
    """Knows which files it has seen: only newer ones make a restart."""

    def __init__(self, recipe: Recipe, values: Values, evidence: Evidence, cwd: Path) -> None:
        self._recipe = recipe
        self._values = values
        self._evidence = evidence
        self._cwd = cwd
        self._seen: Stamps = {}

    def stamps(self) -> Stamps:
        """Every restart file that is there now, in the order of the patterns."""
        found: Stamps = {}
        for pattern in self._recipe.restart.files:
            for path in self._values.files(pattern):
                now = None if path.name.endswith(ASIDE) else stamp(path)
                if now is not None:
                    found[str(path)] = now
        return found

    def may_have_left(self, before: Mapping[str, Stamp]) -> bool:
        """Whether there is a restart file that was not there before, or could not be found."""
        if any(self._values.unknown(pattern) for pattern in self._recipe.restart.files):
            return True
        return any(before.get(path) != mark for path, mark in self.stamps().items())

    def seen_now(self) -> None:
        """What lies there now is of an earlier run, or was put there to go on from."""
        self._seen = self.stamps()

    def seen_then(self, begun: Beginning) -> None:
        """What was written since is not saved yet."""
        self._seen = {path: (mark[0], mark[1]) for path, mark in begun.restarts.items()}

    def newest(self) -> Path | None:
        found = self.stamps()
        return Path(max(found, key=lambda path: found[path][1])) if found else None

    def collect(self, into: Path, steady_s: float = 0.0) -> Collected:
        """Raises NothingNew, NoRoom. Files that belong together must stay the same for
        `steady_s`."""
        now = self.stamps()
        new = {path: s for path, s in now.items() if self._seen.get(path) != s}
        if not new:
            raise NothingNew("there is no restart file yet" if not now else "no newer restart file")
        self._check_room(into, new, now)
        if self._recipe.restart.pick != "all":
            collected = self._newest_of(into, new)
        elif self._recipe.restart.copy:
            collected = self._all(into, list(now), steady_s)
        else:
            collected = self._noted(into, now)
        self._also(into, collected)
        return collected

    def _check_room(self, into: Path, new: Stamps, now: Stamps) -> None:
        """A copy that takes the last of the space, or of a quota, ends the program that writes
        there too."""
        wanted = self._recipe.restart
        marks = list(now.values()) if wanted.pick == "all" else [max(new.values())]
        sizes = [mark[0] for mark in marks if wanted.copy]
        sizes += [mark[0] for _, mark in self._beside()]
        problem = check_storage(into, int(ROOM * sum(sizes)), len(sizes)) if sizes else None
        if problem is not None:
            raise NoRoom(problem)

    def _noted(self, into: Path, now: Stamps) -> Collected:
        """The program looks after them itself, and may be changing them at this moment."""
        collected = Collected()
        for path, mark in now.items():
            self._note(collected, Path(path), mark, None)
        why = self._insane(into, collected, self._cwd / collected.restart)
        if why is not None:
            raise NothingNew(why)
        self._seen = now
        return collected

    def _newest_of(self, into: Path, new: Stamps) -> Collected:
        why = ""
        for path in sorted(new, key=lambda path: new[path][1], reverse=True):
            collected = Collected()
            try:
                mark = self._take(Path(path), into, collected)
            except (Unsteady, FileNotFoundError) as error:
                why = str(error)
                continue
            except OSError as error:
                raise SaveFailed(f"{path} cannot be copied: {error}") from error
            why = self._insane(into, collected, Path(path)) or ""
            if why:
                self._leave(into, collected)
                continue
            # Older ones that were never taken are not news either.
            self._seen.update({p: s for p, s in new.items() if s[1] <= mark[1]})
            self._seen[path] = mark
            return collected
        raise NothingNew(why)

    def _all(self, into: Path, paths: list[str], steady_s: float) -> Collected:
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(AGAIN_AFTER_S)
            collected, marks = Collected(), {}
            try:
                for path in paths:
                    marks[path] = self._take(Path(path), into, collected)
            except (Unsteady, FileNotFoundError):
                self._leave(into, collected)
                continue
            except OSError as error:
                raise SaveFailed(f"the restart files cannot be copied: {error}") from error
            time.sleep(steady_s)
            if marks == self.stamps():
                why = self._insane(into, collected, Path(paths[0]))
                if why is not None:
                    raise NothingNew(why)
                self._seen = marks
                return collected
            self._leave(into, collected)
            paths = list(self.stamps())
        raise NothingNew("the restart files change all the time while they are copied")

    def _take(self, path: Path, into: Path, collected: Collected) -> Stamp:
        """Copies one file, if it stays the same meanwhile."""
        copy = self._recipe.restart.copy
        name = f"{len(collected.files):04d}/{path.name}"
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(AGAIN_AFTER_S)
            before = stamp(path)
            if before is None:
                continue
            if copy:
                copy_in(path, into / name)
            if before == stamp(path) and (not copy or before[0] == (into / name).stat().st_size):
                self._note(collected, path, before, name if copy else None)
                return before
        (into / name).unlink(missing_ok=True)
        raise Unsteady(f"{path.name} changed while it was copied")

    def _note(self, collected: Collected, path: Path, mark: Stamp, stored: str | None) -> None:
        shown = self._shown(path)
        if not collected.files:
            collected.restart, collected.stored = shown, stored
        record = {"path": shown, "stored": stored, "size": mark[0], "mtime_ns": mark[1]}
        collected.files.append(record)

    def _also(self, into: Path, collected: Collected) -> None:
        """What is wanted beside it; a log that grows meanwhile is no harm."""
        for path, mark in self._beside():
            name = f"{len(collected.files):04d}/{path.name}"
            copy_in(path, into / name)
            self._note(collected, path, mark, name)
            collected.files[-1]["also"] = True

    def _beside(self) -> Iterator[tuple[Path, Stamp]]:
        for also in self._recipe.also:
            for path in self._values.files(also.files):
                mark = stamp(path)
                if mark is not None and (also.at_most is None or mark[0] <= also.at_most):
                    yield path, mark

    def _leave(self, into: Path, collected: Collected) -> None:
        for record in collected.files:
            if record["stored"] is not None:
                (into / record["stored"]).unlink(missing_ok=True)

    def _insane(self, into: Path, collected: Collected, original: Path) -> str | None:
        if self._recipe.sane is None:
            return None
        restart = into / collected.stored if collected.stored else original
        why = self._evidence.insane(self._recipe.sane, restart)
        if why is not None:
            log.warning("not saved: %s", why)
        return why

    def put_aside(self, facts: Mapping[str, Any]) -> None:
        """What is newer than the saved one would be taken in its place by the program.

        Of files that belong together those that are put back need not go away.
        """
        if not self._recipe.restart.aside:
            return
        saved, whole = _saved_at(facts), self._recipe.restart.pick == "all"
        stays = {str(self._cwd / f["path"]) for f in facts["files"]} if whole else set()
        for path, mark in self.stamps().items():
            if mark[1] > saved and path not in stays:
                why = "not of the same moment" if whole else "not known to be whole"
                _move_away(path, f"newer than what was saved, {why}")

    def newer_than(self, facts: Mapping[str, Any]) -> str | None:
        """A whole restart file in place that was written after the saved one; its path."""
        sane = self._recipe.sane
        if sane is None or self._recipe.restart.pick != "newest":
            return None
        saved = _saved_at(facts)
        now = self.stamps()
        for path in sorted(now, key=lambda path: now[path][1], reverse=True):
            if now[path][1] <= saved:
                return None
            if self._evidence.is_whole(sane, Path(path)) and self._is_further(path, facts):
                return self._shown(Path(path))
        return None

    def left_since(self, begun: Beginning) -> str | None:
        """A restart file that an earlier link wrote and nobody saved; its path.

        Of several that belong together some may be older than others: none of them.
        """
        wanted, sane = self._recipe.restart, self._recipe.sane
        left = {p: s for p, s in self.stamps().items() if list(begun.restarts.get(p, ())) != [*s]}
        if wanted.pick == "all" and wanted.copy and len(left) > 1:
            return None
        for path in sorted(left, key=lambda path: left[path][1], reverse=True):
            whole = sane is None or self._evidence.insane(sane, Path(path)) is None
            if whole and begun.may_try(path, left[path]):
                return self._shown(Path(path))
            if wanted.aside:
                _move_away(path, "the program does not take it" if whole else "not whole")
        return None

    def _shown(self, path: Path) -> str:
        return str(path.relative_to(self._cwd) if path.is_relative_to(self._cwd) else path)

    def _is_further(self, path: str, facts: Mapping[str, Any]) -> bool:
        """By its step, where there is one: times change when files are copied or touched. What a
        program that counts anew wrote since the last save is given up for that."""
        source, saved = self._recipe.progress, facts.get("step")
        if source is None or saved is None:
            return True
        step = self._evidence.number(source, Path(path))
        return step is not None and step > int(saved)


def _move_away(path: str, why: str) -> None:
    log.warning("moved away: %s, %s", path, why)
    Path(path).replace(f"{path}{ASIDE}")


def _saved_at(facts: Mapping[str, Any]) -> int:
    return max((int(f["mtime_ns"]) for f in facts["files"] if not f.get("also")), default=0)


def put_all_back(restart: Path, facts: Mapping[str, Any], cwd: Path) -> str:
    """The path of the file to go on from. What only grows is put back where it is shorter."""
    for record in facts["files"]:
        target = cwd / record["path"]
        if record["stored"] is None:
            continue
        now = stamp(target)
        if record.get("also") and now is not None and now[0] >= int(record["size"]):
            continue
        put_back(restart / record["stored"], target)
    return str(facts["restart"])
