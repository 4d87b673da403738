"""A newer checkpoint that cannot be read just now: waited for, and not gone back behind unsaid.

What is gone back behind is lost: the next commit outranks it for ever.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_tiers import run, steps_of, tier_of

from hpc_ckpt.errors import NoCheckpoint
from hpc_ckpt.rundir import CheckpointKey, RunDir
from hpc_ckpt.tiers.directory import DirectoryTier

NEWEST = "step-000000002-g00000001"


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, int | None], list[str]]:
    """Reads of files whose path has this part fail with this error, so often; who was asked."""

    def make(part: str, number: int, times: int | None = None) -> list[str]:
        asked: list[str] = []

        def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
            def read(descriptor: int, *arguments: Any) -> Any:
                path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
                if part in path and path.endswith(".safetensors"):
                    asked.append(path)
                    if times is None or len(asked) <= times:
                        raise OSError(number, os.strerror(number))
                return real(descriptor, *arguments)

            return read

        for name in ("preadv", "pread"):
            monkeypatch.setattr(os, name, wrapped(getattr(os, name)))
        return asked

    return make


@pytest.mark.usefixtures("impatient")
def test_an_error_that_passes_costs_no_work(rundir: RunDir, fast: Path, failing: Any) -> None:
    run(rundir, fast, 2, tiers=["root"])
    asked = failing(f"/{NEWEST}/", errno.EIO, 1)
    restored = run(rundir, fast, 2, save=False, tiers=["root"])
    assert len(asked) > 1
    assert (2, ()) == (restored.step, restored.skipped)


@pytest.mark.usefixtures("impatient")
def test_the_only_checkpoint_is_waited_for_too(rundir: RunDir, fast: Path, failing: Any) -> None:
    """A link that fails at once would be counted as one without progress."""
    run(rundir, fast, 1, tiers=["root"])
    failing("/step-000000001-", errno.EMFILE, 1)
    assert 1 == run(rundir, fast, 1, save=False, tiers=["root"]).step


@pytest.mark.usefixtures("impatient")
def test_an_error_that_stays_while_others_are_read_is_the_files_own(
    rundir: RunDir, fast: Path, failing: Any
) -> None:
    """The same file system has given the older one: nobody has to come and move the newer."""
    run(rundir, fast, 2, tiers=["root"])
    failing(f"/{NEWEST}/", errno.EIO)
    restored = run(rundir, fast, 2, save=False, tiers=["root"])
    assert 1 == restored.step
    (skipped,) = restored.skipped
    assert (NEWEST, True) == (skipped.path.name, os.strerror(errno.EIO) in skipped.reason)


@pytest.mark.usefixtures("impatient")
def test_a_tier_whose_newest_cannot_be_read_is_not_gone_back_behind(
    rundir: RunDir, fast: Path, failing: Any
) -> None:
    """What another tier has is older; this one may be whole again tomorrow."""
    run(rundir, fast, 2)
    shutil.rmtree(rundir.checkpoints / NEWEST)
    asked = failing(f"{fast}/", errno.EIO)
    with pytest.raises(NoCheckpoint, match="does not go back to it, for there are newer ones"):
        run(rundir, fast, 1)
    assert asked
    assert 2 == steps_of(tier_of(rundir, fast))[-1]


@pytest.mark.usefixtures("impatient")
def test_a_newer_one_that_stays_unreadable_in_a_tier_that_answers_is_gone_back_behind(
    rundir: RunDir, fast: Path, failing: Any
) -> None:
    """Wherever the older one was read: the run directory gives it, so it is not the server."""
    run(rundir, fast, 2)
    shutil.rmtree(tier_of(rundir, fast).path_of(CheckpointKey(1, 2)))
    failing(f"/run/checkpoints/{NEWEST}/", errno.EIO)
    restored = run(rundir, fast, 1, save=False)
    assert (1, [NEWEST]) == (restored.step, [one.path.name for one in restored.skipped])


@pytest.mark.usefixtures("impatient")
def test_a_run_directory_that_cannot_be_listed_just_now_is_waited_for(
    rundir: RunDir, fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(rundir, fast, 1, tiers=["root"])
    real, asked = DirectoryTier.keys, []

    def keys(self: DirectoryTier) -> list[CheckpointKey]:
        asked.append(self.path)
        if len(asked) == 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(self)

    monkeypatch.setattr(DirectoryTier, "keys", keys)
    assert 1 == run(rundir, fast, 1, save=False, tiers=["root"]).step
