"""The run directory: every path and record of the party wall, used by both wings.

Standard library only: the link runner reads and writes these files before any environment is
set up. Nothing here decides anything; lease.py takes generations, tiers/ writes checkpoints.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from . import fsio

MANIFEST_NAME = "MANIFEST.json"
ENV_ROOT = "HPC_CKPT_ROOT"
ENV_GENERATION = "HPC_CKPT_GENERATION"
ENV_NOTICE = "HPC_CKPT_NOTICE"
ENV_DEADLINE = "HPC_CKPT_DEADLINE"
ENV_OUTCOME = "HPC_CKPT_OUTCOME"
ENV_SETTINGS = "HPC_CKPT_SETTINGS"
ENV_BACKEND = "HPC_CKPT_BACKEND"
ENV_STEWARD = "HPC_CKPT_STEWARD"
"""Of a program that a level saves from outside: the file by which it says that it saves itself."""
HURRY_AFTER_S = 2.0
"""A second notice line this much later than the first means hurry."""

_KEY = re.compile(r"step-(\d{9,19})-g(\d{8,19})(?:-r([1-9]\d{0,18}))?")


@dataclass(frozen=True, order=True)
class CheckpointKey:
    """Names one checkpoint; the order is the order in which readers prefer them."""

    generation: int
    step: int
    revision: int = 0

    @property
    def directory_name(self) -> str:
        suffix = f"-r{self.revision}" if self.revision else ""
        return f"step-{self.step:09d}-g{self.generation:08d}{suffix}"

    @classmethod
    def parse(cls, name: str) -> CheckpointKey | None:
        """None for anything that is not the exact spelling of a checkpoint directory."""
        match = _KEY.fullmatch(name)
        if match is None:
            return None
        key = cls(int(match[2]), int(match[1]), int(match[3] or 0))
        return key if key.directory_name == name else None


class Result(str, Enum):
    """How a link's program ended, as its outcome file says."""

    SAVED = "saved"
    COMPLETE = "complete"
    FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """Written by rank 0 after the commit; decides how the link ended."""

    outcome: Result
    generation: int
    step: int | None
    reason: str
    by_code: bool = False
    """Complete by exit code 0 alone: the link runner knows if it was ended, and writes DONE."""


@dataclass(frozen=True)
class Done:
    """The work is complete; counts only if the checkpoint it names exists."""

    generation: int
    step: int | None


@dataclass(frozen=True)
class Notice:
    """Somebody asked this link to save and stop."""

    time: float
    sources: tuple[str, ...]
    hurry: bool


