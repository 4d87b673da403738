"""The command line as a user meets it: real processes, exit codes, one-line errors."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_ckpt.rundir import RunDir

Cli = Callable[..., subprocess.CompletedProcess[str]]
CLI = [sys.executable, "-m", "hpc_ckpt.cli"]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """hpc-ckpt in an empty directory, on a machine without Slurm and without settings."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("HPC_CKPT")
    }
    environment |= {"HOME": str(tmp_path / "home"), "SLURM_CONF": "/nonexistent"}
    environment.pop("XDG_CONFIG_HOME", None)
    (tmp_path / "work").mkdir()

    def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*CLI, *words],
            cwd=tmp_path / "work",
            env=environment | more,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@pytest.mark.parametrize("words", [["--help"], ["status", "run"], ["status", "run", "--json"]])
def test_looking_never_imports_torch(cli: Cli, tmp_path: Path, words: list[str]) -> None:
    """A login node never pays for it, nor for the spec's libraries."""
    RunDir(tmp_path / "work" / "run").create()
    script = (
        "import sys\n"
        "from hpc_ckpt.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'jinja2', 'submitit'}\n"
        "print(code, sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=tmp_path / "work",
        capture_output=True,
        text=True,
    )
    assert "0 []" == done.stderr.splitlines()[-1]


def test_status_of_a_run(cli: Cli, tmp_path: Path) -> None:
    """The table and the JSON tell the same story."""
    assert 0 == cli("run", "--root", "r", "--", "bash", "-c", "true").returncode
    shown = cli("status", "r")
    assert 0 == shown.returncode
    assert "complete" in shown.stdout
    told = json.loads(cli("status", "r", "--json").stdout)
    assert ("complete", 1, "complete") == (
        told["state"], len(told["links"]), told["links"][0]["cause"],
    )  # fmt: skip


def test_the_root_may_come_from_the_environment(cli: Cli, tmp_path: Path) -> None:
    """$HPC_CKPT_ROOT is the default of every verb that takes a root."""
    cli("run", "--root", "r", "--", "true")
    told = cli("status", "--json", HPC_CKPT_ROOT=str(tmp_path / "work" / "r"))
    assert "complete" == json.loads(told.stdout)["state"]


def test_run_says_what_it_will_do_and_how_it_ended(cli: Cli) -> None:
    """The plan first, the table last; exit 1 when the chain stopped short."""
    done = cli("run", "--name", "stuck", "--max-links", "4", "--", "false")
    assert 1 == done.returncode
    assert "links     at most 4 of 1h each" in done.stdout
    assert "no progress in two links running" in done.stdout


