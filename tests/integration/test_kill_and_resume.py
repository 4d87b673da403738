"""The promise: whatever ends a process, the chain's losses and weights are those of one run.

Real processes, real signals; programs/train.py is what a user would write.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hpc_ckpt import events, fsio
from hpc_ckpt.errors import EXIT_SAVED
from hpc_ckpt.events import Event
from hpc_ckpt.rundir import MANIFEST_NAME, Result, RunDir

TRAIN = Path(__file__).parent / "programs" / "train.py"
STEPS = 36
"""Three epochs of twelve batches."""


@dataclass
class Trial:
    """One root and the processes that work on it, one after the other."""

    place: Path
    options: tuple[str, ...] = ()
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def rundir(self) -> RunDir:
        return RunDir(self.place / "run")

    def start(self, *more: str, environ: dict[str, str] | None = None) -> subprocess.Popen[str]:
        log = self.place / f"log-{len(self.processes)}"
        argv = [sys.executable, str(TRAIN), "--out", str(log), *self.options, *more]
        if "HPC_CKPT_ROOT" not in (environ or {}):
            argv += ["--root", str(self.rundir.root)]
        process = subprocess.Popen(
            argv,
            env={**clean_environment(), **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Under nohup and in some CI SIGINT is ignored, which is inherited.
            preexec_fn=_listen_to_ctrl_c,  # noqa: PLW1509 - no other thread holds a lock here
        )
        self.processes.append(process)
        return process

    def run(self, *more: str, environ: dict[str, str] | None = None) -> Ended:
        return finish(self.start(*more, environ=environ))

    def start_link(self, *more: str, generation: int = 1) -> subprocess.Popen[str]:
        """Start as the link runner would."""
        self.rundir.create()
        (self.rundir.lease / f"{generation:08d}").write_text("{}")
        if not self.rundir.chain_file.exists():
            self.rundir.chain_file.write_text(json.dumps({"chain": "test"}))
        return self.start(*more, environ=self.rundir.environment(generation, "local"))

    def losses(self) -> dict[int, str]:
        """Step → bits of its loss; a step that was redone counts as it was last seen."""
        found: dict[int, str] = {}
        for number in range(len(self.processes)):
            path = self.place / f"log-{number}"
            for line in path.read_text().splitlines() if path.exists() else ():
                step, loss = line.split()
                found[int(step)] = loss
        return found

    def wait_for_step(self, step: int | None) -> None:
        """Until the newest process has made this step, or with None any."""
        path = self.place / f"log-{len(self.processes) - 1}"
        wait_until(lambda: bool(seen_steps(path) & ({step} if step else seen_steps(path))))

    def recorded(self, event: Event, generation: int | None = None) -> list[dict[str, object]]:
        pattern = "*.jsonl" if generation is None else f"{generation:08d}-*.jsonl"
        paths = sorted(self.rundir.events.glob(pattern))
        return [r for path in paths for r in events.read(path) if r["event"] == event.value]


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str

    @property
    def weights(self) -> str:
        """The fingerprint that a completed program prints."""
        lines = [line for line in self.stdout.splitlines() if line.startswith("complete ")]
        assert lines, f"it did not complete (code {self.code}):\n{self.stdout}\n{self.stderr}"
        return lines[-1]


def finish(process: subprocess.Popen[str], timeout: float = 60.0) -> Ended:
    stdout, stderr = process.communicate(timeout=timeout)
    return Ended(process.returncode, stdout, stderr)


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("HPC_CKPT")}


def seen_steps(path: Path) -> set[int]:
    if not path.exists():
        return set()
    return {int(line.split()[0]) for line in path.read_text().splitlines() if " " in line}


def _listen_to_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Callable[..., Trial]]:
    made: list[Trial] = []

    def make(*options: str) -> Trial:
        place = tmp_path / f"trial-{len(made)}"
        place.mkdir()
        made.append(Trial(place, options))
        return made[-1]

    yield make
    for one in made:
        for process in one.processes:
            if process.poll() is None:
                process.kill()
                process.communicate()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, str], str]:
    """Losses and weights of the run that nobody interrupts."""
    whole = Trial(tmp_path_factory.mktemp("reference"))
    ended = whole.run()
    losses = whole.losses()
    assert list(range(1, STEPS + 1)) == sorted(losses)
    return losses, ended.weights


def outcome(one: Trial, generation: int = 1) -> tuple[Result, int | None, str]:
    found = one.rundir.outcome(generation)
    assert found is not None
    return found.outcome, found.step, found.reason


# ── kill -9 ───────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("workers", ["0", "2"])
def test_random_kills_change_no_bit(
    trial: Callable[..., Trial], reference: tuple[dict[int, str], str], workers: str
) -> None:
    """Losses and final weights after SIGKILLs at random steps equal the uninterrupted run's."""
    one = trial("--workers", workers)
    chance = random.Random(f"kills with {workers} workers")
    for target in sorted(chance.sample(range(4, STEPS - 2), 3)):
        process = one.start("--pause", "0.02")
        one.wait_for_step(target)
        time.sleep(chance.uniform(0, 0.03))
        process.kill()
        finish(process)
        assert one.rundir.done() is None
    ended = one.run()
    assert (0, reference) == (ended.code, (one.losses(), ended.weights))
    restored = one.recorded(Event.RESTORED)
    assert len(restored) >= 2, "the kills came before anything was saved"


