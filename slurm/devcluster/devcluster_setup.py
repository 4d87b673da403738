"""What has to be in place before the first daemon of a devcluster starts.

Programs, a directory nobody else uses, a block of free ports, the configuration on disk. Starting
and stopping is done in devcluster.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import devcluster_accounting as accounting
import devcluster_procs as procs
from devcluster_conf import (
    GPUS_PER_NODE,
    PORTS_PER_CLUSTER,
    STATE_FILE,
    STOCK_TICK_S,
    DevClusterError,
    Layout,
    MissingPackages,
    Options,
    Proctrack,
    Refused,
    cgroup_conf,
    gres_conf,
    login_environment,
    mail_script,
    slurm_conf,
)

TICK_SOURCE = Path(__file__).resolve().parent / "tick.c"
# Below the ports the kernel hands out to clients.
FIRST_PORT, LAST_PORT = 17000, 32000
# Sockets live up to 45 bytes below the root and their paths end at 107; and slurm.conf knows
# neither spaces nor quotes.
PLAIN_ROOT = re.compile(r"[A-Za-z0-9/._-]{1,60}")
SUBDIRECTORIES = ("db", "dev", "etc", "lib", "log", "run", "spool", "state")
PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sinfo": "slurm-client",
    "munged": "munge",
    "gcc": "gcc libc6-dev",
}


def proctrack_candidates(wanted: Proctrack) -> list[tuple[Proctrack, str]]:
    """Return what to try, best first, each with the reason a person reads in status."""
    if wanted is not Proctrack.AUTO:
        return [(wanted, "asked for")]
    plugin = procs.usable_cgroup_plugin()
    if plugin is None:
        return [(Proctrack.LINUXPROC, "no cgroup tree of this machine is writable")]
    return [
        (Proctrack.CGROUP, f"a job ran on every node under {plugin}"),
        (Proctrack.LINUXPROC, f"{plugin} is writable, but Slurm could not use it"),
    ]


def find_programs(*, with_compiler: bool, with_accounting: bool = False) -> dict[str, str]:
    """Return the path of each program needed; MissingPackages names what to install."""
    # An ordinary user's PATH often lacks the directories where Debian keeps daemons.
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])
    wanted = {n: package for n, package in PACKAGES.items() if with_compiler or n != "gcc"}
    wanted |= accounting.PACKAGES if with_accounting else {}
    found = {name: shutil.which(name, path=path) for name in wanted}
    missing = {name: wanted[name] for name, place in found.items() if place is None}
    if with_accounting and not _has_database_plugin():
        missing[accounting.PLUGIN] = accounting.PLUGIN_PACKAGE
    if missing:
        packages = " ".join(dict.fromkeys(missing.values()))
        raise MissingPackages(
            f"not installed: {', '.join(missing)}. "
            f"On Debian: apt-get install --no-install-recommends {packages}"
        )
    return {name: place for name, place in found.items() if place is not None}


def _has_database_plugin() -> bool:
    """Only Debian keeps it in a package of its own; elsewhere slurmdbd says what it lacks."""
    places = [place for place in Path("/usr/lib").glob("*/slurm-wlm") if place.is_dir()]
    return not places or any((place / accounting.PLUGIN).exists() for place in places)


def refuse_foreign(directory: Path) -> None:
    """Starting removes what an earlier cluster left, so it must never meet other people's files."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise Refused(f"{directory}: not a directory")
    if any(directory.iterdir()) and not (directory / STATE_FILE).exists():
        raise Refused(f"{directory}: not empty and not a devcluster's; choose a new directory")


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep a second up or down of the same directory out; the kernel frees it if we die."""
    if not directory.exists():
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refused(f"{directory}: being started or stopped by another process") from error
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def claimed_port() -> Iterator[int]:
    """Yield the first port of a free block, ours until the daemons hold it themselves.

    The claim is an abstract socket: it lives in the same network namespace as the ports it stands
    for, and is gone with this process whatever happens to it.
    """
    for port in range(FIRST_PORT, LAST_PORT, PORTS_PER_CLUSTER):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim:
            try:
                claim.bind(f"\0devcluster-{port}")
            except OSError:
                continue
            if all(_is_free(port + offset) for offset in range(PORTS_PER_CLUSTER)):
                yield port
                return
    raise DevClusterError(
        f"no {PORTS_PER_CLUSTER} free ports in a row between {FIRST_PORT} and {LAST_PORT}: "
        "stop clusters that are no longer needed"
    )


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As Slurm does: connections that have just ended do not keep a port busy.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def plain_root(directory: Path) -> Path:
    """Return the directory, or a short link to it if its path is too long or too odd for Slurm."""
    if PLAIN_ROOT.fullmatch(str(directory)):
        return directory
    private = Path(tempfile.mkdtemp(prefix="devcluster-", dir="/tmp"))
    private.chmod(0o755)
    link = private / "root"
    link.symlink_to(directory)
    return link


def write_files(layout: Layout, options: Options) -> None:
    """Replace what an earlier cluster left in the directory by a configuration and empty places."""
    layout.save()
    root = layout.root
    for name in SUBDIRECTORIES:
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).mkdir()
        # Other users may submit too: they read the configuration and connect to munge, whatever
        # our umask is.
        (root / name).chmod(0o755)
    for number in range(GPUS_PER_NODE):
        (root / "dev" / f"nvidia{number}").symlink_to("/dev/null")
    host = socket.gethostname().partition(".")[0]
    lines = accounting.slurm_conf_lines(layout, limits=options.limits) if options.accounting else ""
    layout.conf.write_text(
        slurm_conf(layout, options, host=host, user=_user_name(), accounting=lines)
    )
    (root / "etc" / "gres.conf").write_text(gres_conf(layout))
    plugin = procs.usable_cgroup_plugin() if layout.proctrack is Proctrack.CGROUP else None
    (root / "etc" / "cgroup.conf").write_text(cgroup_conf(plugin or "cgroup/v1"))
    for path in (root / "etc").iterdir():
        path.chmod(0o644)
    mail = root / "etc" / "mail.sh"
    mail.write_text(mail_script(layout))
    mail.chmod(0o755)
    layout.database.chmod(0o700)
    _write_environments(layout)
    if options.accounting:
        _write_accounting(layout)


def _write_environments(layout: Layout) -> None:
    layout.environments.mkdir()
    for one in pwd.getpwall():
        text = login_environment(user=one.pw_name, home=one.pw_dir, shell=one.pw_shell)
        (layout.environments / one.pw_name).write_text(text)


def _write_accounting(layout: Layout) -> None:
    password = secrets.token_hex(16)
    for path, text in (
        (layout.conf.parent / "slurmdbd.conf",
         accounting.slurmdbd_conf(layout, user=_user_name(), password=password)),
        (layout.root / "run" / "grants.sql", accounting.grants(password)),
    ):  # fmt: skip
        path.touch(mode=0o600)
        path.write_text(text)


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container may run us under a number without a name
        return str(os.geteuid())


def compile_tick(compiler: str, library: Path) -> None:
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(TICK_SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DevClusterError(
            f"{shlex.join(command)}: {done.stderr.strip()}\n"
            f"On Debian: apt-get install gcc libc6-dev; or start with --tick {STOCK_TICK_S}"
        )
