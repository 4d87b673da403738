"""Durable file primitives: atomic write, directory fsync, and the named kill points.

Standard library only: the link runner uses it before any environment is set up. It knows
nothing of checkpoints; tiers/ decides what is written where, and in which order.

A kill point is a name announced between two steps whose order matters for durability. In a
running program nobody listens; the fault tests kill the process there.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import itertools
import mmap
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path

PAGE = 4096
"""Memory, offsets and lengths of direct I/O are multiples of this."""

KILL_POINTS = (
    # write_atomic
    "atomic.opened",
    "atomic.written",
    "atomic.synced",
    "atomic.renamed",
    "atomic.durable",
    # Tier.stage and Staging.write_shard
    "stage.created",
    "shard.opened",
    "shard.chunk",
    "shard.written",
    "shard.synced",
    # Staging.commit
    "manifest.opened",
    "manifest.written",
    "manifest.synced",
    "commit.staged",
    "commit.guarded",
    "commit.renamed",
    "commit.durable",
    # Tier.remove
    "replace.hidden",
    "replace.pinned",
    "remove.renamed",
    "remove.entry",
    "remove.deleted",
    # Tier.recover
    "recover.found",
    "recover.renamed",
    # Tier.sweep
    "sweep.found",
    "sweep.entry",
    "sweep.deleted",
    # Staging.adopt; the rest of a drain meets the points of stage and commit
    "drain.opened",
    "drain.chunk",
    "drain.written",
    "drain.synced",
)
"""Every name that is announced, in the order in which what is done meets them."""

_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.ENOTSUP)
_NO_DIRECT = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
_MADV_POPULATE_WRITE = 23
_TOUCH = 4 * 1024**2
_MOSTLY = 0.9
_CACHESTAT = 451
"""The same number on every architecture."""
_syscall = getattr(ctypes.CDLL(None), "syscall", lambda *_: -1)
_observer: Callable[[str], None] | None = None
_serial = itertools.count()
_TEMPORARY = re.compile(r"\..+\.tmp-(\d{1,18})-\d+-([0-9a-f]{8})[0-9a-f]{8}")


def observe(callback: Callable[[str], None] | None) -> Callable[[str], None] | None:
    """Call `callback` with the name of every kill point reached; None stops it.

    Returns the callback that was installed before, so that a test can put it back.
    """
    global _observer
    previous, _observer = _observer, callback
    return previous


def reached(point: str) -> None:
    """Announce a kill point."""
    if _observer is not None:
        _observer(point)


PRIVATE_DIRECTORY = 0o700
GROUP_DIRECTORY = 0o2770
_SHARED = stat.S_ISGID | stat.S_IWGRP


def is_shared(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory is meant for a group: setgid and writable, as `sharing: group` makes it.

    What is made in it follows: no setting has to reach whoever writes there.
    """
    try:
        return os.stat(directory).st_mode & _SHARED == _SHARED  # noqa: PTH116 - no Path needed
    except OSError:
        return False


def file_mode(directory: str | os.PathLike[str]) -> int:
    return 0o660 if is_shared(directory) else 0o600


def directory_mode(parent: str | os.PathLike[str]) -> int:
    return GROUP_DIRECTORY if is_shared(parent) else PRIVATE_DIRECTORY


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace `path` by `data`: a reader, or a crash, sees the old content or the new.

    Durable when it returns. If it raises, the old content is untouched and the temporary file
    is gone; after a kill the temporary file (.NAME.tmp-…) stays, and no reader looks at it.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.tmp-{unique_suffix()}")
    try:
        _write_durably(temporary, data)
        temporary.replace(target)
    except BaseException:  # cleaned up, then raised again
        temporary.unlink(missing_ok=True)
        raise
    reached("atomic.renamed")
    sync_directory(target.parent)
    reached("atomic.durable")


def write_first(path: str | os.PathLike[str], data: bytes) -> None:
    """The same unless there is such a file: of several that write at once, all find what the
    first one wrote. By link(2), which not every file system has."""
    target = Path(path)
    draft = target.with_name(f".{target.name}.tmp-{unique_suffix()}")
    write_atomic(draft, data)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(draft, target)
    finally:
        draft.unlink()
    sync_directory(target.parent)


