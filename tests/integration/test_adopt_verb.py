"""`hpc-ckpt adopt` as a user meets it: shown first, written only when asked, and it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., subprocess.CompletedProcess[str]]

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=count
#SBATCH --time=01:00:00
#SBATCH --partition=gpu
#SBATCH --output=count-%j.out
#SBATCH --licenses=matlab:1
#SBATCH --export=ALL,GREETING="good day"

# Counts to three, one a link.
echo "$GREETING" >>said
echo x >>state
[ "$(wc -l <state)" -ge 3 ] || exit 75
"""
FAKES = {
    "sbatch": 'cp "$2" submitted; echo 101',
    "squeue": "true",
    "scontrol": "echo PartitionName=gpu Default=YES MaxTime=UNLIMITED",
}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    (work / "jobs").mkdir(parents=True)
    (work / "jobs" / "count.sbatch").write_text(SCRIPT)
    (tmp_path / "bin").mkdir()
    for name, text in FAKES.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return work


@pytest.fixture
def cli(tmp_path: Path, work: Path) -> Cli:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HPC_CKPT")}
    environment |= {"HOME": str(tmp_path), "SLURM_CONF": "/nonexistent"}
    environment["HPC_CKPT_PROFILE"] = "local"  # or every call asks for a Slurm and waits
    environment.pop("XDG_CONFIG_HOME", None)

    def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "hpc_ckpt.cli", *words],
            cwd=work,
            env=environment | more,
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )

    return run


@pytest.fixture
def path(tmp_path: Path) -> str:
    """With a cluster that is three small scripts."""
    return f"{tmp_path / 'bin'}:{os.environ['PATH']}"


def files(work: Path) -> list[str]:
    return sorted(str(p.relative_to(work)) for p in work.rglob("*") if p.is_file())


def test_it_only_shows(cli: Cli, work: Path) -> None:
    """What becomes of each option, the spec, and the differences; nothing is written."""
    done = cli("adopt", "jobs/count.sbatch", "--profile", "explorer")
    assert 0 == done.returncode, done.stderr
    assert ["jobs/count.sbatch"] == files(work)
    for expected in (
        "chain.link_time: 01:00:00",
        "replaced",
        "--- jobs/count.sbatch\n+++ chain.sbatch\n",
        "-#SBATCH --output=count-%j.out\n",
        " #SBATCH --licenses=matlab:1\n",
        "--- jobs/count.sbatch\n+++ jobs/count.chain.sh\n",
        "+export GREETING='good day'\n",
    ):
        assert expected in done.stdout, done.stdout
    assert "--array" not in done.stdout  # it writes files of its own


def test_without_a_cluster_the_batch_script_is_not_shown(cli: Cli) -> None:
    """And it says how to see it."""
    done = cli("adopt", "jobs/count.sbatch")
    assert 0 == done.returncode
    assert "name a cluster with --profile" in done.stdout
    assert "+++ jobs/count.chain.sh" in done.stdout


def test_the_written_spec_runs(cli: Cli, work: Path) -> None:
    """Three links, one a count."""
    done = cli("adopt", "jobs/count.sbatch", "-o", "count.yaml")
    assert 0 == done.returncode, done.stderr
    assert ["count.chain.sh", "count.yaml", "jobs/count.sbatch"] == files(work)
    ran = cli("run", "count.yaml")
    assert 0 == ran.returncode, ran.stdout
    assert "good day\n" * 3 == (work / "said").read_text()
    told = json.loads(cli("status", "runs/count", "--json").stdout)
    assert (3, "complete") == (len(told["links"]), told["state"])


def test_files_of_others_are_left_alone(cli: Cli, work: Path) -> None:
    """The same again is no matter; what differs needs --force."""
    assert 0 == cli("adopt", "jobs/count.sbatch", "-o", "count.yaml").returncode
    assert 0 == cli("adopt", "jobs/count.sbatch", "-o", "count.yaml").returncode
    (work / "count.chain.sh").write_text("mine\n")
    refused = cli("adopt", "jobs/count.sbatch", "-o", "count.yaml")
    assert (2, "") == (refused.returncode, refused.stdout)
    assert "count.chain.sh: is there already" in refused.stderr
    assert "mine\n" == (work / "count.chain.sh").read_text()
    assert 0 == cli("adopt", "jobs/count.sbatch", "-o", "count.yaml", "--force").returncode


