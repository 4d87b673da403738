"""The wheel carries everything: built, installed in a clean venv, used from another directory."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
LIGHT = ("pydantic>=2.5,<3", "pyyaml", "jinja2", "typer", "rich", "xxhash")
"""What the login node's verbs need. torch stays out: rendering must not want it."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target)]
    subprocess.run([*command, str(PROJECT)], check=True, capture_output=True)
    return next(target.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of a clean venv with the wheel in it."""
    venv = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
    subprocess.run([*pip, *LIGHT], check=True)
    return venv / "bin"


def test_the_wheel_has_the_files_people_edit(wheel: Path) -> None:
    """templates/, slurm/clusters/ and the demo travel inside the package; tests do not."""
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        "hpc_ckpt/templates/chain.sbatch.j2",
        "hpc_ckpt/templates/shim.sh",
        "hpc_ckpt/clusters/local.yaml",
        "hpc_ckpt/clusters/explorer.yaml",
        "hpc_ckpt/examples/demo.py",
        "hpc_ckpt/py.typed",
    }
    assert set() == wanted - names
    assert {"hpc_ckpt"} == {name.split("/")[0] for name in names if ".dist-info" not in name}


def test_a_script_is_rendered_from_another_directory(installed: Path, tmp_path: Path) -> None:
    """Without a checkout, without torch."""
    words = ["render", "--profile", "explorer", "--partition", "gpu", "--", "true"]
    done = subprocess.run(
        [str(installed / "hpc-ckpt"), *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert (0, "") == (done.returncode, done.stderr)
    assert f"hpc_ckpt_python={installed}/python\n" in done.stdout
    assert "run_link" == done.stdout.splitlines()[-1]


def test_a_chain_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    """The link runner is found by the isolated interpreter."""
    words = ["run", "--root", "r", "--", "bash", "-c", "test $HPC_CKPT_GENERATION = 2 || exit 75"]
    done = subprocess.run(
        [str(installed / "hpc-ckpt"), *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert 0 == done.returncode, done.stderr
    assert (tmp_path / "r" / "DONE").exists()
