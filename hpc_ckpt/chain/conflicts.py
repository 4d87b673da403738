"""Lines of a batch script's body that mean something else inside a chain. Text in, remarks out.

A chain runs the body from its first line in every link, as one step, and starts the next link
itself; a body written for one job may count on none of that.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from .sbatchfile import MAGIC, Line


class Fate(str, Enum):
    """What becomes of a line or an option of the old script."""

    TAKEN = "taken"
    KEPT = "kept"
    REPLACED = "replaced"
    LEFT_OUT = "left out"
    LOOK = "look at it"
    """Nobody but its author can tell whether it still does what it should."""


@dataclass(frozen=True)
class Remark:
    line: int
    what: str
    fate: Fate
    why: str


TWO_OWNERS = (
    "two owners of requeue: the chain starts the next link itself, and this would start the "
    "work a second time; take the line out"
)
_COMMAND = r"(?:^|[\s;&|(`{!'\"])"
"""What may stand before the name of a program."""
_SAVES = frozenset({"TERM", "USR1", "USR2", "INT", "HUP", "QUIT", "XCPU", "CONT"})
_MARK = re.compile(r"(^|\s)#.*")


@dataclass(frozen=True)
class _Rule:
    pattern: re.Pattern[str]
    what: str
    why: str


def _rule(pattern: str, what: str, why: str) -> _Rule:
    return _Rule(re.compile(pattern), what, why)


_RULES = (
    _rule(_COMMAND + r"scontrol\s+(requeue|requeuehold|release)\b", "scontrol requeue", TWO_OWNERS),
    _rule(
        r"SLURM_ARRAY_\w+",
        "SLURM_ARRAY_TASK_ID",
        "indices are interchangeable tokens: one can be used up or come twice. Let the program go "
        "on from its checkpoint; the number of the link is HPC_CKPT_GENERATION",
    ),
    _rule(
        r"SLURM_RESTART_COUNT\b",
        "SLURM_RESTART_COUNT",
        "a new link of the chain begins with 0; the number of the link is HPC_CKPT_GENERATION",
    ),
    _rule(
        r"\$\{?SLURM_JOB_?ID\b",
        "SLURM_JOB_ID",
        "another number in each link: what one link puts into a place named for it the next does "
        "not find. HPC_CKPT_ROOT is the same in all",
    ),
    _rule(
        _COMMAND + r"timeout\s",
        "timeout",
        "ends the program at a moment of its own, and its 124 counts as a failure; the chain "
        "knows when the link ends and asks for a save in time",
    ),
    _rule(
        _COMMAND + r"(dmtcp_\w+|start_coordinator|criu)\b",
        "dmtcp, criu",
        "restarting from images is the script's own business here: the chain only runs it again",
    ),
    _rule(
        _COMMAND + r"srun\b.*\s(--exclusive|--exact)\b",
        "srun --exclusive",
        "cannot be together with --overlap, which an srun inside the chain's step needs; take it "
        "out",
    ),
)


def code_of(text: str) -> str:
    """A line without its comment; a `#` in quotes after a space is taken for one too."""
    return _MARK.sub("", text)


def calls(body: Iterable[Line], program: str) -> list[Line]:
    """Lines in which a program is called by name or path."""
    pattern = re.compile(_COMMAND + rf"(?:[\w./~$-]*/)?(?:{program})(?=\s|$|[;&|)`\"'])")
    return [line for line in body if pattern.search(code_of(line.text))]


def find_conflicts(body: Iterable[Line], script_name: str) -> list[Remark]:
    """Everything in the body that its author should look at."""
    lines = list(body)
    searches: tuple[Callable[[list[Line]], Iterable[Remark]], ...] = (
        _unread_directives,
        lambda found: _submissions(found, script_name),
        _traps,
        _by_rule,
    )
    remarks = [remark for search in searches for remark in search(lines)]
    return sorted(remarks, key=lambda remark: remark.line)


def _by_rule(lines: list[Line]) -> Iterator[Remark]:
    for rule in _RULES:
        for line in lines:
            if rule.pattern.search(code_of(line.text)):
                yield Remark(line.number, rule.what, Fate.LOOK, rule.why)


def _unread_directives(lines: list[Line]) -> Iterator[Remark]:
    for line in lines:
        if line.text.startswith(MAGIC):
            why = "stands after the first command, where sbatch does not read it; nor do we"
            yield Remark(line.number, line.text.strip(), Fate.LEFT_OUT, why)


def _submissions(lines: list[Line], script_name: str) -> Iterator[Remark]:
    itself = re.compile(rf"\$0\b|\$\{{0\}}|BASH_SOURCE|{re.escape(script_name)}")
    for line in calls(lines, "sbatch"):
        if itself.search(code_of(line.text)):
            yield Remark(line.number, "sbatch of itself", Fate.LOOK, TWO_OWNERS)
        else:
            why = "submits another job in every link; the chain does not know of it"
            yield Remark(line.number, "sbatch", Fate.LOOK, why)


# ── traps ─────────────────────────────────────────────────────────────────────────────────
def _traps(lines: list[Line]) -> Iterator[Remark]:
    for line, signals in trapped(lines):
        why = (
            "no signal reaches the body: the runner turns them into the file $HPC_CKPT_NOTICE. "
            f"'forward: {{signal: {signals[0]}}}' in the spec sends it on; after saving the "
            "script must exit 75, for 0 means that the work is complete"
        )
        yield Remark(line.number, f"trap {' '.join(signals)}", Fate.LOOK, why)


def trapped(body: Iterable[Line]) -> list[tuple[Line, list[str]]]:
    """Lines that set a trap for a signal of the scheduler, and for which."""
    found = []
    for line in calls(body, "trap"):
        after = re.split(_COMMAND + r"trap\s", code_of(line.text), maxsplit=1)
        signals = _signals(after[1]) if len(after) > 1 else []
        if signals:
            found.append((line, signals))
    return found


def _signals(after: str) -> list[str]:
    """Names in `trap 'action' NAME…`; of an action over several lines only what is here."""
    try:
        words = shlex.split(after)[1:]
    except ValueError:
        words = re.findall(r"\b(?:SIG)?[A-Z]+[12]?\b", after)
    names = [word.strip(";").upper().removeprefix("SIG") for word in words]
    numbers = {"1": "HUP", "2": "INT", "3": "QUIT", "10": "USR1", "12": "USR2", "15": "TERM"}
    return [numbers.get(name, name) for name in names if numbers.get(name, name) in _SAVES]
