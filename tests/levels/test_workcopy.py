"""The copy that a rehearsal runs in: nothing in it leads to the real files."""

import os
from pathlib import Path

import pytest

from hpc_ckpt.errors import SpecError
from hpc_ckpt.levels.workcopy import copy_work

MOST = 10_000


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "outside" / "deep").mkdir(parents=True)
    (tmp_path / "outside" / "data").write_text("real")
    (tmp_path / "work" / "inside").mkdir(parents=True)
    (tmp_path / "work" / "inside" / "file").write_text("real")
    return tmp_path / "work"


def copied(work: Path, most: int = MOST) -> Path:
    target = work.parent / "copy"
    copy_work(work, target, most)
    for folder, _, names in os.walk(target):
        for name in names:
            real = Path(folder, name).resolve()
            assert real.is_relative_to(target) or not real.is_relative_to(work.parent), name
    return target


def test_writing_through_a_linked_directory_leaves_the_real_files_alone(work: Path) -> None:
    (work / "out").symlink_to("../outside")
    copy = copied(work)
    assert "real" == (copy / "out" / "data").read_text()
    (copy / "out" / "data").write_text("changed")
    (copy / "out" / "deep" / "new").touch()
    assert "real" == (work / "out" / "data").read_text()
    assert not (work / "out" / "deep" / "new").exists()


def test_a_linked_file_and_a_full_path_into_the_directory_are_no_way_out(work: Path) -> None:
    (work / "data").symlink_to(work.parent / "outside" / "data")
    (work / "full").symlink_to(work / "inside")
    (work / "later").symlink_to(work / "inside" / "not yet")
    (work / "gone").symlink_to(work.parent / "not yet")
    copy = copied(work)
    (copy / "data").write_text("changed")
    (copy / "full" / "file").write_text("changed")
    (copy / "later").write_text("new")
    (copy / "gone").write_text("new")
    assert "changed" == (copy / "inside" / "file").read_text()
    assert "real" == (work / "data").read_text() == (work / "inside" / "file").read_text()
    assert [work / "inside" / "file"] == list((work / "inside").iterdir())
    assert not (work.parent / "not yet").exists()


def test_what_many_links_lead_to_is_one_in_the_copy_too(work: Path) -> None:
    for name in ("a", "b"):
        (work / name).symlink_to("../outside")
    (work / "c").symlink_to("../outside/data")
    copy = copied(work, most=8)
    (copy / "c").write_text("changed")
    assert "changed" == (copy / "a" / "data").read_text() == (copy / "b" / "data").read_text()


def test_links_that_lead_around_end(work: Path) -> None:
    (work / "inside" / "up").symlink_to("..")
    (work / "above").symlink_to("..")
    (work / "self").symlink_to("self")
    (work.parent / "outside" / "deep" / "again").symlink_to("..")
    copy = copied(work)
    assert copy.resolve() == (copy / "inside" / "up").resolve()
    assert copy.resolve() == (copy / "above" / "work").resolve()
    assert "real" == (copy / "above" / "outside" / "deep" / "again" / "data").read_text()


def test_what_links_lead_to_counts(work: Path) -> None:
    (work / "out").symlink_to("../outside")
    (work.parent / "outside" / "large").write_bytes(bytes(MOST))
    with pytest.raises(SpecError, match=r"outside/large\), too much to copy.*--in-place"):
        copied(work)
    assert not (work.parent / "copy").exists()


def test_devices_stay_what_they_are_and_runs_stay_behind(work: Path) -> None:
    (work / "null").symlink_to("/dev/null")
    (work / "runs" / "one").mkdir(parents=True)
    (work / "runs" / "one" / "chain.json").write_bytes(bytes(2 * MOST))
    os.mkfifo(work / "pipe")
    assert {"null", "inside"} == {path.name for path in copied(work).iterdir()}


def test_data_may_be_in_a_directory_named_runs(work: Path) -> None:
    for place in (work / "runs", work / "inside" / "runs", work / "inside" / "runs" / "one"):
        place.mkdir()
    (work / "runs" / "data").write_text("mine")
    (work / "inside" / "runs" / "one" / "chain.json").write_text("of something else")
    copy = copied(work)
    assert "mine" == (copy / "runs" / "data").read_text()
    assert (copy / "inside" / "runs" / "one" / "chain.json").exists()
