"""What chain.json tells the link runner. Standard library only."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SpecError
from ..rundir import RunDir, phase_of
from ..settings import parse_signal
from ..units import parse_duration, parse_size
from .backend import Cause
from .patience import why_unread
from .sbatchfile import options_of

CONTINUE, RETRY, HALT = "continue", "retry", "halt"
_REACTION_KEYS = {
    Cause.PREEMPTED: "on_preemption",
    Cause.REQUEUED: "on_preemption",
    Cause.NODE_FAILURE: "on_node_failure",
    Cause.OUT_OF_MEMORY: "on_out_of_memory",
    Cause.CRASHED: "on_crash",
    Cause.KILLED: "on_crash",
    Cause.NOT_STARTED: "on_crash",
    Cause.CANCELLED: "on_cancel",
}


@dataclass(frozen=True)
class MemberOrders:
    """This chain is one of a sweep."""

    index: int
    """Its array index."""
    name: str
    values: dict[str, str]


@dataclass(frozen=True)
class Budget:
    """What the chain may use; None: no bound."""

    links: int
    hours: float | None = None
    gpu_hours: float | None = None
    restarts: int | None = None
    gpus: int = 0
    """What one link has: GPU hours are counted with it."""

    @classmethod
    def read(cls, chain: Mapping[str, Any], gpus: int) -> Budget:
        return cls(
            links=int(chain["max_links"]),
            hours=_number(chain.get("max_hours")),
            gpu_hours=_number(chain.get("max_gpu_hours")),
            restarts=None if chain.get("max_restarts") is None else int(chain["max_restarts"]),
            gpus=gpus,
        )

    @property
    def seconds(self) -> float | None:
        """Allocated seconds over all links: the tighter of hours and GPU hours."""
        bounds = [self.hours, self.gpu_hours / self.gpus if self.gpu_hours and self.gpus else None]
        return min((3600.0 * bound for bound in bounds if bound is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What chain.json tells the runner."""

    chain: str
    name: str
    argv: tuple[str, ...]
    phase: int
    phases_left: int
    """Commands that follow this one."""
    cwd: str
    threads: int | None
    after_generation: int
    """Links up to this one belong to an earlier submission and are not counted."""
    signal: signal.Signals
    kill_wait_s: float
    environment: dict[str, str]
    """Settings of the program that were given at submission, as HPC_CKPT__… variables."""
    strategy: str
    links: int
    """How many are submitted at once."""
    may_submit: bool
    """Whether sbatch works where this runs."""
    script: Path
    """What is submitted again when the chain extends itself."""
    batch_logs: Path
    budget: Budget
    retries: int
    reactions: dict[Cause, str]
    exclude: tuple[str, ...]
    """By the user or the site; some may be lists in Slurm's short form."""
    exclude_after: int
    mail: str | None
    forward: tuple[str, str] | None
    """(signal, command | workers)"""
    log_limit: int
    member: MemberOrders | None
    levels: tuple[str, ...]
    """Which levels may save for the program, in this order; none: it saves for itself."""
    alone: bool
    """The program writes files of its own: two links of it must never run at once."""
    choice: dict[str, Any]
    """What was chosen at submission, and why nothing else: level, rejected."""
    packages: dict[str, str] | None
    """Installed packages at submission by directory, if they are pinned."""

    @property
    def max_links(self) -> int:
        return self.budget.links

    def reaction(self, cause: Cause) -> str:
        return self.reactions.get(cause, CONTINUE)

    @classmethod
    def read(cls, rundir: RunDir) -> Orders:
        record = rundir.chain()
        if record is None:
            message = f"{rundir.chain_file}: missing or not JSON; submit the chain again"
            raise SpecError(message) from why_unread(rundir.chain_file)
        try:
            return cls._from_record(rundir, record)
        except (KeyError, TypeError, ValueError) as error:
            raise SpecError(f"{rundir.chain_file}: not a chain's record: {error!r}") from None
        except OSError as error:
            raise SpecError(f"{rundir.phase_file}: cannot be read: {error.strerror}") from error

    @classmethod
    def _from_record(cls, rundir: RunDir, record: dict[str, Any]) -> Orders:
        spec, profile = record["spec"], record["profile"]
        phase = rundir.phase()
        present = phase_of(record, phase)
        chain, rules = spec["chain"], profile.get("chain") or {}
        member = record.get("member")
        home = Path(record.get("sweep") or rundir.root)
        return cls(
            chain=str(record.get("chain") or ""),
            name=str(record.get("name") or rundir.root.name),
            argv=tuple(str(word) for word in present["argv"]),
            phase=phase,
            phases_left=max(0, len(record.get("then") or ()) - phase),
            cwd=str(record["cwd"]),
            threads=int(record["threads"]) if record.get("threads") else None,
            after_generation=int(record.get("after_generation", 0)),
            signal=parse_signal(profile["signal"]["name"]),
            kill_wait_s=parse_duration(profile["kill_wait"]),
            environment={str(k): str(v) for k, v in (record.get("environment") or {}).items()},
            strategy=str(record.get("strategy") or "array"),
            links=int(record.get("links") or chain["max_links"]),
            may_submit=bool(rules.get("submit_from_compute_nodes")),
            script=home / "chain.sbatch",
            batch_logs=home / "logs",
            budget=Budget.read(chain, int(record.get("gpus") or 0)),
            retries=int(chain.get("retries", 5)),
            reactions={cause: str(chain.get(key, _default(key)))
                       for cause, key in _REACTION_KEYS.items()},
            exclude=_excluded(spec, profile, Path(record["cwd"])),
            exclude_after=int(rules.get("exclude_after", 2)),
            mail=spec.get("mail"),
            forward=_forward(spec.get("forward")),
            log_limit=parse_size(str(spec.get("log_limit") or "1G")),
            member=None if member is None else MemberOrders(
                int(member["index"]), str(member["name"]), dict(member["values"])
            ),
            levels=tuple(str(one["name"]) for one in present.get("levels") or ()),
            alone=bool(record.get("alone")),
            choice=dict(present.get("choice") or {}),
            packages=record.get("packages"),
        )  # fmt: skip


def _excluded(spec: Mapping[str, Any], profile: Mapping[str, Any], cwd: Path) -> tuple[str, ...]:
    """The last word counts, and lines written by hand come after the chain's own."""
    found = tuple(str(host) for host in spec.get("exclude") or ())
    extra = (profile.get("directives") or {}).get("extra") or ()
    for line in (*extra, *(spec.get("sbatch") or ())):
        for given in options_of(str(line)):
            if given.name == "exclude" and given.value:
                found = _hosts(given.value, cwd)
    return found


def _hosts(value: str, cwd: Path) -> tuple[str, ...]:
    """With a slash it is the name of a file, as sbatch has it."""
    if "/" not in value:
        return (value,)
    try:
        lines = (cwd / value).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    return tuple(word for line in lines for word in line.partition("#")[0].split())


def _default(key: str) -> str:
    return {"on_cancel": HALT, "on_crash": RETRY, "on_out_of_memory": RETRY}.get(key, CONTINUE)


def _forward(section: Mapping[str, Any] | None) -> tuple[str, str] | None:
    return None if section is None else (str(section["signal"]), str(section["to"]))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
