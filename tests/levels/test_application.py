"""The application level: a C program that cannot be changed, and files in every bad state."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from molecules import require

from hpc_ckpt import lease
from hpc_ckpt.errors import EXIT_COMPLETE, EXIT_FAILED, EXIT_SAVED
from hpc_ckpt.events import EventLog, read
from hpc_ckpt.levels import collecting, evidence
from hpc_ckpt.levels.application import Application
from hpc_ckpt.levels.base import (
    Level,
    Moment,
    NoRoom,
    NothingNew,
    ResumeFailed,
    SaveFailed,
    Work,
)
from hpc_ckpt.levels.collecting import Beginning
from hpc_ckpt.levels.ingredients import Number
from hpc_ckpt.levels.plain import Plain
from hpc_ckpt.levels.program import Program
from hpc_ckpt.levels.recipe import load_recipes, recipe_of
from hpc_ckpt.levels.restarts import Restart, Restarts, Staging
from hpc_ckpt.levels.stewardship import Steward
from hpc_ckpt.making import prepare
from hpc_ckpt.policy.interval import EveryTime
from hpc_ckpt.rundir import ENV_DEADLINE, Result, RunDir
from hpc_ckpt.settings import Settings

SHIPPED = load_recipes(Path("/nowhere"), {})
GENERIC: dict[str, Any] = {
    "like": "generic",
    "name": "count",
    "save": {"lead": "3s"},
    "complete": {"file": "result.dat"},
    "progress": {"file": "{restart}", "regex": r"^step (\d+)"},
    "sane": {"ends": r"end\n"},
}


LOG_STEP = {"file": "log", "regex": r"step (\d+)"}
LOG_TIME = {"file": "log", "regex": r"TIME = ([\d.]+)"}


@pytest.fixture(scope="session")
def count(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require("gcc")
    program = tmp_path_factory.mktemp("programs") / "count"
    source = Path(__file__).parent / "programs" / "count.c"
    subprocess.run(["gcc", "-O1", "-o", program, source], check=True)
    return program


class Case:
    """A working directory, and the links of a chain in it."""

    def __init__(self, place: Path) -> None:
        self.cwd = place / "work"
        self.cwd.mkdir()
        self.rundir = RunDir(place / "run")
        prepare(self.rundir)
        self.restarts = Restarts(self.rundir)

    def level(self, recipe: dict[str, Any], **change: Any) -> Application:
        return Application(recipe_of({**recipe, **change}, SHIPPED, self.cwd))

    def work(self, *argv: str) -> Work:
        return Work(
            argv=argv,
            cwd=self.cwd,
            environ=dict(os.environ),
            kept=self.rundir.logs,
            noted=self.rundir.restarts,
        )

    def link(
        self,
        level: Application,
        *argv: str,
        others: tuple[Level, ...] = (),
        notice_s: float | None = None,
        notice_at: str | None = None,
        interval_s: float = 600.0,
        deadline_s: float | None = None,
    ) -> int:
        held = lease.acquire_standalone(self.rundir)
        self.generation = held.generation
        held.release()
        work = self.work(*argv)
        if deadline_s is not None:
            self.rundir.write_deadline(self.generation, time.time() + deadline_s)
            path = str(self.rundir.deadline_file(self.generation))
            work = replace(work, environ={**os.environ, ENV_DEADLINE: path})
        log = EventLog(self.rundir.events_file(self.generation, "here"))
        settings = Settings(policy=EveryTime(interval_s))
        steward = Steward(self.rundir, self.generation, work, [level, *others], settings, log)
        if notice_s is not None:
            tell = threading.Timer(
                notice_s, lambda: self.rundir.give_notice(self.generation, "test")
            )
            tell.start()
        if notice_at is not None:
            at = (self.cwd / notice_at,)
            threading.Thread(target=self._tell_at, args=at, daemon=True).start()
        try:
            return steward.run()
        finally:
            log.close()

    def _tell_at(self, path: Path) -> None:
        """Once the program has made this file, however long it took to begin."""
        until = time.monotonic() + 120
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.02)
        self.rundir.give_notice(self.generation, "test")

    def records(self) -> list[dict[str, Any]]:
        return list(read(self.rundir.events_file(self.generation, "here")))

    def events(self) -> list[str]:
        return [record["event"] for record in self.records()]

    def said(self) -> str:
        outcome = self.rundir.outcome(self.generation)
        assert outcome is not None
        return outcome.reason

    def result(self) -> str:
        return (self.cwd / "result.dat").read_text()


@pytest.fixture(autouse=True)
def _any_command(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link is given another command here, in place of a program that does something else then."""
    if "another_command" not in request.node.name:
        monkeypatch.setattr(Restarts, "of_another", lambda *_: None)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def uninterrupted(count: Path, place: Path, steps: int) -> str:
    place.mkdir()
    subprocess.run([count, str(steps), "0"], cwd=place, check=True, stdout=subprocess.DEVNULL)
    return (place / "result.dat").read_text()


# ── a real program ────────────────────────────────────────────────────────────────────────
def test_a_program_that_writes_when_asked_comes_to_the_same_result(
    case: Case, count: Path, tmp_path: Path
) -> None:
    for seconds in (0.8, 1.2):
        assert EXIT_SAVED == case.link(case.level(GENERIC), str(count), "9000", "1000",
                                       notice_s=seconds)  # fmt: skip
    assert 2 == len(case.restarts.keys())
    (case.cwd / "restart.dat").unlink()
    assert EXIT_COMPLETE == case.link(case.level(GENERIC), str(count), "9000", "10")
    assert "restored" in case.events()
    assert uninterrupted(count, tmp_path / "whole", 9000) == case.result()


def test_it_is_asked_at_each_interval_behind_a_shell_too(case: Case, count: Path) -> None:
    """bash itself would die of USR1."""
    command = f"cd . && {count} 100000 1000; exit $?"
    code = case.link(case.level(GENERIC), "bash", "-c", command, notice_s=5.0, interval_s=1.0)
    assert EXIT_SAVED == code
    assert case.events().count("save.committed") >= 2
    steps = [key.step for key in reversed(case.restarts.keys())][::-1]
    assert steps == sorted(set(steps))


def test_the_deadline_saves_in_time(case: Case, count: Path) -> None:
    level = case.level(GENERIC, save={"lead": "1s"})
    assert EXIT_SAVED == case.link(level, str(count), "100000", "1000", deadline_s=3.0)
    assert case.said().startswith("deadline:")
    assert time.time() < (case.rundir.deadline(case.generation) or 0.0)


