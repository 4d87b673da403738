"""Whose place in a tier it is: one run directory's, until that is gone."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt import fsio
from hpc_ckpt.errors import RootError
from hpc_ckpt.making import prepare
from hpc_ckpt.rundir import RunDir
from hpc_ckpt.tiers import asking
from hpc_ckpt.tiers.owner import OWNER_NAME, Owner
from hpc_ckpt.tiers.stack import open_stack
from hpc_ckpt.tiers.wishes import TierWish


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    prepare(found)
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "tier" / "chain").mkdir(parents=True)
    return tmp_path / "tier" / "chain"


def owner(place: Path, rundir: RunDir) -> Owner:
    return Owner(place, "fast", rundir, (rundir.chain() or {})["chain"])


def copied(rundir: RunDir) -> RunDir:
    target = rundir.root.with_name("copy")
    shutil.copytree(rundir.root, target)
    return RunDir(target)


def recorded(place: Path) -> Any:
    return json.loads((place / OWNER_NAME).read_bytes())["root"]


def test_a_copy_is_refused_and_told_what_to_do(rundir: RunDir, place: Path) -> None:
    """Before it reads, and before it writes; the original goes on."""
    owner(place, rundir).claim()
    copy = copied(rundir)
    told = owner(place, copy).refusal()
    assert told is not None
    for word in ("'fast'", str(rundir.root), str(place), str(copy.chain_file)):
        assert word in told
    with pytest.raises(PermissionError, match="is a copy of the other"):
        owner(place, copy).claim()
    assert None is owner(place, rundir).refusal()
    assert str(rundir.root) == recorded(place)


@pytest.mark.parametrize("gone", ["moved", "chain.json", "another chain", "a file"])
def test_who_is_left_takes_it_over(rundir: RunDir, place: Path, gone: str) -> None:
    """A run directory that was moved, or copied and not to go on itself."""
    owner(place, rundir).claim()
    copy = copied(rundir)
    if gone == "chain.json":
        rundir.chain_file.unlink()
    elif gone == "another chain":
        rundir.chain_file.write_text('{"chain": "x"}')
    else:
        shutil.rmtree(rundir.root)
    if gone == "a file":
        rundir.root.write_text("")
    assert None is owner(place, copy).refusal()
    assert str(copy.root) == recorded(place)


def test_a_moved_one_is_known_even_if_a_copy_has_its_old_name(rundir: RunDir, place: Path) -> None:
    """And then the copy is the one that is refused."""
    owner(place, rundir).claim()
    moved = RunDir(rundir.root.rename(rundir.root.with_name("moved")))
    shutil.copytree(moved.root, rundir.root)
    assert None is owner(place, moved).refusal()
    assert owner(place, rundir).refusal() is not None


def test_another_way_to_the_same_directory_is_no_copy(
    rundir: RunDir, place: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(rundir.root)
    owner(place, rundir).claim()
    assert None is owner(place, RunDir(tmp_path / "link")).refusal()


def test_one_put_back_from_a_backup_is_no_copy(rundir: RunDir, place: Path) -> None:
    owner(place, rundir).claim()
    copy = copied(rundir)
    shutil.rmtree(rundir.root)
    shutil.copytree(copy.root, rundir.root)
    assert None is owner(place, rundir).refusal()
    assert owner(place, copy).refusal() is not None


def test_what_cannot_be_looked_at_may_live(
    rundir: RunDir, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not taken over; nor is a name that cannot be read."""
    owner(place, rundir).claim()
    copy, real = owner(place, copied(rundir)), Path.read_bytes
    unreadable = [str(rundir.chain_file)]

    def read_bytes(path: Path) -> bytes:
        if str(path) in unreadable:
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert copy.refusal() is not None
    unreadable[:] = [str(place / OWNER_NAME)]
    with pytest.raises(OSError, match="Input/output error"):
        copy.refusal()
    monkeypatch.undo()
    assert str(rundir.root) == recorded(place)


def test_a_damaged_name_is_nobodys(rundir: RunDir, place: Path) -> None:
    (place / OWNER_NAME).write_text("{")
    assert None is owner(place, rundir).refusal()
    assert str(rundir.root) == recorded(place)


