"""A row of pieces: each is taken once, by whoever is there, and the first error ends it.

And work without garbage collection.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Iterator

import pytest

from hpc_ckpt.parallel import Row, uncollected

PATIENCE_S = 30.0
"""Only a broken row waits this long."""


class Work:
    """Pieces that note who did them, and wait at the gates that a test puts up."""

    def __init__(self, gated: tuple[int, ...] = ()) -> None:
        self.begun: list[int] = []
        self.by: dict[int, str] = {}
        self.entered = {piece: threading.Event() for piece in gated}
        self.gates = {piece: threading.Event() for piece in gated}
        self.errors: dict[int, BaseException] = {}

    def __call__(self, piece: int) -> None:
        self.begun.append(piece)
        self.by[piece] = threading.current_thread().name
        if piece in self.gates:
            self.entered[piece].set()
            assert self.gates[piece].wait(PATIENCE_S)
        if piece in self.errors:
            raise self.errors[piece]


class Runner(threading.Thread):
    """row.run() in a thread of its own, and what came out of it."""

    def __init__(self, row: Row, threads: int = 1) -> None:
        super().__init__(name="runner", daemon=True)
        self._row, self._threads = row, threads
        self.raised: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._row.run(self._threads)
        except BaseException as error:
            self.raised = error

    def ended(self) -> bool:
        self.join(PATIENCE_S)
        return not self.is_alive()


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 500])
def test_every_piece_is_done_once(count: int, threads: int) -> None:
    """None is left out and none comes twice, however many threads take from the row."""
    work = Work()
    Row(count, work).run(threads)
    assert dict.fromkeys(range(count), 1) == Counter(work.begun)


def test_one_thread_takes_them_in_order() -> None:
    """Chunks of a file are then written from its beginning."""
    work = Work()
    Row(20, work).run()
    assert list(range(20)) == work.begun
    assert {threading.current_thread().name} == set(work.by.values())


def test_no_pieces_need_no_thread() -> None:
    """An empty row is over at once, also for one who wants to help."""
    before = threading.active_count()
    row = Row(0, Work())
    row.run(8)
    row.help()
    assert before == threading.active_count()


def test_there_are_never_more_threads_than_pieces() -> None:
    """Two pieces: the caller and one more, which does not keep a program from ending."""
    work = Work(gated=(0, 1))
    runner = Runner(Row(2, work), threads=8)
    assert all(entered.wait(PATIENCE_S) for entered in work.entered.values())
    mine = [t for t in threading.enumerate() if t.name.startswith("hpc-ckpt-row")]
    assert [("hpc-ckpt-row-0", True)] == [(thread.name, thread.daemon) for thread in mine]
    for gate in work.gates.values():
        gate.set()
    assert (True, None) == (runner.ended(), runner.raised)


def test_somebody_from_outside_can_help() -> None:
    """While the row's own thread is held up, another takes all that is left."""
    work = Work(gated=(0,))
    runner = Runner(row := Row(6, work))
    assert work.entered[0].wait(PATIENCE_S)
    row.help()
    assert list(range(6)) == work.begun
    assert {"runner", threading.current_thread().name} == set(work.by.values())
    assert runner.is_alive()
    work.gates[0].set()
    assert (True, None) == (runner.ended(), runner.raised)


def test_the_row_waits_for_a_piece_that_a_stranger_has_taken() -> None:
    """run() returns when every piece is done, not when none is left to take."""
    work = Work(gated=(0, 1))
    runner = Runner(row := Row(3, work))
    assert work.entered[0].wait(PATIENCE_S)
    helper = threading.Thread(target=row.help, daemon=True)
    helper.start()
    assert work.entered[1].wait(PATIENCE_S)
    work.gates[0].set()
    runner.join(0.05)
    assert runner.is_alive()
    work.gates[1].set()
    assert (True, None) == (runner.ended(), runner.raised)
    helper.join(PATIENCE_S)
    assert [0, 1, 2] == sorted(work.begun)


# ── errors ────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("error", [OSError(28, "full"), KeyboardInterrupt(), SystemExit(3)])
def test_the_first_error_ends_the_row(error: BaseException) -> None:
    """It is raised as it is, and no piece is begun after it."""
    work = Work()
    work.errors[2] = error
    with pytest.raises(type(error)) as caught:
        Row(9, work).run()
    assert caught.value is error
    assert [0, 1, 2] == work.begun


