"""The environment a link gives to its program. Standard library only: the link runner asks it."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
from collections.abc import Mapping

from .. import lease, resources
from ..rundir import RunDir
from .orders import Orders

ENV_RUN_ID = "HPC_CKPT_RUN_ID"
ENV_MEMBER = "HPC_CKPT_MEMBER"
ENV_FORWARD = "HPC_CKPT_FORWARD"
ENV_SHIM = "HPC_CKPT_SHIM"
"""For an srun inside the command: its tasks hear the scheduler's signals themselves."""
ENV_FENCE = "HPC_CKPT_FENCE"
"""For the shim: the file whose appearance means that the next link has begun."""
ENV_FENCING = "HPC_CKPT_FENCING"
"""Set by a shim for those inside its command."""
MLFLOW_RUN_FILE = "mlflow-run-id"
"""MLflow's server makes run ids itself: a program that writes its own here keeps it."""


def environment(
    given: Mapping[str, str], rundir: RunDir, orders: Orders, generation: int, backend: str
) -> dict[str, str]:
    """What is given, and over it what every link of the chain must find the same."""
    found = {**_logger_ids(rundir, orders), **given, **orders.environment}
    found.update(rundir.environment(generation, backend))
    found[ENV_RUN_ID] = run_id(orders)
    found[ENV_SHIM] = str(resources.find("templates/shim.sh"))
    if orders.threads:
        # Another thread count gives other sums: the same for every link of the chain.
        found.setdefault("OMP_NUM_THREADS", str(orders.threads))
    for name in (ENV_FENCE, ENV_FENCING):
        found.pop(name, None)  # of a link around this one
    if orders.alone:
        found[ENV_FENCE] = str(lease.file_of(rundir, generation + 1))
    if orders.forward is not None:
        found[ENV_FORWARD] = " ".join(orders.forward)
    if orders.member is not None:
        found[ENV_MEMBER] = orders.member.name
        found |= {f"{ENV_MEMBER}_{k.upper()}": v for k, v in orders.member.values.items()}
    return found


def run_id(orders: Orders) -> str:
    """The same in every link, unlike that of any other chain."""
    return f"{orders.name}-{orders.chain.replace('-', '')[:12]}"


def _logger_ids(rundir: RunDir, orders: Orders) -> dict[str, str]:
    """Experiment trackers take a restarted program for the same run. The user's own ids win."""
    stable = run_id(orders)
    ids = {
        "WANDB_RUN_ID": stable,
        "WANDB_RESUME": "allow",
        "MLFLOW_RUN_NAME": stable,
        "MLFLOW_RUN_CONTEXT": json.dumps({"hpc_ckpt.chain": orders.chain}),
        "TENSORBOARD_LOGGING_DIR": str(rundir.root / "tensorboard"),
    }
    try:
        known = (rundir.root / MLFLOW_RUN_FILE).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ids
    return ids | ({"MLFLOW_RUN_ID": known} if known.isalnum() else {})