def test_what_storing_took_moves_the_moment_and_the_limit_of_the_next_link(
    case: Case, count: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of many gigabytes: copied and digested after the program has written them."""
    commit = Staging.commit

    def slow(self: Staging, **how: Any) -> Restart:
        time.sleep(2.0)
        return commit(self, **how)

    monkeypatch.setattr(Staging, "commit", slow)
    again = f"echo {{seconds_left}} > told; exec {count} 1000000 1000"
    level = case.level(GENERIC, save={"lead": "1s"}, resume={"command": ["bash", "-c", again]})
    assert EXIT_SAVED == case.link(level, str(count), "1000000", "1000", notice_s=0.8)
    assert EXIT_SAVED == case.link(level, str(count), "1000000", "1000", deadline_s=14.0)
    assert float(case.said().split()[1]) >= 1 + 3.0
    assert int((case.cwd / "told").read_text()) <= 14 - 0.5 - 3.0
    assert time.time() < (case.rundir.deadline(case.generation) or 0.0)


OWN_CLOCK = """
import pathlib, sys, time
state = pathlib.Path("state.rst")
at = int(state.read_text()) if state.exists() else 0
limit = time.monotonic() + float(sys.argv[sys.argv.index("--limit") + 1])
while at < int(sys.argv[1]) and time.monotonic() < limit:
    at += 1
    time.sleep(0.1)
    state.write_text(str(at))
"""


@pytest.mark.parametrize("how", ["append", "command", "write"])
def test_a_program_that_ends_by_its_own_clock_is_not_done(case: Case, how: str) -> None:
    """With code 0, which its recipe takes for the end of the work."""
    (case.cwd / "limit.in").write_text("none")
    (case.cwd / "own.py").write_text(OWN_CLOCK)
    told = {
        "append": {"append": ["--limit {seconds_left}"]},
        "command": {"command": f"{sys.executable} own.py 40 --limit {{seconds_left}}"},
        "write": {
            "write": {"from": "limit.in", "to": "limit", "replace": {"none": "{seconds_left}"}},
            "command": f"{sys.executable} own.py 40 --limit $(cat limit)",
        },
    }[how]
    recipe = {
        "name": "own", "restart": "state.rst", "first": told, "resume": told,
        "save": {"lead": "2s"}, "complete": {"exit_code": 0},
    }  # fmt: skip
    argv = (sys.executable, "own.py", "40")
    assert EXIT_SAVED == case.link(case.level(recipe), *argv, deadline_s=6.0)
    assert 0 < int((case.cwd / "state.rst").read_text()) < 40
    assert EXIT_COMPLETE == case.link(case.level(recipe), *argv, deadline_s=60.0)
    assert 40 == int((case.cwd / "state.rst").read_text())


OWN_END = """
import pathlib, sys, time
state, begun = pathlib.Path("state.rst"), pathlib.Path("begun")
limit = time.monotonic() + float(sys.argv[sys.argv.index("--limit") + 1])
at = int(state.read_text()) if state.exists() else 0
with begun.open("a") as stream:
    stream.write(f"{at} ")
while at < int(sys.argv[1]) and time.monotonic() < limit:
    at += 1
    time.sleep(0.1)
    if sys.argv[2] == "removed":
        state.write_text(str(at))
if at < int(sys.argv[1]):
    state.write_text(str(at))
elif sys.argv[2] == "removed":
    state.unlink()
"""


@pytest.mark.parametrize(
    ("how", "is_cut"), [("removed", False), ("when cut", False), ("when cut", True)]
)
def test_a_program_that_leaves_nothing_to_go_on_from_was_not_cut_by_its_clock(
    case: Case, how: str, is_cut: bool
) -> None:
    """It removes its restart file at the end, or writes one only when it is cut; and comes to its
    end in the second half of the time that it was told."""
    (case.cwd / "own.py").write_text(OWN_END)
    told = {"append": ["--limit {seconds_left}"]}
    recipe = {
        "name": "own", "restart": "state.rst", "first": told, "resume": told,
        "save": {"lead": "1s"}, "complete": {"exit_code": 0},
    }  # fmt: skip
    done = 0
    if is_cut:
        argv = (sys.executable, "own.py", "400", how)
        assert EXIT_SAVED == case.link(case.level(recipe), *argv, deadline_s=5.0)
        done = int((case.cwd / "state.rst").read_text())
    argv = (sys.executable, "own.py", str(done + 45), how)
    assert EXIT_COMPLETE == case.link(case.level(recipe), *argv, deadline_s=8.0), case.said()
    assert str(done) == (case.cwd / "begun").read_text().split()[-1]


def test_a_program_that_stops_at_a_share_of_its_limit_is_not_done(case: Case) -> None:
    """It was told that much more, so that its time is used."""
    (case.cwd / "own.py").write_text(
        OWN_CLOCK.replace('index("--limit") + 1])', 'index("--limit") + 1]) * 0.4')
    )
    told = {"append": ["--limit {seconds_left}"]}
    recipe = {
        "name": "own", "restart": "state.rst", "first": told, "resume": told,
        "save": {"lead": "1s", "limit_share": 0.4}, "complete": {"exit_code": 0},
    }  # fmt: skip
    argv = (sys.executable, "own.py", "400")
    assert EXIT_SAVED == case.link(case.level(recipe), *argv, deadline_s=6.0)


def test_storage_that_does_not_answer_fails_no_program_that_was_told_no_time(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in place then tells nothing of its end."""
    level = opened(case, complete={"exit_code": 0})

    def away(_: object) -> None:
        raise OSError(errno.ESTALE, "away")

    monkeypatch.setattr(collecting, "stamp", away)
    (case.cwd / "a.rst").write_text("x")
    assert level.is_complete(case.work("sleep", "60"), 0) is None
    assert level.is_complete(case.work("sleep", "60"), 1) is False


def test_a_restart_file_whose_name_is_not_known_may_be_there(case: Case) -> None:
    """So that code 0 tells nothing."""
    level = case.level(
        {
            "name": "own", "values": {"out": {"option": "-o"}}, "restart": "{out}.rst",
            "complete": {"exit_code": 0},
        }
    )  # fmt: skip
    level._open(case.work("sleep", "1"))
    assert level._collector.may_have_left({})
    level._open(case.work("sleep", "1", "-o", "state"))
    assert not level._collector.may_have_left({})


def test_whoever_removes_the_restarts_begins_anew(case: Case) -> None:
    """As the steward advises, with the program's files of the work before still in place."""
    recipe = {
        "name": "own", "restart": "state", "complete": {"file": "never"},
        "resume": {"append": ["--from {restart}"]},
    }  # fmt: skip
    argv = ("bash", "-c", 'echo "$*" >> seen; echo 1 > state', "own")
    for _ in range(2):
        assert EXIT_SAVED == case.link(case.level(recipe), *argv)
    shutil.rmtree(case.rundir.restarts)
    for _ in range(2):
        assert EXIT_SAVED == case.link(case.level(recipe), *argv)
    seen = (case.cwd / "seen").read_text().splitlines()
    assert ["", "--from state", "", "--from state"] == [line.strip() for line in seen]


def test_a_program_that_cannot_be_run_on_a_node_has_no_bad_files(case: Case) -> None:
    """Its restarts are not passed over one by one, and the level is not given up."""
    recipe = {"name": "t", "restart": "r", "complete": {"file": "out"}}
    level = case.level(recipe)
    assert EXIT_SAVED == case.link(level, "bash", "-c", "echo 1 > r")
    assert EXIT_FAILED == case.link(level, "bash", "-c", "no-such-program")
    assert "cannot be run on this node" in case.said()
    assert EXIT_COMPLETE == case.link(level, "bash", "-c", "cp r out")


def test_whole_commands_for_the_first_and_for_later_links(case: Case) -> None:
    script = (
        "import sys; open('seen','a').write(' '.join(sys.argv[1:])+';'); open('r','w').write('7')"
    )
    recipe = {
        "name": "own",
        "restart": "r",
        "first": {"command": [sys.executable, "-c", script, "begin"]},
        "resume": {"command": f'{sys.executable} -c "{script}" go {{restart}}'},
        "complete": {"file": "never"},
    }
    for _ in range(2):
        assert EXIT_SAVED == case.link(case.level(recipe), "ignored")
        time.sleep(0.01)
    assert "begin;go r;" == (case.cwd / "seen").read_text()


@pytest.mark.parametrize("name", ["state 1.dat", "state 1;touch PWNED;.dat", "it's $(touch PWNED)"])
def test_the_name_of_a_file_is_no_command(case: Case, name: str) -> None:
    """Nor several words, in a command that is a text for bash."""
    (case.cwd / "state").write_text("7")
    recipe = {
        "name": "own",
        "restart": "*[.)]*",
        "first": {"command": ["cp", "state", name]},
        "resume": {"command": "cat {restart} > out"},
        "complete": {"file": "out"},
    }
    assert EXIT_SAVED == case.link(case.level(recipe), "ignored")
    assert EXIT_COMPLETE == case.link(case.level(recipe), "ignored"), case.said()
    assert "7" == (case.cwd / "out").read_text()
    assert not (case.cwd / "PWNED").exists()


def test_a_chain_by_the_command_line_survives_a_kill(count: Path, tmp_path: Path) -> None:
    """`hpc-ckpt run` with the recipe in the spec; program and steward are killed once."""
    from molecules import kill

    place = tmp_path / "here"
    place.mkdir()
    spec = {
        "command": [str(count), "4000", "1000"],
        "root": "run",
        "recipe": GENERIC,
        "chain": {"link_time": "30s", "max_links": "5"},
        "checkpoint": {"policy": "every 1s"},
    }
    (place / "spec.yaml").write_text(json.dumps(spec))
    store = Restarts(RunDir(place / "run"))

    def strike() -> None:
        end = time.monotonic() + 30
        while time.monotonic() < end and not store.keys():
            time.sleep(0.05)
        kill(place, "count", "4000")

    striking = threading.Thread(target=strike)
    striking.start()
    command = [sys.executable, "-m", "hpc_ckpt.cli", "run", "spec.yaml"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True)
    striking.join()
    assert 0 == done.returncode, done.stdout + done.stderr
    assert re.search(r"\bkilled\b", done.stdout)
    expected = uninterrupted(count, tmp_path / "whole", 4000)
    assert expected == (place / "result.dat").read_text()


# ── completion ────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("test", "script", "complete"),
    [
        ({"file": "out"}, "touch x", False),
        ({"file": "out"}, "echo 1 > out", True),
        ({"file": "out"}, "echo 1 > out; exit 3", False),
        ({"step": {"file": "stale", "regex": r"(\d+)"}, "target": 5}, "true", False),
        ({"step": {"file": "stale", "regex": r"(\d+)"}, "target": 5}, "echo 5 >> stale", True),
        ({"step": {"command": "cat stale", "regex": r"(\d+)"}, "target": 5}, "true", False),
        ({"step": {"command": "cat stale", "regex": r"(\d+)"}, "target": 5}, "echo >> stale", True),
        ({"step": {"count": "s*e"}, "target": 1}, "true", False),
        ({"file": "out", "exit_code": 0}, "echo 1 > out; exit 3", False),
        ({"file": "stale"}, "true", False),
        ({"file": "stale"}, "echo more >> stale", True),
        ({"file": "out"}, ": > out", False),
        ({"text": "^DONE", "in": "log"}, "echo DONE > log", True),
        ({"text": "^DONE", "in": "log"}, "echo NOT DONE > log", False),
        ({"text": "DONE", "no_text": "LIMIT", "in": "log"}, "echo LIMIT DONE > log", False),
        ({"text": "DONE", "in": "stale"}, "true", False),
        ({"step": LOG_STEP, "target": 20}, "echo step 9 step 20 > log", True),
        ({"step": LOG_STEP, "target": 20}, "echo step 20 step 9 > log", False),
        ({"step": LOG_STEP, "target": 20}, "true", False),
        ({"step": LOG_TIME, "target": "0.5"}, "echo TIME = 0.25 > log", False),
        ({"step": LOG_TIME, "target": "0.5"}, "echo TIME = 0.500 > log", True),
        ({"step": LOG_TIME, "target": "20.5"}, "echo TIME = 20 > log", False),
        ({"step": {"command": "cat log", "regex": r"= (\d+)"},
          "target": {"file": "stale", "regex": r"(\d+)"}}, "echo = 5 > log", True),
        ({"step": {"count": "r*"}, "target": 3}, "touch r1 r2 r3", True),
        ([{"file": "out"}, {"exit_code": 0}], "true", None),
    ],
)  # fmt: skip
def test_completion(case: Case, test: Any, script: str, complete: bool | None) -> None:
    """None: by the exit code alone."""
    (case.cwd / "stale").write_text("DONE 5\n")
    level = case.level({"name": "t", "restart": "none", "complete": test})
    work = case.work("bash", "-c", script)
    start = level.first(work)
    time.sleep(0.01)
    code = subprocess.run(start.argv, cwd=case.cwd).returncode
    assert complete is level.is_complete(work, code)


