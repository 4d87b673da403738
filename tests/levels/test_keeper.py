"""The process between the steward and a program: what it passes on, and what ends with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_ckpt.levels import keeper
from hpc_ckpt.levels.criu_tool import may_make_namespaces

MODES = [
    pytest.param(False, id="shared-ids"),
    pytest.param(
        True,
        id="own-ids",
        marks=pytest.mark.skipif(not may_make_namespaces(), reason="needs CAP_SYS_ADMIN"),
    ),
]


def command(place: Path, namespace: bool, *words: str) -> list[str]:
    more = ["--namespace"] if namespace else []
    files = ["--ready", str(place / "ready"), "--output", str(place / "output")]
    return keeper.command(*more, *files, "--", *words)


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def lives(token: str) -> bool:
    """A process whose command has that word."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if token in path.read_text().split("\0"):
                return True
        except OSError:
            continue
    return False


@pytest.mark.parametrize("namespace", MODES)
@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("true", 0)])
def test_the_end_of_the_program_is_passed_on(
    tmp_path: Path, namespace: bool, script: str, code: int
) -> None:
    assert code == subprocess.run(command(tmp_path, namespace, "sh", "-c", script)).returncode


@pytest.mark.parametrize("namespace", MODES)
def test_the_program_has_a_session_and_an_output_of_its_own(
    tmp_path: Path, namespace: bool
) -> None:
    """As CRIU needs it; and signals to the keeper's group are not its own."""
    script = (
        "import os, signal; "
        "print(os.getpid() == os.getsid(0), os.getpid(), int(signal.getsignal(15)))"
    )
    subprocess.run(command(tmp_path, namespace, sys.executable, "-c", script), check=True)
    session, pid, term = (tmp_path / "output").read_text().split()
    assert ("True", "0") == (session, term)
    assert int(pid) == json.loads((tmp_path / "ready").read_text())["pid"]
    assert not namespace or int(pid) > keeper.FIRST_PID


def test_a_command_that_is_not_there_is_said_as_a_shell_does(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path, False, "no-such-command"))
    assert keeper.NOT_FOUND == done.returncode
    assert "no-such-command: No such file" in (tmp_path / "output").read_text()


@pytest.mark.parametrize("namespace", MODES)
def test_nothing_goes_on_without_the_program(tmp_path: Path, namespace: bool) -> None:
    token = f"100.{os.getpid()}1"
    script = f"setsid sleep {token} & sleep 0.3; exit 0"
    subprocess.run(command(tmp_path, namespace, "sh", "-c", script), check=True)
    assert not lives(token)


@pytest.mark.parametrize("namespace", MODES)
def test_nothing_goes_on_without_the_steward(tmp_path: Path, namespace: bool) -> None:
    """Killed, it cannot end anything itself."""
    token = f"100.{os.getpid()}2"
    argv = command(tmp_path, namespace, "sh", "-c", f"sleep {token} & wait")
    steward = subprocess.Popen([sys.executable, "-c", f"import subprocess; subprocess.run({argv})"])
    wait_for(lambda: lives(token))
    steward.kill()
    steward.wait()
    wait_for(lambda: not lives(token))