def test_submitting_needs_a_yes(cli: Cli, work: Path, path: str) -> None:
    """Where nobody can be asked nothing is written or submitted."""
    words = ("adopt", "jobs/count.sbatch", "--profile", "explorer", "--submit")
    done = cli(*words, PATH=path)
    assert 2 == done.returncode
    assert "say --yes" in done.stderr
    assert ["jobs/count.sbatch"] == files(work)
    done = cli(*words, "--yes", PATH=path)
    assert 0 == done.returncode, done.stderr
    assert "submitted job 101" in done.stdout
    record = json.loads((work / "runs" / "count" / "chain.json").read_text())
    assert ["bash", "jobs/count.chain.sh"] == record["argv"]
    assert "#SBATCH --licenses=matlab:1\n" in (work / "submitted").read_text()


def test_a_program_behind_the_script_that_saves_for_itself_is_seen(cli: Cli, work: Path) -> None:
    """The spec says so: whoever submits it later would look into the script alone."""
    (work / "train.py").write_text("from hpc_ckpt import Checkpointer\n")
    (work / "jobs" / "count.sbatch").write_text("#!/bin/bash\n#SBATCH -p gpu\npython train.py\n")
    assert 0 == cli("adopt", "jobs/count.sbatch", "-o", "count.yaml").returncode
    assert "level: model\n" in (work / "count.yaml").read_text()
    shown = cli("adopt", "jobs/count.sbatch", "--profile", "explorer").stdout
    assert "+#SBATCH --array=1-10%1\n" in shown
    (work / "train.py").write_text("print('no')\n")
    assert 0 == cli("adopt", "jobs/count.sbatch", "-o", "other.yaml", "--force").returncode
    assert "level" not in (work / "other.yaml").read_text()


def test_a_lost_answer_leaves_the_script_that_the_chain_needs(
    cli: Cli, work: Path, tmp_path: Path
) -> None:
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/bash\necho Socket timed out >&2; exit 1\n")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = cli("adopt", "jobs/count.sbatch", "--profile", "explorer", "--submit", "-y", PATH=path)
    assert 1 == done.returncode
    assert "whether it has submitted is not known" in done.stderr
    assert {"jobs/count.chain.sh", "runs/count/chain.json"} <= set(files(work))


def test_a_refused_submission_leaves_nothing(cli: Cli, work: Path, tmp_path: Path) -> None:
    """As submit does."""
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/bash\necho no >&2; exit 1\n")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = cli("adopt", "jobs/count.sbatch", "--profile", "explorer", "--submit", "-y", PATH=path)
    assert 2 == done.returncode
    assert "sbatch refused the chain: no" in done.stderr
    assert ["jobs/count.sbatch"] == files(work)


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("#!/bin/bash\n#SBATCH -N 2\n", [], "x.sbatch:2: --nodes=2"),
        ("no script\n", [], "not a batch script"),
        ("#!/bin/bash\n", ["--submit", "-y"], "no Slurm here"),
        ("#!/bin/bash\n#SBATCH -p nope\n", ["--profile", "explorer"], "knows no partition 'nope'"),
        ("#!/bin/bash\n#SBATCH -t 3\n", ["--profile", "explorer"], "too short"),
    ],
)
def test_a_mistake_is_one_line(
    cli: Cli, work: Path, text: str, words: list[str], message: str
) -> None:
    """Exit 2 and nothing on standard output."""
    (work / "x.sbatch").write_text(text)
    done = cli("adopt", "x.sbatch", *words)
    assert (2, "", 1) == (done.returncode, done.stdout, len(done.stderr.splitlines()))
    assert message in done.stderr


def test_a_script_that_is_not_there(cli: Cli) -> None:
    """One line as well."""
    done = cli("adopt", "none.sbatch")
    assert (2, "", 1) == (done.returncode, done.stdout, len(done.stderr.splitlines()))


@pytest.mark.parametrize(("mode", "of_spec"), [(0o600, 0o600), (0o750, 0o640)])
def test_what_is_written_is_for_those_who_may_read_the_script(
    cli: Cli, work: Path, mode: int, of_spec: int
) -> None:
    """It may have a password in it."""
    (work / "jobs" / "count.sbatch").chmod(mode)
    done = cli("adopt", "jobs/count.sbatch", "-o", "count.yaml")
    assert 0 == done.returncode, done.stderr
    assert mode == (work / "count.chain.sh").stat().st_mode & 0o777
    assert of_spec == (work / "count.yaml").stat().st_mode & 0o777