def test_a_result_that_was_there_before_the_chain_stays_old_in_later_links(case: Case) -> None:
    """Else the second link would take the leftovers of another run for its own end."""
    (case.cwd / "out").write_text("of last week")
    recipe = {"name": "t", "restart": "r", "complete": {"file": "out"}}
    write = ("bash", "-c", "date +%N > r; sleep 0.02")
    for _ in range(2):
        assert EXIT_SAVED == case.link(case.level(recipe), *write)
    assert EXIT_COMPLETE == case.link(case.level(recipe), "bash", "-c", "echo 1 > out")


def test_code_0_without_an_end_and_without_a_file_is_a_failure(case: Case) -> None:
    level = case.level({"name": "t", "restart": "r", "complete": {"file": "out"}})
    assert EXIT_FAILED == case.link(level, "true")
    assert "nothing was saved" in case.said()


def test_code_0_of_a_program_that_was_asked_to_stop_proves_nothing(case: Case) -> None:
    """It saves and leaves at 28 of 1000; what ends by itself with code 0 is complete."""
    recipe = {
        "name": "t",
        "restart": "r",
        "save": {"file": "STOP", "stops": "true", "lead": "5s"},
        "complete": {"exit_code": 0},
    }
    script = "while [ ! -e STOP ]; do sleep 0.05; done; echo 28 > r"
    code = case.link(case.level(recipe), "bash", "-c", script, notice_s=0.5)
    assert (EXIT_SAVED, "notice: test") == (code, case.said())
    assert EXIT_COMPLETE == case.link(case.level(recipe), "bash", "-c", "true")


LAMMPS_LOG = """LAMMPS (29 Sep 2021)
run 500 upto
Step Temp E_pair
     500  1.5 -4.7
Loop time of 1.0
run ${{n}} upto
run 200000 upto
Step Temp E_pair
     500  1.5 -4.7
a line of fix print
  {}  1.5 -4.7
{}Loop time of 5.0
Total wall time: 0:00:05
"""
LIMIT = "WARNING: Wall time limit reached (src/timer.cpp:238)\n"
WHOLE, SHORT = LAMMPS_LOG.format(200000, ""), LAMMPS_LOG.format(11000, "")
LIMITED = LAMMPS_LOG.format(11000, LIMIT)
HALT = "Fix halt condition for fix-id h met on step 11000 with value 2 (src/fix_halt.cpp:310)\n"
LONG = WHOLE.replace("a line", "     700  1.5 -4.7\n" * 70_000 + "a line")
NORMAL, ERROR = " Normal termination of Gaussian 16\n", " Error termination via Lnk1e\n"


@pytest.mark.parametrize(
    ("command", "log", "text", "code", "complete"),
    [
        ("lmp -in in.lj", "log.lammps", LIMITED, 0, False),
        ("lmp -var n 5 -in in.lj", "log.lammps", LIMITED, 0, False),
        ("lmp -in in.lj", "log.lammps", SHORT, 0, False),
        ("lmp -in in.lj", "log.lammps", WHOLE, 0, True),
        ("lmp -in in.lj", "log.lammps", WHOLE.replace("200000  ", "200100  "), 0, True),
        ("lmp -in in.lj", "log.lammps", WHOLE, 1, False),
        ("lmp -in in.lj", "log.lammps", WHOLE.partition("Total")[0], 0, False),
        ("lmp -in in.lj", "log.lammps", WHOLE.replace("Step Temp", "Atoms Temp"), 0, False),
        ("lmp -in in.lj", "log.lammps", LIMITED + WHOLE, 0, True),
        ("lmp -in in.lj", "log.lammps", WHOLE + LIMITED, 0, False),
        ("lmp -in in.lj", "log.lammps", LONG, 0, True),
        ("lmp -in in.lj", "log.lammps", LAMMPS_LOG.format(11000, HALT), 0, True),
        ("lmp -in in.lj", "log.lammps", HALT + SHORT, 0, False),
        ("lmp -in in.lj", "log.lammps", HALT + WHOLE, 0, True),
        ("lmp -in in.log", "prod.log", WHOLE, 0, True),
        ("lmp -in in.log -log x", "prod.log", WHOLE, 0, True),
        ("lmp -in in.log", "equil.log", WHOLE, 0, False),
        ("g16 mol.com", "mol.log", NORMAL + ERROR, 1, False),
        ("g16 mol.com", "mol.log", NORMAL + ERROR, 0, False),
        ("g16 mol.com", "mol.log", NORMAL, 0, True),
    ],
)
def test_the_end_by_the_logs_of_programs(
    case: Case, command: str, log: str, text: str, code: int, complete: bool
) -> None:
    (case.cwd / "in.lj").write_text("restart 9 ck.a ck.b\nrun 500 upto\nrun 200000 upto\n")
    (case.cwd / "in.log").write_text("log equil.log\nrestart 9 ck.a ck.b\nlog prod.log # here\n")
    (case.cwd / "mol.com").write_text("%chk=mol\n# opt\n")
    level = Application(recipe_of("lammps" if "lmp" in command else "gaussian", SHIPPED, case.cwd))
    work = case.work(*command.split())
    level.first(work)
    (case.cwd / log).write_text(text)
    assert complete is level.is_complete(work, code)


