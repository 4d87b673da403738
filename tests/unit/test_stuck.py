"""What the queue has of a chain is told by `status`: the next job, jobs that never begin by
themselves, and that there is nothing, with what to do."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from links import chain_record
from sweeps import make_sweep

from hpc_ckpt import events, lease
from hpc_ckpt.chain.allocation import SlurmBackend
from hpc_ckpt.chain.backend import Queued
from hpc_ckpt.chain.entries import write_start
from hpc_ckpt.chain.ledger import ChainStatus, NextJob, State, read_status
from hpc_ckpt.chain.stuck import SETTLED_S, with_stuck_jobs, with_stuck_members
from hpc_ckpt.chain.sweep import SweepStatus, sweep_status
from hpc_ckpt.errors import SchedulerError
from hpc_ckpt.events import EventLog
from hpc_ckpt.rundir import RunDir

HELD = "launch failed requeued held"
LATER_S = 3 * 24 * 3600.0


class Queue:
    def __init__(self, *lines: str, script: str = "/r/chain.sbatch", cluster: str = "lab") -> None:
        self.cluster = cluster
        self.lines = lines
        self.script = script
        self.asked = 0

    def __call__(self, argv: Sequence[str]) -> str:
        self.asked += 1
        if argv[0] == "scontrol":
            return f"Configuration data\nClusterName             = {self.cluster}\n"
        return "".join(f"{line}|{self.script}\n" for line in self.lines)


@pytest.fixture
def status(rundir: RunDir) -> ChainStatus:
    rundir.chain_file.write_text(json.dumps(chain_record(jobs=["84", "85"])))
    return replace(read_status(rundir), state=State.BETWEEN)


def remark(status: ChainStatus, *lines: str) -> str:
    return with_stuck_jobs(status, Queue(*lines)).remark


def test_a_job_that_slurm_holds_is_told(status: ChainStatus) -> None:
    """In its own words, also while it leaves its node."""
    for state in ("PENDING", "COMPLETING"):
        told = remark(status, f"84|{state}|{HELD}", "7|PENDING|JobHeldAdmin")
        assert told.startswith(f"job 84 never begins by itself ({HELD}): ")
        assert told.endswith("'scontrol release 84'")


@pytest.mark.parametrize(
    ("reason", "advice"),
    [("JobHeldAdmin", "ask those who run this cluster"),
     ("DependencyNeverSatisfied", "hpc-ckpt resume"),
     ("JobHoldMaxRequeue", "scontrol release 84"),
     ("PartitionTimeLimit", "change the spec"),
     ("InvalidAccount", "change the spec")],
)  # fmt: skip
def test_each_reason_has_its_advice(status: ChainStatus, reason: str, advice: str) -> None:
    assert advice in remark(status, f"84|PENDING|{reason}")


def test_jobs_behind_a_held_one_do_not_hide_it(status: ChainStatus) -> None:
    """afterany: they wait for it to end, which it never does."""
    told = remark(status, f"84|PENDING|{HELD}", "85|PENDING|Dependency")
    assert "scontrol release 84" in told


@pytest.mark.parametrize("reason", ["Priority", "JobArrayTaskLimit", "JobHeldUser", "BeginTime"])
def test_what_will_begin_is_no_news(status: ChainStatus, reason: str) -> None:
    """Another index of an array takes the place of one that is held."""
    assert "" == remark(status, f"84_1|PENDING|{reason}", f"84_2|PENDING|{HELD}")


@pytest.mark.parametrize("state", [State.COMPLETE, State.STOPPED])
def test_nobody_is_asked_after_the_end(status: ChainStatus, state: State) -> None:
    queue = Queue(f"84|PENDING|{HELD}")
    told = with_stuck_jobs(replace(status, state=state), queue)
    assert ("", 0) == (told.remark, queue.asked)


def test_a_chain_without_jobs_asks_nobody(status: ChainStatus) -> None:
    """A local one, for example."""
    queue = Queue()
    with_stuck_jobs(replace(status, jobs=()), queue)
    assert 0 == queue.asked


def test_without_an_answer_the_files_are_all_there_is(status: ChainStatus) -> None:
    def mute(argv: Sequence[str]) -> str:
        raise SchedulerError(argv, None, "no answer from the scheduler")

    assert status == with_stuck_jobs(status, mute)


# ── nothing in the queue ──────────────────────────────────────────────────────────────────
def began(
    rundir: RunDir, generation: int, job: str | None, *, ended: bool = False, **more: str
) -> None:
    """A link on some other host, which can tell nothing of itself any more."""
    holder = lease.Holder(job=job, host="far-away", pid=1)
    lease.file_of(rundir, generation).write_text(json.dumps(holder.record()))
    start = {"time": time.time(), "event": "link.started", "step": 0, **more}
    records: list[dict[str, Any]] = [start]
    if ended:
        records.append({"time": time.time(), "event": "link.ended", "cause": "time limit"})
        lease.Lease(rundir, generation).release()
    rundir.ledger_file(generation).write_text("".join(json.dumps(r) + "\n" for r in records))


@pytest.fixture
def chain(rundir: RunDir) -> RunDir:
    rundir.chain_file.write_text(json.dumps(chain_record(jobs=["84"])))
    return rundir


def seen(rundir: RunDir, queue: Queue, after_s: float = LATER_S) -> ChainStatus:
    now = time.time() + after_s
    return with_stuck_jobs(read_status(rundir, now), queue, now)


@pytest.mark.parametrize("begun", [False, True], ids=["not started", "between links"])
def test_a_chain_of_which_nothing_is_in_the_queue_is_told(chain: RunDir, begun: bool) -> None:
    """Its array was cancelled between two links: nothing of it runs that could say so."""
    if begun:
        began(chain, 1, "84_1", ended=True)
    told = seen(chain, Queue("7_1|PENDING|Priority"))
    assert told.remark.startswith("nothing of this chain is in this cluster's queue: ")
    assert told.remark.endswith(f"'hpc-ckpt resume {chain.root}'")


@pytest.mark.parametrize("begun", [False, True], ids=["submitted", "ended"])
def test_just_submitted_or_just_ended_is_not_stranded(chain: RunDir, begun: bool) -> None:
    """Files of other nodes are seen late, and so may a new job be."""
    if begun:
        os.utime(chain.chain_file, (0, 0))
        began(chain, 1, "84_1", ended=True)
    assert "" == seen(chain, Queue(), SETTLED_S / 2).remark
    assert "" != seen(chain, Queue(), SETTLED_S * 2).remark


def test_jobs_that_nobody_wrote_down_are_there_all_the_same(chain: RunDir) -> None:
    """The answer of sbatch was lost, the job runs this chain's script."""
    queue = Queue("91_1|PENDING|Priority", script=str(chain.root / "chain.sbatch"))
    told = seen(chain, queue)
    assert ("", NextJob("91_1", "Priority")) == (told.remark, told.next_job)


