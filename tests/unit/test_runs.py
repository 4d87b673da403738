"""The index of a user's runs: newest last, bounded, and never in the way."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_ckpt.chain import runs
from hpc_ckpt.chain.runs import index_file, known_runs, last_run, remember


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path / "state"), "HOME": "/nonexistent"}


def made(tmp_path: Path, name: str) -> Path:
    root = tmp_path / name
    (root / "lease").mkdir(parents=True)
    return root


def test_the_last_run_is_the_newest(tmp_path: Path, environ: dict[str, str]) -> None:
    """Also when an older root is submitted again."""
    assert last_run(environ) is None
    one, two = made(tmp_path, "one"), made(tmp_path, "two")
    remember(one, "first", environ)
    remember(two, "second", environ)
    assert two == last_run(environ)
    remember(one, "first", environ)
    assert one == last_run(environ)
    assert [str(two), str(one)] == [run.root for run in known_runs(environ)]


def test_a_sweep_is_a_run(tmp_path: Path, environ: dict[str, str]) -> None:
    """Else `stop last` would stop the chain before it."""
    remember(made(tmp_path, "chain"), "first", environ)
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    (sweep / "sweep.json").write_text('{"members": []}')
    remember(sweep, "second", environ)
    assert sweep == last_run(environ)


def test_runs_that_are_gone_are_passed_over(tmp_path: Path, environ: dict[str, str]) -> None:
    """People delete their runs."""
    one = made(tmp_path, "one")
    remember(one, "first", environ)
    remember(tmp_path / "gone", "second", environ)
    assert one == last_run(environ)


def test_broken_lines_are_passed_over(tmp_path: Path, environ: dict[str, str]) -> None:
    """And a torn last line does not spoil the next one."""
    one, two = made(tmp_path, "one"), made(tmp_path, "two")
    remember(one, "first", environ)
    path = index_file(environ)
    assert path is not None
    with path.open("ab") as stream:
        stream.write(b'\xff\n[]\n"x"\n{"root": 3}\n{"root": "/x", "tim')
    remember(two, "second", environ)
    assert [str(one), str(two)] == [run.root for run in known_runs(environ)]


def test_it_stays_small(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest are kept."""
    monkeypatch.setattr(runs, "MOST_BYTES", 2000)
    monkeypatch.setattr(runs, "KEPT", 5)
    root = made(tmp_path, "one")
    for number in range(100):
        remember(tmp_path / f"old-{number}", "x", environ)
        remember(root, f"run {number}", environ)
    path = index_file(environ)
    assert path is not None
    assert path.stat().st_size < 4000
    assert "run 99" == known_runs(environ)[-1].name


def test_the_usual_place() -> None:
    """By the rules of the XDG directories."""
    assert Path("/h/.local/state/hpc_ckpt/runs") == index_file({"HOME": "/h"})
    assert Path("/s/hpc_ckpt/runs") == index_file({"HOME": "/h", "XDG_STATE_HOME": "/s"})
    assert Path("/h/.local/state/hpc_ckpt/runs") == index_file(
        {"HOME": "/h", "XDG_STATE_HOME": "s"}
    )
    assert index_file({}) is None


def test_where_nothing_can_be_written_nothing_is(tmp_path: Path) -> None:
    """A submission never fails for it."""
    (tmp_path / "file").write_text("")
    remember(tmp_path, "x", {"XDG_STATE_HOME": str(tmp_path / "file")})
    remember(tmp_path, "x", {})
    assert [] == known_runs({"XDG_STATE_HOME": str(tmp_path / "file")})


def test_a_lock_that_somebody_keeps_is_not_waited_for(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for ever."""
    monkeypatch.setattr(runs, "PATIENCE_S", 0.1)
    path = index_file(environ)
    assert path is not None
    path.parent.mkdir(parents=True)
    with runs._locked(path):
        remember(made(tmp_path, "one"), "x", environ)
    assert [] == known_runs(environ)


MANY = """
import sys
from pathlib import Path
from hpc_ckpt.chain.runs import remember
for number in range(50):
    remember(Path(sys.argv[1]), str(number), {"XDG_STATE_HOME": sys.argv[2]})
"""


def test_submissions_at_the_same_time_lose_nothing(tmp_path: Path, environ: dict[str, str]) -> None:
    """Every line is whole and there."""
    roots = [made(tmp_path, f"r{number}") for number in range(4)]
    command = [sys.executable, "-c", MANY]
    workers = [subprocess.Popen([*command, str(root), environ["XDG_STATE_HOME"]]) for root in roots]
    assert [0] * 4 == [worker.wait() for worker in workers]
    path = index_file(environ)
    assert path is not None
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert 200 == len(records)
    assert 4 == len(known_runs(environ))