class RunDir:
    """One chain's directory. Creating the object touches nothing."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))  # noqa: PTH100 - resolve() would follow links

    def __repr__(self) -> str:
        return f"RunDir({str(self.root)!r})"

    # ── places ────────────────────────────────────────────────────────────────────────────
    @property
    def chain_file(self) -> Path:
        return self.root / "chain.json"

    @property
    def lease(self) -> Path:
        return self.root / "lease"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger"

    @property
    def events(self) -> Path:
        return self.root / "events"

    @property
    def control(self) -> Path:
        return self.root / "control"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def restarts(self) -> Path:
        """Files of programs that cannot be changed; there only if a chain has such."""
        return self.root / "restarts"

    @property
    def levels_file(self) -> Path:
        """Which levels were tried in this chain, and what came of it."""
        return self.control / "levels.json"

    @property
    def speaks_file(self) -> Path:
        """There once a program that a level was to save has turned out to have a Checkpointer."""
        return self.control / "speaks"

    def speaks(self) -> bool:
        """Storage that does not answer now is asked again at the next look."""
        return os.path.exists(self.speaks_file)  # noqa: PTH110 - never raises

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def halt_file(self) -> Path:
        return self.root / "halt"

    @property
    def done_file(self) -> Path:
        return self.root / "DONE"

    def ledger_file(self, generation: int) -> Path:
        return self.ledger / f"{generation:08d}.jsonl"

    def events_file(self, generation: int, node: str) -> Path:
        return self.events / f"{generation:08d}-{node}.jsonl"

    def notice_file(self, generation: int) -> Path:
        return self.control / f"notice-{generation}"

    def deadline_file(self, generation: int) -> Path:
        return self.control / f"deadline-{generation}"

    def outcome_file(self, generation: int) -> Path:
        return self.control / f"outcome-{generation}.json"

    def log_file(self, generation: int) -> Path:
        return self.logs / f"link-{generation:08d}.log"

    @property
    def places(self) -> tuple[Path, ...]:
        """Every directory of it, the root first."""
        inside = (self.lease, self.ledger, self.events, self.control, self.checkpoints, self.logs)
        return (self.root, *inside)

    def create(self, *, group: bool = False) -> list[Path]:
        """Make the directories, for the user alone or for the group; those this call made.

        Durable when it returns: a checkpoint in a directory whose name is lost is lost too.
        """
        parents = [place for place in reversed(self.root.parents) if not place.exists()]
        made = [place for place in parents if _make(place, 0o777)]
        own = [place for place in self.places if _make(place, 0o700)]
        if group:
            # After mkdir, whatever the umask. Files follow the directory they are in.
            for place in own:
                place.chmod(fsio.GROUP_DIRECTORY)
        fsio.sync_names(made + own)
        return made + own

    def environment(self, generation: int, backend: str) -> dict[str, str]:
        """What a link tells its program; all paths absolute."""
        return {
            ENV_ROOT: str(self.root),
            ENV_GENERATION: str(generation),
            ENV_NOTICE: str(self.notice_file(generation)),
            ENV_DEADLINE: str(self.deadline_file(generation)),
            ENV_OUTCOME: str(self.outcome_file(generation)),
            ENV_SETTINGS: str(self.chain_file),
            ENV_BACKEND: backend,
        }

    # ── checkpoints by name ───────────────────────────────────────────────────────────────
    def committed(self) -> list[CheckpointKey]:
        """Keys of the directories with a manifest, oldest first; says nothing of validity."""
        keys = (CheckpointKey.parse(name) for name in _names(self.checkpoints))
        return sorted(key for key in keys if key is not None and self._has_manifest(key))

    def _has_manifest(self, key: CheckpointKey) -> bool:
        return fsio.is_file(self.checkpoints / key.directory_name / MANIFEST_NAME)

    def newest(self) -> CheckpointKey | None:
        """How far the work has come."""
        return max(self.all_keys(), default=None)

    def all_keys(self) -> list[CheckpointKey]:
        """Of checkpoints and restarts together."""
        restarts = (CheckpointKey.parse(name) for name in _names(self.restarts))
        made = [
            key
            for key in restarts
            if key is not None and fsio.is_file(self.restarts / key.directory_name / MANIFEST_NAME)
        ]
        return [*self.committed(), *made]

    # ── phases ────────────────────────────────────────────────────────────────────────────
    @property
    def phase_file(self) -> Path:
        return self.control / "phase.json"

    def phase(self) -> int:
        """Which of the chain's commands is at work; 0: the first. Raises OSError where storage does
        not tell: the first would be run again over the work of a later one."""
        number = (read_surely(self.phase_file) or {}).get("phase")
        return number if isinstance(number, int) else 0

    def is_entering_phase(self) -> bool:
        """The command before is complete, but what is left of it has not gone yet. Raises OSError
        as phase() does."""
        return (read_surely(self.phase_file) or {}).get("entering") is True

    def write_phase(self, number: int, *, entering: bool) -> None:
        fsio.write_atomic(self.phase_file, _encode({"phase": number, "entering": entering}))

    # ── completion ────────────────────────────────────────────────────────────────────────
    def done(self) -> Done | None:
        """The record in DONE if it counts, else None."""
        entering = (read_json(self.phase_file) or {}).get("entering") is True
        record = None if entering else read_json(self.done_file)
        if record is None or not isinstance(record.get("generation"), int):
            return None
        step = record.get("step")
        done = Done(record["generation"], step if isinstance(step, int) else None)
        if done.step is None:
            return done
        named = (done.generation, done.step)
        exists = any((key.generation, key.step) == named for key in self.committed())
        return done if exists else None

    def write_done(self, done: Done) -> None:
        fsio.write_atomic(self.done_file, _encode(asdict(done)))

    # ── halt ──────────────────────────────────────────────────────────────────────────────
    def halted(self) -> str | None:
        """Why the chain was asked to stop, or None."""
        try:
            return self.halt_file.read_text(encoding="utf-8", errors="replace").strip() or "halt"
        except OSError:
            return None

    def write_halt(self, reason: str) -> None:
        fsio.write_atomic(self.halt_file, (reason + "\n").encode())

    # ── outcome ───────────────────────────────────────────────────────────────────────────
    def outcome(self, generation: int) -> Outcome | None:
        record = read_json(self.outcome_file(generation))
        if record is None or record.get("outcome") not in set(Result):
            return None
        step = record.get("step")
        return Outcome(
            Result(record["outcome"]),
            generation,
            step if isinstance(step, int) else None,
            str(record.get("reason", "")),
            record.get("by_code") is True,
        )

    # ── deadline ──────────────────────────────────────────────────────────────────────────
    def deadline(self, generation: int) -> float | None:
        return read_deadline(self.deadline_file(generation))

    def write_deadline(self, generation: int, unix_s: float) -> None:
        fsio.write_atomic(self.deadline_file(generation), f"{unix_s:.3f}\n".encode())

    # ── notice ────────────────────────────────────────────────────────────────────────────
    def notice(self, generation: int) -> Notice | None:
        return read_notice(self.notice_file(generation))

    def give_notice(self, generation: int, source: str, *, hurry: bool = False) -> None:
        """Append one line; a line that cannot be written is the caller's error to see."""
        line = {"time": round(time.time(), 3), "source": source, "hurry": hurry}
        with self.notice_file(generation).open("ab") as stream:
            stream.write(_encode(line))

    # ── chain.json ────────────────────────────────────────────────────────────────────────
    def chain(self) -> dict[str, Any] | None:
        return read_json(self.chain_file)


