"""How links follow each other at a site, and how many of them it takes at once. Pure."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Sequence

from ..errors import SpecError
from .cluster import least
from .profile import Profile, Strategy
from .sbatchfile import options_of
from .spec import Spec
from .survey import Bound, LiveLimits

MOST_JOBS = 100
"""Of afterany at once: each is a call of sbatch, and one more record for the scheduler to keep."""


def strategy_of(
    spec: Spec, profile: Profile, live: LiveLimits | None = None, *, fenced: bool = True
) -> Strategy:
    """`fenced`: whether a link that is overtaken can do no harm. Where it can, Slurm itself must
    keep links apart, and an array's %1 does not: the next starts in the last one's kill wait."""
    rules = profile.chain
    default = Strategy.ARRAY if fenced else Strategy.AFTERANY
    wanted = spec.chain.strategy or rules.strategy or default
    if wanted is Strategy.ARRAY and _most_array(profile, live or LiveLimits()) == 0:
        if spec.chain.strategy is Strategy.ARRAY:
            raise SpecError(
                f"chain.strategy: {profile.cluster} takes no job arrays (MaxArraySize); "
                "leave it out, or write afterany"
            )
        wanted = Strategy.AFTERANY
    if spec.members:
        wanted = _of_sweep(spec, profile)
        if spec.parallel and wanted is Strategy.RESUBMIT:
            raise SpecError(
                "parallel: with chain.strategy resubmit each further link is an array of its own, "
                "and Slurm counts them apart; leave parallel out, or write strategy: requeue where "
                "the profile allows it"
            )
    if wanted is Strategy.REQUEUE and not rules.requeue:
        raise SpecError(
            f"chain.strategy: requeue is not allowed by the profile of {profile.cluster} "
            "(chain.requeue: false); write array"
        )
    if wanted is Strategy.REQUEUE:
        _check_may_come_back((*profile.directives.extra, *spec.sbatch))
    if wanted is Strategy.RESUBMIT and not rules.submit_from_compute_nodes:
        raise SpecError(
            "chain.strategy: resubmit needs sbatch on compute nodes, which the profile of "
            f"{profile.cluster} does not allow (chain.submit_from_compute_nodes); write array"
        )
    return wanted


def _check_may_come_back(lines: Sequence[str]) -> None:
    """The last word counts, and these lines come after the chain's own."""
    for directive in lines:
        if any(given.name == "no-requeue" for given in options_of(directive)):
            raise SpecError(
                f"{directive!r}: chain.strategy is requeue, and Slurm would not put the job back; "
                "leave that out, or write strategy: array"
            )


def strategy_notes(strategy: Strategy, *, fenced: bool) -> list[str]:
    """What people should know of it."""
    if fenced or strategy is not Strategy.ARRAY:
        return []
    return [
        "chain.strategy is array, and this program writes files of its own: Slurm can start a link "
        "while the last one is still being ended, and it then waits for that; with afterany it "
        "does not start"
    ]


def _later_notes(links: int, budget: int | None, *, extends: bool) -> list[str]:
    """How links come about that the budget allows and that are not submitted now."""
    if budget is None or links >= budget:
        return []
    now = f"{links} links are submitted now"
    if extends:
        return [f"{now}; the chain submits further ones itself"]
    return [
        f"{now}; this site lets no compute node submit more (chain.submit_from_compute_nodes): "
        f"further ones take 'hpc-ckpt resume', which counts the {budget} anew"
    ]


def _of_sweep(spec: Spec, profile: Profile) -> Strategy:
    """An index is a member there, no token: it must come back, or submit itself again."""
    if spec.chain.strategy in (Strategy.ARRAY, Strategy.AFTERANY):
        raise SpecError("chain.strategy: the members of a sweep go on by requeue or resubmit")
    if spec.chain.strategy is not None:
        return spec.chain.strategy
    if profile.chain.requeue:
        return Strategy.REQUEUE
    if profile.chain.submit_from_compute_nodes:
        return Strategy.RESUBMIT
    raise SpecError(
        f"members: the profile of {profile.cluster} allows neither requeue nor sbatch on compute "
        "nodes, so a member could not go on after its first link; submit each as a chain"
    )


def array_of(spec: Spec, strategy: Strategy, links: int) -> str | None:
    if spec.members:
        together = f"%{spec.parallel}" if spec.parallel else ""
        return f"1-{len(spec.members)}{together}"
    return f"1-{links}%1" if strategy is Strategy.ARRAY else None


def within_limits(
    links: int,
    strategy: Strategy,
    spec: Spec,
    profile: Profile,
    live: LiveLimits,
    left: Sequence[int] = (),
) -> tuple[int, list[str]]:
    """As many as the site takes at once; the rest follows where the chain may extend itself.

    `left`: the indices of a sweep's members that are to be submitted.
    """
    notes = _running_notes(spec, live.running, len(left))
    most_array = _most_array(profile, live)
    room = None if live.submit is None else int(live.submit.most)
    most_jobs = least(profile.limits.max_submit, room)
    said = "" if live.submit is None or most_jobs != room else f": {live.submit.by}"
    if most_jobs == 0:
        raise SpecError(f"no job can be submitted now{said}; wait until some are over")
    if spec.members:
        _check_sweep_fits(left, most_array, most_jobs, said)
        return links, notes
    extends = profile.chain.submit_from_compute_nodes
    if strategy is Strategy.RESUBMIT and most_jobs == 1:
        return links, [f"a link's successor waits until there is room in the queue{said}", *notes]
    if strategy in (Strategy.REQUEUE, Strategy.RESUBMIT):
        return links, notes
    if extends and most_jobs is not None and links > most_jobs > 1:
        most_jobs -= 1  # a link that extends the chain is in the queue itself
    most = least(most_jobs, most_array if strategy is Strategy.ARRAY else MOST_JOBS)
    if most is None or links <= most:
        return links, [*_later_notes(links, spec.chain.max_links, extends=extends), *notes]
    rest = "the chain extends itself" if extends else "submit again when they are used up"
    ours = strategy is Strategy.AFTERANY and most == MOST_JOBS
    at_once = f"at once instead of {links}"
    taken = f"{most} jobs are submitted {at_once}" if ours else None
    note = taken or f"this site takes {most} links {at_once}{said}"
    return max(1, most), [f"{note}; {rest}", *notes]


def _most_array(profile: Profile, live: LiveLimits) -> int | None:
    """Indices from 1 on: MaxArraySize is above the highest, and 0 where there are no arrays."""
    indices = least(profile.limits.max_array, live.max_array)
    return None if indices is None else max(0, indices - 1)


def _check_sweep_fits(
    left: Sequence[int], most_array: int | None, most_jobs: int | None, said: str
) -> None:
    """An array is bounded by its highest index, the queue by how many there are."""
    highest = max(left, default=0)
    if most_array is not None and highest > most_array:
        raise SpecError(
            f"members: {highest} are more than this site takes in one array ({most_array})"
        )
    if most_jobs is not None and len(left) > most_jobs:
        raise SpecError(
            f"members: {len(left)} are more than this site takes at once ({most_jobs}{said})"
        )


def _running_notes(spec: Spec, running: Bound | None, left: int) -> list[str]:
    """One link of a chain runs at a time; members of a sweep beside each other."""
    if running is None:
        return []
    if running.most < 1:
        raise SpecError(f"no link could ever start: {running.by} allows no running jobs")
    wanted = min(spec.parallel or left, left)
    return [f"{running.by} allows {running.most:g} running jobs"] if wanted > running.most else []
