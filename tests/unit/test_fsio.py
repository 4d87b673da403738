"""Durable file primitives."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hpc_ckpt
from hpc_ckpt import fsio


@pytest.fixture(autouse=True)
def _no_observer_is_left() -> Iterator[None]:
    yield
    fsio.observe(None)


def raise_at(point: str, error: BaseException) -> None:
    def watch(reached: str) -> None:
        if reached == point:
            raise error

    fsio.observe(watch)


def test_write_atomic_replaces_the_whole_content(tmp_path: Path) -> None:
    """The new content stands alone, and nothing else is left in the directory."""
    target = tmp_path / "DONE"
    fsio.write_atomic(target, b"a long first content")
    fsio.write_atomic(target, b"short")
    assert target.read_bytes() == b"short"
    assert fsio.names_in(tmp_path) == ["DONE"]


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_files_are_private_or_the_groups_as_their_directory_is(tmp_path: Path, umask: int) -> None:
    """Private means private, and shared means that, whatever the user's umask."""
    private, group = tmp_path / "private", tmp_path / "group"
    for place, mode in ((private, 0o700), (group, fsio.GROUP_DIRECTORY)):
        place.mkdir()
        place.chmod(mode)
    before = os.umask(umask)
    try:
        fsio.write_atomic(private / "file", b"")
        fsio.write_atomic(group / "file", b"")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((place / "file").stat().st_mode) for place in (private, group)]
    assert modes == [0o600, 0o660]


@pytest.mark.parametrize("point", ["atomic.opened", "atomic.written", "atomic.synced"])
def test_a_failed_write_atomic_changes_nothing(tmp_path: Path, point: str) -> None:
    """If it raises, the old content is untouched and the temporary file is gone."""
    target = tmp_path / "outcome"
    fsio.write_atomic(target, b"old")
    raise_at(point, OSError(errno.ENOSPC, "full"))
    with pytest.raises(OSError, match="full"):
        fsio.write_atomic(target, b"new")
    assert target.read_bytes() == b"old"
    assert fsio.names_in(tmp_path) == ["outcome"]


def test_bytes_are_durable_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsync file, rename, fsync directory: any other order can lose both contents."""
    seen: list[str] = []
    real = os.fsync

    def recording(descriptor: int) -> None:
        kind = "directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        seen.append(f"sync {kind}")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    fsio.observe(seen.append)
    fsio.write_atomic(tmp_path / "x", b"data")
    assert seen == [
        "atomic.opened",
        "atomic.written",
        "sync file",
        "atomic.synced",
        "atomic.renamed",
        "sync directory",
        "atomic.durable",
    ]


def test_write_all_goes_on_after_a_short_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """write(2) may take fewer bytes than it is given."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, view: real(fd, view[:3]))
    descriptor = fsio.create_file(tmp_path / "x")
    fsio.write_all(descriptor, memoryview(b"0123456789"))
    os.close(descriptor)
    assert (tmp_path / "x").read_bytes() == b"0123456789"


def test_write_all_does_not_spin_when_nothing_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that takes no bytes and gives no error is an error."""
    monkeypatch.setattr(os, "write", lambda fd, view: 0)
    descriptor = fsio.create_file(tmp_path / "x")
    with pytest.raises(OSError, match="accepted no bytes"):
        fsio.write_all(descriptor, memoryview(b"data"))
    os.close(descriptor)


def test_write_all_counts_bytes_not_items(tmp_path: Path) -> None:
    """A view of wider items is written whole."""
    descriptor = fsio.create_file(tmp_path / "x")
    fsio.write_all(descriptor, memoryview(b"01234567").cast("I"))
    os.close(descriptor)
    assert (tmp_path / "x").read_bytes() == b"01234567"


def test_create_file_never_reuses_a_file(tmp_path: Path) -> None:
    """What somebody else wrote is never overwritten in place."""
    os.close(fsio.create_file(tmp_path / "x"))
    with pytest.raises(FileExistsError):
        fsio.create_file(tmp_path / "x")


@pytest.mark.parametrize(
    ("number", "fatal"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)]
)
def test_sync_directory_forgives_only_a_missing_ability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fatal: bool
) -> None:
    """Some file systems cannot sync a directory; a real error is never swallowed."""

    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    if fatal:
        with pytest.raises(OSError, match=os.strerror(number)):
            fsio.sync_directory(tmp_path)
    else:
        fsio.sync_directory(tmp_path)


def test_make_directory_makes_and_syncs_every_missing_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint in a directory whose own name is lost in a crash is lost too."""
    synced: list[Path] = []
    monkeypatch.setattr(fsio, "sync_directory", lambda path: synced.append(Path(path)))
    fsio.make_directory(tmp_path / "a" / "b")
    assert {tmp_path, tmp_path / "a"} == set(synced)
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    fsio.make_directory(tmp_path / "a" / "b")


