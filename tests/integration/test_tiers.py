"""A run with more than one place: commits to the fastest, restores from whichever is valid."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_ckpt import Checkpointer, LinkEnded, events, fsio, preflight
from hpc_ckpt.engine.persist import Pending
from hpc_ckpt.errors import NoCheckpoint, RootError
from hpc_ckpt.events import Event
from hpc_ckpt.rundir import CheckpointKey, Result, RunDir
from hpc_ckpt.tiers import asking
from hpc_ckpt.tiers.directory import DirectoryTier
from hpc_ckpt.tiers.stack import UNMEASURED_S


class Stopped(Exception):
    """Ends a run between two steps, without a final save."""


def run(rundir: RunDir, fast: Path, steps: int, *, save: bool = True, tiers: Any = None) -> Any:
    """Go on to this step, saving at each, and die; what it was restored from."""
    weight, tiers = torch.zeros(3000), tiers or [fast]
    with (
        pytest.raises(Stopped),
        Checkpointer(rundir.root, tiers=tiers, policy="every hour", weight=weight) as ckpt,
    ):
        assert float(ckpt.global_step) == float(weight[0])
        for _ in ckpt.steps(steps):
            weight += 1
            ckpt.step()
            if save:
                settle(ckpt.save())
        raise Stopped
    return ckpt.restored


def settle(pending: Pending) -> None:
    """Until it is committed or has failed; who waits for a save would have it in the root."""
    while not pending.done():
        time.sleep(0.001)


def tier_of(rundir: RunDir, fast: Path) -> DirectoryTier:
    (chain,) = fast.iterdir()
    return DirectoryTier(chain / "checkpoints")


def steps_of(tier: DirectoryTier) -> list[int]:
    return [key.step for key in tier.keys()]  # noqa: SIM118 - not a mapping


def recorded(rundir: RunDir, event: Event) -> list[dict[str, Any]]:
    paths = sorted(rundir.events.glob("*.jsonl"))
    return [r for path in paths for r in events.read(path) if r["event"] == event.value]


def flip_a_bit(tier: DirectoryTier, key: CheckpointKey) -> None:
    path = tier.path_of(key) / tier.manifest(key).shards[0].file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_commits_go_to_the_fastest_and_arrive_at_the_root(rundir: RunDir, fast: Path) -> None:
    """The same bytes in both, by the time the program has left."""
    run(rundir, fast, 2)
    local, home = tier_of(rundir, fast), DirectoryTier(rundir.checkpoints)
    assert ([1, 2], 2) == (steps_of(local), steps_of(home)[-1])
    newest = home.keys()[-1]
    assert [] == home.verify(newest)
    for path in home.path_of(newest).iterdir():
        assert (local.path_of(newest) / path.name).read_bytes() == path.read_bytes()
    assert {str(fast)} == {r["tier"] for r in recorded(rundir, Event.COMMITTED)}
    assert "root" in {r["tier"] for r in recorded(rundir, Event.DRAINED)}
    assert 0o700 == local.path.stat().st_mode & 0o777


def test_a_restore_takes_the_fastest_that_has_it(rundir: RunDir, fast: Path) -> None:
    """And goes on exactly there."""
    run(rundir, fast, 2)
    restored = run(rundir, fast, 3)
    assert (2, str(fast), ()) == (restored.step, restored.tier, restored.skipped)


def test_a_lost_tier_costs_nothing_that_was_drained(rundir: RunDir, fast: Path) -> None:
    """A node-local disk is gone with its job."""
    run(rundir, fast, 2)
    shutil.rmtree(fast)
    restored = run(rundir, fast, 3)
    assert (2, "root") == (restored.step, restored.tier)
    assert [3] == steps_of(tier_of(rundir, fast))


def test_a_damaged_copy_means_the_other_one_of_the_same_step(rundir: RunDir, fast: Path) -> None:
    """Not an older step: what was rejected is named."""
    run(rundir, fast, 2)
    local = tier_of(rundir, fast)
    flip_a_bit(local, local.keys()[-1])
    restored = run(rundir, fast, 2, save=False)
    assert (2, "root", 1) == (restored.step, restored.tier, len(restored.skipped))
    assert "chunk-digest" in restored.skipped[0].reason


def test_what_was_not_drained_any_more_is_drained_by_the_next_link(
    rundir: RunDir, fast: Path
) -> None:
    """The fast tier has survived, the root has not got it yet."""
    run(rundir, fast, 2)
    shutil.rmtree(DirectoryTier(rundir.checkpoints).path_of(CheckpointKey(1, 2)))
    restored = run(rundir, fast, 2, save=False)
    assert (2, str(fast)) == (restored.step, restored.tier)
    assert 2 == steps_of(DirectoryTier(rundir.checkpoints))[-1]


def test_a_damaged_copy_in_the_root_is_mended_from_the_other_tier(
    rundir: RunDir, fast: Path
) -> None:
    """Found at the restore: the other tier may be gone before the next one."""
    home, tiers = DirectoryTier(rundir.checkpoints), ["root", fast]
    run(rundir, fast, 3, tiers=tiers)
    flip_a_bit(home, home.keys()[-1])
    restored = run(rundir, fast, 3, save=False, tiers=tiers)
    assert (3, str(fast), 1) == (restored.step, restored.tier, len(restored.skipped))
    assert ([1, 2, 3], []) == (steps_of(home), home.verify(home.keys()[-1]))
    restored = run(rundir, fast, 6, tiers=tiers)
    assert (3, "root", ()) == (restored.step, restored.tier, restored.skipped)
    assert [4, 5, 6] == steps_of(home), "what was mended counts again, and goes in its time"


KEEP = {"last": 2, "every": 5, "best": {"metric": "score", "mode": "max"}}


def kept_of(rundir: RunDir, fast: Path, steps: int, *, until: threading.Event) -> list[int]:
    """Go on to this step with many saves, of which only some stay; what the root has then.

    Nothing is drained before the last one is saved.
    """
    fsio.observe(lambda point: until.wait(60) if point == "drain.opened" else None)
    try:
        with (
            pytest.raises(Stopped),
            Checkpointer(rundir.root, tiers=[fast], policy="every hour", keep=KEEP) as ckpt,
        ):
            for _ in ckpt.steps(steps):
                ckpt.step(metrics={"score": 1.0 if ckpt.global_step == 6 else 0.1})
                settle(ckpt.save())
            until.set()
            raise Stopped
    finally:
        fsio.observe(None)
    return steps_of(DirectoryTier(rundir.checkpoints))


def test_what_is_to_stay_reaches_the_root_however_slow_it_is(rundir: RunDir, fast: Path) -> None:
    """`every` and `best` hold in the run directory: a fast tier may be gone with its job."""
    found = kept_of(rundir, fast, 13, until=threading.Event())
    assert {5, 7, 10, 13} <= set(found)
    assert [] == DirectoryTier(rundir.checkpoints).verify(CheckpointKey(1, 7))


def test_what_is_to_stay_and_was_not_drained_is_drained_by_the_next_link(
    rundir: RunDir, fast: Path
) -> None:
    """Not only the newest."""
    home = DirectoryTier(rundir.checkpoints)
    kept_of(rundir, fast, 13, until=threading.Event())
    for key in home.keys():  # noqa: SIM118 - not a mapping
        if key.step in (5, 7):
            shutil.rmtree(home.path_of(key))
    run_on = kept_of(rundir, fast, 13, until=threading.Event())
    assert {5, 7, 10, 13} <= set(run_on)


def test_the_end_of_the_work_is_in_the_root(rundir: RunDir, fast: Path) -> None:
    """DONE counts only if the checkpoint it names is there."""
    with Checkpointer(rundir.root, tiers=[fast], policy="every 1 steps") as ckpt:
        for _ in ckpt.steps(3):
            ckpt.step()
    done = rundir.done()
    assert done is not None
    assert (3, 3) == (done.step, steps_of(DirectoryTier(rundir.checkpoints))[-1])


def test_a_final_save_without_time_for_the_root_goes_to_the_fast_tier(
    rundir: RunDir, fast: Path
) -> None:
    """By what is known of the root, which is nothing here: taken for a slow one."""
    rundir.control.mkdir(parents=True)
    rundir.deadline_file(1).write_text(f"{time.time() + 0.9 * UNMEASURED_S}")
    with pytest.raises(LinkEnded), Checkpointer(rundir.root, tiers=[fast]) as ckpt:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in ckpt.steps(1000):
            ckpt.step()
            time.sleep(0.01)
    (committed,) = recorded(rundir, Event.COMMITTED)
    assert str(fast) == committed["tier"]
    outcome = rundir.outcome(1)
    assert outcome is not None
    assert (Result.SAVED, committed["step"]) == (outcome.outcome, outcome.step)


def test_a_checkpoint_that_was_to_be_replaced_is_found_at_the_start(
    rundir: RunDir, fast: Path
) -> None:
    """Whoever replaced it was killed between the two renames: it gets its name back."""
    run(rundir, fast, 2)
    shutil.rmtree(fast)
    home = DirectoryTier(rundir.checkpoints)
    newest = home.path_of(home.keys()[-1])
    newest.rename(newest.with_name(f".was-g00000001-{newest.name}-1-2-x"))
    restored = run(rundir, fast, 2, save=False)
    assert (2, newest) == (restored.step, restored.path)


def test_a_tier_that_cannot_be_used_does_not_end_the_run(rundir: RunDir, fast: Path) -> None:
    """The events say so, at the start and at a save; the root takes every save."""
    fast.write_text("a file is in the way")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the preflight finds it too
        with Checkpointer(rundir.root, tiers=[fast], policy="every hour") as ckpt:
            ckpt.step()
            settle(ckpt.save())
            ckpt.step()
    failed = recorded(rundir, Event.TIER_FAILED)
    assert [str(fast)] * 2 == [record["tier"] for record in failed]
    done = rundir.done()
    assert done is not None
    assert (2, [1, 2]) == (done.step, steps_of(DirectoryTier(rundir.checkpoints)))


def test_two_chains_in_one_directory_do_not_meet(tmp_path: Path, fast: Path) -> None:
    """Each has its own place there."""
    one, two = RunDir(tmp_path / "one"), RunDir(tmp_path / "two")
    run(one, fast, 2)
    assert run(two, fast, 1) is None
    assert 2 == len(list(fast.iterdir()))


# ── a tier that hangs ─────────────────────────────────────────────────────────────────────
@pytest.fixture
def hang(fast: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """From now on this operation of the fast tier does not come back, until the test is over."""
    over = threading.Event()

    def arrange(operation: str) -> None:
        owner = Path if operation == "resolve" else DirectoryTier
        real = getattr(owner, operation)

        def stuck(self: Any, *arguments: Any, **more: Any) -> Any:
            if Path(getattr(self, "path", self)).is_relative_to(fast):
                over.wait(60)
            return real(self, *arguments, **more)

        monkeypatch.setattr(owner, operation, stuck)

    monkeypatch.setattr(asking, "PATIENCE_S", 0.2)
    yield arrange
    over.set()


@pytest.mark.parametrize("order", ["fast first", "root first"])
@pytest.mark.parametrize("operation", ["recover", "keys", "resolve"])
def test_a_run_starts_beside_a_tier_that_hangs(
    rundir: RunDir,
    fast: Path,
    hang: Callable[[str], None],
    order: str,
    operation: str,
) -> None:
    """The root is well: the run goes on from there, saves there, and says whom it passed over."""
    run(rundir, fast, 2)
    hang(operation)
    tiers = [fast, "root"] if order == "fast first" else ["root", fast]
    weight, began = torch.zeros(3000), time.monotonic()
    with Checkpointer(rundir.root, tiers=tiers, policy="every hour", weight=weight) as ckpt:
        assert ckpt.restored is not None
        assert (2, "root") == (ckpt.restored.step, ckpt.restored.tier)
        for _ in ckpt.steps(5):
            weight += 1
            ckpt.step()
            settle(ckpt.save())
    assert time.monotonic() - began < 20
    (failed,) = recorded(rundir, Event.TIER_FAILED)
    assert (str(fast), True) == (failed["tier"], "not answer" in failed["error"])
    assert [3, 4, 5] == steps_of(DirectoryTier(rundir.checkpoints))[-3:]


def test_a_tier_that_answers_late_is_used_again(
    rundir: RunDir, fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was only slow."""
    run(rundir, fast, 2)
    slow, real = threading.Event(), DirectoryTier.recover

    def recover(self: DirectoryTier) -> None:
        if self.path.is_relative_to(fast):
            slow.wait(60)
        real(self)

    monkeypatch.setattr(DirectoryTier, "recover", recover)
    monkeypatch.setattr(asking, "PATIENCE_S", 0.2)
    weight = torch.zeros(3000)
    with Checkpointer(rundir.root, tiers=[fast], policy="every hour", weight=weight) as ckpt:
        stack = ckpt._entered().session.stack
        assert stack.hangs(stack.first)
        slow.set()
        while stack.hangs(stack.first):
            time.sleep(0.001)
        ckpt.step()
        settle(ckpt.save())
        assert 3 == steps_of(tier_of(rundir, fast))[-1]


