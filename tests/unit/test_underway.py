"""Which saves hang: by the clock alone a slow one could not be told from one that stands still."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from hpc_ckpt.engine.orders import Order
from hpc_ckpt.engine.underway import FOLLOWS_S, STUCK_S, UnderWay
from hpc_ckpt.tiers.writing import Pace


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def order_with(pace: Pace) -> Order:
    unused: Any = None
    return Order(
        snapshot=unused,
        about=unused,
        pending=unused,
        tier=unused,
        pace=pace,
        began_s=0.0,
        stall_s=0.0,
        urgent=False,
    )


@pytest.mark.parametrize(("last_chunk_s", "hangs"), [(None, True), (STUCK_S, True), (200, False)])
def test_a_save_of_which_something_is_still_written_does_not_hang(
    last_chunk_s: float | None, hangs: bool
) -> None:
    """However long it takes: a large state on a slow disk is no reason to leave either."""
    clock, begun, over = Clock(), threading.Event(), threading.Event()
    pace = Pace(clock=clock)
    order, under_way = order_with(pace), UnderWay(clock)
    under_way.start(order, lambda _: (begun.set(), over.wait(30), None)[-1])
    begun.wait(30)
    if last_chunk_s is not None:
        clock.now = last_chunk_s
        pace.took(1)
    clock.now = 210.0
    found = under_way.stuck(None)
    over.set()
    assert (order if hangs else None) is found


def test_a_save_that_waits_for_its_turn_does_not_hang() -> None:
    """The one before it is written as planned."""
    clock, begun, over = Clock(), threading.Event(), threading.Event()
    first, second = order_with(Pace(clock=clock)), order_with(Pace(clock=clock))
    under_way = UnderWay(clock)
    under_way.start(first, lambda _: (begun.set(), over.wait(30), None)[-1])
    under_way.start(second, lambda _: None)
    begun.wait(30)
    clock.now = 200.0
    first.pace.took(1)
    found = under_way.stuck(None)
    over.set()
    assert found is None


def test_a_save_may_begin_while_another_thread_gives_one_up() -> None:
    """Whoever waits for a save looks for what hangs, in whichever thread."""
    clock, begun, over = Clock(), threading.Event(), threading.Event()
    looking, added, done = threading.Event(), threading.Event(), threading.Semaphore(0)
    first, second, third = (order_with(Pace(clock=clock)) for _ in range(3))
    under_way = UnderWay(clock)

    class Looked(dict[Order, Any]):
        def items(self) -> Any:
            for pair in super().items():
                looking.set()
                added.wait(0.3)
                yield pair

    def start_third() -> None:
        looking.wait(30)
        under_way.start(third, lambda _: done.release())
        added.set()

    under_way._waiting = Looked()
    under_way.start(first, lambda _: (begun.set(), over.wait(30), None)[-1])
    under_way.start(second, lambda _: done.release())
    begun.wait(30)
    clock.now = 200.0
    starter = threading.Thread(target=start_third)
    starter.start()
    found = under_way.stuck(None)
    starter.join(30)
    assert [True, True] == [done.acquire(timeout=30) for _ in range(2)]
    over.set()
    assert first is found


@pytest.mark.parametrize(("limit_s", "given_up"), [(None, False), (0.05, True)])
def test_a_save_that_gets_on_is_waited_for_up_to_the_limit(
    limit_s: float | None, given_up: bool
) -> None:
    """Given up, it would be lost with its process, and its buffer with it."""
    over = threading.Event()
    order, under_way = order_with(Pace()), UnderWay(time.monotonic)
    begun = threading.Event()

    def work(order: Order) -> None:
        begun.set()
        over.wait(0.3)
        under_way.end(order)

    under_way.start(order, work)
    begun.wait(30)
    hanging = under_way.settle(0.01, limit_s)
    over.set()
    assert ([order] if given_up else []) == hanging


def saved_and_tidying(under_way: UnderWay, order: Order, over: threading.Event) -> None:
    """The save is done, and what follows it hangs in its thread until `over`."""
    tidying = threading.Event()

    def save_and_tidy(order: Order) -> None:
        under_way.end(order)
        tidying.set()
        over.wait(30)

    under_way.start(order, save_and_tidy)
    assert tidying.wait(30)


def test_a_save_does_not_wait_for_ever_behind_what_follows_another() -> None:
    """That may hang as well, when the save itself is long over: it gets a thread of its own."""
    clock, over, done = Clock(), threading.Event(), threading.Event()
    first, second = order_with(Pace(clock=clock)), order_with(Pace(clock=clock))
    under_way = UnderWay(clock)
    saved_and_tidying(under_way, first, over)
    under_way.start(second, lambda _: done.set())
    clock.now = STUCK_S - 1
    assert under_way.stuck(None) is None
    assert not done.wait(0.1)
    clock.now = STUCK_S
    assert under_way.stuck(None) is None
    assert done.wait(30)
    over.set()
    assert not second.given_up


def test_after_settling_no_thread_hangs() -> None:
    over, done = threading.Event(), threading.Event()
    under_way, first = UnderWay(time.monotonic), order_with(Pace())
    saved_and_tidying(under_way, first, over)
    assert [] == under_way.settle(0.01, None)
    under_way.start(order_with(Pace()), lambda _: done.set())
    assert done.wait(30)
    over.set()


@pytest.mark.parametrize("limit_s", [None, 20.0, 0.4])
def test_settling_does_not_wait_for_what_follows_a_commit(limit_s: float | None) -> None:
    """It would take half of the time that is left for the last save."""
    over, under_way, first = threading.Event(), UnderWay(time.monotonic), order_with(Pace())
    saved_and_tidying(under_way, first, over)
    began = time.monotonic()
    assert [] == under_way.settle(STUCK_S, limit_s)
    took_s = time.monotonic() - began
    over.set()
    assert not under_way.busy
    assert took_s < min(FOLLOWS_S, limit_s or FOLLOWS_S) + 1


def test_settling_gives_a_thread_to_what_waits_behind_that() -> None:
    """It may be the last save: nobody knows whether a newer one comes."""
    over, done, dropped = threading.Event(), threading.Event(), list[Order]()
    under_way = UnderWay(time.monotonic, lambda order, error: dropped.append(order))
    saved_and_tidying(under_way, order_with(Pace()), over)

    def save(order: Order) -> None:
        time.sleep(0.2)
        under_way.end(order)
        done.set()

    under_way.start(order_with(Pace()), save)
    assert [] == under_way.settle(STUCK_S, 20.0)
    over.set()
    assert (True, [], 0) == (done.is_set(), dropped, under_way.count)


def test_settling_waits_for_a_save_however_long_what_follows_it_takes() -> None:
    """The second that what follows is given begins when the save is over."""
    over, under_way = threading.Event(), UnderWay(time.monotonic)
    begun, tidied = threading.Event(), list[bool]()

    def save_and_tidy(order: Order) -> None:
        begun.set()
        time.sleep(1.5 * FOLLOWS_S)
        under_way.end(order)
        time.sleep(0.3 * FOLLOWS_S)
        tidied.append(True)
        over.wait(30)

    under_way.start(order_with(Pace()), save_and_tidy)
    assert begun.wait(30)
    assert [] == under_way.settle(STUCK_S, None)
    over.set()
    assert [True] == tidied


def test_what_a_save_waited_for_others_does_not_count_as_its_own() -> None:
    """It would be taken for the time that saves take, in this link and the next."""
    clock, over, begun = Clock(), threading.Event(), threading.Event()
    first, second = order_with(Pace(clock=clock)), order_with(Pace(clock=clock))
    under_way = UnderWay(clock)
    writing = threading.Event()
    under_way.start(first, lambda _: (writing.set(), over.wait(30), None)[-1])
    under_way.start(second, lambda _: begun.set())
    assert writing.wait(30)
    clock.now = 100.0
    assert (100.0, 0.0) == (under_way.at_full_speed(first), under_way.at_full_speed(second))
    over.set()
    assert begun.wait(30)
    clock.now = 103.0
    assert 3.0 == under_way.at_full_speed(second)


def test_a_save_that_no_thread_would_begin_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buffer would be taken for good, and whoever waits for it would wait for ever."""
    clock, over, begun = Clock(), threading.Event(), threading.Event()
    first, second = order_with(Pace(clock=clock)), order_with(Pace(clock=clock))
    dropped: list[tuple[Order, str]] = []
    under_way = UnderWay(clock, lambda order, error: dropped.append((order, str(error))))
    under_way.start(first, lambda _: (begun.set(), over.wait(30), None)[-1])
    under_way.start(second, lambda _: None)
    begun.wait(30)
    clock.now = 2 * STUCK_S

    def none_to_be_had(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_to_be_had)
    assert first is under_way.stuck(None)
    over.set()
    assert ([(second, "can't start new thread")], 1) == (dropped, under_way.count)