NAMD = "WRITING COORDINATES TO {} FILE AT STEP {}\n"


@pytest.mark.parametrize(
    ("text", "code", "complete"),
    [
        (NAMD.format("OUTPUT", 1000) + "[Partition 0][Node 0] End of program\n", 0, True),
        (NAMD.format("OUTPUT", 500) + "[Partition 0][Node 0] End of program\n", 0, False),
        (NAMD.format("RESTART", 1000), 0, False),
        ("FATAL ERROR: ...\n[Partition 0][Node 0] End of program\n", 1, False),
    ],
)
def test_namd_is_complete_by_its_steps(
    case: Case, text: str, code: int, complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the link's own log, where the last lines come a moment later."""
    monkeypatch.setattr("hpc_ckpt.levels.evidence.LOG_S", 0.6)
    (case.cwd / "run.namd").write_text("outputName sim\n")
    level = Application(recipe_of("namd", SHIPPED, case.cwd))
    work = replace(case.work("namd3", "run.namd"), log=case.cwd / "link.log")
    assert "numsteps N" in (level.probe(work) or "")
    (case.cwd / "run.namd").write_text("outputName sim\nnumsteps 1000\n")
    assert None is level.probe(work)
    (case.cwd / "link.log").write_text("Info: NAMD\n")
    level.first(work)
    late = threading.Timer(0.1, (case.cwd / "link.log").write_text, [text])
    late.start()
    assert complete is level.is_complete(work, code)
    late.join()


# ── nothing of the user's is written over ─────────────────────────────────────────────────
def gone_on(case: Case, name: str, *argv: str) -> tuple[str, ...]:
    """The command of a later link by a shipped recipe, from what the first has left."""
    work = case.work(*argv)
    level = Application(recipe_of(name, SHIPPED, case.cwd))
    into = case.cwd.parent / f"into{time.monotonic_ns()}"
    into.mkdir()
    level._open(work)
    facts = level._collector.collect(into).facts()
    return level.resume(work, into, facts).argv


def test_amber_keeps_the_outputs_of_each_link(case: Case) -> None:
    (case.cwd / "mdin").write_text("total 1000 ps\n &cntrl irest=0, ntx=1 /\n")
    for link in ("first", "second"):
        for name in ("mdout", "prod.nc", "restrt"):
            (case.cwd / name).write_text(link * 20)
        argv = gone_on(case, "amber", "pmemd", "-i", "mdin", "-x", "prod.nc")
        assert {"-O", "mdin.link", "restrt.from"} <= set(argv)
    kept = [(case.cwd / f"{name}.{n}").read_text() for name in ("mdout", "prod.nc") for n in (1, 2)]
    assert ["first" * 20, "second" * 20] * 2 == kept


@pytest.mark.parametrize(("reached", "complete"), [("0.100", False), ("0.500", True)])
def test_amber_is_complete_at_a_fraction_of_a_picosecond(
    case: Case, reached: str, complete: bool
) -> None:
    (case.cwd / "mdin").write_text("total 0.5 ps\n &cntrl irest=0, ntx=1 /\n")
    level = Application(recipe_of("amber", SHIPPED, case.cwd))
    work = case.work("pmemd", "-i", "mdin")
    level.first(work)
    (case.cwd / "mdout").write_text(f" NSTEP = 50   TIME(PS) = {reached}  TEMP(K) = 300.00\n")
    assert complete is level.is_complete(work, 0)


def test_vasp_keeps_the_users_structure(case: Case) -> None:
    (case.cwd / "POSCAR").write_text("mine")
    for link in ("first", "second"):
        (case.cwd / "CONTCAR").write_text(link * 20)
        (case.cwd / "OUTCAR").write_text(link)
        gone_on(case, "vasp", "vasp_std")
        assert link * 20 == (case.cwd / "POSCAR").read_text()
    assert "mine" == (case.cwd / "POSCAR.first").read_text()
    assert "second" == (case.cwd / "OUTCAR.2").read_text()


def test_vasp_keeps_the_structure_of_each_chain(case: Case) -> None:
    """In one directory; the copy of the first is not that of the second."""
    for chain in ("one", "two", "three"):
        (case.cwd / "POSCAR").write_text(chain)
        for link in ("first", "second"):
            (case.cwd / "CONTCAR").write_text(f"{chain} {link} " * 20)
            gone_on(case, "vasp", "vasp_std")
        shutil.rmtree(case.rundir.restarts)
    found = {path.name: path.read_text() for path in case.cwd.glob("POSCAR.*")}
    assert {"POSCAR.first": "three", "POSCAR.first.1": "one", "POSCAR.first.2": "two"} == found


def test_gaussian_steps_that_a_restart_would_lose_are_refused(case: Case) -> None:
    (case.cwd / "mol.com").write_text("%chk=mol\n# opt\n\n--Link1--\n%chk=mol\n# freq\n")
    level = Application(recipe_of("gaussian", SHIPPED, case.cwd))
    assert "does not show {chk}" in (level.probe(case.work("g16", "mol.com")) or "")


# ── files in every bad state ──────────────────────────────────────────────────────────────
def opened(case: Case, **change: Any) -> Application:
    recipe = {"name": "t", "restart": "*.rst", "complete": {"file": "out"}, **change}
    level = case.level(recipe)
    level.first(case.work("sleep", "60"))
    return level


@pytest.mark.parametrize("regex", ["step", "(s)t(e)p"])
def test_a_number_that_cannot_be_read_is_not_known_and_ends_no_program(
    case: Case, regex: str
) -> None:
    (case.cwd / "a.rst").write_text("step 5")
    level = opened(case)
    assert None is level._evidence.number(Number(file="a.rst", regex=regex))
    assert None is level._evidence.number(Number(name=regex), case.cwd / "step")


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("ck/{epoch}.keras", "7.keras"),
        ("ck/resnet50_{epoch:03d}.keras", "resnet50_007.keras"),
        ("ck/v2+{epoch:02d}-{val_loss:.2f}.weights.h5", "v2+07-0.25.weights.h5"),
        ("ck/m_{val_loss:.2f}_{epoch:02d}.keras", "m_0.25_07.keras"),
    ],
)
def test_an_epoch_of_keras_is_read_where_the_pattern_has_it(
    case: Case, pattern: str, name: str
) -> None:
    (case.cwd / "train.py").write_text(f'keras.ModelCheckpoint("{pattern}"); load_model(x)\n')
    recipe = recipe_of("keras", SHIPPED, case.cwd)
    level = Application(recipe)
    level.first(case.work("python", "train.py"))
    assert recipe.progress is not None
    assert 7 == level._evidence.number(recipe.progress, case.cwd / name)


def collect(level: Application, into: Path) -> list[str]:
    into.mkdir()
    found = level._collector.collect(into)
    return [str(record["path"]) for record in found.files]


def put(path: Path, text: str, at: float) -> None:
    path.write_text(text)
    os.utime(path, (at, at))


def test_only_what_is_new_is_collected(case: Case, tmp_path: Path) -> None:
    put(case.cwd / "old.rst", "of last week", 1000)
    level = opened(case)
    with pytest.raises(NothingNew, match="no newer"):
        collect(level, tmp_path / "1")
    put(case.cwd / "a.rst", "1", 2000)
    put(case.cwd / "b.rst", "2", 3000)
    assert ["b.rst"] == collect(level, tmp_path / "2")
    with pytest.raises(NothingNew):  # a.rst is older than what was taken
        collect(level, tmp_path / "3")
    put(case.cwd / "a.rst", "3", 4000)
    assert ["a.rst"] == collect(level, tmp_path / "4")
    assert ["3"] == [path.read_text() for path in (tmp_path / "4").rglob("*.rst")]


