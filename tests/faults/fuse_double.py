"""A FUSE file system that passes everything through to a directory, or fails as it is told.

The kernel and the program under test meet it as they meet a network file system: errors come out
of real system calls, and a call that is not answered hangs in the kernel. It speaks the kernel's
protocol itself (linux/fuse.h, 7.31), so that no library is needed; root mounts it.

fuse_double.py BEHIND PLACE     stdin: one plan a line: {"write": 5} (an errno), {"*": "hang"},
                                {"fsync:rank-": 5} (of files with that in their name),
                                {"read": "hang-far"} (behind a file's first megabyte); {} heals,
                                and answers what hung. Each plan is acknowledged.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HEADER = struct.Struct("<IIQQIII4x")
ANSWER = struct.Struct("<IiQ")
MAX_WRITE = 128 * 1024
WITHOUT_ANSWER = (2, 36, 42)
"""forget, interrupt, batch_forget"""
KEPT_FLAGS = os.O_ACCMODE | os.O_TRUNC | os.O_EXCL
HANG, HANG_FAR = "hang", "hang-far"
FAR = 1024**2


@dataclass(frozen=True)
class Request:
    opcode: int
    unique: int
    node: int
    body: bytes


class Double:
    """The file system: a path for each node the kernel knows, a descriptor for each open file."""

    def __init__(self, behind: Path) -> None:
        self._paths = {1: str(behind)}
        self._nodes = {str(behind): 1}
        self.plan: dict[str, int | str] = {}
        self.held: list[Request] = []

    def answer(self, request: Request) -> bytes | None:
        """What goes back to the kernel; None: nothing, for now or for ever."""
        if request.opcode in WITHOUT_ANSWER:
            return None
        name, operate = OPERATIONS.get(request.opcode, ("unknown", None))
        fault = self._fault(name, request.node)
        if fault == HANG_FAR:
            fault = HANG if struct.unpack_from("<8xQ", request.body)[0] >= FAR else None
        if fault == HANG and name != "init":
            self.held.append(request)
            return None
        try:
            if isinstance(fault, int):
                raise OSError(fault, os.strerror(fault))
            if operate is None:
                raise OSError(errno.ENOSYS, name)
            return self._packed(request, 0, operate(self, request))
        except OSError as error:
            return self._packed(request, -(error.errno or errno.EIO), b"")

    def _fault(self, operation: str, node: int) -> int | str | None:
        """What is planned for it: by its name, and by a part of the name of what it is done to."""
        name = Path(self._paths.get(node, "")).name
        for planned, fault in self.plan.items():
            wanted, _, part = planned.partition(":")
            if wanted in (operation, "*") and part in name:
                return fault
        return None

    @staticmethod
    def _packed(request: Request, error: int, body: bytes) -> bytes:
        return ANSWER.pack(ANSWER.size + len(body), error, request.unique) + body

    # ── names ─────────────────────────────────────────────────────────────────────────────
    def _path(self, node: int) -> str:
        if node not in self._paths:
            raise OSError(errno.ESTALE, "the node has gone")
        return self._paths[node]

    def _child(self, node: int, name: bytes) -> str:
        return f"{self._path(node)}/{os.fsdecode(name)}"

    def _node(self, path: str) -> int:
        if path not in self._nodes:
            node = max(self._paths) + 1
            self._paths[node], self._nodes[path] = path, node
        return self._nodes[path]

    def _forget(self, path: str) -> None:
        for known in [p for p in self._nodes if p == path or p.startswith(path + "/")]:
            del self._paths[self._nodes.pop(known)]

    def _entry(self, path: str) -> bytes:
        attributes = self._attributes(path)
        return struct.pack("<QQQQII", self._node(path), 0, 0, 0, 0, 0) + attributes

    @staticmethod
    def _attributes(path: str) -> bytes:
        status = os.lstat(path)
        seconds = [moment // 10**9 for moment in _times(status)]
        rests = [moment % 10**9 for moment in _times(status)]
        owner = (status.st_mode, status.st_nlink, status.st_uid, status.st_gid, 0, 4096, 0)
        sizes = (status.st_ino, status.st_size, status.st_blocks)
        return struct.pack("<QQQQQQIIIIIIIIII", *sizes, *seconds, *rests, *owner)

    # ── operations ────────────────────────────────────────────────────────────────────────
    def init(self, request: Request) -> bytes:
        big_writes = 1 << 5
        return struct.pack(
            "<IIIIHHIIHHI28x", 7, 31, MAX_WRITE, big_writes, 16, 12, MAX_WRITE, 1, 0, 0, 0
        )

    def lookup(self, request: Request) -> bytes:
        return self._entry(self._child(request.node, _names(request.body)[0]))

    def getattr(self, request: Request) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self._attributes(self._path(request.node))

    def setattr(self, request: Request) -> bytes:
        valid, size = struct.unpack_from("<I12xQ", request.body)
        (mode,) = struct.unpack_from("<I", request.body, 68)
        path = self._path(request.node)
        if valid & 1:
            os.chmod(path, mode & 0o7777)  # noqa: PTH101 - paths are text here
        if valid & 8:
            os.truncate(path, size)
        return self.getattr(request)

    def mkdir(self, request: Request) -> bytes:
        (mode,) = struct.unpack_from("<I", request.body)
        path = self._child(request.node, _names(request.body[8:])[0])
        os.mkdir(path, mode)  # noqa: PTH102 - as above
        return self._entry(path)

    def unlink(self, request: Request) -> bytes:
        path = self._child(request.node, _names(request.body)[0])
        os.unlink(path)  # noqa: PTH108 - as above
        self._forget(path)
        return b""

    def rmdir(self, request: Request) -> bytes:
        path = self._child(request.node, _names(request.body)[0])
        os.rmdir(path)  # noqa: PTH106 - as above
        self._forget(path)
        return b""

    def rename(self, request: Request) -> bytes:
        return self._rename(request, 8)

    def rename2(self, request: Request) -> bytes:
        return self._rename(request, 16)

    def _rename(self, request: Request, names_at: int) -> bytes:
        (directory,) = struct.unpack_from("<Q", request.body)
        before, after = _names(request.body[names_at:])
        old, new = self._child(request.node, before), self._child(directory, after)
        os.rename(old, new)  # noqa: PTH104 - as above
        self._forget(new)
        for known in [p for p in self._nodes if p == old or p.startswith(old + "/")]:
            node = self._nodes.pop(known)
            moved = new + known[len(old) :]
            self._paths[node], self._nodes[moved] = moved, node
        return b""

    def link(self, request: Request) -> bytes:
        (node,) = struct.unpack_from("<Q", request.body)
        path = self._child(request.node, _names(request.body[8:])[0])
        os.link(self._path(node), path)
        return self._entry(path)

    def open(self, request: Request) -> bytes:
        (flags,) = struct.unpack_from("<I", request.body)
        descriptor = os.open(self._path(request.node), flags & KEPT_FLAGS & ~os.O_EXCL)
        return struct.pack("<QII", descriptor, 0, 0)

    def create(self, request: Request) -> bytes:
        flags, mode = struct.unpack_from("<II", request.body)
        path = self._child(request.node, _names(request.body[16:])[0])
        descriptor = os.open(path, flags & KEPT_FLAGS | os.O_CREAT, mode & 0o7777)
        return self._entry(path) + struct.pack("<QII", descriptor, 0, 0)

    def read(self, request: Request) -> bytes:
        descriptor, offset, size = struct.unpack_from("<QQI", request.body)
        return os.pread(descriptor, size, offset)

    def write(self, request: Request) -> bytes:
        descriptor, offset, size = struct.unpack_from("<QQI", request.body)
        written = os.pwrite(descriptor, request.body[40 : 40 + size], offset)
        return struct.pack("<II", written, 0)

    def statfs(self, request: Request) -> bytes:
        found = os.statvfs(self._path(1))
        counts = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("<QQQQQIIII24x", *counts, found.f_bsize, 255, found.f_frsize, 0)

    def release(self, request: Request) -> bytes:
        os.close(struct.unpack_from("<Q", request.body)[0])
        return b""

    def sync(self, request: Request) -> bytes:
        return b""

    def opendir(self, request: Request) -> bytes:
        flags = os.O_RDONLY | os.O_DIRECTORY
        return struct.pack("<QII", os.open(self._path(request.node), flags), 0, 0)

    def readdir(self, request: Request) -> bytes:
        descriptor, offset, size = struct.unpack_from("<QQI", request.body)
        listing = b""
        names = sorted(os.listdir(descriptor))  # noqa: PTH208 - of a descriptor
        for place, name in enumerate(names[offset:], start=offset + 1):
            raw = os.fsencode(name)
            entry = struct.pack("<QQII", 2**32 + place, place, len(raw), 0) + raw
            entry += bytes(-len(entry) % 8)
            if len(listing) + len(entry) > size:
                break
            listing += entry
        return listing


OPERATIONS: dict[int, tuple[str, Callable[[Double, Request], bytes]]] = {
    1: ("lookup", Double.lookup),
    3: ("getattr", Double.getattr),
    4: ("setattr", Double.setattr),
    9: ("mkdir", Double.mkdir),
    10: ("unlink", Double.unlink),
    11: ("rmdir", Double.rmdir),
    12: ("rename", Double.rename),
    13: ("link", Double.link),
    14: ("open", Double.open),
    15: ("read", Double.read),
    16: ("write", Double.write),
    17: ("statfs", Double.statfs),
    18: ("release", Double.release),
    20: ("fsync", Double.sync),
    25: ("flush", Double.sync),
    26: ("init", Double.init),
    27: ("opendir", Double.opendir),
    28: ("readdir", Double.readdir),
    29: ("releasedir", Double.release),
    30: ("fsyncdir", Double.sync),
    35: ("create", Double.create),
    45: ("rename", Double.rename2),
}
"""By the kernel's number; a plan names them so. Whatever is not here does not exist (ENOSYS)."""


