"""Programs that start another one: which word of a call is that one, and where it will run."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .binaries import LAUNCHERS, MPI_LAUNCHERS

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_SCRIPT = re.compile(r"(?:\.{1,2}|~|\$\w+|\$\{\w+\})/.*|.*\.(?:sh|bash|py|pl|R)", re.DOTALL)
_OF_THE_SYSTEM = ("/bin/", "/sbin/", "/usr/")


@dataclass(frozen=True)
class Starter:
    """Its own words, before those of the program that it starts."""

    takes: frozenset[str] = frozenset()
    """Options with a value behind them; of others it is not known."""
    flags: frozenset[str] = frozenset()
    """Options without one."""
    words: int = 0
    """How many that are no options: a limit of time, a container."""
    places: tuple[str, ...] = ()
    """Options for another directory. Others mean something else by the same letter."""


def _starter(takes: str = "", flags: str = "", words: int = 0, places: str = "") -> Starter:
    taken = frozenset((*takes.split(), *places.split()))
    return Starter(taken, frozenset(flags.split()), words, tuple(places.split()))


_MPI = _starter(
    "-np -n -c -N -H -f -x -A -host --host -hosts -hostfile --hostfile -machinefile --machinefile "
    "-npernode --npernode -ppn -perhost -map-by --map-by -bind-to --bind-to -rank-by --rank-by "
    "-rf --rankfile -prefix --prefix -app --app -tune --tune -path --path -timeout --timeout "
    "-output-filename --output-filename -configfile -genvlist -envlist -launcher -bootstrap -rmk",
    "-v -V -q -l --oversubscribe -oversubscribe --allow-run-as-root --report-bindings "
    "-report-bindings --use-hwthread-cpus --tag-output -tag-output --display-map -prepend-rank",
    places="-wdir --wdir -wd --wd",
)
_SRUN = _starter(
    "-A -B -C -d -e -i -J -L -m -M -n -N -o -p -q -r -S -t -T -w -x -G -c --account --job-name "
    "--partition --output --error --input --nodelist --exclude --constraint --reservation --qos "
    "--ntasks --nodes --cpus-per-task --ntasks-per-node --time --mem --gres --gpus --export --mpi "
    "--cpu-bind --gpu-bind --mem-bind --distribution --licenses --jobid --het-group --dependency",
    "-l -u -v -vv -Q -K -s -O -k -H -E -I -X --label --unbuffered --exclusive --overlap --exact "
    "--pty --overcommit --kill-on-bad-exit --quiet --verbose",
    places="-D --chdir",
)
_CONTAINER = _starter(
    "-B --bind --env --env-file -H --home --overlay -o -W --workdir -S --scratch --mount --app "
    "--network --dns --hostname --security",
    "--nv --rocm -e --cleanenv -c --contain -C --containall -f --fakeroot --no-home -w --writable "
    "--writable-tmpfs --compat -i --ipc -p --pid -u --userns --uts --net -s -q -d -v --unsquash",
    2,
    "--pwd --cwd",
)
_CONDA = _starter(
    "-n --name -p --prefix -r --root-prefix -e --env -a --attach",
    "--no-capture-output --live-stream -v -vv --dev --debug-wrapper-scripts",
    1,
    "--cwd",
)
_PYTHON = _starter("-W -X -c", "-m -u -O -OO -B -s -S -E -I -v -q -b -d -i -x")
_STARTERS: Mapping[str, Starter] = {
    **dict.fromkeys(LAUNCHERS, _starter("-n -N -d -c -p -r -a -g -b -o")),
    **dict.fromkeys((*MPI_LAUNCHERS, "mpiexec_mpt", "mpirun_rsh", "ccc_mprun"), _MPI),
    "srun": _SRUN,
    "jsrun": _starter("-n -r -a -c -g -b -d -l -p -o -E", places="--chdir"),
    "flux": _starter("-n -N -c -g -t -o", words=1, places="--cwd"),
    "env": _starter("-u --unset", "-i - -0 --ignore-environment -v", places="-C --chdir"),
    "nice": _starter("-n --adjustment"),
    "ionice": _starter("-c -n --class --classdata", "-t"),
    "time": _starter("-f -o --format --output", "-v -p -a --verbose"),
    "timeout": _starter("-k -s --kill-after --signal", "--foreground --preserve-status -v", 1),
    "taskset": _starter(flags="-c -a -p -ac --cpu-list --all-tasks", words=1),
    "numactl": _starter(
        "-i -m -N -C -p --interleave --membind --cpunodebind --physcpubind --preferred",
        "-l -s -a --localalloc --all",
    ),
    "chrt": _starter("-T -P -D", "-b -f -i -o -r -d -a -v", 1),
    "stdbuf": _starter("-i -o -e"),
    "sudo": _starter("-u -g --user --group", "-E -n -H --preserve-env"),
    "flock": _starter("-w -E", "-n -x -s -e -o -u", 1),
    "likwid-pin": _starter("-c -s -d"),
    "likwid-mpirun": _starter("-np -n -nperdomain -pin -g -mpi"),
    "strace": _starter("-o -e -s -p -u", "-f -ff -c -t -tt"),
    **dict.fromkeys(
        ("nohup", "setsid", "exec", "command", "unbuffer", "chronic", "uvx"), _starter()
    ),
    **dict.fromkeys(
        ("ccmrun", "valgrind", "catchsegv", "shifter", "charmrun", "xvfb-run"), _starter()
    ),
    **dict.fromkeys(
        ("perf", "nsys", "poetry", "pixi", "uv", "pipenv", "pipx", "hatch"), _starter(words=1)
    ),
    **dict.fromkeys(("apptainer", "singularity"), _CONTAINER),
    **dict.fromkeys(("conda", "mamba", "micromamba"), _CONDA),
}
_OF_TWO = frozenset(("-genv", "-env", "--mca", "-mca", "-gmca", "--gmca", "--prtemca", "--pmixmca"))
"""Options with two values."""


def is_called(texts: Sequence[str], at: int) -> bool:
    """Whether a word is a program that is run, and neither an argument nor an option's value."""
    begin = next((n for n, text in enumerate(texts) if not _ASSIGNMENT.fullmatch(text)), 0)
    return _leads(texts, begin, at, "")


