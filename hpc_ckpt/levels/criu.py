"""System level: CRIU saves the whole process tree from outside, with no preparation of it.

The program runs under a keeper (keeper.py) and writes its output into a file of its own; its
files are recorded at a save (openfiles.py) and rolled back before a restart (rollback.py).
What criu is told, and what it says: criu_tool.py.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import fsio
from ..errors import SpecError
from . import keeper, namespaces, openfiles, rollback
from .base import (
    Kind,
    Moment,
    NoRoom,
    NotHere,
    NothingNew,
    NotNow,
    ResumeFailed,
    Saved,
    SaveFailed,
    Start,
    Work,
)
from .binaries import launcher_in
from .criu_tool import (
    TAKEN,
    Tool,
    find,
    kernel_version,
    may_make_namespaces,
    reason_in,
    refused_by_storage,
)
from .footprint import living
from .namespaces import LAST_PID
from .program import Program, memory_of, tree_of
from .sockets import Tcp, tcp_of

log = logging.getLogger("hpc_ckpt.steward")

LEAD_S = 2.0
LEAD_BYTES_A_S = 200e6
LEAST_RESERVE_S = 2.0
"""For CRIU to break off and let the program go on."""
"""A guess of how fast images are written and read again for their digests."""
LEAD_LEAST_S = 0.5
LEAD_FACTOR = 3.0
"""Of a dump, for the whole save: digests, and the storage may be slower than last time."""
LOOK_EVERY_S = 0.02
MEASURE_EVERY_S = 5.0
START_S = 30.0
END_S = 5.0
ENDING_S = 0.5
BESIDE_S = 5.0
"""A process that has lost its parent may be about to end."""
_TAKEN_AWAY = "criu-taken-away"
_SCRIPT = """#!/bin/sh
case "$CRTOOLS_SCRIPT_ACTION" in
post-dump) exec {record} ;;
post-restore) {pids} ;;
esac
"""


class Criu:
    """One program tree; it stands still while a save is made."""

    name = "criu"
    kind = Kind.SYSTEM

    def __init__(self, tool: Mapping[str, Any] | None = None) -> None:
        self._wanted = tool
        self._tool: Tool | None = None
        self._scratch = Path()
        self._made: Path | None = None
        self._output: Path | None = None
        self._namespace = False
        self._taken: str | None = None
        """Why no restart can be gone on from on this node."""
        self._taken_away = rollback.TakenAway()
        self._root: int | None = None
        self._tcp = Tcp.NONE
        self._step = 0
        self._used_s = 0.0
        self._measured_s = 0.0
        self._asked: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self._memory = 0
        self._dumped: tuple[float, int] | None = None
        """Seconds of the last dump, and the memory that the program had."""
        self._lead: tuple[float, float] = (-math.inf, LEAD_S)

    @property
    def lead_s(self) -> float:
        """By the memory that the program has now."""
        now = time.monotonic()
        if now >= self._lead[0] + MEASURE_EVERY_S:
            self._lead = (now, self._guess(memory_of(tree_of(os.getpid())[1:])))
        return self._lead[1]

    def _guess(self, memory: int) -> float:
        if self._dumped is None:
            return LEAD_S + memory / LEAD_BYTES_A_S
        seconds, then = self._dumped
        return LEAD_LEAST_S + LEAD_FACTOR * seconds * max(1.0, memory / max(then, 1))

    # ── start ─────────────────────────────────────────────────────────────────────────────
    def probe(self, work: Work) -> str | None:
        launcher = launcher_in(work.argv)
        if launcher is not None:
            return f"{launcher} starts processes elsewhere, and CRIU does not save MPI"
        found = find(self._wanted, work)
        if isinstance(found, str):
            return found
        self._tool = found
        return None

    @property
    def tool(self) -> dict[str, Any] | None:
        """What probe() has found, as a profile would name it."""
        return None if self._tool is None else {"path": self._tool.path}

    def first(self, work: Work) -> Start:
        self._scratch = work.scratch or self._own_scratch()
        self._namespace = _namespaces_work()
        rollback.forget_all((work.kept or self._scratch) / _TAKEN_AWAY)
        self._step, self._used_s = 0, 0.0
        self._output = _free_name(work.kept or self._scratch)
        return self._start(work, ["--output", str(self._output), "--", *work.argv])

    def resume(self, work: Work, restart: Path, facts: Mapping[str, Any]) -> Start:
        if self._taken is not None:
            raise NotHere(self._taken)  # an older one has the same ids
        self._scratch = work.scratch or self._own_scratch()
        self._namespace = _namespaces_work()
        if facts["namespace"] and not self._namespace:
            raise NotHere(
                "the program had process ids of its own, which this account may not give it "
                "here: CRIU must run with the privileges that it had when it saved"
            )
        found = rollback.read(restart)
        kept = (work.kept or self._scratch) / _TAKEN_AWAY
        self._taken_away.roll_back(restart, found, kept, facts.get("left"))
        for path in rollback.grown(found):
            log.warning("%s has grown since the save, and was not open then: not cut back", path)
        self._output = Path(facts["output"])
        self._step = int(facts["step"])
        self._dumped = (float(facts["dump_s"]), int(facts["memory"]))
        self._restore_log.unlink(missing_ok=True)
        pids = f"echo {int(found['last_pid'])} > {LAST_PID}" if self._namespace else ":"
        script = self._script("restore.sh", pids=pids)
        argv = self._criu.restore(restart, self._restore_log, script, Tcp(facts["tcp"]))
        said = self._restore_log.with_suffix(".said")
        return self._start(
            work, ["--restored", str(int(facts["pid"])), "--log", str(said), "--", *argv]
        )

    def _start(self, work: Work, words: list[str]) -> Start:
        self._ready.unlink(missing_ok=True)
        more = ["--namespace"] if self._namespace else []
        argv = keeper.command("--ready", str(self._ready), *more, *words)
        return Start(argv=tuple(argv), cwd=work.cwd, environ=work.environ, output=self._output)

    def resumed(self, program: Program, until: float) -> None:
        if self._wait_ready(program, until) is None:
            why = _why(self._restore_log) or f"not back in time; exit code {program.poll()}"
            if TAKEN in why:
                self._taken = f"criu restore: {why}"
                raise NotHere(self._taken)
            raise ResumeFailed(f"criu restore: {why}")
        self._taken_away.forget()
        self._used_s = program.processor_s()

    def _wait_ready(self, program: Program, until: float) -> int | None:
        """The id of the program, as its keeper sees it; None: it does not run."""
        while time.monotonic() < until:
            if self._ready.exists():
                self._root = int(json.loads(self._ready.read_text(encoding="ascii"))["pid"])
                return self._root
            if program.poll() is not None:
                return None
            time.sleep(LOOK_EVERY_S)
        return None

    # ── saves ─────────────────────────────────────────────────────────────────────────────
    def ask(self, program: Program, into: Path, moment: Moment) -> None:
        root = self._wait_ready(program, min(moment.until, time.monotonic() + START_S))
        if root is None or program.poll() is not None:
            raise NothingNew("the program has ended")
        self._wait_for_those_beside(program, root, moment.until)
        self._measured_s = program.processor_s()
        self._began = time.monotonic()
        tree = program.tree()
        self._memory = memory_of(tree)
        self._tcp = tcp_of(tree)
        why = self._criu.refuses(self._tcp, kernel_version())
        if why is not None:
            raise SaveFailed(why)
        self._dump_log.unlink(missing_ok=True)
        until = _copied_by(moment.until, self._memory)
        record = [sys.executable, "-I", "-m", openfiles.__name__, str(root), str(into), str(until)]
        script = self._script("dump.sh", record=shlex.join(record))
        argv = self._criu.dump(root, into, self._dump_log, script, last=moment.last, tcp=self._tcp)
        if self._namespace:
            argv = keeper.command("--enter", str(_inner(tree)), "--", *argv)
        with self._dump_log.with_suffix(".said").open("wb") as said:
            self._asked = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
            )

    def _wait_for_those_beside(self, program: Program, root: int, until: float) -> None:
        """Raises SaveFailed: CRIU saves a process and its descendants. One whose parent has ended
        is a keeper's child: it would be missing after a restart, without a word."""
        until = min(until, time.monotonic() + BESIDE_S)
        while beside := _beside(self._kept(program), root):
            if time.monotonic() >= until:
                named = ", ".join(f"{name} ({pid})" for pid, name in sorted(beside.items()))
                raise SaveFailed(
                    f"left by its parent, and out of CRIU's reach: {named}; have the program "
                    "wait for what it starts"
                )
            time.sleep(LOOK_EVERY_S)

    def wait(self, program: Program, into: Path, moment: Moment) -> Saved:
        asked, self._asked = self._asked, None
        if asked is None:
            raise SaveFailed("no save was asked for")
        try:
            code = asked.wait(max(0.0, moment.until - time.monotonic()))
        except subprocess.TimeoutExpired:
            # Left in the middle, the program would go on in CRIU's code instead of its own.
            program.end()
            asked.kill()
            asked.wait()
            raise SaveFailed("criu dump did not end in time, and the program with it") from None
        if code != 0 and program.wait(time.monotonic() + ENDING_S) == 0:
            raise NothingNew("the program has ended")  # while it was being saved
        if code != 0:
            raise _refused(self._dump_log, code)
        with contextlib.suppress(ResumeFailed):  # said where it is resumed
            for told in openfiles.warnings(rollback.read(into)):
                log.warning("%s", told)
        self._dumped = (time.monotonic() - self._began, self._memory)
        tree = program.tree()
        if moment.last:
            self._end(program)
        step = self._step + math.ceil(max(0.0, self._measured_s - self._used_s))
        facts = {
            "dump_s": round(self._dumped[0], 3),
            "memory": self._memory,
            "pid": self._root,
            "namespace": self._namespace,
            "output": str(self._output),
            "tcp": self._tcp.value,
            "step": step,
            "criu": list(self._criu.version),
            "left": rollback.left_by(tree[1:], into, moment.until) if moment.last else {},
        }
        return Saved(step=step, facts=facts)

    def _end(self, program: Program) -> None:
        """By way of the keeper, which hears of every end: the ids are then free again."""
        for pid in self._kept(program):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        program.wait(time.monotonic() + END_S)

    def _kept(self, program: Program) -> list[int]:
        """Its tree without the keepers."""
        return program.tree()[2 if self._namespace else 1 :]

    # ── the rest ──────────────────────────────────────────────────────────────────────────
    def is_complete(self, work: Work, code: int) -> bool | None:
        return None

    def own_failure(self, code: int) -> str | None:
        if code == keeper.CANNOT:
            return "the program could not be given a keeper; the log says why"
        return None

    def close(self) -> None:
        if self._asked is not None and self._asked.poll() is None:
            self._asked.kill()
            self._asked.wait()
        self._taken_away.put_back()
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)
            self._made = None

    @property
    def _criu(self) -> Tool:
        if self._tool is None:
            raise SpecError("criu: it was not asked whether it can be used here")
        return self._tool

    @property
    def _ready(self) -> Path:
        return self._scratch / "criu-ready.json"

    @property
    def _dump_log(self) -> Path:
        return self._scratch / "criu-dump.log"

    @property
    def _restore_log(self) -> Path:
        return self._scratch / "criu-restore.log"

    def _own_scratch(self) -> Path:
        if self._made is None:
            self._made = Path(tempfile.mkdtemp(prefix="hpc-ckpt-"))
        return self._made

    def _script(self, name: str, *, record: str = ":", pids: str = ":") -> Path:
        """What criu calls while the program stands still."""
        path = self._scratch / name
        path.write_text(_SCRIPT.format(record=record, pids=pids), encoding="utf-8")
        path.chmod(0o700)
        return path


