"""Files that a program writes: recorded, cut back, put back."""

import contextlib
import json
import math
import mmap
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from hpc_ckpt.levels import openfiles, rollback
from hpc_ckpt.levels.base import NotHere, ResumeFailed
from hpc_ckpt.levels.openfiles import TooSlow, Written, record, written_by
from hpc_ckpt.levels.rollback import roll_back


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "restart").mkdir()
    yield tmp_path


def mine(place: Path) -> dict[str, bool]:
    """Files of this process below a place, and whether they are written in place."""
    found = written_by([os.getpid()])
    return {
        Path(path).name: one.in_place for path, one in found.items() if Path(path).parent == place
    }


def save(place: Path) -> Path:
    """Without what the tests themselves have open, as their output in a file."""

    def written_here(pids: list[int]) -> dict[str, openfiles.Written]:
        found = written_by(pids)
        return {path: one for path, one in found.items() if Path(path).is_relative_to(place)}

    restart = place / "restart"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openfiles, "written_by", written_here)
        record(os.getpid(), restart)
    return restart


def test_only_what_is_open_for_writing_counts(place: Path) -> None:
    (place / "read").write_text("x")
    with (
        (place / "read").open(),
        (place / "written").open("w"),
        (place / "gone").open("w"),
    ):
        (place / "gone").unlink()
        assert {"written": False} == mine(place)


def test_in_place_is_all_but_the_end(place: Path) -> None:
    (place / "appended").write_text("before\n")
    (place / "seeked").write_text("0123456789")
    with (
        (place / "appended").open("a") as appended,
        (place / "seeked").open("r+"),
        (place / "sequential").open("w") as sequential,
        (place / "back").open("w") as back,
    ):
        for stream in (appended, sequential, back):
            stream.write("more")
            stream.flush()
        back.seek(1)
        expected = {"appended": False, "seeked": True, "sequential": False, "back": True}
        assert expected == mine(place)


def test_what_may_be_read_too_may_be_changed_anywhere(place: Path) -> None:
    """Also one of mode "a+", which is rewritten by truncate() and write()."""
    for name in ("log", "table"):
        (place / name).write_text("0123456789")
    with (place / "log").open("a+") as log, (place / "table").open("r+") as table:
        log.seek(3)
        table.seek(0, os.SEEK_END)
        assert {"log": True, "table": True} == mine(place)


def test_a_file_that_grows_between_two_looks_is_at_its_end(place: Path) -> None:
    """The program runs: its size is that of a moment before its position."""
    path, info = place / "frames", place / "info"
    path.write_text("0123456789")
    with path.open("r+") as stream:
        link = Path(f"/proc/self/fd/{stream.fileno()}")
        for position, in_place in ((9, True), (10, False), (14, False)):
            info.write_text(f"pos:\t{position}\nflags:\t0{os.O_WRONLY:o}\n")
            assert [in_place] == [one.in_place for one in openfiles._described(link, info)]


def test_a_mapping_counts_when_its_file_is_closed(place: Path) -> None:
    path = place / "mapped file"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as stream:
        mapped = mmap.mmap(stream.fileno(), 4096)
    try:
        assert {"mapped file": True} == mine(place)
    finally:
        mapped.close()


def test_what_was_written_after_the_save_goes(place: Path) -> None:
    (place / "table").write_text("0123456789")
    with (place / "log").open("w") as log, (place / "table").open("r+") as table:
        log.write("one\n")
        log.flush()
        restart = save(place)
        log.write("two\n")
        table.write("abc")
    roll_back(restart, rollback.read(restart), place / "kept")
    assert "one\n" == (place / "log").read_text()
    assert "0123456789" == (place / "table").read_text()


@pytest.mark.parametrize("what", ["shorter", "gone"])
def test_a_file_that_lost_something_is_named(place: Path, what: str) -> None:
    """And no other file is touched."""
    with (place / "a").open("w") as other, (place / "b").open("w") as log:
        for stream in (other, log):
            stream.write("four")
            stream.flush()
        restart = save(place)
        other.write("more")
    if what == "gone":
        (place / "b").unlink()
    else:
        os.truncate(place / "b", 3)
    said = rf"{place}/b: .*{'gone' if what == 'gone' else 3}"
    with pytest.raises(ResumeFailed, match=said) as failure:
        roll_back(restart, rollback.read(restart), place / "kept")
    assert not isinstance(failure.value, NotHere)
    assert "fourmore" == (place / "a").read_text()