FAULTS = {
    "files": [f"{point}:1" for point in fsio.KILL_POINTS if point.startswith("atomic.")],
    "commit": [
        f"{point}:2"
        for point in fsio.KILL_POINTS
        if point.startswith(("stage.", "shard.", "manifest.", "commit."))
    ],
    # A sweep needs something that a killed writer left behind.
    "removal": [
        *(f"{point}:1" for point in fsio.KILL_POINTS if point.startswith("remove.")),
        "shard.synced:2",
        *(f"{point}:1" for point in fsio.KILL_POINTS if point.startswith("sweep.")),
    ],
}


def test_every_kill_point_is_tried() -> None:
    """A point that is added later is tried too, or this fails; drains have their own test."""
    tried = {fault.partition(":")[0] for faults in FAULTS.values() for fault in faults}
    of_drains = ("drain.", "replace.", "recover.")
    assert {point for point in fsio.KILL_POINTS if not point.startswith(of_drains)} == tried


@pytest.mark.parametrize("group", FAULTS)
def test_a_kill_at_any_point_of_a_save_changes_no_bit(
    trial: Callable[..., Trial], reference: tuple[dict[int, str], str], group: str
) -> None:
    """SIGKILL at every named point of write, commit, removal and sweep, in one chain."""
    # Slow enough for a few saves: each process has to reach its fault before the last step.
    one = trial("--policy", "every 1 steps", "--pause", "0.05")
    for fault in FAULTS[group]:
        ended = one.run(environ={"HPC_CKPT_FAULT": f"kill@{fault}"})
        assert (fault, -signal.SIGKILL) == (fault, ended.code), ended
    ended = one.run()
    assert (0, reference) == (ended.code, (one.losses(), ended.weights))


# ── told to stop ──────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_exits_75(
    trial: Callable[..., Trial], reference: tuple[dict[int, str], str], number: signal.Signals
) -> None:
    """SIGTERM and the site's signal end the link at the next boundary, losing no step."""
    one = trial("--policy", "every hour")
    process = one.start("--pause", "0.02")
    one.wait_for_step(9)
    process.send_signal(number)
    ended = finish(process)
    result, step, reason = outcome(one)
    assert (EXIT_SAVED, Result.SAVED, f"notice: {number.name}") == (ended.code, result, reason)
    assert max(one.losses()) == step
    assert one.rundir.done() is None
    again = one.run()
    assert f"entered {step}" in again.stdout
    assert reference == (one.losses(), again.weights)


def test_a_signal_with_data_workers_still_saves(
    trial: Callable[..., Trial], reference: tuple[dict[int, str], str]
) -> None:
    """Signals to every process of the group (as some sites send them) do not hurt workers."""
    one = trial("--policy", "every hour", "--workers", "2")
    process = one.start("--pause", "0.02")
    one.wait_for_step(15)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) >= 2
    for pid in (*children, process.pid):
        os.kill(int(pid), signal.SIGUSR1)
        os.kill(int(pid), signal.SIGTERM)
    ended = finish(process)
    assert EXIT_SAVED == ended.code
    again = one.run()
    assert reference == (one.losses(), again.weights)


def test_sigint_stays_keyboard_interrupt(trial: Callable[..., Trial]) -> None:
    """Ctrl-C is not a notice: no final save, no DONE, the outcome says failed."""
    one = trial("--policy", "every hour")
    process = one.start("--pause", "0.02")
    one.wait_for_step(5)
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert "KeyboardInterrupt" in ended.stderr
    assert Result.FAILED == outcome(one)[0]
    assert ([], None) == (one.rundir.committed(), one.rundir.done())


