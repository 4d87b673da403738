"""A small real job that tries what a link relies on: who hears which signal, what a node can do.

It is submitted, signalled, listened to and always taken away again, also on Ctrl-C. What its
answers mean for a profile is diagnosis.py's business. The job is templates/trial.sh.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType

from .. import resources
from ..errors import RootError, SchedulerError
from .probe import SIGHT_NAME, WANTED_NAME, Sight, Wanted
from .profile import Profile, directive_name
from .slurm import (
    Runner,
    parse_record,
    parse_submitted,
    parse_time,
    run_command,
    sbatch_defaults,
)

LIMIT_S = 120.0
JOB_MINUTES = 10
LEAD_S = 90
"""Of the job's own --signal; a limit of at most two minutes more makes Slurm send it at once."""
HEARD_WITHIN_S = 10.0
WARNED_WITHIN_S = 45.0
"""slurmctld looks at time limits every 30 s."""
AFTERWARDS_S = 0.5
"""For those who hear a signal besides the one who should."""
SEEN_WITHIN_S = 20.0
ASK_EVERY_S = 30.0
FIRST_ASK_S = 5.0
COMMAND_S = 30.0
GONE_WITHIN_S = 10.0
FILES = ("batch", "program", "notice", "leave", "modules", "job.log", SIGHT_NAME)
_NO_TIME = "there was no time left for it"

Say = Callable[[str], None]


class Ear(str, Enum):
    """Who can hear a signal."""

    BATCH = "the batch process"
    SHIM = "the shim"
    PROGRAM = "the program"


@dataclass(frozen=True)
class Attempt:
    """One signal, sent in one of Slurm's ways."""

    name: str
    wanted: frozenset[Ear]
    heard: frozenset[Ear] = frozenset()
    after_s: float | None = None
    problem: str = ""
    """Why it could not be sent."""

    @property
    def reached(self) -> bool:
        return self.wanted <= self.heard


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of it."""

    job: str | None = None
    refused: str = ""
    """What sbatch said instead of taking the job."""
    state: str = ""
    """What the queue said of a job that was never heard of."""
    host: str | None = None
    """None: it did not start, or what it writes is not seen here."""
    started_after_s: float | None = None
    ready: bool = False
    attempts: tuple[Attempt, ...] = ()
    sight: Sight | None = None
    modules: dict[str, bool] = dataclasses.field(default_factory=dict)
    log: str = ""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to try, where."""

    profile: Profile
    root: Path
    """On the file system where runs will be."""
    wanted: Wanted
    modules: tuple[str, ...] = ()
    partition: str | None = None
    minutes: int = JOB_MINUTES
    """The job's time limit."""
    limit_s: float = LIMIT_S


def run_trial(
    request: Request,
    *,
    say: Say = lambda _text: None,
    run: Runner = lambda argv: run_command(argv, COMMAND_S),
    sleep: Callable[[float], None] = time.sleep,
) -> Trial:
    """Takes at most `limit_s`, and some seconds to clean up."""
    with _ended_by_signals(), _folder(request) as folder:
        job = _Job(request, folder, run, sleep, say)
        try:
            return job.play()
        finally:
            with _uninterrupted():
                job.remove()


