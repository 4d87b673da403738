"""Processes that outlive their parent: heard of while a link runs, and gone when it is over."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_ckpt import processes

SCRIPT = """
import os, subprocess, sys, time
from pathlib import Path
from hpc_ckpt import processes
from hpc_ckpt.levels import orphans as room
from hpc_ckpt.levels.program import Program

def zombies():
    here = os.getpid()
    return [pid for pid, stat in processes.every() if stat.parent == here and stat.ended]

def wait_for(what):
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end, what
        time.sleep(0.02)

room.LOOK_EVERY_S = 0.0
orphans = room.Orphans()
"""
REAPED = """
program = Program(["bash", "-c", "for i in 1 2 3; do (sleep 0.1 &); done; sleep 1.5; exit 3"],
                  Path("."), os.environ)
helper = subprocess.Popen(["bash", "-c", "exit 4"])
wait_for(lambda: len(zombies()) >= 4)
orphans.reap()
print(len(zombies()))
wait_for(lambda: program.pid in zombies())
orphans.reap()
print(program.poll(), helper.wait())
"""
ENDED = """
script = "setsid sleep 1000 & echo $! > pid; exit 0"
program = Program(["bash", "-c", script], Path("."), os.environ)
wait_for(lambda: program.poll() is not None)
program.end()
orphans.end()
print(len(zombies()), len(room.tree_of(os.getpid())))
"""
RESTARTED = """
import json, threading
from hpc_ckpt import lease
from hpc_ckpt.events import EventLog
from hpc_ckpt.levels.base import LevelFailed, Work
from hpc_ckpt.levels.plain import Plain
from hpc_ckpt.levels.stewardship import Steward
from hpc_ckpt.making import prepare
from hpc_ckpt.rundir import RunDir
from hpc_ckpt.settings import Settings

class Failing(Plain):
    name = "failing"
    def own_failure(self, code):
        return "on purpose" if code == 7 else None

place = RunDir("run")
prepare(place)
held = lease.acquire_standalone(place)
held.release()
script = "test -e pid && { kill -0 $(cat pid) && echo both > both; exit 0; }; " \\
         "setsid sleep 1000 & echo $! > pid; exit 7"
work = Work(argv=("bash", "-c", script), cwd=Path("."), environ=dict(os.environ))
log = EventLog(place.events_file(held.generation, "here"))
steward = Steward(place, held.generation, work, [Failing(), Plain()], Settings(), log,
                  orphans=orphans)
print(steward.run(), Path("both").exists())
"""

AGAIN = """
from hpc_ckpt import lease
from hpc_ckpt.events import EventLog
from hpc_ckpt.levels.base import ResumeFailed, Work
from hpc_ckpt.levels.plain import Plain
from hpc_ckpt.levels.restarts import Restarts
from hpc_ckpt.levels.stewardship import Steward
from hpc_ckpt.making import prepare
from hpc_ckpt.rundir import RunDir
from hpc_ckpt.settings import Settings

class Resuming(Plain):
    def resume(self, work, restart, facts):
        return self.first(work)
    def resumed(self, program, until):
        if REFUSES:
            program.wait(until)
            raise ResumeFailed("on purpose")

place = RunDir("run")
prepare(place)
for step in (1, 2):
    with Restarts(place).stage(1) as staging:
        staging.commit(level="plain", step=step, reason="", facts={}, guard=lambda: None)
held = lease.acquire_standalone(place)
held.release()
script = "for pid in $(cat pids); do kill -0 $pid && echo both > both; done; " \
         "setsid sleep 1000 & echo $! >> pids; echo x >> attempts; sleep 0.2; exit 7"
work = Work(argv=("bash", "-c", script), cwd=Path("."), environ=dict(os.environ))
log = EventLog(place.events_file(held.generation, "here"))
Steward(place, held.generation, work, [Resuming()], Settings(), log, orphans=orphans).run()
print(len(Path("attempts").read_text().split()), Path("both").exists())
"""


def run(place: Path, script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + script], cwd=place, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr
    return done.stdout


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_those_that_end_while_the_program_runs_do_not_stay_as_zombies(tmp_path: Path) -> None:
    """And the codes of what was started here are left to whoever started it."""
    assert "1\n3 4\n" == run(tmp_path, REAPED)


def test_those_that_still_run_are_ended_with_the_link(tmp_path: Path) -> None:
    assert "0 1\n" == run(tmp_path, ENDED)
    pid = int((tmp_path / "pid").read_text())
    assert processes.stat_of(pid) is None


def test_none_of_them_goes_on_beside_the_next_attempt(tmp_path: Path) -> None:
    assert "0 False\n" == run(tmp_path, RESTARTED)


@pytest.mark.parametrize(("refuses", "attempts"), [(False, 4), (True, 2)])
def test_nor_beside_the_next_attempt_of_the_same_level(
    tmp_path: Path, refuses: bool, attempts: int
) -> None:
    """A launcher starts its solver in a session of its own, and fails soon after it went on."""
    assert f"{attempts} False\n" == run(tmp_path, f"REFUSES = {refuses}\n" + AGAIN)


@pytest.mark.parametrize("end", ["exit 0", "kill -9 $$", "kill -9 $PPID; sleep 1000"])
def test_a_link_leaves_nothing_behind(tmp_path: Path, end: str) -> None:
    """Through `hpc-ckpt run`, where the steward is a process of its own, and may be killed."""
    script = f"setsid sleep 1000 & echo $! > pid; sleep 0.5; {end}"
    words = ["run", "--root", "run", "--link-time", "20 s", "--max-links", "1",
             "--set", "level=application", "--set", "recipe=generic", "--"]  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "hpc_ckpt.cli", *words, "bash", "-c", script],
        cwd=tmp_path, env=dict(os.environ), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        timeout=60,
    )  # fmt: skip
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: processes.stat_of(pid) is None)
