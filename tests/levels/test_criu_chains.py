"""Chains of programs that know nothing of it, saved by a real CRIU; real kills."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from chains_of_programs import LocalChain, kill_all, undisturbed, write_program

ROUNDS = {"c": 50, "bash": 200, "numpy": 90, "torch": 40}


@pytest.fixture
def chain(tmp_path: Path, criu: Path) -> Iterator[LocalChain]:
    running = LocalChain(tmp_path, criu)
    yield running
    running.close()


def lines(chain: LocalChain) -> int:
    path = chain.place / "result"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.parametrize("name", ["c", "bash", "numpy", "torch"])
def test_a_program_that_cannot_be_changed_ends_as_if_never_stopped(
    chain: LocalChain, name: str
) -> None:
    """Every line once, the same numbers; the last save of each link is where the next goes on."""
    command = write_program(chain.place, name, ROUNDS[name])
    expected = undisturbed(command, chain.place)
    chain.start(command, link_s=120)
    for link in (1, 2):
        chain.wait_for(lambda: lines(chain) >= link * ROUNDS[name] // 3)  # noqa: B023 - at once
        chain.rundir.give_notice(link, "test")
        chain.wait_for(lambda: len(chain.events("restored")) == link)  # noqa: B023 - at once
    assert 0 == chain.finish(), chain.story()
    assert expected == (chain.place / "result").read_text()
    assert {"1": "criu", "2": "criu", "3": "criu"} == chain.levels()["chosen"]


def test_a_killed_link_is_gone_on_from_the_last_save(chain: LocalChain) -> None:
    """What was written after the save is rolled back, and written again."""
    command = write_program(chain.place, "c", 2 * ROUNDS["c"])
    expected = undisturbed(command, chain.place)
    chain.start(command, link_s=60, save_s=0.8)
    chain.wait_for(lambda: chain.events("save.committed"))
    before = lines(chain)
    chain.wait_for(lambda: lines(chain) > before + 5)
    kill_all(chain.link_tree(1))
    assert 0 == chain.finish(), chain.story()
    assert expected == (chain.place / "result").read_text()
    (restored,) = chain.events("restored")
    assert restored["step"] > 0
    assert "result cut back to" in chain.rundir.log_file(2).read_text()


def test_the_program_ends_with_its_steward(chain: LocalChain) -> None:
    """Or two of them would write into the same files."""
    command = write_program(chain.place, "c", 100000)
    chain.start(command, link_s=60)
    chain.wait_for(lambda: lines(chain) > 2)
    link, steward, *below = chain.link_tree(1)
    assert len(below) == 3  # two keepers, the program
    program = Path(f"/proc/{below[-1]}")
    assert "count" in (program / "cmdline").read_text()
    kill_all((link, steward))
    chain.wait_for(lambda: not program.exists(), timeout_s=5)
    chain.rundir.write_halt("test")
    chain.finish()


def test_a_program_of_many_processes_keeps_its_pids(chain: LocalChain) -> None:
    """A shell with children and a pipe, saved in the middle of it."""
    script = "a=$$; (for i in {1..30}; do sleep 0.1; echo $i; done) | cat > result; [ $a = $$ ]"
    chain.start(["bash", "-c", script], link_s=60)
    chain.wait_for(lambda: lines(chain) >= 10)
    chain.rundir.give_notice(1, "test")
    assert 0 == chain.finish(), chain.story()
    assert [str(i) for i in range(1, 31)] == (chain.place / "result").read_text().split()
    assert chain.events("restored")


def test_the_exit_code_of_a_restored_program_is_known(chain: LocalChain) -> None:
    command = write_program(chain.place, "c", 4 * ROUNDS["c"])
    chain.start([*command, "7"], link_s=60, more=["--set", "chain.retries=0"])
    chain.wait_for(lambda: lines(chain) > 5)
    chain.rundir.give_notice(1, "test")
    assert 1 == chain.finish(), chain.story()
    assert chain.events("restored")
    assert "exit code 7" in chain.events("ended")[-1]["reason"], chain.story()


def test_a_damaged_image_falls_back_to_the_save_before(chain: LocalChain) -> None:
    command = write_program(chain.place, "c", 2 * ROUNDS["c"])
    expected = undisturbed(command, chain.place)
    chain.start(command, link_s=60, save_s=0.5)
    chain.wait_for(lambda: len(saves(chain)) >= 2)
    kill_all(chain.link_tree(1))
    damaged = saves(chain)[-1]
    image = max((damaged / "files").glob("pages-*.img"), key=lambda path: path.stat().st_size)
    with image.open("r+b") as stream:
        stream.seek(4096)
        stream.write(b"\xff" * 64)
    assert 0 == chain.finish(), chain.story()
    assert expected == (chain.place / "result").read_text()
    (restored,) = chain.events("restored")
    assert damaged.name in restored["skipped"][0]


def saves(chain: LocalChain) -> list[Path]:
    return sorted(chain.rundir.restarts.glob("step-*"))


def test_a_file_that_was_cut_is_named(chain: LocalChain) -> None:
    """To begin anew would lose everything: the chain fails, and says which file."""
    command = write_program(chain.place, "c", 100000)
    assert 1 == _interrupted(chain, command)
    os.truncate(chain.place / "result", 5)
    assert 1 == chain.run(command, link_s=8)
    assert f"{chain.place}/result: 5 bytes, but the program had written" in chain.story()


def _interrupted(chain: LocalChain, command: list[str]) -> int:
    """Stopped by its user after a restart has shown that it can be gone on from."""
    chain.start(command, link_s=60)
    chain.wait_for(lambda: lines(chain) > 2)
    chain.rundir.give_notice(1, "test")
    chain.wait_for(lambda: chain.events("restored"))
    chain.rundir.write_halt("test")
    return chain.finish()
