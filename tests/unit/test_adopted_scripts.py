"""Batch scripts as chains: what becomes of every option and of the lines of the body."""

import subprocess
from pathlib import Path, PurePath
from typing import Any

import pytest
import yaml

from hpc_ckpt.chain.adopt import Adopted, adopt, script_file
from hpc_ckpt.chain.conflicts import Fate
from hpc_ckpt.chain.layers import Loaded, load
from hpc_ckpt.chain.plan import plan_chain
from hpc_ckpt.chain.render import render
from hpc_ckpt.errors import SpecError

COURSE_GROMACS = """\
#!/bin/bash
#SBATCH --partition=short,lowpriority
#SBATCH --constraint=cascadelake
#SBATCH --nodes=1
#SBATCH --time=12:00:00
#SBATCH --job-name=myrun
#SBATCH --ntasks=56
#SBATCH --array=1-10%1  # execute 10 array jobs, 1 at a time
#SBATCH --output=myrun-%A_%a.out
#SBATCH --error=myrun-%A_%a.err

module load cuda/10.2
module load gcc/7.3.0
module load openmpi/4.0.5-skylake-gcc7.3
module load gromacs/2020.3-gpu-mpi
source /shared/centos7/gromacs/2020.3-gcc7.3/bin/GMXRC.bash

srun --mpi=pmi2 -n $SLURM_NTASKS gmx_mpi mdrun -ntomp 1 -s myrun.tpr -v -dlb yes -cpi state
"""
"""Both scripts are those of the course that this product began with."""

COURSE_TENSORFLOW = """\
#!/bin/bash
#SBATCH --job-name=myrun
#SBATCH --time=00:10:00
#SBATCH --partition=gpu,lowpriority
#SBATCH --nodes=1
#SBATCH --gres=gpu:1
#SBATCH --mem=10Gb
#SBATCH --output=%A-%a.out
#SBATCH --error=%A-%a.err
#SBATCH --array=1-10%1  #execute 10 array jobs, 1 at a time.

module load miniconda3/2020-09
source activate tf_gpu

# Define the number of steps based on the job id:
numOfSteps=$(( 500 * SLURM_ARRAY_TASK_ID ))

# Run python and save outputs to a log file corresponding to the current job task ID
python train_with_checkpoints.py $numOfSteps &> log.$SLURM_ARRAY_TASK_ID
"""


def adopted(*lines: str, body: str = "python train.py") -> Adopted:
    """A script with these directives."""
    text = "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), "", body, ""])
    return adopt(text, source="job.sbatch", script="job.chain.sh")


def spec(*lines: str, body: str = "python train.py") -> dict[str, Any]:
    return adopted(*lines, body=body).spec


def loaded(result: Adopted, tmp_path: Path) -> Loaded:
    """Through the front door: written as a file, read with all layers."""
    path = tmp_path / "spec.yaml"
    path.write_text(result.spec_text("job.sbatch"))
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    return load(path, live_cluster="lab", cwd=tmp_path, environ=home)


def fates(result: Adopted) -> dict[str, Fate]:
    return {remark.what: remark.fate for remark in result.remarks}


def whys(result: Adopted, what: str) -> str:
    return " | ".join(remark.why for remark in result.remarks if remark.what == what)


