"""`forward:` of a spec where a steward stands between the shim and the program."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt import lease, resources
from hpc_ckpt.making import prepare
from hpc_ckpt.rundir import RunDir

ANSWERS = """
import os, signal, sys, time
def heard(number, frame):
    with open("heard", "a") as stream:
        stream.write(signal.Signals(number).name + "\\n")
    time.sleep(1.5)  # the shim has looked again by then
    with open("state", "w") as stream:
        stream.write("7")
    sys.exit(75)
for number in (signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, heard)
open("up", "w").close()
time.sleep(1000)
"""
RECIPE = {"name": "own", "restart": "state", "complete": {"file": "result"}}
PLAIN = {"name": "plain", "kind": "plain"}
APPLICATION = {"name": "own", "kind": "application", "recipe": RECIPE}


@pytest.mark.parametrize("to", ["command", "workers"])
@pytest.mark.parametrize("name", ["USR1", "INT"])
@pytest.mark.parametrize("entry", [PLAIN, APPLICATION])
def test_the_program_hears_it_once_and_is_given_time(
    tmp_path: Path, entry: dict[str, Any], name: str, to: str
) -> None:
    rundir = RunDir(tmp_path / "run")
    prepare(rundir)
    lease.acquire_standalone(rundir).release()
    (tmp_path / "answers.py").write_text(ANSWERS)
    argv = ["bash", "-c", f"{sys.executable} answers.py; exit $?"]
    record = {"chain": "x", "cwd": str(tmp_path), "argv": argv, "spec": {}, "levels": [entry]}
    rundir.chain_file.write_text(json.dumps(record))
    rundir.write_deadline(1, time.time() + 600)
    environ = {**os.environ, **rundir.environment(1, "slurm"), "HPC_CKPT_FORWARD": f"{name} {to}"}
    shim = str(resources.find("templates/shim.sh"))
    steward = [sys.executable, "-m", "hpc_ckpt.levels.steward"]
    child = subprocess.Popen(["bash", shim, *steward], cwd=tmp_path, env=environ)

    def notice() -> None:
        while not (tmp_path / "up").exists():
            time.sleep(0.05)
        rundir.give_notice(1, "test")

    threading.Thread(target=notice, daemon=True).start()
    assert 75 == child.wait(60)
    assert f"SIG{name}\n" == (tmp_path / "heard").read_text()
    assert "7" == (tmp_path / "state").read_text()
    if entry is APPLICATION:
        assert list(rundir.restarts.glob("step-*"))
