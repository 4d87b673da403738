"""The parts of a recipe, each made of plain text and checked: what is wrong is said by its key."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import SpecError
from ..settings import parse_signal
from ..units import parse_duration, parse_size
from .reader import Reader, split

LEAD_S = 30.0
PICKS = ("newest", "all")

_TIME_LEFT = re.compile(r"\{(?:hours|minutes|seconds|time)_left\}")


@dataclass(frozen=True)
class Value:
    """Where a {name} comes from: the first of these that is there."""

    option: tuple[str, ...] = ()
    """The word after one of these in the command."""
    word: str | None = None
    """The first word of the command of this form, its group if it has one."""
    file: str | None = None
    regex: str | None = None
    """The first match in that file."""
    default: tuple[str, ...] = ()
    """The first of which every {name} is known."""
    suffix: tuple[str, ...] = ()
    """The first is added where none of them is there."""

    @classmethod
    def parse(cls, value: object, where: str) -> Value:
        if isinstance(value, str):
            value = {"default": value}
        read = Reader(value, where, ("option", "word", "file", "regex", "default", "suffix"))
        if read.has("file") != read.has("regex"):
            raise SpecError(f"{where}: 'file' and 'regex' belong together")
        return cls(
            read.texts("option"),
            read.pattern("word"),
            read.text("file"),
            read.pattern("regex"),
            read.texts("default"),
            read.texts("suffix"),
        )


@dataclass(frozen=True)
class Number:
    """Where a number, such as a step, is read."""

    command: tuple[str, ...] | None = None
    """Its output's first match of the regex."""
    file: str | None = None
    """A text file's last match of the regex."""
    regex: str | None = None
    bytes: str | None = None
    """Of a binary file: a regex whose group is the number, little-endian."""
    count: str | None = None
    """How many files match this pattern."""
    name: str | None = None
    """A regex for the name of the restart file; its {names} are filled."""
    value: str | None = None
    """Outranks what else is given where all its {names} are known."""
    total: Number | None = None
    """What the number is when the work is done: {steps_left} is the difference."""
    plus: Number | None = None
    """Added to it; where that is not known, neither is the sum."""

    @classmethod
    def parse(cls, value: object, where: str) -> Number:
        if isinstance(value, (str, int, float)):
            value = {"value": value}
        kinds = ("command", "file", "count", "name")
        read = Reader(value, where, (*kinds, "value", "regex", "bytes", "total", "plus"))
        given = sum(read.has(kind) for kind in kinds)
        if given > 1 or (given == 0 and not read.has("value")):
            raise SpecError(f"{where}: write one of {', '.join(kinds)}, value")
        if read.has("command") and not read.has("regex"):
            raise SpecError(f"{where}: 'command' needs 'regex', whose group is the number")
        if read.has("file") and read.has("regex") == read.has("bytes"):
            raise SpecError(f"{where}: 'file' needs 'regex' (a text) or 'bytes' (a binary file)")
        return cls(
            read.words("command"),
            read.text("file"),
            read.number("regex"),
            read.number("bytes"),
            read.text("count"),
            read.number("name"),
            read.text("value"),
            *(cls.parse(read.raw(key), read.at(key)) if read.has(key) else None
              for key in ("total", "plus")),
        )  # fmt: skip

    @property
    def is_value(self) -> bool:
        """Whether it has nothing else to be read from."""
        return self.command is None and self.file is None and not (self.count or self.name)


@dataclass(frozen=True)
class RestartFiles:
    files: tuple[str, ...]
    pick: str = "newest"
    """newest: each of them is enough; all: they belong together."""
    copy: bool = True
    """False: only noted, for what is too large or kept by the program itself."""
    aside: bool = False
    """The program takes the newest it finds: newer ones than the saved one are moved away."""

    @classmethod
    def parse(cls, value: object, where: str) -> RestartFiles:
        if isinstance(value, (str, list, tuple)):
            value = {"files": value}
        read = Reader(value, where, ("files", "pick", "copy", "aside"))
        files, pick = read.texts("files"), read.text("pick") or "newest"
        if not files:
            raise SpecError(f"{where}: files: missing; write the pattern of the restart files")
        if pick not in PICKS:
            raise SpecError(f"{read.at('pick')}: write newest or all, not {pick!r}")
        return cls(files, pick, read.flag("copy", True), read.flag("aside", False))


