"""The batch script: golden files, its set-up run for real by bash, and the shim.

HPC_CKPT_REGENERATE_GOLDEN=1 writes the golden files anew; read the difference before keeping it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt import resources
from hpc_ckpt.chain.activation import Activation, Kind
from hpc_ckpt.chain.directives import Directive
from hpc_ckpt.chain.layers import Option, load
from hpc_ckpt.chain.plan import plan_chain
from hpc_ckpt.chain.render import render, sbatch_line
from hpc_ckpt.errors import SpecError

GOLDEN = Path(__file__).parents[1] / "golden"
CWD = Path("/home/user/project")
PYTHON = "/home/user/venv/bin/python"
VENV = Activation(Kind.VENV, "/home/user/venv")
FULL_SPEC = {
    "name": "resnet",
    "command": "python train.py --lr 0.1",
    "root": "runs/resnet",
    "partition": ["gpu", "lowpriority"],
    "resources": {"nodes": 1, "gpus": 1, "cpus": 8, "memory": "32G"},
    "chain": {"total_time": "72h", "link_time": "8h", "max_links": 40},
    "checkpoint": {
        "policy": "auto",
        "keep": {"last": 3, "every": 10000, "best": {"metric": "accuracy", "mode": "max"}},
    },
    "level": "auto",
}
PREEMPTIBLE = """\
cluster: lab
partitions:
  lowpriority: {max_time: 24h, preempt: {mode: requeue, grace: 120s}}
signal: {name: USR2, lead: 300s}
chain: {strategy: array, requeue: true}
environment:
  modules: [miniconda3, cuda/12.1]
  prologue: |
    eval "$(conda shell.bash hook)"
    conda activate torch
directives: {extra: ["--constraint=ib", '--comment="two words"'], skip: ["--mem"]}
"""


def script(
    given: dict[str, Any],
    *,
    tmp_path: Path,
    profile: str | None = None,
    live_cluster: str | None = None,
    activations: Sequence[Activation] = (VENV,),
    options: Sequence[Option] = (),
    cwd: Path = CWD,
    python: str = PYTHON,
) -> str:
    """The script, from the same front door as the command line's."""
    loaded = load(
        given,
        profile=profile,
        live_cluster=live_cluster,
        options=options,
        cwd=cwd,
        environ={"HOME": "/home/user", "XDG_CONFIG_HOME": str(tmp_path / "config")},
    )
    plan = plan_chain(loaded.spec, loaded.profile, cwd=cwd, activations=activations)
    return render(plan, python=python)