def test_delete_tree_removes_links_and_not_what_they_point_to(tmp_path: Path) -> None:
    """A link in a directory that goes must not take its target with it."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_bytes(b"x")
    doomed = tmp_path / "doomed"
    (doomed / "inner").mkdir(parents=True)
    (doomed / "inner" / "file").write_bytes(b"x")
    (doomed / "link").symlink_to(tmp_path / "precious")
    fsio.delete_tree(doomed)
    fsio.delete_tree(doomed)
    assert fsio.names_in(tmp_path) == ["precious"]
    assert (tmp_path / "precious" / "file").read_bytes() == b"x"


LOOKS = {"file": fsio.is_file, "directory": fsio.is_directory, "anything": fsio.exists}


@pytest.mark.parametrize("kind", LOOKS)
def test_what_is_looked_for_is_there_or_not(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for name in ("gone", "file/below a file", "nowhere"):
        assert not LOOKS[kind](tmp_path / name)
    seen = [name for name in ("file", "directory") if LOOKS[kind](tmp_path / name)]
    assert (["file", "directory"] if kind == "anything" else [kind]) == seen


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOTCONN])
@pytest.mark.parametrize("kind", LOOKS)
def test_what_storage_does_not_show_now_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, number: int
) -> None:
    """Path.is_dir() and its like of Python 3.14 say that it is."""

    def stat(path: object, **_: object) -> os.stat_result:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        with pytest.raises(OSError, match=os.strerror(number)):
            LOOKS[kind](tmp_path)


def test_a_link_that_cannot_be_looked_at_is_not_followed_to_be_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path.is_symlink() of Python 3.14 says that it is none."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (tmp_path / "doomed").mkdir()
    (tmp_path / "doomed" / "link").symlink_to(tmp_path / "precious")
    real = os.stat

    def stat(path: Any, *arguments: Any, **more: Any) -> os.stat_result:
        if str(path).endswith("link") and more.get("follow_symlinks") is False:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(path, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        patch.setattr(Path, "is_symlink", lambda _: False)
        with pytest.raises(OSError, match="Stale"):
            fsio.delete_tree(tmp_path / "doomed")
    assert ["file"] == fsio.names_in(tmp_path / "precious")


def test_names_in_a_missing_directory_are_none(tmp_path: Path) -> None:
    """Reading tolerates concurrent removal."""
    assert fsio.names_in(tmp_path / "gone") == []


def test_observe_gives_back_the_observer_before_it() -> None:
    """A test can put back what it replaced; without an observer nothing happens."""
    seen: list[str] = []
    assert fsio.observe(seen.append) is None
    fsio.reached("shard.opened")
    previous = fsio.observe(None)
    fsio.reached("shard.written")
    assert seen == ["shard.opened"]
    assert previous is not None


def test_kill_points_are_named_once() -> None:
    """A name that stood for two moments could not be aimed at."""
    assert len(set(fsio.KILL_POINTS)) == len(fsio.KILL_POINTS)


def test_the_link_runner_can_import_it_without_site_packages() -> None:
    """Standard library only: no third-party directory is on the path here."""
    root = Path(hpc_ckpt.__file__).parents[1]
    code = f"import sys; sys.path.insert(0, {str(root)!r}); import hpc_ckpt.fsio, hpc_ckpt.rundir"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_what_killed_writers_left_is_swept(tmp_path: Path) -> None:
    """Only old files with the exact name of a temporary one; a young one may be in use."""
    old, young = ".DONE.tmp-12-3-0123abcd01234567", ".DONE.tmp-12-4-0123abcd01234567"
    others = [
        "DONE",
        ".DONE.tmp",
        ".tmp-g00000001-x",
        "a.tmp-1-2-0123abcd01234567",
        ".b.tmp-1-2-0123abcd0123456",
    ]
    for name in (old, young, *others):
        (tmp_path / name).write_text("x")
        if name != young:
            os.utime(tmp_path / name, (1, 1))
    fsio.sweep_temporaries(tmp_path)
    assert sorted([young, *others]) == fsio.names_in(tmp_path)
    fsio.sweep_temporaries(tmp_path / "not there")


def test_what_cannot_be_listed_is_not_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that begins has better to do than to fail for it."""

    def broken(path: object) -> list[str]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fsio, "names_in", broken)
    fsio.sweep_temporaries(tmp_path)


def test_what_a_dead_process_of_this_machine_left_goes_at_once(tmp_path: Path) -> None:
    """Its own name says whose it was; the living keep theirs."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    serial, _, tail = fsio.unique_suffix().split("-", 1)[1].partition("-")
    names = [f".DONE.tmp-{pid}-{serial}-{tail}" for pid in (dead.pid, os.getpid())]
    for name in names:
        (tmp_path / name).write_text("x")
    fsio.sweep_temporaries(tmp_path)
    assert [names[1]] == fsio.names_in(tmp_path)
