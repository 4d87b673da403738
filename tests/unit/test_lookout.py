"""The lookout: what the files and signals outside say, read when they change."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt.rundir import RunDir
from hpc_ckpt.runtime.lookout import Lookout, Places
from hpc_ckpt.runtime.signals import SignalWatch
from hpc_ckpt.testing import FakeClock


class Received(SignalWatch):
    """Signals that somebody else has already caught."""

    def __init__(self) -> None:
        super().__init__(())
        self.moments: list[tuple[float, str]] = []

    def received(self) -> list[tuple[float, str]]:
        return self.moments


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    rundir = RunDir(tmp_path)
    rundir.create()
    return rundir


@pytest.fixture
def signals() -> Received:
    return Received()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000.0)


@pytest.fixture
def lookout(rundir: RunDir, signals: Received, clock: FakeClock) -> Lookout:
    places = Places(rundir, rundir.notice_file(1), rundir.deadline_file(1))
    return Lookout(places, signals, clock=clock)


def line(moment: float, source: str = "runner", hurry: bool = False) -> str:
    return f'{{"time": {moment}, "source": "{source}", "hurry": {str(hurry).lower()}}}\n'


def test_without_files_and_signals_nothing_is_known(lookout: Lookout) -> None:
    """A plain program: no notice, no deadline, no halt."""
    lookout.look()
    assert (None, None, None, None) == (
        lookout.notice, lookout.deadline_s, lookout.halted, lookout.hurry_since_s,
    )  # fmt: skip


def test_the_deadline_is_read_again_when_it_changes(lookout: Lookout, rundir: RunDir) -> None:
    """The scheduler moved the end: the file is rewritten, and may go away."""
    for moment in (2000.0, 1500.0):
        rundir.write_deadline(1, moment)
        lookout.look()
        assert moment == lookout.deadline_s
    rundir.deadline_file(1).unlink()
    lookout.look()
    assert lookout.deadline_s is None


def test_a_file_that_did_not_change_is_not_read_again(lookout: Lookout, rundir: RunDir) -> None:
    """Same time, size and inode: one stat and no read."""
    rundir.write_deadline(1, 2000.0)
    lookout.look()
    status = rundir.deadline_file(1).stat()
    rundir.deadline_file(1).write_text("1999.000\n")
    os.utime(rundir.deadline_file(1), ns=(status.st_atime_ns, status.st_mtime_ns))
    lookout.look()
    assert 2000.0 == lookout.deadline_s


def test_halt_is_seen_with_its_reason(lookout: Lookout, rundir: RunDir) -> None:
    """And taken back when the file goes."""
    rundir.write_halt("enough")
    lookout.look()
    assert "enough" == lookout.halted
    rundir.halt_file.unlink()
    lookout.look()
    assert lookout.halted is None


def test_a_second_line_two_seconds_later_means_hurry(
    lookout: Lookout, rundir: RunDir, clock: FakeClock
) -> None:
    """The moment at which the hurry was seen is kept."""
    path = rundir.notice_file(1)
    path.write_text(line(900.0))
    lookout.look()
    assert (False, None) == (getattr(lookout.notice, "hurry", None), lookout.hurry_since_s)
    clock.advance(5)
    path.write_text(line(900.0) + line(902.0, "scheduler"))
    lookout.look()
    assert ("runner", "scheduler") == getattr(lookout.notice, "sources", None)
    assert 1005.0 == lookout.hurry_since_s
    clock.advance(5)
    lookout.look()
    assert 1005.0 == lookout.hurry_since_s


def test_a_notice_once_seen_stays(lookout: Lookout, rundir: RunDir) -> None:
    """Nobody takes a notice back by deleting the file."""
    rundir.notice_file(1).write_text(line(900.0))
    lookout.look()
    rundir.notice_file(1).unlink()
    lookout.look()
    assert lookout.notice is not None


def test_a_signal_is_a_notice_without_any_look(lookout: Lookout, signals: Received) -> None:
    """The training thread sees it at the very next boundary."""
    signals.moments.append((1000.0, "SIGTERM"))
    assert ("SIGTERM",) == getattr(lookout.notice, "sources", None)


@pytest.mark.parametrize(("second", "hurry"), [(1001.9, False), (1002.0, True)])
def test_signals_and_lines_count_together(
    lookout: Lookout, rundir: RunDir, signals: Received, second: float, hurry: bool
) -> None:
    """A signal two seconds after a line is a second notice; a copy of the first is none."""
    rundir.notice_file(1).write_text(line(1000.0))
    signals.moments.append((second, "SIGTERM"))
    lookout.look()
    assert hurry == getattr(lookout.notice, "hurry", None)


@pytest.mark.parametrize("what", ["notice", "deadline", "halt"])
def test_what_cannot_be_read_at_once_is_read_later(
    lookout: Lookout, rundir: RunDir, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A process out of descriptors still sees that a file has changed, but not what it says."""
    rundir.give_notice(1, "runner")
    rundir.write_deadline(1, 2000.0)
    rundir.write_halt("enough")
    real, name = Path.open, {"notice": "notice-1", "deadline": "deadline-1", "halt": "halt"}[what]

    def full(self: Path, *arguments: Any, **more: Any) -> Any:
        if self.name == name:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(self, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        lookout.look()
    seen = {"notice": lookout.notice, "deadline": lookout.deadline_s, "halt": lookout.halted}
    assert [what] == [key for key, value in seen.items() if value is None]
    lookout.look()
    assert (2000.0, "enough") == (lookout.deadline_s, lookout.halted)
    assert lookout.notice is not None


def test_a_deadline_that_cannot_be_read_just_now_is_still_the_last_one(
    lookout: Lookout, rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir.write_deadline(1, 2000.0)
    lookout.look()
    rundir.write_deadline(1, 3000.0)
    with monkeypatch.context() as patch:
        patch.setattr("hpc_ckpt.runtime.lookout._is_readable", lambda path: False)
        lookout.look()
    assert 2000.0 == lookout.deadline_s
    lookout.look()
    assert 3000.0 == lookout.deadline_s