def test_a_file_that_is_none_gives_way_to_the_one_before(case: Case, tmp_path: Path) -> None:
    level = opened(case, sane={"begins": "MAGIC", "ends": "END", "min_size": 12})
    put(case.cwd / "a.rst", "MAGIC ok ok END", 2000)
    put(case.cwd / "b.rst", "MAGIC half of", 3000)
    assert ["a.rst"] == collect(level, tmp_path / "1")
    assert ["a.rst"] == [path.name for path in (tmp_path / "1").rglob("*.rst")]
    put(case.cwd / "a.rst", "MAGIC END", 4000)
    with pytest.raises(NothingNew, match=r"fewer than|does not end"):
        collect(level, tmp_path / "2")


def test_a_command_may_judge_a_file(case: Case, tmp_path: Path) -> None:
    level = opened(case, sane={"command": ["grep", "-q", "good", "{restart}"]})
    put(case.cwd / "a.rst", "good", 2000)
    put(case.cwd / "b.rst", "bad", 3000)
    assert ["a.rst"] == collect(level, tmp_path / "1")


CANNOT_BE_ASKED = [["no-such-program", "{restart}"], ["sh", "-c", "exit 127"], ["sleep", "9"]]


@pytest.mark.parametrize("command", CANNOT_BE_ASKED, ids=" ".join)
def test_a_command_that_cannot_judge_says_nothing_against_a_file(
    case: Case,
    tmp_path: Path,
    command: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is saved; and left in place, where an earlier link was killed before that."""
    monkeypatch.setattr(evidence, "COMMAND_S", 0.3)
    level = opened(case, sane={"command": command})
    put(case.cwd / "a.rst", "good", 2000)
    assert ["a.rst"] == collect(level, tmp_path / "1")
    assert "taken unseen" in caplog.text
    assert "a.rst" == level._collector.left_since(Beginning("x", case.work()))
    assert ["a.rst"] == sorted(path.name for path in case.cwd.glob("*.rst*"))


def superblock(version: int, size: int) -> bytes:
    """Of HDF5, as far as it is looked at."""
    at = {0: 40, 1: 44}.get(version, 28)
    head = b"\x89HDF\r\n\x1a\n" + bytes([version])
    return head + bytes(at - 9) + size.to_bytes(8, "little") + bytes(100)


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_the_test_of_keras_needs_nothing_of_the_programs_environment(
    case: Case, version: int
) -> None:
    """Which only the command's own shell may know."""
    sane = next(recipe for recipe in SHIPPED if recipe.name == "keras").sane
    assert sane is not None
    level = case.level({"name": "t", "restart": "*.h5", "complete": {"file": "out"}})
    level.first(case.work("no-such-python", "train.py"))
    whole, cut, zipped = (case.cwd / name for name in ("whole.h5", "cut.h5", "a.keras"))
    data = superblock(version, 1000)
    whole.write_bytes(data.ljust(1000))
    cut.write_bytes(data.ljust(999))
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("model.weights.h5", "0123456789" * 100)
    assert level._evidence.is_whole(sane, whole)
    assert level._evidence.is_whole(sane, zipped)
    zipped.write_bytes(zipped.read_bytes()[:-1])
    for path in (cut, zipped):
        assert "finds it wrong" in (level._evidence.insane(sane, path) or "")


def test_what_is_not_known_to_be_whole_is_no_newer_than_what_was_saved(
    case: Case, tmp_path: Path
) -> None:
    """The one that was saved is; the other is kept beside it."""
    level = opened(case, sane={"command": ["no-such-program", "{restart}"]})
    put(case.cwd / "a.rst", "good", 2000)
    facts = level._collector.collect(tmp_path / "1").facts()
    put(case.cwd / "b.rst", "half", 3000)
    assert level._collector.newer_than(facts) is None


@pytest.mark.parametrize("pick", ["newest", "all"])
def test_a_file_that_changes_while_it_is_copied_is_not_kept(
    case: Case, tmp_path: Path, pick: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again: a file that holds still later is taken as it is then."""
    level = opened(case, restart={"files": "*.rst", "pick": pick})
    (case.cwd / "a.rst").write_text("0")
    unsteady = 3
    real = collecting.copy_in

    def copy(source: Path, target: Path) -> None:
        nonlocal unsteady
        real(source, target)
        if unsteady:
            unsteady -= 1
            source.write_text(source.read_text() + "0")

    monkeypatch.setattr(collecting, "copy_in", copy)
    monkeypatch.setattr(collecting, "AGAIN_AFTER_S", 0.01)
    assert ["a.rst"] == collect(level, tmp_path / "1")
    assert ["0000"] == [path.read_text() for path in (tmp_path / "1").rglob("*.rst")]
    unsteady = 10**6
    (case.cwd / "a.rst").write_text("1")
    with pytest.raises(NothingNew, match="while"):
        collect(level, tmp_path / "2")
    assert [] == list((tmp_path / "2").rglob("*.rst"))


def test_files_that_belong_together_stay_together(case: Case) -> None:
    recipe = {
        "name": "t",
        "restart": {"files": ["x.coor", "x.vel"], "pick": "all"},
        "also": ["x.log", {"files": "x.big", "at_most": "10"}],
        "complete": {"file": "out"},
    }
    script = "for f in coor vel log; do date +%N > x.$f; done; seq 100 > x.big"
    assert EXIT_SAVED == case.link(case.level(recipe), "bash", "-c", script)
    (key,) = case.restarts.keys()
    files = sorted(p.name for p in case.restarts.path_of(key).glob("files/*/*"))
    assert ["x.coor", "x.log", "x.vel"] == files
    saved = {name: (case.cwd / name).read_text() for name in files}
    (case.cwd / "x.vel").write_text("torn")
    (case.cwd / "x.coor").unlink()
    (case.cwd / "x.log").write_text("a much longer log, which the program cuts back by itself")
    case.link(case.level(recipe), "bash", "-c", "cat x.coor x.vel > seen; false")
    assert saved["x.coor"] + saved["x.vel"] == (case.cwd / "seen").read_text()
    assert "a much longer" in (case.cwd / "x.log").read_text()


def test_newer_files_that_are_not_whole_are_moved_away(case: Case) -> None:
    """A program that takes the newest file it finds must find the one that was saved."""
    recipe = {
        "name": "t",
        "restart": {"files": "e*.rst", "aside": "true"},
        "sane": {"ends": "END"},
        "complete": {"file": "out"},
    }
    assert EXIT_SAVED == case.link(case.level(recipe), "bash", "-c", "printf 1END > e5.rst")
    time.sleep(0.01)
    (case.cwd / "e6.rst").write_text("2E")
    case.link(case.level(recipe), "bash", "-c", "ls e*.rst > seen; false")
    assert "e5.rst\n" == (case.cwd / "seen").read_text()
    assert (case.cwd / "e6.rst.aside").exists()


def test_what_a_killed_link_left_half_is_moved_away_though_nothing_was_saved(case: Case) -> None:
    recipe = {
        "name": "t",
        "restart": {"files": "e*.rst", "aside": "true"},
        "sane": {"ends": "END"},
        "complete": {"file": "out"},
    }
    case.level(recipe).first(case.work("true"))  # killed: no more is known of it
    (case.cwd / "e5.rst").write_text("1END")
    time.sleep(0.01)
    (case.cwd / "e6.rst").write_text("2E")
    case.link(case.level(recipe), "true")
    assert ["e5.rst", "e6.rst.aside"] == sorted(p.name for p in case.cwd.glob("e*"))


def test_of_files_that_belong_together_the_first_pattern_names_the_one_that_is_tested(
    case: Case,
) -> None:
    recipe = {
        "name": "t",
        "restart": {"files": ["z.xml", "*.dat"], "pick": "all"},
        "sane": {"ends": "END"},
        "complete": {"file": "out"},
    }
    case.link(case.level(recipe), "bash", "-c", "printf 1END > a.dat; printf 1E > z.xml")
    assert [] == case.restarts.keys()
    case.link(case.level(recipe), "bash", "-c", "printf 2 > a.dat; printf 2END > z.xml")
    assert 1 == len(case.restarts.keys())


def test_a_file_that_the_program_did_not_go_on_from_is_not_saved(case: Case) -> None:
    """It was left by a killed link: what nobody can tell is half may be just that."""
    recipe = {"name": "t", "restart": "e.rst", "complete": {"file": "out"}}
    work = case.work("bash", "-c", "exit 3")
    case.level(recipe).first(work)
    (case.cwd / "e.rst").write_text("ha")
    assert EXIT_FAILED == case.link(case.level(recipe), *work.argv)
    assert [] == case.restarts.keys()


def test_the_steps_that_are_left_are_told(case: Case) -> None:
    """For a program that counts anew in each link."""
    recipe = {
        "name": "t",
        "values": {"all": {"option": "--steps"}},
        "restart": "e.rst",
        "progress": {"file": "e.rst", "regex": r"(\d+)", "total": "{all}"},
        "resume": {"set": ["--steps {steps_left}"]},
        "complete": {"file": "out"},
    }
    for step, left in (("70", "30"), ("100", "1")):
        (case.cwd / "e.rst").write_text(step)
        facts = {"restart": "e.rst", "files": []}
        work = case.work("x", "--steps", "100")
        assert ("x", "--steps", left) == case.level(recipe).resume(work, case.cwd, facts).argv


GMX = """#!/bin/bash
case $2 in -cp) echo "step = $(cat $3)";; -s) cat $3;; esac
"""


@pytest.mark.parametrize(
    ("begins", "step", "left", "complete"),
    [
        ("= 0", 1500, "500", False),
        ("= 0", 2000, "1", True),
        ("= 1000", 2500, "500", False),
        ("= 1000", 3000, "1", True),
    ],
)
def test_steps_for_mdrun_count_from_the_first_step_of_its_input(
    case: Case, begins: str, step: int, left: str, complete: bool
) -> None:
    """`-nsteps 2000` of an input that begins at 1000 ends at 3000, and not at 2000."""
    gmx = case.cwd / "gmx"
    gmx.write_text(GMX)
    gmx.chmod(0o755)
    (case.cwd / "prod.tpr").write_text(f"   nsteps    = 50\n   init-step    {begins}\n")
    (case.cwd / "prod.cpt").write_text(str(step))
    work = case.work(str(gmx), "mdrun", "-deffnm", "prod", "-nsteps", "2000")
    level = Application(recipe_of("gromacs", SHIPPED, case.cwd))
    assert None is level.probe(work)
    start = level.resume(work, case.cwd, {"restart": "prod.cpt", "files": []})
    expected = (*work.argv[:-1], left, "-cpi", "prod.cpt")
    assert (expected, complete) == (start.argv, level.is_complete(work, 0))


@pytest.mark.parametrize(
    ("tpr", "cpt", "said"),
    [
        ("   init-step    unknown\n", "1500", "prod.tpr' cannot be run here, or does not say"),
        ("   init-step    = 0\n", "torn", "nothing shows the step of prod.cpt"),
    ],
)
def test_a_link_that_cannot_be_told_how_many_steps_are_left_is_not_started(
    case: Case, tpr: str, cpt: str, said: str
) -> None:
    """It would do all the steps of the work once more, and be called complete."""
    gmx = case.cwd / "gmx"
    gmx.write_text(GMX)
    gmx.chmod(0o755)
    (case.cwd / "prod.tpr").write_text(tpr)
    (case.cwd / "prod.cpt").write_text(cpt)
    level = Application(recipe_of("gromacs", SHIPPED, case.cwd))
    facts = {"restart": "prod.cpt", "files": []}
    work = case.work(str(gmx), "mdrun", "-deffnm", "prod", "-nsteps", "2000")
    with pytest.raises(ResumeFailed, match=re.escape(said)):
        level.resume(work, case.cwd, facts)
    work = case.work(str(gmx), "mdrun", "-deffnm", "prod")
    assert (*work.argv, "-cpi", "prod.cpt") == level.resume(work, case.cwd, facts).argv


@pytest.mark.parametrize(
    ("command", "files", "refused"),
    [
        ("{gmx} mdrun -deffnm prod -nsteps 9", {"prod.tpr": "   init-step    = 0\n"}, False),
        ("{gmx} mdrun -deffnm prod -nsteps 9", {"prod.tpr": "torn"}, True),
        ("{gmx} grompp -o prod.tpr; {gmx} mdrun -deffnm prod -nsteps 9", {}, False),
        ("PATH=x gmx mdrun -deffnm prod -nsteps 9", {"prod.tpr": "   init-step    = 0\n"}, True),
        ("PATH=x gmx mdrun -deffnm prod", {}, False),
    ],
)
def test_a_number_of_steps_is_taken_where_the_node_can_tell_what_is_left_of_it(
    case: Case, command: str, files: dict[str, str], refused: bool
) -> None:
    """One that only the command's own shell knows tells nobody; at submission no one asks."""
    gmx = case.cwd / "gmx"
    gmx.write_text(GMX)
    gmx.chmod(0o755)
    for name, text in files.items():
        (case.cwd / name).write_text(text)
    level = Application(recipe_of("gromacs", SHIPPED, case.cwd))
    here = replace(case.work("bash", "-c", command.format(gmx=gmx)), environ={"PATH": "/bin"})
    assert None is level.probe(here)
    there = replace(here, environ={**here.environ, ENV_DEADLINE: "/run/control/deadline-1"})
    said = level.probe(there)
    assert said is None if not refused else "gmx convert-tpr" in (said or "")


