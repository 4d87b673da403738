"""SIGKILL at random moments, again and again on one run directory: nothing committed is lost.

64 kills here; HPC_CKPT_SOAK=500 (`make soak`) makes it at least so many. What a failing round did
is printed with its seed; HPC_CKPT_SOAK_SEED repeats the orders, though not the scheduler's mood.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from random_kills import KEEP, Order

import hpc_ckpt
from hpc_ckpt import events, fsio
from hpc_ckpt.errors import NoCheckpoint
from hpc_ckpt.events import Event
from hpc_ckpt.format.verify import PIN_NAME
from hpc_ckpt.rundir import MANIFEST_NAME, CheckpointKey, RunDir
from hpc_ckpt.tiers.directory import DirectoryTier

SERVER = Path(__file__).with_name("random_kills.py")
KILLS = 64
"""In one round, which has one run directory from beginning to end."""
ROUNDS = max(1, -(-int(os.environ.get("HPC_CKPT_SOAK", "0")) // KILLS))
FIRST_SEED = int(os.environ.get("HPC_CKPT_SOAK_SEED", "1"))
LEFTOVER = re.compile(r"\.(tmp|trash)-g\d{8}-.+")
TEMPORARY = re.compile(r"\.tmp-\d+-\d+-[0-9a-f]{16}$")
FOREIGN = ("notes.txt", "checkpoints/notes.txt", "checkpoints/.tmp-mine", "checkpoints/mine")
"""What somebody else put into the run directory; no name of it is one of ours."""
ONCE = ("atomic.", "sweep.")
"""Points a victim meets only on its way in."""
OF_DRAINS = ("drain.", "replace.", "recover.")
POINTS = [point for point in fsio.KILL_POINTS if not point.startswith(OF_DRAINS)]
"""Those a victim with one tier can meet."""
AT_A_POINT_S = 5.0
"""So long a victim has for that; on a busy disk a few saves take seconds."""


class Server:
    """The parent of all victims."""

    def __init__(self, stderr: Path) -> None:
        self._stderr = stderr
        with stderr.open("w") as stream:
            self._process = subprocess.Popen(
                [sys.executable, str(SERVER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
            )
        assert "ready" == self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.said()
        return json.loads(line)

    def run(self, order: Order) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(order)) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = self._answer()
        return answer

    def said(self) -> str:
        return self._stderr.read_text()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    one = Server(tmp_path_factory.mktemp("server") / "stderr")
    yield one
    one.close()


@dataclass
class Chain:
    """A run directory, and everything that must still be true of it."""

    rundir: RunDir
    log: Path
    known: dict[CheckpointKey, bytes] = field(default_factory=dict)
    """Every checkpoint that ever was, with its manifest; empty where only the event told."""
    pinned: CheckpointKey | None = None
    entered: int = 0
    """How many victims came as far as their first line."""
    leftovers: int = 0
    """How often a death left something behind."""

    def __post_init__(self) -> None:
        self.rundir.checkpoints.mkdir(parents=True)
        for name in FOREIGN:
            (self.rundir.root / name).write_text(name)

    @property
    def tier(self) -> DirectoryTier:
        return DirectoryTier(self.rundir.checkpoints)

    def order(self, **fields: Any) -> Order:
        values = {"pause_s": 0.001, "delay_s": 30.0} | fields
        return Order(root=str(self.rundir.root), log=str(self.log), **values)

    # ── what must be true after every death ───────────────────────────────────────────────
    def check(self) -> None:
        before = max(self.known, default=None)
        self.learn()
        self.check_log(0 if before is None else before.step)
        self.check_nothing_lost()
        self.check_newest()
        self.check_strangers()

    def learn(self) -> None:
        """What is there now, and what the victims said they had committed."""
        for path in sorted(self.rundir.events.glob("*.jsonl")):
            for record in events.read(path):
                if record["event"] == Event.COMMITTED.value:
                    key = CheckpointKey.parse(record["checkpoint"])
                    assert key is not None
                    self.known.setdefault(key, b"")
        for key in self.tier.keys():  # noqa: SIM118 - not a mapping
            manifest = (self.tier.path_of(key) / MANIFEST_NAME).read_bytes()
            assert self.known.get(key) in (None, b"", manifest), f"{key} was written again"
            self.known[key] = manifest
        steps = [key.step for key in sorted(self.known)]
        assert sorted(set(steps)) == steps, "a step was committed again by a later generation"

    def check_log(self, newest: int) -> None:
        """The last victim went on from the newest; a step that was done twice is the same step."""
        lines = [line.split() for line in self.log.read_text().splitlines()]
        began = [int(line[1]) for line in lines if line[0] == "began"]
        fresh, self.entered = began[self.entered :], len(began)
        assert fresh in ([], [newest]), "committed work was done again, or not found"
        losses: dict[str, str] = {}
        for _, step, loss in (line for line in lines if line[0] == "step"):
            assert losses.setdefault(step, loss) == loss, f"step {step} came out differently"

    def required(self) -> set[CheckpointKey]:
        """What retention keeps of all that ever was."""
        ordered = sorted(self.known)
        kept = set(ordered[-KEEP["last"] :])
        kept |= {key for key in ordered if key.step % KEEP["every"] == 0}
        return kept | ({self.pinned} if self.pinned else set())

    def check_nothing_lost(self) -> None:
        present = self.tier.keys()
        assert [] == sorted(self.required() - set(present)), "retention should have kept these"
        assert {key: [] for key in present} == {key: self.tier.verify(key) for key in present}

    def check_newest(self) -> None:
        if not self.known:
            with pytest.raises(NoCheckpoint):
                hpc_ckpt.latest(self.rundir.root)
            return
        newest = max(self.known)
        path = hpc_ckpt.latest(self.rundir.root)
        assert newest.directory_name == path.name
        state = hpc_ckpt.load(path)
        tracked = state["tracked"]
        assert newest.step == state["progress"]["step"]
        assert (tracked["mark"] == newest.step).all()
        assert newest.step == tracked["optimizer"]["state"][0]["step"]
        assert (tracked["model"]["frozen"] == 0.5).all()

    def check_strangers(self) -> None:
        """Only our own names come and go."""
        assert list(FOREIGN) == [(self.rundir.root / name).read_text() for name in FOREIGN]
        names = fsio.names_in(self.rundir.checkpoints)
        ours = [name for name in names if f"checkpoints/{name}" not in FOREIGN]
        left = [name for name in ours if CheckpointKey.parse(name) is None]
        assert [] == [name for name in left if not LEFTOVER.fullmatch(name)]
        self.leftovers += bool(left)

    # ── and after the next run's first commit ─────────────────────────────────────────────
    def check_tidy(self) -> None:
        """No leftovers, and exactly what retention keeps, with what that refers to."""
        names = fsio.names_in(self.rundir.checkpoints)
        assert [] == [name for name in names if LEFTOVER.fullmatch(name)]
        required = self.required()
        held = {
            CheckpointKey.parse(shard.get("in", key.directory_name))
            for key in required
            for shard in json.loads(self.known[key])["shards"]
        }
        assert sorted(required | held) == self.tier.keys()

    def pin_oldest(self) -> None:
        self.pinned = min(self.tier.keys())
        (self.tier.path_of(self.pinned) / PIN_NAME).touch()


def orders(chain: Chain, dice: random.Random) -> Iterator[Order]:
    """Half of them die by the clock, half at a kill point: each point once before any again."""
    points: list[str] = []
    for number in range(KILLS):
        pause = dice.choice([0.0005, 0.004, 0.02])
        if number % 2:
            points = points or dice.sample(POINTS, len(POINTS))
            point = points.pop()
            nth = 1 if point.startswith(ONCE) else dice.randint(1, 5)
            yield chain.order(pause_s=pause, delay_s=AT_A_POINT_S, fault=f"kill@{point}:{nth}")
        else:
            yield chain.order(pause_s=pause, delay_s=dice.uniform(0, 0.5))


@pytest.mark.parametrize("number", range(ROUNDS))
def test_random_deaths_lose_nothing_committed(server: Server, tmp_path: Path, number: int) -> None:
    """After each: the newest committed one loads and is whole, nothing that should be kept is
    gone, no step was lost, and the next run that commits clears up.
    """
    seed = FIRST_SEED + number
    dice = random.Random(seed)
    chain = Chain(RunDir(tmp_path / "run"), tmp_path / "log")
    chain.log.touch()
    at_points = 0
    for count, order in enumerate(orders(chain, dice)):
        died = server.run(order)
        print(f"seed {seed}, kill {count}: {died} of {order}")
        assert -signal.SIGKILL == died["code"], server.said()
        at_points += not died["timed"]
        chain.check()
        if dice.random() < 0.25:
            ended = server.run(chain.order(steps=1))
            print(f"seed {seed}, after kill {count}: {ended}")
            assert 0 == ended["code"], server.said()
            chain.check()
            chain.check_tidy()
            if chain.pinned is None:
                chain.pin_oldest()
    # Otherwise the deaths were not where they matter.
    assert at_points >= KILLS // 4
    assert chain.leftovers >= KILLS // 16
    assert len(chain.known) >= KILLS


def test_the_next_run_clears_up_outside_of_the_checkpoints_too(
    server: Server, tmp_path: Path
) -> None:
    """A death while chain.json or a lease is written leaves a temporary file, but not for good."""
    chain = Chain(RunDir(tmp_path / "run"), tmp_path / "log")
    for _ in range(2):
        assert -signal.SIGKILL == server.run(chain.order(fault="kill@atomic.written:1"))["code"]
    left = [path for path in chain.rundir.root.rglob("*") if TEMPORARY.search(path.name)]
    assert 2 == len(left)
    assert 0 == server.run(chain.order(steps=1))["code"], server.said()
    assert [] == [path for path in left if path.exists()]