def _namespaces_work() -> bool:
    """Whether a program can have process ids of its own here; tried, as containers may forbid."""
    if not may_make_namespaces():
        return False
    tried = subprocess.run(
        keeper.command("--namespace"), stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    return tried.returncode == 0


def _inner(tree: list[int]) -> int:
    """The keeper that is the first process of the name space: the only child of the other."""
    if len(tree) < 3:
        raise NothingNew("the program has ended")
    return tree[1]


def _copied_by(end: float, memory: int) -> float:
    """When it refuses, and the program goes on. Images are there before files are copied, and
    are only read for their digests after that."""
    reserve = max(LEAST_RESERVE_S, memory / LEAD_BYTES_A_S)
    return end - min(reserve, (end - time.monotonic()) / 2)


def _beside(kept: list[int], root: int) -> dict[int, str]:
    """The living of those under a keeper that do not descend from the program."""
    top = next((pid for pid in kept if namespaces.own_pid(pid) == root), None)
    if top is None:
        raise NothingNew("the program has ended")
    return living(set(kept) - set(tree_of(top)))


def _free_name(place: Path) -> Path:
    """Older restarts need the file that they were saved with."""
    taken = set(fsio.names_in(place))
    names = (f"program-{number}.out" for number in itertools.count(1))
    return place / next(name for name in names if name not in taken)


def _refused(path: Path, code: int) -> SaveFailed | NotNow:
    """A dump that the storage did not take, or not in time, says nothing against CRIU."""
    why = f"criu dump: {_why(path) or f'exit code {code}'}"
    told = _text(path) + _text(path.with_suffix(".said"))
    if refused_by_storage(told):
        return NoRoom(why)
    return NotNow(why) if openfiles.TOO_SLOW in told else SaveFailed(why)


def _why(path: Path) -> str | None:
    """From criu's log, or from what was printed before it had one."""
    said = _text(path.with_suffix(".said"))
    ours = [line for line in said.splitlines() if line.startswith("hpc-ckpt: ")]
    return ours[-1] if ours else reason_in(_text(path)) or reason_in(said)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
