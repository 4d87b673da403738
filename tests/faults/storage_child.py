"""A training program on storage that fails half-way and recovers; says on stdout what it saw.

storage_child.py FAULT PLACE ROOT AT     PLACE is an empty directory, ROOT is made inside of it,
                                         AT is what lies on the bad storage: root or checkpoints.

It saves at every step: three times, then the fault happens, it tries some more, the fault is
healed, and it saves three times more. Run
it in a mount namespace of its own (unshare -m): what it mounts goes with it.
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
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import hpc_ckpt
from hpc_ckpt import Checkpointer, events
from hpc_ckpt.events import Event

HEALTHY, FAILING = 3, 6
"""Saves before the fault and after it was healed; saves while it lasts."""
ITEMS = 100_000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 1, 2, 4, 32
NOBODY = 65534


@dataclass
class Report:
    """What the program saw; the test asks nothing else."""

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
    while_hung: int = 0
    """Steps made while nothing was answered."""


@dataclass(frozen=True)
class Fault:
    """How a place is made, breaks and is mended."""

    inflict: Callable[[], None]
    heal: Callable[[], None]
    readable: Callable[[Path], Path] = lambda root: root
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
    """A thin device without room: write(2) succeeds, and fsync(2) brings the bad news."""
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
        lambda root: away if place == root else root,
    )


def forbidden(place: Path) -> Fault:
    """EACCES: may be read, may not be written any more. Binds root only without its rights."""
    if os.geteuid() == 0:
        os.chown(place.parent, NOBODY, NOBODY)
        os.chown(place, NOBODY, NOBODY)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    return Fault(lambda: place.chmod(0o500), lambda: place.chmod(0o700))


class Double:
    """fuse_double.py mounted at a place; see there for its plans."""

    def __init__(self, place: Path) -> None:
        behind = place.with_name("behind")
        behind.mkdir()
        program = Path(__file__).with_name("fuse_double.py")
        self._process = subprocess.Popen(
            [sys.executable, "-S", str(program), str(behind), str(place)],
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

    def everything(self, fault: int | str) -> None:
        self.plan(**{"*": fault})


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
        return Fault(lambda: double.plan(**{operation: "hang"}), double.plan)

    return prepare


FAULTS: dict[str, Callable[[Path], Fault]] = {
    "full": full,
    "without-inodes": without_inodes,
    "read-only": read_only,
    "overcommitted": overcommitted,
    "vanished": vanished,
    "forbidden": forbidden,
    **{f"eio-{name}": refusing(name, errno.EIO) for name in ("mkdir", "create", "write")},
    **{f"eio-{name}": refusing(name, errno.EIO) for name in ("fsync", "fsyncdir", "rename")},
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


@contextlib.contextmanager
def heard(report: Report, ckpt: Checkpointer) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    report.warnings += [(ckpt.global_step, str(one.message)) for one in caught]


def one_step(report: Report, ckpt: Checkpointer, value: torch.Tensor) -> None:
    value.fill_(ckpt.global_step + 1)
    with heard(report, ckpt):
        ckpt.step()


def settle(ckpt: Checkpointer) -> None:
    """Until the save of this step is committed or has failed, and what follows it is done."""
    assert ckpt._running is not None
    assert ckpt._running.engine.wait(60)


def failing(fault: Fault, root: Path, report: Report, ckpt: Checkpointer, value: torch.Tensor):
    for _ in ckpt.steps(2 * HEALTHY + FAILING):
        if ckpt.global_step == HEALTHY:
            fault.inflict()
        if ckpt.global_step == HEALTHY + FAILING:
            report.during = loaded(fault.readable(root))
            fault.heal()
        one_step(report, ckpt, value)
        settle(ckpt)


def hung(fault: Fault, root: Path, report: Report, ckpt: Checkpointer, value: torch.Tensor):
    """Nobody waits for a save here: the program steps on, and the storage does not answer."""
    for _ in ckpt.steps(HEALTHY):
        one_step(report, ckpt, value)
        settle(ckpt)
    fault.inflict()
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        one_step(report, ckpt, value)
        report.while_hung += 1
        time.sleep(0.01)
    fault.heal()
    settle(ckpt)
    for _ in range(HEALTHY):
        one_step(report, ckpt, value)
        settle(ckpt)


def main(name: str, place: Path, root: Path, at: str) -> Report:
    torch.set_num_threads(1)
    bad = root if at == "root" else root / "checkpoints"
    bad.mkdir(parents=True)
    fault = FAULTS[name](bad)
    report, value = Report(), torch.zeros(ITEMS)
    script = hung if name.startswith("hang") else failing
    with Checkpointer(root, policy="every 1 steps", keep=50, value=value) as ckpt:
        script(fault, root, report, ckpt, value)
    report.steps = ckpt.global_step
    report.after = loaded(root)
    records = [r for path in sorted((root / "events").glob("*")) for r in events.read(path)]
    report.failed = [
        (r["step"], r["error"]) for r in records if r["event"] == Event.SAVE_FAILED.value
    ]
    report.committed = [r["step"] for r in records if r["event"] == Event.COMMITTED.value]
    found = sorted(path.name for path in (root / "checkpoints").iterdir())
    report.left = [each for each in found if not each.startswith("step-")]
    return report


if __name__ == "__main__":
    said = main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    print(json.dumps(asdict(said)))
    sys.stdout.flush()
    os._exit(0)
