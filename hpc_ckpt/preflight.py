"""Before the first save: is there memory, space, quota and inodes enough for what is planned?

Looks and tells; nothing is reserved, and whoever asks decides what to do about a problem. A
problem is one text that says what is needed, what is there, where, and what to do. An answer of
"enough" is no promise: others use the same disk and the same memory.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .units import format_size

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
FALLOC_FL_KEEP_SIZE = 1

_IN_MEMORY = (0x01021994, 0x858458F6)
"""statfs's f_type of tmpfs and ramfs: what is allocated there is taken from the memory."""
_ON_DISKS = (0xEF53, 0x58465342, 0x9123683E, 0x794C7630, 0xF2F52010, 0x2FC12FC1)
"""The same of ext4 and its elders, xfs, btrfs, overlay, f2fs and zfs."""
_REFUSED = (errno.EDQUOT, errno.ENOSPC)
_STORAGE_ADVICE = "free some, keep fewer checkpoints (checkpoint.keep), or choose another directory"
_MEMORY_ADVICE = "ask for more memory (resources.memory), or track less state"


# ── memory ────────────────────────────────────────────────────────────────────────────────
def free_memory(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Bytes this process may still take: the machine's, or less where a cgroup says so.

    None where nobody tells. A file cache counts as free, as in the kernel's own MemAvailable:
    a job that has read its data would otherwise look full.
    """
    bounds = [_available(proc), *_left_in_cgroups(proc, cgroups)]
    return min((bound for bound in bounds if bound is not None), default=None)


def check_memory(
    need: int, limit: int | None = None, *, proc: Path = PROC, cgroups: Path = CGROUPS
) -> str | None:
    """What keeps snapshots from using `need` bytes, or None; `limit` is checkpoint.memory."""
    needed = f"snapshots need {format_size(need)} of memory"
    if limit is not None and need > limit:
        return (
            f"{needed}, checkpoint.memory allows {format_size(limit)}; raise it to at least "
            f"{_whole_mebibytes(need)}M, or track less state"
        )
    free = free_memory(proc=proc, cgroups=cgroups)
    if free is not None and need > free:
        return f"{needed}, {format_size(max(free, 0))} are free on this node; {_MEMORY_ADVICE}"
    return None


def _whole_mebibytes(count: int) -> int:
    return -(-count // 1024**2)


def _available(proc: Path) -> int | None:
    for line in _lines(proc / "meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return _number(rest.split()[0], times=1024) if rest.split() else None
    return None


def _left_in_cgroups(proc: Path, cgroups: Path) -> Iterator[int]:
    """What each group on the way from this process's own up to the root leaves."""
    for line in _lines(proc / "self" / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            # Alone at the root, or beside the old hierarchies under "unified".
            for root in (cgroups, cgroups / "unified"):
                yield from _each(root, path, _left_v2)
        elif "memory" in controllers.split(","):
            yield from _each(cgroups / "memory", path, _left_v1)


def _each(root: Path, path: str, left: Callable[[Path], int | None]) -> Iterator[int]:
    """In a container the path may be the host's: groups that are not there are passed over."""
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    for length in range(len(parts), -1, -1):
        found = left(root.joinpath(*parts[:length]))
        if found is not None:
            yield found


def _left_v2(group: Path) -> int | None:
    # Above memory.high a process is not killed but slowed down without mercy.
    limits = [_number(_text(group / name)) for name in ("memory.max", "memory.high")]
    used = _number(_text(group / "memory.current"))
    return _left(limits, used, _cache(group, "inactive_file", "active_file"))


def _left_v1(group: Path) -> int | None:
    limits = [_number(_text(group / "memory.limit_in_bytes"))]
    used = _number(_text(group / "memory.usage_in_bytes"))
    return _left(limits, used, _cache(group, "total_inactive_file", "total_active_file"))


def _left(limits: list[int | None], used: int | None, cache: int) -> int | None:
    known = [limit for limit in limits if limit is not None]
    if not known or used is None:
        return None
    return min(known) - max(used - cache, 0)


def _cache(group: Path, *names: str) -> int:
    counts = dict(line.partition(" ")[::2] for line in _lines(group / "memory.stat"))
    return sum(_number(counts.get(name, "")) or 0 for name in names)


def _number(text: str, *, times: int = 1) -> int | None:
    """None for "max" and for anything else that is not a number."""
    return int(text) * times if text.strip().isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


# ── storage ───────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class FreeStorage:
    """What a file system has left for this user."""

    size: int
    """Bytes."""
    inodes: int | None
    """None: it has no fixed number of them."""
    place: Path
    """The directory that was asked: the path itself, or its nearest parent that exists."""


def free_storage(path: str | os.PathLike[str]) -> FreeStorage:
    """Bytes and inodes by statvfs; quotas it does not know. Every OSError reaches the caller."""
    place = _nearest_existing(Path(path))
    found = os.statvfs(place)
    inodes = found.f_favail if found.f_files else None
    return FreeStorage(found.f_bavail * found.f_frsize, inodes, place)


def check_storage(
    path: str | os.PathLike[str],
    nbytes: int,
    files: int,
    *,
    quota: int | None = None,
    allocate: Callable[[int, int], None] | None = None,
) -> str | None:
    """What keeps `files` files of `nbytes` bytes in all from being written, or None.

    `quota` is what the site's profile says one user may have there; since others of the user's
    files count too, it can only refuse. A quota nobody wrote down is found by asking the file
    system for the space (`allocate`, replaceable in tests), which is given back at once.
    """
    needed = f"{Path(path)}: {format_size(nbytes)} in {files} files are needed"
    if quota is not None and nbytes > quota:
        return f"{needed}, its quota is {format_size(quota)}; {_STORAGE_ADVICE}"
    try:
        free = free_storage(path)
        size = _less_if_in_memory(free)
        if size < nbytes:
            return f"{needed}, {format_size(size)} are free; {_STORAGE_ADVICE}"
        if free.inodes is not None and free.inodes < files:
            return f"{needed}, {free.inodes} more files can be made; {_STORAGE_ADVICE}"
        refusal = _probe(free.place, nbytes, allocate or keep_size_allocate)
    except OSError as error:
        return f"{needed}, but it cannot be written ({_strerror(error)}); choose another directory"
    return refusal and f"{needed}, {refusal}; {_STORAGE_ADVICE}"


def _nearest_existing(path: Path) -> Path:
    absolute = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links
    return next(place for place in (absolute, *absolute.parents) if place.exists())


def _less_if_in_memory(free: FreeStorage) -> int:
    """The limit of a tmpfs may be more than the job is allowed to have."""
    memory = free_memory() if in_memory(free.place) else None
    return free.size if memory is None else max(min(free.size, memory), 0)


def _probe(place: Path, nbytes: int, allocate: Callable[[int, int], None]) -> str | None:
    """Why the file system refuses so many bytes; it may also refuse any file at all (OSError)."""
    with tempfile.TemporaryFile(dir=place) as stream:
        if nbytes <= 0 or in_memory(place):
            return None  # there the pages would be taken, and the job killed for it
        try:
            allocate(stream.fileno(), nbytes)
        except OSError as error:
            # Anything else means that it cannot be asked in this way.
            return f"it refuses them ({_strerror(error)})" if error.errno in _REFUSED else None
    return None


def _strerror(error: OSError) -> str:
    return error.strerror or str(error)


def keep_size_allocate(descriptor: int, nbytes: int) -> None:
    """fallocate(2) without a change of size; OSError as the kernel says it.

    Not os.posix_fallocate: where the file system cannot allocate, that one writes every block.
    """
    fallocate = getattr(_libc(), "fallocate64", None) or getattr(_libc(), "fallocate", None)
    if fallocate is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    arguments = (descriptor, FALLOC_FL_KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(nbytes))
    while fallocate(*arguments) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def in_memory(place: Path) -> bool:
    """Whether the files there are kept in memory; False where nobody tells."""
    return _file_system(place) in _IN_MEMORY


def on_this_node(path: Path) -> bool:
    """Whether other nodes do not see what is written there, for all that its file system tells;
    of a directory that is yet to be made the one that it will be in is asked."""
    return _file_system(_nearest_existing(path)) in (*_IN_MEMORY, *_ON_DISKS)


def _file_system(place: Path) -> int | None:
    statfs = getattr(_libc(), "statfs", None)
    # f_type comes first, in a long; the rest of the structure differs between machines.
    answer = (ctypes.c_long * 64)()
    if statfs is None or statfs(os.fsencode(place), answer) != 0:
        return None
    return int(answer[0]) & 0xFFFFFFFF


def _libc() -> ctypes.CDLL | None:
    with contextlib.suppress(OSError):
        return ctypes.CDLL(None, use_errno=True)
    return None
