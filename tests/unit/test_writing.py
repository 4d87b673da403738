"""Writing an image: the file is the image, on every file system, at every pace."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt import fsio
from hpc_ckpt.format.manifest import digest
from hpc_ckpt.testing import FakeClock
from hpc_ckpt.tiers import writing
from hpc_ckpt.tiers.writing import Pace, write_image

PAGE, CHUNK = fsio.PAGE, 2 * fsio.PAGE
PATIENCE_S = 30.0
"""Only a broken writer waits this long."""
SIZES = (
    1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1,
    3 * CHUNK - PAGE, 3 * CHUNK, 3 * CHUNK + 1, 7 * CHUNK + 5 * 512,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_observer_is_left() -> Iterator[None]:
    yield
    fsio.observe(None)


# ── memory ────────────────────────────────────────────────────────────────────────────────
def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def in_pages(size: int) -> memoryview:
    """At a page's beginning, and what follows in its last page is not the image's."""
    memory = memoryview(fsio.allocate(size))
    memory[:] = b"\xaa" * len(memory)
    memory[:size] = noise(size)
    return memory[:size]


def after_another(size: int) -> memoryview:
    """Pages in the middle of a buffer, as the second image of a snapshot."""
    memory = memoryview(fsio.allocate(5 * PAGE + size + PAGE))
    memory[5 * PAGE : 5 * PAGE + size] = noise(size)
    return memory[5 * PAGE : 5 * PAGE + size]


def beside_a_page(size: int) -> memoryview:
    memory = memoryview(fsio.allocate(size + 1))
    memory[1 : size + 1] = noise(size)
    return memory[1 : size + 1]


MEMORY: dict[str, Callable[[int], memoryview]] = {
    "pages": in_pages,
    "pages in a buffer": after_another,
    "beside a page": beside_a_page,
    "bytearray": lambda size: memoryview(bytearray(noise(size))),
    "read-only": lambda size: memoryview(noise(size)),
}


# ── files ─────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Write:
    """One pwrite() as the kernel got it."""

    direct: bool
    offset: int
    length: int
    thread: str


class Kernel:
    """os.pwrite(), which notes each write and fails or stops short when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes: list[Write] = []
        self.before: Callable[[Write], None] = lambda write: None
        self.most = 1 << 30
        self._real = os.pwrite
        monkeypatch.setattr(os, "pwrite", self._pwrite)

    def _pwrite(self, descriptor: int, view: memoryview, offset: int) -> int:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        name = threading.current_thread().name
        write = Write(bool(flags & os.O_DIRECT), offset, len(view), name)
        self.writes.append(write)
        self.before(write)
        return self._real(descriptor, view[: self.most], offset)

    def refuse_direct(self, number: int) -> None:
        """As a file system that takes the flag and not the write."""

        def refuse(write: Write) -> None:
            if write.direct:
                raise OSError(number, os.strerror(number))

        self.before = refuse


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


def written(
    path: Path, image: memoryview, pace: Pace | None = None
) -> tuple[bytes, tuple[str, ...]]:
    """What is in the file afterwards, and the digests."""
    descriptor = fsio.create_file(path)
    try:
        digests = write_image(descriptor, image, CHUNK, pace or Pace())
    finally:
        os.close(descriptor)
    return path.read_bytes(), digests


def expected(image: memoryview) -> tuple[bytes, tuple[str, ...]]:
    whole = bytes(image)
    return whole, tuple(digest(whole[at : at + CHUNK]) for at in range(0, len(whole), CHUNK))


def has_direct(directory: Path) -> bool:
    """Asked of the file system by a write, without the code under test."""
    descriptor = os.open(directory / "probe", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_WRONLY | os.O_DIRECT)
        os.pwrite(descriptor, memoryview(fsio.allocate(PAGE)), 0)
    except OSError:
        return False
    finally:
        os.close(descriptor)
        (directory / "probe").unlink()
    return True


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("size", SIZES)
def test_the_file_is_the_image(tmp_path: Path, size: int, memory: str) -> None:
    """Every byte, not one more, and the digest of each chunk, around every border."""
    image = MEMORY[memory](size)
    assert expected(image) == written(tmp_path / "x", image)


