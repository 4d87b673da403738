"""Whether a command saves for itself, as far as reading tells: nothing is run.

A program with a Checkpointer may stand behind scripts (`bash train.sh`, `./run`, `make train`):
those are followed, some deep, by what their lines call.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path, PurePosixPath

from .base import Work
from .binaries import SHELLS
from .invocation import calls_in
from .makefiles import recipe_text

LOOK_INTO = 1024**2
"""Of a file: a line that imports the Checkpointer is near its top."""
LONGEST = 64 * 1024
"""Of a script that is taken apart."""
DEEPEST = 3
"""A script that the command names is one deep, a script or program that this one calls two."""
MOST_FILES = 64
MOST_PLACES = 8
_IMPORTS = re.compile(
    rb"""^(?:[^#\n]*[;:])?[ \t]*(?:from|import(?:[ \t]+[\w., \t]+,)?)[ \t]+hpc_ckpt\b
       | ^[^#\n]*\bimport\w*\(["']hpc_ckpt\b
       | (?:^|[ \t])-m\s+hpc_ckpt\b(?!/)""",
    re.MULTILINE | re.VERBOSE,
)
"""Not the bare name: a directory may have it too, and its program would never be saved."""
_ANSWERS = re.compile(rb"(?<![\w/.-])HPC_CKPT_(?:NOTICE|DEADLINE|OUTCOME|GENERATION)\b|\bexit 75\b")
"""What a script hears, and what it says once it has saved. Not the root, which is only a place."""
_SCRIPT = re.compile(r"[^=]*\.(?:py|sh|bash|R|jl|pl)")
_SHELL_SCRIPT = re.compile(r".*\.(?:sh|bash|ksh|zsh)")
_READS = frozenset((*SHELLS, "source", "."))
"""Their first word that is no option is a script, whatever its name."""
_HANDLES = frozenset(
    ("echo", "printf", "cp", "mv", "rm", "ls", "cat", "test", "[", "[[", "git", "grep", "sed",
     "tar", "rsync", "scp", "chmod", "touch", "mkdir", "module", "ml", "export", "which", "head",
     "tail", "wc", "diff", "md5sum", "sha256sum", "zip", "ln")
)  # fmt: skip
"""They name files, and run none of them."""
_RESERVED = frozenset(("if", "then", "elif", "else", "do", "while", "until", "{", "!", "time"))
_MAKE = frozenset(("make", "gmake"))
_BEFORE_A_PLACE = re.compile(r"^.*\$(?:\([^()]*\)|\{[^{}]*\}|\w+)/")
"""What a script has for the directory it lies in."""


@dataclass(frozen=True)
class Spoken:
    """That a command saves for itself, and how."""

    why: str
    by_checkpointer: bool
    """Else it writes files of its own, which no lease keeps a second one from."""


def speaks_for_itself(work: Work) -> Spoken | None:
    """Which word of the command shows that it uses a Checkpointer or, if none does, the notice
    file or the exit code of one that has saved."""
    found = words(work.argv)
    own = _heard_in(os.fsencode("\n".join(found)), "the command speaks to hpc_ckpt itself")
    if own is not None and own.by_checkpointer:
        return own
    other = _Search(work).among(_of_command(work, found))
    return other if own is None or (other is not None and other.by_checkpointer) else own


def _heard_in(text: bytes, why: str) -> Spoken | None:
    imports = _IMPORTS.search(text) is not None
    return Spoken(why, imports) if imports or _ANSWERS.search(text) else None


def words(argv: Sequence[str]) -> list[str]:
    """The words of a command, those inside `bash -c` too; modules as the files they would be."""
    found: list[str] = []
    for before, word in zip(("", *argv), argv, strict=False):
        if before == "-c":
            found += _split(word)
        found.append(word)
        if before == "-m":
            found.append(word.replace(".", "/") + ".py")
    return found


def _split(text: str) -> list[str]:
    try:
        inner = shlex.split(text, comments=True)
    except ValueError:
        inner = text.split()
    return words(inner)


# ── files ─────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class _File:
    """One that may be run, and how the command comes to it."""

    path: Path
    way: tuple[str, ...]
    is_for_a_shell: bool = False


def _of_command(work: Work, found: Sequence[str]) -> Iterator[_File]:
    for word in found:
        yield from _named(word, (work.cwd,), (), known=_SCRIPT.fullmatch(word) is not None)
    yield from _called(found, (work.cwd,), ())
    for before, word in itertools.pairwise(work.argv):
        if before == "-c":  # a semicolon belongs to no word
            yield from _in_script(word, (work.cwd,), (), work.environ)


class _Search:
    """Breadth first, each file once."""

    def __init__(self, work: Work) -> None:
        self._cwd = work.cwd
        self._environ = work.environ
        self._seen: set[Path] = set()

    def among(self, files: Iterator[_File]) -> Spoken | None:
        pending, answers = list(files), None
        while pending:
            one = pending.pop(0)
            if one.path in self._seen or len(self._seen) >= MOST_FILES:
                continue
            self._seen.add(one.path)
            text = _text(one.path)
            heard = _heard_in(text, f"{one.way[-1]} uses hpc_ckpt{_shown(one.way)}")
            if heard is not None and heard.by_checkpointer:
                return heard
            answers = answers or heard
            if len(one.way) < DEEPEST and (one.is_for_a_shell or _is_shell(one.path, text)):
                places = (self._cwd, one.path.parent)
                script = os.fsdecode(text[:LONGEST])
                pending += _in_script(script, places, one.way, self._environ)
        return answers


def _shown(way: tuple[str, ...]) -> str:
    return f" (by way of {', '.join(way[:-1])})" if len(way) > 1 else ""


def _in_script(
    text: str, places: tuple[Path, ...], way: tuple[str, ...], environ: Mapping[str, str]
) -> Iterator[_File]:
    """What the lines of a script call; where it goes by `cd` is looked into as well."""
    for call in _calls(text, environ):
        if call[0] in ("cd", "pushd") and len(call) > 1:
            there = (place / name for place in places for name in _names(call[1]))
            places = (*places, *there)[:MOST_PLACES]
        elif call[0] not in _HANDLES:
            for word in words(call):
                yield from _named(word, places, way, known=_SCRIPT.fullmatch(word) is not None)
            yield from _called(call, places, way)


def _calls(text: str, environ: Mapping[str, str]) -> Iterator[list[str]]:
    found = [[word.text for word in call.words] for call in calls_in(text, environ)]
    # A text with a quote too few cannot be taken apart: line by line, then.
    for call in found or map(str.split, text.splitlines()):
        own = list(dropwhile(_RESERVED.__contains__, call))
        if own and not own[0].startswith("#"):
            yield own


def _called(call: Sequence[str], places: tuple[Path, ...], way: tuple[str, ...]) -> Iterator[_File]:
    """Scripts without an ending: an executable by its first line, what a shell is given, what
    `make` would do."""
    for at, word in enumerate(call):
        name = PurePosixPath(word).name
        rest = [other for other in call[at + 1 :] if not other.startswith("-")]
        if name in _READS and rest:
            yield from _named(rest[0], places, way, known=True, shell=True)
        if name in _MAKE and len(way) < DEEPEST:
            for place in places:
                text = recipe_text(call[at + 1 :], place)
                yield from _in_script(text, (place,), (*way, word), {})


def _named(
    word: str, places: tuple[Path, ...], way: tuple[str, ...], *, known: bool, shell: bool = False
) -> Iterator[_File]:
    for name in _names(word):
        for place in places:
            path = place / name
            if _is_file(path) and (known or _begins(path) == b"#!"):
                yield _File(path, (*way, word), shell)
                return


def _names(word: str) -> list[str]:
    """As it is written, and without a variable directory before it."""
    bare = _BEFORE_A_PLACE.sub("", word)
    names = dict.fromkeys((word, bare, word.lstrip("/")))
    return [name for name in names if name and "$" not in name]


def _is_shell(path: Path, text: bytes) -> bool:
    first = text.partition(b"\n")[0]
    called = os.fsdecode(first).removeprefix("#!").split() if first.startswith(b"#!") else []
    return (
        any(PurePosixPath(word).name in SHELLS for word in called)
        or _SHELL_SCRIPT.fullmatch(path.name) is not None
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _begins(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(2)
    except OSError:
        return b""


def _text(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(LOOK_INTO)
    except OSError:
        return b""
