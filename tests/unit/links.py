"""A run directory as a submission leaves it: the least that a link needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpc_ckpt.rundir import RunDir


def make_chain(root: Path, **more: Any) -> RunDir:
    """`more` is laid over its chain.json; what is said of the spec is laid over the spec."""
    place = RunDir(root)
    place.create()
    place.chain_file.write_text(json.dumps(chain_record(**more)))
    return place


def chain_record(*, spec: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "argv": ["true"],
        "cwd": "/",
        "spec": {"chain": {"max_links": 9}, **(spec or {})},
        "profile": {"signal": {"name": "USR1"}, "kill_wait": "5s"},
        **more,
    }
