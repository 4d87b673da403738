"""File systems that really fail: training goes on, says so, and saves again once they are healed.

Real: a full tmpfs, one without inodes, one remounted read-only, a thin device without room (loop
on tmpfs), a directory moved away, permissions taken away. Doubles, because nothing here can make
them happen: EIO and EDQUOT (no device mapper, no quota in this kernel) and storage that hangs come
from a FUSE file system of our own, through the real kernel; for machines where nothing can be
mounted, EIO and EDQUOT once more from a FaultyTier.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from storage_child import FAILING, HEALTHY, HUNG

from hpc_ckpt import Checkpointer, events, latest, load
from hpc_ckpt.events import Event
from hpc_ckpt.rundir import Done, RunDir
from hpc_ckpt.testing import FaultyTier

CHILD = Path(__file__).with_name("storage_child.py")
TMPFS = {
    "full@root": "No space left on device",
    "full@checkpoints": "No space left on device",
    "without-inodes@root": "No space left on device",
    "read-only@root": "Read-only file system",
    "read-only@checkpoints": "Read-only file system",
}
LOOP = {"overcommitted@checkpoints": "No space left on device"}
FUSE = {
    "eio-mkdir@root": "Input/output error",
    "eio-create@root": "Input/output error",
    "eio-write@root": "Input/output error",
    "eio-write@checkpoints": "Input/output error",
    "eio-fsync-shard@root": "Input/output error",
    "eio-fsync-manifest@root": "Input/output error",
    "eio-fsyncdir@root": "Input/output error",
    "eio-rename@root": "Input/output error",
    "edquot-mkdir@root": "Disk quota exceeded",
    "edquot-write@root": "Disk quota exceeded",
    "edquot-write@checkpoints": "Disk quota exceeded",
}
HANGING = ("hang-write@root", "hang-fsync@root", "hang-everything@root")
MOVED = {
    "vanished@root": "No such file or directory",
    "vanished@checkpoints": "No such file or directory",
}
FORBIDDEN = {"forbidden@checkpoints": "Permission denied"}
REFUSING = {
    **dict.fromkeys(TMPFS, ("tmpfs", TMPFS)),
    **dict.fromkeys(LOOP, ("loop", LOOP)),
    **dict.fromkeys(FUSE, ("fuse", (*FUSE, *HANGING))),
    **dict.fromkeys(MOVED, ("plain", MOVED)),
    **dict.fromkeys(FORBIDDEN, ("unprivileged", FORBIDDEN)),
}
"""Every fault that makes saves fail, with the child that meets it."""
FAILED = list(range(HEALTHY + 1, HEALTHY + FAILING + 1))
LAST = 2 * HEALTHY + FAILING


# ── running the child ─────────────────────────────────────────────────────────────────────
def unavailable(reason: str) -> NoReturn:
    """On a person's own machine skipped, by name; in CI a failure."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"required here: {reason}")
    pytest.skip(reason)


@functools.cache
def why_not(kind: str) -> str:
    """What is missing for faults of this kind; empty if nothing is."""
    if os.geteuid() != 0:
        return "needs root, to mount"
    if kind == "fuse" and not Path("/dev/fuse").exists():
        return "needs /dev/fuse"
    if kind == "loop" and not (shutil.which("mkfs.ext4") and Path("/dev/loop-control").exists()):
        return "needs mkfs.ext4 (e2fsprogs) and loop devices"
    with tempfile.TemporaryDirectory() as place:
        command = ["unshare", "-m", "mount", "-t", "tmpfs", "test", place]
        tried = subprocess.run(command, capture_output=True, text=True)
    return tried.stderr.strip() if tried.returncode else ""


