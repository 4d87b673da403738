"""The verbs about runs as a user meets them: local chains, real processes, a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt.chain.ledger import read_status
from hpc_ckpt.rundir import RunDir

CLI = [sys.executable, "-m", "hpc_ckpt.cli"]
TRAIN = Path(__file__).parent / "programs" / "train.py"
THREE = "echo link $HPC_CKPT_GENERATION says hello; [ $HPC_CKPT_GENERATION -ge 3 ] || exit 75"


class Here:
    """hpc-ckpt in an empty directory, on a machine without Slurm and without settings."""

    def __init__(self, place: Path) -> None:
        self.work = place / "work"
        self.work.mkdir()
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("HPC_CKPT")}
        self.environment |= {"HOME": str(place), "SLURM_CONF": "/nonexistent"}
        self.environment |= {"XDG_STATE_HOME": str(place / "state")}
        self.environment.pop("XDG_CONFIG_HOME", None)
        self._started: list[subprocess.Popen[str]] = []

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*CLI, *words],
            cwd=self.work,
            env=self.environment | more,
            capture_output=True,
            text=True,
            timeout=90,
            stdin=subprocess.DEVNULL,
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*CLI, *words],
            cwd=self.work,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)

    def wait_for(self, what: Callable[[], object], timeout_s: float = 40.0) -> None:
        end = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    here = Here(tmp_path)
    yield here
    here.end()


@pytest.fixture
def finished(here: Here) -> Here:
    """A chain of three links in r."""
    assert 0 == here.run("run", "--root", "r", "--", "bash", "-c", THREE).returncode
    return here


# ── logs ──────────────────────────────────────────────────────────────────────────────────
def test_logs_of_the_newest_and_of_a_given_link(finished: Here) -> None:
    """As the program printed it, and nothing else."""
    assert "link 3 says hello\n" == finished.run("logs", "r").stdout
    assert "link 1 says hello\n" == finished.run("logs", "r", "--link", "1").stdout
    assert "" == finished.run("logs", "r", "--lines", "0").stdout
    told = finished.run("logs", "r", "--json").stdout
    assert {"link": 3, "line": "link 3 says hello"} == json.loads(told)
    wrong = finished.run("logs", "r", "--link", "9")
    assert (2, "") == (wrong.returncode, wrong.stdout)
    assert "link 9 has no output; it has 1, 2, 3" in wrong.stderr


def test_following_goes_from_link_to_link_and_ends_with_the_chain(here: Here) -> None:
    """One header a link; what was printed last is there."""
    script = (
        "echo begin $HPC_CKPT_GENERATION; sleep 1.5; printf 'end %s' $HPC_CKPT_GENERATION; "
        "[ $HPC_CKPT_GENERATION -ge 3 ] || exit 75"
    )
    here.start("run", "--root", "r", "--", "bash", "-c", script)
    here.wait_for((here.work / "r" / "lease").is_dir)
    done = here.run("logs", "r", "-f")
    assert (0, "") == (done.returncode, done.stderr)
    lines = done.stdout.splitlines()
    heads = [line for line in lines if line.startswith("── link ")]
    assert ["1", "2", "3"] == [head.split()[2] for head in heads]
    rest = [line for line in lines if line not in heads]
    assert [f"{word} {link}" for link in (1, 2, 3) for word in ("begin", "end")] == rest


def test_following_as_json(finished: Here) -> None:
    """One object a line, also of earlier links if asked."""
    told = finished.run("logs", "r", "-f", "--link", "1", "--json").stdout.splitlines()
    assert [1, 2, 3] == [json.loads(line)["link"] for line in told]


@pytest.mark.parametrize("words", [["logs", "r", "-f"], ["watch", "r"], ["watch", "r", "--json"]])
def test_ctrl_c_ends_looking_quietly_and_the_chain_goes_on(here: Here, words: list[str]) -> None:
    """No traceback, no word."""
    script = "echo hello; exec sleep 60"
    chain = here.start("run", "--root", "r", "--set", "kill_wait=1s", "--", "bash", "-c", script)
    here.wait_for(lambda: RunDir(here.work / "r").log_file(1).exists())
    looking = here.start(*words)
    assert looking.stdout is not None
    looking.stdout.readline()
    looking.send_signal(signal.SIGINT)
    _, errors = looking.communicate(timeout=20)
    assert (130, "") == (looking.returncode, errors)
    assert chain.poll() is None


# ── history and watch ─────────────────────────────────────────────────────────────────────
def test_history_tells_every_link_and_the_end(finished: Here) -> None:
    """For people and for machines."""
    shown = finished.run("history", "r").stdout
    assert 2 == shown.count("saved and left")
    assert "link 3  done" in shown
    told = json.loads(finished.run("history", "r", "--json").stdout)
    assert ["saved and left", "saved and left", "complete"] == [x["cause"] for x in told["links"]]
    assert ["done"] == [event["event"] for event in told["events"]]
    assert all(link["wait_s"] is not None for link in told["links"])
    assert [["exit code 75"], ["exit code 75"], ["exit code 0"]] == [
        link["evidence"] for link in told["links"]
    ]


def test_watch_prints_a_line_a_change_where_nobody_looks(here: Here) -> None:
    """And ends with the chain: 0 if the work is complete."""
    here.start("run", "--root", "r", "--", "bash", "-c", f"sleep 2.5; {THREE}")
    here.wait_for((here.work / "r" / "lease").is_dir)
    done = here.run("watch", "r", "--json")
    assert 0 == done.returncode
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert "complete" == records[-1]["state"]
    assert 3 == len(records[-1]["links"])
    assert 2 <= len(records) <= 12
    plain = here.run("watch", "r")
    assert 1 == len(plain.stdout.splitlines())
    assert "complete" in plain.stdout


def test_work_that_takes_longer_than_planned_has_all_of_its_budget(here: Here) -> None:
    """One hour is planned as two links of one hour."""
    asked = ["--total-time", "1h", "--max-links", "3"]
    done = here.run("run", "--root", "r", *asked, "--", "bash", "-c", THREE)
    assert "links     2 of 1h each for the work, at most 3 (3h)" in done.stdout
    assert 0 == done.returncode


def test_watch_of_a_chain_that_stopped_short(here: Here) -> None:
    """1, as `run` said."""
    assert 1 == here.run("run", "--root", "r", "--max-links", "1", "--", "false").returncode
    assert 1 == here.run("watch", "r").returncode


def test_watch_in_a_terminal(here: Here) -> None:
    """A view that is drawn again: links, a bar, the newest output; Ctrl-C leaves it."""
    script = "for i in 1 2 3; do echo line $i; done; exec sleep 60"
    here.start("run", "--root", "r", "--name", "mine", "--link-time", "90s",
               "--set", "kill_wait=1s", "--", "bash", "-c", script)  # fmt: skip
    here.wait_for(lambda: RunDir(here.work / "r").log_file(1).exists())
    drawn = ("mine", "running", "link 1", "1m 30s", "line 1", "line 3", "Ctrl-C leaves")
    screen, code = _in_terminal([*CLI, "watch", "r"], here, until=drawn)
    for expected in drawn:
        assert expected in screen
    assert 130 == code
    assert "Traceback" not in screen


def _in_terminal(command: list[str], here: Here, until: Sequence[str]) -> tuple[str, int]:
    """What it drew, without colours. Ctrl-C is pressed once all of `until` is there: pressed in the
    middle of a frame it would cut that short."""
    parent, child = pty.openpty()
    environment = here.environment | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(
        command, cwd=here.work, env=environment, stdin=child, stdout=child, stderr=child,
        start_new_session=True,
    )  # fmt: skip
    os.close(child)
    seen, text, pressed, end = b"", "", False, time.monotonic() + 30
    while time.monotonic() < end:
        ready, _, _ = select.select([parent], [], [], 0.2)
        try:
            data = os.read(parent, 65536) if ready else b""
        except OSError:  # the other end is closed
            break
        seen += data
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode(errors="replace"))
        if all(words in text for words in until) and not pressed:
            process.send_signal(signal.SIGINT)
            pressed = True
    os.close(parent)
    return text, process.wait(timeout=20)


# ── stop ──────────────────────────────────────────────────────────────────────────────────
def start_training(here: Here) -> RunDir:
    here.start(
        "run", "--root", "r", "--policy", "every 30 steps", "--",
        sys.executable, str(TRAIN), "--out", "losses", "--pause", "0.1", "--epochs", "200",
    )  # fmt: skip
    rundir = RunDir(here.work / "r")
    here.wait_for(lambda: (here.work / "losses").exists() and (here.work / "losses").stat().st_size)
    return rundir


def test_stop_after_the_next_checkpoint(here: Here) -> None:
    """The one its policy makes: nothing is saved for the stop, and no notice is given."""
    rundir = start_training(here)
    done = here.run("stop", "r", "--after-checkpoint")
    assert 0 == done.returncode
    assert "link 1 ends after its next checkpoint" in done.stdout
    here.wait_for(lambda: read_status(rundir).state.value == "stopped")
    (link,) = read_status(rundir).links
    assert ("halted", 0) == (link.cause, link.step_to % 30)
    assert link.step_to > 0
    assert rundir.notice(1) is None


def test_stop_saves_at_once(here: Here) -> None:
    """The usual way: a notice, a save at the next step, and it says how to go on."""
    rundir = start_training(here)
    told = json.loads(here.run("stop", "r", "--json").stdout)
    assert ("save", 1, [], False) == (told["how"], told["link"], told["cancelled"], told["ended"])
    here.wait_for(lambda: read_status(rundir).state.value == "stopped")
    (link,) = read_status(rundir).links
    assert 0 == link.lost_steps
    assert rundir.notice(1) is not None


def test_stop_now_ends_what_does_not_listen(here: Here) -> None:
    """Within seconds, and nothing is left running."""
    here.start("run", "--root", "r", "--set", "kill_wait=1s", "--", "bash", "-c",
               "echo $$; trap '' TERM; while :; do sleep 0.2; done")  # fmt: skip
    log = RunDir(here.work / "r").log_file(1)
    here.wait_for(lambda: log.exists() and log.read_text().strip())
    done = here.run("stop", "last", "--now")
    assert "did not end in time" in done.stdout
    here.wait_for(lambda: read_status(RunDir(here.work / "r")).state.value == "stopped")
    assert not Path("/proc", log.read_text().strip()).exists()


def test_two_ways_to_stop_at_once(finished: Here) -> None:
    """One line, exit 2."""
    done = finished.run("stop", "r", "--now", "--after-checkpoint")
    assert (2, "") == (done.returncode, done.stdout)
    assert "choose one" in done.stderr
    assert "the work is complete" in finished.run("stop", "r", "--now").stderr


# ── last ──────────────────────────────────────────────────────────────────────────────────
def test_last_is_the_newest_run(finished: Here) -> None:
    """Everywhere a root is taken; a directory of that name that is a run goes first."""
    assert "complete" == json.loads(finished.run("status", "last", "--json").stdout)["state"]
    assert "link 3 says hello\n" == finished.run("logs", "last").stdout
    finished.run("run", "--root", "s", "--", "bash", "-c", "echo second")
    assert "second\n" == finished.run("logs", HPC_CKPT_ROOT="last").stdout
    finished.run("run", "--root", "last", "--", "bash", "-c", "echo third")
    finished.run("run", "--root", "t", "--", "bash", "-c", "echo fourth")
    assert "third\n" == finished.run("logs", "last").stdout


def test_last_without_any_run(here: Here) -> None:
    """Exit 2, one line."""
    done = here.run("status", "last")
    assert (2, 1) == (done.returncode, len(done.stderr.splitlines()))
    assert "no run of yours is known" in done.stderr


# ── resume ────────────────────────────────────────────────────────────────────────────────
FAKES = {
    "sbatch": 'cd "${0%/*}"; cat "${@: -1}" >>log; echo $((100 + $(grep -c "^run_link$" log)))',
    "squeue": 'cat live 2>/dev/null || true',
    "scancel": 'echo "$@" >>scancel.log',
    "scontrol": 'echo PartitionName=gpu Default=YES MaxTime=UNLIMITED',
}  # fmt: skip


@pytest.fixture
def submitted(here: Here) -> Here:
    """A chain on a cluster that is four small scripts."""
    folder = here.work / "bin"
    folder.mkdir()
    for name, text in FAKES.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    here.environment["PATH"] = f"{folder}:{here.environment['PATH']}"
    done = here.run(
        "submit", "--profile", "explorer", "--partition", "gpu", "--root", "r", "--policy",
        "every 7 steps", "--total-time", "20h", "--set", "chain.strategy=array", "--", "bash", "-c",
        "true",
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr
    return here


def status_of(here: Here) -> tuple[dict[str, Any], str]:
    """For programs and for people."""
    shown = " ".join(here.run("status", "r").stdout.split())
    return json.loads(here.run("status", "r", "--json").stdout), shown


def test_status_says_what_is_next_and_why_it_waits(submitted: Here) -> None:
    (submitted.work / "live").write_text("101_1|PENDING|Priority|x\n101_2|PENDING|Priority|x\n")
    told, shown = status_of(submitted)
    assert ({"id": "101_1", "reason": "Priority"}, "") == (told["next_job"], told["remark"])
    assert "next: job 101_1, pending (Priority)" in shown


def test_status_says_that_nothing_of_a_chain_is_in_the_queue(submitted: Here) -> None:
    """Not at once: a job may be seen later than sbatch has said its number."""
    told, _ = status_of(submitted)
    assert ("not started", "") == (told["state"], told["remark"])
    for path in ("chain.json", "lease"):
        os.utime(submitted.work / "r" / path, (1e9, 1e9))
    told, shown = status_of(submitted)
    assert "nothing of this chain is in this cluster's queue" in told["remark"]
    assert "nothing of this chain is in this cluster's queue" in shown
    assert 0 == submitted.run("resume", "r").returncode


def test_resume_takes_up_a_stopped_chain_as_it_was(submitted: Here) -> None:
    """Same spec, profile and settings; another job; from another directory, without options."""
    before = json.loads((submitted.work / "r" / "chain.json").read_text())
    (submitted.work / "r" / "halt").write_text("stopped by the user\n")
    (submitted.work / "elsewhere").mkdir()
    done = subprocess.run(
        [*CLI, "resume", "../r"], cwd=submitted.work / "elsewhere", env=submitted.environment,
        capture_output=True, text=True,
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr
    after = json.loads((submitted.work / "r" / "chain.json").read_text())
    for key in ("chain", "spec", "profile", "environment", "command", "cwd", "created", "threads"):
        assert before[key] == after[key], key
    assert {"HPC_CKPT__CHECKPOINT__POLICY": "every 7 steps"} == after["environment"]
    assert 2 == len(after["jobs"])
    assert not (submitted.work / "r" / "halt").exists()


def test_resume_as_json(submitted: Here) -> None:
    """Root, job, links."""
    told = json.loads(submitted.run("resume", "r", "--json").stdout)
    assert (str(submitted.work / "r"), ["102"]) == (told["root"], told["jobs"])


def test_what_cannot_be_resumed(submitted: Here) -> None:
    """Live, complete, local, no chain: each with what to do, and nothing is changed."""
    (submitted.work / "live").write_text("101\n")
    live = submitted.run("resume", "r")
    assert (2, True) == (live.returncode, "is a chain on it already" in live.stderr)
    (submitted.work / "live").unlink()
    (submitted.work / "r" / "DONE").write_text('{"generation": 1, "step": null}')
    complete = submitted.run("resume", "r")
    assert (2, True) == (complete.returncode, "the work is complete" in complete.stderr)
    submitted.run("run", "--root", "mine", "--max-links", "1", "--", "bash", "-c", "exit 75")
    local = submitted.run("resume", "mine")
    assert (2, True) == (local.returncode, "hpc-ckpt run" in local.stderr)
    none = submitted.run("resume", "nowhere")
    assert (2, True) == (none.returncode, "no run there" in none.stderr)
    for done in (live, complete, local, none):
        assert ("", 1) == (done.stdout, len(done.stderr.splitlines()))
    assert 1 == len(json.loads((submitted.work / "r" / "chain.json").read_text())["jobs"])


def test_a_chain_of_a_plain_program_has_no_spec(here: Here) -> None:
    """It says so."""
    from hpc_ckpt.making import prepare

    prepare(RunDir(here.work / "r"))
    assert "no submitted chain there" in here.run("resume", "r").stderr


# ── report ────────────────────────────────────────────────────────────────────────────────
def test_a_report_for_support(here: Here) -> None:
    """Says what it took out, and tells to look into it."""
    script = 'echo "WANDB_API_KEY=$0 in the log"'
    here.run("run", "--root", "r", "--", "bash", "-c", script, "hunter2")
    done = here.run("report", "--for-support", "r", "-o", "x.tar.gz")
    assert 0 == done.returncode, done.stderr
    assert "logs/link-00000001.log:1: value of WANDB_API_KEY" in done.stdout
    assert "look into it before you send it" in done.stdout
    with tarfile.open(here.work / "x.tar.gz") as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert {"chain.json", "about.json", "ledger/00000001.jsonl", "redacted.txt"} <= names
    again = here.run("report", "--for-support", "r", "-o", "x.tar.gz")
    assert (2, 1) == (again.returncode, len(again.stderr.splitlines()))
    assert 0 == here.run("report", "--for-support", "last").returncode
    assert 1 == len(list(here.work.glob("hpc-ckpt-support-r-*.tar.gz")))
    assert 2 == here.run("report", "r").returncode
