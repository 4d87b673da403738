"""The camera: what a snapshot holds is, byte for byte, what encoding and copying would give."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import ctypes
import functools
import gc
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpc_ckpt import fsio
from hpc_ckpt.engine import moves
from hpc_ckpt.engine import snapshot as snapshot_room
from hpc_ckpt.engine.snapshot import SLOTS, Camera, Snapshot, check
from hpc_ckpt.errors import UnsupportedState, UserError
from hpc_ckpt.format.image import ImageLayout, lay_out
from hpc_ckpt.format.manifest import TreeText, digest, json_text
from hpc_ckpt.state.leaves import copy_into
from hpc_ckpt.state.tree import encode

MIB = 1024**2


# ── the reference ─────────────────────────────────────────────────────────────────────────
Picture = dict[str, Any]
"""Images by their digests: a difference of megabytes says nothing, and takes minutes to print."""


def reference(state: object, steady: Iterable[str] = ()) -> Picture:
    """Made without a camera: encode(), lay_out(), copy_into()."""
    encoded, apart = encode(state), set(steady)
    moving = lay_out([leaf for leaf in encoded.leaves if leaf.name not in apart])
    still = [leaf for leaf in encoded.leaves if leaf.name in apart]
    layouts = moving + (lay_out(still, first_part=len(moving)) if still else ())
    values = {leaf.name: leaf.value for leaf in encoded.leaves}
    return {
        "tree": json_text(encoded.tree),
        "aliases": encoded.aliases,
        "layouts": layouts,
        "images": [digest(_image(layout, values)) for layout in layouts],
        "steady": tuple(number >= len(moving) for number in range(len(layouts))),
        "size": sum(layout.size for layout in layouts),
    }


def _image(layout: ImageLayout, values: dict[str, Any]) -> bytes:
    image = bytearray(layout.size)
    image[: len(layout.header)] = layout.header
    for name, (start, end) in layout.spans.items():
        copy_into(memoryview(image)[start:end], values[name])
    return bytes(image)


def seen(snapshot: Snapshot) -> Picture:
    tree = snapshot.make_tree()
    return {
        "tree": tree.text if isinstance(tree, TreeText) else json_text(tree),
        "aliases": snapshot.aliases,
        "layouts": snapshot.layouts,
        "images": [digest(image) for image in snapshot.images],
        "steady": snapshot.steady,
        "size": snapshot.size,
    }


def take(camera: Camera, state: object, steady: Iterable[str] = ()) -> Picture:
    """One snapshot, looked at and given back."""
    snapshot = camera.take(state, frozenset(steady))
    try:
        return seen(snapshot)
    finally:
        snapshot.release()


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


# ── states that change ────────────────────────────────────────────────────────────────────
class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.Linear(20, 3))
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def change(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 30)).square().mean().backward()
        self.optimizer.step()

    def state(self) -> object:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Mixture:
    """Every way of copying: small, large, in pieces, strided, conjugated, numpy, nothing."""

    def __init__(self) -> None:
        self.n = 0
        self.large = torch.zeros(3 * MIB // 4 + 5)
        self.array = np.zeros(5 * MIB // 8)
        self.change()

    def change(self) -> None:
        self.n += 1
        generator = torch.Generator().manual_seed(self.n)
        self.large.normal_(generator=generator)
        self.array[:] = np.random.default_rng(self.n).standard_normal(len(self.array))
        turn = torch.complex(torch.randn(9, generator=generator), torch.full((9,), float(self.n)))
        self.rest: dict[str, Any] = {
            "strided": torch.randn(40, 6, generator=generator)[::2, 1:4],
            "channels last": torch.randn(2, 3, 4, 5, generator=generator).to(
                memory_format=torch.channels_last
            ),
            "conjugated": turn.conj(),
            "negated": turn.conj().imag,
            "negated, in one stretch": torch._neg_view(torch.randn(9, generator=generator)),
            "half": torch.randn(7, generator=generator).bfloat16(),
            "wide": torch.full((3,), self.n, dtype=torch.complex128),
            "scalar": torch.tensor(self.n),
            "nothing": torch.empty(0, 3),
            "fortran": np.asfortranarray(np.random.default_rng(self.n).standard_normal((3, 4))),
            "text": np.array([f"n{self.n}", "b"], dtype="<U9"),
        }

    def state(self) -> object:
        tied = {"large": self.large, "again": self.large.view(-1), "array": self.array}
        return {**self.rest, "tied": tied, "n": self.n, "log": [self.n] * 3}


class Unremembered:
    """Forms that are encoded afresh each time."""

    def __init__(self) -> None:
        self.n = 0
        self.generator = torch.Generator().manual_seed(3)
        self.shared: dict[str, Any] = {"w": torch.zeros(5)}

    def change(self) -> None:
        self.n += 1
        self.shared["w"] += 1
        torch.rand(1, generator=self.generator)

    def state(self) -> object:
        sparse = torch.eye(4 + self.n).to_sparse()
        return {"a": self.shared, "b": self.shared, "g": self.generator, "sparse": sparse}


class Growing:
    """Another form at every step, and now and then an old one again."""

    def __init__(self) -> None:
        self.n = 0

    def change(self) -> None:
        self.n += 1

    def state(self) -> object:
        size = 1000 * (self.n % 3) + 1
        return OrderedDict((f"w{n}", torch.full((size,), self.n)) for n in range(self.n % 4))


STATES: dict[str, Callable[[], Any]] = {
    "training": Training,
    "mixture": Mixture,
    "unremembered": Unremembered,
    "growing": Growing,
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("planned", [False, True])
def test_every_snapshot_is_what_was_there(name: str, planned: bool) -> None:
    """The first, and the next ones with other values, in the same buffer."""
    program, camera = STATES[name](), Camera()
    program.change()
    if planned:
        assert camera.plan(program.state(), frozenset()) >= check(program.state())
    for _ in range(7):
        assert reference(program.state()) == take(camera, program.state())
        program.change()


def test_pieces_are_shared_out_between_threads() -> None:
    """From 8 MiB on two threads copy; every piece arrives, the odd rest too."""
    big = torch.arange(9 * MIB // 4 + 3, dtype=torch.float32)
    state, camera = {"big": big, "small": torch.ones(3)}, Camera()
    assert big.nbytes > moves._WORTH_A_THREAD
    assert reference(state) == take(camera, state)
    big.neg_()
    assert reference(state) == take(camera, state)


def test_a_parameter_that_moved_is_found_again() -> None:
    """p.data = … gives it other memory; what lay at the old place is not copied."""
    program, camera = Training(), Camera()
    program.change()
    take(camera, program.state())
    for parameter in program.model.parameters():
        old = parameter.data
        parameter.data = torch.randn_like(parameter)
        old.fill_(-1.0)
    assert reference(program.state()) == take(camera, program.state())


def test_values_may_swap_places() -> None:
    """Two leaves of one form that exchange their memory exchange their bytes."""
    one, other, camera = torch.ones(50), torch.zeros(50), Camera()
    first, second = {"a": one, "b": other}, {"a": other, "b": one}
    for state in (first, second, first):
        assert reference(state) == take(camera, state)


def test_the_tree_is_of_the_moment_of_the_snapshot() -> None:
    """It is made when training has gone on."""
    for extra in ({}, {"shared": [[1]] * 2}):
        state: dict[str, Any] = {"w": torch.ones(3), "log": [1], "n": 1, **extra}
        expected = reference(state)
        snapshot = Camera().take(state)
        state["log"].append(2)
        state["n"] = 2
        assert expected == seen(snapshot)


def test_images_begin_at_pages_and_the_buffer_is_reused() -> None:
    """Direct I/O needs the one, a save without allocation the other."""
    program, camera = Training(), Camera()
    program.change()
    places = set()
    for _ in range(3):
        snapshot = camera.take(program.state())
        places.add(tuple(address(image) for image in snapshot.images))
        snapshot.release()
        program.change()
    assert 1 == len(places)
    assert [0] == [place % fsio.PAGE for place in places.pop()]
    assert fsio.round_up(check(program.state())) == camera.held


# ── steady leaves ─────────────────────────────────────────────────────────────────────────
STEADY: dict[str, frozenset[str]] = {
    "one": frozenset({"model.0.weight"}),
    "some": frozenset({"model.0.weight", "model.2.bias", "optimizer.state.0.exp_avg"}),
    "buffers": frozenset({"model.1.num_batches_tracked", "model.1.running_mean"}),
    "and one that is not there": frozenset({"model.0.weight", "model.9.weight"}),
    "none that is there": frozenset({"model.9.weight"}),
}


@pytest.mark.parametrize("case", STEADY)
def test_steady_leaves_have_a_file_of_their_own(case: str) -> None:
    """The last one; no leaf is lost and none comes twice."""
    program, camera, steady = Training(), Camera(), STEADY[case]
    program.change()
    names = [leaf.name for leaf in encode(program.state()).leaves]
    for _ in range(3):
        found = take(camera, program.state(), steady)
        assert reference(program.state(), steady) == found
        held = [list(layout.spans) for layout in found["layouts"]]
        assert sorted(names) == sorted(name for part in held for name in part)
        present = steady & set(names)
        assert [present] * bool(present) == [set(part) for part in held[1:]]
        assert (False, True)[: len(held)] == found["steady"]
        program.change()


def test_all_leaves_may_be_steady() -> None:
    """Then the first file is there and empty, for every rank has one."""
    state = {"a": torch.ones(3), "b": np.ones(4)}
    found = take(Camera(), state, {"a", "b"})
    assert reference(state, {"a", "b"}) == found
    assert [set(), {"a", "b"}] == [set(layout.spans) for layout in found["layouts"]]


def test_what_is_steady_may_change_between_snapshots() -> None:
    """A new plan each time; the same buffer serves them all."""
    program, camera = Training(), Camera()
    program.change()
    for steady in (*STEADY.values(), frozenset(), STEADY["one"]):
        assert reference(program.state(), steady) == take(camera, program.state(), steady)
        program.change()


def test_steady_leaves_come_after_every_file_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So many names that one header cannot hold them: no two files have one name."""
    narrow = functools.partial(lay_out, header_cap=fsio.PAGE)
    monkeypatch.setattr(snapshot_room, "lay_out", narrow)
    monkeypatch.setitem(globals(), "lay_out", narrow)
    state = {f"a rather long name {n}": torch.full((3,), n) for n in range(120)}
    steady = {name for name in state if name.endswith("7")}
    found = take(Camera(), state, steady)
    assert reference(state, steady) == found
    names = [layout.file_name for layout in found["layouts"]]
    assert len(names) == len(set(names)) > 2
    assert steady == set(found["layouts"][-1].spans)


