"""An existing batch script becomes a chain: a spec, and the body as a script of its own.

Pure: text in, result out. Options that a spec has become keys of it, the others stay as they
are; what cannot be together with a chain is replaced or refused, and each time it is said why.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import yaml

from ..errors import SpecError
from ..settings import parse_signal
from ..units import expand_nodes, parse_array, parse_duration
from .conflicts import TWO_OWNERS, Fate, Remark, calls, find_conflicts, trapped
from .demands import Demands, demands_of
from .directives import Directive
from .render import sbatch_line
from .sbatchfile import NOT_IN_A_CHAIN, OF_THE_SUBMISSION, BatchScript, Given, read_script
from .spec import MOST_LINKS, job_name

MOST_HOSTS = 500
"""A longer list of excluded hosts stays written as ranges."""
SAME_KEY = ("account", "qos", "constraint", "reservation")
_NO_LIMIT = frozenset({"0", "-1", "infinite", "unlimited"})
_LAUNCHERS = r"srun|mpirun|mpiexec|orterun"
_MODULES = (
    "# A job that starts without the shell's variables may have no `module` yet.",
    "if ! command -v module >/dev/null 2>&1; then",
    "    for init in modules lmod z00_lmod; do",
    '        if [ -r "/etc/profile.d/$init.sh" ]; then . "/etc/profile.d/$init.sh"; fi',
    "    done",
    "fi",
)


@dataclass(frozen=True)
class Adopted:
    """What a batch script becomes."""

    spec: dict[str, Any]
    script: str
    """Text of the script that every link runs."""
    remarks: tuple[Remark, ...]

    def spec_text(self, source: str) -> str:
        """The spec as a file for people."""
        head = f"# From {source} by 'hpc-ckpt adopt'; edit it as you like.\n"
        return head + yaml.safe_dump(
            self.spec, sort_keys=False, allow_unicode=True, default_flow_style=None, width=96
        )


def script_file(source: PurePath) -> str:
    """The file name of the body's own script: train.chain.sh for train.sbatch."""
    return f"{source.stem}.chain.sh"


def adopt(text: str, *, source: str, script: str) -> Adopted:
    """What `text` becomes; `source` is its file, `script` the path its body will have.

    SpecError names the first thing that cannot be part of a chain.
    """
    return _Adoption(read_script(text, source), source).result(script)


