"""How a link ended, from evidence. Reads the run directory and its logs, starts nothing.

Standard library only: the link runner asks it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from .. import events, lease
from ..errors import EXIT_COMPLETE, EXIT_SAVED
from ..events import Event
from ..lease import Holder
from ..rundir import Done, Result, RunDir
from . import evidence
from .backend import Cause, JobRecord
from .evidence import Finding

_NOT_ITS_FAULT = frozenset(
    {
        Cause.PREEMPTED,
        Cause.REQUEUED,
        Cause.NODE_FAILURE,
        Cause.LOST,
        Cause.CANCELLED,
        Cause.HALTED,
    }
)
"""Ends that say nothing about whether the program makes progress."""

_ENDED_BY_SLURM = frozenset(
    {
        Cause.PREEMPTED,
        Cause.REQUEUED,
        Cause.NODE_FAILURE,
        Cause.TIME_LIMIT,
        Cause.CANCELLED,
    }
)
"""Of a command that was ended so, srun may return 0 all the same."""


@dataclass(frozen=True)
class Verdict:
    """How the link ended."""

    result: Result | None
    """None: fenced, so what this link says no longer counts."""
    cause: Cause
    reason: str
    by_code: bool = False
    """No outcome file: the program keeps its own restart files, and its word is all there is."""
    evidence: tuple[str, ...] = ()
    ended: float | None = None
    """When its job was over, as far as the scheduler told; unix seconds."""

    def progress(self, step_from: int, step_to: int) -> bool | None:
        """Whether it got anywhere; None if it did not, but that was not its fault."""
        if step_to > step_from or self.result is Result.COMPLETE:
            return True
        if self.result is Result.SAVED and self.by_code:
            return True
        return None if self.result is None or self.cause in _NOT_ITS_FAULT else False


@dataclass(frozen=True)
class Logs:
    """What the program and slurmstepd wrote during one link."""

    program: Path
    batch: Path
    program_from: int = 0
    batch_from: int = 0
    """Where this link's share begins: a requeued job goes on in the same file."""

    @classmethod
    def of(cls, rundir: RunDir, generation: int, batch: Path) -> Logs:
        """From their present ends on."""
        program = rundir.log_file(generation)
        return cls(program, batch, _size(program), _size(batch))

    def texts(self) -> Iterable[str]:
        """The batch job's last."""
        yield evidence.tail(self.program, self.program_from)
        yield evidence.tail(self.batch, self.batch_from)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def judge(
    rundir: RunDir,
    generation: int,
    code: int,
    seen: Finding | None,
    logs: Logs | None = None,
    *,
    told: bool = False,
) -> Verdict:
    """The outcome file decides; the exit code only where there is none.

    `seen` is what the scheduler said when it began to end the link; `told` is that the program was
    told to end by a signal, whether or not anybody said why.
    """
    newest = lease.highest(rundir)
    if newest > generation:
        return Verdict(None, Cause.FENCED, f"overtaken by link {newest}")
    texts = [] if logs is None else list(logs.texts())
    # A command that returned 0 did without the steps of its own that were ended.
    steps = code != EXIT_COMPLETE
    written = [finding for text in texts for finding in evidence.in_log(text, 0.0, steps=steps)]
    written += evidence.by_srun(texts[-1]) if texts else []
    seen_all = [*([seen] if seen is not None else []), *written]
    halted = None if rundir.halted() is None else Cause.HALTED
    cause = evidence.strongest(seen_all) or halted
    # A warning alone has ended nothing: what returned 0 after it came to its own end.
    ended = evidence.strongest(finding for finding in seen_all if not finding.warning) or halted
    verdict = _judge(rundir, generation, code, cause, ended or (Cause.STOPPED if told else None))
    short = [found for text in texts if (found := evidence.out_of_memory(text)) is not None]
    if verdict.result is Result.FAILED and short:
        seen_all += short
        verdict = replace(verdict, cause=cause or Cause.OUT_OF_MEMORY)
    said = [*_from_files(rundir, generation, code), *(finding.said for finding in seen_all)]
    return replace(verdict, evidence=tuple(dict.fromkeys(filter(None, said))))


def told_too_soon(seen: Finding | None) -> Verdict:
    """Of a link that was told to stop before its program was started."""
    seen = seen or Finding(Cause.STOPPED, "TERM")
    reason = "told to stop before the program was started"
    return Verdict(Result.FAILED, seen.cause or Cause.STOPPED, reason, evidence=(seen.said,))


def _from_files(rundir: RunDir, generation: int, code: int) -> list[str]:
    said = [f"exit code {code}"]
    outcome = rundir.outcome(generation)
    if outcome is not None:
        said.insert(0, f"outcome: {outcome.outcome.value}, step {outcome.step}: {outcome.reason}")
    notice = rundir.notice(generation)
    if notice is not None:
        said.append(f"notice: {', '.join(dict.fromkeys(notice.sources))}")
    return said


def _judge(
    rundir: RunDir, generation: int, code: int, seen: Cause | None, ended: Cause | None
) -> Verdict:
    outcome = rundir.outcome(generation)
    if outcome is None:
        return _judge_by_code(rundir, generation, code, seen, ended)
    if outcome.outcome is Result.SAVED:
        cause = seen or Cause.said(outcome.reason) or Cause.SAVED
        return Verdict(Result.SAVED, cause, outcome.reason)
    if outcome.outcome is Result.FAILED:
        return Verdict(Result.FAILED, seen or Cause.CRASHED, outcome.reason)
    if outcome.by_code:
        return _ended_anyway(rundir, generation, ended) or _complete(rundir, generation)
    if rundir.done() is None:
        reason = "it said complete, but the checkpoint that DONE names is not there"
        return Verdict(Result.FAILED, Cause.CRASHED, reason)
    return Verdict(Result.COMPLETE, Cause.COMPLETE, outcome.reason)