def test_a_tied_steady_leaf_is_stored_once() -> None:
    """Under its first name; the alias goes where it goes."""
    weight = torch.randn(30)
    state, camera = {"a": weight, "b": {"c": weight}, "d": torch.ones(2)}, Camera()
    found = take(camera, state, {"a"})
    assert reference(state, {"a"}) == found
    assert ({"b.c": "a"}, ["d"]) == (found["aliases"], list(found["layouts"][0].spans))


def test_a_form_that_is_not_remembered_sets_nothing_apart() -> None:
    """One file, and everything in it."""
    program = Unremembered()
    found = take(Camera(), program.state(), {"a.w"})
    assert reference(program.state()) == found


def test_two_groups_of_parameters_can_have_steady_leaves() -> None:
    """A fine-tuned model with two groups is the usual case of frozen weights."""
    frozen, moving = torch.ones(50), [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))]
    optimizer = torch.optim.AdamW([{"params": [one]} for one in moving])
    state = {"frozen": frozen, "optimizer": optimizer.state_dict()}
    assert reference(state, {"frozen"}) == take(Camera(), state, {"frozen"})


def test_leaves_are_found_by_where_they_lie() -> None:
    """Names and bytes of those at the given addresses, with the bytes of all."""
    model = nn.Linear(4, 3)
    state = {"model": model.state_dict(), "tied": model.weight, "array": np.ones(2)}
    found = Camera().leaves_at(state, {model.weight.data_ptr()})
    assert {"model.weight": (48, 48 + 12 + 16)} == found
    assert {} == Camera().leaves_at(state, ())