@pytest.mark.parametrize("mount_point", [True, False])
def test_a_file_whose_directory_is_away_too_says_nothing_of_the_restart(
    place: Path, mount_point: bool
) -> None:
    """Storage that is not mounted on this node."""
    away = place / "scratch"
    away.mkdir()
    with (away / "out").open("a") as stream:
        stream.write("four")
        stream.flush()
        restart = save(place)
    away.rename(place / "elsewhere")
    if mount_point:
        away.mkdir()
    with pytest.raises(NotHere, match=r"out: .*gone"):
        roll_back(restart, rollback.read(restart), place / "kept")


def test_what_is_put_back_may_be_gone(place: Path) -> None:
    (place / "table").write_text("0123456789")
    with (place / "table").open("r+"):
        restart = save(place)
    (place / "table").unlink()
    roll_back(restart, rollback.read(restart), place / "kept")
    assert "0123456789" == (place / "table").read_text()


def test_what_is_the_same_is_left_alone(place: Path) -> None:
    """Of the system, perhaps."""
    (place / "table").write_text("0123456789")
    with (place / "table").open("r+"):
        restart = save(place)
    before = (place / "table").stat()
    assert [] == roll_back(restart, rollback.read(restart), place / "kept")
    assert before.st_ino == (place / "table").stat().st_ino