class _Job:
    """The job while it is there."""

    def __init__(
        self,
        request: Request,
        folder: Path,
        run: Runner,
        sleep: Callable[[float], None],
        say: Say,
    ) -> None:
        self._request = request
        self._folder = folder
        self._run = run
        self._sleep = sleep
        self._say = say
        self._signal = request.profile.signal.name
        self._end = time.monotonic() + request.limit_s
        self._submitted = False
        self._id: str | None = None

    def play(self) -> Trial:
        began = time.monotonic()
        try:
            with _uninterrupted():
                self._submit()
        except SchedulerError as error:
            self._submitted = error.returncode is None  # cut off: it may have been taken
            return Trial(refused=" ".join((error.stderr or str(error)).split()))
        self._say(f"job {self._id} is submitted; waiting for it to start")
        state = self._wait_for_start()
        waited = time.monotonic() - began
        if self._line("start") is None:
            return Trial(job=self._id, state=state or self._state(), log=self._log())
        self._say(f"it runs on {self._line('start')}; sending signals")
        self._until(lambda: "ready" in self._lines("program"), HEARD_WITHIN_S)
        # First, because a signal may reach whatever else runs in the job.
        self._until(lambda: self._sight() is not None, SEEN_WITHIN_S)
        ready = "ready" in self._lines("program")
        attempts = tuple(self._attempts()) if ready else ()
        return Trial(
            job=self._id,
            host=self._line("start"),
            started_after_s=waited,
            ready=ready,
            attempts=attempts,
            sight=self._sight(),
            modules=self._modules(),
            log=self._log(),
        )

    # ── in and out ────────────────────────────────────────────────────────────────────────
    def _submit(self) -> None:
        self._submitted = True
        self._id = parse_submitted(self._run(submission(self._request, self._folder)))

    def remove(self) -> None:
        """By its name where the id is not known: sbatch may have been cut off."""
        (self._folder / "leave").write_text("now\n")
        if not self._submitted:
            return
        which = [self._id] if self._id else [f"--name={self._folder.name}"]
        with contextlib.suppress(SchedulerError):  # it has ended by itself
            self._run(["scancel", *which])
        if self._line("start") is not None:
            self._wait(lambda: "end" in self._lines("batch"), GONE_WITHIN_S)

    def _wait_for_start(self) -> str:
        """Until it is heard of; else what the queue says of it."""
        state, ask_at, end = "", time.monotonic() + FIRST_ASK_S, self._end
        while self._line("start") is None and time.monotonic() < end:
            if time.monotonic() >= ask_at:
                ask_at = time.monotonic() + ASK_EVERY_S
                state = self._state()
                word = state.partition(" ")[0]
                if word == "RUNNING":
                    end = min(end, time.monotonic() + HEARD_WITHIN_S)
                elif word not in ("PENDING", "CONFIGURING", ""):
                    break
            self._sleep(0.2)
        return state

    def _state(self) -> str:
        argv = ["squeue", "--noheader", "--format=%T (%r)", f"--jobs={self._id}"]
        try:
            return self._run(argv).strip() or "ENDED"
        except SchedulerError as error:
            return "ENDED" if "Invalid job id" in error.stderr else ""

    # ── signals ───────────────────────────────────────────────────────────────────────────
    def _attempts(self) -> Iterator[Attempt]:
        job, name = str(self._id), self._signal
        step, batch = frozenset({Ear.SHIM}), frozenset({Ear.BATCH})
        yield self._try(f"{name} to the step", step, name, ["scancel", f"--signal={name}", job])
        yield self._try("TERM to the step", step, "TERM", ["scancel", "--signal=TERM", job])
        yield self._try(
            f"{name} to the batch process",
            batch,
            name,
            ["scancel", "--batch", f"--signal={name}", job],
        )
        yield self._try("the warning before the end", batch, name, self._shorten, WARNED_WITHIN_S)
        yield self._try("TERM at the end", step | batch, "TERM", ["scancel", job])

    def _try(
        self,
        name: str,
        wanted: frozenset[Ear],
        number: str,
        send: Sequence[str] | Callable[[], Sequence[str]],
        within_s: float = HEARD_WITHIN_S,
    ) -> Attempt:
        if time.monotonic() >= self._end:
            return Attempt(name, wanted, problem=_NO_TIME)
        before = {ear: self._count(ear, number) for ear in Ear}

        def heard() -> frozenset[Ear]:
            return frozenset(ear for ear in Ear if self._count(ear, number) > before[ear])

        began = time.monotonic()
        try:
            self._run(send() if callable(send) else send)
        except SchedulerError as error:
            return Attempt(name, wanted, problem=" ".join(str(error).split()))
        self._until(lambda: wanted <= heard(), within_s)
        after_s = time.monotonic() - began
        self._sleep(AFTERWARDS_S)
        reached = heard()
        if wanted <= reached:
            return Attempt(name, wanted, reached, after_s)
        late = time.monotonic() >= self._end
        return Attempt(name, wanted, reached, problem=_NO_TIME if late else "")

    def _shorten(self) -> list[str]:
        """A limit so near that the job's own warning is due; an owner may lower it."""
        text = self._run(["scontrol", "-o", "show", "job", str(self._id)])
        started = parse_time(parse_record(text).get("StartTime")) or time.time()
        minutes = math.floor(max(0.0, time.time() - started) / 60) + 2
        return ["scontrol", "update", f"JobId={self._id}", f"TimeLimit={minutes}"]

    # ── files ─────────────────────────────────────────────────────────────────────────────
    def _lines(self, name: str) -> list[str]:
        with contextlib.suppress(OSError):
            return (self._folder / name).read_text(errors="replace").splitlines()
        return []

    def _line(self, word: str) -> str | None:
        """What the batch process said after this word."""
        found = [line.partition(" ")[2] for line in self._lines("batch") if _says(line, word)]
        return found[0] if found else None

    def _count(self, ear: Ear, number: str) -> int:
        if ear is Ear.SHIM:
            return sum(f'"shim {number}"' in line for line in self._lines("notice"))
        return self._lines("batch" if ear is Ear.BATCH else "program").count(number)

    def _modules(self) -> dict[str, bool]:
        said = [line.partition(" ") for line in self._lines("batch")]
        return {name: word == "loaded" for word, _, name in said if word in ("loaded", "missing")}

    def _sight(self) -> Sight | None:
        lines = self._lines(SIGHT_NAME)
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return Sight.from_record(json.loads(lines[0])) if lines else None
        return None

    def _log(self) -> str:
        return "\n".join(self._lines("job.log")[-5:])

    def _until(self, done: Callable[[], bool], within_s: float) -> None:
        self._wait(done, min(within_s, max(0.0, self._end - time.monotonic())))

    def _wait(self, done: Callable[[], bool], within_s: float) -> None:
        end = time.monotonic() + within_s
        while not done() and time.monotonic() < end:
            self._sleep(0.1)