# ── buffers ───────────────────────────────────────────────────────────────────────────────
def test_a_snapshot_stands_while_the_next_is_taken() -> None:
    """Two in flight: the second is copied into another buffer."""
    program, camera = Mixture(), Camera()
    first, expected = camera.take(program.state()), reference(program.state())
    assert (False, True) == (camera.ready, camera.can_grow)
    camera.grow()
    assert (True, False, SLOTS) == (camera.ready, camera.can_grow, len(camera._slots))
    program.change()
    second, then = camera.take(program.state()), reference(program.state())
    assert not camera.ready
    assert (expected, then) == (seen(first), seen(second))
    first.release()
    program.change()
    third = camera.take(program.state())
    assert (then, reference(program.state())) == (seen(second), seen(third))


def test_a_buffer_made_later_learns_no_form_that_is_over() -> None:
    """What was seen at the start holds for the state of the start alone."""
    camera = Camera()
    start = {"a": torch.ones(70_000), "b": torch.ones(3)}
    later = {"b": torch.ones(70_000), "c": torch.full((70_000,), 2.0), "d": torch.zeros(5)}
    camera.plan(start, frozenset())
    first = camera.take(later)
    camera.grow()
    second = camera.take(later)
    assert [reference(later)] * 2 == [seen(first), seen(second)]


