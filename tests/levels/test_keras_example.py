"""The Keras example as a chain: killed, its newest file cut off, the same numbers in the end."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from molecules import cut, kill

from hpc_ckpt.levels.restarts import Restarts
from hpc_ckpt.rundir import RunDir

SCRIPT = Path(__file__).parents[2] / "examples" / "keras_epochs.py"
EPOCHS = "60"
LOSS = re.compile(r"^(?:epoch \d+|end:) loss .*$", re.MULTILINE)
ENVIRONMENT = {**os.environ, "KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"}


@pytest.mark.skipif(
    importlib.util.find_spec("keras") is None and os.environ.get("CI") != "true",
    reason="keras is in the extra 'dev'",
)
def test_a_chain_of_the_keras_example_ends_with_the_same_loss(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    script = tmp_path / "train.py"  # with a number in the name that is no epoch
    script.write_text(SCRIPT.read_text().replace("/{epoch}.keras", "/resnet50_{epoch:03d}.keras"))
    done = subprocess.run(
        [sys.executable, script, EPOCHS], cwd=tmp_path / "whole", env=ENVIRONMENT,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    reference = LOSS.findall(done.stdout)
    place = tmp_path / "here"
    place.mkdir()
    spec = {
        "command": [sys.executable, str(script), EPOCHS],
        "root": "run",
        "chain": {"link_time": "3 min", "max_links": "5"},
        "checkpoint": {"policy": "every 1s"},
    }
    (place / "spec.yaml").write_text(json.dumps(spec))
    store = Restarts(RunDir(place / "run"))

    def strike() -> None:
        end = time.monotonic() + 120
        while time.monotonic() < end and not store.keys():
            time.sleep(0.05)
        kill(place, "python", EPOCHS)
        for path in (place / "training_2").glob("*.keras"):
            cut(path)
        shutil.copy(path, place / "training_2" / "resnet50_900.keras")  # the one it was writing

    striking = threading.Thread(target=strike)
    striking.start()
    done = subprocess.run(
        [sys.executable, "-m", "hpc_ckpt.cli", "run", "spec.yaml"], cwd=place, env=ENVIRONMENT,
        capture_output=True, text=True,
    )  # fmt: skip
    striking.join()
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "level     keras" in done.stdout
    assert re.search(r"\bkilled\b", done.stdout)
    logs = "".join(p.read_text() for p in sorted((place / "run" / "logs").glob("link-*")))
    began = [int(epoch) for epoch in re.findall(r"goes on from epoch (\d+)", logs)]
    assert 0 == began[0] and began[-1] > 0
    assert (place / "training_2" / "resnet50_900.keras.aside").exists()
    assert set(reference) >= set(LOSS.findall(logs))
    steps = {key.step for key in sorted(store.keys())}
    assert {50} != steps and steps <= set(range(5, 61, 5))
    assert reference[-1] == LOSS.findall(logs)[-1]