# ── a tier that is not there ──────────────────────────────────────────────────────────────
@pytest.mark.usefixtures("impatient")
def test_a_tier_that_is_not_mounted_is_not_begun_anew_over(rundir: RunDir, fast: Path) -> None:
    """A node without it looks like a tier without checkpoints; the run directory remembers."""
    run(rundir, fast, 2)
    shutil.rmtree(rundir.checkpoints)
    fast.rename(fast.with_name("elsewhere"))
    with pytest.raises(NoCheckpoint, match=r"fast is not there; is it mounted on this node\?"):
        run(rundir, fast, 1)
    fast.with_name("elsewhere").rename(fast)
    assert 2 == run(rundir, fast, 3).step


@pytest.mark.usefixtures("impatient")
def test_checkpoints_that_were_removed_everywhere_are_begun_anew(
    rundir: RunDir, fast: Path
) -> None:
    """That is how a user starts afresh."""
    run(rundir, fast, 2)
    shutil.rmtree(rundir.checkpoints)
    shutil.rmtree(tier_of(rundir, fast).path.parent)
    assert run(rundir, fast, 1) is None


@pytest.mark.usefixtures("impatient")
def test_a_tier_that_goes_with_the_job_may_be_gone(rundir: RunDir, fast: Path) -> None:
    """The next link has another node's disk, and what was only on the first is lost anyway."""
    storage = {"local": {"path": str(fast), "survives": "process"}}
    settings = {"storage": storage, "tiers": ["local"], "policy": "every hour"}
    with pytest.raises(Stopped), Checkpointer(rundir.root, settings=settings) as ckpt:
        ckpt.step()
        settle(ckpt.save())
        raise Stopped
    shutil.rmtree(rundir.checkpoints)
    shutil.rmtree(fast)
    with pytest.raises(Stopped), Checkpointer(rundir.root, settings=settings) as ckpt:
        assert ckpt.restored is None
        raise Stopped


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("entry", ["$TMPDIR/x", "{job}/x"])
def test_a_directory_of_the_node_may_be_gone_in_the_next_job(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    """Nobody said what it survives; the next link waited for it as for a file system that is not
    mounted, and failed."""
    job = tmp_path / "of the first job"
    entry = entry.format(job=job)
    monkeypatch.setattr(preflight, "on_this_node", lambda path: True)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("TMPDIR", str(job))
    run(rundir, job / "x", 2, tiers=[entry])
    shutil.rmtree(rundir.checkpoints / "step-000000002-g00000001")
    shutil.rmtree(job)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "of the second"))
    assert 1 == run(rundir, job / "x", 3, tiers=[entry]).step