@pytest.mark.parametrize("memory", MEMORY)
def test_no_bytes_make_an_empty_file(tmp_path: Path, memory: str) -> None:
    """Nothing is written, and there is no chunk."""
    assert (b"", ()) == written(tmp_path / "x", MEMORY[memory](0))


@pytest.mark.parametrize("memory", ["pages", "pages in a buffer"])
@pytest.mark.parametrize("size", SIZES)
def test_whole_pages_go_past_the_page_cache(
    tmp_path: Path, kernel: Kernel, size: int, memory: str
) -> None:
    """Every write is direct, of whole pages, one for each chunk; then the file is cut."""
    if not has_direct(tmp_path):
        pytest.skip("this file system has no direct I/O")
    kernel.writes.clear()
    image = MEMORY[memory](size)
    assert expected(image) == written(tmp_path / "x", image)
    whole = fsio.round_up(size)
    assert [(True, at, min(CHUNK, whole - at)) for at in range(0, whole, CHUNK)] == sorted(
        (write.direct, write.offset, write.length) for write in kernel.writes
    )


@pytest.mark.parametrize("memory", ["beside a page", "bytearray", "read-only"])
def test_other_memory_is_written_through_the_page_cache(
    tmp_path: Path, kernel: Kernel, memory: str
) -> None:
    """Direct I/O would refuse it."""
    image = MEMORY[memory](3 * CHUNK)
    assert expected(image) == written(tmp_path / "x", image)
    assert [False] * 3 == [write.direct for write in kernel.writes]


def test_pages_that_are_not_the_image_s_are_not_used(tmp_path: Path, kernel: Kernel) -> None:
    """A view that ends with its memory inside a page cannot be lengthened."""
    memory = bytearray(2 * PAGE + CHUNK)
    start = -fsio.address(memoryview(memory)) % PAGE
    image = memoryview(memory)[start : start + len(memory) - start - 7]
    image[:] = noise(len(image))
    assert expected(image) == written(tmp_path / "x", image)
    assert {False} == {write.direct for write in kernel.writes}