def test_a_command_string_with_shell_syntax_runs_through_bash(cli: Cli, tmp_path: Path) -> None:
    """As a string through bash -c, as a list as it is."""
    spec = tmp_path / "work" / "s.yaml"
    spec.write_text('command: echo "a  b" > out; test -s out\nroot: r\n')
    assert 0 == cli("run", "s.yaml").returncode
    assert "a  b\n" == (tmp_path / "work" / "out").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "give either a spec file or a command after '--'"),
        (["run", "no.yaml"], "no.yaml"),
        (["run", "bad.yaml"], "bad.yaml:2"),
        (["run", "typo.yaml"], "typo.yaml:2: chain.max_link: unknown key"),
        (["run", "--", "python", "missing.py"], "no file 'missing.py'"),
        (["run", "--", "./missing"], "no file './missing'"),
        (["run", "--", "no-such-program"], "no program 'no-such-program' on the PATH"),
        (["run", "--root", "file/x", "--", "true"], "cannot be made or written"),
        (["run", "--policy", "sometimes", "--", "true"], "'sometimes' is not a policy"),
        (["run", "--policy", "young", "--", "true"], "not available in this version"),
        (["run", "--max-links", "many", "--", "true"], "--max-links"),
        (["run", "--set", "chain.max_link=3", "--", "true"], "max_links"),
        (["run", "--set", "nonsense", "--", "true"], "write KEY=VALUE"),
        (["submit", "--", "true"], "no Slurm here: run the chain on this machine"),
        (["run", "--profile", "nowhere", "--", "true"], "no profile is named 'nowhere'"),
        (["run", "--profile", "explorer", "--", "true"], "use 'hpc-ckpt submit'"),
        (["submit", "--profile", "explorer", "--partition", "nope", "--", "true"],
         "knows no partition 'nope'"),
        (["submit", "--profile", "explorer", "--partition", "gpu", "--link-time", "9h", "--",
          "true"], "more than partition 'gpu' allows"),
        (["render", "--profile", "explorer", "--link-time", "3m", "--", "true"], "too short"),
        (["status"], "which run?"),
        (["status", "nowhere"], "no run there"),
        (["stop", "nowhere"], "no chain there"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_a_mistake_is_one_line_exit_2_and_nothing_is_left_behind(
    cli: Cli, tmp_path: Path, words: list[str], message: str
) -> None:
    """It says what, where and what to do."""
    work = tmp_path / "work"
    (work / "bad.yaml").write_text("command: [unclosed\n")
    (work / "typo.yaml").write_text("command: 'true'\nchain: {max_link: 3}\n")
    (work / "file").write_text("")
    before = sorted(work.rglob("*"))
    done = cli(*words)
    assert (2, "") == (done.returncode, done.stdout)
    assert message in done.stderr
    assert 1 == len(done.stderr.splitlines())
    assert before == sorted(work.rglob("*"))


@pytest.mark.parametrize("verb", ["ls", "verify"])
def test_looking_for_checkpoints_where_there_is_no_run(cli: Cli, verb: str) -> None:
    """A mistake, not a defect: exit 2."""
    done = cli(verb, "nowhere")
    assert 2 == done.returncode
    assert 1 == len(done.stderr.splitlines())


def test_a_failed_submission_removes_only_what_it_made(cli: Cli, tmp_path: Path) -> None:
    """A neighbour that appeared in the same new folder meanwhile is left alone."""
    work = tmp_path / "work"
    slow = work / "bin" / "sbatch"
    slow.parent.mkdir()
    slow.write_text("#!/bin/bash\nmkdir -p runs/neighbour && touch runs/neighbour/x; exit 1\n")
    slow.chmod(0o755)
    (work / "bin" / "scontrol").write_text("#!/bin/bash\necho PartitionName=gpu Default=YES\n")
    (work / "bin" / "scontrol").chmod(0o755)
    (work / "bin" / "squeue").write_text("#!/bin/bash\n")
    (work / "bin" / "squeue").chmod(0o755)
    path = f"{work / 'bin'}:{os.environ['PATH']}"
    done = cli("submit", "--profile", "explorer", "--partition", "gpu", "--", "true", PATH=path)
    assert 2 == done.returncode, done.stderr
    assert [work / "runs" / "neighbour"] == list((work / "runs").iterdir())


def test_settings_of_the_submission_outrank_those_in_the_program(cli: Cli, tmp_path: Path) -> None:
    """environment and command line > call: the link hands them on as variables."""
    done = cli("run", "--root", "r", "--policy", "every 7 steps", "--", "bash", "-c",
               "env | grep HPC_CKPT__")  # fmt: skip
    assert 0 == done.returncode
    log = tmp_path / "work" / "r" / "logs" / "link-00000001.log"
    assert "HPC_CKPT__CHECKPOINT__POLICY=every 7 steps\n" == log.read_text()


def test_tiers_of_the_submission_outrank_the_programs_own(cli: Cli, tmp_path: Path) -> None:
    """As JSON: a directory may have a comma in its name. Relative means relative to here."""
    words = ("run", "--root", "r", "--set", "tiers=fast/x, root")
    done = cli(*words, "--", "bash", "-c", "env | grep HPC_CKPT__")
    assert "tiers     " in done.stdout
    log = tmp_path / "work" / "r" / "logs" / "link-00000001.log"
    fast = tmp_path / "work" / "fast" / "x"
    assert f'HPC_CKPT__TIERS=["{fast}", "root"]\n' == log.read_text()


def test_a_tier_nobody_knows_is_refused_at_submission(cli: Cli) -> None:
    """With what to write instead."""
    done = cli("run", "--set", "tiers=scratch", "--", "true")
    assert (2, "") == (done.returncode, done.stdout)
    assert "tiers: the profile of local: no storage is named 'scratch'. Known: root." in done.stderr


def test_a_program_killed_in_front_of_a_pipe_is_not_complete(cli: Cli, tmp_path: Path) -> None:
    """The string form runs with pipefail."""
    (tmp_path / "work" / "s.yaml").write_text("command: 'false | cat'\nroot: r\n")
    assert 1 == cli("run", "s.yaml").returncode
    assert not (tmp_path / "work" / "r" / "DONE").exists()


def test_a_finished_root_is_not_run_again_by_accident(cli: Cli) -> None:
    """The message says how, if it is meant."""
    cli("run", "--root", "r", "--", "true")
    done = cli("run", "--root", "r", "--", "true")
    assert 2 == done.returncode
    assert "the work is complete; delete" in done.stderr


def test_a_root_in_use_is_refused(cli: Cli, tmp_path: Path) -> None:
    """Two chains on one root cannot be."""
    first = subprocess.Popen(
        [*CLI, "run", "--root", "r", "--", "sleep", "60"],
        cwd=tmp_path / "work",
        stdout=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 20
        while not (tmp_path / "work" / "r" / "ledger" / "00000001.jsonl").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        done = cli("run", "--root", "r", "--", "true")
        assert 2 == done.returncode
        assert "in use by process" in done.stderr
    finally:
        first.terminate()
        first.wait()


def test_stop_halts_and_run_takes_it_up_again(cli: Cli, tmp_path: Path) -> None:
    """halt, notice; the next run goes on with a new budget."""
    script = (
        "[ $HPC_CKPT_GENERATION -gt 1 ] && exit 0; "
        "while [ ! -e $HPC_CKPT_NOTICE ]; do sleep 0.1; done; exit 75"
    )
    words = ["run", "--root", "r", "--max-links", "1", "--", "bash", "-c", script]
    first = subprocess.Popen(
        [*CLI, *words], cwd=tmp_path / "work", stdout=subprocess.PIPE, text=True
    )
    ledger = tmp_path / "work" / "r" / "ledger" / "00000001.jsonl"
    end = time.monotonic() + 20
    while not ledger.exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    assert 0 == cli("stop", "r").returncode
    output, _ = first.communicate(timeout=20)
    assert 1 == first.returncode
    assert "stopped by the user" in output
    assert 0 == cli(*words).returncode


def test_config_show_names_the_origin_of_every_value(cli: Cli, tmp_path: Path) -> None:
    """File and line, environment variable, option, default."""
    text = "command: 'true'\nchain:\n  max_links: 7\npartition: [gpu, low]\n"
    (tmp_path / "work" / "s.yaml").write_text(text)
    done = cli(
        "config", "show", "s.yaml", "--origin", "--set", "name=mine",
        HPC_CKPT__CHECKPOINT__POLICY="every 3 steps",
    )  # fmt: skip
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert "s.yaml:3" in rows["chain.max_links"]
    assert "HPC_CKPT__CHECKPOINT__POLICY" in rows["checkpoint.policy"]
    assert "--set name" in rows["name"]
    assert "default" in rows["resources.cpus"]
    assert "[gpu, low]" in rows["partition"]  # and not taken for markup


def test_render_prints_the_script_and_makes_nothing(cli: Cli, tmp_path: Path) -> None:
    """What submit would use."""
    done = cli("render", "--profile", "explorer", "--partition", "gpu", "--", "true")
    assert 0 == done.returncode
    assert done.stdout.startswith("#!/bin/bash\n#SBATCH ")
    assert [] == list((tmp_path / "work").iterdir())
