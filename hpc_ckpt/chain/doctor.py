"""Whether a profile fits the live cluster, and whether links will hear what they must.

The rules here compare the profile with what Slurm says of itself (survey.py); what only a job
can show is tried by trial.py and judged by diagnosis.py.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import SchedulerError, SpecError
from ..units import format_duration, parse_duration
from .cluster import ClusterPartition, Survey
from .diagnosis import modules_of, place_findings, trial_findings, wanted_of
from .findings import Finding, Grade, note, ok, wrong
from .layers import load
from .probe import look
from .profile import Backend, Partition, PreemptMode, Profile, Sharing, Strategy
from .survey import take_survey
from .trial import JOB_MINUTES, LIMIT_S, Request, Say, run_trial

OLDEST = (20, 11)
"""Older ones are not known to work."""
SOON_S = 7 * 86400.0
SHORT_MEMORY_S = 60.0
_TRACKING = {
    "cgroup": "Slurm's signals reach the direct task of a step only, which is the shim",
    "linuxproc": "every process of a step is signalled, and what leaves the tree outlives the job",
    "pgid": "every process of a step is signalled, and what leaves the group outlives the job",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line asks for."""

    profile: str | None = None
    job: bool = True
    partition: str | None = None
    root: Path = Path()
    wait_s: float = LIMIT_S


@dataclass(frozen=True)
class Diagnosis:
    cluster: str
    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> int:
        return sum(finding.grade is Grade.WRONG for finding in self.findings)


def diagnose(
    options: Options, *, cwd: Path, environ: Mapping[str, str], say: Say = lambda _text: None
) -> Diagnosis:
    """Asks the cluster, looks around, and runs the trial job unless told not to."""
    survey, silence = _survey()
    live = survey.config.cluster if survey else None
    # The name of a command is asked for by the spec, and no command is run.
    profile = load(
        {"command": "true"}, profile=options.profile, live_cluster=live, cwd=cwd, environ=environ
    ).profile
    if survey is None and profile.backend is Backend.SLURM:
        raise SpecError(
            f"no Slurm answers on this machine ({silence}): run doctor on a login "
            f"node of {profile.cluster}, or with --profile local"
        )
    root = cwd / options.root
    here = look(wanted_of(profile, root, slurm=False), environ)
    trial = None
    if survey is None or profile.backend is Backend.LOCAL:
        findings = [note("cluster", "no Slurm here: only this machine was looked at")]
    else:
        findings = list(cluster_findings(survey, profile, now=time.time()))
        if options.job and here.root.problem is None:
            trial = run_trial(_request(options, survey, profile, root), say=say)
            findings += trial_findings(profile, trial)
    findings += place_findings(profile, here, trial, environ.get("HOME"))
    return Diagnosis(profile.cluster, tuple(findings))


def _survey() -> tuple[Survey | None, str]:
    try:
        return take_survey(), ""
    except SchedulerError as error:
        return None, " ".join((error.stderr or str(error)).split())


