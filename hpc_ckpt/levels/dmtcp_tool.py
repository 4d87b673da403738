"""DMTCP's programs: where they are, which version, and the command lines that version takes."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import HpcCkptError

OLDEST = (2, 6)
ASSERTED = 99
"""Exit code of every failed assertion in DMTCP's programs, and in a program under them."""
HOST = "127.0.0.1"
_LAUNCH = "dmtcp_launch"
_PROGRAMS = (_LAUNCH, "dmtcp_restart", "dmtcp_command", "dmtcp_coordinator", "mtcp_restart")
_VERSION = re.compile(r"\(DMTCP\)\s+((\d+)\.(\d+)[\w.+-]*)")
_ANSWER_S = 30.0
_REFRESHED = re.compile(r"SLURM\w*|HPC_CKPT_\w+|TMPDIR|HOSTNAME|PMI\w*")
_PLAIN = re.compile(r"[\w./:,@%+()\[\]-]{0,500}")
ENV_FILE_CAP = 8000
"""DMTCP reads into fixed buffers; what does not fit would be worse than an old value."""


NOT_FOUND = "dmtcp_launch is not on PATH; load its module, or write tools.dmtcp.path"


class NoTool(HpcCkptError):
    """DMTCP is not here, or not in a state to be used."""


@dataclass(frozen=True)
class DmtcpTool:
    """One installation."""

    place: Path
    version: str
    number: tuple[int, int]

    def coordinator(self, port_file: Path, scripts: Path, temporary: Path) -> list[str]:
        """Port 0 and a port file: nothing that two links on one node could share.

        In the foreground: as our own child it can be ended for sure.
        """
        return [
            self._path("dmtcp_coordinator"), "--exit-on-last", "--port", "0",
            "--port-file", str(port_file), "--ckptdir", str(scripts), "--tmpdir", str(temporary),
        ]  # fmt: skip

    def launch(self, port: int, images: Path, temporary: Path, argv: Sequence[str]) -> list[str]:
        """Uncompressed: gzip makes a save ten times slower."""
        words = [self._path(_LAUNCH), *_joined(port), "--ckptdir", str(images)]
        words += ["--no-gzip", "--tmpdir", str(temporary), "--quiet"]
        if self.refreshes_environment:
            words.append("--modify-env")
        return [*words, *argv]

    def restart(self, port: int, temporary: Path, images: Sequence[Path]) -> list[str]:
        """All images of a process tree in one call. No --ckptdir: DMTCP would look there for
        the directories *_files that lie beside the images."""
        words = [self._path("dmtcp_restart"), *_joined(port), "--tmpdir", str(temporary)]
        return [*words, "--quiet", *map(str, images)]

    def command(self, port: int, *words: str) -> list[str]:
        return [self._path("dmtcp_command"), "-h", HOST, "-p", str(port), *words]

    @property
    def refreshes_environment(self) -> bool:
        """Whether its plugin that sets variables at a restart was built."""
        prefix = self.place.parent
        return any(prefix.glob("lib*/dmtcp/libdmtcp_modify-env.so"))

    def _path(self, program: str) -> str:
        return str(self.place / program)


def _joined(port: int) -> list[str]:
    """-j: never a coordinator of their own, which nobody would end."""
    return ["-j", "-h", HOST, "-p", str(port)]


# ── where it is ───────────────────────────────────────────────────────────────────────────
def find_tool(profile: Mapping[str, Any] | None, environ: Mapping[str, str]) -> DmtcpTool:
    """By the profile's path, the PATH, or the profile's module. Raises NoTool."""
    place = _place(profile or {}, environ)
    missing = [name for name in _PROGRAMS if not os.access(place / name, os.X_OK)]
    if missing:
        raise NoTool(f"{place}: {', '.join(missing)} is missing: not a whole DMTCP")
    said = _answer([str(place / _LAUNCH), "--version"], environ)
    match = _VERSION.search(said)
    if match is None:
        raise NoTool(f"{place / _LAUNCH} --version says {said.strip()[:80]!r}: not known")
    number = int(match[2]), int(match[3])
    if number < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise NoTool(f"DMTCP {match[1]} is too old; {oldest} or newer is needed")
    return DmtcpTool(place, match[1], number)