def test_what_is_under_way_is_waited_for_before_the_error_is_raised() -> None:
    """The memory of a piece that is still being written must not be given back."""
    work = Work(gated=(0,))
    work.errors[1] = OSError(5, "broken")
    runner = Runner(row := Row(9, work))
    assert work.entered[0].wait(PATIENCE_S)
    row.help()
    assert [0, 1] == work.begun
    runner.join(0.05)
    assert runner.is_alive()
    work.gates[0].set()
    assert runner.ended()
    assert runner.raised is work.errors[1]
    assert [0, 1] == work.begun


@pytest.mark.parametrize("error", [OSError(5, "beside"), SystemExit(3)])
def test_an_error_in_a_thread_of_the_row_reaches_the_caller(error: BaseException) -> None:
    """Nothing that goes wrong beside the caller is lost."""
    work = Work(gated=(0, 1))
    runner = Runner(Row(2, work), threads=2)
    assert all(entered.wait(PATIENCE_S) for entered in work.entered.values())
    other = next(piece for piece, name in work.by.items() if name != "runner")
    work.errors[other] = error
    for gate in work.gates.values():
        gate.set()
    assert runner.ended()
    assert runner.raised is error


def test_the_error_that_came_first_is_the_one_that_is_raised() -> None:
    """What breaks because of it, or after it, does not hide it."""
    work = Work(gated=(0,))
    work.errors |= {0: OSError(5, "second"), 1: OSError(5, "first")}
    runner = Runner(row := Row(9, work))
    assert work.entered[0].wait(PATIENCE_S)
    row.help()
    work.gates[0].set()
    assert runner.ended()
    assert "first" == getattr(runner.raised, "strerror", None)


def test_a_helper_is_not_told_of_errors() -> None:
    """They are the caller's to raise; one who comes late finds nothing to take."""
    work = Work()
    work.errors[0] = ValueError("mine")
    row = Row(3, work)
    row.help()
    row.help()
    assert [0] == work.begun
    with pytest.raises(ValueError, match="mine"):
        row.run()


# ── no garbage collection ─────────────────────────────────────────────────────────────────
@pytest.fixture
def _collector_as_before() -> Iterator[None]:
    was_on = gc.isenabled()
    yield
    (gc.enable if was_on else gc.disable)()


@pytest.mark.parametrize("was_on", [True, False])
@pytest.mark.usefixtures("_collector_as_before")
def test_the_collector_is_off_inside_and_as_before_after(was_on: bool) -> None:
    """Also when the work fails, and for a program that has switched it off for good."""
    (gc.enable if was_on else gc.disable)()
    with uncollected():
        inside = gc.isenabled()
    assert (False, was_on) == (inside, gc.isenabled())
    with pytest.raises(ValueError, match="work"), uncollected():
        raise ValueError("work")
    assert was_on == gc.isenabled()


def test_an_interrupt_between_pieces_ends_the_others_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever leaves run() may give back the memory that the pieces work on."""
    work = Work(gated=(0, 1))
    row = Row(50, work)
    take = row._take

    def interrupted() -> int | None:
        if threading.current_thread() is threading.main_thread() and work.begun:
            raise KeyboardInterrupt
        return take()

    monkeypatch.setattr(row, "_take", interrupted)
    for gate in work.gates.values():
        gate.set()
    with pytest.raises(KeyboardInterrupt):
        row.run(2)
    begun = len(work.begun)
    assert not row._under_way
    assert take() is None
    assert begun == len(work.begun)


def test_an_interrupt_before_a_piece_is_given_back_hangs_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who leaves has no piece any more, whether or not it could say so."""
    row = Row(3, Work())

    def interrupted(error: BaseException | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(row, "_give_back", interrupted)
    runner = Runner(row)
    assert runner.ended()
    assert isinstance(runner.raised, KeyboardInterrupt)


def test_an_error_keeps_nothing_of_the_work_alive() -> None:
    """A search that is tried again would fill memory with what every attempt had read."""

    class Work:
        def piece(self, number: int) -> None:
            raise ValueError(number)

    work = Work()
    kept = weakref.ref(work)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="0"):
            Row(1, work.piece).run(2)
        del work
        assert kept() is None
    finally:
        gc.enable()