def _times(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns


def _names(body: bytes) -> list[bytes]:
    return body.rstrip(b"\0").split(b"\0")


def mount(place: str) -> int:
    """A descriptor of /dev/fuse that stands for the file system mounted at `place`."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    libc = ctypes.CDLL(None, use_errno=True)
    nosuid_nodev = 2 | 4
    if libc.mount(b"double", place.encode(), b"fuse", nosuid_nodev, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), place)
    return device


def serve(device: int, double: Double) -> None:
    """Until the file system is unmounted or nobody gives plans any more."""
    poll = select.poll()
    poll.register(device, select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if sys.stdin.fileno() in ready:
            line = sys.stdin.readline()
            if not line:
                return
            double.plan = json.loads(line)
            held, double.held = double.held, []
            for request in held:
                _send(device, double.answer(request))
            print("ok", flush=True)
        if device in ready:
            data = os.read(device, MAX_WRITE + 8192)
            _, opcode, unique, node, *_ = HEADER.unpack_from(data)
            _send(device, double.answer(Request(opcode, unique, node, data[HEADER.size :])))


def _send(device: int, answer: bytes | None) -> None:
    # Nobody waits any more for a request whose process was killed.
    with contextlib.suppress(FileNotFoundError):
        if answer is not None:
            os.write(device, answer)


def main() -> None:
    double = Double(Path(sys.argv[1]))
    device = mount(sys.argv[2])
    print("ok", flush=True)
    serve(device, double)


if __name__ == "__main__":
    main()
