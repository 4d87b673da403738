"""The persist thread: one thing after the other, at its own niceness."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from hpc_ckpt.engine.persist import Worker

PATIENCE_S = 30.0
"""Only a broken worker waits this long."""


class Gate:
    """Work that has begun and does not end before it is let go."""

    def __init__(self) -> None:
        self.begun, self._open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self._open.wait(PATIENCE_S)

    def open(self) -> None:
        self._open.set()


def noting(done: list[int], number: int) -> Callable[[], None]:
    return lambda: done.append(number)


def test_orders_are_done_one_after_the_other() -> None:
    """In the order in which they were given, and all of them in one thread."""
    worker, done, threads = Worker("hpc-ckpt-test"), [], set()
    for number in range(50):
        worker.start(lambda number=number: done.append(number) or threads.add(thread_now()))
    assert worker.wait(PATIENCE_S)
    assert list(range(50)) == done
    assert 1 == len(threads)
    assert worker.close(PATIENCE_S)


def thread_now() -> tuple[str, bool]:
    thread = threading.current_thread()
    return thread.name, thread.daemon


def test_the_thread_has_a_name_and_keeps_no_program_from_ending() -> None:
    """A daemon, made when there is something to do."""
    before = threading.active_count()
    worker, seen = Worker("hpc-ckpt-test"), []
    assert before == threading.active_count()
    worker.start(lambda: seen.append(thread_now()))
    assert worker.close(PATIENCE_S)
    assert [("hpc-ckpt-test", True)] == seen


def test_what_is_left_is_counted() -> None:
    """The order under way counts until it is done."""
    worker, first, second = Worker("w"), Gate(), Gate()
    assert 0 == worker.left
    worker.start(first)
    worker.start(second)
    assert first.begun.wait(PATIENCE_S)
    assert 2 == worker.left
    first.open()
    assert second.begun.wait(PATIENCE_S)
    assert 1 == worker.left
    second.open()
    assert worker.wait(PATIENCE_S)
    assert 0 == worker.left
    worker.close()


def test_waiting_gives_up_in_time_and_can_be_repeated() -> None:
    """A file system that hangs does not hold up who waits with a limit."""
    worker, gate = Worker("w"), Gate()
    worker.start(gate)
    assert gate.begun.wait(PATIENCE_S)
    assert (False, False) == (worker.wait(0.0), worker.wait(0.01))
    gate.open()
    assert worker.wait(PATIENCE_S)
    assert worker.wait(0.0)
    worker.close()


def test_without_orders_there_is_nothing_to_wait_for() -> None:
    """Not even a thread."""
    worker = Worker("w")
    assert (True, True) == (worker.wait(), worker.close())


def test_closing_ends_the_thread_after_its_work() -> None:
    """Nothing of ours is left in the process."""
    worker, done = Worker("w"), []
    for number in range(3):
        worker.start(noting(done, number))
    assert worker.close(PATIENCE_S)
    thread = worker._thread
    assert thread is not None
    assert ([0, 1, 2], False) == (done, thread.is_alive())


def test_closing_leaves_stuck_work_behind_and_says_so() -> None:
    """When it comes free after all, what was ordered is done and the thread ends."""
    worker, gate, done = Worker("w"), Gate(), []
    worker.start(gate)
    worker.start(noting(done, 1))
    assert gate.begun.wait(PATIENCE_S)
    assert not worker.close(0.0)
    thread = worker._thread
    assert thread is not None
    assert thread.is_alive()
    gate.open()
    thread.join(PATIENCE_S)
    assert ([1], False) == (done, thread.is_alive())


def test_a_worker_can_be_used_again_after_a_rest() -> None:
    """Its one thread waits for the next order."""
    worker, seen = Worker("w"), []
    for _ in range(3):
        worker.start(lambda: seen.append(threading.get_ident()))
        assert worker.wait(PATIENCE_S)
    assert (3, 1) == (len(seen), len(set(seen)))
    worker.close()


# ── niceness ──────────────────────────────────────────────────────────────────────────────
def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.parametrize("more", [0, 3])
def test_only_the_worker_is_nice(more: int) -> None:
    """Linux counts it by thread: training keeps its own."""
    mine = niceness()
    if mine + more > 19:
        pytest.skip("there is nothing nicer than this process")
    worker, seen = Worker("w", nice=mine + more if more else 0), []
    worker.start(lambda: seen.append(niceness()))
    assert worker.close(PATIENCE_S)
    assert ([mine + more], mine) == (seen, niceness())


def test_a_niceness_that_is_refused_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work matters more."""

    def refuse(*_: int) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    worker, done = Worker("w", nice=5), []
    worker.start(noting(done, 1))
    assert worker.close(PATIENCE_S)
    assert [1] == done
