"""What a look around and a trial job mean for a profile. Records in, findings out."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..tiers.wishes import Survives
from ..units import format_duration, format_size
from .findings import Finding, Grade, note, ok, wrong
from .probe import IN_MEMORY, Place, Sight, Wanted
from .profile import Profile, Storage, Strategy, Tool
from .trial import Attempt, Ear, Trial

_NO_JOB = "not looked at: that takes a job"


def wanted_of(profile: Profile, root: Path, *, slurm: bool) -> Wanted:
    """What to look at for this profile."""
    return Wanted(
        root=str(root),
        storage={name: storage.path for name, storage in profile.storage.items()},
        tools={name: tool.path for name, tool in tools_of(profile).items() if tool.path},
        slurm=slurm,
    )


def tools_of(profile: Profile) -> dict[str, Tool]:
    found = {"dmtcp": profile.tools.dmtcp, "criu": profile.tools.criu}
    return {name: tool for name, tool in found.items() if tool is not None}


def modules_of(profile: Profile) -> tuple[str, ...]:
    """Each is loaded by itself, to see whether it is there."""
    found = [*profile.environment.modules, *(t.module for t in tools_of(profile).values())]
    return tuple(dict.fromkeys(module for module in found if module))


# ── the job ───────────────────────────────────────────────────────────────────────────────
def trial_findings(profile: Profile, trial: Trial) -> Iterator[Finding]:
    started = _started(trial)
    yield started
    if trial.host is None:
        return
    yield _interpreter(trial)
    if not trial.ready:
        yield wrong(
            "step of the job",
            f"srun did not start a step on {trial.host}" + _quoted(trial.log),
            "",
            "a link runs the program as one step: see whether `sbatch --wrap 'srun true'` works",
        )
    yield from (_attempt(attempt) for attempt in trial.attempts)
    if trial.attempts:
        yield _who_else(trial)
    if trial.sight is not None:
        yield from _commands(profile, trial.sight)
    for module, loaded in trial.modules.items():
        yield _module(module, loaded)


def _started(trial: Trial) -> Finding:
    what = "trial job"
    if trial.refused:
        return wrong(
            what,
            f"sbatch refused it: {trial.refused}",
            "",
            "say --partition; SBATCH_ACCOUNT and SBATCH_QOS are heeded",
        )
    if trial.host is not None:
        after = format_duration(round(trial.started_after_s or 0.0, 1))
        return ok(what, f"job {trial.job} ran on {trial.host}, {after} after sbatch")
    if trial.state.startswith("RUNNING"):
        return wrong(
            what,
            f"job {trial.job} ran, but nothing it wrote is seen here",
            "",
            "run doctor in a directory (--root) that all nodes see",
        )
    if trial.state.startswith("ENDED"):
        return wrong(
            what,
            f"job {trial.job} ended at once" + _quoted(trial.log),
            "",
            "run doctor in a directory (--root) that all nodes see",
        )
    state = trial.state or "the queue did not answer"
    return note(
        what,
        f"job {trial.job} did not start in time: {state}; its signals are not tried",
        "",
        "give it longer (--wait), or a partition that is free (--partition)",
    )


def _quoted(log: str) -> str:
    return f" ({' '.join(log.split())})" if log.strip() else ""


def _interpreter(trial: Trial) -> Finding:
    if trial.sight is not None:
        return ok("interpreter on the node", f"hpc_ckpt starts on {trial.host}")
    return wrong(
        "interpreter on the node",
        f"hpc_ckpt did not start on {trial.host}" + _quoted(trial.log),
        "",
        "install it where every node sees it: the same interpreter runs each link",
    )


def _attempt(attempt: Attempt) -> Finding:
    wanted = " and ".join(ear.value for ear in Ear if ear in attempt.wanted)
    if attempt.problem:
        return note(attempt.name, f"not tried: {attempt.problem}")
    if attempt.reached:
        after = "" if attempt.after_s is None else f" ({attempt.after_s:.1f} s)"
        return ok(attempt.name, f"heard by {wanted}{after}")
    heard = " and ".join(ear.value for ear in Ear if ear in attempt.heard) or "nobody"
    return wrong(
        attempt.name,
        f"heard by {heard}, not by {wanted}",
        "",
        "a link would not be warned in this way: ask the site's staff about its signals, and "
        "save often",
    )


def _who_else(trial: Trial) -> Finding:
    """Whether a program without a trap would be killed by what only the shim should hear."""
    others = any(Ear.PROGRAM in attempt.heard for attempt in trial.attempts)
    if not others:
        return ok("signals to the program", "it hears none: only the shim does")
    return note(
        "signals to the program",
        "every process of a step hears what Slurm sends",
        "",
        "a program that uses hpc_ckpt takes it as a notice; others must ignore TERM",
    )


def _commands(profile: Profile, sight: Sight) -> Iterator[Finding]:
    if sight.scontrol:
        yield wrong(
            "scontrol on the node",
            sight.scontrol,
            "",
            "links then do not know when they end: keep signal.lead long",
        )
    elif sight.scontrol is not None:
        yield ok("scontrol on the node", "answers: links know when they end")
    if sight.sbatch is not None:
        yield _submitting(profile, sight.sbatch)


def _submitting(profile: Profile, problem: str) -> Finding:
    what, allowed = "sbatch on the node", profile.chain.submit_from_compute_nodes
    said = f"submit_from_compute_nodes: {str(allowed).lower()}"
    if problem and profile.chain.strategy is Strategy.RESUBMIT:
        return wrong(what, problem, "strategy: resubmit", "write strategy: array")
    if problem and allowed:
        return wrong(what, problem, said, "write submit_from_compute_nodes: false")
    if not problem and not allowed:
        return note(
            what, "works", said, "with true, a chain that runs out of links can extend itself"
        )
    return ok(what, f"refused: {problem}" if problem else "works", said)


def _module(module: str, loaded: bool) -> Finding:
    what = f"module {module}"
    if loaded:
        return ok(what, "loads on the node")
    return wrong(
        what,
        "does not load on the node",
        f"module: {module}",
        f"see `module avail {module.partition('/')[0]}`, and correct the name",
    )


# ── places and tools ──────────────────────────────────────────────────────────────────────
def place_findings(
    profile: Profile, here: Sight, trial: Trial | None, home: str | None
) -> Iterator[Finding]:
    """`here` is what the login node sees; the trial's node sees what links will see."""
    node = trial.sight if trial is not None else None
    yield _root(here.root, seen_by=None if trial is None else trial.host)
    if home and Path(home) in Path(here.root.path).parents:
        yield note(
            "root",
            f"{here.root.path} is in your home directory",
            "",
            "checkpoints are large: choose a place for large files",
        )
    for name, storage in profile.storage.items():
        yield _storage(name, storage, here, node)
    for name in tools_of(profile):
        found = (node or here).tools.get(name)
        if found is not None:
            yield _tool(name, found, (node or here).host, profile)
        elif trial is None:
            yield note(f"tool {name}", _NO_JOB)
    if trial is None:
        for module in profile.environment.modules:
            yield note(f"module {module}", _NO_JOB)


