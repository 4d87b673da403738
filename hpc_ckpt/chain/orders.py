"""What chain.json tells the link runner. Standard library only."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError
from ..rundir import RunDir
from ..settings import parse_signal
from ..units import parse_duration


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What chain.json tells the runner."""

    argv: tuple[str, ...]
    cwd: str
    threads: int | None
    max_links: int
    after_generation: int
    """Links up to this one belong to an earlier submission and are not counted."""
    signal: signal.Signals
    kill_wait_s: float
    environment: dict[str, str]
    """Settings of the program that were given at submission, as HPC_CKPT__… variables."""

    @classmethod
    def read(cls, rundir: RunDir) -> Orders:
        record = rundir.chain()
        if record is None:
            raise SpecError(f"{rundir.chain_file}: missing or not JSON; submit the chain again")
        try:
            return cls._from_record(record)
        except (KeyError, TypeError, ValueError) as error:
            raise SpecError(f"{rundir.chain_file}: not a chain's record: {error!r}") from None

    @classmethod
    def _from_record(cls, record: dict[str, Any]) -> Orders:
        profile = record["profile"]
        return cls(
            argv=tuple(str(word) for word in record["argv"]),
            cwd=str(record["cwd"]),
            threads=int(record["threads"]) if record.get("threads") else None,
            max_links=int(record["spec"]["chain"]["max_links"]),
            after_generation=int(record.get("after_generation", 0)),
            signal=parse_signal(profile["signal"]["name"]),
            kill_wait_s=parse_duration(profile["kill_wait"]),
            environment={str(k): str(v) for k, v in (record.get("environment") or {}).items()},
        )
