"""The stack: a run's tiers, fastest first, and the choices between them.

Knows the order, what was measured, and which tier a final save fits into. It moves no bytes
(tiers/drain.py does) and decides neither when to save nor what to keep.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..errors import RootError, SpecError
from ..format.verify import Reader
from ..rundir import CheckpointKey, RunDir
from . import asking
from .asking import Answer, Asker
from .base import Tier
from .directory import DirectoryTier
from .owner import Owner
from .watched import watched
from .wishes import HOME, Survives, TierWish, is_path

log = logging.getLogger("hpc_ckpt")

RECENT_RATES = 8
UNMEASURED_RATE = 50e6
UNMEASURED_S = 5.0
"""Bytes a second, and a start: what a slow shared file system does on a bad day."""

SLOWER = 1.5
"""The next save may be slower than any yet seen."""

_CHAIN = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)


class Stack:
    """Ordered tiers, of which one is the home: the run directory's own.

    Safe to share between threads.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        home: str = HOME,
        wishes: Mapping[str, TierWish] | None = None,
        asker: Asker | None = None,
    ) -> None:
        self.tiers = tuple(tiers)
        self._wishes = dict(wishes or {})
        self._by_name = {tier.name: tier for tier in self.tiers}
        if len(self._by_name) != len(self.tiers):
            raise ValueError("two tiers of a stack have the same name")
        self.home = self._by_name[home]
        self._rates: dict[str, deque[float]] = {
            tier.name: deque(maxlen=RECENT_RATES) for tier in self.tiers
        }
        self._lock = threading.Lock()
        self._asker = asker or Asker()
        self.passed_over: dict[str, str] = {}
        """Tiers that could not be listed by the last newest_first(), and why."""

    def __repr__(self) -> str:
        return f"Stack({', '.join(tier.name for tier in self.tiers)})"

    @property
    def first(self) -> Tier:
        """Where commits go: the fastest."""
        return self.tiers[0]

    def named(self, name: str) -> Tier:
        """The tier of that name; KeyError if there is none."""
        return self._by_name[name]

    def wish(self, tier: Tier) -> TierWish:
        """What was asked for when the tier was named: path, failure domain, quota."""
        return self._wishes.get(tier.name, TierWish(tier.name))

    def outlives_job(self, tier: Tier) -> bool:
        """Whether the next link can find there what this one leaves."""
        return self.wish(tier).survives is not Survives.PROCESS

    def targets(self, source: Tier) -> tuple[Tier, ...]:
        """Where a checkpoint in `source` is drained to: the home, then every tier below.

        The home comes first: the chain is judged by it, and another tier that hangs must not
        keep it waiting; what comes later waits until that one is left behind (draining.py).
        """
        below = self.tiers[self.tiers.index(source) + 1 :]
        others = tuple(tier for tier in below if tier is not self.home)
        return others if source is self.home else (self.home, *others)

    def instead_of(self, tier: Tier) -> tuple[Tier, ...]:
        """Where a save goes if that one fails: the home, then what else the next link can find."""
        others = (other for other in self.tiers if self.outlives_job(other))
        return tuple(one for one in dict.fromkeys((self.home, *others)) if one is not tier)

    # ── reading ───────────────────────────────────────────────────────────────────────────
    def ask(self, tier: Tier, question: Callable[[], Answer]) -> Answer:
        """A short question, such as what is there. TimeoutError, which is an OSError, if a tier
        hangs; for the home's answer everybody waits: nothing can go on without it."""
        return question() if tier is self.home else self._asker.ask(tier.name, question)

    def ask_home(self, question: Callable[[], Answer], patience_s: float) -> Answer:
        """A question to the run directory by who can go on without the answer. TimeoutError if
        that does not come; until it does, the home counts as hanging."""
        return self._asker.ask(self.home.name, question, patience_s=patience_s)

    def reader(self, tier: Tier, key: CheckpointKey) -> Reader:
        """What reads one checkpoint. TimeoutError, now or while it reads, if the tier hangs.

        For what only the home has everybody waits, and it is read straight into place.
        """
        if tier is self.home and not self._is_elsewhere(key):
            return tier.reader(key)

        def ask(question: Callable[[], Answer], progress: Callable[[], object]) -> Answer:
            try:
                return self._asker.ask(
                    tier.name, question, progress=progress, patience_s=asking.READING_S
                )
            except TimeoutError as error:
                raise TimeoutError(f"tier {tier.name} hangs: {error}") from error

        chunks = 0

        def counted() -> bool:
            nonlocal chunks
            chunks += 1
            return False

        # One with a broken header is read from end to end, which takes long where it is large.
        return watched(ask(lambda: tier.reader(key, counted), lambda: chunks), ask)

    def _is_elsewhere(self, key: CheckpointKey) -> bool:
        return any(tier is not self.home and self.lists(tier, key) for tier in self.tiers)

    def lists(self, tier: Tier, key: CheckpointKey) -> bool:
        """Whether it has a checkpoint of that name now; what cannot be listed has none."""
        try:
            return key in self.ask(tier, tier.keys)
        except OSError:
            return False

    def hangs(self, tier: Tier) -> bool:
        """Whether it owes an answer."""
        return tier.name in self._asker.silent

    def newest_first(self) -> Iterator[tuple[CheckpointKey, Tier]]:
        """Every checkpoint of every tier once; of equal keys the fastest tier's first.

        Looks again each time, so that what a writer has moved on to in the meantime is found. A
        tier that cannot be listed, or hangs, is passed over; the home's OSError reaches the
        caller.
        """
        tried: set[tuple[CheckpointKey, str]] = set()
        self.passed_over = {}
        while True:
            found = [
                (key, -order)
                for order, tier in enumerate(self.tiers)
                for key in self._keys(tier)
                if (key, tier.name) not in tried
            ]
            if not found:
                return
            key, order = max(found)
            tier = self.tiers[-order]
            tried.add((key, tier.name))
            yield key, tier

    def _keys(self, tier: Tier) -> list[CheckpointKey]:
        if tier.name in self.passed_over:
            return []
        try:
            return self.ask(tier, tier.keys)
        except OSError as error:
            if tier is self.home:
                raise
            self.passed_over[tier.name] = str(error)
            log.warning("tier %s passed over: %s", tier.name, error)
            return []

    def recover(self) -> None:
        """Before anything is read; a tier that does not answer is told by whoever reads it."""
        for tier in self.tiers:
            with suppress(OSError):
                self.ask(tier, tier.recover)

    # ── measuring and choosing ────────────────────────────────────────────────────────────
    def note(self, tier: Tier, nbytes: int, seconds: float) -> None:
        """A commit of so many bytes took so long there."""
        if nbytes > 0:
            with self._lock:
                self._rates[tier.name].append(seconds / nbytes)

    def expected_s(self, tier: Tier, nbytes: int) -> float | None:
        """Seconds a save of so many bytes takes at the slowest recent rate; None: not measured."""
        with self._lock:
            slowest = max(self._rates[tier.name], default=None)
        return None if slowest is None else slowest * nbytes

    def choose(
        self,
        size_in: Callable[[Tier], int],
        seconds_left: float | None,
        avoid: Collection[str] = (),
        *,
        last: bool = False,
    ) -> Tier:
        """The tier for a save that must be durable in `seconds_left`; None: no deadline.

        The home where that is in time. Where it is not, another tier that is: what outlives the
        job before what does not, what was measured before what is taken for as slow as a home
        that nobody has measured, and the lowest. What lies elsewhere is drained to the home later.
        Where nothing is in time: the fastest that outlives the job. `size_in`: the bytes to be
        written there; `avoid`: names of tiers that hang, which are the last resort; but the `last`
        save of a link goes to a home that may yet answer in time, rather than go with the job.
        """
        if seconds_left is None and self.home.name not in avoid:
            return self.home
        needed = {tier: self._needed_s(tier, size_in(tier)) for tier in self.tiers}
        left_s = float("inf") if seconds_left is None else seconds_left
        in_time = [tier for tier in self.tiers if SLOWER * needed[tier] <= left_s]
        fitting = [tier for tier in in_time if tier.name not in avoid]
        lasting = [tier for tier in fitting if self.outlives_job(tier)]
        if self.home in lasting or (last and self.home in in_time and not lasting):
            return self.home
        if fitting:
            return max(lasting or fitting, key=self._merit)
        tiers = [tier for tier in self.tiers if tier.name not in avoid] or [self.home]
        return min(tiers, key=lambda tier: (not self.outlives_job(tier), needed[tier]))

    def _merit(self, tier: Tier) -> tuple[bool, int]:
        return self.expected_s(tier, 1) is not None, self.tiers.index(tier)

    def _needed_s(self, tier: Tier, nbytes: int) -> float:
        expected = self.expected_s(tier, nbytes)
        if expected is not None:
            return expected
        slow = tier is self.home or tier is not self.first
        return UNMEASURED_S + nbytes / UNMEASURED_RATE if slow else 0.0


