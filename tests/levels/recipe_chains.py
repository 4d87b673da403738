"""Chains by a recipe on this machine, through `hpc-ckpt run`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpc_ckpt.levels.restarts import Restarts
from hpc_ckpt.rundir import RunDir


def chain(place: Path, command: str, like: str, link: str, **more: Any) -> dict[str, Any]:
    """`hpc-ckpt run` to its end; its status."""
    spec = {
        "command": command,
        "root": "run",
        "recipe": {"like": like, "name": like, "save": {"lead": "2s"}},
        "chain": {"link_time": link, "max_links": "12"},
        "checkpoint": {"policy": "every 1s"},
        **more,
    }
    (place / "spec.yaml").write_text(json.dumps(spec))
    done = cli(place, "run", "spec.yaml")
    assert 0 == done.returncode, done.stdout + done.stderr + logs(place)
    told = cli(place, "status", "run", "--json")
    return dict(json.loads(told.stdout))


def cli(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpc_ckpt.cli", *words]
    return subprocess.run(command, cwd=place, capture_output=True, text=True)


def logs(place: Path) -> str:
    return "".join(p.read_text() for p in sorted((place / "run" / "logs").glob("link-*.log")))


def at_first_restart(place: Path, what: Callable[[], object], number: int = 1) -> threading.Thread:
    """Does it once, as soon as a first restart (or that many) is committed."""

    def look() -> None:
        store = Restarts(RunDir(place / "run"))
        end = time.monotonic() + 60
        while time.monotonic() < end and len(store.keys()) < number:
            time.sleep(0.05)
        what()

    thread = threading.Thread(target=look)
    thread.start()
    return thread
