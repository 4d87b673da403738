"""The batch script: golden files, its set-up run for real by bash, and the shim.

HPC_CKPT_REGENERATE_GOLDEN=1 writes the golden files anew; read the difference before keeping it.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt import processes, resources
from hpc_ckpt.chain.activation import Activation, Kind
from hpc_ckpt.chain.directives import Directive
from hpc_ckpt.chain.layers import Option, load
from hpc_ckpt.chain.plan import plan_chain
from hpc_ckpt.chain.render import render, sbatch_line
from hpc_ckpt.errors import SpecError
from hpc_ckpt.levels.choice import MODEL, Choice

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
    level: Choice = MODEL,
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
    plan = plan_chain(loaded.spec, loaded.profile, cwd=cwd, level=level, activations=activations)
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


def test_a_program_that_writes_files_of_its_own(tmp_path: Path) -> None:
    """`hpc-ckpt submit -- gmx mdrun`: jobs that wait for each other, no array."""
    command = Option("command line", "command", ["gmx", "mdrun"])
    level = Choice(({"name": "gromacs"},), "gromacs", "by its recipe")
    made = script(
        {}, tmp_path=tmp_path, live_cluster="lab", activations=(), options=[command], level=level
    )
    compare("own-files", made)


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
    assert code[0].startswith("hpc_ckpt_root=")
    after = code.index("}") + 1
    assert ["run_link() {", "leave_node"] == [code[2], code[after - 2].strip()]
    assert code[after].startswith("trap '' USR")
    assert "trap 'run_link --told' TERM" == code[after + 1]
    assert ("run_link --set-up" if "hpc_ckpt_stop() {" in code else "run_link") == code[-1]


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
    """Run a script with commands of our own in front: modules, conda and Slurm's."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    told = f'echo "${{0##*/}} $*" >>{shlex.quote(str(tmp_path / "asked"))}'
    for name, body in {
        "module": 'echo "module $*"; [ "$2" != broken ]',
        "scontrol": f"{told}\n"
        'if [ "$2" = show ]; then echo "JobId=78 $ASKED ExcNodeList=${EXC-n9} X=1"; fi\n'
        'if [ "$2" = hostnames ]; then eval "echo {$(tr "[]" "{}" <<<"$3"),}" | tr " " "\\n"; fi\n'
        'if [ "$1" = requeue ]; then [ -z "$REQUEUE" ]; fi',
        "sinfo": "if [[ $* != *--@(all|partition)* || -n $SINFO_PARTITION ]]; then exit; fi\n"
        'if [[ $* == *--all*--partition* ]]; then echo "Conflicting options" >&2; exit 1; fi\n'
        'if [[ $* == *--nodes=* ]]; then echo "gpu:1|ib|"; else printf "$NODES"; fi',
        "squeue": '[ -n "$SQUEUE_PARTITION" ] || printf "$QUEUE"',
        "sbatch": f"{told}\nenv >{shlex.quote(str(tmp_path / 'handed-on'))}",
        "sleep": f'{told}\nif [ -n "$STOPPED" ]; then touch "$STOPPED"; fi',
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
    expected = f"-I -m hpc_ckpt.chain.link --root {root} --backend slurm --strategy array\n"
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
def test_a_set_up_that_fails_is_told_to_the_runner(
    root: Path, tmp_path: Path, profile: str, activations: list[Activation], said: str
) -> None:
    """It alone knows whether another node may do; the program is not started."""
    done = run(prepared(root, tmp_path, profile, activations=activations), tmp_path)
    last = done.stdout.splitlines()[-1]
    assert f"--root {root} --backend slurm --strategy array --not-set-up {said}" in last
    assert f"hpc-ckpt: {said}" in done.stderr
    assert "this link did not start" in done.stderr


def test_a_prologue_may_call_its_own_interpreter_python(root: Path, tmp_path: Path) -> None:
    """In a variable that many scripts have; the runner's is another."""
    text = prepared(root, tmp_path, "environment: {prologue: python=/no/python}", activations=())
    assert run(text, tmp_path).stdout.endswith("--strategy array --set-up\n")


OWN_NAMES = "root=/opt/apps; stop() { :; }"


def test_a_prologue_may_use_names_that_many_scripts_have(root: Path, tmp_path: Path) -> None:
    """The runner would find no chain where the site has its programs."""
    site = f"environment: {{prologue: '{OWN_NAMES}'}}"
    text = prepared(root, tmp_path, site, activations=())
    assert f"--root {root} --backend slurm" in run(text, tmp_path).stdout
    on_node(broken(root, tmp_path, "requeue", prologue=OWN_NAMES), tmp_path)
    assert (root / "logs" / "setup-failed-no-runner").exists()


def test_its_failure_is_told_all_the_same(root: Path, tmp_path: Path) -> None:
    """A link that ended without the runner would be followed by nothing."""
    site = f"environment: {{prologue: '{OWN_NAMES}; false'}}"
    done = run(prepared(root, tmp_path, site), tmp_path)
    assert f"--root {root} " in done.stdout
    assert "--not-set-up the prologue of the profile failed on " in done.stdout


def test_a_set_up_that_succeeds_is_told_too(root: Path, tmp_path: Path) -> None:
    """A failure elsewhere is then the node's."""
    text = prepared(root, tmp_path, "environment: {modules: [good]}", activations=())
    assert run(text, tmp_path).stdout.endswith("--strategy array --set-up\n")


# ── nodes on which the runner cannot start ────────────────────────────────────────────────
NODES = "gpu:1|ib|n1\ngpu:1|ib|n2\n"
ON_NODE = {
    "SLURM_JOB_ID": "78",
    "SLURM_ARRAY_TASK_ID": "4",
    "SLURMD_NODENAME": "n1",
    "SLURM_JOB_PARTITION": "gpu",
    "SINFO_PARTITION": "cpu",
    "SQUEUE_PARTITION": "cpu",
}
NO_MODULE = "#!/bin/bash\necho \"No module named 'hpc_ckpt'\" >&2; exit 1\n"


def broken(
    root: Path, tmp_path: Path, strategy: str, *, python: str = "/no/python", prologue: str = ""
) -> str:
    rules = f"strategy: {strategy}, submit_from_compute_nodes: true"
    site = f"chain: {{{rules}}}\nenvironment: {{prologue: '{prologue}'}}\n"
    (tmp_path / "site.yaml").write_text(site)
    return script(
        {"command": "x", "root": str(root)},
        tmp_path=tmp_path,
        profile=str(tmp_path / "site.yaml"),
        python=python,
        activations=(),
    )


def on_node(text: str, tmp_path: Path, **environ: str) -> list[str]:
    """What the scheduler is asked, and how long is waited; the link has failed. Its partition is
    hidden, and the user's own view of the cluster another."""
    (tmp_path / "asked").touch()
    done = run(text, tmp_path, **{"NODES": NODES, **ON_NODE, **environ})
    assert 1 == done.returncode
    assert "cannot run hpc_ckpt on " in done.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    (tmp_path / "asked").unlink()
    return [line for line in asked if not line.startswith(("scontrol -o show", "scontrol show"))]


@pytest.mark.parametrize(
    ("strategy", "job"),
    [("requeue", "78"), ("array", "77_4"), ("afterany", "78"), ("resubmit", "78")],
)
def test_a_node_without_the_interpreter_is_left_to_others(
    root: Path, tmp_path: Path, strategy: str, job: str
) -> None:
    """However links follow each other: the node is excluded, the link put back after a while."""
    asked = on_node(broken(root, tmp_path, strategy), tmp_path)
    pending = ["scontrol update jobid=77 ExcNodeList=n9,n1"] if strategy == "array" else []
    last = ["sleep 120", f"scontrol requeue {job}"]
    assert [*pending, *last, f"scontrol update jobid={job} ExcNodeList=n9,n1"] == asked
    assert "n1\n" == (root / "logs" / "no-runner-nodes").read_text()
    assert not (root / "logs" / "setup-bad-nodes").exists()
    said = (root / "logs" / "setup-failed-no-runner").read_text()
    assert said.startswith("hpc-ckpt: /no/python cannot run hpc_ckpt on ")


def test_the_jobs_that_wait_for_this_one_do_not_meet_the_node(root: Path, tmp_path: Path) -> None:
    """afterany: each is a job of its own, known by the script that it runs."""
    own = root / "chain.sbatch"
    queue = f"79|{own}\n80|/other/chain.sbatch\n81|{own}\n"
    asked = on_node(broken(root, tmp_path, "afterany"), tmp_path, QUEUE=queue)
    told = [f"scontrol update jobid={job} ExcNodeList=n9,n1" for job in (79, 81)]
    assert [*told, "sleep 120"] == asked[:3]


@pytest.mark.parametrize("strategy", ["array", "afterany"])
def test_a_node_that_is_known_is_not_told_again(root: Path, tmp_path: Path, strategy: str) -> None:
    """A thousand members meet it; those that wait know it from the first."""
    (root / "logs" / "no-runner-nodes").write_text("n1\n")
    queue = f"79|{root}/chain.sbatch\n"
    asked = on_node(broken(root, tmp_path, strategy), tmp_path, QUEUE=queue)
    assert "sleep 120" == asked[0]
    assert asked[-1].endswith(" ExcNodeList=n9,n1")
    assert "n1\n" == (root / "logs" / "no-runner-nodes").read_text()


@pytest.mark.parametrize(
    ("wanted", "left"),
    [("ReqNodeList=n[1-2]", False), ("Reservation=course", False), ("ReqNodeList=(null)", True)],
)
def test_nodes_that_were_asked_for_by_name_are_not_excluded(
    root: Path, tmp_path: Path, wanted: str, left: bool
) -> None:
    """Others of the partition are none of this job's: it would wait for ever."""
    asked = on_node(broken(root, tmp_path, "requeue"), tmp_path, ASKED=wanted)
    assert left == any("ExcNodeList" in line for line in asked)
    assert left == (root / "logs" / "no-runner-nodes").exists()


def test_an_interpreter_without_the_package_is_no_runner(root: Path, tmp_path: Path) -> None:
    """Half a virtual environment is mounted, or pip is at work in it."""
    (tmp_path / "python").write_text(NO_MODULE)
    (tmp_path / "python").chmod(0o755)
    text = broken(root, tmp_path, "requeue", python=str(tmp_path / "python"))
    assert "scontrol requeue 78" in on_node(text, tmp_path)


@pytest.mark.parametrize("prologue", ["set -o pipefail", "set -euo pipefail; false"])
def test_a_strict_prologue_does_not_hide_the_other_nodes(
    root: Path, tmp_path: Path, prologue: str
) -> None:
    """Who answers at the first match leaves the writer of a long list with a broken pipe."""
    long = "".join(f"gpu:1|ib|{'n' * 90}{number}\n" for number in range(1000))
    text = broken(root, tmp_path, "requeue", prologue=prologue)
    asked = on_node(text, tmp_path, NODES=long)
    assert "scontrol update jobid=78 ExcNodeList=n9,n1" == asked[-1]


@pytest.mark.parametrize(
    ("nodes", "known"),
    [("gpu:1|ib|n1\n", ""), ("gpu:1|ib|n1\n(null)|ib|n2\n", ""), (NODES, "n2\n"), ("", "")],
)
def test_the_last_node_that_could_do_is_not_excluded(
    root: Path, tmp_path: Path, nodes: str, known: str
) -> None:
    """A job that may run nowhere would wait for ever."""
    (root / "logs" / "setup-bad-nodes").write_text(known)
    asked = on_node(broken(root, tmp_path, "array"), tmp_path, NODES=nodes)
    assert ["sleep 120", "scontrol requeue 77_4"] == asked
    assert known == (root / "logs" / "setup-bad-nodes").read_text()
    assert not (root / "logs" / "no-runner-nodes").exists()


@pytest.mark.parametrize(
    ("excluded", "left"), [("n2", False), ("n9,n[2,3]", False), ("n[3,9]", True), ("(null)", True)]
)
def test_a_node_that_is_excluded_already_could_not_do(
    root: Path, tmp_path: Path, excluded: str, left: bool
) -> None:
    """By its user, or for links that failed there; Slurm tells them in its short form."""
    asked = on_node(broken(root, tmp_path, "array"), tmp_path, EXC=excluded)
    assert left == any("ExcNodeList" in line for line in asked)
    assert left == (root / "logs" / "no-runner-nodes").exists()


def test_where_no_job_is_put_back_a_link_submits_the_next(root: Path, tmp_path: Path) -> None:
    """Of resubmit nothing waits behind it."""
    (root / "chain.sbatch").touch()
    told = {"SLURM_CONF": "/etc/it", "SBATCH_PARTITION": "cpu", "PMI_RANK": "0", "SLURMX": "mine"}
    asked = on_node(broken(root, tmp_path, "resubmit"), tmp_path, REQUEUE="disabled", **told)
    assert f"sbatch --dependency=afterany:78 --exclude=n9,n1 {root}/chain.sbatch" == asked[-1]
    names = {line.partition("=")[0] for line in (tmp_path / "handed-on").read_text().splitlines()}
    of_slurm = {name for name in names if name.startswith(("SLURM", "SBATCH", "PMI"))}
    assert {"SLURM_CONF", "SLURMX", "SLURMD_NODENAME"} == of_slurm


def test_a_node_without_a_runner_is_not_left_for_ever(root: Path, tmp_path: Path) -> None:
    """Somebody has to do something then; the log of the job says so."""
    (root / "logs" / "setup-failed-no-runner").write_text("x\n" * 20)
    asked = on_node(broken(root, tmp_path, "requeue"), tmp_path)
    assert ["sleep 120"] == asked


@pytest.mark.parametrize("when", ["before", "in the pause"])
@pytest.mark.parametrize("strategy", ["requeue", "array", "afterany", "resubmit"])
def test_a_chain_that_was_stopped_is_not_put_back(
    root: Path, tmp_path: Path, strategy: str, when: str
) -> None:
    """Without a lease `hpc-ckpt stop` sees no link here that it could tell."""
    halt = root / "halt"
    if when == "before":
        halt.touch()
    asked = on_node(broken(root, tmp_path, strategy), tmp_path, STOPPED=str(halt))
    assert [] == [line for line in asked if line.startswith(("scontrol requeue", "sbatch"))]
    assert (when != "before") == ("sleep 120" in asked)


# ── what reaches the program ──────────────────────────────────────────────────────────────
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


STUBBORN = """
trap '' TERM INT HUP
(setsid bash -c 'echo $$ >>pids; while :; do sleep 0.1; done' &)
env -i sleep 300 &
echo $! >>pids
until [ "$(wc -l <pids)" = 2 ]; do sleep 0.1; done
echo ready
while :; do sleep 0.1; done
"""


def test_the_shim_kills_a_link_that_was_overtaken(tmp_path: Path) -> None:
    """All that its command has started, in whichever session; then it says so."""
    (tmp_path / "lease").mkdir()
    fence = tmp_path / "lease" / "00000003"
    (tmp_path / "lease" / "00000002.left").touch()
    with subprocess.Popen(
        ["bash", SHIM, "bash", "-c", STUBBORN],
        env={**os.environ, "HPC_CKPT_FENCE": str(fence), "HPC_CKPT_GENERATION": "2"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=default_signals,  # noqa: PLW1509 - no other thread holds a lock here
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        fence.touch()
        assert 75 == process.wait(timeout=20)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert [] == [pid for pid in pids if (stat := processes.stat_of(pid)) and not stat.ended]
    assert {"00000002.released", "00000003"} == {p.name for p in fence.parent.iterdir()}


def test_the_shim_of_a_program_with_a_checkpointer_fences_nobody(tmp_path: Path) -> None:
    """Nothing of it counts any more, and it finds out by itself."""
    with shim(tmp_path / "notice", "bash", "-c", "sleep 2.5; exit 7") as process:
        assert 7 == process.wait(timeout=20)
