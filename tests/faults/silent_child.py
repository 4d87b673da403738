"""Runs with a second tier on a FUSE file system that stops answering; what they saw, on stdout.

silent_child.py PLACE CASE…      One line of JSON for each. Run it in a mount namespace of its
                                 own (unshare -m): what it mounts goes with it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from storage_child import Double

from hpc_ckpt import Checkpointer, events, fsio
from hpc_ckpt.errors import NoCheckpoint
from hpc_ckpt.events import Event
from hpc_ckpt.runtime import earlier
from hpc_ckpt.tiers import asking

ITEMS = 2_000_000
"""Eight megabytes: several pieces, read by several threads."""
SHORT_S = 0.4
OURS = 123.0
ASK = "hpc-ckpt-ask"


class Stopped(Exception):
    """Ends a run between two steps, without a final save."""


def made() -> tuple[torch.nn.Module, torch.Tensor]:
    """A module, which is read straight into place, and its memory."""
    model = torch.nn.Linear(ITEMS // 1000, 1000, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model, model.weight.detach().view(-1)


class Place:
    """A run directory, and a tier beside it whose storage can be told to hang."""

    def __init__(self, place: Path) -> None:
        place.mkdir()
        self.root, self.fast = place / "run", place / "fast"
        self.fast.mkdir()
        self.double = Double(self.fast)
        self.model, self.weight = made()

    def run(self, to_step: int, tiers: tuple[str, ...] | None = None) -> Any:
        """Go on to this step, saving at each into every tier; what it was restored from."""
        self.model, self.weight = made()
        named = [str(self.fast)] if tiers is None else list(tiers)
        try:
            with Checkpointer(
                self.root, tiers=named, policy="every hour", model=self.model
            ) as ckpt:
                self.began = float(self.weight[0]), float(self.weight[-1])
                for _ in ckpt.steps(to_step):
                    self.weight += 1
                    ckpt.step()
                    pending = ckpt.save()
                    while not pending.done():  # who waits for it would have it in the home
                        time.sleep(0.001)
                raise Stopped
        except Stopped:
            return ckpt.restored

    def refused(self) -> str:
        try:
            self.run(1)
        except NoCheckpoint as error:
            return str(error)
        return ""

    def told(self, event: Event) -> list[dict[str, Any]]:
        paths = sorted((self.root / "events").glob("*"))
        return [r for path in paths for r in events.read(path) if r["event"] == event.value]

    def empty_home(self) -> None:
        shutil.rmtree(self.root / "checkpoints")


def fast_only(place: Place, steps: int) -> None:
    """Checkpoints in the tier, and none in the run directory."""
    place.run(steps, (str(place.fast), "root"))
    settle(place, steps)
    place.empty_home()


def settle(place: Place, steps: int) -> None:
    names = [path.name for path in place.double.behind.glob("*/checkpoints/step-*")]
    assert f"step-{steps:09d}-g00000001" in names, names


# ── cases ─────────────────────────────────────────────────────────────────────────────────
def begins_anew(place: Place) -> dict[str, Any]:
    """Nothing in the home, and the tier that has everything is silent; then it is healed."""
    fast_only(place, 2)
    place.double.plan(**{"*": "hang"})
    began = time.monotonic()
    said = place.refused()
    took_s = time.monotonic() - began
    committed = len(list((place.root / "checkpoints").glob("step-*")))
    place.double.plan()
    restored = place.run(3)
    return {
        "said": said,
        "took_s": took_s,
        "committed": committed,
        "failed": [r["tier"] == str(place.fast) for r in place.told(Event.TIER_FAILED)],
        "step": restored and restored.step,
        "began": place.began,
    }


def answers_late(place: Place) -> dict[str, Any]:
    """It comes back while it is waited for."""
    fast_only(place, 2)
    earlier.WAIT_S = 60.0
    place.double.plan(**{"*": "hang"})
    threading.Timer(2 * SHORT_S, place.double.plan).start()
    restored = place.run(3)
    return {"step": restored and restored.step, "began": place.began}


def first_run(place: Place) -> dict[str, Any]:
    """There cannot be anything yet."""
    place.double.plan(**{"*": "hang"})
    began = time.monotonic()
    restored = place.run(2)
    return {"restored": restored, "took_s": time.monotonic() - began}


def goes_back(place: Place) -> dict[str, Any]:
    """The home has an older one, and the record says that the silent tier has a newer."""
    place.run(2, (str(place.fast), "root"))
    settle(place, 2)
    shutil.rmtree(place.root / "checkpoints" / "step-000000002-g00000001")
    place.double.plan(**{"*": "hang"})
    said = place.refused()
    committed = len(list((place.root / "checkpoints").glob("step-*g00000002")))
    place.double.plan()
    restored = place.run(3)
    return {"said": said, "committed": committed, "step": restored and restored.step}


def hangs_while_read(operation: str, how: str = "hang") -> Callable[[Place], dict[str, Any]]:
    """It lists its checkpoints and does not give their bytes; the home has the same."""

    def case(place: Place) -> dict[str, Any]:
        place.run(2)
        settle(place, 2)
        place.double.plan(**{operation: how})
        began = time.monotonic()
        restored = place.run(2)
        took_s = time.monotonic() - began
        behind = [t for t in threading.enumerate() if t.name == ASK]
        place.weight.fill_(OURS)
        place.double.plan()  # now the bytes come
        for thread in behind:
            thread.join(30)
        return {
            "step": restored.step,
            "tier": restored.tier,
            "began": place.began,
            "took_s": took_s,
            "skipped": [str(one) for one in restored.skipped],
            "event": place.told(Event.RESTORED)[-1]["skipped"],
            "behind": len(behind),
            "ended": not any(thread.is_alive() for thread in behind),
            "untouched": bool((place.weight == OURS).all()),
        }

    return case


def buffered(case: Callable[[Place], dict[str, Any]]) -> Callable[[Place], dict[str, Any]]:
    """The same without direct I/O, which wants memory that begins at a page."""

    def run(place: Place) -> dict[str, Any]:
        real = fsio.set_direct
        fsio.set_direct = lambda descriptor, *, direct: not direct
        try:
            return case(place)
        finally:
            fsio.set_direct = real

    return run


def only_there(place: Place) -> dict[str, Any]:
    """It hangs while it is read, and nobody else has anything."""
    fast_only(place, 2)
    place.double.plan(**{"read:rank-": "hang-far"})
    said = place.refused()
    place.weight.fill_(OURS)
    place.double.plan()
    for thread in threading.enumerate():
        if thread.name == ASK:
            thread.join(30)
    untouched = bool((place.weight == OURS).all())
    restored = place.run(3)
    return {"said": said, "untouched": untouched, "step": restored and restored.step}


CASES: dict[str, Callable[[Place], dict[str, Any]]] = {
    "begins-anew": begins_anew,
    "answers-late": answers_late,
    "first-run": first_run,
    "goes-back": goes_back,
    "hangs-while-read": hangs_while_read("read:rank-", "hang-far"),
    "hangs-while-read-buffered": buffered(hangs_while_read("read:rank-", "hang-far")),
    "hangs-at-the-header": hangs_while_read("read:rank-"),
    "hangs-at-the-manifest": hangs_while_read("open:MANIFEST"),
    "hangs-at-the-shard": hangs_while_read("open:rank-"),
    "only-there": only_there,
}


def main(place: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    for name in cases:
        asking.PATIENCE_S = asking.READING_S = SHORT_S
        earlier.WAIT_S, earlier.AGAIN_S = 2 * SHORT_S, SHORT_S / 4
        one = Place(place / name)
        try:
            report = {"name": name, "error": "", **CASES[name](one)}
        except BaseException:
            report = {"name": name, "error": traceback.format_exc()}
        one.double.plan()  # a file that is open there could not be closed otherwise
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    os._exit(0)  # not by the way of threads that a hung file system holds