# ── options ───────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--job-name=resnet", {"name": "resnet", "root": "runs/resnet"}),
        ("-J 'my run!'", {"name": "my-run"}),
        ("-p gpu,lowpriority", {"partition": ["gpu", "lowpriority"]}),
        ("-A chem -q high -C 'a100&ib'",
         {"account": "chem", "qos": "high", "constraint": "a100&ib"}),
        ("--reservation=workshop", {"reservation": "workshop"}),
        ("-x 'c[01-03],d7'", {"exclude": ["c01", "c02", "c03", "d7"]}),
        ("--exclude=./bad-nodes", {"sbatch": ["--exclude=./bad-nodes"]}),
        ("-t 90", {"chain": {"link_time": "90 min"}}),
        ("--time=2-12", {"chain": {"link_time": "2-12"}}),
        ("--time=30:00", {"chain": {"link_time": "30:00"}}),
        ("--time=8:00:00 --time-min=120",
         {"chain": {"link_time": "8:00:00", "min_time": "120 min"}}),
        ("--mail-user=me@example.edu --mail-type=END", {"mail": "me@example.edu"}),
        ("--array=1-20%1", {"chain": {"max_links": 20}}),
        ("--array=5", {"chain": {"max_links": 1}}),
        ("--cpus-per-task=8", {"resources": {"cpus": 8}}),
        ("--gpus=2", {"resources": {"gpus": 2}}),
        ("-G a100:2", {"resources": {"gpus": "a100:2"}}),
        ("--gpus-per-node=v100", {"resources": {"gpus": "v100:1"}}),
        ("--gres=gpu", {"resources": {"gpus": 1}}),
        ("--gres=gpu:4", {"resources": {"gpus": 4}}),
        ("--gres=gpu:a100:2(S:0-1)", {"resources": {"gpus": "a100:2"}}),
        ("--gres=gpu:1,tmp:10G",
         {"resources": {"gpus": 1}, "sbatch": ["--gres=gpu:1,tmp:10G"]}),
        ("--gres=tmp:10G", {"sbatch": ["--gres=tmp:10G"]}),
        ("--gpus=a100:1,v100:1", {"sbatch": ["--gpus=a100:1,v100:1"]}),
        ("--gpus=2 --cpus-per-gpu=6 --mem-per-gpu=40G",
         {"resources": {"gpus": 2, "cpus": 12, "memory": "81920M"}}),
        ("--mem=4000", {"resources": {"memory": "4000M"}}),
        ("--mem=10Gb", {"resources": {"memory": "10Gb"}}),
        ("--mem=0", {"resources": {"memory": "0"}}),
        ("--mem-per-cpu=4G -c 4",
         {"resources": {"cpus": 4}, "sbatch": ["--mem-per-cpu=4G"]}),
        ("-n 4 -c 2", {"resources": {"cpus": 8}}),
        ("-N1 --ntasks-per-node=6", {"resources": {"cpus": 6}}),
        ("-n 2 --gpus-per-task=1", {"resources": {"cpus": 2, "gpus": 2}}),
        ("--exclusive --licenses=matlab:1 --comment='two words'",
         {"sbatch": ["--exclusive", "--licenses=matlab:1", '--comment="two words"']}),
        ("--from-the-future=3", {"sbatch": ["--from-the-future=3"]}),
    ],
)  # fmt: skip
def test_what_an_option_becomes(line: str, expected: dict[str, Any], tmp_path: Path) -> None:
    """Keys of the spec where it has one, a directive as it is where not; and it loads."""
    result = adopted(line)
    found = {key: result.spec.get(key) for key in expected}
    assert expected == found
    assert loaded(result, tmp_path).spec.command == ("bash", "job.chain.sh")


@pytest.mark.parametrize(
    "line",
    [
        "--output=x-%j.out", "--error=x.err", "--open-mode=truncate", "--requeue", "--no-requeue",
        "--dependency=singleton", "--export=ALL", "--signal=USR1@120", "--array=1-3%1",
        "--ntasks=4", "--nodes=1-2", "--chdir=/data", "--mail-type=ALL",
    ],
)  # fmt: skip
def test_what_is_replaced_is_said_with_its_reason(line: str) -> None:
    """Nothing of it stays in the spec under its old name."""
    result = adopted(line)
    assert Fate.REPLACED == fates(result)[line]
    assert len(whys(result, line)) > 15
    assert line not in result.spec.get("sbatch", [])


def test_a_dependency_stays_and_is_explained() -> None:
    """The chain's links wait for each other as well, and sbatch takes one of the two."""
    result = adopted("-d afterok:1234")
    assert ["--dependency=afterok:1234"] == result.spec["sbatch"]
    assert "for the first link; those after it wait for the link before" in whys(
        result, "--dependency=afterok:1234"
    )