def open_stack(
    wishes: Sequence[TierWish],
    *,
    rundir: RunDir,
    chain: str,
    goes_with_the_job: Callable[[Path], bool] = lambda path: False,
) -> Stack:
    """The tiers that were wished for; nothing is made before something is saved there.

    A directory that several chains share gives each its own place, <path>/<chain>/checkpoints.
    `goes_with_the_job` is asked of directories of which nobody has said what they survive.
    Raises SpecError where two wishes are the same directory, RootError where that place is another
    run directory's.
    """
    asker = Asker()
    _check_distinct(wishes, rundir, asker)
    wishes = [_looked_at(wish, asker, goes_with_the_job) for wish in wishes]
    tiers = [DirectoryTier(_place(wish, rundir, chain), name=wish.name) for wish in wishes]
    for tier, wish in zip(tiers, wishes, strict=True):
        if wish.path is not None:
            owner = Owner(tier.path.parent, wish.name, rundir, chain)
            _check_owner(owner, asker)
            tier.claim = owner.claim
        else:
            tier.stands_in = rundir.lease
    return Stack(tiers, wishes={wish.name: wish for wish in wishes}, asker=asker)


def _looked_at(wish: TierWish, asker: Asker, goes_with_the_job: Callable[[Path], bool]) -> TierWish:
    path = wish.path if is_path(wish.name) else None
    try:
        goes = path is not None and asker.ask(wish.name, partial(goes_with_the_job, path))
    except OSError:  # whoever lists it says so
        return wish
    return replace(wish, survives=Survives.PROCESS) if goes else wish


