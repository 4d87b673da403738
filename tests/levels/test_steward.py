"""The steward with a level made for tests: a counter in a file that the level copies."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt import events, fsio, lease
from hpc_ckpt.chain.verdict import judge
from hpc_ckpt.errors import EXIT_COMPLETE, EXIT_FAILED, EXIT_SAVED
from hpc_ckpt.events import EventLog
from hpc_ckpt.levels import ending, stewardship
from hpc_ckpt.levels.base import (
    Kind,
    Moment,
    NoRoom,
    NothingNew,
    NotNow,
    ResumeFailed,
    Saved,
    SaveFailed,
    Start,
    Work,
)
from hpc_ckpt.levels.plain import Plain
from hpc_ckpt.levels.program import Program
from hpc_ckpt.levels.restarts import Restarts, Staging, copy_in, put_back
from hpc_ckpt.levels.stewardship import Steward
from hpc_ckpt.making import prepare
from hpc_ckpt.policy.interval import EveryTime
from hpc_ckpt.rundir import Result, RunDir
from hpc_ckpt.settings import Settings

COUNT = """
import sys, time
from pathlib import Path
state, most = Path("state"), int(sys.argv[1])
n = int(state.read_text()) if state.exists() else 0
while n < most:
    n += 1
    new = Path("state.new"); new.write_text(str(n)); new.rename(state)
    with open("counted", "a") as stream:
        stream.write(".")
    time.sleep(0.02)
"""


class Copying:
    """Saves by copying the program's file `state`."""

    kind = Kind.APPLICATION
    lead_s = 0.2

    def __init__(self, name: str = "copying", *, saves: bool = True, resumes: bool = True) -> None:
        self.name = name
        self.saves = saves
        self.resumes = resumes
        self.refuses: str | None = None
        self.storage_says: OSError | None = None
        self.save_fails: str | None = None
        self.no_room: str | None = None
        self.dies_for_want_of_space = False
        self.saves_after_end = True
        self.closed = 0

    def probe(self, work: Work) -> str | None:
        return self.refuses

    def first(self, work: Work) -> Start:
        return Start(argv=work.argv, cwd=work.cwd, environ=work.environ)

    def resume(self, work: Work, restart: Path, facts: Mapping[str, Any]) -> Start:
        if self.storage_says is not None:
            raise ResumeFailed("cannot be put back") from self.storage_says
        if not self.resumes:
            raise ResumeFailed("broken on purpose")
        put_back(restart / "state", work.cwd / "state")
        return self.first(work)

    def resumed(self, program: Program, until: float) -> None:
        return

    def ask(self, program: Program, into: Path, moment: Moment) -> None:
        if self.no_room is not None:
            raise NoRoom(self.no_room)
        if self.dies_for_want_of_space:
            program.end()
            raise SaveFailed("it died") from OSError(errno.ENOSPC, "No space left on device")
        if self.save_fails is not None:
            raise SaveFailed(self.save_fails)
        if not self.saves:
            program.end()
            raise SaveFailed("broken on purpose")

    def wait(self, program: Program, into: Path, moment: Moment) -> Saved:
        if program.poll() is not None and not self.saves_after_end:
            raise NothingNew("it has ended")
        copy_in(self._cwd / "state", into / "state")
        return Saved(step=int((into / "state").read_text()))

    def at(self, cwd: Path) -> "Copying":
        self._cwd = cwd
        return self

    def is_complete(self, work: Work, code: int) -> bool | None:
        return None

    def own_failure(self, code: int) -> str | None:
        return "it could not be launched" if code == 99 else None

    def close(self) -> None:
        self.closed += 1


