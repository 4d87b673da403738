"""What the stat files of /proc say, whatever a program is called."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from hpc_ckpt import processes


def test_this_process_is_what_the_system_says() -> None:
    stat = processes.stat_of(os.getpid())
    assert stat is not None
    assert (os.getppid(), os.getsid(0), False) == (stat.parent, stat.session, stat.ended)
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - stat.started / processes.TICKS
    assert 0 <= age < 24 * 3600
    assert stat.resident > 1024**2
    assert stat.ticks > 0
    assert (os.getpid(), stat.parent) in [(pid, one.parent) for pid, one in processes.every()]


def test_a_name_may_look_like_fields(tmp_path: Path) -> None:
    """The kernel puts it in brackets and escapes nothing."""
    program = tmp_path / "a) Z 1 (b"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
    with subprocess.Popen([program, "60"]) as child:
        try:
            while "Z 1" not in Path(f"/proc/{child.pid}/comm").read_text():
                time.sleep(0.001)
            stat = processes.stat_of(child.pid)
            assert stat is not None
            assert (os.getpid(), False) == (stat.parent, stat.ended)
        finally:
            child.kill()


def test_one_that_has_ended_is_seen_until_it_is_waited_for() -> None:
    child = subprocess.Popen(["true"])
    while not ((stat := processes.stat_of(child.pid)) is not None and stat.ended):
        time.sleep(0.001)
    child.wait()
    assert processes.stat_of(child.pid) is None
