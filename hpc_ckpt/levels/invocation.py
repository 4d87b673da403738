"""Where a command calls a program, and the same command with other words for it.

The program may stand behind a launcher (`mpirun -np 4 gmx_mpi mdrun …`) or inside the text of
`bash -c`; what surrounds it stays as it was written, byte for byte.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path, PurePosixPath

from .binaries import is_for_a_shell
from .starters import gone_by_launcher, is_called

_TOKEN = re.compile(
    r"""(?P<space>(?:[ \t]|\\\n)+|\#[^\n]*)
      | (?P<redirect>\d*(?:<<<|<<|>>|>\||&>>|&>|>&|<&|<>|<|>))
      | (?P<end>&&|\|\||;;|[;|&\n()])
      | (?P<word>(?:[^\s\\'"|&;()<>]|\\.|'[^']*'|"(?:[^"\\]|\\.)*")+)""",
    re.VERBOSE | re.DOTALL,
)
_LOOPS = frozenset(("for", "while", "until", "select"))
_RESERVED = _LOOPS | {"do", "if", "then", "elif", "else", "{", "!", "time"}
_ONLY_NAME = frozenset(("module", "ml", "spack", "which", "type", "echo", "printf", "export"))
"""They name a program and do not call it."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_OPTION = re.compile(r"--?[A-Za-z].*", re.DOTALL)
_REDIRECTION = re.compile(r"\d*[<>&].*", re.DOTALL)
END_OF_OPTIONS = "--"
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)


@dataclass(frozen=True)
class Word:
    """One word: what it means, and how it is written with the space before it."""

    text: str
    raw: str
    gap: str = " "

    @property
    def may_be_value(self) -> bool:
        """Or the option before it stands alone, as mdrun's -cpi may."""
        if self.text == END_OF_OPTIONS:
            return False
        return not (_OPTION.fullmatch(self.text) or _REDIRECTION.fullmatch(self.raw))


@dataclass(frozen=True)
class Invocation:
    """The words of one call, the program's own name first."""

    words: tuple[Word, ...]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    """Words of the command around it; where it is inside a text, around that text."""
    head: str | None = None
    tail: str = ""
    """The text around it; head is None where the words are the command's own."""

    @property
    def program(self) -> str:
        return self.words[0].text

    def option(self, names: Sequence[str]) -> str | None:
        """The word after an option, or behind its '='; an option may be of two words."""
        for name in names:
            values = self._values_at(name.split())
            if values:
                return values[0].text
            for word in self.words[1:]:
                if name.startswith("--") and word.text.startswith(f"{name}="):
                    return word.text.partition("=")[2]
        return None

    def word(self, pattern: str) -> str | None:
        """The first word that is wholly of this form; its first group if it has one."""
        for word in self.words[1:]:
            match = re.fullmatch(pattern, word.text)
            if match is not None:
                return match[1] if match.re.groups else match[0]
        return None

    def has(self, row: Sequence[str]) -> bool:
        """Whether these words, patterns each, follow each other behind the program."""
        texts = [word.text for word in self.words[1:]]
        windows = (texts[at : at + len(row)] for at in range(len(texts) - len(row) + 1))
        return any(all(map(fnmatchcase, window, row)) for window in windows)

    def with_option(self, words: Sequence[str]) -> Invocation:
        """`-cpi FILE` in the place of the value it has, or behind it if it has none, or at the
        end."""
        *name, value = words
        at = self._behind(name)
        if at is None:
            return self.with_words(words)
        old = self._values_at(name)
        new = replace(_plain(value), gap=old[0].gap if old else " ")
        return replace(self, words=(*self.words[:at], new, *self.words[at + len(old) :]))

    def with_swapped(self, old: str, new: str) -> Invocation:
        """Another word in every place of one."""
        swapped = (replace(_plain(new), gap=w.gap) if w.text == old else w for w in self.words[1:])
        return replace(self, words=(self.words[0], *swapped))

    def with_words(self, words: Sequence[str]) -> Invocation:
        """At the end of its options: behind '--' they would be something else."""
        end = self._end()
        return replace(self, words=(*self.words[:end], *map(_plain, words), *self.words[end:]))

    def with_first(self, words: Sequence[str]) -> Invocation:
        """Words right behind the program's name."""
        return replace(self, words=(self.words[0], *map(_plain, words), *self.words[1:]))

    def argv(self) -> tuple[str, ...]:
        if self.head is None:
            return (*self.before, *(word.text for word in self.words), *self.after)
        inner = "".join(word.gap + word.raw for word in self.words)
        return (*self.before, self.head + inner + self.tail, *self.after)

    def _values_at(self, name: Sequence[str]) -> tuple[Word, ...]:
        """The word behind an option, if it is its value."""
        at = self._behind(name)
        found = () if at is None else self.words[at : at + 1]
        return tuple(word for word in found if word.may_be_value)

    def _behind(self, name: Sequence[str]) -> int | None:
        """Where the value of an option stands, or would."""
        texts = [word.text for word in self.words[: self._end()]]
        for at in range(len(texts) - len(name), 0, -1):  # the last one counts
            if texts[at : at + len(name)] == list(name):
                return at + len(name)
        return None

    def _end(self) -> int:
        texts = [word.text for word in self.words]
        return texts.index(END_OF_OPTIONS, 1) if END_OF_OPTIONS in texts[1:] else len(texts)


def _plain(text: str) -> Word:
    return Word(text, shlex.quote(text))


def find(
    argv: Sequence[str], programs: Sequence[str], words: Sequence[str], environ: Mapping[str, str]
) -> Invocation | None:
    """The first call of one of the programs with all those words; glob patterns, both.

    Without programs: the first call that there is.
    """
    found = (_meant(call, programs, words) for call in calls(argv, environ))
    return next(filter(None, found), None)


def is_run(
    argv: Sequence[str], programs: Sequence[str], words: Sequence[str], environ: Mapping[str, str]
) -> bool:
    """Whether the command runs such a program, and does not only name it."""
    for call in calls(argv, environ):
        meant = _meant(call, programs, words)
        if meant is not None and _is_run(call, meant):
            return True
    return False


def is_repeated(
    argv: Sequence[str], programs: Sequence[str], words: Sequence[str], environ: Mapping[str, str]
) -> bool:
    """Whether there are more calls of that kind than one, or the one is in a loop."""
    found = loops = 0
    for call in calls(argv, environ):
        reserved, first = _lead(call)
        loops += sum(word in _LOOPS for word in reserved) - (first == "done")
        if _meant(call, programs, words) is not None:
            found += 1 + (loops > 0)
    return found > 1


def goes_to(
    argv: Sequence[str],
    programs: Sequence[str],
    words: Sequence[str],
    environ: Mapping[str, str],
    cwd: Path,
) -> str | None:
    """How a command leaves its directory before the first call of that kind, or with it."""
    for call in calls(argv, environ):
        meant = _meant(call, programs, words)
        if meant is not None:
            inner = call.words[: len(call.words) - len(meant.words)]
            return gone_by_launcher((*call.before, *(word.text for word in inner)), cwd)
        reserved, first = _lead(call)
        if first in ("cd", "pushd"):
            rest = [word.text for word in call.words[len(reserved) + 1 :]]
            places = [text for text in rest if not text.startswith("-")]
            if len(places) != 1 or (cwd / places[0]).resolve() != cwd.resolve():
                return " ".join((first, *rest))
    return None


def _meant(call: Invocation, programs: Sequence[str], words: Sequence[str]) -> Invocation | None:
    """From the program on: a word that is run, if there is one, before others of its name."""
    found = list(_named(call, programs, words))
    return next((one for one in found if _is_run(call, one)), next(iter(found), None))


def _is_run(call: Invocation, meant: Invocation) -> bool:
    """Whether the program of a call is no argument of another one."""
    texts = [word.text for word in call.words]
    reserved, _ = _lead(call)
    at = len(texts) - len(meant.words)
    return is_called(texts[len(reserved) :], at - len(reserved))


def _named(call: Invocation, programs: Sequence[str], words: Sequence[str]) -> Iterator[Invocation]:
    """From each word on that may be the program."""
    for at, word in enumerate(call.words):
        if not programs and _ASSIGNMENT.fullmatch(word.text):
            continue
        if programs and not named(word.text, programs):
            continue
        if at > 0 and _lead(call)[1] in _ONLY_NAME:
            return
        rest = [other.text for other in call.words[at + 1 :]]
        if all(any(fnmatchcase(other, want) for other in rest) for want in words):
            yield _from(call, at)
        if not programs:
            return


def _lead(call: Invocation) -> tuple[list[str], str]:
    """The shell's own words at the beginning of a call, and the first that is none."""
    texts = [word.text for word in call.words]
    reserved = list(takewhile(_RESERVED.__contains__, texts))
    if reserved[-1:] == ["time"] and texts[len(reserved) :][:1] == ["-p"]:
        reserved.append("-p")
    return reserved, next(iter(texts[len(reserved) :]), "")


def named(word: str, patterns: Sequence[str]) -> bool:
    """Whether a word, by its last part, is one of the programs."""
    name = PurePosixPath(word).name
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def calls(argv: Sequence[str], environ: Mapping[str, str]) -> Iterator[Invocation]:
    """Every call of a command: those in a text for a shell, else the command itself."""
    for at, text in enumerate(argv):
        if is_for_a_shell(argv, at):
            inner = list(calls_in(text, environ))
            for call in inner:
                yield replace(call, before=tuple(argv[:at]), after=tuple(argv[at + 1 :]))
            if inner:
                return
    yield Invocation(tuple(map(_plain, argv)))


def calls_in(text: str, environ: Mapping[str, str]) -> Iterator[Invocation]:
    """Every call in a text for a shell; none where it cannot be taken apart."""
    tokens = _tokens(text)
    if tokens is None:
        return
    words: list[Word] = []
    began, gap = 0, ""
    for kind, start, raw in [*tokens, ("end", len(text), "")]:
        if kind == "space":
            gap += raw
        elif kind == "end":
            if words:
                last = start - len(gap)
                yield Invocation(tuple(words), head=text[:began], tail=text[last:])
            words, gap = [], ""
        else:
            if not words:
                began, gap = start, ""
            words.append(Word(_meaning(raw, environ), raw, gap))
            gap = ""


def _tokens(text: str) -> list[tuple[str, int, str]] | None:
    """None: not a text that can be taken apart, such as one with a quote too few."""
    found, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            return None
        found.append((str(match.lastgroup), at, match[0]))
        at = match.end()
    return found


def _meaning(raw: str, environ: Mapping[str, str]) -> str:
    try:
        parts = shlex.split(raw)
    except ValueError:
        return raw
    text = parts[0] if len(parts) == 1 else raw
    if "'" in raw:
        return text
    return VARIABLE.sub(lambda m: environ.get(m[1] or m[2], m[0]), text)


def _from(call: Invocation, at: int) -> Invocation:
    """The same call, from the program on."""
    if call.head is None:
        return replace(
            call,
            words=call.words[at:],
            before=(*call.before, *(word.text for word in call.words[:at])),
        )
    skipped = "".join(word.gap + word.raw for word in call.words[:at])
    return replace(call, words=call.words[at:], head=call.head + skipped)