@pytest.mark.parametrize("line", ["--wait", "--parsable", "--test-only", "-Q", "-v"])
def test_options_of_the_submission_are_left_out(line: str) -> None:
    """--wait in a chain's script would wait for days."""
    assert {Fate.LEFT_OUT} == set(fates(adopted(line)).values())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--nodes=2", "job.sbatch:2: --nodes=2: a chain on more than one node is not available"),
        ("-N 2-4", "more than one node"),
        ("--array=0-99", "100 tasks side by side are a sweep"),
        ("--array=1-10%2", "members:"),
        ("--array=$N", "not an array expression"),
        ("--ntasks=$N", "sbatch fills in no variables here"),
        ("--clusters=other", "on the cluster it is submitted on"),
        ("--time=soon", "not a duration"),
        ("--mem=much", "not a size"),
        ("--mem=4G --mem-per-cpu=1G", "takes only one of them"),
        ("--signal=nonsense", "job.sbatch:2"),
        ("--export-file=vars", "source it in the script"),
        ("--input=in-%j", "redirect in the script"),
        ("--wrap='sleep 1'", "hpc-ckpt submit -- COMMAND"),
    ],
)
def test_what_cannot_be_a_chain_is_refused(line: str, message: str) -> None:
    """With the line and what to do instead."""
    with pytest.raises(SpecError, match=message.replace("$", r"\$")):
        adopted(line)


def test_of_an_option_that_is_there_twice_the_last_one_counts() -> None:
    """As in Slurm."""
    result = adopted("--qos=a", "--qos=b")
    assert "b" == result.spec["qos"]
    assert "said again in line 3" == whys(result, "--qos=a")


def test_no_time_limit_is_left_to_the_profile() -> None:
    """A chain has links of some length."""
    assert "chain" not in spec("--time=UNLIMITED")


def test_without_a_job_name_the_file_gives_it() -> None:
    """As Slurm does."""
    assert ("job", "runs/job") == (spec()["name"], spec()["root"])


def test_mail_that_nobody_wanted() -> None:
    """--mail-type=NONE."""
    assert "mail" not in spec("--mail-user=me@example.edu --mail-type=NONE")


# ── the script ────────────────────────────────────────────────────────────────────────────
def test_the_body_stays_as_it_is() -> None:
    """Directives go, everything else stays in its order."""
    body = "set -e\nmodule load cuda\n\n# a comment\npython train.py  --lr 0.1"
    script = adopted("--time=10", body=body).script
    assert script.startswith("#!/bin/bash\n")
    assert script.endswith(f"\n\n{body}\n")
    assert "#SBATCH" not in script


def test_the_shell_keeps_its_options() -> None:
    """A login shell stays one."""
    result = adopt("#!/bin/bash -l\ntrue\n", source="j.sh", script="j.chain.sh")
    assert ["bash", "-l", "j.chain.sh"] == result.spec["command"]


def test_variables_directory_and_input_are_set_by_the_script(tmp_path: Path) -> None:
    """What --export, --chdir and --input did."""
    (tmp_path / "it's here").mkdir()
    (tmp_path / "it's here" / "in").write_text("input\n")
    result = adopted(
        "--export=ALL,FOO='a b',BAR=1", '--chdir="it\'s here"', "--input=in",
        body='echo "$FOO-$BAR-$(cat)"',
    )  # fmt: skip
    (tmp_path / "s.sh").write_text(result.script)
    done = subprocess.run(["bash", "s.sh"], cwd=tmp_path, capture_output=True, text=True)
    assert ("a b-1-input\n", "") == (done.stdout, done.stderr)


def test_a_variable_that_sbatch_would_copy_is_pointed_out() -> None:
    """Its value is known to a shell only."""
    result = adopted("--export=TOKEN,HOME")
    assert "TOKEN is not passed on" in whys(result, "--export=TOKEN,HOME")


