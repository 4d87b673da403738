"""What a save costs at each level, for the same programs.

    python -m benchmarks.levels --dmtcp DIR --criu PATH [--runs 3] [--only NAME …] [--into GUIDE]

Size of a restart; the whole save, until every byte has a digest and is on the disk; and going on,
until the program runs again and has what was saved. Medians. At model level a save is in the
background: beside it stands for how long training waits. --into writes the table between the two
marks of docs/guides/choosing-a-level.md, once every row is there.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import argparse
import datetime
import os
import platform
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hpc_ckpt import events
from hpc_ckpt.levels.application import Application
from hpc_ckpt.levels.base import Level, Moment, Work
from hpc_ckpt.levels.criu import Criu
from hpc_ckpt.levels.criu_tool import dotted, version_of
from hpc_ckpt.levels.dmtcp import Dmtcp
from hpc_ckpt.levels.dmtcp_tool import find_tool
from hpc_ckpt.levels.program import Program
from hpc_ckpt.levels.recipe import load_recipes, recipe_of
from hpc_ckpt.levels.restarts import Restart, Restarts
from hpc_ckpt.rundir import RunDir

from .level_programs import MODELS, TITLES, write, write_model

RUN_S = 3.0
"""After it is at work: its memory is then what it needs."""
LONG_S = 120.0
RECIPE = {
    "like": "generic",
    "name": "own",
    "restart": {"files": "restart.dat", "pick": "newest"},
    "save": {"signal": "USR1", "lead": "60s"},
}


HEAD = (
    "| program | dmtcp: size, save, going on | criu: size, save, going on "
    "| application level (its own file on USR1) | model level |\n|---|---|---|---|---|"
)
BEGIN, END = "<!-- benchmarks.levels: begin -->\n", "<!-- benchmarks.levels: end -->\n"


class Measured(NamedTuple):
    size: float
    save_s: float
    resume_s: float
    stall_s: float = 0.0


@contextmanager
def place_of(name: str) -> Iterator[tuple[Path, list[str]]]:
    with tempfile.TemporaryDirectory(prefix="hpc-ckpt-levels-", dir="/var/tmp") as made:
        place = Path(made)
        yield place, write(place, name)


def at_level(name: str, make: Callable[[Path], Level], gone_on: str | None) -> Measured:
    """`gone_on`: the file by which the program says that it has gone on."""
    with place_of(name) as (place, argv):
        scratch, rundir = place / "scratch", RunDir(place / "run")
        scratch.mkdir()
        rundir.create()
        environ = {**os.environ, "OMP_NUM_THREADS": "2"}
        work = Work(argv=tuple(argv), cwd=place, environ=environ, scratch=scratch, kept=rundir.logs)
        level = make(place)
        why = level.probe(work)
        if why is not None:
            raise SystemExit(f"{level.name}: {why}")
        try:
            return _saved_and_gone_on(level, work, rundir, gone_on)
        finally:
            level.close()


def _saved_and_gone_on(level: Level, work: Work, rundir: RunDir, gone_on: str | None) -> Measured:
    start = level.first(work)
    output = start.output or work.cwd / "output"
    program = Program(start.argv, start.cwd, start.environ, output)
    try:
        _wait_for(work.cwd / "at-work", program)
        time.sleep(RUN_S)
        began = time.monotonic()
        restart = _save(level, program, Restarts(rundir))
        save_s = time.monotonic() - began
    finally:
        program.end()
    began = time.monotonic()
    start = level.resume(work, restart.path, restart.facts)
    program = Program(start.argv, start.cwd, start.environ, start.output or output)
    try:
        if gone_on is None:
            level.resumed(program, time.monotonic() + LONG_S)
        else:
            _wait_for(work.cwd / gone_on, program)
        return Measured(restart.size, save_s, time.monotonic() - began)
    finally:
        program.end()


def _wait_for(path: Path, program: Program) -> None:
    until = time.monotonic() + LONG_S
    while not path.exists():
        if program.poll() is not None or time.monotonic() >= until:
            raise SystemExit(f"{path.name} did not come: the program ended with {program.poll()}")
        time.sleep(0.005)


def _save(level: Level, program: Program, restarts: Restarts) -> Restart:
    moment = Moment(until=time.monotonic() + LONG_S, last=level.name != "own")
    with restarts.stage(1) as staging:
        level.ask(program, staging.path, moment)
        saved = level.wait(program, staging.path, moment)
        return staging.commit(
            level=level.name,
            step=saved.step or 1,
            reason="benchmark",
            facts=saved.facts,
            guard=lambda: None,
        )


def by_itself(name: str) -> Measured:
    """With a Checkpointer; going on from the start of the interpreter, as at application level."""
    with place_of(name) as (place, _):
        argv = write_model(place, name)
        started = 0.0
        for wanted in (["save.committed"] * 3, ["restored"]):
            started = time.time()
            child = subprocess.Popen(argv, cwd=place, env={**os.environ, "OMP_NUM_THREADS": "2"})
            while [r["event"] for r in _told(place)].count(wanted[0]) < len(wanted):
                if child.poll() is not None or time.time() > started + LONG_S:
                    child.kill()
                    raise SystemExit(f"{name}: no {wanted[0]}; it ended with {child.poll()}")
                time.sleep(0.1)
            child.send_signal(signal.SIGTERM)
            child.wait()
        told = _told(place)
    saves = [r for r in told if r["event"] == "save.committed"]
    (restored,) = (r for r in told if r["event"] == "restored")
    return Measured(
        statistics.median(r["bytes"] for r in saves),
        statistics.median(r.get("full_s", r["save_s"]) for r in saves),
        float(restored["time"]) - started,
        statistics.median(r["stall_s"] for r in saves),
    )


def _told(place: Path) -> list[dict[str, Any]]:
    return [r for p in sorted((place / "run/events").glob("*.jsonl")) for r in events.read(p)]


def repeated(what: Callable[[], Measured], runs: int) -> Measured:
    found = [what() for _ in range(runs)]
    return Measured(*(statistics.median(column) for column in zip(*found, strict=True)))


def shown(found: Measured) -> str:
    return f"{_size(found.size)}, {found.save_s:.2f} s, {found.resume_s:.2f} s"


def _size(count: float) -> str:
    if count < 1e4:
        return f"{count:.0f} bytes"
    return f"{count / 1e6:.2f} MB" if count < 1e6 else f"{count / 1e6:.0f} MB"


def row(name: str, dmtcp: str, criu: str, runs: int) -> str:
    recipes = load_recipes(Path("/"), {})

    def own(place: Path) -> Level:
        return Application(recipe_of(RECIPE, recipes, place))

    cells = [
        shown(repeated(lambda: at_level(name, lambda _: Dmtcp({"path": dmtcp}), None), runs)),
        shown(repeated(lambda: at_level(name, lambda _: Criu({"path": criu}), None), runs)),
        shown(repeated(lambda: at_level(name, own, "gone-on"), runs)),
        "not applicable",
    ]
    if name in MODELS:
        found = repeated(lambda: by_itself(name), runs)
        cells[-1] = f"{shown(found)}; training waits {1000 * found.stall_s:.0f} ms of the save"
    return f"| {TITLES[name]} | {' | '.join(cells)} |"


def measured_on(dmtcp: str, criu: str, runs: int, load: float) -> str:
    """What the figures belong to."""
    version = version_of(criu, os.environ)
    return (
        f"Medians of {runs}, {datetime.date.today()}: {os.cpu_count()} cores, "
        f"Linux {platform.release()}, DMTCP {find_tool({'path': dmtcp}, os.environ).version} "
        f"without compression, CRIU {dotted(version or (0,))}; load {load:.1f} before, "
        f"{os.getloadavg()[0]:.1f} after (of which these programs are 1 to 2)."
    )


def put_into(guide: Path, text: str) -> None:
    before, begin, rest = guide.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{guide}: {BEGIN.strip()} and {END.strip()} must be there, in this order")
    guide.write_text(f"{before}{BEGIN}{text}{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dmtcp", required=True, help="the directory of dmtcp_launch")
    parser.add_argument("--criu", required=True, help="the path of criu")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--into", type=Path, help="the guide whose table is written anew")
    arguments = parser.parse_args()
    if arguments.into is not None and set(arguments.only) != set(TITLES):
        parser.error("--into: a table of all programs, or none")
    load = os.getloadavg()[0]
    print(HEAD, flush=True)
    rows = []
    for name in arguments.only:
        rows.append(row(name, arguments.dmtcp, arguments.criu, arguments.runs))
        print(rows[-1], flush=True)
    told = measured_on(arguments.dmtcp, arguments.criu, arguments.runs, load)
    print(f"\n{told}")
    if arguments.into is not None:
        put_into(arguments.into, "\n".join([HEAD, *rows, "", told, ""]))


if __name__ == "__main__":
    main()