# ── file systems without direct I/O ───────────────────────────────────────────────────────
@pytest.mark.parametrize("size", SIZES)
def test_a_file_system_may_refuse_the_flag(
    tmp_path: Path, kernel: Kernel, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is the same, written through the page cache."""
    monkeypatch.setattr(fsio, "set_direct", lambda descriptor, direct: not direct)
    image = in_pages(size)
    assert expected(image) == written(tmp_path / "x", image)
    assert {False} == {write.direct for write in kernel.writes}


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
@pytest.mark.parametrize("size", SIZES)
def test_a_file_system_may_refuse_the_first_write(
    tmp_path: Path, kernel: Kernel, size: int, number: int
) -> None:
    """Some take the flag and say so only then; what was refused is written again."""
    kernel.refuse_direct(number)
    image = in_pages(size)
    assert expected(image) == written(tmp_path / "x", image, Pace(1e18))


def test_both_threads_may_be_refused(
    tmp_path: Path, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One finds it out and is held up before it has switched the descriptor; the other goes on."""
    kernel.refuse_direct(errno.EINVAL)
    switching, together, real = threading.Event(), threading.Barrier(2), fsio.set_direct

    def set_direct(descriptor: int, *, direct: bool) -> bool:
        if not direct:
            switching.set()
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(2.0)
        return real(descriptor, direct=direct)

    def slow_digest(view: memoryview) -> str:
        if view[:16] == image[CHUNK : CHUNK + 16]:
            assert switching.wait(PATIENCE_S)
        return digest(view)

    image = in_pages(2 * CHUNK)
    monkeypatch.setattr(fsio, "set_direct", set_direct)
    monkeypatch.setattr(writing, "digest", slow_digest)
    assert expected(image) == written(tmp_path / "x", image)


def test_a_file_system_may_refuse_a_later_write(tmp_path: Path, kernel: Kernel) -> None:
    """What was written directly before it stays, and is cut to the image's end."""

    def refuse(write: Write) -> None:
        if write.direct and write.offset >= 2 * CHUNK:
            raise OSError(errno.EINVAL, "unaligned")

    kernel.before = refuse
    image = in_pages(5 * CHUNK + 3)
    assert expected(image) == written(tmp_path / "x", image, Pace(1e18))


def test_each_file_is_tried_anew(tmp_path: Path, kernel: Kernel) -> None:
    """One file without direct I/O says nothing of the next, which may lie elsewhere."""
    if not has_direct(tmp_path):
        pytest.skip("this file system has no direct I/O")
    image = in_pages(2 * CHUNK)
    kernel.refuse_direct(errno.EINVAL)
    written(tmp_path / "first", image, Pace(1e18))
    kernel.writes.clear()
    kernel.before = lambda write: None
    assert expected(image) == written(tmp_path / "second", image)
    assert [True, True] == [write.direct for write in kernel.writes]


def test_the_disk_begins_before_the_end_of_a_buffered_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sync_file_range for each chunk, so that fsync finds little to do; none if direct."""
    asked: list[tuple[int, int, int]] = []

    def note(descriptor: int, start: Any, length: Any, flags: int) -> None:
        asked.append((start.value, length.value, flags))

    monkeypatch.setattr(writing, "_sync_file_range", note)
    image = beside_a_page(2 * CHUNK + 9)
    assert expected(image) == written(tmp_path / "x", image, Pace(1e18))
    assert [(0, CHUNK, 2), (CHUNK, CHUNK, 2), (2 * CHUNK, 9, 2)] == asked
    if has_direct(tmp_path):
        asked.clear()
        written(tmp_path / "direct", in_pages(CHUNK))
        assert [] == asked


def test_the_page_cache_is_never_far_ahead_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fsync at the end would take minutes, in which nothing moves: a save that gets on would
    be taken for one that hangs."""
    asked: list[tuple[int, int, int]] = []

    def note(descriptor: int, start: Any, length: Any, how: int) -> int:
        asked.append((start.value, length.value, how))
        return 0

    monkeypatch.setattr(writing, "_sync_file_range", note)
    image = beside_a_page(7 * CHUNK)
    assert expected(image) == written(tmp_path / "x", image, Pace(1e18))
    began = [start for start, _, how in asked if how == writing._START]
    ended = [(start, length) for start, length, how in asked if how == writing._FINISH]
    assert [number * CHUNK for number in range(7)] == began
    assert [(number * CHUNK, CHUNK) for number in range(7 - writing.BEHIND)] == ended
    assert asked.index((0, CHUNK, writing._FINISH)) > asked.index(
        (writing.BEHIND * CHUNK, CHUNK, writing._START)
    )


def test_each_chunk_that_the_disk_has_shows_that_the_save_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the disk is, and however much it has still to write."""
    clock, moved = FakeClock(), list[float]()
    pace = Pace(clock=clock)

    def slow(descriptor: int, start: Any, length: Any, how: int) -> int:
        if how == writing._FINISH:
            moved.append(clock.now - pace.moved_s)
            clock.advance(50.0)
        return 0

    monkeypatch.setattr(writing, "_sync_file_range", slow)
    monkeypatch.setattr(writing, "THREADS", 1)
    written(tmp_path / "x", beside_a_page(9 * CHUNK), pace)
    assert [0.0] * (9 - writing.BEHIND) == moved
    assert 250.0 == clock.now


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_what_the_disk_could_not_write_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Who waits for the disk is told, and nobody after that: the fsync at the end succeeds."""
    image = beside_a_page(6 * CHUNK)
    monkeypatch.setattr(writing, "_sync_file_range", refusing(number))
    with pytest.raises(OSError, match=os.strerror(number)):
        written(tmp_path / "x", image)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EINVAL, errno.EINTR])
