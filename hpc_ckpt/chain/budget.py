"""Whether a chain may go on: budgets, failed links in a row, no progress.

Reads the ledgers through past.py, starts nothing. Standard library only.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ..rundir import RunDir
from ..units import format_duration
from .backend import Cause
from .orders import HALT, RETRY, Budget, Orders
from .past import PastLink, hosts_excluded, past_links

STARTS_PER_LINK = 10
_NOT_COUNTED = frozenset({Cause.PREEMPTED, Cause.REQUEUED, Cause.NODE_FAILURE, Cause.LOST, None})
"""Ends that do not use up the budget of links; None is a link that left no record."""

_HALTS = {Cause.CANCELLED: "cancelled by the user"}


def reason_to_stop(rundir: RunDir, generation: int, orders: Orders) -> str | None:
    """Why no further link should run after this one, or None."""
    halted = rundir.halted()
    if halted is not None:
        return halted
    links = past_links(rundir, orders.after_generation, generation)
    return (
        _by_reaction(links, orders)
        or no_progress(links, hosts_excluded(rundir))
        or spent(links, orders.after_generation, generation, orders.budget)
    )


def budget_spent(rundir: RunDir, last: int, orders: Orders) -> str | None:
    """Whether the links up to `last` have used up the budget, and which."""
    after = orders.after_generation
    return spent(past_links(rundir, after, last), after, last, orders.budget)


def links_left(rundir: RunDir, generation: int, orders: Orders, seen: Cause | None = None) -> int:
    """How many may follow link `generation`; under way it counts, unless what the scheduler
    was seen to do to it does not, and one that never began does not count either."""
    links = past_links(rundir, orders.after_generation, generation)
    own = next((link for link in links if link.generation == generation), None)
    counted = len(_counted(links))
    if own is not None and own.cause is None and (seen is None or seen not in _NOT_COUNTED):
        counted += 1
    return orders.budget.links - counted


def seconds_left(rundir: RunDir, generation: int, orders: Orders) -> float | None:
    """What link `generation` may still use of the budget of hours; None: no such budget."""
    bound = orders.budget.seconds
    if bound is None:
        return None
    links = past_links(rundir, orders.after_generation, generation - 1)
    return bound - sum(link.allocated_s for link in links)


def _by_reaction(links: Sequence[PastLink], orders: Orders) -> str | None:
    last = links[-1].cause if links else None
    if last is None:
        return None
    for cause in _ends_that_count(links):
        if orders.reaction(cause) == HALT:
            return _HALTS.get(cause, f"a link ended: {cause.value}")
    failed = 0
    for link in reversed(links):
        if link.cause is None or orders.reaction(link.cause) != RETRY:
            break
        failed += 1
    if failed > orders.retries:
        return f"{failed} failed links in a row (chain.retries: {orders.retries}): {last.value}"
    return None


def _ends_that_count(links: Sequence[PastLink]) -> Iterator[Cause]:
    """That of the last link; of the one before it as well where that link started nothing: it may
    have been told to stop before it could find out how the one before had ended."""
    for link in reversed(links):
        if link.submission == links[-1].submission and link.cause is not None:
            yield link.cause
        if link.ran:
            return


def no_progress(links: Sequence[PastLink], excluded: Sequence[str] = ()) -> str | None:
    """Twice running, among the links that say anything about the program.

    Two on one host that is now excluded are one: the next link shows whether it was the host.
    """
    if not links or links[-1].progress is not False:
        return None
    told = [link for link in links if link.progress is not None]
    stuck = list(itertools.takewhile(lambda link: link.progress is False, reversed(told)))
    hosts = {link.host for link in stuck}
    by_the_host = len(stuck) == 2 and len(hosts) == 1 and hosts <= set(excluded)
    if len(stuck) < 2 or by_the_host:
        return None
    return "no progress in two links running"


def spent(links: Sequence[PastLink], after: int, last: int, budget: Budget) -> str | None:
    """Of the links `after` one up to the `last`. Preempted and requeued ones, and those whose node
    went, do not count: a chain never stops because of them. Starts that got nowhere are bounded
    all the same."""
    starts = last - after
    in_vain = last - max((link.generation for link in links if link.progress), default=after)
    if in_vain >= STARTS_PER_LINK * budget.links:
        return f"started {in_vain} times without progress for a budget of {budget.links} links"
    if len(_counted(links)) >= budget.links:
        return f"the budget of {budget.links} links is spent"
    if budget.restarts is not None and starts > budget.restarts:
        return f"the budget of {budget.restarts} restarts is spent"
    used = sum(link.allocated_s for link in links)
    # What a link leaves of it for its last save is too little to begin with.
    ended = bool(links) and links[-1].budget_end and links[-1].cause is Cause.TIME_LIMIT
    if budget.seconds is not None and (ended or used >= budget.seconds - 1.0):
        return f"the budget of {_hours(budget)} is spent ({format_duration(round(used))})"
    return None


def _hours(budget: Budget) -> str:
    by_gpu = budget.gpu_hours and budget.gpus and budget.seconds != 3600.0 * (budget.hours or 0)
    return f"{budget.gpu_hours:g} GPU hours" if by_gpu else f"{budget.hours:g} hours"


def _counted(links: Sequence[PastLink]) -> list[PastLink]:
    return [link for link in links if link.cause not in _NOT_COUNTED]
