"""Weights that do not change are written once, and whatever refers to them can be restored."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpc_ckpt import Checkpointer, events, load
from hpc_ckpt.cli import listing
from hpc_ckpt.engine.persist import Pending
from hpc_ckpt.errors import RestoreMismatch
from hpc_ckpt.events import Event
from hpc_ckpt.format.manifest import Manifest
from hpc_ckpt.rundir import CheckpointKey, RunDir
from hpc_ckpt.tiers.directory import DirectoryTier

WIDE, NARROW = 512, 8


class Stopped(Exception):
    """Ends a run between two steps, without a final save."""


class Net(nn.Module):
    """Nine tenths of its bytes are the backbone's."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(NARROW * 40, WIDE, bias=False)
        self.norm = nn.BatchNorm1d(WIDE)
        self.head = nn.Linear(WIDE, NARROW)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.backbone(x)))  # type: ignore[no-any-return] # a tensor


def two_groups(model: Net) -> torch.optim.Optimizer:
    """All parameters train, but the backbone's rate is nought."""
    others = [p for name, p in model.named_parameters() if not name.startswith("backbone")]
    return torch.optim.SGD(
        [{"params": others}, {"params": model.backbone.parameters(), "lr": 0.0}], lr=0.1
    )


class Program:
    """One process: its objects, and a loop that saves after every step."""

    def __init__(
        self,
        *,
        frozen: bool = True,
        seed: int = 0,
        optimizer: Callable[[Net], torch.optim.Optimizer] | None = None,
    ) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.model.backbone.weight.requires_grad_(not frozen)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        made = None if optimizer is None else optimizer(self.model)
        self.optimizer = made or torch.optim.SGD(trained, lr=0.1)
        self.restored: Any = None

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, NARROW * 40)).square().mean().backward()
        self.optimizer.step()

    def run(
        self,
        root: Path,
        steps: int,
        *,
        before_save: Callable[[int], object] = lambda step: None,
        wait: bool = True,
        **options: Any,
    ) -> Program:
        """Go on up to this step and die without a final save."""
        tracked = {"model": self.model, "optimizer": self.optimizer}
        with (
            pytest.raises(Stopped),
            Checkpointer(root, policy="every hour", seed=0, **options, **tracked) as ckpt,
        ):
            self.restored = ckpt.restored
            for _ in ckpt.steps(steps):
                self.train()
                before_save(ckpt.global_step + 1)
                ckpt.step()
                settle(ckpt.save(wait=wait))
            raise Stopped
        return self

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def settle(pending: Pending) -> None:
    while not pending.done():
        time.sleep(0.001)
    pending.wait()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith("HPC_CKPT"):
            monkeypatch.delenv(name)
    return tmp_path / "run"


@pytest.fixture
def tier(root: Path) -> DirectoryTier:
    return DirectoryTier(RunDir(root).checkpoints)


# ── what is looked at ─────────────────────────────────────────────────────────────────────
def steps_of(tier: DirectoryTier) -> list[int]:
    return [key.step for key in tier.keys()]  # noqa: SIM118 - not a mapping


def size_of(tier: DirectoryTier, key: CheckpointKey) -> int:
    return sum(file.stat().st_size for file in tier.path_of(key).iterdir())


def sizes_of(tier: DirectoryTier) -> dict[int, int]:
    return {key.step: size_of(tier, key) for key in tier.keys()}  # noqa: SIM118 - not a mapping


def holders_of(manifest: Manifest) -> list[int]:
    return sorted(key.step for key in manifest.holders)


def held(tier: DirectoryTier) -> dict[int, list[int]]:
    """For each step, the steps that hold shards of it."""
    keys = tier.keys()
    return {key.step: holders_of(tier.manifest(key)) for key in keys}


def defects_of(tier: DirectoryTier) -> dict[int, list[Any]]:
    found = {key.step: tier.verify(key) for key in tier.keys()}  # noqa: SIM118 - not a mapping
    return {step: defects for step, defects in found.items() if defects}