def _about(place: Place) -> str:
    free = "" if place.free is None else f", {format_size(place.free)} free"
    return f"{place.path} ({place.kind or 'unknown file system'}{free})"


def _root(place: Place, seen_by: str | None) -> Finding:
    what = "root"
    if place.problem:
        return wrong(what, f"{place.path}: {place.problem}", "", "choose another --root")
    if place.kind in IN_MEMORY:
        return wrong(
            what,
            f"{_about(place)} is kept in memory",
            "",
            "choose a root on a disk that all nodes see",
        )
    if seen_by is not None:
        return ok(what, f"{_about(place)}; seen by {seen_by}")
    if place.shared:
        return ok(what, f"{_about(place)}; a shared file system")
    return note(
        what,
        f"{_about(place)} may be this machine's own",
        "",
        "the root of a chain must be seen by every node",
    )


def _storage(name: str, storage: Storage, here: Sight, node: Sight | None) -> Finding:
    what, said = f"storage {name}", f"path: {storage.path}, survives: {storage.survives.value}"
    if node is None and storage.survives is Survives.PROCESS:
        return note(what, _NO_JOB, said)
    seen = node or here
    place = seen.storage.get(name)
    if place is None:
        return note(what, "not looked at", said)
    if place.problem:
        return wrong(
            what,
            f"on {seen.host}: {place.problem}",
            said,
            "correct the path, or make the directory",
        )
    shown = f"on {seen.host}: {_about(place)}" + _purged(storage)
    if storage.survives is Survives.NODE and place.kind in IN_MEMORY:
        return wrong(what, f"{shown} is kept in memory", said, "write survives: process")
    if storage.survives is Survives.NODE and not place.shared:
        return note(
            what,
            f"{shown} may be that machine's own",
            said,
            "write survives: process unless other nodes see it",
        )
    return Finding(what, Grade.OK, shown, said)


def _purged(storage: Storage) -> str:
    return f"; files untouched for {storage.purge} are removed" if storage.purge else ""


def _tool(name: str, problem: str, host: str, profile: Profile) -> Finding:
    tool = tools_of(profile)[name]
    if not problem:
        return ok(f"tool {name}", f"{tool.path} is on {host}")
    return wrong(
        f"tool {name}",
        f"{tool.path} on {host}: {problem}",
        f"path: {tool.path}",
        "correct the path, or leave the tool out",
    )
