"""Training programs on storage that fails half-way and recovers; says on stdout what they saw.

storage_child.py PLACE FAULT@AT…     AT is what lies on the bad storage: root or checkpoints.

Each saves at every step: three times, then the fault happens, it tries some more, the fault is
healed, and it saves three times more. One line of JSON for each. Run it in a mount namespace of
its own (unshare -m): what it mounts goes with it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import hpc_ckpt
from hpc_ckpt import Checkpointer, events
from hpc_ckpt.events import Event

HEALTHY, FAILING, HUNG = 3, 6, 200
"""Saves before the fault and after it was healed; saves, or steps that hang, while it lasts."""
ITEMS = 100_000
MS_RDONLY, MS_REMOUNT = 1, 32


@dataclass
class Report:
    """What the program saw; the test asks nothing else."""

    name: str
    error: str = ""
    """What ended the program before its time."""
    steps: int = 0
    warnings: list[tuple[int, str]] = field(default_factory=list)
    """The step whose step() warned, and the words."""
    during: str = ""
    """The newest checkpoint that loads while the fault lasts."""
    after: str = ""
    failed: list[tuple[int, str]] = field(default_factory=list)
    """The events save.failed: step and error."""
    committed: list[int] = field(default_factory=list)
    """The steps of the events save.committed."""
    left: list[str] = field(default_factory=list)
    """What is among the checkpoints in the end and is none."""


@dataclass(frozen=True)
class Fault:
    """How a place is made, breaks and is mended."""

    inflict: Callable[[], None]
    heal: Callable[[], None]
    readable: Callable[[Path], Path | None] = lambda root: root
    """Where the run directory can be read while the fault lasts."""


# ── file systems ──────────────────────────────────────────────────────────────────────────
def mount(kind: str, place: Path, flags: int = 0, options: str = "", source: str = "test") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = [source.encode(), str(place).encode(), kind.encode()]
    if libc.mount(*arguments, flags, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"mount: {os.strerror(ctypes.get_errno())}", str(place))


def fill(place: Path) -> Path:
    """Leave no byte free."""
    ballast = place / "ballast"
    with ballast.open("wb", buffering=0) as stream:
        for size in (65536, 4096, 1):
            with contextlib.suppress(OSError):
                while stream.write(bytes(size)):
                    pass
    return ballast


def full(place: Path) -> Fault:
    """ENOSPC: somebody else's file takes what was free."""
    mount("tmpfs", place, options="size=8m")
    return Fault(lambda: fill(place) and None, (place / "ballast").unlink)


def without_inodes(place: Path) -> Fault:
    """ENOSPC although there is room: somebody else's empty files."""
    mount("tmpfs", place, options="size=8m,nr_inodes=100")
    crowd = place / "crowd"

    def inflict() -> None:
        crowd.mkdir()
        with contextlib.suppress(OSError):
            for number in range(1000):
                (crowd / str(number)).touch()

    def heal() -> None:
        for path in crowd.iterdir():
            path.unlink()
        crowd.rmdir()

    return Fault(inflict, heal)


def read_only(place: Path) -> Fault:
    """EROFS: what a kernel does to a file system whose journal it lost."""
    mount("tmpfs", place, options="size=8m")

    def remount(flags: int) -> None:
        while True:
            try:
                mount("tmpfs", place, MS_REMOUNT | flags)
            except OSError as error:
                if error.errno != errno.EBUSY:  # a file is open for writing just now
                    raise
                time.sleep(0.01)
            else:
                return

    return Fault(lambda: remount(MS_RDONLY), lambda: remount(0))


