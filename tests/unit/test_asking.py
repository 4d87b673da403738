"""Questions to something that may hang: an answer, its error, or no more than some patience."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import itertools
import threading

import pytest

from hpc_ckpt.tiers import asking
from hpc_ckpt.tiers.asking import Asker

PATIENCE_S = 30.0
"""Only a broken asker waits this long."""


def test_an_answer_is_the_answer_and_an_error_the_error() -> None:
    """As if it had been asked here; also an error that looks like a lack of one."""
    asker = Asker(PATIENCE_S)
    assert "well" == asker.ask("disk", lambda: "well")

    def fails() -> None:
        raise TimeoutError("Connection timed out")

    with pytest.raises(TimeoutError, match="Connection timed out"):
        asker.ask("disk", fails)
    assert set() == asker.silent


def test_who_does_not_answer_is_not_asked_again_until_it_has() -> None:
    """Each question would leave a thread behind."""
    asker, over = Asker(0.02), threading.Event()
    with pytest.raises(TimeoutError, match=r"it does not answer after 0\.02 s"):
        asker.ask("disk", lambda: over.wait(PATIENCE_S))
    asked: list[str] = []
    with pytest.raises(TimeoutError, match="has not answered since"):
        asker.ask("disk", lambda: asked.append("again"))
    assert ([], {"disk"}) == (asked, asker.silent)
    assert "other" == asker.ask("another disk", lambda: "other")
    (thread,) = [one for one in threading.enumerate() if one.name == "hpc-ckpt-ask"]
    assert thread.daemon
    over.set()
    thread.join(PATIENCE_S)
    assert (set(), 5) == (asker.silent, asker.ask("disk", lambda: 5))


def test_without_a_thread_it_is_asked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lack of threads says nothing of a disk."""

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert threading.get_ident() == Asker().ask("disk", threading.get_ident)


def test_who_gets_on_is_waited_for() -> None:
    """However long it takes in all: only a stretch without progress is the end of patience."""
    asker, over, done = Asker(0.05), threading.Event(), itertools.count()
    answers: list[str] = []

    def ask() -> None:
        answers.append(asker.ask("disk", lambda: str(over.wait(30)), progress=lambda: next(done)))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(0.5)
    assert ([], set()) == (answers, asker.silent)
    over.set()
    thread.join(30)
    assert ["True"] == answers


def test_who_got_on_once_is_not_waited_for_for_ever() -> None:
    asker, over, moments = Asker(), threading.Event(), iter([0, 1, 1])
    with pytest.raises(TimeoutError, match=r"after 0\.02 s"):
        asker.ask("disk", over.wait, progress=lambda: next(moments), patience_s=0.02)
    assert {"disk"} == asker.silent
    over.set()


def test_one_lost_request_does_not_condemn_for_ever() -> None:
    """After a while it is asked once more, and believed if it answers; few threads are left."""
    now, over = [0.0], threading.Event()
    asker = Asker(0.02, clock=lambda: now[0])

    def fails(match: str) -> None:
        with pytest.raises(TimeoutError, match=match):
            asker.ask("disk", over.wait)

    fails("does not answer")
    for _ in range(asking.UNANSWERED - 1):
        fails("has not answered since")
        now[0] += asking.AGAIN_S
        fails("does not answer")
    now[0] += asking.AGAIN_S
    fails("has not answered since")
    over.set()


def test_who_answers_the_next_question_is_asked_as_ever() -> None:
    now, over = [0.0], threading.Event()
    asker = Asker(0.02, clock=lambda: now[0])
    with pytest.raises(TimeoutError):
        asker.ask("disk", over.wait)
    now[0] += asking.AGAIN_S
    assert (1, set(), 2) == (
        asker.ask("disk", lambda: 1, patience_s=PATIENCE_S),
        asker.silent,
        asker.ask("disk", lambda: 2, patience_s=PATIENCE_S),
    )
    over.set()


def test_who_is_silent_is_not_asked_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """That would wait as long as it hangs."""
    now, over = [0.0], threading.Event()
    asker = Asker(0.02, clock=lambda: now[0])
    with pytest.raises(TimeoutError):
        asker.ask("disk", over.wait)
    now[0] += asking.AGAIN_S

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(TimeoutError, match="has not answered since"):
        asker.ask("disk", over.wait)
    over.set()


def test_answers_in_between_do_not_let_lost_threads_pile_up() -> None:
    now, over = [0.0], threading.Event()
    asker = Asker(0.02, clock=lambda: now[0])
    for number in range(asking.UNANSWERED):
        if number:
            now[0] += asking.AGAIN_S
            assert 1 == asker.ask("disk", lambda: 1, patience_s=PATIENCE_S)
        with pytest.raises(TimeoutError, match="does not answer"):
            asker.ask("disk", over.wait)
    now[0] += asking.AGAIN_S
    assert {"disk"} == asker.silent
    with pytest.raises(TimeoutError, match="has not answered since"):
        asker.ask("disk", lambda: 1)
    over.set()
    for thread in threading.enumerate():
        if thread.name == "hpc-ckpt-ask":
            thread.join(PATIENCE_S)
    assert (set(), 2) == (asker.silent, asker.ask("disk", lambda: 2, patience_s=PATIENCE_S))
