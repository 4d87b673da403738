"""Chains on the dev cluster, and what tests do to them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chains_of_programs import kill_all
from devcluster import DevCluster, Proctrack

from hpc_ckpt import events, lease
from hpc_ckpt.chain.ledger import LinkSummary, State, read_status
from hpc_ckpt.chain.past import jobs_of
from hpc_ckpt.format.verify import open_verified, verify
from hpc_ckpt.levels.program import tree_of
from hpc_ckpt.rundir import RunDir

PROGRAM = Path(__file__).parent / "programs" / "train.py"
STEPS_AN_EPOCH = 25
SAVE_EVERY = 20
MOST_LOST = 2 * SAVE_EVERY
"""After a kill: what was made since a save, and during the next one, which was not committed."""
GRACE_S = 10
KILL_WAIT_S = int(os.environ.get("DEVCLUSTER_KILL_WAIT", "5"))
TRACKING = Proctrack(os.environ.get("DEVCLUSTER_PROCTRACK", "auto"))
EVERYBODY_HEARS = TRACKING in (Proctrack.LINUXPROC, Proctrack.PGID)
"""TERM reaches every process of a step, not only the shim: docs/guides/slurm.md, Signals."""


def wait_until(what: Callable[[], object], timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.2)


def note(
    fault: str, happened: str, link: LinkSummary | None = None, lost: int | None = None
) -> None:
    """A row of docs/faults.md, for HPC_CKPT_FAULT_TABLE; `lost` where the program counts steps."""
    target = os.environ.get("HPC_CKPT_FAULT_TABLE")
    if target:
        cause = None if link is None else link.cause
        row = {"fault": fault, "cause": cause, "happened": happened, "lost": lost}
        with Path(target).open("a") as stream:
            stream.write(json.dumps(row) + "\n")


@dataclass
class SubmittedChain:
    """A chain on the cluster, and what a test does to it."""

    cluster: DevCluster
    rundir: RunDir
    array: str

    def release(self, *, minutes: int) -> None:
        """Lower the limit of the held members: Slurm counts whole minutes, tests have seconds."""
        jobs = jobs_of(self.rundir)
        first = jobs.index(self.array) if self.array in jobs else 0
        for job in jobs[first:]:  # those of an earlier submission are over
            self.cluster.run("scontrol", "update", f"jobid={job}", f"timelimit={minutes}")
            self.cluster.run("scontrol", "release", job)

    def link(self, number: int) -> LinkSummary | None:
        links = read_status(self.rundir).links
        return next((link for link in links if link.generation == number), None)

    def wait_for(self, what: Callable[[], object], timeout_s: float = 90.0) -> None:
        end = time.monotonic() + timeout_s
        while not what():
            if time.monotonic() > end:
                raise TimeoutError(self.story())
            time.sleep(0.1)

    def story(self) -> str:
        files = [*self.rundir.ledger.iterdir(), *self.rundir.logs.iterdir()]
        told = "\n".join(f"── {path.name}\n{path.read_text()[-2000:]}" for path in sorted(files))
        return f"{told}\n{self.cluster.run('squeue', '-a').stdout}"

    def wait_for_steps(self, number: int, steps: int) -> None:
        """Until link `number` has made that many steps."""

        def made() -> bool:
            link = self.link(number)
            return link is not None and link.step_now >= link.step_from + steps

        self.wait_for(made)

    def wait_for_end(self, number: int) -> LinkSummary:
        self.wait_for(lambda: (link := self.link(number)) is not None and link.ended is not None)
        link = self.link(number)
        assert link is not None
        return link

    def steps_lost(self, number: int) -> int:
        """What link `number` made and the next one did not go on from, by the program's own count:
        of a program that was killed the events know commits alone."""
        link, following = self.link(number), self.link(number + 1)
        assert link is not None
        kept = link.step_to if following is None else following.step_from
        return int((self.rundir.root.parent / f"reached-{number}").read_text()) - kept

    def job_of(self, number: int) -> str:
        holder = lease.holder_of(self.rundir, number)
        assert holder is not None and holder.job is not None
        return holder.job

    def end_in(self, number: int, seconds: int) -> None:
        """Move the end of a running link, as an operator or a preemption does."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))
        self.cluster.run("scontrol", "update", f"jobid={self.job_of(number)}", f"EndTime={moment}")

    def preempt(self, number: int | None = None) -> None:
        """A job of the higher partition that needs every node, or the one of a link."""
        where = f"-N{len(self.cluster.nodes)}" if number is None else f"-w{self.node_of(number)}"
        wanted = ["sbatch", "-p", "gpu", where, "--exclusive", "-o", "/dev/null", "-t", "5"]
        self.cluster.run(*wanted, "--wrap", "sleep 1")

    def kill_program(self, number: int) -> None:
        """SIGKILL to the training process alone, on its node."""
        log = self.rundir.log_file(number)
        pid = re.search(r"pid (\d+)", log.read_text())
        assert pid is not None
        os.kill(int(pid[1]), signal.SIGKILL)

    def left_in_queue(self) -> list[str]:
        return self.cluster.run("squeue", "-h", "-r", "-o", "%i %T", "-j", self.array,
                                check=False).stdout.split()  # fmt: skip

    @property
    def partition(self) -> str:
        shown = self.cluster.run("scontrol", "-o", "show", "job", self.array).stdout
        found = re.search(r" Partition=(\S+)", shown)
        assert found is not None
        return found[1]

    def requeue(self, number: int) -> None:
        self.cluster.run("scontrol", "requeue", self.job_of(number))

    def scancel(self, number: int) -> None:
        self.cluster.run("scancel", self.job_of(number))

    def node_of(self, number: int) -> str:
        records = events.read(self.rundir.ledger_file(number))
        return str(next(r["node"] for r in records if r["event"] == "link.started"))

    def kill_node_of(self, number: int) -> str:
        """A power cut: slurmd, the job and its step at once."""
        node = self.node_of(number)
        self.cluster.kill_node(node)
        return node

    def wait_for_done(self, timeout_s: float = 150.0) -> None:
        self.wait_for(lambda: self.rundir.done() is not None, timeout_s)

    def wait_for_state(self, state: State, timeout_s: float = 90.0) -> None:
        self.wait_for(lambda: read_status(self.rundir).state is state, timeout_s)

    def waiting(self) -> list[str]:
        """What has not begun of all its jobs."""
        jobs = ",".join(jobs_of(self.rundir))
        asked = ["squeue", "-h", "-r", "-t", "PD", "-o", "%i", "-j", jobs]
        return self.cluster.run(*asked, check=False).stdout.split()

    def ledger(self, name: str) -> list[dict[str, Any]]:
        """Every ledger record of that name, oldest link first."""
        every = (r for g in lease.generations(self.rundir)
                 for r in events.read(self.rundir.ledger_file(g)))  # fmt: skip
        return [record for record in every if record["event"] == name]