class Case:
    """A run directory and the links of a chain in it."""

    def __init__(self, place: Path) -> None:
        self.rundir = RunDir(place / "run")
        prepare(self.rundir)
        self.cwd = place / "work"
        self.cwd.mkdir()
        self.script = place / "count.py"
        self.script.write_text(COUNT)

    def link(
        self, *levels: Any, argv: tuple[str, ...] = ("100000",), interval_s: float = 600.0
    ) -> Steward:
        held = lease.acquire_standalone(self.rundir)
        self.generation = held.generation
        held.release()
        words = argv if len(argv) > 1 else (sys.executable, str(self.script), *argv)
        work = Work(argv=words, cwd=self.cwd, environ=dict(os.environ))
        return Steward(
            self.rundir,
            self.generation,
            work,
            levels,
            Settings(policy=EveryTime(interval_s)),
            EventLog(self.rundir.events_file(self.generation, "here")),
        )

    def notice_after(self, seconds: float) -> None:
        """For what is waited for by the level itself."""
        generation = self.generation
        threading.Timer(seconds, lambda: self.rundir.give_notice(generation, "test")).start()

    def when(self, ready: Callable[[], bool], act: Callable[[], object]) -> None:
        """However long the program takes to get there."""

        def wait() -> None:
            until = time.monotonic() + 120
            while not ready() and time.monotonic() < until:
                time.sleep(0.02)
            act()

        threading.Thread(target=wait, daemon=True).start()

    def notice_when(self, ready: Callable[[], bool]) -> None:
        generation = self.generation
        self.when(ready, lambda: self.rundir.give_notice(generation, "test"))

    def notice_soon(self) -> None:
        """Once the program of this link has counted ten times."""
        before = self._counted()
        self.notice_when(lambda: self._counted() >= before + 10)

    def _counted(self) -> int:
        path = self.cwd / "counted"
        return path.stat().st_size if path.exists() else 0

    def commits(self) -> int:
        return self.names().count("save.committed")

    def names(self) -> list[str]:
        path = self.rundir.events_file(self.generation, "here")
        return [record["event"] for record in events.read(path)]

    def result(self) -> Result:
        outcome = self.rundir.outcome(self.generation)
        assert outcome is not None
        return outcome.outcome

    @property
    def restarts(self) -> Restarts:
        return Restarts(self.rundir)