@dataclass(frozen=True)
class Also:
    """A file that the program wants beside its restart file; put back where it is missing."""

    files: str
    at_most: int | None = None

    @classmethod
    def parse(cls, value: object, where: str) -> Also:
        if isinstance(value, str):
            value = {"files": value}
        read = Reader(value, where, ("files", "at_most"))
        files = read.text("files")
        if files is None:
            raise SpecError(f"{where}: files: missing; write a pattern")
        return cls(files, read.parsed("at_most", parse_size))


@dataclass(frozen=True)
class Unasked:
    """Files that a program reads without being told, and what they may not have in them."""

    files: tuple[str, ...] = ()
    without: tuple[tuple[str, str], ...] = ()
    unless: tuple[str, ...] = ()
    """Rows of words of a call that overrides them."""

    @classmethod
    def parse(cls, value: object, where: str) -> Unasked:
        read = Reader(value, where, ("files", "without", "unless"))
        return cls(read.texts("files"), read.reasons("without", regex=True), read.texts("unless"))


@dataclass(frozen=True)
class Rewrite:
    """A changed copy of one of the program's input files."""

    source: str
    target: str
    replace: tuple[tuple[str, str], ...] = ()
    """A regular expression, and what stands there instead; left out if a {name} is not known."""
    once: bool = False
    """In a chain; what another has left under that name is renamed."""

    @classmethod
    def parse(cls, value: object, where: str) -> Rewrite:
        read = Reader(value, where, ("from", "to", "replace", "once"))
        source, target = read.text("from"), read.text("to")
        if source is None or target is None:
            raise SpecError(f"{where}: write 'from' and 'to', the two files")
        pairs = read.raw("replace") or {}
        if not isinstance(pairs, Mapping):
            raise SpecError(f"{read.at('replace')}: must be a mapping of 'regex: text'")
        for regex in pairs:
            try:
                re.compile(str(regex))
            except re.error as error:
                raise SpecError(f"{read.at('replace')}: {regex!r}: {error}") from None
        changes = tuple((str(k), str(v)) for k, v in pairs.items())
        return cls(source, target, changes, read.flag("once", False))