PROFILE: dict[str, Any] = {
    "cluster": "dev",
    "partitions": {
        "gpu": {"max_time": "8h", "gpus": []},
        "lowpriority": {"max_time": "24h", "preempt": {"mode": "requeue", "grace": "10s"}},
        "cancel": {"max_time": "24h", "preempt": {"mode": "cancel", "grace": "10s"}},
        "nograce": {"max_time": "24h", "preempt": {"mode": "requeue", "grace": "0s"}},
    },
    "signal": {"name": "USR1", "lead": "10s"},
    "kill_wait": f"{KILL_WAIT_S}s",
}


def layered(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {key for key in above if isinstance(above[key], dict) and key in below}
    return {**below, **above, **{key: layered(below[key], above[key]) for key in both}}


def submit_chain(
    cluster: DevCluster,
    place: Path,
    *arguments: str,
    spec: dict[str, Any] | None = None,
    profile: dict[str, Any] | None = None,
    held: bool = False,
) -> SubmittedChain:
    """`hpc-ckpt submit spec.yaml` as a user would; if held, until release()."""
    more = {"directives": {"extra": ["--hold"]}} if held else {}
    site = layered(layered(PROFILE, more), profile or {})
    (place / "site.yaml").write_text(json.dumps(site))
    wanted = {
        "name": "train",
        "command": [sys.executable, str(PROGRAM), *arguments],
        "root": "run",
        "partition": "lowpriority",
        "chain": {"link_time": "3 min", "max_links": 9},
        "checkpoint": {"policy": f"every {SAVE_EVERY} steps", "keep": {"last": 3}},
    }
    (place / "train.yaml").write_text(json.dumps(layered(wanted, spec or {})))
    done = cli(cluster, place, "submit", "train.yaml", "--profile", "./site.yaml")
    assert 0 == done.returncode, done.stderr
    array = re.search(r"submitted (?:array|job) (\d+)", done.stdout)
    assert array is not None
    return SubmittedChain(cluster, RunDir(place / "run"), array[1])


def cli(cluster: DevCluster, place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpc_ckpt.cli", *words],
        cwd=place,
        env=cluster.environment,
        capture_output=True,
        text=True,
    )


def run_undisturbed(root: Path, epochs: int) -> dict[str, bytes]:
    """Final state of the same program without any interruption."""
    environment = {**os.environ, "HPC_CKPT_ROOT": str(root), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(PROGRAM), str(epochs), "0"], env=environment, check=True)
    return final_state(RunDir(root), epochs)


