"""What a program's files say: the step they are at, whether they are whole, whether all is done."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .base import Work
from .ingredients import Number, Sane, Test
from .values import Values

log = logging.getLogger("hpc_ckpt.steward")

COMMAND_S = 60.0
"""The longest that a command of a recipe may take."""
TAIL = 1024**2
DEEP = 64 * TAIL
"""A number may stand above all that a long run has printed since."""
HEAD = 256 * 1024
CANNOT_RUN = (126, 127)
"""As a shell says that there is no such program, or that it is none: no file of it is to blame."""
LOG_S = 3.0
"""What a program has printed may be in the link's log only a moment later."""
_SCRIPTS = (".py", ".sh", ".pl", ".awk", ".R", ".jl")

Stamp = tuple[int, int]
"""Size, and time of the last change in nanoseconds."""


def stamp(path: Path) -> Stamp | None:
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_size, info.st_mtime_ns


def _changed(path: Path, before: Mapping[str, Sequence[int]]) -> bool:
    now = stamp(path)
    return now is not None and list(now) != list(before.get(str(path), ()))


class Evidence:
    """Asks files and commands, always anew."""

    def __init__(self, values: Values, work: Work) -> None:
        self._values = values
        self._work = work

    def number(self, source: Number, restart: Path | None = None) -> int | None:
        """Without its fraction: a step."""
        found = self.exact(source, restart)
        return None if found is None else int(found)

    def exact(self, source: Number, restart: Path | None = None) -> float | None:
        """None: not there to be read, for whatever reason: no number is worth a program's end."""
        try:
            return self._number(source, restart)
        except Exception as error:  # noqa: BLE001  files of a strange program, by a stranger's regex
            log.warning("a number could not be read: %r", error)
            return None

    def _number(self, source: Number, restart: Path | None) -> float | None:
        found = self._alone(source, restart)
        if found is None or source.plus is None:
            return found
        more = self._number(source.plus, restart)
        return None if more is None else found + more

    def _alone(self, source: Number, restart: Path | None) -> float | None:
        more = {} if restart is None else {"restart": str(restart)}
        said = None if source.value is None else self._values.fill(source.value, more)
        if said is not None or source.is_value:
            return _told(said)
        if source.name is not None:
            regex = self._values.regex(source.name)
            match = re.search(regex, restart.name) if restart and regex is not None else None
            return None if match is None else _told(match[1])
        if source.count is not None:
            return len(self._values.files(source.count))
        if source.command is not None:
            argv = self._values.words(source.command, more)
            return None if argv is None else self._printed(argv, str(source.regex))
        path = self._values.path(str(source.file), more)
        if path is None:
            return None
        if source.bytes is not None:
            return _packed(path, source.bytes)
        return _told(_last_match(path, str(source.regex)))

    def insane(self, tests: Sane, restart: Path) -> str | None:
        """Why a restart file is none; None: nothing speaks against it, or nobody could tell."""
        why = self._unlike(tests, restart)
        if why is not None or tests.command is None:
            return why
        argv = self._values.words(tests.command, {"restart": str(restart)}) or tests.command
        passed = self._is_passed(argv)
        said = f"{restart.name}: {' '.join(argv[:2])}"
        if passed is None:
            log.warning("%s could not be run, or not within %g s: taken unseen", said, COMMAND_S)
        return f"{said} finds it wrong" if passed is False else None

    def is_whole(self, tests: Sane, restart: Path) -> bool:
        """For certain."""
        if self._unlike(tests, restart) is not None:
            return False
        if tests.command is None:
            return True
        argv = self._values.words(tests.command, {"restart": str(restart)})
        return argv is not None and self._is_passed(argv) is True

    def _is_passed(self, argv: Sequence[str]) -> bool | None:
        """None: it could not be asked, which says nothing of the file."""
        code = self.run(argv)
        return None if code is None or code in CANNOT_RUN else code == 0

    def _unlike(self, tests: Sane, restart: Path) -> str | None:
        """By its size, its beginning and its end."""
        try:
            with restart.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                head = stream.read(len(tests.begins))
                stream.seek(max(0, size - len(tests.ends)))
                end = stream.read()
        except OSError as error:
            return f"{restart.name}: {error.strerror}"
        if size < tests.min_size:
            return f"{restart.name} has {size} bytes, fewer than {tests.min_size}"
        if head != tests.begins:
            return f"{restart.name} does not begin as such a file does"
        if tests.ends and end != tests.ends:
            return f"{restart.name} does not end as such a file does: it is cut off"
        return None

    def complete(self, test: Test, code: int, before: Mapping[str, Sequence[int]]) -> bool:
        """`before` has the stamps of what was there when the chain began."""
        if code != 0:
            return False
        if test.file is not None and not self._is_new(self._values.path(test.file), before):
            return False
        step, target = test.step, test.target
        if step is not None and target is not None and not self._is_there(step, target, before):
            return False
        return test.where is None or self._texts_hold(test, before)

    def shown_by(self, test: Test) -> list[Path]:
        """The files, of those that are there now, that tell whether the work is done."""
        paths = [self._values.path(text) for text in (test.file, test.where) if text is not None]
        read = [] if test.step is None else self._read_by(test.step)
        return [path for path in (*paths, *read) if path is not None]

    def _is_there(self, step: Number, target: Number, before: Mapping[str, Sequence[int]]) -> bool:
        """What an earlier run has left says nothing of this one."""
        until = time.monotonic() + (LOG_S if self._work.log in self._read_by(step) else 0.0)
        while True:
            read = self._read_by(step)
            if not read or any(_changed(path, before) for path in read):
                now, last = self.exact(step), self.exact(target)
                if now is not None and last is not None and now >= last:
                    return True
            if time.monotonic() >= until:
                return False
            time.sleep(0.2)

    def _read_by(self, source: Number) -> list[Path]:
        """A command reads the files that it names; a script among them is no evidence."""
        if source.count is not None:
            return self._values.files(source.count)
        if source.command is not None:
            words = self._values.words(source.command) or []
            named = (self._work.cwd / word for word in words[1:])
            return [path for path in named if path.suffix not in _SCRIPTS and path.is_file()]
        path = None if source.file is None else self._values.path(source.file)
        return [] if path is None else [path]

    def run(self, argv: Sequence[str]) -> int | None:
        """Its exit code; None: it could not be run, or took too long."""
        try:
            done = subprocess.run(
                argv,
                cwd=self._work.cwd,
                env=dict(self._work.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=COMMAND_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.returncode

    def _is_new(self, path: Path | None, before: Mapping[str, Sequence[int]]) -> bool:
        return path is not None and _changed(path, before) and path.stat().st_size > 0

    def _texts_hold(self, test: Test, before: Mapping[str, Sequence[int]]) -> bool:
        path = self._values.path(str(test.where))
        printed = path is not None and path == self._work.log
        if path is None or (not printed and not self._is_new(path, before)):
            return False
        until = time.monotonic() + (LOG_S if printed else 0.0)
        while True:
            text = tail(path)
            if test.no_text is not None and re.search(test.no_text, text, re.MULTILINE):
                return False
            if test.text is None or re.search(test.text, text, re.MULTILINE):
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(0.2)

    def _printed(self, argv: Sequence[str], regex: str) -> float | None:
        """The first match in the beginning of what a command prints; it is not run to its end."""
        try:
            with subprocess.Popen(
                argv,
                cwd=self._work.cwd,
                env=dict(self._work.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            ) as child:
                text = _beginning(child)
                child.kill()
        except OSError:
            return None
        match = re.search(regex, text, re.MULTILINE)
        return None if match is None else _told(match[1])


def _beginning(child: subprocess.Popen[bytes]) -> str:
    """Of what it prints, as long as it may take."""
    if child.stdout is None:
        return ""
    descriptor, data = child.stdout.fileno(), b""
    until = time.monotonic() + COMMAND_S
    while len(data) < HEAD and (left := until - time.monotonic()) > 0:
        if not select.select([descriptor], [], [], left)[0]:
            break
        block = os.read(descriptor, HEAD)
        if not block:
            break
        data += block
    return data.decode("utf-8", "replace")


def _last_match(path: Path, regex: str) -> str | None:
    """Near the end of the file, or else far above it."""
    for size in (TAIL, DEEP):
        found: list[str] = re.findall(regex, tail(path, size), re.MULTILINE)
        if found:
            return found[-1]
    return None


def tail(path: Path, size: int = TAIL) -> str:
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - size))
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _told(text: str | None) -> float | None:
    """A whole number stays one, however large."""
    if text is None:
        return None
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        found = float(text)
        return found if math.isfinite(found) else None
    return None


def _packed(path: Path, regex: str) -> int | None:
    try:
        with path.open("rb") as stream:
            head = stream.read(HEAD)
    except OSError:
        return None
    match = re.search(regex.encode("latin-1"), head, re.DOTALL)
    return None if match is None else int.from_bytes(match[1], "little")