@functools.cache
def reports(kind: str, faults: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """What one child saw of all faults of a kind; starting torch takes longer than a fault."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("HPC_CKPT")}
    wrapped = {
        "plain": [],
        # Root without the privilege that overrides permissions; everybody else has none.
        "unprivileged": ["setpriv", "--bounding-set=-dac_override,-dac_read_search"],
    }.get(kind, ["unshare", "-m", "--fork", "--kill-child"])
    if kind == "unprivileged" and os.geteuid() != 0:
        wrapped = []
    with tempfile.TemporaryDirectory(prefix="hpc-storage-") as place:
        ended = subprocess.run(
            [*wrapped, sys.executable, str(CHILD), place, *faults],
            capture_output=True,
            text=True,
            env=environ,
            timeout=200,
        )
    found = {one["name"]: one for one in map(json.loads, ended.stdout.splitlines())}
    assert list(faults) == list(found), ended.stderr
    return found


def report_of(fault: str, kind: str, together: Iterable[str]) -> dict[str, Any]:
    if kind in ("tmpfs", "loop", "fuse") and why_not(kind):
        unavailable(why_not(kind))
    if kind == "unprivileged" and os.geteuid() == 0 and shutil.which("setpriv") is None:
        unavailable("needs setpriv (util-linux), to give up root's privilege")
    return reports(kind, tuple(together))[fault]


# ── what must be true ─────────────────────────────────────────────────────────────────────
def check_failing(fault: str, words: str) -> None:
    """To the end of its steps; one warning for each failed save; nothing lost; saved again."""
    report = report_of(fault, *REFUSING[fault])
    assert "" == report["error"]
    assert LAST == report["steps"]
    # Step n tells of the save that was made at the end of step n - 1.
    assert [step + 1 for step in FAILED] == [step for step, _ in report["warnings"]]
    assert all(words in text for _, text in report["warnings"])
    assert f"step-{HEALTHY:09d}-g00000001" == report["during"]
    healthy = [step for step in range(1, LAST + 1) if step not in FAILED]
    assert healthy == sorted(set(report["committed"]))
    assert f"step-{LAST:09d}-g00000001" == report["after"]
    assert [] == report["left"]


@pytest.mark.parametrize("fault", TMPFS)
def test_a_file_system_that_refuses(fault: str) -> None:
    """ENOSPC for bytes and for inodes, EROFS: each from the kernel."""
    check_failing(fault, TMPFS[fault])


@pytest.mark.parametrize("fault", LOOP)
def test_a_device_that_has_no_room_for_what_the_file_system_took(fault: str) -> None:
    """The bad news may come as late as fsync(2); what did not arrive is not committed."""
    check_failing(fault, LOOP[fault])


@pytest.mark.parametrize("fault", MOVED)
def test_a_directory_that_vanishes_and_comes_back(fault: str) -> None:
    """As when a mount goes: whatever is written meanwhile to the bare place would be hidden."""
    check_failing(fault, MOVED[fault])


@pytest.mark.parametrize("fault", FORBIDDEN)
def test_permission_taken_away_and_given_back(fault: str) -> None:
    """EACCES from the kernel, for a process that permissions bind."""
    check_failing(fault, FORBIDDEN[fault])


@pytest.mark.parametrize("fault", FUSE)
def test_a_fuse_double_that_fails_in_one_system_call(fault: str) -> None:
    """EIO and EDQUOT through the kernel, made by a double: no device here fails on demand."""
    check_failing(fault, FUSE[fault])


@pytest.mark.parametrize("fault", REFUSING)
def test_one_event_for_each_failed_save(fault: str) -> None:
    """Also where the events lie on the same bad storage: they are written when it is healed."""
    report = report_of(fault, *REFUSING[fault])
    assert FAILED == [step for step, _ in report["failed"]]
    words = (TMPFS | LOOP | FUSE | MOVED | FORBIDDEN)[fault]
    assert all(words in text for _, text in report["failed"])


def test_an_event_that_was_cut_short_does_not_spoil_the_next(tmp_path: Path) -> None:
    """A file system that fills up takes a part of a line; the line after it must be readable."""
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from hpc_ckpt.events import Event, EventLog\n"
        "log = EventLog(Path(sys.argv[1]))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))\n"
        "log.emit(Event.SAVE_FAILED, step=1, error='No space left on device')\n"
        "log.emit(Event.SAVE_FAILED, step=2, error='No space left on device')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))\n"
        "log.emit(Event.COMMITTED, step=3)\n"
    )
    path = tmp_path / "events.jsonl"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)
    assert 3 == [record["step"] for record in events.read(path)][-1]


@pytest.mark.parametrize("fault", HANGING)
def test_a_fuse_double_that_hangs_does_not_hold_up_training(fault: str) -> None:
    """Steps go on while a call does not come back, or none does; then what hung is committed."""
    report = report_of(fault, "fuse", (*FUSE, *HANGING))
    assert "" == report["error"]
    assert 2 * HEALTHY + HUNG == report["steps"]
    assert [] == report["warnings"] + report["failed"] + report["left"]
    assert f"step-{HEALTHY:09d}-g00000001" == report["during"]
    assert [*range(1, HEALTHY + 2)] == report["committed"][: HEALTHY + 1]
    healed = [*range(HEALTHY + HUNG + 1, 2 * HEALTHY + HUNG + 1)]
    assert healed == sorted(set(report["committed"]))[-HEALTHY:]
    assert f"step-{2 * HEALTHY + HUNG:09d}-g00000001" == report["after"]


# ── where nothing can be mounted ──────────────────────────────────────────────────────────
@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT], ids=["eio", "edquot"])
@pytest.mark.parametrize("operation", ["stage", "write_shard", "commit"])
def test_a_fake_tier_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, number: int
) -> None:
    """The same rules, from a FaultyTier: no system call fails here."""
    rundir = RunDir(tmp_path / "run")
    tier = FaultyTier(rundir.checkpoints, name="root")
    monkeypatch.setattr("hpc_ckpt.tiers.stack.DirectoryTier", lambda _path, name: tier)
    value = torch.zeros(10)
    words = os.strerror(number)
    with Checkpointer(rundir.root, policy="every 1 steps", value=value) as ckpt:
        for step in ckpt.steps(4):
            if step in (1, 2):
                tier.fail_at(operation, OSError(number, words))
            value.fill_(step + 1)
            if step in (2, 3):
                with pytest.warns(RuntimeWarning, match=words):
                    ckpt.step()
            else:
                ckpt.step()
            assert ckpt._running is not None
            assert ckpt._running.engine.wait(60)
            if step == 2:
                assert 1 == load(latest(rundir.root))["progress"]["step"]
                tier.heal()
    assert Done(1, 4) == rundir.done()
    assert (load(latest(rundir.root))["tracked"]["value"] == 4).all()
    records = [r for path in rundir.events.glob("*") for r in events.read(path)]
    failed = [r for r in records if r["event"] == Event.SAVE_FAILED.value]
    assert [2, 3] == [r["step"] for r in failed]