def _place(profile: Mapping[str, Any], environ: Mapping[str, str]) -> Path:
    if profile.get("path"):
        return _named(Path(os.path.expandvars(str(profile["path"]))).expanduser())
    found = shutil.which(_LAUNCH, path=environ.get("PATH", os.defpath))
    if found is None and profile.get("module"):
        found = _by_module(str(profile["module"]), environ)
    if found is None:
        raise NoTool(NOT_FOUND)
    return Path(found).resolve().parent


def _named(path: Path) -> Path:
    """A prefix, its bin directory, or a program in it."""
    for place in (path, path / "bin", path.parent):
        if (place / _LAUNCH).is_file():
            return place.resolve()
    raise NoTool(f"{path}: no dmtcp_launch there; correct tools.dmtcp.path in the profile")


def _by_module(module: str, environ: Mapping[str, str]) -> str | None:
    text = f"module load {shlex.quote(module)} >&2 && command -v {_LAUNCH}"
    try:
        lines = _answer(["bash", "-lc", text], environ).split()
    except NoTool:
        return None
    return lines[-1] if lines and lines[-1].startswith("/") else None


def _answer(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if argv[0] != "bash" else subprocess.DEVNULL,
            env=dict(environ),
            timeout=_ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoTool(f"{argv[0]}: {error}") from error
    return done.stdout.decode(errors="replace")


# ── memory ────────────────────────────────────────────────────────────────────────────────
def same_addresses(environ: Mapping[str, str]) -> list[str]:
    """Words before a restart: the kernel then gives it the same addresses every time.

    At random ones the end of mtcp_restart's heap may lie above the program's. DMTCP leaves it
    there, the C library takes every wish for more to be granted, and the program crashes as soon
    as it uses what it was not given. Empty where a sandbox forbids it.
    """
    found = shutil.which("setarch", path=environ.get("PATH", os.defpath))
    words = [] if found is None else [found, platform.machine(), "-R"]
    return words if words and _succeeds([*words, "true"], environ) else []


def _succeeds(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    silent = subprocess.DEVNULL
    try:
        done = subprocess.run(
            argv,
            stdin=silent,
            stdout=silent,
            stderr=silent,
            env=dict(environ),
            timeout=_ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


# ── environment ───────────────────────────────────────────────────────────────────────────
def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Without DMTCP's own variables: an empty DMTCP_COORD_PORT ends it, a DMTCP_CHECKPOINT_DIR
    hides the files of a restart, DMTCP_FORKED_CHECKPOINT makes most builds crash.

    hwloc's search for devices ends a program under DMTCP at its start: it is switched off
    unless the user has said something about it.
    """
    kept = {k: v for k, v in environ.items() if not k.startswith("DMTCP_") or k == "DMTCP_PLUGIN"}
    kept.setdefault("HWLOC_COMPONENTS", "-linuxio")
    return kept


def fresh_names(environ: Mapping[str, str]) -> list[str]:
    """Variables that say where a program runs: others in every link."""
    return sorted(name for name in environ if _REFRESHED.fullmatch(name))


def env_file_text(environ: Mapping[str, str], before: Sequence[str]) -> str:
    """What DMTCP sets, and removes, in the memory of a program that restarts."""
    names = fresh_names(environ)
    gone = sorted(set(before) - set(names))
    lines = [f"{name}={environ[name]}\n" for name in names if _PLAIN.fullmatch(environ[name])]
    text = ""
    for line in [*lines, *(f"{name}\n" for name in gone if _REFRESHED.fullmatch(name))]:
        if len(text) + len(line) <= ENV_FILE_CAP:
            text += line
    return text