def _request(options: Options, survey: Survey, profile: Profile, root: Path) -> Request:
    named = survey.partition(options.partition) if options.partition else None
    if options.partition and named is None:
        known = ", ".join(sorted(one.name for one in survey.partitions))
        raise SpecError(f"--partition: this cluster has no {options.partition!r}; it has {known}")
    used = named or next((one for one in survey.partitions if one.default), None)
    limit = survey.max_time_s(used) if used else None
    return Request(
        profile=profile,
        root=Path(os.path.abspath(root)),  # noqa: PTH100 - resolve() would follow links
        wanted=wanted_of(profile, root, slurm=True),
        modules=modules_of(profile),
        partition=options.partition,
        minutes=JOB_MINUTES if limit is None else max(1, min(JOB_MINUTES, int(limit // 60))),
        limit_s=options.wait_s,
    )


# ── the cluster as a whole ────────────────────────────────────────────────────────────────
def cluster_findings(survey: Survey, profile: Profile, *, now: float) -> Iterator[Finding]:
    """One for each thing that was compared, in the order in which one would read them."""
    for rule in _RULES:
        yield rule(survey, profile)
    yield from _partitions(survey, profile)
    yield from _maintenance(survey, now)


def _cluster(survey: Survey, profile: Profile) -> Finding:
    live = survey.config.cluster or "unknown"
    if live == profile.cluster:
        return ok("cluster", live)
    return note(
        "cluster", live, f"cluster: {profile.cluster}", "this may be another cluster's profile"
    )


def _version(survey: Survey, profile: Profile) -> Finding:
    shown = survey.config.version or ""
    numbers = re.match(r"(\d+)\.(\d+)", shown)
    if numbers is None:
        return note("Slurm", f"version {shown or 'unknown'}")
    if (int(numbers[1]), int(numbers[2])) < OLDEST:
        return note(
            "Slurm",
            f"version {shown}",
            "",
            f"older than {OLDEST[0]}.{OLDEST[1]}: not known to work",
        )
    return ok("Slurm", f"version {shown}")


def _tracking(survey: Survey, profile: Profile) -> Finding:
    kind = survey.config.proctrack
    seen = f"{kind or 'unknown'}: {_TRACKING.get(kind or '', 'who hears a signal is not known')}"
    if kind == "cgroup":
        return ok("process tracking", seen)
    return note(
        "process tracking",
        seen,
        "",
        "a program that does not use hpc_ckpt must ignore TERM to be warned",
    )


def _kill_wait(survey: Survey, profile: Profile) -> Finding:
    live, said = survey.config.kill_wait_s, f"kill_wait: {profile.kill_wait}"
    if live is None:
        return note("time to end", "KillWait is not known", said)
    seen = f"KillWait is {live:g}s"
    if live == parse_duration(profile.kill_wait):
        return ok("time to end", seen, said)
    return wrong("time to end", seen, said, f"write kill_wait: {live:g}s")


def _bad_exit(survey: Survey, profile: Profile) -> Finding:
    if survey.config.kill_on_bad_exit:
        return note(
            "KillOnBadExit",
            "1: one rank that fails ends all of its step",
            "",
            "links say otherwise for their own step; an srun in a program must say "
            "--kill-on-bad-exit=0",
        )
    return ok("KillOnBadExit", "0: a rank that fails does not end the others")


def _preemption(survey: Survey, profile: Profile) -> Finding:
    what = "preemption notice"
    if survey.config.preempt_type == "none":
        return ok(what, "nothing is preempted here")
    if survey.config.user_signal:
        seen = f"--signal: the batch process hears {profile.signal.name} when the grace begins"
    else:
        seen = "TERM: the steps hear it when the grace begins"
    if survey.config.preempt_type != "qos":
        return ok(what, seen)
    known = ", ".join(
        f"{one.name} ({one.mode.value if one.mode else 'as the cluster'}, {one.grace_s:g}s grace)"
        for one in survey.preempted_qos()
    )
    return note(
        what,
        f"{seen}. By QoS: {known or 'which ones is not known'}",
        "",
        "the profile describes partitions; say failures.preemption for spare links",
    )


def _requeue(survey: Survey, profile: Profile) -> Finding:
    config, said = survey.config, f"requeue: {str(profile.chain.requeue).lower()}"
    wait = f"a requeued job waits at least {format_duration(config.requeue_delay_s)}"
    if profile.chain.strategy is Strategy.REQUEUE and not profile.chain.requeue:
        return wrong("requeue", wait, f"strategy: requeue, {said}", "write requeue: true")
    if config.requeue is False and profile.chain.requeue:
        return note("requeue", f"off unless a job asks for it, as links do; {wait}", said)
    return ok("requeue", wait, said)


def _array(survey: Survey, profile: Profile) -> Finding:
    live, most = survey.config.max_array, profile.limits.max_array
    said = f"max_array: {most}" if most else ""
    if live is None:
        return note("arrays", "MaxArraySize is not known", said)
    if live <= 1 and profile.chain.strategy in (None, Strategy.ARRAY):
        return wrong(
            "arrays", "switched off (MaxArraySize)", "strategy: array", "write strategy: afterany"
        )
    seen = f"indices up to {max(live - 1, 0)}"
    if most and most > live:
        return wrong("arrays", seen, said, f"write max_array: {live}, or leave it out")
    return ok("arrays", seen, said)


def _submit_limit(survey: Survey, profile: Profile) -> Finding:
    most = profile.limits.max_submit
    said = f"max_submit: {most}" if most else ""
    live = min(survey.submit_limits(), default=None)
    if live is None and survey.associations is None:
        return note(
            "jobs in the queue",
            "the limit of one user cannot be asked here",
            said,
            "" if most else "if there is one, write limits.max_submit",
        )
    if live is None:
        return ok("jobs in the queue", "no limit for you", said)
    if most and most > live:
        return wrong(
            "jobs in the queue",
            f"at most {live} for you",
            said,
            f"write max_submit: {live}, or leave it out",
        )
    return ok("jobs in the queue", f"at most {live} for you", said)


def _memory(survey: Survey, profile: Profile) -> Finding:
    """Why a link ended is asked of slurmctld, which forgets."""
    config = survey.config
    age = config.min_job_age_s
    seen = f"jobs are remembered for {format_duration(age)}" if age else "MinJobAge is not known"
    if config.accounting is None:
        seen += "; no accounting: sacct knows nothing"
    if age is not None and age < SHORT_MEMORY_S:
        return note("memory of jobs", seen, "", "why a link was killed may stay unknown")
    return ok("memory of jobs", seen)


def _sharing(survey: Survey, profile: Profile) -> Finding:
    """Slurm says of a job that it hides what it says of one that is over."""
    said = f"sharing: {profile.sharing.value}"
    if not survey.config.hides_jobs:
        return ok("jobs of others", "shown", said)
    seen = "hidden (PrivateData=jobs)"
    if profile.sharing is not Sharing.GROUP:
        return ok("jobs of others", seen, said)
    return note("jobs of others", seen, said, "who takes up a chain of another must know it over")


_RULES: tuple[Callable[[Survey, Profile], Finding], ...] = (
    _cluster,
    _version,
    _tracking,
    _kill_wait,
    _bad_exit,
    _preemption,
    _requeue,
    _array,
    _submit_limit,
    _memory,
    _sharing,
)


def _maintenance(survey: Survey, now: float) -> Iterator[Finding]:
    if survey.maintenance is None:
        yield note("maintenance", "reservations cannot be asked here")
        return
    coming = [
        one
        for one in survey.maintenance
        if (one.end is None or one.end > now) and (one.start is None or one.start < now + SOON_S)
    ]
    for one in coming:
        start = "at an unknown time" if one.start is None else _from_now(one.start - now)
        nodes = f", {one.nodes} nodes" if one.nodes else ""
        yield note(
            "maintenance",
            f"{one.name} begins {start}{nodes}",
            "",
            "links that would not end before it do not start",
        )
    if not coming:
        yield ok("maintenance", "none within a week")


def _from_now(seconds: float) -> str:
    if seconds <= 0:
        return "now"
    return f"in {format_duration(round(seconds / 60) * 60 or 60)}"


# ── partitions ────────────────────────────────────────────────────────────────────────────
def _partitions(survey: Survey, profile: Profile) -> Iterator[Finding]:
    for name, said in profile.partitions.items():
        live = survey.partition(name)
        if live is None:
            yield wrong(
                f"partition {name}",
                "this cluster has none of that name",
                "",
                "remove it, or correct its name",
            )
            continue
        found = [
            *_limit(survey, live, said),
            *_preempt(survey, live, said),
            *_gpus(survey, live, said),
            *_state(live),
        ]
        yield from found or [ok(f"partition {name}", _described(survey, live))]
    missing = [one.name for one in survey.partitions if one.name not in profile.partitions]
    if missing and profile.partitions:
        yield note(
            "other partitions",
            ", ".join(missing),
            "",
            "users cannot name them: add them to the profile",
        )
    elif missing:
        yield note(
            "partitions",
            ", ".join(missing),
            "no partitions",
            "their limits are asked at submission; preemption is not known",
        )


def _described(survey: Survey, live: ClusterPartition) -> str:
    limit = survey.max_time_s(live)
    mode = survey.preempted(live)
    long = f"{format_duration(limit)} at most" if limit else "no time limit"
    return f"{long}, {f'preempted: {mode.value}, {live.grace_s:g}s' if mode else 'not preempted'}"


def _limit(survey: Survey, live: ClusterPartition, said: Partition) -> Iterator[Finding]:
    what, limit = f"partition {live.name}", survey.max_time_s(live)
    if limit is None or said.max_time is None:
        return
    seen, shown = f"{format_duration(limit)} at most", f"max_time: {said.max_time}"
    if parse_duration(said.max_time) > limit:
        yield wrong(
            what,
            seen,
            shown,
            f"write max_time: {format_duration(limit)}: longer jobs would wait for ever",
        )
    elif parse_duration(said.max_time) < limit:
        yield note(what, seen, shown, "links could be longer")


def _preempt(survey: Survey, live: ClusterPartition, said: Partition) -> Iterator[Finding]:
    what, mode = f"partition {live.name}", survey.preempted(live)
    if mode is None:
        if said.preempt is not None and survey.config.preempt_type != "qos":
            yield note(
                what,
                "not preempted",
                f"preempt: {{mode: {said.preempt.mode.value}}}",
                "more spare links are planned than needed",
            )
        return
    seen = f"preempted: {mode.value}, {live.grace_s:g}s grace"
    right = f"write preempt: {{mode: {mode.value}, grace: {live.grace_s:g}s}}"
    if said.preempt is None:
        yield wrong(what, seen, "no preempt", right)
        return
    shown = f"preempt: {{mode: {said.preempt.mode.value}, grace: {said.preempt.grace}}}"
    if said.preempt.mode is not mode or parse_duration(said.preempt.grace) > live.grace_s:
        yield wrong(what, seen, shown, right)
    elif parse_duration(said.preempt.grace) < live.grace_s:
        yield note(what, seen, shown, right)
    elif live.grace_s == 0 and mode is not PreemptMode.SUSPEND:
        yield note(what, seen, shown, "KillWait is all the time there is to save: save often")


def _gpus(survey: Survey, live: ClusterPartition, said: Partition) -> Iterator[Finding]:
    what, types = f"partition {live.name}", survey.gpu_types(live)
    if said.gpus is None or types is None:
        return
    seen = f"GPUs: {', '.join(types) or 'none'}"
    shown, right = f"gpus: [{', '.join(said.gpus)}]", f"write gpus: [{', '.join(types)}]"
    if set(types) - set(said.gpus):
        yield wrong(what, seen, shown, f"{right}: who asks for others is refused")
    elif set(said.gpus) - set(types):
        yield note(what, seen, shown, right)


def _state(live: ClusterPartition) -> Iterator[Finding]:
    if live.state != "UP":
        yield note(f"partition {live.name}", f"its state is {live.state}: nothing starts there")