class _Adoption:
    """One script on its way: the spec grows, and the remarks with it."""

    def __init__(self, batch: BatchScript, source: str) -> None:
        self._batch = batch
        self._source = source
        self._last = {given.name: given for given in batch.options}
        """Of an option that is there twice the last one counts."""
        self._spec: dict[str, Any] = {}
        self._chain: dict[str, Any] = {}
        self._kept: list[str] = []
        self._remarks: list[Remark] = []
        self._set_up: list[str] = []
        """Lines that come before the body."""

    def result(self, script: str) -> Adopted:
        # Everything after it: what a script means by "one" of something depends on these.
        demands = demands_of(self._last, self._refuse)
        for given in self._batch.options:
            self._take(given)
        self._remarks += demands.remarks
        self._kept = [*demands.kept, *self._kept]
        self._surroundings(demands)
        self._remarks += find_conflicts(self._batch.body, PurePath(self._source).name)
        self._remarks.sort(key=lambda remark: remark.line)
        return Adopted(self._whole(script, demands), self._script(), tuple(self._remarks))

    def _whole(self, script: str, demands: Demands) -> dict[str, Any]:
        """In the order in which people read it."""
        name = self._spec.pop("name", job_name(PurePath(self._source).stem))
        spec = {
            "name": name,
            "command": [*self._batch.shell, script],
            "root": f"runs/{name}",
            **self._spec,
            "resources": demands.resources,
            "chain": self._chain,
            "sbatch": self._kept,
        }
        return {key: value for key, value in spec.items() if value not in ({}, [])}

    def _script(self) -> str:
        head = [
            self._batch.shebang,
            f"# The body of {self._source}, by 'hpc-ckpt adopt'. Every link runs it from here on.",
            "# It must end with exit code 0 when the work is complete, 75 when it was saved and",
            "# is to go on in the next link; anything else is a failure.",
        ]
        body = [line.text for line in self._batch.body]
        return "\n".join([*head, *self._set_up, *body]) + "\n"

    # ── options ───────────────────────────────────────────────────────────────────────────
    def _take(self, given: Given) -> None:
        if self._last[given.name] is not given:
            self._say(given, Fate.LEFT_OUT, f"said again in line {self._last[given.name].line}")
        elif given.name in _RULES:
            _RULES[given.name](self, given)
        elif given.name in SAME_KEY:
            self._taken(given, given.name, given.value)
        elif given.name in OF_THE_SUBMISSION:
            self._say(given, Fate.LEFT_OUT, NOT_IN_A_CHAIN[given.name])
        elif given.name not in Demands.NAMES:
            self._keep(given)

    def _taken(self, given: Given, key: str, value: object) -> None:
        self._spec[key] = value
        self._say(given, Fate.TAKEN, f"{key}: {_shown(value)}")

    def _keep(self, given: Given, why: str = "as it is") -> None:
        self._kept.append(sbatch_line(Directive(f"--{given.name}", given.value)))
        self._say(given, Fate.KEPT, why)

    def _say(self, given: Given, fate: Fate, why: str) -> None:
        self._remarks.append(Remark(given.line, str(given), fate, why))

    def _refuse(self, given: Given, why: str) -> SpecError:
        return SpecError(f"{self._source}:{given.line}: {given}: {why}")

    def _job_name(self, given: Given) -> None:
        name = job_name(given.value or "")
        self._spec["name"] = name
        short = "" if name == given.value else ", letters that a name may have"
        self._say(given, Fate.TAKEN, f"name: {name}{short}")

    def _partition(self, given: Given) -> None:
        self._taken(given, "partition", [name for name in (given.value or "").split(",") if name])

    def _time(self, given: Given) -> None:
        key = "link_time" if given.name == "time" else "min_time"
        duration = self._minutes(given)
        if duration is None:
            self._say(given, Fate.LEFT_OUT, "no limit: the profile and the partition decide")
            return
        self._chain[key] = duration
        self._say(given, Fate.TAKEN, f"chain.{key}: {duration}")

    def _minutes(self, given: Given) -> str | None:
        """Slurm's bare number is minutes, ours is seconds."""
        written = (given.value or "").strip()
        if written.lower() in _NO_LIMIT:
            return None
        duration = f"{written} min" if written.isdecimal() else written
        try:
            parse_duration(duration)
        except SpecError as error:
            raise self._refuse(given, str(error)) from None
        return duration

    def _exclude(self, given: Given) -> None:
        value = given.value or ""
        hosts = [] if "/" in value else expand_nodes(value)
        if 0 < len(hosts) <= MOST_HOSTS:
            self._taken(given, "exclude", hosts)
        else:
            self._keep(given)

    def _mail_user(self, given: Given) -> None:
        kinds = self._last.get("mail-type")
        if kinds is not None and (kinds.value or "").upper() == "NONE":
            self._say(given, Fate.LEFT_OUT, "--mail-type=NONE: no mail was wanted")
        else:
            self._taken(given, "mail", given.value)

    def _mail_type(self, given: Given) -> None:
        user = "" if "mail-user" in self._last else "; say to whom with 'mail:' in the spec"
        why = f"one mail when the chain ends, not some for every link{user}"
        self._say(given, Fate.REPLACED, why)

    def _array(self, given: Given) -> None:
        try:
            indices, at_once = parse_array(given.value or "")
        except SpecError as error:
            raise self._refuse(given, str(error)) from None
        if at_once != 1 and len(indices) > 1:
            raise self._refuse(
                given,
                f"{len(indices)} tasks side by side are a sweep, and adopt makes one chain. For a "
                "chain of each: adopt it without --array, then write members: {task: [1, 2, 3]} "
                "into the spec and SLURM_ARRAY_TASK_ID={task} before its command",
            )
        self._chain["max_links"] = min(len(indices), MOST_LINKS)
        self._say(
            given,
            Fate.REPLACED,
            f"the chain has an array of its own, which ends when the work is complete; "
            f"chain.max_links: {self._chain['max_links']}",
        )

    def _output(self, given: Given) -> None:
        self._say(given, Fate.REPLACED, NOT_IN_A_CHAIN["error"])

    def _open_mode(self, given: Given) -> None:
        self._say(given, Fate.REPLACED, "always append: a requeue would empty the log")

    def _requeue(self, given: Given) -> None:
        why = "the profile decides; a link that comes back goes on from the newest checkpoint"
        self._say(given, Fate.REPLACED, why)

    def _dependency(self, given: Given) -> None:
        if given.value == "singleton":
            self._say(given, Fate.REPLACED, "links follow one another by themselves")
            return
        self._keep(
            given,
            "for the first link; those after it wait for the link before. It names a job of this "
            "moment: take it out of sbatch: before a submission of later",
        )

    def _export(self, given: Given) -> None:
        """The chain's jobs start without the variables of the shell that submits them."""
        for item in re.findall(r"(?:[^,'\"]|'[^']*'|\"[^\"]*\")+", given.value or ""):
            name, equals, value = item.partition("=")
            if equals:
                self._set_up.append(f"export {name}={shlex.quote(value.strip(chr(34) + chr(39)))}")
            elif name.upper() not in ("ALL", "NONE", "NIL"):
                why = f"{name} is not passed on: write 'export {name}=…' into the new script"
                self._remarks.append(Remark(given.line, str(given), Fate.LOOK, why))
        why = (
            "always NONE, so that a chain does not depend on a shell; the Python environment that "
            "is active at submission is activated again"
        )
        self._say(given, Fate.REPLACED, why)

    def _chdir(self, given: Given) -> None:
        self._set_up.append(f"cd -- {shlex.quote(given.value or '.')} || exit 1")
        self._say(given, Fate.REPLACED, "the new script begins with a cd; submit from here")

    def _input(self, given: Given) -> None:
        value = given.value or ""
        if "%" in value:
            raise self._refuse(given, "a name with % is Slurm's to fill; redirect in the script")
        self._set_up.append(f"exec <{shlex.quote(value)}")
        self._say(given, Fate.REPLACED, "the new script begins by opening it")

    def _refused(self, given: Given) -> None:
        raise self._refuse(given, NOT_IN_A_CHAIN[given.name])

    # ── signals ───────────────────────────────────────────────────────────────────────────
    def _signal(self, given: Given) -> None:
        """A trap of the batch shell can have its signal still; nothing else hears one."""
        match = re.fullmatch(r"(?:([RB]+):)?(\w+)(?:@(\d+))?", given.value or "")
        if match is None:
            raise self._refuse(given, "not a signal; write USR1@120")
        name = self._signal_name(given, match[2])
        traps = {each for _, signals in trapped(self._batch.body) for each in signals}
        owners = {remark.why for remark in find_conflicts(self._batch.body, self._source)}
        ours = "the profile's --signal reaches the runner, which asks the program to save"
        if "B" in (match[1] or "") and name in traps and TWO_OWNERS not in owners:
            self._spec["forward"] = {"signal": name, "to": "command"}
            ours += f"; forward: the script's own trap gets {name} then"
        self._say(given, Fate.REPLACED, ours)

    def _signal_name(self, given: Given, written: str) -> str:
        try:
            known = signal.Signals(int(written)) if written.isdecimal() else parse_signal(written)
        except (ValueError, SpecError):
            raise self._refuse(given, "not a signal; write USR1@120") from None
        return known.name.removeprefix("SIG")

    # ── what a body finds around it ───────────────────────────────────────────────────────
    def _surroundings(self, demands: Demands) -> None:
        """It runs inside a step, and without the variables and functions of a login shell."""
        if calls(self._batch.body, "module|ml"):
            self._set_up += _MODULES
        if calls(self._batch.body, _LAUNCHERS):
            self._set_up += [
                "# Inside the chain's one step: the steps of an srun share what it has.",
                "export SLURM_OVERLAP=1 SLURM_MEM_PER_NODE=0",
                "unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_DISTRIBUTION",
                "unset SLURM_CPU_BIND SLURM_CPU_BIND_LIST SLURM_CPU_BIND_TYPE",
                "unset SLURM_CPU_BIND_VERBOSE",
            ]
        if demands.tasks > 1:
            tasks, cpus = demands.tasks, demands.cpus_per_task
            self._set_up += [
                f"export SLURM_NTASKS={tasks} SLURM_NPROCS={tasks} SLURM_TASKS_PER_NODE={tasks}",
                f"export SLURM_CPUS_PER_TASK={cpus} SRUN_CPUS_PER_TASK={cpus}",
                f"export OMP_NUM_THREADS={cpus}",
            ]
        for line in calls(self._batch.body, "srun"):
            why = (
                "a step inside the chain's step: the new script sets SLURM_OVERLAP=1 (srun "
                "--overlap), or it would wait for ever. At a preemption its tasks hear TERM "
                'themselves: without a Checkpointer write srun bash "$HPC_CKPT_SHIM" program'
            )
            self._remarks.append(Remark(line.number, "srun", Fate.LOOK, why))


def _shown(value: object) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, list) else str(value)


_RULES: dict[str, Callable[[_Adoption, Given], None]] = {
    "job-name": _Adoption._job_name,
    "partition": _Adoption._partition,
    "time": _Adoption._time,
    "time-min": _Adoption._time,
    "exclude": _Adoption._exclude,
    "mail-user": _Adoption._mail_user,
    "mail-type": _Adoption._mail_type,
    "array": _Adoption._array,
    "output": _Adoption._output,
    "error": _Adoption._output,
    "open-mode": _Adoption._open_mode,
    "requeue": _Adoption._requeue,
    "no-requeue": _Adoption._requeue,
    "dependency": _Adoption._dependency,
    "export": _Adoption._export,
    "export-file": _Adoption._refused,
    "chdir": _Adoption._chdir,
    "input": _Adoption._input,
    "signal": _Adoption._signal,
    "clusters": _Adoption._refused,
    "cluster-constraint": _Adoption._refused,
    "wrap": _Adoption._refused,
}