@pytest.mark.parametrize(
    ("body", "is_set"),
    [("srun python train.py", True), ("/usr/bin/srun x", True), ("mpirun -n 4 x", True),
     ("a && srun x", True), ("python srun.py", False), ("# srun x", False),
     ("python mysrun x", False)],
)  # fmt: skip
def test_launchers_share_the_step(body: str, is_set: bool) -> None:
    """A second step would wait for ever for what the first one has."""
    assert is_set == ("export SLURM_OVERLAP=1 " in adopted(body=body).script)


def test_several_tasks_are_still_that_many_to_the_script() -> None:
    """`srun -n $SLURM_NTASKS` starts as many as before."""
    script = adopted("--ntasks=56", "--cpus-per-task=2", body="srun -n $SLURM_NTASKS x").script
    assert "export SLURM_NTASKS=56 " in script
    assert "export SLURM_CPUS_PER_TASK=2 " in script
    assert "SLURM_NTASKS" not in adopted("--ntasks=1").script


def test_every_new_script_is_bash(tmp_path: Path) -> None:
    """Checked by bash."""
    for text in (COURSE_GROMACS, COURSE_TENSORFLOW):
        path = tmp_path / "s.sh"
        path.write_text(adopt(text, source="a.sh", script="s.sh").script)
        assert 0 == subprocess.run(["bash", "-n", path]).returncode


def test_the_name_of_the_script() -> None:
    """Beside its source, and not mistaken for it."""
    assert "train.chain.sh" == script_file(PurePath("jobs/train.sbatch"))


# ── the body ──────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("body", "what", "why"),
    [
        ("scontrol requeue $SLURM_JOB_ID", "scontrol requeue", "two owners of requeue"),
        ("trap 'scontrol requeue ${SLURM_JOB_ID}' USR1", "scontrol requeue", "two owners"),
        ("sbatch $0", "sbatch of itself", "two owners of requeue"),
        ('sbatch "$0" && exit', "sbatch of itself", "two owners"),
        ('sbatch "${BASH_SOURCE[0]}"', "sbatch of itself", "two owners"),
        ("sbatch --dependency=afterany:$SLURM_JOB_ID job.sbatch", "sbatch of itself", "two owners"),
        ("sbatch post.sbatch", "sbatch", "in every link"),
        ("trap 'touch stop' TERM", "trap TERM", "HPC_CKPT_NOTICE"),
        ('trap "cleanup" SIGUSR1 EXIT', "trap USR1", "forward: {signal: USR1}"),
        ("trap handler 12", "trap USR2", "exit 75"),
        ("python x.py $SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_ID", "interchangeable tokens"),
        ("mkdir /scratch/$SLURM_JOB_ID", "SLURM_JOB_ID", "HPC_CKPT_ROOT"),
        ("cd $SLURM_JOBID", "SLURM_JOB_ID", "another number in each link"),
        ("echo $SLURM_RESTART_COUNT", "SLURM_RESTART_COUNT", "HPC_CKPT_GENERATION"),
        ("timeout 7h python x.py", "timeout", "124"),
        ("dmtcp_launch ./a.out", "dmtcp, criu", "images"),
        ("srun --exclusive -n1 x &", "srun --exclusive", "--overlap"),
        ("srun x", "srun", "SLURM_OVERLAP=1"),
        ("srun y", "srun", 'srun bash "$HPC_CKPT_SHIM" program'),
    ],
)
def test_lines_to_look_at(body: str, what: str, why: str) -> None:
    """Named by line, with what to do."""
    result = adopted("--time=10", body=body)
    (remark,) = [one for one in result.remarks if one.what == what]
    assert (Fate.LOOK, 4) == (remark.fate, remark.line)
    assert why in remark.why


@pytest.mark.parametrize(
    "body",
    ["python train.py", "# scontrol requeue", "trap 'rm -rf tmp' EXIT", "echo timeouts", "wait",
     "./sbatcher", "cd $SLURM_SUBMIT_DIR", "python train.py  # sbatch $0"],
)  # fmt: skip
def test_lines_that_are_no_matter(body: str) -> None:
    """No false alarm."""
    assert () == adopted(body=body).remarks