@pytest.mark.parametrize("what", ["in the middle", "mapped", "twice"])
def test_a_file_too_large_to_copy_fails_the_save(
    place: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(openfiles, "COPY_MOST", 9)
    (place / "table").write_text("0123456789")
    with (place / "table").open("r+") as table, contextlib.ExitStack() as more:
        if what != "in the middle":
            table.seek(0, os.SEEK_END)
        if what == "mapped":
            more.enter_context(mmap.mmap(table.fileno(), 10))
        if what == "twice":
            more.enter_context((place / "table").open("r+"))
        with pytest.raises(OSError, match="table: written in place"):
            save(place)


def test_a_large_table_is_copied_where_there_is_room(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlike an output: once over the limit, no later save would be made."""
    monkeypatch.setattr(openfiles, "COPY_AT_END_MOST", 9)
    (place / "table").write_text("0123456789")
    with (place / "table").open("r+"):
        (entry,) = rollback.read(save(place))["files"]
    assert "0123456789" == (place / "restart" / entry["copy"]).read_text()
    assert 64 * 1024**3 == openfiles.COPY_MOST


def test_what_is_mapped_to_be_read_is_told_apart(place: Path) -> None:
    for name in ("read", "written", "both"):
        (place / name).write_bytes(bytes(4096))
    mapped = []
    for name, modes in (("read", "r"), ("written", "w"), ("both", "rw")):
        for mode in modes:
            with (place / name).open("rb" if mode == "r" else "r+b") as stream:
                access = mmap.ACCESS_READ if mode == "r" else mmap.ACCESS_WRITE
                mapped.append(mmap.mmap(stream.fileno(), 0, access=access))
    found = openfiles.only_read_by([os.getpid()])
    assert {"read"} == {Path(path).name for path in found if Path(path).parent == place}
    assert {"written": True, "both": True} == mine(place)


def test_of_a_large_file_that_is_at_its_end_the_size_does(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libgfortran opens for reading and writing whatever is only written. It is told."""
    monkeypatch.setattr(openfiles, "COPY_AT_END_MOST", 9)
    for name in ("output", "log", "small"):
        (place / name).write_text("0123456789" if name != "small" else "0123")
    with (
        (place / "output").open("r+") as output,
        (place / "log").open("a+") as log,
        (place / "small").open("r+") as small,
    ):
        for stream in (output, small):
            stream.seek(0, os.SEEK_END)
        log.seek(0)
        found = rollback.read(save(place))
        for stream in (output, log, small):
            stream.write("more")
    copies = {Path(entry["path"]).name: entry["copy"] is not None for entry in found["files"]}
    assert {"output": False, "log": False, "small": True} == copies
    told = sorted(
        line.partition(": too large to be copied")[0] for line in openfiles.warnings(found)
    )
    assert [f"{place}/log", f"{place}/output"] == told
    roll_back(place / "restart", found, place / "kept")
    assert ["0123456789", "0123456789", "0123"] == [
        (place / name).read_text() for name in ("output", "log", "small")
    ]


@pytest.mark.parametrize("name", ["dmtcpSharedArea.98ff-40000-1", "gconv-modules.cache"])
def test_what_is_not_the_programs_is_not_put_back(place: Path, name: str) -> None:
    """Older versions have recorded both: the first under a directory of a job that is over, the
    second as it was before an update of the system."""
    restart, kept = place / "restart", place / "kept"
    (restart / "copy").write_text("old")
    entries = [{"path": str(place / "gone" / name), "size": 3, "copy": "copy"}]
    (restart / openfiles.RECORD).write_text(json.dumps({"files": entries}))
    assert [] == roll_back(restart, rollback.read(restart), kept)
    kept.mkdir()
    (kept / "0").write_text("old")
    journal = {"files": [{"path": entries[0]["path"], "whole": "0"}]}
    (kept / rollback.JOURNAL).write_text(json.dumps(journal))
    assert [] == rollback.undo(kept)
    assert not (place / "gone").exists()


def test_files_that_nobody_rolls_back_are_told(place: Path) -> None:
    (place / "lines").write_text("one\n")
    with (place / "log").open("w") as log:
        restart = save(place)
        log.write("x")
    with (place / "lines").open("a") as lines:
        lines.write("two\n")
    assert [str(place / "lines")] == rollback.grown(rollback.read(restart))


def test_an_older_restart_that_does_not_work_takes_nothing_from_a_newer_one(place: Path) -> None:
    """Both tried, both in vain: the newer one is good for the next link."""
    old, new, kept = place / "old", place / "new", place / "kept"
    (place / "table").write_text("0000")
    with (place / "log").open("w") as log, (place / "table").open("r+") as table:
        for restart in (old, new):
            restart.mkdir()
            log.write(f"{restart.name}\n")
            log.flush()
            table.seek(0)
            table.write(restart.name)
            table.flush()
            record(os.getpid(), restart)
        log.write("more\n")
        table.write("more")
    before = {name: (place / name).read_text() for name in ("log", "table")}
    for restart in (new, old):
        roll_back(restart, rollback.read(restart), kept)
        assert before != {name: (place / name).read_text() for name in before}
        rollback.undo(kept)
        assert before == {name: (place / name).read_text() for name in before}
    assert not kept.exists()
    roll_back(new, rollback.read(new), kept)
    assert "old\nnew\n" == (place / "log").read_text()


def test_what_was_written_by_a_restart_that_was_given_up_goes_too(place: Path) -> None:
    with (place / "log").open("w") as log:
        log.write("one\n")
        log.flush()
        restart = save(place)
        log.write("two\n")
    roll_back(restart, rollback.read(restart), place / "kept")
    with (place / "log").open("a") as log:
        log.write("another history")
    rollback.undo(place / "kept")
    assert "one\ntwo\n" == (place / "log").read_text()


def test_where_nothing_can_be_kept_nothing_is_taken_away(place: Path) -> None:
    with (place / "log").open("w") as log:
        restart = save(place)
        log.write("one\n")
    (place / "file").touch()
    with pytest.raises(ResumeFailed, match="could not be kept"):
        roll_back(restart, rollback.read(restart), place / "file" / "kept")
    assert "one\n" == (place / "log").read_text()


def inodes(place: Path, *names: str) -> list[int]:
    return [(place / name).stat().st_ino for name in names]


@pytest.mark.parametrize("longer", [True, False])
def test_a_file_stays_the_same_inode_when_it_is_put_back(place: Path, longer: bool) -> None:
    """SQLite remembers it, and writes to no other: "attempt to write a readonly database"."""
    (place / "table").write_text("0123456789")
    (place / "table").chmod(0o640)
    with (place / "table").open("r+"):
        restart = save(place)
    now = "abcdefghijklmn" if longer else "abc"
    (place / "table").write_text(now)
    before = inodes(place, "table")
    roll_back(restart, rollback.read(restart), place / "kept")
    assert (before, "0123456789") == (inodes(place, "table"), (place / "table").read_text())
    rollback.undo(place / "kept")
    assert (before, now) == (inodes(place, "table"), (place / "table").read_text())
    assert 0o640 == stat.S_IMODE((place / "table").stat().st_mode)


@pytest.mark.parametrize("during", ["roll back", "undo"])
def test_a_kill_while_files_are_overwritten_is_mended_by_the_next_link(
    place: Path, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    """Half of one is written, the other not at all; what was there is on the disk by then."""
    names = ("one", "two")
    for name in names:
        (place / name).write_text(f"{name}: saved")
    with (place / "one").open("r+"), (place / "two").open("r+"):
        restart = save(place)
    for name in names:
        (place / name).write_text(f"{name}: newer, and longer")
    kept, before = place / "kept", inodes(place, *names)

    def killed(source: IO[bytes], target: IO[bytes], *_: int) -> None:
        assert (kept / rollback.JOURNAL).exists()
        target.write(source.read(7))
        target.flush()
        raise KeyboardInterrupt

    if during == "undo":
        roll_back(restart, rollback.read(restart), kept)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "copyfileobj", killed)
        if during == "undo":
            rollback.undo(kept)
        else:
            roll_back(restart, rollback.read(restart), kept)
    rollback.undo(kept)
    assert [f"{name}: newer, and longer" for name in names] == [
        (place / name).read_text() for name in names
    ]
    rollback.TakenAway().roll_back(restart, rollback.read(restart), kept)
    assert [f"{name}: saved" for name in names] == [(place / name).read_text() for name in names]
    assert before == inodes(place, *names)


def test_what_is_kept_is_on_the_disk_before_anything_is_overwritten(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "table").write_text("0123456789")
    with (place / "table").open("r+"):
        restart = save(place)
    (place / "table").write_text("abc")
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name.partition(".tmp")[0])

    monkeypatch.setattr(os, "fsync", noted)
    roll_back(restart, rollback.read(restart), place / "kept")
    journal = synced.index(f".{rollback.JOURNAL}")
    assert {place.name, "0"} <= set(synced[:journal])
    assert synced.index("kept") < synced.index("table")


def test_a_file_that_was_not_there_is_gone_again_where_the_restart_does_not_work(
    place: Path,
) -> None:
    """An old journal of a database beside a newer one would be played back into it."""
    (place / "journal").write_text("old")
    with (place / "journal").open("r+"):
        restart = save(place)
    (place / "journal").unlink()
    roll_back(restart, rollback.read(restart), place / "kept")
    assert (place / "journal").exists()
    rollback.undo(place / "kept")
    assert not (place / "journal").exists()


def saved_last(place: Path) -> tuple[Path, dict[str, list[int]]]:
    """The last save of a link, and how it has left its one file in place."""
    (place / "table").write_text("saved")
    with (place / "table").open("r+"):
        restart = save(place)
    return restart, rollback.left_by([], restart, math.inf)


def resumed(place: Path, restart: Path, left: dict[str, list[int]]) -> rollback.TakenAway:
    taken = rollback.TakenAway()
    taken.roll_back(restart, rollback.read(restart), place / "kept", left)
    return taken


def test_what_somebody_else_has_written_since_the_last_save_is_kept_and_told(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a restart that works; before that it may still be put back where it was."""
    for name in ("shared", "own"):
        (place / name).write_text("saved")
    with (place / "shared").open("r+"), (place / "own").open("r+") as own:
        restart = save(place)
        own.write("SAVED, and the rest")
    left = rollback.left_by([], restart, math.inf)
    assert {"shared", "own"} == {Path(path).name for path in left}
    (place / "shared").write_text("of another")
    resumed(place, restart, left).put_back()
    assert "of another" == (place / "shared").read_text()
    resumed(place, restart, left).forget()
    assert ["saved", "saved"] == [(place / name).read_text() for name in ("shared", "own")]
    (told,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert told.startswith(f"{place}/shared: WAS CHANGED BY SOMEBODY ELSE (a reader of")
    copy = Path(told.rpartition(" ")[2])
    assert "of another" == copy.read_text()
    assert [] == rollback.undo(place / "kept")
    # Killed before any save: what is there now is of the program that has gone on from it.
    (place / "shared").write_text("its own")
    resumed(place, restart, left).forget()
    assert 1 == len([r for r in caplog.records if r.levelname == "WARNING"])
    assert [copy.parent.name] == sorted(p.name for p in place.glob("kept*") if p.is_dir())


def test_what_somebody_else_has_written_is_kept_too_where_an_older_restart_works(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the last save of a link knows how its files were left, and it may be the bad one."""
    restart, left = saved_last(place)
    (place / "table").write_text("of another")
    taken = resumed(place, restart, left)
    taken.roll_back(restart, rollback.read(restart), place / "kept", {})
    taken.forget()
    (told,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "of another" == Path(told.rpartition(" ")[2]).read_text()
    (place / "table").write_text("of the program")
    taken.roll_back(restart, rollback.read(restart), place / "kept", {})
    taken.forget()
    assert 1 == len([r for r in caplog.records if r.levelname == "WARNING"])


def test_what_the_program_itself_has_written_after_its_last_save_is_nobody_elses(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (place / "table").write_text("saved")
    with (place / "table").open("r+") as table:
        restart = save(place)
        table.write("newer")
    resumed(place, restart, rollback.left_by([], restart, math.inf)).forget()
    assert "saved" == (place / "table").read_text()
    assert [] == [r for r in caplog.records if r.levelname == "WARNING"]
    assert [] == [p for p in place.glob("kept*") if p.is_dir()]


# Saved after the first word, killed after the second: in the middle of a transaction that has
# reached the file, so that its journal is hot, or with commits that are in the log alone.
SQLITE = """
import sqlite3, sys
database = sqlite3.connect("db")
database.execute(f"pragma journal_mode={sys.argv[1]}")
database.execute("create table t(k integer primary key, v text)")
database.execute("create index i on t(v)")
many = "insert into t values(?, ?)"
database.executemany(many, [(n, f"x{n * 7919 % 1000}" * 20) for n in range(2000)])
database.commit()
if sys.argv[1] == "wal":
    database.close()
    database = sqlite3.connect("db")
file = open("db", "r+b")  # of a connection that has not read yet, no log is there
print("saved", flush=True)
sys.stdin.readline()
database.executemany(many, [(n, f"y{n * 7919 % 1000}" * 20) for n in range(2000, 6000)])
database.commit()
database.execute("delete from t where k % 3 = 0")
database.commit()
database.execute("pragma cache_size=5")
database.execute("update t set v = v || 'zzzz'")
print("middle", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("mode", ["delete", "truncate", "persist", "wal"])
def test_a_journal_of_sqlite_that_came_after_the_save_is_not_played_back(
    place: Path, mode: str
) -> None:
    """Into the file as it was before: rows of two histories, and a damaged index."""
    restart, kept = place / "restart", place / "kept"
    argv = [sys.executable, "-c", SQLITE, mode]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None and program.stdout is not None
        assert "saved\n" == program.stdout.readline()
        record(program.pid, restart)
        program.stdin.write("\n")
        program.stdin.flush()
        assert "middle\n" == program.stdout.readline()
        program.kill()
    names = sorted(path.name for path in place.glob("db*"))
    assert len(names) > 1
    killed = {name: (place / name).read_bytes() for name in names}
    for _ in range(2):
        roll_back(restart, rollback.read(restart), kept)
        rollback.undo(kept)
        assert killed == {path.name: path.read_bytes() for path in place.glob("db*")}
    roll_back(restart, rollback.read(restart), kept)
    rollback.forget(kept)
    with contextlib.closing(sqlite3.connect(place / "db")) as database:
        assert [("ok",)] == database.execute("pragma integrity_check").fetchall()
        assert [(2000,)] == database.execute("select count(*) from t").fetchall()


def test_only_what_came_after_the_save_is_taken_away(place: Path) -> None:
    """And nothing beside a file that is only appended to, or that is no database."""
    head = "SQLite format 3\0"
    for name in ("table", "table-journal", "notes"):
        (place / name).write_text(f"{head if name == 'table' else ''}saved")
    with (place / "table").open("r+"), (place / "notes").open("r+"), (place / "log").open("a"):
        restart = save(place)
    after = ("table-journal", "table-wal", "table-old", "log-journal", "notes-journal")
    for name in ("table", "notes", *after):
        (place / name).write_text(f"{head if name == 'table' else ''}later")
    roll_back(restart, rollback.read(restart), place / "kept")
    found = {path.name: path.read_text() for path in place.iterdir() if path.name in after}
    later = dict.fromkeys(("table-old", "log-journal", "notes-journal"), "later")
    assert {"table-journal": "saved", **later} == found
    assert (f"{head}saved", "saved") == tuple((place / n).read_text() for n in ("table", "notes"))


def test_what_is_known_of_an_earlier_program_is_forgotten(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next command of a chain counts its steps from 0 again."""
    restart, left = saved_last(place)
    resumed(place, restart, left).forget()
    rollback.forget_all(place / "kept")
    (place / "table").write_text("of another")
    resumed(place, restart, left).forget()
    (told,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "SOMEBODY ELSE" in told


def test_a_save_that_must_be_committed_now_is_not_held_up_for_a_warning(place: Path) -> None:
    (place / "table").write_text("saved")
    with (place / "table").open("r+"):
        restart = save(place)
    assert rollback.left_by([], restart, time.monotonic() + 60)
    assert {} == rollback.left_by([], restart, time.monotonic() + rollback.GONE_S)


def test_copies_end_when_the_time_is_over(place: Path) -> None:
    """The program stands still meanwhile; who ends it does not wait for them."""
    path, into = place / "table", place / "copied"
    path.write_bytes(bytes(2 * openfiles.BLOCK))
    into.mkdir()
    written = [Written(str(path), 2 * openfiles.BLOCK, in_place=True)]
    with pytest.raises(TooSlow, match="not copied in the time"):
        openfiles.stored(written, into, time.monotonic())
    assert openfiles.stored(written, into)[0]["copy"]
    assert path.read_bytes() == (into / openfiles.COPIES / "0").read_bytes()
