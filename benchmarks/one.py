"""The process in which one thing is measured: reads a job, writes its result."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import importlib
import json
import logging
import sys
import warnings
from contextlib import suppress
from pathlib import Path

MEASURES = {
    "limits": "limits.measure",
    "peer": "grid.measure",
    "ours": "ours.measure",
    "restore": "ours.restore",
    "stolen": "stolen.measure",
    "competing": "competing.measure",
    "tiny": "tiny.measure",
    "frozen": "frozen.measure",
    "resume": "resume.measure",
    "tiers": "tiers.measure",
}


def main() -> None:
    job, target = json.loads(sys.argv[1]), Path(sys.argv[2])
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    _offer_to_the_oom_killer()
    module, _, function = MEASURES[job["kind"]].partition(".")
    measure = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    target.write_text(json.dumps(measure(job)))


def _offer_to_the_oom_killer() -> None:
    """If memory runs out, it is this process that goes."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    main()
