"""Programs whose own step goes down: what was written last is gone on from, and is progress."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path
from typing import cast

import pytest
from molecules import kill, require, thermo
from recipe_chains import chain
from test_application import Case
from test_steward import Copying

from hpc_ckpt import lease
from hpc_ckpt.events import EventLog
from hpc_ckpt.levels.base import Moment, Saved
from hpc_ckpt.levels.moments import Moments
from hpc_ckpt.levels.program import Program
from hpc_ckpt.levels.record import Trials
from hpc_ckpt.levels.restarts import Restart, Restarts
from hpc_ckpt.levels.saving import Saves
from hpc_ckpt.making import prepare
from hpc_ckpt.rundir import CheckpointKey, RunDir

NO_PROGRAM = cast(Program, None)


class Counting(Copying):
    """Each save is at the step it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.at_step: int | None = 0

    def wait(self, program: Program, into: Path, moment: Moment) -> Saved:
        (into / "state").write_text(str(self.at_step))
        return Saved(step=self.at_step)


class Links:
    """Saves of one link after the other."""

    def __init__(self, place: Path) -> None:
        self.rundir = RunDir(place / "run")
        prepare(self.rundir)
        self.restarts = Restarts(self.rundir)
        self.level = Counting()

    def link(self, *steps: int | None, since: Restart | None = None) -> list[int]:
        """The steps of the keys that the program's own make."""
        held = lease.acquire_standalone(self.rundir)
        held.release()
        place, generation = self.rundir, held.generation
        log = EventLog(place.events_file(generation, "here"))
        trials = Trials(place, generation, log)
        moments = Moments(place, generation, 600.0, None)
        saves = Saves(self.restarts, lease.Lease(place, generation), log, trials, moments, 2)
        saves.look()
        saves.goes_on_from(since)
        made = [self._save(saves, step).key.step for step in steps]
        log.close()
        return made

    def _save(self, saves: Saves, step: int | None) -> Restart:
        self.level.at_step = step
        made = saves.make(self.level, NO_PROGRAM, "test", last=False)
        assert made is not None
        return made

    def newest(self) -> Restart:
        return next(self.restarts.newest(self.level.name, lambda *_: None))


@pytest.fixture
def links(tmp_path: Path) -> Links:
    return Links(tmp_path)


def test_what_was_saved_last_is_the_newest_whatever_its_step(links: Links) -> None:
    """Equilibration to 17000, reset_timestep, production."""
    assert [17000, 17001, 18001, 35001] == links.link(17000, 0, 1000, 18000)
    assert "18000" == (links.newest().path / "state").read_text()
    assert [1000, 18000] == [told["step"] for told in links.restarts.told()]


def test_the_next_link_counts_on_from_what_it_went_on_from(links: Links) -> None:
    """Or the guard would see no progress in a chain that gets on."""
    links.link(17000, 0, 5000)
    assert [25001, 25001, 25002] == links.link(8000, 8000, 10, since=links.newest())


def test_a_link_that_may_have_begun_anew_is_no_progress(links: Links) -> None:
    links.link(17000)
    assert [1000, 16000] == links.link(1000, 16000, since=links.newest())
    assert "16000" == (links.newest().path / "state").read_text()


def test_a_step_that_is_not_known_is_one_more(links: Links) -> None:
    assert [10, 11, 21, 22] == links.link(10, None, 20, 5)


def test_the_same_step_again_is_newer_and_no_progress(links: Links) -> None:
    assert [10, 10] == links.link(10, 10)
    assert 1 == links.newest().key.revision


def test_what_was_just_committed_is_not_removed(links: Links) -> None:
    links.link(10, 20, 30)
    with links.restarts.stage(1) as staging:
        (staging.path / "state").write_text("5")
        made = staging.commit(
            level=links.level.name, step=5, reason="", facts={}, guard=lambda: None
        )
    assert made.key not in links.restarts.retain(2, links.level.name, made.key)
    assert CheckpointKey(1, 5) == min(links.restarts.keys())


def test_files_that_were_touched_are_not_taken_for_newer_work(tmp_path: Path) -> None:
    """Against a purge, or by a copy without times: an older step would be gone on from."""
    case = Case(tmp_path)
    recipe = {
        "name": "t",
        "restart": "*.rst",
        "sane": {"ends": "END"},
        "resume": {"append": ["{restart}"]},
        "progress": {"file": "{restart}", "regex": r"step (\d+)"},
        "complete": {"file": "out"},
    }
    write = "printf 'step 100 END' > b.rst; sleep 0.1; printf 'step 17000 END' > a.rst"
    case.link(case.level(recipe), "bash", "-c", write)
    later = time.time() + 1
    for name in ("a.rst", "b.rst"):
        os.utime(case.cwd / name, (later, later))
        later += 1
    found = next(case.restarts.newest("t", lambda *_: None))
    start = case.level(recipe).resume(case.work("program"), found.path, found.facts)
    assert ("program", "a.rst") == start.argv


# ── a real program ────────────────────────────────────────────────────────────────────────
TWO_PARTS = """variable mode index start
units lj
atom_style atomic
if "${mode} == start" then &
  "lattice fcc 0.8442" "region box block 0 5 0 5 0 5" "create_box 1 box" "create_atoms 1 box" &
  "mass 1 1.0" "velocity all create 1.44 87287" &
else "read_restart ${restart}"
pair_style lj/cut 2.5
pair_coeff 1 1 1.0 1.0 2.5
fix 1 all nve
thermo 500
thermo_modify flush yes
if "${mode} == start" then "run 15000" "reset_timestep 0"
restart 500 ck.a ck.b
run 9000 upto
write_restart ck.last
"""


@pytest.mark.parametrize("killed_in", ["equilibration", "run proper"])
def test_lammps_goes_on_from_the_run_proper_and_from_no_half_of_the_equilibration(
    tmp_path: Path, killed_in: str
) -> None:
    """What was killed before the run proper is done again, in full."""
    require("lmp")
    (tmp_path / "in.lj").write_text(TWO_PARTS)
    proper = killed_in == "run proper"

    def strike() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end and not _is_at_2000(tmp_path / "log.lammps", proper=proper):
            time.sleep(0.05)
        kill(tmp_path, "lmp", "in.lj")

    striking = threading.Thread(target=strike)
    striking.start()
    often = {"policy": "every 300ms"}
    status = chain(tmp_path, "lmp -in in.lj", "lammps", "60s", checkpoint=often)
    striking.join()
    assert "complete" == status["state"]
    log = (tmp_path / "log.lammps").read_text()
    assert proper is ("reset_timestep 0\n" not in log)
    if proper:
        assert "reset_timestep" in (tmp_path / "log.lammps.1").read_text()
        assert 0 < min(thermo(log)) < 8000
    else:
        assert 15000 == max(thermo(log.partition("reset_timestep 0\n")[0]))


def _is_at_2000(log: Path, *, proper: bool) -> bool:
    """The equilibration, or the run proper, has come to that step."""
    text = log.read_text(errors="replace") if log.exists() else ""
    text = text.partition("reset_timestep 0\n")[2] if proper else text
    return re.search(r"^ +2000 ", text, re.MULTILINE) is not None
