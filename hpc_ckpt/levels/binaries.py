"""What can be said of a command's executables without running them.

Tools that come into a process by LD_PRELOAD need a dynamic loader that listens to it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

LAUNCHERS = frozenset(
    ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prun", "srun", "aprun", "jsrun", "ibrun")
)
"""Programs that start others, on other nodes too."""
MPI_LAUNCHERS = LAUNCHERS - {"srun", "aprun", "jsrun", "ibrun"}
"""Those that start them by themselves where there is one node."""
SHELLS = frozenset(("sh", "bash", "dash", "ksh", "zsh"))
_PT_INTERP = 3
_PROGRAM_HEADERS_CAP = 4096
_ENV = "env"
_SHELL_TEXT = re.compile(r"-[a-z]*c")
_SHELL_SETTING = re.compile(r"[-+][A-Za-z]*[oO]|--rcfile|--init-file")
"""Options of a shell behind which a word of their own stands."""


def launcher_in(argv: Sequence[str]) -> str | None:
    """The first word of a command that starts processes on several nodes."""
    return next((word for word in words(argv) if Path(word).name in LAUNCHERS), None)


def words(argv: Sequence[str]) -> Iterator[str]:
    """The words of a command, and of what a shell is told with -c."""
    yield from argv
    yield from inner_words(argv)


def inner_words(argv: Sequence[str]) -> list[str]:
    return [w for at, text in enumerate(argv) if is_for_a_shell(argv, at) for w in _split(text)]


def is_for_a_shell(argv: Sequence[str], at: int) -> bool:
    """Whether a word is what a shell is told with -c, also one behind env or nice; other
    programs have a -c of their own."""
    if at < 2 or _SHELL_TEXT.fullmatch(argv[at - 1]) is None:
        return False
    for before in range(at - 2, -1, -1):
        word = argv[before]
        if Path(word).name in SHELLS:
            return True
        if not word.startswith(("-", "+")) and not _SHELL_SETTING.fullmatch(argv[before - 1]):
            return False
    return False


def _split(text: str) -> list[str]:
    try:
        lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        return list(lexer)
    except ValueError:
        return text.split()


def executables(argv: Sequence[str], cwd: Path, environ: Mapping[str, str]) -> list[Path]:
    """The command's program, its interpreter, and what is named by a path inside `bash -c`."""
    found = [find(argv[0], cwd, environ)]
    inner = inner_words(argv)
    found += [find(word, cwd, environ) for word in inner[:1] + [w for w in inner if "/" in w]]
    seen = dict.fromkeys(path for path in found if path is not None and ".so" not in path.name)
    return [one for path in seen for one in (path, _interpreter(path, cwd, environ)) if one]


def find(word: str, cwd: Path, environ: Mapping[str, str]) -> Path | None:
    """As the shell would; None: there is no such program."""
    if "/" in word:
        path = cwd / word
        return path if path.is_file() and os.access(path, os.X_OK) else None
    named = shutil.which(word, path=environ.get("PATH", os.defpath))
    return None if named is None else cwd / named


def _interpreter(path: Path, cwd: Path, environ: Mapping[str, str]) -> Path | None:
    with contextlib.suppress(OSError), path.open("rb") as stream:
        line = stream.readline(512)
        if line.startswith(b"#!"):
            named = line[2:].decode(errors="replace").split()
            if named and Path(named[0]).name == _ENV:
                named = [word for word in named[1:] if not word.startswith("-")]
            return find(named[0], cwd, environ) if named else None
    return None


def deaf_to_preload(path: Path) -> str | None:
    """Why LD_PRELOAD does nothing for this file; None: nothing is known against it."""
    try:
        info = path.stat()
        if info.st_mode & (stat.S_ISUID | stat.S_ISGID):
            return f"{path} is setuid or setgid: the loader ignores LD_PRELOAD"
        if _has_capabilities(path):
            return f"{path} has file capabilities: the loader ignores LD_PRELOAD"
        with path.open("rb") as stream:
            head = stream.read(64)
            if len(head) < 64 or head[:4] != b"\x7fELF":
                return None
            if head[4] != 2:
                return f"{path} is a 32-bit program"
            interpreted = _is_interpreted(stream.fileno(), head)
    except (OSError, struct.error):
        return None
    return None if interpreted else f"{path} is statically linked: it loads no library"


def _is_interpreted(descriptor: int, head: bytes) -> bool:
    order = "<" if head[5] == 1 else ">"
    (offset,) = struct.unpack_from(order + "Q", head, 32)
    size, count = struct.unpack_from(order + "HH", head, 54)
    for index in range(min(count, _PROGRAM_HEADERS_CAP)):
        (kind,) = struct.unpack(order + "I", os.pread(descriptor, 4, offset + index * size))
        if kind == _PT_INTERP:
            return True
    return False


def _has_capabilities(path: Path) -> bool:
    try:
        return "security.capability" in os.listxattr(path)
    except OSError:
        return False