def _judge_by_code(
    rundir: RunDir, generation: int, code: int, seen: Cause | None, by: Cause | None
) -> Verdict:
    if code == EXIT_COMPLETE and _used_checkpointer(rundir, generation):
        # It always leaves an outcome: this one was killed behind something that returned 0.
        reason = "the command returned 0, but the program inside it ended without a word"
        return Verdict(Result.FAILED, seen or Cause.KILLED, reason)
    ended = _ended_anyway(rundir, generation, by) if code == EXIT_COMPLETE else None
    if ended is not None:
        return ended
    if code == EXIT_COMPLETE and _earlier_used_checkpointer(rundir, generation):
        # Something like a last `echo finished` hides that the program did not get that far.
        reason = "the command returned 0, but it did not go on from its checkpoints"
        return Verdict(Result.FAILED, seen or Cause.CRASHED, reason)
    if code == EXIT_COMPLETE:
        return _complete(rundir, generation)
    if code == EXIT_SAVED:
        return Verdict(Result.SAVED, seen or Cause.SAVED, f"exit code {code}", by_code=True)
    number = -code if code < 0 else code - 128
    if number in {member.value for member in signal.Signals}:
        name = signal.Signals(number).name
        return Verdict(Result.FAILED, seen or Cause.KILLED, f"killed by {name}")
    return Verdict(Result.FAILED, seen or Cause.CRASHED, f"exit code {code}")


def _ended_anyway(rundir: RunDir, generation: int, by: Cause | None) -> Verdict | None:
    """Where exit code 0 alone does not mean that the work is complete."""
    if by is not None and by in _ENDED_BY_SLURM:
        reason = f"the command returned 0, but it was ended: {by.value}"
        return Verdict(Result.FAILED, by, reason)
    noticed = rundir.notice(generation) is not None
    if by is Cause.STOPPED or (by is Cause.HALTED and noticed):
        reason = "exit code 0 once it was asked to stop, which says nothing of the work"
        return Verdict(Result.SAVED, by, reason, by_code=True)
    return None


def _complete(rundir: RunDir, generation: int) -> Verdict:
    if rundir.done() is None:
        rundir.write_done(Done(generation, None))
    return Verdict(Result.COMPLETE, Cause.COMPLETE, "exit code 0")


def _used_checkpointer(rundir: RunDir, generation: int) -> bool:
    """By that link's present command: what an earlier one wrote is older than its phase."""
    begun = _modified(rundir.phase_file)
    return any(_modified(p) > begun for p in rundir.events.glob(f"{generation:08d}-*.jsonl"))


def _earlier_used_checkpointer(rundir: RunDir, generation: int) -> bool:
    """Whether an earlier link of the present command committed checkpoints that are there."""
    links = {key.generation for key in rundir.committed() if key.generation < generation}
    return any(_used_checkpointer(rundir, link) for link in links)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


# ── a link that could not say it itself ───────────────────────────────────────────────────
def explain(
    rundir: RunDir, generation: int, ask: Callable[[Holder, bool], JobRecord], batch: Path
) -> Verdict | None:
    """How an earlier link ended that left no record of it; None where it did leave one. `ask` is
    told whether a cause is known already, and an answer not worth waiting for."""
    records = list(events.read(rundir.ledger_file(generation)))
    started = [r for r in records if r["event"] == Event.LINK_STARTED.value]
    if not started or any(r["event"] == Event.LINK_ENDED.value for r in records):
        return None
    holder = lease.holder_of(rundir, generation) or Holder()
    since = float(started[-1]["time"])
    texts = [evidence.tail(path) for path in (batch, rundir.log_file(generation))]
    noticed = _noticed(records)
    in_logs = [finding for text in texts for finding in evidence.in_log(text, since)]
    record = ask(holder, evidence.strongest([*noticed, *in_logs]) is not None)
    findings = [*noticed, *_by_scheduler(record), *in_logs]
    cause = evidence.strongest(findings)
    said = [finding.said for finding in findings if finding.said]
    of_the_job = any(evidence.in_log(text, since, steps=False) for text in texts)
    if cause is Cause.REQUEUED and not (of_the_job or any(f.cause for f in [*noticed, *in_logs])):
        # Whatever else puts a job back into the queue sends TERM first, and slurmstepd tells of it.
        cause = Cause.NODE_FAILURE
        said.append("put back into the queue without a signal to its job: its node failed")
    return Verdict(
        Result.FAILED, cause or Cause.LOST, "it left no record of its end",
        evidence=tuple(dict.fromkeys(said)), ended=record.end,
    )  # fmt: skip


def _noticed(records: Iterable[dict[str, object]]) -> list[Finding]:
    """What the scheduler had said to it before it was killed."""
    found = []
    for record in records:
        if record["event"] == Event.LINK_NOTICED.value:
            cause = record.get("cause")
            known = Cause(cause) if cause in {member.value for member in Cause} else None
            found.append(Finding(known, str(record.get("said") or "")))
    return found[::-1]


def _by_scheduler(record: JobRecord) -> list[Finding]:
    return [Finding(record.cause, record.said, record.certain)] if record.said else []
