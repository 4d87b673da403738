"""Memory and descriptors for direct I/O."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt import fsio
from hpc_ckpt.fsio import PAGE


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT, 0o600)
    yield opened
    os.close(opened)


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, 0), (1, PAGE), (PAGE - 1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE), (2**40, 2**40)],
)
def test_sizes_are_rounded_up_to_pages(size: int, expected: int) -> None:
    """Lengths of direct I/O are multiples of a page."""
    assert expected == fsio.round_up(size)


@pytest.mark.parametrize("size", [0, 1, PAGE, PAGE + 1, 3 * 1024**2 + 1])
def test_memory_is_whole_zeroed_pages(size: int) -> None:
    """At least one; it begins where a page begins."""
    memory = fsio.allocate(size)
    assert max(fsio.round_up(size), PAGE) == len(memory)
    assert 0 == fsio.address(memoryview(memory)) % PAGE
    assert bytes(len(memory)) == bytes(memory)


def test_touching_changes_nothing() -> None:
    """What was written stays, over all slices and the odd end."""
    memory = fsio.allocate(2 * fsio._TOUCH + 3 * PAGE)
    places = range(0, len(memory), PAGE)
    for place in places:
        memory[place] = place // PAGE % 251
    fsio.touch(memory)
    assert [place // PAGE % 251 for place in places] == [memory[place] for place in places]


def test_an_old_kernel_need_not_know_how_to_touch() -> None:
    """Then the first write finds the memory."""

    class Old(mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError(errno.EINVAL, "before Linux 5.14")

    fsio.touch(Old(-1, PAGE))


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, PAGE, True),
        (PAGE, 3 * PAGE, True),
        (0, 0, False),
        (1, PAGE + 1, False),
        (0, PAGE - 1, False),
        (512, PAGE, False),
    ],
)
def test_only_whole_pages_are_aligned(start: int, end: int, expected: bool) -> None:
    """Both ends count."""
    memory = memoryview(fsio.allocate(4 * PAGE))
    assert expected == fsio.is_aligned(memory[start:end])


def test_a_descriptor_is_switched_to_direct_and_back(descriptor: int) -> None:
    """Nothing else about it changes; where there is no direct I/O the answer is no."""
    before = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    direct = fsio.set_direct(descriptor, direct=True)
    assert before | (os.O_DIRECT if direct else 0) == fcntl.fcntl(descriptor, fcntl.F_GETFL)
    assert fsio.set_direct(descriptor, direct=False)
    assert before == fcntl.fcntl(descriptor, fcntl.F_GETFL)


def test_a_file_system_may_refuse_direct_io(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the descriptor is not direct, which is what the answers say."""
    real = fcntl.fcntl

    def refuse(number: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(number, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert (False, True) == (
        fsio.set_direct(descriptor, direct=True),
        fsio.set_direct(descriptor, direct=False),
    )


@pytest.mark.parametrize(
    ("number", "expected"),
    [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False), (errno.ENOSPC, False)],
)
def test_only_a_missing_ability_is_forgiven(number: int, expected: bool) -> None:
    """A full or broken disk is not taken for one without direct I/O."""
    assert expected == fsio.lacks_direct(OSError(number, ""))


def test_write_at_goes_on_after_a_short_write(
    descriptor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rest at its own place in the file."""
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, offset: real(fd, view[:3], offset))
    fsio.write_at(descriptor, memoryview(b"0123456789"), 5)
    assert bytes(5) + b"0123456789" == (tmp_path / "x").read_bytes()


@pytest.mark.parametrize("size", [0, 1, PAGE, 10 * PAGE + 1])
def test_what_can_be_read_without_waiting_is_cached(
    descriptor: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few pages are asked for, at the beginning, in the middle and at the end."""
    asked: list[int] = []

    def read(number: int, views: list[Any], offset: int, flags: int) -> int:
        assert (os.RWF_NOWAIT, 0) == (flags, offset % PAGE)
        asked.append(offset)
        return PAGE

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(fsio, "_cached_pages", lambda descriptor: None)
    assert fsio.is_cached(descriptor, size)
    last = max(size - 1, 0) // PAGE * PAGE
    assert [0, size // 2 // PAGE * PAGE] == asked[:2]
    assert last - PAGE <= asked[2] <= last


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EOPNOTSUPP])
def test_what_would_have_to_wait_is_not_cached(
    descriptor: int, number: int, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One page that is not there is enough; a system that cannot tell says no."""
    left = at

    def read(*_: Any) -> int:
        nonlocal left
        if left == 0:
            raise OSError(number, os.strerror(number))
        left -= 1
        return PAGE

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(fsio, "_cached_pages", lambda descriptor: None)
    assert not fsio.is_cached(descriptor, 10 * PAGE)


@pytest.mark.parametrize(("pages", "expected"), [(0, False), (3, False), (8, False), (9, True)])
def test_where_the_kernel_counts_nothing_is_read(
    descriptor: int, pages: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine tenths of the file are as good as all of it; a few pages are not."""

    def read(*_: Any) -> int:
        raise AssertionError("a page was read to find out")

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(fsio, "_cached_pages", lambda descriptor: pages)
    assert expected == fsio.is_cached(descriptor, 10 * PAGE)


def test_the_kernel_counts_what_was_just_written(descriptor: int) -> None:
    """The real call: as many pages as were written, or it says that it cannot count."""
    os.pwrite(descriptor, bytes(10 * PAGE), 0)
    assert fsio._cached_pages(descriptor) in (10 * PAGE // mmap.PAGESIZE, None)
