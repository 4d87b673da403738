"""DevCluster: starts the daemons of a throw-away Slurm, talks to them, and ends them.

What must exist before the first daemon is made in devcluster_setup.py; which processes are ours is
decided in devcluster_procs.py.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import devcluster_accounting as accounting
import devcluster_procs as procs
import devcluster_setup as setup
from devcluster_conf import STOCK_TICK_S, DevClusterError, Layout, Options, Proctrack, Refused

START_TIMEOUT_S = 30.0
POLL_S = 0.05
FOREIGN_PREFIXES = ("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SCANCEL_")


class DevCluster:
    """A cluster that is up, in a directory of its own."""

    def __init__(self, directory: Path, layout: Layout, options: Options | None = None) -> None:
        self.directory = directory
        self.layout = layout
        self._options = options or Options()

    @classmethod
    def start(cls, directory: Path, *, options: Options | None = None) -> DevCluster:
        """Return when all nodes are idle; on any failure nothing is left running."""
        options = options or Options()
        programs = setup.find_programs(
            with_compiler=options.tick_s < STOCK_TICK_S, with_accounting=options.accounting
        )
        directory = directory.resolve()
        setup.refuse_foreign(directory)
        directory.mkdir(parents=True, exist_ok=True)
        with setup.locked(directory):
            _refuse_if_up(directory)
            *better, last = setup.proctrack_candidates(options.proctrack)
            for proctrack, reason in better:
                with contextlib.suppress(DevClusterError):
                    return _start_with(directory, options, proctrack, reason, programs)
            return _start_with(directory, options, last[0], last[1], programs)

    @classmethod
    def open(cls, directory: Path) -> DevCluster | None:
        """Return the cluster that is up in the directory, or None."""
        directory = directory.resolve()
        layout = Layout.load(directory)
        if layout is None or not procs.members(layout):
            return None
        return cls(directory, layout)

    @property
    def nodes(self) -> list[str]:
        return self.layout.nodes

    @property
    def environment(self) -> dict[str, str]:
        """What a client of this cluster needs, and nothing of a Slurm job we may run in."""
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith(FOREIGN_PREFIXES)
        }
        return {**inherited, "SLURM_CONF": str(self.layout.conf)}

    def run(
        self, *argv: str, check: bool = True, timeout: float = 30
    ) -> subprocess.CompletedProcess[str]:
        """Run a client of this cluster; with check, a failure is an error with its output."""
        command = shlex.join(argv)
        try:
            done = subprocess.run(
                argv,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired as error:
            raise DevClusterError(f"{command}: no answer within {timeout:.0f} s") from error
        if check and done.returncode != 0:
            output = (done.stdout + done.stderr).strip()
            raise DevClusterError(f"{command}: exit code {done.returncode}: {output}")
        return done

    def node_states(self) -> dict[str, str]:
        """Return each node's state in sinfo's words; a trailing * means it does not answer."""
        output = self.run("sinfo", "-h", "-N", "-p", "gpu", "-o", "%N %T").stdout
        return dict(line.split() for line in output.splitlines())

    def kill_node(self, name: str) -> None:
        """End a node as a power cut would: slurmd, its job steps and the jobs, by SIGKILL."""
        self._require_node(name)

        def find() -> list[procs.Member]:
            procs.thaw_cgroups([name])
            return [member for member in procs.members(self.layout) if member.node == name]

        procs.kill(find)

    def kill_slurmd(self, name: str) -> None:
        """End the daemon of a node alone: its jobs live on, and Slurm takes them for dead."""
        self._require_node(name)
        procs.kill(
            lambda: [
                member
                for member in procs.members(self.layout)
                if member.node == name and member.name == "slurmd"
            ]
        )

    def restart_node(self, name: str) -> None:
        """Start the slurmd of a killed node; return when the controller can use it again."""
        self._require_node(name)
        if any(member.node == name for member in procs.members(self.layout)):
            raise Refused(f"{name} still runs: call kill_node({name!r}) first")
        self._start_slurmd(name, setup.find_programs(with_compiler=False))
        self._wait_for_nodes([name], _is_usable)

    def kill_controller(self) -> None:
        """End slurmctld by SIGKILL; jobs and nodes go on without it."""
        procs.kill(lambda: [m for m in procs.members(self.layout) if m.name == "slurmctld"])

    def save_state(self, job: str) -> None:
        """Return when the controller has written down what it knows of a job: it saves with a delay
        of some seconds, and a crash before that loses the job's start."""
        saved = self.layout.job_state
        before = saved.stat().st_mtime_ns if saved.exists() else 0
        self.run("scontrol", "update", f"jobid={job}", "comment=saved")
        deadline = time.monotonic() + START_TIMEOUT_S
        while not saved.exists() or saved.stat().st_mtime_ns <= before:
            if time.monotonic() > deadline:
                raise DevClusterError(f"{saved}: not written again within {START_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)

    def restart_controller(self) -> None:
        """Start slurmctld again with what it had saved; return when it answers."""
        programs = setup.find_programs(with_compiler=self._options.tick_s < STOCK_TICK_S)
        self._start_slurmctld(programs, self._options)
        self._wait_for_nodes(self.nodes, _is_usable)

    def reset(self, *, within_s: float = 30.0) -> None:
        """Cancel every job and bring every node back; return when all is idle, as after start."""
        deadline = time.monotonic() + within_s
        while not self._is_at_rest():
            if time.monotonic() > deadline:
                jobs = self.run("squeue", check=False).stdout.strip()
                raise DevClusterError(
                    f"not idle after {within_s:.0f} s: {self.node_states()}\n{jobs}{self._report()}"
                )
            self._end_jobs()
            self._revive_nodes()
            if time.monotonic() > deadline - within_s / 2:
                self._shake_loose()
            time.sleep(POLL_S)

    def _is_at_rest(self) -> bool:
        jobs = self.run("squeue", "-h", "-o", "%A").stdout.split()
        return not jobs and all(_is_idle(state) for state in self.node_states().values())

    def _end_jobs(self) -> None:
        jobs = sorted(set(self.run("squeue", "-h", "-o", "%A").stdout.split()))
        if jobs:
            self.run("scancel", *jobs, check=False)
            # A job that ignores TERM would live for KillWait more.
            self.run("scancel", "--quiet", "--full", "--signal=KILL", *jobs, check=False)

    def _shake_loose(self) -> None:
        """A job that ended while the controller was away is completing until that asks again."""
        for name, state in self.node_states().items():
            if state.startswith("completing"):
                node = f"nodename={name}"
                self.run("scontrol", "update", node, "state=down", "reason=reset", check=False)

    def _revive_nodes(self) -> None:
        alive = {m.node for m in procs.members(self.layout) if m.name == "slurmd"}
        for name, state in self.node_states().items():
            if name not in alive:
                self.kill_node(name)
                self.restart_node(name)
            elif state.startswith(("down", "drain")):
                self.run("scontrol", "update", f"nodename={name}", "state=resume", check=False)

    def logs(self, *, lines: int = 40) -> dict[str, str]:
        """Return the end of every log by name, also after stop, for reports of failures."""
        tails = {}
        for path in sorted((self.directory / "log").glob("*.log")):
            text = path.read_text(errors="replace")
            tails[path.name.removesuffix(".log")] = "\n".join(text.splitlines()[-lines:])
        return tails

    def stop(self) -> None:
        """End every process of the cluster and its jobs. Logs stay; a second call does nothing."""
        with setup.locked(self.directory):
            self._stop()

    def __enter__(self) -> DevCluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _stop(self) -> None:
        def find() -> list[procs.Member]:
            procs.thaw_cgroups(procs.own_nodes(self.layout))
            return procs.members(self.layout)

        procs.kill(find)
        procs.remove_cgroups(procs.own_nodes(self.layout))
        # Key and database go with the cluster; the link, if any, has its own directory under /tmp.
        for name in ("run", "db"):
            shutil.rmtree(self.directory / name, ignore_errors=True)
        if self.layout.root != self.directory:
            shutil.rmtree(self.layout.root.parent, ignore_errors=True)

    def _launch(self, programs: dict[str, str], options: Options) -> None:
        self._start_munged(programs)
        if options.accounting:
            self._start_accounting(programs)
        self._start_slurmctld(programs, options)
        for name in self.nodes:
            self._start_slurmd(name, programs)
        self._wait_for_nodes(self.nodes, _is_idle)

    def _start_munged(self, programs: dict[str, str]) -> None:
        run = self.layout.root / "run"
        key = run / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        self._daemon(
            programs["munged"],
            "--force",
            f"--key-file={key}",
            f"--socket={self.layout.munge_socket}",
            f"--pid-file={run}/munged.pid",
            f"--seed-file={run}/munged.seed",
            f"--log-file={self.layout.root}/log/munged.log",
        )

    def _start_accounting(self, programs: dict[str, str]) -> None:
        self._daemon(*accounting.install_command(programs, self.layout))
        self._daemon(*accounting.server_command(programs, self.layout))
        self._wait_until("mariadbd", self._database_answers)
        self._daemon(programs["slurmdbd"])
        self._wait_until("slurmdbd", self._accounting_answers)
        self.run("sacctmgr", "-i", "add", "cluster", f"devcluster{self.layout.port}")

    def _database_answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.layout.database_port), timeout=1):
                return True
        except OSError:
            return False

    def _accounting_answers(self) -> bool:
        try:
            done = self.run("sacctmgr", "-n", "list", "cluster", check=False, timeout=5)
        except DevClusterError:  # no answer yet
            return False
        return done.returncode == 0

    def _wait_until(self, daemon: str, answers: Callable[[], bool]) -> None:
        began = time.monotonic()
        while not answers():
            waited_s = time.monotonic() - began
            alive = any(member.name == daemon for member in procs.members(self.layout))
            # A daemon that has only just forked cannot be told from its launcher.
            if waited_s > START_TIMEOUT_S or (waited_s > 2.0 and not alive):
                state = "does not answer" if alive else "died while starting"
                raise DevClusterError(f"{daemon} {state}{self._report()}")
            time.sleep(POLL_S)

    def _start_slurmctld(self, programs: dict[str, str], options: Options) -> None:
        extra = {}
        if options.tick_s < STOCK_TICK_S:
            setup.compile_tick(programs["gcc"], self.layout.tick_library)
            extra = {
                "LD_PRELOAD": str(self.layout.tick_library),
                "DEVCLUSTER_TICK": str(options.tick_s),
            }
        self._daemon(programs["slurmctld"], "-f", str(self.layout.conf), extra=extra)

    def _start_slurmd(self, name: str, programs: dict[str, str]) -> None:
        (self.directory / "spool" / name).mkdir(exist_ok=True)
        self._daemon(programs["slurmd"], "-f", str(self.layout.conf), "-N", name)

    def _daemon(self, *argv: str, extra: dict[str, str] | None = None) -> None:
        """Start a program that goes to the background by itself."""
        log = self.directory / "log" / "start.log"
        with log.open("a") as output:
            done = subprocess.run(
                argv,
                env={**self.environment, **(extra or {})},
                cwd=self.layout.root,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                umask=0o022,
                timeout=START_TIMEOUT_S,
                check=False,
            )
        if done.returncode != 0:
            raise DevClusterError(
                f"{shlex.join(argv)}: exit code {done.returncode}{self._report()}"
            )

    def _wait_for_nodes(self, names: list[str], ready: Callable[[str], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            seen = self.run("sinfo", "-h", "-N", "-p", "gpu", "-o", "%N %T", check=False)
            states = dict(line.split() for line in seen.stdout.splitlines())
            if all(name in states and ready(states[name]) for name in names):
                return
            self._require_daemons(names)
            if time.monotonic() > deadline:
                raise DevClusterError(
                    f"nodes are not ready after {START_TIMEOUT_S:.0f} s: {states} "
                    f"{seen.stderr.strip()}{self._report()}"
                )
            time.sleep(POLL_S)

    def _require_daemons(self, names: list[str]) -> None:
        """A daemon that died explains itself in its log; waiting for it would only take longer."""
        running = procs.members(self.layout)
        alive = {member.name for member in running if member.node is None}
        alive |= {member.node for member in running if member.node and member.name == "slurmd"}
        dead = [name for name in ("munged", "slurmctld", *names) if name not in alive]
        if dead:
            raise DevClusterError(f"died while starting: {', '.join(dead)}{self._report()}")

    def _require_node(self, name: str) -> None:
        if name not in self.nodes:
            raise Refused(f"no node {name!r} here; there are {', '.join(self.nodes)}")

    def _report(self) -> str:
        return "".join(
            f"\n--- {self.directory}/log/{name}.log\n{text}"
            for name, text in self.logs(lines=12).items()
        )


def _is_idle(state: str) -> bool:
    return state == "idle"


def _is_usable(state: str) -> bool:
    return not state.endswith("*") and not state.startswith(("down", "unknown"))


def _start_with(
    directory: Path,
    options: Options,
    proctrack: Proctrack,
    reason: str,
    programs: dict[str, str],
) -> DevCluster:
    with setup.claimed_port() as port:
        layout = Layout(
            root=setup.plain_root(directory),
            port=port,
            node_count=options.nodes,
            proctrack=proctrack,
            reason=reason,
        )
        cluster = DevCluster(directory, layout, options)
        try:
            setup.write_files(layout, options)
            cluster._launch(programs, options)
            if options.proctrack is Proctrack.AUTO and proctrack is Proctrack.CGROUP:
                cluster.run("srun", f"-N{options.nodes}", "-t1", "true")
                cluster._wait_for_nodes(cluster.nodes, _is_idle)
        except BaseException:
            cluster._stop()
            raise
    return cluster


def _refuse_if_up(directory: Path) -> None:
    layout = Layout.load(directory)
    running = procs.members(layout) if layout else []
    if running:
        raise Refused(
            f"{directory}: a devcluster is already up here ({len(running)} processes, "
            f"for example {running[0].name} {running[0].pid}). "
            f"Use it, or stop it first: devcluster.py down {shlex.quote(str(directory))}"
        )