def test_a_buffer_made_later_is_planned_before_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Training does not wait for the first plan of a second buffer."""
    camera, state = Camera(), {"a": torch.ones(70_000), "b": torch.ones(3)}
    camera.plan(state, frozenset())
    first = camera.take(state)
    camera.grow()
    planned: list[object] = []
    monkeypatch.setattr(moves.Moves, "_plan", lambda self, *_: planned.append(self) or [])
    second = camera.take(state)
    assert [] == planned
    assert seen(first) == seen(second)


def test_two_buffers_may_hold_different_forms() -> None:
    """Each remembers the plan that its headers were written for."""
    camera = Camera()
    small, large = {"w": torch.ones(3)}, {"w": torch.ones(9000), "v": torch.ones(2)}
    camera.take(small).release()
    camera.grow()
    for first_state, second_state in ((small, large), (large, small), (small, small)):
        first, second = camera.take(first_state), camera.take(second_state)
        assert [reference(first_state), reference(second_state)] == [seen(first), seen(second)]
        first.release()
        second.release()


def test_a_released_snapshot_keeps_no_buffer_alive() -> None:
    """What follows a commit still has the snapshot when the next one needs a larger buffer."""
    camera = Camera()
    kept = camera.take({"w": torch.ones(3)})
    memory = camera._slots[0].memory
    assert memory is not None
    too_small = weakref.ref(memory.obj)
    del memory
    kept.release()
    larger = camera.take({"w": torch.ones(9000)})
    assert ((), None) == (kept.images, too_small())
    assert reference({"w": torch.ones(9000)}) == seen(larger)


def test_without_a_free_buffer_nothing_is_taken() -> None:
    """Training is not blocked: whoever asks first finds that the camera is not ready."""
    camera = Camera()
    snapshot = camera.take({"w": torch.ones(3)})
    with pytest.raises(RuntimeError, match="no buffer is free"):
        camera.take({"w": torch.zeros(3)})
    assert reference({"w": torch.ones(3)}) == seen(snapshot)
    snapshot.release()
    assert reference({"w": torch.zeros(3)}) == take(camera, {"w": torch.zeros(3)})


@pytest.mark.parametrize("state", [{"w": torch.ones(3), "bad": object()}, {"w": object()}])
def test_a_snapshot_that_fails_gives_its_buffer_back(state: object) -> None:
    """What cannot be saved is said, and the next state can be."""
    camera = Camera()
    for _ in range(2):
        with pytest.raises(UnsupportedState):
            camera.take(state)
        assert camera.ready
        assert reference({"w": torch.ones(3)}) == take(camera, {"w": torch.ones(3)})


def test_a_buffer_grows_with_the_state_and_does_not_shrink() -> None:
    """Its images are right at every size."""
    camera, held = Camera(), []
    for size in (10, 5000, 10, 200_000, 5000):
        state = {"w": torch.full((size,), float(size))}
        assert reference(state) == take(camera, state)
        held.append(camera.held)
    assert sorted(held) == held
    assert fsio.round_up(check({"w": torch.ones(200_000)})) == held[-1]


def test_a_warm_buffer_is_the_one_that_is_used() -> None:
    """Made in the background, of the size that the plan told; a second call makes no other."""
    state, camera = {"w": torch.ones(5000)}, Camera()
    size = camera.plan(state, frozenset())
    camera.warm(size)
    assert size == camera.held
    warm = camera._slots[0].memory
    camera.warm(size)
    snapshot = camera.take(state)
    assert camera._slots[0].memory is warm
    assert reference(state) == seen(snapshot)


def test_a_buffer_in_use_is_not_warmed() -> None:
    """The image that is being written keeps its memory."""
    camera, state = Camera(), {"w": torch.ones(5000)}
    snapshot = camera.take(state)
    camera.warm(100 * NEED)
    assert reference(state) == seen(snapshot)
    assert fsio.round_up(check(state)) == camera.held


def test_nothing_grows_before_the_first_snapshot() -> None:
    """There is no size to go by."""
    camera = Camera()
    assert not camera.can_grow
    camera.grow()
    assert (1, 0) == (len(camera._slots), camera.held)


# ── the limit ─────────────────────────────────────────────────────────────────────────────
STATE = {"w": torch.ones(5000), "v": torch.ones(5)}
NEED = fsio.round_up(check(STATE))


@pytest.mark.parametrize("steady", [frozenset(), frozenset({"w"})])
def test_a_state_above_the_limit_is_refused_by_the_setting_s_name(steady: frozenset[str]) -> None:
    """When it is planned and when it is taken; a smaller state still can be."""
    camera = Camera(NEED - 1)
    with pytest.raises(UserError, match=r"checkpoint\.memory"):
        camera.plan(STATE, steady)
    with pytest.raises(UserError, match=r"checkpoint\.memory"):
        camera.take(STATE, steady)
    assert (True, 0) == (camera.ready, camera.held)
    assert reference({"v": torch.ones(5)}) == take(camera, {"v": torch.ones(5)})


def test_a_form_that_is_not_remembered_is_held_to_the_limit() -> None:
    """Whatever way the state is laid out."""
    shared = {"w": torch.ones(5000)}
    with pytest.raises(UserError, match=r"checkpoint\.memory"):
        Camera(NEED - 1).take({"a": shared, "b": shared})


@pytest.mark.parametrize(
    ("limit", "grows"), [(NEED, False), (2 * NEED - 1, False), (2 * NEED, True), (None, True)]
)
def test_the_second_buffer_needs_room_under_the_limit(limit: int | None, grows: bool) -> None:
    """Exactly as much as the setting says is still allowed."""
    camera = Camera(limit)
    assert reference(STATE) == take(camera, STATE)
    assert grows == camera.can_grow


def test_all_buffers_together_stay_under_the_limit() -> None:
    """Also when the state grew after there were two."""
    camera, limit = Camera(10 * NEED), 10 * NEED
    camera.take(STATE).release()
    camera.grow()
    larger = {"w": torch.ones(5000 * 8)}
    snapshots = []
    while camera.ready:
        snapshots.append(camera.take(larger))
    assert camera.held <= limit


# ── what belongs to the program ───────────────────────────────────────────────────────────
def test_nothing_of_the_program_is_kept_alive() -> None:
    """A parameter's memory is free once the program has replaced it."""
    owner = np.ones(300_000, dtype="f4")
    watched = weakref.ref(owner)
    model = nn.Linear(2, 2)
    model.weight.data = torch.from_numpy(owner).reshape(2, -1)
    array = np.ones(4)
    watched_array = weakref.ref(array)
    camera = Camera()
    camera.plan({"model": model.state_dict(), "array": array}, frozenset())
    camera.take({"model": model.state_dict(), "array": array}).release()
    del owner, array
    model.weight.data = torch.zeros(2, 150_000)
    gc.collect()
    assert (None, None) == (watched(), watched_array())
    state = {"model": model.state_dict(), "array": np.zeros(4)}
    assert reference(state) == take(camera, state)