def phase_of(chain: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """What a chain's record says of one of its commands: argv and levels."""
    later = chain.get("then") or ()
    return later[number - 1] if 0 < number <= len(later) else chain


def write_outcome(path: Path, outcome: Outcome) -> None:
    """Write the outcome where the environment says it belongs."""
    record = asdict(outcome)
    if not outcome.by_code:
        del record["by_code"]
    fsio.write_atomic(path, _encode(record))


def read_deadline(path: Path) -> float | None:
    """Unix seconds; None where there is no such moment."""
    try:
        moment = float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return moment if math.isfinite(moment) else None


def read_notice(path: Path) -> Notice | None:
    """What the notice file says; a line that is not JSON still counts as somebody's notice."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        modified = path.stat().st_mtime
    except OSError:
        return None
    records = [_parse_line(line) for line in text.splitlines() if line.strip()]
    times = [float(r["time"]) for r in records if isinstance(r.get("time"), (int, float))]
    first = times[0] if times else modified
    late = any(moment >= first + HURRY_AFTER_S for moment in times)
    sources = tuple(str(r.get("source", "unknown")) for r in records) or ("unknown",)
    return Notice(first, sources, late or any(r.get("hurry") is True for r in records))


def _make(place: Path, mode: int) -> bool:
    try:
        place.mkdir(mode=mode)
    except FileExistsError:
        if not place.is_dir():
            raise
        return False
    return True


def _parse_line(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def read_json(path: Path) -> dict[str, Any] | None:
    """None for what is missing, cannot be read now, or is no JSON object."""
    try:
        return read_surely(path)
    except OSError:
        return None


def read_surely(path: Path) -> dict[str, Any] | None:
    """The same, but every OSError that does not say that it is missing reaches the caller."""
    try:
        record = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _encode(record: Mapping[str, object]) -> bytes:
    return (json.dumps(record) + "\n").encode()


def _names(place: Path) -> list[str]:
    try:
        return os.listdir(place)  # noqa: PTH208 - names only, no Path per entry
    except OSError:
        return []
