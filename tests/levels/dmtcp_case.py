"""A program under the DMTCP level without a steward around it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt.levels.base import Moment, Start, Work
from hpc_ckpt.levels.dmtcp import Dmtcp
from hpc_ckpt.levels.program import Program
from hpc_ckpt.levels.restarts import Restart, Restarts
from hpc_ckpt.making import prepare
from hpc_ckpt.rundir import RunDir

LONG_S = 60.0


class Lone:
    """Start, save, restart, by hand; every attempt has a scratch directory of its own."""

    def __init__(self, place: Path, tool: Mapping[str, Any] | None = None) -> None:
        self.place = place
        self.rundir = RunDir(place / "run")
        prepare(self.rundir)
        self.cwd = place / "work"
        self.cwd.mkdir()
        self.output = place / "output"
        self.environ = dict(os.environ)
        self.level = Dmtcp(tool)
        self.program: Program | None = None
        self.before: tuple[str, ...] = ()
        """Words before every command line."""
        self._tool = tool
        self._links = 0

    def work(self, *argv: str) -> Work:
        scratch = self.place / f"scratch-{self._links}"
        scratch.mkdir(exist_ok=True)
        return Work(argv=argv, cwd=self.cwd, environ=self.environ, scratch=scratch)

    def first(self, *argv: str) -> Program:
        return self._run(self.level.first(self.work(*argv)))

    def _run(self, start: Start) -> Program:
        self.program = Program((*self.before, *start.argv), start.cwd, start.environ, self.output)
        return self.program

    def save(self, *, last: bool = False, within_s: float = LONG_S) -> Restart:
        program, moment = self.running, Moment(until=time.monotonic() + within_s, last=last)
        with Restarts(self.rundir).stage(1) as staging:
            self.level.ask(program, staging.path, moment)
            saved = self.level.wait(program, staging.path, moment)
            return staging.commit(
                level="dmtcp",
                step=saved.step or 0,
                reason="test",
                facts=saved.facts,
                guard=lambda: None,
            )

    def resume(self, restart: Restart, *, within_s: float = LONG_S) -> Program:
        """As a new link: nothing of the old one is left."""
        self.end()
        self._links += 1
        self.level = Dmtcp(self._tool)
        program = self._run(self.level.resume(self.work(), restart.path, restart.facts))
        self.level.resumed(program, time.monotonic() + within_s)
        return program

    @property
    def running(self) -> Program:
        assert self.program is not None
        return self.program

    def code(self) -> int:
        found = self.running.wait(time.monotonic() + LONG_S)
        assert found is not None
        return found

    def until_lines(self, path: Path, count: int) -> None:
        until = time.monotonic() + LONG_S
        while not path.exists() or len(path.read_text().splitlines()) < count:
            assert time.monotonic() < until, path
            assert self.running.poll() is None, (self.running.poll(), self.output.read_text())
            time.sleep(0.05)

    def end(self) -> None:
        if self.program is not None:
            self.program.end()
        self.level.close()
        shutil.rmtree(self.place / f"scratch-{self._links}", ignore_errors=True)


class Synced:
    """What was synced, and when a restart got its name."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._told: list[str] = []
        fsync, rename = os.fsync, Path.rename

        def noted(descriptor: int) -> None:
            fsync(descriptor)
            self._told.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

        def named(path: Path, target: str | os.PathLike[str]) -> Path:
            found = rename(path, target)
            # Inside of a directory that has its name now, as it was called before.
            self._told.append(f"{path} → {target}")
            return found

        patch.setattr(os, "fsync", noted)
        patch.setattr(Path, "rename", named)

    def check(self, restart: Restart) -> None:
        final = restart.path.parent
        at = next(n for n, told in enumerate(self._told) if told.endswith(f" → {final}"))
        draft = Path(self._told[at].partition(" → ")[0])
        before = self._told[:at]
        found = [path for path in restart.path.rglob("*") if not path.is_symlink()]
        everything = {draft / path.relative_to(final) for path in found}
        assert everything
        assert [] == sorted(str(path) for path in everything if str(path) not in before)
        assert str(draft / "files") in before
        manifest = [n for n, told in enumerate(before) if "MANIFEST" in told]
        assert manifest and manifest[0] > max(before.index(str(path)) for path in everything)
        assert str(final.parent) in self._told[at:]
