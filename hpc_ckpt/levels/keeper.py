"""The keeper: a small process between the steward and a program that CRIU saves.

CRIU does not tell how a restored program ended; its parent learns it, and that is the keeper.
Where it may, it gives the program process ids of its own, which are then free on every node;
everything in there ends with the keeper, and the keeper with the steward. It is never saved.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from . import namespaces
from .program import tree_of

CANNOT = 96
"""Exit code: the program could not be brought back, or the name space not be made."""
NOT_FOUND = 127
"""As a shell says that there is no such command."""
FIRST_PID = 1000
"""Of a program in a name space of its own: above whatever CRIU needs while it restores."""
CRIU_PID = 100
_ORPHANED = signal.SIGPWR
"""Nobody else sends it."""
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def command(*words: str) -> list[str]:
    """How the keeper itself is started."""
    return [sys.executable, "-I", "-m", __name__, *words]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    try:
        if arguments.enter:
            namespaces.enter(arguments.enter)
            return _code(subprocess.run(arguments.argv, check=False).returncode)
        if arguments.namespace:
            namespaces.die_with_parent()
            namespaces.leave_pids()
            return _with_child(arguments)
        namespaces.adopt_orphans()
        signal.signal(_ORPHANED, _end_with_all)
        namespaces.die_with_parent(_ORPHANED)
        return _keep(arguments)
    except OSError as error:
        sys.stderr.write(f"hpc-ckpt: keeper: {error}\n")
        return CANNOT


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="keeper")
    parser.add_argument("--enter", type=int, help="run argv where that process lives")
    parser.add_argument("--namespace", action="store_true", help="process ids of its own")
    parser.add_argument("--ready", type=Path, help="written once the program runs")
    parser.add_argument("--output", type=Path, help="of the program")
    parser.add_argument("--restored", type=int, help="argv restores this process")
    parser.add_argument("--log", type=Path, help="of the restore")
    parser.add_argument("argv", nargs=argparse.REMAINDER)
    found = parser.parse_args(argv)
    if found.argv[:1] == ["--"]:
        del found.argv[0]
    return found


def _with_child(arguments: argparse.Namespace) -> int:
    child = os.fork()
    if child == 0:
        code = CANNOT
        try:
            namespaces.die_with_parent()
            namespaces.mount_proc()
            code = _keep(arguments) if arguments.argv else 0
        except OSError as error:
            sys.stderr.write(f"hpc-ckpt: keeper: {error}\n")
        finally:
            sys.stderr.flush()
            os._exit(code)
    _ignore_signals()
    return _code(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


# ── the program ───────────────────────────────────────────────────────────────────────────
def _keep(arguments: argparse.Namespace) -> int:
    _ignore_signals()
    first = arguments.restored is None
    root = _start(arguments) if first else _restore(arguments)
    if root is None:
        return NOT_FOUND if first else CANNOT
    _tell(arguments.ready, {"pid": root, "namespace": arguments.namespace})
    while True:
        pid, status = os.wait()
        if pid == root:
            _end_rest()
            return _code(os.waitstatus_to_exitcode(status))


def _end_rest() -> None:
    """What the program has left; waited for, as an id is taken until its end was heard of."""
    while rest := tree_of(os.getpid())[1:]:
        for pid in rest:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.wait()


def _end_with_all(*_: object) -> None:
    _end_rest()
    os._exit(CANNOT)


def _start(arguments: argparse.Namespace) -> int | None:
    if arguments.namespace:
        namespaces.next_pid_after(FIRST_PID)
    # Opened here: a file opened outside of the name space of mounts cannot be saved.
    with arguments.output.open("ab") as output, Path(os.devnull).open("rb") as nothing:
        try:
            child = subprocess.Popen(
                arguments.argv,
                stdin=nothing,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_default_signals,  # noqa: PLW1509 - there is one thread
            )
        except OSError as error:
            output.write(f"{arguments.argv[0]}: {error.strerror}\n".encode())
            return None
    child.returncode = 0  # it is waited for here, not by subprocess
    return child.pid


def _restore(arguments: argparse.Namespace) -> int | None:
    if arguments.namespace:
        namespaces.next_pid_after(CRIU_PID)
    with arguments.log.open("ab") as log:
        done = subprocess.run(
            arguments.argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
            preexec_fn=_default_signals,
        )
    return int(arguments.restored) if done.returncode == 0 else None


def _tell(path: Path, record: dict[str, object]) -> None:
    draft = path.with_name(path.name + ".new")
    draft.write_text(json.dumps(record), encoding="ascii")
    draft.replace(path)


def _code(code: int) -> int:
    """The first process of a name space cannot die by a signal: as a shell says it."""
    return 128 - code if code < 0 else code


def _ignore_signals() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)


def _default_signals() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