def weight_in(tier: DirectoryTier, step: int) -> torch.Tensor:
    (key,) = [key for key in tier.keys() if key.step == step]  # noqa: SIM118 - not a mapping
    weight: torch.Tensor = load(tier.path_of(key))["tracked"]["model"]["backbone.weight"]
    return weight


def assert_same(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == actual.keys()
    assert [] == [name for name in expected if not torch.equal(expected[name], actual[name])]


# ── written once ──────────────────────────────────────────────────────────────────────────
def test_frozen_weights_are_written_once(root: Path, tier: DirectoryTier) -> None:
    """A fifth of the bytes at most from the second save on; every manifest names the first."""
    Program().run(root, 5, keep=9)
    sizes = sizes_of(tier)
    assert [] == [step for step in (2, 3, 4, 5) if sizes[step] > 0.2 * sizes[1]]
    assert {1: [], 2: [1], 3: [1], 4: [1], 5: [1]} == held(tier)
    assert {} == defects_of(tier)


def test_a_checkpoint_that_refers_restores_bit_for_bit(root: Path, tier: DirectoryTier) -> None:
    """Into objects of a new process that know nothing of the old ones."""
    first = Program().run(root, 3)
    saved, weights = first.state(), weight_in(tier, 3)
    again = Program(seed=1)
    assert not torch.equal(weights, again.model.backbone.weight)
    again.run(root, 3)
    assert_same(saved, again.state())
    assert (3, ()) == (again.restored.step, again.restored.skipped)


def test_a_resumed_run_is_the_uninterrupted_one(root: Path, tmp_path: Path) -> None:
    """Frozen or not, referring or not: the same weights at the end."""
    whole = Program().run(tmp_path / "whole", 6)
    Program().run(root, 2)
    Program(seed=5).run(root, 4)
    assert_same(whole.state(), Program(seed=7).run(root, 6).state())


def test_a_program_that_comes_back_goes_on_referring(root: Path, tier: DirectoryTier) -> None:
    """Its first save writes no frozen weight either, nor does that of the one after it."""
    Program().run(root, 2, keep=9)
    Program(seed=1).run(root, 4, keep=9)
    Program(seed=2).run(root, 5, keep=9)
    assert {1: [], 2: [1], 3: [1], 4: [1], 5: [1]} == held(tier)
    assert [1, 1, 2, 2, 3] == [key.generation for key in tier.keys()]  # noqa: SIM118 - a tier
    assert {} == defects_of(tier)


def test_a_save_in_the_background_refers_too(root: Path, tier: DirectoryTier) -> None:
    """The usual way of saving."""
    Program().run(root, 3, wait=False, keep=9)
    assert {1: [], 2: [1], 3: [1]} == held(tier)


def test_what_is_referred_to_stays_young(root: Path, tier: DirectoryTier) -> None:
    """A site that removes what nobody touched for a month must not take the frozen weights."""
    Program().run(root, 2, keep=9)
    holder = tier.path_of(tier.keys()[0])
    needed = [holder / "MANIFEST.json", holder / "rank-00000.1.safetensors"]
    for path in needed:
        os.utime(path, (0, 0))
    Program(seed=1).run(root, 3, keep=9)
    assert [] == [path.name for path in needed if path.stat().st_mtime == 0]
    assert {} == defects_of(tier)


def test_ls_says_which_checkpoints_others_need(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever tidies up by hand sees what must stay."""
    Program().run(root, 3, keep=9)
    listing.list_checkpoints(root, as_json=False)
    shown = capsys.readouterr().out.splitlines()
    assert [1] == [n for n, line in enumerate(shown) if "needed by 2 more" in line]
    listing.list_checkpoints(root, as_json=True)
    needs = [one["needs"] for one in json.loads(capsys.readouterr().out)]
    assert [[], *[["step-000000001-g00000001"]] * 2] == needs


def test_small_weights_are_not_worth_a_file(root: Path, tier: DirectoryTier) -> None:
    """A few frozen bytes stay where all the others are."""
    program = Program(frozen=False)
    program.model.head.bias.requires_grad_(False)
    program.optimizer = torch.optim.SGD(
        [p for p in program.model.parameters() if p.requires_grad], lr=0.1
    )
    program.run(root, 3)
    assert {1: [], 2: [], 3: []} == held(tier)
    assert [1, 1, 1] == [len(tier.manifest(key).shards) for key in tier.keys()]  # noqa: SIM118


def test_a_frozen_weight_that_an_optimizer_has_is_not_trusted(
    root: Path, tier: DirectoryTier
) -> None:
    """It may begin to move at any step: it is set apart when it was seen not to."""
    program = Program(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    program.run(root, 4, keep=9)
    assert {1: [], 2: []} == {step: held(tier)[step] for step in (1, 2)}
    assert (1, 1, 2) == tuple(len(tier.manifest(key).shards) for key in tier.keys()[:3])
    assert {} == defects_of(tier)


def test_weights_that_happen_not_to_change_are_found(root: Path, tier: DirectoryTier) -> None:
    """Equal at two steps: set apart at the third, referred to from the fourth on."""
    program = Program(frozen=False, optimizer=two_groups)
    program.run(root, 6, keep=9)
    assert {1: [], 2: [], 3: [], 4: [3], 5: [3], 6: [3]} == held(tier)
    sizes = sizes_of(tier)
    assert [] == [step for step in (4, 5, 6) if sizes[step] > 0.2 * sizes[1]]
    assert {} == defects_of(tier)
    assert_same(program.state(), Program(seed=3, optimizer=two_groups).run(root, 6).state())


def test_two_groups_of_parameters_are_no_obstacle(root: Path, tier: DirectoryTier) -> None:
    """Decay for some weights and none for others is how most programs are written."""

    def optimizer(model: Net) -> torch.optim.Optimizer:
        groups = [{"params": model.head.parameters()}, {"params": model.norm.parameters()}]
        return torch.optim.AdamW(groups)

    Program(optimizer=optimizer).run(root, 3)
    assert {1: [], 2: [1], 3: [1]} == held(tier)


# ── changed after all ─────────────────────────────────────────────────────────────────────
def add(model: Net) -> None:
    with torch.no_grad():
        model.backbone.weight.add_(1.0)


def add_behind_our_back(model: Net) -> None:
    model.backbone.weight.data.view(-1)[12345] += 1.0


def exchange(model: Net) -> None:
    model.backbone.weight.data = torch.full_like(model.backbone.weight, 3.0)


CHANGES: dict[str, Callable[[Net], None]] = {
    "in place": add,
    "one number, by .data": add_behind_our_back,
    "other memory, by .data": exchange,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_frozen_weight_that_changed_is_written_again(
    root: Path, tier: DirectoryTier, change: str
) -> None:
    """Sameness is by digest: no version counter has to move for it."""
    program, seen = Program(), {}

    def before_save(step: int) -> None:
        if step in (3, 5):
            CHANGES[change](program.model)
        seen[step] = program.model.backbone.weight.detach().clone()

    program.run(root, 6, before_save=before_save, keep=9)
    assert [] == [step for step in seen if not torch.equal(seen[step], weight_in(tier, step))]
    assert ([], [1], []) == (held(tier)[1], held(tier)[2], held(tier)[3])
    assert {} == defects_of(tier)
    assert_same(program.state(), Program(seed=4).run(root, 6).state())


def test_a_weight_that_moves_again_is_not_guessed_at_again(root: Path, tier: DirectoryTier) -> None:
    """After it was wrong once it goes with the others: no more hashing for nothing."""
    program = Program()

    def before_save(step: int) -> None:
        if step == 3:
            add(program.model)

    program.run(root, 7, before_save=before_save, keep=9)
    shards = {key.step: len(tier.manifest(key).shards) for key in tier.keys()}  # noqa: SIM118
    assert {1: 2, 2: 2, 3: 2, 4: 1, 5: 1, 6: 1, 7: 1} == shards


def test_pages_that_are_not_sampled_are_compared_all_the_same(
    root: Path, tier: DirectoryTier
) -> None:
    """A wrong guess costs a file, never wrong bytes."""
    program, seen = Program(frozen=False, optimizer=two_groups), {}

    def before_save(step: int) -> None:
        program.model.backbone.weight.data.view(-1)[10_000] = float(step)
        seen[step] = program.model.backbone.weight.detach().clone()

    program.run(root, 6, before_save=before_save, keep=9)
    assert [] == [step for step in seen if not torch.equal(seen[step], weight_in(tier, step))]
    assert {step: [] for step in range(1, 7)} == held(tier)


def test_a_weight_that_was_unfrozen_is_saved_as_it_trains(root: Path, tier: DirectoryTier) -> None:
    """Fine-tuning in two stages, in two processes."""
    Program().run(root, 2, keep=9)
    program = Program(seed=1, frozen=False, optimizer=lambda m: torch.optim.SGD(m.parameters()))
    with pytest.raises(RestoreMismatch):
        program.run(root, 4)
    both = Program(seed=1)
    both.model.backbone.weight.requires_grad_(True)
    extra = torch.optim.SGD(both.model.backbone.parameters(), lr=0.1)
    both.run(root, 4, before_save=lambda step: extra.step(), keep=9)
    assert torch.equal(both.model.backbone.weight, weight_in(tier, 4))
    assert not torch.equal(weight_in(tier, 2), weight_in(tier, 3))
    assert {} == defects_of(tier)


# ── holders that are lost ─────────────────────────────────────────────────────────────────
def lose_shard(place: Path) -> None:
    (place / "rank-00000.1.safetensors").unlink()


def cut_shard(place: Path) -> None:
    os.truncate(place / "rank-00000.1.safetensors", 5000)


LOSSES: dict[str, Callable[[Path], object]] = {
    "its file": lose_shard,
    "half of its file": cut_shard,
    "all of it": shutil.rmtree,
}


@pytest.mark.filterwarnings("ignore:a checkpoint is damaged:RuntimeWarning")
@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_holder_is_written_again(root: Path, tier: DirectoryTier, loss: str) -> None:
    """By the next save, which then holds for those after it."""
    program = Program()

    def before_save(step: int) -> None:
        if step == 3:
            LOSSES[loss](tier.path_of(CheckpointKey(1, 1)))

    program.run(root, 5, before_save=before_save, keep=9)
    assert {3: [], 4: [3], 5: [3]} == {step: held(tier)[step] for step in (3, 4, 5)}
    assert set() == {3, 4, 5} & set(defects_of(tier))
    assert_same(program.state(), Program(seed=2).run(root, 5).state())


def test_a_damaged_holder_sends_a_restore_back_to_what_is_whole(
    root: Path, tier: DirectoryTier
) -> None:
    """Every checkpoint that refers to it is passed over, by name."""
    program = Program()

    def before_save(step: int) -> None:
        if step == 3:
            add(program.model)

    program.run(root, 4, before_save=before_save, keep=9)
    path = tier.path_of(CheckpointKey(1, 1)) / "rank-00000.1.safetensors"
    data = bytearray(path.read_bytes())
    data[9000] ^= 1
    path.write_bytes(data)
    assert [1, 2] == sorted(defects_of(tier))
    assert (4, ()) == (
        (again := Program(seed=2).run(root, 4).restored).step,
        again.skipped,
    )


@pytest.mark.filterwarnings("ignore:a checkpoint is damaged:RuntimeWarning")
def test_a_holder_that_is_damaged_while_it_runs_is_written_again(
    root: Path, tier: DirectoryTier
) -> None:
    """A part of it is looked at after each save, also where retention reads nothing back; what
    comes after that does not need it any more."""

    def before_save(step: int) -> None:
        if step == 3:
            path = tier.path_of(CheckpointKey(1, 1)) / "rank-00000.1.safetensors"
            data = bytearray(path.read_bytes())
            data[9000] ^= 1
            path.write_bytes(data)

    program = Program().run(root, 6, before_save=before_save, keep=99)
    assert 1 not in held(tier)[5] + held(tier)[6]
    assert set() == {5, 6} & set(defects_of(tier))
    assert_same(program.state(), Program(seed=2).run(root, 6).state())
    said = [record for path in RunDir(root).events.iterdir() for record in events.read(path)]
    damaged = [one["checkpoint"] for one in said if one["event"] == Event.HOLDER_DAMAGED.value]
    assert {CheckpointKey(1, 1).directory_name} == set(damaged)


# ── retention ─────────────────────────────────────────────────────────────────────────────
def test_a_holder_stays_as_long_as_it_is_needed(root: Path, tier: DirectoryTier) -> None:
    """Two are kept, and what they refer to; when nothing does any more it goes."""
    Program().run(root, 5, keep=2)
    assert [1, 4, 5] == steps_of(tier)
    program = Program()

    def before_save(step: int) -> None:
        add(program.model)

    program.run(root, 6, before_save=before_save, keep=2)
    assert [1, 5, 6] == steps_of(tier)
    program.run(root, 9, before_save=before_save, keep=2)
    assert [8, 9] == steps_of(tier)
    assert {} == defects_of(tier)


def test_a_holder_of_an_earlier_process_stays(root: Path, tier: DirectoryTier) -> None:
    """Retention knows from the manifests, not from memory."""
    Program().run(root, 2, keep=1)
    Program(seed=1).run(root, 4, keep=1)
    assert [1, 4] == steps_of(tier)
    assert {} == defects_of(tier)
    Program(seed=2).run(root, 5, keep=1)
    assert ([1, 5], [1]) == (steps_of(tier), held(tier)[5])


# ── several tiers ─────────────────────────────────────────────────────────────────────────
def test_every_tier_holds_what_its_checkpoints_refer_to(
    root: Path, tier: DirectoryTier, tmp_path: Path
) -> None:
    """The fast one may be lost, and what arrived at the root is whole."""
    fast = tmp_path / "fast"
    first = Program().run(root, 4, wait=False, tiers=[fast])
    (place,) = fast.iterdir()
    local = DirectoryTier(place / "checkpoints")
    assert ({}, {}) == (defects_of(local), defects_of(tier))
    assert [1] == held(local)[4]
    shutil.rmtree(fast)
    again = Program(seed=1).run(root, 4, tiers=[fast])
    assert (4, "root") == (again.restored.step, again.restored.tier)
    assert_same(first.state(), again.state())


def test_an_urgent_save_to_another_tier_is_whole_there(
    root: Path, tier: DirectoryTier, tmp_path: Path
) -> None:
    """What is known to lie in one tier is not taken to lie in another."""
    program, fast = Program(), tmp_path / "fast"
    for step in range(1, 5):
        program.run(root, step, wait=step % 2 == 0, tiers=[fast])
    (place,) = fast.iterdir()
    assert ({}, {}) == (defects_of(tier), defects_of(DirectoryTier(place / "checkpoints")))
    shutil.rmtree(fast)
    assert_same(program.state(), Program(seed=1).run(root, 4).state())


# ── the end of the work ───────────────────────────────────────────────────────────────────
def complete(root: Path, program: Program, saves: int) -> None:
    """One step, some saves of it, and out of the block."""
    tracked = {"model": program.model, "optimizer": program.optimizer}
    with Checkpointer(root, policy="every hour", seed=0, **tracked) as ckpt:
        program.train()
        ckpt.step()
        for _ in range(saves):
            ckpt.save(wait=True)


@pytest.mark.parametrize(
    "saves",
    [
        0,
        1,
    ],
)
def test_the_work_can_be_completed_at_the_step_of_the_first_save(
    root: Path, tier: DirectoryTier, saves: int
) -> None:
    """The final save finds the same state under its key, and reuses it."""
    program = Program()
    complete(root, program, saves)
    done = RunDir(root).done()
    assert done is not None
    assert ([1], {}, 1) == (steps_of(tier), defects_of(tier), done.step)
    assert_same(program.state(), Program(seed=1).run(root, 1).state())


def test_the_work_can_be_completed_at_a_step_that_refers(root: Path, tier: DirectoryTier) -> None:
    """The holder is older, as a holder must be."""
    Program().run(root, 2)
    complete(root, Program(seed=1), 1)
    assert ({1: [], 2: [1], 3: [1]}, {}) == (held(tier), defects_of(tier))