def _check_owner(owner: Owner, asker: Asker) -> None:
    try:
        told = asker.ask(owner.tier, owner.refusal)
    except OSError:  # whoever lists it, or saves there, says so
        return
    if told is not None:
        raise RootError(owner.rundir.root, told)


def _place(wish: TierWish, rundir: RunDir, chain: str) -> Path:
    if wish.path is None:
        return rundir.checkpoints
    if _CHAIN.fullmatch(chain) is None:
        raise SpecError(
            f"{rundir.chain_file}: the chain's id {chain!r} cannot name a directory in tier "
            f"{wish.name!r}; choose another root"
        )
    return wish.path / chain / rundir.checkpoints.name


def _check_distinct(wishes: Sequence[TierWish], rundir: RunDir, asker: Asker) -> None:
    seen: dict[Path, str] = {rundir.root.resolve(): HOME, rundir.checkpoints.resolve(): HOME}
    for wish in wishes:
        if wish.path is None:
            continue
        try:
            place = asker.ask(wish.name, wish.path.resolve)
        except TimeoutError:
            continue  # it hangs: whoever lists it says so
        if place in seen:
            raise SpecError(
                f"tiers: {seen[place]!r} and {wish.name!r} are the same directory ({place}); "
                "name it once"
            )
        seen[place] = wish.name
