"""The plan of what was loaded: how its command is made resumable, and what the cluster allows."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import SchedulerError, SpecError
from ..levels.base import Kind, Work
from ..levels.choice import Choice
from ..levels.choose import choose
from ..levels.recipe import Recipe, load_recipes
from ..rundir import RunDir
from . import slurm
from .activation import active
from .cluster import Survey
from .demands import asks_for_gpus
from .layers import Loaded
from .members import member_name
from .plan import Plan, plan_chain
from .profile import Backend, directive_name
from .spec import Phase, Spec
from .survey import LiveLimits, limits, take_survey


def make_plan(
    loaded: Loaded,
    *,
    cwd: Path,
    environ: Mapping[str, str],
    live: bool = False,
    known: Choice | None = None,
) -> Plan:
    """The plan of what was loaded, with the environment that is active here.

    `live`: within the limits of the cluster, which is asked for them. `known`: what the command
    does to be resumed, where its script is not written yet.
    """
    found = _survey() if live and loaded.profile.backend is Backend.SLURM else None
    spec, profile = loaded.spec, loaded.profile
    _refuse_uncounted_gpus(loaded)
    level, later = _levels(loaded, cwd, environ)
    return plan_chain(
        spec,
        profile,
        cwd=cwd,
        level=known or level,
        later=later,
        activations=active(environ),
        limits=None if found is None else _limits(found, loaded),
        home=environ.get("HOME"),
        remarks=() if found is None else _maintenance(found),
        complete=_complete(spec),
    )


def is_of_this_cluster(loaded: Loaded) -> bool:
    """Whether the limits of the cluster that answers here are those of the profile's."""
    profile = loaded.profile
    return profile.backend is Backend.SLURM and profile.cluster == slurm.cluster_name()


def _complete(spec: Spec) -> set[str]:
    """Members of a sweep whose work is done: they are not submitted again."""
    names = map(member_name, spec.members)
    return {name for name in names if RunDir(Path(spec.root, name)).done() is not None}


def _levels(loaded: Loaded, cwd: Path, environ: Mapping[str, str]) -> tuple[Choice, list[Choice]]:
    """Of the command, and of those that follow it."""
    recipes = load_recipes(cwd, environ)
    asked: list[Spec | Phase] = [loaded.spec, *loaded.spec.then]
    level, *later = (_level(loaded, one, recipes, cwd, environ) for one in asked)
    if sum(choice.chosen == Kind.MODEL.value for choice in (level, *later)) > 1:
        # One run directory holds the checkpoints of one program.
        raise SpecError(
            "then: only one command of a chain may use a Checkpointer; give the others chains "
            "of their own"
        )
    return level, later


def _level(
    loaded: Loaded,
    asked: Spec | Phase,
    recipes: Sequence[Recipe],
    cwd: Path,
    environ: Mapping[str, str],
) -> Choice:
    tools = loaded.profile.tools.model_dump(mode="json")
    gpus = int(_directives_ask_for_gpus(loaded) or bool(loaded.spec.resources.gpus))
    work = Work(argv=tuple(asked.argv), cwd=cwd, environ=environ, gpus=gpus)
    recipe, policy = asked.recipe, loaded.spec.checkpoint.policy
    try:
        return choose(work, asked.level, recipes=recipes, recipe=recipe, tools=tools, policy=policy)
    except SpecError as error:
        written = loaded.spec_value.at(("recipe",))
        if written is None or not str(error).startswith("recipe: "):
            raise
        raise SpecError(f"{written.origin}: {error}") from None


def _directives_ask_for_gpus(loaded: Loaded) -> bool:
    return asks_for_gpus((*loaded.profile.directives.extra, *loaded.spec.sbatch))


def _refuse_uncounted_gpus(loaded: Loaded) -> None:
    """A budget that counts no GPUs would never end the chain it was set for."""
    spec = loaded.spec
    counted = spec.chain.max_gpu_hours is None or spec.resources.gpus
    if not counted and _directives_ask_for_gpus(loaded):
        raise SpecError(
            "chain.max_gpu_hours: the GPUs are asked for by a directive, whose number is not "
            "counted; say resources: {gpus: N} instead"
        )


def _limits(found: Survey, loaded: Loaded) -> LiveLimits:
    return limits(
        found,
        loaded.profile,
        account=_asked(loaded, "account", loaded.spec.account),
        qos=_asked(loaded, "qos", loaded.spec.qos),
        partitions=loaded.spec.partition,
    )


def _asked(loaded: Loaded, name: str, given: str | None) -> str | None:
    """As sbatch will understand it: the script's last line about it counts."""
    for line in (*loaded.profile.directives.extra, *loaded.spec.sbatch):
        if directive_name(line) == f"--{name}":
            given = line[len(name) + 3 :].strip()
    return given


def _survey() -> Survey | None:
    """None where the cluster does not answer: that is said when the chain is submitted."""
    try:
        return take_survey()
    except SchedulerError:
        return None


def _maintenance(found: Survey) -> list[str]:
    """A link that would reach into it does not start before it is over."""
    return [
        f"maintenance {one.name} from {time.strftime('%Y-%m-%d %H:%M', time.localtime(one.start))}"
        ": longer links wait until it is over; chain.min_time lets Slurm shorten them"
        for one in found.maintenance or ()
        if one.start is not None and (one.end or one.start) > time.time()
    ]
