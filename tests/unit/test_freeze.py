"""The code of a chain as it was at submission."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpc_ckpt.chain.freeze import freeze
from hpc_ckpt.chain.spec import PinCode
from hpc_ckpt.errors import SpecError


def git(place: Path, *words: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run(["git", *identity, *words], cwd=place, check=True, capture_output=True)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    place = tmp_path / "code"
    (place / "sub").mkdir(parents=True)
    git(place, "init", "-q")
    (place / ".gitignore").write_text("data\n")
    (place / "train.py").write_text("one")
    (place / "sub" / "part.py").write_text("part")
    (place / "data").write_text("large")
    git(place, "add", ".")
    git(place, "commit", "-qm", "first")
    return place


def test_a_commit_is_unpacked_as_git_has_it(code: Path, tmp_path: Path) -> None:
    where = freeze(PinCode.COMMIT, code, tmp_path)
    assert ("one", "part") == (
        (where / "train.py").read_text(),
        (where / "sub/part.py").read_text(),
    )
    assert not (where / "data").exists()


def test_a_commit_of_a_subdirectory_is_that_subdirectory(code: Path, tmp_path: Path) -> None:
    assert "part" == (freeze(PinCode.COMMIT, code / "sub", tmp_path) / "part.py").read_text()


def test_changes_that_no_commit_has_are_refused(code: Path, tmp_path: Path) -> None:
    (code / "train.py").write_text("two")
    with pytest.raises(SpecError, match="changes that no commit has; commit them, or write copy"):
        freeze(PinCode.COMMIT, code, tmp_path)
    assert [] == list(tmp_path.glob("code-*"))


@pytest.mark.parametrize("kind", list(PinCode))
def test_a_chain_that_is_resumed_keeps_its_code(code: Path, tmp_path: Path, kind: PinCode) -> None:
    """Its working directory is the copy, which has no commit of its own."""
    where = freeze(kind, code, tmp_path)
    assert where == freeze(kind, where, tmp_path)
    assert tmp_path / "code-0002" == freeze(kind, code, tmp_path)


@pytest.mark.parametrize("kind", list(PinCode))
def test_a_copy_is_known_by_its_place_and_not_its_name(
    code: Path, tmp_path: Path, kind: PinCode
) -> None:
    """/scratch is a link on many a site, and the root is written down as the user wrote it."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    where = freeze(kind, code, tmp_path / "real")
    assert where == freeze(kind, where, tmp_path / "link")
    by_link = tmp_path / "link" / where.name
    assert by_link == freeze(kind, by_link, tmp_path / "real")


def test_a_copy_of_nothing_is_refused(tmp_path: Path) -> None:
    """No link would find its program there."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecError, match=r"there is no file in .*empty to copy"):
        freeze(PinCode.COPY, tmp_path / "empty", tmp_path)
    assert [] == list(tmp_path.glob("code-*"))


def test_a_copy_has_the_files_as_they_are(code: Path, tmp_path: Path) -> None:
    (code / "train.py").write_text("two")
    (code / "new.py").write_text("new")
    where = freeze(PinCode.COPY, code, tmp_path)
    assert ("two", "new") == ((where / "train.py").read_text(), (where / "new.py").read_text())
    assert not (where / "data").exists()


def test_without_git_a_copy_has_what_is_not_hidden(tmp_path: Path) -> None:
    place = tmp_path / "plain"
    (place / ".cache").mkdir(parents=True)
    (place / ".cache" / "x").write_text("")
    (place / "run.sh").write_text("echo")
    where = freeze(PinCode.COPY, place, tmp_path)
    assert ["run.sh"] == sorted(path.name for path in where.rglob("*"))
    with pytest.raises(SpecError, match="no git repository"):
        freeze(PinCode.COMMIT, place, tmp_path)


def test_too_much_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_ckpt.chain.freeze.MOST_FILES", 1)
    place = tmp_path / "plain"
    place.mkdir()
    for name in "ab":
        (place / name).touch()
    with pytest.raises(SpecError, match=r"2 files.*too much to copy"):
        freeze(PinCode.COPY, place, tmp_path)
