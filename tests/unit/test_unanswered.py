"""An answer of sbatch that is lost makes no second chain on one root."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from links import chain_record
from sweeps import make_sweep

from hpc_ckpt import events
from hpc_ckpt.chain import slurm, unanswered
from hpc_ckpt.chain.allocation import SlurmBackend
from hpc_ckpt.chain.claim import claimed_directory
from hpc_ckpt.chain.orders import MemberOrders, Orders
from hpc_ckpt.chain.past import jobs_of
from hpc_ckpt.chain.succession import Successors
from hpc_ckpt.chain.sweeping import resume_members
from hpc_ckpt.errors import RootError, SchedulerError, Unanswered
from hpc_ckpt.events import EventLog
from hpc_ckpt.rundir import RunDir

LOST = SchedulerError(["sbatch"], 1, "error: Socket timed out on send/recv operation")
KILLED = SchedulerError(["sbatch"], -9, "")
NONSENSE = SchedulerError(["sbatch"], 0, "could not make sense of its answer ''")
REFUSED = SchedulerError(["sbatch"], 1, "error: QOSMaxSubmitJobPerUserLimit")


class Cluster:
    """A queue, and an sbatch that submits although it says otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queue: list[str] = []
        self.asked = 0
        self.mute = False
        self.says: SchedulerError | None = None
        self.arrives = True
        """Whether the submission is carried out."""
        self.submitted = 0
        monkeypatch.setattr(slurm, "submit_script", self.sbatch)
        monkeypatch.setattr(slurm.in_queue, "__defaults__", (self.run,))
        monkeypatch.setitem(unanswered.submit.__kwdefaults__ or {}, "run", self.run)

    def run(self, argv: Sequence[str]) -> str:
        if argv[0] != "squeue":
            return ""
        self.asked += 1
        if self.mute:
            raise SchedulerError(argv, None, "no answer from the scheduler")
        return "".join(f"{line}\n" for line in self.queue)

    def sbatch(self, script: Path, *options: str) -> str:
        self.submitted += 1
        job = f"{900 + self.submitted}"
        arrays = [o.removeprefix("--array=") for o in options if o.startswith("--array=")]
        index = f"_{arrays[0].partition('-')[0].partition('%')[0]}" if arrays else ""
        if self.arrives:
            self.queue.append(f"{job}{index}|PENDING|Dependency|{script}")
        if self.says is not None:
            raise self.says
        return job


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


@pytest.fixture
def rundir(rundir: RunDir) -> RunDir:
    """Whose links may submit others."""
    record = chain_record(jobs=[])
    record["profile"]["chain"] = {"submit_from_compute_nodes": True}
    rundir.chain_file.write_text(json.dumps(record))
    return rundir


# ── where it is submitted ─────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("said", [LOST, KILLED, NONSENSE], ids=["lost", "killed", "nonsense"])
def test_what_was_submitted_without_an_answer_is_found(
    cluster: Cluster, tmp_path: Path, said: SchedulerError
) -> None:
    """By its script, with one question; other jobs of the script are known, or another's."""
    script = tmp_path / "chain.sbatch"
    cluster.queue = [f"812_3|RUNNING|None|{script}", "77|PENDING|None|/other/chain.sbatch"]
    cluster.says = said
    assert "901" == unanswered.submit(script, known=["812"])
    assert (1, 1) == (cluster.submitted, cluster.asked)


def test_what_sbatch_refused_is_not_looked_for(cluster: Cluster, tmp_path: Path) -> None:
    cluster.says, cluster.arrives = REFUSED, False
    with pytest.raises(SchedulerError, match="QOSMaxSubmit") as caught:
        unanswered.submit(tmp_path / "chain.sbatch")
    assert not isinstance(caught.value, Unanswered)
    assert 0 == cluster.asked


@pytest.mark.parametrize("mute", [True, False])
def test_what_nobody_knows_is_said(cluster: Cluster, tmp_path: Path, mute: bool) -> None:
    """The controller may be busy with it still."""
    cluster.says, cluster.arrives, cluster.mute = LOST, False, mute
    with pytest.raises(Unanswered, match="whether it has submitted is not known"):
        unanswered.submit(tmp_path / "chain.sbatch")
    assert 1 == cluster.submitted


def claim(rundir: RunDir) -> None:
    script = rundir.root / "chain.sbatch"
    with claimed_directory(rundir, [rundir.chain_file, script], group=False, script=script):
        pass


