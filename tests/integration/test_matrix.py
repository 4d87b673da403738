"""Loaders × workers × samplers × optimizers × kills: what is computed is what one run computes.

hypothesis picks the cases; every kill is a real signal to a real process, at a moment of its own.
HPC_CKPT_MATRIX asks for more cases.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

PROGRAM = Path(__file__).parent / "programs" / "matrix.py"
CASES = int(os.environ.get("HPC_CKPT_MATRIX", "16"))
SIZE, EPOCHS = 22, 2
LOADERS = (
    "sequential", "shuffled", "own generator", "weighted", "distributed", "uneven", "stateful",
    "stream", "forgetful stream", "list",
)  # fmt: skip
OPTIMIZERS = ("sgd", "adam", "fused", "lbfgs", "rprop", "sparse")
ONCE = set(LOADERS) - {"weighted", "distributed"}
"""Those that use each sample once in an epoch; the others draw as their sampler does."""


RESTORED: list[int] = []
"""How many links of each case went on from a checkpoint."""


@dataclass(frozen=True)
class Kill:
    signal: int
    after: int
    delay_s: float


class Zygote:
    """Has torch imported, and forks a run whenever it is asked to."""

    def __init__(self) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HPC_CKPT")}
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**kept, "OMP_NUM_THREADS": "1"},
            text=True,
        )

    def run(self, shape: dict[str, Any], kill: Kill | None) -> int:
        """One link, killed as asked; its exit code."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        before = len(steps_in(Path(shape["log"])))
        process.stdin.write(json.dumps(shape) + "\n")
        process.stdin.flush()
        child = int(process.stdout.readline())
        if kill is not None:
            self._kill(child, Path(shape["log"]), before, kill)
        return int(process.stdout.readline())

    @staticmethod
    def _kill(child: int, log: Path, before: int, kill: Kill) -> None:
        until = time.monotonic() + 30
        while time.monotonic() < until and _is_alive(child):
            if len(steps_in(log)) >= before + kill.after:
                time.sleep(kill.delay_s)
                break
            time.sleep(0.002)
        try:
            os.kill(child, kill.signal)
        except ProcessLookupError:
            return

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


def _is_alive(child: int) -> bool:
    try:
        return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def lines_in(log: Path) -> list[list[str]]:
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def steps_in(log: Path) -> list[list[str]]:
    return [line for line in lines_in(log) if line[0].isdecimal()]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    RESTORED.clear()
    yield made
    made.close()
    # Else a program that always starts afresh would pass.
    assert sum(RESTORED) >= len(RESTORED) // 2


shapes = st.fixed_dictionaries(
    {
        "loader": st.sampled_from(LOADERS),
        "workers": st.sampled_from((0, 0, 1, 2)),
        "persistent": st.booleans(),
        "batch": st.sampled_from((3, 4, 5)),
        "drop_last": st.booleans(),
        "optimizer": st.sampled_from(OPTIMIZERS),
        "policy": st.sampled_from(("every 1 steps", "every 3 steps", "every 7 steps")),
        "seed": st.integers(0, 1000),
    }
)
kills = st.lists(
    st.builds(
        Kill,
        st.sampled_from((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)),
        st.integers(0, 6),
        st.sampled_from((0.0, 0.001, 0.004, 0.01)),
    ),
    min_size=1,
    max_size=3,
)


def each_loader(test: Any) -> Any:
    """One case of each kind whatever hypothesis picks, killed where a checkpoint is behind it."""
    for number, loader in enumerate(LOADERS):
        shape = {
            "loader": loader,
            "workers": number % 3,
            "persistent": number % 2 == 0,
            "batch": 3,
            "drop_last": False,
            "optimizer": OPTIMIZERS[number % len(OPTIMIZERS)],
            "policy": "every 1 steps",
            "seed": number,
        }
        test = example(shape=shape, plan=[Kill(signal.SIGKILL, 9, 0.01)])(test)
    return test


@each_loader
@settings(
    max_examples=CASES,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],  # each smaller case would cost seconds
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(shape=shapes, plan=kills)
def test_a_killed_run_computes_what_one_run_computes(
    zygote: Zygote,
    tmp_path_factory: pytest.TempPathFactory,
    shape: dict[str, Any],
    plan: list[Kill],
) -> None:
    """Bit-equal losses, the same samples, the same weights, the same numbers at an epoch's end."""
    place = tmp_path_factory.mktemp("matrix")
    whole = {**shape, "epochs": EPOCHS, "pause": 0.0}
    expected = place / "expected"
    assert 0 == zygote.run({**whole, "root": str(place / "one"), "log": str(expected)}, None)
    found = place / "found"
    link = {**whole, "pause": 0.004, "root": str(place / "many"), "log": str(found)}
    for kill in plan:
        zygote.run(link, kill)
    code = zygote.run(link, None)
    assert 0 == code, Path(f"{found}.err").read_text()[-2000:]
    assert not started_afresh_after_a_commit(place / "many")
    RESTORED.append(restores(place / "many"))
    whole_run = by_step(expected)
    assert whole_run == by_step(found)
    # Not only the last time: what a link computed and lost was the same already.
    assert all(line == whole_run[line[0]] for line in steps_in(found))
    assert once(expected, "end-of-epoch") == once(found, "end-of-epoch")
    assert once(expected, "complete") == once(found, "complete")
    if shape["loader"] in ONCE:
        used = Counter(
            (line[1], index) for line in by_step(found).values() for index in line[3].split(",")
        )
        assert {1} == set(used.values())
        if not shape["drop_last"] or shape["loader"] in ("uneven", "list"):
            assert EPOCHS * SIZE == len(used)


def restores(root: Path) -> int:
    return sum(record["event"] == "restored" for record in happened(root))


def started_afresh_after_a_commit(root: Path) -> bool:
    names = [record["event"] for record in happened(root)]
    return "save.committed" in names and "started_fresh" in names[names.index("save.committed") :]


def happened(root: Path) -> list[dict[str, Any]]:
    """In the order of the links, and of what each wrote."""
    lines = [
        line
        for path in sorted((root / "events").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return [json.loads(line) for line in lines if line.endswith("}")]


def by_step(log: Path) -> dict[str, list[str]]:
    """Each step as it was last made: what was made before a kill and not saved is made again."""
    return {line[0]: line for line in steps_in(log)}


def once(log: Path, word: str) -> set[tuple[str, ...]]:
    """However often it was written, the same was written."""
    return {tuple(line) for line in lines_in(log) if line[0] == word}
