"""One DMTCP coordinator: a child of this process, for one attempt to run the program."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .base import NotHere
from .dmtcp_tool import DmtcpTool, clean
from .program import own_children

START_S = 60.0
"""On a busy node, or from slow storage, it takes as long as a client may."""
ANSWER_S = 10.0
QUIT_S = 2.0
LOOK_EVERY_S = 0.05
_STATUS = re.compile(r"NUM_PEERS=(\d+)\s+RUNNING=(yes|no)")
_CLIENT = re.compile(r"\[\d+:(\d+)\]@")
_KILLED = re.compile(r"killing all connected peers", re.IGNORECASE)
_LAST = "last client exited"
_CONNECTED = re.compile(r"worker connected", re.IGNORECASE)


@dataclass(frozen=True)
class Status:
    peers: int
    running: bool


class Coordinator:
    """Its directory holds the port file, its log, and nothing that another attempt needs."""

    def __init__(self, tool: DmtcpTool, place: Path, environ: Mapping[str, str]) -> None:
        """Raises NotHere where it does not come up: that says nothing of any restart."""
        self._tool = tool
        self._environ = clean(environ)
        self.temporary = place / "tmp"
        scripts = place / "scripts"
        try:
            for directory in (place, self.temporary, scripts):
                directory.mkdir(parents=True)
        except OSError as error:
            raise NotHere(f"{place}: {error.strerror}") from error
        self._log = place / "coordinator.log"
        self._child = self._start(place / "port", scripts)
        own_children.add(self._child.pid)
        try:
            self.port = self._wait_for_port(place / "port")
        except BaseException:  # nothing of it outlives this, then raised again
            self.close()
            raise

    def _start(self, port_file: Path, scripts: Path) -> subprocess.Popen[bytes]:
        argv = self._tool.coordinator(port_file, scripts, self.temporary)
        try:
            with self._log.open("wb") as stream:
                return subprocess.Popen(
                    argv,
                    cwd=scripts,
                    env=self._environ,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise NotHere(f"{argv[0]}: {error.strerror}") from error

    def _wait_for_port(self, path: Path) -> int:
        until = time.monotonic() + START_S
        while time.monotonic() < until and self._child.poll() is None:
            with contextlib.suppress(OSError, ValueError):
                return int(path.read_text(encoding="ascii"))
            time.sleep(LOOK_EVERY_S)
        lines = self.log().strip().splitlines()
        said = lines[-1] if lines else "nothing"
        raise NotHere(f"dmtcp_coordinator gave no port within {START_S:g} s; it said: {said}")

    # ── questions ─────────────────────────────────────────────────────────────────────────
    def alive(self) -> bool:
        return self._child.poll() is None

    def status(self) -> Status | None:
        """None: no answer."""
        match = _STATUS.search(self._ask("-s"))
        return None if match is None else Status(int(match[1]), match[2] == "yes")

    def clients(self) -> set[int]:
        """The processes under its control."""
        return {int(pid) for pid in _CLIENT.findall(self._ask("-l"))}

    def log(self) -> str:
        try:
            return self._log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def was_told_to_kill(self) -> bool:
        """By somebody's dmtcp_command -k or -q: its clients then end with code 0, as if they
        had finished. It writes the same words when the last client has left by itself."""
        text = self.log()
        match = _KILLED.search(text)
        return match is not None and _LAST not in text[: match.start()]

    def has_seen_a_client(self) -> bool:
        return _CONNECTED.search(self.log()) is not None

    # ── orders ────────────────────────────────────────────────────────────────────────────
    def checkpoint(self) -> subprocess.Popen[bytes]:
        """Blocks until all images are there under their names, or the program is dead."""
        return subprocess.Popen(
            self._tool.command(self.port, "-bc"),
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def close(self) -> None:
        """It, and whatever it still has under its control."""
        if self.alive() and hasattr(self, "port"):
            self._ask("-q")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(QUIT_S if hasattr(self, "port") else 0)
        self._child.kill()
        self._child.wait()
        own_children.discard(self._child.pid)

    def _ask(self, word: str) -> str:
        try:
            done = subprocess.run(
                self._tool.command(self.port, word),
                env=self._environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=ANSWER_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.decode(errors="replace")