def test_a_kernel_that_does_not_wait_says_nothing_of_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The fsync at the end does."""
    image = beside_a_page(6 * CHUNK)
    monkeypatch.setattr(writing, "_sync_file_range", refusing(number))
    assert expected(image) == written(tmp_path / "x", image)


def refusing(number: int) -> Callable[..., int]:
    """sync_file_range(2) that fails where it would wait."""

    def fail(descriptor: int, start: Any, length: Any, how: int) -> int:
        if how != writing._FINISH:
            return 0
        ctypes.set_errno(number)
        return -1

    return fail


def test_a_system_without_sync_file_range_can_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a hint."""
    monkeypatch.setattr(writing, "_sync_file_range", None)
    image = beside_a_page(CHUNK + 9)
    assert expected(image) == written(tmp_path / "x", image)


# ── what the kernel says ──────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("memory", ["pages", "beside a page"])
def test_a_write_may_take_less_than_it_is_given(
    tmp_path: Path, kernel: Kernel, memory: str
) -> None:
    """The rest is written next."""
    kernel.most = PAGE
    image = MEMORY[memory](3 * CHUNK + 5)
    assert expected(image) == written(tmp_path / "x", image)


@pytest.mark.parametrize("memory", ["pages", "beside a page"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_an_error_comes_out_as_it_is(
    tmp_path: Path, kernel: Kernel, number: int, memory: str
) -> None:
    """Neither hidden nor tried again: what was said is what the event will say."""
    error = OSError(number, os.strerror(number))

    def fail(write: Write) -> None:
        if write.offset == 2 * CHUNK:
            raise error

    kernel.before = fail
    with pytest.raises(OSError) as caught:
        written(tmp_path / "x", MEMORY[memory](9 * CHUNK), Pace(1e18))
    assert caught.value is error
    assert [0, CHUNK, 2 * CHUNK] == [write.offset for write in kernel.writes]


def test_a_write_that_takes_nothing_is_an_error(tmp_path: Path, kernel: Kernel) -> None:
    """Else it would be tried for ever."""
    kernel.most = 0
    with pytest.raises(OSError, match="accepted no bytes"):
        written(tmp_path / "x", in_pages(CHUNK))


def test_each_chunk_is_a_kill_point_after_its_bytes(tmp_path: Path, kernel: Kernel) -> None:
    """The fault tests kill between the chunks."""
    seen: list[tuple[str, int]] = []
    fsio.observe(lambda point: seen.append((point, len(kernel.writes))))
    written(tmp_path / "x", in_pages(3 * CHUNK), Pace(1e18))
    assert [("shard.chunk", 1), ("shard.chunk", 2), ("shard.chunk", 3)] == seen


# ── the pace ──────────────────────────────────────────────────────────────────────────────
class Hold(threading.Event):
    """Waiting that takes no time but the clock's."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        self._clock.advance(timeout)
        return self.is_set()


def paced(bytes_per_s: float) -> tuple[Pace, FakeClock, Hold]:
    clock = FakeClock(1000.0)
    pace, hold = Pace(bytes_per_s, clock=clock), Hold(clock)
    pace._hurry = hold
    return pace, clock, hold


def test_so_many_bytes_a_second_and_no_more() -> None:
    """Each piece is waited for until it may have been written."""
    pace, clock, hold = paced(100.0)
    for nbytes in (100, 50, 200):
        pace.took(nbytes)
    assert ([1.0, 0.5, 2.0], 3.5, 1003.5) == (hold.waits, pace.waited_s, clock())


def test_time_that_writing_took_is_not_waited_for_again() -> None:
    """A disk that is slower than the pace is never held back; a hiccup is made up for."""
    pace, clock, hold = paced(100.0)
    pace.took(100)
    clock.advance(0.4)
    pace.took(100)
    clock.advance(5.0)
    pace.took(100)
    assert ([1.0, pytest.approx(0.6)], pytest.approx(1.6)) == (hold.waits, pace.waited_s)


def test_a_file_is_written_at_its_pace(tmp_path: Path) -> None:
    """By one thread, held back after every chunk by its share of the time."""
    pace, _, hold = paced(float(CHUNK))
    image = in_pages(3 * CHUNK + PAGE)
    assert 1 == pace.threads
    assert expected(image) == written(tmp_path / "x", image, pace)
    assert ([1.0, 1.0, 1.0, 0.5], 3.5) == (hold.waits, pace.waited_s)


def test_the_pace_is_kept_over_several_files(tmp_path: Path) -> None:
    """One pace for a persist, not one for each of its files."""
    pace, _, hold = paced(float(CHUNK))
    for name in ("a", "b"):
        written(tmp_path / name, in_pages(CHUNK), pace)
    assert [1.0, 1.0] == hold.waits


def test_without_a_pace_there_is_no_waiting(tmp_path: Path) -> None:
    """Two threads, from the start."""
    pace = Pace()
    image = in_pages(9 * CHUNK)
    assert writing.THREADS == pace.threads == 2
    assert expected(image) == written(tmp_path / "x", image, pace)
    pace.took(1 << 60)
    assert 0.0 == pace.waited_s


def test_one_in_a_hurry_is_not_held_back_any_more() -> None:
    """From then on two threads, and no waiting."""
    pace, _, hold = paced(1.0)
    pace.took(3)
    pace.hurry()
    pace.took(1 << 40)
    assert (2, [3.0], 3.0) == (pace.threads, hold.waits, pace.waited_s)


class Writer(threading.Thread):
    """A paced persist in its own thread."""

    def __init__(self, path: Path, image: memoryview, pace: Pace) -> None:
        super().__init__(name="writer", daemon=True)
        self._path, self._image, self._pace = path, image, pace
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = written(self._path, self._image, self._pace)
        except BaseException as error:
            self.result = error

    def ended(self) -> bool:
        self.join(PATIENCE_S)
        return not self.is_alive()


def test_hurry_ends_a_wait_at_once(tmp_path: Path) -> None:
    """A byte a second would be more than an hour for the first chunk."""
    pace, image, reached = Pace(1.0), in_pages(6 * CHUNK), threading.Event()
    fsio.observe(lambda point: reached.set())
    writer = Writer(tmp_path / "x", image, pace)
    assert reached.wait(PATIENCE_S)
    writer.join(0.05)
    assert writer.is_alive()
    pace.hurry()
    assert writer.ended()
    assert expected(image) == writer.result
    assert 0.0 < pace.waited_s < PATIENCE_S


def test_hurry_without_a_second_thread_is_hurry_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job at its limit of processes still gets its last save."""
    pace, image, reached = Pace(1.0), in_pages(6 * CHUNK), threading.Event()
    fsio.observe(lambda point: reached.set())
    writer = Writer(tmp_path / "x", image, pace)
    assert reached.wait(PATIENCE_S)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    pace.hurry()
    assert writer.ended()
    assert expected(image) == writer.result


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_one_in_a_hurry_gets_a_second_thread(tmp_path: Path, kernel: Kernel) -> None:
    """The writer's own write is stuck: what is left is written beside it, once."""
    pace, image = Pace(1.0), in_pages(6 * CHUNK)
    stuck, freed, done = threading.Event(), threading.Event(), threading.Event()
    counted = threading.Event()

    def before(write: Write) -> None:
        if write.thread == "writer":
            stuck.set()
            assert freed.wait(PATIENCE_S)
            return
        assert counted.wait(PATIENCE_S)
        if len(kernel.writes) == 6:
            done.set()

    kernel.before = before
    writer = Writer(tmp_path / "x", image, pace)
    assert stuck.wait(PATIENCE_S)
    pace.hurry()
    pace.hurry()
    assert ["hpc-ckpt-hurry-0"] == [t.name for t in threading.enumerate() if "hurry" in t.name]
    counted.set()
    assert done.wait(PATIENCE_S)
    freed.set()
    assert writer.ended()
    assert expected(image) == writer.result
    by = {write.offset // CHUNK: write.thread for write in kernel.writes}
    assert {0: "writer", **dict.fromkeys(range(1, 6), "hpc-ckpt-hurry-0")} == by
    assert 6 == len(kernel.writes)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_keeps_an_image_that_is_written(
    tmp_path: Path, kernel: Kernel, fails: bool
) -> None:
    """Also where the collector is switched off: the buffer is given back before a larger one."""

    def before(write: Write) -> None:
        if fails:
            raise OSError(errno.EIO, "broken")

    kernel.before = before
    image = in_pages(6 * CHUNK)
    kept = weakref.ref(image.obj)
    gc.disable()
    try:
        with contextlib.suppress(OSError):
            written(tmp_path / "x", image, Pace())
        for thread in threading.enumerate():
            if thread.name.startswith("hpc-ckpt-row"):
                thread.join(PATIENCE_S)
        del image
        assert kept() is None
    finally:
        gc.enable()


class Hashes:
    """Which chunk was hashed, and how many writes had begun by then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
        self.seen: list[int] = []
        self.all = threading.Event()
        self._kernel = kernel
        self._real = writing.digest
        monkeypatch.setattr(writing, "digest", self)

    def __call__(self, view: memoryview) -> str:
        found = self._real(view)
        self.seen.append(len(self._kernel.writes))
        if len(self.seen) == 6:
            self.all.set()
        return found


def test_at_full_speed_hashing_does_not_wait_for_the_disk(
    tmp_path: Path, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the disk for hashing: the first write is under way until every chunk is hashed."""
    hashes, image = Hashes(monkeypatch, kernel), in_pages(6 * CHUNK)
    waited: list[bool] = []

    def before(write: Write) -> None:
        if write.offset == 0:
            waited.append(hashes.all.wait(PATIENCE_S))

    kernel.before = before
    assert expected(image) == written(tmp_path / "x", image, Pace())
    assert [True] == waited


def test_a_paced_save_hashes_as_it_writes(
    tmp_path: Path, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk before each write: hashing all of it first would be a burst beside training."""
    hashes, image = Hashes(monkeypatch, kernel), in_pages(6 * CHUNK)
    pace, _, _ = paced(float(CHUNK))
    assert expected(image) == written(tmp_path / "x", image, pace)
    assert [0, 1, 2, 3, 4, 5] == hashes.seen


def test_an_error_beside_the_writer_is_the_writer_s(tmp_path: Path, kernel: Kernel) -> None:
    """A helper that fails does not leave a hole in a file that looks whole."""
    pace, error = Pace(1.0), OSError(errno.ENOSPC, "full")
    stuck, freed = threading.Event(), threading.Event()

    def before(write: Write) -> None:
        if write.thread == "writer":
            stuck.set()
            assert freed.wait(PATIENCE_S)
        else:
            freed.set()
            raise error

    kernel.before = before
    writer = Writer(tmp_path / "x", in_pages(6 * CHUNK), pace)
    assert stuck.wait(PATIENCE_S)
    pace.hurry()
    assert writer.ended()
    assert writer.result is error


@pytest.mark.parametrize("fails", [False, True])
def test_hurry_after_the_end_starts_nothing(tmp_path: Path, kernel: Kernel, fails: bool) -> None:
    """The row of a file that is over, well or not, is not touched again."""

    def before(write: Write) -> None:
        if fails:
            raise OSError(errno.EIO, "broken")

    kernel.before = before
    pace, _, _ = paced(1e18)
    try:
        written(tmp_path / "x", in_pages(3 * CHUNK), pace)
    except OSError:
        assert fails
    before_it = threading.active_count()
    pace.hurry()
    assert (before_it, None) == (threading.active_count(), pace._help)
