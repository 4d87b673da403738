"""An existing batch script, read as sbatch itself reads it: options and body. Text in, facts out.

The rules are those of Slurm's own parser: words in quotes, `#` begins a comment, a backslash
escapes one character, and nothing counts after the first line that is a command.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..errors import SpecError

MAGIC = ("#SBATCH", "#SLURM")
SHORT = {
    "A": "account", "a": "array", "b": "begin", "D": "chdir", "M": "clusters", "C": "constraint",
    "S": "core-spec", "c": "cpus-per-task", "d": "dependency", "m": "distribution", "e": "error",
    "x": "exclude", "B": "extra-node-info", "G": "gpus", "h": "help", "H": "hold", "i": "input",
    "J": "job-name", "L": "licenses", "k": "no-kill", "F": "nodefile", "w": "nodelist",
    "N": "nodes", "n": "ntasks", "o": "output", "O": "overcommit", "s": "oversubscribe",
    "p": "partition", "q": "qos", "Q": "quiet", "t": "time", "v": "verbose", "V": "version",
    "W": "wait",
}  # fmt: skip
FLAGS = frozenset({
    "contiguous", "help", "hold", "ignore-pbs", "no-requeue", "overcommit", "oversubscribe",
    "parsable", "quiet", "reboot", "spread-job", "test-only", "usage", "use-min-nodes", "verbose",
    "version", "wait",
})  # fmt: skip
"""Without a value."""
OPTIONAL = frozenset({"exclusive", "get-user-env", "nice", "no-kill", "propagate", "requeue"})
"""With a value only after an equals sign."""
VALUED = frozenset({
    "account", "acctg-freq", "array", "batch", "bb", "bbf", "begin", "chdir", "cluster-constraint",
    "clusters", "comment", "constraint", "container", "core-spec", "cores-per-socket", "cpu-freq",
    "cpus-per-gpu", "cpus-per-task", "deadline", "delay-boot", "dependency", "distribution",
    "error", "exclude", "export", "export-file", "extra-node-info", "gid", "gpu-bind", "gpu-freq",
    "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "gres-flags", "hint",
    "input", "job-name", "kill-on-invalid-dep", "licenses", "mail-type", "mail-user", "mcs-label",
    "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nodefile", "nodelist",
    "nodes", "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node",
    "ntasks-per-socket", "open-mode", "output", "partition", "power", "prefer", "priority",
    "profile", "qos", "reservation", "signal", "sockets-per-node", "switches", "thread-spec",
    "threads-per-core", "time", "time-min", "tmp", "uid", "wait-all-nodes", "wckey", "wrap",
})  # fmt: skip
ALIASES = {
    "cluster": "clusters", "share": "oversubscribe", "tasks-per-node": "ntasks-per-node",
    "workdir": "chdir",
}  # fmt: skip
OF_THE_SUBMISSION = frozenset(
    {"help", "ignore-pbs", "parsable", "quiet", "test-only", "usage", "verbose", "version", "wait"}
)
NOT_IN_A_CHAIN = {
    **dict.fromkeys(OF_THE_SUBMISSION, "tells sbatch how to submit; hpc-ckpt submits"),
    **dict.fromkeys(
        ("clusters", "cluster-constraint"),
        "a chain lives on the cluster it is submitted on; log in there",
    ),
    "error": "what the program prints goes to logs/ in the run directory: hpc-ckpt logs",
    "export-file": "the chain's jobs start with NONE; source it in the script",
    "wrap": "not in a script: hpc-ckpt submit -- COMMAND does the same",
}
"""Options that no script of a chain may have, and why; those that it has itself are not here."""
_KNOWN = FLAGS | OPTIONAL | VALUED | ALIASES.keys()
_SHELLS = re.compile(r"(?:ba|da|z|k)?sh")


@dataclass(frozen=True)
class Given:
    """One option of a script by its long name, and where it stands."""

    name: str
    value: str | None
    line: int

    def __str__(self) -> str:
        return f"--{self.name}" if self.value is None else f"--{self.name}={self.value}"


@dataclass(frozen=True)
class Line:
    """One line of the body, without its line break."""

    number: int
    text: str


@dataclass(frozen=True)
class BatchScript:
    shebang: str
    shell: tuple[str, ...]
    """The interpreter that the first line asks for, by name, with its options."""
    options: tuple[Given, ...]
    body: tuple[Line, ...]
    """Everything but the first line and what sbatch reads."""


@dataclass(frozen=True)
class _Word:
    text: str
    line: int


def read_script(text: str, shown: str) -> BatchScript:
    """The script's options and body; SpecError for what sbatch would refuse as well."""
    lines = _lines(text, shown)
    words: list[_Word] = []
    body: list[Line] = []
    reading = True
    for number, line in enumerate(lines[1:], start=2):
        if reading and line.startswith(MAGIC):
            words += _words(line, number, shown)
            continue
        reading = reading and (not line.strip() or line.lstrip().startswith("#"))
        body.append(Line(number, line))
    shell = _shell(lines[0], shown)
    return BatchScript(lines[0], shell, tuple(_options(words, shown)), tuple(body))