def test_nothing_is_made_before_something_is_saved(rundir: RunDir, tmp_path: Path) -> None:
    """A file system that is not mounted must not look as if it were."""
    assert None is owner(tmp_path / "away" / "chain", rundir).refusal()
    assert not (tmp_path / "away").exists()


def test_without_hard_links_it_is_claimed_too(
    rundir: RunDir, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    owner(place, rundir).claim()
    assert [OWNER_NAME] == fsio.names_in(place)


@pytest.mark.parametrize("mode", [0o700, fsio.GROUP_DIRECTORY])
def test_it_is_read_by_those_who_read_the_checkpoints(
    rundir: RunDir, place: Path, mode: int
) -> None:
    place.chmod(mode)
    owner(place, rundir).claim()
    expected = 0o660 if mode == fsio.GROUP_DIRECTORY else 0o600
    assert expected == (place / OWNER_NAME).stat().st_mode & 0o777


@pytest.mark.parametrize("point", [p for p in fsio.KILL_POINTS if p.startswith("atomic.")])
@pytest.mark.parametrize("first", [True, False])
def test_a_death_while_it_is_written_leaves_no_half_of_it(
    rundir: RunDir, place: Path, point: str, first: bool
) -> None:
    """None, the old one or the new one; the next run claims it and clears up."""
    copy = rundir
    if not first:
        owner(place, rundir).claim()
        copy = copied(rundir)
        shutil.rmtree(rundir.root)
    code = (
        "import sys; from pathlib import Path; from hpc_ckpt.rundir import RunDir\n"
        "from hpc_ckpt.testing import kill_at; from hpc_ckpt.tiers.owner import Owner\n"
        f"kill_at({point!r}, 1)\n"
        "Owner(Path(sys.argv[1]), 'fast', RunDir(sys.argv[2]), sys.argv[3]).claim()"
    )
    arguments = [str(place), str(copy.root), owner(place, copy).chain]
    died = subprocess.run([sys.executable, "-c", code, *arguments], check=False, timeout=60)
    assert -signal.SIGKILL == died.returncode
    if (place / OWNER_NAME).exists():
        assert recorded(place) in (str(rundir.root), str(copy.root))
    assert None is owner(place, copy).refusal()
    assert ([OWNER_NAME], str(copy.root)) == (fsio.names_in(place), recorded(place))


def test_a_tier_that_hangs_holds_up_nobody_who_enters(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever lists it says so."""
    over = threading.Event()
    monkeypatch.setattr(Owner, "refusal", lambda _: over.wait(60))
    monkeypatch.setattr(asking, "PATIENCE_S", 0.2)
    wishes = [TierWish("fast", tmp_path / "tier"), TierWish("root")]
    stack = open_stack(wishes, rundir=rundir, chain="x")
    assert stack.hangs(stack.named("fast"))
    over.set()


def test_a_place_of_another_is_refused_when_the_stack_is_opened(
    rundir: RunDir, tmp_path: Path
) -> None:
    wishes = [TierWish("fast", tmp_path / "tier"), TierWish("root")]
    chain = (rundir.chain() or {})["chain"]
    (tmp_path / "tier" / chain).mkdir(parents=True)
    open_stack(wishes, rundir=rundir, chain=chain)
    with pytest.raises(RootError, match="move it away"):
        open_stack(wishes, rundir=copied(rundir), chain=chain)


@pytest.mark.parametrize("saved_before", [True, False])
def test_a_run_directory_that_stops_answering_keeps_nobody_from_saving_here(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_before: bool
) -> None:
    """Whose place it is was known when the link began."""
    place = tmp_path / "tier" / "chain"
    if saved_before:
        place.mkdir(parents=True)
    one, real = owner(place, rundir), os.stat
    assert None is one.refusal()
    place.mkdir(parents=True, exist_ok=True)

    def stat(path: Any, *arguments: Any, **more: Any) -> os.stat_result:
        if str(path) == str(rundir.root):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *arguments, **more)

    monkeypatch.setattr(os, "stat", stat)
    one.claim()
    monkeypatch.undo()
    assert str(rundir.root) == recorded(place)