def overcommitted(place: Path) -> Fault:
    """A thin device without room: the file system has some, and the blocks do not arrive."""
    pool = place.with_name("pool")
    pool.mkdir()
    mount("tmpfs", pool, options="size=8m")
    image = pool / "image"
    image.touch()
    os.truncate(image, 64 * 1024**2)
    features = ["-O", "^has_journal", "-E", "lazy_itable_init=0,nodiscard", "-N", "256"]
    subprocess.run(["mkfs.ext4", "-q", "-F", "-b", "4096", *features, str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    return Fault(lambda: fill(pool) and None, (pool / "ballast").unlink)


def vanished(place: Path) -> Fault:
    """ENOENT: moved away, and put back."""
    away = place.with_name(f"{place.name}.away")
    return Fault(
        lambda: place.rename(away) and None,
        lambda: away.rename(place) and None,
        lambda root: away if place == root else None,
    )


def forbidden(place: Path) -> Fault:
    """EACCES: may be read, may not be written any more. The test takes away root's privilege."""
    return Fault(lambda: place.chmod(0o500), lambda: place.chmod(0o700))


class Double:
    """fuse_double.py mounted at a place; see there for its plans."""

    def __init__(self, place: Path) -> None:
        self.behind = place.with_name("behind")
        self.behind.mkdir()
        program = Path(__file__).with_name("fuse_double.py")
        self._process = subprocess.Popen(
            [sys.executable, "-S", str(program), str(self.behind), str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._acknowledged()

    def plan(self, **faults: int | str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(faults) + "\n")
        self._process.stdin.flush()
        self._acknowledged()

    def _acknowledged(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ok\n":
            raise SystemExit("mount: the FUSE double did not start")


def refusing(operation: str, number: int) -> Callable[[Path], Fault]:
    """An errno out of one system call, whatever it is made on."""

    def prepare(place: Path) -> Fault:
        double = Double(place)
        return Fault(lambda: double.plan(**{operation: number}), double.plan)

    return prepare


def hanging(operation: str) -> Callable[[Path], Fault]:
    """A system call that does not come back until the storage is healed."""

    def prepare(place: Path) -> Fault:
        double = Double(place)
        # What hangs cannot be read; what lies behind it can.
        return Fault(
            lambda: double.plan(**{operation: "hang"}), double.plan, lambda root: double.behind
        )

    return prepare


FAULTS: dict[str, Callable[[Path], Fault]] = {
    "full": full,
    "without-inodes": without_inodes,
    "read-only": read_only,
    "overcommitted": overcommitted,
    "vanished": vanished,
    "forbidden": forbidden,
    **{f"eio-{name}": refusing(name, errno.EIO) for name in ("mkdir", "create", "write")},
    **{f"eio-{name}": refusing(name, errno.EIO) for name in ("fsyncdir", "rename")},
    "eio-fsync-shard": refusing("fsync:rank-", errno.EIO),
    "eio-fsync-manifest": refusing("fsync:MANIFEST", errno.EIO),
    "edquot-write": refusing("write", errno.EDQUOT),
    "edquot-mkdir": refusing("mkdir", errno.EDQUOT),
    "hang-write": hanging("write"),
    "hang-fsync": hanging("fsync"),
    "hang-everything": hanging("*"),
}


# ── the program ───────────────────────────────────────────────────────────────────────────
def loaded(root: Path) -> str:
    """The newest checkpoint, if its content is that of its step."""
    path = hpc_ckpt.latest(root)
    state = hpc_ckpt.load(path)
    whole = bool((state["tracked"]["value"] == state["progress"]["step"]).all())
    return path.name if whole else f"{path.name} holds another step's state"


@dataclass
class Run:
    """One program under way."""

    ckpt: Checkpointer
    value: torch.Tensor
    fault: Fault
    root: Path
    report: Report

    def step(self) -> None:
        self.value.fill_(self.ckpt.global_step + 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.ckpt.step()
        step = self.ckpt.global_step
        told = [str(one.message) for one in caught]
        # The preflight asks the same storage, in a thread of its own: now or a step later.
        saves = [text for text in told if not text.startswith("the next checkpoint may not fit")]
        self.report.warnings += [(step, text) for text in saves]

    def settle(self) -> None:
        """Until the save of this step is committed or has failed, and what follows it is done."""
        assert self.ckpt._running is not None
        assert self.ckpt._running.engine.wait(60)


def failing(run: Run) -> None:
    for _ in run.ckpt.steps(2 * HEALTHY + FAILING):
        if run.ckpt.global_step == HEALTHY:
            run.fault.inflict()
        if run.ckpt.global_step == HEALTHY + FAILING:
            readable = run.fault.readable(run.root)
            if readable is not None:
                run.report.during = loaded(readable)
            run.fault.heal()
            if readable is None:  # nothing could be seen of it until now
                run.report.during = loaded(run.root)
        run.step()
        run.settle()


def hung(run: Run) -> None:
    """Nobody waits for a save here: the program steps on, and the storage does not answer."""
    for _ in run.ckpt.steps(HEALTHY):
        run.step()
        run.settle()
    run.fault.inflict()
    for _ in range(HUNG):
        run.step()
        time.sleep(0.01)
    run.report.during = loaded(run.fault.readable(run.root) or run.root)
    run.fault.heal()
    run.settle()
    for _ in range(HEALTHY):
        run.step()
        run.settle()


def train(name: str, at: str, root: Path) -> Report:
    bad = root if at == "root" else root / "checkpoints"
    bad.mkdir(parents=True)
    fault = FAULTS[name](bad)
    report, value = Report(name=f"{name}@{at}"), torch.zeros(ITEMS)
    script = hung if name.startswith("hang") else failing
    with Checkpointer(root, policy="every 1 steps", keep=50, value=value) as ckpt:
        script(Run(ckpt, value, fault, root, report))
    report.steps = ckpt.global_step
    report.after = loaded(root)
    records = [r for path in sorted((root / "events").glob("*")) for r in events.read(path)]
    failures = [r for r in records if r["event"] == Event.SAVE_FAILED.value]
    report.failed = [(r["step"], r["error"]) for r in failures]
    report.committed = [r["step"] for r in records if r["event"] == Event.COMMITTED.value]
    found = sorted(path.name for path in (root / "checkpoints").iterdir())
    report.left = [each for each in found if each.startswith((".tmp-", ".trash-"))]
    return report


def main(place: Path, faults: list[str]) -> None:
    torch.set_num_threads(1)
    for fault in faults:
        name, _, at = fault.partition("@")
        try:
            report = train(name, at, place / fault / "run")
        except BaseException:
            report = Report(name=fault, error=traceback.format_exc())
        print(json.dumps(asdict(report)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    os._exit(0)  # not by the way of threads that a hung file system holds
