"""Idle cores are read from the kernel's counters, for the cores of this process alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_ckpt.cores import IdleCores
from hpc_ckpt.testing import FakeClock

TICKS = os.sysconf("SC_CLK_TCK")


def write(stat: Path, *idle_and_waiting: tuple[float, float]) -> None:
    """One line per core, in seconds; the first line is the sum, as in the kernel's own file."""
    rows = [
        f"cpu{n} 1 2 3 {int(idle * TICKS)} {int(waiting * TICKS)} 0 0 0 0 0"
        for n, (idle, waiting) in enumerate(idle_and_waiting)
    ]
    stat.write_text("\n".join(["cpu  9 9 9 999999 9 0 0 0 0 0", *rows, "intr 5", ""]))


@pytest.fixture
def stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    write(tmp_path / "stat", (10, 0), (10, 0), (10, 0))
    return tmp_path / "stat"


def test_only_the_cores_of_this_process_count(stat: Path) -> None:
    """The third core's idleness is somebody else's; waiting for a disk is idle too."""
    clock = FakeClock()
    cores = IdleCores(stat, clock)
    clock.advance(10)
    write(stat, (15, 0), (10, 2.5), (20, 0))
    assert 0.75 == cores.spare()


def test_each_answer_is_about_the_time_since_the_last(stat: Path) -> None:
    """First busy, then idle."""
    clock = FakeClock()
    cores = IdleCores(stat, clock)
    clock.advance(10)
    assert 0.0 == cores.spare()
    clock.advance(10)
    write(stat, (20, 0), (20, 0))
    assert 2.0 == cores.spare()


def test_too_short_a_time_tells_nothing(stat: Path) -> None:
    """And does not use up what was counted until then."""
    clock = FakeClock()
    cores = IdleCores(stat, clock)
    clock.advance(0.25)
    assert cores.spare() is None
    clock.advance(0.75)
    write(stat, (11, 0), (10, 0))
    assert 1.0 == cores.spare()


@pytest.mark.parametrize("text", ["", "cpu0 1 2", "cpu0 a b c d e f", "cpu7 1 2 3 4 5 6"])
def test_what_cannot_be_read_is_unknown(stat: Path, text: str) -> None:
    """Never an error: it only decides how fast a save is written."""
    clock = FakeClock()
    stat.write_text(text)
    cores = IdleCores(stat, clock)
    clock.advance(10)
    assert cores.spare() is None


def test_a_missing_file_is_unknown(tmp_path: Path) -> None:
    """Not on every system."""
    clock = FakeClock()
    cores = IdleCores(tmp_path / "stat", clock)
    clock.advance(10)
    assert cores.spare() is None


def test_the_real_counters_can_be_read() -> None:
    """Here and now, between none and all of the cores."""
    clock = FakeClock()
    cores = IdleCores(clock=clock)
    clock.advance(1)
    found = cores.spare()
    assert found is not None
    assert 0 <= found