@pytest.mark.parametrize(
    ("progress", "said"),
    [("STEP_START_VAL 70\n", None), ("no step\n", "nothing shows the step of e.rst")],
)
def test_the_steps_in_a_changed_input_are_those_that_are_left_or_no_link_is_started(
    case: Case, progress: str, said: str | None
) -> None:
    recipe = {
        "name": "t",
        "values": {"all": {"file": "in", "regex": r"STEPS (\d+)"}},
        "restart": "e.rst",
        "progress": {"file": "{restart}", "regex": r"STEP_START_VAL (\d+)", "total": "{all}"},
        "resume": {"write": {"from": "in", "to": "in.link",
                             "replace": {r"STEPS \d+": "STEPS {steps_left}"}}},
        "complete": {"file": "out"},
    }  # fmt: skip
    (case.cwd / "in").write_text("STEPS 100\n")
    (case.cwd / "e.rst").write_text(progress)
    level, facts = case.level(recipe), {"restart": "e.rst", "files": []}
    if said is None:
        level.resume(case.work("x"), case.cwd, facts)
        assert "STEPS 30\n" == (case.cwd / "in.link").read_text()
        return
    with pytest.raises(ResumeFailed, match=said):
        level.resume(case.work("x"), case.cwd, facts)
    assert not (case.cwd / "in.link").exists()
    (case.cwd / "in").write_text("no end\n")
    level.resume(case.work("x"), case.cwd, facts)
    assert "no end\n" == (case.cwd / "in.link").read_text()


def test_a_program_that_has_not_done_its_first_step_does_all_of_them(case: Case) -> None:
    """pw.x writes its count with the first step; a relaxation has none."""
    (case.cwd / "a.in").write_text("&control\n nstep = 9\n/\n")
    work = case.work("pw.x", "-in", "a.in")
    level = Application(recipe_of("quantum-espresso", SHIPPED, case.cwd))
    level.resume(work, case.cwd, {"restart": "x", "files": []})
    text = (case.cwd / "a.in.link").read_text()
    assert "restart_mode" in text
    assert 1 == text.count("nstep")


def test_a_script_is_asked_by_its_own_name(case: Case) -> None:
    """Its process is called as the interpreter; what it runs must not hear the signal."""
    script = case.cwd / "flow"
    script.write_text(
        f"#!{sys.executable}\nimport signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: open('e.rst', 'w').write('1'))\n"
        "open('up', 'w').close()\n"
        "sys.exit(subprocess.run(['sleep', '2']).returncode)\n"
    )
    script.chmod(0o755)
    recipe = {
        "name": "t",
        "recognise": {"programs": ["flow"]},
        "restart": "e.rst",
        "save": {"signal": "TERM", "stops": "true", "lead": "5s"},
        "complete": {"file": "out"},
    }
    case.link(case.level(recipe), "bash", "-c", "./flow; echo $? > code", notice_at="up")
    assert "0\n" == (case.cwd / "code").read_text()
    assert "1" == (case.cwd / "e.rst").read_text()


