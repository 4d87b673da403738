"""A throw-away real Slurm on one machine: the library the tests use, and the command.

    python devcluster.py up [DIR]      start slurmctld, four slurmd, partitions gpu and lowpriority
    python devcluster.py status [DIR]
    eval "$(python devcluster.py env [DIR])"
    python devcluster.py down [DIR]

Everything a cluster has (munge key, ports, state, logs) is its own, so several run side by side.
This file is the command and the list of public names; devcluster_daemons.py does the work.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from devcluster_conf import DevClusterError, Layout, MissingPackages, Options, Proctrack, Refused
from devcluster_daemons import DevCluster
from devcluster_procs import Member, members
from devcluster_setup import find_programs

__all__ = [
    "DevCluster",
    "DevClusterError",
    "Layout",
    "Member",
    "MissingPackages",
    "Options",
    "Proctrack",
    "Refused",
    "find_programs",
    "members",
]

DEFAULT_DIRECTORY = Path(__file__).resolve().parents[2] / ".make" / "slurm"


def _command(verb: str, directory: Path) -> str:
    return shlex.join(["python", str(Path(__file__)), verb, str(directory)])


def _up(arguments: argparse.Namespace) -> int:
    options = Options(
        proctrack=Proctrack(arguments.proctrack),
        tick_s=arguments.tick,
        nodes=arguments.nodes,
        grace_s=arguments.grace,
        kill_wait_s=arguments.kill_wait,
        send_user_signal=arguments.send_user_signal,
        accounting=arguments.accounting,
    )
    began = time.monotonic()
    cluster = DevCluster.start(arguments.directory, options=options)
    layout = cluster.layout
    print(f"up in {time.monotonic() - began:.1f} s: {len(cluster.nodes)} nodes idle")
    print(f"process tracking: {layout.proctrack.value} ({layout.reason})")
    print(f'use it:   eval "$({_command("env", cluster.directory)})" && sinfo')
    print(f"stop it:  {_command('down', cluster.directory)}")
    return 0


def _down(arguments: argparse.Namespace) -> int:
    directory = arguments.directory.resolve()
    layout = Layout.load(directory)
    if layout is None:
        print(f"nothing to stop: no devcluster in {directory}")
        return 0
    DevCluster(directory, layout).stop()
    print(f"down: {directory} (logs are kept in {directory}/log)")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    cluster = DevCluster.open(arguments.directory)
    if cluster is None:
        print(f"down: {arguments.directory.resolve()}")
        return 1
    layout = cluster.layout
    print(f"up: {cluster.directory}, ports from {layout.port}")
    print(f"process tracking: {layout.proctrack.value} ({layout.reason})")
    for name, state in cluster.node_states().items():
        print(f"{name}: {state}")
    for member in members(layout):
        print(f"pid {member.pid}: {member.name} {member.node or ''}".rstrip())
    return 0


def _env(arguments: argparse.Namespace) -> int:
    cluster = DevCluster.open(arguments.directory)
    if cluster is None:
        raise Refused(
            f"no devcluster is up in {arguments.directory.resolve()}. "
            f"Start it: {_command('up', arguments.directory)}"
        )
    print(f"export SLURM_CONF={shlex.quote(str(cluster.layout.conf))}")
    return 0


def _parser() -> argparse.ArgumentParser:
    default = Options()
    parser = argparse.ArgumentParser(description="A throw-away real Slurm on one machine.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for action, text in (
        (_up, "start a cluster and wait until its nodes are idle"),
        (_down, "end it and all its jobs; harmless if it is not up"),
        (_status, "say what runs; exit code 1 if nothing does"),
        (_env, "print what a shell has to evaluate to use it"),
    ):
        verb = verbs.add_parser(action.__name__.removeprefix("_"), help=text)
        verb.add_argument("directory", nargs="?", type=Path, default=DEFAULT_DIRECTORY)
        verb.set_defaults(action=action)
    up = verbs.choices["up"]
    up.add_argument("--proctrack", choices=[kind.value for kind in Proctrack], default="auto")
    up.add_argument("--tick", type=int, default=default.tick_s, help="seconds between limit checks")
    up.add_argument("--nodes", type=int, default=default.nodes)
    up.add_argument("--grace", type=int, default=default.grace_s, help="seconds of notice")
    up.add_argument("--kill-wait", type=int, default=default.kill_wait_s, help="TERM to KILL, s")
    up.add_argument("--send-user-signal", action="store_true", help="--signal at preemption too")
    up.add_argument("--accounting", action="store_true", help="sacct works; takes three seconds")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        action: Callable[[argparse.Namespace], int] = arguments.action
        return action(arguments)
    except DevClusterError as error:
        print(f"devcluster: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `status | head` ends quietly
    sys.exit(main())
