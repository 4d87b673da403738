"""The run directory's records: written by one wing, read by the other, damaged by anybody."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_ckpt import fsio
from hpc_ckpt.rundir import (
    MANIFEST_NAME,
    CheckpointKey,
    Done,
    Outcome,
    Result,
    RunDir,
    read_notice,
    write_outcome,
)


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    directory = RunDir(tmp_path / "run")
    directory.create()
    return directory


@given(
    st.integers(min_value=0, max_value=10**12),
    st.integers(min_value=0, max_value=10**10),
    st.integers(min_value=0, max_value=99),
)
def test_a_key_survives_its_directory_name(generation: int, step: int, revision: int) -> None:
    """And the name is the only spelling of it."""
    key = CheckpointKey(generation, step, revision)
    assert key == CheckpointKey.parse(key.directory_name)


@pytest.mark.parametrize(
    "name",
    ["", "step-1-g1", "step-000000001-g00000001-r0", "step-000000001-g00000001-r01", ".tmp-x",
     "step-0000000001-g00000001", "step-000000001-g00000001 ", "step-00000000١-g00000001"],
)  # fmt: skip
def test_other_names_are_no_checkpoints(name: str) -> None:
    """Two spellings of one checkpoint would be two checkpoints."""
    assert CheckpointKey.parse(name) is None


def test_the_order_is_generation_then_step_then_revision() -> None:
    """Once a newer generation has committed, nothing older is preferred at any step."""
    newest, second, third, oldest = (
        CheckpointKey(2, 11), CheckpointKey(2, 10, 1), CheckpointKey(2, 10), CheckpointKey(1, 900),
    )  # fmt: skip
    assert [oldest, third, second, newest] == sorted([newest, oldest, second, third])


def test_the_names_of_the_party_wall(rundir: RunDir) -> None:
    """Other people's scripts rely on them."""
    root = rundir.root
    assert {
        "HPC_CKPT_ROOT": f"{root}",
        "HPC_CKPT_GENERATION": "7",
        "HPC_CKPT_NOTICE": f"{root}/control/notice-7",
        "HPC_CKPT_DEADLINE": f"{root}/control/deadline-7",
        "HPC_CKPT_OUTCOME": f"{root}/control/outcome-7.json",
        "HPC_CKPT_SETTINGS": f"{root}/chain.json",
        "HPC_CKPT_BACKEND": "slurm",
    } == rundir.environment(7, "slurm")
    assert root / "ledger/00000007.jsonl" == rundir.ledger_file(7)
    assert root / "events/00000007-n1.jsonl" == rundir.events_file(7, "n1")


def test_run_directories_are_private(rundir: RunDir) -> None:
    """Nobody else reads a model by accident."""
    assert {0o700} == {
        path.stat().st_mode & 0o777 for path in [rundir.root, *rundir.root.iterdir()]
    }


def test_the_names_of_all_that_was_made_survive_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the first directory that was there before; what was there is not synced again."""
    synced: list[Path] = []
    monkeypatch.setattr(fsio, "sync_directory", lambda path: synced.append(Path(path)))
    place = RunDir(tmp_path / "new" / "deep" / "run")
    place.create()
    deep = place.root.parent
    assert {tmp_path, deep.parent, deep, place.root} == set(synced)
    synced.clear()
    place.create()
    assert [] == synced


def test_an_outcome_is_read_back(rundir: RunDir) -> None:
    """As the contract spells it."""
    told = Outcome(Result.SAVED, 3, 120, "deadline: 2s left")
    write_outcome(rundir.outcome_file(3), told)
    assert {"outcome": "saved", "generation": 3, "step": 120, "reason": "deadline: 2s left"} == (
        json.loads(rundir.outcome_file(3).read_text())
    )
    assert told == rundir.outcome(3)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"outcome": "perhaps"}', "null", "\x00"])
def test_a_broken_outcome_is_none(rundir: RunDir, text: str) -> None:
    """The exit code then decides."""
    rundir.outcome_file(1).write_text(text)
    assert rundir.outcome(1) is None


def test_done_needs_its_checkpoint(rundir: RunDir) -> None:
    """But a program without checkpoints is done by its word."""
    rundir.write_done(Done(2, 50))
    assert rundir.done() is None
    place = rundir.checkpoints / CheckpointKey(2, 50, 1).directory_name
    place.mkdir()
    assert rundir.done() is None
    (place / MANIFEST_NAME).touch()
    assert Done(2, 50) == rundir.done()
    rundir.write_done(Done(3, None))
    assert Done(3, None) == rundir.done()


@pytest.mark.parametrize("text", ["", "soon", "{}", "1e400"])
def test_a_deadline_that_cannot_be_read_is_unknown(rundir: RunDir, text: str) -> None:
    """Infinity is no deadline either."""
    rundir.deadline_file(1).write_text(text)
    assert rundir.deadline(1) is None


def test_one_line_is_a_notice_a_late_second_one_means_hurry(rundir: RunDir) -> None:
    """Two seconds or more after the first; duplicates at once are harmless."""
    path = rundir.notice_file(1)
    lines = ['{"time": 100.0, "source": "TERM", "hurry": false}',
             '{"time": 100.4, "source": "shim TERM", "hurry": false}',
             '{"time": 102.0, "source": "TERM", "hurry": false}']  # fmt: skip
    seen = []
    for count in (1, 2, 3):
        path.write_text("\n".join(lines[:count]) + "\n")
        notice = read_notice(path)
        assert notice is not None
        seen.append((len(notice.sources), notice.hurry))
    assert [(1, False), (2, False), (3, True)] == seen


@pytest.mark.parametrize("text", ["", "please stop", "{}", '{"time": "now"}', "\xff\xfe", "[1]"])
def test_anything_in_the_notice_file_is_a_notice(rundir: RunDir, text: str) -> None:
    """`touch control/notice-7` by hand must work."""
    rundir.notice_file(1).write_bytes(text.encode("latin-1"))
    notice = rundir.notice(1)
    assert notice is not None and not notice.hurry


def test_a_line_can_ask_for_hurry_at_once(rundir: RunDir) -> None:
    """hurry: true needs no second line."""
    rundir.give_notice(1, "operator", hurry=True)
    notice = rundir.notice(1)
    assert notice is not None
    assert (("operator",), True) == (notice.sources, notice.hurry)