@dataclass(frozen=True)
class Edit:
    """What becomes of the command. A line with a {name} that is not known is left out."""

    set: tuple[str, ...] = ()
    append: tuple[str, ...] = ()
    prepend: tuple[str, ...] = ()
    """Right behind the program's name: of two equal options some programs heed the first."""
    command: str | tuple[str, ...] | None = None
    """Instead of the command that was given."""
    swap: tuple[tuple[str, str], ...] = ()
    """The word that is this value, and what stands there instead."""
    write: tuple[Rewrite, ...] = ()
    keep: tuple[str, ...] = ()
    """Outputs that the program would write over: renamed to NAME.1, NAME.2 before it starts."""

    @classmethod
    def parse(cls, value: object, where: str) -> Edit:
        known = ("set", "append", "prepend", "command", "swap", "write", "keep")
        read = Reader(value, where, known)
        swap, write = read.raw("swap") or {}, read.raw("write") or ()
        if not isinstance(swap, Mapping):
            raise SpecError(f"{read.at('swap')}: must be a mapping of 'name of a value: text'")
        edit = cls(
            read.texts("set"),
            read.texts("append"),
            read.texts("prepend"),
            _command(read),
            tuple((str(name), str(text)) for name, text in swap.items()),
            tuple(
                Rewrite.parse(item, read.at("write"))
                for item in (write if isinstance(write, (list, tuple)) else [write])
            ),
            read.texts("keep"),
        )
        for key in ("set", "append", "prepend"):
            for text in read.texts(key):
                split(text, read.at(key))
        for text in edit.set:
            if len(split(text, "")) < 2:
                raise SpecError(f"{read.at('set')}: {text!r}: write an option and its value")
        return edit

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything in which a value is filled in for the program."""
        command = (self.command,) if isinstance(self.command, str) else self.command or ()
        swapped = (text for _, text in self.swap)
        written = (text for rewrite in self.write for _, text in rewrite.replace)
        return (*self.set, *self.append, *self.prepend, *command, *swapped, *written)

    @property
    def tells_the_time(self) -> bool:
        """Whether the program hears how long it may run."""
        return any(_TIME_LEFT.search(text) for text in self.texts)


def _command(read: Reader) -> str | tuple[str, ...] | None:
    if isinstance(read.raw("command"), (list, tuple)):
        return read.words("command")
    return read.text("command")


@dataclass(frozen=True)
class Request:
    """How the program is told to write its restart files; nothing: it does so by itself."""

    signal: signal.Signals | None = None
    file: str | None = None
    """Made for the program to find."""
    text: str = ""
    command: tuple[str, ...] | None = None
    stops: bool = False
    """It ends afterwards: asked for only when the link ends."""
    lead_s: float = LEAD_S
    """How long it takes from the request to the end of the writing, at most."""
    limit_share: float = 1.0
    """At what share of the time it is given the program stops by itself."""

    @classmethod
    def parse(cls, value: object, where: str) -> Request:
        kinds = ("signal", "file", "command")
        read = Reader(value, where, (*kinds, "text", "stops", "lead", "limit_share"))
        if sum(read.has(kind) for kind in kinds) > 1:
            raise SpecError(f"{where}: write one of {', '.join(kinds)}, or none of them")
        number = read.parsed("signal", lambda text: parse_signal(text, where=""))
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise SpecError(f"{read.at('signal')}: no program hears {number.name}; write USR1")
        lead = read.parsed("lead", parse_duration)
        return cls(
            number,
            read.text("file"),
            read.text("text") or "",
            read.words("command"),
            read.flag("stops", False),
            LEAD_S if lead is None else lead,
            read.parsed("limit_share", _share) or 1.0,
        )

    @property
    def asks(self) -> bool:
        return self.signal is not None or self.file is not None or self.command is not None


def _share(value: object) -> float:
    share = float(str(value))
    if not 0 < share <= 1:
        raise ValueError(f"must be more than 0 and at most 1, not {value!r}")
    return share


@dataclass(frozen=True)
class Test:
    """Whether the work is done: everything in it must hold."""

    file: str | None = None
    """It is there, not empty, and not what was there before the chain."""
    text: str | None = None
    no_text: str | None = None
    where: str | None = None
    """The file in which a text is looked for."""
    step: Number | None = None
    target: Number | None = None
    exit_code: int | None = None
    """Only 0: with another code nothing is done."""

    @classmethod
    def parse(cls, value: object, where: str) -> Test:
        known = ("file", "text", "no_text", "in", "step", "target", "exit_code")
        read = Reader(value, where, known)
        if not any(read.has(key) for key in known):
            raise SpecError(f"{where}: says nothing; write one of {', '.join(known)}")
        if read.has("step") != read.has("target"):
            raise SpecError(f"{where}: 'step' and 'target' belong together")
        if (read.has("text") or read.has("no_text")) != read.has("in"):
            raise SpecError(f"{where}: 'text' or 'no_text' and the file, 'in', belong together")
        return cls(
            read.text("file"),
            read.pattern("text"),
            read.pattern("no_text"),
            read.text("in"),
            Number.parse(read.raw("step"), read.at("step")) if read.has("step") else None,
            Number.parse(read.raw("target"), read.at("target")) if read.has("target") else None,
            read.parsed("exit_code", _code),
        )


def _code(value: object) -> int:
    if str(value) != "0":
        raise ValueError(f"{value!r} is not an exit code that says that all is done; write 0")
    return 0


@dataclass(frozen=True)
class Sane:
    """Whether a restart file is one, as far as can be told without the program going on from it."""

    min_size: int = 1
    begins: bytes = b""
    ends: bytes = b""
    command: tuple[str, ...] | None = None
    """Ends with code 0."""

    @property
    def finds_the_end(self) -> bool:
        """Whether a file that was cut off does not pass."""
        return bool(self.ends) or self.command is not None

    @classmethod
    def parse(cls, value: object, where: str) -> Sane:
        read = Reader(value, where, ("min_size", "begins", "ends", "command"))
        size = read.parsed("min_size", parse_size)
        return cls(
            1 if size is None else size,
            read.parsed("begins", _bytes) or b"",
            read.parsed("ends", _bytes) or b"",
            read.words("command"),
        )


def _bytes(value: object) -> bytes:
    """Text in which \\x and the like stand for bytes."""
    try:
        return str(value).encode("latin-1").decode("unicode_escape").encode("latin-1")
    except UnicodeError:
        raise ValueError(r"must be Latin-1 text, other bytes as \x9f") from None
