"""submitit as a door to chains: an executor that fits the site, and a task that comes back.

The job is submitit's: its script, its pickles, its requeue. What a site adds is in site.py,
what happens in one link in tasklink.py. The only room besides submit.py that knows submitit.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import copy
import logging
import math
import os
import re
import shlex
import shutil
import signal
import string
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import DelayedSubmission, FailedJobError, UncompletedJobError
from submitit.slurm.slurm import SlurmInfoWatcher

from .. import lease
from ..errors import SchedulerError, SpecError
from ..lease import Holder
from ..rundir import RunDir
from ..settings import parse_signal, unknown_key
from ..units import format_duration, parse_duration
from . import slurm
from .allocation import SlurmBackend
from .backend import Cause, JobRecord
from .local import Command, LocalBackend
from .plan import DEFAULT_LINKS, SIGNAL_SLACK_S
from .site import Site, directive, queue, refuse_if_live, scrubbed, setup_lines
from .spec import locate
from .succession import AWAY_PATIENCE_S, AWAY_RETRY_S
from .tasklink import Job, TaskLink
from .work import Call, Work, check_count, words_of

log = logging.getLogger("hpc_ckpt.link")

FOREVER = 10**9
"""Time-outs for submitit to count, which takes every end of a short job for one."""
LOCAL_RUNS = 6
"""How often submitit's local executor starts one job."""
LOCAL_LEAD_S = 30.0
SRUN_ARGS = ("--kill-on-bad-exit=0", "--wait=0")
"""Ranks leave one by one, and none may end the others, which are still saving."""
ALIASES = {"gpus": "gpus_per_node", "cpus": "cpus_per_task", "time": "timeout_min"}
DEAF = ("bash", "-c", 'trap "" USR1 USR2 TERM; exec "$@"', "bash")
"""submitit's callbacks are in place only after all imports: until then a signal would kill."""
NOT_YET = frozenset(
    {"READY", "PENDING", "RUNNING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT",
     "COMPLETING", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"}
)  # fmt: skip
"""States in which nobody need be asked whether the job is over."""
ASK_EVERY_S = 30.0
LONGEST_GRACE_S = 600.0


def executor(
    profile: str | os.PathLike[str] | None = None,
    folder: str | os.PathLike[str] = "submitit_logs",
    **overrides: Any,
) -> submitit.AutoExecutor:
    """submitit's executor for this site; its local one where no Slurm answers.

    `overrides` are submitit's parameters, slurm_ in front or not: time="8h", partition="gpu".
    """
    found = SiteExecutor(folder, Site.find(profile))
    found.update_parameters(**overrides)
    return found


class SiteExecutor(submitit.AutoExecutor):
    """An AutoExecutor whose jobs have the site's signal and set-up, whatever else is asked for."""

    def __init__(self, folder: str | os.PathLike[str], site: Site) -> None:
        self._site = site
        self._asked: dict[str, Any] = {}
        cluster = "slurm" if site.on_slurm else "local"
        own = {"max_num_timeout": FOREVER, "python": shlex.join([*DEAF, sys.executable])}
        prefixed = {f"{cluster}_{name}": value for name, value in own.items()}
        super().__init__(Path(folder), cluster=cluster, **prefixed)

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        asked = _translated(kwargs)
        try:
            super()._internal_update_parameters(**asked)
        except (AssertionError, NameError, TypeError, ValueError) as error:
            raise SpecError(f"executor: {str(error).partition(chr(10))[0]}") from None
        if self._site.on_slurm:
            self._asked.update({name.removeprefix("slurm_"): v for name, v in asked.items()})
            self._lay_site()

    def _lay_site(self) -> None:
        """The site's own lines come before what was asked for; its signal is the only one."""
        profile, asked, parameters = self._site.profile, self._asked, self._executor.parameters
        more = dict(asked.get("additional_parameters") or {})
        if "signal" in more:
            raise SpecError("executor: signal: the profile alone says which; see signal.name there")
        lead = int(parameters.setdefault("signal_delay_s", math.ceil(self._site.lead_s)))
        parameters.setdefault("wckey", None)  # sites that check it know none called submitit
        parameters["setup"] = [*setup_lines(profile, self.folder), *(asked.get("setup") or ())]
        parameters["srun_args"] = [*SRUN_ARGS, *(asked.get("srun_args") or ())]
        requeue = "requeue" if profile.chain.requeue else "no-requeue"
        own = {requeue: True, "signal": f"{profile.signal.name}@{lead}"}
        extra = dict(directive(text) for text in profile.directives.extra)
        parameters["additional_parameters"] = {**extra, **more, **own}
        for name in profile.directives.skip:
            parameters["additional_parameters"].pop(name.removeprefix("--"), None)
            parameters.pop(name.removeprefix("--").replace("-", "_"), None)

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[submitit.Job[Any]]:
        on_slurm = self._site.on_slurm
        self._prepare(delayed_submissions)
        if not on_slurm:
            self._fit_local_lead()
        try:
            with scrubbed(self._site.profile.signal.name):
                jobs = super()._internal_process_submissions(delayed_submissions)
        except FailedJobError as error:
            raise SpecError(f"sbatch refused the job: {' '.join(str(error).split())}") from None
        return [_watched(job, self.folder) for job in jobs] if on_slurm else jobs

    def _prepare(self, submissions: Sequence[DelayedSubmission]) -> None:
        """All is checked before anything is changed."""
        places: dict[Path, RunDir] = {}
        for submission in submissions:
            task = submission.function
            if not isinstance(task, ChainTask):
                continue
            place = RunDir(task.root_of(*submission.args, **submission.kwargs))
            if place.root in places:
                raise SpecError(
                    f"root: two tasks of one submission would share {place.root}; "
                    "let it depend on their arguments: runs/{}"
                )
            places[place.root] = place
            submission.function = task.at(self._site.record)
        if places and self._site.on_slurm:
            self._check_lead()
        refuse_if_live(list(places.values()), on_slurm=self._site.on_slurm)
        for place in places.values():
            place.halt_file.unlink(missing_ok=True)  # submitting again takes it up again

    def _check_lead(self) -> None:
        """A link hardly longer than its warning is warned when it starts and does no work."""
        lead_s = float(self._executor.parameters["signal_delay_s"])
        link_s = 60.0 * self._executor.parameters.get("time", 5)
        least_s = 2 * (lead_s + SIGNAL_SLACK_S)
        if link_s < least_s:
            raise SpecError(
                f"time: {format_duration(link_s)} is too short for a warning "
                f"{format_duration(lead_s)} before the end; at least {format_duration(least_s)}, "
                "or a shorter signal.lead in the profile"
            )

    def _fit_local_lead(self) -> None:
        parameters = self._executor.parameters
        timeout_s = 60.0 * parameters.get("timeout_min", 2.0)
        parameters["signal_delay_s"] = min(self._site.lead_s or LOCAL_LEAD_S, timeout_s / 2)


def _translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """submitit's own names for what was asked for; a name nobody knows is refused."""
    shared = submitit.AutoExecutor._typed_parameters()
    special = submitit.SlurmExecutor._valid_parameters()
    found = {}
    for wish, value in given.items():
        name = ALIASES.get(wish.removeprefix("slurm_"), wish)
        if name in special and name not in shared:
            name = f"slurm_{name}"
        if name not in shared and not name.startswith(("slurm_", "local_")):
            raise SpecError(f"executor: {unknown_key(wish, {*shared, *special, *ALIASES})}")
        found[name] = _minutes(value) if name == "timeout_min" else value
    return found


def _minutes(value: Any) -> Any:
    """Numbers are minutes, as everywhere in submitit; text is a duration."""
    return math.ceil(parse_duration(value) / 60) if isinstance(value, str) else value


# ── jobs, seen from where they were submitted ─────────────────────────────────────────────
class QueueWatcher(SlurmInfoWatcher):
    """Takes a job for done only once it has left the queue.

    submitit takes NODE_FAIL and others for the end although Slurm runs the job again, and waits
    for ever for one that died where there is no accounting.
    """

    def __init__(self, delay_s: int = 60) -> None:
        super().__init__(delay_s)
        self._queued: set[str] | None = None
        self._asked_s = -math.inf

    def register_job(self, job_id: str) -> None:
        super().register_job(job_id)
        self._queued, self._asked_s = None, -math.inf  # an older answer does not know this job

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        state = self.get_state(job_id, mode=mode).upper().partition(" ")[0]
        return state not in NOT_YET and not self._is_queued(job_id, mode)

    def _is_queued(self, job_id: str, mode: str) -> bool:
        if mode != "cache" and time.monotonic() >= self._asked_s + ASK_EVERY_S:
            self._queued, self._asked_s = queue(), time.monotonic()
        return self._queued is None or job_id in self._queued


class ChainJob(submitit.SlurmJob[Any]):
    """A job of an executor for chains."""

    watcher = QueueWatcher(delay_s=600)


def _watched(job: submitit.Job[Any], folder: Path) -> ChainJob:
    """submitit makes plain jobs of array members, whatever the executor."""
    return ChainJob(folder=folder, job_id=job.job_id, tasks=tuple(range(job.num_tasks)))


# ── tasks, in the job ─────────────────────────────────────────────────────────────────────
class ChainTask:
    """A function, or a command as a list of words, that goes on in the next link.

    `executor().submit(ChainTask(train, "runs/a"), lr=0.1).result()` is what train(lr=0.1)
    returns, however many links that takes. Placeholders in `root` are filled from the arguments:
    `map_array(ChainTask(train, "runs/lr-{}"), [0.1, 0.01])`. A command gets the arguments as
    further words, keywords as --name=value. Only paths and the function are pickled.

    It may take as many links as a chain of a spec that says nothing of it (ten; preemptions and
    failed nodes do not count). `max_links` changes that; `max_restarts` counts every start, and
    is then the only bound unless both are given.
    """

    _max_links: int | None = DEFAULT_LINKS
    """Also of a task that an earlier version has pickled."""

    def __init__(
        self,
        work: Callable[..., Any] | Sequence[str],
        root: str | os.PathLike[str],
        *,
        max_restarts: int | None = None,
        max_links: int | None = None,
    ) -> None:
        check_count("max_restarts", max_restarts, least=0)
        check_count("max_links", max_links, least=1)
        self._work = work if callable(work) else words_of(work)
        self._root = str(locate(os.fspath(root), cwd=Path.cwd(), environ=os.environ))
        self._max_restarts = max_restarts
        default = DEFAULT_LINKS if max_restarts is None else None
        self._max_links = default if max_links is None else max_links
        self._site: dict[str, Any] = {}

    def at(self, site: dict[str, Any]) -> ChainTask:
        """The same with what its links are told of the site."""
        task = copy.copy(self)
        task._site = site
        return task

    def root_of(self, *args: Any, **kwargs: Any) -> Path:
        """The run directory for these arguments."""
        if not set("{}") & set(self._root):
            return Path(self._root)
        try:
            return Path(_Names().vformat(self._root, args, kwargs))
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise SpecError(f"root: {self._root!r} does not fit the arguments: {error}") from None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        place = RunDir(self.root_of(*args, **kwargs))
        profile = self._site.get("profile") or {}
        job = _job_here(kill_wait_s=parse_duration(profile.get("kill_wait", "30s")))
        link = TaskLink(
            place,
            job,
            max_restarts=self._max_restarts,
            max_links=self._max_links,
            site=self._site,
        )
        return link.run(self._bound(args, kwargs, own_session=job.backend.name == "local"))

    def _bound(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, own_session: bool
    ) -> Work:
        if callable(self._work):
            return Call(self._work, args, kwargs)
        if shutil.which(self._work[0]) is None:
            raise SpecError(f"no command {self._work[0]!r} on this node; see PATH and modules")
        more = [*map(str, args), *(f"--{name}={value}" for name, value in kwargs.items())]
        return Command([*self._work, *more], own_session=own_session)

    def checkpoint(self, *args: Any, **kwargs: Any) -> DelayedSubmission:
        """What submitit runs when the job comes back: the same again."""
        return _AsSubmitted(self, *args, **kwargs)

    __submitit_checkpoint__ = checkpoint


class _Names(string.Formatter):
    """Values become one word each of a path."""

    def format_field(self, value: Any, format_spec: str) -> str:
        word = re.sub(r"[^\w.+=@-]+", "-", super().format_field(value, format_spec))
        return word if word.strip(".") else "-"


class _AsSubmitted(DelayedSubmission):
    """Written as a copy of what was submitted: the work may have changed its arguments since."""

    def dump(self, filepath: str | Path) -> None:
        try:
            shutil.copyfile(submitit.JobEnvironment().paths.submitted_pickle, filepath)
        except (RuntimeError, KeyError, FileNotFoundError):  # not in a job, or it is not there
            plain = DelayedSubmission(self.function, *self.args, **self.kwargs)
            plain.set_timeout(self._timeout_min, self._timeout_countdown)
            plain.dump(filepath)


def _job_here(*, kill_wait_s: float) -> Job:
    try:
        environment = submitit.JobEnvironment()
    except RuntimeError:  # a plain call: nobody would bring it back
        return Job(backend=LocalBackend(kill_wait_s=kill_wait_s), submission=f"pid {os.getpid()}")
    on_slurm, local = environment.cluster == "slurm", environment.cluster == "local"
    backend: SlurmBackend | LocalBackend = LocalBackend(kill_wait_s=kill_wait_s)
    if on_slurm:
        backend = SlurmBackend(os.environ, kill_wait_s=kill_wait_s)
    number = parse_signal(environment.USR_SIG)
    trigger, requeue = signal.getsignal(number), None
    if callable(trigger):  # before our own callback takes its place
        _sweep(environment)
        requeue = partial(_requeue, environment, partial(trigger, number, None), backend.look)
    return Job(
        backend=backend,
        submission=f"{environment.cluster} {environment.job_id}",
        rank=environment.global_rank,
        end=_local_end() if local else None,
        most_restarts=LOCAL_RUNS - 1 if local else None,
        requeue=requeue,
    )


def _sweep(environment: submitit.JobEnvironment) -> None:
    """What a killed link left half-written would make submitit refuse to write it again."""
    paths = environment.paths
    own = [paths.result_pickle] + ([paths.submitted_pickle] if environment.global_rank == 0 else [])
    for path in own:
        path.with_suffix(f"{path.suffix}.save_tmp").unlink(missing_ok=True)


def _requeue(
    environment: submitit.JobEnvironment,
    trigger: Callable[[], object],
    look: Callable[[], JobRecord],
) -> int:
    """Through submitit's own door; the code with which it wants to leave."""
    _sweep(environment)
    try:
        trigger()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except UncompletedJobError:
        raise  # its own budget of time-outs, where the executor was not ours
    except Exception as error:
        cause = look().cause
        if cause is Cause.REQUEUED:
            return 1  # Slurm was faster
        if cause is Cause.PREEMPTED:
            time.sleep(LONGEST_GRACE_S)  # Slurm brings it back, but only if it is still there
        if isinstance(error, slurm.CallFailed):
            return _requeue_patiently(environment.job_id)
        command = ["scontrol", "requeue", environment.job_id]
        raise SchedulerError(command, 1, f"the work is saved, but {error}") from error
    raise SchedulerError(["scontrol"], 1, "submitit did not put the job back into the queue")


def _requeue_patiently(
    job: str,
    run: slurm.Runner = slurm.run_command,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """What submitit asked for in vain, while this allocation lasts: it has written the rest."""
    end, backend = clock() + AWAY_PATIENCE_S, SlurmBackend(os.environ, run=run)
    while True:
        try:
            if backend.asked().cause is Cause.CANCELLED:
                raise SchedulerError(["scontrol"], 1, "the job was cancelled")  # noqa: TRY301 - as a refusal
            if not slurm.requeue(job, run):
                backend.see_that_it_begins()
        except SchedulerError as error:
            if not slurm.is_away(error) or clock() >= end:
                said = f"the work is saved, but {error.stderr.strip()}"
                raise SchedulerError(["scontrol", "requeue", job], 1, said) from error
            log.warning("%s; tried again while this allocation lasts", error.stderr.strip())
            sleep(AWAY_RETRY_S)
        else:
            return 1


def _local_end() -> float | None:
    """When the local executor ends this process, counted from when it began."""
    limit = os.environ.get("SUBMITIT_LOCAL_TIMEOUT_S")
    if limit is None:
        return None
    return lease.started_at(Holder.here()) + float(limit)