@pytest.mark.parametrize("extra", [{}, {"shared": [[1]] * 2}])
def test_a_snapshot_under_way_keeps_nothing_alive(extra: dict[str, Any]) -> None:
    """While it is being written the program may free what was copied."""
    owner = np.ones(1000)
    watched = weakref.ref(owner)
    snapshot = Camera().take({"w": torch.from_numpy(owner), **extra})
    del owner
    gc.collect()
    assert watched() is None
    assert snapshot.make_tree()


@pytest.mark.parametrize(
    "goes",
    [
        "w = torch.ones(9, device='meta')",
        "w.untyped_storage().resize_(0)",
        "part.untyped_storage().resize_(0)",  # its address is not 0 then
        "part.untyped_storage().resize_(400_000)",
    ],
)
def test_a_parameter_whose_data_is_gone_is_refused(goes: str) -> None:
    """By UnsupportedState, as at the first snapshot; not by the death of the program."""
    program = (
        "import torch\n"
        "from hpc_ckpt.engine.snapshot import Camera\n"
        "from hpc_ckpt.errors import UnsupportedState\n"
        "camera, w, part = Camera(), torch.ones(9), torch.ones(1_000_000)[1000:900_000]\n"
        "for _ in range(3):\n"
        "    camera.take({'w': w, 'part': part}).release()\n"
        f"{goes}\n"
        "try:\n"
        "    camera.take({'w': w, 'part': part})\n"
        "except UnsupportedState:\n"
        "    raise SystemExit(7)\n"
    )
    assert 7 == subprocess.run([sys.executable, "-c", program]).returncode