def final_state(rundir: RunDir, epochs: int) -> dict[str, bytes]:
    """Every leaf of the final checkpoint: model, optimizer state and RNG alike."""
    opened = open_verified(rundir.checkpoints / rundir.committed()[-1].directory_name)
    assert opened.manifest.step == STEPS_AN_EPOCH * epochs
    return {name: bytes(opened.leaf(name)) for name in opened.leaves}


def assert_finished(chain: SubmittedChain, reference: dict[str, bytes], epochs: int) -> None:
    """DONE, nothing left in the queue, all checkpoints valid, the same bytes, one publisher."""
    status = read_status(chain.rundir)
    steps = STEPS_AN_EPOCH * epochs
    assert (State.COMPLETE, steps) == (status.state, status.step)
    done = chain.rundir.done()
    assert done is not None and done.step == steps
    chain.wait_for(lambda: chain.waiting() == [])
    for key in chain.rundir.committed():
        assert [] == verify(chain.rundir.checkpoints / key.directory_name)
    assert_one_publisher(chain.rundir)
    assert_nothing_lost(chain.rundir)
    assert reference == final_state(chain.rundir, epochs)


def commits(rundir: RunDir) -> list[tuple[float, int, int]]:
    """(time, generation, step) of every commit, in the order of time."""
    found = []
    for path in rundir.events.iterdir():
        generation = int(path.name.partition("-")[0])
        found += [
            (float(record["time"]), generation, int(record["step"]))
            for record in events.read(path)
            if record["event"] == "save.committed"
        ]
    return sorted(found)


def recorded(chain: SubmittedChain, name: str) -> list[dict[str, Any]]:
    """Every event of that name from the programs or their stewards, oldest link first."""
    if not chain.rundir.events.is_dir():
        return []
    every = (r for path in sorted(chain.rundir.events.iterdir()) for r in events.read(path))
    return [record for record in every if record["event"] == name]


def kill_steward(chain: SubmittedChain) -> None:
    """SIGKILL to it, the program and its keepers, as the kernel does when memory runs out."""
    found = next(
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if "hpc_ckpt.levels.steward" in _text(path)
        and f"HPC_CKPT_ROOT={chain.rundir.root}\0" in _text(path.with_name("environ"))
    )
    kill_all(tree_of(found))


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def assert_one_publisher(rundir: RunDir) -> None:
    """No generation commits after a newer one has."""
    generations = [generation for _, generation, _ in commits(rundir)]
    assert generations == sorted(generations)


def assert_nothing_lost(rundir: RunDir) -> None:
    """Each link begins where the newest commit before it was."""
    made = commits(rundir)
    for link in read_status(rundir).links[1:]:
        earlier = [step for _, generation, step in made if generation < link.generation]
        assert link.step_from == max(earlier, default=0), (link, earlier[-3:])