def test_a_notice_file_ends_the_link(
    trial: Callable[..., Trial], reference: tuple[dict[int, str], str]
) -> None:
    """In a link the runner writes the notice; the program sees it within about a second."""
    one = trial("--policy", "every hour")
    process = one.start_link("--pause", "0.1")
    one.wait_for_step(3)
    one.rundir.give_notice(1, "preemption")
    ended = finish(process)
    result, step, reason = outcome(one)
    assert (EXIT_SAVED, Result.SAVED, "notice: preemption") == (ended.code, result, reason)
    assert step is not None and step <= 3 + 25
    ended = finish(one.start_link(generation=2))
    assert reference == (one.losses(), ended.weights)


def test_the_deadline_is_met_with_a_measured_save(
    trial: Callable[..., Trial], reference: tuple[dict[int, str], str]
) -> None:
    """A first save at the middle at the latest, the last one shortly before the deadline.

    The next link knows how long a save takes, and makes none at its middle.
    """
    one = trial("--policy", "every hour", "--pause", "0.3")
    for generation in (1, 2):
        process = one.start_link(generation=generation)
        one.wait_for_step(None)
        deadline = time.time() + 4
        one.rundir.write_deadline(generation, deadline)
        assert EXIT_SAVED == finish(process).code
        result, step, reason = outcome(one, generation)
        last = one.recorded(Event.COMMITTED, generation)[-1]
        assert (Result.SAVED, last["step"], "deadline") == (result, step, reason.split(":")[0])
        assert 0 < deadline - float(str(last["time"])) < 3
    halves = [
        ["half the link is over" in str(r["reason"]) for r in one.recorded(Event.SAVE_STARTED, g)]
        for g in (1, 2)
    ]
    assert [[True, False], [False]] == halves
    ended = finish(one.start_link("--pause", "0", generation=3))
    assert reference == (one.losses(), ended.weights)


def test_a_link_with_too_little_time_makes_one_step_and_ends(trial: Callable[..., Trial]) -> None:
    """It behaves as if the notice had come before it began."""
    one = trial("--policy", "every hour", "--pause", "0.1")
    one.rundir.create()
    one.rundir.write_deadline(1, time.time() + 0.2)
    ended = finish(one.start_link())
    assert (EXIT_SAVED, (Result.SAVED, 1)) == (ended.code, outcome(one)[:2])


def test_halt_ends_the_link_with_its_next_checkpoint(trial: Callable[..., Trial]) -> None:
    """Nothing is hurried: the save that is due anyway is the last one."""
    one = trial("--policy", "every 10 steps", "--pause", "0.15")
    process = one.start()
    one.wait_for_step(2)
    one.rundir.write_halt("asked to")
    ended = finish(process)
    assert (EXIT_SAVED, (Result.SAVED, 10, "halt: asked to")) == (ended.code, outcome(one))


# ── no boundary comes ─────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("where", ["sleep", "c"])
def test_a_hung_step_leaves_the_newest_checkpoint_as_outcome(
    trial: Callable[..., Trial], where: str
) -> None:
    """The watchdog says what is saved before the deadline, and leaves the process to its end."""
    one = trial("--policy", "every 3 steps", "--pause", "0.1", "--hang-at", "8", "--hang-in", where)
    process = one.start_link()
    one.wait_for_step(8)
    deadline = time.time() + 4
    one.rundir.write_deadline(1, deadline)
    wait_until(lambda: bool(one.recorded(Event.WATCHDOG)), timeout=8)
    time.sleep(2.5)
    result, step, reason = outcome(one)
    newest = one.recorded(Event.COMMITTED)[-1]["step"]
    assert (Result.SAVED, newest) == (result, step)
    assert newest in (6, 7), "a save that comes while another is under way is made a step later"
    assert reason.startswith("deadline: ")
    assert "no step boundary came in time" in reason
    assert process.poll() is None
    (said,) = one.recorded(Event.WATCHDOG)
    assert newest == said["step"]
    assert 0 < deadline - float(str(said["time"])) < 1.5


def test_a_signal_is_heard_while_the_main_thread_is_in_c_code(
    trial: Callable[..., Trial],
) -> None:
    """No Python callback can run there: the wakeup descriptor tells the watchdog."""
    one = trial("--policy", "every 3 steps", "--pause", "0.1", "--hang-at", "5", "--hang-in", "c")
    process = one.start_link()
    one.wait_for_step(5)
    one.rundir.write_deadline(1, time.time() + 600)
    process.send_signal(signal.SIGTERM)
    time.sleep(2.2)
    assert one.rundir.outcome(1) is None
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: one.rundir.outcome(1) is not None, timeout=5)
    result, step, reason = outcome(one)
    assert (Result.SAVED, one.recorded(Event.COMMITTED)[-1]["step"]) == (result, step)
    assert reason.startswith("notice: SIGTERM; no step boundary")