SRUN = """#!/bin/bash
# As srun: what it starts is no child of it, and TERM to itself kills what it has started.
trap 'touch srun-was-told; kill -9 "$task"; exit 143' TERM
mkfifo pause; exec 3<>pause
setsid -f bash -c 'echo $$ > task; exec "$0" "$@"' "$@"
until [ -s task ]; do read -rt 0.05 -u 3; done
read -r task < task
while kill -0 "$task" 2>/dev/null; do read -rt 0.05 -u 3; done
"""
TASK = f"""#!{sys.executable}
import signal, sys, time
def save(*_):
    open('e.rst', 'w').write('1')
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open('ready', 'w').write('1')
time.sleep(60)
"""
BY_TERM = {
    "name": "t",
    "recognise": {"programs": ["flow"]},
    "restart": "e.rst",
    "save": {"signal": "TERM", "stops": "true", "lead": "6s"},
    "complete": {"file": "out"},
}


def behind_srun(case: Case, monkeypatch: pytest.MonkeyPatch, jobs: tuple[str, str]) -> float:
    """How long a notice took; the jobs of the steward and of the task."""
    for name, text in (("srun", SRUN), ("flow", TASK)):
        (case.cwd / name).write_text(text)
        (case.cwd / name).chmod(0o755)
    monkeypatch.setenv("SLURM_JOB_ID", jobs[0])
    case.link(
        case.level(BY_TERM), "./srun", "env", f"SLURM_JOB_ID={jobs[1]}", "./flow", notice_at="ready"
    )
    ended = next(r["time"] for r in case.records() if r["event"] == "ended")
    return float(ended) - next(r["time"] for r in case.records() if r["event"] == "stopping")