@pytest.fixture(autouse=True)
def _any_command(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link is given another command here, in place of a program that does something else then."""
    if "another_command" not in request.node.name:
        monkeypatch.setattr(Restarts, "of_another", lambda *_: None)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_a_notice_saves_and_the_next_link_goes_on(case: Case) -> None:
    level = Copying().at(case.cwd)
    link = case.link(level)
    case.notice_soon()
    assert EXIT_SAVED == link.run()
    assert Result.SAVED is case.result()
    (key,) = case.restarts.keys()
    assert key.step > 5
    (case.cwd / "state").write_text("1")  # what the program left is not what counts
    link = case.link(level, argv=(str(key.step + 3),))
    assert EXIT_COMPLETE == link.run()
    assert "restored" in case.names()
    assert Result.COMPLETE is case.result()
    assert str(key.step + 3) == (case.cwd / "state").read_text()
    assert 2 == level.closed


def test_the_deadline_saves(case: Case) -> None:
    link = case.link(Copying().at(case.cwd))
    case.rundir.write_deadline(case.generation, time.time() + 2.0)
    assert EXIT_SAVED == link.run()
    outcome = case.rundir.outcome(case.generation)
    assert outcome is not None
    assert outcome.reason.startswith("deadline:")
    assert time.time() < (case.rundir.deadline(case.generation) or 0.0)


def test_saves_come_at_the_policys_interval_and_few_are_kept(case: Case) -> None:
    link = case.link(Copying().at(case.cwd), interval_s=0.3)
    case.notice_when(lambda: case.commits() >= 5)
    assert EXIT_SAVED == link.run()
    assert 3 == len(case.restarts.keys())
    assert "removed" in case.names()


def test_a_damaged_restart_falls_back_to_the_one_before(case: Case) -> None:
    level = Copying().at(case.cwd)
    for _ in range(2):
        link = case.link(level)
        case.notice_soon()
        link.run()
    older, newer = case.restarts.keys()
    shard = case.restarts.path_of(newer) / "files" / "state"
    shard.write_text(shard.read_text() + "0")
    link = case.link(level, argv=(str(older.step + 2),))
    assert EXIT_COMPLETE == link.run()
    assert str(older.step + 2) == (case.cwd / "state").read_text()


def test_a_damaged_restart_is_not_one_of_those_that_are_kept(case: Case) -> None:
    """After a fallback the one before would be all that is left."""
    level = Copying().at(case.cwd)
    for _ in range(3):
        link = case.link(level)
        case.notice_soon()
        link.run()
    _, older, newer = case.restarts.keys()
    os.truncate(case.restarts.path_of(newer) / "files/state", 0)
    link = case.link(level)
    case.notice_soon()
    link.run()
    left = case.restarts.keys()
    assert older in left
    assert 3 == len([key for key in left if key != newer])


@pytest.mark.parametrize("what", ["truncate", "manifest", "missing", "extra"])
def test_every_damage_to_a_restart_is_found(case: Case, what: str) -> None:
    link = case.link(Copying().at(case.cwd))
    case.notice_soon()
    link.run()
    (key,) = case.restarts.keys()
    place = case.restarts.path_of(key)
    if what == "truncate":
        os.truncate(place / "files/state", 0)
    elif what == "manifest":
        path = place / "MANIFEST.json"
        path.write_text(path.read_text().replace("copying", "copyinG"))
    elif what == "missing":
        (place / "files/state").unlink()
    else:
        (place / "files/more").write_text("x")
    skipped: list[str] = []
    assert [] == list(case.restarts.newest("copying", lambda _key, why: skipped.append(why)))
    assert 1 == len(skipped)


def test_a_manifest_that_leaves_its_directory_is_refused(case: Case) -> None:
    from hpc_ckpt.levels import restarts as room

    place = case.rundir.restarts / "step-000000001-g00000001"
    (place / "files").mkdir(parents=True)
    record = {"name": "../../../etc/passwd", "size": 1, "digest": "0" * 32}
    manifest = {"format": 1, "level": "copying", "facts": {}, "files": [record]}
    fsio.write_atomic(place / "MANIFEST.json", room._seal(manifest))
    skipped: list[str] = []
    list(case.restarts.newest("copying", lambda _key, why: skipped.append(why)))
    assert "outside" in skipped[0]


def test_a_level_whose_first_save_kills_gives_way_to_the_next(case: Case) -> None:
    broken = Copying("broken", saves=False).at(case.cwd)
    good = Copying("good").at(case.cwd)
    link = case.link(broken, good)
    case.notice_soon()
    assert EXIT_SAVED == link.run()
    record = json.loads(case.rundir.levels_file.read_text())
    assert "broken" in record["failed"]
    link = case.link(broken, good, argv=("3",))
    assert EXIT_COMPLETE == link.run()
    chosen = json.loads(case.rundir.levels_file.read_text())["chosen"]
    assert {"1": "good", "2": "good"} == chosen


def test_why_the_first_save_failed_is_kept_to_the_end_of_the_link(case: Case) -> None:
    """That nothing was saved by then follows from it, and tells less."""
    level = Copying("broken").at(case.cwd)
    level.save_fails = "for a reason of its own"
    link = case.link(level, Plain(), interval_s=0.3)
    case.rundir.write_deadline(case.generation, time.time() + 2.0)
    assert EXIT_SAVED == link.run()
    record = json.loads(case.rundir.levels_file.read_text())
    assert "its first save failed: for a reason of its own" == record["failed"]["broken"]


@pytest.mark.parametrize("saved_here", [True, False])
def test_a_link_whose_last_save_failed_says_why(case: Case, saved_here: bool) -> None:
    """Of a level that has saved before, nobody else does; a chain that then makes no progress has
    its cause in the ledger."""
    level = Copying("one").at(case.cwd)
    link = case.link(level)
    case.notice_soon()
    assert EXIT_SAVED == link.run()
    link = case.link(level, interval_s=0.2 if saved_here else 600.0)

    def breaks() -> None:
        level.save_fails = "table: too large"
        case.rundir.give_notice(case.generation, "test")

    before = case._counted()
    case.when(lambda: case._counted() > before and (not saved_here or case.commits() > 0), breaks)
    assert EXIT_SAVED == link.run()
    outcome = case.rundir.outcome(case.generation)
    assert outcome is not None
    said = "the last save failed: " if saved_here else "nothing could be saved: "
    assert f"notice: test; {said}table: too large" == outcome.reason


class Silent(Copying):
    """Its program writes nothing for it to save."""

    says: type[NothingNew] = NothingNew

    def wait(self, program: Program, into: Path, moment: Moment) -> Saved:
        raise self.says("there is no restart file yet")


@pytest.mark.parametrize(("says", "whole", "failed"), [
    (NothingNew, False, [False, True]),
    (NothingNew, True, [True, True]),
    (NotNow, True, [False, False]),
])  # fmt: skip
def test_a_link_that_was_only_short_condemns_no_level(
    case: Case,
    says: type[NothingNew],
    whole: bool,
    failed: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the rest of one in which the command before was completed. Two of them do, and a long one;
    what passes by itself never does."""
    if whole:
        monkeypatch.setattr("hpc_ckpt.levels.record.WHOLE_S", 0.3)
    level = Silent("silent").at(case.cwd)
    level.says = says
    told = []
    for _ in failed:
        link = case.link(level, Plain())
        case.rundir.write_deadline(case.generation, time.time() + 2.0)
        assert EXIT_SAVED == link.run()
        told.append("silent" in json.loads(case.rundir.levels_file.read_text()).get("failed", {}))
    assert failed == told


def test_a_level_that_cannot_launch_gives_way_in_the_same_link(case: Case) -> None:
    argv = (sys.executable, "-c", "import os, sys; sys.exit(99 if not os.path.exists('x') else 0)")
    first = Copying("first").at(case.cwd)
    link = case.link(first, Plain(), argv=argv)
    assert EXIT_FAILED == link.run()  # plain takes the code for the program's own
    assert case.names().count("level.chosen") == 2
    assert "level.rejected" in case.names()


def test_a_level_whose_restarts_do_not_restart_gives_way(case: Case) -> None:
    level = Copying("once").at(case.cwd)
    level.kind = Kind.SYSTEM
    link = case.link(level)
    case.notice_soon()
    link.run()
    (case.cwd / "state").unlink()
    level.resumes = False
    link = case.link(level, Plain(), argv=("3",))
    assert EXIT_COMPLETE == link.run()
    assert "once" in json.loads(case.rundir.levels_file.read_text())["failed"]
    assert EXIT_COMPLETE == case.link(Plain(), argv=("3",)).run()  # its work is given up


def test_a_level_that_has_no_other_to_give_way_to_is_tried_again(case: Case) -> None:
    """One that the user has named: else nothing would ever run in this chain again."""
    level = Copying("named", saves=False).at(case.cwd)
    link = case.link(level)
    case.notice_soon()
    link.run()
    assert "named" in json.loads(case.rundir.levels_file.read_text())["failed"]
    level.saves = True
    link = case.link(level)
    case.notice_soon()
    assert EXIT_SAVED == link.run()
    assert 1 == len(case.restarts.keys())


def test_a_program_that_fails_is_a_failed_link(case: Case) -> None:
    link = case.link(Plain(), argv=(sys.executable, "-c", "raise SystemExit(3)"))
    assert EXIT_FAILED == link.run()
    assert Result.FAILED is case.result()


LEAVES_ON_TERM = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # as many scripts do
Path("state").write_text("7")
Path("pid.new").write_text(str(os.getpid())); Path("pid.new").rename("pid")
time.sleep(1000)
"""


@pytest.mark.parametrize("asked", ["notice", "halt"])
@pytest.mark.parametrize("saves", [True, False])
def test_code_0_of_a_program_that_was_asked_to_end_completes_nothing(
    case: Case, asked: str, saves: bool
) -> None:
    """Where Slurm signals every process of a step, the program hears it before the steward."""

    def end() -> None:
        pid = int((case.cwd / "pid").read_text())
        if asked == "notice":
            case.rundir.give_notice(case.generation, "shim TERM")
        else:
            case.rundir.write_halt("stop")
        os.kill(pid, signal.SIGTERM)

    level = Copying().at(case.cwd) if saves else Plain()
    link = case.link(level, argv=(sys.executable, "-c", LEAVES_ON_TERM))
    case.when((case.cwd / "pid").exists, end)
    assert EXIT_SAVED == link.run()
    assert case.rundir.done() is None
    outcome = case.rundir.outcome(case.generation)
    assert outcome is not None
    assert (Result.SAVED, f"{asked}:") == (outcome.outcome, outcome.reason.split()[0])
    assert saves is ("nothing could be saved" not in outcome.reason)
    kept = case.restarts.keys()
    assert ([7] if saves else []) == [key.step for key in kept]


def test_complete_by_code_alone_is_said_as_that_and_done_is_the_runners(case: Case) -> None:
    assert EXIT_COMPLETE == case.link(Plain(), argv=("3",)).run()
    outcome = case.rundir.outcome(case.generation)
    assert outcome is not None and outcome.by_code
    assert case.rundir.done() is None
    assert Result.COMPLETE is judge(case.rundir, case.generation, 0, None).result
    assert case.rundir.done() is not None


def test_what_is_overtaken_publishes_nothing(case: Case) -> None:
    link = case.link(Copying().at(case.cwd), interval_s=0.5)
    newer = lease.acquire_standalone(case.rundir)
    assert EXIT_SAVED == link.run()
    newer.release()
    assert [] == case.restarts.keys()
    assert case.rundir.outcome(case.generation) is None
    assert "fenced" in case.names()


def test_nothing_of_the_tree_outlives_the_link(case: Case) -> None:
    code = (
        "import subprocess, time; p = subprocess.Popen(['sleep', '1000'], start_new_session=True); "
        "open('pid', 'w').write(str(p.pid)); time.sleep(1000)"
    )
    link = case.link(Plain(), argv=(sys.executable, "-c", code))
    case.notice_when(lambda: (case.cwd / "pid").exists() and (case.cwd / "pid").read_text() != "")
    link.run()
    pid = int((case.cwd / "pid").read_text())
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_a_level_that_holds_the_work_and_says_no_here_fails_the_link(case: Case) -> None:
    """Any other would begin anew; on another node it may say yes."""
    owner, other = Copying("owner").at(case.cwd), Copying("other").at(case.cwd)
    link = case.link(owner, other)
    case.notice_soon()
    link.run()
    (key,) = case.restarts.keys()
    owner.refuses = "not installed on this node"
    assert EXIT_FAILED == case.link(owner, other).run()
    assert "started_fresh" not in case.names()
    assert [key] == case.restarts.keys()
    owner.refuses = None
    link = case.link(owner, other, argv=(str(key.step + 2),))
    assert EXIT_COMPLETE == link.run()
    assert "restored" in case.names()


def test_work_of_a_level_that_is_not_offered_is_not_begun_anew_over(case: Case) -> None:
    """No later link would find another level: the chain ends, and says what to do."""
    link = case.link(Copying("owner").at(case.cwd))
    case.notice_soon()
    link.run()
    before, state = case.restarts.keys(), (case.cwd / "state").read_text()
    assert EXIT_FAILED == case.link(Copying("other").at(case.cwd), Plain()).run()
    assert "started_fresh" not in case.names()
    outcome = case.rundir.outcome(case.generation)
    assert outcome is not None and outcome.reason == case.rundir.halted()
    for said in ("saved by owner", str(case.rundir.restarts), "other, plain", "by name", "module"):
        assert said in outcome.reason
    assert (before, state) == (case.restarts.keys(), (case.cwd / "state").read_text())


def test_the_level_that_holds_the_work_comes_before_those_above_it(case: Case) -> None:
    """One that said no on the first node and says yes on the second would begin anew."""
    above, owner = Copying("above").at(case.cwd), Copying("owner").at(case.cwd)
    above.refuses = "not installed on this node"
    link = case.link(above, owner)
    case.notice_soon()
    link.run()
    (key,) = case.restarts.keys()
    above.refuses = None
    link = case.link(above, owner, argv=(str(key.step + 2),))
    assert EXIT_COMPLETE == link.run()
    assert [key.directory_name] == restored(case)
    chosen = json.loads(case.rundir.levels_file.read_text())["chosen"]
    assert {"1": "owner", "2": "owner"} == chosen


def test_full_storage_at_a_restart_fails_the_link_and_condemns_no_level(case: Case) -> None:
    """The next level would begin anew, over the work; the next link finds space again."""
    owner, other = Copying("owner").at(case.cwd), Copying("other").at(case.cwd)
    link = case.link(owner, other)
    case.notice_soon()
    link.run()
    (key,) = case.restarts.keys()
    owner.storage_says = OSError(errno.ENOSPC, "No space left on device")
    assert EXIT_FAILED == case.link(owner, other).run()
    assert "started_fresh" not in case.names()
    owner.storage_says = None
    assert EXIT_COMPLETE == case.link(owner, other, argv=(str(key.step + 2),)).run()
    assert "restored" in case.names()
    record = case.rundir.levels_file
    assert not record.exists() or {} == json.loads(record.read_text()).get("failed", {})


@pytest.mark.parametrize(
    "name", ["ESHUTDOWN", "ENOTCONN", "EREMOTEIO", "ECOMM", "EINTR", "EAGAIN", "ESTALE"]
)
def test_storage_that_has_turned_a_node_away_condemns_no_restart(case: Case, name: str) -> None:
    """What Lustre or a mount by FUSE says then; another node, or a later link, gets on."""
    level = Copying("owner").at(case.cwd)
    level.kind = Kind.SYSTEM
    commit(case, level.name, 7)
    number = getattr(errno, name)
    level.storage_says = OSError(number, os.strerror(number))
    assert EXIT_FAILED == case.link(level, Plain(), argv=("3",)).run()
    assert "started_fresh" not in case.names()
    assert {} == json.loads(case.rundir.levels_file.read_text()).get("failed", {})
    level.storage_says = None
    assert EXIT_COMPLETE == case.link(level, Plain(), argv=("9",)).run()
    assert 1 == len(restored(case))


def commit(case: Case, level: str, step: int) -> None:
    with case.restarts.stage(1) as staging:
        (staging.path / "state").write_text(str(step))
        staging.commit(level=level, step=step, reason="", facts={}, guard=lambda: None)


def test_restarts_that_are_all_damaged_are_not_begun_anew_over(case: Case) -> None:
    level = Copying().at(case.cwd)
    level.kind = Kind.SYSTEM  # an application may still have files of its own in place
    link = case.link(level)
    case.notice_soon()
    link.run()
    (key,) = case.restarts.keys()
    os.truncate(case.restarts.path_of(key) / "files/state", 0)
    assert EXIT_FAILED == case.link(level).run()
    assert "started_fresh" not in case.names()
    outcome = case.rundir.outcome(case.generation)
    assert outcome is not None and "to begin anew" in outcome.reason


def test_a_link_that_saved_nothing_says_so_whatever_earlier_ones_saved(case: Case) -> None:
    level = Copying().at(case.cwd)
    link = case.link(level)
    case.notice_soon()
    link.run()
    (key,) = case.restarts.keys()
    level.save_fails = "on purpose"
    link = case.link(level)
    case.notice_soon()
    assert EXIT_SAVED == link.run()
    outcome = case.rundir.outcome(case.generation)
    assert outcome is not None
    said = ("notice: test; nothing could be saved: on purpose", key.step)
    assert said == (outcome.reason, outcome.step)


def test_a_disk_that_cannot_be_read_now_is_not_damage(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = Copying().at(case.cwd)
    link = case.link(level)
    case.notice_soon()
    link.run()
    before = case.restarts.keys()
    real = Path.read_bytes

    def failing(self: Path) -> bytes:
        if self.name == "MANIFEST.json":
            raise OSError(5, "Input/output error")
        return real(self)

    monkeypatch.setattr(Path, "read_bytes", failing)
    assert EXIT_FAILED == case.link(level).run()
    monkeypatch.undo()
    assert before == case.restarts.keys()
    outcome = case.rundir.outcome(case.generation)
    assert outcome is not None and "cannot be read now" in outcome.reason


def test_what_is_known_of_levels_is_not_written_over_while_it_cannot_be_read(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A level that was given up would be tried again, and one that has saved be given up."""
    known = {"failed": {"broken": "on purpose"}, "saved": {"copying": 1}}
    case.rundir.levels_file.write_text(json.dumps(known))
    real = Path.read_bytes

    def failing(self: Path) -> bytes:
        if self == case.rundir.levels_file:
            raise STALE
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", failing)
        assert EXIT_FAILED == case.link(Copying().at(case.cwd), Plain(), argv=("3",)).run()
    assert Result.FAILED is case.result()
    assert known == json.loads(case.rundir.levels_file.read_text())
    assert EXIT_COMPLETE == case.link(Copying().at(case.cwd), Plain(), argv=("3",)).run()


def test_manifests_that_storage_does_not_show_now_are_not_missing(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path.is_file() of Python 3.14 says that they are: the work would be begun anew."""
    for place in (case.rundir.restarts, case.rundir.checkpoints):
        (place / "step-000000001-g00000001").mkdir(parents=True)
        (place / "step-000000001-g00000001/MANIFEST.json").touch()
    real = os.stat

    def stat(path: Any, *args: Any, **more: Any) -> os.stat_result:
        if str(path).endswith("MANIFEST.json"):
            raise STALE
        return real(path, *args, **more)

    for look in (case.restarts.keys, case.rundir.all_keys, case.rundir.committed):
        assert look()
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", stat)
            patch.setattr(Path, "is_file", os.path.isfile)
            with pytest.raises(OSError, match="Stale"):
                look()


def test_restarts_of_another_command_are_neither_gone_on_from_nor_written_over(
    case: Case,
) -> None:
    """Its result would be the other one's. No later link would do better: the chain ends."""
    level = Copying().at(case.cwd)
    link = case.link(level)
    case.notice_soon()
    link.run()
    before, state = case.restarts.keys(), (case.cwd / "state").read_text()
    assert EXIT_FAILED == case.link(level, Plain(), argv=("beta", "5")).run()
    outcome = case.rundir.outcome(case.generation)
    assert outcome is not None
    for said in ("count.py 100000", "beta 5", "another root", str(case.rundir.restarts)):
        assert said in outcome.reason
    assert outcome.reason == case.rundir.halted()
    assert "started_fresh" not in case.names()
    assert (before, state) == (case.restarts.keys(), (case.cwd / "state").read_text())


def test_restarts_that_do_not_say_that_they_are_of_another_command_are_taken(case: Case) -> None:
    """Those of an older version."""
    commit(case, "copying", 7)
    assert EXIT_COMPLETE == case.link(Copying().at(case.cwd), argv=("9",)).run()
    assert "restored" in case.names()


# ── storage that does not answer for a moment ─────────────────────────────────────────────
STALE = OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_a_look_that_storage_does_not_answer_does_not_end_the_program(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = case.link(Copying().at(case.cwd))
    link._link_environ = dict(os.environ)  # as with `level: auto`
    real, looks = os.stat, []

    def stat(path: Any, *args: Any, **more: Any) -> os.stat_result:
        if str(path) == str(case.rundir.speaks_file) and (case.cwd / "state").is_file():
            looks.append(path)
            if len(looks) < 4:
                raise STALE
        return real(path, *args, **more)

    monkeypatch.setattr(os, "stat", stat)
    case.notice_when(lambda: len(looks) > 4)
    assert EXIT_SAVED == link.run()
    assert 1 == len(case.restarts.keys())


def test_restarts_that_cannot_be_listed_for_a_moment_do_not_end_the_program(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was there before is known, and what was committed since; a save comes later."""
    link = case.link(Copying().at(case.cwd), interval_s=0.3)
    real, looks = fsio.names_in, []

    def names_in(path: Any) -> list[str]:
        if str(path) == str(case.rundir.restarts) and (case.cwd / "state").exists():
            looks.append(path)
            if len(looks) in (2, 3):  # after one commit, and at the next
                raise STALE
        return real(path)

    monkeypatch.setattr(fsio, "names_in", names_in)
    case.notice_when(lambda: case.commits() > 1)
    assert EXIT_SAVED == link.run()
    assert "save.failed" in case.names()
    assert Result.SAVED is case.result()


@pytest.mark.parametrize("what", ["lease", "outcome"])
def test_complete_is_said_again_to_storage_that_does_not_answer(
    case: Case, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Or all that was done since the last save would be done again."""
    place, name = (lease.Lease, "check") if what == "lease" else (ending, "write_outcome")
    real, asked = getattr(place, name), []

    def once(*args: Any) -> None:
        asked.append(args)
        if len(asked) == 1:
            raise STALE
        real(*args)

    monkeypatch.setattr(place, name, once)
    monkeypatch.setattr(ending, "LOOK_EVERY_S", 0.01)
    assert EXIT_COMPLETE == case.link(Plain(), argv=("3",)).run()
    assert Result.COMPLETE is case.result()


# ── storage that is full ──────────────────────────────────────────────────────────────────
def test_a_link_without_space_for_any_save_condemns_no_level(case: Case) -> None:
    """It is told, and tried again: the next link finds space."""
    level = Copying().at(case.cwd)
    level.no_room = "the quota is used up"
    link = case.link(level, Plain(), interval_s=0.3)
    case.rundir.write_deadline(case.generation, time.time() + 2.0)
    assert EXIT_SAVED == link.run()
    assert case.names().count("save.failed") > 1
    outcome = case.rundir.outcome(case.generation)
    assert outcome is not None and "the quota is used up" in outcome.reason
    assert "failed" not in json.loads(case.rundir.levels_file.read_text())
    level.no_room = None
    link = case.link(level, Plain())
    case.notice_soon()
    assert EXIT_SAVED == link.run()
    assert 1 == len(case.restarts.keys())


def test_a_last_save_that_the_disk_does_not_take_condemns_no_level(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program is ended by then, as at every end of a link."""

    class Ending(Copying):
        def wait(self, program: Program, into: Path, moment: Moment) -> Saved:
            saved = super().wait(program, into, moment)
            program.end()
            return saved

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(Staging, "commit", full)
    link = case.link(Ending().at(case.cwd), Plain())
    case.notice_soon()
    assert EXIT_SAVED == link.run()
    record = json.loads(case.rundir.levels_file.read_text())
    assert ({"1": "copying"}, None) == (record["chosen"], record.get("failed"))


def test_a_program_that_a_save_without_space_ended_is_not_begun_at_another_level(
    case: Case,
) -> None:
    level = Copying().at(case.cwd)
    level.dies_for_want_of_space = True
    link = case.link(level, Plain(), interval_s=0.3)
    assert EXIT_FAILED == link.run()
    outcome = case.rundir.outcome(case.generation)
    assert outcome is not None and "without room" in outcome.reason
    record = json.loads(case.rundir.levels_file.read_text())
    assert ({"1": "copying"}, None) == (record["chosen"], record.get("failed"))


# ── restarts after which the program fails ────────────────────────────────────────────────
FAILS_SOON = """
import os, sys, time
from pathlib import Path
bad = sys.argv[1].split(",")
state = Path("state")
if state.exists() and (state.read_text() in bad or bad in (["all"], ["crash"])):
    time.sleep(0.3)
    os.abort() if bad == ["crash"] else sys.exit(3)
n = int(state.read_text()) if state.exists() else 0
for _ in range(int(sys.argv[2])):
    n += 1
    new = Path("state.new"); new.write_text(str(n)); new.rename(state)
    time.sleep(0.02)
"""


def saved_twice(case: Case, level: Copying) -> tuple[str, str]:
    """The two restarts' names, older first."""
    for _ in range(2):
        link = case.link(level)
        case.notice_soon()
        assert EXIT_SAVED == link.run()
    level.saves_after_end = False
    older, newer = case.restarts.keys()
    return older.directory_name, newer.directory_name


def fails_soon(case: Case, bad: str) -> tuple[str, ...]:
    (case.cwd / "fails.py").write_text(FAILS_SOON)
    return (sys.executable, "fails.py", bad, "3")


def restored(case: Case) -> list[str]:
    told = events.read(case.rundir.events_file(case.generation, "here"))
    return [record["checkpoint"] for record in told if record["event"] == "restored"]


def test_a_restart_that_the_program_fails_after_is_left_for_the_one_before(case: Case) -> None:
    """In the same link: two links without progress would end the chain."""
    level = Copying().at(case.cwd)
    older, newer = saved_twice(case, level)
    bad = str(case.restarts.keys()[-1].step)
    assert EXIT_COMPLETE == case.link(level, argv=fails_soon(case, bad)).run()
    assert [newer, newer, older] == restored(case)
    assert str(case.restarts.keys()[0].step + 3) == (case.cwd / "state").read_text()


@pytest.mark.parametrize(("how", "saves"), [("crash", 1), ("all", 2)])
def test_a_level_whose_every_restart_the_program_fails_after_gives_way(
    case: Case, how: str, saves: int
) -> None:
    """One crash is enough; a code of its own may be the program's own affair, but not twice."""
    level = Copying("system").at(case.cwd)
    level.kind = Kind.SYSTEM
    link = case.link(level, interval_s=600 if saves == 1 else 0.4)
    if saves == 1:
        case.notice_soon()
    else:
        case.notice_when(lambda: case.commits() > 0)
    link.run()
    assert saves == min(len(case.restarts.keys()), 2)
    level.saves_after_end = False

    class Fresh(Plain):
        def first(self, work: Work) -> Start:
            (case.cwd / "state").unlink()
            return super().first(work)

    assert EXIT_COMPLETE == case.link(level, Fresh(), argv=fails_soon(case, how)).run()
    record = json.loads(case.rundir.levels_file.read_text())
    assert "failed soon after" in record["failed"]["system"]
    assert "plain" == record["chosen"]["2"]


@pytest.mark.parametrize("why", ["its own files", "its own code", "gone on before", "full disk"])
def test_work_that_may_be_sound_is_not_begun_anew_over(
    case: Case, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link fails and says what to do; once the program is mended it goes on."""
    level = Copying("owner").at(case.cwd)
    if why != "its own files":
        level.kind = Kind.SYSTEM
    if why == "gone on before":
        _, newer = saved_twice(case, level)  # the second link has gone on, and saved
    else:
        link = case.link(level)
        case.notice_soon()
        link.run()
        level.saves_after_end = False
        newer = case.restarts.keys()[-1].directory_name
    with monkeypatch.context() as patch:
        if why == "full disk":
            patch.setattr(stewardship, "check_storage", lambda *_: "no space")
        how = "all" if why == "its own code" else "crash"
        assert EXIT_FAILED == case.link(level, Plain(), argv=fails_soon(case, how)).run()
    assert "started_fresh" not in case.names()
    record = json.loads(case.rundir.levels_file.read_text())
    assert "failed" not in record
    assert EXIT_COMPLETE == case.link(level, Plain(), argv=fails_soon(case, "none")).run()
    assert [newer] == restored(case)


def test_who_kills_a_program_says_nothing_against_its_restart(case: Case) -> None:
    level = Copying().at(case.cwd)
    _, newer = saved_twice(case, level)
    kill = "import os, time; time.sleep(0.3); os.kill(os.getpid(), 9)"
    assert EXIT_FAILED == case.link(level, argv=(sys.executable, "-c", kill)).run()
    assert [newer] == restored(case)


def test_a_code_that_is_not_0_never_completes(case: Case) -> None:
    class Sure(Copying):
        def is_complete(self, work: Work, code: int) -> bool | None:
            return True

    level = Sure().at(case.cwd)
    (case.cwd / "state").write_text("7")
    link = case.link(level, argv=(sys.executable, "-c", "raise SystemExit(1)"))
    assert EXIT_FAILED == link.run()
    assert case.rundir.done() is None


def test_the_program_does_not_outlive_a_steward_that_is_killed(tmp_path: Path) -> None:
    """The next link would start a second one beside it."""
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from hpc_ckpt.levels.program import Program\n"
        "p = Program(['sleep', '1000'], Path('.'), os.environ)\n"
        "Path(sys.argv[1]).write_text(str(p.pid))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "pid")], check=False)
    pid = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 10
    while _lives(pid):
        assert time.monotonic() < until
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