def test_the_watchdog_claims_nothing_that_was_never_saved(trial: Callable[..., Trial]) -> None:
    """Without any checkpoint there is no outcome."""
    one = trial("--policy", "every hour", "--hang-at", "2")
    process = one.start_link()
    one.wait_for_step(2)
    one.rundir.write_deadline(1, time.time() + 1)
    time.sleep(2.5)
    assert (None, None) == (process.poll(), one.rundir.outcome(1))


# ── the latch ─────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("mistake", ["bare", "break"])
def test_a_swallowed_end_cannot_fake_completion(
    trial: Callable[..., Trial], reference: tuple[dict[int, str], str], mistake: str
) -> None:
    """A bare except or a break ends the loops, exits 75 and never writes DONE."""
    one = trial("--policy", "every hour", "--swallow", mistake)
    process = one.start("--pause", "0.02")
    one.wait_for_step(7)
    process.terminate()
    ended = finish(process)
    result, step, _ = outcome(one)
    assert (EXIT_SAVED, Result.SAVED, None) == (ended.code, result, one.rundir.done())
    assert max(one.losses()) == step, "training went on after the end"
    assert "complete" not in ended.stdout
    again = one.run()
    assert reference == (one.losses(), again.weights)


def test_under_torchelastic_the_exit_code_is_0(trial: Callable[..., Trial]) -> None:
    """There 75 would make the agent restart or fail the group; the outcome file decides."""
    one = trial("--policy", "every hour", "--pause", "0.02")
    process = one.start(environ={"TORCHELASTIC_RUN_ID": "x"})
    one.wait_for_step(3)
    process.terminate()
    ended = finish(process)
    assert (0, Result.SAVED, None) == (ended.code, outcome(one)[0], one.rundir.done())


# ── other ways to go wrong ────────────────────────────────────────────────────────────────
def test_gradient_accumulation_saves_only_where_the_optimizer_stepped(
    trial: Callable[..., Trial],
) -> None:
    """A save that is due between two optimizer steps waits: gradients are not in the state."""
    whole, killed = trial("--accumulate", "4"), trial("--accumulate", "4")
    weights = whole.run().weights
    process = killed.start("--pause", "0.02")
    killed.wait_for_step(17)
    process.terminate()
    assert EXIT_SAVED == finish(process).code
    steps = {key.step for key in killed.rundir.committed()}
    assert steps
    assert all(step % 4 == 0 for step in steps)
    again = killed.run()
    assert (whole.losses(), weights) == (killed.losses(), again.weights)


def test_a_broken_newest_checkpoint_is_passed_over(
    trial: Callable[..., Trial], reference: tuple[dict[int, str], str]
) -> None:
    """Restore falls back to the newest one without defects and says what it skipped."""
    one = trial("--pause", "0.02")
    process = one.start()
    one.wait_for_step(14)
    process.terminate()
    finish(process)
    newest = one.rundir.committed()[-1]
    shard = one.rundir.checkpoints / newest.directory_name / "rank-00000.safetensors"
    with shard.open("r+b") as stream:
        stream.seek(5000)
        byte = stream.read(1)
        stream.seek(5000)
        stream.write(bytes([byte[0] ^ 1]))
    ended = one.run()
    assert reference == (one.losses(), ended.weights)
    skipped = one.recorded(Event.RESTORED)[-1]["skipped"]
    assert isinstance(skipped, list)
    assert skipped[0].startswith(f"{newest.directory_name}: ")


def test_a_fenced_process_ends_without_an_outcome(trial: Callable[..., Trial]) -> None:
    """A newer generation has the root: nothing more is published, and the event says so."""
    one = trial("--policy", "every 3 steps", "--pause", "0.2")
    process = one.start_link()
    wait_until(lambda: 6 in [r["step"] for r in one.recorded(Event.COMMITTED)])
    (one.rundir.lease / "00000002").write_text("{}")
    ended = finish(process)
    assert (EXIT_SAVED, None) == (ended.code, one.rundir.outcome(1))
    assert [2] == [r["newer"] for r in one.recorded(Event.FENCED)]
    assert [3, 6] == [key.step for key in one.rundir.committed()]
    assert not list(one.rundir.checkpoints.glob(".tmp-*"))


def test_the_manifest_names_the_lineage(trial: Callable[..., Trial]) -> None:
    """Each checkpoint names the one it continues, across processes too."""
    one = trial("--policy", "every 12 steps", "--epochs", "1")
    one.run()
    one.run("--epochs", "2")
    keys = one.rundir.committed()
    parents = [
        json.loads((one.rundir.checkpoints / key.directory_name / MANIFEST_NAME).read_bytes())[
            "parent"
        ]
        for key in keys
    ]
    names = [key.directory_name for key in keys]
    assert names[:-1] == parents[1:]
