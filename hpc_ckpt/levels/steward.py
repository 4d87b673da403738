"""The steward's process: what the link runner starts in place of the user's command."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import rundir as wall
from ..errors import EXIT_FAILED, HpcCkptError, SpecError
from ..events import EventLog
from ..rundir import RunDir, phase_of
from ..settings import resolve
from .base import Work
from .orphans import Orphans
from .stewardship import Steward

log = logging.getLogger("hpc_ckpt.steward")

_OWN = (wall.ENV_ROOT, wall.ENV_GENERATION, wall.ENV_OUTCOME, wall.ENV_SETTINGS, wall.ENV_BACKEND)
"""Not for the program: a Checkpointer inside it would take itself for this link."""


def program_environment(environ: Mapping[str, str], speaks: Path | None = None) -> dict[str, str]:
    """What the user's program finds: not this link's own variables, but where a Checkpointer in
    it may say that it is one."""
    found = {name: value for name, value in environ.items() if name not in _OWN}
    found.pop(wall.ENV_STEWARD, None)
    return found if speaks is None else {**found, wall.ENV_STEWARD: str(speaks)}


def may_speak(record: Mapping[str, Any], phase: int) -> bool:
    """Whether the level was chosen for the program, and not asked for by name."""
    asked = phase_of(record.get("spec") or {}, phase)
    return asked.get("level", "auto") == "auto" and asked.get("recipe") is None


def _node(environ: Mapping[str, str]) -> str:
    name = environ.get("SLURMD_NODENAME") or socket.gethostname()
    return re.sub(r"[^\w.-]+", "-", name) or "node"


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the notice file tells
    logging.basicConfig(level=logging.INFO, format="hpc-ckpt: %(message)s", stream=sys.stderr)
    environ = dict(os.environ)
    orphans = Orphans()
    try:
        return _run(environ, orphans)
    except HpcCkptError as error:
        log.critical("%s", error)
        return error.exit_code
    except OSError as error:
        log.critical("%s", error)
        return EXIT_FAILED
    finally:
        orphans.end()


def _run(environ: Mapping[str, str], orphans: Orphans) -> int:
    from .choose import levels_of  # builds every level: only here

    place = RunDir(environ[wall.ENV_ROOT])
    generation = int(environ[wall.ENV_GENERATION])
    record = place.chain()
    if record is None:
        raise SpecError(f"{place.chain_file}: cannot be read now")
    phase = place.phase()
    scratch = Path(tempfile.mkdtemp(prefix="hpc-ckpt-"))
    try:
        present = phase_of(record, phase)
        speaks = place.speaks_file if may_speak(record, phase) else None
        work = Work(
            argv=tuple(present["argv"]),
            cwd=Path(record["cwd"]),
            environ=program_environment(environ, speaks),
            gpus=int(record.get("gpus") or 0),
            scratch=scratch,
            kept=place.logs,
            noted=place.restarts,
            log=place.log_file(generation),
        )
        settings = resolve(file=environ.get(wall.ENV_SETTINGS), environ=environ)
        log_file = EventLog(place.events_file(generation, _node(environ)))
        try:
            steward = Steward(
                place,
                generation,
                work,
                levels_of(present["levels"]),
                settings,
                log_file,
                lead_s=record.get("lead_s"),
                link_environ=environ if speaks else None,
                orphans=orphans,
            )
            return steward.run()
        finally:
            log_file.close()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