def sweep_temporaries(directory: str | os.PathLike[str], *, older_than_s: float = 60.0) -> None:
    """Delete what killed write_atomic() calls left in a directory; what resists stays, all of it
    where the directory cannot be listed.

    What a process of this boot left goes when it is dead; what may be another node's, when no
    write takes so long: somebody may be just about to rename it.
    """
    names: list[str] = []
    with contextlib.suppress(OSError):  # whoever sweeps begins with something else in mind
        names = names_in(directory)
    for name in names:
        found = _TEMPORARY.fullmatch(name)
        path = Path(directory) / name
        with contextlib.suppress(OSError):
            if found is not None and (
                _is_dead(int(found[1]), found[2])
                or time.time() - path.lstat().st_mtime > older_than_s
            ):
                path.unlink()


def _is_dead(pid: int, boot: str) -> bool:
    if boot != _boot():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _write_durably(path: Path, data: bytes) -> None:
    descriptor = create_file(path)
    try:
        reached("atomic.opened")
        write_all(descriptor, memoryview(data))
        reached("atomic.written")
        os.fsync(descriptor)
        reached("atomic.synced")
    finally:
        os.close(descriptor)


def create_file(path: str | os.PathLike[str]) -> int:
    """A descriptor of a new file, private or the group's as its directory is, whatever the umask.

    Never reuses one.
    """
    mode = file_mode(Path(path).parent)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        os.fchmod(descriptor, mode)
    except BaseException:  # closed, then raised again
        os.close(descriptor)
        raise
    return descriptor


def write_all(descriptor: int, view: memoryview) -> None:
    """Write every byte; one write(2) may take less than it is given."""
    view = view.cast("B") if view.format != "B" or view.ndim != 1 else view
    while view.nbytes:
        written = os.write(descriptor, view)
        if written == 0:
            raise OSError(errno.EIO, "the file system accepted no bytes and gave no reason")
        view = view[written:]


