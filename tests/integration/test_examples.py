"""The examples: killed however often, they end with the bits of one run; and they stay short."""

from __future__ import annotations

import difflib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("image_classifier", "gpt", "gan")
MOST_LINES = 10


def start(name: str, place: Path) -> subprocess.Popen[str]:
    place.mkdir(exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HPC_CKPT")}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(EXAMPLES / f"{name}.py")],
        cwd=place,
        env={**kept, "OMP_NUM_THREADS": "1", "HPC_CKPT__CHECKPOINT__POLICY": "every 5 steps"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def last_line(process: subprocess.Popen[str]) -> str:
    told, errors = process.communicate(timeout=120)
    assert 0 == process.returncode, errors[-2000:]
    return told.splitlines()[-1]


@pytest.mark.parametrize("name", NAMES)
def test_killed_examples_end_with_the_same_weights(tmp_path: Path, name: str) -> None:
    """One by kill, one by the signal of a preemption, each in the middle of an epoch."""
    expected = last_line(start(name, tmp_path / "one"))
    assert expected.startswith("weights ")
    place = tmp_path / "many"
    for how in (signal.SIGKILL, signal.SIGTERM):
        target = max(_steps(place), default=0) + 20
        process = start(name, place)
        until = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < until:
            if max(_steps(place), default=0) >= target:
                break
            time.sleep(0.02)
        process.send_signal(how)
        process.communicate(timeout=60)
        assert 0 != process.returncode
    assert expected == last_line(start(name, place))
    events = "".join(path.read_text() for path in place.glob("runs/*/events/*.jsonl"))
    assert 2 == events.count('"event": "restored"')


def _steps(place: Path) -> list[int]:
    return [int(path.name.split("-")[1]) for path in place.glob("runs/*/checkpoints/step-*")]


@pytest.mark.parametrize("name", NAMES)
def test_the_difference_to_the_plain_program_is_short(name: str) -> None:
    """Indentation apart: what a reader has to write."""
    plain, ours = (
        [line.strip() for line in (folder / f"{name}.py").read_text().splitlines() if line.strip()]
        for folder in (EXAMPLES / "plain", EXAMPLES)
    )
    added = [line for line in difflib.ndiff(plain, ours) if line.startswith("+ ")]
    assert 0 < len(added) <= MOST_LINES, added
