"""A tier that stops answering: nothing committed is begun anew over, no restore waits for ever.

The storage is a FUSE file system of our own, through the real kernel: what hangs, hangs in a
system call, and its bytes come long after anybody wanted them.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from test_real_storage_faults import unavailable, why_not

CHILD = Path(__file__).with_name("silent_child.py")
CASES = (
    "begins-anew",
    "answers-late",
    "first-run",
    "goes-back",
    "hangs-while-read",
    "hangs-while-read-buffered",
    "hangs-at-the-header",
    "hangs-at-the-manifest",
    "hangs-at-the-shard",
    "only-there",
)
SOON_S = 20.0
"""Only what waits for the file system takes this long."""
NEWEST = "step-000000002-g00000001"


@functools.cache
def reports() -> dict[str, dict[str, Any]]:
    """What one child saw in all cases; starting torch takes longer than each."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("HPC_CKPT")}
    with tempfile.TemporaryDirectory(prefix="hpc-silent-") as place:
        ended = subprocess.run(
            ["unshare", "-m", "--fork", "--kill-child", sys.executable, str(CHILD), place, *CASES],
            capture_output=True,
            text=True,
            env=environ,
            timeout=200,
        )
    found = {one["name"]: one for one in map(json.loads, ended.stdout.splitlines())}
    assert list(CASES) == list(found), ended.stderr
    return found


def report_of(case: str) -> dict[str, Any]:
    if why_not("fuse"):
        unavailable(why_not("fuse"))
    report = reports()[case]
    assert "" == report["error"]
    return report


def test_a_silent_tier_is_not_begun_anew_over() -> None:
    """The link fails, names the tier and what to do, and commits nothing: the first commit of a
    newer generation would outrank the old work for ever. Once it answers, the run goes on."""
    report = report_of("begins-anew")
    assert all(part in report["said"] for part in ("generation 2", "/fast", "Run it again"))
    assert (0, [True]) == (report["committed"], report["failed"])
    assert report["took_s"] < SOON_S
    assert (2, [2.0, 2.0]) == (report["step"], report["began"])


def test_a_tier_that_answers_late_is_waited_for() -> None:
    report = report_of("answers-late")
    assert (2, [2.0, 2.0]) == (report["step"], report["began"])


def test_a_first_run_goes_on_without_it() -> None:
    """Nobody can have left anything there."""
    report = report_of("first-run")
    assert report["restored"] is None
    assert report["took_s"] < SOON_S


def test_a_newer_checkpoint_on_record_is_not_gone_back_behind() -> None:
    """What is older in the home would outrank it for ever: the link fails, and says which."""
    report = report_of("goes-back")
    wanted = ("step-000000001-g00000001", "there are newer ones", "/fast", "Run it again")
    assert all(part in report["said"] for part in wanted), report["said"]
    assert (0, 2) == (report["committed"], report["step"])


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("hangs")])
def test_a_tier_that_hangs_while_it_is_read_is_passed_over(case: str) -> None:
    """For the same checkpoint in the home; and what comes too late goes nowhere."""
    report = report_of(case)
    assert (2, "root", [2.0, 2.0]) == (report["step"], report["tier"], report["began"])
    assert report["took_s"] < SOON_S
    (skipped,) = report["skipped"]
    assert skipped.startswith(f"{NEWEST}: tier ")
    assert "hangs" in skipped.partition("/fast")[2]
    assert [skipped] == report["event"]
    assert (1, True) == (report["behind"], report["ended"])
    assert report["untouched"], "bytes that came late were written into the program's memory"


def test_what_only_a_hanging_tier_has_is_not_begun_anew_over() -> None:
    report = report_of("only-there")
    wanted = ("does not begin anew", "/fast: it has not answered", "Run it again")
    assert all(part in report["said"] for part in wanted), report["said"]
    assert report["untouched"]
    assert 2 == report["step"]