def compare(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.sbatch"
    if os.environ.get("HPC_CKPT_REGENERATE_GOLDEN") == "1":
        path.write_text(text)
    assert path.read_text() == text


# ── golden files ──────────────────────────────────────────────────────────────────────────
def test_a_command_alone_on_a_cluster_nobody_described(tmp_path: Path) -> None:
    """`hpc-ckpt submit -- python train.py`, outside any environment."""
    command = Option("command line", "command", ["python", "train.py"])
    made = script({}, tmp_path=tmp_path, live_cluster="lab", activations=(), options=[command])
    compare("minimal", made)


def test_the_design_s_spec_on_explorer(tmp_path: Path) -> None:
    """Every key of the design's example that is built."""
    compare("explorer", script(FULL_SPEC, tmp_path=tmp_path, profile="explorer"))


def test_names_with_spaces_and_quotes(tmp_path: Path) -> None:
    """Everything that has a meaning to bash, to Slurm's parser or to its log names."""
    nasty = Activation(Kind.CONDA, "/envs/it's $HOME", "/opt/con da/bin/conda")
    made = script(
        {"command": "echo \"$x\" 'y' `z`", "root": 'run\'s "5% off" #1; `id` ü'},
        tmp_path=tmp_path,
        live_cluster="lab",
        activations=[nasty],
        cwd=Path("/home/user/my $(project)"),
        python="/opt/it's python/bin/python",
    )
    compare("quotes", made)


def test_a_preemptible_partition_with_requeue(tmp_path: Path) -> None:
    """The site's modules, prologue, extra and skipped directives, and another signal."""
    (tmp_path / "lab.yaml").write_text(PREEMPTIBLE)
    given = {
        "command": "python train.py",
        "partition": "lowpriority",
        "resources": {"gpus": "a100:2", "cpus": 4, "memory": "16G"},
        "chain": {"total_time": "2 days", "link_time": "12h"},
    }
    compare("preemptible", script(given, tmp_path=tmp_path, profile=str(tmp_path / "lab.yaml")))


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.sbatch")), ids=lambda path: path.stem)
def test_golden_scripts_are_bash(path: Path) -> None:
    """And begin as verified on a real cluster: directives, then what signals do."""
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
    assert (0, "") == (done.returncode, done.stderr)
    code = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert code[0].startswith("root=")
    assert code[5].startswith("trap '' USR")
    assert ["trap 'run_link --told' TERM", "run_link"] == [code[6], code[-1]]


# ── what cannot be rendered ───────────────────────────────────────────────────────────────
def test_a_line_break_cannot_be_in_a_directive(tmp_path: Path) -> None:
    """What follows it would be run by bash."""
    with pytest.raises(SpecError, match=r"--output: .* contains a line break"):
        script({"command": "x", "root": "a\nb"}, tmp_path=tmp_path, live_cluster="lab")
    with pytest.raises(SpecError, match=r"--chdir: .* contains a line break"):
        script(
            {"command": "x", "root": "/r"},
            tmp_path=tmp_path,
            live_cluster="lab",
            cwd=Path("/a\nb"),
        )


def test_a_directive_longer_than_slurms_buffer_is_refused() -> None:
    """Slurm would cut it."""
    with pytest.raises(SpecError, match="--output: too long"):
        sbatch_line(Directive("--output", "ü" * 5000))


def test_the_local_runner_has_no_script(tmp_path: Path) -> None:
    """`render` with the local profile says so."""
    with pytest.raises(SpecError, match="needs no batch script"):
        script({"command": "x"}, tmp_path=tmp_path)


# ── the set-up, run by bash ───────────────────────────────────────────────────────────────
@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "it's a root"
    (root / "logs").mkdir(parents=True)
    return root


def run(text: str, tmp_path: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a script with commands of our own in front: `module`, `scancel` and a last program."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    for name, body in {
        "module": 'echo "module $*"; [ "$2" != broken ]',
        "scancel": 'echo "scancel $*"',
        "conda": 'echo "hook() { :; }; conda() { echo \\"conda \\$*\\"; }"',
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    environ = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_ARRAY_JOB_ID": "77", **environ}
    return subprocess.run(["bash"], input=text, env=environ, capture_output=True, text=True)


def prepared(root: Path, tmp_path: Path, profile: str, **rest: Any) -> str:
    (tmp_path / "site.yaml").write_text(profile)
    return script(
        {"command": "x", "root": str(root)},
        tmp_path=tmp_path,
        profile=str(tmp_path / "site.yaml"),
        python="/bin/echo",
        **rest,
    )


def test_the_script_becomes_the_runner(root: Path, tmp_path: Path) -> None:
    """With exactly these arguments, whatever the root is called."""
    done = run(prepared(root, tmp_path, "cluster: lab", activations=()), tmp_path)
    expected = f"-I -m hpc_ckpt.chain.link --root {root} --backend slurm\n"
    assert (0, expected) == (done.returncode, done.stdout)


def test_modules_and_environment_are_set_up_in_order(root: Path, tmp_path: Path) -> None:
    """Modules first: they may bring the conda that is activated next."""
    conda = Activation(Kind.CONDA, "/envs/my env", str(tmp_path / "tools" / "conda"))
    text = prepared(root, tmp_path, "environment: {modules: [a, b]}", activations=[conda])
    done = run(text, tmp_path)
    expected = ["module load a", "module load b", "conda activate /envs/my env"]
    assert (0, expected) == (done.returncode, done.stdout.splitlines()[:3])


@pytest.mark.parametrize(
    ("profile", "activations", "said"),
    [
        ("environment: {modules: [a, broken, c]}", [], "module load broken failed on "),
        ("environment: {prologue: 'false; true'}", [], "the prologue of the profile failed on "),
        ("environment: {prologue: exit 3}", [], "the prologue of the profile failed on "),
        ("cluster: x", [Activation(Kind.VENV, "/no where")], "activating /no where failed on "),
        ("cluster: x", [Activation(Kind.CONDA, "/e", "/no/conda")], "activating /e failed on "),
        ("cluster: x", [Activation(Kind.MICROMAMBA, "/e", "/no/mm")], "activating /e failed on "),
    ],
)
def test_a_set_up_that_fails_stops_the_link_and_the_second_time_the_chain(
    root: Path, tmp_path: Path, profile: str, activations: list[Activation], said: str
) -> None:
    """One bad node is passed over; a mistake does not use up the whole array."""
    text = prepared(root, tmp_path, profile, activations=activations)
    first = run(text, tmp_path)
    assert (1, False, False) == (
        first.returncode,
        "-I -m" in first.stdout,
        (root / "halt").exists(),
    )
    assert f"hpc-ckpt: {said}" in first.stderr
    assert "this link did not start" in first.stderr
    second = run(text, tmp_path)
    assert 1 == second.returncode
    assert (root / "halt").read_text().startswith(said)
    assert "scancel --state=PENDING 77" in second.stdout


def test_a_set_up_that_succeeds_forgets_the_failure_before(root: Path, tmp_path: Path) -> None:
    """Twice running, not twice in the life of a chain."""
    run(prepared(root, tmp_path, "environment: {modules: [broken]}", activations=()), tmp_path)
    assert (root / "logs" / "setup-failed").exists()
    run(prepared(root, tmp_path, "environment: {modules: [good]}", activations=()), tmp_path)
    assert not (root / "logs" / "setup-failed").exists()


def test_unset_variables_do_not_break_the_set_up(root: Path, tmp_path: Path) -> None:
    """Module scripts read variables that are not set; a prologue may say `set -eu` and leave it."""
    text = prepared(root, tmp_path, "environment: {prologue: 'set -eu'}")
    assert 0 == run(text, tmp_path).returncode
    text = prepared(root, tmp_path, "environment: {prologue: 'echo \"<$NOT_SET>\"'}")
    assert "<>" == run(text, tmp_path).stdout.splitlines()[0]


def test_python_path_and_preload_do_not_reach_the_program(root: Path, tmp_path: Path) -> None:
    """They belong to the submission; what the prologue sets stays."""
    prologue = 'echo "${PYTHONPATH-unset} ${LD_PRELOAD-unset} $SLURM_EXPORT_ENV"'
    text = prepared(root, tmp_path, f"environment: {{prologue: '{prologue}'}}")
    assert "unset unset ALL" == run(text, tmp_path, PYTHONPATH="/x").stdout.splitlines()[0]


# ── the shim ──────────────────────────────────────────────────────────────────────────────
SHIM = str(resources.find("templates/shim.sh"))
UNTIL_NOTICED = 'echo ready; until [ -s "$HPC_CKPT_NOTICE" ]; do :; done; exit 7'


def default_signals() -> None:
    """As the runner resets them; a test run in the background would have INT ignored."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)


def shim(notice: Path, *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", SHIM, *argv],
        env={**os.environ, "HPC_CKPT_NOTICE": str(notice)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=default_signals,  # noqa: PLW1509 - no other thread holds a lock here
    )


@pytest.mark.parametrize("name", ["TERM", "USR1", "USR2"])
def test_the_shim_turns_a_signal_into_a_notice(tmp_path: Path, name: str) -> None:
    """One JSON line; the command is not signalled, and its own exit code is kept."""
    with shim(tmp_path / "no tice", "bash", "-c", UNTIL_NOTICED) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.Signals[f"SIG{name}"])
        assert 7 == process.wait()
    record = json.loads((tmp_path / "no tice").read_text())
    assert (f"shim {name}", False) == (record["source"], record["hurry"])
    assert abs(record["time"] - (tmp_path / "no tice").stat().st_mtime) <= 2


def test_each_signal_is_a_line(tmp_path: Path) -> None:
    """A second notice means hurry; also one that comes while the first is being written."""
    notice = tmp_path / "notice"
    notice.touch()
    all_three = '[ "$(wc -l <"$HPC_CKPT_NOTICE")" = 3 ]'
    command = UNTIL_NOTICED.replace('[ -s "$HPC_CKPT_NOTICE" ]', all_three)
    with shim(notice, "bash", "-c", command) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR1):
            process.send_signal(number)
        assert 7 == process.wait()
    assert {"shim TERM", "shim USR1", "shim USR2"} == {
        json.loads(line)["source"] for line in notice.read_text().splitlines()
    }


def test_a_signal_at_the_very_end_does_not_change_the_exit_code(tmp_path: Path) -> None:
    """bash's `wait` returns 143, or -1 for ever, when a trap and the end of a child coincide."""
    codes = set()
    for _ in range(40):
        with shim(tmp_path / "notice", "bash", "-c", "echo ready; exit 75") as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            codes.add(process.wait())
    assert {75} == codes


def test_the_shim_survives_where_every_process_of_a_step_is_signalled(tmp_path: Path) -> None:
    """proctrack/linuxproc and pgid signal all descendants; the command catches it itself."""
    with shim(tmp_path / "notice", "bash", "-c", f"trap : TERM; {UNTIL_NOTICED}") as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.killpg(process.pid, signal.SIGTERM)
        assert 7 == process.wait()


@pytest.mark.parametrize(
    ("command", "expected"),
    [("exit 0", 0), ("exit 75", 75), ("kill -KILL $$", 137), ("kill -TERM $$", 143)],
)
def test_the_shim_ends_with_the_code_of_its_command(
    tmp_path: Path, command: str, expected: int
) -> None:
    """128 + n for one that was killed, as every shell says it."""
    with shim(tmp_path / "notice", "bash", "-c", command) as process:
        assert expected == process.wait()
    assert not (tmp_path / "notice").exists()


def test_the_command_starts_with_default_signals_and_no_input(tmp_path: Path) -> None:
    """A background command of a shell would ignore INT and QUIT."""
    show = "grep -E '^Sig(Ign|Blk)' /proc/self/status; cat"
    with shim(tmp_path / "notice", "bash", "-c", show) as process:
        assert process.stdout is not None
        lines = process.stdout.read().split()
    # Only these: what else is ignored here, as HUP under nohup, is none of the shim's doing.
    watched = sum(1 << (int(getattr(signal, f"SIG{name}")) - 1)
                  for name in ("INT", "QUIT", "TERM", "USR1", "USR2"))  # fmt: skip
    assert (["SigBlk:", "SigIgn:"], [0, 0]) == (
        lines[::2],
        [int(mask, 16) & watched for mask in lines[1::2]],
    )


def test_a_notice_that_cannot_be_written_does_not_end_the_command(tmp_path: Path) -> None:
    """A full disk must not stop the training that should be saved."""
    read_end, write_end = os.pipe()
    command = f"echo ready; read -r _ <&{read_end}; exit 7"
    process = subprocess.Popen(
        ["bash", SHIM, "bash", "-c", command],
        env={**os.environ, "HPC_CKPT_NOTICE": str(tmp_path / "no" / "where")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[read_end],
        preexec_fn=default_signals,  # noqa: PLW1509 - no other thread holds a lock here
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        process.stderr.readline()
        os.write(write_end, b"go\n")
        assert 7 == process.wait()
    os.close(read_end)
    os.close(write_end)
