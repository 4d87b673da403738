"""System level: DMTCP. A process tree is written into images and brought back from them.

No root is needed; every program of the tree must be dynamically linked. What DMTCP does badly
is done around it: it checks no image (restarts.py does), a checkpoint that fails kills the
program (space is looked at before), and exit code 0 may also mean that it was told to quit.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import math
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import fsio
from ..preflight import check_storage
from ..settings import SAVE_FACTOR
from . import rollback
from .base import (
    Kind,
    Moment,
    NoRoom,
    NothingNew,
    NotNow,
    ResumeFailed,
    Saved,
    Start,
    StartFailed,
    StillSaving,
    Work,
)
from .binaries import deaf_to_preload, executables, find, launcher_in
from .dmtcp_checkpoint import Checkpoint, said_of
from .dmtcp_control import under_control, until_finished
from .dmtcp_coordinator import Coordinator
from .dmtcp_files import WrittenFiles
from .dmtcp_images import check_images, move_up, warn_of_gaps
from .dmtcp_tool import (
    ASSERTED,
    DmtcpTool,
    NoTool,
    clean,
    env_file_text,
    find_tool,
    fresh_names,
    same_addresses,
)
from .dmtcp_window import Window
from .footprint import image_bytes, processor_features
from .openfiles import RECORD
from .program import Program

log = logging.getLogger("hpc_ckpt.steward")

LEAD_S = 30.0
LEAD_LEAST_S = 2.0
EARLY_S = 30.0
"""A crash this soon after a launch is more likely DMTCP's than the program's."""
STRAY_S = 5.0
"""An end this soon after a checkpoint of somebody else is taken to be his doing too."""
LOOK_EVERY_S = 0.1
SPACE_FACTOR = 1.1
REST_BYTES_A_S = 100e6
"""A guess of how fast images are written, before any save."""
_CRASHES = tuple(
    -number
    for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGSYS)
)
_IMAGES = "images"
_TAKEN_AWAY = "dmtcp-taken-away"


@dataclass(frozen=True)
class _Attempt:
    """What one launch or restart has around it."""

    coordinator: Coordinator
    window: Window

    def close(self) -> None:
        self.coordinator.close()
        self.window.close()


class Dmtcp:
    """One coordinator for each attempt; images go straight into the restart being made."""

    name = "dmtcp"
    kind = Kind.SYSTEM

    def __init__(self, tool: Mapping[str, Any] | None = None) -> None:
        self._profile = tool
        self.lead_s = LEAD_S
        self._tool: DmtcpTool | None = None
        self._attempt: _Attempt | None = None
        self._own_scratch: tempfile.TemporaryDirectory[str] | None = None
        self._base = 0
        self._own_s = 0.0
        """Processor time of the tree in this attempt that was DMTCP's: restart, saves."""
        self._began = 0.0
        self._fresh: list[str] = []
        self._save: Checkpoint | None = None
        self._rest_s: float | None = None
        """Of the last save, without the copies of files."""
        self._taken_away = rollback.TakenAway()

    # ── before ────────────────────────────────────────────────────────────────────────────
    def probe(self, work: Work) -> str | None:
        """First what holds wherever DMTCP may be found: a module may bring it on the node."""
        why = _beyond(work)
        if why is not None:
            return why
        try:
            self._tool = find_tool(self._profile, work.environ)
        except NoTool as error:
            return str(error)
        there = find(work.argv[0], work.cwd, work.environ) is not None
        return None if there else f"{work.argv[0]}: no such program here"

    @property
    def tool(self) -> dict[str, Any] | None:
        """What probe() has found, as a profile would name it."""
        return None if self._tool is None else {"path": str(self._tool.place)}

    # ── start and restart ─────────────────────────────────────────────────────────────────
    def first(self, work: Work) -> Start:
        """What is wrong with the window or the coordinator is the node's, and NotHere."""
        try:
            tool = self._found(work)
            attempt = self._begin(work, Window())
        except NoTool as error:
            raise StartFailed(str(error)) from error
        rollback.forget_all(self._scratch_of(work, kept=True) / _TAKEN_AWAY)
        self._base = 0
        coordinator = attempt.coordinator
        argv = tool.launch(
            coordinator.port, attempt.window.images, coordinator.temporary, work.argv
        )
        return self._start(work, argv)

    def resume(self, work: Work, restart: Path, facts: Mapping[str, Any]) -> Start:
        images = sorted(restart.glob("*.dmtcp"))
        check_images(images, facts)
        try:
            tool = self._found(work)
        except NoTool as error:
            raise ResumeFailed(str(error)) from error
        if facts.get("dmtcp") != tool.version:
            log.warning("saved by DMTCP %s, this is %s", facts.get("dmtcp"), tool.version)
        self._drop()
        attempt = self._begin(work, Window(str(facts.get("window"))))
        found = rollback.read(restart) if (restart / RECORD).exists() else {"files": []}
        kept = self._scratch_of(work, kept=True) / _TAKEN_AWAY
        self._taken_away.roll_back(restart, found, kept, facts.get("left"))
        warn_of_gaps(facts.get("written", {}))
        variables = env_file_text(work.environ, facts.get("environment", ()))
        attempt.window.show(sorted(restart.iterdir()), variables)
        self._base = int(facts.get("step", 0))
        self.lead_s = max(LEAD_LEAST_S, 2 * float(facts.get("seconds", LEAD_S)))
        self._rest_s = facts.get("rest_seconds")
        links = [attempt.window.images / path.name for path in images]
        coordinator = attempt.coordinator
        argv = tool.restart(coordinator.port, coordinator.temporary, links)
        return self._start(work, [*self._same_addresses(work), *argv])

    def _same_addresses(self, work: Work) -> list[str]:
        words = same_addresses(work.environ)
        if not words:
            log.warning(
                "setarch -R does not work here: after a restart the program may crash when it "
                "asks for more memory, and is then restarted once more"
            )
        return words

    def _start(self, work: Work, argv: list[str]) -> Start:
        """DMTCP does not bring the working directory back: it is where dmtcp_restart runs."""
        self._began, self._own_s = time.monotonic(), 0.0
        self._fresh = fresh_names(work.environ)
        return Start(argv=tuple(argv), cwd=work.cwd, environ=clean(work.environ))

    def _found(self, work: Work) -> DmtcpTool:
        if self._tool is None:
            self._tool = find_tool(self._profile, work.environ)
        return self._tool

    def _begin(self, work: Work, window: Window) -> _Attempt:
        self._drop()  # that of a restart that did not work
        place = self._scratch_of(work) / f"dmtcp-{fsio.unique_suffix()}"
        try:
            coordinator = Coordinator(self._found(work), place, work.environ)
        except BaseException:  # the window is given back, then raised again
            window.close()
            raise
        self._attempt = _Attempt(coordinator, window)
        return self._attempt

    def _scratch_of(self, work: Work, *, kept: bool = False) -> Path:
        """`kept`: for the next link too, where there is such a directory."""
        found = (work.kept if kept else None) or work.scratch
        if found is not None:
            return found
        self._own_scratch = self._own_scratch or tempfile.TemporaryDirectory(prefix="hpc-ckpt-")
        return Path(self._own_scratch.name)

    def _drop(self) -> None:
        if self._attempt is not None:
            self._attempt.close()

    def _now(self) -> _Attempt:
        if self._attempt is None:
            raise NothingNew("nothing was started")
        return self._attempt

    def resumed(self, program: Program, until: float) -> None:
        """A damaged image can make mtcp_restart spin for ever: only a running peer counts."""
        coordinator = self._now().coordinator
        while True:
            code = program.poll()
            if code is not None:
                if code < 0 or code in (1, ASSERTED) or not coordinator.has_seen_a_client():
                    raise ResumeFailed(f"dmtcp_restart ended with {said_of(code)}")
                self._taken_away.forget()
                return  # it had little left to do
            status = coordinator.status()
            if status is not None and status.running and status.peers > 0:
                self._taken_away.forget()
                self._own_s = program.processor_s()
                return
            if time.monotonic() >= until:
                waited = time.monotonic() - self._began
                raise ResumeFailed(f"no process of it runs after {waited:.0f} s")
            time.sleep(LOOK_EVERY_S)

    # ── saves ─────────────────────────────────────────────────────────────────────────────
    def ask(self, program: Program, into: Path, moment: Moment) -> None:
        began = time.monotonic()
        if program.poll() is not None:
            raise NothingNew("the program has ended")
        pids = self._under_control(program, moment)
        attempt = self._now()
        own = (attempt.window.place, attempt.coordinator.temporary)
        place = into / _IMAGES
        files = WrittenFiles(program, place, into, own)
        files.room = int(SPACE_FACTOR * sum(map(image_bytes, pids)))
        guess = files.room / REST_BYTES_A_S
        files.rest_s = guess if self._rest_s is None else SAVE_FACTOR * self._rest_s
        need = files.room + files.size
        self._check_space(into, need, len(pids))
        place.mkdir(parents=True, exist_ok=True)
        attempt.window.point(place)
        used_s = program.processor_s()
        step = self._base + math.ceil(max(0.0, used_s - self._own_s))
        coordinator = attempt.coordinator
        command = coordinator.checkpoint()
        self._save = Checkpoint(coordinator, command, place, step, files, began, used_s, need)

    def wait(self, program: Program, into: Path, moment: Moment) -> Saved:
        save, self._save = self._save, None
        if save is None:
            raise NothingNew("no save was asked for")
        window = self._now().window
        try:
            save.until_whole(program, moment)
        except StillSaving:
            window.unfinished = save.place  # or DMTCP would end the program with code 99
            raise
        finally:
            if window.unfinished is None:
                window.rest()
            self._own_s += max(0.0, program.processor_s() - save.used_s)
        self._rest_s = time.monotonic() - save.began - save.files.copying_s
        names = move_up(save.place, into)
        tree = program.tree()
        if moment.last:
            program.end()  # what it would still do is done again after the restart
        facts = {
            "step": save.step,
            "window": str(window.place),
            "images": names,
            "written": {path: one.size for path, one in save.files.before.items()},
            "dmtcp": None if self._tool is None else self._tool.version,
            "processor": processor_features(),
            "environment": self._fresh,
            "seconds": round(time.monotonic() - save.began, 3),
            "rest_seconds": round(self._rest_s, 3),
            "left": rollback.left_by(tree, into, moment.until) if moment.last else {},
        }
        return Saved(step=save.step, facts=facts)

    def _under_control(self, program: Program, moment: Moment) -> list[int]:
        attempt = self._now()
        try:
            until_finished(attempt.window, attempt.coordinator, moment)
            return under_control(program, attempt.coordinator, moment.until)
        except NotNow as error:
            log.warning("not saved: %s", error)
            raise

    def _check_space(self, into: Path, need: int, count: int) -> None:
        """For want of space DMTCP would kill the program."""
        problem = check_storage(into, need, 2 * count + 2)
        if problem is not None:
            raise NoRoom(problem)

    # ── after ─────────────────────────────────────────────────────────────────────────────
    def is_complete(self, work: Work, code: int) -> bool | None:
        attempt = self._attempt
        if code == 0 and attempt is not None and attempt.coordinator.was_told_to_kill():
            log.warning("exit code 0 means nothing: somebody has told the coordinator to kill it")
            return False
        if code == 0 and attempt is not None and attempt.window.stray_age_s() < STRAY_S:
            log.warning(
                "exit code 0 means nothing: a checkpoint that nobody here has asked for "
                "was made just before, as by dmtcp_command -kc, which ends it"
            )
            return False
        return None

    def own_failure(self, code: int) -> str | None:
        if code == ASSERTED:
            return "an assertion of DMTCP failed (code 99), its message is in the log"
        early = time.monotonic() < self._began + EARLY_S
        if early and code in _CRASHES and self._base == 0:
            return f"the program crashed under it soon after its launch ({said_of(code)})"
        return None

    def close(self) -> None:
        self._drop()
        self._taken_away.put_back()
        if self._own_scratch is not None:
            self._own_scratch.cleanup()
            self._own_scratch = None


def _beyond(work: Work) -> str | None:
    """Why no DMTCP can save this."""
    if work.gpus:
        return "GPUs are asked for, and DMTCP does not save what is on them"
    launcher = launcher_in(work.argv)
    if launcher is not None:
        return f"{launcher} starts processes elsewhere; see docs/guides/dmtcp.md for MPI"
    found = executables(work.argv, work.cwd, work.environ)
    return next(filter(None, map(deaf_to_preload, found)), None)
