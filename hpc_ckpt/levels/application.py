"""Application level: a program's own restart files, by a recipe.

The program writes them, by itself or when asked; here they are collected into the run directory,
generation by generation, and put back before the program goes on. A file that changes while it
is copied, or that is none by the recipe's tests, is not kept.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import EXIT_COMPLETE, EXIT_SAVED
from .addressees import addressees
from .base import (
    Kind,
    Moment,
    NotHere,
    NothingNew,
    NotNow,
    NotThisFile,
    ResumeFailed,
    Saved,
    SaveFailed,
    Start,
    Work,
)
from .collecting import ASIDE, Beginning, Collector, Made, put_all_back
from .evidence import CANNOT_RUN, Evidence, stamp
from .ingredients import Edit, Rewrite, Test
from .invocation import Invocation
from .knowable import why_not_known
from .program import Program
from .recipe import Recipe
from .remaining import is_told, steps_left, why_untold
from .values import Limit, Values, times_left

log = logging.getLogger("hpc_ckpt.steward")

LOOK_EVERY_S = 0.1
SETTLE_S = 0.5
"""Restart files that have not changed for so long are taken to be written."""
RESERVE_S = 1.0
"""Of the time for a last save, for copying what is there."""
WATCH_S = 2.0
"""A program that does not take its restart file ends within about this long."""
COLLECT_S = 5.0
"""For a last save of a program that is asked nothing."""


class Application:
    """One program, by one recipe."""

    kind = Kind.APPLICATION

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.name = recipe.name
        self.lead_s = _lead(recipe)
        self._asked: Mapping[str, Any] | None = None
        self._asked_file: Path | None = None
        self._asked_to_stop = False
        self._limit = Limit()
        self._there: Mapping[str, Any] = {}
        """Restart files before the program began to run in this link."""
        self._untold = False
        """It was to be asked by a signal, and nobody was there to hear it."""
        self._tried_in_place = False
        self._in_place: Path | None = None
        """Newer than anything saved, and gone on from first."""
        self._in_place_ns = 0
        self._from_in_place = False
        """Whether the program is going on from that at present."""
        self._kept: Path | None = None
        """Where that is since a saved one was put in its place."""
        self._tried: list[tuple[Path, Mapping[str, Any]]] = []
        """Restarts that were put back in this link."""
        self._handed: Mapping[str, Any] = {}

    def probe(self, work: Work) -> str | None:
        recipe = self._recipe
        call = recipe.call(work)
        if call is None:
            names = ", ".join(recipe.recognised.programs)
            return (
                f"no word of the command is one of {names}; a recipe of your own with "
                f"'like: {recipe.name}' may name another program under 'recognise'"
            )
        values = Values(recipe, call, work)
        outputs = [values.path(text) for text in recipe.resume.keep]
        why = recipe.why_not_one(call, work) or recipe.why_refused(call, work, outputs)
        if why is not None:
            return why
        why = why_not_known(recipe, values) or recipe.why_not_again(call, work)
        return why or why_untold(recipe, values, Evidence(values, work), work)

    # ── beginning ─────────────────────────────────────────────────────────────────────────
    def first(self, work: Work) -> Start:
        """Not from the beginning where an earlier link, killed before any save, left its files."""
        call = self._open(work)
        begun = Beginning(self.name, work)
        if begun.is_known:
            self._before = begun.results
            name = self._collector.left_since(begun)
            if name is not None:
                log.warning("nothing is saved, but %s is of this chain: goes on from it", name)
                self._collector.seen_then(begun)
                self._handed = self._collector.stamps()
                return self._start(work, call, self._recipe.resume, {"restart": name})
        else:
            self._before = self._final_stamps()
            begun.note(self._collector.stamps(), self._before)
        self._collector.seen_now()
        return self._start(work, call, self._recipe.first, {})

    def resume(self, work: Work, restart: Path, facts: Mapping[str, Any]) -> Start:
        call = self._open(work)
        self._before = dict(facts.get("before") or {})
        name = self._newer_in_place(work, facts)
        self._from_in_place = name is not None
        if name is None:
            try:
                self._collector.put_aside(facts)
                self._keep_in_place(facts)
                name = put_all_back(restart, facts, work.cwd)
            except (OSError, KeyError) as error:
                raise ResumeFailed(f"its files cannot be put back: {error}") from error
            self._tried.append((restart, facts))
        self._collector.seen_now()
        return self._start(work, call, self._recipe.resume, {"restart": name})

    def resumed(self, program: Program, until: float) -> None:
        code = program.wait(min(until, time.monotonic() + WATCH_S))
        if code in CANNOT_RUN:
            raise NotHere(f"the program cannot be run on this node: code {code}")
        if code is not None and code > 0 and code != EXIT_SAVED:
            kind = NotThisFile if self._from_in_place else ResumeFailed
            raise kind(f"the program ended at once with code {code}")

    def _open(self, work: Work) -> Invocation:
        call = self._recipe.call(work)
        if call is None:
            raise ResumeFailed(self.probe(work) or "the command does not fit the recipe")
        self._work = work
        self._values = Values(self._recipe, call, work)
        self._evidence = Evidence(self._values, work)
        self._collector = Collector(self._recipe, self._values, self._evidence, work.cwd)
        self._made = Made(self.name, work)
        self._forget_request()
        return call

    def _start(self, work: Work, call: Invocation, edit: Edit, more: Mapping[str, str]) -> Start:
        known = {**more, **self._limits(work), **self._steps_left(edit, more)}
        for text in edit.keep:
            path = self._values.path(text, known)
            if path is not None and path.is_file():
                path.replace(_free(path))
        for rewrite in edit.write:
            self._rewrite(rewrite, known)
        argv = self._edited(call, edit, known)
        self._limit = Limit.told(edit, known, self._recipe.save.limit_share)
        self._there = self._collector.stamps() if self._limit.seconds else {}
        log.info("runs: %s", " ".join(argv))
        return Start(argv=argv, cwd=work.cwd, environ=work.environ)

    def _limits(self, work: Work) -> dict[str, str]:
        """A program that is asked stops by its own clock only if that was not heard."""
        request = self._recipe.save
        lead_s = request.lead_s / 2 if request.asks else request.lead_s
        return times_left(work, lead_s + work.store_s, request.limit_share)

    def _steps_left(self, edit: Edit, more: Mapping[str, str]) -> dict[str, str]:
        if "restart" not in more or not is_told(edit):
            return {}
        restart = self._work.cwd / more["restart"]
        left = steps_left(self._recipe, self._values, self._evidence, restart)
        return {} if left is None else {"steps_left": str(left)}

    def _edited(self, call: Invocation, edit: Edit, known: Mapping[str, str]) -> tuple[str, ...]:
        if edit.command is not None:
            return self._replaced(edit.command, known)
        for name, text in edit.swap:
            old, new = self._values.get(name), self._values.fill(text, known)
            if old is not None and new is not None:
                call = call.with_swapped(old, new)
        for text in edit.set:
            words = self._values.line(text, known)
            if words is not None:
                call = call.with_option(words)
        call = call.with_words(self._lines(edit.append, known))
        return call.with_first(self._lines(edit.prepend, known)).argv()

    def _lines(self, texts: Sequence[str], known: Mapping[str, str]) -> list[str]:
        """The words of those of which every name is known."""
        lines = (self._values.line(text, known) for text in texts)
        return [word for line in lines if line is not None for word in line]

    def _rewrite(self, rewrite: Rewrite, known: Mapping[str, str]) -> None:
        source = self._values.path(rewrite.source, known)
        target = self._values.path(rewrite.target, known)
        if source is None or target is None or not source.exists():
            return
        if rewrite.once and target in self._made:
            return
        if rewrite.once and os.path.lexists(target):
            spare = _free(target)
            log.warning("%s was there before this chain: it is %s now", target, spare.name)
            target.replace(spare)
        text = source.read_bytes().decode("latin-1")
        for regex, template in rewrite.replace:
            new = self._values.fill(template, known)
            if new is not None:
                text = re.sub(regex, lambda _, new=new: new, text, count=1)  # type: ignore[misc]
        draft = target.with_name(f".{target.name}.hpc-ckpt")
        draft.write_bytes(text.encode("latin-1", "replace"))
        draft.replace(target)
        if rewrite.once:
            self._made.add(target)

    def _replaced(self, command: str | Sequence[str], known: Mapping[str, str]) -> tuple[str, ...]:
        if isinstance(command, str):
            text = self._values.shell(command, known)
            argv = None if text is None else ["bash", "-o", "pipefail", "-c", text]
        else:
            argv = self._values.words(tuple(command), known)
        if argv is None:
            raise ResumeFailed(f"recipe {self.name}: not every name in {command!r} is known")
        return tuple(argv)

    def _newer_in_place(self, work: Work, facts: Mapping[str, Any]) -> str | None:
        """What was written after the last save of a link that was killed: taken, if it is whole.

        Only once in a link: if the program does not take it, the saved ones are next.
        """
        sane = self._recipe.sane
        if self._tried_in_place or sane is None or not sane.finds_the_end:
            return None
        self._tried_in_place = True
        found = self._collector.newer_than(facts)
        if found is not None:
            log.info("%s is newer than what was saved, and whole", found)
            self._in_place = work.cwd / found
            self._in_place_ns = self._in_place.stat().st_mtime_ns
        return found

    def _keep_in_place(self, facts: Mapping[str, Any]) -> None:
        """What is put back would be written over work that nobody has saved."""
        path = self._in_place
        if path is None or self._kept is not None:
            return
        if path.exists() and path in {self._work.cwd / f["path"] for f in facts["files"]}:
            log.warning("kept beside it: %s, which is newer than what was saved", path)
            path.replace(_aside(path))
        kept = _aside(path)  # by put_aside(), or here; another of that name may be of last week
        if not path.exists() and kept.exists() and kept.stat().st_mtime_ns == self._in_place_ns:
            self._kept = kept

    def leave_newest(self) -> None:
        newest = max(self._tried, key=_written_ns, default=None)
        try:
            if self._in_place is not None and self._kept is not None:
                self._kept.replace(self._in_place)
            elif newest is not None and newest is not self._tried[-1]:
                put_all_back(*newest, self._work.cwd)
        except OSError as error:
            log.warning("the newest restart files are not put back: %s", error)

    # ── saving ────────────────────────────────────────────────────────────────────────────
    def ask(self, program: Program, into: Path, moment: Moment) -> None:
        request = self._recipe.save
        self._asked = None
        if program.poll() is not None or not request.asks or (request.stops and not moment.last):
            return
        self._asked = self._collector.stamps()
        self._asked_to_stop = request.stops or moment.last
        if request.signal is not None:
            self._signal(program, request.signal)
        elif request.file is not None:
            self._make_request(request.file, request.text)
        elif request.command is not None:
            argv = self._values.words(request.command, {"pid": str(program.pid)})
            if argv is None or self._evidence.run(argv) != 0:
                raise SaveFailed(f"the command that asks for a save failed: {request.command}")

    def _signal(self, program: Program, number: signal.Signals) -> None:
        names = self._recipe.recognised.programs
        told = addressees(program, names, number, self._work.environ)
        for pid in told:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        self._untold = not told
        if self._untold:
            log.warning(
                "no %s reaches the program: srun has started it on other nodes. What it writes by "
                "itself is collected",
                number.name,
            )

    def wait(self, program: Program, into: Path, moment: Moment) -> Saved:
        began = time.monotonic()
        written = self._wait_written(program, moment)
        waited_s = time.monotonic() - began
        if self._handed and program.poll() and self._handed == self._collector.stamps():
            raise NothingNew("the program ended before it went on from what an earlier link left")
        try:
            collected = self._collector.collect(into, SETTLE_S if program.poll() is None else 0.0)
        except NothingNew as nothing:
            if written or isinstance(nothing, NotNow):
                raise
            raise SaveFailed(
                "asked for its restart files, the program wrote none in time"
            ) from None
        restart = into / collected.stored if collected.stored else None
        progress = self._recipe.progress
        step = None if progress is None else self._evidence.number(progress, restart)
        facts = {**collected.facts(), "before": self._before, "step": step}
        return Saved(step=step, facts=facts, lead_s=self.lead_s, waited_s=waited_s)

    def _wait_written(self, program: Program, moment: Moment) -> bool:
        """Whether what was asked for came, or nothing was asked for."""
        if self._asked is None:
            return True
        # What is written must still be stored; but what is not written is not there to be.
        in_time = moment.until - max(RESERVE_S, moment.store_s)
        promised = time.monotonic() + self._recipe.save.lead_s
        until = max(in_time, min(promised, moment.until - RESERVE_S))
        if not moment.last or self._untold:
            until = min(until, promised)
        changed, since = self._asked, time.monotonic()
        while time.monotonic() < until:
            if program.wait(time.monotonic() + LOOK_EVERY_S) is not None:
                return True
            if self._recipe.save.stops:
                continue
            now = self._collector.stamps()
            if now != changed:
                changed, since = now, time.monotonic()
            elif now != self._asked and time.monotonic() - since >= SETTLE_S:
                return True
        return False

    def _make_request(self, file: str, text: str) -> None:
        path = self._values.path(file)
        if path is None:
            raise SaveFailed(f"save.file: not every name in {file!r} is known")
        draft = path.with_name(f".{path.name}.hpc-ckpt")
        draft.write_text(text + "\n" if text else "", encoding="utf-8")
        draft.replace(path)
        self._asked_file = path

    def _forget_request(self) -> None:
        """A request that nobody took away would stop the next link at once."""
        request = self._recipe.save
        path = None if request.file is None else self._values.path(request.file)
        if path is not None:
            path.unlink(missing_ok=True)

    # ── the end ───────────────────────────────────────────────────────────────────────────
    def is_complete(self, work: Work, code: int) -> bool | None:
        """Code 0 of a program that was asked to end, or told when, says only that it did; but one
        that its own clock cuts ends near its limit, or leaves something to go on from."""
        tests = self._recipe.complete
        shown = [test for test in tests if not _is_code(test)]
        if any(self._evidence.complete(test, code, self._before) for test in shown):
            return True
        by_code = code == EXIT_COMPLETE and len(shown) < len(tests) and not self._asked_to_stop
        cut = self._limit.may_have_ended_it(lambda: self._collector.may_have_left(self._there))
        return None if by_code and not cut else False

    def _final_stamps(self) -> dict[str, Sequence[int]]:
        """Of the files that will show the end, as they were before anything ran."""
        found: dict[str, Sequence[int]] = {}
        for test in self._recipe.complete:
            for path in self._evidence.shown_by(test):
                now = stamp(path)
                if now is not None:
                    found[str(path)] = list(now)
        return found

    def own_failure(self, code: int) -> str | None:
        return None

    def close(self) -> None:
        if self._asked_file is not None:
            self._asked_file.unlink(missing_ok=True)


def _is_code(test: Test) -> bool:
    """Whether it asks for nothing but the exit code."""
    return test.file is None and test.where is None and test.step is None


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ASIDE)


def _written_ns(tried: tuple[Path, Mapping[str, Any]]) -> int:
    return max((int(f["mtime_ns"]) for f in tried[1]["files"] if not f.get("also")), default=0)


def _free(path: Path) -> Path:
    numbered = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    return next(name for name in numbered if not os.path.lexists(name))


def _lead(recipe: Recipe) -> float:
    request = recipe.save
    if request.asks:
        return request.lead_s
    limited = recipe.first.tells_the_time or recipe.resume.tells_the_time
    return request.lead_s / 2 if limited else min(request.lead_s, COLLECT_S)
