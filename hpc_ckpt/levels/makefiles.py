"""What `make` would run for some targets, as far as a Makefile says it in plain words."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

LOOK_INTO = 1024**2
MOST_TARGETS = 200
NAMES = ("GNUmakefile", "makefile", "Makefile")
_RULE = re.compile(r"^([^\s#:=][^#:=]*?)\s*::?(?!=)\s*([^#;\n]*)(?:;([^\n]*))?$")
_VARIABLE = re.compile(r"^\s*(?:export\s+)?([A-Za-z_][\w.-]*)\s*[:?+]{0,3}=\s*(.*?)\s*$")
_USE = re.compile(r"\$[({]([\w.-]+)[)}]")
_DEEP = 3
"""Variables inside variables."""


def recipe_text(words: Sequence[str], place: Path) -> str:
    """The lines for the targets that the words name, and for what those need; nothing where
    there is no Makefile."""
    options: dict[str, str | None] = dict.fromkeys(("-C", "--directory", "-f", "--file"))
    targets, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if word in options:
            options[word] = rest.pop(0) if rest else None
        elif not word.startswith("-") and "=" not in word:
            targets.append(word)
    inside = place / (options["-C"] or options["--directory"] or ".")
    named = options["-f"] or options["--file"]
    text = next((t for t in (_read(inside / n) for n in ([named] if named else NAMES)) if t), "")
    if not text:
        return ""
    lines = _lines_for(targets, text.replace("\\\n", " "))
    return "\n".join([f"cd {inside}", *lines] if lines else [])


def _lines_for(targets: Sequence[str], text: str) -> list[str]:
    variables: dict[str, str] = {}
    needs: dict[str, list[str]] = {}
    recipes: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if line.startswith("\t"):
            for name in current:
                recipes[name].append(line.strip().lstrip("@-+"))
            continue
        line = line.partition(" #")[0].rstrip()  # noqa: PLW2901 - without its comment
        variable = _VARIABLE.match(line)
        rule = None if variable else _RULE.match(line)
        if variable is not None:
            variables[variable[1]] = variable[2]
        elif rule is not None:
            current = _expanded(rule[1], variables).split()
            for name in current:
                needs.setdefault(name, []).extend(_expanded(rule[2], variables).split())
                recipes.setdefault(name, []).extend([rule[3]] if rule[3] else [])
        elif line.strip():
            current = []
    first = next((name for name in recipes if not name.startswith(".")), None)
    pending, seen = list(targets or ([first] if first else [])), list[str]()
    while pending and len(seen) < MOST_TARGETS:
        name = pending.pop(0)
        if name not in seen and name in recipes:
            seen.append(name)
            pending += needs[name]
    return [_expanded(line, variables) for name in seen for line in recipes[name]]


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    for _ in range(_DEEP):
        text = _USE.sub(lambda match: variables.get(match[1], match[0]), text)
    return text


def _read(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return stream.read(LOOK_INTO).decode("utf-8", "replace")
    except OSError:
        return ""