def test_directives_after_the_first_command_are_pointed_out() -> None:
    """Many scripts have them and nobody notices that sbatch does not read them."""
    result = adopted(body="echo\n#SBATCH --qos=high")
    assert Fate.LEFT_OUT == fates(result)["#SBATCH --qos=high"]


def test_a_trap_of_the_batch_shell_gets_its_signal() -> None:
    """Where nothing in it requeues."""
    trap = "trap 'kill -USR1 $pid; wait $pid' USR1\npython x.py & pid=$!; wait"
    assert {"signal": "USR1", "to": "command"} == spec("--signal=B:USR1@60", body=trap)["forward"]
    assert "forward" not in spec("--signal=USR1@60", body=trap)
    requeues = "trap 'scontrol requeue 1' USR1\npython x.py & wait"
    assert "forward" not in spec("--signal=B:USR1@60", body=requeues)


# ── whole scripts ─────────────────────────────────────────────────────────────────────────
def test_the_course_s_gromacs_script(tmp_path: Path) -> None:
    """56 MPI ranks on one node, ten array tasks one at a time."""
    result = adopt(COURSE_GROMACS, source="submit_mdrun_array.bash", script="s.chain.sh")
    assert {
        "name": "myrun",
        "command": ["bash", "s.chain.sh"],
        "root": "runs/myrun",
        "partition": ["short", "lowpriority"],
        "constraint": "cascadelake",
        "resources": {"cpus": 56},
        "chain": {"link_time": "12:00:00", "max_links": 10},
    } == result.spec
    assert ["srun"] == [remark.what for remark in result.remarks if remark.fate is Fate.LOOK]
    found = loaded(result, tmp_path)
    assert 12 * 3600 == plan_chain(found.spec, found.profile, cwd=tmp_path).link_s


def test_the_course_s_tensorflow_script(tmp_path: Path) -> None:
    """Its share by the array index is what a chain cannot keep, and it says so."""
    result = adopt(COURSE_TENSORFLOW, source="submit_tf_array.bash", script="s.chain.sh")
    assert {"gpus": 1, "memory": "10Gb"} == result.spec["resources"]
    look = [(remark.line, remark.what) for remark in result.remarks if remark.fate is Fate.LOOK]
    assert [(16, "SLURM_ARRAY_TASK_ID"), (19, "SLURM_ARRAY_TASK_ID")] == look


def test_what_is_kept_reaches_the_batch_script(tmp_path: Path) -> None:
    """After everything else, so that it counts."""
    result = adopted("--licenses=matlab:1", "--comment='two words'", "--time=8:00:00")
    found = loaded(result, tmp_path)
    script = render(plan_chain(found.spec, found.profile, cwd=tmp_path), python="/usr/bin/python3")
    assert "#SBATCH --licenses=matlab:1\n" in script
    assert '#SBATCH --comment="two words"\n' in script


def test_the_spec_s_text_is_what_was_meant() -> None:
    """YAML would read 12:00:00 as a number of seconds."""
    text = adopted("--time=12:00:00", "--job-name=1e3").spec_text("job.sbatch")
    assert "12:00:00" == yaml.safe_load(text)["chain"]["link_time"]
    assert "1e3" == yaml.load(text, yaml.BaseLoader)["name"]


def test_modules_are_there_where_the_login_shell_had_them() -> None:
    """The job starts with --export=NONE: no functions of the shell come along."""
    assert '. "/etc/profile.d/$init.sh"' in adopted(body="module load cuda").script
    assert "command -v module" in adopted(body="ml cuda").script
    assert "command -v module" not in adopted(body="python modules.py").script


def test_threads_of_several_tasks(tmp_path: Path) -> None:
    """A link pins OMP_NUM_THREADS to all its cores; each of many tasks has its own share."""
    script = adopted("-n 8 -c 2", body="srun x").script
    assert "OMP_NUM_THREADS=2" in script
    assert "OMP_NUM_THREADS" not in adopted("-c 2", body="srun x").script