# ── direct I/O ────────────────────────────────────────────────────────────────────────────
def round_up(size: int) -> int:
    """The next multiple of a page."""
    return -(-size // PAGE) * PAGE


def is_aligned(view: memoryview) -> bool:
    """Whether direct I/O can use this memory as it is: whole pages."""
    return len(view) % PAGE == 0 and len(view) > 0 and address(view) % PAGE == 0


def address(view: memoryview) -> int:
    """Where writable memory begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def allocate(size: int, *, inherited: bool = False) -> mmap.mmap:
    """Private page-aligned memory that reads as zero; in huge pages where the system has them.

    Forked children do not have it unless it is to be inherited: every page of a buffer that is
    written after a data worker was forked would exist twice.
    """
    memory = mmap.mmap(-1, max(round_up(size), PAGE), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not inherited:
        memory.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def touch(memory: mmap.mmap) -> None:
    """Make the kernel find the memory now, in slices, rather than at the first write."""
    for start in range(0, len(memory), _TOUCH):
        length = min(_TOUCH, len(memory) - start)
        try:
            memory.madvise(_MADV_POPULATE_WRITE, start, length)
        except OSError:  # before Linux 5.14: the first write finds it
            return


def set_direct(descriptor: int, *, direct: bool) -> bool:
    """Switch a descriptor to or from direct I/O; False where the file system has none."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, wanted)
    except OSError:
        return not direct
    return True


def lacks_direct(error: OSError) -> bool:
    """Whether an error of direct I/O only means that it is not to be had here."""
    return error.errno in _NO_DIRECT


def write_at(descriptor: int, view: memoryview, offset: int) -> None:
    """Write every byte at an offset; one pwrite(2) may take less than it is given."""
    while view.nbytes:
        written = os.pwrite(descriptor, view, offset)
        if written == 0:
            raise OSError(errno.EIO, "the file system accepted no bytes and gave no reason")
        view, offset = view[written:], offset + written


def is_cached(descriptor: int, size: int) -> bool:
    """Whether reading would be a copy from memory: at least nine tenths of the file."""
    pages = _cached_pages(descriptor)
    if pages is None:
        return _probes_cached(descriptor, size)
    return pages * mmap.PAGESIZE >= _MOSTLY * size


def _cached_pages(descriptor: int) -> int | None:
    """Of the whole file, as the kernel counts them; None before Linux 6.5."""
    found = (ctypes.c_uint64 * 5)()  # cached, dirty, written back, evicted, recently evicted
    whole = (ctypes.c_uint64 * 2)()  # from 0 on, to the end
    failed = _syscall(_CACHESTAT, descriptor, ctypes.byref(whole), ctypes.byref(found), 0)
    return None if failed else found[0]


def _probes_cached(descriptor: int, size: int) -> bool:
    """Asked of a few pages, without waiting. It makes the kernel read them: ask once."""
    page = bytearray(PAGE)
    for offset in (0, size // 2, max(size - PAGE, 0)):
        try:
            os.preadv(descriptor, [page], offset // PAGE * PAGE, os.RWF_NOWAIT)
        except OSError:  # would have to wait, or cannot tell
            return False
    return True


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Make creations, renames and removals inside `path` survive a crash of the node."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some FUSE file systems cannot sync a directory; refusing every save would help nobody.
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(descriptor)


def make_directory(path: str | os.PathLike[str]) -> None:
    """Make a private directory and its missing parents so that they survive a crash."""
    target = Path(path)
    missing = [place for place in (target, *target.parents) if not exists(place)]
    for place in reversed(missing):
        place.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        place.chmod(PRIVATE_DIRECTORY)
    sync_names((target, *missing[1:]))


def sync_names(paths: Iterable[Path]) -> None:
    """Make the names of these files and directories survive a crash, each in its parent."""
    for parent in dict.fromkeys(path.parent for path in paths):
        # A parent that may be passed through but not read (mode 711) is the site's to keep.
        with contextlib.suppress(PermissionError):
            sync_directory(parent)


def unique_suffix() -> str:
    """A suffix no other process, thread or node uses: pid, serial number, boot and chance."""
    return f"{os.getpid()}-{next(_serial)}-{_boot()}{secrets.token_hex(4)}"


@functools.cache
def _boot() -> str:
    """Eight digits that tell this boot of this machine from others."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        text = ""
    return (re.sub(r"[^0-9a-f]", "", text) + "0" * 8)[:8]


def names_in(path: str | os.PathLike[str]) -> list[str]:
    """The names in a directory, sorted; none if it has gone."""
    try:
        return sorted(os.listdir(path))  # noqa: PTH208 - names only, no Path per entry
    except FileNotFoundError:
        return []


def is_file(path: str | os.PathLike[str]) -> bool:
    """Raises where storage does not answer, as the two below. Path.is_file() and its like say of
    Python 3.14 on that nothing is there: work that is saved would be begun anew, or removed."""
    return stat.S_ISREG(_mode(path))


def is_directory(path: str | os.PathLike[str]) -> bool:
    return stat.S_ISDIR(_mode(path))


def exists(path: str | os.PathLike[str]) -> bool:
    return _mode(path) != 0


def _mode(path: str | os.PathLike[str], *, follow: bool = True) -> int:
    """0 only if the file system says that nothing is there."""
    try:
        return Path(path).stat(follow_symlinks=follow).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def delete_tree(path: str | os.PathLike[str], *, point: str | None = None) -> None:
    """Delete a directory and what is in it; what has already gone is fine.

    Symbolic links are removed, not followed. `point` is announced before each entry goes.
    """
    if stat.S_ISLNK(_mode(path, follow=False)):
        Path(path).unlink(missing_ok=True)
        return
    for name in names_in(path):
        entry = Path(path) / name
        if point is not None:
            reached(point)
        if stat.S_ISDIR(_mode(entry, follow=False)):
            delete_tree(entry)
        else:
            entry.unlink(missing_ok=True)
    try:
        Path(path).rmdir()
    except FileNotFoundError:
        return
