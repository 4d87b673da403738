"""A sweep on disk, as its submission leaves it."""

from __future__ import annotations

import json
from pathlib import Path

from hpc_ckpt.rundir import RunDir


def make_sweep(root: Path, count: int, parallel: int | None = None) -> list[RunDir]:
    made = []
    for number in range(count):
        rundir = RunDir(root / f"x-{number}")
        rundir.create()
        member = {"index": number + 1, "name": rundir.root.name, "values": {"x": str(number)}}
        record = {"chain": "u", "sweep": str(root), "member": member, "jobs": []}
        rundir.chain_file.write_text(json.dumps(record))
        made.append(rundir)
    listed = [{"name": rundir.root.name, "values": {"x": str(i)}} for i, rundir in enumerate(made)]
    record = {"name": "s", "jobs": ["7"], "members": listed, "parallel": parallel}
    (root / "sweep.json").write_text(json.dumps(record))
    (root / "chain.sbatch").write_text("#!/bin/bash\n")
    (root / "logs").mkdir()
    return made
