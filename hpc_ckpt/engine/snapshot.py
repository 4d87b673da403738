"""Snapshot: a consistent copy of the state in memory, already laid out as the file image.

Copies; it neither writes nor decides when. Buffers are made once and reused, so that a save
costs one copy and no allocation; the plan of that copy is made once for each form of the state.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import fsio
from ..errors import UserError
from ..format.image import ImageLayout, LeafSpec, lay_out
from ..format.manifest import TreeText
from ..state.leaves import Value
from ..state.outline import Match, Outline, outline_of
from ..state.tree import encode
from ..units import format_size
from .copying import Copier, Kinds, buffer_for, on_device
from .unmoved import has_digests

SLOTS = 2
"""One is written while the other takes the next snapshot; more only beside saves that hang."""


@dataclass(eq=False)
class Snapshot:
    """One rank's state as it will lie on disk. Valid until release()."""

    make_tree: Callable[[], TreeText | Any]
    """The tree of the state; made when it is written, not while training waits."""
    aliases: dict[str, str]
    layouts: tuple[ImageLayout, ...]
    images: tuple[memoryview, ...]
    steady: tuple[bool, ...]
    """For each image: it holds leaves that are expected not to have changed."""
    give_back: Callable[[], None]
    digests: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Of the chunks of an image, by its number, where they are known already."""
    learn: Callable[[int, tuple[str, ...]], None] = lambda number, digests: None
    """Whoever has digested an image says so, before release(): the next snapshot need not copy
    what still has these digests."""

    @property
    def size(self) -> int:
        return sum(layout.size for layout in self.layouts)

    def release(self) -> None:
        """Gives the buffer back; called once, when the images are not needed any more.

        What follows a commit, or an error that nobody has been told, keeps this record for long: it
        must not keep a buffer, which is as large as the state.
        """
        give_back, self.give_back, self.images = self.give_back, _nothing, ()
        give_back()


def _nothing() -> None:
    pass


def check(state: object) -> int:
    """Raise UnsupportedState now rather than at the first save; copies nothing.

    Returns the bytes of a snapshot.
    """
    return sum(layout.size for layout in lay_out(encode(state).leaves))


# ── the plan ──────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, eq=False)
class _Plan:
    """Where each leaf goes. Made when the form of the state, or what is steady, changes."""

    aliases: dict[str, str]
    layouts: tuple[ImageLayout, ...]
    steady: tuple[bool, ...]
    starts: tuple[int, ...]
    """Where each image begins in a buffer."""
    total: int
    places: list[tuple[int, int]]
    """[start, end) of each leaf in a buffer, in the order of the leaves."""
    still: dict[int, list[int]]
    """By the number of an image with steady leaves: their numbers, in file order."""


def _plan(leaves: Sequence[LeafSpec], aliases: dict[str, str], steady: Collection[str]) -> _Plan:
    moving = lay_out([leaf for leaf in leaves if leaf.name not in steady])
    still = [leaf for leaf in leaves if leaf.name in steady]
    layouts = moving + (lay_out(still, first_part=len(moving)) if still else ())
    starts, total, spans = [], 0, {}
    for layout in layouts:
        starts.append(total)
        for name, (start, end) in layout.spans.items():
            spans[name] = (total + start, total + end)
        total += fsio.round_up(layout.size)
    numbers = {leaf.name: number for number, leaf in enumerate(leaves)}
    return _Plan(
        aliases=aliases,
        layouts=layouts,
        steady=tuple(number >= len(moving) for number in range(len(layouts))),
        starts=tuple(starts),
        total=total,
        places=[spans[leaf.name] for leaf in leaves],
        still={
            number: [numbers[name] for name in layouts[number].spans]
            for number in range(len(moving), len(layouts))
        },
    )


# ── the buffers ───────────────────────────────────────────────────────────────────────────
class Slot:
    """Page-aligned memory that is the file image; grows, and is reused otherwise."""

    def __init__(self) -> None:
        self.memory: memoryview | None = None
        self.images: tuple[memoryview, ...] = ()
        self.digests: dict[int, tuple[str, ...]] = {}
        """Of the images as they are now, as far as somebody has told."""
        self.taken = False
        self._pinned = False
        self._plan: _Plan | None = None
        self._copier: Copier | None = None

    def prepare(self, plan: _Plan, *, pinned: bool) -> Copier:
        """What copies into the images of a plan; their headers are in place."""
        if self._plan is plan and self._copier is not None:
            return self._copier
        view = self.sized(plan.total, pinned=pinned)
        starts = zip(plan.layouts, plan.starts, strict=True)
        self.images = tuple(view[start : start + layout.size] for layout, start in starts)
        for layout, image in zip(plan.layouts, self.images, strict=True):
            image[: len(layout.header)] = layout.header
        self.digests = {}
        self._plan, self._copier = plan, Copier(view, plan.places)
        return self._copier

    def unmoved(self, plan: _Plan, kinds: Kinds, addresses: Sequence[int]) -> set[int]:
        """Leaves whose bytes are in the buffer already; what was known of other images is not
        any more: they are about to be overwritten."""
        found: set[int] = set()
        self.digests, before = {}, self.digests
        for number, digests in before.items():
            leaves = plan.still[number]
            here = [addresses[leaf] for leaf in leaves]
            if kinds.are_plain(leaves) and has_digests(plan.layouts[number], here, digests):
                self.digests[number] = digests
                found.update(leaves)
        return found

    def sized(self, size: int, *, pinned: bool) -> memoryview:
        if self.memory is None or len(self.memory) < size or self._pinned != pinned:
            self._plan, self._copier, self.images = None, None, ()
            self.memory = None  # given back before the larger one is asked for
            self.memory, self._pinned = buffer_for(size, pinned=pinned), pinned
        return self.memory


class Camera:
    """Takes snapshots: holds the buffers and remembers the form of the state."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._slots = [Slot()]
        self._outline: Outline | None = None
        self._plan: _Plan | None = None
        self._steady: frozenset[str] = frozenset()
        self._known: tuple[_Plan, Kinds, list[int]] | None = None
        """What plan() saw of the values, for buffers made later; it holds for that plan alone."""
        self.pinned = False

    @property
    def ready(self) -> bool:
        """A buffer is free."""
        return self._free() is not None

    @property
    def held(self) -> int:
        """Bytes of all buffers."""
        return sum(len(slot.memory) for slot in self._slots if slot.memory is not None)

    @property
    def size(self) -> int:
        """Bytes of one buffer, as the first one is."""
        first = self._slots[0].memory
        return 0 if first is None else len(first)

    def leaves_at(self, state: object, addresses: Collection[int]) -> dict[str, tuple[int, int]]:
        """The leaves that lie at one of the addresses: bytes of each, and of all leaves."""
        if not addresses:
            return {}
        leaves = encode(state).leaves
        total = sum(leaf.nbytes for leaf in leaves)
        return {
            leaf.name: (leaf.nbytes, total)
            for leaf in leaves
            if isinstance(leaf.value, torch.Tensor) and leaf.value.data_ptr() in addresses
        }

    def plan(self, state: object, steady: frozenset[str]) -> int:
        """Find the form of the state and where its leaves go; returns the bytes of a buffer.

        `steady`: names of leaves to be put into files of their own.
        """
        self._outline = outline_of(state)
        found = None if self._outline is None else self._outline.match(state)
        if self._outline is None or found is None:
            self._outline = None
            return check(state)
        self._steady = steady
        plan = self._plan_of(self._outline, found)
        values, addresses = _stored(self._outline, found)
        self._known = (plan, Kinds(values, plan.places), addresses)
        return plan.total

    def warm(self, size: int) -> None:
        """Make the first buffer and let the kernel find its pages, before it is needed."""
        slot = self._slots[0]
        if slot.memory is not None or self.pinned:
            return
        _touch(slot.sized(size, pinned=False))
        self._learn(slot)

    def _learn(self, slot: Slot) -> None:
        """What a copy would find out the first time it goes there."""
        known = self._known
        if known is not None and known[0] is self._plan:
            plan, kinds, addresses = known
            slot.prepare(plan, pinned=self.pinned).learn(kinds, addresses)

    @property
    def can_grow(self) -> bool:
        """There is one buffer, and the setting leaves room for a second."""
        return len(self._slots) < SLOTS and self._has_room(2 * self.size)

    def grow(self, *, last: bool = False) -> None:
        """Make another buffer, its pages found before anybody sees it.

        Beyond two there is one more where the setting names so much memory, and one more for the
        `last` save of a link.
        """
        most = SLOTS + (self._limit is not None) + last
        if len(self._slots) >= most or not self._has_room(self.held + self.size):
            return
        slot = Slot()
        memory = slot.sized(self.size, pinned=self.pinned)
        if not self.pinned:
            _touch(memory)
        self._learn(slot)
        self._slots.append(slot)

    def _has_room(self, total: int) -> bool:
        """Whether buffers may have so many bytes; before the first there is no size to go by."""
        return self.size > 0 and (self._limit is None or total <= self._limit)

    def take(self, state: object, steady: frozenset[str] = frozenset()) -> Snapshot:
        """Copy the state; only while ready. When this returns, training may change it again."""
        slot = self._free()
        if slot is None:
            raise RuntimeError("no buffer is free")
        if steady != self._steady:
            self._steady, self._plan = steady, None
        slot.taken = True
        try:
            return self._take(state, slot)
        except BaseException:  # given back, then raised again
            slot.taken = False
            raise

    def _take(self, state: object, slot: Slot) -> Snapshot:
        found = None if self._outline is None else self._outline.match(state)
        if found is None:
            self._plan, self._outline = None, outline_of(state)
            found = None if self._outline is None else self._outline.match(state)
        outline = self._outline
        if found is None or outline is None:
            return self._take_afresh(state, slot)
        plan = self._plan or self._plan_of(outline, found)
        values, addresses = _stored(outline, found)
        found.values, found.addresses = [], []  # the tree is made later, and needs none of them
        return self._copied(plan, slot, values, addresses, lambda: outline.tree(found))

    def _plan_of(self, outline: Outline, found: Match) -> _Plan:
        values = [found.values[number] for number in outline.stored]
        self._plan = self._planned(outline.leaves, outline.aliases, values, self._steady)
        return self._plan

    def _take_afresh(self, state: object, slot: Slot) -> Snapshot:
        """A form that is not remembered."""
        encoded = encode(state)
        values = [leaf.value for leaf in encoded.leaves]
        plan = self._planned(encoded.leaves, encoded.aliases, values, frozenset())
        tree = encoded.tree
        return self._copied(plan, slot, values, None, lambda: tree)

    def _planned(
        self,
        leaves: Sequence[LeafSpec],
        aliases: dict[str, str],
        values: Sequence[Value],
        steady: frozenset[str],
    ) -> _Plan:
        self.pinned = any(on_device(value) for value in values)
        plan = _plan(leaves, aliases, steady)
        if self._limit is not None and plan.total > self._limit:
            raise UserError(
                f"a snapshot needs {format_size(plan.total)} of memory and checkpoint.memory "
                f"allows {format_size(self._limit)}: raise the setting, or track less"
            )
        return plan

    def _copied(
        self,
        plan: _Plan,
        slot: Slot,
        values: list[Value],
        addresses: list[int] | None,
        make_tree: Callable[[], Any],
    ) -> Snapshot:
        self._stay_below_limit(slot, plan.total)
        copier = slot.prepare(plan, pinned=self.pinned)
        unmoved: Collection[int] = ()
        if addresses is not None:
            unmoved = slot.unmoved(plan, copier.kinds(values), addresses)
        copier.copy(values, addresses, unmoved)
        return Snapshot(
            make_tree=make_tree,
            aliases=plan.aliases,
            layouts=plan.layouts,
            images=slot.images,
            steady=plan.steady,
            give_back=lambda: _release(slot),
            digests=dict(slot.digests),
            learn=slot.digests.__setitem__,
        )

    def _stay_below_limit(self, slot: Slot, size: int) -> None:
        """A state that has grown may leave no room for the other buffer."""
        others = [one for one in self._slots if one is not slot and one.memory is not None]
        held = sum(len(one.memory) for one in others if one.memory is not None)
        if self._limit is None or held + size <= self._limit:
            return
        self._slots = [one for one in self._slots if one is slot or one.taken]
        if len(self._slots) > 1:
            raise MemoryError(
                f"two snapshots need more than the {format_size(self._limit)} that "
                "checkpoint.memory allows, and one is still being written"
            )

    def _free(self) -> Slot | None:
        return next((slot for slot in self._slots if not slot.taken and self._fits(slot)), None)

    def _fits(self, slot: Slot) -> bool:
        """Whether the slot may be as large as the plan asks for, beside one being written."""
        if self._limit is None or self._plan is None:
            return True
        taken = (one.memory for one in self._slots if one is not slot and one.taken)
        held = sum(len(memory) for memory in taken if memory is not None)
        return held == 0 or held + self._plan.total <= self._limit


def _stored(outline: Outline, found: Match) -> tuple[list[Value], list[int]]:
    """The leaves that are written, each once, and where they lie."""
    stored = outline.stored
    return [found.values[number] for number in stored], [found.addresses[n] for n in stored]


def _release(slot: Slot) -> None:
    slot.taken = False


def _touch(memory: memoryview) -> None:
    if isinstance(memory.obj, mmap.mmap):
        fsio.touch(memory.obj)