@pytest.mark.usefixtures("impatient")
def test_a_shared_directory_that_is_not_mounted_is_none_of_the_node(
    rundir: RunDir, fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there instead of it is the node's own; those that wrote there knew better."""
    monkeypatch.setattr(preflight, "on_this_node", lambda path: not fast.exists())
    fast.mkdir()
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    run(rundir, fast, 2)
    shutil.rmtree(rundir.checkpoints / "step-000000002-g00000001")
    fast.rename(fast.with_name("elsewhere"))
    with pytest.raises(NoCheckpoint, match="does not go back to it"):
        run(rundir, fast, 1)


@pytest.mark.usefixtures("impatient")
def test_a_tier_that_fails_is_not_begun_anew_over(rundir: RunDir, fast: Path) -> None:
    """An error of the file system says as little as silence."""
    run(rundir, fast, 2)
    shutil.rmtree(rundir.checkpoints)
    place = tier_of(rundir, fast).path
    place.rename(place.with_name("aside"))
    place.write_text("a file is in the way")
    with pytest.raises(NoCheckpoint, match="does not begin anew"):
        run(rundir, fast, 1)
    place.unlink()
    place.with_name("aside").rename(place)
    assert 2 == run(rundir, fast, 3).step


def in_the_home(descriptor: int) -> bool:
    return "/run/checkpoints/" in str(Path(f"/proc/self/fd/{descriptor}").readlink())


def test_a_home_that_hangs_while_it_is_read_is_passed_over_for_the_same_elsewhere(
    rundir: RunDir, fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody else has it, it is waited for: see the next test."""
    run(rundir, fast, 2)
    over, real = threading.Event(), os.preadv

    def stuck(descriptor: int, *arguments: Any) -> int:
        if in_the_home(descriptor):
            over.wait(60)
        return real(descriptor, *arguments)

    monkeypatch.setattr(os, "preadv", stuck)
    monkeypatch.setattr(asking, "READING_S", 0.2)
    restored = run(rundir, fast, 2, save=False, tiers=["root", fast])
    over.set()
    assert (2, str(fast)) == (restored.step, restored.tier)
    assert ["root"] == [one.tier for one in restored.skipped]


def test_what_only_the_home_has_is_waited_for(
    rundir: RunDir, fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one elsewhere is no reason to give up on it."""
    run(rundir, fast, 2)
    tier = tier_of(rundir, fast)
    shutil.rmtree(tier.path_of(tier.keys()[-1]))
    real, slow = os.preadv, threading.Event()

    def late(descriptor: int, *arguments: Any) -> int:
        if not slow.is_set() and in_the_home(descriptor):
            slow.set()
            time.sleep(0.5)
        return real(descriptor, *arguments)

    monkeypatch.setattr(os, "preadv", late)
    monkeypatch.setattr(asking, "READING_S", 0.05)
    restored = run(rundir, fast, 2, save=False, tiers=["root", fast])
    assert slow.is_set()
    assert (2, "root", ()) == (restored.step, restored.tier, restored.skipped)


# ── run directories that were copied or moved ─────────────────────────────────────────────
def copied(rundir: RunDir) -> RunDir:
    target = rundir.root.with_name("copy")
    shutil.copytree(rundir.root, target)
    return RunDir(target)


def everything_in(place: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_a_copy_uses_no_tier_of_its_original(rundir: RunDir, fast: Path) -> None:
    """It would restore the later work of the other, and retention remove it."""
    run(rundir, fast, 2)
    copy = copied(rundir)
    run(rundir, fast, 4)
    before = everything_in(fast)
    with pytest.raises(RootError, match="is a copy of the other"):
        run(copy, fast, 9)
    assert before == everything_in(fast)
    assert 4 == run(rundir, fast, 5).step


@pytest.mark.parametrize("remedy", ["chain.json", "another tier"])
def test_a_copy_that_does_what_it_is_told_goes_on_from_its_own(
    rundir: RunDir, fast: Path, remedy: str
) -> None:
    run(rundir, fast, 2)
    copy = copied(rundir)
    run(rundir, fast, 4)
    if remedy == "chain.json":
        copy.chain_file.unlink()
    assert 2 == run(copy, fast if remedy == "chain.json" else fast.with_name("b"), 9).step
    assert 4 == run(rundir, fast, 5).step


def test_a_run_that_was_moved_finds_its_work_in_the_tier(rundir: RunDir, fast: Path) -> None:
    run(rundir, fast, 2)
    shutil.rmtree(rundir.checkpoints)
    moved = RunDir(rundir.root.rename(rundir.root.with_name("moved")))
    assert (2, str(fast)) == (run(moved, fast, 3).step, run(moved, fast, 3).tier)


def test_of_two_copies_that_began_at_once_one_saves_in_the_tier(rundir: RunDir, fast: Path) -> None:
    """Nothing was there that could have refused the other: it saves in its own run directory."""
    run(rundir, fast, 1, tiers=["root"])
    copy, weight = copied(rundir), torch.zeros(3000)
    with (
        pytest.raises(Stopped),
        Checkpointer(copy.root, tiers=[fast], policy="every hour", weight=weight) as ckpt,
    ):
        run(rundir, fast, 3)
        before = everything_in(fast)
        ckpt.step()
        settle(ckpt.save())
        assert [1, 2] == [key.step for key in copy.committed()]
        raise Stopped
    assert before == everything_in(fast)
    assert "is a copy of the other" in recorded(copy, Event.TIER_FAILED)[0]["error"]


# ── checkpoints that were moved, with a link in their place ───────────────────────────────
def archived(rundir: RunDir, archive: Path) -> list[Path]:
    """Every checkpoint of the home is in the archive now."""
    archive.mkdir()
    found = sorted(rundir.checkpoints.glob("step-*"))
    for path in found:
        path.rename(archive / path.name)
        path.symlink_to(archive / path.name)
    return found


def test_links_that_lead_nowhere_now_are_not_begun_anew_over(
    rundir: RunDir, fast: Path, tmp_path: Path
) -> None:
    """They are listed, so they have not been removed: the archive is not mounted on this node."""
    archive = tmp_path / "archive"
    run(rundir, fast, 2, tiers=["root"])
    assert 2 == len(archived(rundir, archive))
    archive.rename(tmp_path / "elsewhere")
    with pytest.raises(NoCheckpoint, match="step-000000002-g00000001: it is listed, but not there"):
        run(rundir, fast, 1, tiers=["root"])
    (tmp_path / "elsewhere").rename(archive)
    assert 2 == run(rundir, fast, 3, tiers=["root"]).step


def test_retention_removes_a_link_and_not_what_it_leads_to(
    rundir: RunDir, fast: Path, tmp_path: Path
) -> None:
    archive = tmp_path / "archive"
    run(rundir, fast, 2, tiers=["root"])
    kept = {path.name: DirectoryTier(archive) for path in archived(rundir, archive)}
    run(rundir, fast, 8, tiers=["root"])
    assert not list(rundir.checkpoints.glob("step-00000000[12]-*"))
    assert {name: [] for name in kept} == {
        key.directory_name: DirectoryTier(archive).verify(key)
        for key in DirectoryTier(archive).keys()  # noqa: SIM118 - not a mapping
    }
