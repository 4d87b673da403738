"""A landing between bytes that come when they like and memory that is somebody else's by then."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import threading
import time

import pytest

from hpc_ckpt.errors import BrokenOff
from hpc_ckpt.format.landing import Landing


def test_what_has_landed_is_counted() -> None:
    landing = Landing()
    for _ in range(2):
        with landing.copying(5):
            pass
    assert 10 == landing.landed


def test_nothing_lands_once_it_is_closed() -> None:
    landing = Landing()
    landing.close()
    with pytest.raises(BrokenOff), landing.copying(1):
        pytest.fail("copied all the same")
    assert 0 == landing.landed


def test_closing_waits_for_the_copy_that_has_begun() -> None:
    """Whoever closes it may give the memory away in the next moment."""
    landing, begun, go_on = Landing(), threading.Event(), threading.Event()
    closed = threading.Event()

    def copy() -> None:
        with landing.copying(1):
            begun.set()
            go_on.wait(30)

    copier = threading.Thread(target=copy)
    copier.start()
    assert begun.wait(30)
    closer = threading.Thread(target=lambda: (landing.close(), closed.set()))
    closer.start()
    time.sleep(0.05)
    assert not closed.is_set()
    go_on.set()
    closer.join(30)
    copier.join(30)
    assert closed.is_set()


def test_a_copy_that_fails_holds_up_nobody() -> None:
    landing = Landing()
    with pytest.raises(ValueError, match="no such place"), landing.copying(1):
        raise ValueError("no such place")
    landing.close()