def options_of(directive: str) -> tuple[Given, ...]:
    """The options of one #SBATCH line; SpecError for what sbatch would refuse as well."""
    return tuple(_options(_words(f"{MAGIC[0]} {directive}", 1, directive), directive))


def _lines(text: str, shown: str) -> list[str]:
    if "\0" in text:
        raise SpecError(f"{shown}: not a script: it contains NUL characters")
    if not text.startswith("#!"):
        raise SpecError(f"{shown}:1: not a batch script: the first line must be #!/bin/bash")
    if "\r\n" in text:
        raise SpecError(f"{shown}: has the line ends of Windows, which sbatch refuses; dos2unix it")
    return text.split("\n")[: -1 if text.endswith("\n") else None]


def _shell(shebang: str, shown: str) -> tuple[str, ...]:
    words = shebang[2:].split()
    if words and words[0].endswith("/env"):
        words = [word for word in words[1:] if word != "-S"]
    name = words[0].rpartition("/")[2] if words else ""
    if _SHELLS.fullmatch(name) is None:
        raise SpecError(
            f"{shown}:1: {shebang!r} is not a shell's script; submit its command instead: "
            "hpc-ckpt submit -- PROGRAM ARGUMENTS"
        )
    return (name, *words[1:])


# ── words ─────────────────────────────────────────────────────────────────────────────────
def _words(line: str, number: int, shown: str) -> list[_Word]:
    rest = line.removeprefix(next(magic for magic in MAGIC if line.startswith(magic)))
    if re.search("hetjob|packjob", rest, re.IGNORECASE):
        raise SpecError(f"{shown}:{number}: heterogeneous jobs cannot be arrays, so not chains")
    words: list[_Word] = []
    while True:
        rest = rest.lstrip()
        if rest.startswith(":"):
            raise SpecError(f"{shown}:{number}: unexpected ':' in {line!r}")
        word, rest = _word(rest, number, shown)
        if not word:
            return words
        words.append(_Word(word, number))


def _word(rest: str, number: int, shown: str) -> tuple[str, str]:
    """The next word, and what is left of the line."""
    word, quote, place = "", "", 0
    while place < len(rest) and (quote or not rest[place].isspace()):
        letter = rest[place]
        if letter == "\\":
            place += 1
            word += rest[place : place + 1]
        elif letter == quote:
            quote = ""
        elif not quote and letter in "\"'":
            quote = letter
        elif not quote and letter == "#":
            return word, ""
        else:
            word += letter
        place += 1
    if quote:
        raise SpecError(f"{shown}:{number}: no closing {quote} in this line")
    return word, rest[place:]


# ── options ───────────────────────────────────────────────────────────────────────────────
def _options(words: Sequence[_Word], shown: str) -> Iterator[Given]:
    """As getopt_long reads them: words may go on in the next #SBATCH line."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.text.startswith("--") and len(word.text) > 2:
            yield _long(word, rest, shown)
        elif word.text.startswith("-") and len(word.text) > 1:
            yield from _clustered(word, rest, shown)
        else:
            raise SpecError(f"{shown}:{word.line}: {word.text!r} is not an option; sbatch stops")


def _long(word: _Word, rest: list[_Word], shown: str) -> Given:
    written, equals, value = word.text[2:].partition("=")
    name = _full_name(written, word.line, shown)
    if equals:
        if name in FLAGS:
            raise SpecError(f"{shown}:{word.line}: --{name} takes no value")
        return Given(name, value, word.line)
    if name in FLAGS or name in OPTIONAL:
        return Given(name, None, word.line)
    if name in VALUED:
        return Given(name, _next_value(name, word.line, rest, shown), word.line)
    # A newer Slurm's: what follows and is no option can only be its value.
    follows = rest and not rest[0].text.startswith("-")
    return Given(name, rest.pop(0).text if follows else None, word.line)


def _full_name(written: str, number: int, shown: str) -> str:
    """Slurm takes any beginning of a name that only one option has."""
    if written in _KNOWN:
        return ALIASES.get(written, written)
    near = sorted({ALIASES.get(name, name) for name in _KNOWN if name.startswith(written)})
    if len(near) > 1:
        shown_near = ", ".join(f"--{name}" for name in near)
        raise SpecError(f"{shown}:{number}: --{written} could be {shown_near}; write it out")
    return near[0] if near else written


def _clustered(word: _Word, rest: list[_Word], shown: str) -> Iterator[Given]:
    """-p gpu, -pgpu, -Hv."""
    letters = word.text[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        name = SHORT.get(letter)
        if name is None:
            raise SpecError(f"{shown}:{word.line}: sbatch has no option -{letter}")
        if name in FLAGS:
            yield Given(name, None, word.line)
            continue
        value: str | None = letters or None
        if value is None and name in VALUED:
            value = _next_value(name, word.line, rest, shown)
        yield Given(name, value, word.line)
        return


def _next_value(name: str, number: int, rest: list[_Word], shown: str) -> str:
    if not rest:
        raise SpecError(f"{shown}:{number}: --{name} needs a value")
    return rest.pop(0).text