def test_what_somebody_else_has_submitted_is_not_missed(
    chain: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a root that a group shares: the question is for one's own jobs."""
    monkeypatch.setattr(os, "getuid", lambda: chain.chain_file.stat().st_uid + 1)
    queue = Queue()
    assert ("", 0) == (seen(chain, queue).remark, queue.asked)


def test_a_task_of_submitit_is_not_resumed_but_submitted(chain: RunDir) -> None:
    """Its chain.json has no spec."""
    chain.chain_file.write_text(json.dumps({"name": "task", "jobs": ["84"]}))
    assert "submit its task again" in seen(chain, Queue()).remark


# ── a link that is gone ───────────────────────────────────────────────────────────────────
def test_a_link_that_runs_is_asked_for_once_and_no_news(chain: RunDir) -> None:
    """Also while it leaves its node; what follows it is shown with its reason."""
    began(chain, 1, "84_1")
    for state in ("RUNNING", "COMPLETING"):
        queue = Queue(f"84_1|{state}|None", "84_2|PENDING|JobArrayTaskLimit")
        told = seen(chain, queue)
        assert (State.RUNNING, "", 1) == (told.state, told.remark, queue.asked)
        assert NextJob("84_2", "JobArrayTaskLimit") == told.next_job


def test_a_link_whose_job_is_gone_does_not_run_for_ever(chain: RunDir) -> None:
    """Its node was lost under --no-requeue: nobody released the lease, no deadline passed."""
    began(chain, 1, "84_1")
    told = seen(chain, Queue())
    assert (State.BETWEEN, "lost") == (told.state, told.links[-1].cause)
    gone, nothing = told.remark.splitlines()
    assert gone.startswith("link 1 is gone: its job 84_1 does not run any more")
    assert nothing.endswith(f"'hpc-ckpt resume {chain.root}'")


@pytest.mark.parametrize("ended", [False, True], ids=["running", "between links"])
def test_another_cluster_s_queue_says_nothing(chain: RunDir, ended: bool) -> None:
    """They share a home: what runs there is not in this queue."""
    began(chain, 1, "84_1", ended=ended, cluster="lab")
    told = seen(chain, Queue(cluster="other"))
    assert (State.BETWEEN if ended else State.RUNNING) is told.state
    only = "asked on another cluster than its own (lab): only its files are known here"
    assert only == told.remark
    assert "hpc-ckpt resume" in seen(chain, Queue(cluster="lab")).remark


def test_a_link_writes_down_its_cluster(chain: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what another one's queue is known by."""
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "lab")
    began(chain, 1, "84_1")
    ledger = EventLog(chain.ledger_file(1))
    write_start(ledger, SlurmBackend({"SLURM_JOB_ID": "84"}), 1, 0, deadline=None, queued=Queued())
    assert "lab" == list(events.read(chain.ledger_file(1)))[-1]["cluster"]
    assert "(lab)" in seen(chain, Queue(cluster="other")).remark


@pytest.mark.parametrize("trace", ["ledger/00000001.jsonl", "events/00000001-n1.jsonl"])
def test_a_link_that_wrote_just_now_is_not_gone(chain: RunDir, trace: str) -> None:
    """Whatever the queue says: it may be seen late."""
    began(chain, 1, "84_1")
    (chain.root / trace).touch()
    for path in (chain.chain_file, chain.lease, chain.ledger_file(1)):
        if path != chain.root / trace:
            os.utime(path, (0, 0))
    told = seen(chain, Queue("84_2|PENDING|Priority"), SETTLED_S / 2)
    assert (State.RUNNING, "") == (told.state, told.remark)
    assert NextJob("84_2", "Priority") == told.next_job
    assert State.BETWEEN is seen(chain, Queue("84_2|PENDING|Priority"), SETTLED_S * 2).state


@pytest.mark.parametrize("job", ["84_1", "84_2"], ids=["requeued", "the next index"])
def test_a_link_that_is_gone_is_followed(chain: RunDir, job: str) -> None:
    """Nothing to do then, and that is said."""
    began(chain, 1, "84_1")
    told = seen(chain, Queue(f"{job}|PENDING|BeginTime"))
    assert told.remark.endswith(f"; job {job} goes on from the newest checkpoint")
    assert (State.BETWEEN, NextJob(job, "BeginTime")) == (told.state, told.next_job)


def test_a_link_that_ends_while_the_queue_is_asked_is_not_gone(chain: RunDir) -> None:
    """The answer is newer than what was read before."""
    began(chain, 1, "84_1")
    before = read_status(chain)

    def ends_now(argv: Sequence[str]) -> str:
        began(chain, 1, "84_1", ended=True)
        return ""

    told = with_stuck_jobs(before, ends_now)
    assert (State.BETWEEN, "time limit", "") == (told.state, told.links[-1].cause, told.remark)


def test_a_stopped_chain_whose_link_is_gone_is_stopped(chain: RunDir) -> None:
    began(chain, 1, "84_1")
    chain.write_halt("stopped by the user")
    told = seen(chain, Queue())
    assert (State.STOPPED, "") == (told.state, told.remark)


def test_a_link_of_this_machine_asks_nobody(chain: RunDir) -> None:
    """The jobs are those of an earlier submission."""
    began(chain, 1, None)
    queue = Queue()
    assert (State.RUNNING, 0) == (seen(chain, queue).state, queue.asked)


def test_the_next_job_is_the_one_that_can_begin(chain: RunDir) -> None:
    """In the order of indices; what is held or waits for another comes later."""
    began(chain, 1, "84_1", ended=True)
    queue = Queue(
        f"84_2|PENDING|{HELD}", "84_11|PENDING|JobArrayTaskLimit", "84_10|PENDING|Priority",
        "84_9|PENDING|Priority",
    )  # fmt: skip
    assert NextJob("84_9", "Priority") == seen(chain, queue).next_job


# ── sweeps ────────────────────────────────────────────────────────────────────────────────
def sweep(root: Path, count: int = 3) -> list[RunDir]:
    """Each member has begun as 7_1, 7_2, …"""
    made = make_sweep(root, count)
    for number, rundir in enumerate(made, 1):
        began(rundir, 1, f"7_{number}", ended=True)
    return made


def seen_sweep(root: Path, queue: Queue, after_s: float = LATER_S) -> SweepStatus:
    now = time.time() + after_s
    return with_stuck_members(sweep_status(root, now), queue, now)


def test_members_that_are_held_are_told_once(tmp_path: Path) -> None:
    """Each is a chain of its own: others that will begin are no help to it."""
    sweep(tmp_path)
    queue = Queue(f"7_1|PENDING|{HELD}", "7_2|PENDING|Priority", f"7_3|PENDING|{HELD}")
    told = seen_sweep(tmp_path, queue)
    assert ("scontrol release 7_1,7_3" in told.remark, 1) == (True, queue.asked)
    assert {HELD: 2, "Priority": 1} == told.waiting


def test_many_members_are_told_by_their_array(tmp_path: Path) -> None:
    sweep(tmp_path, 30)
    queue = Queue(*(f"7_{n}|PENDING|{HELD}" for n in range(1, 31)))
    told = seen_sweep(tmp_path, queue).remark
    assert told.startswith("30 members of job 7 never begin by themselves")
    assert told.endswith("'scontrol release 7'")


def test_a_sweep_that_is_over_asks_nobody(tmp_path: Path) -> None:
    for rundir in sweep(tmp_path):
        rundir.write_halt("stopped by the user")
    queue = Queue()
    seen_sweep(tmp_path, queue)
    assert 0 == queue.asked


def test_a_sweep_of_which_nothing_is_in_the_queue_is_told(tmp_path: Path) -> None:
    """Between links, not started, or lost with its node: all of it is taken up again."""
    first, second, _ = make_sweep(tmp_path, 3)
    began(first, 1, "7_1", ended=True)
    began(second, 1, "7_2")
    queue = Queue()
    told = seen_sweep(tmp_path, queue)
    assert told.remark.startswith("3 members (x-0, x-1, x-2) are not over, and nothing of that ")
    assert told.remark.endswith(f"'hpc-ckpt resume {tmp_path}'")
    assert 1 == queue.asked
    assert "" == seen_sweep(tmp_path, Queue(), SETTLED_S / 2).remark


def test_a_sweep_of_another_cluster_is_not_missed(tmp_path: Path) -> None:
    first, _ = make_sweep(tmp_path, 2)
    began(first, 1, "7_1", cluster="lab")
    told = seen_sweep(tmp_path, Queue(cluster="other")).remark
    assert told.startswith("asked on another cluster than its own (lab)")
    assert "hpc-ckpt resume" in seen_sweep(tmp_path, Queue(cluster="lab")).remark


def test_a_member_of_which_nothing_is_in_the_queue_is_told_alone(tmp_path: Path) -> None:
    """The others are at work: 'resume' of the whole sweep would be refused."""
    sweep(tmp_path)
    told = seen_sweep(tmp_path, Queue("7_1|RUNNING|None", "7_3|PENDING|Priority"))
    assert told.remark.startswith("member x-1 is not over, and nothing of that is in ")
    assert told.remark.endswith(f"'hpc-ckpt resume {tmp_path}/x-1'")


def test_a_member_that_submitted_itself_is_in_the_queue(tmp_path: Path) -> None:
    """As a job of its own, which its ledger names."""
    _, second, _ = sweep(tmp_path)
    with second.ledger_file(1).open("a") as ledger:
        ledger.write(json.dumps({"time": 1.0, "event": "chain.extended", "job": "9"}) + "\n")
    queue = Queue("7_1|RUNNING|None", "7_3|PENDING|Priority", "9_2|PENDING|Priority")
    assert "" == seen_sweep(tmp_path, queue).remark


def test_a_member_that_ends_while_the_queue_is_asked_is_not_missed(tmp_path: Path) -> None:
    made = sweep(tmp_path, 1)
    before = sweep_status(tmp_path)
    made[0].write_halt("stopped by the user")
    assert "" == with_stuck_members(before, Queue(), time.time() + LATER_S).remark
