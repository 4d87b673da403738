"""The program's output: the end of a log, and what comes after it, link after link."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_ckpt.chain.following import (
    CHUNK,
    Follower,
    Piece,
    chosen_link,
    last_lines,
    read_log,
    start_of_last,
)
from hpc_ckpt.errors import RootError
from hpc_ckpt.rundir import RunDir


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    return rundir


def begin(rundir: RunDir, link: int, text: str | bytes | None = None) -> None:
    (rundir.lease / f"{link:08d}").write_text(json.dumps({"host": "n1"}))
    if text is not None:
        add(rundir, link, text)


def add(rundir: RunDir, link: int, text: str | bytes) -> None:
    with rundir.log_file(link).open("ab") as stream:
        stream.write(text.encode() if isinstance(text, str) else text)


# ── one log ───────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("text", "lines", "expected"),
    [
        ("a\nb\nc\n", 2, "b\nc\n"),
        ("a\nb\nc", 2, "b\nc"),
        ("a\nb\n", 5, "a\nb\n"),
        ("a\n", 1, "a\n"),
        ("", 3, ""),
        ("a\nb\n", 0, ""),
        ("\n\n\n", 2, "\n\n"),
        ("ü\né\n", 1, "é\n"),
    ],
)
def test_the_last_lines(tmp_path: Path, text: str, lines: int, expected: str) -> None:
    """A last line without an end is a line."""
    (tmp_path / "log").write_text(text)
    assert expected == "".join(read_log(tmp_path / "log", lines))


def test_the_last_lines_of_a_long_log(tmp_path: Path) -> None:
    """Found from its end, over the borders of what is read at once."""
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"%07d\n" % number for number in range(CHUNK)))
    assert ["0065534", "0065535"] == "".join(read_log(path, 2)).split()
    assert 8 * (CHUNK - 20_000) == start_of_last(path, 20_000)
    assert 0 == start_of_last(path, 10**9)


def test_a_character_is_not_cut_in_two(tmp_path: Path) -> None:
    """Nor is what is no text an error."""
    path = tmp_path / "log"
    path.write_bytes(b"x" * (CHUNK - 1) + "ü".encode() + b"\xff\n")
    assert "xü\ufffd\n" == "".join(read_log(path))[-4:]


def test_a_line_without_end_is_looked_at_from_its_end(tmp_path: Path) -> None:
    """A progress bar writes one line of megabytes."""
    path = tmp_path / "log"
    path.write_bytes(b"\r".join(b"step %d" % number for number in range(50_000)))
    assert ["step 49998", "step 49999"] == last_lines(path, 2)
    assert [] == last_lines(tmp_path / "none", 2)


def test_which_link(rundir: RunDir) -> None:
    """The newest that has printed anything, or the one asked for."""
    with pytest.raises(RootError, match="no link has printed anything yet"):
        chosen_link(rundir, None)
    begin(rundir, 1, "a\n")
    begin(rundir, 2, "b\n")
    begin(rundir, 3)
    assert (2, 1) == (chosen_link(rundir, None), chosen_link(rundir, 1))
    with pytest.raises(RootError, match="link 3 has no output; it has 1, 2"):
        chosen_link(rundir, 3)
    with pytest.raises(RootError, match="no run there"):
        chosen_link(RunDir(rundir.root / "x"), None)


# ── following ─────────────────────────────────────────────────────────────────────────────
class Play:
    """Something happens at every pause of the follower; after the last the chain is over."""

    def __init__(self, rundir: RunDir, *acts: Callable[[], None]) -> None:
        self._acts: Iterator[Callable[[], None]] = iter(acts)
        self._now = 0.0
        self._over = not acts
        self._left = len(acts)
        self._rundir = rundir

    def sleep(self, seconds: float) -> None:
        self._now += 10.0
        next(self._acts)()
        self._left -= 1
        self._over = self._left == 0

    def clock(self) -> float:
        return self._now

    def over(self, rundir: RunDir) -> bool:
        return self._over

    def follow(self, link: int | None = None, lines: int = 10) -> list[tuple[int, str]]:
        follower = Follower(
            self._rundir, link, lines=lines, over=self.over, sleep=self.sleep, clock=self.clock
        )
        return joined(follower.pieces())


def joined(pieces: Iterator[Piece]) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for piece in pieces:
        if found and found[-1][0] == piece.link:
            found[-1] = (piece.link, found[-1][1] + piece.text)
        else:
            found.append((piece.link, piece.text))
    return found


def test_it_goes_on_with_the_next_link(rundir: RunDir) -> None:
    """The rest of the one before comes first, then all of the next; and it ends by itself."""
    begin(rundir, 1, "old\nshown\n")

    def second_begins() -> None:
        add(rundir, 1, "rest of one\n")
        begin(rundir, 2, "two\n")

    play = Play(
        rundir, lambda: add(rundir, 1, "more\n"), second_begins, lambda: add(rundir, 2, "end")
    )
    assert [(1, "shown\nmore\nrest of one\n"), (2, "two\nend")] == play.follow(1, lines=1)


def test_it_waits_for_the_first_link(rundir: RunDir) -> None:
    """A chain can be in the queue for hours."""
    play = Play(rundir, lambda: None, lambda: begin(rundir, 1), lambda: add(rundir, 1, "a\n"))
    assert [(1, "a\n")] == play.follow()


def test_links_that_began_between_two_looks_are_all_told(rundir: RunDir) -> None:
    """Also those that ended meanwhile; one that printed nothing is passed over."""
    begin(rundir, 1, "one\n")

    def much() -> None:
        begin(rundir, 2, "two\n")
        begin(rundir, 3)
        begin(rundir, 4, "four\n")

    assert [(1, "one\n"), (2, "two\n"), (4, "four\n")] == Play(rundir, much).follow(1)


def test_a_log_that_was_cut_short_is_read_anew(rundir: RunDir) -> None:
    """Somebody keeps logs small."""
    begin(rundir, 1, "a long line\n")
    play = Play(rundir, lambda: rundir.log_file(1).write_bytes(b"new\n") and None)
    assert [(1, "a long line\nnew\n")] == play.follow(1)


def test_a_log_that_vanished_is_no_error(rundir: RunDir) -> None:
    """Nor does it end the following."""
    begin(rundir, 1, "a\n")
    play = Play(rundir, lambda: rundir.log_file(1).unlink(), lambda: begin(rundir, 2, "b\n"))
    assert [(1, "a\n"), (2, "b\n")] == play.follow(1)


def test_half_a_character_waits_for_its_other_half(rundir: RunDir) -> None:
    """What is read may end in the middle of one."""
    begin(rundir, 1, b"\xc3")
    assert [(1, "ü")] == Play(rundir, lambda: add(rundir, 1, b"\xbc")).follow(1)


def test_a_chain_that_is_over_is_only_shown(rundir: RunDir) -> None:
    """No waiting."""
    begin(rundir, 1, "a\nb\n")
    assert [(1, "b\n")] == Play(rundir).follow(1, lines=1)
