"""What a recipe's {names} stand for: words of the command, lines of its input, the time left."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import glob
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..rundir import ENV_DEADLINE, read_deadline
from ..settings import margin
from .base import Work
from .ingredients import Edit, Value
from .invocation import VARIABLE, Invocation
from .reader import split
from .recipe import Recipe
from .texts import beginning

_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")
_EXPANDED = re.compile(r"[$`]")
"""What is left of a variable that is not set here, or of a command's output."""
EARLY = 0.5
"""Of the time that a program was told: one that ends before has not been stopped by it, however
long a step or an epoch of it takes."""
LATE = 0.9
LEAST_S = 1.0
"""A program that is given no time at all may take that for no limit."""


class Values:
    """Of one command; a name that is not known is None, and so is every text with it."""

    def __init__(self, recipe: Recipe, call: Invocation, work: Work) -> None:
        self._recipe = recipe
        self._call = call
        self._work = work
        self._read: set[str] = set()
        """Values out of files, whose variables no shell expands."""
        self._found: dict[str, str | None] = {
            "program": call.program,
            "python": sys.executable,
            "output": None if work.log is None else str(work.log),
        }
        for name, value in recipe.values.items():
            self._found[name] = self._look(value)

    def get(self, name: str) -> str | None:
        return self._found.get(name)

    def fill(self, text: str, more: Mapping[str, str] | None = None) -> str | None:
        known = {**self._found, **(more or {})}
        names = _FIELD.findall(text)
        if any(known.get(name) is None for name in names):
            return None
        return _FIELD.sub(lambda match: str(known[match[1]]), text)

    def shell(self, text: str, more: Mapping[str, str] | None = None) -> str | None:
        """Filled, for a shell: each value is one word to it, and no part of a command."""
        known = {**self._found, **(more or {})}
        return self.fill(text, {n: shlex.quote(t) for n, t in known.items() if t is not None})

    def regex(self, pattern: str) -> str | None:
        """Filled; what a name stands for is meant letter by letter."""
        return self.fill(
            pattern, {n: re.escape(t) for n, t in self._found.items() if t is not None}
        )

    def words(
        self, texts: tuple[str, ...], more: Mapping[str, str] | None = None
    ) -> list[str] | None:
        """Every word filled; each stays one word whatever its value has in it."""
        filled = [self.fill(text, more) for text in texts]
        return None if None in filled else [str(text) for text in filled]

    def line(self, text: str, more: Mapping[str, str] | None = None) -> list[str] | None:
        return self.words(tuple(split(text, "")), more)

    def unknown(self, text: str) -> str | None:
        """The first name in a text that is not known."""
        return next((n for n in _FIELD.findall(text) if self._found.get(n) is None), None)

    def unsure(self, text: str) -> str | None:
        """The first name in a text whose value only a shell, or the program, could tell."""
        found = ((name, self._found.get(name) or "") for name in _FIELD.findall(text))
        return next((f"{{{n}}} is {v!r}" for n, v in found if self._is_open(v)), None)

    def _is_open(self, value: str) -> bool:
        """Before the job nobody knows its variables, or what a module sets: the node tells. What
        the command itself sets never comes out of its shell."""
        if _EXPANDED.search(VARIABLE.sub("", value)):
            return True
        names = [one or other for one, other in VARIABLE.findall(value)]
        if names and (value in self._read or ENV_DEADLINE in self._work.environ):
            return True
        command = "\n".join(self._work.argv)
        return any(re.search(rf"(?:^|[\s;&|(]){name}=", command) for name in names)

    def files(self, pattern: str) -> list[Path]:
        """Those that match now; what a name stands for is no pattern itself."""
        escaped = {name: glob.escape(text) for name, text in self._found.items() if text}
        filled = self.fill(pattern, escaped)
        if filled is None:
            return []
        root = self._work.cwd
        names = glob.glob(os.path.expanduser(filled), root_dir=root, recursive=True)  # noqa: PTH111, PTH207
        return sorted(path for path in (root / name for name in names) if path.is_file())

    def path(self, text: str, more: Mapping[str, str] | None = None) -> Path | None:
        filled = self.fill(text, more)
        return None if filled is None else self._work.cwd / filled

    def _look(self, value: Value) -> str | None:
        found = self._call.option(value.option)
        if found is None and value.word is not None:
            found = self._call.word(value.word)
        if found is None and value.file is not None:
            found = self._in_file(value.file, str(value.regex))
            added = "".join(value.suffix[:1])
            self._read |= set() if found is None else {found, f"{found}{added}"}
        if found is None:
            found = next((t for t in map(self.fill, value.default) if t is not None), None)
        if found is not None and value.suffix and not found.endswith(value.suffix):
            found += value.suffix[0]
        return found

    def _in_file(self, file: str, regex: str) -> str | None:
        path = self.path(file)
        if path is None:
            return None
        text = beginning(path)
        if text is None:
            return None
        match = re.search(regex, text, re.MULTILINE)
        if match is None:
            return None
        return match["value" if "value" in match.re.groupindex else min(match.re.groups, 1)]


@dataclass(frozen=True)
class Limit:
    """What a program was told of its time in this link."""

    seconds: float = 0.0
    """When it ends by its own clock: its share of that."""
    began: float = 0.0

    @classmethod
    def told(cls, edit: Edit, known: Mapping[str, str], share: float) -> Limit:
        seconds = known.get("seconds_left") if edit.tells_the_time else None
        return cls() if seconds is None else cls(share * float(seconds), time.monotonic())

    def may_have_ended_it(self, has_left: Callable[[], bool]) -> bool:
        """Now that it has ended: its code 0 may say no more than that it heeds its limit. Near that
        it ends; sooner only with something to go on from, which is looked for only then."""
        now = time.monotonic() - self.began
        if self.seconds == 0 or now < EARLY * self.seconds:
            return False
        return now >= LATE * self.seconds or has_left()


def times_left(work: Work, lead_s: float, share: float = 1.0) -> dict[str, str]:
    """How long the program may run; nothing where the end of the link is not known."""
    path = work.environ.get(ENV_DEADLINE)
    end = read_deadline(Path(path)) if path else None
    if end is None:
        return {}
    left = end - time.time()
    left = max(left - margin(left) - lead_s, LEAST_S) / share
    hours, rest = divmod(int(left), 3600)
    return {
        "hours_left": f"{left / 3600:.6f}",
        "minutes_left": f"{left / 60:.4f}",
        "seconds_left": f"{int(left)}",
        "time_left": f"{hours:02d}:{rest // 60:02d}:{rest % 60:02d}",
    }
