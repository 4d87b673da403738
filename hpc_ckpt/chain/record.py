"""What chain.json says: spec and profile as resolved, and what the plan made of them."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import __version__
from ..units import format_duration, parse_duration
from .plan import Plan
from .profile import Backend, Profile
from .spec import Spec


def chain_record(
    spec: Spec,
    profile: Profile,
    plan: Plan,
    *,
    chain: str,
    created: float,
    code: dict[str, Any] | None = None,
    cwd: Path | None = None,
) -> dict[str, Any]:
    """`chain` is a fresh UUID, `code` is {git, dirty}, `cwd` where the code was pinned."""
    resolved = spec.model_dump(mode="json", exclude={"members"})
    resolved["chain"]["max_links"] = plan.budget
    resolved["chain"]["link_time"] = spec.chain.link_time or format_duration(plan.link_s)
    return {
        "format_version": 1,
        "chain": chain,
        "name": spec.name,
        "created": created,
        "version": __version__,
        "command": resolved["command"],
        "argv": [*plan.level.before, *spec.argv],
        "cwd": str(cwd or plan.cwd),
        "threads": _threads(spec, profile),
        "backend": profile.backend.value,
        "levels": list(plan.level.entries),
        "choice": plan.level.told(),
        "then": [
            {
                "argv": [*choice.before, *phase.argv],
                "levels": list(choice.entries),
                "choice": choice.told(),
            }
            for phase, choice in zip(spec.then, plan.later, strict=True)
        ],
        "lead_s": None if spec.lead is None else parse_duration(spec.lead),
        "alone": not plan.fenced,
        "strategy": plan.strategy.value,
        "links": plan.links,
        "gpus": plan.gpus,
        "spec": resolved,
        "profile": profile.model_dump(mode="json"),
        "code": code,
        "after_generation": 0,
        "jobs": [],
    }


def _threads(spec: Spec, profile: Profile) -> int | None:
    """What to pin OMP_NUM_THREADS to; None leaves this machine's own default, all its cores."""
    asked = "cpus" in spec.resources.model_fields_set
    return spec.resources.cpus if asked or profile.backend is Backend.SLURM else None