def _leads(texts: Sequence[str], here: int, at: int, by: str) -> bool:
    """Whether what is run here, by a starter, starts that word in the end."""
    if here >= at:
        return here == at
    name, starter = _known(texts[here])
    if starter is None:
        return _is_wrapper(texts, here, at, by)
    sure = doubtful = 0
    for place, is_value in _arguments(texts, here + 1, at, starter):
        fits = sure <= starter.words <= sure + doubtful
        known = place == at or _known(texts[place])[1] is not None
        if fits and known and _leads(texts, place, at, name):
            return True
        doubtful += is_value
        sure += not is_value
        if sure > starter.words:
            return _is_wrapper(texts, place, at, name)
    return False


def _arguments(
    texts: Sequence[str], begin: int, at: int, starter: Starter
) -> Iterator[tuple[int, bool]]:
    """Words that are no options and surely no values; and whether they may be values."""
    place, after_option = begin, False
    while place <= at:
        text = texts[place]
        if text.startswith(("-", "+")):
            place += 2 * (text in _OF_TWO) + (text in starter.takes)
            after_option = "=" not in text and text not in starter.flags | starter.takes | {"--"}
        elif _ASSIGNMENT.fullmatch(text):
            after_option = False
        else:
            yield place, after_option and _SCRIPT.fullmatch(text) is None
            after_option = False
        place += 1


def _is_wrapper(texts: Sequence[str], here: int, at: int, by: str) -> bool:
    """A script of the site or the user, as one that picks a GPU for each task."""
    own = _SCRIPT.fullmatch(texts[here]) is not None
    own = own or (texts[here].startswith("/") and not texts[here].startswith(_OF_THE_SYSTEM))
    if here + 1 != at or not own or _known(by)[1] is _PYTHON:
        return False
    return by in LAUNCHERS or "/" not in texts[at]


def _known(word: str) -> tuple[str, Starter | None]:
    name = PurePosixPath(word).name
    if re.fullmatch(r"python[\d.]*", name):
        return name, _PYTHON
    return name, _STARTERS.get(name)


def gone_by_launcher(lead: Sequence[str], cwd: Path) -> str | None:
    """The option, of the words before a program, that takes it to another directory."""
    for option, place, word in _directories(lead):
        here = (cwd / place).resolve() == cwd.resolve()
        if not here and not _is_bound(place, lead, cwd):
            return f"{option} {place}" if word == option else word
    return None


def _directories(lead: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Option, directory, and the word in which the option stands."""
    places: tuple[str, ...] = ()
    own = 0
    for at, word in enumerate(lead):
        if not word.startswith("-"):
            starter = None if own > 0 else _known(word)[1]
            places = places if starter is None else starter.places
            own = own - 1 if starter is None else starter.words
            continue
        for option in places:
            if word == option:
                yield option, next(iter(lead[at + 1 :]), ""), word
            elif word.startswith(f"{option}="):
                yield option, word.partition("=")[2], word
            elif len(option) == 2 and word.startswith(option):
                yield option, word[2:], word


def _is_bound(place: str, lead: Sequence[str], cwd: Path) -> bool:
    """Whether a container has this directory under that name: --bind $PWD:/data --pwd /data."""
    pairs = (pair.split(":") for word in lead for pair in word.rpartition("=")[2].split(","))
    return any(
        len(pair) > 1 and pair[1] == place and (cwd / pair[0]).resolve() == cwd.resolve()
        for pair in pairs
    )