def test_a_second_submission_is_refused_and_knows_the_first(
    cluster: Cluster, rundir: RunDir
) -> None:
    """The first one was killed before it could write down what it had submitted."""
    claim(rundir)
    cluster.queue = [f"812_1|PENDING|Priority|{rundir.root}/chain.sbatch"]
    with pytest.raises(RootError, match="job 812 was submitted with its script") as caught:
        claim(rundir)
    assert f"hpc-ckpt stop {rundir.root}" in str(caught.value)
    assert ["812"] == jobs_of(rundir)
    with pytest.raises(RootError, match="job 812 is a chain on it already"):
        claim(rundir)
    cluster.queue = []
    claim(rundir)


def test_a_root_by_another_name_is_the_same_root(
    cluster: Cluster, rundir: RunDir, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(rundir.root)
    cluster.queue = [f"812_1|PENDING|Priority|{rundir.root.resolve()}/chain.sbatch"]
    with pytest.raises(RootError, match="job 812 was submitted"):
        claim(RunDir(tmp_path / "link"))


def test_the_array_of_a_root_that_was_deleted_is_found(cluster: Cluster, tmp_path: Path) -> None:
    """A new run there would meet the old one's links."""
    cluster.queue = [f"812_1|PENDING|Priority|{tmp_path}/run/chain.sbatch"]
    with pytest.raises(RootError, match="scancel 812"):
        claim(RunDir(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_the_array_of_a_sweep_is_found(cluster: Cluster, tmp_path: Path) -> None:
    """And stays written down, with its members as they were made for it."""
    first, second = make_sweep(tmp_path, 2)
    cluster.says = LOST
    assert ("901", ["x-0", "x-1"]) == resume_members(tmp_path)
    assert ["7", "901"] == json.loads((tmp_path / "sweep.json").read_text())["jobs"]
    cluster.queue, cluster.arrives = [], False
    first.write_halt("stopped by the user")
    with pytest.raises(Unanswered):
        resume_members(tmp_path)
    assert first.halted() is None
    cluster.queue = [f"950_{number}|PENDING|None|{tmp_path}/chain.sbatch" for number in (1, 2)]
    with pytest.raises(RootError, match="job 950 was submitted with its script"):
        resume_members(tmp_path)
    assert ["7", "901", "950"] == json.loads((tmp_path / "sweep.json").read_text())["jobs"]
    assert ["7_2", "901_2", "950_2"] == jobs_of(second)


# ── where a link submits ──────────────────────────────────────────────────────────────────
def following(cluster: Cluster, rundir: RunDir, member: int | None = None) -> Successors:
    environ = {"SLURM_ARRAY_JOB_ID": "812", "SLURM_ARRAY_TASK_ID": "5", "SLURM_JOB_ID": "817"}
    orders = Orders.read(rundir)
    if member is not None:
        orders = replace(orders, member=MemberOrders(member, "m", {}))
    log = EventLog(rundir.ledger_file(1))
    (rundir.lease / "00000001").write_text("{}")
    return Successors(SlurmBackend(environ, run=cluster.run), rundir, orders, log, lambda: 5)


def extended(rundir: RunDir) -> list[tuple[str, bool]]:
    found = events.read(rundir.ledger_file(1))
    return [(r["job"], "found" in r) for r in found if r["event"] == "chain.extended"]


def test_a_link_that_lost_the_answer_submits_no_second_time(
    cluster: Cluster, rundir: RunDir
) -> None:
    cluster.says = LOST
    follow = following(cluster, rundir)
    assert follow.prepare()
    follow.go_on()
    assert (1, [("901", False)]) == (cluster.submitted, extended(rundir))


def test_what_comes_into_the_queue_late_is_taken_for_what_follows(
    cluster: Cluster, rundir: RunDir
) -> None:
    """Nothing was there when the link asked; a minute later it is."""
    cluster.says, cluster.arrives = LOST, False
    follow = following(cluster, rundir)
    assert not follow.prepare()
    cluster.queue = [f"901_1|PENDING|Dependency|{rundir.root}/chain.sbatch"]
    assert follow.prepare()
    assert (1, [("901", True)]) == (cluster.submitted, extended(rundir))
    assert ["901", "812"] == follow._jobs()


def test_what_a_killed_link_had_submitted_is_found_by_the_next(
    cluster: Cluster, rundir: RunDir
) -> None:
    cluster.queue = [f"880|PENDING|Dependency|{rundir.root}/chain.sbatch"]
    assert following(cluster, rundir).prepare()
    assert (0, [("880", True)]) == (cluster.submitted, extended(rundir))


def test_other_members_of_a_sweep_follow_nobody(cluster: Cluster, rundir: RunDir) -> None:
    """All have the same script; the index tells them apart."""
    script = rundir.root / "chain.sbatch"
    cluster.queue = [f"812_6|PENDING|None|{script}", f"880_4|PENDING|None|{script}"]
    assert following(cluster, rundir, member=5).prepare()
    assert (1, [("901", False)]) == (cluster.submitted, extended(rundir))
