"""Linux calls that Python lacks: process ids of one's own, orphans, and the end of a parent."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWPID = 0x20000000
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MS_REC_SLAVE = 0x4000 | 0x80000
_MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """The signal comes as soon as the parent is gone."""
    parent = os.getppid()
    _call("prctl", _PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process."""
    _call("prctl", _PR_SET_CHILD_SUBREAPER, 1)


def leave_pids() -> None:
    """The next child is the first process of a new space of process ids; see mount_proc()."""
    _call("unshare", CLONE_NEWNS | CLONE_NEWPID)


def mount_proc() -> None:
    """In that first process: a /proc that shows its own process ids, to nobody else."""
    _call("mount", b"none", b"/", None, _MS_REC_SLAVE, None)
    _call("mount", b"proc", b"/proc", b"proc", _MS_NOSUID_NODEV_NOEXEC, None)


def enter(pid: int) -> None:
    """The next child sees the processes and /proc as that process does."""
    for kind in ("pid", "mnt"):
        descriptor = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _call("setns", descriptor, 0)
        finally:
            os.close(descriptor)


def own_pid(pid: int) -> int | None:
    """What a process calls itself, in the name space that it lives in; None: it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = [line.split()[-1] for line in text.splitlines() if line.startswith("NSpid:")]
    return int(found[0]) if found else None


def next_pid_after(pid: int) -> None:
    """Where the kernel goes on looking for a free process id."""
    LAST_PID.write_text(str(pid), encoding="ascii")


def last_pid() -> int:
    return int(LAST_PID.read_text(encoding="ascii"))


def _call(name: str, *arguments: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