def test_a_task_of_srun_is_asked_itself_and_srun_is_not(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no descendant of srun, which turns TERM into KILL."""
    assert behind_srun(case, monkeypatch, ("47", "47")) < 5.9
    assert not (case.cwd / "srun-was-told").exists()
    assert 1 == len(case.restarts.keys())


def test_a_task_of_srun_that_nobody_here_can_ask_is_waited_for_no_longer_than_its_lead(
    case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On other nodes; and a task of another job on this one is not ours to signal."""
    assert 5.9 <= behind_srun(case, monkeypatch, ("47", "48")) < 20
    task = int((case.cwd / "task").read_text())
    os.kill(task, signal.SIGKILL)
    assert not (case.cwd / "srun-was-told").exists()
    assert not (case.cwd / "e.rst").exists()
    assert "no SIGTERM reaches the program" in caplog.text


def test_what_is_not_copied_is_only_noted(case: Case) -> None:
    recipe = {
        "name": "t",
        "restart": {"files": "meta/*", "pick": "all", "copy": "false"},
        "progress": {"count": "meta/*"},
        "complete": {"file": "out"},
    }
    assert EXIT_SAVED == case.link(case.level(recipe), "bash", "-c", "mkdir meta; touch meta/{1,2}")
    (key,) = case.restarts.keys()
    assert 2 == key.step
    assert [] == list(case.restarts.path_of(key).glob("files/*"))


def test_an_input_file_is_changed_in_a_copy(case: Case) -> None:
    (case.cwd / "in").write_text("&control\n mode='begin'\n/\n")
    edit = {
        "swap": {"input": "{input}.link"},
        "write": {
            "from": "{input}",
            "to": "{input}.link",
            "replace": {"mode='begin'": "mode='{restart}'", "&control": "&CONTROL {hours_left}"},
        },
    }
    recipe = {
        "name": "t",
        "values": {"input": {"option": "<"}},
        "restart": "r",
        "resume": edit,
        "complete": {"file": "out"},
    }
    command = ("bash", "-c", "cat < in > seen; date +%N > r")
    for _ in range(2):
        case.link(case.level(recipe), *command)
        time.sleep(0.01)
    # The end of the link is not known: what needs it stays as it was.
    assert "&control\n mode='r'\n/\n" == (case.cwd / "seen").read_text()
    assert "begin" in (case.cwd / "in").read_text()


@pytest.mark.parametrize(
    ("text", "test", "taken"),
    [
        ("2 END", {"ends": "END"}, "new.rst"),
        ("2 EN", {"ends": "END"}, "a.rst"),
        ("2 END", {"min_size": 1}, "a.rst"),  # would not find a file that was cut off
    ],
)
def test_a_newer_file_in_place_is_taken_only_if_it_is_surely_whole(
    case: Case, text: str, test: dict[str, Any], taken: str
) -> None:
    recipe = {
        "name": "t",
        "restart": "*.rst",
        "sane": test,
        "resume": {"append": ["{restart}"]},
        "complete": {"file": "out"},
    }
    assert EXIT_SAVED == case.link(case.level(recipe), "bash", "-c", "printf '1 END' > a.rst")
    time.sleep(0.01)
    (case.cwd / "new.rst").write_text(text)
    case.link(case.level(recipe), "bash", "-c", "false")
    command = case.level(recipe)
    found = next(case.restarts.newest("t", lambda *_: None))
    start = command.resume(case.work("program"), found.path, found.facts)
    assert ("program", taken) == start.argv


@pytest.mark.parametrize("saved", ["a", "ab"])
def test_a_newer_file_that_the_program_refuses_costs_no_restart(case: Case, saved: str) -> None:
    """It is not tried twice, and says nothing against the newest that was saved."""
    recipe = {
        "name": "t",
        "restart": "*.rst",
        "sane": {"ends": "END"},
        "resume": {"append": ["{restart}"]},
        "complete": {"file": "out"},
    }
    script = case.cwd / "program"
    script.write_text("echo $1 >> tried\ngrep -q good $1 || exit 9\necho 1 > out\n")
    for name in saved:
        write = f"printf 'good END' > {name}.rst"
        assert EXIT_SAVED == case.link(case.level(recipe), "bash", "-c", write)
        time.sleep(0.01)
    (case.cwd / "new.rst").write_text("bad END")
    assert EXIT_COMPLETE == case.link(case.level(recipe), "bash", "program")
    assert ["new.rst", f"{saved[-1]}.rst"] == (case.cwd / "tried").read_text().split()
    (told,) = (record for record in case.records() if record["event"] == "restored")
    newest = case.restarts.keys()[-1].directory_name
    assert (newest, []) == (told["checkpoint"], told["skipped"])


@pytest.mark.parametrize("pick", ["newest", "all"])
def test_a_full_disk_is_a_failed_save(
    case: Case, tmp_path: Path, pick: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = opened(case, restart={"files": "*.rst", "pick": pick})
    (case.cwd / "a.rst").write_text("1")

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr(collecting, "copy_in", full)
    with pytest.raises(SaveFailed, match="No space left"):
        collect(level, tmp_path / "1")


@pytest.mark.parametrize(
    ("restart", "needed"),
    [
        ({"files": "*.rst"}, (400, 2)),
        ({"files": "*.rst", "pick": "all"}, (600, 3)),
        ({"files": "*.rst", "pick": "all", "copy": "false"}, (100, 1)),
    ],
)
def test_a_copy_that_would_take_the_last_space_is_not_begun(
    case: Case,
    tmp_path: Path,
    restart: dict[str, Any],
    needed: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program writes there too, and would end; the level is not to blame."""
    level = opened(case, restart=restart, also=["x.log", {"files": "x.big", "at_most": "500"}])
    for name, size in (("a.rst", 200), ("b.rst", 300), ("x.log", 100), ("x.big", 501)):
        (case.cwd / name).write_text("." * size)
    asked = []

    def full(place: Path, size: int, files: int) -> str:
        asked.append((place, size, files))
        return "no space for them"

    with monkeypatch.context() as patch:
        patch.setattr(collecting, "check_storage", full)
        with pytest.raises(NoRoom, match="no space"):
            collect(level, tmp_path / "1")
    size, files = needed
    assert [(tmp_path / "1", int(collecting.ROOM * size), files)] == asked
    assert [] == list((tmp_path / "1").iterdir())
    assert collect(level, tmp_path / "2")


def test_want_of_space_is_no_silence_of_a_program_that_was_asked(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its level would be given up for it."""
    level = opened(case, save={"signal": "USR1", "lead": "0.1s"})
    program = Program(["sleep", "60"], case.cwd, os.environ)
    try:
        (case.cwd / "a.rst").write_text("1")
        level._asked = level._collector.stamps()
        monkeypatch.setattr(collecting, "check_storage", lambda *_: "no space for them")
        with pytest.raises(NoRoom, match="no space"):
            level.wait(program, tmp_path, Moment(until=time.monotonic() + 30))
    finally:
        program.end()


LEFT: dict[str, Any] = {
    "name": "t",
    "restart": "*.rst",
    "sane": {"ends": "END"},
    "resume": {"append": ["--from {restart}"]},
    "complete": {"file": "out"},
}


def test_what_a_link_left_before_any_save_is_gone_on_from(case: Case, tmp_path: Path) -> None:
    """To begin anew would write over the only copy."""
    put(case.cwd / "old.rst", "of another run END", 1000)
    (case.cwd / "out").write_text("of another run")
    work = case.work("program")
    assert ("program",) == case.level(LEFT).first(work).argv
    assert ("program",) == case.level(LEFT).first(work).argv  # nothing but what was there before
    put(case.cwd / "a.rst", "1 END", 2000)
    put(case.cwd / "b.rst", "2 E", 3000)
    level = case.level(LEFT)
    assert ("program", "--from", "a.rst") == level.first(work).argv
    assert ["a.rst"] == collect(level, tmp_path / "1")
    assert not level.is_complete(work, 0)  # out is still the old one


def test_what_the_program_never_takes_is_not_tried_for_ever(case: Case) -> None:
    work = case.work("program")
    case.level(LEFT).first(work)
    put(case.cwd / "a.rst", "1 END", 2000)
    tried = [len(case.level(LEFT).first(work).argv) for _ in range(collecting.TRIES + 1)]
    assert [3] * collecting.TRIES + [1] == tried


def test_files_of_two_moments_are_not_gone_on_from_without_a_save(case: Case) -> None:
    recipe = {**LEFT, "restart": {"files": "*.rst", "pick": "all"}}
    work = case.work("program")
    case.level(recipe).first(work)
    put(case.cwd / "a.rst", "1 END", 2000)
    put(case.cwd / "b.rst", "1 END", 3000)
    assert ("program",) == case.level(recipe).first(work).argv


# ── requests ──────────────────────────────────────────────────────────────────────────────
def test_a_file_asks_and_is_taken_away(case: Case) -> None:
    recipe = {
        "name": "t",
        "restart": "r",
        "save": {"file": "STOP", "text": "NOW", "stops": "true", "lead": "5s"},
        "complete": {"file": "out"},
    }
    (case.cwd / "STOP").write_text("left by somebody")
    script = "while [ ! -e STOP ]; do sleep 0.05; done; cat STOP > r; exit 1"
    assert EXIT_SAVED == case.link(
        case.level(recipe), "bash", "-c", script, notice_s=0.5, interval_s=0.2
    )
    assert "NOW\n" == (case.cwd / "r").read_text()
    assert not (case.cwd / "STOP").exists()
    assert 1 == case.events().count("save.committed")  # asked only when the link ended


def test_a_command_asks(case: Case) -> None:
    recipe = {
        "name": "t",
        "restart": "r",
        "save": {"command": ["bash", "-c", "echo $1 > r", "-", "{pid}"], "lead": "3s"},
        "complete": {"file": "out"},
    }
    assert EXIT_SAVED == case.link(case.level(recipe), "sleep", "60", notice_s=0.4)
    assert int((case.cwd / "r").read_text()) > 1


def test_a_program_that_does_not_answer_is_a_failed_save(case: Case) -> None:
    level = opened(case, save={"signal": "USR1", "lead": "0.3s"})
    script = "trap '' USR1; touch ready; while :; do sleep 0.1; done"
    program = Program(["bash", "-c", script], case.cwd, os.environ)
    try:
        while not (case.cwd / "ready").exists():
            time.sleep(0.01)
        moment = Moment(until=time.monotonic() + 30)
        into = case.cwd / "into"
        into.mkdir()
        level.ask(program, into, moment)
        with pytest.raises(SaveFailed, match="wrote none in time"):
            level.wait(program, into, moment)
    finally:
        program.end()


def test_a_program_that_refuses_its_file_gets_the_one_before(case: Case) -> None:
    """What no test of the recipe finds: the program itself ends at once."""
    recipe = {"name": "t", "restart": "r", "complete": {"file": "out"}}
    for text in ("good", "bad"):
        case.link(case.level(recipe), "bash", "-c", f"echo {text} > r")
        time.sleep(0.01)
    code = case.link(case.level(recipe), "bash", "-c", "grep -q good r || exit 9; echo 1 > out")
    assert EXIT_COMPLETE == code
    assert Result.COMPLETE is getattr(case.rundir.outcome(case.generation), "outcome", None)


SOLVER = """
[ -e licence ] || exit 1
step=$(sed -n 's/step //p' state 2>/dev/null || true)
echo "step $((step + 1))
end" > state
[ "$step" != 3 ] || echo 1 > out
"""
SOLVES: dict[str, Any] = {
    "name": "solver",
    "restart": "state",
    "progress": {"file": "{restart}", "regex": r"step (\d+)"},
    "complete": {"file": "out"},
    "sane": {"ends": r"end\n"},
}


@pytest.mark.parametrize("others", [(), (Plain(),)], ids=["named", "chosen"])
@pytest.mark.parametrize("unsaved", [False, True])
def test_a_licence_that_is_away_at_the_first_resume_costs_a_link_and_nothing_else(
    case: Case, others: tuple[Level, ...], unsaved: bool
) -> None:
    """The level is kept, the newest files lie in place, and the next link goes on from them."""
    (case.cwd / "licence").touch()
    solver = ("bash", "-c", SOLVER)
    for seconds in (1, 2):
        step = f"printf 'step {seconds}\nend\n' > state; touch -d @{seconds} state"
        assert EXIT_SAVED == case.link(case.level(SOLVES), "bash", "-c", step, others=others)
    if unsaved:
        (case.cwd / "state").write_text("step 3\nend\n")
    before = (case.cwd / "state").read_text()
    (case.cwd / "licence").unlink()
    for _ in range(2):
        assert EXIT_FAILED == case.link(case.level(SOLVES), *solver, others=others)
        assert "resume the chain" in case.said()
        assert "started_fresh" not in case.events()
        assert before == (case.cwd / "state").read_text()
    assert "failed" not in json.loads(case.rundir.levels_file.read_text())
    (case.cwd / "licence").touch()
    code = case.link(case.level(SOLVES), *solver, others=others)
    assert (EXIT_COMPLETE if unsaved else EXIT_SAVED) == code
    assert f"step {4 if unsaved else 3}\nend\n" == (case.cwd / "state").read_text()


def test_a_recipe_that_knows_only_the_exit_code_completes_nothing_once_asked_to_end(
    case: Case,
) -> None:
    """R, Octave, Keras: nobody asks them, but Slurm may signal them like every other process."""
    recipe = {"name": "own", "recognise": {"programs": ["python*"]}, "restart": "state"}
    level = case.level({**recipe, "complete": {"exit_code": 0}})
    code = "import time; open('state', 'w').write('7'); time.sleep(1.5)"
    told = case.link(level, sys.executable, "-c", code, notice_s=0.1)
    assert (EXIT_SAVED, None) == (told, case.rundir.done())
    assert EXIT_COMPLETE == case.link(level, sys.executable, "-c", code)
    outcome = case.rundir.outcome(case.generation)
    assert outcome is not None and outcome.by_code
