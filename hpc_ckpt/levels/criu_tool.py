"""The criu command: where it is, whether it may and can, what it is told, what it says."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .base import Work
from .sockets import Tcp

OLDEST = (3, 17)
"""Before it, no program of a C library that uses restartable sequences could be saved."""
OLDEST_GPU = (4, 0)
TCP_FIX = (4, 2)
TCP_BROKEN_KERNEL = (6, 16)
"""From it on, a CRIU before TCP_FIX cannot ask a TCP socket for its options."""
SKIP_LOCK = (4, 0)
GHOST_MOST = "1G"
"""Of a file that is open but deleted, which goes into the images."""
ASK_S = 30.0
_PLACES = ("/usr/sbin", "/usr/local/sbin", "/usr/local/bin", "/sbin")
_PLUGIN_PLACES = ("/usr/lib/criu", "/usr/lib64/criu", "/usr/local/lib/criu", "/usr/libexec/criu")
_SYS_ADMIN, _CHECKPOINT_RESTORE = 21, 40
_ERROR = re.compile(r"Error \([^)]*\): (.*)")
_HARMLESS = ("RLIMIT_NOFILE", "Can't keep kdat cache")
_FOLLOWS = ("Dumping FAILED", "Restoring FAILED", "Dumping TIMEDOUT")
_REFUSED = tuple(
    os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE)
)
_TAKEN = re.compile(r"Can't fork for (\d+): File exists|Pid (\d+) do not match expected")

Version = tuple[int, ...]
TAKEN = "is taken by another process on this node"


@dataclass(frozen=True)
class Tool:
    """One criu that can be called."""

    path: str
    version: Version
    unprivileged: bool = False
    """With its capability alone, not as root."""
    plugins: Path | None = None

    def dump(
        self, pid: int, into: Path, log: Path, script: Path, *, last: bool, tcp: Tcp
    ) -> list[str]:
        # Not killed by criu: with it would go the keeper, and with that criu itself.
        then = "--leave-stopped" if last else "--leave-running"
        which = ["--tree", str(pid), "--ghost-limit", GHOST_MOST, "--file-locks", then]
        return [self.path, "dump", *which, *self._common(into, log, script, tcp)]

    def restore(self, restart: Path, log: Path, script: Path, tcp: Tcp) -> list[str]:
        which = ["--restore-detached", "--file-locks"]
        return [self.path, "restore", *which, *self._common(restart, log, script, tcp)]

    def _common(self, images: Path, log: Path, script: Path, tcp: Tcp) -> list[str]:
        # Its log and statistics go beside the images: those must stay what the manifest says.
        words = ["--images-dir", str(images), "--work-dir", str(log.parent)]
        words += ["--log-file", log.name, "-v2"]
        words += ["--action-script", str(script)]
        # The group of a job that has ended is gone; the program belongs to the one that now runs.
        words += ["--manage-cgroups=ignore"]
        if self.unprivileged:
            words.append("--unprivileged")
        if self.plugins is not None:
            words += ["--libdir", str(self.plugins)]
        return words + self._tcp(tcp)

    def _tcp(self, tcp: Tcp) -> list[str]:
        if tcp is Tcp.OUTSIDE:
            return ["--tcp-close"]
        if tcp is Tcp.WITHIN:
            lock = ["--network-lock", "skip"] if self.version >= SKIP_LOCK else []
            return ["--tcp-established", *lock]
        return []

    def refuses(self, tcp: Tcp, kernel: Version) -> str | None:
        """Why it cannot save a program with such sockets."""
        if tcp is Tcp.NONE or self.version >= TCP_FIX or kernel < TCP_BROKEN_KERNEL:
            return None
        return (
            f"the program has TCP sockets: CRIU {dotted(self.version)} cannot save them on a "
            f"kernel from {dotted(TCP_BROKEN_KERNEL)} on, CRIU {dotted(TCP_FIX)} can"
        )


# ── finding it ────────────────────────────────────────────────────────────────────────────
NOT_FOUND = "criu was not found on the PATH; the site's profile can name it: tools.criu.path"


def find(tool: Mapping[str, Any] | None, work: Work) -> Tool | str:
    """The one to use for this work, or why there is none."""
    path = _path(tool, work.environ)
    if path is None:
        return NOT_FOUND
    version = version_of(path, work.environ)
    if version is None:
        return f"{path} --version says nothing that could be read: is it CRIU?"
    if version < OLDEST:
        return f"{path} is version {dotted(version)}, too old: {dotted(OLDEST)} or newer"
    mode = _unprivileged(path)
    if mode is None:
        return (
            "CRIU needs privileges that this account lacks: root, or the capability "
            "CAP_CHECKPOINT_RESTORE on the criu command (an administrator can give it: "
            f"setcap cap_checkpoint_restore+eip {path})"
        )
    plugins = _plugins(work, version)
    if isinstance(plugins, str):
        return plugins
    found = Tool(path, version, mode, plugins)
    return _check(found, work.environ) or found


def _path(tool: Mapping[str, Any] | None, environ: Mapping[str, str]) -> str | None:
    """Absolute: a save is made from another working directory."""
    named = (tool or {}).get("path")
    if named:
        found = shutil.which(os.path.expandvars(str(named)))
    else:
        search = os.pathsep.join((environ.get("PATH") or os.defpath, *_PLACES))
        found = shutil.which("criu", path=search)
    return None if found is None else str(Path(found).absolute())


def version_of(path: str, environ: Mapping[str, str]) -> Version | None:
    return read_version(_ask([path, "--version"], environ)[1])


def read_version(text: str) -> Version | None:
    match = re.search(r"^Version:\s*(\d+(?:\.\d+)*)", text, re.MULTILINE)
    return None if match is None else tuple(int(part) for part in match[1].split("."))


def kernel_version() -> Version:
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    return (0,) if match is None else (int(match[1]), int(match[2]))


def dotted(version: Version) -> str:
    return ".".join(map(str, version))


def _check(found: Tool, environ: Mapping[str, str]) -> str | None:
    words = [found.path, "check", *(["--unprivileged"] if found.unprivileged else [])]
    code, said = _ask(words, environ)
    return None if code == 0 else f"criu check says no: {reason_in(said) or f'exit code {code}'}"


def _ask(words: list[str], environ: Mapping[str, str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            words,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, str(error)
    return done.returncode, done.stdout


# ── privileges ────────────────────────────────────────────────────────────────────────────
def _unprivileged(path: str) -> bool | None:
    """False: it may do everything; True: with its capability alone; None: not at all."""
    held = capabilities()
    if held >> _SYS_ADMIN & 1:
        return False
    return True if held >> _CHECKPOINT_RESTORE & 1 or _has_capability(path) else None


def capabilities() -> int:
    """Those in effect for this process."""
    text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", text, re.MULTILINE)
    return 0 if match is None else int(match[1], 16)


def may_make_namespaces() -> bool:
    return bool(capabilities() >> _SYS_ADMIN & 1)


def _has_capability(path: str) -> bool:
    try:
        return bool(os.getxattr(path, "security.capability"))
    except OSError:
        return False


# ── GPUs ──────────────────────────────────────────────────────────────────────────────────
def _plugins(work: Work, version: Version) -> Path | str | None:
    """Where CRIU's CUDA plugin is, if the work has GPUs; a text: why it cannot be used."""
    if work.gpus == 0:
        return None
    if version < OLDEST_GPU:
        return f"the work has GPUs: CRIU {dotted(version)} has no CUDA plugin, 4.0 has"
    named = work.environ.get("CRIU_LIBS_DIR")
    places = (named,) if named else _PLUGIN_PLACES
    found = next((p for p in map(Path, places) if (p / "cuda_plugin.so").is_file()), None)
    if found is None:
        return f"the work has GPUs, and no cuda_plugin.so is in {', '.join(places)}"
    if shutil.which("cuda-checkpoint", path=work.environ.get("PATH")) is None:
        return "the work has GPUs, and cuda-checkpoint (of NVIDIA) is not on the PATH"
    return found


# ── what it says ──────────────────────────────────────────────────────────────────────────
def reason_in(log: str) -> str | None:
    """The first error that matters; later ones follow from it."""
    found = [
        text
        for text in _ERROR.findall(log)
        if not any(word in text for word in (*_HARMLESS, *_FOLLOWS))
    ]
    if not found:
        return None
    taken = next((match for match in map(_TAKEN.search, found) if match), None)
    if taken is not None:
        return f"process id {taken[1] or taken[2]} {TAKEN}"
    return str(found[0]).strip()


def refused_by_storage(log: str) -> bool:
    """Whether any error in it is one of storage that is full, over quota, or away."""
    lines = (*_ERROR.findall(log), *(x for x in log.splitlines() if x.startswith("hpc-ckpt: ")))
    return any(word in line for line in lines for word in _REFUSED)
