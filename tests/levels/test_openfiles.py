"""Files that a program writes: recorded, cut back, put back."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_ckpt.levels import openfiles, rollback
from hpc_ckpt.levels.base import NotHere, ResumeFailed
from hpc_ckpt.levels.openfiles import record, written_by
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
    restart = place / "restart"
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


def test_a_file_too_large_to_copy_fails_the_save(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openfiles, "COPY_MOST", 9)
    (place / "table").write_text("0123456789")
    with (place / "table").open("r+"), pytest.raises(OSError, match="table: written in place"):
        save(place)


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