def test_what_is_copied_how_is_decided_when_the_plan_is_made() -> None:
    """Between two boundaries a program may give a parameter other memory for a while."""
    weight = nn.Parameter(torch.arange(6000.0).reshape(60, 100).t())
    strided = weight.data
    camera = Camera()
    size = camera.plan({"w": weight}, frozenset())
    weight.data = strided.contiguous()
    camera.warm(size)
    weight.data = strided
    assert reference({"w": weight}) == take(camera, {"w": weight})


@pytest.mark.parametrize(
    ("limit", "most", "most_for_the_last"),
    [(None, SLOTS, SLOTS + 1), (10 * NEED, SLOTS + 1, SLOTS + 2), (3 * NEED, SLOTS + 1, SLOTS + 1)],
)
def test_buffers_of_saves_that_hang_are_not_replaced_for_ever(
    limit: int | None, most: int, most_for_the_last: int
) -> None:
    """Each is as large as the state: beyond two only for the last save, or by the setting."""
    camera = Camera(limit)
    for last, expected in ((False, most), (True, most_for_the_last)):
        for _ in range(5):
            if camera.ready:
                camera.take(STATE)
            camera.grow(last=last)
        while camera.ready:
            camera.take(STATE)
        assert (expected, False) == (len(camera._slots), camera.can_grow)
        assert limit is None or camera.held <= limit


def test_no_buffer_is_made_beyond_the_limit() -> None:
    """Also for a save that somebody waits for."""
    state = {"value": torch.zeros(MIB)}
    camera = Camera(limit=6 * MIB)
    camera.take(state)
    held = camera.held
    camera.grow()
    assert (held, False) == (camera.held, camera.ready)