def _says(line: str, word: str) -> bool:
    return line.partition(" ")[0] == word


def submission(request: Request, folder: Path) -> list[str]:
    """The sbatch command: as near to a link's as a job of a minute can be."""
    profile = request.profile
    log = str(folder).replace("%", "%%") + "/job.log"
    where = [f"--{key}={os.environ[name]}" for name, key in sbatch_defaults(os.environ).items()]
    where += [f"--partition={request.partition}"] if request.partition else []
    asked = [
        f"--job-name={folder.name}",
        f"--time={request.minutes}",
        *where,
        "--nodes=1",
        "--ntasks=1",
        f"--signal=B:{profile.signal.name}@{LEAD_S}",
        "--open-mode=append",
        f"--output={log}",
        "--export=NONE",
        "--no-requeue",
    ]
    skip = {directive_name(name) for name in profile.directives.skip}
    kept = [option for option in asked if directive_name(option) not in skip]
    script, shim = resources.find("templates/trial.sh"), resources.find("templates/shim.sh")
    stay = str(math.ceil(request.limit_s) + 60)
    words = [script, folder, shim, profile.signal.name, stay, sys.executable]
    return ["sbatch", "--parsable", *kept, *profile.directives.extra, *map(str, words)]


# ── around it ─────────────────────────────────────────────────────────────────────────────
@contextlib.contextmanager
def _folder(request: Request) -> Iterator[Path]:
    try:
        made = tempfile.TemporaryDirectory(
            prefix="hpc-ckpt-doctor-", dir=request.root, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise RootError(request.root, f"cannot be written ({error.strerror})") from None
    with made as name:
        folder = Path(name).absolute()
        for file in FILES:
            (folder / file).touch()
        (folder / "modules").write_text("".join(f"{module}\n" for module in request.modules))
        (folder / WANTED_NAME).write_text(json.dumps(dataclasses.asdict(request.wanted)))
        yield folder


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """TERM and HUP end us as Ctrl-C does: with the job taken away."""
    before = {number: signal.signal(number, _interrupt) for number in _ENDINGS}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)


_ENDINGS = (signal.SIGTERM, signal.SIGHUP)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits: a job whose id nobody wrote down would stay."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_ENDINGS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
